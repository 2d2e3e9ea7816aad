"""The decisions of an epoch, as pure functions: how ranges become tasks, and what reports amount to.

offers ── assign ──> plan ── (run) ──> reports ── judge ──> Failed | Again | Lacking | Mixed | Done
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa

from holdfast.data import schemas
from holdfast.engine.program import WANTED, Program, Report
from holdfast.errors import EngineError, HoldfastError, JobLostError, StateLostError, from_facts
from holdfast.io.base import Offer, StagedFile
from holdfast.log.records import AnswerFile, Commit, Plan, PlannedRange, ShardCommit
from holdfast.time.units import MIN_TIME
from holdfast.time.watermarks import Clocks, Marks, copied, merge, reached


def assign(offers: Mapping[str, Offer], tasks: int) -> list[list[PlannedRange]]:
    """The ranges of each source task: the largest first, each to the task with the least to do.

    Ordinals follow the order of sources and of each source's ranges, whatever task a range goes to. There
    is always at least one task, for someone must bring the control records.
    """
    ranges: list[PlannedRange] = []
    for uid, offer in offers.items():
        for piece in offer.ranges:
            ranges.append(PlannedRange(len(ranges), uid, piece))
    count = max(1, min(tasks, len(ranges)))
    loads = [0] * count
    assigned: list[list[PlannedRange]] = [[] for _ in range(count)]
    for planned in sorted(ranges, key=lambda r: (-_weight(r), r.ordinal)):
        least = loads.index(min(loads))
        loads[least] += _weight(planned)
        assigned[least].append(planned)
    return [sorted(task, key=lambda r: r.ordinal) for task in assigned]


def _weight(planned: PlannedRange) -> int:
    piece = planned.piece
    return max(1, piece.records if piece.records >= 0 else piece.end - piece.start)


@dataclasses.dataclass(frozen=True)
class Failed:
    """Something went wrong that running again would not mend."""

    error: HoldfastError


@dataclasses.dataclass(frozen=True)
class Again:
    """Tasks wrote with different schemas, or one lacked what others saw: the epoch must run again with these pinned."""

    schemas: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Lacking:
    """Shards that do not have their committed version: (uid of the stage, shard)."""

    shards: list[tuple[str, int]]
    damaged: dict[tuple[str, int], str] = dataclasses.field(default_factory=dict)
    """What some of them found wrong with their files, where they had them."""


@dataclasses.dataclass(frozen=True)
class Mixed:
    """Shards heard different attempts of one task, whose calls of the outside world may have answered differently.

    Spark runs a task again if its output is lost, and those who had read it go on with what the first attempt sent.
    """

    tasks: list[str]


@dataclasses.dataclass(frozen=True)
class Skipped:
    """Shards that heard of a failure which nobody reports.

    Spark runs a task again if its output is lost. The second attempt may fail where the first did not, for it may be on
    a host that lacks the version; and who carries reports may have gone on with what the first one sent.
    """

    tasks: list[str]


@dataclasses.dataclass(frozen=True)
class Done:
    """All attempts that are needed are there."""

    shards: dict[str, list[ShardCommit]]
    sinks: dict[str, list[StagedFile]]
    schemas: dict[str, str]
    records_in: int
    records_out: dict[str, int]
    bad: dict[str, int]
    marks: Marks = dataclasses.field(default_factory=dict)
    """The watermarks that were seen."""
    greatest: Marks = dataclasses.field(default_factory=dict)
    clocks: dict[str, int] = dataclasses.field(default_factory=dict)
    late: dict[str, int] = dataclasses.field(default_factory=dict)
    untimed: dict[str, int] = dataclasses.field(default_factory=dict)
    unseen: dict[str, int] = dataclasses.field(default_factory=dict)
    wake_ms: int | None = None
    answers: dict[str, list[AnswerFile]] = dataclasses.field(default_factory=dict)


Outcome = Failed | Again | Lacking | Skipped | Mixed | Done


def judge(
    program: Program, source_tasks: int, pinned: Mapping[str, str], reports: Sequence[Report]
) -> Outcome:
    """What an epoch's reports amount to."""
    expected = source_tasks + len(program.stages.keyed) * program.parallelism
    by_task = {r.task: r for r in reports}
    if len(by_task) != len(reports) or len(reports) != expected:
        return Failed(EngineError(f"{len(reports)} of {expected} tasks reported: {sorted(by_task)}."))
    for report in sorted(reports, key=lambda r: r.task):
        if report.error is not None:
            return _unsettled(report.error, pinned, reports) or Failed(from_facts(report.error))
    lacking = sorted((r.stage, r.shard) for r in reports if r.lacking)
    if lacking:
        return Lacking(lacking, {(r.stage, r.shard): r.damaged for r in reports if r.damaged})
    skipped = sorted(r.task for r in reports if r.skipped)
    if skipped:
        return Skipped(skipped)
    try:
        settled, again = _settle(pinned, reports)
    except HoldfastError as error:
        return Failed(error)
    if again:
        return Again(settled)
    mixed = _mixed(reports)
    if mixed:
        return Mixed(mixed)
    return _done(program, settled, reports)


