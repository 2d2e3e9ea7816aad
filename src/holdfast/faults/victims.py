"""Whom a fault can strike, and how: the processes of one application on one cluster.

The processes that each fault looks for, and the signals that it sends. When to strike and
what comes of it is the experiment's affair.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from holdfast.engine.doors import SLOT
from holdfast.faults.cluster import Cluster
from holdfast.faults.kinds import Fault
from holdfast.log.journal import Journal
from holdfast.log.records import Commit
from holdfast.metrics import read_status
from holdfast.supervise.supervisor import read_supervision

T = TypeVar("T")
Deed = Callable[[Sequence[psutil.Process]], None]

_EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
_DAEMONS = {"pyspark.daemon", "holdfast.engine.daemon"}
_CHECK = "check"
"""The slot that tries the doors at a start, and does nothing afterwards."""


class Nobody(Exception):
    """There is nobody to strike just now."""


@dataclasses.dataclass(frozen=True)
class Executor:
    """An executor's JVM."""

    process: psutil.Process
    number: str
    host: str

    def __str__(self) -> str:
        return f"executor {self.number} on {self.host}"


@dataclasses.dataclass(frozen=True)
class Worker:
    """A Python worker: of a shard or of uploads by its slot, of the sources without one."""

    process: psutil.Process
    slot: str
    host: str

    def __str__(self) -> str:
        return f"worker of {self.slot or 'sources'} on {self.host}"


@dataclasses.dataclass(frozen=True)
class Aim:
    """Who will be struck, found before the moment counts: to look for processes takes a while."""

    victim: str
    strike: Callable[[], None]


