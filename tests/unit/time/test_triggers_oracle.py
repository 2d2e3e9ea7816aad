"""Triggers beside DuckDB's SQL over the same events: when a window fires, and what its result has seen by then."""

from __future__ import annotations

import dataclasses
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.testing import FIRST_MS
from holdfast.time.units import MIN_TIME
from tests.arrivals import ANY_ORDER, HARD, Run, Way, hard_ways, ran, ways
from tests.unit.time.test_windows_oracle import (
    EVENTS,
    KINDS,
    SCHEMA,
    Kind,
    Oracle,
    dense,
    even,
    events_of,
    seconds,
)

FEW = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FIXED = ["tumbling, offset", "sliding, uneven and offset"]
BEHIND = dataclasses.replace(HARD, disorder=ANY_ORDER, lag=0, per_step=3, dies_in=None)
"""Records that are behind the clock in windows that are open."""
Found = list[tuple[Any, int, int]]

PLACED = """
    create temp table placed as
    select *, row_number() over (partition by k, s order by i) as r, sum(late) over (partition by k, s order by i) as l from (
        select k, s, e, v, n, i, epoch, (e * 1000000 - 1 <= clock)::int as late from ({windows})
        where (e + {lateness}) * 1000000 - 1 > clock
    )
"""
"""Each record that is not too late, with each of its windows: how many came to that so far, and how many of them late."""
SEEN = """
    select a.k, a.s, a.e, count(*), sum(b.v), min(b.v) from ({firing}) a join placed b
    on a.k is not distinct from b.k and a.s = b.s and {has} group by a.k, a.s, a.e, a.at
"""
"""The results of what fires: `at` tells one firing of a window from the next, `has` which records are in it."""


def results(run: Run) -> list[tuple[Any, ...]]:
    return sorted((seconds(row) for row in run.rows("out")), key=repr)


def fired(run: Run, kind: Kind, lateness_s: int = 0) -> Oracle:
    """DuckDB with what came to each window."""
    oracle = Oracle(run.arrived("e"), kind, lateness_s)
    oracle._ask(PLACED)
    oracle._con.register(
        "epochs",
        pa.Table.from_pylist(
            [
                {
                    "epoch": plan.epoch,
                    "now_ms": plan.now_ms,
                    "clock": plan.clocks.get("x", MIN_TIME),
                    "after": commit.clocks.get("x", MIN_TIME),
                }
                for plan, commit in zip(run.plans, run.commits, strict=True)
            ],
            pa.schema({name: pa.int64() for name in ("epoch", "now_ms", "clock", "after")}),
        ),
    )
    return oracle


def run_with(trigger: hf.Trigger, found: Found, kind: Kind, way: Way, lateness_s: int = 0) -> Run:
    def build(stream: hf.KeyedStream) -> hf.Stream:
        windowed = stream.window(kind.window()).allowed_lateness(f"{lateness_s}s").trigger(trigger)
        return windowed.aggregate("x", n=hf.count(), total=hf.sum("v"), least=hf.min("v"))

    return ran(way, {"e": events_of(found, kind)}, SCHEMA, build, "late")


EARLY = "select k, s, e, r as at from placed where r % {size} = 0"
END = "select distinct k, s, e, 1000000 as at from placed where late = 0"


@pytest.mark.parametrize("name", FIXED)
@FEW
@hard_ways(found=dense(1, 45), size=2, purging=False)
@given(found=EVENTS, way=ways(), size=st.integers(1, 4), purging=st.booleans())
def test_a_window_fires_early_for_so_many_records_and_at_its_end(
    name: str, found: Found, way: Way, size: int, purging: bool
) -> None:
    trigger = hf.triggers.event_time(early_count=size)
    run = run_with(hf.triggers.purging(trigger) if purging else trigger, found, KINDS[name], way)
    oracle = fired(run, KINDS[name])
    # Purged, the end has what came since the last full count, and is no result if that is nothing.
    since = "b.r > (select count(*) from placed c where c.k is not distinct from a.k and c.s = a.s) // {size} * {size}"
    in_early = "b.r <= a.at" + (" and b.r > a.at - {size}" if purging else "")
    expected = oracle._ask(SEEN.replace("{firing}", EARLY).replace("{has}", in_early), size=size)
    expected += oracle._ask(
        SEEN.replace("{firing}", END).replace("{has}", since if purging else "true"), size=size
    )
    assert results(run) == sorted(expected, key=repr)
    assert sorted(r["n"] for r in run.rows("late")) == oracle.fixed()[1]


