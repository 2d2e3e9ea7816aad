"""Event time in a chain: the step that reads timestamps and sees how far each split is."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.engine.batch import Batch
from holdfast.engine.calls import reached, user_error
from holdfast.errors import SchemaError
from holdfast.plan import graph as g
from holdfast.plan.times import UNTIMED, Stamp
from holdfast.time.units import EPOCH, MIN_TIME, TimeType
from holdfast.time.watermarks import CLOCK_TIME, ByClock, EventTime, Marks, copied, merge

if TYPE_CHECKING:
    from holdfast.engine.chain import Fan


class Seen:
    """What a chain has seen of event time: the split whose records are passing, marks, and records without a time.

    And by the epoch's clock `now_ms`, for streams whose time that is.
    """

    def __init__(self, greatest: Mapping[str, Mapping[str, int]] | None = None, now_ms: int = 0) -> None:
        self.split, self.now_ms = "", now_ms
        self.greatest = copied(greatest or {})
        """The greatest timestamp of each split so far, in microseconds, for assigners whose rule must know it."""
        self.marks: Marks = {}
        """Of each split that records with a time came from, whether they lead to a watermark or not."""
        self.untimed: dict[str, int] = {}
        """How many, by uid of the assigner, whether anybody takes them or not."""

    def risen(self, uid: str, at: int) -> int:
        """The greatest timestamp so far, given one of the split whose records are passing."""
        merge(self.greatest, {uid: {self.split: at}})
        return self.greatest[uid][self.split]

    def note(self, uid: str, mark: int) -> None:
        splits = self.marks.setdefault(uid, {})
        splits[self.split] = max(mark, splits.get(self.split, MIN_TIME))


class TimeStep:
    """An `event_time` operator: lets records pass, and notes the watermark they lead to."""

    def __init__(self, node: g.Node, out: Fan, untimed: Fan, seen: Seen, redact: bool) -> None:
        self._node, self._out, self._untimed, self._seen, self._redact = node, out, untimed, seen, redact
        self._body: EventTime = node.body
        self._by_clock = isinstance(self._body.watermarks, ByClock)
        self.mutates = self._by_clock or out.mutates or untimed.mutates  # it passes the same dicts on

    def push(self, batch: Batch) -> None:
        if self._by_clock:
            batch = self._stamped(batch)
        times, missing = self._times(batch)
        if missing.any():
            batch, times = self._without(batch, times, missing)
        if len(times):
            mark = self._mark(int(times.max()))
            self._seen.note(self._node.uid, MIN_TIME if mark is None else mark)
            if self._body.watermarks.by_record:
                self._by_record(batch)
        self._out.push(batch)

    def _stamped(self, batch: Batch) -> Batch:
        """The records with the epoch's clock as their time."""
        name, now = self._body.column, EPOCH + dt.timedelta(milliseconds=self._seen.now_ms)
        table = batch.known_table
        there = table.schema.names if table is not None else {n for row in batch.rows() for n in row}
        if name in there:
            raise SchemaError(
                f"The records have a column {name!r} already.",
                uid=self._node.uid,
                where=self._node.where,
                remedy='Name another for the clock: clock_time("seen_at").',
            )
        if table is not None:
            column = pa.repeat(pa.scalar(now, CLOCK_TIME), table.num_rows)
            return Batch(table=table.append_column(name, column))
        return Batch(rows=[{**row, name: now} for row in batch.rows()])

    def _mark(self, greatest: int) -> int | None:
        if self._body.watermarks.so_far:
            greatest = self._seen.risen(self._node.uid, greatest)
        try:
            return self._body.watermarks.mark(greatest)
        except Exception as error:
            raise user_error(error, self._node, f"the time {greatest // 1000} ms", self._redact) from None

    def _by_record(self, batch: Batch) -> None:
        rows = batch.rows()
        iterator = iter(rows)
        try:
            marks = [m for r in iterator if (m := self._body.watermarks.mark_of(r)) is not None]
        except Exception as error:
            raise user_error(error, self._node, reached(rows, iterator), self._redact) from None
        if marks:
            self._seen.note(self._node.uid, max(marks))

    def _times(self, batch: Batch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        try:
            column = _column(batch, self._body.column, self._body.missing)
            return times_of(column, Stamp(self._body.column, self._body.unit))
        except SchemaError as error:
            raise error.at(self._node.uid, self._node.where) from None

    def _without(
        self, batch: Batch, times: npt.NDArray[np.int64], missing: npt.NDArray[np.bool_]
    ) -> tuple[Batch, npt.NDArray[np.int64]]:
        uid, count = self._node.uid, int(missing.sum())
        if self._body.missing == "fail":
            raise SchemaError(
                f"{count} records have no time: {self._body.column!r} is null.",
                uid=uid,
                where=self._node.where,
                remedy=f'Filter them before, or have them with missing="side" and stream.side("{UNTIMED}").',
            )
        self._seen.untimed[uid] = self._seen.untimed.get(uid, 0) + count
        self._untimed.push(_where(batch, missing))
        return _where(batch, ~missing), times[~missing]


def _where(batch: Batch, mask: npt.NDArray[np.bool_]) -> Batch:
    """Some records, as they are: dicts stay dicts, or their values would depend on who is in the batch with them."""
    table = batch.known_table
    if table is None:
        return Batch(rows=list(compress(batch.rows(), mask.tolist())))
    return Batch(table=table.filter(pa.array(mask)))


def _column(batch: Batch, name: str, missing: str) -> pa.Array | pa.ChunkedArray:
    table = batch.known_table
    if table is not None:
        if name not in table.schema.names:
            raise _no_time(name, table.schema.names)
        return table.column(name)
    rows = batch.rows()
    if missing == "side":  # a dict that lacks it has no time, like a row in which it is null
        return _array([r.get(name) for r in rows], name)
    lacking = next((r for r in rows if name not in r), None)
    if lacking is not None:
        raise _no_time(name, list(lacking))
    return _array([r[name] for r in rows], name)


def _array(values: list[Any], name: str) -> pa.Array:
    """Times as they are in dicts; a whole number may be a float there, whatever else is in the batch."""
    whole = [int(v) if isinstance(v, float) and v.is_integer() else v for v in values]
    try:
        return pa.array(whole)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise SchemaError(f"The times in {name!r} are not of one type, or too large: {error}") from None


def _no_time(name: str, there: list[str]) -> SchemaError:
    return SchemaError(
        f"There is no column {name!r}, which is to be the event time; there are {there}.",
        remedy="Name a column that the records have, and keep it in functions that make new records.",
    )


def times_of(
    column: pa.Array | pa.ChunkedArray, stamp: Stamp
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The times of a column in microseconds, and which are missing."""
    if pa.types.is_null(column.type):
        return np.zeros(len(column), np.int64), np.ones(len(column), bool)
    times, missing = TimeType.of(column.type, stamp.unit).to_us(column)
    return times + stamp.shift_us if stamp.shift_us else times, missing


def table_times(table: pa.Table, stamp: Stamp, node: g.Node) -> npt.NDArray[np.int64]:
    """The times of records that an operator takes, or an error that says why there are none."""
    try:
        if stamp.column not in table.schema.names:
            raise _no_time(stamp.column, table.schema.names)
        times, missing = times_of(table.column(stamp.column), stamp)
        if missing.any():
            raise SchemaError(
                f"{int(missing.sum())} records have no time: {stamp.column!r} is null.",
                remedy="Keep the time in functions that make new records, or filter these before.",
            )
        return times
    except SchemaError as error:
        raise error.at(node.uid, node.where) from None


def check_order(table: pa.Table, stamp: Stamp, node: g.Node) -> None:
    """Raise for times that microseconds can't tell apart, where an operator goes by which of two is earlier."""
    column = table.column(stamp.column)
    if pa.types.is_null(column.type) or not TimeType.of(column.type, stamp.unit).finer(column):
        return
    raise SchemaError(
        f"{stamp.column!r} has nanoseconds, and event time is in microseconds: of two records within one of them nobody knows "
        "which is earlier.",
        uid=node.uid,
        where=node.where,
        remedy='Cut them before event_time, where you know what that means: cast the column to pa.timestamp("us").',
    )
