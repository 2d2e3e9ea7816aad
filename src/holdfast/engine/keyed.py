"""The roots of keyed stages: how a shard applies an epoch's records to its state.

Records come by key group, and within a key group in the order of the plan, so that what comes out does not
depend on how many shards there are.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.data import schemas
from holdfast.data.rows import canonical, copy_value, one_array, to_rows, to_table
from holdfast.engine.aggregate import Parts, key_columns_of, partial_edge
from holdfast.engine.batch import Batch, SchemaBook
from holdfast.engine.calls import LOOP_FILE, reached, user_error
from holdfast.engine.exchange import GROUP
from holdfast.engine.keys import KEY, key_names, keys_in
from holdfast.engine.timed import times_of
from holdfast.engine.timers import SPECS as TIMER_SPECS
from holdfast.engine.timers import Timers, upto_clock
from holdfast.errors import HoldfastError
from holdfast.functions import Context, KeyedProcess
from holdfast.plan import graph as g
from holdfast.plan.times import Stamp
from holdfast.state.descriptors import declared_states
from holdfast.state.handles import Hand, PlainValue, handle_for, spec_of
from holdfast.state.index import KeyColumns
from holdfast.state.keygroups import key_groups
from holdfast.state.shard import ShardState
from holdfast.state.tables import GONE, MISSING, TableSpec, ValueTable, key_columns
from holdfast.time.units import MIN_TIME

Groups = npt.NDArray[np.uint16]
_PUSH_ROWS = 65_536
STATE = "state"
"""The name under which aggregates and reduce keep theirs."""


class Output(Protocol):
    """Where an operator puts what it emits."""

    def push(self, batch: Batch) -> None: ...


@dataclasses.dataclass(frozen=True)
class Side:
    """What came on one side of an operator: records by key group. Only an operator of two inputs has more than one."""

    number: int
    table: pa.Table
    groups: Groups
    key: g.Key
    stamp: Stamp | None = None
    """Where the records have their time."""

    def keys(self) -> list[Any]:
        """The keys of the records."""
        return keys_in(self.table, key_names(self.key, self.table.schema))

    def times(self) -> list[int | None] | None:
        """The event times of the records in microseconds; None where their stream has none."""
        if self.stamp is None or self.stamp.column not in self.table.schema.names:
            return None
        times, missing = times_of(self.table.column(self.stamp.column), self.stamp)
        found: list[int | None] = times.tolist()
        if not missing.any():
            return found
        return [None if m else t for t, m in zip(found, missing.tolist(), strict=True)]

    def records(self) -> list[Any]:
        """The records as dicts, as the user's function sees them."""
        hidden = [] if self.key.function is None else key_names(self.key, self.table.schema)
        return to_rows(self.table.drop_columns(hidden) if hidden else self.table)


@dataclasses.dataclass
class Work:
    """An epoch's records for one shard, and what they are applied to."""

    sides: list[Side]
    """Empty: no records, in an epoch that only moves the clock."""
    key: g.Key
    state: ShardState
    ctx: Context
    outputs: Mapping[str, Output]
    book: SchemaBook
    behind: pa.Table | None = None
    """Records that came too late, or may have, as they were."""
    before: int = MIN_TIME
    after: int = MIN_TIME
    """The event clock before and after the epoch."""
    late_records: int = 0
    unseen_records: int = 0
    wake_ms: int | None = None
    """What the operator has to say: how many records came too late, how many were in no result when their window was
    forgotten, and when its next timer is due."""
    stamp: Stamp | None = None
    """For windows: where the records have their time, also when none came."""

    @property
    def table(self) -> pa.Table | None:
        """The records, for operators with one side."""
        return self.sides[0].table if self.sides else None


