"""What a user extends: KeyedProcess, WindowFunction and Aggregate, and the aggregates that come with the house.

How they are run, in batches and combined before the exchange, is `engine.keyed`'s business.
"""

from __future__ import annotations

import dataclasses
import datetime
import random
import uuid
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from holdfast.data.types import arrow_type
from holdfast.errors import PipelineError
from holdfast.state.descriptors import State
from holdfast.time.units import EPOCH, LIMIT, MIN_TIME, watermark_ms

if TYPE_CHECKING:
    from holdfast.time.windows import Window

Record = dict[str, Any]


class Context:
    """What a function may know besides its key and record: the epoch's clock, its number, side outputs.

    Everything here is fixed by the epoch's plan, so that an epoch run again sees the same.

    Attributes:
        uid: the operator's uid.
        epoch: the number of the epoch.
        now_ms: the epoch's processing time, in milliseconds since 1970.
    """

    __slots__ = (
        "_at",
        "_clocked",
        "_key",
        "_late",
        "_order",
        "_outputs",
        "_random",
        "_timers",
        "_torn",
        "_watermark",
        "epoch",
        "now_ms",
        "uid",
    )

    def __init__(
        self,
        uid: str,
        epoch: int,
        now_ms: int,
        outputs: dict[str, list[Record]] | None = None,
        watermark: int = MIN_TIME,
        clocked: bool = True,
    ) -> None:
        self.uid = uid
        self.epoch = epoch
        self._clocked = clocked
        self.now_ms = now_ms
        self._outputs = {} if outputs is None else outputs
        self._order = ""
        self._random: random.Random | None = None
        self._watermark = watermark
        self._at: int | None = None
        self._key: Any = None
        self._timers: TimerBook | None = None
        self._late = 0
        self._torn: PipelineError | None = None
        """Where streams with different event times came together: what to do about it."""

    @property
    def time_ms(self) -> int | None:
        """The event time of the record or timer at hand; None where the stream has none."""
        if self._at is None and self._torn is not None:
            raise self._torn
        return None if self._at is None else self._at // 1000

    @property
    def watermark_ms(self) -> int:
        """The event clock: no record at or below it is still to come, except late ones.

        While records are processed it is that of the epoch's start; when timers fire, that of its end. In order of event
        time (`in_order=True`) it is the millisecond before the record or timer at hand.
        """
        return watermark_ms(self._watermark)

    def set_timer(self, at: int | datetime.datetime, name: str = "") -> None:
        """Have `on_timer` called for this key when event time has passed `at`: milliseconds since 1970, or a datetime.

        The same time and name twice is one timer. One in the past fires at the end of this epoch.
        """
        if not self._clocked:
            raise PipelineError(
                "A timer on event time would never fire: the stream has none.",
                uid=self.uid,
                remedy='Say where it is before key_by: stream.event_time("ts", out_of_order="5s"). Or go by the clock: '
                "ctx.set_clock_timer(…).",
            )
        self._book().set(EVENT, self._key, instant_us(at), name)

    def delete_timer(self, at: int | datetime.datetime, name: str = "") -> None:
        """Take a timer back; nothing happens where there is none."""
        self._book().delete(EVENT, self._key, instant_us(at), name)

    def set_clock_timer(self, at: int | datetime.datetime, name: str = "") -> None:
        """Have `on_timer` called in the first epoch whose processing time (`now_ms`) is `at` or later."""
        self._book().set(CLOCK, self._key, instant_us(at), name)

    def delete_clock_timer(self, at: int | datetime.datetime, name: str = "") -> None:
        """Take a timer on processing time back."""
        self._book().delete(CLOCK, self._key, instant_us(at), name)

    def _book(self) -> TimerBook:
        if self._timers is None:
            raise PipelineError(
                "A timer was set, but the function has no on_timer.",
                uid=self.uid,
                remedy="Define on_timer(self, key, timer, ctx) on the class.",
            )
        return self._timers

    def emit(self, tag: str, record: Record) -> None:
        """Send a record to the side output `tag`; have it with `stream.side(tag)`."""
        try:
            self._outputs[tag].append(record)
        except KeyError:
            raise PipelineError(
                f"There is no side output {tag!r}.",
                uid=self.uid,
                remedy=f"Declare it: side_outputs = ({tag!r},) on the class; now: {tuple(self._outputs)}.",
            ) from None

    def late(self, record: Record) -> None:
        """Count a record that came too late, as windows do; where `side_outputs` has "late", it goes there."""
        self._late += 1
        if "late" in self._outputs:
            self._outputs["late"].append(record)

    @property
    def random(self) -> random.Random:
        """Randomness that is the same when the epoch is run again."""
        if self._random is None:
            self._random = random.Random(f"{self.uid}:{self.epoch}:{self._order}")
        return self._random

    def uuid(self) -> uuid.UUID:
        """An id that is the same when the epoch is run again."""
        return uuid.UUID(int=self.random.getrandbits(128), version=4)

    def _reseed(self, order: str) -> None:
        """A key group starts: what is random in it must not depend on which shard runs it."""
        self._order = order
        self._random = None


