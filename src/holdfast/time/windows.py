"""Windows: which stretches of event time a record belongs to, record by record and for whole columns.

An assigner is a pure function from times to windows. When a window fires is a trigger's business, and what it
holds that of the operator. A window has its first instant in it, and its end not.

Windows with a zone are laid out on the clock on the wall, which jumps. One rule holds for all of them: *a window
begins at the instant at which the clock first shows its start, or a later time, and ends where the next one
begins.* So every instant belongs to exactly one tumbling window, and

- what the clock skips is not there: in New York's night of March the hour from 1:00 is followed by that from 3:00,
  and the day has 23 hours;
- what the clock shows twice belongs to the window that was open when it was put back: in November the hour from
  1:00 lasts two hours and the day 25; of windows of 15 minutes, the one from 1:45 lasts 75 minutes.

Windows of an hour and less seldom need a zone: without one they start on the same minutes in nearly every country,
and all have one length.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar, TypeVar, overload
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
import numpy as np

from holdfast.errors import PipelineError
from holdfast.time.units import EPOCH, MAX_TIME, MIN_TIME, Duration, Mask, Times, positive_us, signed_us

Record = dict[str, Any]

_DAY_US = 86_400_000_000
_MONDAY_US = 4 * _DAY_US  # 5 January 1970
_MOST_PANES = 100_000
_INT64 = np.iinfo(np.int64)

_T = TypeVar("_T", int, Times)


class Window(msgspec.Struct, frozen=True, order=True, gc=False):
    """A stretch of event time, in microseconds since 1970, from `start` to just before `end`.

    >>> Window(0, 3_600_000_000)
    Window[1970-01-01T00:00:00Z, 1970-01-01T01:00:00Z)
    """

    start: int
    end: int

    @property
    def last(self) -> int:
        """The last instant that is in it; when the watermark reaches it, the window is complete."""
        return self.end - 1

    @property
    def start_time(self) -> dt.datetime | None:
        """The start in UTC; None where a datetime can't hold it."""
        return _datetime(self.start)

    @property
    def end_time(self) -> dt.datetime | None:
        """The end in UTC; None where a datetime can't hold it."""
        return _datetime(self.end)

    def __repr__(self) -> str:
        return f"Window[{_instant(self.start)}, {_instant(self.end)})"


def _datetime(us: int) -> dt.datetime | None:
    try:
        return EPOCH + dt.timedelta(microseconds=us)
    except OverflowError:
        return None


def _instant(us: int) -> str:
    if us in (MIN_TIME, MAX_TIME):
        return "-∞" if us < 0 else "∞"
    time = _datetime(us)
    return f"{us}us" if time is None else time.replace(tzinfo=None).isoformat() + "Z"


class Assigner:
    """Which windows a record belongs to; derive from it for windows of your own.

    Attributes:
        merging: whether windows of one key that overlap or touch become one.

    >>> class Seasons(Assigner):
    ...     def assign(self, at_us, record):
    ...         year = 31_557_600_000_000
    ...         start = at_us - at_us % (year // 4)
    ...         yield Window(start, start + year // 4)
    >>> list(Seasons().assign(0, {}))
    [Window[1970-01-01T00:00:00Z, 1970-04-02T07:30:00Z)]
    """

    merging: ClassVar[bool] = False

    def assign(self, at_us: int, record: Record) -> Iterable[Window]:
        """The windows of a record with this event time; the same for the same record, always."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Plain data that must stay as it is while there is state for these windows."""
        return {"kind": type(self).__name__}

    def describe(self) -> str:
        """A few words for people.

        >>> tumbling("10s").describe(), session("5m").describe()
        ('tumbling size 10 s', 'session gap 300 s')
        """
        facts = self.facts()
        shown = [f"{n[: -len('_us')]} {v / 1e6:g} s" for n, v in facts.items() if n.endswith("_us") and v]
        shown += [f"{n} {v}" for n, v in facts.items() if n != "kind" and not n.endswith("_us") and v]
        return " ".join([str(facts["kind"]), ", ".join(shown)]).strip()

    def __repr__(self) -> str:
        facts = dict(self.facts())
        kind = facts.pop("kind", type(self).__name__)
        return f"{kind}({', '.join(f'{k}={v!r}' for k, v in facts.items() if v is not None)})"


