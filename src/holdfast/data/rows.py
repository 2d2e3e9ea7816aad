"""Tables to dicts and back, as fast as CPython lets us.

`Table.to_pylist` makes a scalar object for each cell; here whole columns become lists in C, and one
comprehension with the field names written out builds the dicts.

What a per-record function sees: ints, floats, bools, str, bytes, `datetime` (with its zone where the
column has one), `date`, `Decimal`, lists, dicts (structs), lists of pairs become dicts (maps), and
None for null.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.data import schemas
from holdfast.data.exact import MISFITS, exact_array, inferred_array
from holdfast.data.shown import shown
from holdfast.errors import SchemaError

Row = dict[str, Any]


def column_values(column: pa.ChunkedArray | pa.Array) -> list[Any]:
    """A column's values as Python objects."""
    kind = column.type
    array = one_array(column)
    if _is_text(kind):
        return array.to_numpy(zero_copy_only=False).tolist()  # type: ignore[no-any-return]
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        full = array.fill_null(False if pa.types.is_boolean(kind) else 0) if array.null_count else array
        return _none_where_null(full.to_numpy(zero_copy_only=False).tolist(), array)
    if pa.types.is_timestamp(kind):
        return _datetimes(array)
    if pa.types.is_struct(kind):
        return _structs(array)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _lists(array)
    if pa.types.is_nested(kind):
        return _dicts(array)
    return array.to_pylist()  # type: ignore[no-any-return]


def one_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """A column as one array, whatever number of chunks it has.

    >>> (
    ...     one_array(pa.chunked_array([[1], [2]])).to_pylist(),
    ...     len(one_array(pa.chunked_array([], pa.int64()))),
    ... )
    ([1, 2], 0)
    """
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _structs(array: pa.Array) -> list[Any]:
    """Structs as dicts, their fields column by column."""
    names = tuple(f.name for f in array.type)
    if not names or len(set(names)) < len(names):
        return _dicts(array)
    rows: list[Any] = _row_maker(names)(*map(column_values, array.flatten()))
    return _none_where_null(rows, array)


def _lists(array: pa.Array) -> list[Any]:
    """Lists, cut out of the one list of all their values."""
    if not len(array):
        return []
    if array.null_count:
        array = _without_hidden(array)
    edges = array.offsets.to_numpy().tolist()
    low = edges[0]
    values = column_values(array.values.slice(low, edges[-1] - low))
    rows = [values[start - low : end - low] for start, end in itertools.pairwise(edges)]
    return _none_where_null(rows, array)


def _none_where_null(rows: list[Any], array: pa.Array) -> list[Any]:
    if not array.null_count:
        return rows
    valid = array.is_valid().to_numpy(zero_copy_only=False).tolist()
    return [row if there else None for row, there in zip(rows, valid, strict=True)]


def _dicts(array: pa.Array) -> list[Any]:
    try:
        return array.to_pylist(maps_as_pydicts="strict")  # type: ignore[no-any-return]
    except KeyError as error:
        raise SchemaError(
            f"A map has the key {error} twice, which no dict can hold.",
            remedy="Use map_batches, which sees it as it is, or make the keys differ where it is written.",
        ) from None


_FIRST_US, _LAST_US = -62_135_596_800_000_000, 253_402_300_799_999_999
"""The years 1 to 9999, which is what a datetime can be."""


def _datetimes(array: pa.Array) -> list[Any]:
    zone = array.type.tz
    found = _whole_microseconds(array)
    if len(found) == found.null_count:
        return [None] * len(found)
    bounds = pc.min_max(found.view(pa.int64())).as_py()
    if bounds["min"] < _FIRST_US or bounds["max"] > _LAST_US:
        raise _beyond()
    if zone is not None:
        return found.to_pylist()  # type: ignore[no-any-return]
    full = found.fill_null(0) if found.null_count else found
    return _none_where_null(full.to_numpy(zero_copy_only=False).tolist(), found)


def _whole_microseconds(array: pa.Array) -> pa.Array:
    try:
        return array.cast(pa.timestamp("us", tz=array.type.tz))
    except pa.ArrowInvalid:
        if array.type.unit != "ns":
            raise _beyond() from None
        raise SchemaError(
            "A timestamp has nanoseconds, which Python's datetime can't hold.",
            remedy="Use map_batches for this column, or declare it as timestamp('us').",
        ) from None


def _beyond() -> SchemaError:
    return SchemaError(
        "A timestamp is before the year 1 or after 9999, which no datetime can be.",
        remedy="Use map_batches, or drop such records or cast them to int64 before.",
    )


