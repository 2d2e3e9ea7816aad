"""Deduplicate, top and patterns beside DuckDB's SQL over the same records, whatever order they come in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.errors import PipelineError, SchemaError, UserCodeError
from tests.arrivals import Run, Way, hard_ways, ran, ways
from tests.unit.time.test_event_time import Script, at
from tests.unit.time.test_joins import dense

Row = dict[str, Any]
SCHEMA = pa.schema([("k", pa.string()), ("at", pa.int64()), ("v", pa.int64()), ("n", pa.int64())])
QUICK = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def events(values: list[Any]) -> Any:
    one = st.tuples(st.sampled_from(["a", None]), st.integers(0, 40), st.sampled_from(values))
    many = st.builds(
        dense, st.integers(0, 9999), st.integers(10, 45), st.just(["a", "b", None]), st.just(values)
    )
    found = st.one_of(many, many, st.lists(one, max_size=12))
    return found.map(lambda rows: [(k, abs(t), v) for k, t, v in rows])


def gathered(values: list[Any]) -> list[tuple[Any, int, Any]]:
    """Events that are not left to be drawn."""
    return [(k, abs(t), v) for k, t, v in dense(1, 45, ["a", "b", None], values)]


VALUES = [None, *range(-4, 5)]
EVENTS = events(VALUES)
ARRIVED = pa.schema([*SCHEMA, ("i", pa.int64()), ("clock", pa.int64()), ("epoch", pa.int64())])


def rows_of(found: list[tuple[Any, int, Any]]) -> list[Row]:
    return [{"k": k, "at": t, "v": v, "n": n, "t": t} for n, (k, t, v) in enumerate(found)]


def sql(text: str, arrived: list[Row]) -> list[tuple[Any, ...]]:
    """What SQL says of records as they arrived; `e` are those after the clock, `late` the others."""
    con = duckdb.connect()
    con.register("arrived", pa.Table.from_pylist(arrived, ARRIVED))
    con.execute("create temp view e as select * from arrived where arrived.at * 1000000 > clock")
    con.execute("create temp view late as select * from arrived where arrived.at * 1000000 <= clock")
    return sorted(con.execute(text).fetchall(), key=repr)


def check_late(run: Run, query: str = "select n from late") -> None:
    """What came out as late is what SQL says."""
    assert sorted(((r["n"],) for r in run.rows("late")), key=repr) == sql(query, run.arrived("e"))
    assert run.late == len(run.rows("late"))


def keyed(
    rows: list[Row], *, splits: int = 1, per_epoch: int = 5, lag: str = "90s"
) -> tuple[hf.Pipeline, Any]:
    made = hf.Pipeline("library")
    source = hf.records(rows, splits=splits, per_epoch=per_epoch, schema=SCHEMA)
    return made, made.read("e", source).event_time("at", unit="s", out_of_order=lag).key_by("k")


def run(made: hf.Pipeline, out: hf.Stream, run: dict[str, Any], *sides: str) -> hf.testing.Result:
    out.write("out", hf.memory())
    for side in sides:
        out.side(side).write(side, hf.memory())
    result = hf.testing.run(made, parallelism=run["parallelism"], backend=run["backend"])
    if "late" in sides:
        assert sum(c.late.get("x", 0) for c in result.commits) == len(result.rows("late"))
    return result


def held(result: hf.testing.Result) -> list[int]:
    """How much was kept after each epoch."""
    return [sum(sum(s.sealed.live.values()) for s in c.shards["x"]) for c in result.commits]


# Deduplicate


@QUICK
@hard_ways(found=gathered(VALUES))
@given(found=EVENTS, way=ways())
def test_one_record_of_each_key_passes_the_first_that_came(found: Any, way: Way) -> None:
    run = ran(way, {"e": rows_of(found)}, SCHEMA, lambda s: s.deduplicate("x"))
    first = sql("select k, arg_min(n, i) from arrived group by k", run.arrived("e"))
    assert sorted(((r["k"], r["n"]) for r in run.rows("out")), key=repr) == first
    assert run.left == len(first)


PASSED = """
    with recursive
    numbered as (select k, e.at, n, row_number() over (partition by k order by i) as r from e),
    walked(k, r, n, passes, times) as (
        select k, r, n, true, [numbered.at] from numbered where r = 1
        union all
        select x.k, x.r, x.n, {far}, case when {far} then list_append(w.times, x.at) else w.times end
        from walked w join numbered x on x.k is not distinct from w.k and x.r = w.r + 1
    )
    select n from walked where passes
