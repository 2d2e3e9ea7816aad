"""Joins beside DuckDB's SQL over the same records: whatever order they come in, and however they are run."""

from __future__ import annotations

import datetime as dt
import random
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.errors import PipelineError, SchemaError, UserCodeError
from holdfast.time.units import MIN_TIME
from tests.arrivals import Way, hard_ways, ran, ways
from tests.unit.time.test_event_time import Script, at

Row = dict[str, Any]
SCHEMA = pa.schema([("k", pa.string()), ("at", pa.int64()), ("n", pa.int64())])
COLUMNS = ("k", "at", "n")

ON_TIME = """
    with l as materialized (select * from left_rows where left_rows.at * 1000000 > clock),
         r as materialized (select * from right_rows where right_rows.at * 1000000 > clock)
"""
INTERVAL = """
    select l.k, l.at, l.n, r.k, r.at, r.n from l {how} join r
    on l.k is not distinct from r.k and r.at between l.at + {lower} and l.at + {upper}
"""
AS_OF = """
    with l as materialized (select * from left_rows where left_rows.at * 1000000 > clock)
    select l.k, l.at, l.n, r.k, r.at, r.n from l {how} join lateral (
        select * from right_rows as r
        where l.k is not distinct from r.k and r.at <= l.at and r.at >= l.at - {keep} and r.epoch <= l.out
        order by r.at desc, r.i desc limit 1
    ) as r on true
"""
"""What is on time comes out in the epoch `out`, with all that the right had said by then, late or not."""
IN_WINDOWS = """
    select * from (
        select *, unnest(generate_series(e.at // {slide} * {slide} - {size} + {slide}, e.at // {slide} * {slide}, {slide})) as w
        from {side} as e
    ) where (w + {size}) * 1000000 - 1 > clock
"""
WINDOWS = """
    select l.k, l.at, l.n, r.k, r.at, r.n, l.w from ({left}) as l join ({right}) as r
    on l.k is not distinct from r.k and l.w = r.w
"""


NUMBERS = ("i", "clock", "epoch", "out")
ARRIVED = pa.schema([(name, pa.string() if name == "k" else pa.int64()) for name in (*COLUMNS, *NUMBERS)])


def sql(text: str, left: list[Row], right: list[Row]) -> list[tuple[Any, ...]]:
    con = duckdb.connect()
    con.register("left_rows", pa.Table.from_pylist([{"i": 0, "clock": MIN_TIME, **r} for r in left], ARRIVED))
    con.register(
        "right_rows", pa.Table.from_pylist([{"i": 0, "clock": MIN_TIME, **r} for r in right], ARRIVED)
    )
    return sorted(con.execute(text).fetchall(), key=repr)


def streams(
    left: list[Row],
    right: list[Row],
    *,
    splits: tuple[int, int] = (1, 1),
    per_epoch: int = 5,
    lag: str = "0s",
) -> tuple[hf.Pipeline, hf.KeyedStream, hf.KeyedStream]:
    made = hf.Pipeline("joins")
    sides = [
        made.read(uid, hf.records(rows, splits=count, per_epoch=per_epoch, schema=SCHEMA))
        .event_time("at", unit="s", out_of_order=lag)
        .key_by("k")
        for uid, rows, count in (("l", left, splits[0]), ("r", right, splits[1]))
    ]
    return made, sides[0], sides[1]


def finish(made: hf.Pipeline, out: hf.Stream) -> hf.Pipeline:
    out.write("out", hf.memory())
    out.side("late").write("late", hf.memory())
    out.side("late_right").write("late_right", hf.memory())
    return made


def tuples(rows: list[Row]) -> list[tuple[Any, ...]]:
    names = [*COLUMNS, *(f"{c}_right" for c in COLUMNS)]
    found = []
    for row in rows:
        assert set(names) <= set(row)
        more = (int(row["window_start"].timestamp()),) if "window_start" in row else ()
        found.append((*(row[n] for n in names), *more))
    return sorted(found, key=repr)


