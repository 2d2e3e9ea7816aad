"""How the schema of dict records is found, pinned and widened. Pure.

A function that returns dicts has the schema that the user declares. Where none is declared, the
first epoch with records decides: what every task saw is unified, and from then on it is pinned. A
field that has only ever been null stays open and takes the first type that comes. Nothing else
changes later: a value that does not fit is an error that says so.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable

import pyarrow as pa

from holdfast.errors import SchemaError

DECIMAL = pa.decimal128(38, 18)


def unify(schemas: Iterable[pa.Schema], uid: str | None = None) -> pa.Schema:
    """One schema that can hold what each of them can: null gives way to any type, int64 to double.

    >>> unify([pa.schema({"a": pa.int64()}), pa.schema({"a": pa.float64(), "b": pa.null()})])
    a: double
    b: null
    """
    found = list(schemas)
    try:
        return pa.unify_schemas(found, promote_options="permissive").remove_metadata()
    except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
        raise SchemaError(
            f"Records of one stream have types that no schema can hold together: {error}",
            uid=uid,
            remedy="Return one type for each field, or declare schema= on the operator.",
        ) from None


def normal(kind: pa.DataType) -> pa.DataType:
    """An inferred type, freed of what only this batch decided (a decimal's digits)."""
    if pa.types.is_decimal(kind):
        return DECIMAL
    if pa.types.is_list(kind):
        return pa.list_(normal(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, normal(f.type)) for f in kind])
    return kind


def is_open(kind: pa.DataType) -> bool:
    """Whether a type still waits for its first value somewhere inside."""
    if pa.types.is_null(kind):
        return True
    if pa.types.is_list(kind):
        return is_open(kind.value_type)
    if pa.types.is_struct(kind):
        return any(is_open(f.type) for f in kind)
    return False


def keeps(before: pa.DataType, after: pa.DataType) -> bool:
    """Whether a type became another one only where it was open.

    >>> keeps(pa.list_(pa.null()), pa.list_(pa.int64())), keeps(pa.int64(), pa.float64())
    (True, False)
    """
    if pa.types.is_null(before):
        return True
    if pa.types.is_list(before) and pa.types.is_list(after):
        return keeps(before.value_type, after.value_type)
    if pa.types.is_struct(before) and pa.types.is_struct(after):
        if [f.name for f in before] != [f.name for f in after]:
            return False
        return all(keeps(b.type, a.type) for b, a in zip(before, after, strict=True))
    return bool(before.equals(after))


def closed(field: pa.Field, found: pa.DataType) -> pa.DataType:
    """What a field that is open becomes when a type is found for it; an error where it is not open."""
    kind = unify([pa.schema([field]), pa.schema([pa.field(field.name, found)])]).field(0).type
    if not keeps(field.type, kind):
        raise SchemaError(
            f"Field {field.name!r} is {found} here and {field.type} in the schema.",
            remedy="Convert it in the function, or declare schema= on the operator that makes it.",
        )
    return kind


def settle(
    pinned: pa.Schema | None, seen: list[pa.Schema], uid: str | None = None
) -> tuple[pa.Schema | None, bool]:
    """The schema to pin after an epoch, and whether the epoch must run again with it.

    It must when some task wrote with another schema than the one settled on.
    """
    if not seen:
        return pinned, False
    known = [pinned] if pinned is not None else []
    settled = unify([*known, *seen], uid)
    return settled, any(not s.equals(settled) for s in seen)


def to_text(schema: pa.Schema) -> str:
    """A schema as text for a JSON record."""
    return base64.b64encode(schema.serialize().to_pybytes()).decode("ascii")


def from_text(text: str) -> pa.Schema:
    """The schema that `to_text` wrote."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
