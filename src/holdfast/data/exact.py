"""Python values as Arrow arrays, or an error: nothing is cut off, dropped or made up on the way.

`pa.array` makes 0 of 0.5 for an integer type, forgets a datetime's zone where the field has none, its time where it
is to be a date, and leaves out what a struct does not declare. Here each of these is an `ArrowInvalid`.
"""

from __future__ import annotations

import datetime as dt
import decimal
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
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
    _check(values, kind)
    return pa.array(values, type=kind)


def inferred_array(values: Sequence[Any], normal: Callable[[pa.DataType], pa.DataType]) -> pa.Array:
    """Values as an array of the type that they have in common, put in order by `normal`; raises as `exact_array` does.

    >>> inferred_array([dt.date(2026, 1, 1), dt.datetime(2026, 1, 1, 12)], lambda kind: kind)
    Traceback (most recent call last):
    pyarrow.lib.ArrowInvalid: datetime.datetime(2026, 1, 1, 12, 0) has a time of day, date32[day] has none
    """
    array = pa.array(values)
    kind = normal(array.type)
    _check(values, kind)
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        naive = next((v for v in values if isinstance(v, dt.datetime) and v.tzinfo is None), None)
        if naive is not None:
            raise pa.ArrowInvalid(f"{naive!r} has no time zone, others have one")
    return array if kind.equals(array.type) else pa.array(values, type=kind)


_STEP_US = {"s": 1_000_000, "ms": 1_000}
"""How many microseconds the units have that are coarser than Python's."""
_TOO_LARGE = {pa.float16(): 65_520.0, pa.float32(): 3.4028235677973366e38}


def _check(values: Sequence[Any], kind: pa.DataType) -> None:
    """Look at a whole column: at the types in it, at values only where one of them could go wrong."""
    seen = set(map(type, values))
    seen.discard(type(None))
    if not seen or seen <= _CANT_GO_WRONG.get(kind, set()):
        return
    if pa.types.is_integer(kind):
        for value in _of(values, seen, (float, decimal.Decimal, np.floating)):
            if not math.isfinite(value) or value != int(value):
                raise pa.ArrowInvalid(f"{value!r} is not a whole number")
    elif kind in _TOO_LARGE:
        for value in _of(values, seen, (int, float, np.floating)):
            if math.isfinite(value) and abs(value) >= _TOO_LARGE[kind]:
                raise pa.ArrowInvalid(f"{value!r} is too large for {kind}")
    elif pa.types.is_temporal(kind):
        _check_times(values, seen, kind)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        for value in _of(values, seen, (bytes,)):
            raise pa.ArrowInvalid(f"{value!r} is bytes, not text")
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        for value in _of(values, seen, (str,)):
            raise pa.ArrowInvalid(f"{value!r} is text, not bytes")
    elif pa.types.is_dictionary(kind):
        _check(values, kind.value_type)
    elif pa.types.is_struct(kind):
        _check_structs([v if isinstance(v, dict) else dict(v) for v in values if v is not None], kind)
    elif pa.types.is_map(kind):
        pairs = [p for v in values if v is not None for p in (v.items() if isinstance(v, dict) else v)]
        _check([key for key, _ in pairs], kind.key_type)
        _check([part for _, part in pairs], kind.item_type)
    elif any(is_one(kind) for is_one in _LISTS):
        _check([part for value in values if value is not None for part in value], kind.value_type)


_LISTS = (
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)


def _check_times(values: Sequence[Any], seen: set[type], kind: pa.DataType) -> None:
    if pa.types.is_date(kind):
        for value in _of(values, seen, (dt.datetime,)):
            if value.timetz() != dt.time():
                raise pa.ArrowInvalid(f"{value!r} has a time of day, {kind} has none")
        return
    zoned = pa.types.is_timestamp(kind) and kind.tz is not None
    step = _STEP_US.get(kind.unit, 1)
    if seen == {dt.datetime} and _all_fit(values, zoned, step):
        return
    for value in _of(values, seen, (dt.datetime, dt.time, dt.timedelta)):
        if not isinstance(value, dt.timedelta) and value.tzinfo is not None and not zoned:
            raise pa.ArrowInvalid(f"{value!r} has a time zone, {kind} has none")
        micros = value.microseconds if isinstance(value, dt.timedelta) else value.microsecond
        if micros % step:
            raise pa.ArrowInvalid(f"{value!r} is finer than {kind}")


_ZONE, _MICROS = operator.attrgetter("tzinfo"), operator.attrgetter("microsecond")


def _all_fit(values: Sequence[Any], zoned: bool, step: int) -> bool:
    """Whether a column of datetimes surely fits, by a look in C: which of them does not is looked for only then."""
    values = list(filter(None, values))
    if not zoned and any(zone is not None for zone in map(_ZONE, values)):
        return False
    return step == 1 or not any(micros % step for micros in set(map(_MICROS, values)))


def _of(values: Sequence[Any], seen: set[type], kinds: tuple[type, ...]) -> Sequence[Any]:
    """The values of some Python types, given the types that there are."""
    if not any(issubclass(kind, kinds) for kind in seen):
        return ()
    return [value for value in values if isinstance(value, kinds)]


def _check_structs(values: Sequence[Any], kind: pa.DataType) -> None:
    fields = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
    for names in set(map(tuple, values)):
        for name in names:
            if name not in fields:
                raise pa.ArrowInvalid(f"the struct has no field {name!r}")
    for name, part in fields.items():
        _check([value.get(name) for value in values], part)
