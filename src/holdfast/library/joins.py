"""Joins of two keyed streams: what stands between `left.join(right)` and the stream of results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from holdfast.data.types import arrow_schema
from holdfast.errors import PipelineError
from holdfast.plan import graph as g
from holdfast.plan.bodies import (
    INNER,
    LEFT,
    OUTER,
    RIGHT,
    AsOfBody,
    IntervalBody,
    Select,
    WindowJoinBody,
)
from holdfast.plan.times import LATE, LATE_RIGHT, stamp_of
from holdfast.time.units import Duration, positive_us, signed_us
from holdfast.time.windows import Assigner, Sliding, Tumbling

if TYPE_CHECKING:
    from holdfast.pipeline import KeyedStream, Pipeline, Stream

_TAGS = (g.MAIN, LATE, LATE_RIGHT)


def both(left: KeyedStream, right: Any, what: str) -> tuple[g.Input, ...]:
    """The inputs of an operator that takes two keyed streams of one pipeline."""
    from holdfast.pipeline import KeyedStream

    if not isinstance(right, KeyedStream):
        raise PipelineError(
            f"Only keyed streams can be {what}.", where=g.caller(), remedy="Key both: .key_by(column)."
        )
    if right._pipeline is not left._pipeline:
        raise PipelineError(f"Only streams of one pipeline can be {what}.", where=g.caller())
    return left._inputs + tuple(g.Input(i.node, i.tag, i.key, 1) for i in right._inputs)


class JoinedStreams:
    """Two keyed streams of which pairs are to be made: say which with `between` or `window`."""

    def __init__(self, pipeline: Pipeline, inputs: tuple[g.Input, ...]) -> None:
        self._pipeline, self._inputs = pipeline, inputs

    def between(self, lower: Duration, upper: Duration) -> IntervalJoin:
        """Pairs of one key whose times are close: left's + lower <= right's <= left's + upper.

        `between("-5s", "10s")` takes what comes from five seconds before to ten after, both included.

        >>> import holdfast as hf
        >>> orders = [{"id": 1, "at": 10, "item": "tea"}, {"id": 2, "at": 11, "item": "salt"}]
        >>> paid = [{"order": 1, "at": 14, "sum": 3}, {"order": 2, "at": 95, "sum": 1}]
        >>> pipeline = hf.Pipeline("paid")
        >>> left = pipeline.read("orders", hf.records(orders)).event_time("at", unit="s").key_by("id")
        >>> right = pipeline.read("paid", hf.records(paid)).event_time("at", unit="s").key_by("order")
        >>> pairs = left.join(right).between("0s", "1m").select("pairs", lambda o, p: {**o, "sum": p["sum"]})
        >>> pairs.write("out", hf.memory())
        >>> hf.testing.run(pipeline).rows("out")
        [{'id': 1, 'at': 10, 'item': 'tea', 'sum': 3}]
        """
        lower_us, upper_us = signed_us("lower", lower), signed_us("upper", upper)
        if lower_us > upper_us:
            raise PipelineError(
                f"between({lower!r}, {upper!r}): the first must not be greater than the second.",
                where=g.caller(),
            )
        return IntervalJoin(self._pipeline, self._inputs, lower_us, upper_us)

    def window(self, assigner: Assigner) -> WindowJoin:
        """Pairs of one key and window: `hf.tumbling` or `hf.sliding`."""
        if not isinstance(assigner, (Tumbling, Sliding)):
            raise PipelineError(
                f"{assigner!r} can't be joined in.",
                where=g.caller(),
                remedy="Use hf.tumbling or hf.sliding; for records that are close in time: .between(lower, upper).",
            )
        return WindowJoin(self._pipeline, self._inputs, assigner)


class IntervalJoin:
    """Pairs of two streams whose times are close."""

    def __init__(self, pipeline: Pipeline, inputs: tuple[g.Input, ...], lower_us: int, upper_us: int) -> None:
        self._pipeline, self._inputs, self._bounds = pipeline, inputs, (lower_us, upper_us)

    def select(
        self,
        uid: str,
        function: Select | None = None,
        *,
        how: str = INNER,
        time: str | None = None,
        schema: Any = None,
    ) -> Stream:
        """The pairs, each once, as soon as both records are there.

        A result is what `function(left, right)` returns, None for nothing; without it, all columns of both, where
        those of the right that the left has too end in `_right`. Results have no event time, unless you ask for one
        with `time`. Records that come too late are counted, and come out of `side("late")`, and those of the right out
        of `side("late_right")`.

        Args:
            how: "inner", or "left", "right", "outer": then records of that side, or both, that have found no partner
                come out alone, when none can come any more. The function gets None for what is missing.
            time: a column to add, which is the event time of the results: the later time of the two records. For one
                that comes out alone it is the last at which a partner could have come, or its own if that is later.
            schema: what the function returns, where it is known.
        """
        _check(uid, function, how, (INNER, LEFT, RIGHT, OUTER))
        if time is not None and schema is not None:
            schema = arrow_schema(schema)
            if (
                time not in schema.names
            ):  # null is a type that is still open: it takes that of the stream's own time
                schema = schema.append(pa.field(time, pa.null()))
        body = IntervalBody(*self._bounds, how, function, time, time_column(self._pipeline, self._inputs))
        return self._pipeline._add(g.JOIN, uid, body, self._inputs, tags=_TAGS, schema=schema)


class WindowJoin:
    """Pairs of two streams that are in one window."""

    def __init__(self, pipeline: Pipeline, inputs: tuple[g.Input, ...], assigner: Tumbling | Sliding) -> None:
        self._pipeline, self._inputs, self._assigner = pipeline, inputs, assigner

    def select(self, uid: str, function: Select | None = None, *, schema: Any = None) -> Stream:
        """The pairs, when the watermark has passed their window, with `window_start` and `window_end`.

        Results and late records are as for `IntervalJoin.select`; their event time is the end of the window.
        """
        _check(uid, function, INNER, (INNER,))
        body = WindowJoinBody(self._assigner, function, time_column(self._pipeline, self._inputs))
        return self._pipeline._add(g.JOIN, uid, body, self._inputs, tags=_TAGS, schema=schema)


class AsOfJoin:
    """Each record of the left with what the right said by then."""

    def __init__(self, pipeline: Pipeline, inputs: tuple[g.Input, ...], keep_us: int | None) -> None:
        self._pipeline, self._inputs, self._keep_us = pipeline, inputs, keep_us

    def select(
        self, uid: str, function: Select | None = None, *, how: str = LEFT, schema: Any = None
    ) -> Stream:
        """Each left record with the right one of the greatest time that is not after its own.

        It comes out when the watermark has passed it, so that the result does not depend on what came first. Of
        several on the right with one time, the one that came last counts. The event time is that of the left.
        Results and late records are as for `IntervalJoin.select`, except that a late one of the right counts for what
        comes out from then on.

        Args:
            how: "left", or "inner" to leave out records for which the right had nothing.
        """
        _check(uid, function, how, (LEFT, INNER))
        body = AsOfBody(how, function, self._keep_us)
        return self._pipeline._add(g.JOIN, uid, body, self._inputs, tags=_TAGS, schema=schema)


def as_of(left: KeyedStream, right: KeyedStream, keep_for: Duration | None) -> AsOfJoin:
    """The join that `KeyedStream.as_of` makes."""
    keep_us = None if keep_for is None else positive_us("keep_for", keep_for)
    return AsOfJoin(left._pipeline, both(left, right, "joined"), keep_us)


def time_column(pipeline: Pipeline, inputs: tuple[g.Input, ...]) -> str | None:
    """Where the first of an operator's inputs has its time, as far as that is known while the graph is drawn."""
    graph = g.Graph(pipeline.name, tuple(pipeline._nodes))
    try:
        stamp = stamp_of(graph, graph.nodes[inputs[0].node], inputs[0].tag)
    except PipelineError:
        return None
    return None if stamp is None else stamp.column


def _check(uid: Any, function: Any, how: str, known: tuple[str, ...]) -> None:
    if function is not None and not callable(function):
        raise PipelineError(
            f"select needs a function of two records, not {function!r}.",
            uid=str(uid),
            where=g.caller(),
            remedy="Give it one, select(uid, lambda left, right: {…}), or leave it out for all columns of both.",
        )
    if how not in known:
        raise PipelineError(
            f"how={how!r} is not known here.",
            uid=str(uid),
            where=g.caller(),
            remedy=f"One of: {', '.join(known)}.",
        )
