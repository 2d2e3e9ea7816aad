"""Records from a list, and records into one: for tests, notebooks and small things."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from holdfast.data.rows import Row, conform, to_rows, to_table
from holdfast.data.types import arrow_schema
from holdfast.errors import PipelineError
from holdfast.io.base import (
    Decided,
    Limit,
    Offer,
    Range,
    Reading,
    Sink,
    SinkWriter,
    Source,
    TableWriter,
    Target,
    staged_table,
)

TABLE_ROWS = 65_536


def records(
    data: Sequence[Row] | pa.Table,
    schema: Any = None,
    *,
    splits: int = 1,
    per_epoch: int | None = None,
) -> RecordsSource:
    """Records that are there already; the stream ends with them. They travel with the pipeline's code.

    Args:
        data: a list of dicts, or a table.
        schema: an Arrow schema, a dict of names to types, or a TypedDict; without it the records show it.
        splits: in how many parts they are read; each part keeps its order.
        per_epoch: at most so many in one epoch.

    >>> records([{"n": 1}, {"n": 2}]).schema()
    n: int64
    """
    if splits < 1 or (per_epoch is not None and per_epoch < 1):
        raise PipelineError("records: splits and per_epoch must be at least 1.")
    declared = None if schema is None else arrow_schema(schema)
    if isinstance(data, pa.Table):
        table = conform(data, declared)
    elif declared is None and not data:
        raise PipelineError(
            "records([]) has no schema.",
            remedy='Declare it: records([], schema={"account": str, "amount": float}).',
        )
    else:
        table = to_table(list(data), declared)
    return RecordsSource(table, splits, per_epoch)


class RecordsSource(Source):
    """Reads a table in memory; made by `records`."""

    def __init__(self, table: pa.Table, splits: int, per_epoch: int | None) -> None:
        self._table = table
        self._splits = splits
        self._per_epoch = per_epoch

    def describe(self) -> str:
        return f"{self._table.num_rows} records in memory"

    def schema(self) -> pa.Schema:
        return self._table.schema

    def plan(self, position: Any, limit: Limit) -> Offer:
        ends = [self._table.num_rows * (split + 1) // self._splits for split in range(self._splits)]
        places = [0, *ends[:-1]] if position is None else list(position)
        left = limit.records if self._per_epoch is None else min(limit.records, self._per_epoch)
        # Who has the most left comes first: with fewer records than splits none is left behind for good.
        fullest = sorted(range(self._splits), key=lambda split: places[split] - ends[split])
        counts = [0] * self._splits
        for number, split in enumerate(fullest):
            counts[split] = min(-(-left // (self._splits - number)), ends[split] - places[split])
            left -= counts[split]
        names = [f"{split:04d}" for split in range(self._splits)]
        ranges = [Range(n, p, p + c, records=c) for n, p, c in zip(names, places, counts, strict=True) if c]
        places = [place + count for place, count in zip(places, counts, strict=True)]
        rest = [end - place for end, place in zip(ends, places, strict=True)]
        return Offer(
            ranges,
            places,
            backlog=sum(rest),
            exhausted=not any(rest),
            splits=names,
            waiting=[name for name, more in zip(names, rest, strict=True) if more],
        )

    def read(self, piece: Range, reading: Reading) -> Iterator[pa.Table]:
        for start in range(piece.start, piece.end, TABLE_ROWS):
            yield self._table.slice(start, min(TABLE_ROWS, piece.end - start))


def memory() -> MemorySink:
    """A sink that keeps what was written in this process's memory.

    >>> sink = memory()
    >>> sink.rows(), sink.epochs
    ([], [])
    """
    return MemorySink()


class MemorySink(Sink):
    """Keeps decided epochs in memory; made by `memory`. A pipeline started again begins with an empty one."""

    def __init__(self) -> None:
        self._tables: dict[int, pa.Table] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_tables": {}}  # executors only write: what is kept here need not travel

    @property
    def epochs(self) -> list[int]:
        """The epochs that wrote something, in order."""
        return sorted(self._tables)

    def rows(self) -> list[Row]:
        """Everything that was written, epoch by epoch, as dicts."""
        return [row for epoch in self.epochs for row in to_rows(self._tables[epoch])]

    def table(self, epoch: int | None = None) -> pa.Table | None:
        """Everything that was written, or what one epoch wrote, as a table; None where nothing was."""
        if epoch is not None:
            return self._tables.get(epoch)
        found = [self._tables[e] for e in self.epochs]
        return pa.concat_tables(found, promote_options="permissive") if found else None

    def clear(self) -> None:
        """Forget everything."""
        self._tables = {}

    def describe(self) -> str:
        return "memory"

    def writer(self, target: Target) -> SinkWriter:
        return TableWriter(target)

    def publish(self, decided: Decided) -> None:
        table = staged_table(decided)
        if table is not None:
            self._tables[decided.epoch] = table
