"""Windows record by record: whole-window functions beside DuckDB's SQL, and aggregates beside those in batches."""

from __future__ import annotations

import collections
import datetime as dt
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.errors import PipelineError, SchemaError, UserCodeError
from tests.arrivals import Way, hard_ways, ran, ways
from tests.unit.time.test_event_time import Script, at
from tests.unit.time.test_windows_oracle import ALLOWED, EVENTS, KINDS, Kind, check, dense, events_of
from tests.unit.time.test_windows_oracle import SCHEMA as TOLD

Row = dict[str, Any]
BACKENDS = ["heap", "rocksdb"]
SCHEMA = {"k": str, "at": int, "v": int}


class Values(hf.WindowFunction):
    """The values of a window in their order, and in the order they came."""

    def process(self, key: Any, window: hf.Window, records: list[Row], ctx: hf.Context) -> Iterator[Row]:
        came = [r["v"] for r in records]
        yield {"k": key if key is None else str(key), "n": len(came), "vs": sorted(came), "came": came}


class Numbers(hf.WindowFunction):
    """Which records a window has, and what aggregates would say of them."""

    def process(self, key: Any, window: hf.Window, records: list[Row], ctx: hf.Context) -> Iterator[Row]:
        values = [r["v"] for r in records]
        facts = {"n": len(values), "total": sum(values), "least": min(values)}
        yield {"k": key, **facts, "ns": sorted(r["n"] for r in records)}


class Same(hf.Assigner):
    """The windows of another assigner, which can't be computed in batches."""

    def __init__(self, inner: hf.Assigner) -> None:
        self.inner, self.merging = inner, inner.merging  # type: ignore[misc]

    def assign(self, at_us: int, record: Row) -> Any:
        return self.inner.assign(at_us, record)


class Touching(hf.Assigner):
    """Two seconds around each record, merged."""

    merging = True

    def assign(self, at_us: int, record: Row) -> list[hf.Window]:
        return [hf.Window(at_us - 2_000_000, at_us + 2_000_000)]


def seconds(moment: dt.datetime | None) -> int | None:
    if moment is None:
        return None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=dt.timezone.utc)).timestamp())


def bounds(row: Row) -> tuple[Any, ...]:
    return row["k"], seconds(row["window_start"]), seconds(row["window_end"])


def timed(pipeline: hf.Pipeline, source: Any, **time: Any) -> hf.KeyedStream:
    return pipeline.read("in", source).event_time("at", unit="s", **time).key_by("k")


def over(
    source: Any, window: Any, trigger: hf.Trigger | None = None, *, lateness: str = "0s", **options: Any
) -> hf.testing.Result:
    """All three kinds of results of one window."""
    made = hf.Pipeline("p")
    lag = options.pop("lag", "0s")
    windowed = timed(made, source, out_of_order=lag).window(Same(window)).allowed_lateness(lateness)
    if trigger is not None:
        windowed = windowed.trigger(trigger)
    values = windowed.process("values", Values())
    values.write("out", hf.memory())
    values.side("late").write("late", hf.memory())
    windowed.reduce("reduced", lambda a, b: {**b, "v": a["v"] + b["v"]}).write("sums", hf.memory())
    windowed.aggregate("aggregated", n=hf.count(), total=hf.sum("v")).write("totals", hf.memory())
    return hf.testing.run(made, **options)


def came(result: hf.testing.Result) -> list[list[int]]:
    """What each result holds, in the order they came; all three kinds agree on it."""
    found = [r["came"] for r in result.rows("out")]
    assert [sum(f) for f in found] == [r["v"] for r in result.rows("sums")]
    assert [(len(f), sum(f)) for f in found] == [(r["n"], r["total"]) for r in result.rows("totals")]
    assert [bounds(r) for r in result.rows("out")] == [bounds(r) for r in result.rows("sums")]
    assert [bounds(r) for r in result.rows("out")] == [bounds(r) for r in result.rows("totals")]
    return found


