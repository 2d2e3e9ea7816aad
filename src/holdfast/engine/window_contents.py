"""What windows hold when records come one by one: all their records, one reduced record, or aggregates.

The operator (`window_process`) decides what goes into which window, when it fires and when it goes; here is how
that is kept, merged and emitted. An object lives for one epoch: it starts from what is committed, and at the end
hands over the columns of its windows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.data.rows import canonical, column_values, copy_value, one_array, to_table
from holdfast.engine.aggregate import Parts
from holdfast.engine.batch import Batch
from holdfast.engine.calls import user_error
from holdfast.engine.keyed import Held, Output, Work
from holdfast.engine.keys import key_names, public_names
from holdfast.errors import HoldfastError, PipelineError
from holdfast.functions import WindowFunction
from holdfast.plan import graph as g
from holdfast.plan.times import LATE, WINDOW_END, WINDOW_START, WindowBody
from holdfast.state.tables import TableSpec, ValueTable, order_bytes
from holdfast.time.triggers import Small
from holdfast.time.units import MAX_TIME, TimeType
from holdfast.time.windows import Window

Record = dict[str, Any]

RECORDS = "records"
"""The table of all records that windows hold: by key, list and place."""
CAME, RECORD = "came", "record"
LIST_START, LIST_END = "list.start", "list.end"
"""Where windows merge: under which bounds a window's records are kept, which are those it began with."""
_ROW, _NODE = "__key.row", "__node"


@dataclasses.dataclass(slots=True, eq=False)
class Open:
    """A window of a key that the epoch at hand has to do with."""

    key: Any
    group: int
    window: Window
    full: tuple[Any, ...]
    """The key with the window's bounds behind it: what the window and its timers are kept under."""
    known: bool = False
    """Whether it is committed."""
    n: int = 0
    """How many records it holds."""
    seen: int = 0
    """How many of them have been in a result."""
    state: dict[str, Small] = dataclasses.field(default_factory=dict)
    """What its trigger keeps."""
    held: Any = None
    """What it holds, as its contents keep it."""
    alive: bool = True
    touched: bool = False
    fired: int = 0


@dataclasses.dataclass(frozen=True)
class Setting:
    """What contents are told: the operator, the schema of its records, and how results say their bounds."""

    node: g.Node
    redact: bool
    schema: pa.Schema
    time: TimeType
    function: Any = None

    @property
    def body(self) -> WindowBody:
        body: WindowBody = self.node.body
        return body


class Contents:
    """What the windows of an operator hold, in one epoch."""

    def __init__(self, setting: Setting, work: Work) -> None:
        self._setting, self._work = setting, work
        self._node, self._redact = setting.node, setting.redact

    @classmethod
    def fields(cls, node: g.Node, schema: pa.Schema) -> list[pa.Field]:
        """What is kept of it with each window, given the schema of records."""
        return []

    @classmethod
    def tables(cls, schema: pa.Schema) -> list[TableSpec]:
        """What is kept of it in tables of its own."""
        return []

    def begin(self, keys: list[Any], rows: list[Record], records: pa.Table) -> None:
        """Take the epoch's records, in the order they came; `add` speaks of them by their place."""

    def load(self, opens: Sequence[Open], columns: Sequence[pa.Array]) -> None:
        """Give windows what is committed of them."""

    def add(self, one: Open, row: int) -> None:
        """Put a record into a window."""
        raise NotImplementedError

    def merge(self, into: Open, parts: Sequence[Open]) -> None:
        """Make one window of several, which come in the order of time; it may be one of them itself."""
        raise NotImplementedError

    def prepare(self, opens: Sequence[Open]) -> None:
        """These will fire: have at hand what that takes."""

    def fire(self, one: Open) -> None:
        """Emit the result of a window that holds something."""
        raise NotImplementedError

    def purge(self, one: Open) -> None:
        """Drop what a window holds."""
        raise NotImplementedError

    def columns(self, opens: Sequence[Open]) -> list[pa.Array]:
        """What is kept with each of these windows, when the epoch is over."""
        return []

    def finish(self, outputs: Mapping[str, Output]) -> None:
        """Put what is kept elsewhere into the state, and push what was emitted."""
        raise NotImplementedError

    def _bounds(self, window: Window) -> tuple[Any, Any]:
        time = self._setting.time
        return time.value(window.start), time.value(window.end)


