"""The first of each key, all keys at once: deduplicate and top."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import deque
from itertools import compress
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.data.rows import column_values, one_array
from holdfast.engine.batch import Batch
from holdfast.engine.joined import bounds_of, in_windows, zone_of
from holdfast.engine.kept import KeepingOperator, Mask, Rows, Shelf, Times, joined, shelf_spec
from holdfast.engine.keyed import Side, Work
from holdfast.engine.keys import key_ids, key_names, numbering
from holdfast.engine.thinning import UNRANKABLE, firsts, places
from holdfast.engine.timed import table_times
from holdfast.errors import SchemaError
from holdfast.plan import graph as g
from holdfast.plan.bodies import DeduplicateBody, TopBody
from holdfast.plan.times import LATE
from holdfast.state.index import KeyColumns
from holdfast.state.tables import TableSpec, ValueTable
from holdfast.time.units import MAX_TIME

_SEEN, _EARLIER, _UNTIL, _TIMES = "seen", "earlier", "until", "times"
_BEST = "best"


class Deduplicate(KeepingOperator):
    """Remembers of each key until when it has been seen; within a time, also other times of records that passed.

    A record passes if all of its key that passed are further than `within` from it, earlier ones and later ones. One that
    passed is remembered until the clock is that far behind it: what comes after that is further, or late. Of a key there
    is mostly one, the latest; others are in a table of their own.
    """

    def __init__(self, node: g.Node, redact: bool) -> None:
        super().__init__(node, redact)
        self._body: DeduplicateBody = node.body
        self.timed = self._body.within_us is not None

    def specs(self, schema: pa.Schema | None) -> list[TableSpec] | None:
        until = pa.field(_UNTIL, pa.int64())
        if not self.timed:
            return [TableSpec(_SEEN, "value", pa.struct([until]), tuples=True, indexed=True)]
        times = pa.field(_TIMES, pa.list_(pa.int64()))
        return [
            TableSpec(_SEEN, "value", pa.struct([until]), tuples=True, due=_UNTIL),
            TableSpec(_EARLIER, "value", pa.struct([until, times]), tuples=True, due=_UNTIL),
        ]

    def apply(self, work: Work) -> None:
        if self._body.within_us is None:
            self._once(work)
        else:
            self._within(work, self._body.within_us)
        work.state.check_memory()

    def _once(self, work: Work) -> None:
        """Without a time: the first record of each key."""
        (side,) = work.sides
        table, names = _table(work, _SEEN), key_names(side.key, side.table.schema)
        passes = firsts(key_ids(side.table, names))
        keys = KeyColumns([one_array(side.table[n]) for n in names]).where(passes)
        work.state.prefetch_columns(keys, _SEEN)
        known, _ = table.find_columns(keys)
        passes[passes] = ~known
        new = keys.where(~known)
        if len(new):
            table.stage_columns(new, [pa.array(np.full(len(new), MAX_TIME))])
        self.push(work, side, passes)

    def _within(self, work: Work, within_us: int) -> None:
        """Push the records that are far enough from those that passed, and remember their times."""
        tables = [_table(work, name) for name in (_SEEN, _EARLIER)]
        due = [table.due(work.after) for table in tables]
        passed, stored = self._pass(work, work.sides[0], within_us) if work.sides else ({}, set())
        left = {k: [at for at in times if at + within_us > work.after] for k, times in passed.items()}
        earlier = {k: times[:-1] for k, times in left.items() if times[:-1] or k in stored}
        for table, mine, over in zip(tables, (left, earlier), due, strict=True):
            gone: dict[Any, list[int]] = {k: [] for k in over if k not in passed}
            self._stage(table, {**mine, **gone}, within_us)

    def _stage(self, table: ValueTable, times: dict[Any, list[int]], within_us: int) -> None:
        """Keep times, in their order, until the last of them is over; those of which none is left are forgotten."""
        if not times:
            return
        columns = [pa.array([t[-1] + within_us if t else 0 for t in times.values()], pa.int64())]
        if table.spec.name == _EARLIER:
            columns.append(pa.array(list(times.values()), pa.list_(pa.int64())))
        table.stage(list(times), columns, np.array([not t for t in times.values()], bool))

    def _find(
        self, work: Work, side: Side, table: ValueTable, firsts: dict[Any, int]
    ) -> tuple[Mask, list[pa.Array]]:
        """What is kept of keys, each with the place of a record of it."""
        places = np.fromiter(firsts.values(), np.int64, count=len(firsts))
        work.state.prefetch(list(firsts), side.groups[places], table.spec.name)
        return table.find(list(firsts))

    def _pass(self, work: Work, side: Side, within_us: int) -> tuple[dict[Any, list[int]], set[Any]]:
        """Push the records that pass.

        Of keys for which one did: the times of all that have passed, in order; and the keys of which there are earlier ones.
        """
        keys, times = side.keys(), table_times_of(side, self.node)
        behind = times <= work.before
        if behind.any():
            self.push_late(work, side, behind, LATE)
        seen, stored = self._seen(work, side, keys, times, within_us)
        passes = np.zeros(len(keys), bool)
        touched: dict[Any, list[int]] = {}
        for place, (key, at, past) in enumerate(zip(keys, times.tolist(), behind.tolist(), strict=True)):
            if past:
                continue
            mine = seen.setdefault(key, [])
            next_ = bisect_right(mine, at)
            if all(abs(at - other) > within_us for other in mine[max(0, next_ - 1) : next_ + 1]):
                mine.insert(next_, at)
                passes[place], touched[key] = True, mine
        self.push(work, side, passes)
        return touched, stored

    def _seen(
        self, work: Work, side: Side, keys: list[Any], times: Times, within_us: int
    ) -> tuple[dict[Any, list[int]], set[Any]]:
        """The times at which keys have passed, the earlier ones only where a record is far from the latest; who has those."""
        firsts = _firsts(keys)
        known, (ends,) = self._find(work, side, _table(work, _SEEN), firsts)
        latest = {
            k: end - within_us for k, end in compress(zip(firsts, column_values(ends), strict=True), known)
        }
        far = {
            k for k, at in zip(keys, times.tolist(), strict=True) if abs(at - latest.get(k, at)) > within_us
        }
        earlier: dict[Any, list[int]] = {}
        if far:
            wanted = {k: place for k, place in firsts.items() if k in far}
            there, (_, others) = self._find(work, side, _table(work, _EARLIER), wanted)
            earlier = dict(compress(zip(wanted, column_values(others), strict=True), there))
        return {k: [*earlier.get(k, ()), at] for k, at in latest.items()}, set(earlier)

    def push(self, work: Work, side: Side, passes: Mask) -> None:
        """Push some of the records as they are."""
        work.outputs[g.MAIN].push(Batch(table=self.shown(side, side.table.filter(pa.array(passes)))))


def _table(work: Work, name: str) -> ValueTable:
    table = work.state.tables[name]
    assert isinstance(table, ValueTable)
    return table


def _firsts(keys: list[Any]) -> dict[Any, int]:
    """Each key, and the place where it comes first."""
    firsts: dict[Any, int] = {}
    deque(map(firsts.setdefault, keys, itertools.count()), maxlen=0)
    return firsts


def table_times_of(side: Side, node: g.Node) -> Times:
    assert side.stamp is not None
    return table_times(side.table, side.stamp, node)


class Top(KeepingOperator):
    """Keeps the best records of each key, or of each key and window, and no others."""

    def __init__(self, node: g.Node, redact: bool) -> None:
        super().__init__(node, redact)
        self._body: TopBody = node.body
        self._zone: str | None = None
        self.timed = self._body.assigner is not None

    def specs(self, schema: pa.Schema | None) -> list[TableSpec] | None:
        self._zone = zone_of(schema, self._body.time_column)
        return [shelf_spec(_BEST, schema, 0, windows=self.timed, owned=True)]

    def apply(self, work: Work) -> None:
        body, shelf = self._body, Shelf(work, _BEST)
        side = work.sides[0] if work.sides else None
        came = shelf.came(side, self.node, timed=self.timed)
        if body.assigner is None:
            self._update(work, shelf, joined(shelf.rows(shelf.under(came.owners)), came))
            return
        behind, came = in_windows(body.assigner, came, work)
        if side is not None and behind.any():
            self.push_late(work, side, behind, LATE)
        owners = [(*o, w) for o, w in zip(came.owners, came.windows.tolist(), strict=True)]
        rows = joined(shelf.rows(shelf.due(work.after), shelf.under(owners)), came)
        ids, ranks = self._ranked(shelf, rows)
        best = ranks < body.n
        ends = body.assigner.ends(rows.windows)
        ready = ends - 1 <= work.after
        changed = np.flatnonzero(np.where(rows.stored, ~best | ready, best & ~ready))
        shelf.stage(rows.take(changed), ends[changed] - 1, rows.stored[changed])
        at = np.flatnonzero(best & ready)
        at = at[np.lexsort((ranks[at], ids[at], ends[at], rows.groups[at]))]
        self._emit(work, shelf, rows.take(at), ranks[at], bounds_of(rows.windows[at], ends[at], self._zone))

    def _update(self, work: Work, shelf: Shelf, rows: Rows) -> None:
        """Without windows: the best of each key for which they have changed."""
        ids, ranks = self._ranked(shelf, rows)
        best = ranks < self._body.n
        changed = np.flatnonzero(rows.stored != best)
        shelf.stage(rows.take(changed), np.full(len(changed), MAX_TIME), rows.stored[changed])
        at = np.flatnonzero(best & np.isin(ids, ids[best & ~rows.stored]))
        at = at[np.lexsort((ranks[at], ids[at], rows.groups[at]))]
        self._emit(work, shelf, rows.take(at), ranks[at], {})

    def _ranked(self, shelf: Shelf, rows: Rows) -> tuple[Times, Times]:
        """For each record a number that those of its key and window share, and its place among them, from 0.

        Beyond the places that count it is any that does not.
        """
        body = self._body
        if not len(rows):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        missing = next((name for name in body.by if name not in shelf.names), None)
        if missing is not None:
            raise self._misfit(
                f"There is no column {missing!r} to rank by; there are {shelf.names}.",
                "Name a column that the stream has.",
            )
        if body.rank in shelf.names:
            raise self._misfit(
                f"The records have a column {body.rank!r} already.",
                'Name another for the rank: rank="place".',
            )
        ids = rows.ids(numbering(), windows=body.assigner is not None)
        columns = [rows.columns[shelf.names.index(name)] for name in body.by]
        arrival = rows.numbers if body.ties == "first" else -rows.numbers
        try:
            ranks = places(ids, columns, body.ascending, arrival, body.n)
        except UNRANKABLE as error:
            named = ", ".join(map(repr, body.by))
            raise self._misfit(
                f"{named} can't be ranked by: {error}", "Rank by numbers, times, strings or bytes."
            ) from None
        return ids, ranks

    def _misfit(self, message: str, remedy: str) -> SchemaError:
        return SchemaError(message, uid=self.node.uid, where=self.node.where, remedy=remedy)

    def _emit(self, work: Work, shelf: Shelf, rows: Rows, ranks: Times, more: dict[str, pa.Array]) -> None:
        table = shelf.table(rows)
        # Records that are results of a window have its bounds: those of this one take their place.
        table = table.drop_columns([name for name in more if name in table.schema.names])
        table = table.append_column(self._body.rank, pa.array(ranks + 1))
        for name, column in more.items():
            table = table.append_column(name, column)
        work.outputs[g.MAIN].push(Batch(table=table))
