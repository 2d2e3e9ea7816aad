"""Event time in the in-process runner: watermarks of splits, idleness, alignment, clocks across exchanges, timers."""

from __future__ import annotations

import datetime as dt
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.errors import PipelineError, SchemaError
from holdfast.io.base import Limit, Offer, Range, Reading, Source
from holdfast.time.units import MAX_TIME, MIN_TIME
from tests.drivers import live

Row = dict[str, Any]
S = 1_000_000


class Script(Source):
    """A source that offers, epoch by epoch, what it is told: {split: [records]} or None for nothing, and its end."""

    def __init__(
        self, epochs: list[dict[str, list[Row]]], *, splits: list[str] | None = None, bounded: bool = True
    ) -> None:
        self._epochs, self._names, self._bounded = epochs, splits, bounded
        self.watermarks: list[dict[str, int]] = []

    def schema(self) -> pa.Schema:
        return pa.schema([("k", pa.string()), ("at", pa.int64()), ("v", pa.int64())])

    def plan(self, position: Any, limit: Limit) -> Offer:
        here = 0 if position is None else position
        if here >= len(self._epochs):
            return Offer([], here, exhausted=self._bounded, splits=self._names)
        ranges = [
            Range(split, here, here + 1, records=len(rows))
            for split, rows in self._epochs[here].items()
            if rows
        ]
        ends = self._bounded and here + 1 == len(self._epochs)
        marks = self.watermarks[here] if self.watermarks else {}
        return Offer(ranges, here + 1, exhausted=ends, splits=self._names, watermarks=marks)

    def read(self, piece: Range, reading: Reading) -> Iterator[pa.Table]:
        rows = self._epochs[piece.start][piece.split]
        yield pa.Table.from_pylist([{"k": "a", "v": 0, **r} for r in rows], schema=self.schema())


def at(*seconds: int, k: str = "a") -> list[Row]:
    return [{"k": k, "at": s} for s in seconds]


def counted(source: Source, *, window: Any = None, lateness: str = "0s", **time: Any) -> hf.Pipeline:
    made = hf.Pipeline("p")
    timed = made.read("in", source).event_time("at", unit="s", **time)
    out = (
        timed.key_by("k")
        .window(window or hf.tumbling("10s"))
        .allowed_lateness(lateness)
        .aggregate("w", n=hf.count())
    )
    out.write("out", hf.memory())
    out.side("late").write("late", hf.memory())
    return made


def results(result: hf.testing.Result) -> list[tuple[int, int]]:
    """Epoch and count of each result."""
    found = []
    for epoch, table in sorted(result._captured["out"].tables.items()):
        found += [(epoch, n) for n in table["n"].to_pylist()]
    return found


def clocks(result: hf.testing.Result, uid: str = "w") -> list[float]:
    return [c.clocks.get(uid, MIN_TIME) / S for c in result.commits]


def test_the_watermark_is_behind_the_greatest_timestamp_and_fires_in_its_own_epoch() -> None:
    source = Script([{"0": at(1, 2)}, {"0": at(12)}, {"0": at(15)}, {"0": at(30)}], bounded=False)
    result = hf.testing.run(counted(source, out_of_order="5s"))
    assert [c.marks["in.time"]["in/0"] for c in result.commits] == [
        s * S - 5 * S - 1 for s in (2, 12, 15, 30)
    ]
    assert results(result) == [(3, 2), (4, 2)]


def test_the_slowest_split_holds_the_clock_and_one_that_never_came_does_too() -> None:
    source = Script([{"0": at(1)}, {"0": at(50)}, {"1": at(12)}], splits=["0", "1"], bounded=False)
    result = hf.testing.run(counted(source))
    assert results(result) == [(3, 1)]
    assert clocks(result)[:2] == [MIN_TIME / S] * 2
    assert result.commits[-1].clocks["w"] == 12 * S - 1


def test_an_idle_split_steps_out_and_back_in_without_turning_the_clock_back() -> None:
    epochs = [
        {"0": at(1), "1": at(2)},
        {"0": at(50)},
        {"0": at(60)},
        {"1": at(5)},
        {"0": at(80), "1": at(65)},
    ]
    source = Script(epochs, splits=["0", "1"], bounded=False)
    result = hf.testing.run(counted(source, idle_after="2s"), step_ms=1000)
    assert [p.idle for p in result.plans] == [{}, {}, {"in.time": ["in/1"]}, {}, {}]
    assert clocks(result) == sorted(clocks(result))
    assert result.commits[2].clocks["w"] == 60 * S - 1
    assert result.commits[3].clocks["w"] == 60 * S - 1
    assert result.commits[4].clocks["w"] == 65 * S - 1
    assert [r["at"] for r in result.rows("late")] == [5]
    assert result.commits[3].late == {"w": 1}