class _ByRecord(Contents):
    """Contents whose results are dicts."""

    def __init__(self, setting: Setting, work: Work) -> None:
        super().__init__(setting, work)
        self._rows: list[Record] = []
        self._emitted = Held()

    def begin(self, keys: list[Any], rows: list[Record], records: pa.Table) -> None:
        self._rows = rows

    def _push(self, outputs: Mapping[str, Output], tags: Sequence[str]) -> None:
        out, sides = self._emitted.by_group(tags)
        try:
            outputs[g.MAIN].push(Batch(rows=out))
            for tag, rows in sides.items():
                outputs[tag].push(Batch(rows=rows))
        except HoldfastError as error:
            raise error.at(self._node.uid, self._node.where) from None


class Reduced(_ByRecord):
    """One record for each window, which the user's function makes of two."""

    @classmethod
    def fields(cls, node: g.Node, schema: pa.Schema) -> list[pa.Field]:
        return [pa.field(RECORD, pa.struct(list(schema)))]

    def load(self, opens: Sequence[Open], columns: Sequence[pa.Array]) -> None:
        for one, record in zip(opens, column_values(columns[0]), strict=True):
            one.held = record

    def add(self, one: Open, row: int) -> None:
        record = copy_value(self._rows[row])
        one.held = record if one.held is None else self._fold(one, one.held, record)

    def merge(self, into: Open, parts: Sequence[Open]) -> None:
        held = [p.held for p in parts if p.held is not None]
        into.held = held[0] if held else None
        for record in held[1:]:
            into.held = self._fold(into, into.held, record)

    def _fold(self, one: Open, left: Record, right: Record) -> Record:
        try:
            made: Record = self._setting.body.function(left, right)
        except Exception as error:
            raise user_error(error, self._node, right, self._redact, one.key, one.window) from None
        return made

    def fire(self, one: Open) -> None:
        start, end = self._bounds(one.window)
        record = copy_value(one.held)
        if isinstance(record, dict):
            record = {**record, WINDOW_START: start, WINDOW_END: end}
        self._emitted.take(one.group, [record], {})

    def purge(self, one: Open) -> None:
        one.held = None

    def columns(self, opens: Sequence[Open]) -> list[pa.Array]:
        """The records. A field that was open until now has the epoch run again, with its type."""
        schema, kind = self._setting.schema, pa.struct(list(self._setting.schema))
        full = [o for o in opens if o.held is not None]
        try:
            table = to_table([o.held for o in full], schema)
        except HoldfastError as error:
            raise error.at(self._node.uid, self._node.where) from None
        if not table.schema.equals(schema):
            self._work.book.note(f"{self._node.uid}<0", table.schema)
        if not full or not table.schema.equals(schema):
            return [pa.nulls(len(opens), kind)]
        places = {id(one): place for place, one in enumerate(full)}
        records = one_array(table.to_struct_array())
        return [canonical(records.take(pa.array([places.get(id(o)) for o in opens], pa.int64())))]

    def finish(self, outputs: Mapping[str, Output]) -> None:
        self._push(outputs, ())


@dataclasses.dataclass(slots=True, eq=False)
class _List:
    """The records of a window: so many are committed, others were added in this epoch."""

    full: tuple[Any, ...]
    """The key with the bounds that the list is kept under."""
    committed: int = 0
    kept: bool = True
    """Whether what is committed still counts."""
    values: list[tuple[int, Record]] | None = None
    """What is committed, once it was read: when each came, and the record."""
    added: list[tuple[int, Record]] = dataclasses.field(default_factory=list)

    @property
    def stored(self) -> int:
        return self.committed if self.kept else 0

    def clear(self) -> None:
        self.kept, self.added = False, []


