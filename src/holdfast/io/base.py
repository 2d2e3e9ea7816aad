"""What a source and a sink are: two small interfaces, and the facts that pass through them.

A source says what is there (`plan`, on the driver) and reads exactly that (`read`, on an executor,
again and again with the same result). A sink stages what an attempt wrote (`writer`, on an executor)
and makes what was decided visible (`publish`, on the driver, idempotently). Neither knows of epochs'
life, shards or Spark.
"""

from __future__ import annotations

import abc
import contextlib
import os
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa

from holdfast.data.shown import shown
from holdfast.errors import BadRecordError, PipelineError
from holdfast.log.disk import make_folder, sync_folder, write_durably

DEAD_LETTER = "dead_letter"
DEAD_LETTER_SCHEMA = pa.schema(
    [
        pa.field("source", pa.string()),
        pa.field("file", pa.string()),
        pa.field("line", pa.int64()),
        pa.field("reason", pa.string()),
        pa.field("record", pa.string()),
    ]
)


class Range(msgspec.Struct, frozen=True):
    """A fixed piece of a split, `start` to `end` (exclusive); what the two count is the source's affair.

    `info` is plain JSON that the source needs to read the same again: a path, a size, a checksum.
    """

    split: str
    start: int
    end: int
    info: dict[str, Any] = {}
    records: int = -1
    """How many records it holds, or -1 where that is not known without reading it."""


class Limit(msgspec.Struct, frozen=True):
    """How much a source may offer for one epoch.

    `records` bounds the epoch (as near as the source can tell without reading); `tasks` is into how many
    ranges a large piece is best cut so that every core has work; `now_ms` is the epoch's clock.
    """

    records: int
    tasks: int
    now_ms: int


class Offer(msgspec.Struct, frozen=True):
    """What a source has for an epoch: ranges in order, the position after them, and what is left behind.

    `position` is plain JSON and is handed back at the next call. `backlog` counts the records that are
    known to wait beyond this offer. `exhausted` says that nothing will ever come after it.
    """

    ranges: list[Range]
    position: Any
    backlog: int = 0
    exhausted: bool = False
    splits: list[str] | None = None
    """All splits that there are, those with nothing to read included; None: those that ever had something."""
    watermarks: dict[str, int] = {}
    """How far splits will be once this is read, in milliseconds, if the source knows: nothing at or below will come."""
    waiting: list[str] | None = None
    """Splits of which more is there than is offered; None: not known. A split that has something is never idle."""
    idle: list[str] = []
    """Splits that are not to be waited for, as the source knows of itself, until they offer something."""


class Reading:
    """Passed to `read`: where a source says that a record can't be read.

    The policy is the user's: "fail" raises, "skip" counts, "dead_letter" counts and keeps the record.
    """

    def __init__(self, uid: str, policy: str = "fail") -> None:
        self.uid = uid
        self.policy = policy
        self.bad = 0
        self.dead: list[dict[str, Any]] = []

    def bad_record(self, record: str, reason: str, file: str, line: int | None) -> None:
        """Count a record that can't be read, and fail or keep it as the user chose."""
        place = file if line is None else f"{file}, line {line}"
        if self.policy == "fail":
            raise BadRecordError(
                f"A record can't be read at {place}: {reason}; it is {shown(record)}.",
                uid=self.uid,
                remedy='Mend the file, or choose on_bad_record="skip" or "dead_letter".',
            )
        self.bad += 1
        if self.policy == DEAD_LETTER:
            self.dead.append(
                {"source": self.uid, "file": file, "line": line, "reason": reason, "record": record}
            )


class Source(abc.ABC):
    """Where records come from; extend it to read a system of your own, test it with `hf.testing.check_source`.

    A source is pickled and sent to the executors, so it holds settings and no open files.
    """

    on_bad_record: str = "fail"

    @abc.abstractmethod
    def schema(self) -> pa.Schema:
        """The schema of every table that `read` yields. Called on the driver, before anything runs."""

    @abc.abstractmethod
    def plan(self, position: Any, limit: Limit) -> Offer:
        """What is there after `position` (None: from the start). Called on the driver, must not block."""

    @abc.abstractmethod
    def read(self, piece: Range, reading: Reading) -> Iterator[pa.Table]:
        """The records of one range, the same every time, in tables of bounded size."""

    def split_of(self, piece: Range) -> str:
        """The split that a range belongs to, as far as event time goes: each has a watermark of its own.

        Empty: the source as a whole has one.
        """
        return piece.split

    def expires_ms(self, piece: Range) -> int | None:
        """When a range can't be read any more, in milliseconds since 1970; None: never, as far as is known.

        A checkpoint is made before that, so that no replay needs what is gone.
        """
        return None

    def describe(self) -> str:
        """A few words for people: what is read."""
        return type(self).__name__