def dense(seed: int, count: int, keys: list[Any], values: range | list[int] | None = None) -> list[Any]:
    """Records close enough to meet: what Hypothesis draws by itself seldom is."""
    rng = random.Random(seed)
    more = [] if values is None else [values]
    return [(rng.choice(keys), rng.randrange(-5, 40), *(rng.choice(v) for v in more)) for _ in range(count)]


def drawn() -> Any:
    one = st.tuples(st.sampled_from(["a", None]), st.integers(-5, 40))
    many = st.builds(dense, st.integers(0, 9999), st.integers(10, 45), st.just(["a", "b", None]))
    return st.one_of(many, many, st.lists(one, max_size=12))


def rows_of(found: list[tuple[Any, int]]) -> list[Row]:
    return [{"k": k, "at": t, "n": n, "t": t} for n, (k, t) in enumerate(found)]


MEETING = {"left": dense(1, 25, ["a", "b", None]), "right": dense(2, 25, ["a", "b", None])}
"""What is not left to be drawn."""
QUICK = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check(join: Any, query: str, left: Any, right: Any, way: Way, last: str = "{side}.at * 1000000") -> None:
    """Run a join, and hold it against SQL over the same records: what it made, and what was late."""
    run = ran(way, {"l": rows_of(left), "r": rows_of(right)}, SCHEMA, join, "late", "late_right")
    one, other = run.arrived("l"), run.arrived("r")
    for row in one:
        passed = (c.epoch for c in run.commits if c.clocks.get("x", MIN_TIME) >= row["at"] * 1_000_000)
        row["out"] = next(passed, None)
    assert tuples(run.rows("out")) == sql(query, one, other)
    lates = []
    for uid, side in (("late", "left_rows"), ("late_right", "right_rows")):
        late = sql(f"select n from {side} where {last.format(side=side)} <= clock", one, other)
        assert sorted(((r["n"],) for r in run.rows(uid)), key=repr) == late
        lates += late
    assert run.late == len(lates)
    assert run.left == 0


# Interval


@QUICK
@hard_ways(**MEETING, bounds=(-5, 10), how="outer")
@given(
    left=drawn(),
    right=drawn(),
    bounds=st.sampled_from([(-5, 10), (0, 0), (3, 7), (-9, -2), (-60, 60)]),
    how=st.sampled_from(["inner", "left", "right", "outer"]),
    way=ways(),
)
def test_pairs_within_an_interval_are_what_sql_says_once(
    left: Any, right: Any, bounds: tuple[int, int], how: str, way: Way
) -> None:
    lower, upper = bounds
    query = ON_TIME + INTERVAL.format(how="full" if how == "outer" else how, lower=lower, upper=upper)
    check(lambda ls, rs: ls.join(rs).between(lower, upper).select("x", how=how), query, left, right, way)


def test_a_pair_comes_out_as_soon_as_both_are_there_and_alone_when_none_can_come() -> None:
    made = hf.Pipeline("p")
    left = Script([{"0": at(10)}, {"0": at(20)}, {"0": at(30)}, {"0": at(41)}], bounded=False)
    right = Script([{"0": at(9)}, {"0": at(12)}, {"0": at(35)}, {"0": at(45)}], bounded=False)
    ls, rs = (
        made.read(u, s).event_time("at", unit="s", out_of_order="5s").key_by("k")
        for u, s in (("l", left), ("r", right))
    )
    joined = ls.join(rs).between("0s", "10s").select("j", how="left")
    joined.write("out", hf.memory())
    result = hf.testing.run(made)
    found = [
        (epoch, row["at"], row["at_right"])
        for epoch, table in sorted(result._captured["out"].tables.items())
        for row in table.to_pylist()
    ]
    assert found == [(2, 10, 12), (3, 30, 35), (4, 41, 45), (4, 20, None)]


