"""Event time as one kind of number: microseconds since 1970 in UTC, whatever a column holds it in.

Columns and records keep their own type; here is how to read it, and how to write it back. What a watermark
does with times, and what windows are made of them, is said elsewhere.
"""

from __future__ import annotations

import datetime as dt
import math
import operator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.config import parse_duration_s
from holdfast.data.shown import shown
from holdfast.errors import ConfigError, PipelineError, SchemaError

Times = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Duration = str | float | dt.timedelta
"""How a user writes a duration; a number is one of seconds."""

MIN_TIME = -(1 << 62)
"""Nothing is known yet: before every time."""
MAX_TIME = 1 << 62
"""The end of time: after every time."""

LIMIT = 1 << 61
"""Times and durations stay below this (some 73,000 years), so that no sum of two reaches the end of time."""

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
_NAIVE_EPOCH = EPOCH.replace(tzinfo=None)
_EPOCH_DAY = EPOCH.toordinal()
_MICROSECOND = dt.timedelta(microseconds=1)
_DAY_US = 86_400_000_000

# A raw value is `raw // divisor * factor` microseconds; date64 counts milliseconds but means days.
_SCALES: dict[str, tuple[int, int]] = {
    "s": (1, 1_000_000),
    "ms": (1, 1_000),
    "us": (1, 1),
    "ns": (1_000, 1),
    "date32": (1, _DAY_US),
    "date64": (86_400_000, _DAY_US),
}
UNITS = ("s", "ms", "us", "ns")


