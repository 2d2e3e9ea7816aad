"""Starting a pipeline: the session, the directory, the driver on a thread, and the handle that users hold."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.coordinator import Coordinator, Outcome
from holdfast.checkpoint.lifecycle import Reason
from holdfast.checkpoint.metadata import Checkpoint
from holdfast.checkpoint.policy import Trigger
from holdfast.config import Settings, resolve
from holdfast.engine import session as sessions
from holdfast.engine.build import (
    build_program,
    build_stages,
    check_identity,
    checkpoint_url,
    identity_of,
    impatient,
)
from holdfast.engine.doors import is_local, open_doors
from holdfast.engine.driver import Driver
from holdfast.engine.shipping import ship
from holdfast.engine.spark_runner import SparkRunner
from holdfast.errors import EngineError, HoldfastError
from holdfast.faults.points import check_asked
from holdfast.log.journal import Journal
from holdfast.log.tenancy import Tenancy
from holdfast.metrics import EpochFacts, Recent, Status, Watermark, write_status
from holdfast.plan import graph as g
from holdfast.plan.fingerprint import fingerprint
from holdfast.recovery.guard import Guard
from holdfast.recovery.recover import Recovery
from holdfast.recovery.replay import Progress, needs
from holdfast.supervise.heartbeat import SUPERVISED
from holdfast.supervise.strategies import delay_s, parse_restart

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from holdfast.engine.program import Program
    from holdfast.log.records import Identity
    from holdfast.pipeline import Pipeline
    from holdfast.plan.stages import Stages

_log = logging.getLogger("holdfast.run")

Listener = Callable[[Status, EpochFacts | None], None]
STATUS_EVERY_S = 0.2
STOPPING = "stopping after the epoch under way"
"""The message of a run that was asked to stop."""


class Handle:
    """A running pipeline.

    >>> handle = pipeline.start(interval="1s")  # doctest: +SKIP
    >>> handle.status().epoch, handle.last_epoch  # doctest: +SKIP
    >>> handle.stop()  # doctest: +SKIP
    """

    def __init__(
        self, pipeline: Pipeline, settings: Settings, spark: SparkSession | None, listener: Listener
    ) -> None:
        self._pipeline, self._settings, self._spark, self._listener = pipeline, settings, spark, listener
        self._context: SparkContext | None = None
        self._executors_started_s: float | None = None
        """Spark's, if it is ours."""
        self.directory = Path(settings.dir or f".holdfast/{pipeline.name}").absolute()
        self._status = Status(
            pipeline=pipeline.name,
            directory=str(self.directory),
            generation=0,
            pid=os.getpid(),
            host=socket.gethostname(),
            state="starting",
            started_ms=int(time.time() * 1000),
            policy=settings.checkpoint,
            deadline_s=settings.deadline_s,
        )
        self._tenancy = Tenancy(self.directory)
        self._recent = Recent()
        self._written = 0.0
        self._driver: Driver | None = None
        self.guard: Guard | None = None
        """What holds the run to its deadline, once it has started."""
        self._forecast_at = 0.0
        self._stopping = False
        self._error: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._live, name=f"holdfast-{pipeline.name}", daemon=True)

    # What users call

    def status(self) -> Status:
        """Where the run stands now."""
        return msgspec.structs.replace(self._status)

    @property
    def last_epoch(self) -> int:
        """The newest decided epoch."""
        return self._status.epoch

    @property
    def error(self) -> BaseException | None:
        """What ended the run, if something did."""
        return self._error

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the run has ended; True if it has. Raises what ended it."""
        self._thread.join(timeout)
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def stop(self, timeout: float | None = 60.0) -> None:
        """Finish the epoch under way, then end."""
        self.ask_to_stop()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        if self._error is not None:
            raise self._error

    def checkpoint(self) -> None:
        """Ask for a checkpoint of the newest version; does not wait. `status().checkpoint_epoch` tells of the last one."""
        Journal.at(self.directory).ask_for_checkpoint()

    def ask_to_stop(self) -> None:
        """Ask for the end after the epoch under way; does not wait."""
        self._stopping = True
        if self._driver is not None:
            self._driver.stop()
        self._say(STOPPING)

    # One life

    def begin(self) -> None:
        """Check everything that can be checked here, then let the driver live on its thread."""
        check_asked()
        began = time.monotonic()
        stages = build_stages(self._pipeline)
        journal = Journal.at(self.directory)
        identity = journal.identity()
        self._tenancy.check(journal, self._settings.take_over)
        catalog = Catalog(journal)
        catalog.completed()  # a checkpoint of the future is refused while nothing is changed
        if identity is not None:
            here = identity_of(stages, self._settings, self._settings.parallelism or identity.parallelism)
            check_identity(identity, here, str(self.directory), journal.commit(journal.last_epoch()))
        for node in stages.graph.of_kind(g.SINK):
            with _naming(node):
                node.body.check()
        try:
            self._driver = self._make_driver(stages, journal, catalog, identity, self._session())
            if self._stopping:
                self._driver.stop()
            self._driver.start()
            if self.guard is not None:
                self.guard.started(
                    time.monotonic() - began - self._driver.restoring_s, self._executors_started_s
                )
        except BaseException:
            self._let_go()
            self._tenancy.release()
            raise
        self._status.epoch = self._driver.last_epoch
        self._status.state, self._status.message = "running", ""
        self._tell(None)
        self._thread.start()

    def _session(self) -> SparkContext:
        """The user's session, checked, or one that we make, with executors."""
        if self._spark is None:
            self._say("starting Spark")
            sc = self._context = sessions.make_context(self._settings, self._pipeline.name)
            sessions.check_context(sc)
        else:
            sessions.check_session(self._spark)
            sc = self._spark.sparkContext
        sessions.wait_for_executors(sc, self._settings.wait_for_executors_s, self._say)
        if self._context is not None and not is_local(sc):
            self._executors_started_s = max(0.0, time.time() - sc.startTime / 1000)
        return sc

    def _make_driver(
        self, stages: Stages, journal: Journal, catalog: Catalog, identity: Identity | None, sc: SparkContext
    ) -> Driver:
        """Take the directory for this run, and make the driver that will write to it."""
        cores = sessions.cores(sc)
        parallelism = self._settings.parallelism or (identity.parallelism if identity else cores)
        parallelism = min(parallelism, self._settings.key_groups)
        here = identity_of(stages, self._settings, parallelism)
        if identity is None:
            identity = msgspec.structs.replace(here, id=secrets.token_hex(4))
            journal.create_identity(identity)
        for folder in ("staging", "state"):
            (self.directory / folder).mkdir(parents=True, exist_ok=True)
        url = checkpoint_url(self._settings, str(self.directory), identity)
        program = build_program(stages, self._settings, parallelism, str(self.directory), url, identity)
        for node in stages.graph.of_kind(g.SINK):
            with _naming(node):
                node.body.claim(node.uid, program.staging)
        self._tenancy.hold(journal, self._settings.take_over)
        code = fingerprint(stages.graph)
        self._status.generation = journal.take(str(sc.applicationId), code, here.operators).number
        self._status.epoch = journal.last_epoch()  # the supervisor goes by it, also if recovery fails
        newest = catalog.newest(self._status.epoch)
        if newest is not None:  # an earlier life made it, and it is what is loaded if something dies now
            self._backed_up(newest)
        ship(sc, self._pipeline, self.directory)
        runner = SparkRunner(
            sc,
            program,
            open_doors(sc, self.directory / "doors.json"),
            wait_for_home_s=self._settings.wait_for_home_s,
            wait_for_executors_s=self._settings.wait_for_executors_s,
            say=self._say,
        )
        if not runner.pins and not is_local(sc):
            raise EngineError(
                "Shards can't be pinned on this cluster's PySpark.", remedy="Use a supported PySpark: 4.1+."
            )
        guard = self.guard = self._make_guard(sc, cores, program)
        coordinator = Coordinator(
            here,
            runner,
            journal,
            catalog,
            self._settings,
            program.checkpoint_url,
            fingerprint=code,
            on_outcome=self._checkpoint,
            on_read=guard.store_read,
            answers=program.answers,
        )
        coordinator.code_changed = _code_changed(journal, catalog, code)
        strict = self._settings.on_divergence == "stop"
        recovery = Recovery(
            program, runner, journal, catalog, tasks=cores, strict=strict, tell=self._recovering
        )
        driver = Driver(
            program,
            runner,
            journal,
            self._settings,
            coordinator,
            recovery,
            tasks=cores,
            guard=guard,
            on_epoch=self._epoch,
            on_quiet=self._quiet,
            say=self._say,
        )
        runner.while_waiting = driver.check_wanted
        return driver

    def _make_guard(self, sc: SparkContext, cores: int, program: Program) -> Guard:
        supervised = os.environ.get(SUPERVISED, "")
        notice = sessions.notice_of(
            dict(sc.getConf().getAll()),
            local=is_local(sc),
            supervised_s=float(supervised) if supervised else None,
            wait_for_home_s=self._settings.wait_for_home_s,
            restart_s=delay_s(parse_restart(self._settings.restart)),
        )
        for sentence in impatient(program.stages, notice.worker_s):
            _log.warning("%s", sentence)
        return Guard(
            self._settings,
            notice,
            self.directory,
            cores=cores,
            loads=lambda lost: needs(program, lost).parts,
        )

    def _let_go(self) -> None:
        """Stop the session if it is ours."""
        if self._context is not None:
            with contextlib.suppress(Exception):
                self._context.stop()

    def _live(self) -> None:
        assert self._driver is not None
        try:
            self._driver.run()
            self._end("stopped", None)
        except BaseException as error:
            self._end("failed", _plain(error))

    def _end(self, state: str, error: BaseException | None) -> None:
        self._error = error
        self._status.state = state
        self._status.error = "" if error is None else str(error)
        self._status.updated_ms = int(time.time() * 1000)
        write_status(self.directory, self._status)
        self._listener(self.status(), None)
        self._let_go()
        self._tenancy.release()

    def _checkpoint(self, outcome: Outcome) -> None:
        status = self._status
        if self.guard is not None:
            self.guard.backup_ended(outcome)
        if isinstance(outcome, Checkpoint):
            self._backed_up(outcome)
            status.checkpoint_failures = 0
        elif outcome.reason is not Reason.STOPPED:
            status.checkpoint_failures += 1
            self._say(outcome.sentence())

    def _backed_up(self, newest: Checkpoint) -> None:
        status = self._status
        status.checkpoint, status.checkpoint_epoch = newest.number, newest.epoch
        status.checkpoint_ms, status.checkpoint_bytes = newest.completed_ms, newest.size_bytes
        status.checkpoint_new_bytes = newest.new_bytes
        status.backup_reason = Trigger[newest.trigger].value if newest.trigger in Trigger.__members__ else ""

    def _recovering(self, progress: Progress | None) -> None:
        self._status.state = "running" if progress is None else "recovering"
        self._status.message = "" if progress is None else progress.sentence()
        if progress is not None:
            self._status.rebuilt_shards, self._status.rebuild_ms = progress.lacking, progress.took_s * 1e3
            self._status.loaded_bytes = progress.loaded_bytes
            self._status.replayed_epochs, self._status.replay_ms = (
                progress.replayed,
                progress.replaying_s * 1e3,
            )
        self._tell(None)

    def _epoch(self, facts: EpochFacts) -> None:
        now = time.time()
        self._recent.add(now, facts.records_in)
        status = self._status
        status.epoch = facts.epoch
        status.records += facts.records_in
        status.records_per_s = self._recent.per_second()
        status.latency_ms = facts.latency_ms
        status.backlog = facts.backlog
        status.state_keys, status.state_bytes = facts.state_keys, facts.state_bytes
        for name in ("bad_records", "late_records", "untimed_records", "unseen_records"):
            mine: dict[str, int] = getattr(status, name)
            for uid, count in getattr(facts, name).items():
                mine[uid] = mine.get(uid, 0) + count
        status.watermarks = facts.watermarks
        self._tell(facts)

    def _quiet(self, watermarks: dict[str, Watermark]) -> None:
        """Nothing comes: event time falls behind all the same."""
        self._status.watermarks = watermarks
        self._tell(None)

    def _forecast(self) -> None:
        """Recovery as it would be now, as often as anybody looks."""
        guard, now = self.guard, time.monotonic()
        if guard is None or not guard.estimates or now - self._forecast_at < STATUS_EVERY_S:
            return
        self._forecast_at = now
        worst, self._status.bound_s = guard.worst()
        self._status.worst_fault = worst.fault.label
        self._status.forecasts = guard.forecasts()
        self._status.feasible = guard.decision.feasible
        self._status.epoch_limit, self._status.paused = guard.cut, guard.pauses
        self._status.recovered = guard.recovered()

    def _tell(self, facts: EpochFacts | None) -> None:
        self._forecast()
        self._status.updated_ms = int(time.time() * 1000)
        if time.monotonic() - self._written >= STATUS_EVERY_S:
            self._written = time.monotonic()
            write_status(self.directory, self._status)
        self._listener(self.status(), facts)

    def _say(self, message: str) -> None:
        self._status.message = message
        if self._status.generation:  # before that, the directory may be another's
            self._status.updated_ms = int(time.time() * 1000)
            write_status(self.directory, self._status)
        self._listener(self.status(), None)