EVENT, CLOCK = "event", "clock"
"""What a timer follows: event time, or processing time."""


class TimerBook(Protocol):
    """Where timers are set and deleted."""

    def set(self, kind: str, key: Any, at_us: int, name: str) -> None: ...

    def delete(self, kind: str, key: Any, at_us: int, name: str) -> None: ...


@dataclasses.dataclass(frozen=True)
class Timer:
    """A timer that is due: when it was set for, its name, and which time it follows ("event" or "clock")."""

    at_us: int
    name: str
    kind: str

    @property
    def at_ms(self) -> int:
        """Milliseconds since 1970."""
        return self.at_us // 1000

    @property
    def at(self) -> datetime.datetime:
        """As a datetime in UTC."""
        return EPOCH + datetime.timedelta(microseconds=self.at_us)


def instant_us(at: int | datetime.datetime) -> int:
    """Microseconds of a time that a function gives: milliseconds since 1970, or a datetime, without a zone in UTC.

    >>> instant_us(2), instant_us(datetime.datetime(1970, 1, 1, 0, 0, 1))
    (2000, 1000000)
    """
    if isinstance(at, datetime.datetime):
        at = at if at.tzinfo is not None else at.replace(tzinfo=datetime.timezone.utc)
        return (at - EPOCH) // datetime.timedelta(microseconds=1)
    if isinstance(at, bool) or not isinstance(at, int) or not -LIMIT < at * 1000 < LIMIT:
        raise PipelineError(
            f"{at!r} is no time for a timer.", remedy="Give milliseconds since 1970 as an int, or a datetime."
        )
    return at * 1000


class KeyedProcess:
    """A function with state for each key.

    States are declared as class attributes (`ValueState`, `ListState`, `MapState`); while `process` runs
    they hold what belongs to its key. Extra streams are declared in `side_outputs` and fed by `ctx.emit`.

    >>> import holdfast as hf
    >>> class Count(hf.KeyedProcess):
    ...     n = hf.ValueState(int, default=0)
    ...
    ...     def process(self, key, record, ctx):
    ...         self.n.value += 1
    ...         yield {"key": key, "n": self.n.value}
    >>> hf.testing.Harness(Count()).process("a", {})
    [{'key': 'a', 'n': 1}]
    """

    side_outputs: tuple[str, ...] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(getattr(type(self), name, None), State):
            raise PipelineError(
                f"self.{name} is a state and can't be replaced.",
                remedy=f"Write self.{name}.value = … for a value; use the methods of lists and maps.",
            )
        super().__setattr__(name, value)

    def open(self) -> None:
        """Called once in each worker before the first record: load a model, open a connection."""

    def process(self, key: Any, record: Record, ctx: Context) -> Iterable[Record] | None:
        """Take one record of one key; yield records, or return a list of them or None."""
        raise NotImplementedError

    def takes(self) -> list[Callable[..., Any]]:
        """The functions that take records, one for each side."""
        return [self.process]

    def on_timer(self, key: Any, timer: Timer, ctx: Context) -> Iterable[Record] | None:
        """A timer of this key is due; states are the key's, and records may be emitted as in `process`."""
        raise NotImplementedError

    def close(self) -> None:
        """Called when the worker lets the function go to run another program; not when it is killed."""


class TwoInputProcess(KeyedProcess):
    """A function with state for each key that takes records of two streams: see `KeyedStream.connect`.

    Both sides see the same states and timers of a key, and event time is that of the slower one. In each epoch records of
    the left come before those of the right; with `in_order=True` they come by their event time.

    >>> import holdfast as hf
    >>> class Named(hf.TwoInputProcess):
    ...     name = hf.ValueState(str, default="?")
    ...
    ...     def process_left(self, key, record, ctx):
    ...         self.name.value = record["name"]
    ...
    ...     def process_right(self, key, record, ctx):
    ...         yield {"id": key, "name": self.name.value, "amount": record["amount"]}
    >>> pipeline = hf.Pipeline("named")
    >>> people = pipeline.read("people", hf.records([{"id": 1, "name": "Ann"}])).key_by("id")
    >>> orders = pipeline.read("orders", hf.records([{"who": 1, "amount": 5}])).key_by("who")
    >>> people.connect(orders).process("named", Named()).write("out", hf.memory())
    >>> hf.testing.run(pipeline).rows("out")
    [{'id': 1, 'name': 'Ann', 'amount': 5}]
    """

    def process_left(self, key: Any, record: Record, ctx: Context) -> Iterable[Record] | None:
        """Take a record of the first stream."""
        raise NotImplementedError

    def process_right(self, key: Any, record: Record, ctx: Context) -> Iterable[Record] | None:
        """Take a record of the second stream."""
        raise NotImplementedError

    def takes(self) -> list[Callable[..., Any]]:
        return [self.process_left, self.process_right]


