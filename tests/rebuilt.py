"""Lives that lose their state, and what must have come of them: the same as if nothing had happened."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from tests.drivers import Life, Waiting, live
from tests.spark.test_equals_runner import bytes_in
from tests.windowed import sinks_in

BOTH_WAYS = [
    ("4 epochs", "heap"),
    ("never", "rocksdb"),
    pytest.param("4 epochs", "rocksdb", marks=pytest.mark.slow),
    pytest.param("never", "heap", marks=pytest.mark.slow),
]
"""With a checkpoint to begin from and without, and the backends; half of it in `make test`."""
Build = Callable[[Any], hf.Pipeline]
LOSSES = {"trim_log": False, "max_records": 32, "checkpoint_on_stop": False, "runner": Waiting}


def check(build: Build, outputs: Collection[str], life: Life, folder: Path) -> None:
    """Output, digests, clocks, timers and what came late are those of a run without faults over the same plans."""
    plans = [life.journal.plan(e) for e in range(1, life.driver.last_epoch + 1)]
    expected = hf.testing.run(
        build(sinks_in(folder / "runner")),
        parallelism=2,
        plans=[p for p in plans if p],
        capture=False,
        directory=folder / "oracle",
    )
    assert bytes_in(folder / "ours") == bytes_in(folder / "runner")
    assert {p.split("/")[0] for p in bytes_in(folder / "ours")} >= set(outputs)
    for commit in expected.commits:
        ours = life.journal.commit(commit.epoch)
        assert ours is not None
        assert (ours.clocks, ours.marks) == (commit.clocks, commit.marks)
        assert (ours.late, ours.wake_ms) == (commit.late, commit.wake_ms)
        for uid, shards in commit.shards.items():
            assert [s.sealed.digest for s in ours.shards[uid]] == [s.sealed.digest for s in shards]


def rebuilt(build: Build, operators: Collection[str], whole: str, folder: Path, **options: Any) -> Life:
    """A life of six epochs, the loss of a shard of each operator and of all of one, and the life after it."""
    first = live(build(sinks_in(folder / "ours")), folder / "dir", epochs=6, **LOSSES, **options)
    root = Path(first.program.state_root) / first.program.home
    for uid in operators:
        shutil.rmtree(root / uid / "00001", ignore_errors=True)
    shutil.rmtree(root / whole / "00000", ignore_errors=True)
    return live(build(sinks_in(folder / "ours")), folder / "dir", **LOSSES, **options)