def _code_changed(journal: Journal, catalog: Catalog, code: str) -> bool:
    """Whether a replay from the newest checkpoint would cross a change of the pipeline's code."""
    newest = catalog.newest(journal.last_epoch())
    if newest is not None:
        return newest.fingerprint != code
    earlier = [journal.read_generation(n) for n in range(1, journal.generation)]
    return any(g is not None and g.fingerprint != code for g in earlier)


def _plain(error: BaseException) -> BaseException:
    """What ended a run, without the JVM's two hundred lines."""
    if isinstance(error, HoldfastError):
        return error
    text = str(error)
    if type(error).__module__.startswith(("py4j", "pyspark")):
        lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("at ")]
        causes = [line for line in lines if line.startswith("Caused by")]
        made = EngineError(
            f"Spark could not run the job: {lines[0] if lines else type(error).__name__}",
            remedy="Look at the executors' logs; the epoch was not committed and runs again at the next start.",
            detail="\n".join(causes[:5] or lines[:8]),
        )
        made.__cause__ = error
        return made
    if isinstance(error, ConnectionError):  # py4j lets these through when the JVM is gone
        gone = EngineError(
            "Spark's JVM is gone.",
            remedy="Look whether it was killed, for lack of memory perhaps, and start again; nothing is lost.",
        )
        gone.__cause__ = error
        return gone
    return error


