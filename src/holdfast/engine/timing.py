"""What a plan says of event time: splits, who is idle, what has ended, which sources must wait. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from holdfast.io.base import Offer, Source
from holdfast.log.records import Commit, Plan
from holdfast.metrics import Watermark
from holdfast.plan.times import Assigner
from holdfast.time.units import MAX_TIME, MIN_TIME, watermark_ms
from holdfast.time.watermarks import FromSource, Marks, Splits, held_back, holding, merge, planned, watermark


@dataclasses.dataclass(frozen=True)
class PlannedTime:
    """The part of a plan that is about event time."""

    marks: Marks = dataclasses.field(default_factory=dict)
    active_ms: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    idle: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    ended: list[str] = dataclasses.field(default_factory=list)
    given: Marks = dataclasses.field(default_factory=dict)
    clocks: dict[str, int] = dataclasses.field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """As a plan has them."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


def split_name(source: str, split: str) -> str:
    """What a split is called among the marks of an assigner, which may have several sources."""
    return f"{source}/{split}" if split else source


def plan_time(
    assigners: Sequence[Assigner],
    sources: Mapping[str, Source],
    offers: Mapping[str, Offer],
    before: tuple[Plan, Commit] | None,
    now_ms: int,
) -> PlannedTime:
    """Event time as the next epoch starts with it, given the one before and what the sources offer."""
    exhausted = {uid for uid, offer in offers.items() if offer.exhausted}
    made = PlannedTime(clocks={} if before is None else dict(before[1].clocks))
    for one in assigners:
        marks = {} if before is None else before[1].marks.get(one.uid, {})
        active = {} if before is None else before[0].active_ms.get(one.uid, {})
        there, reading = _splits(one, sources, offers, marks)
        splits, idle = planned(Splits(marks, active), there, reading, now_ms, one.body.idle_after_ms)
        made.marks[one.uid] = dict(splits.known)
        made.active_ms[one.uid] = {s: at for s, at in splits.active_ms.items() if s not in one.roots}
        idle = [s for s in idle if s not in one.roots]
        if idle:
            made.idle[one.uid] = idle
        if one.above <= exhausted:
            made.ended.append(one.uid)
        if isinstance(one.body.watermarks, FromSource):
            merge(made.given, {one.uid: _given(one, offers)})
    return made


def _splits(
    one: Assigner, sources: Mapping[str, Source], offers: Mapping[str, Offer], known: Mapping[str, int]
) -> tuple[Collection[str] | None, set[str]]:
    """All splits, and those that are read now. A source that does not say which it has keeps those it had."""
    there: set[str] = set(one.roots)
    reading: set[str] = set()
    for uid in one.sources:
        offer = offers[uid]
        if offer.exhausted and not offer.ranges:
            continue  # its records are read: nobody waits for more
        if offer.splits is None:
            there |= {s for s in known if s == uid or s.startswith(f"{uid}/")}
        else:
            there |= {split_name(uid, s) for s in offer.splits}
        reading |= {split_name(uid, sources[uid].split_of(piece)) for piece in offer.ranges}
    return there, reading


def _given(one: Assigner, offers: Mapping[str, Offer]) -> dict[str, int]:
    return {
        split_name(uid, split): at_ms * 1000 + 999
        for uid in one.sources
        for split, at_ms in offers[uid].watermarks.items()
    }


def shown_time(
    assigners: Sequence[Assigner], plan: Plan, commit: Commit, moved_ms: dict[str, tuple[int, int]]
) -> dict[str, Watermark]:
    """Event time after an epoch, for people. `moved_ms` keeps what each watermark was, and since when."""
    made = {}
    for one in assigners:
        marks, idle = commit.marks.get(one.uid, {}), plan.idle.get(one.uid, [])
        mark = watermark(marks, idle)
        at = max(marks.values(), default=MIN_TIME) if mark is None else mark
        if moved_ms.get(one.uid, (None, 0))[0] != at:
            moved_ms[one.uid] = (at, plan.now_ms)
        known = MIN_TIME < at < MAX_TIME
        ms = watermark_ms(at) if known else None
        held = holding({one.uid: marks}, plan.idle, [one.uid])
        made[one.uid] = Watermark(
            ms=ms,
            lag_ms=None if ms is None else plan.now_ms - ms,
            split="" if held is None or at == MAX_TIME else held[1],
            still_ms=plan.now_ms - moved_ms[one.uid][1],
            idle=list(idle),
            ended=at == MAX_TIME,
        )
    return made


def is_due(made: PlannedTime, before: tuple[Plan, Commit] | None, now_ms: int) -> bool:
    """Whether time alone is worth an epoch: a split has become idle, a source has ended, or a timer is due."""
    if before is None:
        return False
    plan, commit = before
    if commit.wake_ms is not None and commit.wake_ms <= now_ms:
        return True
    newly_ended = set(made.ended) - set(plan.ended)
    newly_idle = any(set(idle) - set(plan.idle.get(uid, ())) for uid, idle in made.idle.items())
    return bool(newly_ended) or newly_idle


def must_wait(assigners: Sequence[Assigner], before: tuple[Plan, Commit] | None) -> set[str]:
    """The sources that are held back in the next epoch, because they are too far ahead of others in their group."""
    groups = {a.uid: (a.body.align, a.body.drift_us) for a in assigners if a.body.align is not None}
    if before is None or not groups:
        return set()
    plan, commit = before
    marks: dict[str, int] = {}
    for uid in groups:
        mark = watermark(commit.marks.get(uid, {}), plan.idle.get(uid, ()))
        if mark is not None and mark != MAX_TIME:
            marks[uid] = mark
    held = held_back(marks, groups)
    return {source for a in assigners if a.uid in held for source in a.sources}


def taken_up(
    offers: Mapping[str, Offer], waiting: Collection[str], positions: Mapping[str, Any], *, drain: bool
) -> dict[str, Offer]:
    """What is read of the offers: nothing of sources that wait, unless all is to be drained and nobody else has anything."""
    if drain and not any(o.ranges for uid, o in offers.items() if uid not in waiting):
        waiting = ()
    return {
        uid: Offer([], positions.get(uid), splits=offer.splits) if uid in waiting and offer.ranges else offer
        for uid, offer in offers.items()
    }
