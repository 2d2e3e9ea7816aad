"""A chain: stateless operators fused into one task, a batch passing from one to the next by a method call.

Ends in sinks and exchanges. Built anew for each attempt from the stages of the plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.engine.aggregate import Combiner, partial_edge
from holdfast.engine.asynchronous import AsyncStep, Desk
from holdfast.engine.batch import Batch, SchemaBook
from holdfast.engine.calls import reached, user_error
from holdfast.engine.exchange import DataHead, data_blob, divide
from holdfast.engine.keys import KEY, key_names
from holdfast.engine.timed import Seen, TimeStep
from holdfast.engine.window_combiners import combiner_for
from holdfast.errors import PipelineError, SchemaError, SinkError
from holdfast.io.base import DEAD_LETTER, Sink, SinkWriter, StagedFile, Target
from holdfast.log.records import AnswerFile
from holdfast.plan import graph as g
from holdfast.plan.stages import Exchange, Stage, Stages, takers
from holdfast.plan.times import UNTIMED, input_stamp
from holdfast.state.keygroups import check_key_type, groups_of, key_groups
from holdfast.time.units import MIN_TIME

_COMBINED_ROWS = 1_000_000
"""So many records are held before they are combined: fewer, larger steps cost less."""


class Step(Protocol):
    """Something a batch can be pushed into."""

    mutates: bool

    def push(self, batch: Batch) -> None: ...


class Fan:
    """An output and all who take it; dicts are copied for all but the last who might change them."""

    def __init__(self, steps: list[Step]) -> None:
        self._steps = steps

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def mutates(self) -> bool:
        """Whether anybody who takes it may change its dicts."""
        return any(step.mutates for step in self._steps)

    def push(self, batch: Batch) -> None:
        if not len(batch):
            return
        last = len(self._steps) - 1
        for place, step in enumerate(self._steps):
            step.push(batch.copy() if step.mutates and place < last else batch)


class _Rows:
    """A per-record function: the body of map, filter and flat_map."""

    mutates = True

    def __init__(self, node: g.Node, out: Fan, redact: bool) -> None:
        self._node, self._out, self._redact = node, out, redact
        self._run: Callable[[Any], list[Any]] = {
            g.MAP: self._map,
            g.FILTER: self._filter,
            g.FLAT_MAP: self._flat,
        }[node.kind]

    def push(self, batch: Batch) -> None:
        try:
            rows = batch.rows()
        except SchemaError as error:
            raise error.at(self._node.uid, self._node.where) from None
        iterator = iter(rows)
        try:
            out = self._run(iterator)
        except Exception as error:
            raise user_error(error, self._node, reached(rows, iterator), self._redact) from None
        try:
            self._out.push(Batch(rows=out))
        except SchemaError as error:
            raise error.at(self._node.uid, self._node.where) from None

    def _map(self, rows: Any) -> list[Any]:
        function = self._node.body
        return [function(r) for r in rows]

    def _filter(self, rows: Any) -> list[Any]:
        function = self._node.body
        return [r for r in rows if function(r)]

    def _flat(self, rows: Any) -> list[Any]:
        function = self._node.body
        return [o for r in rows for o in (function(r) or ())]


class _Tables:
    """A per-batch function."""

    mutates = False

    def __init__(self, node: g.Node, out: Fan, book: SchemaBook, redact: bool) -> None:
        self._node, self._out, self._book, self._redact = node, out, book, redact

    def push(self, batch: Batch) -> None:
        table = self._book.table(self._node.uid, batch)
        try:
            made = self._node.body(table)
        except Exception as error:
            raise user_error(
                error, self._node, f"a table of {table.num_rows} records", self._redact
            ) from None
        if isinstance(made, pa.RecordBatch):
            made = pa.Table.from_batches([made])
        if not isinstance(made, pa.Table):
            raise SchemaError(
                f"map_batches must return a pyarrow.Table, not {type(made).__name__}.",
                uid=self._node.uid,
                where=self._node.where,
                remedy="Return a table; an empty one (table.slice(0, 0)) for nothing.",
            )
        self._out.push(Batch(table=made))


class _ToSink:
    """The end of a stream: one attempt's output of one sink."""

    mutates = False

    def __init__(self, node: g.Node, writer: SinkWriter, book: SchemaBook) -> None:
        self.uid = node.uid
        self._where = node.where
        self.rows = 0
        self._writer, self._book = writer, book
        self._schema: pa.Schema | None = None

    def push(self, batch: Batch) -> None:
        table = self._book.table(self.uid, batch)
        if self._schema is not None and not table.schema.equals(self._schema):
            return  # the driver sees both schemas and runs the epoch again with one that holds both
        self._schema = table.schema
        self.rows += table.num_rows
        with self._naming_disk():
            self._writer.write(table)

    def close(self) -> list[StagedFile]:
        with self._naming_disk():
            return self._writer.close()

    @contextlib.contextmanager
    def _naming_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SinkError(
                f"Output can't be staged: {error}",
                uid=self.uid,
                where=self._where,
                remedy="Make room for it, or mend its disk, and start again: the epoch was not committed, nothing is lost.",
            ) from None

    def abort(self) -> None:
        self._writer.abort()