"""


@QUICK
@hard_ways(found=gathered(VALUES), within=9)
@given(found=EVENTS, within=st.sampled_from([1, 9, 200]), way=ways())
def test_a_key_may_pass_again_when_its_time_is_over(found: Any, within: int, way: Way) -> None:
    run = ran(way, {"e": rows_of(found)}, SCHEMA, lambda s: s.deduplicate("x", within=within), "late")
    check_late(run)
    far = f"len(list_filter(w.times, lambda t: abs(x.at - t) <= {within})) = 0"
    passed = sql(PASSED.format(far=far), run.arrived("e"))
    assert sorted(((r["n"],) for r in run.rows("out")), key=repr) == passed
    assert run.left == 0


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
@pytest.mark.parametrize("per_epoch", [1, 3, 100])
def test_a_record_that_is_far_from_all_that_passed_passes_whatever_came_before_it(
    per_epoch: int, backend: str
) -> None:
    times = [100, 10, 55, 60, 9, 31, 30, 79, 76, 200, 160, 100]
    rows = [{"k": "a", "at": t, "v": 0, "n": n} for n, t in enumerate(times)]
    made, stream = keyed(rows, per_epoch=per_epoch, lag="1h")
    result = run(made, stream.deduplicate("x", within="20s"), {"parallelism": 1, "backend": backend}, "late")
    assert [r["at"] for r in result.rows("out")] == [100, 10, 55, 31, 79, 200, 160]
    assert held(result)[-1] == 0


def test_what_was_seen_is_forgotten_with_time() -> None:
    rows = [{"k": f"k{i % 50}", "at": i, "v": 0, "n": i} for i in range(500)]
    for backend in ("heap", "rocksdb"):
        made, stream = keyed(rows, per_epoch=25, lag="0s")
        result = run(
            made, stream.deduplicate("x", within="10s"), {"parallelism": 2, "backend": backend}, "late"
        )
        assert len(result.rows("out")) == 500
        assert max(held(result)) <= 12
        assert held(result)[-1] == 0


def test_keys_that_are_functions_do_not_show() -> None:
    made = hf.Pipeline("p")
    stream = made.read("e", hf.records([{"v": 1}, {"v": 3}, {"v": 4}])).key_by(lambda r: r["v"] % 2)
    stream.deduplicate("x").write("out", hf.memory())
    assert sorted(r["v"] for r in hf.testing.run(made).rows("out")) == [1, 4]
    assert set(hf.testing.run(made).rows("out")[0]) == {"v"}


# Top

WINDOWS = {
    "tumbling": (lambda: hf.tumbling("10s"), "[a.at // 10 * 10]", 10),
    "sliding": (lambda: hf.sliding("20s", "10s"), "[a.at // 10 * 10 - 10, a.at // 10 * 10]", 20),
}
BEST = """
    with inside as (select *, unnest({starts}) as w from arrived as a)
    select k, w, n, row_number() over (partition by w, k order by v {order} nulls last, i) as r from inside
    where (w + {size}) * 1000000 - 1 > clock qualify r <= {n}
