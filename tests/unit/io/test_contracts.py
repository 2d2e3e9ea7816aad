"""Every source and every sink of ours keeps the contract that users' own are tested with."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

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
)
from holdfast.io.console import ConsoleSink
from holdfast.io.contract import check_sink, check_source
from holdfast.io.files import files
from holdfast.io.folder import FolderSink, jsonl, parquet
from holdfast.io.foreach import foreach_epoch
from holdfast.io.memory import memory, records
from holdfast.io.rate import rate


def table(start: int, count: int) -> pa.Table:
    ids = range(start, start + count)
    return pa.table({"id": pa.array(ids, pa.int64()), "name": [f"name {i}" for i in ids]})


def write(path: Path, format: str, data: pa.Table) -> None:
    hidden = path.parent / f".{path.name}"
    if format == "parquet":
        pq.write_table(data, hidden, row_group_size=1_000)
    elif format == "csv":
        pcsv.write_csv(data, hidden)
    else:
        text = "".join(json.dumps(row) + "\n" for row in data.to_pylist()).encode()
        hidden.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    hidden.rename(path)


@pytest.mark.parametrize(
    ("format", "suffix"), [("parquet", "parquet"), ("jsonl", "jsonl"), ("jsonl", "jsonl.gz"), ("csv", "csv")]
)
def test_files_keep_the_contract(tmp_path: Path, format: str, suffix: str) -> None:
    for number in range(3):
        write(tmp_path / f"{number}.{suffix}", format, table(number * 2_000, 2_000))

    def grow() -> None:
        write(tmp_path / f"new.{suffix}", format, table(90_000, 500))

    check_source(lambda: files(tmp_path, format=format, watch=False))
    check_source(lambda: files(tmp_path, format=format), grow)


def test_records_keep_the_contract() -> None:
    check_source(lambda: records(table(0, 1_000), splits=3))
    check_source(lambda: records([{"n": n} for n in range(100)], per_epoch=7))


def test_rate_keeps_the_contract() -> None:
    check_source(lambda: rate(None, total=10_001, splits=3, skew=0.5))
    check_source(lambda: rate(1_000_000, total=5_000, make=lambda t: t.select(["id", "value"])))


class _Careless(Source):
    """A source of numbers with one fault of your choice."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.reads = 0

    def schema(self) -> pa.Schema:
        return pa.schema({"n": pa.int32() if self.fault == "schema" else pa.int64()})

    def plan(self, position: Any, limit: Limit) -> Offer:
        start = 0 if position is None else position
        end = min(100, start + (100 if self.fault == "limit" else limit.records))
        ranges = [Range("0", start, end, records=end - start)] if end > start else []
        if self.fault == "overlap" and ranges:
            ranges.append(Range("0", end - 1, end, records=1))
        if self.fault == "twice" and start == 0:
            end -= 1
        if self.fault == "skip" and start == 0 and end < 100:
            end += 1
        return Offer(ranges, end if self.fault != "position" else (end,))

    def read(self, piece: Range, reading: Reading) -> Iterator[pa.Table]:
        self.reads += 1
        shift = self.reads if self.fault == "random" else 0
        yield pa.table({"n": pa.array(range(piece.start + shift, piece.end + shift), pa.int64())})


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("schema", "schema"),
        ("limit", "limit was"),
        ("overlap", "overlap"),
        ("twice", "gave other records"),
        ("skip", "gave other records"),
        ("random", "gave other records"),
        ("position", "survive JSON"),
    ],
)
def test_a_source_that_breaks_its_contract_is_told_which_part(fault: str, sentence: str) -> None:
    check_source(lambda: _Careless("none"))
    with pytest.raises(AssertionError, match=sentence):
        check_source(lambda: _Careless(fault))


def read_folder(sink: Sink) -> list[dict[str, Any]]:
    assert isinstance(sink, FolderSink)
    format = "parquet" if sink.suffix == "parquet" else "json"
    found = ds.dataset(sink.path, format=format, partitioning="hive")
    if not found.files:
        return []
    return found.to_table().select(["id", "name"]).to_pylist()


@pytest.mark.parametrize("make", [parquet, jsonl])
@pytest.mark.parametrize("partition_by", [None, "name"])
def test_folders_keep_the_contract(tmp_path: Path, make: Any, partition_by: str | None) -> None:
    numbers = itertools.count()
    check_sink(lambda: make(tmp_path / f"out{next(numbers)}", partition_by=partition_by), read_folder)


def test_memory_keeps_the_contract() -> None:
    check_sink(memory, lambda sink: sink.rows())  # type: ignore[attr-defined]


def test_foreach_epoch_keeps_the_contract_with_a_function_that_minds_epochs() -> None:
    seen: dict[Sink, dict[int, pa.Table]] = {}

    def make() -> Sink:
        kept: dict[int, pa.Table] = {}
        sink = foreach_epoch(_Keep(kept))
        seen[sink] = kept
        return sink

    check_sink(make, lambda sink: [row for t in seen[sink].values() for row in t.to_pylist()])


class _Keep:
    def __init__(self, kept: dict[int, pa.Table]) -> None:
        self._kept = kept

    def __call__(self, data: pa.Table, epoch: int) -> None:
        self._kept[epoch] = data

    def __reduce__(self) -> Any:
        return (_Keep, ({},))


def test_console_keeps_the_contract() -> None:
    def shown(sink: Sink) -> list[dict[str, Any]]:
        assert isinstance(sink, ConsoleSink)
        return list(sink._rows)

    def make() -> Sink:
        sink = ConsoleSink(20, None)
        sink.embedded = True
        return sink

    check_sink(make, shown)


class _Eager(Sink):
    """A sink with one fault of your choice."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.rows: list[dict[str, Any]] = []
        self.epochs: set[int] = set()

    def writer(self, target: Target) -> SinkWriter:
        if self.fault == "name":
            target = Target(target.uid, target.epoch, target.task, "always", target.folder)
        return TableWriter(target)

    def publish(self, decided: Decided) -> None:
        from holdfast.io.base import staged_table

        found = staged_table(decided)
        if found is None or (decided.epoch in self.epochs and self.fault != "twice"):
            return
        self.epochs.add(decided.epoch)
        self.rows += found.to_pylist()

    def maintain(self, decided_epoch: int) -> None:
        if self.fault == "upkeep":
            self.rows = []


@pytest.mark.parametrize(
    ("fault", "sentence"), [("twice", "twice"), ("name", "one name"), ("upkeep", "upkeep")]
)
def test_a_sink_that_breaks_its_contract_is_told_which_part(fault: str, sentence: str) -> None:
    check_sink(lambda: _Eager("none"), lambda sink: sink.rows)  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match=sentence):
        check_sink(lambda: _Eager(fault), lambda sink: sink.rows)  # type: ignore[attr-defined]
