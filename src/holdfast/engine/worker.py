"""What runs inside Spark's Python workers: finds the program, the shards this worker holds, and runs a task."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from holdfast.checkpoint.upload import Request, Uploads
from holdfast.engine.collector import quiet
from holdfast.engine.program import Program, SourceTask
from holdfast.engine.tasks import Shards, Where, run_shard_task, run_source_task
from holdfast.recovery.restore import Prepare, prepare

PREPARE = b"P"
"""What a blob starts with that asks a shard to stand at a version."""

_programs: dict[str, Program] = {}
_shards = Shards()
_uploads = Uploads()


def _program(digest: str, pickled: bytes) -> Program:
    if digest not in _programs:
        _programs.clear()  # one run at a time: an older program's functions and shards go
        _shards.close()
        _programs[digest] = pickle.loads(pickled)
    return _programs[digest]


def _where() -> Where:
    from pyspark import TaskContext

    context = TaskContext.get()
    attempt = "0" if context is None else str(context.taskAttemptId())
    root = os.environ.get("HOLDFAST_STATE_ROOT")
    executor = os.environ.get("SPARK_EXECUTOR_DIRS", os.environ.get("SPARK_LOCAL_DIRS", ""))
    node = os.uname().nodename
    host = node if root is None else f"{node}:{root}"  # several hosts may be one machine, with a root each
    return Where(attempt, host, executor.split(",")[0].rstrip("/")[-40:], root)


class HostBody:
    """Says where it runs: the host as reports name it, and versions, for placement and `holdfast doctor`."""

    def __call__(self, split: int, blobs: Iterator[bytes]) -> Iterable[bytes]:
        import platform

        import pyarrow

        list(blobs)
        try:
            from importlib.metadata import version

            own = version("holdfast")
        except ImportError:
            own = "unknown"
        facts = {
            "host": _where().host,
            "executor": _where().executor,
            "python": platform.python_version(),
            "pyarrow": pyarrow.__version__,
            "holdfast": own,
        }
        return [msgspec.msgpack.encode(facts)]


class SourceBody:
    """The body of source tasks."""

    def __init__(self, digest: str, pickled: bytes) -> None:
        self._digest, self._pickled = digest, pickled

    def __call__(self, split: int, blobs: Iterator[bytes]) -> Iterable[Any]:
        quiet()
        program = _program(self._digest, self._pickled)
        tasks = [t for b in blobs for t in msgspec.msgpack.decode(b, type=list[SourceTask])]
        sent = [s for task in tasks for s in run_source_task(program, task, _where())]
        return [blob for _, blob in sent] if program.terminal(None) else sent


class ShardBody:
    """The body of one shard's tasks: epochs come through the exchange, a `Prepare` comes alone."""

    def __init__(self, digest: str, pickled: bytes, stage: int, shard: int) -> None:
        self._digest, self._pickled, self._stage, self._shard = digest, pickled, stage, shard

    def __call__(self, split: int, blobs: Iterator[bytes]) -> Iterable[Any]:
        quiet()
        received = list(blobs)  # a worker whose input is not read to its end is not used again
        program = _program(self._digest, self._pickled)
        if received and received[0][:1] == PREPARE:
            asked = msgspec.msgpack.decode(memoryview(received[0])[1:], type=Prepare)
            return [msgspec.msgpack.encode(prepare(program, asked, _where(), _shards))]
        stage = next(s for s in program.stages.stages if s.id == self._stage)
        sent, reports = run_shard_task(program, stage, self._shard, received, _where(), _shards)
        return reports or sent


class UploadBody:
    """The body of the tasks that upload versions, in a worker of their own: they begin, or ask how far it is."""

    def __call__(self, split: int, blobs: Iterator[bytes]) -> Iterable[bytes]:
        where = _where()
        requests = [msgspec.msgpack.decode(b, type=Request) for b in blobs]
        return [msgspec.msgpack.encode(_uploads.ask(r, where.host, where.state_root)) for r in requests]