"""


@pytest.mark.parametrize("kind", WINDOWS)
@QUICK
@hard_ways(found=gathered(VALUES), n=2, ascending=True)
@given(found=EVENTS, n=st.integers(1, 4), ascending=st.booleans(), way=ways())
def test_the_best_of_each_window_are_what_sql_says(
    kind: str, found: Any, n: int, ascending: bool, way: Way
) -> None:
    window, starts, size = WINDOWS[kind]
    run = ran(
        way,
        {"e": rows_of(found)},
        SCHEMA,
        lambda s: s.window(window()).top("x", n, by="v", ascending=ascending),
        "late",
    )
    check_late(run, f"select n from arrived as a where (a.at // 10 * 10 + {size}) * 1000000 - 1 <= clock")
    query = BEST.format(starts=starts, size=size, n=n, order="asc" if ascending else "desc")
    got = [(r["k"], int(r["window_start"].timestamp()), r["n"], r["rank"]) for r in run.rows("out")]
    assert sorted(got, key=repr) == sql(query, run.arrived("e"))
    assert run.left == 0


@QUICK
@hard_ways(found=gathered(VALUES), ups=(True, False))
@given(found=EVENTS, ups=st.tuples(st.booleans(), st.booleans()), way=ways())
def test_of_several_columns_the_next_decides_where_one_does_not(
    found: Any, ups: tuple[bool, bool], way: Way
) -> None:
    run = ran(way, {"e": rows_of(found)}, SCHEMA, lambda s: s.top("x", 2, by=["v", "at"], ascending=ups))
    last = {(r["k"], r["rank"]): (r["v"], r["at"]) for r in run.rows("out")}
    words = ["asc" if up else "desc" for up in ups]
    query = f"""
        select k, row_number() over (partition by k order by v {words[0]} nulls last, arrived.at {words[1]}) as r,
        v, arrived.at from arrived qualify r <= 2
    """
    assert last == {(k, r): (v, t) for k, r, v, t in sql(query, run.arrived("e"))}


@QUICK
@hard_ways(found=gathered(VALUES), n=2, ascending=False, ties="last")
@given(
    found=EVENTS,
    n=st.integers(1, 4),
    ascending=st.booleans(),
    ties=st.sampled_from(["first", "last"]),
    way=ways(),
)
def test_the_best_of_all_are_kept_up_to_date(
    found: Any, n: int, ascending: bool, ties: str, way: Way
) -> None:
    run = ran(
        way,
        {"e": rows_of(found)},
        SCHEMA,
        lambda s: s.top("x", n, by="v", ascending=ascending, ties=ties, rank="place"),
    )
    order = f"v {'asc' if ascending else 'desc'} nulls last, i {'asc' if ties == 'first' else 'desc'}"
    query = (
        f"select k, row_number() over (partition by k order by {order}) as r, n from arrived qualify r <= {n}"
    )
    shown: dict[Any, list[tuple[int, int]]] = {}
    for commit in run.commits:
        changed: dict[Any, list[tuple[int, int]]] = {}
        for row in run.shown("out", commit.epoch):
            changed.setdefault(row["k"], []).append((row["place"], row["n"]))
        for key, best in changed.items():
            assert best != shown.get(key), "emitted, and nothing had changed"
        shown.update(changed)
        expected = sql(query, [r for r in run.arrived("e") if r["epoch"] <= commit.epoch])
        assert sorted(((k, *one) for k, best in shown.items() for one in best), key=repr) == expected
    assert run.left == sum(map(len, shown.values()))


def test_only_the_best_of_a_window_are_kept() -> None:
    rows = [{"k": "a", "at": i // 50, "v": i * 7919 % 1000, "n": i} for i in range(1000)]
    for backend in ("heap", "rocksdb"):
        made, stream = keyed(rows, per_epoch=50, lag="20s")
        how = {"parallelism": 2, "backend": backend}
        result = run(made, stream.window(hf.tumbling("10s")).top("x", 3, by="v"), how)
        assert max(held(result)) == 6
        assert [r["rank"] for r in result.rows("out")] == [1, 2, 3] * 2


def test_the_best_of_windows_results_have_the_bounds_of_their_own_window() -> None:
    rows = [{"k": f"k{i % 4}", "at": i, "v": i, "n": i} for i in range(60)]
    made, stream = keyed(rows, lag="9s")
    sums = stream.window(hf.tumbling("10s")).aggregate("sums", v=hf.sum("v"))
    best = sums.key_by(lambda r: 0).window(hf.tumbling("20s")).top("x", 2, by="v")
    result = run(made, best, {"parallelism": 2, "backend": "heap"}, "late")
    found = [
        (r["window_start"].second, r["window_end"].second, r["k"], r["v"], r["rank"])
        for r in result.rows("out")
    ]
    assert found == [
        (0, 20, "k3", 45, 1),
        (0, 20, "k2", 42, 2),
        (20, 40, "k3", 105, 1),
        (20, 40, "k2", 102, 2),
        (40, 0, "k3", 165, 1),
        (40, 0, "k2", 162, 2),
    ]
    assert result.rows("late") == []


def test_top_says_what_it_can_not_do() -> None:
    made, stream = keyed([])
    with pytest.raises(PipelineError, match="at least 1"):
        stream.top("x", 0, by="v")
    with pytest.raises(PipelineError, match="ties='both'"):
        stream.top("x", 1, by="v", ties="both")
    with pytest.raises(PipelineError, match="2 columns, and ascending= speaks of 1"):
        stream.top("x", 1, by=["v", "at"], ascending=[True])
    with pytest.raises(PipelineError, match="name of a column, or several"):
        stream.top("x", 1, by=[])
    with pytest.raises(PipelineError, match="has no top"):
        stream.window(hf.session("5s")).top("x", 1, by="v")
    with pytest.raises(PipelineError, match="neither lateness nor triggers"):
        stream.window(hf.tumbling("5s")).allowed_lateness("5s").top("x", 1, by="v")
    stream.top("x", 1, by="nothing").write("out", hf.memory())
    with pytest.raises(PipelineError, match="no column 'nothing' to rank by"):
        hf.testing.run(made)
    made, stream = keyed([{"k": "a", "at": 1, "v": 1, "n": 1}])
    stream.top("x", 1, by="v", rank="n").write("out", hf.memory())
    with pytest.raises(SchemaError, match=r"\[x\] The records have a column 'n' already"):
        hf.testing.run(made)


# Patterns


def a_then_b(**more: Any) -> hf.Pattern:
    wanted = hf.pattern("first", lambda r: r["v"] == 1).then("second", lambda r: r["v"] == 2)
    if more.get("without"):
        wanted = wanted.without("spoils", lambda r: r["v"] == 3)
    return wanted.within(more.get("within", "15s"))


FOLLOWED = """
    with o as (select k, v, n, e.at as t, row_number() over (partition by k order by e.at, i) as i from e),
    first as (
        select a.k as k, a.n as a, a.i as ai, a.t as t,
               min(b.i) filter (b.v = 2 and b.t <= a.t + {within}) as bi,
               min(b.i) filter (b.v = 3 and b.t <= a.t + {within}) as ci
        from o a left join o b on a.k is not distinct from b.k and b.i > a.i
        where a.v = 1 group by all
    )
    select first.k, a, b.n, case when bi is not null and (not {without} or ci is null or bi < ci) then 'match'
                                 when {without} and ci is not null then 'spoils' else 'timeout' end as ended
    from first left join o b on first.k is not distinct from b.k and b.i = bi
