"""Event time as it passes through a pipeline: what is seen of each split, and the clock of each operator. Pure.

    records of a split ── strategy ──> its mark ── min over splits that are not idle ──> an assigner's watermark
    watermarks of the assigners above an operator ── min, never back ──> its event clock

A watermark T says that no record with a timestamp at or below T is still to come. Times are microseconds since 1970.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.errors import PipelineError
from holdfast.time.units import LIMIT, MAX_TIME, MIN_TIME, duration_us

Marks = dict[str, dict[str, int]]
"""The watermark of each split, by uid of the assigner."""
WHOLE = ""
"""The only split of an assigner that stands behind an exchange, and of a source that has none of its own."""
Times = npt.NDArray[np.int64]


class Watermarks:
    """How watermarks come about; extend it for a rule of your own."""

    by_record = False
    """Whether `mark_of` is asked for each record."""
    so_far = True
    """Whether `mark` must see the greatest timestamp of all that was ever read of a split, and not only of what just was."""

    def mark(self, greatest: int) -> int | None:
        """The watermark of a split, given the greatest timestamp of what was read of it; None: nothing is known."""
        return None

    def mark_of(self, record: dict[str, Any]) -> int | None:
        """The watermark that a record carries, if it carries one."""
        return None

    def describe(self) -> str:
        """A few words for people."""
        return type(self).__name__


@dataclasses.dataclass(frozen=True)
class Bounded(Watermarks):
    """Records are at most so much out of order: the watermark is that far behind the greatest timestamp."""

    lag_us: int = 0
    so_far = False  # a watermark never goes back: the greatest timestamp so far is in it

    def mark(self, greatest: int) -> int | None:
        return greatest - self.lag_us - 1

    def describe(self) -> str:
        return f"{self.lag_us / 1e6:g} s behind" if self.lag_us else "ascending"


def upto_us(made: Any) -> int | None:
    """The last microsecond of a millisecond that a user's function gave."""
    if made is None:
        return None
    if isinstance(made, bool) or not isinstance(made, int) or not -LIMIT < made * 1000 < LIMIT:
        raise PipelineError(
            f"A watermark is whole milliseconds since 1970, or None, and not {made!r}.",
            remedy="Return int(…), or None where nothing is known.",
        )
    return made * 1000 + 999


