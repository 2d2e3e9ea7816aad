"""What a user extends: KeyedProcess and Aggregate, and the aggregates that come with the house.

How they are run, in batches and combined before the exchange, is `engine.keyed`'s business.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from holdfast.data.types import arrow_type
from holdfast.errors import PipelineError
from holdfast.state.descriptors import State

Record = dict[str, Any]


class Context:
    """What a function may know besides its key and record: the epoch's clock, its number, side outputs.

    Everything here is fixed by the epoch's plan, so that an epoch run again sees the same.

    Attributes:
        uid: the operator's uid.
        epoch: the number of the epoch.
        now_ms: the epoch's processing time, in milliseconds since 1970.
    """

    __slots__ = ("_order", "_outputs", "_random", "epoch", "now_ms", "uid")

    def __init__(
        self, uid: str, epoch: int, now_ms: int, outputs: dict[str, list[Record]] | None = None
    ) -> None:
        self.uid = uid
        self.epoch = epoch
        self.now_ms = now_ms
        self._outputs = {} if outputs is None else outputs
        self._order = ""
        self._random: random.Random | None = None

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
        """Two accumulators as one; `left` saw the earlier records."""
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
    """The sum of a column; null while every value was null."""
    return Column("sum", column)


def min(column: str) -> Column:
    """The smallest value of a column."""
    return Column("min", column)


def max(column: str) -> Column:
    """The largest value of a column."""
    return Column("max", column)


def mean(column: str) -> Column:
    """The mean of a column; null while every value was null."""
    return Column("mean", column)


def first(column: str) -> Column:
    """The value of the first record, in the order of the stream; null counts as a value."""
    return Column("first", column)


def last(column: str) -> Column:
    """The value of the last record, in the order of the stream; null counts as a value."""
    return Column("last", column)


def approx_distinct(column: str) -> Column:
    """About how many different values a column has: a HyperLogLog sketch (Apache DataSketches, lg_k=12)."""
    return Column("approx_distinct", column)
