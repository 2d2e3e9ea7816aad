"""What a user writes: Pipeline, Stream and KeyedStream.

They only draw the graph. What runs it is the engine, reached through `run` and `start`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from holdfast.data.types import arrow_schema
from holdfast.errors import HoldfastError, PipelineError
from holdfast.functions import Aggregate, Column, KeyedProcess, TwoInputProcess
from holdfast.io.base import DEAD_LETTER, Sink, Source
from holdfast.library.joins import AsOfJoin, JoinedStreams, as_of, both
from holdfast.library.patterns import Pattern, find
from holdfast.library.ranks import deduplicate, top
from holdfast.library.windows import WindowedStream, check_aggregates
from holdfast.plan import graph as g
from holdfast.plan.bodies import AsyncBody, OrderedBody
from holdfast.plan.times import LATE, LATE_RIGHT, UNTIMED
from holdfast.time.units import duration_us
from holdfast.time.watermarks import ByClock, EventTime, Watermarks, bounded
from holdfast.time.windows import Assigner

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
        if uid is None and kind not in (*g.NEEDS_UID, g.ASYNC_MAP):  # answers are kept under it
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

    def async_map(
        self,
        function: Callable[[Record], Awaitable[Record]],
        *,
        uid: str,
        capacity: int = 100,
        timeout: Any = "10s",
        retries: int = 2,
        on_error: str = "fail",
        schema: Any = None,
    ) -> Stream:
        """One record for each record, by a call of the outside world: an `async def` that asks a service.

        What is answered is recorded with the epoch. A replay reads it and calls nobody; an epoch that was not
        committed is run again, and its calls are made again. Records stay in their order.

        Args:
            function: takes a record, which is its own to change, and returns one. An object with an `async def __call__`
                may also be an async context manager: it is entered before the calls of a batch and left after them,
                the place for a client session.
            uid: under which name answers are kept.
            capacity: so many calls a task has under way at once.
            timeout: so long a record may take, all its tries included.
            retries: so often a call that raised is made again, after a pause that doubles from 0.1 s on.
            on_error: a record that has no answer then: "fail" ends the run, "skip" counts it, "dead_letter" counts it
                and has it come out of `stream.side("dead_letter")`.
            schema: declares what is returned; without it the first epoch shows it, and may make its calls twice.

        >>> import holdfast as hf
        >>> async def lookup(record):
        ...     return {**record, "country": {"ann": "KR"}.get(record["user"])}
        >>> pipeline = hf.Pipeline("visits")
        >>> visits = pipeline.read("visits", hf.records([{"user": "ann"}, {"user": "bob"}]))
        >>> visits.async_map(lookup, uid="country").write("out", hf.memory())
        >>> hf.testing.run(pipeline).rows("out")
        [{'user': 'ann', 'country': 'KR'}, {'user': 'bob', 'country': None}]
        """
        try:
            body = AsyncBody(function, capacity, duration_us(timeout) / 1e6, retries, on_error)
        except HoldfastError as error:
            raise error.at(uid, g.caller()) from None
        tags = (g.MAIN, DEAD_LETTER) if on_error == DEAD_LETTER else (g.MAIN,)
        return self._pipeline._add(g.ASYNC_MAP, uid, body, self._inputs, tags=tags, schema=schema)

    def union(self, *others: Stream) -> Stream:
        """This stream and others as one; each record once."""
        for other in others:
            if other._pipeline is not self._pipeline:
                raise PipelineError("Only streams of one pipeline can be united.", where=g.caller())
        inputs = self._inputs + tuple(i for o in others for i in o._inputs)
        return Stream(self._pipeline, inputs)

    def event_time(
        self,
        column: str,
        *,
        out_of_order: Any = "0s",
        watermark: Watermarks | None = None,
        unit: str | None = None,
        idle_after: Any = None,
        align: str | None = None,
        drift: Any = None,
        missing: str = "fail",
        uid: str | None = None,
    ) -> Stream:
        """Say where the records have their time, and how far behind the greatest a record may come.

        The column stays the time of the stream from here on: keep it in functions that make new records.

        Args:
            column: Arrow timestamps or dates; or integers, then say their `unit` ("s", "ms", "us", "ns").
            out_of_order: how much later than its successors a record may come; later ones are late.
            watermark: another rule than `out_of_order`: `hf.periodic`, `hf.punctuated`, `hf.from_source`, or your own.
            idle_after: a split with nothing to say for so long is not waited for.
            align: the name of a group of streams that are kept together: a source that is more than `drift`
                ahead of the slowest of its group waits.
            missing: "fail" for a record without a time, or "side": such records are counted, and can be had with
                `stream.side("untimed")`.
            uid: under which name its watermarks are kept; by default made of its input's.

        >>> import holdfast as hf
        >>> rows = [{"user": "ann", "at": 1_000}, {"user": "ann", "at": 9_000}, {"user": "ann", "at": 12_000}]
        >>> pipeline = hf.Pipeline("visits")
        >>> timed = pipeline.read("rows", hf.records(rows)).event_time("at", unit="ms", out_of_order="1s")
        >>> counted = timed.key_by("user").window(hf.tumbling("10s")).aggregate("visits", n=hf.count())
        >>> counted.map(lambda r: {"n": r["n"]}).write("out", hf.memory())
        >>> hf.testing.run(pipeline).rows("out")
        [{'n': 2}, {'n': 1}]
        """
        where = g.caller()
        if missing not in ("fail", "side"):
            raise PipelineError(f"missing={missing!r} is not known.", where=where, remedy='"fail" or "side".')
        if align is not None and drift is None:
            raise PipelineError("align needs a drift.", where=where, remedy='Say how far ahead: drift="1m".')
        if drift is not None and duration_us(drift) < 0:
            raise PipelineError(
                f"drift={drift!r} would hold every stream of the group back, the slowest too.",
                where=where,
                remedy='Say how far ahead one may be: drift="1m".',
            )
        if align is None and drift is not None:
            raise PipelineError(
                "drift needs a group.", where=where, remedy='Name it on each stream: align="trips".'
            )
        if watermark is not None and not isinstance(watermark, Watermarks):
            raise PipelineError(
                f"{watermark!r} is no rule for watermarks.",
                where=where,
                remedy="Write hf.periodic(function), hf.punctuated(function) or hf.from_source().",
            )
        if watermark is not None and out_of_order != "0s":
            raise PipelineError(
                "watermark and out_of_order are two rules for one thing.",
                where=where,
                remedy="Give one of them: out_of_order= is short for watermark=hf.bounded(…).",
            )
        idle_us = None if idle_after is None else duration_us(idle_after)
        if idle_us is not None and idle_us <= 0:
            raise PipelineError(
                f"idle_after={idle_after!r} would leave every split out.",
                where=where,
                remedy='Say how long one may be silent: idle_after="30s".',
            )
        body = EventTime(
            column,
            unit,
            bounded(out_of_order) if watermark is None else watermark,
            None if idle_us is None else max(1, idle_us // 1000),
            align,
            0 if drift is None else duration_us(drift),
            missing,
        )
        if uid is None:
            uid = f"{self._pipeline._nodes[self._inputs[0].node].uid}.time"
        tags = (g.MAIN, UNTIMED) if missing == "side" else (g.MAIN,)
        return self._pipeline._add(g.EVENT_TIME, uid, body, self._inputs, tags=tags)

    def clock_time(self, column: str, *, uid: str | None = None) -> Stream:
        """Take the time at which records are processed as theirs: windows and timers behind it go by the clock on the wall.

        It is that of the epoch (`ctx.now_ms`), fixed by its plan, so a replay sees the same. It goes on without records, nothing
        is late, and it is put into a column of that name.

        Args:
            column: a name that no column has.
            uid: under which name its watermarks are kept; by default made of its input's.

        >>> import holdfast as hf
        >>> pipeline = hf.Pipeline("clicks")
        >>> clicks = pipeline.read("rows", hf.records([{"user": "ann"}, {"user": "ann"}])).clock_time("seen_at")
        >>> counted = clicks.key_by("user").window(hf.tumbling("10s")).aggregate("clicks", n=hf.count())
        >>> counted.map(lambda r: {"n": r["n"]}).write("out", hf.memory())
        >>> hf.testing.run(pipeline).rows("out")
        [{'n': 2}]
        """
        if uid is None:
            uid = f"{self._pipeline._nodes[self._inputs[0].node].uid}.time"
        body = EventTime(column, None, ByClock())
        return self._pipeline._add(g.EVENT_TIME, uid, body, self._inputs)

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
                remedy="Declare side_outputs on the function's class."
                if node.kind in (g.PROCESS, g.ORDERED, g.WINDOW)
                else 'For dead letters, open the source with on_bad_record="dead_letter".'
                if node.kind == g.SOURCE
                else 'For dead letters, call with on_error="dead_letter".'
                if node.kind == g.ASYNC_MAP
                else None,
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

    def process(
        self, uid: str, function: KeyedProcess, *, in_order: bool = False, schema: Any = None
    ) -> Stream:
        """Run a `KeyedProcess`: a function with state for each key.

        Args:
            in_order: by event time. Records wait until the clock has passed them, and timers fire between them, so
                results don't depend on when records came. Late ones come out of `side("late")`.
        """
        if isinstance(function, type) and issubclass(function, KeyedProcess):
            function = function()
        if not isinstance(function, KeyedProcess) or isinstance(function, TwoInputProcess):
            raise PipelineError(
                f"process needs a KeyedProcess of one input, not {function!r}.",
                uid=str(uid),
                where=g.caller(),
                remedy="Derive a class from hf.KeyedProcess and pass an instance of it. For a TwoInputProcess: "
                "left.connect(right).process(…).",
            )
        return _add_process(self._pipeline, uid, function, self._inputs, schema, (LATE,) if in_order else ())

    def connect(self, other: KeyedStream) -> ConnectedStreams:
        """This stream and another, keyed alike, for a function that takes both: `hf.TwoInputProcess`."""
        return ConnectedStreams(self._pipeline, both(self, other, "connected"))

    def join(self, other: KeyedStream) -> JoinedStreams:
        """Pairs of this stream and another, keyed alike: `.between(lower, upper)` or `.window(…)` say which.

        Both need an event time. Null is a key like any other: it joins with null.
        """
        return JoinedStreams(self._pipeline, both(self, other, "joined"))

    def as_of(self, other: KeyedStream, *, keep_for: Any = None) -> AsOfJoin:
        """Each record of this stream with what another, keyed alike, had said last by its time: `.select(uid)`.

        Args:
            keep_for: what the other said counts for so long; without it, until it says something newer.
        """
        return as_of(self, other, keep_for)

    def window(self, assigner: Assigner) -> WindowedStream:
        """Divide each key's records by time: `hf.tumbling("10s")`, `hf.sliding`, `hf.session`, or your own assigner.

        The stream needs an event time: see `Stream.event_time`.
        """
        if not isinstance(assigner, Assigner):
            raise PipelineError(
                f"{assigner!r} is no window.",
                where=g.caller(),
                remedy='Use hf.tumbling("10s"), hf.sliding("1m", "10s"), hf.session("30s") or your own Assigner.',
            )
        return WindowedStream(self._pipeline, self._inputs, self._key, assigner)

    def deduplicate(self, uid: str, *, within: Any = None) -> Stream:
        """The first record of each key, as it is.

        Args:
            within: a record passes if none of its key that has passed is within that time of it, earlier or later; it is
                forgotten after so much event time. Records that come too late are counted, and come out of
                `stream.side("late")`. Without it a key passes once, and is kept for ever.

        >>> import holdfast as hf
        >>> pipeline = hf.Pipeline("once")
        >>> clicks = pipeline.read("clicks", hf.records([{"id": 1}, {"id": 2}, {"id": 1}]))
        >>> clicks.key_by("id").deduplicate("once").write("out", hf.memory())
        >>> sorted(r["id"] for r in hf.testing.run(pipeline).rows("out"))
        [1, 2]
        """
        return deduplicate(self._pipeline, self._inputs, uid, within)

    def top(
        self,
        uid: str,
        n: int,
        by: str | Sequence[str],
        *,
        ascending: bool | Sequence[bool] = False,
        ties: str = "first",
        rank: str = "rank",
    ) -> Stream:
        """The `n` records of each key with the greatest values of a column, kept up to date.

        Each epoch emits them for every key for which they have changed: all of them, with their `rank` from 1 on.
        Null comes last. For the top of a window: `keyed.window(…).top(…)`.

        Args:
            by: a column, or several: of records that are equal by the first the second decides, and so on.
            ascending: the smallest instead; for each of several columns, where they are a list.
            ties: of equals, the one that came "first" ranks higher, or the one that came "last".
            rank: what the column with the rank is called.
        """
        return top(self._pipeline, self._inputs, uid, n, by, ascending, ties, rank)

    def pattern(self, uid: str, pattern: Pattern) -> Stream:
        """Records of a key that follow each other, as `hf.pattern` says, in the order of event time.

        A match has the key's columns and the record of each step under its name, and comes out when the watermark has
        passed the last. Every record that fits the first step begins a match of its own; each step takes the first record
        that fits. What began and came to nothing comes out of `stream.side("timeout")`, where `ended` says why:
        "timeout", or the name of what came and must not. Late records are counted, and come out of
        `stream.side("late")`.

        >>> import holdfast as hf
        >>> rows = [{"card": 1, "at": 10, "sum": 2}, {"card": 1, "at": 40, "sum": 950}]
        >>> fraud = hf.pattern("small", lambda r: r["sum"] < 10).then("large", lambda r: r["sum"] > 900)
        >>> pipeline = hf.Pipeline("fraud")
        >>> keyed = pipeline.read("rows", hf.records(rows)).event_time("at", unit="s").key_by("card")
        >>> found = keyed.pattern("fraud", fraud.within("10m"))
        >>> found.map(lambda r: {"card": r["card"], "sum": r["large"]["sum"]}).write("out", hf.memory())
        >>> hf.testing.run(pipeline).rows("out")
        [{'card': 1, 'sum': 950}]
        """
        return find(self._pipeline, self._inputs, self._key, uid, pattern)

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
        check_aggregates(uid, columns, self._key)
        return self._pipeline._add(g.AGGREGATE, uid, dict(columns), self._inputs)


class ConnectedStreams:
    """Two keyed streams that one function takes."""

    def __init__(self, pipeline: Pipeline, inputs: tuple[g.Input, ...]) -> None:
        self._pipeline, self._inputs = pipeline, inputs

    def process(
        self, uid: str, function: TwoInputProcess, *, in_order: bool = False, schema: Any = None
    ) -> Stream:
        """Run a `TwoInputProcess`: a function with state for each key that both streams share.

        Args:
            in_order: by event time, whichever side a record comes on; of the same time, the left's come first. The
                faster side waits for the slower one. Late ones come out of `side("late")` and `side("late_right")`.
        """
        if isinstance(function, type) and issubclass(function, TwoInputProcess):
            function = function()
        if not isinstance(function, TwoInputProcess):
            raise PipelineError(
                f"Connected streams need a TwoInputProcess, not {function!r}.",
                uid=str(uid),
                where=g.caller(),
                remedy="Derive a class from hf.TwoInputProcess and pass an instance of it.",
            )
        late = (LATE, LATE_RIGHT) if in_order else ()
        return _add_process(self._pipeline, uid, function, self._inputs, schema, late)


def _add_process(
    pipeline: Pipeline,
    uid: str,
    function: KeyedProcess,
    inputs: tuple[g.Input, ...],
    schema: Any,
    late: tuple[str, ...],
) -> Stream:
    """A process; in the order of event time if late records come out of it."""
    tags = dict.fromkeys((g.MAIN, *function.side_outputs, *late))
    kind, body = (g.ORDERED, OrderedBody(function)) if late else (g.PROCESS, function)
    return pipeline._add(kind, uid, body, inputs, tags=tuple(tags), schema=schema)