class ToExchange:
    """The start of a channel: records by key group, cut by shard, one blob for each flush and shard."""

    def __init__(
        self,
        exchange: Exchange,
        target: g.Node,
        shape: Shape,
        book: SchemaBook,
        redact: bool,
        epoch: int,
        combiner: Combiner | None,
        stage: int = 0,
    ) -> None:
        self._epoch, self._stage = epoch, stage
        self._exchange, self._target, self._shape, self._book, self._redact = (
            exchange,
            target,
            shape,
            book,
            redact,
        )
        self.edge = f"{target.uid}<{exchange.order}"
        self._parts: list[pa.Table] = []
        self._partials: list[pa.Table] = []
        self._rows = 0
        self._combiner = combiner
        self.mutates = (
            combiner is not None and combiner.by_record
        )  # it keeps dicts, and hands them to a function
        self._late: list[pa.Table] = []
        self._sequence = 0
        self.blobs: list[tuple[int, bytes]] = []

    def push(self, batch: Batch) -> None:
        if self._combiner is not None and self._combiner.by_record:
            rows = batch.rows()
            self._combiner.add_rows(rows, self._keys_of(rows))
            return
        keys: list[Any] = []
        if self._exchange.key.function is not None:
            rows = batch.rows()
            keys = self._keys_of(rows)
            batch = Batch(rows=rows)
        table = self._with_keys(self._book.table(self.edge, batch), keys)
        self._parts.append(table)
        self._rows += table.num_rows
        if self._combiner is not None and self._rows >= _COMBINED_ROWS:
            self._combine(self._combiner)

    def _combine(self, combiner: Combiner) -> None:
        """Make partial results of the records that have come since the last time."""
        records, self._parts, self._rows = self._parts, [], 0
        if records:
            with self._naming_target():
                made, late = combiner.sorted_out(pa.concat_tables(records, promote_options="permissive"))
                if late.num_rows:
                    self._late.append(late)
                partial = combiner.partial(made)
                if combiner.own_schema:
                    self._book.note(partial_edge(self.edge), partial.schema)
                if made.num_rows or not late.num_rows:
                    self._partials.append(partial)

    def _keys_of(self, rows: list[Any]) -> list[Any]:
        key = self._exchange.key
        if key.function is None:
            try:
                if len(key.columns) == 1:
                    name = key.columns[0]
                    return [r[name] for r in rows]
                return [tuple(r[n] for n in key.columns) for r in rows]
            except KeyError as error:
                raise _no_such_column(str(error.args[0]), list(rows[0]), self._target) from None
        iterator = iter(rows)
        try:
            return [key.function(r) for r in iterator]
        except Exception as error:
            raise user_error(error, self._target, reached(rows, iterator), self._redact) from None

    def _with_keys(self, table: pa.Table, keys: list[Any]) -> pa.Table:
        """The table with its keys as columns, where they are a function of the record."""
        if self._exchange.key.function is not None:
            made = self._key_table(keys)
            for name in made.schema.names:
                table = table.append_column(name, made.column(name))
        return table

    def _key_table(self, keys: list[Any]) -> pa.Table:
        width = len(keys[0]) if isinstance(keys[0], tuple) else 0
        if any((len(k) if isinstance(k, tuple) else 0) != width for k in keys):
            raise SchemaError("A key function must give tuples of one length, or no tuples.")
        if width:
            rows = [{f"{KEY}{i}": part for i, part in enumerate(key)} for key in keys]
        else:
            rows = [{f"{KEY}0": key} for key in keys]
        return self._book.table(f"{self.edge}#key", Batch(rows=rows))

    def flush(self, upstream: int) -> None:
        """Send what has come so far: a range is through, or a shard's output."""
        if self._combiner is not None and self._combiner.by_record:
            keys, made = self._combiner.take_rows()
            if made:
                table = self._book.table(partial_edge(self.edge), Batch(rows=made))
                self._parts.append(self._with_keys(table, keys))
        elif self._combiner is not None:
            self._combine(self._combiner)
            self._parts, self._partials = self._partials, []
        if self._late:
            self._dispatch(pa.concat_tables(self._late, promote_options="permissive"), upstream, late=True)
            self._late = []
        if not self._parts:
            return
        table = (
            pa.concat_tables(self._parts, promote_options="permissive")
            if len(self._parts) > 1
            else self._parts[0]
        )
        several, self._parts, self._rows = len(self._parts) > 1, [], 0
        if self._combiner is not None and not self._combiner.by_record and several:
            with self._naming_target():
                table = self._combiner.merged(table)
        self._dispatch(table, upstream)

    def _dispatch(self, table: pa.Table, upstream: int, *, late: bool = False) -> None:
        columns = self._key_columns(table)
        groups = key_groups(columns, self._shape.key_groups)
        head = DataHead(
            self._exchange.id, self._exchange.order, upstream, self._sequence, self._epoch, late, self._stage
        )
        self._sequence += 1
        for shard, part in divide(table, groups, self._shape.first_groups):
            self.blobs.append((shard, data_blob(head, part)))

    def _key_columns(self, table: pa.Table) -> list[Any]:
        columns = []
        for name in key_names(self._exchange.key, table.schema):
            if name not in table.schema.names:
                raise _no_such_column(name, table.schema.names, self._target)
            check_key_type(table.schema.field(name).type, self._target.uid)
            columns.append(table.column(name))
        return columns

    @contextlib.contextmanager
    def _naming_target(self) -> Iterator[None]:
        """What goes wrong in here is the matter of the operator that the records go to."""
        try:
            yield
        except SchemaError as error:
            raise error.at(self._target.uid, self._target.where) from None

    @property
    def target(self) -> int:
        return self._exchange.target

    @property
    def outside(self) -> tuple[str, int]:
        """The operator that records go to, and how many of them are in none of its windows: those stay here."""
        return self._target.uid, 0 if self._combiner is None else self._combiner.outside


