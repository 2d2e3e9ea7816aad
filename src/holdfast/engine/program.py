"""What runs on executors, as data: the pipeline's stages with the user's functions, and the epoch's header.

A program is pickled once a run and kept by every worker under its digest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa

from holdfast.data import schemas
from holdfast.errors import SchemaError
from holdfast.io.base import StagedFile
from holdfast.log.records import AnswerFile, PlannedRange
from holdfast.plan import graph as g
from holdfast.plan.stages import Stage, Stages
from holdfast.state.shard import Sealed
from holdfast.time.watermarks import CLOCK_TIME, ByClock, Clocks, Marks

Part = dict[str, list[int]]
"""Some shards: their numbers by uid of their stage."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A pipeline as the engine runs it."""

    name: str
    home: str
    """The folder of this pipeline's directory below a state root: others of its name may use the same root."""
    stages: Stages
    parallelism: int
    key_groups: int
    backend: str
    staging: str
    state_root: str
    heap_limit_bytes: int
    rocksdb_cache_bytes: int
    redact: bool
    checkpoint_url: str = ""
    storage: dict[str, str] = dataclasses.field(default_factory=dict)
    answers: str = ""
    """The folder with what calls of the outside world answered; all hosts see it."""

    def lane(self, stage: Stage | None) -> list[Stage]:
        """The keyed stages fed by a keyed stage, or by the source tasks (None), in order of partitions."""
        if stage is not None:
            return self.stages.fed_by(stage)
        fed = {s.id: s for source in self.stages.sources for s in self.stages.fed_by(source)}
        return [s for s in self.stages.keyed if s.id in fed]

    def partitions(self, stage: Stage | None) -> int:
        """How many shards a stage's (or the source tasks') exchange leads to."""
        return len(self.lane(stage)) * self.parallelism

    def first_partition(self, stage: Stage | None, target: int) -> int:
        """Where the shards of one fed stage start among those partitions."""
        return [s.root for s in self.lane(stage)].index(target) * self.parallelism

    def feeders(self, stage: Stage) -> list[Stage | None]:
        """Where a keyed stage's records come from: None stands for the source tasks."""
        feeding = self.stages.feeding(stage)
        found: list[Stage | None] = [None] if any(s.reads for s in feeding) else []
        return found + [s for s in feeding if not s.reads]

    def used(self, stage: Stage | None, only: Part | None = None) -> list[int]:
        """The partitions of a stage's (or the source tasks') exchange that take part in a job."""
        found = []
        for place, fed in enumerate(self.lane(stage)):
            shards = range(self.parallelism) if only is None else only.get(self.uid(fed), [])
            found += [place * self.parallelism + shard for shard in shards]
        return found

    def terminal(self, stage: Stage | None, only: Part | None = None) -> bool:
        """Whether tasks of a stage are the last of the job, so that their reports reach the driver directly."""
        return not self.used(stage, only)

    def channels(self, stage: Stage, source_tasks: int, only: Part | None = None) -> int:
        """How many tasks speak to each shard of a stage."""
        count = 0
        for feeder in self.feeders(stage):
            if feeder is None:
                count += source_tasks
            else:
                count += self.parallelism if only is None else len(only.get(self.uid(feeder), []))
        return count

    def uid(self, stage: Stage) -> str:
        return self.stages.node(stage.root).uid


class Replayed(msgspec.Struct, frozen=True):
    """What tasks know of an epoch that is applied again: what it led to the first time."""

    first: bool
    """Whether it is the first of its job: shards start from the versions in the header."""
    last: bool
    """Whether it is the last of its job: shards become the versions that were committed."""
    digests: dict[str, list[int]]
    sent: dict[str, list[dict[str, int]]]
    came: dict[str, list[dict[str, int]]]
    stamps: dict[str, list[str]]
    clocks: dict[str, int]
    """The event clock of each keyed operator after the epoch."""
    scratch: dict[str, list[int]]
    """Shards that have their version and take part only to feed others: they work on copies."""
    strict: bool


class Header(msgspec.Struct, frozen=True):
    """What every task of an epoch knows: fixed by the plan and by what was committed."""

    epoch: int
    generation: int
    now_ms: int
    source_tasks: int
    stamps: dict[str, list[str]]
    """The committed version of each shard, by uid of its stage."""
    schemas: dict[str, str]
    attempt: str = ""
    """What sets this run of the epoch apart from an earlier one."""
    barrier: int = 0
    """The number of the checkpoint under way; 0: none."""
    keeping: dict[str, list[str]] = {}
    """The versions of that checkpoint, which hosts must keep until it is through."""
    only: Part | None = None
    """The shards that take part, by uid of their stage; None: all of them."""
    replayed: Replayed | None = None
    marks: Marks = {}
    idle: dict[str, list[str]] = {}
    ended: list[str] = []
    given: Marks = {}
    clocks: dict[str, int] = {}
    """Event time before this epoch, as in its plan."""
    greatest: Marks = {}
    """The greatest timestamps so far, of assigners whose rule must know them."""
    answers: dict[str, list[AnswerFile]] | None = None
    """What calls answered when this epoch was run and committed; None: they are made."""

    @property
    def start(self) -> Clocks:
        """Event time before this epoch."""
        return Clocks(self.marks, self.idle, self.ended, self.given, self.clocks)


