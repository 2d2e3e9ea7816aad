"""One supervised application on one cluster: strike it, and time its way back.

Recovery is read from the log, as the design defines it: from the fault to the commit of the last epoch planned
before it, and if none was planned, to the next commit, less the waiting for data. Whoever strikes, and when, decides
elsewhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.faults.app import command
from holdfast.faults.cluster import Cluster
from holdfast.faults.kinds import Fault
from holdfast.faults.victims import Aim, Nobody, Victims, kill
from holdfast.log.journal import Journal
from holdfast.metrics import read_status
from holdfast.recovery.memory import OUTCOMES, read_outcome
from holdfast.recovery.trace import EpochLine, read_trace
from holdfast.supervise.processes import kill_everything

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 120.0
FIRST_COMMITS = 3
_LOOK_EVERY_S = 0.02
_LOOKS = 50
_LAST_CALL_S = 0.1
"""A driver that is killed or frozen may be in the middle of a system call, which ends: the record that it creates counts."""
_TRACED_S = 2.0
"""A run tells of an epoch so long after its commit at the latest."""
_COMMIT_S = 0.1
"""What an epoch takes besides its run, and we to see it."""
_TAIL_LINES = 30
_RECENT_PLANS = 9

SETTINGS: dict[str, Any] = {
    "trim_log": False,
    "checkpoint": "3s",
    "restart": "fixed 200ms",
    "driver_timeout": "6s",
    "executor_timeout": "6s",
    "worker_timeout": "6s",
    "spark": {
        "spark.driver.host": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.driver.extraJavaOptions": "-XX:+UseSerialGC",
        "spark.executor.extraJavaOptions": "-XX:+UseSerialGC",
    },
}
"""What a victim runs with unless told otherwise: time-outs and checkpoints in seconds, and a log that is kept whole."""


OF_DRIVER = (Fault.DRIVER_KILL, Fault.DRIVER_FREEZE, Fault.APPLICATION)
"""Faults after which nobody waits for data: there is no driver."""


class StuckError(HoldfastError):
    """An application did not come back from a fault, or ended."""


class DrainedError(HoldfastError):
    """The sources had nothing left before the experiment was over."""


@dataclasses.dataclass(frozen=True)
class Struck:
    """A fault that was done: to whom, when, and where the application stood."""

    fault: Fault
    victim: str
    at_ms: int
    since_start_s: float
    at_s: float
    """On the monotonic clock."""
    epoch: int
    """The last epoch that was decided. Read right after the fault, since one may be decided while it is being done."""
    planned: int
    """The last epoch that was planned; if it was planned after the fault, none was before it."""

    @property
    def awaited(self) -> int:
        """The epoch whose commit ends the recovery."""
        return self.planned if self.planned > self.epoch else self.epoch + 1


def waiting_s(
    fault: Fault, at_ms: int, planned_ms: int, before_ms: Sequence[int], paused_s: float = 0.0
) -> float:
    """How long nothing was wrong between a fault and the plan of the epoch whose commit ended the recovery.

    An epoch that was planned before the fault waited for nothing, and without a driver nobody waits. Otherwise the
    driver waited for data or for its interval until the next plan was due, by the usual distance between
    plans and by how long intake was paused for a backup; what passed beyond that counts as recovery, since a driver that
    looks after lost shards plans nothing. A pause ends where a fault is noticed.

    Args:
        at_ms: when the fault came.
        planned_ms: when that epoch was planned.
        before_ms: when the epochs before it were planned, in order.
        paused_s: how long nothing was taken in before it, for the deadline's sake.

    >>> waiting_s(Fault.HOST, 10_100, 10_400, [9_000, 9_500, 10_000])
    0.3
    >>> waiting_s(Fault.HOST, 10_100, 17_000, [9_000, 9_500, 10_000])
    0.4
    """
    if planned_ms <= at_ms or fault in OF_DRIVER or len(before_ms) < 2:
        return 0.0
    gaps = [later - earlier for earlier, later in itertools.pairwise(before_ms)]
    due_ms = before_ms[-1] + statistics.median(gaps) + paused_s * 1000
    return max(0.0, min(planned_ms, due_ms) - at_ms) / 1000


class Experiment:
    """An application that lives while the context does, and whatever is left of it is killed at its end.

    Args:
        cluster: nobody else may use it meanwhile.
        app: as `holdfast run` takes it.
        folder: of the experiment's own: `dir` is the pipeline's directory, `out/<uid>` its output.
        settings: on top of `SETTINGS`; None takes one of those away, so that it comes from where it would for anybody.
        environment: on top of our own.

    >>> with Experiment(cluster, "app.py", folder) as experiment:  # doctest: +SKIP
    ...     struck = experiment.strike(Fault.EXECUTOR_KILL)
    ...     print(experiment.await_recovery(struck))
    ...     experiment.stop()
    """

    def __init__(
        self,
        cluster: Cluster,
        app: str,
        folder: Path,
        *,
        settings: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        supervise: bool = True,
    ) -> None:
        self.cluster, self.app, self.folder = cluster, app, folder.absolute()
        self.directory, self.out = self.folder / "dir", self.folder / "out"
        ours = {"master": cluster.url, "dir": str(self.directory)}
        asked = {**SETTINGS, **ours, **(settings or {})}
        self.settings = {name: value for name, value in asked.items() if value is not None}
        self.victims = Victims(cluster, self.directory)
        self.journal = Journal.at(self.directory)
        self._supervise, self._environment = supervise, dict(environment or {})
        self._log = self.folder / "application.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = time.monotonic()

    def __enter__(self) -> Experiment:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.out.mkdir(parents=True, exist_ok=True)
        self._started_s = time.monotonic()
        self._process = self.launch(self.settings, supervise=self._supervise)
        try:
            self.await_commit(FIRST_COMMITS, START_TIMEOUT_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        # The driver is in a session of its own, so it is not found once its supervisor has gone.
        with contextlib.suppress(Nobody):
            kill(self.victims.driver())
        kill_everything(self._process)
        self._process = None

    def launch(self, settings: Mapping[str, Any], *, supervise: bool) -> subprocess.Popen[bytes]:
        """Start the application, or a second one beside it; its output is added to the experiment's log."""
        with open(self._log, "ab") as log:
            return subprocess.Popen(
                command(self.app, self.out, settings, supervise=supervise),
                env={**os.environ, **self._environment},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    # Where it stands

    def last_epoch(self) -> int:
        """The newest decided epoch."""
        return self.journal.last_epoch()

    def last_planned(self) -> int:
        """The newest planned epoch."""
        epoch = self.journal.last_epoch()
        while self.journal.plan(epoch + 1) is not None:
            epoch += 1
        return epoch

    # Faults

    def aim(self, fault: Fault, share: float = 0.0, timeout_s: float = 60.0) -> Aim:
        """Whom to strike, as soon as there is somebody."""
        until = time.monotonic() + timeout_s
        while True:
            self._check_lives()
            try:
                return self.victims.aim(fault, share)
            except Nobody as nobody:
                if time.monotonic() >= until:
                    raise self._stuck(f"{fault.label}: {nobody} for {timeout_s:.0f} s.") from None
                time.sleep(_LOOK_EVERY_S)

    def strike(
        self, fault: Fault, share: float = 0.0, timeout_s: float = 60.0, aim: Aim | None = None
    ) -> Struck:
        """Do it as soon as there is somebody to do it to, or to the one who was aimed at."""
        aim = aim or self.aim(fault, share, timeout_s)
        at_s, at_ms = time.monotonic(), int(time.time() * 1000)
        aim.strike()
        if fault in OF_DRIVER:
            time.sleep(_LAST_CALL_S)
        epoch, planned = self.last_epoch(), self.last_planned()
        return Struck(fault, aim.victim, at_ms, at_s - self._started_s, at_s, epoch, planned)

    def await_recovery(self, struck: Struck, timeout_s: float = 120.0) -> float:
        """Wait until the application is back: the seconds that it took from the fault, less the waiting for data."""
        self.await_commit(struck.awaited, struck.at_s + timeout_s - time.monotonic())
        took_s = time.monotonic() - struck.at_s
        return max(0.0, took_s - self._waiting_s(struck))

    def await_felt_recovery(self, struck: Struck, timeout_s: float = 120.0) -> tuple[Struck, float]:
        """The same, until an epoch is decided that needed what died; and the fault as that epoch met it.

        An epoch may be so far at the fault that it no longer needs what died, and be decided as if nothing had
        happened. Then the outage is the next one's, and the time runs on until that one is decided.
        """
        took_s = self.await_recovery(struck, timeout_s)
        if struck.fault in OF_DRIVER or struck.planned <= struck.epoch or self._felt(struck, took_s):
            return struck, took_s
        later = dataclasses.replace(struck, epoch=struck.awaited, planned=struck.awaited)
        return later, self.await_recovery(later, timeout_s)

    def _felt(self, struck: Struck, took_s: float) -> bool:
        """Whether the epoch that was awaited needed what died: it rebuilt the shards of a lost host, or took longer than usual."""
        if struck.fault is Fault.HOST:
            own = read_outcome(self.directory / OUTCOMES / f"{struck.awaited:08d}.json")
            return own is not None and own.fault == Fault.HOST.label
        return took_s > self._usual_s(struck.awaited)

    def _usual_s(self, epoch: int) -> float:
        """How long epochs before this one took, from plan to commit."""
        commits = [self.journal.commit(e) for e in range(max(1, epoch - _RECENT_PLANS), epoch)]
        times = [c.took_ms / 1000 for c in commits if c is not None]
        return (statistics.median(times) if times else 0.0) + _COMMIT_S

    def _waiting_s(self, struck: Struck) -> float:
        wanted = range(max(1, struck.awaited - _RECENT_PLANS), struck.awaited + 1)
        *before, last = [plan for plan in map(self.journal.plan, wanted) if plan is not None]
        planned_ms = [plan.now_ms for plan in before]
        return waiting_s(struck.fault, struck.at_ms, last.now_ms, planned_ms, self._paused_s(struck.awaited))

    def _paused_s(self, epoch: int) -> float:
        """How long intake was paused before an epoch, as its run tells a moment after the commit."""
        until = time.monotonic() + _TRACED_S
        while True:
            lines = (line for line in read_trace(self.directory) if isinstance(line, EpochLine))
            found = next((line.paused_s for line in lines if line.epoch == epoch), None)
            if found is not None or time.monotonic() >= until:
                return found or 0.0
            time.sleep(_LOOK_EVERY_S)

    def await_commit(self, epoch: int, timeout_s: float) -> None:
        """Wait until an epoch is decided."""
        # To list all commits takes the longer the more there are. Now and then it is done: this one may have been trimmed.
        looks = itertools.count(1)
        self._await(
            lambda: (
                self.journal.commit(epoch) is not None
                or (next(looks) % _LOOKS == 0 and self.last_epoch() >= epoch)
            ),
            timeout_s,
            f"Epoch {epoch} was not decided within {timeout_s:.0f} s.",
        )

    def _await(self, happened: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
        until = time.monotonic() + timeout_s
        while not happened():
            self._check_lives()
            if time.monotonic() >= until:
                raise self._stuck(otherwise)
            time.sleep(_LOOK_EVERY_S)

    # The end

    def ended(self, timeout_s: float) -> int:
        """Wait until the application has ended by itself: its exit code."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def stop(self, after: Struck | None = None) -> None:
        """Stop cleanly once the application is well again: an epoch planned after the last fault is decided."""
        assert self._process is not None
        settled = self.last_epoch() if after is None else after.planned + 1
        self.await_commit(settled, START_TIMEOUT_S)
        self._process.terminate()
        try:
            code = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise self._stuck(f"It did not stop within {STOP_TIMEOUT_S:.0f} s.") from None
        if code != 0:
            raise self._stuck(f"It was asked to stop, and ended with {code}.")

    def _check_lives(self) -> None:
        assert self._process is not None
        code = self._process.poll()
        if code == 0:
            raise DrainedError(
                f"The pipeline ended by itself after epoch {self.last_epoch()}: its sources are exhausted.",
                remedy="Give it a source that outlasts the trials: hf.rate without total, or more data; or fewer trials.",
            )
        if code is not None:
            raise self._stuck(f"The application ended with {code}, and was not started again.")

    def _stuck(self, message: str) -> StuckError:
        status = read_status(self.directory)
        planned = self.last_planned() > self.last_epoch()
        if status is not None and status.state == "running" and not planned:
            remedy = "If its sources have nothing new, give them more; otherwise see what it wrote, below."
        else:
            remedy = "See what it wrote, below; the folder is kept."
        where = "" if status is None else f" Its status: {status.state} {status.message}".rstrip()
        return StuckError(
            f"{message} The last epoch decided is {self.last_epoch()}, the last planned {self.last_planned()}.{where}",
            remedy=f"{remedy} ({self.folder})",
            detail=self.tails(),
        )

    def tails(self) -> str:
        """The last lines of the application, its supervisor and the newest executors."""
        logs = [self._log, self.directory / "spark.log"]
        logs += sorted(self.cluster.executor_logs(), key=_written)[-3:]
        return "\n".join(f"--- {log}\n{_tail(log)}" for log in logs if log.exists())


def _written(path: Path) -> float:
    try:
        return os.stat(path).st_mtime
    except FileNotFoundError:
        return 0.0


def _tail(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(line[:400] for line in lines[-_TAIL_LINES:])
