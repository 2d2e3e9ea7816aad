"""Aggregates in windows, all keys at once: what a shard keeps of them, and emits at the watermark.

    partial results of ranges (`window_combiners`) ── exchange ──> joined with the state
    the event clock passes a window's end ──> its result; passes it by the allowed lateness ──> forgotten

Three kinds keep their state differently, each in one table ordered by when an entry is due:

    tumbling   an entry for each key and window
    sliding    an entry for each key and pane, the widest piece that no window cuts; windows are added up when they end
    session    an entry for each key and slot (`sessions`)

A record is late if its window was past when the epoch began. Those of one epoch never make each other late.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.data.rows import canonical, one_array
from holdfast.engine.aggregate import Parts, key_columns_of
from holdfast.engine.batch import Batch
from holdfast.engine.keyed import Operator, Work
from holdfast.engine.keys import keys_in, public_names
from holdfast.engine.window_combiners import (
    PANE,
    Mask,
    Times,
    integers,
    last_of_panes,
    timestamps,
)
from holdfast.plan import graph as g
from holdfast.plan.times import LATE, WINDOW_END, WINDOW_START, WindowBody
from holdfast.state.tables import TableSpec, ValueTable
from holdfast.time.windows import Session, Sliding, Tumbling, late

STATE = "windows"
DUE = "window.due"
_ADDED_UP = 1_000_000
"""So many entries of panes are added up to windows at once: a record is in as many windows as there are panes."""


def window_operator(node: g.Node, redact: bool) -> Operator:
    """The operator for a window: in batches where that can be, record by record otherwise."""
    if not node.body.in_batches:
        from holdfast.engine.window_process import WindowProcess

        return WindowProcess(node, redact)
    from holdfast.engine.sessions import Sessions

    kinds: dict[type, type[Windows]] = {
        Tumbling: _TumblingWindows,
        Sliding: _SlidingWindows,
        Session: Sessions,
    }
    return kinds[type(node.body.assigner)](node, redact)


class Windows(Operator):
    """What the three kinds have in common."""

    timed = True
    bounds: Sequence[str] = (PANE,)
    fields: Sequence[tuple[str, pa.DataType]] = ((DUE, pa.int64()),)

    def __init__(self, node: g.Node, redact: bool) -> None:
        super().__init__(node, redact)
        self._body: WindowBody = node.body
        self._parts = Parts(node, self._body.columns)
        self._zone: str | None = None
        self._key_types: list[pa.DataType] = []

    def specs(self, schema: pa.Schema | None) -> list[TableSpec] | None:
        if schema is None or self.bounds[0] not in schema.names:
            return None
        self._zone = schema.field(self.bounds[0]).type.tz
        fields = [pa.field(name, kind) for name, kind in self.fields]
        fields += [pa.field(n, schema.field(n).type) for n in self._parts.names]
        return [TableSpec(STATE, "value", pa.struct(fields), tuples=True, extra=(pa.int64(),), due=DUE)]

    def _kept(self, work: Work) -> ValueTable:
        table = work.state.tables[STATE]
        assert isinstance(table, ValueTable)
        return table

    def _came(self, work: Work) -> tuple[pa.Table | None, list[str]]:
        """What came, one row for each key and window, and the names of the key's columns."""
        if work.table is None:
            return None, []
        names = key_columns_of(work.key, work.table.schema)
        return self._parts.merged(work.table, [*names, *self.bounds], self.redact), names

    def _find(self, work: Work, keys: list[Any]) -> tuple[Mask, list[pa.Array]]:
        kept = self._kept(work)
        work.state.prefetch(keys, work.state.groups(keys, kept.spec), STATE)
        return kept.find(keys)

    def _values(self, table: pa.Table, spec: TableSpec) -> list[pa.Array]:
        """The partial results of rows, as the state keeps them."""
        first = len(self.fields)
        kinds = [spec.value_type.field(first + i).type for i in range(len(self._parts.names))]
        return [one_array(table[n]).cast(t) for n, t in zip(self._parts.names, kinds, strict=True)]

    def _due_after(self, last: Times, after: int) -> Times:
        """When a window is due next: at its end, or if that is past, when it is forgotten."""
        return np.where(last > after, last, last + self._body.lateness_us)

    def _emit(
        self, work: Work, keys: list[Any], starts: Times, ends: Times, parts: list[pa.Array], groups: Any
    ) -> None:
        """Push results: by key group and end, so that their order does not depend on the number of shards."""
        if not keys:
            return
        order = np.lexsort((ends, groups))
        keys = [keys[i] for i in order.tolist()]
        taken = pa.array(order)
        count = len(work.state.key_types)
        columns: dict[str, Any] = {}
        for place, (name, kind) in enumerate(
            zip(public_names(work.key, count), work.state.key_types, strict=True)
        ):
            columns[name] = pa.array([k[place] for k in keys], kind)
        columns[WINDOW_START] = timestamps(starts[order], self._zone)
        columns[WINDOW_END] = timestamps(ends[order], self._zone)
        made = self._parts.results([p.take(taken) for p in parts], self.redact)
        columns.update((name, canonical(c)) for name, c in made)
        work.outputs[g.MAIN].push(Batch(table=pa.table(columns)))

    def _push_late(self, work: Work, table: pa.Table) -> None:
        hidden = [n for n in (*self.bounds, *_hidden_keys(work.key, table.schema)) if n in table.schema.names]
        work.late_records += table.num_rows
        work.outputs[LATE].push(Batch(table=table.drop_columns(hidden) if hidden else table))


