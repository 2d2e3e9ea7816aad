"""For users' tests: a harness for one KeyedProcess, and a runner for whole pipelines. No Spark in either.

The runner executes the same plans, tasks and rules as the engine, in this process, and is the oracle that
the engine's own tests compare Spark with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from holdfast.config import Settings
from holdfast.data.rows import copy_value, to_rows
from holdfast.engine.build import build_program, build_stages
from holdfast.engine.epoch import Again, Done, Failed, Lacking, assign, decide, judge, stamps, texts
from holdfast.engine.keyed import Held, ProcessOperator
from holdfast.engine.local import LocalRunner
from holdfast.engine.program import Header, declared_schemas
from holdfast.engine.timers import Timers
from holdfast.engine.timing import has_risen, is_due, must_wait, offered, plan_time, taken_up
from holdfast.errors import EngineError
from holdfast.functions import Context, KeyedProcess
from holdfast.io.base import Decided, Limit, Offer, Sink, SinkWriter, TableWriter, Target, staged_table
from holdfast.io.contract import check_sink, check_source
from holdfast.log.journal import Journal
from holdfast.log.records import AnswerFile, Commit, Plan
from holdfast.plan import graph as g
from holdfast.plan.stages import Stages
from holdfast.plan.times import assigners
from holdfast.state.backends import open_state
from holdfast.state.inspect import read_state, shard_tables
from holdfast.state.shard import EMPTY, Place
from holdfast.state.versions import Folder
from holdfast.time.units import MIN_TIME

if TYPE_CHECKING:
    from holdfast.pipeline import Pipeline

__all__ = ["Harness", "Result", "check_sink", "check_source", "run"]

FIRST_MS = 1_700_000_000_000
"""The clock of a runner's first epoch, unless the caller says otherwise."""


class Harness:
    """One `KeyedProcess`, fed record by record; each call is an epoch of its own.

    >>> import holdfast as hf
    >>> class Count(hf.KeyedProcess):
    ...     n = hf.ValueState(int, default=0)
    ...
    ...     def process(self, key, record, ctx):
    ...         self.n.value += 1
    ...         yield {"n": self.n.value}
    >>> harness = Harness(Count())
    >>> harness.process("a", {}), harness.process("a", {})
    ([{'n': 1}], [{'n': 2}])
    >>> harness.state("n")
    {'a': 2}
    """

    def __init__(self, function: KeyedProcess, *, backend: str = "heap", now_ms: int = FIRST_MS) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-harness-")
        self._node = g.Node(
            0, g.PROCESS, type(function).__name__, function, tags=(g.MAIN, *function.side_outputs)
        )
        self._operator = ProcessOperator(self._node, redact=False)
        place = Place(self._node.uid, 0, self._folder.name, 1)
        self._state = open_state(backend, place, self._operator.specs(None) or [])
        self._stamp, self._epoch = EMPTY, 0
        self._watermark = MIN_TIME
        self.now_ms = now_ms
        self.side: dict[str, list[dict[str, Any]]] = {t: [] for t in function.side_outputs}

    def process(
        self, key: Any, *records: dict[str, Any], at_ms: int | None = None, side: int = 0
    ) -> list[dict[str, Any]]:
        """What the function emits for these records of one key, and for timers that are due then.

        Args:
            at_ms: their event time.
            side: 0 or 1, for a function of two inputs.
        """
        parts = key if isinstance(key, tuple) else (key,)
        self._state.key_types = [pa.array([p]).type for p in parts]
        return self._run([key] * len(records), [copy_value(r) for r in records], at_ms, side)

    def advance(self, milliseconds: int) -> list[dict[str, Any]]:
        """Let the epoch's clock go on: states with a TTL expire, and timers on processing time fire."""
        self.now_ms += milliseconds
        return self._run([], [], None, 0)

    def advance_watermark(self, to_ms: int) -> list[dict[str, Any]]:
        """Let event time go on: no record at or below `to_ms` is still to come. What timers emit."""
        self._watermark = max(self._watermark, to_ms * 1000 + 999)
        return self._run([], [], None, 0)

    def _run(self, keys: list[Any], records: list[Any], at_ms: int | None, side: int) -> list[dict[str, Any]]:
        operator, state = self._operator, self._state
        self._epoch += 1
        assert state.begin(self._stamp, self.now_ms)
        context = Context(self._node.uid, self._epoch, self.now_ms, watermark=self._watermark)
        timers = Timers(state) if operator.timed else None
        context._timers = timers
        held = Held()
        times: list[int | None] | None = None if at_ms is None else [at_ms * 1000] * len(keys)
        groups = np.zeros(len(keys), dtype=np.uint16)
        if keys:
            operator.run(keys, records, groups, state, context, held, times, operator.takes[side])
        if timers is not None and state.key_types:
            operator.fire(timers, state, context, held, self._watermark)
        self._stamp = state.seal(f"{self._epoch:08d}-0", self._epoch, self.now_ms).stamp
        out, sides = held.by_group(self._node.tags)
        for tag, rows in sides.items():
            self.side[tag] += rows
        return out

    def state(self, name: str) -> dict[Any, Any]:
        """A state as a dict: by key, and for maps and lists by key and inner key or place."""
        if not self._stamp:
            return {}
        tables = dict(shard_tables(Folder(Path(self._folder.name)), self._stamp, self._node.uid, 0))
        return _as_dict(tables[name]) if name in tables else {}


