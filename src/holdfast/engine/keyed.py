"""The roots of keyed stages: how a shard applies an epoch's records to its state.

Records come by key group, and within a key group in the order of the plan, so that what comes out does not
depend on how many shards there are.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.data import schemas
from holdfast.data.rows import canonical, copy_value, to_rows, to_table
from holdfast.engine.aggregate import Parts, key_columns_of, partial_edge
from holdfast.engine.batch import Batch, SchemaBook
from holdfast.engine.calls import LOOP_FILE, reached, user_error
from holdfast.engine.chain import KEY, key_names, keys_in
from holdfast.engine.exchange import GROUP
from holdfast.errors import HoldfastError
from holdfast.functions import Context, KeyedProcess
from holdfast.plan import graph as g
from holdfast.state.descriptors import declared_states
from holdfast.state.handles import Entries, NestedValue, PlainValue, handle_for, spec_of
from holdfast.state.keygroups import key_groups
from holdfast.state.shard import ShardState
from holdfast.state.tables import GONE, MISSING, TableSpec, ValueTable

Groups = npt.NDArray[np.uint16]
_PUSH_ROWS = 65_536
STATE = "state"
"""The name under which aggregates and reduce keep theirs."""


class Output(Protocol):
    """Where an operator puts what it emits."""

    def push(self, batch: Batch) -> None: ...


@dataclasses.dataclass(frozen=True)
class Work:
    """An epoch's records for one shard, by key group, and what they are applied to."""

    table: pa.Table
    groups: Groups
    key: g.Key
    state: ShardState
    ctx: Context
    outputs: Mapping[str, Output]
    book: SchemaBook

    def keys(self) -> list[Any]:
        """The keys of the records."""
        return keys_in(self.table, key_names(self.key, self.table.schema))

    def records(self) -> list[Any]:
        """The records as dicts, as the user's function sees them."""
        hidden = [] if self.key.function is None else key_names(self.key, self.table.schema)
        return to_rows(self.table.drop_columns(hidden) if hidden else self.table)


class Operator:
    """The body of a keyed stage in one worker."""

    def __init__(self, node: g.Node, redact: bool) -> None:
        self.node = node
        self.redact = redact

    def specs(self, schema: pa.Schema | None) -> list[TableSpec] | None:
        """The tables it needs, given the schema of what is exchanged; None while that is not known."""
        raise NotImplementedError

    def apply(self, work: Work) -> None:
        """Apply an epoch's records to the state, and push what comes out."""
        raise NotImplementedError

    def close(self) -> None:
        return


def operator_for(node: g.Node, redact: bool) -> Operator:
    """The operator for a keyed node."""
    kinds: dict[str, type[Operator]] = {
        g.PROCESS: ProcessOperator,
        g.AGGREGATE: _Aggregate,
        g.REDUCE: _Reduce,
    }
    return kinds[node.kind](node, redact)


class ProcessOperator(Operator):
    """Runs a `KeyedProcess` record by record."""

    def __init__(self, node: g.Node, redact: bool) -> None:
        super().__init__(node, redact)
        self._function: KeyedProcess = copy.copy(
            node.body
        )  # handles are put into it: the user's own stays clean
        self._states = declared_states(type(self._function))
        try:
            self._function.open()
        except Exception as error:
            raise user_error(error, node, "(open)", redact) from None

    def specs(self, schema: pa.Schema | None) -> list[TableSpec] | None:
        return [spec_of(s) for s in self._states.values()]

    def close(self) -> None:
        self._function.close()

    def apply(self, work: Work) -> None:
        self.run(work.keys(), work.records(), work.groups, work.state, work.ctx, work.outputs)

    def run(
        self,
        keys: list[Any],
        records: list[Any],
        groups: Groups,
        state: ShardState,
        ctx: Context,
        outputs: Mapping[str, Output],
    ) -> None:
        """Process records one by one, key group by key group."""
        state.prefetch(keys, groups)
        run = self._loop(state)
        out: list[Any] = []
        sides: dict[str, list[Any]] = {tag: [] for tag in self.node.tags if tag}
        ctx._outputs = sides
        for low, high in _runs(groups):
            state.group = int(groups[low])
            ctx._reseed(str(state.group))
            part = records[low:high]
            iterator = iter(part)
            try:
                run(keys[low:high], iterator, self._function.process, ctx, out.extend)
            except Exception as error:
                at = reached(part, iterator)
                raise user_error(
                    error, self.node, at, self.redact, _key_of(keys[low:high], part, at)
                ) from None
            if len(out) >= _PUSH_ROWS:
                self._push(out, sides, outputs)
                out.clear()
                state.check_memory()
        self._push(out, sides, outputs)

    def _push(self, out: list[Any], sides: dict[str, list[Any]], outputs: Mapping[str, Output]) -> None:
        try:
            outputs[g.MAIN].push(Batch(rows=list(out)))
            for tag, rows in sides.items():
                outputs[tag].push(Batch(rows=list(rows)))
                rows.clear()
        except HoldfastError as error:
            raise error.at(self.node.uid, self.node.where) from None

    def _loop(self, state: ShardState) -> Callable[..., None]:
        handles = [handle_for(s, state.tables[n]) for n, s in self._states.items()]
        for name, handle in zip(self._states, handles, strict=True):
            self._function.__dict__[name] = handle
        plain = [h for h in handles if isinstance(h, PlainValue)]
        others = [h for h in handles if isinstance(h, (NestedValue, Entries))]
        source = _loop_source(len(plain), len(others))
        parts: list[Any] = []
        for handle in plain:
            parts += [handle, handle.table.changes, handle.table.view, handle.default]
        made: Callable[..., None] = source(MISSING, GONE, *parts, *others)
        return made