def test_state_holds_what_may_still_find_a_partner_and_no_more() -> None:
    rows = [{"k": f"k{i % 3}", "at": i, "n": i} for i in range(400)]
    made, ls, rs = streams(rows, rows, per_epoch=20)
    finish(made, ls.join(rs).between("-4s", "6s").select("j"))
    for backend in ("heap", "rocksdb"):
        result = hf.testing.run(made, backend=backend)
        held = [sum(sum(s.sealed.live.values()) for s in c.shards["j"]) for c in result.commits]
        assert held[-1] == 0
        assert 5 <= max(held) <= 14
        query = ON_TIME + INTERVAL.format(how="inner", lower=-4, upper=6)
        assert len(result.rows("out")) == len(sql(query, rows, rows))


def test_a_function_makes_the_results_and_gets_none_for_what_is_missing() -> None:
    left = [{"k": "a", "at": 1, "n": 1}, {"k": "b", "at": 1, "n": 2}]
    right = [{"k": "a", "at": 2, "n": 3}, {"k": "c", "at": 2, "n": 4}]
    made, ls, rs = streams(left, right, lag="9s")

    def both(one: Row | None, other: Row | None) -> Row | None:
        if one is None:
            return None
        return {"n": one["n"], "with": None if other is None else other["n"]}

    ls.join(rs).between(-5, 5).select("j", both, how="outer").write("out", hf.memory())
    rows = sorted(hf.testing.run(made).rows("out"), key=str)
    assert rows == [{"n": 1, "with": 3}, {"n": 2, "with": None}]


def test_a_function_that_fails_is_named_with_both_records() -> None:
    made, ls, rs = streams([{"k": "a", "at": 1, "n": 7}], [{"k": "a", "at": 1, "n": 8}])
    ls.join(rs).between(0, 0).select("j", lambda a, b: {"v": a["nothing"]}).write("out", hf.memory())
    with pytest.raises(UserCodeError, match=r"\[j\] KeyError"):
        hf.testing.run(made)


def test_fields_that_were_open_may_get_a_type_while_records_are_kept() -> None:
    made = hf.Pipeline("p")
    rows = [{"k": "a", "at": i, "n": i} for i in range(12)]
    left = made.read("l", hf.records(rows, per_epoch=3, schema=SCHEMA)).map(
        lambda r: {**r, "note": None if r["n"] < 6 else f"note {r['n']}"}
    )
    right = made.read("r", hf.records(rows, per_epoch=3, schema=SCHEMA)).map(lambda r: {**r, "n": r["n"] * 2})
    ls, rs = (
        s.event_time("at", unit="s", uid=u, out_of_order="9s").key_by("k")
        for s, u in ((left, "tl"), (right, "tr"))
    )
    ls.join(rs).between("0s", "1s").select("j").write("out", hf.memory())
    for backend in ("heap", "rocksdb"):
        found = hf.testing.run(made, backend=backend).rows("out")
        assert len(found) == 23
        assert [r["note"] for r in found if r["n"] == 7] == ["note 7"] * 2


def test_a_side_whose_columns_nobody_knows_is_named() -> None:
    made = hf.Pipeline("p")
    left = made.read("l", hf.records([{"k": "a", "at": 1, "n": 1}])).event_time("at", unit="s").key_by("k")
    right = (
        made.read("r", hf.records([], schema=SCHEMA)).map(lambda r: r).event_time("at", unit="s").key_by("k")
    )
    left.join(right).between(0, 0).select("j", how="left").write("out", hf.memory())
    with pytest.raises(SchemaError, match="columns of the right stream are not known yet"):
        hf.testing.run(made)


