"""Nexmark's queries on Spark, as `bench nexmark` runs them: what was written is DuckDB's answer, restarted or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.nexmark import Config, benchmark
from bench.nexmark.benchmark import Truth, our_check
from bench.nexmark.files import prepare
from bench.nexmark.queries import build
from bench.nexmark.side import measure, sources

CONFIG = Config(seed=2, first_event_rate=100)
PLAN = benchmark.arguments(["--events", "3000", "--per-file", "250", "--files", "2", "--rate", "100"])[0]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nexmark") / "data"
    prepare(folder, 3_000, 250, CONFIG)
    return folder


@pytest.fixture
def plan(data: Path, monkeypatch: pytest.MonkeyPatch) -> benchmark.Plan:
    monkeypatch.setattr(benchmark.Plan, "data", property(lambda self: data))
    return PLAN


@pytest.mark.parametrize(
    ("query", "source", "backend"),
    [
        pytest.param("q1", "files", "heap", marks=pytest.mark.slow),
        ("q3", "generator", "heap"),
        ("q5", "files", "rocksdb"),
        pytest.param("q8", "generator", "rocksdb", marks=pytest.mark.slow),
        ("q9", "files", "heap"),
        ("q12", "files", "heap"),
        ("q16", "generator", "heap"),
        ("q19", "files", "rocksdb"),
    ],
)
def test_a_query_gives_duckdbs_answer(
    spark: Any, tmp_path: Path, data: Path, plan: benchmark.Plan, query: str, source: str, backend: str
) -> None:
    found = measure(query, tmp_path, data, source=source, files=2, backend=backend, spark=spark)
    assert len(found["epochs"]) >= 6
    assert found["events_per_s"] > 0
    assert not any(found["late"].values())
    assert our_check(query, tmp_path, plan, Truth(data), 2) == (True, "")


@pytest.mark.parametrize("query", ["q4", "q7", "q18"])
def test_a_run_that_stopped_halfway_goes_on(
    spark: Any, tmp_path: Path, data: Path, plan: benchmark.Plan, query: str
) -> None:
    import holdfast as hf

    read = sources(query, data, "files", 2, 2)
    first = build(query, read, hf.parquet(str(tmp_path / "out"), merge=False))
    first.run(
        spark=spark, dir=str(tmp_path / "dir"), parallelism=2, max_records=10_000_000, epochs=3, drain=True
    )
    assert our_check(query, tmp_path, plan, Truth(data), 2)[0] is False
    measure(query, tmp_path, data, files=2, spark=spark)
    assert our_check(query, tmp_path, plan, Truth(data), 2) == (True, "")