def epochs(*rows: list[Row], bounded: bool = False) -> Script:
    """Records by epoch, each with its number as its value."""
    number = iter(range(1, 1000))
    return Script([{"0": [{**r, "v": next(number)} for r in part]} for part in rows], bounded=bounded)


# Beside SQL

ALL_KINDS = {**KINDS, "one's own that merge": Kind(Touching, gap="2", back="2")}


@pytest.mark.parametrize("name", ALL_KINDS)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@hard_ways(found=dense(1, 45), allowed=8, whole=True)
@given(found=EVENTS, way=ways(), allowed=ALLOWED, whole=st.booleans())
def test_every_window_has_the_records_that_sql_says_once(
    name: str, found: Any, way: Way, allowed: int, whole: bool
) -> None:
    kind = ALL_KINDS[name]
    lateness_s = allowed * kind.unit_s

    def build(stream: hf.KeyedStream) -> hf.Stream:
        windowed = stream.window(Same(kind.window())).allowed_lateness(f"{lateness_s}s")
        if whole:
            return windowed.process("x", Numbers())
        return windowed.reduce("x", lambda a, b: {**b, "v": a["v"] + b["v"]})

    events = events_of(found, kind)
    run = ran(way, {"e": events}, TOLD, build, "late", unit_s=kind.unit_s, merges=bool(kind.gap))
    kept = ("n", "total", "least", "ns") if whole else ("v",)
    rows = [(*bounds(r), *(r[name] for name in kept)) for r in run.rows("out")]
    columns = (0, 1, 2, 3, 4, 5, 6) if whole else (0, 1, 2, 4)
    check(run, rows, kind, lateness_s, columns=columns, one_by_one=True)


# Beside aggregates in batches


class Joined(hf.Aggregate):
    """The values in order, as text."""

    accumulator = list[int]
    result_type = str

    def create(self) -> list[int]:
        return []

    def add(self, accumulator: list[int], record: Row) -> list[int]:
        return [*accumulator, record["v"]]

    def merge(self, left: list[int], right: list[int]) -> list[int]:
        return left + right

    def result(self, accumulator: list[int]) -> str:
        return ",".join(map(str, sorted(accumulator)))


class Fields(Joined):
    """The values of records that have the fields they came with, and none of ours."""

    def add(self, accumulator: list[int], record: Row) -> list[int]:
        assert set(record) == {"k", "at", "v"}
        return super().add(accumulator, record)


NEW_YORK = pa.timestamp("us", "America/New_York")
PUT_BACK = [
    {"k": "a", "at": dt.datetime(2024, 11, 3, hour, minute, tzinfo=dt.timezone.utc), "v": hour * 100 + minute}
    for minute in (5, 10, 40)
    for hour in (5, 6)  # both are called one o'clock in New York
]


@pytest.mark.parametrize("key", ["k", lambda r: r["k"]], ids=["column", "function"])
@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (hf.tumbling("30m"), ["505,510", "540", "605,610", "640"]),
        (hf.sliding("30m", "10m"), None),
        (hf.session("10m"), ["505,510", "540", "605,610", "640"]),
    ],
    ids=["tumbling", "sliding", "session"],
)
def test_an_aggregate_of_ones_own_tells_instants_apart_that_a_zone_calls_by_one_name(
    key: Any, window: Any, expected: list[str] | None
) -> None:
    made = hf.Pipeline("p")
    schema = {"k": str, "at": NEW_YORK, "v": int}
    stream = made.read("in", hf.records(PUT_BACK, schema=schema)).event_time("at", out_of_order="2h")
    keyed = stream.key_by(key)
    keyed.window(window).aggregate("own", vs=Fields(), n=hf.count()).write("out", hf.memory())
    keyed.window(Same(window)).aggregate("again", vs=Fields(), n=hf.count()).write("one", hf.memory())
    result = hf.testing.run(made)
    rows = [(r["vs"], r["n"]) for r in result.rows("out")]
    assert sorted(rows) == sorted((r["vs"], r["n"]) for r in result.rows("one"))
    assert all(len(vs.split(",")) == n for vs, n in rows)
    if expected is not None:
        assert sorted(vs for vs, _ in rows) == expected