def _no_such_column(name: str, there: list[str], target: g.Node) -> PipelineError:
    return PipelineError(
        f"There is no column {name!r} to key by; there are {there}.",
        uid=target.uid,
        where=target.where,
        remedy="Key by a column that the stream has, or by a function of the record.",
    )


class Shape:
    """How the key space is cut: the same for every keyed stage."""

    def __init__(self, parallelism: int, key_groups: int) -> None:
        self.parallelism = parallelism
        self.key_groups = key_groups
        firsts = [groups_of(s, parallelism, key_groups).start for s in range(parallelism)]
        self.first_groups: npt.NDArray[np.int64] = np.array(firsts, dtype=np.int64)


class Chain:
    """What one attempt of one stage runs after its root, with its sinks and exchanges.

    In a replay sinks are off, and so are exchanges to stages that take no part in it (`only`); what leads nowhere
    then is not run at all.
    """

    def __init__(
        self,
        stages: Stages,
        stage: Stage,
        shape: Shape,
        book: SchemaBook,
        target: Target,
        redact: bool,
        only: Collection[int] | None = None,
        clocks: Mapping[str, int] | None = None,
        desk: Desk | None = None,
        greatest: Mapping[str, Mapping[str, int]] | None = None,
        now_ms: int = 0,
    ) -> None:
        self._stages, self._stage, self._shape, self._book = stages, stage, shape, book
        self._target, self._redact, self._only = target, redact, only
        self._clocks = clocks or {}
        self._desk = desk
        self.seen = Seen(greatest, now_ms)
        self.sinks: dict[int, _ToSink] = {}
        self.exchanges: dict[int, ToExchange] = {}
        self.calling: dict[int, AsyncStep] = {}
        self._built: dict[int, Step | None] = {}
        root = stages.node(stage.root)
        self.outputs = {tag: self._fan(root, tag) for tag in root.tags}

    def _fan(self, node: g.Node, tag: str) -> Fan:
        inside, leaving = takers(self._stages, self._stage, node.id, tag)
        steps: list[Step] = [s for n, _ in inside if (s := self._step(n)) is not None]
        leaving = [e for e in leaving if self._only is None or e.target in self._only]
        return Fan(steps + [self._leave(e) for e in leaving])

    def _step(self, node: g.Node) -> Step | None:
        if node.id not in self._built:
            self._built[node.id] = self._make(node)
        return self._built[node.id]

    def _make(self, node: g.Node) -> Step | None:
        if node.kind == g.SINK:
            return self._sink(node) if self._only is None else None
        fans = {tag: self._fan(node, tag) for tag in dict.fromkeys((g.MAIN, *node.tags))}
        if self._only is not None and not any(fans.values()):
            return None
        out = fans[g.MAIN]
        if node.kind == g.MAP_BATCHES:
            return _Tables(node, out, self._book, self._redact)
        if node.kind == g.EVENT_TIME:
            return TimeStep(node, out, fans.get(UNTIMED, Fan([])), self.seen, self._redact)
        if node.kind == g.ASYNC_MAP:
            assert self._desk is not None
            dead = fans.get(DEAD_LETTER, Fan([]))
            self.calling[node.id] = AsyncStep(node, out, dead, self._book, self._redact, self._desk)
            return self.calling[node.id]
        return _Rows(node, out, self._redact)

    def _sink(self, node: g.Node) -> Step:
        sink = node.body
        assert isinstance(sink, Sink)
        target = Target(
            node.uid, self._target.epoch, self._target.task, self._target.attempt, self._target.folder
        )
        self.sinks[node.id] = _ToSink(node, sink.writer(target), self._book)
        return self.sinks[node.id]

    def _leave(self, exchange: Exchange) -> Step:
        if exchange.id not in self.exchanges:
            target = self._stages.node(exchange.target)
            stamp = None
            if target.kind == g.WINDOW:
                stamp = input_stamp(self._stages.graph, target)
            combiner = combiner_for(
                target, exchange.key, self._redact, self._clocks.get(target.uid, MIN_TIME), stamp
            )
            self.exchanges[exchange.id] = ToExchange(
                exchange,
                target,
                self._shape,
                self._book,
                self._redact,
                self._target.epoch,
                combiner,
                0 if self._stage.reads else self._stage.id,  # ranges are numbered over all sources
            )
        return self.exchanges[exchange.id]

    @property
    def outside(self) -> dict[str, int]:
        """Records that are in no window of the operator they go to, by its uid."""
        found: dict[str, int] = {}
        for uid, count in (exchange.outside for exchange in self.exchanges.values()):
            found[uid] = found.get(uid, 0) + count
        return {uid: count for uid, count in found.items() if count}

    def begin(self, split: str, upstream: int) -> None:
        """From here on the records are of a range of this split, or of a shard."""
        self.seen.split = split
        for step in self.calling.values():
            step.begin(upstream)

    def flush(self, upstream: int) -> None:
        """A range, or a shard's epoch, is through: send what the exchanges hold."""
        for step in self.calling.values():
            step.end(upstream)
        for exchange in self.exchanges.values():
            exchange.flush(upstream)

    def close(self) -> dict[str, list[StagedFile]]:
        """Finish the sinks: what was staged, by uid."""
        return {s.uid: s.close() for s in self.sinks.values()}

    def answers(self) -> dict[str, AnswerFile]:
        """Finish the files of calls' answers, by uid."""
        closed = {s.uid: s.close() for s in self.calling.values()}
        return {uid: file for uid, file in closed.items() if file is not None}

    def abort(self) -> None:
        """Drop what was staged, and what calls answered."""
        for sink in self.sinks.values():
            sink.abort()
        for step in self.calling.values():
            step.abort()