@pytest.mark.parametrize("parallelism", [1, 4])
def test_columns_that_only_another_shard_has_seen_are_known(parallelism: int) -> None:
    made = hf.Pipeline("p")
    rows = [{"k": f"k{i}", "at": 1, "n": i} for i in range(8)]
    ls, rs = (
        made.read(u, hf.records(found, schema=SCHEMA))
        .map(lambda r: {**r})
        .event_time("at", unit="s", uid=f"t{u}")
        for u, found in (("l", [*rows, {"k": "k0", "at": 9, "n": 9}]), ("r", [{"k": "k3", "at": 1, "n": 7}]))
    )
    left, right = ls.key_by("k"), rs.key_by("k")
    left.as_of(right).select("priced").write("priced-out", hf.memory())
    left.join(right).between(0, 0).select("close", how="outer").write("close-out", hf.memory())
    result = hf.testing.run(made, parallelism=parallelism)
    for uid in ("priced-out", "close-out"):
        found = sorted((r["n"], r["n_right"]) for r in result.rows(uid))
        assert found == [(i, 7 if i == 3 else None) for i in (*range(8), 9)]


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_keys_may_be_functions_several_columns_and_records_of_any_type(backend: str) -> None:
    schema = pa.schema(
        {
            "a": pa.int32(),
            "b": pa.string(),
            "at": pa.timestamp("ms", "Asia/Seoul"),
            "tags": pa.list_(pa.string()),
            "deep": pa.struct([("x", pa.decimal128(9, 2))]),
        }
    )
    rows = [
        {"a": i % 2, "b": None if i % 3 else "x", "at": i * 1000, "tags": ["t"] * (i % 3), "deep": {"x": i}}
        for i in range(30)
    ]
    table = pa.Table.from_pylist(rows, schema)
    made = hf.Pipeline("p")
    timed = [
        made.read(u, hf.records(table, per_epoch=7)).event_time("at", out_of_order="4s") for u in ("l", "r")
    ]
    one = timed[0].key_by("a", "b").join(timed[1].key_by("a", "b")).between("-2s", "2s").select("j")
    one.write("out", hf.memory())
    key = [t.key_by(lambda r: (r["a"], str(r["b"]))) for t in timed]
    key[0].join(key[1]).between("-2s", "2s").select("f").write("functions", hf.memory())
    result = hf.testing.run(made, backend=backend)
    expected = sum(
        (p["a"], p["b"]) == (q["a"], q["b"]) and abs(p["at"] - q["at"]) <= 2000 for p in rows for q in rows
    )
    assert len(result.rows("out")) == len(result.rows("functions")) == expected
    assert set(result.rows("out")[0]) == {*schema.names, *(f"{n}_right" for n in schema.names)}
    assert sorted(map(str, result.rows("out"))) == sorted(map(str, result.rows("functions")))


def test_a_stream_may_be_joined_with_itself() -> None:
    rows = [{"k": "a", "at": t, "n": t} for t in (1, 2, 5)]
    made, ls, _ = streams(rows, [], lag="9s")
    joined = ls.join(ls).between("0s", "1s").select("j", lambda a, b: {"n": [a["n"], b["n"]]})
    joined.write("out", hf.memory())
    assert sorted(r["n"] for r in hf.testing.run(made).rows("out")) == [[1, 1], [1, 2], [2, 2], [5, 5]]


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_one_side_may_have_wider_keys_than_the_other(backend: str) -> None:
    big = 1 << 40
    left = pa.table({"id": pa.array([1, 2, 3, 4], pa.int32()), "at": [1, 2, 3, 4]})
    right = pa.table({"ref": pa.array([big, 3, big + 1, 4], pa.int64()), "at": [1, 2, 3, 4]})
    made = hf.Pipeline("p")
    ls, rs = (
        made.read(k, hf.records(t, per_epoch=1)).event_time("at", unit="s", out_of_order="9s").key_by(k)
        for k, t in (("id", left), ("ref", right))
    )
    ls.join(rs).between("-5s", "5s").select("j", how="outer").write("out", hf.memory())
    found = {(r["id"], r["ref"]) for r in hf.testing.run(made, backend=backend).rows("out")}
    assert found == {(1, None), (2, None), (3, 3), (4, 4), (None, big), (None, big + 1)}


# As of


