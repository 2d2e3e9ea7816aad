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
from tests.arrivals import ANY_ORDER, HARD, Run, Way, ran, ways
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
                {"epoch": plan.epoch, "now_ms": plan.now_ms, "clock": plan.clocks.get("x", MIN_TIME)}
                for plan in run.plans
            ],
            pa.schema([("epoch", pa.int64()), ("now_ms", pa.int64()), ("clock", pa.int64())]),
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
@example(found=dense(1, 45), way=HARD, size=2, purging=False)
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
@example(found=dense(1, 45), way=HARD, size=2)
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
@example(found=dense(1, 45), way=HARD)
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
