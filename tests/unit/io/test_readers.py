"""Real readers read what folder sinks wrote, as usual."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from holdfast.io.base import Decided, Target
from holdfast.io.folder import FolderSink, jsonl, parquet

ROWS = pa.table(
    {"id": pa.array(range(4), pa.int64()), "country": ["KR", "DE", "KR", "FR"], "x": [0.5, 1.5, None, 2.5]}
)


def write(sink: FolderSink, tmp_path: Path) -> None:
    """Two decided epochs, and one that is staged and undecided."""
    sink.check()
    for epoch in (1, 2, 3):
        writer = sink.writer(Target("sink", epoch, "0", f"{epoch}", str(tmp_path / "staging")))
        writer.write(ROWS.slice((epoch - 1) * 2, 2) if epoch < 3 else ROWS)
        staged = writer.close()
        if epoch < 3:
            sink.publish(Decided("sink", epoch, 1, staged, str(tmp_path / "staging")))


@pytest.fixture(params=[None, "country"])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write(parquet(tmp_path / "out", partition_by=request.param), tmp_path)
    return tmp_path / "out"


def same(rows: list[dict[str, Any]]) -> bool:
    names = ROWS.schema.names
    return sorted(([r[n] for n in names] for r in rows), key=lambda r: r[0]) == [
        [r[n] for n in names] for r in ROWS.to_pylist()
    ]


def test_pyarrow_reads_it(out: Path) -> None:
    assert same(ds.dataset(out, partitioning="hive").to_table().to_pylist())
    assert same(pq.read_table(out).to_pylist())


def test_duckdb_reads_it_by_a_glob(out: Path) -> None:
    found = duckdb.sql(
        f"select id, country, x from read_parquet('{out}/**/*.parquet', hive_partitioning=true)"
    )
    assert same(found.to_arrow_table().to_pylist())


def test_duckdb_reads_a_flat_folder_by_the_plainest_glob(tmp_path: Path) -> None:
    write(parquet(tmp_path / "p"), tmp_path)
    assert same(duckdb.sql(f"select * from '{tmp_path}/p/*.parquet'").to_arrow_table().to_pylist())
    write(jsonl(tmp_path / "j"), tmp_path / "other")
    assert same(duckdb.sql(f"select * from read_json('{tmp_path}/j/*.jsonl')").to_arrow_table().to_pylist())


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession()
    if running is not None:
        yield running
        return
    session = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    yield session
    session.stop()


@pytest.mark.spark
def test_spark_reads_it(tmp_path: Path, spark: Any) -> None:
    write(parquet(tmp_path / "flat"), tmp_path / "1")
    write(parquet(tmp_path / "cut", partition_by="country"), tmp_path / "2")
    write(jsonl(tmp_path / "json"), tmp_path / "3")
    assert same([row.asDict() for row in spark.read.parquet(str(tmp_path / "flat")).collect()])
    assert same([row.asDict() for row in spark.read.parquet(str(tmp_path / "cut")).collect()])
    assert same([row.asDict() for row in spark.read.json(str(tmp_path / "json")).collect()])