def _hidden_keys(key: g.Key, schema: pa.Schema) -> list[str]:
    return [] if key.function is None else key_columns_of(key, schema)


def _extended(keys: list[Any], extra: Sequence[int]) -> list[Any]:
    """Keys with another part behind them."""
    if keys and isinstance(keys[0], tuple):
        return [(*k, e) for k, e in zip(keys, extra, strict=True)]
    return list(zip(keys, extra, strict=True))


def _joined_parts(
    parts: Parts, known: Mask, old: list[pa.Array], new: list[pa.Array], redact: bool
) -> list[pa.Array]:
    joined = parts.joined(pa.array(known), old, new, redact) if known.any() else new
    return [canonical(c) for c in joined]


class _PaneWindows(Windows):
    """Windows whose entries are keyed by the start of a window or pane."""

    def _update(
        self, work: Work, due: list[Any]
    ) -> tuple[list[Any], int, Times, list[pa.Array], Times, Mask]:
        """Entries that came or are due: keys (those that came first), how many came, panes, values, old due times, known."""
        table, names = self._came(work)
        if work.behind is not None:
            self._push_late(work, work.behind)
        kept = self._kept(work)
        came: list[Any] = []
        if table is not None:
            came = _extended(keys_in(table, names), integers(table[PANE]).tolist())
        there = set(came)
        keys = came + [k for k in due if k not in there]
        known, old = self._find(work, keys)
        values = old[1:]
        if table is not None:
            count = len(came)
            new = self._values(table, kept.spec)
            mine = _joined_parts(self._parts, known[:count], [v[:count] for v in values], new, self.redact)
            values = [pa.concat_arrays([m, v[count:]]) for m, v in zip(mine, values, strict=True)]
        panes = np.fromiter((k[-1] for k in keys), np.int64, count=len(keys))
        dues = old[0].fill_null(0).to_numpy(zero_copy_only=False) if keys else np.empty(0, np.int64)
        return keys, len(came), panes, values, dues, known