_OF_RECORDS = ("UserCodeError", "CallError", "SchemaError")
"""Errors that may have to do with what a record is like."""


def _unsettled(
    error: Mapping[str, str | None], pinned: Mapping[str, str], reports: Sequence[Report]
) -> Again | None:
    """Where a task may have failed for want of a schema, or of a field, that another has seen in the same run."""
    if error.get("type") not in _OF_RECORDS:
        return None
    wanted = (error.get(WANTED) or "").split("\n")
    shown = {edge for report in reports for edge in report.schemas}
    try:
        settled, differs = _settle(pinned, reports)
    except HoldfastError:
        return None
    known_by_now = any(edge in shown and edge not in pinned for edge in wanted)
    return Again(settled) if differs or known_by_now else None


def _settle(pinned: Mapping[str, str], reports: Sequence[Report]) -> tuple[dict[str, str], bool]:
    seen: dict[str, dict[str, None]] = {}
    for report in sorted(reports, key=lambda r: r.task):
        for edge, texts in report.schemas.items():
            seen.setdefault(edge, {}).update(dict.fromkeys(texts))
    settled, again = dict(pinned), False
    for edge, found in seen.items():
        if list(found) == [pinned.get(edge)]:
            continue
        before = schemas.from_text(pinned[edge]) if edge in pinned else None
        uid = edge.split("<")[0]
        schema, differs = schemas.settle(before, [schemas.from_text(t) for t in found], uid)
        if schema is not None:
            settled[edge] = schemas.to_text(schema)
        again = again or differs
    return settled, again


def _mixed(reports: Sequence[Report]) -> list[str]:
    """The tasks of which answers of more than one attempt are in what was sealed, sent or staged."""
    found: dict[str, set[str]] = {r.task: {r.attempt} for r in reports if r.answers}
    for report in reports:
        for task, attempts in report.answered.items():
            found.setdefault(task, set()).update(attempts)
    return sorted(task for task, attempts in found.items() if len(attempts) > 1)


def _done(program: Program, settled: dict[str, str], reports: Sequence[Report]) -> Outcome:
    shards: dict[str, list[ShardCommit]] = {}
    sinks: dict[str, list[StagedFile]] = {}
    marks: Marks = {}
    greatest: Marks = {}
    clocks: dict[str, int] = {}
    answers: dict[str, list[AnswerFile]] = {}
    for report in sorted(reports, key=lambda r: (r.stage != "", r.stage, r.shard, _number(r.task))):
        if report.stage:
            assert report.sealed is not None
            shards.setdefault(report.stage, []).append(
                ShardCommit(
                    report.sealed, report.host, report.executor, report.worker, report.sent, report.came
                )
            )
        for uid, files in report.sinks.items():
            sinks.setdefault(uid, []).extend(files)
        for uid, found in report.answers.items():
            answers.setdefault(uid, []).extend(found)
        merge(marks, report.marks)
        merge(greatest, report.greatest)
        if report.clock is not None and report.clock > MIN_TIME:
            clocks[report.stage] = report.clock
    return Done(
        shards=shards,
        sinks=sinks,
        schemas=settled,
        records_in=sum(r.records_in for r in reports if not r.stage),
        records_out=_added(r.records_out for r in reports),
        bad=_added(r.bad for r in reports),
        marks=marks,
        greatest=greatest,
        clocks=clocks,
        late=_added(r.late for r in reports),
        untimed=_added(r.untimed for r in reports),
        unseen=_added(r.unseen for r in reports),
        wake_ms=min((r.wake_ms for r in reports if r.wake_ms is not None), default=None),
        answers=answers,
    )


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """What several tasks counted, by uid, in an order that does not depend on who reported first."""
    made: dict[str, int] = {}
    for mine in counts:
        for uid, count in mine.items():
            made[uid] = made.get(uid, 0) + count
    return dict(sorted(made.items()))