@pytest.mark.parametrize("name", FIXED)
@FEW
@hard_ways(found=dense(1, 45), size=2)
@given(found=EVENTS, way=ways(lags=(0, 9)), size=st.integers(2, 3))
def test_behind_its_end_a_window_fires_for_so_many_late_records(
    name: str, found: Found, way: Way, size: int
) -> None:
    lateness_s = 50
    trigger = hf.triggers.event_time(late_count=size)
    run = run_with(trigger, found, KINDS[name], way, lateness_s)
    oracle = fired(run, KINDS[name], lateness_s)
    late = "select k, s, e, r as at from placed where late = 1 and l % {size} = 0"
    expected = oracle._ask(SEEN.replace("{firing}", late).replace("{has}", "b.r <= a.at"), size=size)
    expected += oracle._ask(SEEN.replace("{firing}", END).replace("{has}", "b.late = 0"), size=size)
    assert results(run) == sorted(expected, key=repr)
    assert sorted(r["n"] for r in run.rows("late")) == oracle.fixed()[1]


NEAR_NOW = {
    "tumbling": Kind(lambda: hf.tumbling("10s"), even(10, 10), base_s=FIRST_MS // 1000 - 60),
    "sliding": Kind(lambda: hf.sliding("30s", "10s"), even(30, 10), base_s=FIRST_MS // 1000 - 60),
}
"""Some windows have ended by the clock when their records come, and others have not."""
BY_THE_CLOCK = """
    select distinct p.k, p.s, p.e, t.epoch as at from placed p join epochs t
    on t.now_ms >= p.e * 1000 and t.clock < p.e * 1000000 - 1 and p.epoch <= t.epoch
    where t.epoch = p.epoch or t.epoch = (select min(epoch) from epochs where now_ms >= p.e * 1000)
"""
"""A window fires in the first epoch at its end or past it, and again in each that brings it records, until it is forgotten."""


@pytest.mark.parametrize("name", NEAR_NOW)
@settings(FEW, max_examples=30)
@hard_ways(found=dense(1, 45))
@given(found=EVENTS, way=ways())
def test_by_the_clock_a_window_fires_in_the_epoch_that_passes_its_end(
    name: str, found: Found, way: Way
) -> None:
    kind = NEAR_NOW[name]
    run = run_with(hf.triggers.processing_time(), found, kind, way)
    oracle = fired(run, kind)
    expected = oracle._ask(SEEN.replace("{firing}", BY_THE_CLOCK).replace("{has}", "b.epoch <= a.at"))
    assert results(run) == sorted(expected, key=repr)
    assert sorted(r["n"] for r in run.rows("late")) == oracle.fixed()[1]


def test_the_clock_passes_windows_before_their_records_and_after() -> None:
    kind = NEAR_NOW["tumbling"]
    way = dataclasses.replace(HARD, dies_in=None, disorder=ANY_ORDER, lag=200, per_step=2)
    run = run_with(hf.triggers.processing_time(), dense(1, 60), kind, way)
    oracle = fired(run, kind)
    waited = "select count(*) from ({firing}) a where not exists (select 1 from placed b where b.epoch = a.at and b.s = a.s)"
    ((at_once,),) = oracle._ask(f"select count(*) from ({BY_THE_CLOCK})")
    ((later,),) = oracle._ask(waited.replace("{firing}", BY_THE_CLOCK))
    assert at_once > later > 0


WATCHED = """
    with recursive came as (
        select k, s, e, epoch, min({waits_for}) as waits_for from placed where late = 0 group by k, s, e, epoch
    ), watched as (
        select distinct k, s, e, 0::bigint as epoch, null::bigint as waits, false as fires from placed
        union all
        select w.k, w.s, w.e, t.epoch, case when {gone} or {due} then null else {waits} end, {due}
        from watched w join epochs t on t.epoch = w.epoch + 1
        left join came c on c.k is not distinct from w.k and c.s = w.s and c.epoch = t.epoch
    )
    select k, s, e, epoch as at from watched where fires
"""
"""The epochs in which a window fires for what it waits for since it last did: SQL goes with it from one to the next."""


def watched(waits_for: str, due: str) -> str:
    """`waits_for` of a record, of which the least counts, and when it is due; nothing is once the window's end has passed."""
    waits = "least(w.waits, c.waits_for)"
    gone = "t.after >= w.e * 1000000 - 1"
    return (
        WATCHED.replace("{due}", f"coalesce({due}, false)")
        .replace("{gone}", gone)
        .replace("{waits_for}", waits_for)
        .replace("{waits}", waits)
    )


@pytest.mark.parametrize("name", FIXED)
@FEW
@hard_ways(found=dense(1, 45), seconds_=2)
@given(found=EVENTS, way=ways(), seconds_=st.integers(1, 5))
def test_a_window_fires_so_long_after_the_first_record_that_no_result_has_seen(
    name: str, found: Found, way: Way, seconds_: int
) -> None:
    """By the clock of its epochs: nothing is due in the epoch that brought the record."""
    run = run_with(hf.triggers.event_time(early=f"{seconds_}s"), found, KINDS[name], way)
    oracle = fired(run, KINDS[name])
    since = f"(select now_ms from epochs where epochs.epoch = placed.epoch) + {seconds_ * 1000}"
    early = watched(since, "least(w.waits, c.waits_for) <= t.now_ms and t.after < w.e * 1000000 - 1")
    expected = oracle._ask(SEEN.replace("{firing}", early).replace("{has}", "b.epoch <= a.at"))
    expected += oracle._ask(SEEN.replace("{firing}", END).replace("{has}", "true"))
    assert results(run) == sorted(expected, key=repr)


@pytest.mark.parametrize("name", FIXED)
@FEW
@hard_ways(found=dense(1, 45), every=3, lateness_s=50)
@hard_ways(found=dense(1, 45), every=3, lateness_s=0)
@example(found=dense(2, 60), way=BEHIND, every=7, lateness_s=0)
@given(found=EVENTS, way=ways(), every=st.integers(1, 7), lateness_s=st.sampled_from([0, 50]))
def test_a_window_fires_as_event_time_passes_each_period_that_had_records(
    name: str, found: Found, way: Way, every: int, lateness_s: int
) -> None:
    kind = KINDS[name]
    run = run_with(hf.triggers.continuous_event_time(f"{every}s"), found, kind, way, lateness_s)
    oracle = fired(run, kind, lateness_s)
    oracle._con.execute("create temp table clocks as select epoch, clock from epochs")
    ts = "(select ts from events where events.i = placed.i) * 1000000"
    after = f"greatest({ts}, (select clock from clocks where clocks.epoch = placed.epoch) + 1)"
    period = every * 1_000_000
    ends = f"{after} // {period} * {period} + {period} - 1"
    inside = f"case when {ends} < e * 1000000 - 1 then {ends} end"
    # Both the last period that has passed and the window's end are told where one epoch passes both.
    firing = watched(inside, "least(w.waits, c.waits_for) <= t.after and t.clock < w.e * 1000000 - 1")
    expected = oracle._ask(SEEN.replace("{firing}", firing).replace("{has}", "b.epoch <= a.at"))
    late = "select k, s, e, r as at from placed where late = 1"
    expected += oracle._ask(SEEN.replace("{firing}", late).replace("{has}", "b.r <= a.at"))
    expected += oracle._ask(SEEN.replace("{firing}", END).replace("{has}", "b.late = 0"))
    assert results(run) == sorted(expected, key=repr)
    assert sorted(r["n"] for r in run.rows("late")) == oracle.fixed()[1]


GROW = """
    create or replace temp table grown as
    with one as (select k, ts as s, ts + 7 as e, 1 as n, v as total, v as least, {weight} as since, 1 as quiet
            from events where i = {i}),
    met as (select o.* from open o, one where o.k is not distinct from one.k and o.s <= one.e and one.s <= o.e)
    select min(k) as k, min(s) as s, max(e) as e, sum(n) as n, sum(total) as total, min(least) as least, sum(since) as since,
           sum(quiet) as quiet
    from (from one union all from met)
"""
"""The session that a record makes of those it touches: how many records of it no result has seen, and what they count for."""
FIRES = "select k, s, e, n, total, least from grown where since >= {size}"
TAKE_UP = """
    delete from open o using grown g where o.k is not distinct from g.k and o.s <= g.e and g.s <= o.e;
    insert into open select * replace (
        case when since >= {size} then 0 else since end as since, case when since >= {size} then 0 else quiet end as quiet
    ) from grown
"""
OVER = "from open where e * 1000000 - 1 <= {after}"


class Enough(hf.Trigger):
    """Of somebody's own: fires as soon as what no result has seen adds up to so much, and never for its end."""

    can_merge = True

    def __init__(self, least: int) -> None:
        self.least = least

    def on_record(self, record: dict[str, Any], at_us: int, window: hf.Window, ctx: Any) -> hf.Decision:
        ctx.state["open"] = ctx.state.get("open", 0) + record["v"]
        if ctx.state["open"] < self.least:
            return hf.Decision.CONTINUE
        ctx.state["open"] = 0
        return hf.Decision.FIRE

    def on_merge(self, window: hf.Window, ctx: Any, merged: Any) -> None:
        ctx.state["open"] = sum(one.state.get("open", 0) for one in (ctx, *merged))


SESSION_TRIGGERS: dict[str, tuple[Any, str, bool]] = {
    "early and at its end": (lambda n: hf.triggers.event_time(early_count=n), "1", True),
    "count": (hf.triggers.count, "1", False),
    "one's own": (Enough, "v", False),
}
"""Each with what a record counts for, and whether it fires at a window's end."""


@pytest.mark.parametrize("kind_of_trigger", SESSION_TRIGGERS)
@FEW
@hard_ways(found=dense(1, 45), size=2)
@hard_ways(found=dense(1, 45), size=3)
@given(found=EVENTS, way=ways(lags=(0, 9)), size=st.integers(1, 4))
def test_sessions_fire_for_so_many_records_of_all_that_has_become_one(
    kind_of_trigger: str, found: Found, way: Way, size: int
) -> None:
    trigger, weight, ends = SESSION_TRIGGERS[kind_of_trigger]
    kind = KINDS["session"]
    way = dataclasses.replace(way, idle_after=None, declares=False, disorder=way.lag)  # nothing is late

    def build(stream: hf.KeyedStream) -> hf.Stream:
        windowed = stream.window(kind.window()).trigger(trigger(size))
        return windowed.aggregate("x", n=hf.count(), total=hf.sum("v"), least=hf.min("v"))

    run = ran(way, {"e": events_of(found, kind)}, SCHEMA, build, "late", merges=True)
    events = run.arrived("e")
    oracle = Oracle(events, kind, 0)
    ask = oracle._ask
    ask(
        "create temp table open (k varchar, s bigint, e bigint, n bigint, total bigint, least bigint, since bigint, quiet bigint)"
    )
    expected: list[Any] = []
    unseen = 0
    for commit in run.commits:
        for event in (e for e in events if e["epoch"] == commit.epoch):
            ask(GROW, i=event["i"], weight=weight)
            expected += ask(FIRES, size=size)
            ask(TAKE_UP, size=size)
        after = commit.clocks.get("x", MIN_TIME)
        over = ask(f"select k, s, e, n, total, least, quiet {OVER}", after=after)
        expected += [row[:-1] for row in over] if ends else []
        unseen += 0 if ends else sum(row[-1] for row in over)
        ask(f"delete {OVER}", after=after)
    assert results(run) == sorted(expected, key=repr)
    assert sum(c.unseen.get("x", 0) for c in run.commits) == unseen
    assert run.late == run.left == 0
