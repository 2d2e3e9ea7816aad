"""Python values as Arrow arrays, or an error: nothing is cut off, dropped or made up on the way.

`pa.array` makes 0 of 0.5 for an integer type, forgets a datetime's zone where the field has none, and leaves out
what a struct does not declare. Here each of these is an `ArrowInvalid`.
"""

from __future__ import annotations

import datetime as dt
import decimal
import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

MISFITS = (
    pa.ArrowInvalid,
    pa.ArrowTypeError,
    pa.ArrowNotImplementedError,
    OverflowError,
    TypeError,
    ValueError,
)
"""What `exact_array` raises for values that don't fit."""

_CANT_GO_WRONG: dict[pa.DataType, set[type]] = {
    pa.float64(): {float, int},
    pa.int64(): {int},
    pa.string(): {str},
    pa.bool_(): {bool},
}


def exact_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Values as an array of a type; raises one of `MISFITS` if a value would not come back as it is.

    >>> exact_array([1, 2.0, None], pa.int64()).to_pylist()
    [1, 2, None]
    >>> exact_array([0.5], pa.int64())
    Traceback (most recent call last):
    pyarrow.lib.ArrowInvalid: 0.5 is not a whole number
    """
    seen = set(map(type, values))
    seen.discard(type(None))
    if not seen <= _CANT_GO_WRONG.get(kind, set()):
        for value in values:
            _check(value, kind)
    return pa.array(values, type=kind)


def _check(value: Any, kind: pa.DataType) -> None:
    if value is None:
        return
    if pa.types.is_integer(kind):
        if isinstance(value, (float, decimal.Decimal)) and (not math.isfinite(value) or value != int(value)):
            raise pa.ArrowInvalid(f"{value!r} is not a whole number")
    elif pa.types.is_float32(kind):
        if isinstance(value, (int, float)) and math.isfinite(value) and abs(value) > 3.4028235677973366e38:
            raise pa.ArrowInvalid(f"{value!r} is too large for {kind}")
    elif pa.types.is_timestamp(kind) and kind.tz is None:
        if isinstance(value, dt.datetime) and value.tzinfo is not None:
            raise pa.ArrowInvalid(f"{value!r} has a time zone, {kind} has none")
    elif pa.types.is_nested(kind):
        _check_nested(value, kind)


def _check_nested(value: Any, kind: pa.DataType) -> None:
    if pa.types.is_struct(kind) and isinstance(value, dict):
        fields = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
        for name, part in value.items():
            if name not in fields:
                raise pa.ArrowInvalid(f"the struct has no field {name!r}")
            _check(part, fields[name])
    elif pa.types.is_map(kind):
        for key, part in value.items() if isinstance(value, dict) else value:
            _check(key, kind.key_type)
            _check(part, kind.item_type)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        for part in value:
            _check(part, kind.value_type)
