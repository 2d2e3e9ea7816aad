"""Every way in which time comes about, after a loss: the same as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast as hf
from tests.drivers import live
from tests.rebuilt import BOTH_WAYS, LOSSES, check, rebuilt
from tests.timed import IDLE, OPERATORS, OUTPUTS, build
from tests.windowed import sinks_in


@pytest.mark.parametrize(("checkpoint", "backend"), BOTH_WAYS)
def test_time_is_the_same_after_everything_but_the_log_was_lost(
    tmp_path: Path, backend: str, checkpoint: str
) -> None:
    second = rebuilt(build, OPERATORS, "beside", tmp_path, backend=backend, checkpoint=checkpoint)
    assert second.recovery.last is not None
    assert second.recovery.last.lacking >= 4
    check(build, OUTPUTS, second, tmp_path)


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_time_is_the_same_with_a_new_driver_for_each_epoch(tmp_path: Path, backend: str) -> None:
    options = {**LOSSES, "backend": backend, "checkpoint": "never"}
    life = live(build(sinks_in(tmp_path / "ours")), tmp_path / "dir", epochs=1, **options)
    held = 0
    while (
        life.driver.last_epoch < 15
    ):  # until the silent splits speak again: who lives for an epoch finds none idle
        before = life.driver.last_epoch
        life = live(build(sinks_in(tmp_path / "ours")), tmp_path / "dir", epochs=1, **options)
        assert life.driver.last_epoch == before + 1
        held += any(f.watermarks["fast.time"].waits for f in life.facts)
    assert held, "the fast source never waited for the slow one"
    life = live(build(sinks_in(tmp_path / "ours")), tmp_path / "dir", **options)
    check(build, OUTPUTS, life, tmp_path)


def test_splits_are_idle_and_sources_wait_in_what_these_tests_run(tmp_path: Path) -> None:
    life = live(build(sinks_in(tmp_path / "out")), tmp_path / "dir", **LOSSES)
    plans = [life.journal.plan(e) for e in range(1, life.driver.last_epoch + 1)]
    for uid in IDLE:
        assert any(plan is not None and plan.idle.get(uid) for plan in plans), uid
    assert any(f.watermarks["fast.time"].waits for f in life.facts)
    commits = [life.journal.commit(e) for e in range(1, life.driver.last_epoch + 1)]
    assert any(c is not None and c.late for c in commits)


@pytest.mark.parametrize("parallelism", [1, 4])
def test_time_is_the_same_on_any_parallelism(tmp_path: Path, parallelism: int) -> None:
    life = live(build(sinks_in(tmp_path / "two")), tmp_path / "dir", **LOSSES)
    plans = [life.journal.plan(e) for e in range(1, life.driver.last_epoch + 1)]
    rows = []
    for many in (2, parallelism):
        made = hf.testing.run(build(lambda uid: hf.memory()), parallelism=many, plans=[p for p in plans if p])
        rows.append({uid: made.rows(uid) for uid in OUTPUTS})
    assert rows[0] == rows[1]
    assert all(rows[0].values()), {uid: len(found) for uid, found in rows[0].items()}