def _as_dict(table: pa.Table) -> dict[Any, Any]:
    rows = to_rows(table)
    keys = [n for n in table.schema.names if n != "value"]
    return {(row[keys[0]] if len(keys) == 1 else tuple(row[k] for k in keys)): row["value"] for row in rows}


class _Captured(Sink):
    """Stands where a sink of the user's was; what is published stays here."""

    def __init__(self) -> None:
        self.tables: dict[int, pa.Table] = {}

    def writer(self, target: Target) -> SinkWriter:
        return TableWriter(target)

    def publish(self, decided: Decided) -> None:
        table = staged_table(decided)
        if table is not None:
            self.tables[decided.epoch] = table


@dataclasses.dataclass
class Result:
    """What a run of the in-process runner left behind."""

    plans: list[Plan]
    commits: list[Commit]
    _captured: dict[str, _Captured]
    _folder: Path
    _name: str

    @property
    def epochs(self) -> int:
        """How many epochs were run."""
        return len(self.commits)

    def rows(self, uid: str) -> list[dict[str, Any]]:
        """Everything that was written to a sink, in order."""
        tables = self._captured[uid].tables
        return [row for epoch in sorted(tables) for row in to_rows(tables[epoch])]

    def table(self, uid: str) -> pa.Table | None:
        """Everything that was written to a sink, as one table; None where nothing was."""
        tables = self._captured[uid].tables
        made = [tables[e] for e in sorted(tables)]
        return pa.concat_tables(made, promote_options="permissive") if made else None

    def state(self, uid: str) -> dict[str, pa.Table]:
        """The stored state of an operator after the last epoch, as tables."""
        return read_state(self._folder / "state", self._name, self.commits[-1], uid) if self.commits else {}


def run(
    pipeline: Pipeline,
    *,
    epochs: int = 10_000,
    parallelism: int = 2,
    backend: str = "heap",
    max_records: int = 500_000,
    key_groups: int = 128,
    source_tasks: int = 2,
    now_ms: int = FIRST_MS,
    step_ms: int = 1000,
    linger_ms: int = 0,
    plans: Sequence[Plan] | None = None,
    answers: str | Path | None = None,
    capture: bool = True,
    directory: str | Path | None = None,
) -> Result:
    """Run a pipeline in this process until its sources are exhausted or have nothing new.

    Args:
        plans: recorded plans to follow exactly, instead of asking the sources.
        answers: the directory of the run that recorded them: what its `async_map` calls answered is read from there,
            and no call is made.
        capture: keep what is written here, for `Result.rows`, and leave the user's sinks alone.
        now_ms: the clock of the first epoch; each further one is `step_ms` later.
        linger_ms: for so long the clock goes on when there is nothing more to read: timers on processing time
            fire, and splits become idle.
    """
    settings = Settings(backend=backend, key_groups=key_groups, max_records=max_records)
    folder = Path(directory or tempfile.mkdtemp(prefix="holdfast-run-"))
    stages, captured = _with_captured(build_stages(pipeline)) if capture else (build_stages(pipeline), {})
    program = build_program(stages, settings, parallelism, str(folder))
    journal = None if answers is None else Journal.at(answers)
    if answers is not None:
        program = dataclasses.replace(program, answers=f"{answers}/answers")
    runner = LocalRunner(program)
    known = texts(declared_schemas(stages))
    made: list[Plan] = []
    commits: list[Commit] = []
    with contextlib.closing(runner):
        clock = _Clock(now_ms, step_ms, linger_ms)
        for plan in plans or _ask(stages, known, epochs, max_records, source_tasks, clock, commits):
            pinned = {**known, **(commits[-1].schemas if commits else {})}
            told = None if journal is None else _answers(journal, plan.epoch)
            commit = _run_epoch(program, runner, plan, pinned, commits, told)
            made.append(plan)
            commits.append(commit)
            for node in stages.graph.of_kind(g.SINK):
                files = commit.sinks.get(node.uid, [])
                node.body.publish(Decided(node.uid, plan.epoch, 1, files, program.staging))
    if directory is None:
        import atexit

        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Result(made, commits, captured, folder, program.name)


