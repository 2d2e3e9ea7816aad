"""Splits that have something are never idle, sources that are held stay held, and time that stands still is told of."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
from holdfast.cli.status import _event_time, _set_aside
from holdfast.engine.cut import Wait, when_to_cut
from holdfast.engine.shown import ShownTime
from holdfast.errors import PipelineError
from holdfast.io.base import Limit, Offer, Range, Reading, Source
from holdfast.metrics import Watermark
from holdfast.time.units import MIN_TIME
from holdfast.time.watermarks import Splits, planned, still_idle
from tests.drivers import live, make
from tests.unit.time.test_event_time import Script, at, clocks, counted, results, two_sources

S = 1_000_000
NAMES = st.sampled_from("abcd")


class Queue(Source):
    """Splits with records that wait: an epoch takes some of the first that have any, and nothing of the others."""

    def __init__(
        self, splits: dict[str, list[int]], per_epoch: int, *, tells: bool, ends: bool = True
    ) -> None:
        self._splits, self._per_epoch, self._tells, self._ends = splits, per_epoch, tells, ends

    def schema(self) -> pa.Schema:
        return pa.schema([("k", pa.string()), ("at", pa.int64())])

    def plan(self, position: Any, limit: Limit) -> Offer:
        places = dict(position or dict.fromkeys(self._splits, 0))
        ranges, left = [], self._per_epoch
        for name, times in self._splits.items():
            count = min(left, len(times) - places[name])
            if count:
                ranges.append(Range(name, places[name], places[name] + count, records=count))
                places[name] += count
                left -= count
        rest = {n: len(t) - places[n] for n, t in self._splits.items()}
        more = [n for n, count in rest.items() if count] if self._tells else None
        return Offer(
            ranges,
            places,
            backlog=sum(rest.values()),
            exhausted=self._ends and not any(rest.values()),
            splits=list(self._splits),
            waiting=more,
        )

    def read(self, piece: Range, reading: Reading) -> Iterator[pa.Table]:
        times = self._splits[piece.split][piece.start : piece.end]
        yield pa.table({"k": ["a"] * len(times), "at": times}, schema=self.schema())


# Idle


@pytest.mark.parametrize("tells", [True, False])
def test_a_split_whose_records_wait_is_not_idle_however_long_it_is_not_read(tells: bool) -> None:
    source = Queue({"0": list(range(0, 40)), "1": list(range(0, 40, 2))}, 4, tells=tells)
    result = hf.testing.run(counted(source, idle_after="2s"), step_ms=1000)
    assert all("in/1" not in p.idle.get("in.time", ()) for p in result.plans)
    assert result.rows("late") == []
    assert sorted(r["n"] for r in result.rows("out")) == [15] * 4


def test_a_split_that_is_idle_stays_so_while_nobody_knows_whether_it_has_something() -> None:
    before = Splits({"0": 5, "1": 5}, {"0": 0, "1": 0}, ["1"])
    splits, idle = planned(before, ["0", "1"], [], 10_000, 1_000, unsure=["0", "1"])
    assert idle == ["1"]
    assert splits.active_ms == {"0": 10_000, "1": 0}


@given(
    st.sets(NAMES),
    st.sets(NAMES),
    st.sets(NAMES),
    st.sets(NAMES),
    st.integers(0, 100),
    st.none() | st.integers(1, 50),
)
def test_who_has_something_is_never_idle(
    reading: set[str], waiting: set[str], unsure: set[str], declared: set[str], now_ms: int, after: int | None
) -> None:
    before = Splits(dict.fromkeys("abcd", MIN_TIME), dict.fromkeys("abcd", 0))
    splits, idle = planned(
        before, list("abcd"), reading, now_ms, after, waiting=waiting, unsure=unsure, declared=declared
    )
    assert not set(idle) & (reading | waiting)
    assert set(idle) >= declared - reading - waiting
    assert all(splits.active_ms[name] == now_ms for name in reading | waiting | unsure)
    if after is None:
        assert set(idle) <= declared


def test_records_in_memory_leave_no_split_behind() -> None:
    rows = [{"k": "a", "at": second} for _ in range(3) for second in range(20)]
    result = hf.testing.run(counted(hf.records(rows, splits=3, per_epoch=2), idle_after="2s"), step_ms=1000)
    assert result.rows("late") == []
    assert sorted(r["n"] for r in result.rows("out")) == [30, 30]


class Declared(Script):
    """Says from its third epoch on that one of its splits is idle."""

    def plan(self, position: Any, limit: Limit) -> Offer:
        offer = super().plan(position, limit)
        idle = ["1"] if (position or 0) >= 2 else []
        return Offer(offer.ranges, offer.position, exhausted=offer.exhausted, splits=offer.splits, idle=idle)


def test_a_source_may_say_itself_that_a_split_is_idle_and_that_is_worth_an_epoch() -> None:
    source = Declared([{"0": at(1), "1": at(2)}, {"0": at(50)}], splits=["0", "1"], bounded=False)
    result = hf.testing.run(counted(source))
    assert [p.idle for p in result.plans] == [{}, {}, {"in.time": ["in/1"]}]
    assert result.commits[-1].records_in == 0
    assert results(result) == [(3, 2)]


# What is read in vain


def test_a_split_whose_records_are_all_filtered_out_holds_the_clock_only_until_it_is_idle() -> None:
    epochs = [{"0": at(t), "1": at(t, k="noise")} for t in range(0, 60, 10)]
    epochs += [{"0": at(60), "1": at(55)}, {"0": at(70), "1": at(57)}, {"0": at(80), "1": at(64)}]
    source = Script(epochs, splits=["0", "1"], bounded=False)
    made = hf.Pipeline("p")
    timed = made.read("in", source).filter(lambda r: r["k"] == "a")
    timed = timed.event_time("at", unit="s", idle_after="3s", uid="in.time")
    out = timed.key_by("k").window(hf.tumbling("10s")).aggregate("w", n=hf.count())
    out.write("out", hf.memory())
    out.side("late").write("late", hf.memory())
    result = hf.testing.run(made, step_ms=1000)
    idle = [p.idle.get("in.time", []) for p in result.plans]
    assert idle == [[]] * 3 + [["in/1"]] * 4 + [[]] * 2
    assert clocks(result)[2:5] == [MIN_TIME / S, *((t * S - 1) / S for t in (30, 40))]
    # It is heard while it counts as idle: from that very epoch on it is waited for, and nothing of it is late.
    assert clocks(result)[6:] == [(t * S - 1) / S for t in (55, 57, 64)]
    assert result.rows("late") == [] and result.commits[6].heard == {"in.time": ["in/0", "in/1"]}


def test_a_split_that_is_read_in_vain_is_worth_an_epoch_when_it_becomes_idle() -> None:
    source = Script(
        [{"0": at(1), "1": at(1, k="noise")}, {"0": at(50), "1": at(2, k="noise")}],
        splits=["0", "1"],
        bounded=False,
    )
    made = hf.Pipeline("p")
    timed = (
        made.read("in", source)
        .filter(lambda r: r["k"] == "a")
        .event_time("at", unit="s", idle_after="5s", uid="in.time")
    )
    timed.key_by("k").window(hf.tumbling("10s")).aggregate("w", n=hf.count()).write("out", hf.memory())
    result = hf.testing.run(made, step_ms=1000, linger_ms=20_000)
    assert [c.records_in for c in result.commits][:3] == [2, 2, 0]
    assert results(result) == [(3, 1)]


@pytest.mark.parametrize("tells", [True, False])
def test_a_split_that_is_read_in_vain_is_not_idle_while_more_of_it_waits(tells: bool) -> None:
    source = Queue({"0": list(range(40)), "1": [1_000] * 6 + list(range(40))}, 4, tells=tells)
    made = hf.Pipeline("p")
    timed = made.read("in", source).filter(lambda r: r["at"] < 1_000)
    timed = timed.event_time("at", unit="s", idle_after="2s", uid="in.time")
    out = timed.key_by("k").window(hf.tumbling("10s")).aggregate("w", n=hf.count())
    out.write("out", hf.memory())
    out.side("late").write("late", hf.memory())
    result = hf.testing.run(made, step_ms=1000)
    assert all("in/1" not in p.idle.get("in.time", ()) for p in result.plans)
    assert result.rows("late") == []
    assert sorted(r["n"] for r in result.rows("out")) == [20] * 4


def test_to_be_read_in_vain_keeps_no_split_awake_but_one_that_is_heard_is() -> None:
    before = Splits({"0": 5}, {"0": 0}, [], unheard=["0"])
    splits, idle = planned(before, ["0"], ["0"], 10_000, 1_000)
    assert idle == ["0"] and splits.active_ms == {"0": 0} and splits.unheard == ["0"]
    assert still_idle({"a": ["0"]}, {"a": ["0"]}) == {"a": []}


# Behind an exchange


def retimed(source: Source, other: Source, **time: Any) -> hf.Pipeline:
    """What comes out of a keyed operator gets its time anew, and meets a stream that has its own."""
    made = hf.Pipeline("p")
    some = made.read("in", source).filter(lambda r: r["at"] < 1_000)
    totals = some.key_by("k").aggregate("totals", seen=hf.max("at"))
    again = totals.event_time("seen", unit="s", uid="again", **time)
    plain = made.read("other", other).event_time("at", unit="s")
    left = again.map(lambda r: {"k": r["k"], "t": r["seen"]})
    right = plain.map(lambda r: {"k": r["k"], "t": r["at"]})
    both = left.union(right).key_by("k").process("both", Times())
    both.write("out", hf.memory())
    return made


class Times(hf.KeyedProcess):
    """Nothing but a clock."""

    def process(self, key: Any, record: Any, ctx: hf.Context) -> None:
        return None


def test_a_keyed_operator_that_falls_silent_is_not_waited_for_once_it_is_idle() -> None:
    source = Script([{"0": at(1)}, {"0": at(5)}, *[{}] * 4, {"0": at(90)}, {"0": at(91)}], bounded=False)
    other = Script([{"0": at(t)} for t in range(10, 90, 10)], bounded=False)
    held = hf.testing.run(retimed(source, other), step_ms=1000)
    assert clocks(held, "both")[2:6] == [(5 * S - 1) / S] * 4
    freed = hf.testing.run(retimed(source, other, idle_after="2s"), step_ms=1000)
    assert [p.idle.get("again", []) for p in freed.plans] == [[]] * 3 + [["totals"]] * 4 + [[]]
    assert clocks(freed, "both") == [
        (t * S - 1) / S for t in (1, 5, 5, 40, 50, 60, 70, 80)
    ]  # heard again at 90, it holds nobody


def test_what_waits_above_a_keyed_operator_keeps_it_from_being_idle() -> None:
    source = Queue({"0": [1, 2, *[1_000] * 30, 5]}, 2, tells=True)
    other = Script([{"0": at(t)} for t in range(10, 80, 10)])
    result = hf.testing.run(retimed(source, other, idle_after="2s"), step_ms=1000)
    assert result.epochs > 10 and not any(p.idle for p in result.plans)


# A source that ends beside one that goes on


def united(ending: Source, going: Source) -> hf.Pipeline:
    made = hf.Pipeline("p")
    both = made.read("a", ending).union(made.read("b", going)).event_time("at", unit="s", uid="time")
    both.key_by("k").window(hf.tumbling("10s")).aggregate("w", n=hf.count()).write("out", hf.memory())
    return made


def test_a_source_that_has_ended_holds_nobody_and_that_is_worth_an_epoch(tmp_path: Path) -> None:
    ending = Script([{"0": at(1)}, {"0": at(5)}])
    going = Script([{"0": at(30)}, {"0": at(40)}], bounded=False)
    result = hf.testing.run(united(ending, going))
    assert [c.records_in for c in result.commits] == [2, 2, 0]
    assert results(result) == [(3, 2), (3, 1)]
    assert result.commits[-1].marks == {"time": {"b/0": 40 * S - 1}}
    life = live(united(ending, going), tmp_path)  # as `--drain` does
    assert [f.records_in for f in life.facts] == [2, 2, 0]


def test_a_source_that_has_ended_and_held_nobody_is_worth_no_epoch() -> None:
    ending = Script([{"0": at(50)}])
    going = Script([{"0": at(30)}, {"0": at(40)}], bounded=False)
    assert [c.records_in for c in hf.testing.run(united(ending, going)).commits] == [2, 1]


# Given by the source


class Telling(Source):
    """One record, and then nothing but how far it is; `steps` is what it says, by the planned clock or once for all."""

    def __init__(self, *, rises: bool = False) -> None:
        self._rises = rises

    def schema(self) -> pa.Schema:
        return pa.schema([("k", pa.string()), ("at", pa.int64())])

    def plan(self, position: Any, limit: Limit) -> Offer:
        if position is None:
            return Offer([Range("0", 0, 1, records=1)], 1, splits=["0"])
        return Offer([], 1, splits=["0"], watermarks={"0": limit.now_ms if self._rises else 60_000})

    def read(self, piece: Range, reading: Reading) -> Iterator[pa.Table]:
        yield pa.table({"k": ["a"], "at": [1]}, schema=self.schema())


@pytest.mark.parametrize("rises", [False, True])
def test_what_a_source_says_of_time_moves_it_without_records(rises: bool, tmp_path: Path) -> None:
    pipeline = counted(Telling(rises=rises), watermark=hf.from_source())
    result = hf.testing.run(pipeline)
    assert results(result) == [(2, 1)]
    life = live(pipeline, tmp_path)
    assert [f.records_in for f in life.facts] == [1, 0]


def test_a_split_whose_watermark_rises_has_something_to_say_also_without_records() -> None:
    rises = [{"0": 100_000, "1": 20_000 + n * 1000} for n in range(6)]
    source = Script([{"0": at(99)}, {}, {}, {}, {}, {"1": at(60)}], splits=["0", "1"], bounded=False)
    source.watermarks = rises
    result = hf.testing.run(
        counted(source, watermark=hf.from_source(), idle_after="2s"), step_ms=1000, linger_ms=500
    )
    assert sum(c.late.get("w", 0) for c in result.commits) == 0
    assert not any("in/1" in plan.idle.get("in.time", ()) for plan in result.plans[:6])


@given(known=st.dictionaries(NAMES, st.integers(0, 9), min_size=1), now=st.integers(0, 99), data=st.data())
def test_who_rises_is_idle_only_if_its_source_says_so(known: dict[str, int], now: int, data: Any) -> None:
    names = st.frozensets(st.sampled_from(sorted(known)))
    risen, declared = data.draw(names), data.draw(names)
    before = Splits(known, dict.fromkeys(known, 0), data.draw(names))
    splits, idle = planned(before, None, (), now, 5, declared=declared, risen=risen)
    assert set(idle) & risen == risen & declared
    assert all(splits.active_ms[name] == now for name in risen)


def test_a_watermark_that_rises_is_worth_an_epoch_each_interval() -> None:
    def cut(waited_s: float, **facts: Any) -> Wait:
        base = {"records": 0, "full": False, "backlog": 0, "exhausted": False, "drain": False, "risen": True}
        return when_to_cut("data", 1.0, waited_s=waited_s, **{**base, **facts})

    assert (cut(0.0), cut(1.0)) == (Wait.WAIT, Wait.CUT)
    assert cut(1.0, risen=False) is Wait.WAIT
    assert cut(0.0, drain=True) is Wait.CUT
    assert cut(9.0, drain=True, after_records=False) is Wait.END


# Alignment


def leads(result: hf.testing.Result) -> list[float]:
    """How far the fast source was ahead of the slow one, in seconds, while both went on."""
    found = []
    for commit in result.commits:
        marks = [min(commit.marks[uid].values(), default=MIN_TIME) for uid in ("fast.time", "slow.time")]
        if min(marks) > MIN_TIME and max(marks) < 10_000 * S:
            found.append((marks[0] - marks[1]) / S)
    return found


@pytest.mark.parametrize("time", [{}, {"idle_after": "3s"}], ids=["awake", "idle"])
def test_a_source_that_is_held_does_not_become_idle_by_it(time: dict[str, Any]) -> None:
    fast = Script([{"0": at(t)} for t in range(0, 1500, 50)])
    slow = Script([{"0": at(t)} for t in range(30)])
    result = hf.testing.run(two_sources(fast, slow, align="both", drift="60s", **time), step_ms=1000)
    held = [c for c in leads(result) if c]
    assert len(held) >= 20
    assert max(held) <= 60 + 50 + 1
    assert sum(r["n"] for r in result.rows("out")) == 60


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_what_the_faster_side_keeps_stays_bounded_by_the_drift(backend: str) -> None:
    fast = Script([{"0": at(*range(t, t + 50, 10))} for t in range(0, 1500, 50)])
    slow = Script([{"0": at(t)} for t in range(0, 1500, 10)])

    def kept(**time: Any) -> list[int]:
        result = hf.testing.run(two_sources(fast, slow, **time), step_ms=1000, backend=backend)
        assert sum(r["n"] for r in result.rows("out")) == 300
        return [sum(s.sealed.live.get("windows", 0) for s in c.shards["w"]) for c in result.commits]

    assert max(kept()) > 100
    # Of ten seconds each: what the drift allows, one epoch more that was read before it was seen, and what is begun.
    assert max(kept(align="both", drift="60s")) <= 6 + 5 + 2


def test_what_is_held_is_seen_as_backlog_and_as_waiting(tmp_path: Path) -> None:
    fast = Script([{"0": at(t)} for t in (10, 100, 200, 300)])
    slow = Script([{"0": at(t)} for t in (10, 20, 30, 190, 290)])
    life = live(two_sources(fast, slow, align="both", drift="60s"), tmp_path)
    held = [f for f in life.facts if f.watermarks["fast.time"].waits]
    assert [f.epoch for f in held] == [2, 3]
    assert [f.backlog for f in life.facts][2:4] == [1, 1]
    assert {f.watermarks["fast.time"].waits_for for f in held} == {"slow.time (slow/0)"}
    assert not any(f.watermarks["slow.time"].waits for f in life.facts[:3])


def test_alignment_is_refused_where_no_source_is_read() -> None:
    made = hf.Pipeline("p")
    totals = made.read("in", Script([{"0": at(1)}])).key_by("k").aggregate("totals", seen=hf.max("at"))
    totals.event_time("seen", unit="s", uid="again", align="all", drift="1m").write("out", hf.memory())
    with pytest.raises(PipelineError, match="stands behind 'totals'") as caught:
        hf.testing.run(made)
    assert caught.value.uid == "again"
    assert "before key_by" in str(caught.value)


# Seen


def test_a_watermark_that_stands_still_is_told_of_once_with_who_holds_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [1_000_000]

    def tick() -> int:
        clock[0] += 4_000
        return clock[0]

    source = Script(
        [{"0": at(t), "1": at(1)} if t < 3 else {"0": at(t)} for t in range(30)], splits=["0", "1"]
    )
    with caplog.at_level(logging.WARNING, logger="holdfast.driver"):
        life = live(counted(source), tmp_path, clock_ms=tick)
    told = [r.getMessage() for r in caplog.records if "has not moved" in r.getMessage()]
    assert len(told) == 1
    assert "[in.time]" in told[0] and "in/1 holds it back" in told[0]
    assert "idle_after=" in told[0] and "(ascending)" in told[0], "what to do about it, whatever its cause"
    assert life.facts[-2].watermarks["in.time"].still_ms > 60_000
    assert life.facts[-1].watermarks["in.time"].ended


def test_no_split_is_silent_while_nobody_asks(tmp_path: Path) -> None:
    """The driver was away for longer than a split may be silent: what comes of that split afterwards was never late."""
    clock = [1_000_000]
    source = Script([{"0": at(10), "1": at(10)}, {"0": at(40)}, {"1": at(12)}], splits=["0", "1"])
    pipeline = counted(source, idle_after="30s")
    live(pipeline, tmp_path, clock_ms=lambda: clock[0], epochs=1)
    clock[0] += 300_000
    life = live(pipeline, tmp_path, clock_ms=lambda: clock[0])
    plans = [plan for e in range(2, life.driver.last_epoch + 1) if (plan := life.journal.plan(e))]
    assert plans and not any(plan.idle for plan in plans)
    assert not any(facts.late_records for facts in life.facts)


def test_what_a_split_was_silent_before_counts_also_after_nobody_asked(tmp_path: Path) -> None:
    clock = [1_000_000]

    def tick() -> int:
        clock[0] += 7_000
        return clock[0]

    source = Script(
        [{"0": at(t), "1": at(1)} if t < 2 else {"0": at(t)} for t in range(1, 30)], splits=["0", "1"]
    )
    pipeline = counted(source, idle_after="60s")
    away = live(pipeline, tmp_path, clock_ms=tick, epochs=2)
    clock[0] += 500_000
    life = live(pipeline, tmp_path, clock_ms=tick)
    plans = {e: life.journal.plan(e) for e in range(1, life.driver.last_epoch + 1)}
    idle = [e for e, plan in plans.items() if plan is not None and plan.idle]
    after = away.driver.last_epoch + 1
    assert min(idle) > after, "not at once"
    first, asked = plans[min(idle)], plans[after]
    assert first is not None and asked is not None
    assert first.now_ms - asked.now_ms <= 60_000, "and the seconds before count"


def test_of_a_source_that_waits_for_its_group_the_slowest_of_the_group_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = itertools.count(1_000_000, 4_000)
    fast = Script([{"0": at(t)} for t in (10, 1_000, 2_000)])
    slow = Script([{"0": at(t), "1": at(10)} for t in range(10, 30)])
    with caplog.at_level(logging.WARNING, logger="holdfast.driver"):
        live(two_sources(fast, slow, align="both", drift="60s"), tmp_path, clock_ms=lambda: next(clock))
    told = [r.getMessage() for r in caplog.records if "has not moved" in r.getMessage()]
    assert any("[slow.time]" in one and "slow/1 holds it back" in one for one in told)
    (waits,) = (one for one in told if "[fast.time]" in one)
    assert waits.endswith("nothing is read for it until slow.time (slow/1) is as far (align=, drift=)")


def test_where_nothing_comes_any_more_time_falls_behind_and_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, quiet = [1_000_000], []
    life = make(
        counted(Script([{"0": at(1), "1": at(2)}], splits=["0", "1"], bounded=False)),
        tmp_path,
        drain=False,
        clock_ms=lambda: clock[0],
    )

    def hear(watermarks: dict[str, Watermark]) -> None:
        quiet.append(watermarks["in.time"])
        clock[0] += 20_000
        if len(quiet) == 3:
            life.driver.stop()

    life.driver._on_quiet = hear
    with caplog.at_level(logging.WARNING, logger="holdfast.driver"):
        life.driver.start()
        life.driver.run()
    lags = [one.lag_ms for one in quiet]
    assert [round((b - a) / 100) for a, b in itertools.pairwise(lags)] == [200, 200]
    assert quiet[-1].still_ms >= 40_000
    assert sum("in/0 holds it back" in r.getMessage() for r in caplog.records) == 1


def test_of_sources_that_are_united_each_shows_how_far_it_is(tmp_path: Path) -> None:
    made = hf.Pipeline("p")
    one, other = Script([{"0": at(900)}, {"0": at(990), "1": at(950)}]), Script([{"0": at(700)}, {}])
    stream = made.read("in", one).union(made.read("more", other)).event_time("at", unit="s", uid="time")
    stream.key_by("k").window(hf.tumbling("10s")).aggregate("w", n=hf.count()).write("out", hf.memory())
    seen = live(made, tmp_path, clock_ms=lambda: 1_000_000, epochs=1).facts[0].watermarks["time"]
    assert {source: round(ms, -3) for source, ms in seen.sources.items()} == {"in": 100_000, "more": 300_000}
    assert (seen.split, round(seen.lag_ms or 0, -3)) == ("more/0", 300_000)


def test_a_source_that_is_cut_seldom_is_not_said_to_stand_still() -> None:
    assert (ShownTime([])._still_ms, ShownTime([], 60_000)._still_ms) == (30_000, 180_000)


def test_before_anything_is_known_the_sources_are_named(tmp_path: Path) -> None:
    life = live(two_sources(Script([{"0": at(1)}]), Script([{}, {"0": at(3)}])), tmp_path)
    assert life.facts[0].watermarks["slow.time"].split == "slow"


def shown(**facts: Any) -> str:
    base = {
        "ms": 1_714_564_805_000,
        "lag_ms": 65_000,
        "split": "in/1",
        "still_ms": 0,
        "idle": [],
        "ended": False,
        "waits": False,
        "waits_for": "",
        "sources": {"in": 65_000},
    }
    return _event_time("in.time", {**base, **facts}).plain


def test_status_says_how_far_time_is_who_holds_it_and_who_is_not_waited_for() -> None:
    assert shown() == "in.time: 2024-05-01 12:00:05Z, 1:05 behind; in/1 holds it back"
    both = shown(sources={"in": 65_000, "more": 1_000})
    assert (
        both
        == "in.time: 2024-05-01 12:00:05Z, 1:05 behind; in/1 holds it back; by source: in 1:05, more 0:01"
    )
    assert shown(ended=True) == "in.time: ended"
    assert shown(lag_ms=None, ms=None) == "in.time: not known yet; in/1 holds it back"
    assert shown(idle=["in/0"]).endswith("; idle: in/0")
    assert shown(waits=True).endswith("; waits for others of its group")
    assert shown(waits=True, waits_for="b.time (b/0)").endswith("; waits for b.time (b/0)")
    assert shown(still_ms=31_000).endswith("; not moved for 0:31")
    assert "not moved" not in shown(still_ms=29_000)


def test_status_counts_late_records_always_and_others_where_there_are_any() -> None:
    none: dict[str, Any] = {"late_records": {}, "untimed_records": {}, "unseen_records": {}}
    assert _set_aside(none) == [("late records", "0")]
    some = {"late_records": {"w": 2, "x": 3}, "untimed_records": {"t": 4}, "unseen_records": {"w": 1}}
    assert _set_aside(some) == [
        ("late records", "w 2, x 3"),
        ("untimed records", "t 4"),
        ("unseen records", "w 1"),
    ]