def _key_of(keys: Sequence[Any], part: Sequence[Any], record: Any) -> Any:
    return next((k for k, r in zip(keys, part, strict=True) if r is record), None)


def _runs(groups: Groups) -> list[tuple[int, int]]:
    """Where each key group starts and ends."""
    edges = (np.flatnonzero(np.diff(groups)) + 1).tolist()
    return list(zip([0, *edges], [*edges, len(groups)], strict=True))


@lru_cache(maxsize=64)
def _loop_source(plain: int, others: int) -> Callable[..., Any]:
    """The loop over records, written for so many states.

    Committed values are looked up for all keys in one C loop (`map`); a plain value is put into its handle
    before the call and taken out after it, with no call of ours in between. A write counts if the value is
    another one by `!=`, never by identity, which a reload would change; NaN is NaN.
    """
    args = [f"h{i}, c{i}, t{i}, d{i}" for i in range(plain)] + [f"o{i}" for i in range(others)]
    lines = [
        f"def make(MISSING, GONE, {', '.join(args)}):" if args else "def make(MISSING, GONE):",
        "  def loop(keys, records, process, ctx, emit):",
        *[f"    g{i}, s{i} = c{i}.get, map(t{i}.get, keys, repeat(d{i}))" for i in range(plain)],
        f"    for {', '.join(['key', *(f's{i}_' for i in range(plain)), 'record'])} in "
        f"zip({', '.join(['keys', *(f's{i}' for i in range(plain)), 'records'])}):",
    ]
    for i in range(plain):
        lines += [
            f"      v{i} = g{i}(key, s{i}_)",
            f"      if v{i} is GONE: v{i} = d{i}",
            f"      h{i}.value = v{i}",
        ]
    lines += [f"      o{i}.bind(key)" for i in range(others)]
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
    lines += [f"      o{i}.flush()" for i in range(others)]
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
        return [TableSpec(STATE, "value", pa.struct(fields), tuples=True)]

    def apply(self, work: Work) -> None:
        table, key, state = work.table, work.key, work.state
        names = key_columns_of(key, table.schema)
        merged = self._parts.merged(table, names, self.redact)
        keys = keys_in(merged, names)
        kept = state.tables[STATE]
        assert isinstance(kept, ValueTable)
        state.prefetch(keys, key_groups([merged[n] for n in names], state.place.key_groups))
        kinds = [kept.spec.value_type.field(i).type for i in range(kept.spec.value_type.num_fields)]
        new = [_flat(merged[n]).cast(t) for n, t in zip(self._parts.names, kinds, strict=True)]
        known, old = kept.find(keys)
        if known.any():
            new = self._parts.joined(pa.array(known), old, new, self.redact)
        new = [canonical(c) for c in new]
        kept.stage(keys, new)
        state.check_memory()
        public = (
            names if key.columns else (["key"] if len(names) == 1 else [f"key{i}" for i in range(len(names))])
        )
        columns = {p: _flat(merged[n]) for p, n in zip(public, names, strict=True)}
        columns.update((name, canonical(c)) for name, c in self._parts.results(new, self.redact))
        work.outputs[g.MAIN].push(Batch(table=pa.table(columns)))


def _flat(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)


class _Reduce(Operator):
    """Folds records into one for each key."""

    def specs(self, schema: pa.Schema | None) -> list[TableSpec] | None:
        if schema is None:
            return None
        fields = [f for f in schema if not f.name.startswith(KEY) and f.name != GROUP]
        return [TableSpec(STATE, "value", pa.struct(fields))]

    def apply(self, work: Work) -> None:
        keys = work.keys()
        work.state.prefetch(keys, work.groups)
        kept = work.state.tables[STATE]
        assert isinstance(kept, ValueTable)
        touched = kept.changes
        for one, record in zip(keys, work.records(), strict=True):
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


def stored_schema(node: g.Node, schemas_by_edge: dict[str, pa.Schema], edges: int) -> pa.Schema | None:
    """The schema of what is exchanged to an aggregate or reduce, from what is pinned; None if nothing is."""
    found = [schemas_by_edge[e] for i in range(edges) if (e := f"{node.uid}<{i}#partial") in schemas_by_edge]
    return schemas.unify(found, node.uid) if found else None
