"""Python types as Arrow types: what `ValueState(float)` or `schema={"v": float}` mean.

Leaves to `rows` the conversion of values.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import types
import typing
from typing import Any, Union

import pyarrow as pa

from holdfast.errors import PipelineError

_SCALARS: dict[Any, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bytes: pa.binary(),
    dt.datetime: pa.timestamp("us", tz="UTC"),
    dt.date: pa.date32(),
    dt.time: pa.time64("us"),
    dt.timedelta: pa.duration("us"),
    decimal.Decimal: pa.decimal128(38, 18),
    type(None): pa.null(),
}


def arrow_type(declared: Any) -> pa.DataType:
    """The Arrow type for a declared Python or Arrow type.

    >>> arrow_type(dict[str, list[int]])
    MapType(map<string, list<item: int64>>)
    >>> arrow_type(float | None)
    DataType(double)
    """
    if isinstance(declared, pa.DataType):
        return declared
    if isinstance(declared, type) and declared in _SCALARS:
        return _SCALARS[declared]
    origin, args = typing.get_origin(declared), typing.get_args(declared)
    if origin in (Union, types.UnionType):
        inner = [a for a in args if a is not type(None)]
        if len(inner) == 1:
            return arrow_type(inner[0])
    if origin in (list, set, frozenset) and len(args) == 1:
        return pa.list_(arrow_type(args[0]))
    if origin is dict and len(args) == 2:
        return pa.map_(arrow_type(args[0]), arrow_type(args[1]))
    fields = _fields_of(declared)
    if fields is not None:
        return pa.struct([pa.field(name, arrow_type(kind)) for name, kind in fields.items()])
    raise PipelineError(
        f"{declared!r} is not a type that state or a schema can be declared with.",
        remedy="Use bool, int, float, str, bytes, datetime, date, Decimal, list[T], dict[K, V], a TypedDict, "
        "or any pyarrow type.",
    )


def _fields_of(declared: Any) -> dict[str, Any] | None:
    if isinstance(declared, dict):
        return declared
    if isinstance(declared, type) and (dataclasses.is_dataclass(declared) or typing.is_typeddict(declared)):
        return typing.get_type_hints(declared)
    return None


def arrow_schema(declared: Any) -> pa.Schema:
    """The Arrow schema for a declared one: a `pa.Schema`, a dict of names to types, or a TypedDict.

    >>> arrow_schema({"account": str, "amount": float})
    account: string
    amount: double
    """
    if isinstance(declared, pa.Schema):
        return declared
    fields = _fields_of(declared)
    if not fields:
        raise PipelineError(
            f"{declared!r} is not a schema.",
            remedy='Give a pyarrow schema, a TypedDict, or a dict such as {"account": str, "amount": float}.',
        )
    return pa.schema([pa.field(name, arrow_type(kind)) for name, kind in fields.items()])


def is_immutable(kind: pa.DataType) -> bool:
    """Whether Python values of this type can be shared without a copy (no lists or dicts in them)."""
    return not pa.types.is_nested(kind)
