"""Windows, timers and two inputs after a loss: the same as if nothing had happened, over the real loop without Spark."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast as hf
from holdfast.time.units import MIN_TIME
from tests.drivers import live
from tests.rebuilt import BOTH_WAYS, LOSSES, check, rebuilt
from tests.windowed import build, sinks_in

OPERATORS = ["totals", "trend", "visits", "quiet", "priced"]


@pytest.mark.parametrize(("checkpoint", "backend"), BOTH_WAYS)
def test_event_time_is_the_same_after_everything_but_the_log_was_lost(
    tmp_path: Path, backend: str, checkpoint: str
) -> None:
    second = rebuilt(build, OPERATORS, "totals", tmp_path, backend=backend, checkpoint=checkpoint)
    assert second.recovery.last is not None
    assert second.recovery.last.lacking >= 4
    check(build, ("tumbled", "trends", "sessions", "prices"), second, tmp_path)


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


def test_a_checkpoint_says_how_far_event_time_was(tmp_path: Path) -> None:
    life = live(build(sinks_in(tmp_path / "out")), tmp_path / "dir", **{**LOSSES, "checkpoint": "4 epochs"})
    made = life.catalog.newest(life.driver.last_epoch)
    assert made is not None
    commit = life.journal.commit(made.epoch)
    assert commit is not None
    assert made.watermarks == commit.marks
    assert all(splits and min(splits.values()) > MIN_TIME for splits in made.watermarks.values())
