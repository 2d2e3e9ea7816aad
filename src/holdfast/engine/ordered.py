"""Records and timers in the order of event time: a function to which it makes no difference when its records came.

    what came, on either side ── waits until the clock has passed it ──> records and timers of each key group, by time

A timer fires behind all records of its own time or an earlier one, and before any later one. So what a key has been told
at some time does not depend on where epochs were cut. What the function itself set for a time that has passed fires next.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.data.rows import to_rows
from holdfast.engine.calls import user_error
from holdfast.engine.kept import KeepingOperator, Rows, Shelf, joined, shelf_spec
from holdfast.engine.keyed import Held, ProcessOperator, Work
from holdfast.engine.timers import Timers, upto_clock
from holdfast.functions import Context, Timer
from holdfast.plan import graph as g
from holdfast.plan.bodies import WAITING, OrderedBody
from holdfast.plan.times import LATE, LATE_RIGHT
from holdfast.state.shard import ShardState
from holdfast.state.tables import TableSpec
from holdfast.time.units import MAX_TIME, MIN_TIME

_TAGS = (LATE, LATE_RIGHT)


@dataclasses.dataclass(frozen=True)
class _Item:
    """A record that the clock has passed."""

    at: int
    number: int
    """Its place among those of its key group that came on its side."""
    side: int
    key: Any
    record: Any


class Ordered(KeepingOperator):
    """Runs a `KeyedProcess` in the order of event time."""

    def __init__(self, node: g.Node, redact: bool) -> None:
        super().__init__(node, redact)
        body: OrderedBody = node.body
        own = tuple(dict.fromkeys((g.MAIN, *body.function.side_outputs)))
        self._inner = ProcessOperator(dataclasses.replace(node, body=body.function, tags=own), redact)

    def specs(self, schema: pa.Schema | None) -> list[TableSpec] | None:
        found = self._inner.specs(schema)
        assert found is not None
        # The function's own come last: whether it has timers may change, and a table's place is its name in RocksDB.
        return [*(shelf_spec(name, schema, side) for side, name in enumerate(self._shelves)), *found]

    def close(self) -> None:
        self._inner.close()

    @property
    def _shelves(self) -> tuple[str, ...]:
        return WAITING[: len(self._inner.takes)]

    def apply(self, work: Work) -> None:
        items = self._ready(work)
        timers = Timers(work.state, by_group=True) if self._inner.timed else None
        work.ctx._timers = timers
        held = Held()
        if timers is None:
            self._merged(work, items, None, held)
        else:
            for turn, kind in enumerate(timers.turns(work.after, upto_clock(work.ctx.now_ms)), 1):
                if turn == 1:  # that of event time
                    self._merged(work, items, timers, held)
                    work.ctx._watermark = work.after
                else:
                    self._inner.take_turn(timers, work.state, work.ctx, held, f"{kind} timers {turn}")
            timers.seal()
            wake = timers.wake_us(upto_clock(work.ctx.now_ms))
            work.wake_ms = None if wake is None else -(-wake // 1000)
        work.late_records += work.ctx._late
        self._inner.emit(held, work.outputs)
        work.state.check_memory()

    def _ready(self, work: Work) -> dict[int, list[_Item]]:
        """The records that the clock has passed, by key group and in order; the others wait."""
        found: dict[int, list[_Item]] = {}
        for side, name in enumerate(self._shelves):
            shelf = Shelf(work, name)
            came = self.on_time(work, shelf, side, _TAGS[side])
            rows = joined(shelf.rows(shelf.due(work.after)), came)
            ready = rows.times <= work.after
            changed = np.flatnonzero(rows.stored | ~ready)
            shelf.stage(rows.take(changed), rows.times[changed], ready[changed])
            self._take_up(found, side, shelf, rows.where(ready))
        for items in found.values():
            items.sort(key=lambda item: (item.at, item.side, item.number))
        return found

    @staticmethod
    def _take_up(found: dict[int, list[_Item]], side: int, shelf: Shelf, rows: Rows) -> None:
        if not len(rows):
            return
        records = to_rows(shelf.table(rows))
        keys = [o[0] if len(o) == 1 else o for o in rows.owners]
        facts = zip(
            rows.groups.tolist(), rows.times.tolist(), rows.numbers.tolist(), keys, records, strict=True
        )
        for group, at, number, key, record in facts:
            found.setdefault(group, []).append(_Item(at, number, side, key, record))

    def _merged(self, work: Work, items: dict[int, list[_Item]], timers: Timers | None, held: Held) -> None:
        """Call the function for the records of each key group and the timers that are due, by time."""
        state, ctx = work.state, work.ctx
        groups = sorted({*items, *(() if timers is None else timers.lanes)})
        self._fetch(state, items, timers)
        run = self._inner.loop(state)
        out: list[Any] = []
        sides: dict[str, list[Any]] = {tag: [] for tag in self._inner.node.tags if tag}
        ctx._outputs = sides
        for group in groups:
            state.group = group
            ctx._reseed(f"{group}in order")
            way = _Way(self._inner, items.get(group, []), timers, group, ctx, work.after)
            try:
                run(way.pulled("key"), way.pulled("item"), way, ctx, out.extend, way.pulled("at"))
            except Exception as error:
                raise user_error(error, self.node, way.item, self.redact, way.key) from None
            held.take(group, out, sides)
        if timers is not None:
            timers.until = MIN_TIME

    @staticmethod
    def _fetch(state: ShardState, items: dict[int, list[_Item]], timers: Timers | None) -> None:
        keys = {item.key: group for group, mine in items.items() for item in mine}
        if timers is not None:
            keys.update(timers.due())
        if keys:
            groups = np.fromiter(keys.values(), np.uint16, count=len(keys))
            order = np.argsort(groups, kind="stable")
            names = list(keys)
            state.prefetch([names[i] for i in order.tolist()], groups[order])


class _Way:
    """Through a key group: the next record, or the timer that is due before it. It is what the loop over records calls.

    The loop pulls keys, items and times, a round of pulls for each call, and keys more than once. Whoever pulls first in
    a round moves on; what the call before has set is known by then.
    """

    key: Any = None
    item: Any = None
    at: int = MIN_TIME

    def __init__(
        self,
        operator: ProcessOperator,
        items: list[_Item],
        timers: Timers | None,
        group: int,
        ctx: Context,
        after: int,
    ) -> None:
        self._takes, self._on_timer = operator.takes, operator.on_timer
        self._items, self._timers, self._group = items, timers, group
        self._ctx, self._after = ctx, after
        self._last = {item.key: item.at for item in items}
        """When each key has its last record."""
        self._place = self._rounds = 0
        self._function: Callable[..., Any] = self._takes[0]

    def __call__(self, key: Any, item: Any, ctx: Context) -> Any:
        return self._function(key, item, ctx)

    def pulled(self, name: str) -> _Pulled:
        """Something to loop over, as often as is asked for."""
        return _Pulled(self, name)

    def _each(self, name: str) -> Iterator[Any]:
        for number in itertools.count():
            if number == self._rounds:
                if not self._move_on():
                    return
                self._rounds += 1
            yield getattr(self, name)

    def _move_on(self) -> bool:
        item = self._items[self._place] if self._place < len(self._items) else None
        timer = self._timer_before(self._after + 1 if item is None else item.at)
        if timer is not None:
            self.key, self.item = timer
            self.at, self._function = self.item.at_us, self._on_timer
            # When the stream ends, who sets a timer anew has it while records of its key go on, and no longer.
            self._let(self._last.get(self.key, MIN_TIME))
            self._ctx._watermark = self.at
        elif item is not None:
            self._place += 1
            self.key, self.item, self.at = item.key, item.record, item.at
            self._function = self._takes[item.side]
            self._let(MAX_TIME)
            self._ctx._watermark = self.at - 1
        return timer is not None or item is not None

    def _timer_before(self, at: int) -> tuple[Any, Timer] | None:
        return None if self._timers is None else self._timers.take_of(self._group, at)

    def _let(self, until: int) -> None:
        if self._timers is not None:
            self._timers.until = until


class _Pulled:
    """One of the things that are pulled together, from the beginning each time it is asked for."""

    def __init__(self, way: _Way, name: str) -> None:
        self._way, self._name = way, name

    def __iter__(self) -> Iterator[Any]:
        return self._way._each(self._name)
