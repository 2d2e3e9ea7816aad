"""What a user writes: Pipeline, Stream and KeyedStream.

They only draw the graph. What runs it is the engine, reached through `run` and `start`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from holdfast.data.types import arrow_schema
from holdfast.errors import PipelineError
from holdfast.functions import Aggregate, Column, KeyedProcess
from holdfast.io.base import DEAD_LETTER, Sink, Source
from holdfast.plan import graph as g

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from holdfast.engine.handle import Handle

Record = dict[str, Any]


class Pipeline:
    """A graph of operators: sources in, sinks out.

    Args:
        name: what the pipeline is called in its directory, in logs and metrics.

    >>> import holdfast as hf
    >>> sink = hf.memory()
    >>> pipeline = hf.Pipeline("doubling")
    >>> stream = pipeline.read("numbers", hf.records([{"n": 1}, {"n": 2}]))
    >>> stream.map(lambda r: {"n": r["n"] * 2}).write("doubled", sink)
    >>> hf.testing.run(pipeline).rows("doubled")
    [{'n': 2}, {'n': 4}]
    """

    def __init__(self, name: str) -> None:
        self._where = g.caller()
        self._uids: dict[str, str] = {}
        self.name = g.check_uid(name, "pipeline", self._where, {})
        self._nodes: list[g.Node] = []
        self.module = g.caller_module()

    def read(self, uid: str, source: Source) -> Stream:
        """Start a stream at a source."""
        if not isinstance(source, Source):
            raise PipelineError(
                f"{source!r} is not a source.",
                where=g.caller(),
                remedy="Use hf.files, hf.rate, hf.records or your own.",
            )
        tags = (g.MAIN, DEAD_LETTER) if source.on_bad_record == DEAD_LETTER else (g.MAIN,)
        return self._add(g.SOURCE, uid, source, (), tags=tags)

    def graph(self) -> g.Graph:
        """The graph as it was drawn, checked."""
        graph = g.Graph(self.name, tuple(self._nodes))
        g.check(graph)
        return graph

    def run(self, *, spark: SparkSession | None = None, **settings: Any) -> Handle:
        """Run until stopped, drained or done; Ctrl-C and SIGTERM finish the epoch first.

        Settings are those of `holdfast config`: `dir`, `interval`, `parallelism`, `drain=True`, `epochs=5` …
        """
        from holdfast.engine.handle import run

        return run(self, spark=spark, settings=settings)

    def start(self, *, spark: SparkSession | None = None, **settings: Any) -> Handle:
        """Run in the background, for notebooks and services; the handle waits, reports and stops."""
        from holdfast.engine.handle import start

        return start(self, spark=spark, settings=settings)

    def _add(
        self,
        kind: str,
        uid: str | None,
        body: Any,
        inputs: tuple[g.Input, ...],
        *,
        tags: tuple[str, ...] = (g.MAIN,),
        schema: Any = None,
    ) -> Stream:
        where = g.caller()
        number = len(self._nodes)
        if uid is None and kind not in g.NEEDS_UID:
            uid = f"{kind}-{number}"
        uid = g.check_uid(uid, kind, where, self._uids)
        declared = None if schema is None else arrow_schema(schema)
        self._nodes.append(g.Node(number, kind, uid, body, inputs, tags, declared, where))
        return Stream(self, (g.Input(number),))


class Stream:
    """Records on their way from one operator to the next."""

    def __init__(self, pipeline: Pipeline, inputs: tuple[g.Input, ...]) -> None:
        self._pipeline = pipeline
        self._inputs = inputs

    def map(
        self, function: Callable[[Record], Record], *, uid: str | None = None, schema: Any = None
    ) -> Stream:
        """One record for each record.

        The record is yours to change. `schema` declares what is returned; without it the first epoch shows it.
        """
        return self._step(g.MAP, function, uid, schema)

    def filter(self, function: Callable[[Record], bool], *, uid: str | None = None) -> Stream:
        """Only the records for which the function is true."""
        return self._step(g.FILTER, function, uid, None)

    def flat_map(
        self, function: Callable[[Record], Iterable[Record]], *, uid: str | None = None, schema: Any = None
    ) -> Stream:
        """Any number of records for each record."""
        return self._step(g.FLAT_MAP, function, uid, schema)

    def map_batches(
        self, function: Callable[[pa.Table], pa.Table], *, uid: str | None = None, schema: Any = None
    ) -> Stream:
        """A table for each table: for work that pyarrow or numpy does at once.

        The function must not depend on how records are divided into tables.
        """
        return self._step(g.MAP_BATCHES, function, uid, schema)

    def union(self, *others: Stream) -> Stream:
        """This stream and others as one; each record once."""
        for other in others:
            if other._pipeline is not self._pipeline:
                raise PipelineError("Only streams of one pipeline can be united.", where=g.caller())
        inputs = self._inputs + tuple(i for o in others for i in o._inputs)
        return Stream(self._pipeline, inputs)

    def key_by(self, *key: str | Callable[[Record], Any]) -> KeyedStream:
        """The stream divided by a key: a column, several columns (a tuple), or a function of the record.

        Null is a key like any other.
        """
        where = g.caller()
        if key and all(isinstance(k, str) for k in key):
            return KeyedStream(self._pipeline, self._inputs, g.Key(columns=tuple(map(str, key))))
        if len(key) == 1 and callable(key[0]):
            return KeyedStream(self._pipeline, self._inputs, g.Key(function=key[0]))
        raise PipelineError(
            f"{key!r} is no key.",
            where=where,
            remedy='Give columns, key_by("account"), or one function of the record.',
        )

    def side(self, tag: str) -> Stream:
        """A side output of the operator that this stream comes from."""
        if len(self._inputs) != 1 or self._inputs[0].tag != g.MAIN:
            raise PipelineError("Only the main output of one operator has side outputs.", where=g.caller())
        node = self._pipeline._nodes[self._inputs[0].node]
        if tag not in node.tags or tag == g.MAIN:
            known = [t for t in node.tags if t]
            raise PipelineError(
                f"There is no side output {tag!r}; there are {known}.",
                uid=node.uid,
                where=g.caller(),
                remedy="Declare side_outputs on the KeyedProcess"
                if node.kind == g.PROCESS
                else 'For dead letters, open the source with on_bad_record="dead_letter".',
            )
        return Stream(self._pipeline, (g.Input(node.id, tag),))

    def write(self, uid: str, sink: Sink, *, schema: Any = None) -> None:
        """End the stream in a sink. A stream may be written to several, and go on besides."""
        if not isinstance(sink, Sink):
            raise PipelineError(
                f"{sink!r} is not a sink.",
                where=g.caller(),
                remedy="Use hf.parquet, hf.jsonl, hf.console, hf.memory, hf.foreach_epoch or your own.",
            )
        self._pipeline._add(g.SINK, uid, sink, self._inputs, schema=schema)

    def _step(self, kind: str, function: Any, uid: str | None, schema: Any) -> Stream:
        if not callable(function):
            raise PipelineError(f"{kind} needs a function, not {function!r}.", where=g.caller())
        return self._pipeline._add(kind, uid, function, self._inputs, schema=schema)


class KeyedStream:
    """A stream divided by a key, so that what follows may keep state for each key."""

    def __init__(self, pipeline: Pipeline, inputs: tuple[g.Input, ...], key: g.Key) -> None:
        self._pipeline = pipeline
        self._inputs = tuple(g.Input(i.node, i.tag, key) for i in inputs)
        self._key = key

    def process(self, uid: str, function: KeyedProcess, *, schema: Any = None) -> Stream:
        """Run a `KeyedProcess`: a function with state for each key."""
        if isinstance(function, type) and issubclass(function, KeyedProcess):
            function = function()
        if not isinstance(function, KeyedProcess):
            raise PipelineError(
                f"process needs a KeyedProcess, not {function!r}.",
                uid=str(uid),
                where=g.caller(),
                remedy="Derive a class from hf.KeyedProcess and pass an instance of it.",
            )
        tags = (g.MAIN, *function.side_outputs)
        return self._pipeline._add(g.PROCESS, uid, function, self._inputs, tags=tags, schema=schema)

    def reduce(self, uid: str, function: Callable[[Record, Record], Record], *, schema: Any = None) -> Stream:
        """Keep one record for each key, made of all its records by an associative function of two.

        Each epoch emits the new record of every key that it touched.
        """
        if not callable(function):
            raise PipelineError("reduce needs a function of two records.", uid=str(uid), where=g.caller())
        return self._pipeline._add(g.REDUCE, uid, function, self._inputs, schema=schema)

    def aggregate(self, uid: str, **columns: Column | Aggregate) -> Stream:
        """Keep aggregates for each key: `aggregate("totals", n=hf.count(), total=hf.sum("amount"))`.

        Each epoch emits one record for every key that it touched: the key's columns (`key` where it is a
        function), and the aggregates under the names given. They are computed in batches, and combined
        before the exchange.
        """
        if not columns:
            raise PipelineError("aggregate needs at least one aggregate.", uid=str(uid), where=g.caller())
        for name, column in columns.items():
            if not isinstance(column, (Column, Aggregate)):
                raise PipelineError(
                    f"{name}={column!r} is no aggregate.",
                    uid=str(uid),
                    where=g.caller(),
                    remedy="Use hf.count(), hf.sum(column), … or an instance of your own hf.Aggregate.",
                )
            if name in (self._key.columns or ("key",)):
                raise PipelineError(
                    f"{name!r} is both a key and an aggregate.", uid=str(uid), where=g.caller()
                )
        return self._pipeline._add(g.AGGREGATE, uid, dict(columns), self._inputs)
