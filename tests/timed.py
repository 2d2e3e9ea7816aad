"""A pipeline in which time comes about in every way: each rule for watermarks, silent splits, sources that wait for others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

import holdfast as hf
from holdfast.io.base import Limit, Offer, Range, Reading, Source

Row = dict[str, Any]
SCHEMA = pa.schema([("k", pa.string()), ("at", pa.int64()), ("v", pa.int64()), ("mark", pa.int64())])
STEPS = 20
SILENT = range(4, 12)
"""The steps at which the second split of a feed has nothing."""


class Feed(Source):
    """Two splits, each with some records at each step; the second is silent for a while.

    `declares`: it says so itself. `tells`: it says how far its splits are, also at steps without records.
    """

    def __init__(self, seed: int, *, pace_s: int = 5, declares: bool = False, tells: bool = False) -> None:
        self._seed, self._pace_s, self._declares, self._tells = seed, pace_s, declares, tells

    def schema(self) -> pa.Schema:
        return SCHEMA

    def rows(self, split: str, step: int) -> list[Row]:
        """What a split has at a step; now and then one is far too late."""
        if (split == "1" and step in SILENT) or (self._tells and step % 5 == 3):
            return []
        begins = step * self._pace_s + int(split)
        return [
            {
                "k": f"k{(step * 31 + i * 7 + self._seed) % 5}",
                "at": begins + i * self._pace_s // 5 - (90 if i == 3 and step % 7 == 6 else 0),
                "v": (step * 13 + i * self._seed) % 101,
                "mark": (begins - self._pace_s) * 1000 if i == 4 else None,
            }
            for i in range(5)
        ]

    def plan(self, position: Any, limit: Limit) -> Offer:
        step = position or 0
        if step >= STEPS:
            return Offer([], step, exhausted=True, splits=["0", "1"])
        counts = {split: len(self.rows(split, step)) for split in ("0", "1")}
        return Offer(
            [Range(split, step, step + 1, records=n) for split, n in counts.items() if n],
            step + 1,
            backlog=sum(len(self.rows(s, n)) for s in counts for n in range(step + 1, STEPS)),
            exhausted=step + 1 >= STEPS,
            splits=["0", "1"],
            watermarks=dict.fromkeys(counts, (step - 1) * self._pace_s * 1000) if self._tells else {},
            waiting=[],
            idle=[s for s, n in counts.items() if not n] if self._declares else [],
        )

    def read(self, piece: Range, reading: Reading) -> Iterator[pa.Table]:
        yield pa.Table.from_pylist(self.rows(piece.split, piece.start), SCHEMA)


class Sums(hf.KeyedProcess):
    """Says a key's sum each third record, so that what stands behind it is silent at times; and when a key has been quiet."""

    total = hf.ValueState(int, default=0)
    seen = hf.ValueState(int, default=0)

    def process(self, key: Any, record: Row, ctx: hf.Context) -> Iterator[Row]:
        self.total.value += record["v"]
        self.seen.value += 1
        assert ctx.time_ms is not None
        ctx.set_timer(ctx.time_ms + 20_000)
        if self.seen.value % 3 == 0:
            yield {"k": key, "at": record["at"], "v": self.total.value, "why": "third"}

    def on_timer(self, key: Any, timer: hf.Timer, ctx: hf.Context) -> Iterator[Row]:
        yield {"k": key, "at": timer.at_ms // 1000, "v": self.total.value, "why": "quiet"}


class Beside(hf.TwoInputProcess):
    """Each record of the left with what the right has said in the last half minute."""

    said = hf.ValueState(int, default=0)

    def process_left(self, key: Any, record: Row, ctx: hf.Context) -> Iterator[Row]:
        yield {"k": key, "at": record["at"], "v": record["v"], "said": self.said.value}

    def process_right(self, key: Any, record: Row, ctx: hf.Context) -> None:
        self.said.value += record["v"]
        assert ctx.time_ms is not None
        ctx.set_timer(ctx.time_ms + 30_000)

    def on_timer(self, key: Any, timer: hf.Timer, ctx: hf.Context) -> None:
        self.said.clear()


def _mark(record: Row) -> int | None:
    found: int | None = record["mark"]
    return found


def _behind(greatest_ms: int) -> int:
    return greatest_ms - greatest_ms % 4000 - 2000


def build(sinks: Callable[[str], Any]) -> hf.Pipeline:
    """The pipeline, with a sink for each of its outputs."""
    made = hf.Pipeline("timed")

    def read(uid: str, seed: int, feed: dict[str, Any], **time: Any) -> hf.Stream:
        return made.read(uid, Feed(seed, **feed)).event_time("at", unit="s", **time)

    marked = read("marked", 3, {}, watermark=hf.punctuated(_mark), idle_after="1ms")
    told = read("told", 5, {"tells": True}, watermark=hf.from_source())
    own = read("own", 7, {"declares": True}, watermark=hf.periodic(_behind))
    fast = read("fast", 11, {"pace_s": 20}, out_of_order="20s", align="both", drift="60s", idle_after="1ms")
    slow = read("slow", 13, {}, watermark=hf.ascending(), align="both", drift="60s", idle_after="1ms")

    counts = marked.union(own).key_by("k").window(hf.tumbling("10s")).aggregate("counts", n=hf.count())
    counts.write("counted", sinks("counted"))
    counts.side("late").write("late", sinks("late"))
    sums = marked.key_by("k").process("sums", Sums())
    again = sums.event_time("at", unit="s", out_of_order="5s", idle_after="1ms", uid="again")
    beside = again.key_by("k").connect(told.key_by("k")).process("beside", Beside())
    beside.write("told-beside", sinks("told-beside"))
    trend = beside.key_by("said").window(hf.sliding("40s", "20s")).aggregate("trend", v=hf.max("v"))
    trend.write("trends", sinks("trends"))
    near = fast.key_by("k").join(slow.key_by("k")).between("-9s", "9s").select("near")
    near.write("pairs", sinks("pairs"))
    return made


OPERATORS = ("counts", "sums", "beside", "trend", "near")
OUTPUTS = ("counted", "late", "told-beside", "trends", "pairs")
IDLE = ("marked.time", "own.time", "again", "fast.time")
"""Whose splits must be idle at some epoch, or the pipeline shows nothing of it."""