@lru_cache(maxsize=256)
def _row_maker(names: tuple[str, ...]) -> Callable[..., list[Row]]:
    args = [f"c{i}" for i in range(len(names))]
    cells = ", ".join(f"{name!r}: {arg}" for name, arg in zip(names, args, strict=True))
    if len(args) == 1:
        body = f"[{{{cells}}} for c0 in c0]"
    else:
        body = f"[{{{cells}}} for {', '.join(args)} in zip({', '.join(args)})]"
    return eval(f"lambda {', '.join(args)}: {body}")  # type: ignore[no-any-return]


def to_rows(table: pa.Table) -> list[Row]:
    """A table's rows as dicts.

    >>> to_rows(pa.table({"k": [1, 2], "v": ["a", None]}))
    [{'k': 1, 'v': 'a'}, {'k': 2, 'v': None}]
    """
    names = tuple(table.schema.names)
    if not names:
        return [{} for _ in range(table.num_rows)]
    return _row_maker(names)(*(column_values(c) for c in table.columns))


def to_table(rows: Sequence[Row], pinned: pa.Schema | None) -> pa.Table:
    """Dicts as a table: by the pinned schema, or by what these rows show where none is pinned yet.

    The result's schema differs from `pinned` only where a pinned field is still open (only nulls so
    far) and these rows have a value for it.

    >>> to_table([{"a": 1}, {"a": 2.5, "b": None}], None).schema
    a: double
    b: null
    """
    if pinned is None:
        return _inferred(rows)
    columns = _columns(rows, pinned.names)
    arrays = [_array(values, field, rows) for values, field in zip(columns, pinned, strict=True)]
    if any(schemas.is_open(f.type) for f in pinned):
        fields = [f.with_type(a.type) for f, a in zip(pinned, arrays, strict=True)]
        return pa.Table.from_arrays(arrays, schema=pa.schema(fields))
    return pa.Table.from_arrays(arrays, schema=pinned)


def _columns(rows: Sequence[Row], names: list[str]) -> list[list[Any]]:
    width = len(names)
    try:
        if all(n == width for n in set(map(len, rows))):
            return [list(map(itemgetter(name), rows)) for name in names]
    except KeyError:
        pass
    except TypeError:
        raise _not_a_record(rows) from None
    known = set(names)
    for row in rows:
        if not isinstance(row, dict):
            raise _not_a_record(rows)
        extra = [name for name in row if name not in known]
        if extra:
            raise SchemaError(
                f"A record has the field {extra[0]!r}, which its schema does not: {shown(row)}",
                remedy=f"Declare schema= with this field on the operator that makes it; now it has {names}.",
            )
    return [[row.get(name) for row in rows] for name in names]


def _inferred(rows: Sequence[Row]) -> pa.Table:
    names: dict[str, None] = {}
    for row in rows:
        if not isinstance(row, dict):
            raise _not_a_record(rows)
        names.update(dict.fromkeys(row))
    if rows and not names:
        raise SchemaError(
            "A record has no fields at all: {}.",
            remedy="Use filter to drop records; give what remains a field.",
        )
    arrays = []
    for name in names:
        values = [row.get(name) for row in rows]
        arrays.append(_infer_array(name, values, rows))
    for name in names:
        if not isinstance(name, str):
            raise SchemaError(f"A record's field names must be strings, not {name!r}.")
    return pa.Table.from_arrays(arrays, names=list(names))


def _infer_array(name: str, values: list[Any], rows: Sequence[Row]) -> pa.Array:
    try:
        return inferred_array(values, schemas.normal)
    except MISFITS as error:
        row = next((r for r in rows if r.get(name) is not None), {})
        raise SchemaError(
            f"The values of field {name!r} have no common Arrow type ({error}); one record: {shown(row)}",
            remedy="Return one type for this field, or declare schema= on the operator that makes it.",
        ) from None


def _array(values: list[Any], field: pa.Field, rows: Sequence[Row]) -> pa.Array:
    if schemas.is_open(field.type):
        found = _infer_array(field.name, values, rows)
        field = field.with_type(schemas.closed(field, found.type))
        if field.type.equals(found.type):
            return found
    try:
        return exact_array(values, field.type)
    except MISFITS as error:
        raise _misfit(values, field, error) from None


def _misfit(values: list[Any], field: pa.Field, error: Exception) -> SchemaError:
    for value in values:
        try:
            exact_array([value], field.type)
        except MISFITS:
            return SchemaError(
                f"The value {shown(value)} of field {field.name!r} does not fit its type {field.type}.",
                remedy="Convert it in the function, or declare schema= with a wider type.",
            )
    return SchemaError(f"Field {field.name!r} does not fit its type {field.type}: {error}")