def both_ways(events: list[Row], window: Callable[[], Any], lag: str, lateness: str, **options: Any) -> Any:
    splits, per_epoch = options.pop("splits"), options.pop("per_epoch")
    made = hf.Pipeline("both")
    source = hf.records(events, splits=splits, per_epoch=per_epoch, schema=SCHEMA)
    stream = timed(made, source, out_of_order=lag)
    for uid, assigner in (("fast", window()), ("general", Same(window()))):
        out = (
            stream.window(assigner)
            .allowed_lateness(lateness)
            .aggregate(
                uid,
                n=hf.count(),
                some=hf.count("v"),
                total=hf.sum("v"),
                least=hf.min("v"),
                most=hf.max("v"),
                mean=hf.mean("v"),
                about=hf.approx_distinct("v"),
                all=Joined(),
            )
        )
        out.write(f"{uid}-out", hf.memory())
        out.side("late").write(f"{uid}-late", hf.memory())
    return hf.testing.run(made, **options)


IN_BATCHES = ("tumbling", "sliding", "sliding, uneven and offset", "session")


def untold(found: list[tuple[Any, int, int]]) -> list[Row]:
    return [{"k": k, "at": t, "v": v} for k, t, v in found]


OPTIONS: dict[str, Any] = {
    "drawn": EVENTS,
    "splits": st.integers(1, 3),
    "per_epoch": st.sampled_from([2, 5, 9, 50]),
    "parallelism": st.sampled_from([1, 3]),
    "backend": st.sampled_from(["heap", "heap", "rocksdb"]),
}


@pytest.mark.parametrize("kind", IN_BATCHES)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(**OPTIONS)
def test_aggregates_are_those_in_batches(kind: str, drawn: Any, **options: Any) -> None:
    result = both_ways(untold(drawn), KINDS[kind].window, "200s", "0s", **options)
    fast, general = (sorted(map(repr, result.rows(f"{uid}-out"))) for uid in ("fast", "general"))
    assert general == fast


@pytest.mark.parametrize("kind", IN_BATCHES)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    **OPTIONS,
    lag=st.sampled_from(["0s", "5s", "20s"]),
    lateness=st.sampled_from(["0s", "8s", "50s"]),
)
def test_the_same_records_are_late_and_the_last_result_of_each_window_is_the_same(
    kind: str, drawn: Any, lag: str, lateness: str, **options: Any
) -> None:
    events = [{**e, "v": n} for n, e in enumerate(untold(drawn))]
    result = both_ways(events, KINDS[kind].window, lag, lateness, **options)
    late = {uid: sorted(r["v"] for r in result.rows(f"{uid}-late")) for uid in ("fast", "general")}
    assert late["general"] == late["fast"]
    counts = [collections.Counter[str]() for _ in late]
    for count, uid in zip(counts, late, strict=True):
        count["late"] = sum(c.late.get(uid, 0) for c in result.commits)
    assert counts[0] == counts[1] == {"late": len(late["fast"])}
    if kind == "session":  # one by one, late records also show sessions on their way to the one they end in
        fast, general = (set(map(repr, result.rows(f"{uid}-out"))) for uid in ("fast", "general"))
        assert fast <= general
    else:
        last = {uid: {bounds(r): r for r in result.rows(f"{uid}-out")} for uid in late}
        assert last["general"] == last["fast"]