@QUICK
@hard_ways(**MEETING, how="left", keep=8)
@given(
    left=drawn(),
    right=drawn(),
    how=st.sampled_from(["left", "inner"]),
    keep=st.sampled_from([None, 8]),
    way=ways(),
)
def test_each_record_gets_what_the_right_had_said_by_its_time(
    left: Any, right: Any, how: str, keep: int | None, way: Way
) -> None:
    query = AS_OF.format(how=how, keep=10_000 if keep is None else keep)
    check(lambda ls, rs: ls.as_of(rs, keep_for=keep).select("x", how=how), query, left, right, way)


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_a_version_that_comes_late_counts_for_what_comes_out_later(backend: str) -> None:
    """A table in the order of its ids, larger than an epoch, lost all but the newest: orders came out without a rate."""
    rates = [{"k": "eur", "at": 100, "n": 1}, {"k": "usd", "at": 40, "n": 2}, {"k": "usd", "at": 30, "n": 3}]
    orders = [{"k": "usd", "at": 200, "n": 0}, {"k": "eur", "at": 201, "n": 1}]
    made, ls, rs = streams(orders, rates, per_epoch=1)
    finish(made, ls.as_of(rs).select("j"))
    result = hf.testing.run(made, backend=backend)
    assert sorted((r["k"], r["n_right"]) for r in result.rows("out")) == [("eur", 1), ("usd", 2)]
    assert [r["n"] for r in result.rows("late_right")] == [2, 3] and result.rows("late") == []


def test_of_the_right_only_the_newest_before_the_clock_is_kept() -> None:
    rates = [{"k": "eur", "at": i, "n": i} for i in range(0, 300)]
    orders = [{"k": "eur", "at": i, "n": i} for i in range(0, 300)]
    made, ls, rs = streams(orders, rates, per_epoch=20, lag="3s")
    finish(made, ls.as_of(rs).select("j"))
    for backend in ("heap", "rocksdb"):
        result = hf.testing.run(made, backend=backend)
        held = [sum(sum(s.sealed.live.values()) for s in c.shards["j"]) for c in result.commits]
        assert 1 <= max(held) <= 9
        assert held[-1] == 0
        assert [r["n"] - r["n_right"] for r in result.rows("out")] == [0] * 300


def test_of_versions_with_one_time_the_last_counts() -> None:
    rates = [{"k": "a", "at": 1, "n": n} for n in (5, 3, 4)]
    made, ls, rs = streams([{"k": "a", "at": 2, "n": 0}], rates, per_epoch=1, lag="9s")
    ls.as_of(rs).select("j").write("out", hf.memory())
    assert [r["n_right"] for r in hf.testing.run(made).rows("out")] == [4]


def test_what_comes_out_as_of_a_time_has_that_time_for_windows_behind_it() -> None:
    orders = [{"k": "a", "at": i, "n": 1} for i in range(40)]
    made, ls, rs = streams(orders, [{"k": "a", "at": 0, "n": 7}], per_epoch=6, lag="2s")
    priced = ls.as_of(rs).select("j")
    total = priced.key_by("k").window(hf.tumbling("10s")).aggregate("w", n=hf.count(), v=hf.sum("n_right"))
    total.write("out", hf.memory())
    result = hf.testing.run(made)
    assert [(r["n"], r["v"]) for r in result.rows("out")] == [(10, 70)] * 4
    assert not any(c.late for c in result.commits)


# Windows


@pytest.mark.parametrize(("size", "slide"), [(10, 10), (15, 5)], ids=["tumbling", "sliding"])
@QUICK
@hard_ways(**MEETING)
@given(left=drawn(), right=drawn(), way=ways())
def test_pairs_of_a_window_are_what_sql_says_once(
    size: int, slide: int, left: Any, right: Any, way: Way
) -> None:
    left, right = [(k, abs(t)) for k, t in left], [(k, abs(t)) for k, t in right]
    window = hf.tumbling(size) if size == slide else hf.sliding(size, slide)
    sides = {
        name: IN_WINDOWS.format(side=f"{name}_rows", size=size, slide=slide) for name in ("left", "right")
    }
    last = f"({{side}}.at // {slide} * {slide} + {size}) * 1000000 - 1"
    check(
        lambda ls, rs: ls.join(rs).window(window).select("x"), WINDOWS.format(**sides), left, right, way, last
    )


