"""Windows of aggregates beside DuckDB's SQL over the same events: however they arrive, and however they are run."""

from __future__ import annotations

import dataclasses
import datetime as dt
import random
from collections.abc import Callable
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.time.units import MIN_TIME
from tests.arrivals import HARD, Run, Way, hard_ways, ran, ways

Row = dict[str, Any]
Results = list[tuple[Any, ...]]
SCHEMA = pa.schema([("k", pa.string()), ("at", pa.int64()), ("v", pa.int64()), ("n", pa.int64())])
HOUR_S = 3600
QUICK = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def even(size: int, slide: int, offset: int = 0) -> str:
    """Each event with each of its windows, which are counted from 1970."""
    last = f"cast(floor((ts - {offset}) / {slide}) as bigint) * {slide} + {offset}"
    starts = f"generate_series({last} - ({size} - 1) // {slide} * {slide}, {last}, {slide})"
    return (
        f"select *, s + {size} as e from (select *, unnest({starts}) as s from events) where ts < s + {size}"
    )


def days(zone: str, count: int = 1) -> str:
    """Each event with the days that it is in by the clock on the wall; or so many of them, of which one starts each day."""
    day = f"date_trunc('day', timezone('{zone}', to_timestamp(ts)))"
    starts = f"(select *, unnest([{', '.join(f'{day} - interval {n} day' for n in range(count))}]) as d from events)"
    first, last = f"timezone('{zone}', d)", f"timezone('{zone}', d + interval {count} day)"
    return f"select *, epoch({first})::bigint as s, epoch({last})::bigint as e from {starts}"


def calendar(zone: str, start: str, length: str) -> str:
    """Each event with the window that it is in by the clock on the wall, of which `start` says when it began."""
    starts = (
        f"(select *, {start} as d from (select *, timezone('{zone}', to_timestamp(ts)) as wall from events))"
    )
    first, last = f"timezone('{zone}', d)", f"timezone('{zone}', d + interval {length})"
    return f"select *, epoch({first})::bigint as s, epoch({last})::bigint as e from {starts}"


RESULTS = """
    select k, s, e, count(*), sum(v), min(v), list(n order by n) from ({windows})
    where (e + {lateness}) * 1000000 - 1 > clock group by k, s, e
"""
LATE = """
    select n from ({windows}) group by n having max((e + {lateness}) * 1000000 - 1 - clock) <= 0 order by n
"""
SESSIONS = """
    create or replace temp table sessions as
    with parts as (
        select k, s, e, n, total, least, true as solid, had, false as came, ns from kept
        union all
        select k, ts - {back}, ts + {gap}, 1, v, v, (ts + {gap} + {lateness}) * 1000000 - 1 > clock, false, true, [n]
        from events where epoch = {epoch}
    ), cut as (
        select *, coalesce(s > max(e) over (
            partition by k order by s, e rows between unbounded preceding and 1 preceding), true) as opens from parts
    ), told as (
        select *, sum(opens::int) over (partition by k order by s, e rows unbounded preceding) as id from cut
    )
    select k, min(s) as s, max(e) as e, sum(n) as n, sum(total) as total, min(least) as least, bool_or(solid) as solid,
        bool_or(had) as had, bool_or(came) as came, list_sort(flatten(list(ns))) as ns, max(e) * 1000000 - 1 <= {after} as ended
    from told group by k, id
"""
KEPT = """
    create or replace temp table kept as select k, s, e, n, total, least, ended as had, ns from sessions
    where solid and (e + {lateness}) * 1000000 - 1 > {after}
"""
OF_ALL = """
    with cut as (
        select *, coalesce(ts > max(ts + {gap}) over (
            partition by k order by ts, n rows between unbounded preceding and 1 preceding), true) as opens from events
    ), told as (
        select *, sum(opens::int) over (partition by k order by ts, n rows unbounded preceding) as id from cut
    )
    select k, min(ts), max(ts + {gap}), count(*), sum(v), min(v) from told group by k, id
"""


@dataclasses.dataclass(frozen=True)
class Kind:
    """Windows, and SQL for them: of each event its windows, or how far a session goes on after it, and began before."""

    window: Callable[[], Any]
    windows: str = ""
    gap: str = ""
    back: str = "0"
    base_s: int = 0
    unit_s: int = 1


