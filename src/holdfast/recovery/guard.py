"""Holds a running pipeline to its deadline: learns from what happens, forecasts, and decides after every epoch.

    epochs, backups, recoveries ──> Learned ──> estimate ──> decide ──> back up · pause · cut
                                       |
                                 recovery.json, kept across runs; recoveries/, what was estimated and what it took

Everything here is the driver's thread's, except `backup_ended`, which only leaves a note.
"""

from __future__ import annotations

import collections
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import msgspec

from holdfast.checkpoint.calibrate import Reading
from holdfast.checkpoint.coordinator import FIRST_RETRY_S
from holdfast.checkpoint.lifecycle import FailedCheckpoint
from holdfast.checkpoint.metadata import Checkpoint
from holdfast.checkpoint.policy import Deadline, parse_policy
from holdfast.config import Settings
from holdfast.errors import InfeasibleError
from holdfast.faults.kinds import Fault
from holdfast.log.records import Commit
from holdfast.metrics import Forecast, Recovered
from holdfast.recovery.decide import Decision, Outlook, decide, least_epoch
from holdfast.recovery.episode import Episode, fallen, restarts, which
from holdfast.recovery.estimate import (
    OF_DRIVER,
    Bounds,
    Estimate,
    History,
    Learned,
    Memory,
    Notice,
    Outcome,
    Situation,
    attribute,
    covered,
    estimates,
)
from holdfast.recovery.explain import UNSEEN_WORKER, Explanation, explain
from holdfast.recovery.feasible import FAILING, Teller
from holdfast.recovery.memory import drilled, read_memory, read_newest, write_memory, write_outcome
from holdfast.recovery.replay import MAX_RECORDS, Took
from holdfast.recovery.standing import Loads, Standing
from holdfast.recovery.trace import BackupLine, EpochLine, Trace
from holdfast.supervise.heartbeat import FELL, RESTARTS

_P = ParamSpec("_P")
_R = TypeVar("_R")

DRILL = "HOLDFAST_DRILL"
"""In this variable a drill says that it will tell of each fault itself: when it came and which it was."""
_IMPORTS_S = 1.0
"""From a supervisor's start of a driver to its first step: Python and its imports."""
FIRST_RECORDS = 20_000
"""The most records of an epoch before it is known what one costs."""
GROWTH = 4
"""An epoch may have so many times as many records as the largest before it: what is far from all that was seen is not known."""
_SPARK_ENDS_IDLE_S = 50.0
"""Spark ends Python workers that had nothing to do for a minute: a reload after such a pause is no fault's."""
_RECENT = 20
_KEEP_EVERY_S = 10.0
"""A driver that is killed forgets what epochs and backups have taught since then; recoveries are kept at once."""
_LOOK_EVERY_S = 0.5


