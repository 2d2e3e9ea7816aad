"""An epoch in one process: the same tasks, with lists for the exchange. The oracle, and what users test with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from holdfast.checkpoint.upload import Request, ShardUpload, Upload, Uploaded
from holdfast.engine.program import Header, Part, Program, Report, SourceTask
from holdfast.engine.tasks import Sent, Shards, Where, run_shard_task, run_source_task
from holdfast.log.records import Commit, Plan
from holdfast.plan.stages import Stage
from holdfast.recovery.restore import Prepare, Prepared, prepare


class LocalRunner:
    """Runs epochs here. `attempt` tells runs of the same epoch apart."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._shards = Shards()
        self._runs = 0

    def run(self, plan: Plan, header: Header) -> list[Report]:
        """All reports of one run of an epoch."""
        packed = msgspec.msgpack.encode(header)
        return self._job([[SourceTask(n, packed, ranges)] for n, ranges in enumerate(plan.tasks)], None)

    def replay(self, tasks: Sequence[Sequence[SourceTask]], only: Part) -> list[Report]:
        """All reports of one job of a replay, in which some shards take part."""
        return self._job(tasks, only)

    def remember(self, commit: Commit | None) -> None:
        """Nothing to note: there is one place for all shards."""

    def unsettled(self) -> bool:
        """Nobody can be gone."""
        return False

    def _job(self, tasks: Sequence[Sequence[SourceTask]], only: Part | None) -> list[Report]:
        self._runs += 1
        where = Where(attempt=str(self._runs))
        program = self._program
        sent: dict[int | None, list[Sent]] = {None: []}
        for task in tasks:
            for one in task:
                sent[None] += run_source_task(program, one, where)
        if program.terminal(None, only):
            return [_report(blob) for _, blob in sent[None]]
        reports: list[bytes] = []
        for stage in program.stages.keyed:
            sent[stage.id] = []
            for shard in range(program.parallelism) if only is None else only.get(program.uid(stage), []):
                blobs = self._blobs(stage, shard, sent)
                on, done = run_shard_task(program, stage, shard, blobs, where, self._shards)
                sent[stage.id] += on
                reports += done
        return [_report(r) for r in reports]

    def _blobs(self, stage: Stage, shard: int, sent: dict[int | None, list[Sent]]) -> list[bytes]:
        blobs = []
        for feeder in self._program.feeders(stage):
            partition = self._program.first_partition(feeder, stage.root) + shard
            blobs += [b for p, b in sent[None if feeder is None else feeder.id] if p == partition]
        return blobs

    def prepare(self, asked: Sequence[Prepare]) -> list[Prepared]:
        """Ask shards to stand at a version."""
        return [prepare(self._program, one, Where(), self._shards) for one in asked]

    def upload(
        self, folder: str, shards: Sequence[ShardUpload], give_up: Callable[[], bool]
    ) -> list[Uploaded]:
        """Upload versions, here and now."""
        program = self._program
        request = Request(
            folder, program.checkpoint_url, program.storage, program.state_root, program.home, list(shards)
        )
        return [Upload(request, "local", None).run()]

    def settle(self) -> None:
        """Wait until the shards' folders are still. Where each shard has a process of its own, nobody needs to."""
        self._shards.settle()

    def close(self) -> None:
        self.settle()
        self._shards.close()


def _report(data: bytes) -> Report:
    return msgspec.msgpack.decode(data, type=Report)
