"""What an application left behind against the in-process runner fed with its plans, and against its sources.

What calls of the outside world answered is read, as in a replay: the world may say something else by now.

::

    sinks    every row of every folder, as multisets: lost, doubled
    state    every shard's tables at the last commit, and the digests of every commit: different_states
    plans    every split read from its beginning without a gap or an overlap, and as many records as the runner
             read: what is missing counts as lost, what is read twice as doubled

Exactly once means that all of it is nothing.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast import testing
from holdfast.data.rows import to_rows
from holdfast.errors import EngineError, HoldfastError
from holdfast.faults.standins import into_folders
from holdfast.io.base import Limit, Source
from holdfast.io.place import Part, parse_part
from holdfast.log.journal import Journal
from holdfast.log.records import Commit, Plan
from holdfast.pipeline import Pipeline
from holdfast.plan import graph as g
from holdfast.state.inspect import shard_tables
from holdfast.state.versions import Folder

_SHOWN = 5
Lane = tuple[str, str]
"""What a source reads in order: its uid, and a split, or a file where it names one."""
Load = Callable[[], Pipeline]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How far an application is from one to which nothing happened, over the same plans."""

    lost: int = 0
    doubled: int = 0
    different_states: int = 0
    epochs: int = 0
    records: int = 0
    findings: tuple[str, ...] = ()
    """What differs, a sentence each."""

    @property
    def exact(self) -> bool:
        """Whether nothing differs at all."""
        return not (self.lost or self.doubled or self.different_states or self.findings)

    def __add__(self, other: Verdict) -> Verdict:
        return Verdict(
            self.lost + other.lost,
            self.doubled + other.doubled,
            self.different_states + other.different_states,
            self.epochs + other.epochs,
            self.records + other.records,
            self.findings + other.findings,
        )


def compare(load: Load, directory: Path, out: Path, scratch: Path) -> Verdict:
    """Judge what a pipeline's directory and its output hold.

    Args:
        load: makes the pipeline afresh.
        out: one Parquet folder for each sink, named by its uid.
        scratch: where the runner works and writes; it is emptied first.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    journal = Journal.at(directory)
    identity = journal.identity()
    plans, commits = history(journal)
    if identity is None or not commits:
        raise EngineError(f"{directory} holds no decided epoch, so there is nothing to compare.")
    pipeline = load()
    expected = testing.run(
        into_folders(pipeline, scratch / "out"),
        plans=plans,
        answers=directory,
        parallelism=identity.parallelism,
        backend=identity.backend,
        key_groups=identity.key_groups,
        capture=False,
        directory=scratch / "runner",
    )
    verdict = Verdict(epochs=len(commits), records=sum(c.records_in for c in commits))
    for node in pipeline.graph().of_kind(g.SINK):
        verdict += folders_compared(node.uid, out / node.uid, scratch / "out" / node.uid)
    roots = directory / "state", scratch / "runner" / "state"
    verdict += states_compared((identity.home, identity.name), commits, expected.commits, *roots)
    sources = {n.uid: n.body for n in load().graph().of_kind(g.SOURCE)}
    verdict += plans_compared(plans, beginnings(sources))
    return verdict + counts_compared(commits, expected.commits)


def history(journal: Journal) -> tuple[list[Plan], list[Commit]]:
    """Every decided epoch's plan and commit, from the first on; an error if the log was trimmed."""
    plans, commits = [], []
    for epoch in range(1, journal.last_epoch() + 1):
        plan, commit = journal.plan(epoch), journal.commit(epoch)
        if plan is None or commit is None:
            raise EngineError(
                f"The log lacks epoch {epoch}, so the runner can't repeat what was done.",
                remedy="Run with trim_log = false.",
            )
        plans.append(plan)
        commits.append(commit)
    return plans, commits


# Sinks


def folders_compared(uid: str, got: Path, expected: Path) -> Verdict:
    """Rows as multisets, a few epochs at a time: all of a long run would not fit into memory."""
    ours, theirs = _parts(got), _parts(expected)
    starts = [0, 0]
    verdict = Verdict()
    for last in stretches([*ours, *theirs]):
        ends = [bisect.bisect_right(parts, last, key=lambda p: p.first) for parts in (ours, theirs)]
        tables = [
            [pq.read_table(folder / p.name, partitioning=None) for p in parts[start:end]]
            for folder, parts, start, end in zip((got, expected), (ours, theirs), starts, ends, strict=True)
        ]
        verdict, starts = verdict + rows_compared(uid, *tables), ends
    return Verdict(verdict.lost, verdict.doubled, findings=verdict.findings[:_SHOWN])


def stretches(parts: Iterable[Part]) -> list[int]:
    """The epochs behind which no file reaches: what is up to each can be compared by itself.

    >>> named = ["part-00000000-00000002.m000.x", "part-00000002-00000.x", "part-00000003-00000.x"]
    >>> stretches(p for p in (parse_part(name, "x") for name in named) if p is not None)
    [2, 3]
    """
    found: list[int] = []
    for part in sorted(parts):
        if found and part.first <= found[-1]:
            found[-1] = max(found[-1], part.last)
        else:
            found.append(part.last)
    return found


def rows_compared(uid: str, got: Sequence[pa.Table], expected: Sequence[pa.Table]) -> Verdict:
    """Rows as multisets.

    >>> one, two = pa.table({"n": [1, 2]}), pa.table({"n": [2, 2, 3]})
    >>> verdict = rows_compared("out", [two], [one])
    >>> verdict.lost, verdict.doubled
    (1, 2)
    """
    if _equal(got, expected):
        return Verdict()
    ours, theirs = _counted(got), _counted(expected)
    lost, doubled = theirs - ours, ours - theirs
    findings = [f"[{uid}] {sum(lost.values())} rows are lost, such as {_some(lost)}."] if lost else []
    if doubled:
        findings.append(
            f"[{uid}] {sum(doubled.values())} rows are there too often, such as {_some(doubled)}."
        )
    return Verdict(sum(lost.values()), sum(doubled.values()), findings=tuple(findings))


