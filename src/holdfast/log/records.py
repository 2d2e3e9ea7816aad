"""The records of the log: who may write, what an epoch reads, what it wrote. Plain data, with versions."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.io.base import Range, StagedFile
from holdfast.state.shard import Sealed

FORMAT = 1


class Identity(msgspec.Struct, frozen=True):
    """What a directory belongs to: the pipeline's name, its operators with state, and what is fixed for life.

    The record has the operators of the first start; those that came later are in the generations'.
    """

    name: str
    key_groups: int
    parallelism: int
    backend: str
    operators: dict[str, dict[str, Any]]
    """Each uid that has something stored: its kind, its states' types, a source's or sink's kind."""
    id: str = ""
    """Tells directories apart that share a store for checkpoints, or hosts' folders for state."""
    format: int = FORMAT

    @property
    def home(self) -> str:
        """The folder of its own that it has in a place which other directories may share.

        >>> Identity("orders", 128, 2, "heap", {}, "5f3a").home
        'orders-5f3a'
        """
        return f"{self.name}-{self.id}" if self.id else self.name


class Generation(msgspec.Struct, frozen=True):
    """One life of a driver."""

    number: int
    host: str
    pid: int
    started_ms: int
    token: str
    application: str = ""
    fingerprint: str = ""
    """Of the pipeline's code."""
    operators: dict[str, dict[str, Any]] = {}
    """All that the directory may hold something for from here on: what it held before, and what this life runs."""
    format: int = FORMAT


class PlannedRange(msgspec.Struct, frozen=True):
    """A range of a source, as a plan fixes it. `ordinal` is its place in the order of the epoch."""

    ordinal: int
    source: str
    piece: Range


class Plan(msgspec.Struct, frozen=True):
    """What epoch t reads and which clock it sees. Once it exists, the epoch is a fact."""

    epoch: int
    generation: int
    now_ms: int
    tasks: list[list[PlannedRange]]
    """The ranges of each source task."""
    positions: dict[str, Any]
    """Where each source stands after this epoch."""
    schemas: dict[str, str]
    """The schemas that were pinned before it, by edge."""
    exhausted: list[str] = []
    marks: dict[str, dict[str, int]] = {}
    """The watermark of each split before it, by uid of the assigner."""
    active_ms: dict[str, dict[str, int]] = {}
    """When each split had something to say last."""
    idle: dict[str, list[str]] = {}
    """The splits that nobody waits for in this epoch, unless they are heard in it."""
    unheard: dict[str, list[str]] = {}
    """The splits of which nothing with a time came to the assigner when they were last read."""
    given: dict[str, dict[str, int]] = {}
    """Watermarks after it, from sources that know them."""
    ended: list[str] = []
    """The assigners behind which nothing will ever come."""
    clocks: dict[str, int] = {}
    """The event clock of each keyed operator before it."""
    greatest: dict[str, dict[str, int]] = {}
    """The greatest timestamp of each split so far, where the rule for watermarks must know it."""
    replan: int = 0
    format: int = FORMAT

    @property
    def ranges(self) -> list[PlannedRange]:
        return sorted((r for task in self.tasks for r in task), key=lambda r: r.ordinal)


class ShardCommit(msgspec.Struct, frozen=True):
    """The winning attempt of a shard: its version, the host that has it, and who ran it."""

    sealed: Sealed
    host: str
    executor: str
    worker: str = ""
    sent: dict[str, int] = {}
    """A digest of what it sent to later stages, by edge; that of its changes to state is in `sealed`."""
    came: dict[str, int] = {}
    """And of what came to it: where a replay differs, it tells whether the fault lies before the exchange."""


class AnswerPart(msgspec.Struct, frozen=True, array_like=True):
    """The answers to one range's records, or to one shard's: where they stand in their file."""

    upstream: int
    """The ordinal of the range, or the first key group of the shard."""
    offset: int
    size_bytes: int
    crc32: int
    records: int


class AnswerFile(msgspec.Struct, frozen=True):
    """What the calls of one operator answered in one attempt of one stage."""

    path: str
    root: str
    """The uid of the source or keyed operator that the stage starts at."""
    parts: list[AnswerPart]


class Commit(msgspec.Struct, frozen=True):
    """The decision on epoch t: which attempts won, and what they wrote."""

    epoch: int
    generation: int
    shards: dict[str, list[ShardCommit]]
    """By uid of the keyed stage, in the order of shards."""
    sinks: dict[str, list[StagedFile]]
    """By uid of the sink, in the order of tasks."""
    schemas: dict[str, str]
    records_in: int = 0
    records_out: dict[str, int] = {}
    bad_records: dict[str, int] = {}
    published: int = 0
    """Every epoch up to this one was published when this record was made."""
    took_ms: float = 0.0
    marks: dict[str, dict[str, int]] = {}
    """The watermark of each split after it, by uid of the assigner."""
    greatest: dict[str, dict[str, int]] = {}
    """The greatest timestamp of each split so far, where the rule for watermarks must know it."""
    heard: dict[str, list[str]] = {}
    """The splits of which records with a time came to the assigner."""
    clocks: dict[str, int] = {}
    """The event clock of each keyed operator after it."""
    late: dict[str, int] = {}
    """Records that came too late, by uid of the operator."""
    untimed: dict[str, int] = {}
    """Records without a time, by uid of the assigner."""
    unseen: dict[str, int] = {}
    """Records that were in no result when their window was forgotten, by uid of the operator."""
    wake_ms: int | None = None
    """When the next timer on processing time is due."""
    answers: dict[str, list[AnswerFile]] = {}
    """What calls of the outside world answered, by uid of the operator, in the order of tasks."""
    replan: int = 0
    format: int = FORMAT
