"""The timers of a shard: tables ordered by time in its state, and those that an epoch sets, deletes and fires."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.functions import CLOCK, EVENT, Timer
from holdfast.state.shard import ShardState
from holdfast.state.tables import TableSpec, ValueTable, order_bytes
from holdfast.time.units import MAX_TIME, MIN_TIME

_TURNS = 100
"""So often the two kinds of timers take turns in one epoch."""
TABLES = {EVENT: "timers.event", CLOCK: "timers.clock"}
SPECS = [
    TableSpec(
        name,
        "value",
        pa.struct([pa.field("at", pa.int64())]),
        tuples=True,
        extra=(pa.int64(), pa.string()),
        due="at",
    )
    for name in TABLES.values()
]


class Timers:
    """What one attempt does with timers. Those of the epochs before are in the state, in the order of their time.

    `beside`: how many parts of a timer's key stand behind the operator's own, as the bounds of a window. `by_group`: those
    of a key group are taken one after the other, whichever key they belong to.
    """

    until = MIN_TIME
    """When the stream has ended: a timer for an earlier time is set all the same."""

    def __init__(self, state: ShardState, beside: int = 0, *, by_group: bool = False) -> None:
        self._state = state
        self._beside, self._by_group = beside, by_group
        self._changes: dict[str, dict[Any, bool]] = {EVENT: {}, CLOCK: {}}
        self._firing: dict[Any, list[tuple[int, bytes, str, Any]]] | None = None
        """By the operator's own key, or by key group."""
        self._kind, self._upto = EVENT, 0
        self._ended = False
        """Whether no more event time passes: the stream has ended, and what was set by then has its turn."""
        self._last: set[Any] = set()
        """Then: what is still to have its turn, whether it is deleted and set anew meanwhile or not."""

    def set(self, kind: str, key: Any, at_us: int, name: str) -> None:
        full = _full(key, at_us, name)
        if kind == EVENT and self._ended and at_us >= self.until and full not in self._last:
            return  # nobody would call it: in this epoch it would set itself anew without end, and later no time passes
        self._changes[kind][full] = True
        if self._firing is not None and kind == self._kind and at_us <= self._upto:
            heapq.heappush(self._of(self._lane(key)), (at_us, order_bytes(key), name, key))

    def delete(self, kind: str, key: Any, at_us: int, name: str) -> None:
        self._changes[kind][_full(key, at_us, name)] = False

    def turns(self, event_us: int, clock_us: int) -> Iterator[str]:
        """Start to fire all that is due, a kind at a time: first event time, then processing time.

        And again as long as timers of one kind have set some of the other for a time that has passed. When the stream
        has ended, those on event time have one turn. What sets each other without end goes on in the next epoch.
        """
        upto = {EVENT: event_us, CLOCK: clock_us}
        self._ended = event_us == MAX_TIME
        for turn, kind in enumerate(itertools.islice(itertools.cycle(upto), _TURNS)):
            if turn >= len(upto) and not self._was_set(kind, upto[kind]):
                return
            self._begin(kind, upto[kind])
            yield kind
            self._firing = None

    def _was_set(self, kind: str, upto_us: int) -> bool:
        """Whether a timer was set in this epoch that is due, and still is to fire."""
        return any(alive and full[-2] <= upto_us for full, alive in self._changes[kind].items())

    def _begin(self, kind: str, upto_us: int) -> None:
        changes = self._changes[kind]
        due = [full for full in self._table(kind).due(upto_us) if full not in changes]
        due += [full for full, alive in changes.items() if alive and full[-2] <= upto_us]
        self._kind, self._upto, self._firing = kind, upto_us, {}
        if kind == EVENT and self._ended:
            self._last = set(due)
        keys = [_key(full) for full in due]
        lanes = self._groups(due) if self._by_group else map(self._lane, keys)
        for full, key, lane in zip(due, keys, lanes, strict=True):
            self._of(lane).append((full[-2], order_bytes(key), full[-1], key))
        for timers in self._firing.values():
            heapq.heapify(timers)

    def take(self) -> list[tuple[Any, Timer]]:
        """The next timers: for each key its first, so that what it sets or deletes counts for the others.

        Of several windows of a key those of the earliest time: none has to do with another's timers.
        """
        assert self._firing is not None
        found: list[tuple[int, bytes, Any, Timer]] = []
        changes = self._changes[self._kind]
        for own in list(self._firing):
            timers = self._firing[own]
            first: int | None = None
            while timers and (first is None or (self._beside and timers[0][0] == first)):
                at, order, name, key = heapq.heappop(timers)
                full = _full(key, at, name)
                self._last.discard(full)
                if changes.get(full, True):
                    changes[full] = False
                    first = at
                    found.append((at, order, key, Timer(at, name, self._kind)))
            if not timers:
                del self._firing[own]
        found.sort(key=lambda f: (f[0], f[1], f[3].name))
        return [(key, timer) for _, _, key, timer in found]

    @property
    def lanes(self) -> list[Any]:
        """The keys, or key groups, that have something to fire."""
        assert self._firing is not None
        return list(self._firing)

    def due(self) -> dict[Any, Any]:
        """The keys that have something to fire, and the lane of each."""
        assert self._firing is not None
        return {key: lane for lane, timers in self._firing.items() for *_, key in timers}

    def take_of(self, lane: Any, before_us: int) -> tuple[Any, Timer] | None:
        """The next timer of a lane, if it is due before a time."""
        assert self._firing is not None
        timers, changes = self._firing.get(lane, []), self._changes[self._kind]
        while timers and timers[0][0] < before_us:
            at, _, name, key = heapq.heappop(timers)
            full = _full(key, at, name)
            self._last.discard(full)
            if changes.get(full, True):
                changes[full] = False
                return key, Timer(at, name, self._kind)
        return None

    def _lane(self, key: Any) -> Any:
        """Where a timer of the key at hand stands in line."""
        if self._by_group:
            return self._state.group
        return key[: -self._beside] if self._beside else key

    def _groups(self, due: list[Any]) -> list[int]:
        found: list[int] = self._state.groups(due, self._table(self._kind).spec).tolist()
        return found

    def _of(self, lane: Any) -> list[tuple[int, bytes, str, Any]]:
        assert self._firing is not None
        return self._firing.setdefault(lane, [])

    def seal(self) -> None:
        """Put what was set and deleted into the state."""
        for kind, changes in self._changes.items():
            if not changes:
                continue
            keys = sorted(changes, key=order_bytes)
            table = self._table(kind)
            self._state.prefetch(keys, self._state.groups(keys, table.spec), table.spec.name)
            gone = np.fromiter((not changes[k] for k in keys), bool, count=len(keys))
            table.stage(keys, [pa.array([k[-2] for k in keys], pa.int64())], gone)

    def wake_us(self, now_us: int) -> int | None:
        """When the next timer on processing time is due."""
        changes = self._changes[CLOCK]
        times = [full[-2] for full, alive in changes.items() if alive]
        stored = self._table(CLOCK).next_due(now_us + 1)
        if stored is not None:
            times.append(stored)
        return min(times, default=None)

    def _table(self, kind: str) -> ValueTable:
        table = self._state.tables[TABLES[kind]]
        assert isinstance(table, ValueTable)
        return table


def _full(key: Any, at_us: int, name: str) -> Any:
    return (*key, at_us, name) if isinstance(key, tuple) else (key, at_us, name)


def _key(full: Any) -> Any:
    return full[0] if len(full) == 3 else full[:-2]


def upto_clock(now_ms: int) -> int:
    """The times that are due by an epoch's processing time."""
    return min(now_ms * 1000 + 999, MAX_TIME)
