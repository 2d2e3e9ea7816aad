"""A pipeline with every kind of event time: windows behind windows, sessions, timers, two inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import holdfast as hf

Row = dict[str, Any]


class Quiet(hf.KeyedProcess):
    """Says when a key has been quiet for 15 seconds of event time, and how much it had said."""

    seen = hf.ValueState(int, default=0)
    until_ms = hf.ValueState(int, default=0)

    def process(self, key: Any, record: Row, ctx: hf.Context) -> None:
        self.seen.value += 1
        assert ctx.time_ms is not None
        until = ctx.time_ms + 15_000
        if until > self.until_ms.value:
            ctx.delete_timer(self.until_ms.value)
            ctx.set_timer(until)
            self.until_ms.value = until

    def on_timer(self, key: Any, timer: hf.Timer, ctx: hf.Context) -> Iterator[Row]:
        yield {"k": key, "at": timer.at_ms // 1000, "seen": self.seen.value, "id": str(ctx.uuid())}
        self.seen.clear()


class Latest(hf.TwoInputProcess):
    """Each record of the right with the newest price of the left, kept for a minute."""

    price = hf.ValueState(int)

    def process_left(self, key: Any, record: Row, ctx: hf.Context) -> None:
        self.price.value = record["v"]
        assert ctx.time_ms is not None
        ctx.set_timer(ctx.time_ms + 60_000)

    def process_right(self, key: Any, record: Row, ctx: hf.Context) -> Iterator[Row]:
        yield {"k": key, "v": record["v"], "price": self.price.value}

    def on_timer(self, key: Any, timer: hf.Timer, ctx: hf.Context) -> None:
        self.price.clear()


def sinks_in(folder: Path) -> Callable[[str], hf.Sink]:
    """Sinks below a folder."""
    return lambda uid: hf.jsonl(str(folder / uid))


def events(count: int, seed: int) -> list[Row]:
    """Records whose times rise, a little out of order; now and then one is far too late."""
    return [
        {
            "k": f"k{(i * 31 + seed) % 11}",
            "at": i * 2 + (i * 7919 + seed) % 9 - (80 if i % 23 == 22 else 0),
            "v": i * seed % 101,
        }
        for i in range(count)
    ]


def build(sinks: Callable[[str], Any], *, count: int = 160, per_epoch: int = 16) -> hf.Pipeline:
    """The pipeline, with a sink for each of its outputs."""
    made = hf.Pipeline("windowed")
    schema = {"k": str, "at": int, "v": int}
    streams = [
        made.read(
            uid, hf.records(events(count, seed), splits=2, per_epoch=per_epoch, schema=schema)
        ).event_time("at", unit="s", out_of_order=lag, idle_after="1h")
        for uid, seed, lag in (("left", 3, "6s"), ("right", 5, "12s"))
    ]
    left, right = streams
    both = left.union(right)
    tumbled = both.key_by("k").window(hf.tumbling("10s")).allowed_lateness("4s")
    totals = tumbled.aggregate("totals", n=hf.count(), v=hf.sum("v"), last=hf.last("v"))
    totals.write("tumbled", sinks("tumbled"))
    totals.side("late").write("late", sinks("late"))
    totals.key_by("n").window(hf.sliding("60s", "20s")).aggregate("trend", k=hf.count(), v=hf.max("v")).write(
        "trends", sinks("trends")
    )
    left.key_by("k").window(hf.session("9s")).aggregate("visits", n=hf.count()).write(
        "sessions", sinks("sessions")
    )
    right.key_by("k").process("quiet", Quiet()).write("silences", sinks("silences"))
    left.key_by("k").connect(right.key_by("k")).process("priced", Latest()).write("prices", sinks("prices"))
    return made
