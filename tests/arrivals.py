"""How records arrive and how a pipeline is run, for Hypothesis to choose; and what the log says of it.

    rows ── order, splits, silences ──> `Arriving` sources ── one life, or two with a loss between ──> `Run`

Rows can't say what is late: that depends on when they came. So a run tells in which order an operator got them and
where its clock stood (`Run.arrived`), and SQL decides by those columns.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
from hypothesis import example
from hypothesis import strategies as st

import holdfast as hf
from holdfast.engine import driver
from holdfast.engine.program import Program
from holdfast.faults.points import reach
from holdfast.io.base import Limit, Offer, Range, Reading, Source
from holdfast.io.memory import MemorySink
from holdfast.log.records import Commit, Plan
from holdfast.state.inspect import read_state
from holdfast.testing import FIRST_MS
from holdfast.time.units import MAX_TIME, MIN_TIME
from tests.drivers import Waiting, live

Row = dict[str, Any]
Steps = list[dict[str, list[Row]]]
"""For each epoch what each split has for it."""

ANY_ORDER = 1_000_000
STEP_MS = 1000


@dataclasses.dataclass(frozen=True)
class Way:
    """One way for records to come, and to be run."""

    seed: int
    splits: int
    per_step: int
    disorder: int
    """So many units of time a record may come after one that is younger."""
    lag: int
    """What the watermark allows for."""
    silent: float
    """How likely a split falls silent, at each step."""
    holds: bool
    """Whether what a silent split would have brought comes when it speaks again; otherwise another brings it."""
    idle_after: str | None
    declares: bool
    """Whether the source says which of its splits are idle."""
    parallelism: int
    backend: str
    dies_in: int | None
    """The epoch whose work is done when the driver dies; None: it lives on."""
    lost: frozenset[int]
    """The shards whose state is gone by then."""
    away_ms: int
    checkpoint: str
    decided: bool = False
    """Whether the epoch in which it dies is decided by then, and not published; otherwise it is done and not decided."""
    behind: bool = False
    """Whether the operator stands behind another keyed stage, which loses the same shards."""
    rule: str = "bounded"
    """How watermarks come about: `bounded` and `periodic` by the greatest time of a split, `punctuated` by some records."""

    @property
    def waits_for_all(self) -> bool:
        """Whether nothing can be late: no split is passed by, and none is more out of order than allowed."""
        return self.idle_after is None and not self.declares and self.disorder <= self.lag


def ways(*, lags: tuple[int, ...] = (0, 9, 200)) -> st.SearchStrategy[Way]:
    """Ways of all kinds."""
    return st.builds(
        Way,
        seed=st.integers(0, 9999),
        splits=st.integers(1, 3),
        per_step=st.sampled_from([3, 6, 50]),
        disorder=st.sampled_from([0, 9, ANY_ORDER]),
        lag=st.sampled_from(lags),
        silent=st.sampled_from([0.0, 0.2, 0.5]),
        holds=st.booleans(),
        idle_after=st.sampled_from([None, "1s", "3s"]),
        declares=st.sampled_from([False, False, True]),
        parallelism=st.sampled_from([1, 2, 4]),
        backend=st.sampled_from(["heap", "heap", "rocksdb"]),
        dies_in=st.sampled_from([None, None, 2, 4]),
        lost=st.frozensets(st.integers(0, 3)),
        away_ms=st.sampled_from([0, 60_000]),
        checkpoint=st.sampled_from(["never", "2 epochs"]),
        decided=st.booleans(),
        behind=st.sampled_from([False, False, True]),
        rule=st.sampled_from(["bounded", "bounded", "periodic", "punctuated"]),
    )


HARD = Way(
    seed=3,
    splits=3,
    per_step=6,
    disorder=9,
    lag=9,
    silent=0.5,
    holds=True,
    idle_after="1s",
    declares=False,
    parallelism=2,
    backend="rocksdb",
    dies_in=3,
    lost=frozenset({0, 1}),
    away_ms=60_000,
    checkpoint="never",
    behind=True,
)
"""All at once, for what must not be left to be drawn: silences, late records, a death that takes all state, RocksDB."""
OTHER_HARD = dataclasses.replace(
    HARD, backend="heap", parallelism=4, checkpoint="2 epochs", dies_in=4, decided=True
)
"""And what that is not: on the heap, from a checkpoint, more shards than are lost, a death between decision and publishing."""


def hard_ways(**given: Any) -> Callable[[Any], Any]:
    """Examples of a test that are always among its draws: what is given, in each hard way."""

    def marked(test: Any) -> Any:
        return example(way=HARD, **given)(example(way=OTHER_HARD, **given)(test))

    return marked


# Arrival


def arranged(rows: Mapping[str, list[Row]], way: Way) -> dict[str, Steps]:
    """What each source has at each step. Steps are the same for all, and at none has nobody anything."""
    rng = random.Random(way.seed)
    order = [(source, row) for source, mine in rows.items() for row in mine]
    rng.shuffle(order)
    spread = {id(row): row["t"] + rng.uniform(0, way.disorder) for _, row in order}
    order.sort(key=lambda one: spread[id(one[1])])
    pairs = {source: [(source, str(n)) for n in range(way.splits)] for source in rows}
    left = dict.fromkeys((pair for mine in pairs.values() for pair in mine), 0)
    held: dict[tuple[str, str], list[Row]] = {pair: [] for pair in left}
    steps: list[dict[tuple[str, str], list[Row]]] = []
    for start in range(0, len(order), way.per_step):
        for pair in left:
            left[pair] = left[pair] - 1 if left[pair] > 0 else rng.randint(1, 5) * (rng.random() < way.silent)
        for source, row in order[start : start + way.per_step]:
            speaking = [p for p in pairs[source] if not left[p]]
            held[rng.choice(pairs[source] if way.holds or not speaking else speaking)].append(row)
        steps.append({pair: held[pair] for pair in left if not left[pair] and held[pair]})
        held.update({pair: [] for pair in steps[-1]})
    steps.append({pair: mine for pair, mine in held.items() if mine})
    return {
        source: [
            {split: found for (of, split), found in step.items() if of == source} for step in steps if step
        ]
        for source in rows
    }


class Arriving(Source):
    """Records that come as they were arranged; the source ends with the last step."""

    def __init__(self, steps: Steps, way: Way, schema: pa.Schema) -> None:
        self._steps, self._way, self._schema = steps, way, schema

    def schema(self) -> pa.Schema:
        return self._schema

    def plan(self, position: Any, limit: Limit) -> Offer:
        here = position or 0
        found = self._steps[here] if here < len(self._steps) else {}
        names = [str(n) for n in range(self._way.splits)]
        ranges = [Range(split, here, here + 1, records=len(rows)) for split, rows in found.items()]
        return Offer(
            ranges,
            here + 1,
            exhausted=here + 1 >= len(self._steps),
            splits=names,
            waiting=[],
            idle=[n for n in names if n not in found] if self._way.declares else [],
        )

    def of(self, piece: Range) -> list[Row]:
        return self._steps[piece.start][piece.split]

    def read(self, piece: Range, reading: Reading) -> Iterator[pa.Table]:
        yield pa.Table.from_pylist(self.of(piece), self._schema)


# Lives


class Died(Exception):
    """The driver is gone."""


class Passing(hf.KeyedProcess):
    """A keyed stage that lets its records pass."""

    def process(self, key: Any, record: Row, ctx: hf.Context) -> Iterator[Row]:
        yield record


class _Clock:
    now_ms = FIRST_MS

    def __call__(self) -> int:
        return self.now_ms


class _Mortal(Waiting):
    """Time goes on by a step an epoch; in one of them it dies when the work is done, before it is decided or right after."""

    def __init__(self, program: Program, clock: _Clock, dies_in: int, decided: bool) -> None:
        super().__init__(program)
        self._clock, self._dies_in, self._decided = clock, dies_in, decided
        self._epoch = 0
        self.home = Path(program.state_root) / program.home

    def run(self, plan: Any, header: Any) -> Any:
        reports = super().run(plan, header)
        if plan.epoch == self._dies_in and not self._decided:
            raise Died
        self._epoch = plan.epoch
        self._clock.now_ms = max(self._clock.now_ms, plan.now_ms + STEP_MS)
        return reports

    def reach(self, point: str) -> None:
        """Its driver has come to a point."""
        if point == "commit.after_record" and self._epoch == self._dies_in:
            raise Died
        reach(point)


@dataclasses.dataclass
class Run:
    """What came of it."""

    sinks: dict[str, MemorySink]
    sources: dict[str, Arriving]
    plans: list[Plan]
    commits: list[Commit]
    left: int
    """How many entries of state the operator has at the end."""
    lacking: int = 0
    """How many shards had to be brought back."""

    def rows(self, uid: str) -> list[Row]:
        return self.sinks[uid].rows()

    def shown(self, uid: str, epoch: int) -> list[Row]:
        """What one epoch wrote."""
        table = self.sinks[uid].table(epoch)
        return [] if table is None else table.to_pylist()

    def arrived(self, source: str) -> list[Row]:
        """Its records in the order in which they came: `i` counts them, `clock` is the operator's as their epoch began."""
        found: list[Row] = []
        for plan in self.plans:
            clock = plan.clocks.get("x", MIN_TIME)
            for one in plan.ranges:
                if one.source == source:
                    for row in self.sources[source].of(one.piece):
                        found.append({**row, "i": len(found), "clock": clock, "epoch": plan.epoch})
        return found

    @property
    def late(self) -> int:
        return sum(commit.late.get("x", 0) for commit in self.commits)