class WindowFunction:
    """A function of all records that a window of a key holds when it fires.

    They come in the order in which they arrived. What is yielded gets `window_start` and `window_end`, unless it has
    them. Extra streams are declared in `side_outputs` and fed by `ctx.emit`.

    >>> import holdfast as hf
    >>> class Middle(hf.WindowFunction):
    ...     def process(self, key, window, records, ctx):
    ...         values = sorted(r["v"] for r in records)
    ...         yield {"k": key, "middle": values[len(values) // 2]}
    >>> rows = [{"k": "a", "at": 1, "v": 5}, {"k": "a", "at": 2, "v": 1}, {"k": "a", "at": 3, "v": 4}]
    >>> pipeline = hf.Pipeline("middles")
    >>> timed = pipeline.read("rows", hf.records(rows)).event_time("at", unit="s")
    >>> middles = timed.key_by("k").window(hf.tumbling("10s")).process("middles", Middle())
    >>> middles.map(lambda r: {"middle": r["middle"]}).write("out", hf.memory())
    >>> hf.testing.run(pipeline).rows("out")
    [{'middle': 4}]
    """

    side_outputs: tuple[str, ...] = ()

    def open(self) -> None:
        """Called once in each worker before the first window: load a model, open a connection."""

    def process(
        self, key: Any, window: Window, records: list[Record], ctx: Context
    ) -> Iterable[Record] | None:
        """Take what a window holds; yield records, or return a list of them or None."""
        raise NotImplementedError

    def close(self) -> None:
        """Called when the worker lets the function go to run another program; not when it is killed."""


class Aggregate:
    """The user's own incremental aggregate: an accumulator that records are added to and that merges.

    `merge` must not care how the records were divided: it is called on partial results of several splits.

    Attributes:
        accumulator: the type of an accumulator, as for `ValueState`.
        result_type: the type of the result; the accumulator's where it is None.

    >>> import holdfast as hf
    >>> class Longest(hf.Aggregate):
    ...     accumulator = str
    ...
    ...     def create(self):
    ...         return ""
    ...
    ...     def add(self, acc, record):
    ...         return max(acc, record["word"], key=len)
    ...
    ...     def merge(self, a, b):
    ...         return max(a, b, key=len)
    """

    accumulator: Any = None
    result_type: Any = None

    def create(self) -> Any:
        """An accumulator that has seen nothing."""
        raise NotImplementedError

    def add(self, accumulator: Any, record: Record) -> Any:
        """The accumulator with one more record."""
        raise NotImplementedError

    def merge(self, left: Any, right: Any) -> Any:
        """Two accumulators as one; `left` saw the earlier records.

        Not so where windows overlap or merge: sliding windows are put together from panes and sessions from pieces, by
        their times and not by when they came. There the order of records must not matter.
        """
        raise NotImplementedError

    def result(self, accumulator: Any) -> Any:
        """What is emitted for an accumulator."""
        return accumulator

    def arrow_accumulator(self) -> pa.DataType:
        """The Arrow type of the accumulator."""
        if self.accumulator is None:
            raise PipelineError(
                f"{type(self).__name__} does not say what type its accumulator has.",
                remedy="Set the class attribute accumulator, e.g. accumulator = float.",
            )
        return arrow_type(self.accumulator)


class Column:
    """One of the aggregates that come with the house, over one column; computed in batches."""

    def __init__(self, kind: str, column: str | None) -> None:
        self.kind = kind
        self.column = column

    def __repr__(self) -> str:
        return f"{self.kind}({self.column or ''})"


def count(column: str | None = None) -> Column:
    """How many records; with a column, how many where it is not null."""
    return Column("count", column)


def sum(column: str) -> Column:
    """The sum of a column; null while every value was null. Of integers and decimals it is exact, or an error."""
    return Column("sum", column)


def min(column: str) -> Column:
    """The smallest value of a column; False is smaller than True."""
    return Column("min", column)


def max(column: str) -> Column:
    """The largest value of a column."""
    return Column("max", column)


def mean(column: str) -> Column:
    """The mean of a column, always a float: decimals are summed exactly, then divided; null while every value was null."""
    return Column("mean", column)


def first(column: str) -> Column:
    """The value of the first record, in the order of the stream; null counts as a value.

    In sliding windows, what is earlier by its pane comes first. Sessions, which merge, have no first.
    """
    return Column("first", column)


def last(column: str) -> Column:
    """The value of the last record, in the order of the stream; null counts as a value. In windows as for `first`."""
    return Column("last", column)


def approx_distinct(column: str) -> Column:
    """About how many different values a column has: a HyperLogLog sketch (Apache DataSketches, lg_k=12)."""
    return Column("approx_distinct", column)