def around(day: dt.datetime) -> dict[str, int]:
    """Two and a half days around a day, in half hours."""
    return {"base_s": int(day.timestamp()) - 30 * HOUR_S, "unit_s": HOUR_S // 2}


UTC = dt.timezone.utc
KINDS = {
    "tumbling": Kind(lambda: hf.tumbling("10s"), even(10, 10)),
    "tumbling, offset": Kind(lambda: hf.tumbling("10s", offset="3s"), even(10, 10, 3)),
    "sliding": Kind(lambda: hf.sliding("30s", "10s"), even(30, 10)),
    "sliding, uneven and offset": Kind(lambda: hf.sliding("25s", "10s", offset="4s"), even(25, 10, 4)),
    "sliding, with gaps": Kind(lambda: hf.sliding("6s", "10s"), even(6, 10)),
    "days in Seoul, spring of 1988": Kind(
        lambda: hf.tumbling("1d", zone="Asia/Seoul"),
        days("Asia/Seoul"),
        **around(dt.datetime(1988, 5, 8, tzinfo=UTC)),
    ),
    "days in New York, November": Kind(
        lambda: hf.tumbling("1d", zone="America/New_York"),
        days("America/New_York"),
        **around(dt.datetime(2024, 11, 3, tzinfo=UTC)),
    ),
    "two days in New York, March": Kind(
        lambda: hf.sliding("2d", "1d", zone="America/New_York"),
        days("America/New_York", 2),
        **around(dt.datetime(2024, 3, 10, tzinfo=UTC)),
    ),
    "quarters of a day in New York, November": Kind(
        lambda: hf.tumbling("6h", zone="America/New_York"),
        calendar("America/New_York", "time_bucket(interval 6 hour, wall)", "6 hour"),
        **around(dt.datetime(2024, 11, 3, tzinfo=UTC)),
    ),
    "weeks in New York, November": Kind(
        lambda: hf.tumbling("1w", zone="America/New_York"),
        calendar("America/New_York", "date_trunc('week', wall)", "7 day"),
        base_s=int(dt.datetime(2024, 10, 20, tzinfo=UTC).timestamp()),
        unit_s=6 * HOUR_S,
    ),
    "months in Berlin, spring": Kind(
        lambda: hf.tumbling("1mo", zone="Europe/Berlin"),
        calendar("Europe/Berlin", "date_trunc('month', wall)", "1 month"),
        base_s=int(dt.datetime(2024, 1, 20, tzinfo=UTC).timestamp()),
        unit_s=24 * HOUR_S,
    ),
    "session": Kind(lambda: hf.session("7s"), gap="7"),
    "session, dynamic": Kind(lambda: hf.session(lambda r: abs(r["v"]) + 2), gap="(abs(v) + 2)"),
}


class Oracle:
    """DuckDB, with the events as they arrived at the windows."""

    def __init__(self, events: list[Row], kind: Kind, lateness: int) -> None:
        self._kind, self._lateness = kind, lateness
        self._con = duckdb.connect()
        self._con.execute("set TimeZone = 'UTC'")
        more = [("i", pa.int64()), ("clock", pa.int64()), ("epoch", pa.int64())]
        table = pa.Table.from_pylist(events, pa.schema([*SCHEMA, *more]))
        self._con.register("events", table.rename_columns({"at": "ts"}))

    def _ask(self, text: str, **facts: Any) -> Results:
        kind = self._kind
        text = text.format(
            windows=kind.windows, gap=kind.gap, back=kind.back, lateness=self._lateness, **facts
        )
        return self._con.execute(text).fetchall()

    def fixed(self) -> tuple[Results, list[int]]:
        """The last result of each window, and the events that were late for all of theirs."""
        return self._ask(RESULTS), [n for (n,) in self._ask(LATE)]

    def outside(self) -> int:
        """How many events are in no window."""
        if self._kind.gap:
            return 0
        ((count,),) = self._ask(
            "select (select count(*) from events) - (select count(distinct n) from ({windows}))"
        )
        return int(count)

    def sessions(self, run: Run) -> tuple[Results, list[int]]:
        """All results, and the events that were late.

        Which sessions there are depends on what was forgotten before, so SQL is asked once for each epoch.
        """
        found: Results = []
        late: list[int] = []
        self._ask(
            "create temp table kept "
            "(k varchar, s bigint, e bigint, n bigint, total bigint, least bigint, had bool, ns bigint[])"
        )
        for commit in run.commits:
            after = commit.clocks.get("x", MIN_TIME)
            self._ask(SESSIONS, epoch=commit.epoch, after=after)
            found += self._ask(
                "select k, s, e, n, total, least, ns from sessions where solid and ended and (came or not had)"
            )
            late += [n for (lost,) in self._ask("select ns from sessions where not solid") for n in lost]
            self._ask(KEPT, after=after)
        return found, sorted(late)


def seconds(row: Row) -> tuple[Any, ...]:
    bounds = [row[n] if row[n].tzinfo else row[n].replace(tzinfo=UTC) for n in ("window_start", "window_end")]
    start, end = (int(at.timestamp()) for at in bounds)
    return row["k"], start, end, row["n"], row["total"], row["least"]


def dense(seed: int, count: int) -> list[tuple[Any, int, int]]:
    """Events close enough to share windows: what Hypothesis draws by itself seldom are."""
    rng = random.Random(seed)
    return [(rng.choice(["a", "b", None]), rng.randrange(120), rng.randint(-5, 5)) for _ in range(count)]


EVENTS = st.one_of(
    st.builds(dense, st.integers(0, 9999), st.integers(20, 60)),
    st.lists(st.tuples(st.sampled_from(["a", None]), st.integers(0, 120), st.integers(-5, 5)), max_size=12),
)


ALLOWED = st.sampled_from([0, 0, 8, 50])
"""How late a record may be."""


def aggregate(window: Any, lateness_s: int) -> Callable[[hf.KeyedStream], hf.Stream]:
    def build(stream: hf.KeyedStream) -> hf.Stream:
        windowed = stream.window(window).allowed_lateness(f"{lateness_s}s")
        return windowed.aggregate("x", n=hf.count(), total=hf.sum("v"), least=hf.min("v"))

    return build


def events_of(found: list[tuple[Any, int, int]], kind: Kind) -> list[Row]:
    return [
        {"k": k, "at": kind.base_s + t * kind.unit_s, "v": v, "n": n, "t": t}
        for n, (k, t, v) in enumerate(found)
    ]


def check(
    run: Run,
    rows: Results,
    kind: Kind,
    lateness_s: int,
    *,
    columns: tuple[int, ...],
    one_by_one: bool = False,
) -> None:
    """Hold results, and what was late, against SQL; of its columns those that the results have.

    Record by record, each late one shows what its session is by then: at the end of its epoch there is a greater one.
    """
    oracle = Oracle(run.arrived("e"), kind, lateness_s)
    results, late = oracle.sessions(run) if kind.gap else oracle.fixed()
    expected = [tuple(r[c] for c in columns) for r in results]
    if not kind.gap:
        last = {row[:3]: row for row in rows}
        assert lateness_s or len(rows) == len(last), "a window had two results"
        assert sorted(last.values(), key=repr) == sorted(expected, key=repr)
    else:
        early = [row for row in rows if row not in expected] if one_by_one and lateness_s else []
        assert sorted(rows, key=repr) == sorted([*expected, *early], key=repr)
        assert all(any(k == r[0] and r[1] <= s and e <= r[2] for r in results) for k, s, e, *_ in early)
    assert sorted(r["n"] for r in run.rows("late")) == late
    assert run.late == len(late)
    assert sum(c.unseen.get("x", 0) for c in run.commits) == oracle.outside()
    assert run.left == 0


@pytest.mark.parametrize("name", KINDS)
@QUICK
@hard_ways(found=dense(1, 45), allowed=8)
@given(found=EVENTS, way=ways(), allowed=ALLOWED)
def test_windows_are_what_sql_says_of_what_was_not_late(
    name: str, found: list[tuple[Any, int, int]], way: Way, allowed: int
) -> None:
    kind = KINDS[name]
    lateness_s = allowed * kind.unit_s
    build = aggregate(kind.window(), lateness_s)
    run = ran(
        way, {"e": events_of(found, kind)}, SCHEMA, build, "late", unit_s=kind.unit_s, merges=bool(kind.gap)
    )
    rows = [seconds(r) for r in run.rows("out")]
    check(run, rows, kind, lateness_s, columns=(0, 1, 2, 3, 4, 5), one_by_one="dynamic" in name)


@pytest.mark.parametrize("name", ["session", "session, dynamic"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@hard_ways(found=dense(1, 45), allowed=8)
@given(found=EVENTS, way=ways(lags=(0, 9)), allowed=ALLOWED)
def test_sessions_are_those_of_all_events_wherever_epochs_were_cut(
    name: str, found: list[tuple[Any, int, int]], way: Way, allowed: int
) -> None:
    kind = KINDS[name]
    way = dataclasses.replace(way, idle_after=None, declares=False, disorder=way.lag)
    build = aggregate(kind.window(), allowed)
    run = ran(way, {"e": events_of(found, kind)}, SCHEMA, build, "late", merges=True)
    expected = Oracle(run.arrived("e"), kind, allowed)._ask(OF_ALL)
    assert sorted(map(seconds, run.rows("out")), key=repr) == sorted(expected, key=repr)


@QUICK
@hard_ways(found=dense(1, 45))
@given(found=EVENTS, way=ways())
def test_a_global_window_has_all_records_of_a_key(found: list[tuple[Any, int, int]], way: Way) -> None:
    kind = Kind(hf.global_window, "select *, null as s, null as e from events")
    run = ran(way, {"e": events_of(found, kind)}, SCHEMA, aggregate(hf.global_window(), 0), "late")
    oracle = Oracle(run.arrived("e"), kind, 0)
    expected = oracle._ask("select k, s, e, count(*), sum(v), min(v) from ({windows}) group by k, s, e")
    names = ("k", "window_start", "window_end", "n", "total", "least")
    assert sorted((tuple(r[n] for n in names) for r in run.rows("out")), key=repr) == sorted(
        expected, key=repr
    )
    assert run.late == run.left == 0


PLACED = """
    create temp table placed as
    select k, s, e, v, row_number() over (partition by k, s order by i) as r from ({windows}) where e * 1000000 - 1 > clock
"""
EVERY = """
    select a.k, a.s, a.e, count(*), sum(b.v), min(b.v) from placed a join placed b
    on a.k is not distinct from b.k and a.s = b.s and b.r <= a.r and b.r > a.r - {most}
    where a.r % {size} = 0 group by a.k, a.s, a.e, a.r
"""
UNSEEN = "select coalesce(sum(n), 0)::bigint from (select count(*) % {size} as n from placed group by k, s)"


@pytest.mark.parametrize("name", ["tumbling, offset", "sliding, uneven and offset"])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@hard_ways(found=dense(1, 45), size=2, purging=True)
@given(found=EVENTS, way=ways(), size=st.integers(1, 4), purging=st.booleans())
def test_a_count_fires_for_the_records_that_sql_says(
    name: str, found: list[tuple[Any, int, int]], way: Way, size: int, purging: bool
) -> None:
    kind = KINDS[name]

    def build(stream: hf.KeyedStream) -> hf.Stream:
        trigger = hf.triggers.count(size)
        windowed = stream.window(kind.window()).trigger(hf.triggers.purging(trigger) if purging else trigger)
        return windowed.aggregate("x", n=hf.count(), total=hf.sum("v"), least=hf.min("v"))

    run = ran(way, {"e": events_of(found, kind)}, SCHEMA, build, "late")
    oracle = Oracle(run.arrived("e"), kind, 0)
    oracle._ask(PLACED)
    expected = oracle._ask(EVERY, size=size, most=size if purging else 1_000_000)
    assert sorted(map(seconds, run.rows("out")), key=repr) == sorted(expected, key=repr)
    assert sorted(r["n"] for r in run.rows("late")) == oracle.fixed()[1]
    ((unseen,),) = oracle._ask(UNSEEN, size=size)
    assert sum(c.unseen.get("x", 0) for c in run.commits) == unseen
    assert run.left == 0


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_silence_and_death_are_not_only_drawn(backend: str) -> None:
    way = dataclasses.replace(HARD, backend=backend)
    events = [{"k": k, "at": t, "v": v, "n": n, "t": t} for n, (k, t, v) in enumerate(dense(1, 45))]
    runs = [
        ran(one, {"e": events}, SCHEMA, aggregate(hf.tumbling("10s"), 0), "late")
        for one in (way, dataclasses.replace(way, dies_in=None))
    ]
    assert [run.lacking for run in runs] == [2, 0]
    assert [c.generation for c in runs[0].commits][1:4] == [1, 2, 2]
    assert all(any(plan.idle for plan in run.plans) and run.late for run in runs)
    assert runs[0].plans[3].now_ms - runs[0].plans[2].now_ms == 60_000
    assert runs[0].arrived("e")[:18] == runs[1].arrived("e")[:18], (
        "the plan of the epoch in which it died stands"
    )


def test_the_days_on_which_clocks_change_are_among_the_windows() -> None:
    hours = {}
    for name, kind in KINDS.items():
        if kind.base_s:
            events = [{"k": "a", "at": kind.base_s + t * kind.unit_s, "v": 1, "n": t} for t in range(120)]
            oracle = Oracle([{**e, "i": 0, "clock": 0, "epoch": 1} for e in events], kind, 0)
            hours[name] = sorted({(end - start) // HOUR_S for _, start, end, *_ in oracle.fixed()[0]})
    assert list(hours.values()) == [
        [23, 24],
        [24, 25],
        [47, 48],
        [6, 7],
        [168, 169],
        [696, 720, 743, 744],
    ]


def test_the_same_plans_lead_to_the_same_bytes_with_any_parallelism() -> None:
    events = [{"k": f"k{i % 17}", "at": (i * 7919) % 300, "v": i, "n": i} for i in range(400)]
    for name in ("tumbling", "sliding", "session"):
        made = []
        for parallelism in (1, 2, 4):
            pipeline = hf.Pipeline("windows")
            source = hf.records(events, splits=2, per_epoch=40, schema=SCHEMA)
            stream = pipeline.read("in", source).event_time("at", unit="s", out_of_order="20s").key_by("k")
            out = aggregate(KINDS[name].window(), 10)(stream)
            out.write("out", hf.memory())
            out.side("late").write("late", hf.memory())
            result = hf.testing.run(pipeline, parallelism=parallelism)
            made.append((result.rows("out"), result.rows("late")))
        assert made[0] == made[1] == made[2]
        assert made[0][0]
