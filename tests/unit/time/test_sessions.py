"""Where sessions end: what touches them at their end is theirs, wherever epochs are cut and however they are computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
from holdfast.engine.sessions import Stored, seated
from tests.drivers import live
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


# Slots


@st.composite
def keys(draw: st.DrawFn) -> tuple[int, list[int], list[int], int]:
    """Of a key: how many slots it has, which of them were read, which of these stay, and how many sessions are new."""
    slots = draw(st.integers(0, 6))
    going = draw(st.sets(st.integers(0, slots - 1))) if slots else set()
    read = {0, *going, *range(slots - len(going), slots)} if slots else set()
    return slots, sorted(read), sorted(read - going), draw(st.integers(0, 3))


@given(st.lists(keys(), min_size=1, max_size=5))
def test_sessions_that_stay_fill_the_first_slots_and_few_of_them_move(
    found: list[tuple[int, list[int], list[int], int]],
) -> None:
    read = [(key, slot) for key, (_, there, _, _) in enumerate(found) for slot in there]
    going_on = [(key, home) for key, (_, _, stay, new) in enumerate(found) for home in (*stay, *[-1] * new)]
    used = [slots - len(there) + len(stay) + new for slots, there, stay, new in found]
    empty = np.empty(0, np.int64)
    stored = Stored(
        np.array([key for key, _ in read], np.int64), empty, empty, [], np.array([s for _, s in read], np.int64),
        empty, empty, np.array([slots for slots, *_ in found], np.int64),
    )  # fmt: skip
    seats = seated(*(np.array(c, np.int64).reshape(-1) for c in ([k for k, _ in going_on], [h for _, h in going_on])),
                   np.array(used, np.int64), stored)  # fmt: skip
    for key, (slots, there, stay, _) in enumerate(found):
        mine = [int(seat) for seat, (of, _) in zip(seats, going_on, strict=True) if of == key]
        unread = set(range(slots)) - set(there)
        assert sorted([*mine, *unread]) == list(range(used[key])), "each slot has one session"
        kept = [(int(s), h) for s, (of, h) in zip(seats, going_on, strict=True) if of == key and h >= 0]
        assert all(seat == home for seat, home in kept if home < used[key]), "who can stay does"
        assert len(stay) - sum(seat == home for seat, home in kept) <= len(there) - len(stay)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_goes_costs_what_goes_however_many_sessions_of_its_key_are_kept(backend: str) -> None:
    """When the oldest session of a key was forgotten, all the others were written again, a slot further."""
    written = []
    for kept_s in (100, 1000):
        epochs = [{"0": at(10 * e)} for e in range(130)]
        made = hf.Pipeline("p")
        keyed = made.read("in", Script(epochs, bounded=False)).event_time("at", unit="s").key_by("k")
        windows = keyed.window(hf.session("1s")).allowed_lateness(f"{kept_s}s")
        windows.aggregate("w", n=hf.count()).write("out", hf.memory())
        result = hf.testing.run(made, parallelism=1, backend=backend)
        last = [c.shards["w"][0].sealed for c in result.commits if c.records_in][-20:]
        assert {sum(s.live.values()) for s in last} == {kept_s // 10 + 1}, "as many come as go"
        written.append(max(s.delta_bytes for s in last))
    assert written[1] <= 1.1 * written[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_sessions_in_any_slots_are_merged_split_nowhere_and_forgotten_in_time(backend: str) -> None:
    """Several of a key at once, of which the middle one goes on, two become one, and one is late for its own."""
    source = told(at(0, 20, 40, 60, k="a"), at(70), at(25, 32, 5), at(100, k="b"), at(66), at(200, k="b"))
    made = hf.Pipeline("p")
    timed = made.read("in", source).event_time("at", unit="s", out_of_order="50s").key_by("k")
    out = timed.window(hf.session("10s")).allowed_lateness("30s").aggregate("w", n=hf.count())
    out.write("out", hf.memory())
    out.side("late").write("late", hf.memory())
    result = hf.testing.run(made, backend=backend)
    last = {(r[0], r[1]): r for r in found(result)}
    assert list(last.values()) == [
        ("a", 0, 15, 2), ("a", 20, 50, 4), ("a", 60, 80, 3), ("b", 100, 110, 1), ("b", 200, 210, 1)
    ]  # fmt: skip
    assert result.commits[-1].shards["w"][0].sealed.live.get("windows", 0) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shorter_lateness_takes_nothing_that_is_open(tmp_path: Path, backend: str) -> None:
    """A session that was kept for its lateness went at once, and took an open one's slot with it."""
    steps = [at(0, 2000), at(1000), at(2500, k="b"), at(3500, k="b"), at(2001), at(9000, k="b")]
    out = hf.memory()

    def pipeline(lateness: str) -> hf.Pipeline:
        made = hf.Pipeline("p")
        source = made.read("in", Script([{"0": step} for step in steps]))
        keyed = source.event_time("at", unit="s", out_of_order="2000s").key_by("k")
        windows = keyed.window(hf.session("10s")).allowed_lateness(lateness)
        windows.aggregate("w", n=hf.count()).write("out", out)
        return made

    live(pipeline("1h"), tmp_path, epochs=3, backend=backend, parallelism=1)
    last = live(pipeline("0s"), tmp_path, backend=backend, parallelism=1)
    rows = [(r["k"], round(r["window_start"].timestamp()), r["n"]) for r in out.rows()]
    assert sorted(rows) == [
        ("a", 0, 1), ("a", 1000, 1), ("a", 2000, 2), ("b", 2500, 1), ("b", 3500, 1), ("b", 9000, 1)
    ]  # fmt: skip
    commit = last.journal.commit(last.driver.last_epoch)
    assert commit is not None and commit.shards["w"][0].sealed.live.get("windows", 0) == 0
