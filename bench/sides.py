"""Our side of `bench durability`, each case in a process of its own: `python -m bench.sides CASE --folder F …`.

Prints one JSON line. What is measured here is what `bench.durability` compares.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import holdfast as hf
from bench import pipelines
from bench.ours import PARALLELISM, measure
from holdfast.checkpoint.catalog import Catalog
from holdfast.engine.handle import run
from holdfast.log.journal import Journal

KEYS = 1_000_000


def throughput(folder: Path, backend: str, checkpoint: str, epochs: int) -> dict[str, Any]:
    """Records a second at a million keys, wall clock, with checkpoints as asked."""
    source = pipelines.Growing(KEYS, fill_epoch=500_000, epoch=500_000, epochs=epochs)
    pipeline = pipelines.keyed_python(source, hf.parquet(str(folder / "out")))
    ended: list[tuple[float, int]] = []

    def note(status: Any, facts: Any) -> None:
        if facts is not None:
            ended.append((time.perf_counter(), facts.records_in))

    settings = {
        "dir": str(folder / "dir"),
        "parallelism": PARALLELISM,
        "master": "local[2]",
        "backend": backend,
        "checkpoint": checkpoint,
        "checkpoint_on_stop": False,
        "checkpoint_keep": 100,
        "drain": True,
        "heap_limit": "16GB",
    }
    run(pipeline, spark=None, settings=settings, listener=note)
    warm = 4  # two epochs fill the state, two more settle
    seconds = ended[-1][0] - ended[warm - 1][0]
    made = Catalog(Journal.at(folder / "dir")).completed()
    return {
        "records_per_s": round(sum(n for _, n in ended[warm:]) / seconds),
        "seconds": round(seconds, 2),
        "checkpoints": len(made),
        "checkpoint_mb": [round(c.new_bytes / 1e6, 1) for c in made],
        "checkpoint_ms": [c.completed_ms - c.started_ms for c in made],
    }


class Gated(pipelines.Growing):
    """Offers the next epoch only when the last one has its checkpoint."""

    def __init__(self, directory: str, touched: int, epochs: int) -> None:
        super().__init__(KEYS, fill_epoch=KEYS, epoch=touched, epochs=epochs)
        self._directory = directory

    def plan(self, position: Any, limit: hf.Limit) -> hf.Offer:
        journal = Journal.at(self._directory)
        last = journal.last_epoch()
        newest = Catalog(journal).newest(last)
        if last and (newest is None or newest.epoch < last):
            return hf.Offer([], position)
        return super().plan(position, limit)


def incremental(folder: Path, backend: str, touched: int, checkpoints: int) -> dict[str, Any]:
    """What each checkpoint writes after so many keys of a million were touched, beside the full one before."""
    source = Gated(str(folder / "dir"), touched, checkpoints)
    pipeline = pipelines.keyed_python(source, hf.parquet(str(folder / "out")))
    options = {"checkpoint": "1 epochs", "checkpoint_keep": 1000, "interval": "0s", "max_records": KEYS}
    measure(pipeline, folder, epochs=checkpoints + 1, backend=backend, **options)
    made = Catalog(Journal.at(folder / "dir")).completed()
    full, later = made[0], made[1:]
    return {
        "full_bytes": full.new_bytes,
        "new_bytes": [c.new_bytes for c in later],
        "files": [len(c.files) for c in later],
        "size_bytes": [c.size_bytes for c in later],
    }


def replay(folder: Path, epochs: int, records: int) -> dict[str, Any]:
    """Seconds of the first run of some epochs, and of their replay after all state was lost."""

    def build() -> hf.Pipeline:
        source = pipelines.Growing(records, fill_epoch=records, epoch=records, epochs=epochs - 1)
        return pipelines.keyed_python(source, hf.parquet(str(folder / "out")))

    options: dict[str, Any] = {"checkpoint": "never", "max_records": records, "interval": "0s", "cut": "data"}
    first = measure(build(), folder, drain=True, **options)
    shutil.rmtree(folder / "dir" / "state")
    chosen = {"dir": str(folder / "dir"), "parallelism": PARALLELISM, "master": "local[2]", **options}
    status = run(build(), spark=None, settings={**chosen, "drain": True}).status()
    # The first epoch starts the Python workers, and so does the look for what was lost before the replay.
    spent = [f.latency_ms for f in first]
    per_epoch = sum(spent[1:]) / (len(spent) - 1)
    return {
        "first_s": round(per_epoch * len(spent) / 1e3, 3),
        "replay_s": round(status.replay_ms / 1e3, 3),
        "recovery_s": round(status.rebuild_ms / 1e3, 3),
        "replayed": status.replayed_epochs,
        "epochs": len(first),
    }


def restart(folder: Path, data: Path) -> dict[str, Any]:
    """Runs until it is killed: sum and count for each key, in RocksDB."""
    pipeline = pipelines.aggregate(hf.files(str(data)), hf.parquet(str(folder / "out")))
    settings = {
        "dir": str(folder / "dir"),
        "parallelism": PARALLELISM,
        "master": "local[2]",
        "backend": "rocksdb",
        "checkpoint": "10s",
        "max_records": 100_000,
        "interval": "0s",
        "cut": "data",
        "take_over": True,
    }
    run(pipeline, spark=None, settings=settings)
    return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=["throughput", "incremental", "replay", "restart"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--backend", default="heap")
    parser.add_argument("--checkpoint", default="never")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--records", type=int, default=2_000)
    parser.add_argument("--touched", type=int, default=KEYS // 100)
    parser.add_argument("--data", type=Path)
    a = parser.parse_args()
    if a.case == "throughput":
        result = throughput(a.folder, a.backend, a.checkpoint, a.epochs)
    elif a.case == "incremental":
        result = incremental(a.folder, a.backend, a.touched, a.epochs)
    elif a.case == "replay":
        result = replay(a.folder, a.epochs, a.records)
    else:
        result = restart(a.folder, a.data)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