class Records(_ByRecord):
    """All records of a window, for a function that sees them together.

    They stand in a table of their own, so that one more costs one more. Where windows merge, those of the shorter
    lists move to the longest; so each moves a few times, however many merges there are. When each came is kept with
    it: the epoch, and its place among the epoch's records of its key.
    """

    @classmethod
    def fields(cls, node: g.Node, schema: pa.Schema) -> list[pa.Field]:
        if not node.body.assigner.merging:
            return []
        return [pa.field(LIST_START, pa.int64()), pa.field(LIST_END, pa.int64())]

    @classmethod
    def tables(cls, schema: pa.Schema) -> list[TableSpec]:
        value = pa.struct([pa.field(CAME, pa.int64()), pa.field(RECORD, pa.struct(list(schema)))])
        return [TableSpec(RECORDS, "value", value, tuples=True, extra=(pa.int64(),) * 3)]

    def __init__(self, setting: Setting, work: Work) -> None:
        super().__init__(setting, work)
        self._function: WindowFunction = setting.function
        self._lists: dict[tuple[Any, ...], _List] = {}
        self._came: list[int] = []
        self._tags = (*self._function.side_outputs, LATE)
        self._sides: dict[str, list[Any]] = {tag: [] for tag in self._tags}
        work.ctx._outputs = self._sides
        work.ctx._timers = _NoTimers()

    @property
    def _table(self) -> ValueTable:
        table = self._work.state.tables[RECORDS]
        assert isinstance(table, ValueTable)
        return table

    def begin(self, keys: list[Any], rows: list[Record], records: pa.Table) -> None:
        super().begin(keys, rows, records)
        counts: dict[Any, int] = {}
        first = self._work.ctx.epoch << 32
        for key in keys:
            place = counts[key] = counts.get(key, -1) + 1
            self._came.append(first + place)

    def load(self, opens: Sequence[Open], columns: Sequence[pa.Array]) -> None:
        fulls = [o.full for o in opens]
        if columns:
            bounds = zip(*(column_values(c) for c in columns), strict=True)
            fulls = [(*o.full[:-2], *b) for o, b in zip(opens, bounds, strict=True)]
        for one, full in zip(opens, fulls, strict=True):
            one.held = self._lists[full] = _List(full, one.n)

    def _list(self, one: Open) -> _List:
        if one.held is None:
            one.held = self._lists.setdefault(one.full, _List(one.full))
        held: _List = one.held
        return held

    def add(self, one: Open, row: int) -> None:
        self._list(one).added.append((self._came[row], self._rows[row]))

    def merge(self, into: Open, parts: Sequence[Open]) -> None:
        lists = [self._list(p) for p in parts]
        longest = max(lists, key=lambda one: (one.stored, len(one.added)))
        others = [one for one in lists if one is not longest]
        self._read(others)
        for one in others:
            longest.added += one.values or []
            longest.added += one.added
            one.values = None
            one.clear()
        into.held = longest

    def prepare(self, opens: Sequence[Open]) -> None:
        self._read([self._list(o) for o in opens])

    def _read(self, lists: Iterable[_List]) -> None:
        """Read what is committed of lists, all at once; what no longer counts is not."""
        wanted = [one for one in lists if one.stored and one.values is None]
        keys = [(*one.full, place) for one in wanted for place in range(one.stored)]
        if not keys:
            return
        came, records = (column_values(c) for c in self._find(keys))
        low = 0
        for one in wanted:
            high = low + one.stored
            one.values = list(zip(came[low:high], records[low:high], strict=True))
            low = high

    def _find(self, keys: list[Any]) -> list[pa.Array]:
        state, table = self._work.state, self._table
        state.prefetch(keys, state.groups(keys, table.spec), RECORDS)
        known, columns = table.find(keys)
        assert known.all(), f"{self._node.uid}: a window lacks records that it says it has"
        return columns

    def fire(self, one: Open) -> None:
        held = self._list(one)
        self._read([held])
        both = [*(held.values or []), *held.added] if held.kept else list(held.added)
        both.sort(key=lambda pair: pair[0])
        records = [copy_value(record) for _, record in both]
        ctx, window = self._work.ctx, one.window
        ctx._key, ctx._at = one.key, None if window.end == MAX_TIME else window.last
        ctx._reseed(f"{order_bytes(one.key).hex()} {window.start} {window.end} {one.fired}")
        try:
            out = list(self._function.process(one.key, window, records, ctx) or ())
        except Exception as error:
            shown = f"all {len(both)} of the window"
            raise user_error(error, self._node, shown, self._redact, one.key, window) from None
        start, end = self._bounds(window)
        bounds = {WINDOW_START: start, WINDOW_END: end}
        # A function may yield a dict that it keeps; where it says bounds itself, they are its own.
        out = [
            {**row, **{n: row.get(n, at) for n, at in bounds.items()}} if isinstance(row, dict) else row
            for row in out
        ]
        self._emitted.take(one.group, out, self._sides)

    def purge(self, one: Open) -> None:
        held = self._list(one)
        held.clear()
        held.values = None

    def columns(self, opens: Sequence[Open]) -> list[pa.Array]:
        if not self._setting.body.assigner.merging:
            return []
        fulls = [o.full if o.held is None else o.held.full for o in opens]
        return [pa.array([f[-2] for f in fulls], pa.int64()), pa.array([f[-1] for f in fulls], pa.int64())]

    def finish(self, outputs: Mapping[str, Output]) -> None:
        self._stage()
        self._work.late_records += self._work.ctx._late
        self._push(outputs, self._tags)

    def _stage(self) -> None:
        changes: dict[tuple[Any, ...], tuple[int | None, Record | None]] = {}
        before: list[tuple[Any, ...]] = []
        """Places that are committed and change."""
        for one in self._lists.values():
            for place, value in enumerate(one.added, start=one.stored):
                changes[(*one.full, place)] = value
            end = one.stored + len(one.added)
            changes.update(((*one.full, place), (None, None)) for place in range(end, one.committed))
            before += [(*one.full, place) for place in range(one.stored, one.committed)]
        if not changes:
            return
        state, table = self._work.state, self._table
        state.prefetch(before, state.groups(before, table.spec), RECORDS)
        keys = sorted(changes, key=order_bytes)
        values = [changes[k] for k in keys]
        kinds = [table.spec.value_type.field(i).type for i in range(2)]
        columns = [pa.array([v[i] for v in values], kinds[i]) for i in range(2)]
        table.stage(keys, columns, np.fromiter((v[0] is None for v in values), bool, count=len(values)))