def _not_a_record(rows: Sequence[Any]) -> SchemaError:
    wrong = next((r for r in rows if not isinstance(r, dict)), None)
    return SchemaError(
        f"A record must be a dict, not {type(wrong).__name__}: {shown(wrong)}",
        remedy="Yield or return dicts; a function that yields must yield whole records.",
    )


def conform(table: pa.Table, pinned: pa.Schema | None) -> pa.Table:
    """A table that the user's code made, with the pinned schema's columns, order and types.

    >>> conform(pa.table({"b": [1], "a": [1]}), pa.schema({"a": pa.float64(), "b": pa.int64()})).schema
    a: double
    b: int64
    """
    table = table.replace_schema_metadata(None)
    if pinned is None or table.schema.equals(pinned):
        return table
    extra = [name for name in table.schema.names if name not in pinned.names]
    if extra:
        raise SchemaError(
            f"A table has the column {extra[0]!r}, which its schema does not.",
            remedy="Declare schema= with this column on the operator that makes it.",
        )
    arrays, fields = [], []
    for field in pinned:
        if field.name not in table.schema.names:
            arrays.append(pa.chunked_array([pa.nulls(table.num_rows, field.type)]))
            fields.append(field)
            continue
        column = table.column(field.name)
        if not column.type.equals(field.type):
            column = _cast(column, field)
        arrays.append(column)
        fields.append(field.with_type(column.type))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _cast(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    kind = field.type
    if schemas.is_open(kind):
        kind = schemas.closed(field, column.type)
        if kind.equals(column.type):
            return column
    try:
        return column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SchemaError(
            f"Column {field.name!r} is {column.type} here and {field.type} in the schema: {error}",
            remedy="Cast it in the function, or declare schema= with a wider type.",
        ) from None


def canonical(array: pa.Array) -> pa.Array:
    """The same values in the same bytes, whatever computed them: Arrow leaves anything under a null."""
    kind = array.type
    if array.null_count == 0 and (pa.types.is_primitive(kind) or _is_text(kind)):
        return array
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        missing = array.is_null().to_numpy(zero_copy_only=False)
        return pa.array(array.fill_null(0).to_numpy(zero_copy_only=False), type=kind, mask=missing)
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        return canonical(array.view(pa.int32() if kind.bit_width == 32 else pa.int64())).view(kind)
    if _is_text(kind):
        return _without_hidden(array)
    if pa.types.is_struct(kind) and kind.num_fields:
        parts = [canonical(_visible(array, place)) for place in range(kind.num_fields)]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=_nulls(array))
    if pa.types.is_list(kind):
        array = _without_hidden(array)
        edges = array.offsets
        values = array.values.slice(edges[0].as_py(), edges[-1].as_py() - edges[0].as_py())
        return pa.ListArray.from_arrays(edges, canonical(values), type=kind, mask=_nulls(array))
    if pa.types.is_map(kind):  # as pairs: a key may be there twice
        return pa.array(array.to_pylist(), type=kind)
    return pa.array(column_values(array), type=kind)


def _visible(array: pa.StructArray, place: int) -> pa.Array:
    """A field of structs; where a struct is null, what `pa.array` puts there."""
    part = array.field(place)
    if not array.null_count:
        return part
    empty = pa.array([None], pa.struct([("x", part.type)])).field(0)
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    return pa.concat_arrays([part, empty]).take(pa.array(np.where(valid, np.arange(len(array)), len(array))))


def _nulls(array: pa.Array) -> pa.Array | None:
    return array.is_null() if array.null_count else None


def _without_hidden(array: pa.Array) -> pa.Array:
    """The same, with nothing left under a null and nothing before the first value."""
    return array.take(pa.array(np.arange(len(array))))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_large_string(kind))


def copy_value(value: Any) -> Any:
    """A copy that shares no list or dict with the original."""
    if isinstance(value, dict):
        return {k: copy_value(v) for k, v in value.items()}
    if isinstance(value, list):
        return [copy_value(v) for v in value]
    return value


def copier(kind: pa.DataType) -> Callable[[Any], Any]:
    """`copy_value` for values of one type: in C where nothing inside can be changed.

    >>> copy = copier(pa.list_(pa.int64()))
    >>> mine = [1]
    >>> copy(mine) == mine, copy(mine) is mine, copy(None)
    (True, False, None)
    """
    if not pa.types.is_nested(kind):
        return _same
    if pa.types.is_struct(kind) and not any(pa.types.is_nested(f.type) for f in kind):
        return _copied_dict
    if pa.types.is_list(kind) and not pa.types.is_nested(kind.value_type):
        return _copied_list
    return copy_value


def _same(value: Any) -> Any:
    return value


def _copied_dict(value: Any) -> Any:
    return value.copy() if type(value) is dict else copy_value(value)


def _copied_list(value: Any) -> Any:
    return value.copy() if type(value) is list else copy_value(value)