def _equal(got: Sequence[pa.Table], expected: Sequence[pa.Table]) -> bool:
    """The common case, without a Python object for a row."""
    if not got or not expected:
        return not got and not expected
    one, other = (pa.concat_tables(t, promote_options="permissive") for t in (got, expected))
    return bool(one.schema.equals(other.schema) and one.equals(other))


def _counted(tables: Iterable[pa.Table]) -> collections.Counter[str]:
    return collections.Counter(_text(row) for table in tables for row in to_rows(table))


def _text(row: Mapping[str, Any]) -> str:
    return repr(sorted((k, v) for k, v in row.items() if v is not None))


def _some(rows: collections.Counter[str]) -> str:
    return "; ".join(sorted(rows)[:_SHOWN])


def _parts(folder: Path) -> list[Part]:
    """What a reader sees in a folder, in the order of epochs."""
    if not folder.is_dir():
        return []
    visible = [n for n in os.listdir(folder) if n[0] not in "._"]
    parts = [p for p in (parse_part(n, "parquet") for n in visible) if p is not None]
    if len(parts) != len(visible):
        raise EngineError(f"{folder} holds files that are not ours: {sorted(visible)[:_SHOWN]}.")
    return sorted(parts, key=lambda p: (p.first, p.number))


# State


def states_compared(
    homes: tuple[str, str], got: Sequence[Commit], expected: Sequence[Commit], here: Path, theirs_root: Path
) -> Verdict:
    """Shards whose state at the last commit, or whose changes in any epoch, are not the runner's.

    A commit names a host by its state root, where it has one of its own; otherwise `here` is. `homes`: the folders
    of both below their roots.
    """
    findings = []
    for uid, shards in got[-1].shards.items():
        for number, shard in enumerate(shards):
            where = Path(uid) / f"{number:05d}"
            theirs = expected[-1].shards[uid][number]
            why = _first_divergence(uid, number, got, expected)
            try:
                root = shard.host.partition(":")[2]
                ours_root = Path(root) if root else here
                ours = _state(ours_root / homes[0] / where, shard.sealed.stamp, uid, number)
                if ours != _state(theirs_root / homes[1] / where, theirs.sealed.stamp, uid, number):
                    why = why or "its tables differ"
            except HoldfastError as error:
                why = why or error.message
            if why:
                findings.append(f"[{uid}] the state of shard {number} is not the runner's: {why}.")
    return Verdict(different_states=len(findings), findings=tuple(findings))


def _first_divergence(uid: str, shard: int, got: Sequence[Commit], expected: Sequence[Commit]) -> str:
    for ours, theirs in zip(got, expected, strict=True):
        one, other = ours.shards[uid][shard], theirs.shards[uid][shard]
        if (one.sealed.digest, one.sent) != (other.sealed.digest, other.sent):
            return f"epoch {ours.epoch} changed it otherwise"
    return ""


def _state(folder: Path, stamp: str, uid: str, shard: int) -> dict[str, list[str]]:
    if not stamp:
        return {}
    tables = shard_tables(Folder(folder), stamp, uid, shard)
    return {state: sorted(map(_text, to_rows(table))) for state, table in tables if table.num_rows}


# Record ids against the source


def beginnings(sources: Mapping[str, Source]) -> dict[Lane, int]:
    """Where each split of each source begins, as far as its first offers tell.

    A source with a clock begins at its first question and has something of every split only later: so it is asked twice.
    """
    found: dict[Lane, int] = {}
    for uid, source in sources.items():
        for now_ms in (0, 1_000_000):
            for piece in source.plan(None, Limit(1_000_000, 2, now_ms)).ranges:
                lane = _lane(uid, piece.split, piece.info)
                found[lane] = min(piece.start, found.get(lane, piece.start))
    return found


def plans_compared(plans: Sequence[Plan], begins: Mapping[Lane, int]) -> Verdict:
    """Each lane's ranges must follow each other: a gap is lost, an overlap is doubled."""
    position: dict[Lane, int] = dict(begins)
    lost = doubled = 0
    findings = []
    for plan in sorted(plans, key=lambda p: p.epoch):
        for planned in plan.ranges:
            piece = planned.piece
            lane = _lane(planned.source, piece.split, piece.info)
            stood = position.get(lane, piece.start)
            lost, doubled = lost + max(0, piece.start - stood), doubled + max(0, stood - piece.start)
            if piece.start != stood:
                findings.append(
                    f"[{planned.source}] epoch {plan.epoch} reads {lane[1]} from {piece.start}; the one before read to {stood}."
                )
            position[lane] = max(stood, piece.end)
    return Verdict(lost, doubled, findings=tuple(findings[:_SHOWN]))


def _lane(source: str, split: str, info: Mapping[str, Any]) -> Lane:
    return source, str(info.get("path", split))


def counts_compared(got: Sequence[Commit], expected: Sequence[Commit]) -> Verdict:
    """As many records in every epoch as the runner read from the same ranges."""
    lost = doubled = 0
    findings = []
    for ours, theirs in zip(got, expected, strict=True):
        lost += max(0, theirs.records_in - ours.records_in)
        doubled += max(0, ours.records_in - theirs.records_in)
        if ours.records_in != theirs.records_in:
            findings.append(
                f"Epoch {ours.epoch} read {ours.records_in} records, the runner {theirs.records_in}."
            )
    return Verdict(lost, doubled, findings=tuple(findings[:_SHOWN]))
