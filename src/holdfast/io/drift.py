"""What happens when a file's columns are not the schema's. Decided here, and pure.

A column that is missing is null. A column that the schema does not have is an error, or left out where
the user chose `on_drift="ignore"`. A column of another type is cast where nothing is lost by it: integers
to wider ones, to decimals and to floats that hold them, `float` to `double`, timestamps to another unit or
to another zone (the same instants), decimals to more digits, texts and bytes to their large forms and back,
dictionaries to their values, nulls to anything, and lists, structs and maps by the same rules. A cast that would
lose a value of this very file (a nanosecond, a digit), and any other pair of types, is an error that names both.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from holdfast.errors import PipelineError, SchemaError

CHOICES = ("fail", "ignore")


def check_choice(on_drift: str) -> str:
    """A choice for drift, or an error that lists both."""
    if on_drift not in CHOICES:
        raise PipelineError(f"on_drift={on_drift!r} is no choice.", remedy='Choose "fail" or "ignore".')
    return on_drift


def check_names(names: list[str], schema: pa.Schema, on_drift: str, path: str) -> None:
    """Raise where a file has a column that the schema does not, unless such columns are ignored."""
    extra = [name for name in names if name not in schema.names]
    if extra and on_drift == "fail":
        raise SchemaError(
            f"{path} has the column {extra[0]!r}, which the schema does not: {schema.names}.",
            remedy='Declare schema= with it, or leave such columns out with on_drift="ignore".',
        )


def fit(table: pa.Table, schema: pa.Schema, path: str) -> pa.Table:
    """A file's table with the schema's columns, order and types.

    >>> fit(
    ...     pa.table({"b": pa.array([1], pa.int32())}), pa.schema({"a": pa.string(), "b": pa.int64()}), "f"
    ... ).to_pylist()
    [{'a': None, 'b': 1}]
    """
    if table.schema.equals(schema):
        return pa.Table.from_arrays(table.columns, schema=schema)
    columns = []
    for field in schema:
        place = table.schema.get_field_index(field.name)
        if place < 0:
            columns.append(pa.nulls(table.num_rows, field.type))
        else:
            columns.append(_fit_column(table.column(place), field, path))
    return pa.Table.from_arrays(columns, schema=schema)


def _fit_column(column: pa.ChunkedArray, field: pa.Field, path: str) -> pa.ChunkedArray:
    if column.type.equals(field.type):
        return column
    reason = "these types don't stand for the same values"
    if may_cast(column.type, field.type):
        try:
            return column.cast(field.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            reason = str(error)
    raise SchemaError(
        f"{path}: column {field.name!r} is {column.type} there and {field.type} in the schema: {reason}.",
        remedy="Declare schema= with a type that holds both, or mend the file.",
    )


def may_cast(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values of one type can be had as another with none lost, or the loss noticed.

    >>> may_cast(pa.int32(), pa.int64()), may_cast(pa.string(), pa.int64())
    (True, False)
    """
    if given.equals(wanted) or pa.types.is_null(given):
        return True
    if pa.types.is_dictionary(given):
        return may_cast(given.value_type, wanted)
    if pa.types.is_nested(given) and pa.types.is_nested(wanted):
        return _may_cast_nested(given, wanted)
    if pa.types.is_timestamp(given) and pa.types.is_timestamp(wanted):
        return (given.tz is None) == (wanted.tz is None)
    if pa.types.is_floating(given) and pa.types.is_floating(wanted):
        return bool(given.bit_width < wanted.bit_width)
    return any(given_is(given) and wanted_is(wanted) for given_is, wanted_is in _PAIRS)


def _may_cast_nested(given: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_struct(given) and pa.types.is_struct(wanted):
        names = [f.name for f in given]
        return names == [f.name for f in wanted] and all(
            may_cast(g.type, w.type) for g, w in zip(given, wanted, strict=True)
        )
    if pa.types.is_map(given) and pa.types.is_map(wanted):
        return may_cast(given.key_type, wanted.key_type) and may_cast(given.item_type, wanted.item_type)
    lists = (pa.types.is_list, pa.types.is_large_list)
    if any(t(given) for t in lists) and any(t(wanted) for t in lists):
        return may_cast(given.value_type, wanted.value_type)
    return False


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    )


_Test = Callable[[pa.DataType], bool]
_PAIRS: list[tuple[_Test, _Test]] = [
    (pa.types.is_integer, pa.types.is_integer),
    (pa.types.is_integer, pa.types.is_floating),
    (pa.types.is_integer, pa.types.is_decimal),
    (pa.types.is_decimal, pa.types.is_decimal),
    (pa.types.is_date, pa.types.is_date),
    (pa.types.is_time, pa.types.is_time),
    (pa.types.is_duration, pa.types.is_duration),
    (_is_text, _is_text),
    (_is_bytes, _is_bytes),
]
