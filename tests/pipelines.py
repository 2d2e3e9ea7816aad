"""Pipelines that Hypothesis builds: any graph of the public API over any input, described as plain data.

A `Recipe` can be built as often as wanted, each time with sinks of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import strategies as st

import holdfast as hf

Row = dict[str, Any]

SCHEMA = pa.schema(
    {"id": pa.int64(), "k": pa.int64(), "name": pa.string(), "v": pa.float64(), "n": pa.int64()}
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A pipeline and its input, as data."""

    sources: list[list[Row]]
    per_epoch: int
    splits: int
    before: list[str]
    first: str
    key: str
    between: list[str]
    second: str | None
    parallelism: int
    max_records: int

    def build(self, sinks: dict[str, hf.Sink] | None = None) -> hf.Pipeline:
        """The pipeline; sinks by uid, or such as a captured run replaces."""
        made = _Sinks(sinks)
        p = hf.Pipeline("generated")
        streams = []
        for i, rows in enumerate(self.sources):
            source = hf.records(rows, SCHEMA, splits=self.splits, per_epoch=self.per_epoch)
            streams.append(p.read(f"source{i}", source))
        stream = streams[0].union(*streams[1:]) if len(streams) > 1 else streams[0]
        stream = _steps(stream, self.before, "a", made)
        stream = _keyed(stream, self.key, self.first, "first", made)
        stream = _steps(stream, self.between, "b", made)
        if self.second is not None:
            stream = _keyed(stream, "k" if self.first != "aggregate" else "key2", self.second, "second", made)
        stream.write("end", made["end"])
        return p

    def branched(self) -> list[Row] | None:
        """What the branch before the first exchange must get, by plain Python over all sources; None without one."""
        if "branch" not in self.before:
            return None
        found = [dict(row) for rows in self.sources for row in rows]
        for step in self.before[: self.before.index("branch")]:
            found = [made for row in found for made in _PLAIN[step](row)]
        return [{**row, "branched": True} for row in found]


class _Sinks:
    def __init__(self, given: dict[str, hf.Sink] | None) -> None:
        self._given = given

    def __getitem__(self, uid: str) -> hf.Sink:
        return hf.memory() if self._given is None else self._given[uid]


SINKS = ["end", "a.branch", "b.branch", "first.side", "second.side"]


def _steps(stream: hf.Stream, steps: list[str], uid: str, sinks: _Sinks) -> hf.Stream:
    for step in steps:
        if step == "branch":
            stream.map(lambda r: {**r, "branched": True}).write(f"{uid}.branch", sinks[f"{uid}.branch"])
        else:
            stream = _STEPS[step](stream)
    return stream


def _change(row: Row) -> Row:
    row["n"] = (row.get("n") or 0) + 1
    row["extra"] = None if row["n"] % 3 else f"x{row['n']}"
    return row


async def _answer(row: Row) -> Row:
    """What a service that never changes its mind would say, not always in the order in which it was asked."""
    for _ in range((row["n"] or 0) % 3):
        await asyncio.sleep(0)
    return {**row, "said": (row["n"] or 0) * 3}


def _double(table: pa.Table) -> pa.Table:
    place = table.schema.get_field_index("n")
    return table.set_column(place, "n", pc.multiply(table["n"], 2))


_STEPS: dict[str, Any] = {
    "map": lambda s: s.map(_change),
    "filter": lambda s: s.filter(lambda r: (r["n"] or 0) % 4 != 0),
    "flat_map": lambda s: s.flat_map(lambda r: [r, dict(r, n=7)] if r["k"] % 2 else [r]),
    "map_batches": lambda s: s.map_batches(_double),
    "call": lambda s: s.async_map(_answer, uid=f"call-{len(s._pipeline._nodes)}", capacity=3),
}


_PLAIN: dict[str, Callable[[Row], list[Row]]] = {
    "map": lambda r: [_change(r)],
    "filter": lambda r: [r] if (r["n"] or 0) % 4 != 0 else [],
    "flat_map": lambda r: [r, {**r, "n": 7}] if r["k"] % 2 else [r],
    "map_batches": lambda r: [{**r, "n": None if r["n"] is None else r["n"] * 2}],
    "call": lambda r: [{**r, "said": (r["n"] or 0) * 3}],
}
"""What each step does to a record, without the engine."""


