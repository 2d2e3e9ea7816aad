"""Windows record by record after a loss, and with memory that forgets: the same as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from tests.drivers import live
from tests.rebuilt import BOTH_WAYS, check, rebuilt
from tests.windowed import events, sinks_in

Row = dict[str, Any]
OPERATORS = ["values", "visits", "batches", "sums", "busy"]


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


OUTPUTS = ("told", "late", "sessions", "reduced", "summed", "busiest")


@pytest.mark.parametrize(("checkpoint", "backend"), BOTH_WAYS)
def test_windows_are_the_same_after_everything_but_the_log_was_lost(
    tmp_path: Path, backend: str, checkpoint: str
) -> None:
    second = rebuilt(build, OPERATORS, "values", tmp_path, backend=backend, checkpoint=checkpoint)
    assert second.recovery.last is not None
    assert second.recovery.last.lacking >= 4
    check(build, OUTPUTS, second, tmp_path)


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_windows_are_the_same_with_a_new_process_for_each_epoch(tmp_path: Path, backend: str) -> None:
    options: dict[str, Any] = {
        "backend": backend,
        "checkpoint": "never",
        "trim_log": False,
        "max_records": 32,
    }
    life = live(build(sinks_in(tmp_path / "ours")), tmp_path / "dir", epochs=1, **options)
    while life.driver.last_epoch < 8:
        before = life.driver.last_epoch
        life = live(build(sinks_in(tmp_path / "ours")), tmp_path / "dir", epochs=1, **options)
        assert life.driver.last_epoch == before + 1
    life = live(build(sinks_in(tmp_path / "ours")), tmp_path / "dir", **options)
    check(build, OUTPUTS, life, tmp_path)


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_the_same_on_any_parallelism(tmp_path: Path, backend: str) -> None:
    made = []
    for parallelism in (1, 2, 4):
        folder = tmp_path / str(parallelism)
        result = hf.testing.run(build(sinks_in(folder)), parallelism=parallelism, backend=backend)
        made.append({uid: result.rows(uid) for uid in OUTPUTS})
    assert made[0] == made[1] == made[2]
    assert all(made[0].values()), {uid: len(rows) for uid, rows in made[0].items()}
