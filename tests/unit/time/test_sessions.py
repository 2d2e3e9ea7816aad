"""Where sessions end: what touches them at their end is theirs, wherever epochs are cut and however they are computed."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast as hf
from tests.unit.time.test_event_time import Script, at

BACKENDS = ["heap", "rocksdb"]


class Bounds(hf.WindowFunction):
    def process(self, key: Any, window: hf.Window, records: list[Any], ctx: hf.Context) -> Any:
        yield {"k": key, "n": len(records), "at_ms": ctx.time_ms}


class Seen(hf.KeyedProcess):
    def process(self, key: Any, record: Any, ctx: hf.Context) -> Any:
        yield {"at_ms": ctx.time_ms, "watermark_ms": ctx.watermark_ms}


WAYS = {
    "batches": lambda w: w.aggregate("w", n=hf.count()),
    "one by one": lambda w: w.process("w", Bounds()),
    "trigger": lambda w: w.trigger(hf.triggers.event_time(late_count=2)).aggregate("w", n=hf.count()),
}


def sessions(source: Script, way: str, lateness: str = "0s") -> hf.Pipeline:
    made = hf.Pipeline("p")
    keyed = made.read("in", source).event_time("at", unit="s").key_by("k")
    out = WAYS[way](keyed.window(hf.session("10s")).allowed_lateness(lateness))
    out.write("out", hf.memory())
    out.side("late").write("late", hf.memory())
    out.key_by("n").window(hf.tumbling("5s")).aggregate("later", ends=hf.count()).write("ends", hf.memory())
    return made


def found(result: hf.testing.Result) -> list[tuple[str, float, float, int]]:
    rows = [(r["k"], r["window_start"], r["window_end"], r["n"]) for r in result.rows("out")]
    return sorted((k, start.timestamp(), end.timestamp(), n) for k, start, end, n in rows)


def told(*epochs: list[dict[str, Any]]) -> Script:
    return Script([{"0": rows} for rows in epochs])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cut", [True, False], ids=["three epochs", "one epoch"])
def test_records_exactly_a_gap_apart_are_in_one_session_wherever_epochs_are_cut(
    cut: bool, way: str, backend: str
) -> None:
    # The record of b takes the clock right before the end of a's session.
    epochs = [at(0), at(10, k="b"), at(10)]
    source = told(*epochs) if cut else told([row for rows in epochs for row in rows])
    result = hf.testing.run(sessions(source, way), backend=backend)
    assert found(result) == [("a", 0, 20, 2), ("b", 10, 20, 1)]
    assert not result.rows("late")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_session_is_complete_when_the_clock_is_at_its_end_and_not_before(way: str, backend: str) -> None:
    # Timestamps are whole seconds, and the clock is a microsecond behind: at 10 s it stands before the end of [0, 10).
    source = Script([{"0": at(0)}, {"0": at(10, k="b")}, {"0": at(11, k="b")}], bounded=False)
    result = hf.testing.run(sessions(source, way), backend=backend)
    tables = result._captured["out"].tables
    assert {epoch: t["k"].to_pylist() for epoch, t in tables.items() if t.num_rows} == {3: ["a"]}


@pytest.mark.parametrize("way", WAYS)
def test_results_of_sessions_are_late_for_nobody_behind_them(way: str) -> None:
    # An epoch ends with the clock right before a session's end, the next begins there.
    source = told(at(0), at(10, k="b"), at(11, k="c"), at(12, k="c"), at(40, k="d"))
    result = hf.testing.run(sessions(source, way))
    assert sum(c.late.get("later", 0) for c in result.commits) == 0
    assert sum(r["ends"] for r in result.rows("ends")) == len(result.rows("out")) == 4
    # As of other windows, the last instant is the time of the result: one that ends at 10 s is of [5, 10).
    assert min(r["window_start"].timestamp() for r in result.rows("ends")) == 5


def test_results_of_sessions_and_of_other_windows_come_together() -> None:
    made = hf.Pipeline("p")
    source = told(at(0), at(10, k="b"), at(11, k="c"), at(12, k="c"), at(40, k="d"))
    keyed = made.read("in", source).event_time("at", unit="s").key_by("k")
    visits = keyed.window(hf.session("10s")).aggregate("visits", n=hf.count())
    tens = keyed.window(hf.tumbling("10s")).aggregate("tens", n=hf.count())
    both = visits.union(tens).key_by("k").window(hf.tumbling("5s")).aggregate("both", results=hf.count())
    both.write("out", hf.memory())
    seen = visits.union(tens).key_by("k").process("seen", Seen())
    seen.write("times", hf.memory())
    result = hf.testing.run(made)
    assert sum(c.late.get("both", 0) for c in result.commits) == 0
    assert sum(r["results"] for r in result.rows("out")) == len(result.rows("times")) == 8
    assert all(r["at_ms"] % 1000 == 999 for r in result.rows("times"))
    assert all(r["at_ms"] > r["watermark_ms"] for r in result.rows("times"))


def test_sessions_of_sessions_are_late_for_nobody() -> None:
    made = hf.Pipeline("p")
    rows = [at(n, k="ab"[n % 2]) for n in range(0, 60, 5)]
    stream = made.read("in", told(*rows)).event_time("at", unit="s")
    for uid, gap in (("first", "4s"), ("second", "5s"), ("third", "6s")):
        stream = stream.key_by("k").window(hf.session(gap)).aggregate(uid, n=hf.count())
    stream.write("out", hf.memory())
    result = hf.testing.run(made)
    assert not any(c.late for c in result.commits)
    assert [r["n"] for r in result.rows("out")]


def test_the_time_that_a_function_sees_is_that_of_its_results() -> None:
    result = hf.testing.run(sessions(told(at(0), at(40)), "one by one"))
    assert [r["at_ms"] for r in result.rows("out")] == [9_999, 49_999]