def ran(
    way: Way,
    rows: Mapping[str, list[Row]],
    schema: pa.Schema,
    build: Callable[..., hf.Stream],
    *sides: str,
    unit_s: int = 1,
    merges: bool = False,
) -> Run:
    """Run an operator with uid "x" over streams that are keyed by "k", timed by "at" and have one unit of `t` in `unit_s`.

    A `t` that rises with `at` says in what order rows would come if nothing were in the way. `merges`: whether "x" has
    windows that merge.
    """
    made = hf.Pipeline("arrivals")
    steps = arranged(rows, way)
    sources = {uid: Arriving(steps[uid], way, schema) for uid in rows}
    time: dict[str, Any] = {"unit": "s", "idle_after": way.idle_after, **Rule.of(way, unit_s).told}

    def keyed(uid: str) -> hf.KeyedStream:
        stream = made.read(uid, sources[uid]).event_time("at", **time).key_by("k")
        return stream.process(f"before-{uid}", Passing(), schema=schema).key_by("k") if way.behind else stream

    out = build(*map(keyed, sources))
    sinks = {uid: hf.memory() for uid in ("out", *sides)}
    out.write("out", sinks["out"])
    for side in sides:
        out.side(side).write(side, sinks[side])
    with tempfile.TemporaryDirectory(prefix="holdfast-arrivals-") as name:
        run = _in_two_lives if way.dies_in is not None else _in_one
        found = run(made, way, sinks, sources, Path(name))
    assert sum(p.piece.records for plan in found.plans for p in plan.ranges) == sum(map(len, rows.values()))
    if way.waits_for_all:
        assert found.late == 0
    check_clocks(found, way, unit_s, merges)
    return found


