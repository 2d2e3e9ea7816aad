"""Event time on Spark: the same output, clocks and state as the in-process runner, with a loss on the way."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.log.journal import Journal
from tests.spark.test_equals_runner import bytes_in
from tests.windowed import build, sinks_in


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_windows_timers_and_two_inputs_are_as_in_the_runner_after_a_loss(
    spark: Any, tmp_path: Path, backend: str
) -> None:
    options: dict[str, Any] = {
        "dir": str(tmp_path / "dir"),
        "parallelism": 2,
        "max_records": 32,
        "backend": backend,
        "interval": "0s",
        "drain": True,
        "checkpoint": "3 epochs",
        "trim_log": False,
    }
    build(sinks_in(tmp_path / "ours")).run(spark=spark, epochs=5, checkpoint_on_stop=False, **options)
    shutil.rmtree(tmp_path / "dir" / "state" / "windowed" / "totals" / "00001")
    shutil.rmtree(tmp_path / "dir" / "state" / "windowed" / "quiet" / "00000")
    build(sinks_in(tmp_path / "ours")).run(spark=spark, **options)
    journal = Journal.at(tmp_path / "dir")
    plans = [journal.plan(e) for e in range(1, journal.last_epoch() + 1)]
    expected = hf.testing.run(
        build(sinks_in(tmp_path / "runner")),
        parallelism=2,
        plans=[p for p in plans if p],
        capture=False,
        directory=tmp_path / "oracle",
    )
    assert bytes_in(tmp_path / "ours") == bytes_in(tmp_path / "runner")
    for commit in expected.commits:
        ours = journal.commit(commit.epoch)
        assert ours is not None
        assert (ours.clocks, ours.marks, ours.late) == (commit.clocks, commit.marks, commit.late)
        for uid, shards in commit.shards.items():
            assert [s.sealed.digest for s in ours.shards[uid]] == [s.sealed.digest for s in shards]