class Victims:
    """The application that has a directory, on a cluster that nobody else uses."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self._cluster, self._directory = cluster, directory
        self.shards_only = False
        """Whether only workers, executors and hosts that hold state are struck: others are replaced at little cost."""

    def executors(self) -> list[Executor]:
        """The executors that live, frozen ones too, in the order of hosts and numbers."""
        found = [
            Executor(process, _option(words, "--executor-id"), self._cluster.host(host))
            for host in self._cluster.hosts
            for process in self._cluster.processes(host)
            if _EXECUTOR in (words := _words(process))
        ]
        return sorted(found, key=lambda e: (e.host, e.number.zfill(6)))

    def workers(self) -> list[Worker]:
        """The Python workers that live: what PySpark's daemons forked."""
        found = []
        for host in self._cluster.hosts:
            living = self._cluster.processes(host)
            daemons = {p.pid for p in living if _DAEMONS & set(_words(p))}
            for process in living:
                with contextlib.suppress(psutil.Error):
                    slot = str(process.environ().get(SLOT, ""))
                    if process.ppid() in daemons and slot != _CHECK:
                        found.append(Worker(process, slot, self._cluster.host(host)))
        return sorted(found, key=lambda w: (w.host, w.slot, w.process.pid))

    def driver(self) -> list[psutil.Process]:
        """The driver's Python process and its JVM, if it has one yet."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self._driver_pid())
            below = [p for p in process.children(recursive=True) if "java" in p.name()]
            return [process, *below]
        raise Nobody("the driver")

    def _driver_pid(self) -> int:
        supervision = read_supervision(self._directory)
        if supervision is not None:
            if supervision.child_pid is None:
                raise Nobody("a driver that lives")
            return supervision.child_pid
        status = read_status(self._directory)
        if status is None:
            raise Nobody("a driver")
        return status.pid

    def aim(self, fault: Fault, share: float) -> Aim:
        """Find whom to strike. `share`, from 0 to 1, chooses among those who are there; `Nobody` if none is."""
        return _AIMS[fault](self, share)

    def _worker(self, share: float, do: Deed) -> Aim:
        living = self.workers()
        if self.shards_only:
            holders = self._holders()
            living = [w for w in living if (w.host, str(w.process.pid)) in holders]
        worker = chosen(living, share)
        return Aim(str(worker), lambda: do([worker.process]))

    def _executor(self, share: float, do: Deed) -> Aim:
        homes = {self._cluster.host(number) for number in self._homes()}
        awake = [e for e in self.executors() if e.host in homes and not _stopped(e.process)]
        executor = chosen(awake, share)
        return Aim(str(executor), lambda: do([executor.process]))

    def _driver(self, share: float, do: Deed) -> Aim:
        processes = self.driver()
        return Aim(f"driver {processes[0].pid}", lambda: do(processes))

    def _host(self, share: float) -> Aim:
        number = chosen(self._homes(), share)

        def lose() -> None:
            self._cluster.lose_host(number)
            self._cluster.start_worker(number)

        return Aim(f"host {self._cluster.host(number)}", lose)

    def _homes(self) -> list[int]:
        """The hosts that may be struck: where only those with state are, those that the newest commit names."""
        hosts = list(self._cluster.hosts)
        if not self.shards_only:
            return hosts
        return sorted({number for number, _ in self._holding()}) or hosts

    def _holders(self) -> set[tuple[str, str]]:
        """The workers that hold a shard: host and process. One of its slot elsewhere, from before it moved, does not."""
        return {(self._cluster.host(number), pid) for number, pid in self._holding()}

    def _holding(self) -> set[tuple[int, str]]:
        journal = Journal.at(self._directory)
        roots = [str(self._cluster.state_root(number)) for number in self._cluster.hosts]
        return holding(journal.commit(journal.last_epoch()), roots)

    def _application(self, share: float) -> Aim:
        driver, executors = self.driver(), self.executors()
        name = f"driver {driver[0].pid}, {len(executors)} executor{'' if len(executors) == 1 else 's'}"
        return Aim(name, lambda: kill([*driver, *(e.process for e in executors)]))


def holding(commit: Commit | None, roots: Sequence[str]) -> set[tuple[int, str]]:
    """Who holds state after an epoch: hosts by their numbers, each with a process. A home is named by its host and its state's root.

    >>> holding(None, ["/a", "/b"])
    set()
    """
    shards = [] if commit is None else [s for of in commit.shards.values() for s in of]
    return {(n, s.worker) for n, root in enumerate(roots) for s in shards if s.host.endswith(root)}


def kill(processes: Sequence[psutil.Process]) -> None:
    """SIGKILL; who has gone meanwhile is passed over."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def freeze(processes: Sequence[psutil.Process]) -> None:
    """SIGSTOP; who has gone meanwhile is passed over."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()


def wake(processes: Sequence[psutil.Process]) -> None:
    """SIGCONT; who has gone meanwhile is passed over."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def chosen(of: Sequence[T], share: float) -> T:
    """The one at a share of the way through.

    >>> chosen("abcd", 0.0), chosen("abcd", 0.6), chosen("abcd", 1.0)
    ('a', 'c', 'd')
    """
    if not of:
        raise Nobody("none of them lives")
    return of[min(int(share * len(of)), len(of) - 1)]


_AIMS: dict[Fault, Callable[[Any, float], Aim]] = {
    Fault.WORKER_KILL: lambda v, share: v._worker(share, kill),
    Fault.WORKER_FREEZE: lambda v, share: v._worker(share, freeze),
    Fault.EXECUTOR_KILL: lambda v, share: v._executor(share, kill),
    Fault.EXECUTOR_FREEZE: lambda v, share: v._executor(share, freeze),
    Fault.HOST: Victims._host,
    Fault.DRIVER_KILL: lambda v, share: v._driver(share, kill),
    Fault.DRIVER_FREEZE: lambda v, share: v._driver(share, freeze),
    Fault.APPLICATION: Victims._application,
}


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _stopped(process: psutil.Process) -> bool:
    """Whether it is frozen: its worker ends it only after ten seconds, with a new one beside it."""
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return True


def _option(words: Sequence[str], name: str) -> str:
    """What stands behind an option in a command line.

    >>> _option(["java", "--executor-id", "3"], "--executor-id")
    '3'
    """
    return words[words.index(name) + 1] if name in words[:-1] else "?"
