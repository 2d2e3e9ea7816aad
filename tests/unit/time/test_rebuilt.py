"""Windows, timers and two inputs after a loss: the same as if nothing had happened, over the real loop without Spark."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from tests.drivers import Life, live
from tests.spark.test_equals_runner import bytes_in
from tests.unit.test_recovery import Waiting
from tests.windowed import build, sinks_in

OPERATORS = ["totals", "trend", "visits", "quiet", "priced"]


def check(life: Life, folder: Path) -> None:
    """Output, digests and clocks are those of a run without faults over the same plans."""
    plans = [life.journal.plan(e) for e in range(1, life.driver.last_epoch + 1)]
    expected = hf.testing.run(
        build(sinks_in(folder / "runner")),
        parallelism=2,
        plans=[p for p in plans if p],
        capture=False,
        directory=folder / "oracle",
    )
    assert bytes_in(folder / "ours") == bytes_in(folder / "runner")
    assert {p.split("/")[0] for p in bytes_in(folder / "ours")} >= {"tumbled", "trends", "sessions", "prices"}
    for commit in expected.commits:
        ours = life.journal.commit(commit.epoch)
        assert ours is not None
        assert (ours.clocks, ours.marks, ours.late) == (commit.clocks, commit.marks, commit.late)
        for uid, shards in commit.shards.items():
            assert [s.sealed.digest for s in ours.shards[uid]] == [s.sealed.digest for s in shards]


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
@pytest.mark.parametrize("checkpoint", ["4 epochs", "never"])
def test_event_time_is_the_same_after_everything_but_the_log_was_lost(
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
    shutil.rmtree(root / "totals" / "00000", ignore_errors=True)
    second = live(build(sinks_in(tmp_path / "ours")), tmp_path / "dir", **options)
    assert second.recovery.last is not None
    assert second.recovery.last.lacking >= 4
    check(second, tmp_path)


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_the_same_on_any_parallelism(tmp_path: Path, backend: str) -> None:
    made = []
    for parallelism in (1, 2, 4):
        folder = tmp_path / str(parallelism)
        result = hf.testing.run(build(sinks_in(folder)), parallelism=parallelism, backend=backend)
        uids = ("tumbled", "late", "trends", "sessions", "silences", "prices")
        made.append({uid: result.rows(uid) for uid in uids})
    assert made[0] == made[1] == made[2]
    assert all(made[0].values()), {uid: len(rows) for uid, rows in made[0].items()}
