"""Event time as people see it: how far each watermark is, what holds it back, and for how long it has stood still."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

import msgspec

from holdfast.engine.timing import ahead, idle_in
from holdfast.log.records import Commit, Plan
from holdfast.metrics import Watermark
from holdfast.plan.times import Assigner
from holdfast.time.units import MAX_TIME, MIN_TIME, watermark_ms
from holdfast.time.watermarks import ByClock, holding, watermark

_log = logging.getLogger("holdfast.driver")

STILL_MS, STILL_INTERVALS = 30_000, 3
"""A watermark that has not moved for so long, and for so many intervals of epochs, is worth a warning."""


class ShownTime:
    """Follows the watermarks of a run, and warns of one that stands still."""

    def __init__(self, assigners: Sequence[Assigner], interval_ms: int = 0) -> None:
        self._assigners = assigners
        self._still_ms = max(STILL_MS, STILL_INTERVALS * interval_ms)
        self._moved_ms: dict[str, tuple[int, int]] = {}
        """What each watermark was, and since when."""
        self._by_clock = {one.uid for one in assigners if isinstance(one.body.watermarks, ByClock)}
        """Those that move on whenever there is an epoch."""
        self._rules = {one.uid: one.body.watermarks.describe() for one in assigners}
        self._shown: dict[str, Watermark] = {}
        self._told: set[str] = set()

    def after(self, plan: Plan, commit: Commit) -> dict[str, Watermark]:
        """Event time after an epoch."""
        made = {}
        waiting, all_idle = ahead(self._assigners, plan, commit), idle_in(plan, commit)
        for one in self._assigners:
            marks, idle = commit.marks.get(one.uid, {}), all_idle.get(one.uid, [])
            mark = watermark(marks, idle)
            at = max(marks.values(), default=MIN_TIME) if mark is None else mark
            if self._moved_ms.get(one.uid, (None, 0))[0] != at:
                self._moved_ms[one.uid] = (at, plan.now_ms)
            ms = watermark_ms(at) if MIN_TIME < at < MAX_TIME else None
            held = holding({one.uid: marks}, all_idle, [one.uid])
            made[one.uid] = Watermark(
                ms=ms,
                lag_ms=None if ms is None else plan.now_ms - ms,
                split="" if at == MAX_TIME else _holder(one, held, bool(marks)),
                still_ms=plan.now_ms - self._moved_ms[one.uid][1],
                idle=list(idle),
                ended=at == MAX_TIME,
                waits=one.uid in waiting,
                waits_for=_slowest(one, self._assigners, commit, all_idle) if one.uid in waiting else "",
                sources=_lags(one, marks, idle, plan.now_ms),
            )
        self._shown = made
        self._tell(made)
        return made

    def quiet(self, now_ms: int) -> dict[str, Watermark]:
        """Event time some time after the last epoch: nothing has moved since."""
        made = {}
        for uid, one in self._shown.items():
            since = self._moved_ms.get(uid, (0, now_ms))[1]
            lag = None if one.ms is None else now_ms - one.ms
            passed = 0 if lag is None or one.lag_ms is None else lag - one.lag_ms
            lags = {source: behind + passed for source, behind in one.sources.items()}
            made[uid] = msgspec.structs.replace(one, lag_ms=lag, still_ms=now_ms - since, sources=lags)
        self._tell(made)
        return made

    def _tell(self, found: Mapping[str, Watermark]) -> None:
        """A watermark that stands still for long is told of, with what holds it, once until it moves."""
        for uid, one in found.items():
            if one.still_ms < self._still_ms:
                self._told.discard(uid)
            elif uid not in self._told and uid not in self._by_clock and one.split and not one.ended:
                self._told.add(uid)
                why = (
                    f"{one.split} holds it back. If nothing comes of it, idle_after= lets it step out; if something does, "
                    f"the rule for its watermarks ({self._rules[uid]}) makes nothing of that"
                )
                if one.waits:
                    why = f"nothing is read for it until {one.waits_for} is as far (align=, drift=)"
                _log.warning("[%s] the watermark has not moved for %d s: %s", uid, one.still_ms // 1000, why)


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


def _lags(one: Assigner, marks: Mapping[str, int], idle: Collection[str], now_ms: int) -> dict[str, int]:
    """How far each of an assigner's sources is behind."""
    found = {}
    for source in one.sources:
        mine = (m for s, m in marks.items() if s not in idle and (s == source or s.startswith(f"{source}/")))
        least = min(mine, default=MIN_TIME)
        if MIN_TIME < least < MAX_TIME:
            found[source] = now_ms - watermark_ms(least)
    return found


def _holder(one: Assigner, held: tuple[str, str, int] | None, known: bool) -> str:
    """The split that holds an assigner; before any is known, the sources it waits for."""
    if held is not None:
        return held[1]
    return "" if known else ", ".join((*one.sources, *one.roots))
