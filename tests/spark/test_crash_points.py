"""The driver killed, and frozen, replaced and woken, at every named step. Real processes, real signals.

The matrix runs over the in-process runner (the driver's own code is the same) and on Spark, with both backends:
every point once and a few on Spark in `make test`, the rest in `make test-slow`.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.faults.points import DRIVER_POINTS
from holdfast.log.journal import Journal
from tests import victim
from tests.spark.test_equals_runner import bytes_in, sinks_in

LOST = ("second", 1)
"""A shard behind another keyed stage: to rebuild it, that stage replays on scratch copies."""
COVERING = ["commit.after_record", "recovery.loaded"]


def start(folder: Path, backend: str, *more: str, **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.victim", str(folder), backend, *more],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def run(folder: Path, backend: str, *more: str) -> None:
    process = start(folder, backend, *more)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()[-3000:]


def first_life(folder: Path, backend: str) -> None:
    """Five epochs, over the in-process runner as nothing happens in them, and then a host's disk loses a shard."""
    run(folder, backend, "5")
    uid, shard = LOST
    shutil.rmtree(folder / "dir" / "state" / "generated" / uid / f"{shard:05d}")


def check(folder: Path) -> None:
    """Output and state changes are those of a run without faults over the same plans."""
    journal = Journal.at(folder / "dir")
    assert journal.last_epoch() == victim.EPOCHS
    plans = [journal.plan(e) for e in range(1, victim.EPOCHS + 1)]
    expected = hf.testing.run(
        victim.RECIPE.build(sinks_in(folder / "runner")),
        parallelism=2,
        plans=[p for p in plans if p],
        capture=False,
        directory=folder / "oracle",
    )
    assert bytes_in(folder / "ours") == bytes_in(folder / "runner")
    for epoch, commit in enumerate(expected.commits, start=1):
        ours = journal.commit(epoch)
        assert ours is not None
        for uid, shards in commit.shards.items():
            assert [s.sealed.digest for s in ours.shards[uid]] == [s.sealed.digest for s in shards]


def crash(folder: Path, backend: str, point: str, *more: str) -> None:
    first_life(folder, backend)
    process = start(folder, backend, *more, HOLDFAST_CRASH_AT=point)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, f"{point} was not reached: {errors.decode()[-2000:]}"
    run(folder, backend, *more)
    check(folder)


def freeze(folder: Path, backend: str, point: str, *more: str) -> None:
    first_life(folder, backend)
    frozen = start(folder, backend, *more, HOLDFAST_FREEZE_AT=point)
    try:
        _, status = os.waitpid(frozen.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), f"{point} was not reached: {os.waitstatus_to_exitcode(status)}"
        run(folder, backend, *more)
        check(folder)
        before = (bytes_in(folder / "ours"), bytes_in(folder / "dir" / "log" / "commits"))
        os.killpg(frozen.pid, signal.SIGCONT)
        _, errors = frozen.communicate(timeout=60)
        assert frozen.returncode == 5, (
            f"the woken driver did not see that it was replaced: {errors.decode()[-2000:]}"
        )
        assert (bytes_in(folder / "ours"), bytes_in(folder / "dir" / "log" / "commits")) == before
    finally:
        if frozen.poll() is None:
            os.killpg(frozen.pid, signal.SIGKILL)
            frozen.wait()
    run(folder, backend)  # and nothing that it left behind hurts the next life
    assert bytes_in(folder / "ours") == before[0]


BACKENDS = ["heap", "rocksdb"]
MATRIX = [(point, backend) for point in DRIVER_POINTS for backend in BACKENDS]
KILLED = [(point, BACKENDS[place // 2 % 2]) for place, point in enumerate(DRIVER_POINTS) if place % 2 == 0]
FROZEN = [(point, BACKENDS[place // 2 % 2]) for place, point in enumerate(DRIVER_POINTS) if place % 2 == 1]
"""In `make test` every point once: killed there or frozen, in turns, and so with the backends."""


@pytest.mark.parametrize(("point", "backend"), KILLED)
def test_the_driver_is_killed_at(tmp_path: Path, point: str, backend: str) -> None:
    crash(tmp_path, backend, point)


@pytest.mark.parametrize(("point", "backend"), FROZEN)
def test_the_driver_is_frozen_replaced_and_woken_at(tmp_path: Path, point: str, backend: str) -> None:
    freeze(tmp_path, backend, point)


@pytest.mark.slow
@pytest.mark.parametrize(("point", "backend"), [one for one in MATRIX if one not in KILLED])
def test_the_driver_is_killed_at_every_other_point(tmp_path: Path, point: str, backend: str) -> None:
    crash(tmp_path, backend, point)


@pytest.mark.slow
@pytest.mark.parametrize(("point", "backend"), [one for one in MATRIX if one not in FROZEN])
def test_the_driver_is_frozen_replaced_and_woken_at_every_other_point(
    tmp_path: Path, point: str, backend: str
) -> None:
    freeze(tmp_path, backend, point)


@pytest.mark.parametrize("point", COVERING)
def test_on_spark_the_driver_is_killed_at(tmp_path: Path, point: str) -> None:
    crash(tmp_path, "rocksdb", point, "spark")


def test_on_spark_the_driver_is_frozen_replaced_and_woken(tmp_path: Path) -> None:
    freeze(tmp_path, "heap", "commit.before_record", "spark")


@pytest.mark.slow
@pytest.mark.parametrize(("point", "backend"), MATRIX)
def test_on_spark_the_driver_is_killed_at_every_point(tmp_path: Path, point: str, backend: str) -> None:
    crash(tmp_path, backend, point, "spark")


@pytest.mark.slow
@pytest.mark.parametrize(("point", "backend"), MATRIX)
def test_on_spark_the_driver_is_frozen_replaced_and_woken_at_every_point(
    tmp_path: Path, point: str, backend: str
) -> None:
    freeze(tmp_path, backend, point, "spark")