@dataclasses.dataclass(frozen=True)
class Rule:
    """How watermarks come about: what a pipeline is told of it, and what the times of some records of a split lead to."""

    told: dict[str, Any]
    mark_us: Callable[[list[int]], int]

    @staticmethod
    def of(way: Way, unit_s: int) -> Rule:
        lag_s = way.lag * unit_s

        def behind(greatest_ms: int) -> int:
            return greatest_ms - greatest_ms % (3000 * unit_s) - lag_s * 1000 - 1

        def carried(record: Row) -> int | None:
            return (record["at"] - lag_s) * 1000 - 1 if record["at"] // unit_s % 3 == 0 else None

        def punctuated(times: list[int]) -> int:
            marks = [mark for at in times if (mark := carried({"at": at})) is not None]
            return max(marks) * 1000 + 999 if marks else MIN_TIME

        match way.rule:
            case "periodic":
                told = {"watermark": hf.periodic(behind)}
                return Rule(told, lambda times: behind(max(times) * 1000) * 1000 + 999)
            case "punctuated":
                return Rule({"watermark": hf.punctuated(carried)}, punctuated)
        return Rule({"out_of_order": f"{lag_s}s"}, lambda times: (max(times) - lag_s) * 1_000_000 - 1)


def check_clocks(run: Run, way: Way, unit_s: int, merges: bool) -> None:
    """Hold the clock of "x" against the records that were read: the least over all splits that were not idle, never back.

    Where windows merge it is a microsecond behind that. Who is idle is taken from the plans; where all splits of a source
    are, the clock only must not go back.
    """
    rule = Rule.of(way, unit_s)
    found_so_far: dict[tuple[str, str], int] = {}
    clock = MIN_TIME
    for plan, commit in zip(run.plans, run.commits, strict=True):
        heard = {(one.source, one.piece.split) for one in plan.ranges}
        for one in plan.ranges:
            pair = one.source, one.piece.split
            mark = rule.mark_us([row["at"] for row in run.sources[one.source].of(one.piece)])
            found_so_far[pair] = max(mark, found_so_far.get(pair, mark))
        found = commit.clocks.get("x", MIN_TIME)
        if plan.ended:
            assert found == MAX_TIME
            return
        waited = {
            uid: [
                (uid, str(n))
                for n in range(way.splits)
                if f"{uid}/{n}" not in plan.idle.get(f"{uid}.time", ())
            ]
            + [pair for pair in heard if pair[0] == uid]
            for uid in run.sources
        }
        if all(waited.values()):
            least = min(found_so_far.get(pair, MIN_TIME) for pairs in waited.values() for pair in pairs)
            assert found == max(clock, least - (merges and least > MIN_TIME)), f"epoch {plan.epoch}"
        assert found >= clock, f"epoch {plan.epoch}"
        clock = found


