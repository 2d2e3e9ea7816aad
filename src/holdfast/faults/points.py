"""Named points in the code at which a fault can be asked for. Free when nothing is asked for.

In the driver, `HOLDFAST_CRASH_AT=commit.after_record` kills it with SIGKILL when it gets there;
`commit.after_record@3` when it gets there for the third time. `HOLDFAST_FREEZE_AT` stops it and its JVM with
SIGSTOP instead, until somebody sends SIGCONT.

In tasks, `HOLDFAST_FAULT="shard.start:raise:<marker file>"` makes the first task that reaches the point raise,
once for each marker file; `kill` kills its Python worker, `freeze` stops it, and `lose-shuffle` deletes the shuffle
files on its host and raises, so that its next attempt finds its input gone. `shard.start@second:…` waits for a task
of the stage `second`, `shard.start@second-1:…` for its shard 1, `source.start@source-0:…` for the first source task.
Several are asked for with `;` between them. The marker exists if and only if the fault was done.
"""

from __future__ import annotations

import collections
import contextlib
import glob
import os
import signal
import threading

from holdfast.errors import ConfigError, EngineError

_CRASH, _FREEZE, _FAULT = "HOLDFAST_CRASH_AT", "HOLDFAST_FREEZE_AT", "HOLDFAST_FAULT"

DRIVER_POINTS = {
    "start.taken": "the generation is taken, nothing else has happened",
    "start.published": "what was decided before is published again",
    "plan.before_record": "an epoch is cut, its plan is not recorded yet",
    "plan.after_record": "the plan is recorded, nothing has run",
    "epoch.after_run": "all tasks have reported, nothing is judged",
    "commit.before_record": "the outcome is known, the commit is not recorded",
    "commit.after_record": "the commit is recorded, nothing is published",
    "publish.before_sink": "a sink is about to publish",
    "publish.after_sink": "one sink has published, perhaps not the others",
    "publish.after": "everything is published",
    "checkpoint.begun": "a checkpoint is begun, nothing is uploaded",
    "checkpoint.before_record": "everything is uploaded, the record is not created",
    "checkpoint.after_record": "the record exists, nothing was cleared up",
    "checkpoint.before_delete": "old records and files are about to go",
    "checkpoint.between_deletes": "records are gone, files are not",
    "checkpoint.after_delete": "everything is cleared up",
    "recovery.begun": "it is known which shards lack their version",
    "recovery.loaded": "checkpoints are loaded, nothing is replayed",
    "recovery.replayed": "one job of the replay is done",
}
"""Where a driver can be killed or frozen. Recovery's are reached only where something is to be recovered."""

TASK_POINTS = {
    "source.start": "a source task is about to read",
    "shard.start": "a shard has heard from all its channels",
    "shard.applied": "the epoch is applied, nothing is sealed",
    "upload.shard": "a shard's version is about to be uploaded",
    "upload.file": "a file is about to be uploaded",
}

_ACTIONS = ("raise", "kill", "freeze", "lose-shuffle")

_counts: collections.Counter[str] = collections.Counter()


class InjectedFault(BaseException):
    """Raised at a point; not an `Exception`, so that nothing reports it as a value: Spark must retry."""


def check_asked() -> None:
    """Raise for a point that does not exist: a fault that never comes would prove nothing."""
    for variable, points in ((_CRASH, DRIVER_POINTS), (_FREEZE, DRIVER_POINTS)):
        asked = os.environ.get(variable, "").partition("@")[0]
        if asked and asked not in points:
            raise ConfigError(
                f"{variable}={asked}: there is no such point.", remedy=f"The points are: {', '.join(points)}."
            )
    for asked in filter(None, os.environ.get(_FAULT, "").split(";")):
        _check_fault(asked)


def _check_fault(asked: str) -> None:
    point, _, action, marker = _parts(asked)
    if point not in TASK_POINTS:
        raise ConfigError(
            f"{_FAULT}={asked}: there is no such point.", remedy=f"The points are: {', '.join(TASK_POINTS)}."
        )
    if action not in _ACTIONS or not marker:
        raise ConfigError(
            f"{_FAULT}={asked}: it must be point:action:marker, or point@task:action:marker.",
            remedy=f"The actions are: {', '.join(_ACTIONS)}; the marker is a file that is not there yet.",
        )


def reach(point: str, task: str = "") -> None:
    """Say that a point is reached; fails if a fault was asked for here."""
    crash, freeze, asked = os.environ.get(_CRASH), os.environ.get(_FREEZE), os.environ.get(_FAULT)
    if not (crash or freeze or asked):
        return
    if point in DRIVER_POINTS:
        _counts[point] += 1
        if crash and _is_now(crash, point):
            os.kill(os.getpid(), signal.SIGKILL)
        if freeze and _is_now(freeze, point):
            _freeze_driver()
    for one in (asked or "").split(";"):
        wanted, aim, action, marker = _parts(one)
        if wanted == point and _is_aimed_at(aim, task) and _first(marker):
            _act(action, point, marker)


def _parts(asked: str) -> tuple[str, str, str, str]:
    """A fault as it is asked for: the point, the task or stage (empty: any), the action, the marker.

    >>> _parts("shard.start@second:raise:/tmp/marker")
    ('shard.start', 'second', 'raise', '/tmp/marker')
    """
    where, _, rest = asked.partition(":")
    point, _, aim = where.partition("@")
    action, _, marker = rest.partition(":")
    return point, aim, action, marker


def _is_aimed_at(aim: str, task: str) -> bool:
    """Whether a task is the one that is aimed at, or of the stage that is.

    >>> [_is_aimed_at(aim, "second-1") for aim in ("", "second", "second-1", "second-0", "first")]
    [True, True, True, False, False]
    """
    return aim in ("", task, task.rpartition("-")[0])


def _is_now(asked: str, point: str) -> bool:
    wanted, _, count = asked.partition("@")
    return wanted == point and _counts[point] == int(count or 1)


def _freeze_driver() -> None:
    """The JVM first: a driver that is frozen is so as a whole. And by this thread, so that it gets no further."""
    import psutil

    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "java" in child.name():
                child.suspend()
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def _first(marker: str) -> bool:
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _act(action: str, point: str, marker: str) -> None:
    if action in ("kill", "freeze"):
        os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)
        return
    if action == "lose-shuffle" and not _lose_shuffle():
        os.unlink(marker)
        raise EngineError(
            f"The shuffle files were to be lost at {point}, and there are none.",
            remedy="Ask for it where a task has input from another: at shard.start.",
        )
    raise InjectedFault(f"A fault was asked for at {point}.")


def _lose_shuffle() -> int:
    """Delete every shuffle file of this executor: how many there were."""
    lost = 0
    roots = os.environ.get("SPARK_EXECUTOR_DIRS", os.environ.get("SPARK_LOCAL_DIRS", ""))
    for root in filter(None, roots.split(",")):
        for file in glob.glob(os.path.join(root, "**", "shuffle_*.*"), recursive=True):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file)
                lost += 1
    return lost