@contextlib.contextmanager
def _naming(node: g.Node) -> Iterator[None]:
    try:
        yield
    except HoldfastError as error:
        raise error.at(node.uid, node.where) from None


def _no_listener(status: Status, facts: EpochFacts | None) -> None:
    return


def start(
    pipeline: Pipeline,
    *,
    spark: SparkSession | None,
    settings: dict[str, Any] | Settings,
    listener: Listener = _no_listener,
) -> Handle:
    """Start a pipeline in the background."""
    resolved = settings if isinstance(settings, Settings) else resolve(settings).settings
    handle = Handle(pipeline, resolved, spark, listener)
    try:
        handle.begin()
    except BaseException as error:
        plain = _plain(error)
        if plain is not error:
            raise plain from None
        raise
    return handle


def run(
    pipeline: Pipeline,
    *,
    spark: SparkSession | None,
    settings: dict[str, Any] | Settings,
    listener: Listener = _no_listener,
) -> Handle:
    """Start a pipeline and wait for its end; signals finish the epoch first."""
    handle = start(pipeline, spark=spark, settings=settings, listener=listener)
    with _signals(handle):
        while not handle.wait(0.2):
            pass
    return handle


@contextlib.contextmanager
def _signals(handle: Handle) -> Iterator[None]:
    """SIGINT and SIGTERM ask to stop; a second one gives up waiting."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        handle.ask_to_stop()

    before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
