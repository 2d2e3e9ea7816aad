"""Our side of the benchmark, in a process of its own: `python -m bench.ours --case keyed-python --data FOLDER`.

Prints one JSON line with the fields that a peer's script prints. An epoch's time is all of it: planning, the
plan record, the Spark job, the commit record and publishing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import holdfast as hf
from bench import pipelines
from holdfast.engine.handle import run
from holdfast.metrics import EpochFacts, Status

DURABLE = (
    "every epoch: plan and commit synced to disk, output synced and published exactly once, state changes written "
    "to the host's disk (not synced)"
)
PARALLELISM = 2
WARM_UP_EPOCHS = 2


def measure(pipeline: hf.Pipeline, folder: Path, spark: Any = None, **settings: Any) -> list[EpochFacts]:
    """Run a pipeline to its end: the facts of each epoch."""
    facts: list[EpochFacts] = []

    def note(status: Status, epoch: EpochFacts | None) -> None:
        if epoch is not None:
            facts.append(epoch)

    chosen = {"dir": str(folder / "dir"), "parallelism": PARALLELISM, "master": "local[2]", **settings}
    run(pipeline, spark=spark, settings=chosen, listener=note)
    return facts


def throughput(case: str, data: Path, backend: str, rows: int) -> dict[str, Any]:
    """Records a second over all epochs but the warm-up."""
    build = pipelines.keyed_python if case == "keyed-python" else pipelines.aggregate
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        folder = Path(name)
        pipeline = build(hf.files(str(data)), hf.parquet(str(folder / "out")))
        facts = measure(pipeline, folder, drain=True, backend=backend, max_records=rows)
    counted = facts[WARM_UP_EPOCHS:]
    seconds = sum(f.latency_ms for f in counted) / 1e3
    return {
        "records_per_s": round(sum(f.records_in for f in counted) / seconds),
        "records": sum(f.records_in for f in facts),
        "epochs": [round(f.latency_ms / 1e3, 4) for f in facts],
        "settings": {"backend": backend, "parallelism": PARALLELISM, "epoch_records": rows},
    }


def empty_epoch(epochs: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of an epoch with nothing in it, and of a bare two-stage job on the same session, in turns."""
    from holdfast.config import Settings
    from holdfast.engine.session import make_session

    spark = make_session(Settings(master="local[2]"), "empty")
    ours: list[float] = []
    bare: list[float] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        for number in range(rounds + 1):
            pipeline = pipelines.keyed_python(pipelines.Silence(), hf.parquet(f"{name}/out{number}"))
            facts = measure(
                pipeline, Path(name) / str(number), spark, epochs=epochs, interval="0s", empty_epochs=True
            )
            times = bare_jobs(spark.sparkContext, epochs)
            if number:  # the first round warms both up
                ours += [f.latency_ms for f in facts[3:]]
                bare += times[3:]
    spark.stop()
    return {"ours_ms": ours, "bare_ms": bare}


def bare_jobs(sc: Any, jobs: int) -> list[float]:
    """Two Python stages with an exchange and nothing to do, by PySpark's public calls alone."""
    times = []
    for _ in range(jobs):
        started = time.perf_counter()
        exchanged = sc.parallelize(range(2), 2).mapPartitions(_pairs).partitionBy(2, _same)
        exchanged.mapPartitions(_count).collect()
        times.append((time.perf_counter() - started) * 1e3)
    return times


def _pairs(items: Any) -> Any:
    return [(shard, b"x") for _ in items for shard in range(2)]


def _same(shard: int) -> int:
    return shard


def _count(items: Any) -> Any:
    return [len(list(items))]


def growth(backend: str, keys: int, epoch: int, epochs: int) -> dict[str, Any]:
    """Milliseconds of epochs of one size, over a state of so many keys, and the memory of the largest worker."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        folder = Path(name)
        source = pipelines.Growing(keys, fill_epoch=500_000, epoch=epoch, epochs=epochs)
        pipeline = pipelines.keyed_python(source, hf.parquet(str(folder / "out")))
        facts = measure(pipeline, folder, drain=True, backend=backend, heap_limit="16GB")
    counted = facts[-epochs:][WARM_UP_EPOCHS:]
    return {
        "epoch_ms": [round(f.latency_ms, 1) for f in counted],
        "median_ms": statistics.median(f.latency_ms for f in counted),
        "state_keys": facts[-1].state_keys,
        "worker_rss_mb": max(f.worker_rss_bytes for f in facts) >> 20,
        "settings": {"backend": backend, "keys": keys, "epoch_records": epoch},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.ours", description="Our side of the benchmark.")
    parser.add_argument("--case", required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--backend", default="heap")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "keyed-python": lambda: throughput("keyed-python", chosen.data, chosen.backend, chosen.rows),
        "aggregate": lambda: throughput("aggregate", chosen.data, chosen.backend, chosen.rows),
        "empty-epoch": lambda: empty_epoch(chosen.epochs, chosen.rounds),
        "growth": lambda: growth(chosen.backend, chosen.keys, chosen.rows, chosen.epochs),
    }
    report = {"peer": "holdfast", "case": chosen.case, "version": hf.__version__, "durable": DURABLE}
    print(json.dumps({**report, **cases[chosen.case]()}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