class SourceTask(msgspec.Struct, frozen=True):
    """The input of a source task."""

    number: int
    header: bytes
    ranges: list[PlannedRange]


WANTED = "wanted"
"""In the facts of an error: edges whose schema would have helped, one a line."""


class WantedError(SchemaError):
    """A task lacks schemas that nobody knew before this epoch. Where others saw them in it, it is run again."""

    def __init__(self, message: str, node: g.Node, edges: Sequence[str], remedy: str) -> None:
        super().__init__(message, uid=node.uid, where=node.where, remedy=remedy)
        self._edges = edges

    def facts(self) -> dict[str, str | None]:
        return {**super().facts(), "type": "SchemaError", WANTED: "\n".join(self._edges)}


class Report(msgspec.Struct):
    """What an attempt has to say to the driver. Nothing in it counts before the commit record lists it."""

    task: str
    epoch: int = 0
    stage: str = ""
    shard: int = -1
    attempt: str = ""
    records_in: int = 0
    records_out: dict[str, int] = {}
    bad: dict[str, int] = {}
    sinks: dict[str, list[StagedFile]] = {}
    sealed: Sealed | None = None
    sent: dict[str, int] = {}
    """A digest of what a shard sent to later stages, by edge."""
    came: dict[str, int] = {}
    """And of what came to it."""
    marks: Marks = {}
    """The watermarks that its own chain has seen."""
    greatest: Marks = {}
    """The greatest timestamps so far, of assigners whose rule must know them."""
    clock: int | None = None
    """A shard's event clock after the epoch."""
    late: dict[str, int] = {}
    untimed: dict[str, int] = {}
    """Records without a time, by uid of the assigner."""
    unseen: dict[str, int] = {}
    """Records that were in no result when their window was forgotten, by uid of the operator."""
    wake_ms: int | None = None
    """When the next timer on processing time is due."""
    answers: dict[str, list[AnswerFile]] = {}
    answered: dict[str, list[str]] = {}
    """Whose answers are in it: attempts by task, its own and those further up."""
    diverged: str = ""
    """What a replay did other than the first run, where that is only worth a warning."""
    lacking: bool = False
    damaged: str = ""
    """What was found wrong with the files of a version, where that is why it is lacking."""
    skipped: bool = False
    """Nothing was applied because something upstream failed."""
    schemas: dict[str, list[str]] = {}
    error: dict[str, Any] | None = None
    host: str = ""
    executor: str = ""
    worker: str = ""
    took_ms: float = 0.0
    reloads: int = 0
    rss_bytes: int = 0


_READ: dict[str, pa.Schema] = {}


def read_schemas(texts: dict[str, str]) -> dict[str, pa.Schema]:
    """Schemas from a header, parsed once a worker."""
    if len(_READ) > 1000:
        _READ.clear()
    for text in texts.values():
        if text not in _READ:
            _READ[text] = schemas.from_text(text)
    return {edge: _READ[text] for edge, text in texts.items()}


def declared_schemas(stages: Stages) -> dict[str, pa.Schema]:
    """The schemas that are known before anything runs, by edge: of sources, and where the user declared them."""
    known: dict[str, pa.Schema] = {}
    for exchange in stages.exchanges:
        found = output_schema(stages.graph, exchange.node, exchange.tag)
        target = stages.node(exchange.target)
        edge = f"{target.uid}<{exchange.order}"
        if target.kind == g.REDUCE:
            edge, found = f"{edge}#partial", target.schema or found
        if found is not None:
            known[edge] = found
    for node in stages.graph.of_kind(g.SINK, g.MAP_BATCHES):
        declared = node.schema if node.kind == g.SINK else None
        found = declared or _common(stages.graph, node)
        if found is not None:
            known[node.uid] = found
    for node in stages.graph.of_kind(g.ASYNC_MAP):
        if node.schema is not None:
            known[node.uid] = node.schema
    return known


def output_schema(graph: g.Graph, node: int, tag: str) -> pa.Schema | None:
    """The schema of an output, where source or user declare it."""
    from holdfast.io.base import DEAD_LETTER, DEAD_LETTER_SCHEMA

    made = graph.nodes[node]
    if tag == DEAD_LETTER and made.kind in (g.SOURCE, g.ASYNC_MAP):
        return DEAD_LETTER_SCHEMA
    if tag != g.MAIN:
        return None
    if made.kind in (g.FILTER, g.EVENT_TIME):
        found = _common(graph, made)
        stamped = made.kind == g.EVENT_TIME and isinstance(made.body.watermarks, ByClock)
        return (
            found.append(pa.field(made.body.column, CLOCK_TIME)) if stamped and found is not None else found
        )
    return made.schema


def _common(graph: g.Graph, node: g.Node) -> pa.Schema | None:
    found = [output_schema(graph, i.node, i.tag) for i in node.inputs]
    first = found[0]
    return first if first is not None and all(f is not None and f.equals(first) for f in found) else None