class StagedFile(msgspec.Struct, frozen=True):
    """A file that an attempt has written and nobody can see yet."""

    path: str
    rows: int
    size_bytes: int
    crc32: int
    partition: str = ""
    """The folder below the sink's root that it belongs in ("country=KR"), for sinks that partition."""


class Target(msgspec.Struct, frozen=True):
    """Where one attempt may stage: names no other attempt has.

    `attempt` is unique over all generations. `folder` is the pipeline's own folder for staged output,
    for sinks that have no better place.
    """

    uid: str
    epoch: int
    task: str
    attempt: str
    folder: str


class SinkWriter(abc.ABC):
    """Takes one attempt's output of one sink."""

    @abc.abstractmethod
    def write(self, table: pa.Table) -> None:
        """Take a table; all tables of one writer have one schema."""

    @abc.abstractmethod
    def close(self) -> list[StagedFile]:
        """Write what is left; the files in order, none where nothing was written."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Drop what was staged; must not raise."""


class Decided(msgspec.Struct, frozen=True):
    """A decided epoch's output of one sink, as its commit record lists it: files in order of task.

    `fence` is the generation that publishes it: a system that can compare may refuse an older one.
    """

    uid: str
    epoch: int
    fence: int
    files: list[StagedFile]
    folder: str
    """The pipeline's folder for staged output, as in `Target`."""


class Sink(abc.ABC):
    """Where records go; extend it to write to a system of your own, test it with `hf.testing.check_sink`."""

    @abc.abstractmethod
    def writer(self, target: Target) -> SinkWriter:
        """A writer for one attempt. Called on an executor."""

    @abc.abstractmethod
    def publish(self, decided: Decided) -> None:
        """Make a decided epoch visible. Called on the driver, in order, perhaps more than once."""

    def check(self) -> None:
        """Raise if this sink can't be written to. Called on the driver, before anything runs."""
        return

    def claim(self, uid: str, folder: str) -> None:
        """Take the place for this sink of this pipeline, whose own folder is `folder`, or raise if it is another's.

        Called on the driver, before anything runs and before anything is removed.
        """
        return

    def maintain(self, decided_epoch: int) -> None:
        """Tidy up what is older than `decided_epoch`. Called on a thread of the driver's, now and then."""
        return

    def discard(self, older_than: str) -> None:
        """Remove what attempts of earlier generations staged and nobody decided. Called at start."""
        return

    def describe(self) -> str:
        """A few words for people: what is written."""
        return type(self).__name__


_FOLDERS: set[str] = set()


class TableWriter(SinkWriter):
    """Stages tables as one Arrow file in the pipeline's own folder, for sinks that publish on the driver."""

    def __init__(self, target: Target) -> None:
        self._name = f"{target.uid}-{target.attempt}.arrow.staged"
        self._folder = target.folder
        self._tables: list[pa.Table] = []

    def write(self, table: pa.Table) -> None:
        self._tables.append(table)

    def close(self) -> list[StagedFile]:
        if not self._tables:
            return []
        table = pa.concat_tables(self._tables)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        data = sink.getvalue()
        make_folder(self._folder, _FOLDERS)
        write_durably(os.path.join(self._folder, self._name), data)
        sync_folder(self._folder)
        return [
            StagedFile(path=self._name, rows=table.num_rows, size_bytes=data.size, crc32=zlib.crc32(data))
        ]

    def abort(self) -> None:
        self._tables = []
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._folder, self._name))


def staged_table(decided: Decided) -> pa.Table | None:
    """The rows of a decided epoch that a `TableWriter` staged; None where there are none."""
    tables = []
    for file in decided.files:
        with pa.OSFile(os.path.join(decided.folder, file.path), "rb") as source:
            tables.append(pa.ipc.open_stream(source).read_all())
    return pa.concat_tables(tables) if tables else None


def check_policy(policy: str) -> str:
    """A policy for bad records, or an error that lists the three."""
    if policy not in ("fail", "skip", DEAD_LETTER):
        raise PipelineError(
            f"on_bad_record={policy!r} is no policy.", remedy='Choose "fail", "skip" or "dead_letter".'
        )
    return policy
