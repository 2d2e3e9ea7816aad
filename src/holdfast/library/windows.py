"""Windows of a keyed stream: what stands between `keyed.window(…)` and the stream of results."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from holdfast.data.types import arrow_schema
from holdfast.errors import PipelineError
from holdfast.functions import Aggregate, Column, WindowFunction
from holdfast.library.ranks import top
from holdfast.plan import graph as g
from holdfast.plan.times import LATE, WINDOW_END, WINDOW_START, WindowBody
from holdfast.time.triggers import Trigger, event_time
from holdfast.time.units import duration_us
from holdfast.time.windows import Assigner

if TYPE_CHECKING:
    from holdfast.pipeline import Pipeline, Stream

Record = dict[str, Any]

_KEY_NAME = re.compile(r"key\d*")
"""What a key that is a function is called in results: `key`, or where it gives tuples, `key0`, `key1` …"""


class WindowedStream:
    """A keyed stream divided by time."""

    def __init__(
        self,
        pipeline: Pipeline,
        inputs: tuple[g.Input, ...],
        key: g.Key,
        assigner: Assigner,
        lateness_us: int = 0,
        trigger: Trigger | None = None,
    ) -> None:
        self._pipeline, self._inputs, self._key, self._assigner = pipeline, inputs, key, assigner
        self._lateness_us = lateness_us
        self._trigger = event_time() if trigger is None else trigger

    def allowed_lateness(self, lateness: Any) -> WindowedStream:
        """Keep windows so much longer: a record that comes late, but within it, makes its window's result come again.

        What comes later still is counted, and can be had with `stream.side("late")`.
        """
        us = duration_us(lateness)
        if us < 0:
            raise PipelineError(f"Lateness can't be {lateness!r}.", where=g.caller())
        return WindowedStream(self._pipeline, self._inputs, self._key, self._assigner, us, self._trigger)

    def trigger(self, trigger: Trigger) -> WindowedStream:
        """Say when windows fire: `hf.triggers.count(100)` and others, or an `hf.Trigger` of your own.

        Without one they fire when the watermark passes their end, and again for what comes late.
        """
        if not isinstance(trigger, Trigger):
            raise PipelineError(
                f"{trigger!r} is no trigger.",
                where=g.caller(),
                remedy="Use hf.triggers.event_time(), count(100), … or an instance of your own hf.Trigger.",
            )
        if self._assigner.merging and not trigger.can_merge:
            raise PipelineError(
                f"{trigger!r} can't be used with windows that merge, as {self._assigner!r} makes them.",
                where=g.caller(),
                remedy="Set can_merge = True on the trigger and define on_merge.",
            )
        return WindowedStream(
            self._pipeline, self._inputs, self._key, self._assigner, self._lateness_us, trigger
        )

    def aggregate(self, uid: str, **columns: Column | Aggregate) -> Stream:
        """Aggregates of each key and window: the key's columns, `window_start` and `window_end`, and the aggregates.

        Of tumbling and sliding windows and sessions, without a trigger, they are computed in batches and combined before the
        exchange: one record when the watermark passes the window's end. Otherwise records are taken one by one.
        """
        _check_bounds(uid, self._key)
        check_aggregates(uid, columns, self._key, (WINDOW_START, WINDOW_END))
        ordered = [n for n, c in columns.items() if isinstance(c, Column) and c.kind in ("first", "last")]
        if self._assigner.merging and ordered:
            raise PipelineError(
                f"{', '.join(ordered)}: first and last are by arrival, and of windows that have merged nobody knows it any more.",
                uid=str(uid),
                where=g.caller(),
                remedy="Take hf.min or hf.max of the time, or .process(uid, WindowFunction), which has all records.",
            )
        return self._add(uid, g.AGGREGATE, columns=dict(columns))

    def reduce(self, uid: str, function: Callable[[Record, Record], Record]) -> Stream:
        """One record for each key and window, made of all its records by an associative function of two.

        It has the fields of the records, and `window_start` and `window_end`.
        """
        if not callable(function):
            raise PipelineError("reduce needs a function of two records.", uid=str(uid), where=g.caller())
        _check_bounds(uid, self._key)
        return self._add(uid, g.REDUCE, function)

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
        """The `n` records of each key and window with the greatest values of a column, when the watermark has passed it.

        They come with their `rank` from 1 on, and with `window_start` and `window_end`; the rest is as for
        `KeyedStream.top`. Only they are kept. Late records are counted, and come out of `stream.side("late")`.
        """
        if self._lateness_us or self._trigger != event_time():
            raise PipelineError(
                "top knows neither lateness nor triggers.",
                uid=str(uid),
                where=g.caller(),
                remedy="Leave them out, or sort the records of a window in .process(uid, WindowFunction).",
            )
        return top(self._pipeline, self._inputs, uid, n, by, ascending, ties, rank, self._assigner)

    def process(self, uid: str, function: WindowFunction, *, schema: Any = None) -> Stream:
        """Run a `WindowFunction` over all records of a window. All of them are kept until it is forgotten.

        `schema` declares what it yields; `window_start` and `window_end` are added if they are not in it.
        """
        if isinstance(function, type) and issubclass(function, WindowFunction):
            function = function()
        if not isinstance(function, WindowFunction):
            raise PipelineError(
                f"process needs a WindowFunction here, not {function!r}.",
                uid=str(uid),
                where=g.caller(),
                remedy="Derive a class from hf.WindowFunction and pass an instance of it.",
            )
        if LATE in function.side_outputs:
            raise PipelineError(
                f"The side output {LATE!r} is that of late records.",
                uid=str(uid),
                where=g.caller(),
                remedy="Give yours another name in side_outputs.",
            )
        if schema is not None:
            schema = arrow_schema(schema)
            # Null is a type that is still open: it takes that of the stream's own time.
            for name in (n for n in (WINDOW_START, WINDOW_END) if n not in schema.names):
                schema = schema.append(pa.field(name, pa.null()))
        return self._add(uid, g.PROCESS, function, tags=function.side_outputs, schema=schema)

    def _add(
        self,
        uid: str,
        kind: str,
        function: Any = None,
        *,
        columns: dict[str, Column | Aggregate] | None = None,
        tags: tuple[str, ...] = (),
        schema: Any = None,
    ) -> Stream:
        body = WindowBody(self._assigner, columns or {}, self._lateness_us, self._trigger, kind, function)
        tags = (g.MAIN, LATE, *tags)
        return self._pipeline._add(g.WINDOW, uid, body, self._inputs, tags=tags, schema=schema)


def check_aggregates(
    uid: str, columns: dict[str, Column | Aggregate], key: g.Key, bounds: tuple[str, ...] = ()
) -> None:
    """Raise for aggregates that are none, or whose names are taken."""
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
        if name in key.columns or (key.function is not None and _KEY_NAME.fullmatch(name)) or name in bounds:
            raise PipelineError(
                f"{name!r} is both {'a bound of the window' if name in bounds else 'a key'} and an aggregate.",
                uid=str(uid),
                where=g.caller(),
                remedy="Give the aggregate another name.",
            )


def _check_bounds(uid: str, key: g.Key) -> None:
    """Raise for a key that the bounds of a window would take the place of."""
    taken = next((name for name in key.columns if name in (WINDOW_START, WINDOW_END)), None)
    if taken is not None:
        raise PipelineError(
            f"{taken!r} is both a key and a bound of the window.",
            uid=str(uid),
            where=g.caller(),
            remedy=f'Give the key another name before: .map(lambda r: {{**r, "start": r["{taken}"]}}).key_by("start").',
        )