def test_first_and_last_are_by_arrival() -> None:
    events = [{"k": "a", "at": s, "v": s} for s in (5, 1, 12, 3, 11)]
    made = hf.Pipeline("p")
    stream = timed(made, hf.records(events, per_epoch=2), out_of_order="60s")
    for uid, window in (("fast", hf.tumbling("10s")), ("general", Same(hf.tumbling("10s")))):
        out = stream.window(window).aggregate(uid, first=hf.first("v"), last=hf.last("v"))
        out.write(f"{uid}-out", hf.memory())
    result = hf.testing.run(made)
    assert [(r["first"], r["last"]) for r in result.rows("general-out")] == [(5, 3), (12, 11)]
    assert result.rows("general-out") == result.rows("fast-out")


# Windows that merge


@pytest.mark.parametrize("backend", BACKENDS)
def test_sessions_that_merge_add_up_their_counts_and_keep_the_order_of_arrival(backend: str) -> None:
    source = epochs(at(10), at(0, 20), at(1), at(5, 15), at(6, 7))
    trigger = hf.triggers.count(5)
    result = over(source, hf.session("5s"), trigger, lag="60s", backend=backend)
    assert came(result) == [[1, 2, 3, 4, 5, 6]]
    assert bounds(result.rows("out")[0])[1:] == (0, 25)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_session_that_was_purged_goes_on(backend: str) -> None:
    trigger = hf.triggers.purging(hf.triggers.count(2))
    source = epochs(at(0, 3), at(6), at(9), at(40, 41), at(90))
    result = over(source, hf.session("5s"), trigger, lag="20s", backend=backend)
    assert came(result) == [[1, 2], [3, 4], [5, 6]]
    assert [bounds(r)[1:] for r in result.rows("out")] == [(0, 8), (0, 14), (40, 46)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_record_that_joins_two_sessions_brings_the_records_of_both(backend: str) -> None:
    many = [at(*range(0, 4)), at(*range(20, 32)), at(4, 5), at(*range(8, 12)), at(16), at(13), at(120)]
    result = over(epochs(*many), hf.session("5s"), lag="60s", backend=backend)
    assert came(result) == [list(range(1, 25))]
    assert bounds(result.rows("out")[0])[1:] == (0, 36)
    assert {n: t.num_rows for n, t in result.state("values").items()} == {
        "windows": 1,
        "open": 1,
        "records": 1,
        "timers.event": 1,
    }


def test_a_gap_may_depend_on_the_record() -> None:
    window = hf.session(lambda r: "20s" if r["v"] == 2 else "2s")
    result = over(epochs(at(0), at(10), at(25), at(40), at(90), bounded=True), window)
    assert [bounds(r)[1:] for r in result.rows("out")] == [(0, 2), (10, 30), (40, 42), (90, 92)]
    assert came(result) == [[1], [2, 3], [4], [5]]


# Late records


@pytest.mark.parametrize("backend", BACKENDS)
def test_late_records_come_again_within_the_lateness_and_at_the_side_behind_it(backend: str) -> None:
    source = epochs(at(1, 2), at(15), at(3), at(4, 30), at(5))
    result = over(source, hf.tumbling("10s"), lateness="10s", backend=backend)
    assert came(result) == [[1, 2], [1, 2, 4], [1, 2, 4, 5], [3]]
    assert [r["v"] for r in result.rows("late")] == [7]
    assert [c.late.get("values", 0) for c in result.commits] == [0, 0, 0, 0, 1]


def test_a_record_that_is_late_for_some_of_its_windows_is_in_the_others() -> None:
    result = over(epochs(at(1), at(25), at(8), at(70), bounded=True), hf.sliding("20s", "10s"))
    found = {bounds(r)[1:]: r["came"] for r in result.rows("out")}
    assert found[(-10, 10)] == [1]
    assert found[(0, 20)] == [1]
    assert [r["v"] for r in result.rows("late")] == [3]
    result = over(epochs(at(1), at(15), at(8), at(70), bounded=True), hf.sliding("20s", "10s"))
    found = {bounds(r)[1:]: r["came"] for r in result.rows("out")}
    assert (found[(-10, 10)], found[(0, 20)]) == ([1], [1, 2, 3])
    assert result.rows("late") == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_late_records_that_touch_an_open_session_only_through_each_other_are_in_it(backend: str) -> None:
    source = epochs(at(20), at(23), at(8, 12, 16), at(60))
    result = over(source, hf.session("5s"), backend=backend)
    assert came(result) == [[1, 2, 3, 4, 5]]
    assert bounds(result.rows("out")[0])[1:] == (8, 28)
    assert result.rows("late") == []


class Gaps(hf.Assigner):
    """Every second of ten is in a window; the rest is in none."""

    def assign(self, at_us: int, record: Row) -> Iterator[hf.Window]:
        second = at_us // 1_000_000
        if second % 10 < 5:
            start = (second - second % 10) * 1_000_000
            yield hf.Window(start, start + 5_000_000)


def test_windows_of_ones_own_may_leave_gaps_whose_records_are_in_none() -> None:
    result = over(epochs(at(1, 7, 4), at(12, 30), at(8), bounded=True), Gaps())
    assert came(result) == [[1, 3], [4], [5]]
    assert result.rows("late") == []
    assert {
        sum(c.unseen.get(uid, 0) for c in result.commits) for c in result.commits for uid in c.unseen
    } == {2}


def test_windows_of_ones_own_may_merge() -> None:
    result = over(epochs(at(2, 9), at(6), at(40), bounded=True), Touching(), lag="20s")
    assert [bounds(r)[1:] for r in result.rows("out")] == [(0, 11), (38, 42)]
    assert came(result) == [[1, 2, 3], [4]]


# What functions may do, and errors


class Telling(hf.WindowFunction):
    """Sends large windows to the side, draws a number, and changes what it was given."""

    side_outputs = ("large",)

    def open(self) -> None:
        self.opened = True

    def process(self, key: Any, window: hf.Window, records: list[Row], ctx: hf.Context) -> list[Row] | None:
        assert self.opened
        if len(records) > 2:
            ctx.emit("large", {"k": key, "n": len(records), "end_ms": ctx.time_ms})
        for record in records:
            record["v"] = -1
        records.clear()
        return [{"k": key, "id": str(ctx.uuid()), "window_end": window.end}]


def test_functions_have_side_outputs_and_randomness_and_their_own_copies() -> None:
    made = []
    for parallelism in (1, 2, 4):
        pipeline = hf.Pipeline("p")
        events = [{"k": f"k{i % 7}", "at": i // 2, "v": i} for i in range(60)]
        stream = timed(pipeline, hf.records(events, per_epoch=9))
        windowed = stream.window(hf.tumbling("10s")).trigger(hf.triggers.event_time(early_count=1))
        out = windowed.process("told", Telling())
        out.write("out", hf.memory())
        out.side("large").write("large", hf.memory())
        windowed.process("both", Values()).write("values", hf.memory())
        result = hf.testing.run(pipeline, parallelism=parallelism)
        made.append({uid: result.rows(uid) for uid in ("out", "large", "values")})
    assert made[0] == made[1] == made[2]
    ids = [r["id"] for r in made[0]["out"]]
    assert len(ids) == len(set(ids)) > 60
    assert {r["window_end"] for r in made[0]["out"]} == {10_000_000, 20_000_000, 30_000_000}
    assert made[0]["large"] and all(r["end_ms"] % 10_000 == 9_999 for r in made[0]["large"])
    assert all(v >= 0 for r in made[0]["values"] for v in r["vs"])


class Spoiling(hf.WindowFunction):
    """Adds up, and leaves nothing of what it was given as it was."""

    def process(self, key: Any, window: hf.Window, records: list[Row], ctx: hf.Context) -> Iterator[Row]:
        total = sum(r["v"] for r in records)
        for record in records:
            record["v"] = -1000
        yield {"k": key, "total": total}


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_function_does_to_records_is_not_seen_when_the_window_fires_again(backend: str) -> None:
    made = hf.Pipeline("p")
    stream = timed(made, epochs(at(1, 2), at(3), at(30)))
    windowed = stream.window(hf.tumbling("10s")).trigger(hf.triggers.event_time(early_count=1))
    windowed.process("w", Spoiling()).write("out", hf.memory())
    assert [r["total"] for r in hf.testing.run(made, backend=backend).rows("out")] == [1, 3, 6, 4, 6]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fold_may_change_its_left_record_and_no_other_window_sees_it(backend: str) -> None:
    def add(left: Row, right: Row) -> Row:
        left["v"] += right["v"]
        return left

    made = hf.Pipeline("p")
    stream = timed(made, epochs(at(1, 2), at(3, 12), at(60)))
    stream.window(hf.sliding("20s", "10s")).reduce("w", add).write("out", hf.memory())
    rows = hf.testing.run(made, backend=backend).rows("out")
    assert [(*bounds(r)[1:], r["v"]) for r in rows] == [(-10, 10, 6), (0, 20, 10), (10, 30, 4)]


class Clocked(hf.WindowFunction):
    """Where the watermark was when it was called."""

    def process(self, key: Any, window: hf.Window, records: list[Row], ctx: hf.Context) -> Iterator[Row]:
        yield {"k": key, "by": ctx.watermark_ms}


def test_a_function_sees_the_watermark_that_made_its_window_fire() -> None:
    made = hf.Pipeline("p")
    timed(made, epochs(at(1), at(12))).window(hf.tumbling("10s")).process("w", Clocked()).write(
        "out", hf.memory()
    )
    assert [r["by"] for r in hf.testing.run(made).rows("out")] == [11_999]


def test_a_declared_schema_gets_the_bounds_of_the_window() -> None:
    made = hf.Pipeline("p")
    schema = {"k": str, "n": int, "vs": list[int], "came": list[int]}
    zoned = [{"k": "a", "at": dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc), "v": 1}]
    stream = made.read("in", hf.records(zoned)).event_time("at").key_by("k")
    stream.window(hf.tumbling("1d")).process("w", Values(), schema=schema).write("out", hf.memory())
    table = hf.testing.run(made).table("out")
    assert table is not None
    assert table.schema.names == [*schema, "window_start", "window_end"]
    assert table.schema.field("window_end").type == pa.timestamp("us", "UTC")
    assert table["window_end"].to_pylist() == [dt.datetime(2024, 1, 2, tzinfo=dt.timezone.utc)]


def test_results_of_a_window_are_on_time_for_the_next() -> None:
    made = hf.Pipeline("p")
    stream = timed(made, epochs(at(1, 2), at(11), at(25), at(90), bounded=True))
    first = stream.window(hf.tumbling("10s")).process("first", Values())
    second = (
        first.key_by("k")
        .window(hf.tumbling("20s"))
        .reduce("second", lambda a, b: {**b, "n": a["n"] + b["n"]})
    )
    second.write("out", hf.memory())
    result = hf.testing.run(made)
    assert [(*bounds(r)[1:], r["n"]) for r in result.rows("out")] == [(0, 20, 3), (20, 40, 1), (80, 100, 1)]
    assert not any(c.late for c in result.commits)


def test_a_function_of_the_record_may_be_the_key() -> None:
    made = hf.Pipeline("p")
    stream = made.read("in", epochs(at(1, 2), at(11), bounded=True)).event_time("at", unit="s")
    keyed = stream.key_by(lambda r: (r["k"] * 2, r["v"] % 2)).window(Same(hf.tumbling("10s")))
    keyed.aggregate("w", n=hf.count()).write("out", hf.memory())
    keyed.process("both", Values()).write("all", hf.memory())
    result = hf.testing.run(made)
    rows = sorted((r["key0"], r["key1"], r["n"]) for r in result.rows("out"))
    assert rows == [("aa", 0, 1), ("aa", 1, 1), ("aa", 1, 1)]
    assert sorted(r["came"] for r in result.rows("all")) == [[1], [2], [3]]


def test_a_field_that_was_null_so_far_takes_its_first_type() -> None:
    def fold(a: Row, b: Row) -> Row:
        return {**b, "note": "two"}

    made = hf.Pipeline("p")
    stream = made.read("in", epochs(at(1), at(2), at(30), bounded=True)).event_time("at", unit="s")
    noted = stream.map(lambda r: {**r, "note": "late" if r["at"] == 30 else None, "note2": None})
    windowed = noted.key_by("k").window(hf.tumbling("10s"))
    windowed.reduce("reduced", fold).write("out", hf.memory())
    windowed.process("both", Values()).write("values", hf.memory())
    for backend in BACKENDS:
        result = hf.testing.run(made, backend=backend)
        assert [(r["v"], r["note"]) for r in result.rows("out")] == [(2, "two"), (3, "late")]
        assert [r["came"] for r in result.rows("values")] == [[1, 2], [3]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_aggregate_over_a_column_that_was_null_so_far_takes_its_first_type(backend: str) -> None:
    made = hf.Pipeline("p")
    stream = made.read("in", epochs(at(1, 2), at(3), at(30), bounded=True)).event_time("at", unit="s")
    noted = stream.map(lambda r: {**r, "w": r["v"] if r["v"] > 2 else None})
    windowed = noted.key_by("k").window(Same(hf.tumbling("10s")))
    windowed.aggregate("sums", total=hf.sum("w"), least=hf.min("w"), n=hf.count()).write("out", hf.memory())
    rows = hf.testing.run(made, backend=backend).rows("out")
    assert [(r["total"], r["least"], r["n"]) for r in rows] == [(3, 3, 3), (4, 4, 1)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_union_may_bring_other_fields_later(backend: str) -> None:
    made = hf.Pipeline("p")
    some = made.read("in", epochs(at(1), at(2), at(3), at(4), bounded=True)).event_time("at", unit="s")
    left = some.filter(lambda r: r["v"] < 3).map(lambda r: {"k": "a", "at": r["at"], "v": r["v"]})
    right = some.filter(lambda r: r["v"] >= 3).map(
        lambda r: {"extra": "x", "k": "a", "at": r["at"], "v": r["v"]}
    )
    windowed = left.union(right).key_by("k").window(hf.tumbling("10s"))

    class Extras(hf.WindowFunction):
        def process(self, key: Any, window: hf.Window, records: list[Row], ctx: hf.Context) -> Iterator[Row]:
            yield {"k": key, "extras": [r["extra"] for r in records]}

    windowed.process("values", Extras()).write("out", hf.memory())
    windowed.reduce("reduced", lambda a, b: {**b, "v": a["v"] + b["v"]}).write("sums", hf.memory())
    result = hf.testing.run(made, backend=backend)
    assert [r["extras"] for r in result.rows("out")] == [[None, None, "x", "x"]]
    assert [(r["v"], r["extra"]) for r in result.rows("sums")] == [(10, "x")]


class Broken(hf.WindowFunction):
    def process(self, key: Any, window: hf.Window, records: list[Row], ctx: hf.Context) -> Iterator[Row]:
        yield {"n": 1 // (len(records) - 2)}


def test_a_function_that_raises_is_named_with_its_key_and_window() -> None:
    made = hf.Pipeline("p")
    windowed = timed(made, epochs(at(1, 2), at(30), bounded=True)).window(hf.tumbling("10s"))
    windowed.process("broken", Broken()).write("out", hf.memory())
    with pytest.raises(UserCodeError, match="ZeroDivisionError") as raised:
        hf.testing.run(made)
    text = f"{raised.value}\n{raised.value.facts()}"
    assert "broken" in text and "key: 'a'" in text
    assert "window: Window[1970-01-01T00:00:00Z, 1970-01-01T00:00:10Z)" in text
    assert "1 // (len(records) - 2)" in text


def test_what_is_no_window_function_or_trigger_is_refused() -> None:
    made = hf.Pipeline("p")
    windowed = timed(made, epochs(at(1), bounded=True)).window(hf.tumbling("10s"))
    with pytest.raises(PipelineError, match="WindowFunction"):
        windowed.process("w", hf.KeyedProcess())  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match="is no trigger"):
        windowed.trigger("count")  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match="a function of two records"):
        windowed.reduce("w", 5)  # type: ignore[arg-type]

    class Late(hf.WindowFunction):
        side_outputs = ("late",)

    with pytest.raises(PipelineError, match="side output 'late'"):
        windowed.process("w", Late())

    class Timed(hf.WindowFunction):
        def process(self, key: Any, window: hf.Window, records: list[Row], ctx: hf.Context) -> None:
            ctx.set_timer(5)

    windowed.process("timed", Timed()).write("out", hf.memory())
    with pytest.raises(PipelineError, match="can't set timers"):
        hf.testing.run(made)


def test_a_reduce_that_changes_the_shape_of_records_says_so() -> None:
    made = hf.Pipeline("p")
    windowed = timed(made, epochs(at(1, 2), at(30))).window(hf.tumbling("10s"))
    windowed.reduce("r", lambda a, b: {"total": 1}).write("out", hf.memory())
    with pytest.raises(SchemaError, match="'total'"):
        hf.testing.run(made)


def test_an_assigner_that_gives_no_windows_but_something_else_is_named() -> None:
    class Wrong(hf.Assigner):
        def __init__(self, given: Any) -> None:
            self.given = given

        def assign(self, at_us: int, record: Row) -> Any:
            return [self.given]

    for wrong in ((0, 1), hf.Window(5, 5), hf.Window(0, 1 << 63), hf.Window(0.5, 2)):  # type: ignore[arg-type]
        with pytest.raises(PipelineError, match=r"\[\w+\] Same gave .*, which is no window"):
            over(epochs(at(1)), Wrong(wrong))


@pytest.mark.slow
def test_the_same_plans_lead_to_the_same_rows_with_any_parallelism() -> None:
    events = [{"k": f"k{i % 5}", "at": (i * 7919) % 300, "v": i} for i in range(400)]
    triggers = [
        None,
        hf.triggers.count(3),
        hf.triggers.continuous_event_time("7s"),
        hf.triggers.event_time(early="2s"),
    ]
    for window in (KINDS[name].window for name in IN_BATCHES):
        for trigger in triggers:
            made = []
            for parallelism, backend in ((1, "heap"), (3, "rocksdb")):
                source = hf.records(events, splits=2, per_epoch=40)
                result = over(
                    source,
                    window(),
                    trigger,
                    lag="20s",
                    lateness="10s",
                    parallelism=parallelism,
                    backend=backend,
                )
                assert came(result)
                made.append({uid: result.rows(uid) for uid in ("out", "late", "sums", "totals")})
            assert made[0] == made[1]


def test_results_of_a_global_window_have_no_time_until_they_are_given_one() -> None:
    def counted(*, again: bool) -> hf.Pipeline:
        made = hf.Pipeline("p")
        stream = timed(made, epochs(at(1, 2), at(30), bounded=True)).window(hf.global_window())
        newest = stream.trigger(hf.triggers.count(1)).reduce("newest", lambda a, b: b)
        newest = newest.event_time("at", unit="s") if again else newest
        newest.key_by("k").window(hf.tumbling("10s")).aggregate("n", n=hf.count()).write("out", hf.memory())
        return made

    with pytest.raises(PipelineError, match="needs event time"):
        hf.testing.run(counted(again=False))
    assert [r["n"] for r in hf.testing.run(counted(again=True)).rows("out")] == [2, 1]
