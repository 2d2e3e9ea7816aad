"""What a plan says of event time: splits, who is idle, what has ended, which sources must wait. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.errors import PipelineError
from holdfast.io.base import Offer, Source
from holdfast.log.records import Commit, Plan
from holdfast.metrics import Watermark
from holdfast.plan.times import Assigner
from holdfast.time.units import MAX_TIME, MIN_TIME, watermark_ms
from holdfast.time.watermarks import (
    FromSource,
    Marks,
    Splits,
    event_clock,
    held_back,
    holding,
    merge,
    planned,
    still_idle,
    upto_us,
    watermark,
)


@dataclasses.dataclass(frozen=True)
class PlannedTime:
    """The part of a plan that is about event time."""

    marks: Marks = dataclasses.field(default_factory=dict)
    active_ms: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    idle: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    unheard: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    ended: list[str] = dataclasses.field(default_factory=list)
    given: Marks = dataclasses.field(default_factory=dict)
    clocks: dict[str, int] = dataclasses.field(default_factory=dict)
    greatest: Marks = dataclasses.field(default_factory=dict)

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
    held: Collection[str] = (),
) -> PlannedTime:
    """Event time as the next epoch starts with it, given the one before and what the sources offer.

    `held` are sources that must wait: what they offer is there, and is not read.
    """
    exhausted = {uid for uid, offer in offers.items() if offer.exhausted and uid not in held}
    made = PlannedTime(clocks={} if before is None else dict(before[1].clocks))
    for one in assigners:
        known = Splits({}, {}) if before is None else _known(one, sources, *before)
        found = _splits(one, sources, offers, known.known, held)
        splits, idle = planned(
            known,
            found.there,
            found.reading,
            now_ms,
            one.body.idle_after_ms,
            waiting=found.waiting,
            unsure=found.unsure,
            declared=found.declared,
        )
        made.marks[one.uid] = dict(splits.known)
        if before is not None and one.uid in before[1].greatest:
            reached = before[1].greatest[one.uid]
            made.greatest[one.uid] = {s: at for s, at in reached.items() if s in splits.known}
        made.active_ms[one.uid] = dict(splits.active_ms)
        if idle:
            made.idle[one.uid] = idle
        if splits.unheard:
            made.unheard[one.uid] = list(splits.unheard)
        if one.above <= exhausted:
            made.ended.append(one.uid)
        if isinstance(one.body.watermarks, FromSource):
            merge(made.given, {one.uid: _given(one, offers, held)})
    return made


def _known(one: Assigner, sources: Mapping[str, Source], plan: Plan, commit: Commit) -> Splits:
    """What is known of an assigner's splits after an epoch."""
    heard = set(commit.heard.get(one.uid, ()))
    read = {
        split_name(r.source, sources[r.source].split_of(r.piece))
        for r in plan.ranges
        if r.source in one.sources
    }
    return Splits(
        commit.marks.get(one.uid, {}),
        {**plan.active_ms.get(one.uid, {}), **dict.fromkeys(heard, plan.now_ms)},
        _idle_in(plan, commit).get(one.uid, []),
        (read | set(plan.unheard.get(one.uid, ()))) - heard,
    )


def _idle_in(plan: Plan, commit: Commit) -> dict[str, list[str]]:
    """The splits that nobody waited for in an epoch."""
    return still_idle(plan.idle, commit.heard)


@dataclasses.dataclass
class _Found:
    """The splits of an assigner, by what its sources say of them."""

    there: set[str]
    reading: set[str] = dataclasses.field(default_factory=set)
    waiting: set[str] = dataclasses.field(default_factory=set)
    unsure: set[str] = dataclasses.field(default_factory=set)
    declared: set[str] = dataclasses.field(default_factory=set)


def _splits(
    one: Assigner,
    sources: Mapping[str, Source],
    offers: Mapping[str, Offer],
    known: Mapping[str, int],
    held: Collection[str],
) -> _Found:
    """All splits, and what is known of them. A source that does not say which it has keeps those it had."""
    found = _Found(set(one.roots))
    if any(uid in held or offers[uid].backlog > 0 for uid in one.above):
        found.waiting |= set(one.roots)  # what comes of the records that wait is still to come
    for uid in one.sources:
        offer = offers[uid]
        if offer.exhausted and not offer.ranges:
            continue  # its records are read: nobody waits for more
        if offer.splits is None:
            there = {s for s in known if s == uid or s.startswith(f"{uid}/")}
        else:
            there = {split_name(uid, s) for s in offer.splits}
        offered = {split_name(uid, sources[uid].split_of(piece)) for piece in offer.ranges}
        found.there |= there
        if uid in held:
            found.waiting |= offered
            found.there |= offered
        else:
            found.reading |= offered
        if offer.waiting is not None:
            found.waiting |= {split_name(uid, s) for s in offer.waiting}
        elif offer.backlog > 0:
            found.unsure |= there
        found.declared |= {split_name(uid, s) for s in offer.idle}
    return found


def _given(one: Assigner, offers: Mapping[str, Offer], held: Collection[str]) -> dict[str, int]:
    found = {}
    for uid in one.sources:
        for split, at_ms in offers[uid].watermarks.items() if uid not in held else ():
            try:
                mark = upto_us(at_ms)
            except PipelineError as error:
                raise error.at(uid, None) from None
            if mark is not None:
                found[split_name(uid, split)] = mark
    return found


