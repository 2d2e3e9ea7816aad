"""The epoch loop: plan, run, commit, publish; one life of a driver.

start      publish what was decided · bring back shards that lost their version · stand at the last commit
each epoch 1 plan     ask the sources, fix ranges and clock: the plan record
           2 run      one Spark job; again where schemas had to be settled or shards rebuilt
           3 commit   the commit record is the decision
           4 publish  sinks show what was decided
           5 decide   how long would recovery take now? is a backup due, or a pause?
           6 back up  a checkpoint is begun if one is due, and goes on beside the next epochs
stop       between epochs, never inside one
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from holdfast.checkpoint.coordinator import Coordinator
from holdfast.config import Settings
from holdfast.engine.calls import method_error
from holdfast.engine.cut import Wait, when_to_cut
from holdfast.engine.epoch import (
    Again,
    Done,
    Failed,
    Lacking,
    Mixed,
    Skipped,
    assign,
    computed_s,
    decide,
    judge,
    lost_again,
    stamps,
    taken_over,
    texts,
    torn_again,
    what_tore,
)
from holdfast.engine.program import Header, Program, Report, declared_schemas
from holdfast.engine.publishing import publish
from holdfast.engine.shown import ShownTime
from holdfast.engine.timing import (
    PlannedTime,
    counted,
    has_risen,
    is_due,
    must_wait,
    offered,
    plan_time,
    taken_up,
)
from holdfast.engine.upkeep import Upkeep
from holdfast.errors import EngineError, HoldfastError, JobLostError
from holdfast.faults.kinds import Fault
from holdfast.faults.points import reach
from holdfast.io.base import Limit, Offer, Source
from holdfast.log.journal import Journal
from holdfast.log.records import Commit, Plan
from holdfast.metrics import EpochFacts, Watermark
from holdfast.plan import graph as g
from holdfast.plan.times import assigners
from holdfast.recovery.guard import Guard
from holdfast.recovery.recover import Recovery

_log = logging.getLogger("holdfast.driver")

_RUNS_TO_SETTLE = 4
_LOST_JOBS = 6
"""So often a job of one epoch may be lost before the driver gives up."""
_REBUILT = 20
"""So often shards may be rebuilt for one epoch: enough to find that all kept checkpoints are damaged."""


class Unwanted(HoldfastError):
    """It was asked to stop, and what it waits for may never come."""


class Runner(Protocol):
    """What runs an epoch's tasks: Spark, or this process."""

    def run(self, plan: Plan, header: Header) -> list[Report]: ...

    def remember(self, commit: Commit | None) -> None: ...

    def unsettled(self) -> bool: ...


