"""The library's operators after a loss: the same as if nothing had happened, over the real loop without Spark."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from tests.drivers import Life, live
from tests.joined import OPERATORS, SINKS, build
from tests.spark.test_equals_runner import bytes_in
from tests.unit.test_recovery import Waiting
from tests.windowed import sinks_in


def check(life: Life, folder: Path) -> None:
    """Output, digests and what came late are those of a run without faults over the same plans."""
    plans = [life.journal.plan(e) for e in range(1, life.driver.last_epoch + 1)]
    expected = hf.testing.run(
        build(sinks_in(folder / "runner")),
        parallelism=2,
        plans=[p for p in plans if p],
        capture=False,
        directory=folder / "oracle",
    )
    assert bytes_in(folder / "ours") == bytes_in(folder / "runner")
    assert {p.split("/")[0] for p in bytes_in(folder / "ours")} >= set(SINKS)
    for commit in expected.commits:
        ours = life.journal.commit(commit.epoch)
        assert ours is not None
        assert (ours.clocks, ours.marks, ours.late) == (commit.clocks, commit.marks, commit.late)
        for uid, shards in commit.shards.items():
            assert [s.sealed.digest for s in ours.shards[uid]] == [s.sealed.digest for s in shards]


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
@pytest.mark.parametrize("checkpoint", ["4 epochs", "never"])
def test_the_library_is_the_same_after_everything_but_the_log_was_lost(
    tmp_path: Path, backend: str, checkpoint: str
) -> None:
    options: dict[str, Any] = {
        "backend": backend,
        "checkpoint": checkpoint,
        "trim_log": False,
        "max_records": 32,
        "checkpoint_on_stop": False,
        "runner": Waiting,
    }
    first = live(build(sinks_in(tmp_path / "ours")), tmp_path / "dir", epochs=6, **options)
    root = Path(first.program.state_root) / first.program.name
    for uid in OPERATORS:
        shutil.rmtree(root / uid / "00001", ignore_errors=True)
    shutil.rmtree(root / OPERATORS[0] / "00000", ignore_errors=True)
    second = live(build(sinks_in(tmp_path / "ours")), tmp_path / "dir", **options)
    assert second.recovery.last is not None
    assert second.recovery.last.lacking >= len(OPERATORS)
    check(second, tmp_path)


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_the_same_on_any_parallelism_and_backend(tmp_path: Path, backend: str) -> None:
    made = []
    for parallelism in (1, 2, 4):
        result = hf.testing.run(build(lambda uid: hf.memory()), parallelism=parallelism, backend=backend)
        made.append({uid: result.rows(uid) for uid in SINKS})
        for uid in OPERATORS:
            assert sum(t.num_rows for t in result.state(uid).values()) == (21 if uid == "ever" else 0), uid
    assert made[0] == made[1] == made[2]
    assert all(made[0].values()), {uid: len(rows) for uid, rows in made[0].items()}


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_a_worker_that_is_new_reads_the_state_and_goes_on(tmp_path: Path, backend: str) -> None:
    options: dict[str, Any] = {"backend": backend, "max_records": 32, "trim_log": False}
    for _ in range(5):
        life = live(build(sinks_in(tmp_path / "ours")), tmp_path / "dir", epochs=3, **options)
    life = live(build(sinks_in(tmp_path / "ours")), tmp_path / "dir", **options)
    check(life, tmp_path)