class Operator:
    """The body of a keyed stage in one worker."""

    timed = False
    """Whether time alone can make it do something."""

    def __init__(self, node: g.Node, redact: bool) -> None:
        self.node = node
        self.redact = redact

    def specs(self, schema: pa.Schema | None) -> list[TableSpec] | None:
        """The tables it needs, given the schema of what is exchanged; None while that is not known."""
        raise NotImplementedError

    def apply(self, work: Work) -> None:
        """Apply an epoch's records to the state, and push what comes out."""
        raise NotImplementedError

    def next_due(self, work: Work) -> int | None:
        """When, behind the event clock of now, time alone will make it do something."""
        tables = (t for t in work.state.tables.values() if isinstance(t, ValueTable) and t.spec.due)
        return min((due for t in tables if (due := t.first_due(work.after + 1)) is not None), default=None)

    def close(self) -> None:
        return


def operator_for(node: g.Node, redact: bool) -> Operator:
    """The operator for a keyed node."""
    kinds: dict[str, type[Operator]] = {
        g.PROCESS: ProcessOperator,
        g.AGGREGATE: _Aggregate,
        g.REDUCE: _Reduce,
    }
    if node.kind == g.WINDOW:
        from holdfast.engine.windowed import window_operator

        return window_operator(node, redact)
    if node.kind in g.LIBRARY:
        from holdfast.engine.library import library_operator

        return library_operator(node, redact)
    return kinds[node.kind](node, redact)


