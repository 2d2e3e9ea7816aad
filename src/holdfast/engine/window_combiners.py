"""Records on their way to windows in batches: what is combined before the exchange, and what is late already.

    records of a range ── by key and window (or pane) ──> partial results ── exchange ──> `windowed`

Records that are late by the clock before the epoch, or of sessions may be, are sorted out and go as they are. What
becomes of them, and of partial results, is `windowed`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.engine.aggregate import Combiner, Parts, key_columns_of
from holdfast.engine.keys import key_ids
from holdfast.engine.thinning import thinner_for
from holdfast.engine.timed import table_times
from holdfast.errors import SchemaError
from holdfast.plan import graph as g
from holdfast.plan.times import Stamp, WindowBody
from holdfast.state.keygroups import check_key_type
from holdfast.time.merging import merge_sessions
from holdfast.time.windows import Session, Sliding, Tumbling, late

Times = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

PANE, START, END = "__pane", "__start", "__end"
"""Columns of an exchange: the start of a record's window or pane; the bounds of a session."""


def combiner_for(
    target: g.Node, key: g.Key, redact: bool, before: int, stamp: Stamp | None
) -> Combiner | None:
    """What an exchange does with records before it sends them to an operator whose event clock stands at `before`."""
    if target.kind != g.WINDOW:
        return Combiner.of(target, key, redact) or thinner_for(target, key)
    if not target.body.in_batches:
        return None
    assert stamp is not None
    kind = _SessionCombiner if isinstance(target.body.assigner, Session) else _PaneCombiner
    return kind(target, key, redact, before, stamp)


class _WindowCombiner(Combiner):
    """Records of a range as partial results of each key and window."""

    columns: Sequence[str] = ()

    def __init__(self, target: g.Node, key: g.Key, redact: bool, before: int, stamp: Stamp) -> None:
        self._node, self._key, self._redact, self._before, self._stamp = target, key, redact, before, stamp
        self._body: WindowBody = target.body
        self._parts = Parts(target, self._body.columns)

    def _keys(self, table: pa.Table) -> list[str]:
        names = key_columns_of(self._key, table.schema)
        for name in names:
            if name not in table.schema.names:
                raise SchemaError(f"There is no column {name!r} to key by; there are {table.schema.names}.")
            check_key_type(table.schema.field(name).type)
        return names

    def _times(self, table: pa.Table) -> Times:
        return table_times(table, self._stamp, self._node)

    def _stamped(self, times: Times, table: pa.Table) -> pa.Array:
        """Times as a column that knows the zone of the records' own."""
        kind = table.schema.field(self._stamp.column).type
        return timestamps(times, kind.tz if pa.types.is_timestamp(kind) else None)

    def partial(self, table: pa.Table) -> pa.Table:
        return self._parts.partial(table, [*self._keys(table), *self.columns], self._redact, self.columns)

    def merged(self, table: pa.Table) -> pa.Table:
        return self._parts.merged(table, [*self._keys(table), *self.columns], self._redact)


class _PaneCombiner(_WindowCombiner):
    """For tumbling and sliding windows."""

    columns = (PANE,)

    def sorted_out(self, table: pa.Table) -> tuple[pa.Table, pa.Table]:
        times = self._times(table)
        assigner = self._body.assigner
        if isinstance(assigner, Tumbling):
            panes = assigner.starts(times)
            last, inside = assigner.ends(panes) - 1, None
        else:
            assert isinstance(assigner, Sliding)
            panes = assigner.pane_starts(times)
            last, inside = last_of_panes(assigner, panes)
        behind = late(last, self._before, self._body.lateness_us)
        if inside is not None and not inside.all():
            behind &= inside
            self.outside += int((~inside).sum())
        table = table.append_column(PANE, self._stamped(panes, table))
        if not behind.any() and (inside is None or inside.all()):
            return table, table.slice(0, 0)
        kept = ~behind if inside is None else inside & ~behind
        return table.filter(pa.array(kept)), table.filter(pa.array(behind)).drop_columns([PANE])


def last_of_panes(assigner: Sliding, panes: Times) -> tuple[Times, Mask]:
    """The last instant of the last window that each pane is in, and whether it is in any."""
    unique, places = np.unique(panes, return_inverse=True)
    windows = [assigner.newest_of_pane(int(p)) for p in unique]
    found = np.array([0 if w is None else w for w in windows], np.int64)
    inside = np.array([w is not None for w in windows], bool)
    return (assigner.ends(found) - 1)[places], inside[places]


class _SessionCombiner(_WindowCombiner):
    """For sessions. Whether a record is too late depends on what is still open, so those that may be go as they are."""

    columns = (START, END)

    def sorted_out(self, table: pa.Table) -> tuple[pa.Table, pa.Table]:
        times = self._times(table)
        ends = times + _gap(self._body)
        behind = late(ends - 1, self._before, self._body.lateness_us)
        bounded = table.append_column(START, self._stamped(times, table))
        bounded = bounded.append_column(END, self._stamped(ends, table))
        if not behind.any():
            return bounded, table.slice(0, 0)
        return bounded.filter(pa.array(~behind)), bounded.filter(pa.array(behind))

    def partial(self, table: pa.Table) -> pa.Table:
        return super().partial(self._joined(table))

    def merged(self, table: pa.Table) -> pa.Table:
        return super().merged(self._joined(table))

    def _joined(self, table: pa.Table) -> pa.Table:
        """Rows with the bounds of the session that they make up together."""
        names = self._keys(table)
        merged = merge_sessions(integers(table[START]), integers(table[END]), key_ids(table, names))
        zone = table.schema.field(START).type.tz
        for name, bounds in ((START, merged.starts), (END, merged.ends)):
            place = table.schema.get_field_index(name)
            table = table.set_column(place, name, timestamps(bounds[merged.rows], zone))
        return table


def _gap(body: WindowBody) -> int:
    assigner = body.assigner
    assert isinstance(assigner, Session) and assigner.gap_us is not None
    return assigner.gap_us


def timestamps(times: Times, zone: str | None) -> pa.Array:
    return pa.array(times, pa.int64()).cast(pa.timestamp("us", zone))


def integers(column: pa.ChunkedArray | pa.Array) -> Times:
    return np.asarray(column.cast(pa.int64()).to_numpy(), np.int64)
