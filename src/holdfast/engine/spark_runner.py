"""An epoch as one Spark job: builds it through the doors, places its shards, and gathers the reports."""

from __future__ import annotations

import functools
import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.checkpoint.coordinator import Expired
from holdfast.checkpoint.upload import Request, ShardUpload, Uploaded
from holdfast.engine.absence import Absence, Go, Watch, go
from holdfast.engine.doors import Doors, executors, is_local, open_doors
from holdfast.engine.placement import Placement, place
from holdfast.engine.program import Header, Part, Program, Report, SourceTask
from holdfast.engine.worker import PREPARE, HostBody, ShardBody, SourceBody, UploadBody
from holdfast.errors import EngineError, JobLostError
from holdfast.log.records import Commit, Plan
from holdfast.recovery.restore import Prepare, Prepared

if TYPE_CHECKING:
    from pyspark import SparkContext

    from holdfast.plan.stages import Stage


_FIRST_LOOK_S, _LAST_LOOK_S = 0.25, 1.0
"""How long after it was begun, and then at the most, an upload is asked how far it is."""


class SparkRunner:
    """Runs epochs of one program on one Spark context."""

    def __init__(
        self,
        sc: SparkContext,
        program: Program,
        doors: Doors | None = None,
        *,
        wait_for_home_s: float = 0.0,
        wait_for_executors_s: float = 120.0,
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._sc, self._program = sc, program
        self._wait_for_executors_s, self._absence = wait_for_executors_s, Absence()
        self.while_waiting: Callable[[], None] = lambda: None
        """Called now and then while there is no executor to run on; raises where nobody wants that any more."""
        self._watch = Watch(self._waits_in_vain, self._end_jobs)
        self._tag = f"holdfast-{secrets.token_hex(4)}"
        self._doors = doors or open_doors(sc)
        self._local = is_local(sc)
        self._wait_for_home_s, self._say = wait_for_home_s, say
        self._placement = Placement({})
        self._hosts: dict[str, str] = {}
        self._homes: dict[tuple[str, int], str] = {}
        self._deserted: set[str] = set()
        self.waited_s = 0.0
        """How long it has waited for executors, all in all."""
        pickled = _pickled(program)
        digest = hashlib.sha256(pickled).hexdigest()
        self._source = self._doors.function(
            SourceBody(digest, pickled), None, pairs=not program.terminal(None)
        )
        self._uploader = self._doors.function(UploadBody(), "upload", pairs=False)
        self._sending: dict[tuple[int, int], Any] = {}
        self._ending: dict[tuple[int, int], Any] = {}
        for stage in program.stages.keyed:
            for shard in range(program.parallelism):
                body = ShardBody(digest, pickled, stage.id, shard)
                slot = f"{program.uid(stage)}-{shard}"
                self._ending[stage.id, shard] = self._doors.function(body, slot, pairs=False)
                if not program.terminal(stage):
                    self._sending[stage.id, shard] = self._doors.function(body, slot, pairs=True)

    @property
    def pins(self) -> bool:
        """Whether shards stay in their workers."""
        return self._doors.pins

    def remember(self, commit: Commit | None) -> None:
        """Note on which host each shard's committed version is, so that it is placed there again."""
        shards = {} if commit is None else commit.shards
        self._homes = {(uid, n): s.host for uid, kept in shards.items() for n, s in enumerate(kept)}

    def run(self, plan: Plan, header: Header) -> list[Report]:
        """All reports of one run of an epoch."""
        self._place()
        packed = msgspec.msgpack.encode(header)
        tasks = [[SourceTask(n, packed, ranges)] for n, ranges in enumerate(plan.tasks)]
        return self._job(tasks, None)

    def replay(self, tasks: Sequence[Sequence[SourceTask]], only: Part) -> list[Report]:
        """All reports of one job of a replay, in which some shards take part."""
        self._place()
        return self._job(tasks, only)

    def _job(self, tasks: Sequence[Sequence[SourceTask]], only: Part | None) -> list[Report]:
        program = self._program
        read = self._doors.sources([msgspec.msgpack.encode(list(t)) for t in tasks], self._source)
        if program.terminal(None, only):
            return [_report(b) for b in self._collect([read])]
        exchanges: dict[int | None, Any] = {None: self._doors.exchange([read], program.partitions(None))}
        last: list[Any] = []
        for stage in program.stages.keyed:
            shards = range(program.parallelism) if only is None else only.get(program.uid(stage), [])
            ends = program.terminal(stage, only)
            made = [self._shard(stage, n, exchanges, self._ending if ends else self._sending) for n in shards]
            if ends:
                last += made
            elif made:
                exchanges[stage.id] = self._doors.exchange(made, program.partitions(stage))
        return [_report(b) for b in self._collect(last)]

    def _shard(
        self,
        stage: Stage,
        shard: int,
        exchanges: dict[int | None, Any],
        functions: dict[tuple[int, int], Any],
    ) -> Any:
        inputs = []
        for feeder in self._program.feeders(stage):
            first = self._program.first_partition(feeder, stage.root)
            inputs.append((exchanges[None if feeder is None else feeder.id], first + shard))
        location = self._placement.location(self._program.uid(stage), shard)
        return self._doors.shard(inputs, functions[stage.id, shard], location)

    def prepare(self, asked: Sequence[Prepare]) -> list[Prepared]:
        """Ask shards, each where it runs, to stand at a version."""
        if not asked:
            return []
        self._place()
        stages = {self._program.uid(s): s for s in self._program.stages.keyed}
        tasks = []
        for one in asked:
            item = PREPARE + msgspec.msgpack.encode(one)
            location = self._placement.location(one.uid, one.shard)
            tasks.append(self._doors.located(item, self._ending[stages[one.uid].id, one.shard], location))
        return [msgspec.msgpack.decode(b, type=Prepared) for b in self._collect(tasks)]

    def upload(
        self, folder: str, shards: Sequence[ShardUpload], give_up: Callable[[], bool]
    ) -> list[Uploaded]:
        """Have each executor upload the versions of its shards, beside its tasks: what they stored, or why not."""
        by_place: dict[str | None, list[ShardUpload]] = {}
        for one in shards:
            by_place.setdefault(self._placement.location(one.uid, one.shard), []).append(one)
        program = self._program
        open_requests = {
            there: msgspec.msgpack.encode(
                Request(folder, program.checkpoint_url, program.storage, program.state_root, program.home, of)
            )
            for there, of in by_place.items()
        }
        done: list[Uploaded] = []
        pause_s = _FIRST_LOOK_S  # to ask is a job of Spark's, which takes a task's place for a moment
        while open_requests:
            places = list(open_requests)
            tasks = [self._doors.located(open_requests[p], self._uploader, p) for p in places]
            answers = [msgspec.msgpack.decode(b, type=Uploaded) for b in self._collect(tasks)]
            for there, answer in zip(places, answers, strict=True):
                if answer.done:
                    done.append(answer)
                    del open_requests[there]
            if open_requests:
                if give_up():
                    raise Expired
                time.sleep(pause_s)
                pause_s = min(_LAST_LOOK_S, pause_s * 2)
        return done

    def _collect(self, tasks: list[Any]) -> list[bytes]:
        return self._watched(lambda: self._doors.collect(tasks))

    def _watched(self, job: Callable[[], list[bytes]]) -> list[bytes]:
        """Run a job. What Spark gives up because executors died is worth another try; all else is not."""
        from py4j.protocol import Py4JJavaError

        try:
            if self._local:
                return job()
            self._sc.addJobTag(self._tag)  # taken off again: the thread may be a user's, with jobs of its own
            try:
                with self._watch.job():
                    return job()
            finally:
                self._sc.removeJobTag(self._tag)
        except Py4JJavaError as error:
            text = str(error.java_exception)
            if self._sc._jsc.sc().isStopped():
                raise
            raise JobLostError(
                f"Spark gave a job up: {(text.splitlines() or ['unknown'])[0]}",
                remedy="Look at the executors' logs: something ends them again and again.",
                detail="\n".join(text.splitlines()[1:6]),
            ) from error

    def unsettled(self) -> bool:
        """Whether an executor that had shards is gone, so that they should be looked after before the next epoch."""
        if self._local or not self._placement.executors:
            return False
        return bool(set(self._placement.executors.values()) - set(executors(self._sc)))

    def _place(self) -> None:
        if self._local:
            return
        live = self._live()
        wanted = [
            (self._program.uid(s), n)
            for s in self._program.stages.keyed
            for n in range(self._program.parallelism)
        ]
        self._placement = place(wanted, live, self._placement, self._homes, self._hosts)

    def _live(self) -> list[tuple[str, str]]:
        """The live executors, once there is one on every host that has state, or has had its time to come back."""
        started = time.monotonic()
        try:
            return self._await_homes(started)
        finally:
            self.waited_s += time.monotonic() - started

    def _await_homes(self, started: float) -> list[tuple[str, str]]:
        told = False
        while True:
            self._check_runs()
            live = executors(self._sc)
            try:
                self._learn_hosts([e for e in live if e[0] not in self._hosts])
            except JobLostError:
                if set(live) <= set(executors(self._sc)):
                    raise
                continue  # who was asked has died meanwhile
            here, homes = {self._hosts[e[0]] for e in live}, set(self._homes.values())
            self._deserted -= here
            verdict = go(
                here,
                homes,
                self._deserted,
                waited_s=time.monotonic() - started,
                wait_for_home_s=self._wait_for_home_s,
                gone_for_s=self._absence.seen(bool(live)),
                wait_for_executors_s=self._wait_for_executors_s,
            )
            if verdict is Go.ON:
                self._deserted |= homes - here
                return live
            if verdict is Go.GIVE_UP:
                raise EngineError(
                    f"{self._sc.master} has given no executor for {self._wait_for_executors_s:.0f} s.",
                    remedy="Look at the cluster: are workers up, does its master know this application? Then start "
                    "again, or raise wait_for_executors. Nothing is lost.",
                )
            if not told:
                told = True
                self._say("waiting for executors on the hosts that have the state")
            if not live:
                self.while_waiting()
            time.sleep(0.1)

    def _check_runs(self) -> None:
        if self._sc._jsc.sc().isStopped():
            raise EngineError(
                "The Spark context was stopped under a running pipeline.",
                remedy="Look why: its master may have removed the application. Start again; nothing is lost.",
            )

    def _waits_in_vain(self) -> bool:
        """Whether a job should be ended: there is no executor, and none will come, or nobody wants one."""
        live = bool(executors(self._sc))
        if self._absence.seen(live) >= self._wait_for_executors_s:
            return True
        if live:
            return False
        try:
            self.while_waiting()
        except Exception:
            return True
        return False

    def _end_jobs(self) -> None:
        self._sc.cancelJobsWithTag(self._tag)

    def _learn_hosts(self, unknown: list[tuple[str, str]]) -> None:
        """Ask executors that are new which host they are on, as reports name hosts."""
        for executor, host in unknown:
            there = f"executor_{host}_{executor}"
            answer = self._watched(functools.partial(self._doors.ask, [there], HostBody()))
            found = msgspec.msgpack.decode(answer[0])
            # An executor that died meanwhile is answered for by another; that one's host is not its own.
            self._hosts[executor] = str(found["host"])


def _report(data: bytes) -> Report:
    return msgspec.msgpack.decode(data, type=Report)


def _pickled(program: Program) -> bytes:
    from pyspark import cloudpickle

    return bytes(cloudpickle.dumps(program))  # type: ignore[no-untyped-call]
