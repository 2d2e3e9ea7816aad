"""The first of each key, all keys at once: deduplicate and top."""

from __future__ import annotations

import itertools
from collections import deque
from itertools import compress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.data.rows import column_values
from holdfast.engine.batch import Batch
from holdfast.engine.joined import bounds_of, in_windows, zone_of
from holdfast.engine.kept import KeepingOperator, Mask, Rows, Shelf, Times, joined, shelf_spec
from holdfast.engine.keyed import Side, Work
from holdfast.engine.timed import table_times
from holdfast.errors import SchemaError
from holdfast.plan import graph as g
from holdfast.plan.bodies import DeduplicateBody, TopBody
from holdfast.plan.times import LATE
from holdfast.state.tables import TableSpec, ValueTable
from holdfast.time.units import MAX_TIME

_SEEN, _UNTIL = "seen", "until"
_BEST = "best"


class Deduplicate(KeepingOperator):
    """Remembers of each key until when it has been seen."""

    def __init__(self, node: g.Node, redact: bool) -> None:
        super().__init__(node, redact)
        self._body: DeduplicateBody = node.body
        self.timed = self._body.within_us is not None

    def specs(self, schema: pa.Schema | None) -> list[TableSpec] | None:
        due = _UNTIL if self.timed else None
        return [TableSpec(_SEEN, "value", pa.struct([pa.field(_UNTIL, pa.int64())]), tuples=True, due=due)]

    def apply(self, work: Work) -> None:
        table = work.state.tables[_SEEN]
        assert isinstance(table, ValueTable)
        due = table.due(work.after) if self.timed else []
        until: dict[Any, int] = {}
        if work.sides:
            until = self._pass(work, work.sides[0], table)
        keys = list(until) + [k for k in due if k not in until]
        if not keys:
            return
        ends = np.fromiter((until.get(k, 0) for k in keys), np.int64, count=len(keys))
        gone = ends <= work.after if self.timed else np.zeros(len(keys), bool)
        gone[len(until) :] = True
        table.stage(keys, [pa.array(ends)], gone)
        work.state.check_memory()

    def _pass(self, work: Work, side: Side, table: ValueTable) -> dict[Any, int]:
        """Push the records that are the first of their key; until when those keys are seen from now on."""
        keys = side.keys()
        firsts: dict[Any, int] = {}
        deque(map(firsts.setdefault, keys, itertools.count()), maxlen=0)
        distinct, places = list(firsts), np.fromiter(firsts.values(), np.int64, count=len(firsts))
        work.state.prefetch(distinct, side.groups[places], _SEEN)
        known, (ends,) = table.find(distinct)
        passes = np.zeros(len(keys), bool)
        made: dict[Any, int] = {}
        if self._body.within_us is None:
            passes[places[~known]] = True
            made = dict.fromkeys(compress(distinct, ~known), MAX_TIME)
        else:
            seen = dict(compress(zip(distinct, column_values(ends), strict=True), known))
            times = table_times_of(side, self.node)
            behind = times <= work.before
            if behind.any():
                self.push_late(work, side, behind, LATE)
            for place, (key, at, past) in enumerate(zip(keys, times.tolist(), behind.tolist(), strict=True)):
                if not past and (key not in seen or at > seen[key]):
                    seen[key] = made[key] = at + self._body.within_us
                    passes[place] = True
        self.push(work, side, passes)
        return made

    def push(self, work: Work, side: Side, passes: Mask) -> None:
        """Push some of the records as they are."""
        work.outputs[g.MAIN].push(Batch(table=self.shown(side, side.table.filter(pa.array(passes)))))


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
        behind, came = in_windows(body.assigner, came, work.before)
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
        """For each record a number that those of its key and window share, and its place among them, from 0."""
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
        ids = rows.ids({}, windows=True)
        table = {"id": ids}
        keys = [("id", "ascending")]
        for place, (name, up) in enumerate(zip(body.by, body.ascending, strict=True)):
            values = rows.columns[shelf.names.index(name)]
            table[f"by{place}"] = values.cast(pa.int64()) if pa.types.is_null(values.type) else values
            keys.append((f"by{place}", "ascending" if up else "descending"))
        table["n"] = rows.numbers if body.ties == "first" else -rows.numbers
        keys.append(("n", "ascending"))
        try:
            order = pc.sort_indices(pa.table(table), sort_keys=keys).to_numpy()
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            named = ", ".join(map(repr, body.by))
            raise self._misfit(
                f"{named} can't be ranked by: {error}", "Rank by numbers, times, strings or bytes."
            ) from None
        first = np.ones(len(order), bool)
        first[1:] = ids[order][1:] != ids[order][:-1]
        begins = np.flatnonzero(first)
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.arange(len(order)) - np.repeat(begins, np.diff(np.append(begins, len(order))))
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