class Driver:
    """Runs a program's epochs until told to stop, drained or done."""

    def __init__(
        self,
        program: Program,
        runner: Runner,
        journal: Journal,
        settings: Settings,
        coordinator: Coordinator,
        recovery: Recovery,
        *,
        tasks: int,
        guard: Guard | None = None,
        on_epoch: Callable[[EpochFacts], None] = lambda facts: None,
        on_quiet: Callable[[dict[str, Watermark]], None] = lambda watermarks: None,
        say: Callable[[str], None] = lambda message: None,
        clock_ms: Callable[[], int] = lambda: int(time.time() * 1000),
    ) -> None:
        self._program, self._runner, self._journal, self._settings = program, runner, journal, settings
        self._coordinator, self._recovery, self._guard, self._say = coordinator, recovery, guard, say
        self._tasks, self._on_epoch, self._on_quiet, self._clock_ms = tasks, on_epoch, on_quiet, clock_ms
        graph = program.stages.graph
        self._sources: dict[str, Source] = {n.uid: n.body for n in graph.of_kind(g.SOURCE)}
        self._sinks: dict[str, g.Node] = {n.uid: n for n in graph.of_kind(g.SINK)}
        self._assigners = assigners(program.stages)
        self._shown = ShownTime(
            self._assigners, int(1000 * settings.interval_s) if settings.cut == "interval" else 0
        )
        self._stop = threading.Event()
        self._unwanted = False
        """Asked to stop before it stood."""
        self._upkeep = Upkeep([n.body for n in self._sinks.values()], Path(program.staging))
        self._last: Commit | None = None
        self._last_plan: Plan | None = None
        self._published = 0
        self._positions: dict[str, Any] = {}
        self._pinned = texts(declared_schemas(program.stages))
        self._now_ms = 0
        self._backlog = 0
        self._run_s = self._idle_s = 0.0
        self.restoring_s = 0.0
        """What a start spent on bringing state back, and on a backup because the code has changed."""
        self._polled_ms = 0
        self._first_polled_ms: int | None = None
        self._cut_at = self._asked_at = self._planning_at = self._looked_at = 0.0

    @property
    def last_epoch(self) -> int:
        """The newest decided epoch."""
        return 0 if self._last is None else self._last.epoch

    def stop(self) -> None:
        """Ask to stop after the epoch under way."""
        self._stop.set()

    def check_wanted(self) -> None:
        """Raise if nobody wants this run to go on: it was asked to stop, or another has taken the pipeline over."""
        if self._stop.is_set() or self._journal_says_stop():
            raise Unwanted(
                "The run was asked to stop while there was no executor.",
                remedy="Start again once the cluster has some: the epoch under way runs then, as it was planned.",
            )

    def start(self) -> None:
        """Stand at the last commit: publish what was decided, take over positions and schemas, bring back state."""
        try:
            self._start()
        except Unwanted as told:
            _log.warning("%s", told.message)
            self._unwanted = True

    def _start(self) -> None:
        reach("start.taken")
        last = self._journal.last_epoch()
        self._last = self._journal.commit(last) if last else None
        self._coordinator.start(last)
        self._journal.check_fence()
        if self._last is not None:
            for epoch in range(self._last.published + 1, last):
                earlier = self._journal.commit(epoch)
                if earlier is not None:
                    self._publish(earlier)
            self._publish(self._last)
            self._last_plan = self._journal.plan(last)
            assert self._last_plan is not None
            self._positions, self._now_ms = dict(self._last_plan.positions), self._last_plan.now_ms
            self._pinned = taken_over(self._pinned, self._last.schemas)
        for node in self._sinks.values():
            node.body.discard(f"{self._journal.generation}")
        reach("start.published")
        self._published = last
        self._runner.remember(self._last)
        started = time.monotonic()
        if self._guard is not None:
            self._recovery.job_records = self._guard.job_records
        try:
            self._recover()
            self._note_expiries()
            self._start_guard()
            if self._coordinator.code_changed:
                self._back_up()
                self._coordinator.wait(self._settings.checkpoint_timeout_s)
        finally:
            self.restoring_s = time.monotonic() - started
        self._upkeep.start()

    def _start_guard(self) -> None:
        """Know what a replay would run, and refuse a deadline that can't be held, if that is wanted."""
        if self._guard is None:
            return
        self._guard.start(self._last, self._since_backup(), self._coordinator.newest(self.last_epoch))
        self._guard.decide()

    def _since_backup(self) -> Iterator[Commit]:
        """What a replay would run."""
        return (c for c in map(self._journal.commit, self._epochs_since()) if c is not None)

    def _epochs_since(self) -> list[int]:
        """The epochs since the newest checkpoint, as far as the log reaches back."""
        return [e for e in self._journal.epochs() if self._coordinator.newest_epoch < e <= self.last_epoch]

    def _recover(self, damaged: Mapping[tuple[str, int], str] | None = None) -> None:
        """Have every shard stand where the last commit says. What was rebuilt may have shown that a checkpoint is damaged."""
        if not self._recovery.recover(self._last, damaged):
            return
        if self._coordinator.look_again(self.last_epoch):
            self._coordinator.found_damage()  # it is told below
            self._note_expiries()
        self._tell_what_is_replayed()

    def _tell_what_is_replayed(self) -> None:
        if self._guard is not None and self._guard.estimates:
            newest = self._coordinator.newest(self.last_epoch)
            self._guard.rebuilt(self._since_backup(), newest)
            self._guard.decide()

    def _note_expiries(self) -> None:
        """Know when what a replay would read expires, for the epochs of earlier lives too."""
        if not any(_may_expire(s) for s in self._sources.values()):
            return
        for epoch in self._epochs_since():
            plan = self._journal.plan(epoch)
            if plan is not None:
                self._coordinator.expires(epoch, self._expiry(plan))

    def _expiry(self, plan: Plan) -> int | None:
        found = [
            self._sources[r.source].expires_ms(r.piece) for r in plan.ranges if r.source in self._sources
        ]
        return min((at for at in found if at is not None), default=None)

    def run(self) -> None:
        """Epochs until it is time to stop."""
        done = 0
        limit = self._settings.epochs
        try:
            if self._unwanted:
                return
            while not self._stop.is_set() and (limit is None or done < limit):
                self._planning_at = time.perf_counter()
                plan = self._journal.plan(self.last_epoch + 1) or self._new_plan()
                if plan is None:
                    break
                self._run_epoch(plan)
                done += 1
            self._finish()
        except Unwanted as told:
            _log.warning("%s", told.message)
        finally:
            self._coordinator.stop()
            self._upkeep.stop()
            if self._guard is not None:
                self._guard.stop()

    def _finish(self) -> None:
        """A clean stop: let the checkpoint under way end, and leave one of the last version."""
        self._journal.check_fence()
        if not self._coordinator.wait(self._settings.checkpoint_timeout_s):
            return
        self._back_up(stopping=True)
        self._coordinator.wait(self._settings.checkpoint_timeout_s)

    # 1 Plan

    def _new_plan(self) -> Plan | None:
        """Wait until an epoch is due, and fix it. None: it is time to stop."""
        while True:
            if not self._await_backup():
                return None
            self._planning_at = time.perf_counter()  # waiting for data is no part of an epoch
            asked, held = self._offers()
            away_ms = self._away_ms()
            timing = plan_time(
                self._assigners, self._sources, asked, self._before, self._polled_ms, held, away_ms
            )
            offers = taken_up(asked, held, self._positions)
            wait = when_to_cut(
                self._settings.cut,
                self._settings.interval_s,
                waited_s=time.monotonic() - self._cut_at,
                records=counted(offers.values()),
                full=counted(offers.values()) > self._max_records - len(offers),  # shares are whole numbers
                backlog=sum(o.backlog for o in offers.values()),
                exhausted=all(o.exhausted for o in offers.values()),
                drain=self._settings.drain,
                empty=self._settings.empty_epochs,
                due=is_due(timing, self._before, self._polled_ms),
                risen=has_risen(timing, self._before),
                after_records=self._last_plan is not None and bool(self._last_plan.ranges),
            )
            if wait is Wait.CUT:
                break
            idle = time.monotonic()
            if (
                wait is Wait.END
                or self._stop.wait(min(0.02, self._settings.interval_s))
                or self._journal_says_stop()
            ):
                return None
            self._idle_s += time.monotonic() - idle
            self._look_around()
        self._backlog = sum(o.backlog for o in asked.values()) + counted(asked[uid] for uid in held)
        if self._guard is not None:
            self._guard.planned(counted(offers.values()))
        return self._fix(offers, timing)

    def _await_backup(self) -> bool:
        """Take nothing in while one more epoch would endanger the deadline; False: it is time to stop."""
        guard = self._guard
        if guard is None or not guard.decision.pause or not self._coordinator.follows_deadline:
            return True
        if self._coordinator.hopeless or guard.recovering:
            return True
        started = until = time.monotonic()
        self._say("intake is paused until the backup is through: one more epoch would endanger the deadline")
        try:
            # Who recovers is not kept waiting: the recovery ends with the next commit, so a small epoch is let through.
            while guard.decision.pause and not self._coordinator.hopeless and not guard.recovering:
                if self._stop.wait(0.02) or self._journal_says_stop():
                    return False
                until = time.monotonic()
                self._look_around()
                self._back_up()
                guard.decide()
        finally:
            guard.paused(until - started)
            self._say("")
        return True

    @property
    def _max_records(self) -> int:
        """The most records the next epoch takes: fewer than the settings allow where the deadline asks for it."""
        guard = self._guard
        if guard is None:
            return self._settings.max_records
        return min(guard.busy_limit, guard.limit) if self._coordinator.follows_deadline else guard.busy_limit

    def _away_ms(self) -> int:
        """How long nobody asked the sources, from the last plan of an earlier driver to when this one did first."""
        plan = self._last_plan
        if plan is None or plan.generation == self._journal.generation:
            return 0
        if self._first_polled_ms is None:
            self._first_polled_ms = self._polled_ms
        return max(0, self._first_polled_ms - plan.now_ms)

    def _offers(self) -> tuple[dict[str, Offer], set[str]]:
        """What the sources have, together no more than an epoch takes; and those of which nothing is read now."""
        self._polled_ms = max(self._clock_ms(), self._now_ms + 1)
        waiting = must_wait(self._assigners, self._before)
        return offered(self._ask, self._sources, self._max_records, waiting, drain=self._settings.drain)

    def _ask(self, uid: str, records: int) -> Offer:
        limit = Limit(records, self._tasks, self._polled_ms)
        try:
            return self._sources[uid].plan(self._positions.get(uid), limit)
        except Exception as error:
            node = self._program.stages.graph.by_uid(uid)
            if isinstance(error, HoldfastError):
                raise error.at(uid, node.where) from None
            raise method_error(error, node, "The source can't say what there is") from error

    @property
    def _before(self) -> tuple[Plan, Commit] | None:
        return None if self._last is None or self._last_plan is None else (self._last_plan, self._last)

    def _journal_says_stop(self) -> bool:
        now = time.monotonic()
        if now - self._asked_at < 0.5:
            return False
        self._asked_at = now
        if self._journal.asked_to_stop():
            self._stop.set()
            return True
        self._journal.check_fence()
        return False

    def _fix(self, offers: dict[str, Offer], timing: PlannedTime) -> Plan:
        plan = Plan(
            epoch=self.last_epoch + 1,
            generation=self._journal.generation,
            now_ms=self._polled_ms,
            tasks=assign(offers, self._tasks),
            positions={uid: o.position for uid, o in offers.items()},
            schemas=self._pinned,
            exhausted=[uid for uid, o in offers.items() if o.exhausted],
            **timing.fields(),
        )
        self._cut_at = time.monotonic()
        reach("plan.before_record")
        plan = self._journal.put_plan(plan)
        reach("plan.after_record")
        return plan

    def _look_around(self) -> None:
        """While waiting for data: shards whose executor has gone are looked after, and checkpoints that are due."""
        now = time.monotonic()
        if now - self._looked_at < 0.5:
            return
        self._looked_at = now
        if self._last is not None and self._runner.unsettled():
            self._noticed(Fault.EXECUTOR_KILL, time.time())
            self._recover()
        if self._guard is not None:
            self._guard.refresh()
        if quiet := self._shown.quiet(self._polled_ms):
            self._on_quiet(quiet)
        self._back_up()

    # 2 Run

    def _run_epoch(self, plan: Plan) -> None:
        planned = time.perf_counter()
        done, runs, reports = self._run(plan)
        ran = time.perf_counter()
        commit = decide(plan, done, self._journal.generation, self._published, (ran - planned) * 1e3)
        if self._settings.guarantee == "at_least_once":
            self._journal.check_fence()  # who was replaced may have other output than what was decided on
            self._publish(commit)
        reach("commit.before_record")
        commit = self._journal.put_commit(commit)
        reach("commit.after_record")
        decided = time.perf_counter()
        self._stand_at(plan, commit)
        if self._settings.guarantee == "exactly_once":
            self._publish(commit)
        reach("publish.after")
        self._published = commit.epoch
        self._upkeep.decided(commit.epoch)
        self._coordinator.expires(commit.epoch, self._expiry(plan))
        shown = time.perf_counter()
        reloads = sum(r.reloads for r in reports)
        clean = runs == 1 and not reloads
        self._learn(commit, decided - planned, clean=clean, reloads=reloads, busy_s=computed_s(reports))
        sealed = [s.sealed for shards in commit.shards.values() for s in shards]
        self._on_epoch(
            EpochFacts(
                epoch=plan.epoch,
                now_ms=plan.now_ms,
                records_in=commit.records_in,
                records_out=commit.records_out,
                bad_records=commit.bad_records,
                backlog=self._backlog,
                plan_ms=(planned - self._planning_at) * 1e3,
                run_ms=(ran - planned) * 1e3,
                commit_ms=(decided - ran) * 1e3,
                publish_ms=(shown - decided) * 1e3,
                state_keys=sum(max(s.live.values(), default=0) for s in sealed),
                state_bytes=sum(s.size_bytes for s in sealed),
                runs=runs,
                reloads=reloads,
                worker_rss_bytes=max((r.rss_bytes for r in reports), default=0),
                late_records=commit.late,
                untimed_records=commit.untimed,
                unseen_records=commit.unseen,
                watermarks=self._shown.after(plan, commit),
            )
        )
        self._journal_says_stop()
        if not self._stop.is_set():
            self._back_up()

    # 5 Decide

    def _learn(self, commit: Commit, took_s: float, *, clean: bool, reloads: int, busy_s: float) -> None:
        if self._guard is None:
            return
        took = self._recovery.taken()
        self._guard.epoch_done(
            commit,
            took_s,
            clean=clean,
            reloads=reloads,
            took=took,
            run_s=self._run_s,
            idle_s=self._idle_s,
            backlog=self._backlog,
            busy_s=busy_s,
        )
        self._idle_s = 0.0
        self._recovery.job_records = self._guard.job_records

    def _noticed(self, fault: Fault, at_s: float) -> None:
        if self._guard is not None and self._guard.fault(fault, at_s):
            self._idle_s = 0.0  # what was waited before the fault is no part of it

    # 6 Back up

    def _back_up(self, *, stopping: bool = False) -> None:
        if self._last is None or self._last_plan is None:
            return
        guard = self._guard
        if self._coordinator.found_damage():
            self._note_expiries()
            self._tell_what_is_replayed()
        if guard is None:
            self._coordinator.consider(self._last, self._last_plan, stopping=stopping)
            return
        self._coordinator.consider(
            self._last,
            self._last_plan,
            stopping=stopping,
            endangered=guard.decision.back_up,
            usual_s=guard.backup_s[0],
            at_most_s=guard.backup_s[1],
        )
        guard.backing_up(self._coordinator.pending_epoch, hopeless=self._coordinator.hopeless)

    def _run(self, plan: Plan) -> tuple[Done, int, list[Report]]:
        """Run a plan until its outcome stands.

        Schemas settle in two runs; more are a fault. Shards that lost their version are rebuilt, and the epoch is
        run again for all: the others still stand at the version before it.
        """
        pinned = self._pinned
        unsettled = lost = rebuilt = 0
        began_s = time.time()
        for run in range(1, 1000):
            if unsettled == _RUNS_TO_SETTLE:
                break
            started = time.perf_counter()
            try:
                reports = self._runner.run(plan, self._header(plan, pinned, run))
                self._run_s = time.perf_counter() - started
            except JobLostError:
                self._noticed(Fault.EXECUTOR_KILL, began_s)
                lost += 1
                if lost >= _LOST_JOBS:
                    raise
                _log.warning("epoch %d: the job was lost, it is run again", plan.epoch)
                self._recover()
                continue
            reach("epoch.after_run")
            outcome = judge(self._program, len(plan.tasks), pinned, reports)
            if isinstance(outcome, Done):
                return outcome, run, reports
            if isinstance(outcome, Failed):
                self._journal.check_fence()  # what is wrong may be that a successor has cleared away what was here
                raise self._located(outcome.error)
            if isinstance(outcome, Lacking):
                self._noticed(Fault.EXECUTOR_KILL, began_s)
                self._journal.check_fence()
                rebuilt += 1
                if rebuilt >= _REBUILT:
                    raise lost_again(plan.epoch, outcome, _REBUILT)
                self._recover(outcome.damaged)
            if isinstance(outcome, Again):
                pinned = outcome.schemas
                unsettled += 1
            if isinstance(outcome, Mixed | Skipped):
                lost += 1
                if lost >= _LOST_JOBS:
                    raise torn_again(plan.epoch, outcome, _LOST_JOBS)
                _log.warning("epoch %d: %s, it is run again", plan.epoch, what_tore(outcome))
            if isinstance(outcome, Skipped):
                self._noticed(Fault.EXECUTOR_KILL, began_s)
                self._recover()
        raise EngineError(
            f"The schemas of epoch {plan.epoch} don't settle.", remedy="Declare schema= on the operators."
        )

    def _header(self, plan: Plan, pinned: dict[str, str], run: int) -> Header:
        return Header(
            plan.epoch,
            self._journal.generation,
            plan.now_ms,
            len(plan.tasks),
            stamps(self._last),
            pinned,
            attempt=f"r{run}" if run > 1 else "",
            barrier=self._coordinator.barrier,
            keeping=self._coordinator.keeping,
            marks=plan.marks,
            idle=plan.idle,
            ended=plan.ended,
            given=plan.given,
            clocks=plan.clocks,
            greatest=plan.greatest,
        )

    def _located(self, error: HoldfastError) -> HoldfastError:
        """The error with the place where its operator was defined."""
        nodes = [n for n in self._program.stages.graph.nodes if n.uid == error.uid]
        return error.at(error.uid, nodes[0].where) if nodes else error

    # 3 Commit

    def _stand_at(self, plan: Plan, commit: Commit) -> None:
        self._last, self._last_plan = commit, plan
        self._positions, self._now_ms = dict(plan.positions), plan.now_ms
        self._pinned = commit.schemas
        self._runner.remember(commit)

    # 4 Publish

    def _publish(self, commit: Commit) -> None:
        publish(commit, self._sinks, self._journal, self._program.staging)


def _may_expire(source: Source) -> bool:
    return type(source).expires_ms is not Source.expires_ms
