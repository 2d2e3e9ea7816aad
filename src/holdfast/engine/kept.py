"""Records that an operator keeps as they are: typed as they were exchanged, by key and number, ordered by when they are due.

A record's number is made of its epoch and of its place among the records of its key group. So it is the same however
many shards there are, tells arrival, and is there once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.data.rows import canonical, one_array
from holdfast.engine.batch import Batch
from holdfast.engine.keyed import Groups, Operator, Side, Work
from holdfast.engine.keys import key_names
from holdfast.engine.timed import check_order, table_times
from holdfast.plan import graph as g
from holdfast.state.tables import FIRST_NUMBER, TableSpec, ValueTable

Times = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_DUE, _AT, _MARK = "kept.due", "kept.at", "kept.mark"
_OWN = 3
"""So many fields of an entry are ours; those of the record follow."""


@dataclasses.dataclass
class Rows:
    """Records at hand, column by column."""

    owners: list[Any]
    """The key of each, as a tuple."""
    windows: Times
    """The start of the window each is in, where there are windows; a record in two of them is there twice."""
    numbers: Times
    groups: Times
    times: Times
    marked: Mask
    """What the operator remembers of each, such as that it has found a partner."""
    stored: Mask
    """Whether it is in the state."""
    columns: list[pa.Array]

    def __len__(self) -> int:
        return len(self.owners)

    def take(self, at: Times) -> Rows:
        """Some of them."""
        taken = pa.array(at)
        return Rows(
            [self.owners[i] for i in at.tolist()],
            self.windows[at],
            self.numbers[at],
            self.groups[at],
            self.times[at],
            self.marked[at],
            self.stored[at],
            [c.take(taken) for c in self.columns],
        )

    def where(self, mask: Mask) -> Rows:
        """Those for which the mask is true."""
        return self if mask.all() else self.take(np.flatnonzero(mask))

    def ids(self, known: dict[Any, int], *, windows: bool = False) -> Times:
        """A number for each that those of one key share, or of one key and window; `known` is a `numbering`."""
        keys = zip(self.owners, self.windows.tolist(), strict=True) if windows else self.owners
        return np.fromiter(map(known.__getitem__, keys), np.int64, count=len(self))

    def order(self) -> Times:
        """An order that depends on nothing but the plan."""
        return np.lexsort((self.windows, self.numbers, self.groups))


def joined(*parts: Rows) -> Rows:
    """Several as one."""
    return Rows(
        [o for p in parts for o in p.owners],
        np.concatenate([p.windows for p in parts]),
        np.concatenate([p.numbers for p in parts]),
        np.concatenate([p.groups for p in parts]),
        np.concatenate([p.times for p in parts]),
        np.concatenate([p.marked for p in parts]),
        np.concatenate([p.stored for p in parts]),
        [pa.concat_arrays(list(cs)) for cs in zip(*(p.columns for p in parts), strict=True)],
    )


def shelf_spec(
    name: str, schema: pa.Schema | None, side: int, *, windows: bool = False, owned: bool = False
) -> TableSpec:
    """The table for the records of a side. While nothing is known of them it holds none."""
    fields = [pa.field(_DUE, pa.int64()), pa.field(_AT, pa.int64()), pa.field(_MARK, pa.int8())]
    if schema is not None and str(side) in schema.names:
        fields += list(schema.field(str(side)).type)
    extra = (pa.int64(),) * (2 if windows else 1)
    return TableSpec(
        name, "value", pa.struct(fields), tuples=True, extra=extra, due=_DUE, owned=owned, named=True
    )


class Shelf:
    """The records of one side in a shard's state, and those that come."""

    def __init__(self, work: Work, name: str) -> None:
        table = work.state.tables[name]
        assert isinstance(table, ValueTable)
        self._work, self._table = work, table
        kind = table.spec.value_type
        fields = [kind.field(i) for i in range(_OWN, kind.num_fields)]
        self.names = [f.name for f in fields]
        self._types = [f.type for f in fields]
        self._windows = len(table.spec.extra) > 1

    def none(self) -> Rows:
        """No records."""
        empty = np.empty(0, np.int64)
        no = np.empty(0, bool)
        return Rows([], empty, empty, empty, empty, no, no, [pa.array([], t) for t in self._types])

    def came(self, side: Side | None, node: g.Node, *, timed: bool = True) -> Rows:
        """What came in this epoch."""
        if side is None:
            return self.none()
        count = side.table.num_rows
        groups = side.groups.astype(np.int64)
        first = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]])
        places = np.arange(count) - np.repeat(first, np.diff(np.append(first, count)))
        times = np.zeros(count, np.int64)
        if timed:
            assert side.stamp is not None
            times = table_times(side.table, side.stamp, node)
        no = np.zeros(count, bool)
        return Rows(
            _tuples(side.keys()),
            np.zeros(count, np.int64),
            self._work.ctx.epoch * FIRST_NUMBER + places,
            groups,
            times,
            no,
            no.copy(),
            [self._column(side.table, n, t) for n, t in zip(self.names, self._types, strict=True)],
        )

    @staticmethod
    def _column(table: pa.Table, name: str, kind: pa.DataType) -> pa.Array:
        if name not in table.schema.names:
            return pa.nulls(table.num_rows, kind)
        column = one_array(table.column(name))
        return column if column.type.equals(kind) else column.cast(kind)

    def due(self, upto: int) -> list[Any]:
        """What is in the state and due."""
        return self._table.due(upto)

    def under(self, owners: Sequence[Any]) -> list[Any]:
        """What is in the state under these owners: keys, or keys with a window."""
        distinct, spec = list(dict.fromkeys(owners)), self._table.spec

        def groups() -> Groups:
            own = len(self._work.state.key_types)
            return self._work.state.groups([(*o[:own], *([0] * len(spec.extra))) for o in distinct], spec)

        return self._table.under(distinct, groups)

    def rows(self, *found: list[Any]) -> Rows:
        """The records of what was found in the state, each once."""
        keys = list(dict.fromkeys(k for part in found for k in part))
        if not keys:
            return self.none()
        known, columns = self._table.find(keys)
        assert known.all(), f"{self._table.spec.name}: an entry is gone"
        own = len(self._work.state.key_types)
        count = len(keys)
        windows = (k[-2] for k in keys) if self._windows else (0 for _ in keys)
        rows = Rows(
            [k[:own] for k in keys],
            np.fromiter(windows, np.int64, count=count),
            np.fromiter((k[-1] for k in keys), np.int64, count=count),
            self._work.state.groups(keys, self._table.spec).astype(np.int64),
            np.asarray(columns[1].to_numpy(), np.int64),
            np.asarray(columns[2].to_numpy(), np.int64).astype(bool),
            np.ones(count, bool),
            columns[_OWN:],
        )
        return rows.take(rows.order())

    def stage(self, rows: Rows, dues: Times, gone: Mask) -> None:
        """Keep records until they are due, and forget those that are gone. Once in an epoch."""
        if not len(rows):
            return
        order = rows.order()
        rows, dues, gone = rows.take(order), dues[order], gone[order]
        extra = [rows.numbers.tolist()]
        if self._windows:
            extra.insert(0, rows.windows.tolist())
        keys = [(*o, *e) for o, e in zip(rows.owners, zip(*extra, strict=True), strict=True)]
        marks = pa.array(rows.marked.astype(np.int8))
        columns = [pa.array(dues), pa.array(rows.times), marks, *(canonical(c) for c in rows.columns)]
        self._table.stage(keys, columns, gone)
        self._work.state.check_memory()

    def table(self, rows: Rows) -> pa.Table:
        """The records as a table."""
        return pa.Table.from_arrays([canonical(c) for c in rows.columns], names=self.names)