def shown_time(
    assigners: Sequence[Assigner], plan: Plan, commit: Commit, moved_ms: dict[str, tuple[int, int]]
) -> dict[str, Watermark]:
    """Event time after an epoch, for people. `moved_ms` keeps what each watermark was, and since when."""
    made = {}
    waiting, all_idle = ahead(assigners, plan, commit), _idle_in(plan, commit)
    for one in assigners:
        marks, idle = commit.marks.get(one.uid, {}), all_idle.get(one.uid, [])
        mark = watermark(marks, idle)
        at = max(marks.values(), default=MIN_TIME) if mark is None else mark
        if moved_ms.get(one.uid, (None, 0))[0] != at:
            moved_ms[one.uid] = (at, plan.now_ms)
        known = MIN_TIME < at < MAX_TIME
        ms = watermark_ms(at) if known else None
        held = holding({one.uid: marks}, all_idle, [one.uid])
        made[one.uid] = Watermark(
            ms=ms,
            lag_ms=None if ms is None else plan.now_ms - ms,
            split="" if at == MAX_TIME else _holder(one, held, bool(marks)),
            still_ms=plan.now_ms - moved_ms[one.uid][1],
            idle=list(idle),
            ended=at == MAX_TIME,
            waits=one.uid in waiting,
            waits_for=_slowest(one, assigners, commit, all_idle) if one.uid in waiting else "",
        )
    return made


def _slowest(
    one: Assigner, assigners: Sequence[Assigner], commit: Commit, idle: Mapping[str, Collection[str]]
) -> str:
    """Whom an assigner waits for: the one of its group that is furthest behind, and the split that holds it."""
    found = []
    for other in assigners:
        marks = commit.marks.get(other.uid, {})
        mark = watermark(marks, idle.get(other.uid, ()))
        if other.body.align == one.body.align and mark is not None:
            held = holding({other.uid: marks}, idle, [other.uid])
            found.append((mark, f"{other.uid} ({_holder(other, held, bool(marks))})"))
    return min(found)[1]


def _holder(one: Assigner, held: tuple[str, str, int] | None, known: bool) -> str:
    """The split that holds an assigner; before any is known, the sources it waits for."""
    if held is not None:
        return held[1]
    return "" if known else ", ".join((*one.sources, *one.roots))


def still_for(
    found: Mapping[str, Watermark], moved_ms: Mapping[str, tuple[int, int]], now_ms: int
) -> dict[str, Watermark]:
    """Event time as it is some time after the last epoch: nothing has moved since."""
    made = {}
    for uid, one in found.items():
        since = moved_ms.get(uid, (0, now_ms))[1]
        lag = None if one.ms is None else now_ms - one.ms
        made[uid] = msgspec.structs.replace(one, lag_ms=lag, still_ms=now_ms - since)
    return made


def is_due(made: PlannedTime, before: tuple[Plan, Commit] | None, now_ms: int) -> bool:
    """Whether time alone is worth an epoch: a split has become idle or is finished, a source has ended, or a timer is due."""
    if before is None:
        return False
    plan, commit = before
    if commit.wake_ms is not None and commit.wake_ms <= now_ms:
        return True
    newly_ended = set(made.ended) - set(plan.ended)
    was_idle = _idle_in(plan, commit)
    newly_idle = any(set(idle) - set(was_idle.get(uid, ())) for uid, idle in made.idle.items())
    return bool(newly_ended) or newly_idle or _freed(made, commit, was_idle)


def _freed(made: PlannedTime, commit: Commit, was_idle: Mapping[str, Collection[str]]) -> bool:
    """Whether a watermark rises because the split that held it is finished: its source has ended, and others go on."""
    return any(
        event_clock(made.marks, made.idle, [uid]) > event_clock(commit.marks, was_idle, [uid])
        for uid, splits in made.marks.items()
        if uid not in made.ended and set(commit.marks.get(uid, ())) - set(splits)
    )


def has_risen(made: PlannedTime, before: tuple[Plan, Commit] | None) -> bool:
    """Whether a source says that a split is further than it was known to be, records or not."""
    known = {} if before is None else before[1].marks
    return any(
        mark > known.get(uid, {}).get(split, MIN_TIME)
        for uid, splits in made.given.items()
        for split, mark in splits.items()
    )


def must_wait(assigners: Sequence[Assigner], before: tuple[Plan, Commit] | None) -> set[str]:
    """The sources that are held back in the next epoch, because they are too far ahead of others in their group."""
    if before is None:
        return set()
    held = ahead(assigners, *before)
    # Who is behind reads on, also where one that is ahead stands at the same source: it would wait for ever.
    behind = {s for a in assigners if a.body.align is not None and a.uid not in held for s in a.sources}
    return {source for a in assigners if a.uid in held for source in a.sources} - behind


def ahead(assigners: Sequence[Assigner], plan: Plan, commit: Commit) -> set[str]:
    """The assigners that are too far ahead of the slowest of their group after an epoch."""
    groups = {a.uid: (a.body.align, a.body.drift_us) for a in assigners if a.body.align is not None}
    marks: dict[str, int] = {}
    idle = _idle_in(plan, commit)
    for uid in groups:
        mark = watermark(commit.marks.get(uid, {}), idle.get(uid, ()))
        if mark is not None and mark != MAX_TIME:
            marks[uid] = mark
    return held_back(marks, groups)


def held_now(offers: Mapping[str, Offer], waiting: Collection[str], *, drain: bool) -> set[str]:
    """The sources of which nothing is read though they offer something: those that must wait.

    Nobody does where all is to be drained and the others have nothing more.
    """
    if drain and not any(o.ranges for uid, o in offers.items() if uid not in waiting):
        return set()
    return {uid for uid in waiting if offers[uid].ranges}


def taken_up(
    offers: Mapping[str, Offer], held: Collection[str], positions: Mapping[str, Any]
) -> dict[str, Offer]:
    """What is read of the offers: nothing of sources that are held."""
    return {uid: Offer([], positions.get(uid)) if uid in held else o for uid, o in offers.items()}
