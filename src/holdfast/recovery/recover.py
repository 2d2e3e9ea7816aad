"""Brings shards that lost their version back to it: load the newest checkpoint, replay the epochs since.

    ask every shard ──> lacking ──> load checkpoint c ──> replay c+1..t in few jobs ──> all stand at t
                          ^             └ damaged: the checkpoint before         |
                          └───────────────── another fault on the way ───────────┘

Nothing here decides anything: plans and commits are facts, and a replay leads to the versions that were
committed or stops with an error.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.metadata import Checkpoint
from holdfast.engine.epoch import stamps
from holdfast.engine.program import Header, Program, Replayed, Report, SourceTask
from holdfast.errors import HoldfastError, JobLostError, StateLostError, from_facts
from holdfast.faults.points import reach
from holdfast.log.journal import Journal
from holdfast.log.records import Commit, Plan
from holdfast.recovery.replay import MAX_RECORDS, Load, Needs, Progress, Took, jobs, needs
from holdfast.recovery.restore import Prepare, Prepared

_log = logging.getLogger("holdfast.recovery")
_TRIES = 8
_SMALLER = 4
"""A replay that was lost is cut into so many times as many jobs."""
_FRUITLESS = 3
"""So often a checkpoint may be loaded in vain before the one before it is tried."""


class Runner(Protocol):
    """What runs the tasks of a recovery."""

    def prepare(self, asked: Sequence[Prepare]) -> list[Prepared]: ...

    def replay(self, tasks: Sequence[Sequence[SourceTask]], only: dict[str, list[int]]) -> list[Report]: ...


class _Again(Exception):
    """Something happened on the way: look afresh who lacks what."""


class Recovery:
    """Recoveries of one driver."""

    def __init__(
        self,
        program: Program,
        runner: Runner,
        journal: Journal,
        catalog: Catalog,
        *,
        tasks: int,
        strict: bool,
        tell: Callable[[Progress | None], None] = lambda progress: None,
    ) -> None:
        self._program, self._runner, self._journal, self._catalog = program, runner, journal, catalog
        self._tasks, self._strict, self._tell = tasks, strict, tell
        self._progress = Progress(0)
        self._smaller = 1
        self._fruitless: collections.Counter[int] = collections.Counter()
        self._loaded: dict[tuple[str, int], int] = {}
        """The checkpoint that each shard was loaded from last, where it was."""
        self.last: Progress | None = None
        """What the last one took."""
        self._took = Took()
        self.job_records = MAX_RECORDS
        """So many records one job of a replay reads; fewer where a task would be silent for too long otherwise."""

    def taken(self) -> Took:
        """What recoveries have taken since the last call."""
        took, self._took = self._took, Took()
        return took

    def _waited_s(self) -> float:
        """How long the runner has waited for executors so far: that is no loading."""
        return float(getattr(self._runner, "waited_s", 0.0))

    def recover(self, last: Commit | None, damaged: Mapping[tuple[str, int], str] | None = None) -> int:
        """Have every shard stand at its committed version: how many had to be rebuilt.

        `damaged`: what an epoch found wrong with versions of shards, which may have come from a checkpoint.
        """
        if last is None:
            return 0
        newest = self._catalog.newest(last.epoch, last_resort=True) if damaged else None
        for shard, damage in (damaged or {}).items():
            if newest is not None and self._loaded.get(shard) == newest.number:
                self._blame(newest, damage)
                break
        started, rebuilt = time.monotonic(), 0
        self._smaller = 1
        for _ in range(_TRIES):
            with contextlib.suppress(_Again, JobLostError):
                lacking = self._lacking(last)
                if not lacking:
                    self._ended(started, rebuilt)
                    return rebuilt
                reach("recovery.begun")
                rebuilt = max(rebuilt, len(lacking))
                self._took.rebuilt = rebuilt
                self._progress = Progress(len(lacking))
                self._rebuild(last, lacking)
        raise StateLostError(
            f"Shards could not be brought back to epoch {last.epoch} in {_TRIES} attempts.",
            remedy="Look at the executors: something ends them again and again. Nothing was committed since; start again.",
        )

    def _ended(self, started: float, rebuilt: int) -> None:
        if rebuilt:
            self.last = dataclasses.replace(self._progress, took_s=time.monotonic() - started)
            self._tell(self.last)
            self._tell(None)

    def _lacking(self, last: Commit) -> list[tuple[str, int]]:
        asked = [
            Prepare(uid, n, s.sealed.stamp, last.schemas)
            for uid, shards in last.shards.items()
            for n, s in enumerate(shards)
        ]
        answers = self._runner.prepare(asked)
        # Loading itself: a job that has to start its workers first takes longer, and that is not loading.
        self._took.checked_s += max((a.took_ms for a in answers), default=0.0) / 1000
        _raise_errors(answers)
        return [(a.uid, a.shard) for a in answers if a.lacking]

    def _rebuild(self, last: Commit, lacking: list[tuple[str, int]]) -> None:
        checkpoint = self._catalog.newest(last.epoch, last_resort=True)
        self._check_history(checkpoint, last)
        need = needs(self._program, lacking)
        epoch = 0 if checkpoint is None else checkpoint.epoch
        if epoch == last.epoch:
            need = Needs(need.real, {}, frozenset())
        loads = [self._load_of(e) for e in range(epoch + 1, last.epoch + 1)]
        self._progress = dataclasses.replace(self._progress, to_replay=len(loads))
        try:
            self._load(checkpoint, need, last)
            reach("recovery.loaded")
            records = {load.epoch: load.records for load in loads}
            self._took.share = len(need.parts) / sum(len(shards) for shards in last.shards.values())
            for job in jobs(loads, max(1, self.job_records // self._smaller)):
                self._replay(job, need, checkpoint)
                self._took.replayed_records += sum(records[epoch] for epoch in job)
                reach("recovery.replayed")
        finally:
            self._drop(need)

    def _check_history(self, checkpoint: Checkpoint | None, last: Commit) -> None:
        """Raise unless plans and commits reach back to the checkpoint, or to the beginning."""
        start = 0 if checkpoint is None else checkpoint.epoch
        there = set(self._journal.epochs())
        gone = [e for e in range(start + 1, last.epoch + 1) if e not in there]
        if not gone:
            return
        bad = "".join(f"\n  - checkpoint {n}: {why}" for n, why in self._catalog.unusable().items())
        raise StateLostError(
            f"No checkpoint can be used, and the log begins at epoch {min(there, default=0)}: state can't be rebuilt.",
            remedy="Bring back the host that had the state, or the checkpoint's files, and start again.",
            detail=bad or None,
        )

    def _load_of(self, epoch: int) -> Load:
        commit = self._commit(epoch)
        return Load(epoch, commit.records_in, commit.schemas)

    def _commit(self, epoch: int) -> Commit:
        commit = self._journal.commit(epoch)
        if commit is None:
            raise _Again  # a newer checkpoint was completed meanwhile, and what it does not need was trimmed
        return commit

    def _plan(self, epoch: int) -> Plan:
        plan = self._journal.plan(epoch)
        if plan is None:
            raise _Again
        return plan

    # Load

    def _load(self, checkpoint: Checkpoint | None, need: Needs, last: Commit) -> None:
        if checkpoint is None:
            _log.warning(
                "no checkpoint: %d shards replay everything since the first epoch", self._progress.lacking
            )
            return
        wanted = [(u, n, False) for u, ns in need.real.items() for n in ns]
        wanted += [(u, n, True) for u, ns in need.scratch.items() for n in ns]
        asked = [
            Prepare(u, n, checkpoint.stamp(u, n), checkpoint.schemas, checkpoint.version(u, n), scratch)
            for u, n, scratch in wanted
        ]
        self._said(to_load=len(asked))
        started = time.monotonic() - self._waited_s()
        answers = self._runner.prepare(asked)
        self._took.fetched_s += time.monotonic() - self._waited_s() - started
        damaged = [a for a in answers if a.damaged]
        if damaged:
            self._catalog.condemn(checkpoint.number, damaged[0].damaged)
            raise _Again
        _raise_errors(answers)
        if any(a.lacking for a in answers):
            self._in_vain(checkpoint, "its files are whole, but don't lead to its versions")
            raise _Again
        self._loaded.update({(u, n): checkpoint.number for u, n, scratch in wanted if not scratch})
        self._took.fetched_bytes += sum(a.fetched_bytes for a in answers)
        self._took.fetched_files += sum(len(a.stored.files) for a in asked if a.stored is not None)
        self._said(loaded=len(asked), loaded_bytes=sum(a.fetched_bytes for a in answers))

    def _in_vain(self, checkpoint: Checkpoint, why: str) -> None:
        """It was loaded, and led nowhere. Once may be the host's fault; again and again is the checkpoint's."""
        self._fruitless[checkpoint.number] += 1
        if self._fruitless[checkpoint.number] < _FRUITLESS:
            return
        others = any(c.number != checkpoint.number for c in self._catalog.completed())
        if others or min(self._journal.epochs(), default=0) == 1:  # otherwise it is all there is
            self._catalog.condemn(checkpoint.number, why)

    def _blame(self, checkpoint: Checkpoint, damage: str) -> None:
        self._in_vain(checkpoint, f"its files are those that were uploaded, but hold damage ({damage})")

    def _drop(self, need: Needs) -> None:
        """Forget scratch copies. If that fails, they are overwritten by the next recovery."""
        asked = [Prepare(u, n, "", {}, scratch=True, drop=True) for u, ns in need.scratch.items() for n in ns]
        if asked:
            with contextlib.suppress(HoldfastError):
                self._runner.prepare(asked)

    # Replay

    def _replay(self, epochs: Sequence[int], need: Needs, checkpoint: Checkpoint | None) -> None:
        started = time.monotonic() - self._waited_s()
        only = need.only
        tasks: list[list[SourceTask]] = [[] for _ in range(self._tasks)]
        for epoch in epochs:
            plan, header = self._plan(epoch), self._header(epoch, epochs, need, checkpoint)
            packed = msgspec.msgpack.encode(header)
            ranges = [r for r in plan.ranges if r.source in need.sources]
            for number, task in enumerate(tasks):
                task.append(SourceTask(number, packed, ranges[number :: self._tasks]))
        try:
            reports = self._runner.replay(tasks, only)
        except JobLostError:
            # It may have computed for so long that a worker was taken for frozen: the next ones are smaller.
            self._smaller *= _SMALLER
            raise
        for report in sorted(reports, key=lambda r: (r.epoch, r.task)):
            if report.error is not None:
                raise from_facts(report.error)
            if report.diverged:
                _log.warning("%s", report.diverged)
        damaged = [r.damaged for r in reports if r.damaged]
        if damaged and checkpoint is not None:
            self._blame(checkpoint, damaged[0])
        if any(r.lacking or r.skipped for r in reports):
            raise _Again
        replayed_s = time.monotonic() - self._waited_s() - started
        self._took.replayed_s += replayed_s
        self._took.replayed_epochs += len(epochs)
        replaying_s = self._progress.replaying_s + replayed_s
        self._said(replayed=self._progress.replayed + len(epochs), replaying_s=replaying_s)

    def _starting(self, epoch: int, checkpoint: Checkpoint | None) -> dict[str, list[str]]:
        """The versions with which the replay of an epoch begins: those that were loaded, or that the one before made."""
        if checkpoint is not None and checkpoint.epoch == epoch - 1:
            return {
                u: ["" if v is None else v.stamp for v in versions]
                for u, versions in checkpoint.shards.items()
            }
        return stamps(self._commit(epoch - 1) if epoch > 1 else None)

    def _header(
        self, epoch: int, epochs: Sequence[int], need: Needs, checkpoint: Checkpoint | None
    ) -> Header:
        commit, starting = self._commit(epoch), self._starting(epoch, checkpoint)
        return Header(
            epoch=epoch,
            generation=self._journal.generation,
            now_ms=self._plan(epoch).now_ms,
            source_tasks=self._tasks,
            stamps=starting,
            schemas=commit.schemas,
            clocks=self._plan(epoch).clocks,
            greatest=self._plan(epoch).greatest,
            answers=commit.answers,
            attempt="p",
            only=need.only,
            replayed=Replayed(
                first=epoch == epochs[0],
                last=epoch == epochs[-1],
                digests={u: [s.sealed.digest for s in shards] for u, shards in commit.shards.items()},
                sent={u: [s.sent for s in shards] for u, shards in commit.shards.items()},
                came={u: [s.came for s in shards] for u, shards in commit.shards.items()},
                stamps=stamps(commit),
                clocks=commit.clocks,
                scratch=need.scratch,
                strict=self._strict,
            ),
        )

    def _said(self, **changes: Any) -> None:
        self._progress = dataclasses.replace(self._progress, **changes)
        self._tell(self._progress)


def _raise_errors(answers: Sequence[Prepared]) -> None:
    for answer in answers:
        if answer.error is not None:
            raise from_facts(answer.error)