@dataclasses.dataclass(frozen=True)
class Periodic(Watermarks):
    """A function of the greatest timestamp so far, asked for each batch of a range."""

    function: Callable[[int], int | None]

    def mark(self, greatest: int) -> int | None:
        return upto_us(self.function(greatest // 1000))

    def describe(self) -> str:
        return "periodic"


@dataclasses.dataclass(frozen=True)
class Punctuated(Watermarks):
    """Records carry watermarks: a function of the record gives one in milliseconds, or None."""

    function: Callable[[dict[str, Any]], int | None]
    by_record = True
    so_far = False

    def mark_of(self, record: dict[str, Any]) -> int | None:
        return upto_us(self.function(record))

    def describe(self) -> str:
        return "punctuated"


@dataclasses.dataclass(frozen=True)
class FromSource(Watermarks):
    """The source says how far each split is (`Offer.watermarks`)."""

    so_far = False

    def describe(self) -> str:
        return "given by the source"


CLOCK_TIME = pa.timestamp("us", "UTC")
"""What a time that the clock gives is."""


@dataclasses.dataclass(frozen=True)
class ByClock(Watermarks):
    """Records have the time of the epoch that reads them: all that come later have a later one."""

    so_far = False

    def mark(self, greatest: int) -> int:
        return self.upto(greatest // 1000)

    @staticmethod
    def upto(now_ms: int) -> int:
        """The watermark of an epoch at that time."""
        return now_ms * 1000 + 999

    def describe(self) -> str:
        return "by the clock"


def bounded(out_of_order: Any) -> Watermarks:
    """Records are at most so much out of order ("5s").

    A record that is later than that is late; one that is not can never be.
    """
    lag = duration_us(out_of_order)
    if lag < 0:
        raise PipelineError(f"Records can't be out of order by {out_of_order!r}.")
    return Bounded(lag)


def ascending() -> Watermarks:
    """Timestamps of a split never go back."""
    return Bounded(0)


def periodic(function: Callable[[int], int | None]) -> Watermarks:
    """A function of your own: the greatest timestamp so far in, the watermark out, both in milliseconds.

    It is asked several times in an epoch, as often as there are batches, and the greatest answer counts. So let it rise with
    the timestamp: one that answers less, or nothing, to a greater one depends on how records were divided.
    """
    return Periodic(function)


def punctuated(function: Callable[[dict[str, Any]], int | None]) -> Watermarks:
    """Records carry the watermark: a function of the record gives it in milliseconds, or None."""
    return Punctuated(function)


def from_source() -> Watermarks:
    """The source itself says how far each of its splits is."""
    return FromSource()


@dataclasses.dataclass(frozen=True)
class EventTime:
    """What an assigner is told: where the time is, how watermarks come about, who may be idle or must wait."""

    column: str
    unit: str | None = None
    watermarks: Watermarks = dataclasses.field(default_factory=Bounded)
    idle_after_ms: int | None = None
    align: str | None = None
    drift_us: int = 0
    missing: str = "fail"


# An epoch's clocks


@dataclasses.dataclass(frozen=True)
class Clocks:
    """What an epoch starts from: marks of all known splits, who is idle or ended in it, and the operators' clocks."""

    marks: Marks = dataclasses.field(default_factory=dict)
    idle: Mapping[str, Collection[str]] = dataclasses.field(default_factory=dict)
    ended: Collection[str] = ()
    given: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    """What the sources themselves say of their splits, once this epoch is read."""
    clocks: Mapping[str, int] = dataclasses.field(default_factory=dict)


def merge(into: Marks, seen: Mapping[str, Mapping[str, int]]) -> Marks:
    """Marks with what else was seen; marks only rise.

    >>> merge({"a": {"0": 5}}, {"a": {"0": 3, "1": 4}})
    {'a': {'0': 5, '1': 4}}
    """
    for uid, splits in seen.items():
        mine = into.setdefault(uid, {})
        for split, mark in splits.items():
            mine[split] = max(mark, mine.get(split, MIN_TIME))
    return into


def copied(marks: Mapping[str, Mapping[str, int]]) -> Marks:
    """Marks of one's own."""
    return {uid: dict(splits) for uid, splits in marks.items()}


def reached(start: Clocks, seen: Mapping[str, Mapping[str, int]]) -> Marks:
    """The marks after an epoch: what it started from, what was seen, and the end of time for what has ended."""
    marks = merge(merge(copied(start.marks), start.given), seen)
    for uid in start.ended:
        marks[uid] = dict.fromkeys(marks.get(uid) or [WHOLE], MAX_TIME)
    return marks


def still_idle(
    idle: Mapping[str, Collection[str]], heard: Mapping[str, Collection[str]]
) -> dict[str, list[str]]:
    """The splits that were planned as idle, without those that had something to say all the same.

    >>> still_idle({"a": ["0", "1"], "b": ["2"]}, {"a": ["1"]})
    {'a': ['0'], 'b': ['2']}
    """
    return {uid: [s for s in splits if s not in heard.get(uid, ())] for uid, splits in idle.items()}


def watermark(splits: Mapping[str, int], idle: Collection[str]) -> int | None:
    """An assigner's watermark: the least of its splits that are not idle; None: all are.

    >>> watermark({"0": 5, "1": 9}, ["0"])
    9
    """
    active = [mark for split, mark in splits.items() if split not in idle]
    if active:
        return min(active)
    return None if splits else MIN_TIME


def event_clock(
    marks: Mapping[str, Mapping[str, int]],
    idle: Mapping[str, Collection[str]],
    assigners: Iterable[str],
    before: int = MIN_TIME,
) -> int:
    """An operator's event clock: the least watermark of the assigners above it, never less than it was.

    Where all splits of all of them are idle, it is the greatest mark: nobody is there to wait for. So it is beside streams
    that have ended: those say nothing of when an idle one goes on.

    >>> ended, silent = {"0": MAX_TIME}, {"1": 5}
    >>> (
    ...     event_clock({"a": ended, "b": silent}, {"b": ["1"]}, "ab"),
    ...     event_clock({"a": ended}, {}, "a") == MAX_TIME,
    ... )
    (5, True)
    """
    uids = list(assigners)
    known = [watermark(marks.get(uid, {}), idle.get(uid, ())) for uid in uids]
    active = [mark for mark in known if mark is not None]
    if active and (len(active) == len(known) or min(active) < MAX_TIME):
        return max(before, min(active))
    everything = [mark for uid in uids for mark in marks.get(uid, {}).values()]
    return max([before, *(mark for mark in everything if mark < MAX_TIME)])


def delayed(clock: int, delay_us: int) -> int:
    """A clock that is behind another, and at the ends of time where that is.

    >>> delayed(9, 1), delayed(MAX_TIME, 1) == MAX_TIME
    (8, True)
    """
    return clock - delay_us if MIN_TIME < clock < MAX_TIME else clock


def holding(
    marks: Mapping[str, Mapping[str, int]], idle: Mapping[str, Collection[str]], assigners: Iterable[str]
) -> tuple[str, str, int] | None:
    """Who holds a clock back: assigner, split and mark; None where nobody does.

    >>> holding({"a": {"0": 5, "1": 9}}, {}, ["a"])
    ('a', '0', 5)
    """
    found = [
        (mark, uid, split)
        for uid in assigners
        for split, mark in marks.get(uid, {}).items()
        if split not in idle.get(uid, ()) and mark < MAX_TIME
    ]
    if not found:
        return None
    mark, uid, split = min(found)
    return uid, split, mark


# What a plan fixes


@dataclasses.dataclass(frozen=True)
class Splits:
    """What is known of an assigner's splits when an epoch is planned."""

    known: Mapping[str, int]
    """The mark of each."""
    active_ms: Mapping[str, int]
    """When each had something to say last, by the planned clock."""
    idle: Collection[str] = ()
    """Those that were idle in the epoch before."""
    unheard: Collection[str] = ()
    """Those of which nothing came to the assigner when they were last read: a filter before it takes it all."""


def planned(
    before: Splits,
    there: Collection[str] | None,
    reading: Collection[str],
    now_ms: int,
    idle_after_ms: int | None,
    *,
    waiting: Collection[str] = (),
    unsure: Collection[str] = (),
    declared: Collection[str] = (),
    risen: Collection[str] = (),
) -> tuple[Splits, list[str]]:
    """The splits of an epoch, and which of them are idle in it.

    A split that has something is not idle, whether it is read now or not: who called it so would pass by what waits.
    But one that is read in vain has nothing to say. If it has after all, it is not idle in that very epoch (`still_idle`).

    Args:
        there: all splits that the source has, where it says so; those that are not among them are finished.
        reading: the splits that this epoch reads.
        waiting: those that have something which is not read yet.
        unsure: those that may have: they stay as they were, idle or not.
        declared: those that the source calls idle.
        risen: those whose watermark the source says is higher by now: that is something to say, records or not.
    """
    names = {*before.known, *reading} if there is None else {*there, *reading}
    known = {name: before.known.get(name, MIN_TIME) for name in sorted(names)}
    busy = {*(set(reading) - set(before.unheard)), *waiting}
    fresh = busy | set(risen) | (set(unsure) - set(before.idle))
    active = {name: now_ms if name in fresh else before.active_ms.get(name, now_ms) for name in known}

    def quiet(name: str) -> bool:
        silent = idle_after_ms is not None and now_ms - active[name] >= idle_after_ms
        return name not in busy and (silent or name in declared)

    idle = [name for name in known if quiet(name)]
    return Splits(known, active, idle, [name for name in known if name in before.unheard]), idle


def held_back(watermarks: Mapping[str, int], groups: Mapping[str, tuple[str | None, int]]) -> set[str]:
    """The assigners whose sources must wait: those further ahead of the slowest of their group than its drift.

    Args:
        watermarks: of each assigner; those that are idle or have ended are left out.
        groups: the alignment group of each assigner, and the drift in microseconds that it allows.

    >>> held_back({"fast": 90, "slow": 10}, {"fast": ("both", 50), "slow": ("both", 50)})
    {'fast'}
    """
    slowest: dict[str | None, int] = {}
    for uid, mark in watermarks.items():
        if uid in groups:
            name = groups[uid][0]
            slowest[name] = min(mark, slowest.get(name, MAX_TIME))
    return {
        uid
        for uid, (name, drift) in groups.items()
        if uid in watermarks and watermarks[uid] - slowest[name] > drift
    }