def test_pairs_of_a_window_come_out_when_the_clock_passes_it_with_its_bounds() -> None:
    rows = [{"k": "a", "at": t, "n": t} for t in (1, 2, 13, 31)]
    made, ls, rs = streams(rows, rows, per_epoch=1)
    out = ls.join(rs).window(hf.tumbling("10s")).select("j", lambda a, b: {"v": a["n"] * 100 + b["n"]})
    out.write("out", hf.memory())
    out.key_by("v").window(hf.tumbling("10s")).aggregate("w", n=hf.count()).write("counts", hf.memory())
    result = hf.testing.run(made)
    found = {e: t["v"].to_pylist() for e, t in result._captured["out"].tables.items()}
    assert found == {3: [101, 102, 201, 202], 4: [1313, 3131]}
    assert len(result.rows("counts")) == 6
    assert {str(r["window_end"] - r["window_start"]) for r in result.rows("out")} == {"0:00:10"}


@pytest.mark.parametrize("how", ["inner", "left", "right", "outer"])
@pytest.mark.parametrize(
    "made", [None, lambda a, b: {"ln": a and a["n"], "rn": b and b["n"]}], ids=["all", "some"]
)
@pytest.mark.parametrize(("lower", "upper"), [(-5, 10), (3, 8), (-9, -4)])
def test_results_that_are_given_a_time_are_never_late_for_what_stands_behind_them(
    how: str, made: Any, lower: int, upper: int
) -> None:
    rows = [{"k": f"k{i % 3}", "at": (i * 7919) % 120, "n": i} for i in range(120)]
    order = sorted(rows, key=lambda r: r["at"] + r["n"] % 7)
    pipeline, ls, rs = streams(order[::2], order[1::2], per_epoch=4, lag="7s")
    pairs = ls.join(rs).between(f"{lower}s", f"{upper}s").select("j", made, how=how, time="when")
    pairs.write("out", hf.memory())
    counts = pairs.map(lambda r: {"all": 0, "when": r["when"]}).key_by("all").window(hf.tumbling("5s"))
    counted = counts.aggregate("w", n=hf.count())
    counted.write("counts", hf.memory())
    result = hf.testing.run(pipeline)
    found, windows = result.rows("out"), result.rows("counts")
    assert len(found) > 20
    assert all(c.late.get("w", 0) == 0 for c in result.commits)
    assert sum(r["n"] for r in windows) == len(found)
    times = {r["n"]: r["at"] for r in rows}
    for row in found if made is not None else ():
        at = [times[n] for n in (row["ln"], row["rn"]) if n is not None]
        alone = max(upper, 0) if row["rn"] is None else max(-lower, 0)
        seconds = max(at) + (alone if len(at) == 1 else 0)
        assert row["when"] == dt.datetime(1970, 1, 1) + dt.timedelta(seconds=seconds)
    assert windows[0]["window_end"] < max(r["window_end"] for r in windows)


def test_windows_behind_a_join_with_a_time_go_on_when_it_finds_no_more_pairs() -> None:
    rows = [{"k": "a", "at": t, "n": t} for t in (1, 2)]
    later = [{"k": "b", "at": t, "n": t} for t in range(3, 60, 3)]
    made, ls, rs = streams([*rows, *later], rows, per_epoch=2)
    pairs = ls.join(rs).between("0s", "5s").select("j", lambda a, b: {"k": a["k"]}, time="when")
    pairs.key_by("k").window(hf.tumbling("10s")).aggregate("w", n=hf.count()).write("out", hf.memory())
    result = hf.testing.run(made)
    (epoch,) = result._captured["out"].tables
    assert epoch < result.epochs and result.rows("out")[0]["n"] == 3


