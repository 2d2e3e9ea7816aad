"""Joins of two keyed streams by event time, all keys at once.

    interval   pairs come out as soon as both are there; a record is kept until no partner can come any more
    as of      a record of the left comes out when the clock has passed it, with the newest of the right by then
    window     pairs come out when the clock has passed their window

Whatever order records come in, results are those of SQL over all records that were not late. A record is late if
the clock had passed it, or its last window, before the epoch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.data.rows import canonical, to_rows
from holdfast.engine.batch import Batch
from holdfast.engine.calls import user_error
from holdfast.engine.kept import KeepingOperator, Mask, Rows, Shelf, Times, joined, shelf_spec
from holdfast.engine.keyed import Operator, Work
from holdfast.engine.keys import numbering
from holdfast.engine.program import WantedError
from holdfast.errors import HoldfastError, SchemaError
from holdfast.plan import graph as g
from holdfast.plan.bodies import LEFT, OUTER, RIGHT, AsOfBody, IntervalBody, WindowJoinBody
from holdfast.plan.times import LATE, LATE_RIGHT, WINDOW_END, WINDOW_START
from holdfast.state.tables import TableSpec
from holdfast.time.units import MAX_TIME
from holdfast.time.windows import Sliding, Tumbling

SHELVES = ("left", "right")
SUFFIX = "_right"
"""What is added to the name of a right column that the left has too."""


def join_operator(node: g.Node, redact: bool) -> Operator:
    """The operator for a join."""
    kinds: dict[type, type[_Join]] = {IntervalBody: _Interval, AsOfBody: _AsOf, WindowJoinBody: _WindowJoin}
    return kinds[type(node.body)](node, redact)


def _unknown_columns(node: g.Node, side: int) -> WantedError:
    """Results have columns of a side of which this shard has seen no record, and nobody before this epoch."""
    return WantedError(
        f"Results without a partner come out, and the columns of the {SHELVES[side]} stream are not known yet.",
        node,
        [f"{node.uid}<{n}" for n, i in enumerate(node.inputs) if i.side == side],
        "Declare them: schema= on the operator that makes the stream.",
    )


class _Join(KeepingOperator):
    """What the three have in common: a shelf for each side, and how results are made of two records."""

    windows = False
    owned = (False, False)

    def __init__(self, node: g.Node, redact: bool) -> None:
        super().__init__(node, redact)
        self._known: list[str] = []
        self._zone: str | None = None

    def specs(self, schema: pa.Schema | None) -> list[TableSpec] | None:
        self._known = [] if schema is None else schema.names
        self._zone = zone_of(schema, getattr(self.node.body, "time_column", None))
        return [
            shelf_spec(name, schema, side, windows=self.windows, owned=self.owned[side])
            for side, name in enumerate(SHELVES)
        ]

    def emit(
        self,
        work: Work,
        shelves: list[Shelf],
        sides: list[Rows],
        places: list[Times],
        order: Times,
        more: dict[str, pa.Array] | None = None,
    ) -> None:
        """Push results in an order: the places of their records on each side, -1 for none, and columns to add."""
        if not len(order):
            return
        places = [p[order] for p in places]
        more = {n: c.take(pa.array(order)) for n, c in (more or {}).items()}
        tables = []
        for shelf, rows, at in zip(shelves, sides, places, strict=True):
            taken = pa.array(at, mask=at < 0)
            columns = [canonical(c.take(taken)) for c in rows.columns]
            tables.append(pa.Table.from_arrays(columns, names=shelf.names))
        if self.node.body.function is not None:
            self._push_made(work, tables, places, more)
            return
        missing = [n for n, _ in enumerate(SHELVES) if str(n) not in self._known]
        if missing:
            raise _unknown_columns(self.node, missing[0])
        left, right = tables
        names = self._names(left.schema.names, right.schema.names, list(more))
        arrays = [*left.columns, *right.columns, *more.values()]
        work.outputs[g.MAIN].push(Batch(table=pa.Table.from_arrays(arrays, names=names)))

    def _names(self, left: list[str], right: list[str], more: list[str]) -> list[str]:
        names = [*left, *(f"{n}{SUFFIX}" if n in left else n for n in right), *more]
        twice = next((n for n in names if names.count(n) > 1), None)
        if twice is not None:
            raise SchemaError(
                f"The result would have two columns {twice!r}.",
                uid=self.node.uid,
                where=self.node.where,
                remedy="Give it the records you want: select(uid, lambda left, right: {…}).",
            )
        return names

    def _push_made(
        self, work: Work, tables: list[pa.Table], places: list[Times], more: dict[str, pa.Array]
    ) -> None:
        """Results that the user's function makes of two records; None for nothing."""
        left, right = (
            [row if place >= 0 else None for row, place in zip(_dicts(t, len(at)), at.tolist(), strict=True)]
            for t, at in zip(tables, places, strict=True)
        )
        added = to_rows(pa.table(more)) if more else [{}] * len(left)
        out: list[Any] = []
        for one, other, row in zip(left, right, added, strict=True):
            try:
                made = self.node.body.function(one, other)
            except Exception as error:
                raise user_error(error, self.node, (one, other), self.redact) from None
            if made is not None:
                out.append(self._with_ours(made, row) if row and isinstance(made, dict) else made)
        try:
            work.outputs[g.MAIN].push(Batch(rows=out))
        except HoldfastError as error:
            raise error.at(self.node.uid, self.node.where) from None

    def _with_ours(self, made: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
        """A result with the bounds of its window, or its time, which must not take the place of what the function made."""
        taken = next((name for name in ours if name in made), None)
        if taken is not None:
            raise SchemaError(
                f"The function returns {taken!r}, which is added to each result.",
                uid=self.node.uid,
                where=self.node.where,
                remedy="Leave it out, or give it another name.",
            )
        return {**made, **ours}


def _dicts(table: pa.Table, count: int) -> list[Any]:
    return to_rows(table) if table.num_columns else [{}] * count


class _Interval(_Join):
    """Keeps a record until the clock has passed its last possible partner."""

    owned = (True, True)

    def apply(self, work: Work) -> None:
        body: IntervalBody = self.node.body
        shelves = [Shelf(work, name) for name in SHELVES]
        came = [self.on_time(work, s, n, t) for n, (s, t) in enumerate(zip(shelves, _LATE, strict=True))]
        kept = [
            shelf.rows(shelf.due(work.after), shelf.under(other.owners))
            for shelf, other in zip(shelves, reversed(came), strict=True)
        ]
        sides = [joined(k, c) for k, c in zip(kept, came, strict=True)]
        left, right = _close_pairs(sides, body.lower_us, body.upper_us)
        found = [rows.marked.copy() for rows in sides]
        found[0][left], found[1][right] = True, True
        alone = []
        reach = (body.upper_us, -body.lower_us)
        keeps = (body.how in (LEFT, OUTER), body.how in (RIGHT, OUTER))
        for shelf, rows, mine, until, lonely in zip(shelves, sides, found, reach, keeps, strict=True):
            dues = rows.times + until
            gone = dues <= work.after
            changed = np.where(rows.stored, gone | (lonely & (mine != rows.marked)), ~gone)
            rows.marked = mine
            at = np.flatnonzero(changed)
            shelf.stage(rows.take(at), dues[at], gone[at])
            alone.append(np.flatnonzero(gone & ~mine) if lonely else np.empty(0, np.int64))
        places = [
            np.concatenate([left, alone[0], np.full(len(alone[1]), -1)]),
            np.concatenate([right, np.full(len(alone[0]), -1), alone[1]]),
        ]
        kind = np.repeat([0, 1, 2], [len(left), len(alone[0]), len(alone[1])])
        group = np.where(places[0] >= 0, _at(sides[0].groups, places[0]), _at(sides[1].groups, places[1]))
        numbers = [_at(rows.numbers, at) for rows, at in zip(sides, places, strict=True)]
        order = np.lexsort((numbers[1], numbers[0], kind, group))
        more = {} if body.time is None else {body.time: self._times(sides, (left, right), alone, reach)}
        self.emit(work, shelves, sides, places, order, more)

    def _times(
        self, sides: list[Rows], pairs: tuple[Times, Times], alone: list[Times], reach: tuple[int, int]
    ) -> pa.Array:
        """The times of results, none of which the clock had passed before the epoch.

        Of a pair the later: it is that of the record which came now, or one beyond it. Of a record without a partner
        when it was given up, which the clock passes now.
        """
        found = [np.maximum(sides[0].times[pairs[0]], sides[1].times[pairs[1]])]
        for rows, at, until in zip(sides, alone, reach, strict=True):
            found.append(rows.times[at] + max(until, 0))
        return pa.array(np.concatenate(found)).cast(pa.timestamp("us", self._zone))


_LATE = (LATE, LATE_RIGHT)


def _at(values: Times, places: Times) -> Times:
    """Values at places, 0 for none."""
    return np.where(places >= 0, values[places], 0) if len(values) else np.zeros(len(places), np.int64)


def _close_pairs(sides: list[Rows], lower: int, upper: int) -> tuple[Times, Times]:
    """Places of the pairs of one key whose times are close, unless both records were there before."""
    left, right = sides
    known = numbering()
    ids = [rows.ids(known) for rows in sides]
    new, old = np.flatnonzero(~left.stored), np.flatnonzero(left.stored)
    fresh = np.flatnonzero(~right.stored)
    lows, highs = left.times + lower, left.times + upper
    first = pairs_within(ids[0][new], lows[new], highs[new], ids[1], right.times)
    second = pairs_within(ids[0][old], lows[old], highs[old], ids[1][fresh], right.times[fresh])
    return (
        np.concatenate([new[first[0]], old[second[0]]]),
        np.concatenate([first[1], fresh[second[1]]]),
    )


def pairs_within(ids: Times, lows: Times, highs: Times, others: Times, times: Times) -> tuple[Times, Times]:
    """All pairs of a span and a time with the same id, where the time is in the span, both ends included.

    >>> import numpy as np
    >>> one = np.array([7])
    >>> [p.tolist() for p in pairs_within(one, one - 2, one + 2, np.array([7, 8, 7]), np.array([9, 7, 10]))]
    [[0], [0]]
    """
    values = np.unique(times)
    width = len(values) + 1  # ranks instead of times: a number for id and time together stays small
    marks = others * width + np.searchsorted(values, times)
    order = np.argsort(marks, kind="stable")
    marks = marks[order]
    start = np.searchsorted(marks, ids * width + np.searchsorted(values, lows, "left"))
    stop = np.searchsorted(marks, ids * width + np.searchsorted(values, highs, "right"))
    count = np.maximum(stop - start, 0)
    mine = np.repeat(np.arange(len(ids)), count)
    step = np.arange(len(mine)) - np.repeat(np.cumsum(count) - count, count)
    return mine, order[np.repeat(start, count) + step]


class _AsOf(_Join):
    """Keeps a left record until the clock has passed it; of the right, what is newer than the clock, and the newest before."""

    owned = (False, True)

    def apply(self, work: Work) -> None:
        shelves = [Shelf(work, name) for name in SHELVES]
        orders, versions = shelves
        # What is out is out; for the records still to come a version counts, however late it was.
        came = [
            self.on_time(work, s, n, t, all_count=n == 1)
            for n, (s, t) in enumerate(zip(shelves, _LATE, strict=True))
        ]
        left = joined(orders.rows(orders.due(work.after)), came[0])
        ready = left.times <= work.after
        changed = np.flatnonzero(left.stored | ~ready)
        orders.stage(left.take(changed), left.times[changed], ready[changed])
        due = versions.due(work.after)
        passed = came[1].times <= work.after
        touched = [k[: len(work.state.key_types)] for k in due]
        touched += left.where(ready).owners + came[1].where(passed).owners
        right = joined(versions.rows(due, versions.under(touched)), came[1])
        self._keep_newest(work, versions, right)
        self._emit_ready(work, shelves, left.where(ready), right)

    def _keep_newest(self, work: Work, versions: Shelf, right: Rows) -> None:
        """Keep what is newer than the clock, and of each key the newest that is not, as long as it may be."""
        keep_us = self.node.body.keep_us
        ids = right.ids(numbering())
        past = np.flatnonzero(right.times <= work.after)
        order = past[np.lexsort((right.numbers[past], right.times[past], ids[past]))]
        last = np.ones(len(order), bool)
        last[:-1] = ids[order][1:] != ids[order][:-1]
        current = np.zeros(len(right), bool)
        current[order[last]] = True
        ahead = right.times > work.after
        until = np.full(len(right), MAX_TIME) if keep_us is None else right.times + keep_us
        dues = np.where(ahead, right.times, until)
        lives = ahead | (current & (until > work.after))
        # The mark says that it is the newest by the clock already, and waits for the end of its time.
        settled = right.stored & (right.marked == current)
        changed = np.flatnonzero(np.where(right.stored, ~lives | ~settled, lives))
        right.marked = current
        versions.stage(right.take(changed), dues[changed], ~lives[changed])

    def _emit_ready(self, work: Work, shelves: list[Shelf], left: Rows, right: Rows) -> None:
        body: AsOfBody = self.node.body
        known = numbering()
        ids, others = left.ids(known), right.ids(known)
        found = newest_before(ids, left.times, others, right.times, right.numbers)
        if body.keep_us is not None and len(right):
            found = np.where(left.times - _at(right.times, found) <= body.keep_us, found, -1)
        at = np.arange(len(left)) if body.how == LEFT else np.flatnonzero(found >= 0)
        order = np.lexsort((left.numbers[at], left.times[at], left.groups[at]))
        self.emit(work, shelves, [left, right], [at, found[at]], order)


def newest_before(ids: Times, times: Times, others: Times, since: Times, numbers: Times) -> Times:
    """For each id and time the place of the newest of the others with that id, not after it; -1 for none.

    Of several with one time, the one with the greatest number.

    >>> import numpy as np
    >>> newest_before(*map(np.array, ([1, 1, 2], [5, 9, 9], [1, 1], [5, 7], [0, 1]))).tolist()
    [0, 1, -1]
    """
    if not len(others):
        return np.full(len(ids), -1)
    order = np.lexsort((numbers, since, others))
    values = np.unique(since)
    width = len(values) + 1
    marks = (others * width + np.searchsorted(values, since))[order]
    place = np.searchsorted(marks, ids * width + np.searchsorted(values, times, "right")) - 1
    found = order[np.maximum(place, 0)]
    return np.where((place >= 0) & (others[found] == ids), found, -1)


class _WindowJoin(_Join):
    """Keeps a record for each window it is in, until the clock has passed that."""

    windows = True

    def apply(self, work: Work) -> None:
        body: WindowJoinBody = self.node.body
        shelves = [Shelf(work, name) for name in SHELVES]
        sides = []
        for number, (shelf, tag) in enumerate(zip(shelves, _LATE, strict=True)):
            side = next((s for s in work.sides if s.number == number), None)
            rows = shelf.came(side, self.node)
            behind, rows = in_windows(body.assigner, rows, work)
            if side is not None and behind.any():
                self.push_late(work, side, behind, tag)
            rows = joined(shelf.rows(shelf.due(work.after)), rows)
            dues = body.assigner.ends(rows.windows) - 1
            ready = dues <= work.after
            changed = np.flatnonzero(rows.stored | ~ready)
            shelf.stage(rows.take(changed), dues[changed], ready[changed])
            sides.append(rows.where(ready))
        known = numbering()
        ids = [rows.ids(known, windows=True) for rows in sides]
        zeros = [np.zeros(len(i), np.int64) for i in ids]
        left, right = pairs_within(ids[0], zeros[0], zeros[0], ids[1], zeros[1])
        one, other = sides
        starts = one.windows[left]
        ends = body.assigner.ends(starts)
        order = np.lexsort((other.numbers[right], one.numbers[left], ends, one.groups[left]))
        self.emit(work, shelves, sides, [left, right], order, bounds_of(starts, ends, self._zone))


def zone_of(schema: pa.Schema | None, column: str | None) -> str | None:
    """The zone of the first side's times."""
    if schema is None or column is None or "0" not in schema.names:
        return None
    place = schema.field("0").type.get_field_index(column)
    kind = schema.field("0").type.field(place).type if place >= 0 else None
    return kind.tz if kind is not None and pa.types.is_timestamp(kind) else None


def bounds_of(starts: Times, ends: Times, zone: str | None) -> dict[str, pa.Array]:
    """The columns in which results carry the bounds of their window."""
    bounds = {WINDOW_START: starts, WINDOW_END: ends}
    return {name: pa.array(t).cast(pa.timestamp("us", zone)) for name, t in bounds.items()}


def in_windows(assigner: Tumbling | Sliding, rows: Rows, work: Work) -> tuple[Mask, Rows]:
    """Which records are late for all their windows, and each record in each window that the clock had not passed.

    Records that are in no window are counted.
    """
    at, starts = windows_of(assigner, rows.times)
    work.unseen_records += len(rows) - len(np.unique(at))
    if not len(at):
        return np.zeros(len(rows), bool), rows.take(at)
    open_still = assigner.ends(starts) - 1 > work.before
    inside, kept = np.zeros(len(rows), bool), np.zeros(len(rows), bool)
    inside[at], kept[at[open_still]] = True, True
    made = rows.take(at[open_still])
    made.windows = starts[open_still]
    return inside & ~kept, made


def windows_of(assigner: Tumbling | Sliding, times: Times) -> tuple[Times, Times]:
    """The place of a time and the start of a window that it is in, for all such pairs."""
    if isinstance(assigner, Tumbling):
        return np.arange(len(times)), assigner.starts(times)
    panes, which = np.unique(assigner.pane_starts(times), return_inverse=True)
    windows = [assigner.windows_of_pane(int(p)) for p in panes]
    count = np.array([len(w) for w in windows], np.int64)[which] if len(times) else np.empty(0, np.int64)
    at = np.repeat(np.arange(len(times)), count)
    starts = np.array([s for w in which.tolist() for s in windows[w]], np.int64)
    return at, starts