class _NoTimers:
    """Stands where a function that may set timers has its own."""

    def set(self, kind: str, key: Any, at_us: int, name: str) -> None:
        raise PipelineError(
            "A window's function can't set timers.",
            remedy="Say when the window fires with a trigger, or use a KeyedProcess.",
        )

    delete = set


class Aggregates(Contents):
    """The house's aggregates and the user's own, as the windows in batches keep them.

    What is added, merged and fired is only noted while triggers are asked: a window holds numbers, of records
    and of what is committed (from 0 on), or of sums that are still to be made (below 0). They are made at the end, by
    Arrow: first all that are made of records and what is committed, then those that have these in them, and so on.
    """

    @classmethod
    def fields(cls, node: g.Node, schema: pa.Schema) -> list[pa.Field]:
        parts = Parts(node, node.body.columns)
        nothing = schema.empty_table().append_column(_ROW, pa.array([], pa.int64()))
        made = parts.partial(nothing, [_ROW], redact=False)
        return [pa.field(name, made.schema.field(name).type) for name in parts.names]

    def __init__(self, setting: Setting, work: Work) -> None:
        super().__init__(setting, work)
        self._parts = Parts(self._node, setting.body.columns)
        self._fields = self.fields(self._node, setting.schema)
        self._leaves: list[list[pa.Array]] = []
        self._count = 0
        self._sums: list[tuple[int, list[int]]] = []
        """How deep each sum is, and what it is made of."""
        self._emitted: list[tuple[Open, Window, int]] = []
        self._known: list[pa.Array] = []
        self._made: list[pa.Array] = []
        """The parts of all records and of what is committed, and those of sums; the records are copied once."""
        self._at: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def begin(self, keys: list[Any], rows: list[Record], records: pa.Table) -> None:
        names = key_names(self._work.key, records.schema)
        numbered = records.append_column(_ROW, pa.array(np.arange(records.num_rows)))
        made = self._parts.partial(numbered, [*names, _ROW], self._redact).sort_by(_ROW)
        self._grow([one_array(made[f.name]).cast(f.type) for f in self._fields])

    def _grow(self, columns: Sequence[pa.Array]) -> None:
        self._leaves.append(list(columns))
        self._count += len(columns[0])

    def load(self, opens: Sequence[Open], columns: Sequence[pa.Array]) -> None:
        for place, one in enumerate(opens, start=self._count):
            one.held = [place] if one.n else []
        self._grow(columns)

    def add(self, one: Open, row: int) -> None:
        if one.held is None:
            one.held = []
        one.held.append(row)

    def merge(self, into: Open, parts: Sequence[Open]) -> None:
        into.held = [number for part in parts for number in part.held or []]

    def fire(self, one: Open) -> None:
        self._emitted.append((one, one.window, self._sum(one)))

    def _sum(self, one: Open) -> int:
        """The number of all that a window holds."""
        if len(one.held) > 1:
            depth = 1 + max(self._sums[-n - 1][0] if n < 0 else 0 for n in one.held)
            self._sums.append((depth, one.held))
            one.held = [-len(self._sums)]
        number: int = one.held[0]
        return number

    def purge(self, one: Open) -> None:
        one.held = []

    def columns(self, opens: Sequence[Open]) -> list[pa.Array]:
        numbers = [self._sum(o) if o.held else None for o in opens]
        self._make()
        return self._take(numbers)

    def _make(self) -> None:
        """Make all sums, by depth."""
        none = [pa.nulls(0, f.type) for f in self._fields]
        self._known = [
            pa.concat_arrays(list(columns)) for columns in zip(*(self._leaves or [none]), strict=True)
        ]
        self._made = none
        self._at = np.zeros(len(self._sums), np.int64)
        by_depth: dict[int, list[int]] = {}
        for which, (depth, _) in enumerate(self._sums):
            by_depth.setdefault(depth, []).append(which)
        for depth in sorted(by_depth):
            mine = by_depth[depth]
            made_of = [self._sums[which][1] for which in mine]
            taken = self._take([n for numbers in made_of for n in numbers])
            nodes = np.repeat(np.arange(len(mine)), [len(numbers) for numbers in made_of])
            columns = {f.name: c for f, c in zip(self._fields, taken, strict=True)}
            merged = self._parts.merged(pa.table({_NODE: nodes, **columns}), [_NODE], self._redact)
            merged = merged.sort_by(_NODE)
            self._at[mine] = len(self._made[0]) + np.arange(len(mine))
            self._made = [
                pa.concat_arrays([old, canonical(one_array(merged[f.name]).cast(f.type))])
                for f, old in zip(self._fields, self._made, strict=True)
            ]

    def _take(self, numbers: Sequence[int | None]) -> list[pa.Array]:
        known = pa.array([n for n in numbers if n is not None and n >= 0], pa.int64())
        made = pa.array(self._at[[-n - 1 for n in numbers if n is not None and n < 0]])
        places = {True: itertools.count(), False: itertools.count(len(known))}
        order = pa.array([None if n is None else next(places[n >= 0]) for n in numbers], pa.int64())
        return [
            canonical(pa.concat_arrays([one.take(known), other.take(made)]).take(order))
            for one, other in zip(self._known, self._made, strict=True)
        ]

    def finish(self, outputs: Mapping[str, Output]) -> None:
        if not self._emitted:
            return
        emitted = sorted(self._emitted, key=lambda e: e[0].group)
        kinds = self._work.state.key_types
        keys = [one.key for one, _, _ in emitted]
        columns: dict[str, Any] = {}
        for place, name in enumerate(public_names(self._work.key, len(kinds))):
            values = keys if len(kinds) == 1 else [k[place] for k in keys]
            columns[name] = pa.array(values, kinds[place])
        time = self._setting.time
        columns[WINDOW_START] = time.from_us([w.start for _, w, _ in emitted])
        columns[WINDOW_END] = time.from_us([w.end for _, w, _ in emitted])
        made = self._parts.results(self._take([number for _, _, number in emitted]), self._redact)
        columns.update((name, canonical(c)) for name, c in made)
        outputs[g.MAIN].push(Batch(table=pa.table(columns)))


KINDS: dict[str, type[Contents]] = {g.AGGREGATE: Aggregates, g.REDUCE: Reduced, g.PROCESS: Records}
"""The contents of each kind of window."""