def _counted(method: Callable[Concatenate[Guard, _P], _R]) -> Callable[Concatenate[Guard, _P], _R]:
    """Count what a method costs as estimating and deciding; what it calls is counted once."""

    @functools.wraps(method)
    def call(self: Guard, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if self.counting:
            return method(self, *args, **kwargs)
        self.counting, started = True, time.perf_counter()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.counting = False
            self.cost_s += time.perf_counter() - started

    return call


class Guard:
    """The deadline of one pipeline, in one life of its driver."""

    def __init__(
        self,
        settings: Settings,
        notice: Notice,
        directory: Path,
        *,
        cores: int = 2,
        clock_s: Callable[[], float] = time.time,
        environment: dict[str, str] | None = None,
        loads: Loads = list,
    ) -> None:
        self._settings, self._notice, self._directory = settings, notice, directory
        self._clock_s = clock_s
        self._holds = isinstance(parse_policy(settings.checkpoint), Deadline)
        if environment is None:
            environment = dict(os.environ)
            os.environ.pop(FELL, None)  # it is told once
            os.environ.pop(RESTARTS, None)
        self._drilled = bool(environment.get(DRILL))
        self._supervised_s = notice.driver_s
        self.faults = covered(notice)
        self._known = read_memory(directory) or Memory()
        self.learned = Learned(self._known)
        self.learned.job_records = self._fitting(MAX_RECORDS)  # time-outs may be others than in the last life
        self._trace = Trace(directory)
        self._standing = Standing(cores, settings.max_records, loads)
        self._gaps: collections.deque[float] = collections.deque(maxlen=_RECENT)
        self._faulty_ms = 0
        """When the last recovery ended."""
        self._committed_s = 0.0
        self._uploading: int | None = None
        self._hopeless = False
        self._ended: collections.deque[Checkpoint | FailedCheckpoint] = collections.deque()
        self._readings: collections.deque[Reading] = collections.deque()
        self._episode = fallen(environment.get(FELL, ""))
        self._restarts = restarts(environment.get(RESTARTS, ""), notice.restart_s)
        self._well_since_s: float | None = None
        self._first_epoch: int | None = None
        self._catching: Outcome | None = None
        """A recovery after which more waits than before."""
        self._backlog = self._known.backlog
        """How much waited when all was well."""
        self._paused_s = 0.0
        self._kept_s = self._looked_s = 0.0
        self._unkept = False
        """Whether a backup has ended that what is kept says nothing of."""
        self.retry_s = FIRST_RETRY_S
        self.backup_s = (1.0, 1.0)
        """How long a backup takes as it stands, usually and at the most."""
        self.decision = Decision()
        self.estimates: list[Estimate] = []
        self._forecast_for = Situation()
        self._bounded: tuple[list[Estimate], list[float]] = (self.estimates, [])
        """Estimates, and the bound of each."""
        self._beyond: list[str] = []
        """Why the deadline is not held: the faults for which it can't be, or that backups fail."""
        self._teller = Teller(settings.deadline_s, settings.on_infeasible)
        self._newest = read_newest(directory)
        """The last recovery, of this life or an earlier one."""
        self.cost_s = 0.0
        """What estimating and deciding have cost so far."""
        self.counting = False

    # What the driver tells

    def start(self, last: Commit | None, since: Iterable[Commit], newest: Checkpoint | None) -> None:
        """Stand where the log stands: the commits since the newest checkpoint are what a replay would run."""
        self._standing.begin(since, newest)
        if last is not None:
            self._standing.stand(last)
        self._forecast_for = self._standing.situation  # what is learned below is kept at once
        self._see(self._standing.records)
        self._look_at_drill(force=True)
        if self._notice.worker_s is None:
            self._teller.say(UNSEEN_WORKER)
        if self._episode is not None:
            self._episode.estimates = self._all_estimates()
        self.forecast()

    def started(self, seconds: float, executors_s: float | None = None) -> None:
        """A start took so long from its first step: a new driver would take that after a fault, and its imports.

        `executors_s`: how long executors took to be there, where that was seen.
        """
        if self._episode is None:
            self.learned.started(seconds + _IMPORTS_S)
        if executors_s is not None:
            self.learned.executors_started(executors_s)

    def rebuilt(self, since: Iterable[Commit], newest: Checkpoint | None) -> None:
        """Shards were rebuilt: it may have been found that the newest checkpoint can't be used."""
        self._take_in_backups()
        if (0 if newest is None else newest.epoch) != self._standing.backed_epoch:
            self._standing.begin(since, newest)

    @_counted
    def epoch_done(
        self,
        commit: Commit,
        took_s: float,
        *,
        clean: bool,
        reloads: int,
        took: Took,
        run_s: float,
        idle_s: float = 0.0,
        backlog: int = 0,
        busy_s: float = 0.0,
    ) -> Decision:
        """Learn from an epoch, and decide. `busy_s`: how long its tasks computed, the slowest of each stage."""
        now_s = self._clock_s()
        if clean:
            self.learned.computed(busy_s, commit.records_in)
            self.learned.job_records = self._fitting(MAX_RECORDS)
        if (
            clean and commit.records_in > 0 and self._first_epoch is not None
        ):  # the first one waits for workers
            self.learned.ran(commit.records_in, took_s)
        self._learn_recovery(took)
        if self._first_epoch is None:
            self._first_epoch, self._well_since_s = commit.epoch, now_s
        elif self._episode is None:
            self._episode = self._repaired(commit, now_s - took_s, reloads)
        if self._episode is not None:
            self._recovered(commit, now_s, took, run_s, idle_s)
        elif self._committed_s:
            self._gaps.append(max(0.0, now_s - self._committed_s - self._paused_s))
        self._catch_up(commit.epoch, now_s, backlog)
        self._committed_s = now_s
        self._standing.committed(commit)
        self._see([commit.records_in])
        if abs(now_s - self._looked_s) >= _LOOK_EVERY_S:
            self._looked_s = now_s
            self._look_at_drill()
        self.decide()
        self._write(commit, now_s, took_s)
        return self.decision

    def _repaired(self, commit: Commit, began_s: float, reloads: int) -> Episode | None:
        """The fault that Spark has repaired within an epoch's job, so that only where its shards ran tells of it; None: there was none."""
        if self._standing.moved(commit):
            return Episode(Fault.EXECUTOR_KILL, began_s, self._all_estimates(), within=True)
        if reloads and began_s - self._committed_s < _SPARK_ENDS_IDLE_S:
            return Episode(Fault.WORKER_KILL, began_s, self._all_estimates(), within=True)
        return None

    def fault(self, fault: Fault, began_s: float) -> bool:
        """Something was noticed: the epoch under way is lost, or shards are. True if it was not known before."""
        if self._episode is not None:
            return False
        self._episode = Episode(fault, began_s, self._all_estimates())
        return True

    def planned(self, records: int) -> None:
        """An epoch of so many records begins. If it is larger than those before it, recovery would take longer than was told."""
        if self._standing.plan(records):
            self.forecast()
            self._tell_over()

    def backing_up(self, epoch: int | None, *, hopeless: bool = False) -> None:
        """Which version is being uploaded now; None: none is. Hopeless: so many have failed that nobody waits for one."""
        self._uploading, self._hopeless = epoch, hopeless

    def backup_ended(self, outcome: Checkpoint | FailedCheckpoint) -> None:
        """From any thread: how a backup ended. Taken in by the next decision."""
        self._ended.append(outcome)

    def refresh(self) -> None:
        """While no epoch passes: decide anew if a backup has ended meanwhile."""
        if self._ended or self._readings:
            self.decide()
            self._unkept = True
        if self._unkept and self._may_keep(self._clock_s()):
            self._keep()  # or nobody would hear of a backup until the next epoch

    def store_read(self, reading: Reading) -> None:
        """From any thread: how fast the store was when it was tried."""
        self._readings.append(reading)

    def paused(self, seconds: float) -> None:
        """Intake was paused for so long."""
        self._paused_s += seconds

    @property
    def deadline_s(self) -> float:
        return self._settings.deadline_s

    @property
    def most_records(self) -> int:
        """The most records of an epoch of which anything is known: not many times as many as there ever were in one."""
        return min(self._settings.max_records, max(FIRST_RECORDS, GROWTH * self.learned.largest))

    @property
    def recovering(self) -> bool:
        """Whether a fault is known whose recovery is not over."""
        return self._episode is not None

    @property
    def limit(self) -> int:
        """The most records the next epoch may have for the deadline's sake."""
        if self.recovering and self.decision.pause:
            return 1  # it ends the recovery, and adds next to nothing to a history that is long enough
        most = self.most_records
        if self.recovering and self._standing.situation.usual:
            most = min(most, self._standing.situation.usual)  # what has built up is taken in when it is over
        return most if self.decision.limit is None else min(most, max(1, self.decision.limit))

    @property
    def busy_limit(self) -> int:
        """The most records that an epoch may have so that no task is silent long enough to be taken for frozen.

        What a record costs is not known at first, so the first epochs are small.
        """
        if self._notice.worker_s is None:
            return self._settings.max_records
        if not self.learned.epoch.seen.count:
            return min(self._settings.max_records, FIRST_RECORDS)
        return self._fitting(self.most_records)

    @property
    def job_records(self) -> int:
        """The most records a job of a replay may read, so that none of its tasks is taken for frozen."""
        return self.learned.job_records

    def _fitting(self, most: int) -> int:
        """So many records are computed in a part of the time after which a silent worker is taken for frozen."""
        each = self.learned.computing_s or self.learned.epoch.weights[1]
        may_s = (self._notice.worker_s or 600.0) / 3
        return most if each <= 0 else int(min(most, max(100.0, may_s / each)))

    # Deciding

    @_counted
    def decide(self) -> Decision:
        """What to do now, from all that is known."""
        self._take_in_backups()
        self._count_restart()
        # A backup made now would have to be loaded as large as the state is now.
        bound = Bounds(
            self._standing.backed(), self.learned, self._notice, self.faults, self._settings.confidence
        )
        within, beyond = bound.parted(self._settings.deadline_s, self._least_epoch())
        uploading = None
        if self._uploading is not None:
            uploading = self._standing.since(self._uploading)
        backup = self.learned.upload.predict([1.0, float(self._standing.new_bytes)])
        self.backup_s = backup.mean, backup.bound(self._settings.confidence)
        outlook = Outlook(
            deadline_s=self._settings.deadline_s,
            history=self._standing.history,
            epoch_s=self._pace_s(),
            epoch_records=self._standing.situation.planned,
            max_records=self.most_records,
            backup_s=self.backup_s[1],
            failed_s=self.backup_s[0],
            retry_s=self.retry_s,
            uploading=uploading,
            mean_records=self._standing.mean_records,
            usual_records=self._standing.situation.usual,
        )
        self.decision = decide(outlook, within or bound, None if within is None else beyond)
        self._beyond = [] if beyond is None else [fault.label for fault in beyond.faults]
        if self._hopeless and (self.decision.back_up or self.decision.pause):
            self.decision = msgspec.structs.replace(self.decision, pause=False, feasible=False)
            self._beyond = [FAILING]
        self.forecast()
        over = [] if self._holds else self._over()
        if over:
            # Nobody backs up for the deadline's sake here: that it would be missed now is said all the same.
            self._beyond = list(dict.fromkeys([*self._beyond, *over]))
            self.decision = msgspec.structs.replace(self.decision, feasible=False)
        self._tell_feasible()
        self._tell_over()
        return self.decision

    def _over(self) -> list[str]:
        """The faults whose bound is past the deadline now."""
        deadline_s = self._settings.deadline_s
        return [e.fault.label for e, s in zip(self.estimates, self._bounds(), strict=True) if s > deadline_s]

    @property
    def pauses(self) -> bool:
        """Whether intake waits for a backup; who does not back up for the deadline's sake does not pause for it either."""
        return self._holds and self.decision.pause

    @property
    def cut(self) -> int | None:
        """The most records the deadline lets an epoch have; None: as many as the settings do."""
        return self.decision.limit if self._holds else None

    def _count_restart(self) -> None:
        """A supervisor waits the longer before the next start the more often the driver fell, until it was well for a while."""
        if self._supervised_s is None:
            return
        well_s = None if self._well_since_s is None else self._clock_s() - self._well_since_s
        restart_s = self._restarts.next_s(well_s)
        never = math.isinf(restart_s)
        driver_s, restart_s = (None, 0.0) if never else (self._supervised_s, restart_s)
        if (driver_s, restart_s) == (self._notice.driver_s, self._notice.restart_s):
            return
        ended = never and self._notice.driver_s is not None
        self._notice = msgspec.structs.replace(self._notice, driver_s=driver_s, restart_s=restart_s)
        self.faults = covered(self._notice)
        if ended:
            self._teller.say(
                f"If the driver dies now it is not started again (restart = {self._settings.restart!r}): "
                "no deadline is held for its faults."
            )

    @property
    def _supervised(self) -> Notice:
        """Who notices what, a driver's fall included, also where the next one would be the last: the last one was noticed."""
        return msgspec.structs.replace(self._notice, driver_s=self._supervised_s)

    def _least_epoch(self) -> int:
        fixed_s, each_s = self.learned.epoch.weights
        return least_epoch(fixed_s, each_s, self._standing.mean_records or 0.0, self._pace_s())

    def _pace_s(self) -> float:
        if not self._gaps:
            return max(self._settings.interval_s, self.learned.epoch.predict([1.0, 1.0]).mean)
        return max(0.01, statistics.median(self._gaps))

    def _all_estimates(self) -> dict[Fault, Estimate]:
        every = list(Fault)
        of = estimates(self._standing.situation, self.learned, self._notice, every)
        return dict(zip(every, of, strict=True))

    def forecast(self) -> list[Estimate]:
        """What recovery would take now, for every fault that is covered; while intake pauses, nothing is planned."""
        there = self._standing.situation
        if self._holds and self.decision.pause:
            there = msgspec.structs.replace(there, planned=0)
        elif self._holds and self.decision.limit is not None:
            there = msgspec.structs.replace(there, planned=min(there.planned, self.limit))
        self._forecast_for = there
        self.estimates = estimates(there, self.learned, self._notice, self.faults)
        return self.estimates

    def worst(self) -> tuple[Estimate, float]:
        """The fault whose bound is the largest, and that bound."""
        bounds = self._bounds()
        bound_s = max(bounds)
        return self.estimates[bounds.index(bound_s)], bound_s

    def _bounds(self) -> list[float]:
        """Of every estimate; they are asked for more often than those change."""
        if self._bounded[0] is not self.estimates:
            self._bounded = self.estimates, [e.bound(self._settings.confidence) for e in self.estimates]
        return self._bounded[1]

    def forecasts(self) -> dict[str, Forecast]:
        """As the status has it."""
        return {
            e.fault.label: Forecast(
                e.detection.mean,
                e.environment.mean,
                e.loading.mean,
                e.recomputing.mean,
                bound_s,
                e.bound(0.99),
                self.learned.times_seen(e.fault),
            )
            for e, bound_s in zip(self.estimates, self._bounds(), strict=True)
        }

    def recovered(self) -> Recovered | None:
        """The last recovery as the status has it."""
        last = self._newest
        if last is None:
            return None
        bound_s = last.bounds.get(f"{self._settings.confidence:g}", max(last.bounds.values(), default=0.0))
        return Recovered(
            last.fault,
            last.at_ms,
            last.took_s,
            last.estimated.total,
            bound_s,
            last.deadline_s,
            last.caught_up_s,
        )

    def _floor(self) -> Situation:
        """Where it would stand with everything backed up, and the smallest epoch that is of use since then and planned."""
        least = self._least_epoch()
        return msgspec.structs.replace(
            self._standing.backed(), history=History(1, least), planned=least, usual=None
        )

    def _explained(self, there: Situation, faults: Sequence[Fault]) -> Explanation | None:
        return explain(there, self.learned, self._notice, self._settings.confidence, faults=faults)

    def _tell_feasible(self) -> None:
        """Say it when it becomes so for one fault more."""

        def told() -> Explanation | None:
            passed = FAILING in self._beyond or (not self._holds and bool(self._over()))
            return self._explained(self._forecast_for if passed else self._floor(), self.faults)

        # What runs, or comes back, is not ended for it.
        may_refuse = self._first_epoch is None and self._episode is None
        try:
            self._teller.beyond(self._beyond, self._clock_s(), told, may_refuse=may_refuse)
        except InfeasibleError:
            self._keep()  # so that `holdfast explain` can say why
            raise

    def _tell_over(self) -> None:
        """Say it when the bound is past the deadline for a fault for which a backup would bring it back.

        Whoever decides in time never gets there. But a run may begin with a long history, a checkpoint may turn out
        damaged, a source may have a range that can't be cut, and what is learned may make a history longer that is there.
        """
        if not self._holds or FAILING in self._beyond:
            return

        def told(labels: Sequence[str]) -> tuple[Explanation | None, Explanation | None]:
            faults = [fault for fault in self.faults if fault.label in labels]
            return self._explained(self._forecast_for, faults), self._explained(self._floor(), faults)

        every = self._over()
        over = [label for label in every if label not in self._beyond]
        if over or not every:  # one that can't be held any more is not held again
            self._teller.over(over, self._clock_s(), told)

    # Backups

    def _see(self, records: Iterable[int]) -> None:
        """There were epochs with so many records."""
        self.learned.largest = max(self.learned.largest, *records, 0)

    def _take_in_backups(self) -> None:
        while self._readings:
            read = self._readings.popleft()
            self.learned.store_read(read.bytes, read.files, read.seconds)
        while self._ended:
            outcome = self._ended.popleft()
            self._uploading = None
            if isinstance(outcome, Checkpoint):
                self._backed_up(outcome)
            else:
                self._trace.add(
                    BackupLine(
                        outcome.epoch,
                        outcome.started_ms,
                        (outcome.failed_ms - outcome.started_ms) / 1e3,
                        failed=outcome.reason.name,
                        trigger=outcome.trigger.name,
                    )
                )

    def _backed_up(self, made: Checkpoint) -> None:
        took_s = (made.completed_ms - made.started_ms) / 1e3
        uploaded = self._standing.backed_up(made)
        if (
            self._faulty_ms < made.started_ms and self._episode is None
        ):  # one that a fault held up is not usual
            self.learned.upload.learn([1.0, float(uploaded)], took_s)
        self._trace.add(
            BackupLine(
                made.epoch, made.started_ms, took_s, made.new_bytes, made.size_bytes, trigger=made.trigger
            )
        )

    # Learning from recoveries

    def _learn_recovery(self, took: Took) -> None:
        """Loads and replays teach whatever the fault was."""
        if took.replayed_epochs:
            history = History(took.replayed_epochs, took.replayed_records)
            self.learned.replay.learn(self.learned.replay_features(history, took.share), took.replayed_s)
        if took.fetched_bytes:
            features = [1.0, float(took.fetched_bytes), float(took.fetched_files)]
            self.learned.fetch.learn(features, took.fetched_s)

    def _recovered(self, commit: Commit, now_s: float, took: Took, run_s: float, idle_s: float) -> None:
        episode, self._episode = self._episode, None
        assert episode is not None
        self._faulty_ms = int(now_s * 1000)
        took_s, known = episode.took_s(now_s, idle_s), episode.estimates or self._all_estimates()
        fault = which(
            episode.fault,
            took_s,
            known,
            self._notice,
            self.faults,
            rebuilt=bool(took.rebuilt),
            told=self._drilled,
        )
        before = known[fault]
        loading_s = took.checked_s + took.fetched_s
        if not loading_s:  # inside a job that Spark repaired by itself
            loading_s = before.loading.mean
        # A job that Spark repaired by itself has the whole outage in it: no more than usual is computing.
        usual = self.learned.epoch.predict([1.0, float(commit.records_in)]).mean
        recomputing_s = took.replayed_s + min(run_s, usual)
        measured = attribute(took_s, fault, self._supervised, loading_s, recomputing_s)
        outcome = Outcome(
            fault=fault.label,
            epoch=commit.epoch,
            at_ms=int(episode.began_s * 1000),
            took_s=took_s,
            measured=measured,
            estimated=before.parts,
            bounds={
                "0.99": before.bound(0.99),
                f"{self._settings.confidence:g}": before.bound(self._settings.confidence),
            },
            deadline_s=self._settings.deadline_s,
        )
        write_outcome(self._directory, outcome)
        self._catching = self._newest = outcome
        if not self._drilled:
            self._learn_outcome(outcome)

    def _catch_up(self, epoch: int, now_s: float, backlog: int) -> None:
        """After a recovery: once no more waits than before the fault, note how long that took from the fault on.

        What waits is known from an epoch's plan, and the one that ended the recovery was planned long ago.
        """
        if self._catching is None:
            self._backlog = backlog
        elif epoch > self._catching.epoch and backlog <= self._backlog:
            caught_up_s = max(self._catching.took_s, now_s - self._catching.at_ms / 1000)
            self._newest = msgspec.structs.replace(self._catching, caught_up_s=caught_up_s)
            write_outcome(self._directory, self._newest)
            self._catching = None

    def _learn_outcome(self, outcome: Outcome) -> None:
        fault = Fault.named(outcome.fault)
        key = f"{outcome.epoch:08d}"
        if fault is None or key in self.learned.outcomes:
            return
        if fault in OF_DRIVER and outcome.measured.loading:
            self.learned.reload.learn(
                [1.0, float(self._standing.situation.host_bytes)], outcome.measured.loading
            )
        waited_s = self._restarts.waited_s if fault in OF_DRIVER else 0.0
        self.learned.recovered(fault, outcome.measured.environment - waited_s)
        self.learned.outcomes.add(key)
        self._keep()

    def _look_at_drill(self, *, force: bool = False) -> None:
        """Learn from what a drill measured: it knows which fault it was, and when it came."""
        if not (self._drilled or force):
            return
        for told, fault, own in drilled(self._directory, self.learned.outcomes):
            loading_s = own.measured.loading if own is not None else told.estimated.loading
            recomputing_s = own.measured.recomputing if own is not None else told.estimated.recomputing
            measured = attribute(told.took_s, fault, self._supervised, loading_s, recomputing_s)
            self._learn_outcome(msgspec.structs.replace(told, measured=measured))

    # Keeping

    def _write(self, commit: Commit, now_s: float, took_s: float) -> None:
        worst, bound_s = self.worst()
        self._trace.add(
            EpochLine(
                commit.epoch,
                int(now_s * 1000),
                commit.records_in,
                round(took_s, 4),
                self._standing.state_bytes,
                self._standing.situation.host_bytes,
                self._standing.situation.shard_bytes,
                self._standing.last_new_bytes,
                round(worst.sum.mean, 3),
                round(bound_s, 3),
                worst.fault.label,
                worst.parts.rounded,
                round(self._paused_s, 3),
            )
        )
        self._paused_s = 0.0
        if self._may_keep(now_s):
            self._keep()

    def _may_keep(self, now_s: float) -> bool:
        """Whether it is long enough ago; a clock that was set back must not make that for ever."""
        return abs(now_s - self._kept_s) > _KEEP_EVERY_S

    def _keep(self) -> None:
        self._kept_s, self._unkept = self._clock_s(), False
        memory = msgspec.structs.replace(
            self.learned.memory(),
            notice=self._notice,
            situation=self._forecast_for,
            floor=self._floor(),
            deadline_s=self._settings.deadline_s,
            confidence=self._settings.confidence,
            backlog=self._backlog,
        )
        write_memory(self._directory, memory)

    def stop(self) -> None:
        """Keep what was learned."""
        self._take_in_backups()
        self._keep()
