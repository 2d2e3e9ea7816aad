"""What `holdfast chaos` and `holdfast drill` have in common: a folder of their own, progress, and the verdict."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast.cli.output import Unbroken, clock
from holdfast.errors import HoldfastError, PipelineError
from holdfast.faults.cluster import Cluster
from holdfast.faults.compare import Verdict
from holdfast.faults.experiment import Experiment, Struck, StuckError

CORES = 2
"""Of each host."""


class NotExactError(HoldfastError):
    """After the faults, output or state are not what they would have been without."""


def home_of(folder: Path | None, command: str) -> Path:
    """Where everything goes: the folder that was named, if it is empty, or a new one."""
    if folder is None:
        return Path(tempfile.mkdtemp(prefix=f"holdfast-{command}-"))
    if folder.exists() and any(folder.iterdir()):
        raise PipelineError(f"{folder} is not empty.", remedy="Name a folder that is, or that is not there.")
    return folder.absolute()


@contextlib.contextmanager
def experiment_on(
    hosts: int,
    app: str,
    home: Path,
    settings: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
) -> Iterator[Experiment]:
    """A pipeline that runs on a cluster of its own while the context lasts."""
    with (
        Cluster(home / "cluster", workers=hosts, cores=CORES) as cluster,
        Experiment(cluster, app, home, settings=settings, environment=environment) as experiment,
    ):
        yield experiment


class Told:
    """Tells on standard error how far the trials are, and how long the rest will take."""

    def __init__(self, trials: int) -> None:
        self._trials = trials
        self._began_s: float | None = None
        self._out = Unbroken(sys.stderr)
        self.last: Struck | None = None
        self.count = 0

    def say(self, text: str) -> None:
        """A line."""
        self._out.write(f"{text}\n")
        self._out.flush()

    def hear(self, struck: Struck, took_s: float, outcome: str) -> None:
        """One trial more is over; its fault was so long ago, or a little longer."""
        self.last, self.count = struck, self.count + 1
        now_s = time.monotonic()
        if self._began_s is None:
            self._began_s = now_s - took_s - 1.0
        each_s = (now_s - self._began_s) / self.count
        left_s = each_s * (self._trials - self.count)
        self.say(
            f"{self.count:>4}/{self._trials}  {struck.fault.label}: {struck.victim}, epoch {struck.planned}; "
            f"{outcome}; {clock(left_s)} left"
        )

    def added_to(self, error: HoldfastError) -> HoldfastError:
        """What was done before it went wrong belongs to the error."""
        if self.last is not None and isinstance(error, StuckError):
            error.message = f"After {self.count} trials, the last {self.last.fault.label}: {error.message}"
        return error


def refuse_unless_exact(verdict: Verdict, home: Path, seed: int) -> None:
    """Raise what differs, if anything does."""
    if verdict.exact:
        return
    raise NotExactError(
        f"{verdict.lost} rows lost, {verdict.doubled} doubled, {verdict.different_states} shards different.",
        remedy=f"Look at {home}; --seed {seed} draws the same faults.",
        detail="\n".join(f"  - {f}" for f in verdict.findings),
    )
