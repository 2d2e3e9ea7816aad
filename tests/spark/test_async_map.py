"""Calls of the outside world on Spark: the driver killed in the middle, state lost, shuffle files lost."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.log.journal import Journal
from tests import asking
from tests.drivers import state_in
from tests.injected import injected
from tests.spark.test_equals_runner import bytes_in


def life(folder: Path, **environment: str) -> int:
    done = subprocess.run(
        [sys.executable, "-m", "tests.asking", str(folder)],
        env={**os.environ, **environment},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr.decode()[-3000:]
    return done.returncode


def check(folder: Path) -> None:
    """Output and digests are those of the runner over the same plans and answers, which asks nobody."""
    journal = Journal.at(folder / "dir")
    assert journal.last_epoch() == asking.EPOCHS
    plans = [journal.plan(e) for e in range(1, asking.EPOCHS + 1)]
    silent = asking.World(folder / "silent")
    expected = hf.testing.run(
        asking.build(silent, folder / "runner"),
        plans=[p for p in plans if p],
        answers=folder / "dir",
        capture=False,
        directory=folder / "oracle",
    )
    assert silent.asked() == []
    assert bytes_in(folder / "ours") == bytes_in(folder / "runner")
    for commit in expected.commits:
        ours = journal.commit(commit.epoch)
        assert ours is not None
        for uid, shards in commit.shards.items():
            assert [s.sealed.digest for s in ours.shards[uid]] == [s.sealed.digest for s in shards]
            assert [s.sent for s in ours.shards[uid]] == [s.sent for s in shards]


@pytest.mark.slow
def test_the_driver_is_killed_and_state_is_lost_and_only_the_undecided_epoch_asks_again(
    tmp_path: Path,
) -> None:
    assert life(tmp_path, HOLDFAST_CRASH_AT="commit.before_record@9") == -signal.SIGKILL
    assert Journal.at(tmp_path / "dir").last_epoch() == 8
    shutil.rmtree(state_in(tmp_path / "dir") / "second" / "00001")
    assert life(tmp_path) == 0
    undecided = range(40, 45), range(100, 105)  # what the ninth epoch takes of each split
    once = [n for n in range(120) for _ in range(2)]
    twice = [n for part in undecided for n in part for _ in range(2)]
    assert asking.World(tmp_path / "asked").asked() == sorted(once + twice)
    check(tmp_path)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("source.start:raise", marks=pytest.mark.slow),
        pytest.param("shard.applied:raise", marks=pytest.mark.slow),
        pytest.param("shard.start:lose-shuffle", marks=pytest.mark.slow),
        "shard.start@second:lose-shuffle",
    ],
)
def test_attempts_that_spark_makes_again_are_never_mixed(spark: Any, tmp_path: Path, fault: str) -> None:
    world = asking.World(tmp_path / "asked")
    with injected(spark, fault) as marker:
        asking.build(world, tmp_path / "ours").run(spark=spark, dir=str(tmp_path / "dir"), **asking.OPTIONS)
        assert marker.exists(), "the fault did not come"
    asked = world.asked()
    assert set(asked) == set(range(120)) and all(asked.count(n) >= 2 for n in range(120))
    check(tmp_path)