def test_a_split_that_falls_idle_is_worth_an_epoch_without_records() -> None:
    source = Script([{"0": at(1), "1": at(2)}, {"0": at(50)}, {}, {}], splits=["0", "1"], bounded=False)
    result = hf.testing.run(counted(source, idle_after="3s"), step_ms=2000)
    assert result.commits[2].records_in == 0
    assert result.plans[2].idle == {"in.time": ["in/1"]}
    assert results(result) == [(3, 2)]


def test_the_end_of_a_bounded_source_is_the_end_of_time() -> None:
    result = hf.testing.run(counted(Script([{"0": at(1)}, {"0": at(12)}]), out_of_order="1h"))
    assert result.plans[-1].ended == ["in.time"]
    assert result.commits[-1].clocks["w"] == MAX_TIME
    assert results(result) == [(2, 1), (2, 1)]


def test_a_stream_that_has_ended_does_not_take_an_idle_one_to_the_end_of_time_with_it() -> None:
    """All windows were closed then, and whatever the idle one had to say later was late, for good."""
    made = hf.Pipeline("p")
    old = made.read("old", Script([{"0": at(1)}, {"0": at(12)}])).event_time("at", unit="s", uid="old.time")
    quiet: list[dict[str, list[Row]]] = [{"0": at(2)}, {"0": at(15)}, {}, {}, {}, {}]
    live_source = Script([*quiet, {"0": at(16)}, {"0": at(40)}], splits=["0"], bounded=False)
    new = made.read("new", live_source).event_time("at", unit="s", idle_after="3s", uid="new.time")
    out = old.union(new).key_by("k").window(hf.tumbling("10s")).aggregate("w", n=hf.count())
    out.write("out", hf.memory())
    out.side("late").write("late", hf.memory())
    made.read("ticks", Script([{"0": at(0)}] * 8, bounded=False)).write("ticked", hf.memory())
    result = hf.testing.run(made, step_ms=1000)
    assert any(plan.idle for plan in result.plans) and result.plans[-1].ended == ["old.time"]
    assert max(clocks(result)) == 40 - 1 / S and clocks(result) == sorted(clocks(result))
    assert result.rows("late") == []
    assert [n for _, n in results(result)] == [2, 3]


def test_a_folder_that_is_still_empty_holds_the_clock_until_it_is_idle(tmp_path: Path) -> None:
    source = Script([{"0": at(t)} for t in (1, 12, 25, 38)], bounded=False)
    silent = hf.files(tmp_path, "jsonl", {"k": str, "at": int, "v": int})
    held = hf.testing.run(two_sources(source, silent))
    freed = hf.testing.run(two_sources(source, silent, idle_after="2s"))
    assert held.rows("out") == []
    assert freed.plans[-1].idle == {"slow.time": ["slow"]}
    assert [r["n"] for r in freed.rows("out")] == [1, 1, 1]