"""


@QUICK
@hard_ways(found=gathered([1, 1, 2, 2, 3, 4]), within=15, without=True)
@given(
    found=events([1, 1, 2, 2, 3, 4]),
    within=st.sampled_from([1, 15, 100]),
    without=st.booleans(),
    way=ways(),
)
def test_what_follows_in_the_order_of_time_is_what_sql_says(
    found: Any, within: int, without: bool, way: Way
) -> None:
    wanted = a_then_b(within=within, without=without)
    run = ran(way, {"e": rows_of(found)}, SCHEMA, lambda s: s.pattern("x", wanted), "late", "timeout")
    check_late(run)
    got = [(r["k"], r["first"]["n"], r["second"]["n"], "match") for r in run.rows("out")]
    lost = [(r["k"], r["first"]["n"], None, r["ended"]) for r in run.rows("timeout")]
    expected = sql(FOLLOWED.format(within=within, without=without), run.arrived("e"))
    assert sorted(got, key=repr) == [e for e in expected if e[3] == "match"]
    ended = [(k, a, None, why) for k, a, _, why in expected if why != "match"]
    assert sorted(lost, key=repr) == sorted(ended, key=repr)
    assert run.left == 0


THREE = """
    with o as (select k, v, n, e.at as t, row_number() over (partition by k order by e.at, i) as i from e),
    first as (select k, n, i, t + {within} as until from o where v = 1),
    second as (
        select f.*, min(b.i) filter (b.v = 2) as bi, min(b.i) filter (b.v = 3) as ci
        from first f left join o b on f.k is not distinct from b.k and b.i > f.i and b.t <= f.until group by all
    ),
    reached as (select * replace (case when {without} and ci < bi then null else bi end as bi) from second),
    third as (
        select r.*, min(d.i) filter (d.v = 4) as di, min(d.i) filter (d.v = 3) as si
        from reached r left join o d on r.k is not distinct from d.k and d.i > r.bi and d.t <= r.until group by all
    )
    select k, n, (select o.n from o where o.k is not distinct from third.k and o.i = bi),
           case when di < si or si is null or not {without} then
                (select o.n from o where o.k is not distinct from third.k and o.i = di) end,
           case when di is not null and (not {without} or si is null or di < si) then 'match'
                when {without} and bi is null and ci is not null then 'early'
                when {without} and bi is not null and si is not null then 'spoils' else 'timeout' end
    from third