def test_a_time_that_the_function_returns_itself_is_refused() -> None:
    rows = [{"k": "a", "at": 1, "n": 1}]
    made, ls, rs = streams(rows, rows)
    pairs = ls.join(rs).between("0s", "5s").select("j", lambda a, b: {"when": 1}, time="when")
    pairs.write("out", hf.memory())
    with pytest.raises(SchemaError, match=r"\[j\] The function returns 'when'"):
        hf.testing.run(made)


def test_the_schema_of_results_may_leave_out_the_time_that_is_added() -> None:
    rows = [{"k": "a", "at": 1, "n": 1}]
    made, ls, rs = streams(rows, rows)
    pairs = (
        ls.join(rs)
        .between("0s", "5s")
        .select("j", lambda a, b: {"n": a["n"]}, time="when", schema={"n": int})
    )
    pairs.key_by("n").window(hf.tumbling("10s")).aggregate("w", n2=hf.count()).write("out", hf.memory())
    assert [r["n2"] for r in hf.testing.run(made).rows("out")] == [1]


@pytest.mark.parametrize("name", ["window_start", "window_end"])
def test_a_function_that_returns_a_bound_of_the_window_is_refused(name: str) -> None:
    rows = [{"k": "a", "at": 1, "n": 1}]
    made, ls, rs = streams(rows, rows)
    ls.join(rs).window(hf.tumbling("10s")).select("j", lambda a, b: {name: 7}).write("out", hf.memory())
    with pytest.raises(SchemaError, match=rf"\[j\] The function returns '{name}'") as caught:
        hf.testing.run(made)
    assert "give it another name" in str(caught.value)


# Both