class KeepingOperator(Operator):
    """What operators that keep records have in common."""

    timed = True

    def on_time(self, work: Work, shelf: Shelf, number: int, tag: str, *, all_count: bool = False) -> Rows:
        """What came on a side, without what is late by the clock before the epoch: that comes out at the side.

        `all_count`: late ones are told of all the same, but taken.
        """
        side = next((s for s in work.sides if s.number == number), None)
        rows = shelf.came(side, self.node)
        if side is not None and side.stamp is not None:
            check_order(side.table, side.stamp, self.node)
        behind = rows.times <= work.before
        if not behind.any():
            return rows
        assert side is not None
        self.push_late(work, side, behind, tag)
        return rows if all_count else rows.where(~behind)

    def push_late(self, work: Work, side: Side, behind: Mask, tag: str) -> None:
        """Count records that came too late, and push them as they were."""
        table = side.table.filter(pa.array(behind))
        work.late_records += table.num_rows
        work.outputs[tag].push(Batch(table=self.shown(side, table)))

    @staticmethod
    def shown(side: Side, table: pa.Table) -> pa.Table:
        """Records of a side as the user knows them."""
        hidden = [] if side.key.function is None else key_names(side.key, table.schema)
        return table.drop_columns(hidden) if hidden else table


def _tuples(keys: list[Any]) -> list[Any]:
    return keys if keys and isinstance(keys[0], tuple) else [(k,) for k in keys]