def _answers(journal: Journal, epoch: int) -> dict[str, list[AnswerFile]]:
    """What calls answered in an epoch of another run."""
    commit = journal.commit(epoch)
    if commit is None:
        raise EngineError(
            f"The log lacks epoch {epoch}, so what its calls answered is not known.",
            remedy="Run with trim_log = false.",
        )
    return commit.answers


@dataclasses.dataclass(frozen=True)
class _Clock:
    first_ms: int
    step_ms: int
    linger_ms: int


def _ask(
    stages: Stages,
    known: dict[str, str],
    epochs: int,
    max_records: int,
    tasks: int,
    clock: _Clock,
    commits: list[Commit],
) -> Iterator[Plan]:
    positions: dict[str, Any] = {}
    sources = {n.uid: n.body for n in stages.graph.of_kind(g.SOURCE)}
    timers = assigners(stages)
    before: tuple[Plan, Commit] | None = None
    now, epoch, ends_ms = clock.first_ms, 1, None

    def ask(uid: str, records: int) -> Offer:
        offer: Offer = sources[uid].plan(positions.get(uid), Limit(records, tasks, now))
        return offer

    while epoch <= epochs:
        offers, held = offered(ask, sources, max_records, must_wait(timers, before), drain=True)
        timing = plan_time(timers, sources, offers, before, now, held)
        offers = taken_up(offers, held, positions)
        exhausted = all(o.exhausted for o in offers.values())
        nothing = not any(o.ranges for o in offers.values())
        # What a source says of time alone is worth one epoch after records, not one for ever.
        told = has_risen(timing, before) and before is not None and bool(before[0].ranges)
        if nothing and not told and not is_due(timing, before, now) and (exhausted or epoch > 1):
            ends_ms = now + clock.linger_ms if ends_ms is None else ends_ms
            if now >= ends_ms:
                return
            now += clock.step_ms
            continue
        positions = {uid: o.position for uid, o in offers.items()}
        plan = Plan(
            epoch,
            1,
            now,
            assign(offers, tasks),
            positions,
            dict(commits[-1].schemas) if commits else known,
            [uid for uid, o in offers.items() if o.exhausted],
            **timing.fields(),
        )
        yield plan
        before = plan, commits[-1]
        now, epoch = now + clock.step_ms, epoch + 1


def _run_epoch(
    program: Any,
    runner: LocalRunner,
    plan: Plan,
    pinned: dict[str, str],
    commits: list[Commit],
    answers: dict[str, list[AnswerFile]] | None,
) -> Commit:
    before = commits[-1] if commits else None
    for attempt in range(4):
        header = Header(
            plan.epoch,
            1,
            plan.now_ms,
            len(plan.tasks),
            stamps(before),
            pinned,
            f"r{attempt}" if attempt else "",
            marks=plan.marks,
            idle=plan.idle,
            ended=plan.ended,
            given=plan.given,
            clocks=plan.clocks,
            greatest=plan.greatest,
            answers=answers,
        )
        outcome = judge(program, len(plan.tasks), pinned, runner.run(plan, header))
        if isinstance(outcome, Failed):
            raise outcome.error
        if isinstance(outcome, Lacking):
            raise EngineError(f"Shards lost their state in the in-process runner: {outcome.shards}.")
        if isinstance(outcome, Done):
            return decide(plan, outcome, 1, plan.epoch - 1, 0.0)
        assert isinstance(outcome, Again)
        pinned = outcome.schemas
    raise EngineError(f"The schemas of epoch {plan.epoch} don't settle.")


def _with_captured(stages: Stages) -> tuple[Stages, dict[str, _Captured]]:
    captured: dict[str, _Captured] = {}
    nodes = []
    for node in stages.graph.nodes:
        if node.kind == g.SINK:
            captured[node.uid] = _Captured()
            node = dataclasses.replace(node, body=captured[node.uid])
        nodes.append(node)
    return dataclasses.replace(stages, graph=g.Graph(stages.graph.name, tuple(nodes))), captured
