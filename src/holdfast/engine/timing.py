"""What a plan says of event time: splits, who is idle, what has ended, which sources must wait.

Pure, but for `offered`, which asks the sources through whom it is given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from holdfast.engine.cut import shares
from holdfast.errors import PipelineError
from holdfast.io.base import Offer, Source
from holdfast.log.records import Commit, Plan
from holdfast.plan.times import Assigner
from holdfast.time.units import MAX_TIME, MIN_TIME
from holdfast.time.watermarks import (
    WHOLE,
    ByClock,
    FromSource,
    Marks,
    Splits,
    event_clock,
    held_back,
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
    away_ms: int = 0,
) -> PlannedTime:
    """Event time as the next epoch starts with it, given the one before and what the sources offer.

    `held` are sources that must wait: what they offer is there, and is not read. For `away_ms` after the plan before
    there was nobody to hear anything: no split has been silent then.
    """
    exhausted = {uid for uid, offer in offers.items() if offer.exhausted and uid not in held}
    made = PlannedTime(clocks={} if before is None else dict(before[1].clocks))
    for one in assigners:
        known = Splits({}, {}) if before is None else _known(one, sources, *before, away_ms)
        found = _splits(one, sources, offers, known.known, held)
        given = _given(one, offers, held) if isinstance(one.body.watermarks, FromSource) else None
        splits, idle = planned(
            known,
            found.there,
            found.reading,
            now_ms,
            one.body.idle_after_ms,
            waiting=found.waiting,
            unsure=found.unsure,
            declared=found.declared,
            risen={s for s, mark in (given or {}).items() if mark > known.known.get(s, MIN_TIME)},
        )
        made.marks[one.uid] = dict(splits.known)
        if isinstance(one.body.watermarks, ByClock):
            made.marks[one.uid] = dict.fromkeys(splits.known or [WHOLE], one.body.watermarks.upto(now_ms))
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
        if given is not None:
            merge(made.given, {one.uid: given})
    return made


def _known(one: Assigner, sources: Mapping[str, Source], plan: Plan, commit: Commit, away_ms: int) -> Splits:
    """What is known of an assigner's splits after an epoch."""
    heard = set(commit.heard.get(one.uid, ()))
    read = {
        split_name(r.source, sources[r.source].split_of(r.piece))
        for r in plan.ranges
        if r.source in one.sources
    }
    active_ms = {**plan.active_ms.get(one.uid, {}), **dict.fromkeys(heard, plan.now_ms)}
    return Splits(
        commit.marks.get(one.uid, {}),
        {split: at_ms + away_ms for split, at_ms in active_ms.items()},
        idle_in(plan, commit).get(one.uid, []),
        (read | set(plan.unheard.get(one.uid, ()))) - heard,
    )


def idle_in(plan: Plan, commit: Commit) -> dict[str, list[str]]:
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


def is_due(made: PlannedTime, before: tuple[Plan, Commit] | None, now_ms: int) -> bool:
    """Whether time alone is worth an epoch: a split has become idle or is finished, a source has ended, or a timer is due."""
    if before is None:
        return False
    plan, commit = before
    if commit.wake_ms is not None and commit.wake_ms <= now_ms:
        return True
    newly_ended = set(made.ended) - set(plan.ended)
    was_idle = idle_in(plan, commit)
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
    idle = idle_in(plan, commit)
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


def counted(offers: Iterable[Offer]) -> int:
    """Records on offer, as far as the sources know; one for a range of unknown size."""
    return sum(p.records if p.records >= 0 else 1 for o in offers for p in o.ranges)


def offered(
    ask: Callable[[str, int], Offer],
    sources: Iterable[str],
    most: int,
    waiting: Collection[str],
    *,
    drain: bool,
) -> tuple[dict[str, Offer], set[str]]:
    """What sources have, together no more than an epoch takes; and those of which nothing is read, as they must wait.

    Each is asked for a whole epoch. Where they offer more than one together, those with the most are asked for less.
    """
    asked = {uid: ask(uid, most) for uid in sources}
    held = held_now(asked, waiting, drain=drain)
    taken = {uid: counted([offer]) for uid, offer in asked.items() if uid not in held}
    if sum(taken.values()) > most:
        asked |= {uid: ask(uid, records) for uid, records in shares(taken, most).items()}
    return asked, held


def taken_up(
    offers: Mapping[str, Offer], held: Collection[str], positions: Mapping[str, Any]
) -> dict[str, Offer]:
    """What is read of the offers: nothing of sources that are held."""
    return {uid: Offer([], positions.get(uid)) if uid in held else o for uid, o in offers.items()}