class _Clock(msgspec.Struct, frozen=True):
    """The clock on the wall in one zone, between two changes of which it is so many microseconds off UTC.

    Attributes:
        starts: when each stretch with one offset begins.
        offsets: what it shows then, less UTC.
        reached: what it had shown at most before, plus 1.
        ends: what it will have shown at most when the stretch is over, plus 1.
    """

    starts: list[int]
    offsets: list[int]
    reached: list[int]
    ends: list[int]
    arrays: tuple[Times, Times, Times, Times]

    def shown(self, at: int) -> int:
        i = bisect_right(self.starts, at) - 1
        return max(at + self.offsets[i], self.reached[i] - 1)

    def first(self, wall: int) -> int:
        i = bisect_right(self.ends, wall)
        return max(self.starts[i], wall - self.offsets[i])

    def shown_all(self, at: Times) -> Times:
        starts, offsets, reached, _ = self.arrays
        i = np.searchsorted(starts, at, side="right") - 1
        shown: Times = np.maximum(at + offsets[i], reached[i] - 1)
        return shown

    def first_all(self, wall: Times) -> Times:
        starts, offsets, _, ends = self.arrays
        i = np.searchsorted(ends, wall, side="right")
        first: Times = np.maximum(starts[i], wall - offsets[i])
        return first


# Clocks are read in stretches of 2**45 µs (407 days), each day once: no two changes have come nearer. The margin is
# for times near a stretch's end, where what the wall shows and the instant itself lie in two.
_STRETCH = 45
_MARGIN_US = 40 * _DAY_US
_FIRST_US = (dt.datetime(2, 1, 1, tzinfo=dt.timezone.utc) - EPOCH) // dt.timedelta(microseconds=1)
_LAST_US = (dt.datetime(9999, 1, 1, tzinfo=dt.timezone.utc) - EPOCH) // dt.timedelta(microseconds=1)


@lru_cache(maxsize=4096)
def _clock(zone: str, stretch: int) -> _Clock:
    """What `zoneinfo` knows about a stretch of time; outside the years 2 to 9998 clocks don't change."""
    info = ZoneInfo(zone)

    def offset(us: int) -> int:
        local = (EPOCH + dt.timedelta(microseconds=us)).astimezone(info).utcoffset()
        return (local or dt.timedelta()) // dt.timedelta(microseconds=1)

    low = min(max((stretch << _STRETCH) - _MARGIN_US, _FIRST_US), _LAST_US)
    high = min(max((stretch + 1 << _STRETCH) + _MARGIN_US, _FIRST_US), _LAST_US)
    starts, offsets = [int(_INT64.min)], [offset(low)]
    before = low
    for probe in [*range(low + _DAY_US, high, _DAY_US), high]:
        if offset(probe) != offsets[-1]:
            left, right = before, probe
            while right - left > 1:
                middle = (left + right) // 2
                left, right = (middle, right) if offset(middle) == offsets[-1] else (left, middle)
            starts.append(right)
            offsets.append(offset(probe))
        before = probe
    reached = [int(_INT64.min) + 1]
    for start, was in zip(starts[1:], offsets, strict=False):
        reached.append(max(reached[-1], start + was))
    ends = [*reached[1:], int(_INT64.max)]
    columns = [np.array(c, dtype=np.int64) for c in (starts, offsets, reached, ends)]
    return _Clock(starts, offsets, reached, ends, (columns[0], columns[1], columns[2], columns[3]))