class Everything(hf.KeyedProcess):
    """Uses every kind of state, clears some, and has a side output."""

    total = hf.ValueState(float, default=0.0)
    count = hf.ValueState(int)
    best = hf.ValueState(dict[str, float])
    names = hf.MapState(str, int)
    last = hf.ListState(int)
    recent = hf.ValueState(int, default=0, ttl="3s")
    side_outputs = ("side",)

    def process(self, key: Any, record: Row, ctx: hf.Context) -> Any:
        n = record["n"] or 0
        self.count.value = (self.count.value or 0) + 1
        self.total.value += n * 0.1
        self.recent.value += 1
        self.names[str(n % 5)] = self.names.get(str(n % 5), 0) + 1
        self.last.add(n)
        if len(self.last) > 3:
            self.last.update(list(self.last)[-2:])
        best = self.best.value or {}
        best[str(n % 3)] = float(n)
        self.best.value = best
        if n % 7 == 3:
            self.names.clear()
            self.count.clear()
        if n % 2:
            ctx.emit("side", {"k": n, "n": len(self.names), "random": ctx.random.randint(0, 1000)})
        yield {
            "k": (n or 0) % 10,
            "n": self.count.value,
            "total": self.total.value,
            "names": list(self.names.items()) and [k for k, _ in self.names.items()],
            "last": list(self.last),
            "recent": self.recent.value,
            "id": str(ctx.uuid()),
        }


class Longest(hf.Aggregate):
    """The user's own aggregate."""

    accumulator = list[int]
    result_type = int

    def create(self) -> list[int]:
        return []

    def add(self, accumulator: list[int], record: Row) -> list[int]:
        return sorted([*accumulator, record["n"] or 0])[-3:]

    def merge(self, left: list[int], right: list[int]) -> list[int]:
        return sorted([*left, *right])[-3:]

    def result(self, accumulator: list[int]) -> int:
        return sum(accumulator)


def _larger(a: Row, b: Row) -> Row:
    return {**a, "n": (a["n"] or 0) + (b["n"] or 0)}


def _keyed(stream: hf.Stream, key: str, kind: str, uid: str, sinks: _Sinks) -> hf.Stream:
    columns = {"k": ("k",), "key2": ("key2",), "two": ("k", "n")}
    keyed = stream.key_by(lambda r: (r["n"] or 0) % 6) if key == "function" else stream.key_by(*columns[key])
    if kind == "process":
        made = keyed.process(uid, Everything())
        made.side("side").write(f"{uid}.side", sinks[f"{uid}.side"])
        return made
    if kind == "reduce":
        return keyed.reduce(uid, _larger)
    out = keyed.aggregate(
        uid,
        c=hf.count(),
        cn=hf.count("n"),
        s=hf.sum("n"),
        lo=hf.min("n"),
        hi=hf.max("n"),
        avg=hf.mean("n"),
        a=hf.first("n"),
        z=hf.last("n"),
        d=hf.approx_distinct("n"),
        own=Longest(),
    )
    return out.map(
        lambda r: {"key2": (r["s"] or 0) % 3, "k": r["c"] % 3, "n": r["s"], "m": r["avg"], "own": r["own"]}
    )


def rows(max_size: int) -> st.SearchStrategy[list[Row]]:
    """Records with nulls, and keys that are skewed: half of them are one key."""
    key = st.one_of(st.just(1), st.integers(0, 12))
    row = st.fixed_dictionaries(
        {
            "k": key,
            "name": st.one_of(st.none(), st.sampled_from(["ann", "bob", "ünï", ""])),
            "v": st.one_of(st.none(), st.floats(-1e6, 1e6)),
            "n": st.one_of(st.none(), st.integers(-50, 50)),
        }
    )
    return st.lists(row, max_size=max_size).map(lambda found: [{"id": i, **r} for i, r in enumerate(found)])


def _once(steps: list[str]) -> list[str]:
    return [s for i, s in enumerate(steps) if s != "branch" or "branch" not in steps[:i]]


STEPS = st.lists(st.sampled_from([*_STEPS, "branch"]), max_size=3).map(_once)
KINDS = st.sampled_from(["process", "aggregate", "reduce"])


def recipes(max_rows: int = 60) -> st.SearchStrategy[Recipe]:
    """Any pipeline that the public API can write, within reason."""
    return st.builds(
        Recipe,
        sources=st.lists(rows(max_rows), min_size=1, max_size=2),
        per_epoch=st.integers(1, 40),
        splits=st.integers(1, 3),
        before=STEPS,
        first=KINDS,
        key=st.sampled_from(["k", "two", "function"]),
        between=STEPS,
        second=st.one_of(st.none(), KINDS),
        parallelism=st.integers(1, 3),
        max_records=st.integers(10, 60),
    )