def test_the_same_plans_lead_to_the_same_bytes_with_any_parallelism() -> None:
    left = [{"k": f"k{i % 17}", "at": (i * 7919) % 300 // 2, "n": i} for i in range(300)]
    right = [{"k": f"k{i % 13}", "at": (i * 104729) % 300 // 2, "n": i} for i in range(300)]
    joins: list[Any] = [
        lambda ls, rs: ls.join(rs).between("-5s", "10s").select("j", how="outer"),
        lambda ls, rs: ls.as_of(rs).select("j"),
        lambda ls, rs: ls.join(rs).window(hf.sliding("20s", "10s")).select("j"),
    ]
    for join in joins:
        found = []
        for parallelism in (1, 2, 4):
            made, ls, rs = streams(left, right, splits=(2, 3), per_epoch=40, lag="60s")
            finish(made, join(ls, rs))
            result = hf.testing.run(made, parallelism=parallelism)
            found.append([result.rows(uid) for uid in ("out", "late", "late_right")])
        assert found[0] == found[1] == found[2]
        assert all(found[0])


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_a_record_at_the_clock_is_late_and_one_after_it_is_not(backend: str) -> None:
    made = hf.Pipeline("p")
    ls, rs = (
        made.read(u, Script([{"0": at(10)}, {"0": at(9, 10)}], bounded=False))
        .event_time("at", unit="us")
        .key_by("k")
        for u in "lr"
    )
    for uid, join in (("j", ls.join(rs).between(0, 0)), ("as-of", ls.as_of(rs))):
        out = join.select(uid)
        out.write(f"{uid}-out", hf.memory())
        out.side("late").write(f"{uid}-late", hf.memory())
        out.side("late_right").write(f"{uid}-right", hf.memory())
    result = hf.testing.run(made, backend=backend)
    assert result.commits[0].clocks == {"j": 9, "as-of": 9}
    assert result.commits[1].late == {"j": 2, "as-of": 2}
    for uid in ("j", "as-of"):
        assert [r["at"] for side in ("late", "right") for r in result.rows(f"{uid}-{side}")] == [9, 9]
    assert len(result.rows("j-out")) == 4
    assert result.rows("as-of-out") == []


def test_an_idle_split_does_not_hold_the_join_back() -> None:
    made = hf.Pipeline("p")
    left = Script([{"0": at(1), "1": at(2)}, {"0": at(50)}, {"0": at(60)}], splits=["0", "1"], bounded=False)
    right = Script([{"0": at(1)}, {"0": at(55)}, {"0": at(61)}], bounded=False)
    ls, rs = (
        made.read(u, s).event_time("at", unit="s", idle_after="2s").key_by("k")
        for u, s in (("l", left), ("r", right))
    )
    ls.join(rs).between("0s", "10s").select("j", how="left").write("out", hf.memory())
    result = hf.testing.run(made, step_ms=1000)
    assert [(r["at"], r["at_right"]) for r in result.rows("out")] == [(1, 1), (50, 55), (60, 61), (2, None)]


def test_what_makes_no_sense_is_refused() -> None:
    made, ls, rs = streams([], [])
    with pytest.raises(PipelineError, match="greater than the second"):
        ls.join(rs).between("5s", "1s")
    with pytest.raises(PipelineError, match="can't be joined in"):
        ls.join(rs).window(hf.session("5s"))
    with pytest.raises(PipelineError, match="how='full'"):
        ls.join(rs).between(0, 1).select("j", how="full")
    with pytest.raises(PipelineError, match="Key both"):
        ls.join(made.read("x", hf.records([], schema=SCHEMA)))  # type: ignore[arg-type]
    untimed = hf.Pipeline("p")
    one = untimed.read("l", hf.records([], schema=SCHEMA)).event_time("at", unit="s").key_by("k")
    other = untimed.read("r", hf.records([], schema=SCHEMA)).key_by("k")
    one.as_of(other).select("j").write("out", hf.memory())
    with pytest.raises(PipelineError, match="both sides"):
        hf.testing.run(untimed)


NANOS = pa.schema([("k", pa.int64()), ("at", pa.timestamp("ns")), ("v", pa.int64())])


def _nanos(pipeline: hf.Pipeline, uid: str, *times: int) -> hf.KeyedStream:
    rows = pa.table({"k": [1] * len(times), "at": pa.array(times, pa.timestamp("ns")), "v": list(times)})
    return pipeline.read(uid, hf.records(rows, schema=NANOS)).event_time("at").key_by("k")


@pytest.mark.parametrize("kind", ["as of", "between", "pattern", "in order"])
@pytest.mark.parametrize("finer", [True, False])
def test_who_goes_by_which_of_two_times_is_earlier_refuses_what_microseconds_cannot_tell(
    kind: str, finer: bool
) -> None:
    """A quote was joined with a trade of the same microsecond that was made before it."""
    p = hf.Pipeline("p")
    trades, quotes = _nanos(p, "trades", 5_000), _nanos(p, "quotes", 3_000, 4_900 if finer else 5_000)
    match kind:
        case "as of":
            out = trades.as_of(quotes).select("x", lambda t, q: {"v": q["v"]})
        case "between":
            out = trades.join(quotes).between("-1s", "0s").select("x", lambda t, q: {"v": q["v"]})
        case "pattern":
            low = hf.pattern("low", lambda r: r["v"] == 3_000).then("high", lambda r: r["v"] > 4_000)
            out = quotes.pattern("x", low.within("1s")).map(lambda r: {"v": r["high"]["v"]})
        case _:
            out = quotes.process("x", Told(), in_order=True)
    out.write("out", hf.memory())
    if finer:
        with pytest.raises(SchemaError, match=r"\[x\] 'at' has nanoseconds") as caught:
            hf.testing.run(p)
        assert 'pa.timestamp("us")' in str(caught.value)
    else:
        assert {"v": 5_000} in hf.testing.run(p).rows("out")


class Told(hf.KeyedProcess):
    def process(self, key: Any, record: Row, ctx: hf.Context) -> Any:
        yield {"v": record["v"]}


def test_windows_take_nanoseconds_as_they_are() -> None:
    p = hf.Pipeline("p")
    counts = (
        _nanos(p, "in", 999_999_999, 1_000_000_001).window(hf.tumbling("1s")).aggregate("w", n=hf.count())
    )
    counts.write("out", hf.memory())
    assert [r["n"] for r in hf.testing.run(p).rows("out")] == [1, 1]