def _in_one(
    made: hf.Pipeline, way: Way, sinks: dict[str, MemorySink], sources: dict[str, Arriving], folder: Path
) -> Run:
    result = hf.testing.run(
        made,
        parallelism=way.parallelism,
        backend=way.backend,
        step_ms=STEP_MS,
        capture=False,
        directory=folder,
    )
    left = _left(folder / "state", made.name, result.commits)
    return Run(sinks, sources, result.plans, result.commits, left)


def _in_two_lives(
    made: hf.Pipeline, way: Way, sinks: dict[str, MemorySink], sources: dict[str, Arriving], folder: Path
) -> Run:
    clock = _Clock()
    dies_in = dying = way.dies_in or 0
    runners: list[_Mortal] = []

    def mortal(program: Program) -> _Mortal:
        runners.append(_Mortal(program, clock, dies_in, way.decided))
        return runners[-1]

    def life() -> Any:
        return live(
            made,
            folder,
            runner=mortal,
            clock_ms=clock,
            parallelism=way.parallelism,
            backend=way.backend,
            checkpoint=way.checkpoint,
            checkpoint_on_stop=False,
            trim_log=False,
        )

    died = False
    try:
        with mock.patch.object(driver, "reach", lambda point: runners[0].reach(point) if runners else None):
            first = life()
        assert way.dies_in is None or first.driver.last_epoch < way.dies_in, "it was to die, and lived on"
    except Died:
        died = True
        runners[0].close()  # the state's files are let go of, as by a process that is gone
        for stage in ["x", *(f"before-{uid}" for uid in sources if way.behind)]:
            for shard in way.lost:
                shutil.rmtree(runners[0].home / stage / f"{shard:05d}", ignore_errors=True)
    dies_in = 0
    clock.now_ms += way.away_ms
    second = life()
    runners[-1].close()
    epochs = range(1, second.driver.last_epoch + 1)
    plans, commits = ([read(e) for e in epochs] for read in (second.journal.plan, second.journal.commit))
    assert not died or commits[dying - 1].generation == (1 if way.decided else 2), (
        "it died, and was not followed"
    )
    assert len(commits) <= dying or commits[dying].generation == 2
    left = _left(Path(second.program.state_root), second.program.home, commits)
    lacking = 0 if second.recovery.last is None else second.recovery.last.lacking
    return Run(sinks, sources, plans, commits, left, lacking)


def _left(root: Path, name: str, commits: list[Commit]) -> int:
    """Entries of state after the last epoch: what is stored is what is counted."""
    if not commits:
        return 0
    stored = sum(table.num_rows for table in read_state(root, name, commits[-1], "x").values())
    assert stored == sum(sum(shard.sealed.live.values()) for shard in commits[-1].shards["x"])
    return stored
