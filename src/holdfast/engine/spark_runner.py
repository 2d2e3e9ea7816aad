"""An epoch as one Spark job: builds it through the doors, places its shards, and gathers the reports."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.engine.doors import Doors, executors, is_local, open_doors
from holdfast.engine.placement import Placement, place
from holdfast.engine.program import Header, Program, Report, SourceTask
from holdfast.engine.worker import HostBody, ShardBody, SourceBody
from holdfast.log.records import Commit, Plan

if TYPE_CHECKING:
    from pyspark import SparkContext

    from holdfast.plan.stages import Stage


class SparkRunner:
    """Runs epochs of one program on one Spark context."""

    def __init__(self, sc: SparkContext, program: Program, doors: Doors | None = None) -> None:
        self._sc, self._program = sc, program
        self._doors = doors or open_doors(sc)
        self._local = is_local(sc)
        self._placement = Placement({})
        self._hosts: dict[str, str] = {}
        self._homes: dict[tuple[str, int], str] = {}
        pickled = _pickled(program)
        digest = hashlib.sha256(pickled).hexdigest()
        self._source = self._doors.function(
            SourceBody(digest, pickled), None, pairs=not program.terminal(None)
        )
        self._bodies: dict[tuple[int, int], Any] = {}
        for stage in program.stages.keyed:
            for shard in range(program.parallelism):
                body = ShardBody(digest, pickled, stage.id, shard)
                slot = f"{program.uid(stage)}-{shard}"
                self._bodies[stage.id, shard] = self._doors.function(
                    body, slot, pairs=not program.terminal(stage)
                )

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
        if not self._local:
            self._place()
        packed = msgspec.msgpack.encode(header)
        items = [msgspec.msgpack.encode(SourceTask(n, packed, ranges)) for n, ranges in enumerate(plan.tasks)]
        read = self._doors.sources(items, self._source)
        if self._program.terminal(None):
            return [_report(b) for b in self._doors.collect([read])]
        exchanges: dict[int | None, Any] = {
            None: self._doors.exchange([read], self._program.partitions(None))
        }
        last: list[Any] = []
        for stage in self._program.stages.keyed:
            tasks = [self._shard(stage, shard, exchanges) for shard in range(self._program.parallelism)]
            if self._program.terminal(stage):
                last += tasks
            else:
                exchanges[stage.id] = self._doors.exchange(tasks, self._program.partitions(stage))
        return [_report(b) for b in self._doors.collect(last)]

    def _shard(self, stage: Stage, shard: int, exchanges: dict[int | None, Any]) -> Any:
        inputs = []
        for feeder in self._program.feeders(stage):
            first = self._program.first_partition(feeder, stage.root)
            inputs.append((exchanges[None if feeder is None else feeder.id], first + shard))
        location = self._placement.location(self._program.uid(stage), shard)
        return self._doors.shard(inputs, self._bodies[stage.id, shard], location)

    def _place(self) -> None:
        live = executors(self._sc)
        self._learn_hosts([e for e in live if e[0] not in self._hosts])
        wanted = [
            (self._program.uid(s), n)
            for s in self._program.stages.keyed
            for n in range(self._program.parallelism)
        ]
        self._placement = place(wanted, live, self._placement, self._homes, self._hosts)

    def _learn_hosts(self, unknown: list[tuple[str, str]]) -> None:
        """Ask executors that are new which host they are on, as reports name hosts."""
        for executor, host in unknown:
            answer = self._doors.ask([f"executor_{host}_{executor}"], HostBody())
            self._hosts[executor] = str(msgspec.msgpack.decode(answer[0])["host"])


def _report(data: bytes) -> Report:
    return msgspec.msgpack.decode(data, type=Report)


def _pickled(program: Program) -> bytes:
    from pyspark import cloudpickle

    return bytes(cloudpickle.dumps(program))  # type: ignore[no-untyped-call]