@pytest.mark.parametrize(("watch", "emitted"), [(True, [2]), (False, [1, 1, 2])])
def test_files_that_are_not_watched_for_end_event_time_with_the_last_one(
    tmp_path: Path, watch: bool, emitted: list[int]
) -> None:
    for name, times in (("a", (1, 2)), ("b", (12, 25))):
        lines = [json.dumps(row) + "\n" for row in at(*times)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    source = hf.files(tmp_path, "jsonl", {"k": str, "at": int}, watch=watch)
    result = hf.testing.run(counted(source, out_of_order="10s"))
    assert sorted(n for _, n in results(result)) == emitted
    assert (result.commits[-1].clocks["w"] == MAX_TIME) is not watch


def test_the_source_may_say_how_far_it_is() -> None:
    source = Script([{"0": at(1)}, {"0": at(2)}, {"0": at(3)}], bounded=False)
    source.watermarks = [{}, {"0": 9_999}, {"0": 9_999}]
    result = hf.testing.run(counted(source, watermark=hf.from_source()))
    assert results(result) == [(2, 2)]
    assert result.commits[-1].late == {"w": 1}


def test_records_may_carry_watermarks() -> None:
    source = Script([{"0": at(1)}, {"0": [{"at": 2, "v": 10_000}]}, {"0": at(3)}], bounded=False)
    rule = hf.punctuated(lambda r: r["v"] or None)
    result = hf.testing.run(counted(source, watermark=rule))
    assert results(result) == [(2, 2)]
    assert result.commits[-1].late == {"w": 1}


def test_a_periodic_rule_sees_the_greatest_timestamp() -> None:
    source = Script([{"0": at(1, 4)}, {"0": at(25)}], bounded=False)
    result = hf.testing.run(counted(source, watermark=hf.periodic(lambda ms: ms - 10_000)))
    assert [c.clocks["w"] for c in result.commits] == [-6_000_000 + 999, 15_000_999]


class Halting(hf.Watermarks):
    """The watermark moves only when the greatest time is a whole minute."""

    def mark(self, greatest: int) -> int | None:
        return greatest if greatest % (60 * S) == 0 else None


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_periodic_rule_sees_the_greatest_timestamp_so_far_over_ranges_epochs_and_restarts(
    parallelism: int, tmp_path: Path
) -> None:
    def rule(ms: int) -> int | None:
        return (
            ms if ms in (7_000, 30_000) else ms - 60_000
        )  # less for a greater one: who forgets it is found out

    def build() -> hf.Pipeline:
        source = Script(
            [{"0": at(1, 9), "1": at(40)}, {"0": at(7), "1": at(30)}, {"0": at(8)}], bounded=False
        )
        return counted(source, watermark=hf.periodic(rule))

    expected = {"in/0": (9_000 - 60_000) * 1000 + 999, "in/1": (40_000 - 60_000) * 1000 + 999}
    result = hf.testing.run(build(), parallelism=parallelism)
    assert [c.marks["in.time"] for c in result.commits] == [expected] * 3
    for _ in range(3):
        life = live(build(), tmp_path, epochs=1, parallelism=parallelism)
    commit = life.journal.commit(3)
    assert commit is not None and commit.marks["in.time"] == expected
    assert commit.greatest == {"in.time": {"in/0": 9 * S, "in/1": 40 * S}}


def test_a_rule_is_told_the_same_in_a_replay_as_at_first(tmp_path: Path) -> None:
    def rule(ms: int) -> int | None:
        if ms < 50_000:
            raise ValueError(f"{ms} is less than was read before")
        return ms - 60_000

    def build() -> hf.Pipeline:
        source = Script([{"0": at(50)}, {"0": at(40)}, {"0": at(51)}], bounded=False)
        return counted(source, watermark=hf.periodic(rule))

    once = {"checkpoint": "manual", "checkpoint_on_stop": False}
    live(build(), tmp_path, epochs=2, **once)
    shutil.rmtree(tmp_path / "state")
    life = live(build(), tmp_path, epochs=1, **once)
    assert life.recovery.last is not None and life.recovery.last.lacking
    assert life.driver.last_epoch == 3


def test_a_rule_of_ones_own_sees_the_greatest_timestamp_so_far() -> None:
    result = hf.testing.run(
        counted(Script([{"0": at(61)}, {"0": at(60)}, {"0": at(120)}], bounded=False), watermark=Halting())
    )
    assert [c.marks["in.time"]["in/0"] for c in result.commits] == [MIN_TIME, MIN_TIME, 120 * S]


def test_a_rule_that_fails_names_the_operator() -> None:
    source = Script([{"0": at(1)}])
    with pytest.raises(hf.errors.UserCodeError, match=r"\[in.time\]"):
        hf.testing.run(counted(source, watermark=hf.periodic(lambda ms: 1 // 0)))


def two_sources(fast: Source, slow: Source, **time: Any) -> hf.Pipeline:
    made = hf.Pipeline("p")
    a = made.read("fast", fast).event_time("at", unit="s", **time)
    b = made.read("slow", slow).event_time("at", unit="s", **time)
    a.union(b).key_by("k").window(hf.tumbling("10s")).aggregate("w", n=hf.count()).write("out", hf.memory())
    return made


def test_a_source_that_is_far_ahead_waits_for_the_others_of_its_group() -> None:
    fast = Script([{"0": at(t)} for t in (10, 100, 200, 300)])
    slow = Script([{"0": at(t)} for t in (10, 20, 30, 190, 290)])
    free = hf.testing.run(two_sources(fast, slow))
    held = hf.testing.run(two_sources(fast, slow, align="both", drift="60s"))
    assert free.epochs == 5
    for commit in held.commits[:-1]:
        ahead = min(commit.marks["fast.time"].values()) - min(commit.marks["slow.time"].values())
        assert ahead < 111 * S  # one epoch beyond the drift: what was read before it was seen
    assert [p.positions["fast"] for p in held.plans[:5]] == [1, 2, 2, 2, 3]
    assert sorted(map(str, held.rows("out"))) == sorted(map(str, free.rows("out")))


def test_a_watermark_passes_three_exchanges_within_the_epoch_that_raised_it() -> None:
    made = hf.Pipeline("p")
    source = Script([{"0": at(1, 2)}, {"0": at(500)}], bounded=False)
    stream = made.read("in", source).event_time("at", unit="s")
    for number in (1, 2, 3):
        stream = stream.key_by("k").window(hf.tumbling("10s")).aggregate(f"w{number}", n=hf.count())
    stream.write("out", hf.memory())
    result = hf.testing.run(made, parallelism=3)
    assert result.commits[1].clocks == dict.fromkeys(("w1", "w2", "w3"), 500 * S - 1)
    assert [(e, t.num_rows) for e, t in result._captured["out"].tables.items()] == [(2, 1)]


def test_times_may_be_assigned_anew_behind_an_exchange() -> None:
    made = hf.Pipeline("p")
    source = Script(
        [{"0": [{"k": k, "at": s} for s, k in enumerate("abcdef")]}, {"0": at(30)}], bounded=False
    )
    totals = made.read("in", source).key_by("k").aggregate("totals", n=hf.count(), seen=hf.max("at"))
    timed = totals.event_time("seen", unit="s", uid="again")
    timed.key_by("n").window(hf.tumbling("10s")).aggregate("w", keys=hf.count()).write("out", hf.memory())
    for parallelism in (1, 3):
        result = hf.testing.run(made, parallelism=parallelism)
        assert [c.marks for c in result.commits] == [
            {"again": {"totals": 5 * S - 1}},
            {"again": {"totals": 30 * S - 1}},
        ]
        assert [r["keys"] for r in result.rows("out")] == [6]


def test_a_window_without_event_time_is_refused_with_the_remedy() -> None:
    made = hf.Pipeline("p")
    made.read("in", Script([])).key_by("k").window(hf.tumbling("10s")).aggregate("w", n=hf.count()).write(
        "o", hf.memory()
    )
    with pytest.raises(PipelineError, match="event_time"):
        hf.testing.run(made)


def test_records_without_a_time_fail_or_come_out_at_the_side() -> None:
    rows = [{"k": "a", "at": 1}, {"k": "a", "at": None}, {"k": "b", "at": 2}]
    made = hf.Pipeline("p")
    timed = made.read("in", hf.records(rows)).event_time("at", unit="s")
    timed.key_by("k").window(hf.tumbling("10s")).aggregate("w", n=hf.count()).write("out", hf.memory())
    with pytest.raises(SchemaError, match=r"\[in.time\] 1 records have no time"):
        hf.testing.run(made)
    made = hf.Pipeline("p")
    timed = made.read("in", hf.records(rows)).event_time("at", unit="s", missing="side")
    timed.key_by("k").window(hf.tumbling("10s")).aggregate("w", n=hf.count()).write("out", hf.memory())
    timed.side("untimed").write("without", hf.memory())
    result = hf.testing.run(made)
    assert result.rows("without") == [{"k": "a", "at": None}]
    assert sorted(r["k"] for r in result.rows("out")) == ["a", "b"]


def test_a_dict_that_lacks_the_time_has_none_and_a_whole_number_may_be_a_float() -> None:
    """Behind a function records are dicts: they were read by other rules than tables."""

    def parse(row: Row) -> Row:
        return {
            "k": row["k"],
            **({} if row["v"] == 1 else {"at": float(row["v"]) if row["v"] == 2 else row["v"]}),
        }

    rows = [{"k": "a", "v": n} for n in range(4)]
    made = hf.Pipeline("p")
    parsed = made.read("in", hf.records(rows)).map(parse, schema={"k": str, "at": int})
    timed = parsed.event_time("at", unit="s", missing="side")
    timed.key_by("k").window(hf.tumbling("10s")).aggregate("w", n=hf.count()).write("out", hf.memory())
    timed.side("untimed").write("without", hf.memory())
    result = hf.testing.run(made)
    assert [r["n"] for r in result.rows("out")] == [3] and len(result.rows("without")) == 1


@pytest.mark.parametrize("per_epoch", [1, 3])
def test_what_a_record_is_does_not_depend_on_one_without_a_time_beside_it(per_epoch: int) -> None:
    """One without a time made a table of the whole batch: the 1 beside it became 1.0, and a missing field a None."""

    def told(row: Row) -> Row:
        return [{"v": 1, "at": 5}, {"v": 2.5, "at": 6, "more": True}, {"v": 3}][row["n"]]

    made = hf.Pipeline("p")
    timed = made.read("in", hf.records([{"n": n} for n in range(3)], per_epoch=per_epoch)).map(told)
    timed = timed.event_time("at", unit="s", missing="side")
    timed.map(lambda r: {"text": repr(r)}).write("out", hf.memory())
    timed.side("untimed").map(lambda r: {"text": repr(r)}).write("without", hf.memory())
    result = hf.testing.run(made)
    texts = [[r["text"] for r in result.rows(uid)] for uid in ("out", "without")]
    assert texts == [["{'v': 1, 'at': 5}", "{'v': 2.5, 'at': 6, 'more': True}"], ["{'v': 3}"]]


def test_a_dict_without_a_time_is_shown_as_it_is_and_one_too_large_is_named() -> None:
    for made_of, said in (
        (lambda r: {"k": "a"} if r["v"] else {"k": "a", "at": 1}, r"there are \['k'\]"),
        (
            lambda r: {"k": "a", "at": 2**70},
            "too large",
        ),
    ):
        made = hf.Pipeline("p")
        parsed = made.read("in", hf.records([{"v": 0}, {"v": 1}])).map(made_of)
        parsed.event_time("at", unit="s", uid="timed").write("out", hf.memory())
        with pytest.raises(SchemaError, match=said) as told:
            hf.testing.run(made)
        assert told.value.uid == "timed"


def test_a_timer_on_event_time_where_there_is_none_is_refused() -> None:
    """It was accepted, never fired, and was kept for ever."""

    class Waits(hf.KeyedProcess):
        def process(self, key: Any, record: Row, ctx: hf.Context) -> Any:
            ctx.set_timer(record["at"] + 600_000)

        def on_timer(self, key: Any, timer: hf.Timer, ctx: hf.Context) -> Any:
            yield {"k": key}

    made = hf.Pipeline("p")
    made.read("in", hf.records(at(1))).key_by("k").process("waits", Waits()).write("out", hf.memory())
    with pytest.raises(PipelineError, match="would never fire") as told:
        hf.testing.run(made)
    assert told.value.uid == "waits" and "set_clock_timer" in str(told.value)


@pytest.mark.parametrize("at_ms", [2**63 - 1, 2**62 // 1000, 1.5, "soon"])
def test_a_watermark_that_a_source_gives_is_looked_at(at_ms: Any) -> None:
    source = Script([{"0": at(1)}, {"0": at(2)}], splits=["0"])
    source.watermarks = [{"0": 500}, {"0": at_ms}]
    with pytest.raises(PipelineError, match="whole milliseconds") as told:
        hf.testing.run(counted(source, watermark=hf.from_source()))
    assert told.value.uid == "in"


@pytest.mark.parametrize("taken", [True, False], ids=["taken", "left"])
def test_records_without_a_time_are_counted_whether_anybody_takes_them_or_not(
    taken: bool, tmp_path: Path
) -> None:
    rows = [{"k": str(n), "at": None if n % 3 == 0 else n} for n in range(10)]
    made = hf.Pipeline("p")
    timed = made.read("in", hf.records(rows, splits=2, per_epoch=4)).event_time(
        "at", unit="s", missing="side"
    )
    timed.write("out", hf.memory())
    if taken:
        timed.side("untimed").write("without", hf.memory())
    result = hf.testing.run(made)
    assert sum(c.untimed.get("in.time", 0) for c in result.commits) == 4
    assert len(result.rows("out")) == 6
    life = live(made, tmp_path)
    assert sum(f.untimed_records.get("in.time", 0) for f in life.facts) == 4


@pytest.mark.parametrize("parallelism", [1, 3])
def test_records_that_lose_their_time_behind_an_exchange_are_counted_there(parallelism: int) -> None:
    rows = [{"k": str(n), "at": None if n % 3 == 0 else n} for n in range(10)]
    made = hf.Pipeline("p")
    totals = made.read("in", hf.records(rows)).key_by("k").aggregate("totals", seen=hf.max("at"))
    totals.event_time("seen", unit="s", missing="side", uid="again").write("out", hf.memory())
    result = hf.testing.run(made, parallelism=parallelism)
    assert [c.untimed for c in result.commits] == [{"again": 4}]


def test_a_map_that_drops_the_time_is_named() -> None:
    made = hf.Pipeline("p")
    timed = made.read("in", hf.records([{"k": "a", "at": 1}])).event_time("at", unit="s")
    dropped = timed.map(lambda r: {"k": r["k"]})
    dropped.key_by("k").window(hf.tumbling("10s")).aggregate("w", n=hf.count()).write("out", hf.memory())
    with pytest.raises(SchemaError, match=r"\[w\] There is no column 'at'"):
        hf.testing.run(made)


def test_a_day_in_seoul_is_a_day_in_seoul() -> None:
    seoul = pa.timestamp("ms", "Asia/Seoul")
    rows = [{"k": "a", "at": dt.datetime(2024, 3, 1, h, tzinfo=dt.timezone.utc)} for h in (14, 15, 20)]
    made = hf.Pipeline("p")
    stream = made.read("in", hf.records(rows, schema={"k": str, "at": seoul})).event_time("at")
    day = stream.key_by("k").window(hf.tumbling("1d", zone="Asia/Seoul"))
    day.aggregate("w", n=hf.count()).write("out", hf.memory())
    out = hf.testing.run(made).rows("out")
    assert [(r["n"], r["window_start"].isoformat()) for r in out] == [
        (1, "2024-03-01T00:00:00+09:00"),
        (2, "2024-03-02T00:00:00+09:00"),
    ]


# Timers


class Reminders(hf.KeyedProcess):
    """Emits what it was told of, `v` seconds after it; a negative `v` takes the reminder back."""

    told = hf.ValueState(int, default=0)

    def process(self, key: Any, record: Row, ctx: hf.Context) -> Iterator[Row]:
        self.told.value += 1
        assert ctx.time_ms == record["at"] * 1000
        if record["v"] < 0:
            ctx.delete_timer(ctx.time_ms)
        else:
            ctx.set_timer(ctx.time_ms + record["v"] * 1000)
        return iter(())

    def on_timer(self, key: Any, timer: hf.Timer, ctx: hf.Context) -> Iterator[Row]:
        assert ctx.watermark_ms >= timer.at_ms == ctx.time_ms
        yield {"k": key, "due": timer.at_ms // 1000, "told": self.told.value}
        if timer.name == "" and timer.at_ms == 20_000:
            ctx.set_timer(21_000, "again")
            ctx.set_timer(40_000, "later")


def reminded(source: Source, function: hf.KeyedProcess | None = None, **options: Any) -> hf.testing.Result:
    made = hf.Pipeline("p")
    timed = made.read("in", source).event_time("at", unit="s")
    timed.key_by("k").process("r", function or Reminders()).write("out", hf.memory())
    return hf.testing.run(made, **options)


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_timers_fire_in_order_once_and_may_set_others(backend: str) -> None:
    set_ = [{"at": 1, "v": 19}, {"at": 2, "v": 28}, {"at": 3, "v": 17}, {"at": 4, "v": 1}, {"at": 5, "v": -1}]
    source = Script(
        [{"0": set_}, {"0": [{"k": "b", "at": 35, "v": 0}]}, {"0": [{"k": "b", "at": 50, "v": 0}]}],
        bounded=False,
    )
    result = reminded(source, backend=backend)
    rows = [
        (e, [(r["k"], r["due"]) for r in t.to_pylist()])
        for e, t in sorted(result._captured["out"].tables.items())
    ]
    assert [(e, [d for k, d in found if k == "a"]) for e, found in rows] == [(2, [20, 21, 30]), (3, [40])]
    assert [(e, [d for k, d in found if k == "b"]) for e, found in rows] == [(2, []), (3, [35])]
    left = result.state("r")
    assert left["timers.event"].num_rows == 1  # that of b at 50


def test_a_timer_in_the_past_fires_at_the_end_of_its_epoch() -> None:
    source = Script([{"0": at(100)}, {"0": [{"at": 50, "v": 1}]}], bounded=False)
    assert [r["due"] for r in reminded(source).rows("out")] == [51]


class Clocked(hf.KeyedProcess):
    def process(self, key: Any, record: Row, ctx: hf.Context) -> None:
        ctx.set_clock_timer(ctx.now_ms + 2_500, "soon")
        ctx.set_clock_timer(ctx.now_ms + 9_000, "never")
        ctx.delete_clock_timer(ctx.now_ms + 9_000, "never")

    def on_timer(self, key: Any, timer: hf.Timer, ctx: hf.Context) -> Iterator[Row]:
        yield {"k": key, "name": timer.name, "late_ms": ctx.now_ms - timer.at_ms, "kind": timer.kind}


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_timers_on_processing_time_wake_the_pipeline_by_themselves(backend: str) -> None:
    result = reminded(Script([{"0": at(1)}]), Clocked(), step_ms=1000, linger_ms=20_000, backend=backend)
    assert result.rows("out") == [{"k": "a", "name": "soon", "late_ms": 500, "kind": "clock"}]
    assert [c.wake_ms for c in result.commits][-1] is None
    assert result.commits[-1].records_in == 0


class Relay(hf.KeyedProcess):
    """A timer of each kind sets one of the other for a time that has passed, so many times."""

    def __init__(self, times: int) -> None:
        self.times = times

    def process(self, key: Any, record: Row, ctx: hf.Context) -> None:
        ctx.set_clock_timer(ctx.now_ms, "1")

    def on_timer(self, key: Any, timer: hf.Timer, ctx: hf.Context) -> Iterator[Row]:
        yield {"kind": timer.kind, "name": timer.name, "chance": ctx.random.random()}
        if int(timer.name) < self.times:
            at = ctx.set_timer if timer.kind == "clock" else ctx.set_clock_timer
            at(0, str(int(timer.name) + 1))


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_timers_of_one_kind_that_set_the_other_for_the_past_fire_in_the_same_epoch(backend: str) -> None:
    result = reminded(Script([{"0": at(5)}], bounded=False), Relay(4), backend=backend)
    rows = result.rows("out")
    assert [(r["kind"], r["name"]) for r in rows] == [
        ("clock", "1"),
        ("event", "2"),
        ("clock", "3"),
        ("event", "4"),
    ]
    assert len({r["chance"] for r in rows}) == 4
    assert result.epochs == 1


class Drawing(hf.KeyedProcess):
    """Of key "a" a timer of each kind, and the one on processing time sets one for the past; of the others so many."""

    def process(self, key: Any, record: Row, ctx: hf.Context) -> None:
        if key == "a":
            ctx.set_clock_timer(ctx.now_ms, "clock")
        for n in range(1 if key == "a" else 5):
            ctx.set_timer(n, str(n))

    def on_timer(self, key: Any, timer: hf.Timer, ctx: hf.Context) -> Iterator[Row]:
        yield {"k": key, "name": timer.name, "id": str(ctx.uuid())}
        if timer.name == "clock":
            ctx.set_timer(0, "behind it")


def test_what_a_timer_draws_does_not_depend_on_which_keys_are_beside_it() -> None:
    found, plans = [], None
    for parallelism in (1, 2, 4):
        source = Script([{"0": [row for k in "abcdefgh" for row in at(5, k=k)]}], bounded=False)
        made = hf.Pipeline("p")
        timed = made.read("in", source).event_time("at", unit="s")
        timed.key_by("k").process("w", Drawing()).write("out", hf.memory())
        result = hf.testing.run(made, parallelism=parallelism, plans=plans)
        plans = result.plans
        found.append(sorted((r["k"], r["name"], r["id"]) for r in result.rows("out")))
    assert found[0] == found[1] == found[2]
    assert ("a", "behind it") in {(k, name) for k, name, _ in found[0]}
    assert len({one for _, _, one in found[0]}) == len(found[0])


def test_timers_that_set_each_other_without_end_go_on_in_the_next_epoch() -> None:
    result = reminded(Script([{"0": at(5)}, {"0": at(6)}], bounded=False), Relay(120), epochs=2)
    names = [
        [int(n) for n in t["name"].to_pylist()] for _, t in sorted(result._captured["out"].tables.items())
    ]
    assert names[0] == list(range(1, 100))
    assert set(names[1]) >= set(range(100, 121))


class Waiting(hf.KeyedProcess):
    """Counts records without a key, and reminds of others."""

    nobody = hf.ValueState(int, default=0)
    told = hf.ValueState(int, default=0)

    def process(self, key: Any, record: Row, ctx: hf.Context) -> None:
        if key is None:
            self.nobody.value += 1
        else:
            self.told.value += 1
            ctx.set_clock_timer(ctx.now_ms + 60_000)

    def on_timer(self, key: Any, timer: hf.Timer, ctx: hf.Context) -> Iterator[Row]:
        yield {"k": key, "told": self.told.value}


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_a_timer_after_a_restart_knows_keys_of_a_type_that_not_all_states_have_seen(
    backend: str, tmp_path: Path
) -> None:
    def build() -> hf.Pipeline:
        made = hf.Pipeline("p")
        source = Script([{"0": [{"k": None, "at": 1}]}, {"0": at(2)}], bounded=False)
        keyed = made.read("in", source).map(lambda r: {"k": r["k"]}).key_by("k")
        keyed.process("w", Waiting()).write("out", hf.jsonl(tmp_path / "out"))
        return made

    folder = tmp_path / "run"
    live(build(), folder, backend=backend, parallelism=1, clock_ms=lambda: 1_000_000)
    life = live(build(), folder, backend=backend, parallelism=1, clock_ms=lambda: 1_100_000)
    assert [f.records_in for f in life.facts] == [0]
    lines = [json.loads(line) for file in (tmp_path / "out").glob("*.jsonl") for line in file.open()]
    assert lines == [{"k": "a", "told": 1}]


def test_a_timer_needs_an_on_timer() -> None:
    class Forgetful(hf.KeyedProcess):
        def process(self, key: Any, record: Row, ctx: hf.Context) -> None:
            ctx.set_timer(5)

    with pytest.raises(PipelineError, match="on_timer"):
        reminded(Script([{"0": at(1)}]), Forgetful())


@pytest.mark.parametrize("window", [hf.tumbling("10s"), hf.sliding("10s", "10s"), hf.session("2s")], ids=str)
def test_only_a_record_within_the_allowed_lateness_makes_a_result_come_again(window: Any) -> None:
    epochs = [at(1), at(15), at(16), at(2), at(17), at(40), at(3)]
    source = Script([{"0": rows} for rows in epochs], bounded=False)
    result = hf.testing.run(counted(source, window=window, lateness="20s"))
    assert results(result) == [(2, 1), (4, 2), (6, 3)]
    assert [r["at"] for r in result.rows("late")] == [3]
    assert sum(s.sealed.live.get("windows", 0) for s in result.commits[-1].shards["w"]) == 1  # that of 40


class Twice(hf.KeyedProcess):
    """Emits at once and when a timer fires."""

    def process(self, key: Any, record: Row, ctx: hf.Context) -> Iterator[Row]:
        ctx.set_timer(record["at"] * 1000)
        yield {"all": 0, "said": f"{key} {ctx.uuid()}"}

    def on_timer(self, key: Any, timer: hf.Timer, ctx: hf.Context) -> Iterator[Row]:
        yield {"all": 0, "said": f"{key} {ctx.uuid()}"}


class Heard(hf.KeyedProcess):
    """What came before what."""

    heard = hf.ListState(str)

    def process(self, key: Any, record: Row, ctx: hf.Context) -> None:
        self.heard.add(record["said"])


def test_the_order_of_what_functions_and_timers_emit_does_not_depend_on_the_number_of_shards() -> None:
    found = []
    for parallelism in (1, 2, 4):
        made = hf.Pipeline("p")
        rows = [{"k": f"k{i}", "at": i} for i in range(20)]
        timed = made.read("in", Script([{"0": rows}, {"0": at(100)}], bounded=False)).event_time(
            "at", unit="s"
        )
        said = timed.key_by("k").process("twice", Twice())
        said.key_by("all").process("heard", Heard()).write("out", hf.memory())
        result = hf.testing.run(made, parallelism=parallelism)
        found.append(result.state("heard")["heard"]["value"].to_pylist())
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == len(set(found[0])) == 41


@pytest.mark.parametrize(
    "rule",
    [
        hf.punctuated(lambda r: r["at"] / 1),
        hf.punctuated(lambda r: 1 << 62),
        hf.periodic(lambda ms: "soon"),
        hf.periodic(lambda ms: True),
    ],
)
def test_a_watermark_that_is_no_time_is_an_error_with_the_operators_name(rule: hf.Watermarks) -> None:
    made = hf.Pipeline("p")
    timed = made.read("in", hf.records(at(1, 2, 3))).event_time("at", unit="s", watermark=rule, uid="time")
    timed.key_by("k").window(hf.tumbling("1s")).aggregate("x", n=hf.count()).write("out", hf.memory())
    with pytest.raises(hf.errors.HoldfastError, match="whole milliseconds since 1970") as caught:
        hf.testing.run(made)
    assert caught.value.uid == "time"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"drift": "5s"}, "drift needs a group"),
        ({"align": "g", "drift": -1}, "would hold every stream of the group back"),
        ({"align": "g", "drift": dt.timedelta(seconds=-5)}, "would hold every stream of the group back"),
        ({"out_of_order": "5s", "watermark": hf.ascending()}, "two rules for one thing"),
        ({"watermark": lambda ms: ms}, "is no rule for watermarks"),
        ({"idle_after": 0}, "would leave every split out"),
        ({"idle_after": dt.timedelta(seconds=-5)}, "would leave every split out"),
    ],
)
def test_what_would_be_ignored_or_leave_nothing_is_refused(given: dict[str, Any], says: str) -> None:
    read = hf.Pipeline("p").read("in", hf.records(at(1)))
    with pytest.raises(PipelineError, match=says) as caught:
        read.event_time("at", unit="s", **given)
    assert caught.value.remedy


class Asking(hf.KeyedProcess):
    def __init__(self, asks: bool) -> None:
        self.asks = asks

    def process(self, key: Any, record: Row, ctx: hf.Context) -> Iterator[Row]:
        yield {"at": ctx.time_ms if self.asks else 0}


@pytest.mark.parametrize("asks", [True, False])
def test_a_function_that_asks_for_a_time_that_united_streams_disagree_on_is_told_so(asks: bool) -> None:
    """It was None without a word."""
    made = hf.Pipeline("p")
    one = made.read("one", hf.records([{"k": "a", "at": 1}])).event_time("at", unit="s")
    other = made.read("other", hf.records([{"k": "a", "ts": 1}])).event_time("ts", unit="s")
    one.union(other).key_by("k").process("x", Asking(asks)).write("out", hf.memory())
    if not asks:
        assert len(hf.testing.run(made).rows("out")) == 2
        return
    with pytest.raises(
        PipelineError, match=r"\[x\] Streams with different event times.*'at' and 'ts'"
    ) as caught:
        hf.testing.run(made)
    assert ".union(…).event_time(column, …)" in str(caught.value)