class _Wall(msgspec.Struct, frozen=True):
    """From instants to what the wall's clock has shown at most by then, and from that to its first instant.

    Both ways never fall, whatever the clock does. Without a zone they are nothing at all.
    """

    zone: str | None

    def shown(self, at: int) -> int:
        return at if self.zone is None else _clock(self.zone, at >> _STRETCH).shown(at)

    def first(self, wall: int) -> int:
        return wall if self.zone is None else _clock(self.zone, wall >> _STRETCH).first(wall)

    def shown_all(self, at: Times) -> Times:
        return self._by_stretch(at, _Clock.shown_all)

    def first_all(self, wall: Times) -> Times:
        return self._by_stretch(wall, _Clock.first_all)

    def _by_stretch(self, times: Times, read: Callable[[_Clock, Times], Times]) -> Times:
        if self.zone is None or not len(times):
            return times
        stretches = times >> _STRETCH
        if stretches.min() == stretches.max():
            return read(_clock(self.zone, int(stretches[0])), times)
        result = np.empty_like(times)
        for stretch in np.unique(stretches):
            here = stretches == stretch
            result[here] = read(_clock(self.zone, int(stretch)), times[here])
        return result


class _Ruler(msgspec.Struct, frozen=True):
    """Marks at even distances, in microseconds or in calendar months, with one of them at `offset`."""

    step: int
    offset: int
    months: bool = False

    def mark(self, wall: _T) -> _T:
        """The last mark that is not after a time."""
        if not self.months:
            return wall - (wall - self.offset) % self.step
        months = _months(wall - self.offset)
        return _first_of(months - months % self.step) + self.offset

    def next(self, mark: _T) -> _T:
        """The mark after one."""
        if not self.months:
            return mark + self.step
        return _first_of(_months(mark - self.offset) + self.step) + self.offset