class Held:
    """What an operator emits in several passes, held until it can go out by key group.

    So its order does not depend on how many shards there are.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[int, list[Any], dict[str, list[Any]]]] = []

    def take(self, group: int, out: list[Any], sides: dict[str, list[Any]]) -> None:
        """Take what came out of a key group, and leave nothing."""
        if out or any(sides.values()):
            self._parts.append((group, list(out), {tag: list(rows) for tag, rows in sides.items()}))
            out.clear()
            for rows in sides.values():
                rows.clear()

    def by_group(self, tags: Sequence[str]) -> tuple[list[Any], dict[str, list[Any]]]:
        """All of it: the main output, and side outputs."""
        parts = sorted(self._parts, key=lambda p: p[0])
        out = [row for _, rows, _ in parts for row in rows]
        return out, {tag: [row for _, _, sides in parts for row in sides[tag]] for tag in tags if tag}


class ProcessOperator(Operator):
    """Runs a `KeyedProcess` record by record."""

    def __init__(self, node: g.Node, redact: bool) -> None:
        super().__init__(node, redact)
        self._function: KeyedProcess = copy.copy(
            node.body
        )  # handles are put into it: the user's own stays clean
        self._states = declared_states(type(self._function))
        self.timed = type(self._function).on_timer is not KeyedProcess.on_timer
        try:
            self._function.open()
        except Exception as error:
            raise user_error(error, node, "(open)", redact) from None

    def specs(self, schema: pa.Schema | None) -> list[TableSpec] | None:
        return [spec_of(s) for s in self._states.values()] + (TIMER_SPECS if self.timed else [])

    def close(self) -> None:
        self._function.close()

    @property
    def takes(self) -> list[Callable[..., Any]]:
        """The user's functions that take records, one for each side."""
        return self._function.takes()

    @property
    def on_timer(self) -> Callable[..., Any]:
        """The user's function that takes timers."""
        return self._function.on_timer

    def apply(self, work: Work) -> None:
        functions = self.takes
        held = Held() if self.timed or len(functions) > 1 else None
        timers = Timers(work.state) if self.timed else None
        work.ctx._timers = timers
        for side in work.sides:
            self.run(
                side.keys(),
                side.records(),
                side.groups,
                work.state,
                work.ctx,
                held or work.outputs,
                side.times(),
                functions[side.number],
                str(side.number or ""),
            )
        if timers is not None:
            assert held is not None
            self.fire(timers, work.state, work.ctx, held, work.after)
            wake = timers.wake_us(upto_clock(work.ctx.now_ms))
            work.wake_ms = None if wake is None else -(-wake // 1000)
        work.late_records += work.ctx._late
        if held is not None:
            self.emit(held, work.outputs)

    def emit(self, held: Held, outputs: Mapping[str, Output]) -> None:
        """Push what was held, by key group."""
        self._push(*held.by_group(self.node.tags), outputs)

    def fire(self, timers: Timers, state: ShardState, ctx: Context, held: Held, after: int) -> None:
        """Call `on_timer` for what is due by the event clock after the epoch, and by processing time."""
        ctx._watermark = after
        for turn, kind in enumerate(timers.turns(after, upto_clock(ctx.now_ms)), 1):
            self.take_turn(timers, state, ctx, held, f"{kind} timers {turn}")
        timers.seal()

    def take_turn(self, timers: Timers, state: ShardState, ctx: Context, held: Held, turn: str) -> None:
        """Call `on_timer` for all that are due of one kind."""
        for number in itertools.count(1):  # how many another key has had in earlier turns is not its business
            if not (due := timers.take()):
                break
            groups = key_groups(
                key_columns([k for k, _ in due], state.key_types, self.node.uid), state.place.key_groups
            )
            order = np.argsort(groups, kind="stable")
            due = [due[i] for i in order.tolist()]
            keys, fired = [k for k, _ in due], [t for _, t in due]
            times: list[int | None] = [t.at_us for t in fired]
            self.run(keys, fired, groups[order], state, ctx, held, times, self.on_timer, f"{turn}.{number}")

    def run(
        self,
        keys: list[Any],
        records: list[Any],
        groups: Groups,
        state: ShardState,
        ctx: Context,
        outputs: Mapping[str, Output] | Held,
        times: list[int | None] | None = None,
        function: Callable[..., Any] | None = None,
        phase: str = "",
    ) -> None:
        """Process records, or timers, one by one, key group by key group.

        `phase` tells calls for one epoch apart, so that they see different randomness.
        """
        state.prefetch(keys, groups)
        told = times is not None or self.timed
        run = self.loop(state, told=told)
        function = function or self._function.process
        if told and times is None:
            times = [None] * len(keys)
        out: list[Any] = []
        sides: dict[str, list[Any]] = {tag: [] for tag in self.node.tags if tag}
        ctx._outputs = sides
        for low, high in _runs(groups):
            state.group = int(groups[low])
            ctx._reseed(f"{state.group}{phase}")
            part = records[low:high]
            iterator = iter(part)
            stamps = None if times is None else times[low:high]
            try:
                run(keys[low:high], iterator, function, ctx, out.extend, stamps)
            except Exception as error:
                at = reached(part, iterator)
                raise user_error(
                    error, self.node, at, self.redact, _key_of(keys[low:high], part, at)
                ) from None
            if isinstance(outputs, Held):
                outputs.take(state.group, out, sides)
            elif len(out) >= _PUSH_ROWS:
                self._push(out, sides, outputs)
                out.clear()
                state.check_memory()
        if not isinstance(outputs, Held):
            self._push(out, sides, outputs)

    def _push(self, out: list[Any], sides: dict[str, list[Any]], outputs: Mapping[str, Output]) -> None:
        try:
            outputs[g.MAIN].push(Batch(rows=list(out)))
            for tag, rows in sides.items():
                outputs[tag].push(Batch(rows=list(rows)))
                rows.clear()
        except HoldfastError as error:
            raise error.at(self.node.uid, self.node.where) from None

    def loop(self, state: ShardState, *, told: bool = True) -> Callable[..., None]:
        """The loop over records, with the function's states at hand; `told`: its context knows key and time of each."""
        hand = Hand()
        handles = [handle_for(s, state.tables[n], hand) for n, s in self._states.items()]
        for name, handle in zip(self._states, handles, strict=True):
            self._function.__dict__[name] = handle
        plain = [h for h in handles if isinstance(h, PlainValue)]
        source = _loop_source(len(plain), len(plain) < len(handles), told)
        parts: list[Any] = []
        for handle in plain:
            parts += [handle, handle.table.changes, handle.table.view, handle.default]
        made: Callable[..., None] = source(MISSING, GONE, hand, *parts)
        return made


_TOLD, _TELLING = ("ctx._key", "ctx._at"), ("keys", "times")


def _key_of(keys: Sequence[Any], part: Sequence[Any], record: Any) -> Any:
    return next((k for k, r in zip(keys, part, strict=True) if r is record), None)


def _runs(groups: Groups) -> list[tuple[int, int]]:
    """Where each key group starts and ends."""
    edges = (np.flatnonzero(np.diff(groups)) + 1).tolist()
    return list(zip([0, *edges], [*edges, len(groups)], strict=True))


@lru_cache(maxsize=64)
def _loop_source(plain: int, others: bool, told: bool) -> Callable[..., Any]:
    """The loop over records, written for so many plain states; `told` if the context is to know key and time of each.

    Committed values are looked up for all keys in one C loop (`map`); a plain value is put into its handle
    before the call and taken out after it, with no call of ours in between. A write counts if the value is
    another one by `!=`, never by identity, which a reload would change; NaN is NaN. The others look themselves up when
    they are asked, and only those that were asked are looked at after the call.
    """
    args = ["MISSING", "GONE", "hand", *(f"h{i}, c{i}, t{i}, d{i}" for i in range(plain))]
    lines = [
        f"def make({', '.join(args)}):",
        "  touched, flush = hand.touched, hand.flush",
        "  def loop(keys, records, process, ctx, emit, times):",
        *[f"    g{i}, s{i} = c{i}.get, map(t{i}.get, keys, repeat(d{i}))" for i in range(plain)],
        f"    for {', '.join(['key', *(f's{i}_' for i in range(plain)), *(_TOLD if told else []), 'record'])} in "
        f"zip({', '.join(['keys', *(f's{i}' for i in range(plain)), *(_TELLING if told else []), 'records'])}):",
    ]
    for i in range(plain):
        lines += [
            f"      v{i} = g{i}(key, s{i}_)",
            f"      if v{i} is GONE: v{i} = d{i}",
            f"      h{i}.value = v{i}",
        ]
    lines += ["      hand.key = key"] if others else []
    lines += ["      out = process(key, record, ctx)", "      if out is not None: emit(out)"]
    for i in range(plain):
        lines += [
            f"      w = h{i}.value",
            f"      if (w is not v{i} and w != v{i} and (w == w or v{i} == v{i})) or h{i}.gone:",
            f"        if h{i}.gone:",
            f"          h{i}.gone = False",
            f"          if w is d{i}: w = GONE",
            f"        if w is not GONE or g{i}(key, t{i}.get(key, GONE)) is not GONE: c{i}[key] = w",
        ]
    lines += ["      if touched: flush()"] if others else []
    lines += ["  return loop"]
    scope: dict[str, Any] = {"repeat": repeat}
    exec(compile("\n".join(lines), LOOP_FILE, "exec"), scope)
    made: Callable[..., Any] = scope["make"]
    return made


class _Aggregate(Operator):
    """Joins an epoch's partial results with the state, all keys at once."""

    def __init__(self, node: g.Node, redact: bool) -> None:
        super().__init__(node, redact)
        self._parts = Parts(node)

    def specs(self, schema: pa.Schema | None) -> list[TableSpec] | None:
        if schema is None:
            return None
        fields = [pa.field(n, schema.field(n).type) for n in self._parts.names]
        return [TableSpec(STATE, "value", pa.struct(fields), tuples=True, indexed=True)]

    def apply(self, work: Work) -> None:
        table, key, state = work.table, work.key, work.state
        assert table is not None
        names = key_columns_of(key, table.schema)
        merged = self._parts.merged(table, names, self.redact)
        keys = KeyColumns([one_array(merged[n]) for n in names])
        kept = state.tables[STATE]
        assert isinstance(kept, ValueTable)
        state.prefetch_columns(keys, STATE)
        kinds = [kept.spec.value_type.field(i).type for i in range(kept.spec.value_type.num_fields)]
        new = [one_array(merged[n]).cast(t) for n, t in zip(self._parts.names, kinds, strict=True)]
        known, old = kept.find_columns(keys)
        if known.any():
            new = self._parts.joined(pa.array(known), old, new, self.redact)
        new = [canonical(c) for c in new]
        kept.stage_columns(keys, new)
        state.check_memory()
        public = (
            names if key.columns else (["key"] if len(names) == 1 else [f"key{i}" for i in range(len(names))])
        )
        columns = {p: one_array(merged[n]) for p, n in zip(public, names, strict=True)}
        columns.update((name, canonical(c)) for name, c in self._parts.results(new, self.redact))
        work.outputs[g.MAIN].push(Batch(table=pa.table(columns)))


class _Reduce(Operator):
    """Folds records into one for each key."""

    def specs(self, schema: pa.Schema | None) -> list[TableSpec] | None:
        if schema is None:
            return None
        fields = [f for f in schema if not f.name.startswith(KEY) and f.name != GROUP]
        return [TableSpec(STATE, "value", pa.struct(fields))]

    def apply(self, work: Work) -> None:
        (side,) = work.sides
        keys = side.keys()
        work.state.prefetch(keys, side.groups)
        kept = work.state.tables[STATE]
        assert isinstance(kept, ValueTable)
        touched = kept.changes
        for one, record in zip(keys, side.records(), strict=True):
            before = kept.get(one)
            try:
                touched[one] = record if before is MISSING else self.node.body(copy_value(before), record)
            except Exception as error:
                raise user_error(error, self.node, record, self.redact, one) from None
        work.outputs[g.MAIN].push(Batch(table=self._widened(kept, list(touched.values()), work.book)))

    def _widened(self, kept: ValueTable, values: list[Any], book: SchemaBook) -> pa.Table:
        """What was made of records, as a table. A field that was open until now makes the epoch run again."""
        pinned = pa.schema(list(kept.spec.value_type))
        try:
            table = to_table(values, pinned)
        except HoldfastError as error:
            raise error.at(self.node.uid, self.node.where) from None
        if not table.schema.equals(pinned):
            book.note(partial_edge(f"{self.node.uid}<0"), table.schema)
            kept.spec = dataclasses.replace(kept.spec, value_type=pa.struct(list(table.schema)))
        return table


def stored_schema(
    node: g.Node,
    schemas_by_edge: dict[str, pa.Schema],
    edges: int,
    seen: Mapping[int, pa.Schema] | None = None,
) -> pa.Schema | None:
    """The schema of what is exchanged to an aggregate or reduce, from what is pinned; None if nothing is.

    For an operator of the library, that of the records of each side: a struct by the side's number. They may be
    wider than what is pinned, where a field that was open has a value in what was `seen` now.
    """
    if node.kind in g.LIBRARY:
        return _schemas_of_sides(node, schemas_by_edge, seen or {})
    sent = "" if node.kind == g.WINDOW and not node.body.in_batches else "#partial"
    found = [schemas_by_edge[e] for i in range(edges) if (e := f"{node.uid}<{i}{sent}") in schemas_by_edge]
    return schemas.unify(found, node.uid) if found else None


def _schemas_of_sides(
    node: g.Node, schemas_by_edge: dict[str, pa.Schema], seen: Mapping[int, pa.Schema]
) -> pa.Schema:
    fields = []
    for side in sorted({i.side for i in node.inputs}):
        edges = [f"{node.uid}<{n}" for n, i in enumerate(node.inputs) if i.side == side]
        found = [schemas_by_edge[e] for e in edges if e in schemas_by_edge]
        found += [seen[side]] if side in seen else []
        if found:
            whole = schemas.unify(found, node.uid)
            kept = [f for f in whole if not f.name.startswith(KEY) and f.name != GROUP]
            fields.append(pa.field(str(side), pa.struct(kept)))
    return pa.schema(fields)
