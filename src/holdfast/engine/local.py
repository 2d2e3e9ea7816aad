"""An epoch in one process: the same tasks, with lists for the exchange. The oracle, and what users test with."""

from __future__ import annotations

import msgspec

from holdfast.engine.program import Header, Program, Report, SourceTask
from holdfast.engine.tasks import Sent, Shards, Where, run_shard_task, run_source_task
from holdfast.log.records import Plan
from holdfast.plan.stages import Stage


class LocalRunner:
    """Runs epochs here. `attempt` tells runs of the same epoch apart."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._shards = Shards()
        self._runs = 0

    def run(self, plan: Plan, header: Header) -> list[Report]:
        """All reports of one run of an epoch."""
        self._runs += 1
        where = Where(attempt=str(self._runs))
        packed = msgspec.msgpack.encode(header)
        sent: dict[int | None, list[Sent]] = {None: []}
        for number, ranges in enumerate(plan.tasks):
            sent[None] += run_source_task(self._program, SourceTask(number, packed, ranges), where)
        if self._program.terminal(None):
            return [_report(blob) for _, blob in sent[None]]
        reports: list[bytes] = []
        for stage in self._program.stages.keyed:
            sent[stage.id] = []
            for shard in range(self._program.parallelism):
                blobs = self._blobs(stage, shard, sent)
                on, done = run_shard_task(self._program, stage, shard, blobs, where, self._shards)
                sent[stage.id] += on
                reports += done
        return [_report(r) for r in reports]

    def _blobs(self, stage: Stage, shard: int, sent: dict[int | None, list[Sent]]) -> list[bytes]:
        blobs = []
        for feeder in self._program.feeders(stage):
            partition = self._program.first_partition(feeder, stage.root) + shard
            blobs += [b for p, b in sent[None if feeder is None else feeder.id] if p == partition]
        return blobs

    def close(self) -> None:
        self._shards.close()


def _report(data: bytes) -> Report:
    return msgspec.msgpack.decode(data, type=Report)