@dataclass(frozen=True)
class TimeType:
    """How a column holds event time, and the way there and back.

    A timestamp without a zone, and a date, are taken as UTC.

    Attributes:
        arrow: the column's type.
        unit: what it counts: "s", "ms", "us", "ns", "date32" or "date64".

    >>> seconds = TimeType.of(pa.int64(), "s")
    >>> us, nulls = seconds.to_us(pa.array([1, None]))
    >>> us[0], nulls.tolist()
    (np.int64(1000000), [False, True])
    >>> seconds.from_us(us).to_pylist()
    [1, None]
    """

    arrow: pa.DataType
    unit: str

    @classmethod
    def of(cls, arrow_type: pa.DataType, unit: str | None = None) -> TimeType:
        """The time type of a column: timestamps and dates say their unit themselves, integers need one."""
        if unit is not None and unit not in UNITS:
            raise PipelineError(f"{unit!r} is not a unit of time.", remedy=f"One of: {', '.join(UNITS)}.")
        if pa.types.is_integer(arrow_type):
            if unit is None:
                raise SchemaError(
                    f"A column of {arrow_type} holds event time, but not in which unit.",
                    remedy='Say what it counts since 1970: unit="s", "ms", "us" or "ns".',
                )
            return cls(arrow_type, unit)
        own = _own_unit(arrow_type)
        if own is None:
            raise SchemaError(
                f"A column of {arrow_type} can't hold event time.",
                remedy="Make it a timestamp, a date, or an integer with a unit, e.g. with map_batches.",
            )
        if unit not in (None, own):
            raise SchemaError(
                f"Event time was declared in {unit!r}, but its column is {arrow_type}.",
                remedy="Leave unit out: a timestamp or date knows its own.",
            )
        return cls(arrow_type, own)

    def to_us(self, array: pa.Array | pa.ChunkedArray) -> tuple[Times, Mask]:
        """Microseconds of a column, and where it is null; a null's time is MIN_TIME.

        Nanoseconds are cut to the microsecond below. A time out of range is a SchemaError.
        """
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
        if not array.type.equals(self.arrow):
            raise SchemaError(f"Event time was declared as {self.arrow}, but is {array.type} here.")
        raw = _integers(array)
        nulls: Mask = np.zeros(len(raw), dtype=np.bool_)
        if raw.null_count:
            nulls = raw.is_null().to_numpy(zero_copy_only=False)
            raw = raw.fill_null(0)
        divisor, factor = _SCALES[self.unit]
        counts = raw.to_numpy(zero_copy_only=False)
        if divisor != 1:
            counts = counts // counts.dtype.type(divisor)
        if len(counts):
            for extreme in (int(counts.min()), int(counts.max())):
                self._check(extreme * factor, extreme * divisor)
        us: Times = counts.astype(np.int64) * np.int64(factor)
        us[nulls] = MIN_TIME
        return us, nulls

    def finer(self, array: pa.Array | pa.ChunkedArray) -> bool:
        """Whether some of a column's times lie between two microseconds."""
        if self.unit != "ns":
            return False
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
        counts = _integers(array).drop_null().to_numpy(zero_copy_only=False)
        return bool((counts % counts.dtype.type(1000)).any())

    def from_us(self, us: npt.ArrayLike) -> pa.Array:
        """A column of this type: each time cut to the unit below; MIN_TIME and MAX_TIME become null."""
        times: Times = np.asarray(us, dtype=np.int64)
        endless = (times == MIN_TIME) | (times == MAX_TIME)
        times = np.where(endless, np.int64(0), times)
        divisor, factor = _SCALES[self.unit]
        counts = times // factor
        kind = _integer_type(self.arrow)
        bounds = np.iinfo(kind.to_pandas_dtype())
        if len(counts):
            for extreme in (int(counts.min()), int(counts.max())):
                if not int(bounds.min) <= extreme * divisor <= int(bounds.max):
                    raise self._out_of_range(extreme * factor)
        counts = (counts * divisor).astype(bounds.dtype)
        return pa.array(counts, type=kind, mask=endless if endless.any() else None).cast(self.arrow)

    def scalar_us(self, value: Any) -> int:
        """Microseconds of a value as a record holds it.

        >>> TimeType.of(pa.date32()).scalar_us(dt.date(1970, 1, 2))
        86400000000
        """
        if isinstance(value, dt.datetime) and pa.types.is_timestamp(self.arrow):
            return self._datetime_us(value)
        if isinstance(value, dt.date) and pa.types.is_date(self.arrow):
            return (value.toordinal() - _EPOCH_DAY) * _DAY_US
        # Where a timestamp without a zone is past the year 9999, `data.rows` gives its microseconds.
        if pa.types.is_integer(self.arrow) or (self.unit == "us" and self.arrow.tz is None):
            count = _whole(value)
            if count is not None:
                divisor, factor = _SCALES[self.unit]
                return self._check(count // divisor * factor, value)
        raise SchemaError(
            f"{shown(value)} is not an event time of type {self.arrow}.",
            remedy="Give every record a time of the column's type, or drop those without one before.",
        )

    def value(self, us: int) -> Any:
        """What a record holds for a time, cut to the unit below; None for MIN_TIME and MAX_TIME.

        >>> TimeType.of(pa.timestamp("s", "Asia/Seoul")).value(1_500_000).isoformat()
        '1970-01-01T09:00:01+09:00'
        """
        if us in (MIN_TIME, MAX_TIME):
            return None
        divisor, factor = _SCALES[self.unit]
        count = us // factor
        if pa.types.is_integer(self.arrow):
            return count * divisor
        try:
            if pa.types.is_date(self.arrow):
                return dt.date.fromordinal(count + _EPOCH_DAY)
            since = dt.timedelta(microseconds=count * factor)
            if self.arrow.tz is None:
                return _NAIVE_EPOCH + since
            return (EPOCH + since).astimezone(_zone(self.arrow.tz))
        except (OverflowError, ValueError):
            if self.unit == "us" and self.arrow.tz is None:
                return us
            raise self._out_of_range(us) from None

    def _datetime_us(self, value: dt.datetime) -> int:
        if value.tzinfo is None:
            return (value - _NAIVE_EPOCH) // _MICROSECOND
        if self.arrow.tz is None:
            raise SchemaError(
                f"{shown(value)} has a time zone, but its column is {self.arrow}, which has none.",
                remedy="Declare the column as a timestamp with a zone, or take the zone off.",
            )
        return (value - EPOCH) // _MICROSECOND

    def _check(self, us: int, value: Any) -> int:
        if not -LIMIT < us < LIMIT:
            raise SchemaError(
                f"{shown(value)} in {self.unit!r} is no event time that can be held.",
                remedy="See whether the unit is right: a time in microseconds is no time in seconds.",
            )
        return us

    def _out_of_range(self, us: int) -> SchemaError:
        return SchemaError(
            f"The time {us} (microseconds since 1970) does not fit {self.arrow}.",
            remedy="Hold event time in a type with room for it, such as timestamp('us').",
        )


def _own_unit(kind: pa.DataType) -> str | None:
    if pa.types.is_timestamp(kind):
        return str(kind.unit)
    if pa.types.is_date32(kind):
        return "date32"
    if pa.types.is_date64(kind):
        return "date64"
    return None


def _integer_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_integer(kind):
        return kind
    return pa.int32() if pa.types.is_date32(kind) else pa.int64()


def _integers(array: pa.Array) -> pa.Array:
    return array if pa.types.is_integer(array.type) else array.view(_integer_type(array.type))


def _whole(value: Any) -> int | None:
    """An integer, or a float that is one, as `data.exact` takes them for an integer column."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    try:
        return operator.index(value)
    except TypeError:
        return None


@lru_cache(maxsize=64)
def _zone(name: str) -> dt.tzinfo:
    """The zone as Arrow reads its name, which may be an offset such as +09:00."""
    return pa.scalar(0, pa.timestamp("us", tz=name)).as_py().tzinfo  # type: ignore[no-any-return]


def duration_us(value: Duration) -> int:
    """Microseconds of a duration: "500ms", "10s", "5m", "2h", "1d", a timedelta, or a number of seconds.

    >>> duration_us("500ms"), duration_us(dt.timedelta(minutes=1)), duration_us(0.1)
    (500000, 60000000, 100000)
    """
    if isinstance(value, dt.timedelta):
        return _held(value // _MICROSECOND, value)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ConfigError(
            f"{value!r} is not a duration.", remedy='Write it as "10s" or "5m", a timedelta, or seconds.'
        )
    if isinstance(value, int):
        return _held(value * 1_000_000, value)
    seconds = parse_duration_s(value)
    if not math.isfinite(seconds):
        raise ConfigError(f"{value!r} is not a duration.", remedy='Write it as "10s" or "5m".')
    if seconds.is_integer():
        return _held(int(seconds) * 1_000_000, value)
    us = round(seconds * 1_000_000)
    if abs(us - seconds * 1_000_000) > 1e-6 + abs(us) * 1e-15:
        raise ConfigError(
            f"{value!r} is finer than a microsecond.", remedy="Time is counted in whole microseconds."
        )
    return _held(us, value)


def _held(us: int, value: Any) -> int:
    if not -LIMIT < us < LIMIT:
        raise ConfigError(f"{value!r} is too long.", remedy="A duration must be below 70,000 years.")
    return us


def positive_us(what: str, value: Duration) -> int:
    """Microseconds of a duration that a pipeline is written with, which must be longer than nothing."""
    us = pipeline_us(what, value)
    if us <= 0:
        raise PipelineError(
            f"{what} is {value!r}, but must be longer than nothing.", remedy='Write it as "10s" or "5m".'
        )
    return us


def pipeline_us(what: str, value: Duration) -> int:
    """Microseconds of a duration that a pipeline is written with; a PipelineError if it is none."""
    try:
        return duration_us(value)
    except ConfigError as error:
        raise PipelineError(f"{what}: {error.message}", remedy=error.remedy) from None


def signed_us(what: str, value: Duration) -> int:
    """Microseconds of a duration that may be before: "-5s"."""
    if isinstance(value, str) and value.strip().startswith("-"):
        return -pipeline_us(what, value.strip()[1:])
    return pipeline_us(what, value)


def us_to_ms_floor(us: int) -> int:
    """The millisecond a time lies in; MIN_TIME and MAX_TIME stay what they are.

    >>> us_to_ms_floor(1999), us_to_ms_floor(-1)
    (1, -1)
    """
    return us if us in (MIN_TIME, MAX_TIME) else us // 1000


def watermark_ms(us: int) -> int:
    """A watermark in milliseconds that promises no more than the one in microseconds.

    A watermark says that no record at or below it is still to come. At 1500 µs one at 1600 µs may be, which
    lies in millisecond 1: so only millisecond 0 is over.

    >>> watermark_ms(1500), watermark_ms(1999)
    (0, 1)
    """
    return us if us in (MIN_TIME, MAX_TIME) else (us + 1) // 1000 - 1
