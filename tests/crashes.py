"""A driver that is killed, or frozen, replaced and woken, at a named step; and what must have come of it."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path

import holdfast as hf
from holdfast.checkpoint.catalog import Catalog
from holdfast.faults.points import DRIVER_POINTS
from holdfast.log.journal import Journal
from tests import victim
from tests.drivers import state_in
from tests.mother import Child, Mother
from tests.pipelines import Recipe
from tests.spark.test_equals_runner import bytes_in, sinks_in

BACKENDS = ["heap", "rocksdb"]
MATRIX = [(point, backend) for point in DRIVER_POINTS for backend in BACKENDS]
WALK = sorted(DRIVER_POINTS, key=lambda point: not point.startswith("recovery"))
"""Every point in an order for one life after the other: after the first life, and for sure only then, there is something to replay."""
FIRST_LIFE = 9
LOST = ("second", 1)
"""A shard behind another keyed stage: to rebuild it, that stage replays on scratch copies."""


Process = Child | subprocess.Popen[bytes]
_mother = Mother()


def start(folder: Path, backend: str, *more: str, **environment: str) -> Process:
    """A life of a driver. With Spark it is started like any program; without, it is forked from one that has its imports."""
    arguments = [str(folder), backend, *more]
    if "spark" not in more:
        folder.mkdir(parents=True, exist_ok=True)
        return Child(_mother, arguments, environment, folder / f"errors-{secrets.token_hex(4)}")
    return subprocess.Popen(
        [sys.executable, "-m", "tests.victim", *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def run(folder: Path, backend: str, *more: str) -> None:
    process = start(folder, backend, *more)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()[-3000:]


def first_life(folder: Path, backend: str, *more: str) -> None:
    """Nine epochs, over the in-process runner as nothing happens in them, and then a host's disk loses a shard.

    By then deltas were merged, so that the first checkpoint of the next life has files of the one before to delete.
    """
    run(folder, backend, str(FIRST_LIFE), *more)
    lose(folder)


def lose(folder: Path) -> None:
    """Delete a shard from its host's disk; perhaps it was not even rebuilt since the last time."""
    uid, shard = LOST
    shutil.rmtree(state_in(folder / "dir") / uid / f"{shard:05d}", ignore_errors=True)


def check(folder: Path, recipe: Recipe = victim.RECIPE, epochs: int = victim.EPOCHS) -> None:
    """Output and state changes are those of a run without faults over the same plans."""
    check_state(folder, sinks_in(folder / "runner"), recipe, epochs)
    assert bytes_in(folder / "ours") == bytes_in(folder / "runner")


def check_state(
    folder: Path, sinks: dict[str, hf.Sink], recipe: Recipe = victim.RECIPE, epochs: int = victim.EPOCHS
) -> None:
    """State changes are those of such a run, which writes to these sinks."""
    journal = Journal.at(folder / "dir")
    assert journal.last_epoch() == epochs
    plans = [journal.plan(e) for e in range(1, epochs + 1)]
    expected = hf.testing.run(
        recipe.build(sinks),
        parallelism=2,
        plans=[p for p in plans if p],
        capture=False,
        directory=folder / "oracle",
    )
    for epoch, commit in enumerate(expected.commits, start=1):
        ours = journal.commit(epoch)
        assert ours is not None
        for uid, shards in commit.shards.items():
            assert [s.sealed.digest for s in ours.shards[uid]] == [s.sealed.digest for s in shards]


def check_store(folder: Path) -> None:
    """Every file that a completed checkpoint names is in the store, and is what was uploaded."""
    store = folder / "dir" / "checkpoints"
    completed = Catalog(Journal.at(folder / "dir")).completed()
    assert completed, "there is no checkpoint"
    for checkpoint in completed:
        for file in checkpoint.files:
            data = (store / file.key).read_bytes() if (store / file.key).exists() else None
            assert data is not None, f"checkpoint {checkpoint.number} lacks {file.key}"
            assert (len(data), zlib.crc32(data)) == (file.size_bytes, file.crc32), file.key