"""


@QUICK
@hard_ways(found=gathered([1, 1, 2, 2, 3, 4]), within=40, without=True)
@given(
    found=events([1, 1, 2, 2, 3, 4, 4]),
    within=st.sampled_from([1, 15, 100]),
    without=st.booleans(),
    way=ways(),
)
def test_each_step_of_three_follows_the_one_before_it_as_sql_says(
    found: Any, within: int, without: bool, way: Way
) -> None:
    wanted = hf.pattern("first", lambda r: r["v"] == 1).then("second", lambda r: r["v"] == 2)
    wanted = wanted.without("early", lambda r: r["v"] == 3) if without else wanted
    wanted = wanted.then("third", lambda r: r["v"] == 4)
    wanted = wanted.without("spoils", lambda r: r["v"] == 3) if without else wanted
    run = ran(
        way,
        {"e": rows_of(found)},
        SCHEMA,
        lambda s: s.pattern("x", wanted.within(f"{within}s")),
        "late",
        "timeout",
    )
    check_late(run)

    def told(row: Any) -> tuple[Any, ...]:
        steps = (None if row[s] is None else row[s]["n"] for s in ("first", "second", "third"))
        return (row["k"], *steps, row.get("ended", "match"))

    got = sorted(map(told, [*run.rows("out"), *run.rows("timeout")]), key=repr)
    assert got == sql(THREE.format(within=within, without=without), run.arrived("e"))
    assert run.left == 0


def test_a_match_comes_out_when_the_clock_has_passed_its_last_record() -> None:
    made = hf.Pipeline("p")
    epochs = [[(1, 10)], [(2, 30)], [(3, 20)], [(0, 36)], [(0, 80)]]
    source = Script([{"0": [{"at": t, "v": v} for v, t in found]} for found in epochs], bounded=False)
    stream = made.read("e", source).event_time("at", unit="s", out_of_order="12s").key_by("k")
    steps = hf.pattern("a", lambda r: r["v"] == 1).then("b", lambda r: r["v"] == 2)
    plain, strict = steps.within("30s"), steps.without("c", lambda r: r["v"] == 3).within("30s")
    stream.pattern("plain", plain).write("out", hf.memory())
    found = stream.pattern("strict", strict)
    found.write("none", hf.memory())
    found.side("timeout").write("ended", hf.memory())
    result = hf.testing.run(made)
    assert [(e, t.to_pylist()[0]["b"]["at"]) for e, t in result._captured["out"].tables.items()] == [(5, 30)]
    assert result.rows("none") == []
    assert [(e, t["ended"].to_pylist()) for e, t in result._captured["ended"].tables.items()] == [(4, ["c"])]


def test_a_pattern_of_three_steps_may_last_for_many_epochs() -> None:
    letters = "axbxxacbxbcx"
    rows = [{"k": "a", "at": i, "v": ord(c), "n": i} for i, c in enumerate(letters)]
    wanted = hf.pattern("a", lambda r: r["v"] == ord("a"))
    wanted = wanted.then("b", lambda r: r["v"] == ord("b")).then("c", lambda r: r["v"] == ord("c"))
    for backend in ("heap", "rocksdb"):
        made, stream = keyed(rows, per_epoch=1, lag="0s")
        result = run(
            made, stream.pattern("x", wanted.within("9s")), {"parallelism": 2, "backend": backend}, "timeout"
        )
        assert [[r[s]["n"] for s in "abc"] for r in result.rows("out")] == [[0, 2, 6], [5, 7, 10]]
        assert result.rows("timeout") == []


def test_fields_that_were_open_may_get_a_type_while_a_pattern_waits() -> None:
    rows = [{"k": "a", "at": i, "v": 1 if i < 3 else 2, "n": i} for i in range(6)]
    made = hf.Pipeline("p")
    stream = made.read("e", hf.records(rows, per_epoch=1, schema=SCHEMA))
    noted = stream.map(
        lambda r: {**r, "note": None if r["n"] < 3 else "now", "deep": {"x": None, "y": r["n"]}}
    )
    timed = noted.event_time("at", unit="s", uid="t").key_by("k")
    timed.pattern("x", a_then_b()).write("out", hf.memory())
    for backend in ("heap", "rocksdb"):
        found = hf.testing.run(made, backend=backend).rows("out")
        assert [(r["first"]["n"], r["second"]["n"]) for r in found] == [(0, 3), (1, 3), (2, 3)]
        assert [r["second"]["note"] for r in found] == ["now"] * 3
        assert found[0]["first"]["deep"]["y"] == 0


def test_matches_share_nothing_that_a_function_could_change() -> None:
    rows = [{"k": "a", "at": i, "v": v, "n": i} for i, v in enumerate([1, 1, 2])]
    made, stream = keyed(rows)

    def change(match: Row) -> Row:
        match["second"]["n"] += 100
        return {"n": match["second"]["n"]}

    stream.pattern("x", a_then_b()).map(change).write("out", hf.memory())
    assert [r["n"] for r in hf.testing.run(made).rows("out")] == [102, 102]


def test_a_step_that_fails_is_named_with_its_record() -> None:
    made, stream = keyed([{"k": "a", "at": 1, "v": 1, "n": 7}])
    wanted = hf.pattern("a", lambda r: r["nothing"]).then("b", bool).within("1s")
    stream.pattern("x", wanted).write("out", hf.memory())
    with pytest.raises(UserCodeError, match=r"\[x\] KeyError"):
        hf.testing.run(made)


def test_patterns_that_make_no_sense_are_refused() -> None:
    _, stream = keyed([])
    one = hf.pattern("a", bool)
    for wrong, words in (
        (one.within("5s"), "two steps"),
        (one.then("b", bool), "wait for ever"),
        (one.then("k", bool).within("5s"), "both a key and a step"),
        ("a", "is no pattern"),
    ):
        with pytest.raises(PipelineError, match=words):
            stream.pattern("x", wrong)
    for name in ("key", "key1"):
        with pytest.raises(PipelineError, match=f"'{name}' is both a key and a step"):
            made, _ = keyed([])
            timed = made.read("f", hf.records([], schema=SCHEMA)).event_time("at", unit="s")
            timed.key_by(lambda r: (r["k"], 1)).pattern("x", one.then(name, bool).within("5s"))
    with pytest.raises(PipelineError, match=r"\[x\] 'ended' is both a key and what says"):
        timed.map(dict).key_by("k", "ended").pattern("x", one.then("b", bool).within("5s"))
    with pytest.raises(PipelineError, match="has a 'a' already"):
        one.then("a", bool)
    with pytest.raises(PipelineError, match="between two steps"):
        one.without("b", bool)
    with pytest.raises(PipelineError, match="name and a function"):
        hf.pattern("a", None)  # type: ignore[arg-type]


# Late records of a function of one's own


def test_a_function_may_say_that_a_record_is_late() -> None:
    class Strict(hf.KeyedProcess):
        side_outputs = ("late",)

        def process(self, key: Any, record: Row, ctx: hf.Context) -> Iterator[Row]:
            assert ctx.time_ms is not None
            if ctx.time_ms <= ctx.watermark_ms:
                ctx.late(record)
            else:
                yield record

    class Quiet(Strict):
        side_outputs = ()

    made = hf.Pipeline("p")
    source = Script([{"0": at(10)}, {"0": at(20)}, {"0": at(5, 25)}], bounded=False)
    stream = made.read("e", source).event_time("at", unit="s").key_by("k")
    out = stream.process("x", Strict())
    out.write("out", hf.memory())
    out.side("late").write("late", hf.memory())
    stream.process("y", Quiet()).write("quiet", hf.memory())
    result = hf.testing.run(made)
    assert [r["at"] for r in result.rows("late")] == [5]
    assert [r["at"] for r in result.rows("out")] == [r["at"] for r in result.rows("quiet")] == [10, 20, 25]
    assert [c.late for c in result.commits] == [{}, {}, {"x": 1, "y": 1}]