class _TumblingWindows(_PaneWindows):
    """One entry for each key and window."""

    def apply(self, work: Work) -> None:
        kept = self._kept(work)
        assigner = self._body.assigner
        assert isinstance(assigner, Tumbling)
        keys, count, starts, values, dues, known = self._update(work, kept.due(work.after))
        if not keys:
            return
        ends = assigner.ends(starts)
        last = ends - 1
        touched = np.arange(len(keys)) < count
        # Zone data may have moved the end of a window since: one that is forgotten as it fires has not fired yet.
        unfired = dues == last if self._body.lateness_us else np.ones(len(last), bool)
        fires = (last <= work.after) & (touched | (known & unfired))
        gone = late(last, work.after, self._body.lateness_us)
        kept.stage(keys, [pa.array(self._due_after(last, work.after)), *values], gone)
        work.state.check_memory()
        at = np.flatnonzero(fires)
        chosen = [keys[i] for i in at.tolist()]
        groups = work.state.groups(chosen, kept.spec)
        self._emit(work, chosen, starts[at], ends[at], [v.take(pa.array(at)) for v in values], groups)


class _SlidingWindows(_PaneWindows):
    """One entry for each key and pane; it is due when its last window is forgotten."""

    def apply(self, work: Work) -> None:
        kept = self._kept(work)
        assigner = self._body.assigner
        assert isinstance(assigner, Sliding)
        keys, count, panes, values, _, _ = self._update(work, self._wanted(work, kept, assigner))
        if not keys:
            return
        last, _ = last_of_panes(assigner, panes)
        due = last + self._body.lateness_us
        touched = np.arange(len(keys)) < count
        gone = due <= work.after
        changed = np.flatnonzero(touched | gone)
        chosen = keys if len(changed) == len(keys) else [keys[i] for i in changed.tolist()]
        taken = pa.array(changed)
        kept.stage(chosen, [pa.array(due[changed]), *(v.take(taken) for v in values)], gone[changed])
        work.state.check_memory()
        self._fire(work, assigner, keys, panes, touched, values)

    def next_due(self, work: Work) -> int | None:
        """When the next window ends, as long as there are panes."""
        assigner = self._body.assigner
        assert isinstance(assigner, Sliding)
        forgotten = super().next_due(work)
        return None if forgotten is None else min(forgotten, assigner.next_complete(work.after))

    def _wanted(self, work: Work, kept: ValueTable, assigner: Sliding) -> list[Any]:
        """Panes that are forgotten now, and those of windows that have a result now.

        Panes whose windows all had theirs are only kept for late records, and there may be many: where one came, those of
        its key are read that are in a window with it, and no others.
        """
        lateness_us = self._body.lateness_us
        furthest = work.after + assigner.reach_us + lateness_us
        beside = self._overdue(work, assigner)
        if beside and assigner.zoned:
            return kept.due(furthest)
        found = kept.due(work.after)
        if assigner.complete_by(work.after) != assigner.complete_by(work.before):
            moved_us = (
                assigner.reach_us - assigner.size_us
            )  # by so much zone data may have moved an end since
            low = max(work.after, work.before + lateness_us - moved_us)
            found += kept.between(low + 1, furthest + 1)
        if not beside:
            return found
        assert work.table is not None
        names = key_columns_of(work.key, work.table.schema)
        came = zip(keys_in(work.table, names), integers(work.table[PANE]).tolist(), strict=True)
        near = dict.fromkeys((key, pane) for key, late_one in came for pane in beside.get(late_one, ()))
        asked = _extended([key for key, _ in near], [pane for _, pane in near])
        known, _ = self._find(work, asked)
        return list(dict.fromkeys([*found, *compress(asked, known)]))

    def _overdue(self, work: Work, assigner: Sliding) -> dict[int, list[int]]:
        """For each pane of a record that came for a window which has had its result: the panes of such windows."""
        if work.table is None or not self._body.lateness_us:
            return {}
        found: dict[int, list[int]] = {}
        for pane in np.unique(integers(work.table[PANE])).tolist():
            starts = np.array(assigner.windows_of_pane(pane), np.int64)
            last = assigner.ends(starts) - 1
            had = (last <= work.before) & ~late(last, work.before, self._body.lateness_us)
            if had.any():
                found[pane] = sorted({p for start in starts[had].tolist() for p in assigner.panes_of(start)})
        return found

    def _fire(
        self,
        work: Work,
        assigner: Sliding,
        keys: list[Any],
        panes: Times,
        touched: Mask,
        values: list[pa.Array],
    ) -> None:
        """Add up the panes of windows that end in this epoch, and of those that late records have changed."""
        kept = self._kept(work)
        starts_of = {int(p): assigner.windows_of_pane(int(p)) for p in np.unique(panes)}
        starts = np.array(sorted({s for found in starts_of.values() for s in found}), np.int64)
        last = assigner.ends(starts) - 1
        ended = set(starts[(last > work.before) & (last <= work.after)].tolist())
        open_still = ~late(last, work.before, self._body.lateness_us)
        overdue = set(starts[(last <= work.before) & open_still].tolist())
        late_keys = self._late_windows(keys, panes, touched, starts_of, overdue)
        order = np.argsort(panes, kind="stable")
        ordered = panes[order]
        of_window: dict[int, list[Times]] = {}
        for pane, found in starts_of.items():
            low, high = np.searchsorted(ordered, pane), np.searchsorted(ordered, pane, side="right")
            for start in found:
                if start in ended:
                    of_window.setdefault(start, []).append(order[low:high])
                elif start in overdue:
                    hit = [i for i in order[low:high].tolist() if (keys[i][:-1], start) in late_keys]
                    of_window.setdefault(start, []).append(np.array(hit, np.int64))
        whose: dict[Any, int] = {}
        ids = np.fromiter((whose.setdefault(k[:-1], len(whose)) for k in keys), np.int64, count=len(keys))
        sums: list[pa.Table] = []
        batch: list[tuple[int, Times]] = []
        rows = 0
        for start in sorted(of_window):
            batch += [(start, mine) for mine in of_window[start]]
            rows += sum(map(len, of_window.pop(start)))
            if rows and (not of_window or rows >= _ADDED_UP):
                sums.append(self._summed(ids, batch, values))
                batch, rows = [], 0
        if sums:
            self._emit_sums(work, kept.spec, assigner, list(whose), pa.concat_tables(sums))

    def _late_windows(
        self,
        keys: list[Any],
        panes: Times,
        touched: Mask,
        starts_of: dict[int, list[int]],
        overdue: set[int],
    ) -> set[tuple[Any, int]]:
        """The windows, by key, that have had their result and have changed since."""
        if not overdue:
            return set()
        return {
            (keys[i][:-1], start)
            for i in np.flatnonzero(touched).tolist()
            for start in starts_of[int(panes[i])]
            if start in overdue
        }

    def _summed(self, ids: Times, batch: list[tuple[int, Times]], values: list[pa.Array]) -> pa.Table:
        """Windows of keys as the sums of their panes."""
        rows = np.concatenate([mine for _, mine in batch])
        windows = np.repeat([start for start, _ in batch], [len(mine) for _, mine in batch])
        taken = pa.array(rows)
        columns = {n: v.take(taken) for n, v in zip(self._parts.names, values, strict=True)}
        return self._parts.merged(
            pa.table({"__id": ids[rows], PANE: windows, **columns}), ["__id", PANE], self.redact
        )

    def _emit_sums(
        self, work: Work, spec: TableSpec, assigner: Sliding, names: list[Any], merged: pa.Table
    ) -> None:
        starts = integers(merged[PANE])
        owners = [names[i] for i in integers(merged["__id"]).tolist()]
        groups = work.state.groups([(*o, 0) for o in owners], spec)
        parts = [canonical(one_array(merged[n])) for n in self._parts.names]
        self._emit(work, owners, starts, assigner.ends(starts), parts, groups)