def killed_at(folder: Path, backend: str, point: str, *more: str) -> None:
    """A life that ends there."""
    process = start(folder, backend, *more, HOLDFAST_CRASH_AT=point)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, f"{point} was not reached: {errors.decode()[-2000:]}"
    check_store(folder)


def frozen_at(folder: Path, backend: str, point: str, *more: str) -> Process:
    """A life that stands still there."""
    frozen = start(folder, backend, *more, HOLDFAST_FREEZE_AT=point)
    try:
        assert stands_still(frozen), f"{point} was not reached: {frozen.returncode}"
        check_store(folder)
    except BaseException:
        end(frozen)
        raise
    return frozen


def stands_still(process: Process) -> bool:
    """Wait until it does; False: it has ended."""
    if isinstance(process, Child):
        return process.await_stop(120)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    return os.WIFSTOPPED(status)


def wake(folder: Path, frozen: Process, *, done: bool = True) -> None:
    """It must see that it was replaced, and change nothing: neither output nor commits, nor what checkpoints need.

    If its successor is not done with what was decided, it may still show some of that: the same files, whoever does it.
    """
    shown, commits = bytes_in(folder / "ours"), bytes_in(folder / "dir" / "log" / "commits")
    os.killpg(frozen.pid, signal.SIGCONT)
    _, errors = frozen.communicate(timeout=60)
    assert frozen.returncode == 5, (
        f"the woken driver did not see that it was replaced: {errors.decode()[-2000:]}"
    )
    assert bytes_in(folder / "dir" / "log" / "commits") == commits
    after = bytes_in(folder / "ours")
    assert after == shown if done else after.items() >= shown.items()
    check_store(folder)


def end(process: Process) -> None:
    """Whatever has become of it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def crash(folder: Path, backend: str, point: str, *more: str) -> None:
    first_life(folder, backend)
    killed_at(folder, backend, point, *more)
    run(folder, backend, *more)
    check(folder)
    check_store(folder)


def freeze(folder: Path, backend: str, point: str, *more: str) -> None:
    first_life(folder, backend)
    frozen = frozen_at(folder, backend, point, *more)
    try:
        run(folder, backend, *more)
        if "trim" in more:
            assert FIRST_LIFE + 1 not in Journal.at(folder / "dir").epochs(), "its epoch is still in the log"
        else:
            check(folder)
        check_store(folder)
        wake(folder, frozen)
    finally:
        end(frozen)
    shown = bytes_in(folder / "ours")
    run(folder, backend)  # and nothing that it left behind hurts the next life
    assert bytes_in(folder / "ours") == shown
    check_store(folder)


def crash_along(folder: Path, backend: str, points: Iterable[str], *more: str) -> None:
    """Killed at one point after the other: each life recovers from the end of the one before, and from a lost shard."""
    first_life(folder, backend, "long")
    for point in points:
        lose(folder)
        killed_at(folder, backend, point, "long", *more)
    last_life(folder, backend, *more)


def freeze_along(folder: Path, backend: str, points: Iterable[str], *more: str) -> None:
    """Frozen at one point after the other: each life replaces the one before, which wakes while its successor stands still."""
    first_life(folder, backend, "long")
    frozen: list[Process] = []
    try:
        for point in points:
            lose(folder)
            frozen.append(frozen_at(folder, backend, point, "long", *more))
            if len(frozen) > 1:
                wake(folder, frozen[-2], done=False)
        last_life(folder, backend, *more)
        wake(folder, frozen[-1])
    finally:
        for process in frozen:
            end(process)
    last_life(folder, backend)  # nothing that the woken ones left behind hurts the next life


def last_life(folder: Path, backend: str, *more: str) -> None:
    """Two epochs to which nothing happens, and what all lives together have left behind."""
    before = Journal.at(folder / "dir").last_epoch()
    run(folder, backend, "2", "long", *more)
    epochs = Journal.at(folder / "dir").last_epoch()
    assert epochs >= before + 2
    for of in ("runner", "oracle"):
        shutil.rmtree(folder / of, ignore_errors=True)
    check(folder, victim.recipe(victim.LONG), epochs)
    check_store(folder)