def _months(wall: _T) -> _T:
    """How many months since 1970 a time is in."""
    if isinstance(wall, int):
        return _month_of_day(wall // _DAY_US)
    return (wall // _DAY_US).astype("datetime64[D]").astype("datetime64[M]").astype(np.int64)


def _first_of(months: _T) -> _T:
    """The time at which a month begins."""
    if isinstance(months, int):
        return _first_day_of(months) * _DAY_US
    return months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64) * _DAY_US


@lru_cache(maxsize=4096)
def _month_of_day(day: int) -> int:
    return int(np.datetime64(day, "D").astype("datetime64[M]").astype(np.int64))


@lru_cache(maxsize=4096)
def _first_day_of(month: int) -> int:
    return int(np.datetime64(month, "M").astype("datetime64[D]").astype(np.int64))


class Tumbling(Assigner):
    """Windows one after the other, without gap or overlap; made by `tumbling`."""

    def __init__(self, ruler: _Ruler, zone: str | None) -> None:
        self._ruler = ruler
        self._wall = _Wall(zone)

    def starts(self, at_us: Times) -> Times:
        """For each time, the start of its window."""
        return self._wall.first_all(self._ruler.mark(self._wall.shown_all(at_us)))

    def ends(self, starts: Times) -> Times:
        """For each start of a window, its end."""
        return self._wall.first_all(self._ruler.next(self._ruler.mark(self._wall.shown_all(starts))))

    def assign(self, at_us: int, record: Record) -> tuple[Window]:
        """The one window of a time."""
        mark = self._ruler.mark(self._wall.shown(at_us))
        return (Window(self._wall.first(mark), self._wall.first(self._ruler.next(mark))),)

    def facts(self) -> dict[str, Any]:
        """Size, offset (as far as it matters) and zone."""
        size = "size_months" if self._ruler.months else "size_us"
        return {
            "kind": "tumbling",
            size: self._ruler.step,
            "offset_us": self._ruler.offset,
            "zone": self._wall.zone,
        }


class Sliding(Assigner):
    """Windows of one size, one of which starts every `slide`; made by `sliding`.

    They are cut into panes, the widest pieces that each lie in a window whole or not at all. Records are added up
    once for their pane, and panes for the windows that have them.

    Where a clock skips the start of one window, so that the next begins at the same instant, only the next is
    there: a start belongs to one window.

    Attributes:
        size_us: how long a window is, on the wall's clock.
        slide_us: how long after one the next starts.
        pane_width: how wide a pane is: the greatest common divisor of both.
    """

    def __init__(self, size_us: int, slide_us: int, offset_us: int, zone: str | None) -> None:
        self.size_us = size_us
        self.slide_us = slide_us
        self.pane_width = math.gcd(size_us, slide_us)
        self._windows = _Ruler(slide_us, offset_us % slide_us)
        self._panes = _Ruler(self.pane_width, offset_us % self.pane_width)
        self._wall = _Wall(zone)

    def pane_starts(self, at_us: Times) -> Times:
        """For each time, the start of its pane."""
        return self._wall.first_all(self._panes.mark(self._wall.shown_all(at_us)))

    @property
    def zoned(self) -> bool:
        """Whether its panes follow a clock on the wall, and so may begin elsewhere once zone data have changed."""
        return self._wall.zone is not None

    @property
    def reach_us(self) -> int:
        """By so much at most the end of a pane's last window comes after the end of its first."""
        return self.size_us + (0 if self._wall.zone is None else 2 * _DAY_US)

    def complete_by(self, watermark: int) -> int:
        """A number that changes whenever another window is complete: on the wall's clock, the start of the last one."""
        return self._windows.mark(self._wall.shown(watermark + 1) - self.size_us)

    def next_complete(self, watermark: int) -> int:
        """The first watermark behind this one that completes another window."""
        return self._wall.first(self.complete_by(watermark) + self.slide_us + self.size_us) - 1

    def windows_of_pane(self, pane_start: int) -> list[int]:
        """The starts of the windows that have a pane in them, in order; none if it lies between two windows."""
        return [
            self._wall.first(mark) for mark in self._marks(self._panes.mark(self._wall.shown(pane_start)))
        ]

    def newest_of_pane(self, pane_start: int) -> int | None:
        """The start of the last window that has a pane in it; None if it lies between two windows."""
        if self._wall.zone is not None:
            found = self.windows_of_pane(pane_start)
            return found[-1] if found else None
        newest = self._windows.mark(pane_start)
        return newest if pane_start < newest + self.size_us else None

    def panes_of(self, window_start: int) -> list[int]:
        """The starts of a window's panes, in order; a clock that is put forward skips some."""
        mark = self._windows.mark(self._wall.shown(window_start))
        edges = [self._wall.first(m) for m in range(mark, mark + self.size_us + 1, self.pane_width)]
        return [left for left, right in pairwise(edges) if left < right]

    def ends(self, starts: Times) -> Times:
        """For each start of a window, its end."""
        return self._wall.first_all(self._windows.mark(self._wall.shown_all(starts)) + self.size_us)

    def assign(self, at_us: int, record: Record) -> list[Window]:
        """The windows of a time, in order."""
        first = self._wall.first
        return [Window(first(m), first(m + self.size_us)) for m in self._marks(self._wall.shown(at_us))]

    def _marks(self, shown: int) -> list[int]:
        newest = self._windows.mark(shown)
        older = (newest - shown + self.size_us - 1) // self.slide_us
        marks = [newest - n * self.slide_us for n in range(older, -1, -1)]
        if self._wall.zone is None:
            return marks
        return [m for m in marks if self._wall.first(m) < self._wall.first(m + self.slide_us)]

    def facts(self) -> dict[str, Any]:
        """Size, slide, offset (as far as it matters) and zone."""
        return {
            "kind": "sliding",
            "size_us": self.size_us,
            "slide_us": self.slide_us,
            "offset_us": self._windows.offset,
            "zone": self._wall.zone,
        }


class Session(Assigner):
    """Windows that last as long as records of a key keep coming; made by `session`.

    Attributes:
        gap_us: the longest pause within one; None where it depends on the record.
        dynamic: whether it does.
    """

    merging = True

    def __init__(self, gap_us: int | None, gap_of: Callable[[Record], Duration] | None = None) -> None:
        self.gap_us = gap_us
        self._gap_of = gap_of

    @property
    def dynamic(self) -> bool:
        return self._gap_of is not None

    def assign(self, at_us: int, record: Record) -> tuple[Window]:
        """The session of this record alone, to be merged with those that overlap or touch it."""
        gap = self.gap_us
        if gap is None:
            assert self._gap_of is not None
            gap = positive_us("The gap of a session", self._gap_of(record))
        return (Window(at_us, at_us + gap),)

    def facts(self) -> dict[str, Any]:
        """The gap; nothing about it where it is a function."""
        return {"kind": "session", "gap_us": self.gap_us, "dynamic": self.dynamic}


class Global(Assigner):
    """One window for all time; made by `global_window`."""

    WINDOW: ClassVar[Window] = Window(MIN_TIME, MAX_TIME)

    def assign(self, at_us: int, record: Record) -> tuple[Window]:
        """The one window that there is."""
        return (self.WINDOW,)

    def facts(self) -> dict[str, Any]:
        """That it is the one."""
        return {"kind": "global"}


def tumbling(size: Duration, offset: Duration = "0s", zone: str | None = None) -> Tumbling:
    """Windows one after the other: every instant belongs to exactly one.

    Without a zone they are counted from 1970 in UTC, plus `offset`. With one they follow the clock on the wall
    there: days start at midnight, and have 23 or 25 hours when it is changed. A size must then be whole days or
    divide a day. The head of this module says how shorter windows fare when clocks change.

    Calendar sizes are "1w" (from Monday), "1mo" and "1y", or several; in UTC if there is no zone. "7d" is counted
    from 1 January 1970, which was a Thursday.

    >>> tumbling("1h").assign(90 * 60_000_000, {})
    (Window[1970-01-01T01:00:00Z, 1970-01-01T02:00:00Z),)
    >>> tumbling("1d", zone="Asia/Seoul").assign(0, {})
    (Window[1969-12-31T15:00:00Z, 1970-01-01T15:00:00Z),)
    >>> tumbling("1mo").assign(0, {})
    (Window[1970-01-01T00:00:00Z, 1970-02-01T00:00:00Z),)
    """
    zone = _known(zone)
    offset_us = signed_us("offset", offset)
    months = _calendar_months(size)
    if months is not None:
        return Tumbling(_Ruler(months, offset_us, months=True), zone)
    size_us, origin_us = _length("size", size)
    _fits_days("size", size, size_us, zone)
    return Tumbling(_Ruler(size_us, (origin_us + offset_us) % size_us), zone)


def sliding(size: Duration, slide: Duration, offset: Duration = "0s", zone: str | None = None) -> Sliding:
    """Windows of `size`, one of which starts every `slide`: a record belongs to about size / slide of them.

    The size need not be a multiple of the slide. If the slide is the longer one, records between two windows
    belong to none. Zone and offset are as for `tumbling`.

    >>> minutes = 60_000_000
    >>> [(w.start // minutes, w.end // minutes) for w in sliding("10m", "5m").assign(12 * minutes, {})]
    [(5, 15), (10, 20)]
    """
    zone = _known(zone)
    for what, given in (("size", size), ("slide", slide)):
        if _calendar_months(given) is not None:
            raise PipelineError(
                f"{what}={given!r}: windows that slide can't be counted in months or years.",
                remedy='Use days ("30d" by "1d"), or tumbling("1mo") and add months up behind it.',
            )
    size_us, _ = _length("size", size)
    slide_us, origin_us = _length("slide", slide)
    _fits_days("size", size, size_us, zone)
    _fits_days("slide", slide, slide_us, zone)
    if max(size_us, slide_us) // math.gcd(size_us, slide_us) > _MOST_PANES:
        raise PipelineError(
            f"size={size!r} and slide={slide!r} have no common divisor that is large enough: a window would have "
            f"more than {_MOST_PANES:,} panes.",
            remedy="Make the slide longer, or the size a multiple of it.",
        )
    return Sliding(size_us, slide_us, origin_us + signed_us("offset", offset), zone)


def session(gap: Duration | Callable[[Record], Duration]) -> Session:
    """Windows that end when a key has been silent for longer than `gap`.

    Two records of a key that are exactly `gap` apart are in one session; a microsecond more, and they are in two.
    The window ends `gap` after its last record. A gap may be a function of the record.

    >>> session("10s").assign(0, {})
    (Window[1970-01-01T00:00:00Z, 1970-01-01T00:00:10Z),)
    >>> session(lambda r: "1h" if r["premium"] else "5m").dynamic
    True
    """
    if callable(gap):
        return Session(None, gap)
    return Session(positive_us("gap", gap))


def global_window() -> Global:
    """One window for all time; it is complete at the end of time, so give it a trigger.

    >>> global_window().assign(0, {})
    (Window[-∞, ∞),)
    """
    return Global()


_CALENDAR = re.compile(r"\s*(\d+)\s*(w|weeks?|mo|months?|y|years?)\s*")


def _calendar(value: Duration) -> tuple[int, str] | None:
    match = _CALENDAR.fullmatch(value.lower()) if isinstance(value, str) else None
    if not match:
        return None
    if int(match[1]) == 0:
        raise PipelineError(f"{value!r} is no time at all.", remedy='Write it as "1w", "1mo" or "1y".')
    return int(match[1]), match[2][0]


def _calendar_months(value: Duration) -> int | None:
    match _calendar(value):
        case (n, "m"):
            return n
        case (n, "y"):
            return 12 * n
    return None


def _length(what: str, value: Duration) -> tuple[int, int]:
    """A size that is the same for every window, and where to start counting."""
    calendar = _calendar(value)
    if calendar is not None:
        return positive_us(what, f"{7 * calendar[0]}d"), _MONDAY_US
    return positive_us(what, value), 0


def _fits_days(what: str, value: Duration, us: int, zone: str | None) -> None:
    if zone is not None and us % _DAY_US and _DAY_US % us:
        raise PipelineError(
            f"{what}={value!r} neither divides a day nor is made of whole days, as windows with a zone must be.",
            remedy="Leave the zone out, or take a size such as 15m, 1h, 6h, 1d or 7d.",
        )


def _known(zone: str | None) -> str | None:
    if zone is None:
        return None
    try:
        return ZoneInfo(zone).key
    except (ZoneInfoNotFoundError, ValueError, TypeError, OSError):
        raise PipelineError(
            f"{zone!r} is not a time zone this machine knows.",
            remedy='Use a name such as "Asia/Seoul"; if that fails too, install the package tzdata.',
        ) from None


@overload
def late(window_last_us: int, watermark_us: int, lateness_us: int) -> bool: ...
@overload
def late(window_last_us: Times, watermark_us: int, lateness_us: int) -> Mask: ...
def late(window_last_us: int | Times, watermark_us: int, lateness_us: int) -> bool | Mask:
    """Whether a window is past, so that it is forgotten and a record for it comes too late.

    It is when the watermark has reached its last instant plus the lateness that is allowed; at the end of time
    every window is past.

    >>> late(99, 99, 0), late(99, 99, 1)
    (True, False)
    """
    if isinstance(window_last_us, int):
        return min(window_last_us + lateness_us, MAX_TIME) <= watermark_us
    past: Mask = np.minimum(window_last_us + np.int64(lateness_us), MAX_TIME) <= watermark_us
    return past
