"""A pipeline with windows that are taken record by record: each kind of contents, under each kind of trigger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import holdfast as hf
from tests.windowed import events

Row = dict[str, Any]


class Values(hf.WindowFunction):
    """What came, in its order, and an id."""

    def process(self, key: Any, window: hf.Window, records: list[Row], ctx: hf.Context) -> Iterator[Row]:
        yield {"k": key, "came": [r["v"] for r in records], "id": str(ctx.uuid())}


class Tens(hf.Assigner):
    """Windows of ten seconds, as `tumbling` makes them."""

    def assign(self, at_us: int, record: Row) -> Iterator[hf.Window]:
        start = at_us - at_us % 10_000_000
        yield hf.Window(start, start + 10_000_000)


def build(sinks: Callable[[str], Any]) -> hf.Pipeline:
    """Every kind of contents, with and without merging, under every kind of trigger."""
    made = hf.Pipeline("windows")
    schema = {"k": str, "at": int, "v": int}
    source = hf.records(events(160, 3), splits=2, per_epoch=16, schema=schema)
    stream = made.read("in", source).event_time("at", unit="s", out_of_order="6s").key_by("k")
    early = hf.triggers.event_time(early="1ms", late_count=2)
    values = stream.window(hf.sliding("20s", "10s")).allowed_lateness("4s").trigger(early)
    told = values.process("values", Values())
    told.write("told", sinks("told"))
    told.side("late").write("late", sinks("late"))
    visits = stream.window(hf.session("9s")).allowed_lateness("30s")
    visits.process("visits", Values()).write("sessions", sinks("sessions"))
    purging = hf.triggers.purging(hf.triggers.count(3))
    stream.window(hf.global_window()).trigger(purging).reduce(
        "batches", lambda a, b: {**b, "v": a["v"] + b["v"]}
    ).write("reduced", sinks("reduced"))
    sums = stream.window(Tens()).trigger(hf.triggers.continuous_event_time("3s"))
    summed = sums.aggregate("sums", n=hf.count(), v=hf.sum("v"), d=hf.approx_distinct("v"))
    summed.write("summed", sinks("summed"))
    busy = summed.key_by("n").window(hf.session("15s")).trigger(hf.triggers.count(2))
    busy.aggregate("busy", n2=hf.count(), v=hf.max("v")).write("busiest", sinks("busiest"))
    return made