def _number(task: str) -> int:
    return int(task.rsplit("-", 1)[1])


def decide(plan: Plan, done: Done, generation: int, published: int, took_ms: float) -> Commit:
    """The commit record of an epoch that is done."""
    return Commit(
        epoch=plan.epoch,
        generation=generation,
        shards=done.shards,
        sinks=done.sinks,
        schemas=done.schemas,
        records_in=done.records_in,
        records_out=done.records_out,
        bad_records={u: n for u, n in done.bad.items() if n},
        published=published,
        took_ms=round(took_ms, 3),
        marks=reached(Clocks(plan.marks, plan.idle, plan.ended, plan.given), done.marks),
        greatest=merge(copied(plan.greatest), done.greatest),
        heard={uid: sorted(splits) for uid, splits in sorted(done.marks.items())},
        clocks={**plan.clocks, **done.clocks},
        late=done.late,
        untimed=done.untimed,
        unseen=done.unseen,
        wake_ms=done.wake_ms,
        answers=done.answers,
        replan=plan.replan,
    )


def stamps(commit: Commit | None) -> dict[str, list[str]]:
    """The committed version of every shard."""
    return (
        {}
        if commit is None
        else {uid: [s.sealed.stamp for s in shards] for uid, shards in commit.shards.items()}
    )


def taken_over(declared: Mapping[str, str], committed: Mapping[str, str]) -> dict[str, str]:
    """The schemas to go on with: those of the last commit, and where the user declares a wider one by now, that.

    Not at the input of a keyed operator, whose state has the types that it has.
    """
    made = {**declared, **committed}
    for uid in (u for u in declared.keys() & committed.keys() if "<" not in u):
        if declared[uid] != committed[uid] and _is_wider(declared[uid], committed[uid]):
            made[uid] = declared[uid]
    return made


def _is_wider(new: str, old: str) -> bool:
    wide = schemas.from_text(new)
    try:
        return bool(wide.equals(schemas.unify([wide, schemas.from_text(old)])))
    except HoldfastError:
        return False


def texts(known: Mapping[str, pa.Schema]) -> dict[str, str]:
    """Schemas as a plan holds them."""
    return {edge: schemas.to_text(schema) for edge, schema in known.items()}


def computed_s(reports: Sequence[Report]) -> float:
    """How long tasks computed, one stage after the other: the slowest of each."""
    slowest: dict[str, float] = {}
    for report in reports:
        slowest[report.stage] = max(slowest.get(report.stage, 0.0), report.took_ms)
    return sum(slowest.values()) / 1e3


def lost_again(epoch: int, lacking: Lacking, times: int) -> StateLostError:
    """The error of an epoch that found state missing again and again."""
    (uid, shard), why = next(iter(lacking.damaged.items()), (lacking.shards[0], "it was not there"))
    return StateLostError(
        f"Epoch {epoch} found state missing or damaged {times} times, each time after it had been rebuilt.",
        uid=uid,
        remedy="Look at the disks of the executors' hosts: what is written there does not stay. Nothing was committed; "
        "start again.",
        detail=f"  the last time, shard {shard}: {why}",
    )


def torn_again(epoch: int, torn: Mixed | Skipped, times: int) -> JobLostError:
    """The error of an epoch that lost output again and again."""
    return JobLostError(
        f"Epoch {epoch} lost output on its way {times} times.",
        remedy="Look at the executors: something ends them again and again. Nothing was committed; start again.",
        detail=f"  the last time, {what_tore(torn)}",
    )


def what_tore(torn: Mixed | Skipped) -> str:
    """What was wrong with the reports, in words."""
    if isinstance(torn, Skipped):
        return f"{', '.join(torn.tasks)} heard of a failure whose report was lost"
    return f"answers of two attempts of {', '.join(torn.tasks)} are mixed"
