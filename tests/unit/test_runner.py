"""What pipelines do, in the in-process runner: operators, state, schemas, errors."""

from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.errors import PipelineError, SchemaError, StateError, UserCodeError
from tests.drivers import live
from tests.pipelines import Recipe, recipes, rows

Row = dict[str, Any]


def run(stream_of: Any, data: list[Row], **options: Any) -> list[Row]:
    """What a stream gives for some records."""
    p = hf.Pipeline("p")
    stream_of(p.read("in", hf.records(data, per_epoch=options.pop("per_epoch", None)))).write(
        "out", hf.memory()
    )
    return hf.testing.run(p, **options).rows("out")


def test_map_filter_and_flat_map_take_records_one_by_one() -> None:
    data = [{"n": i} for i in range(6)]
    assert run(lambda s: s.map(lambda r: {"n": r["n"] * 2}), data) == [{"n": i * 2} for i in range(6)]
    assert run(lambda s: s.filter(lambda r: r["n"] > 3), data) == [{"n": 4}, {"n": 5}]
    assert run(lambda s: s.flat_map(lambda r: [r] * r["n"]), data[:3]) == [{"n": 1}, {"n": 2}, {"n": 2}]
    assert run(lambda s: s.flat_map(lambda r: None), data) == []


def test_map_batches_takes_tables() -> None:
    assert run(
        lambda s: s.map_batches(lambda t: t.filter(pa.compute.greater(t["n"], 1))),
        [{"n": i} for i in range(3)],
    ) == [{"n": 2}]


def test_a_union_has_each_record_once() -> None:
    p = hf.Pipeline("p")
    a, b = p.read("a", hf.records([{"n": 1}])), p.read("b", hf.records([{"n": 2}]))
    a.union(b).map(lambda r: r).write("out", hf.memory())
    for tasks in (1, 2):  # one task may read both sources: what it wrote for the first was lost
        result = hf.testing.run(p, source_tasks=tasks)
        assert result.rows("out") == [{"n": 1}, {"n": 2}]
        assert result.commits[0].records_out == {"out": 2}


def test_a_union_of_folders_is_written_whole_whoever_reads_them(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        for n in range(3):
            pq.write_table(pa.table({"from": [name], "n": [n]}), tmp_path / name / f"{n}.parquet")
    p = hf.Pipeline("p")
    a, b = (p.read(name, hf.files(str(tmp_path / name), settle="0s")) for name in "ab")
    a.union(b).write("out", hf.parquet(str(tmp_path / "out")))
    live(p, tmp_path / "dir")
    found = ds.dataset(tmp_path / "out").to_table(columns=["from", "n"]).to_pylist()
    assert sorted((row["from"], row["n"]) for row in found) == [(f, n) for f in "ab" for n in range(3)]


def test_branches_do_not_see_each_others_changes_and_share_what_is_before_them() -> None:
    calls: list[int] = []

    def shared(r: Row) -> Row:
        calls.append(1)
        return {"tags": ["x"]}

    def spoil(r: Row) -> Row:
        r["tags"].append("y")
        return r

    p = hf.Pipeline("p")
    s = p.read("in", hf.records([{"n": 1}])).map(shared, schema={"tags": list[str]})
    s.map(spoil, schema={"tags": list[str]}).write("one", hf.memory())
    s.write("two", hf.memory())
    result = hf.testing.run(p)
    assert result.rows("one") == [{"tags": ["x", "y"]}]
    assert result.rows("two") == [{"tags": ["x"]}]
    assert len(calls) == 1


class Running(hf.KeyedProcess):
    total = hf.ValueState(int, default=0)

    def process(self, key: Any, record: Row, ctx: hf.Context) -> Any:
        self.total.value += record["v"]
        yield {"key": str(key), "total": self.total.value}


@pytest.mark.parametrize("key", [("k",), ("k", "w"), (lambda r: r["k"],), (lambda r: (r["k"], r["w"]),)])
def test_a_key_is_a_column_several_or_a_function(key: Any) -> None:
    data = [{"k": i % 2, "w": "x", "v": 1} for i in range(5)]
    out = run(lambda s: s.key_by(*key).process("run", Running()), data)
    name = (
        (lambda k: str((k, "x")))
        if len(key) == 2 or (callable(key[0]) and "w" in key[0].__code__.co_consts)
        else str
    )
    assert Counter((r["key"], r["total"]) for r in out) == Counter(
        [(name(0), 1), (name(0), 2), (name(0), 3), (name(1), 1), (name(1), 2)]
    )


def test_null_is_a_key_like_any_other() -> None:
    out = run(
        lambda s: s.key_by("k").process("run", Running()),
        [{"k": None, "v": 1}, {"k": 3, "v": 5}, {"k": None, "v": 1}],
    )
    assert Counter((r["key"], r["total"]) for r in out) == Counter([("None", 1), ("None", 2), ("3", 5)])


def test_state_goes_on_from_epoch_to_epoch() -> None:
    out = run(lambda s: s.key_by("k").process("run", Running()), [{"k": 1, "v": 1}] * 7, per_epoch=2)
    assert [r["total"] for r in out] == [1, 2, 3, 4, 5, 6, 7]


AGGREGATES = {
    "c": (hf.count(), "count(*)"),
    "cn": (hf.count("v"), "count(v)"),
    "s": (hf.sum("v"), "sum(v)"),
    "lo": (hf.min("name"), "min(name)"),
    "hi": (hf.max("v"), "max(v)"),
    "avg": (hf.mean("n"), "avg(n)"),
    "si": (hf.sum("n"), "sum(n)"),
    "a": (hf.first("id"), "first(id order by id)"),
    "z": (hf.last("id"), "last(id order by id)"),
}


@settings(max_examples=30, deadline=None)
@given(rows(80).filter(bool), st.integers(1, 30), st.integers(1, 3), st.sampled_from(["heap", "rocksdb"]))
def test_aggregates_are_what_duckdb_says(data: list[Row], per_epoch: int, splits: int, backend: str) -> None:
    p = hf.Pipeline("p")
    events = pa.Table.from_pylist(
        data,
        pa.schema(
            {"id": pa.int64(), "k": pa.int64(), "name": pa.string(), "v": pa.float64(), "n": pa.int64()}
        ),
    )
    source = hf.records(events, per_epoch=per_epoch)
    made = p.read("in", source).key_by("k").aggregate("agg", **{n: a for n, (a, _) in AGGREGATES.items()})
    made.write("out", hf.memory())
    out = hf.testing.run(p, backend=backend, source_tasks=splits).rows("out")
    last = {r["k"]: r for r in out}
    columns = ", ".join(f"{sql} as {n}" for n, (_, sql) in AGGREGATES.items())
    expected = duckdb.sql(f"select k, {columns} from events group by k").to_arrow_table().to_pylist()
    assert len(last) == len(expected)
    for want in expected:
        got = last[want["k"]]
        for name, value in want.items():
            assert (
                got[name] == pytest.approx(value, rel=1e-9, abs=1e-6)
                if isinstance(value, float)
                else got[name] == value
            )


def test_distinct_values_are_counted_about_right() -> None:
    data = [{"k": i % 2, "u": f"user-{i % 5000}"} for i in range(20_000)]
    out = run(lambda s: s.key_by("k").aggregate("d", users=hf.approx_distinct("u")), data, per_epoch=3000)
    final = {r["k"]: r["users"] for r in out}
    assert all(abs(n - 2500) < 125 for n in final.values())


class Span(hf.Aggregate):
    accumulator = pa.struct([("low", pa.int64()), ("high", pa.int64())])
    result_type = int

    def create(self) -> Row:
        return {"low": 10**9, "high": -(10**9)}

    def add(self, accumulator: Row, record: Row) -> Row:
        return {"low": min(accumulator["low"], record["v"]), "high": max(accumulator["high"], record["v"])}

    def merge(self, left: Row, right: Row) -> Row:
        return {"low": min(left["low"], right["low"]), "high": max(left["high"], right["high"])}

    def result(self, accumulator: Row) -> int:
        return int(accumulator["high"] - accumulator["low"])


def test_an_aggregate_of_the_users_own_stands_beside_the_houses() -> None:
    data = [{"k": i % 2, "v": i * i} for i in range(10)]
    for backend in ("heap", "rocksdb"):
        out = run(
            lambda s: s.key_by("k").aggregate("a", span=Span(), n=hf.count()),
            data,
            per_epoch=4,
            backend=backend,
        )
        assert {r["k"]: (r["span"], r["n"]) for r in out} == {0: (64, 5), 1: (80, 5)}


def test_reduce_keeps_one_record_for_each_key() -> None:
    data = [{"k": i % 2, "v": i} for i in range(10)]
    out = run(
        lambda s: s.key_by("k").reduce("r", lambda a, b: {"k": a["k"], "v": a["v"] + b["v"]}),
        data,
        per_epoch=3,
    )
    assert {r["k"]: r["v"] for r in out} == {0: 20, 1: 25}


def test_side_outputs_are_streams_of_their_own() -> None:
    class Sort(hf.KeyedProcess):
        side_outputs = ("odd",)

        def process(self, key: Any, record: Row, ctx: hf.Context) -> Any:
            if record["v"] % 2:
                ctx.emit("odd", record)
            else:
                yield record

    p = hf.Pipeline("p")
    s = p.read("in", hf.records([{"v": i} for i in range(6)])).key_by("v").process("sort", Sort())
    s.write("even", hf.memory())
    s.side("odd").write("odd", hf.memory())
    result = hf.testing.run(p)
    assert sorted(r["v"] for r in result.rows("even")) == [0, 2, 4]
    assert sorted(r["v"] for r in result.rows("odd")) == [1, 3, 5]


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
@given(recipes())
def test_what_comes_out_does_not_depend_on_the_backend_and_is_the_same_every_time(recipe: Recipe) -> None:
    one = hf.testing.run(recipe.build(), parallelism=recipe.parallelism, max_records=recipe.max_records)
    again = hf.testing.run(recipe.build(), parallelism=recipe.parallelism, plans=one.plans)
    rocks = hf.testing.run(recipe.build(), parallelism=recipe.parallelism, plans=one.plans, backend="rocksdb")
    for other in (again, rocks):
        assert [_facts(c) for c in other.commits] == [_facts(c) for c in one.commits]
        for uid in one._captured:
            assert other.rows(uid) == one.rows(uid)


@pytest.mark.parametrize("per_epoch", [1, 3], ids=["by epochs", "in one"])
def test_a_sum_that_does_not_fit_is_an_error_and_no_other_number(per_epoch: int) -> None:
    def total(s: hf.Stream) -> hf.Stream:
        return s.key_by("k").aggregate("sum", total=hf.sum("v"), mean=hf.mean("v"))

    large = [{"k": 1, "v": 1 << 62} for _ in range(3)]
    with pytest.raises(SchemaError, match=r"A sum is too large for int64") as caught:
        run(total, large, per_epoch=per_epoch)
    assert caught.value.uid == "sum"
    back_and_forth = [{"k": n % 2, "v": (1 << 61) * (-1 if n % 4 < 2 else 1)} for n in range(12)]
    assert {r["total"] for r in run(total, back_and_forth, per_epoch=12)} == {0}


class Popping(hf.KeyedProcess):
    """Changes in place what it takes out of a map."""

    lists = hf.MapState(str, list[int])

    def process(self, key: Any, record: Row, ctx: hf.Context) -> Any:
        mine = self.lists.pop("a", [])
        mine.append(record["v"])
        self.lists["a"] = mine
        yield {"k": key, "all": mine, "note": record["note"]}


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_an_epoch_that_is_run_again_begins_with_what_was_committed(backend: str) -> None:
    # In the second epoch one key shows the type of a field that was null until then: all of it is run again.
    data = [
        {"k": k, "v": v, "note": "now" if v == 2 and k == 3 else None} for v in (1, 2, 3) for k in range(8)
    ]
    out = run(lambda s: s.key_by("k").process("pop", Popping()), data, per_epoch=8, backend=backend)
    assert [r["all"] for r in out if r["k"] == 0] == [[1], [1, 2], [1, 2, 3]]


def test_what_an_operator_makes_is_not_the_sources_fault() -> None:
    p = hf.Pipeline("p")
    p.read("in", hf.records([{"n": 1}])).map(lambda r: {"k": "\udc80"}, uid="odd").write("out", hf.memory())
    with pytest.raises(SchemaError, match="no common Arrow type") as caught:
        hf.testing.run(p)
    assert caught.value.uid != "in"


def test_a_source_that_has_ended_holds_no_watermark_back() -> None:
    p = hf.Pipeline("p")
    short = p.read("short", hf.records([{"k": 1, "t": t} for t in range(3)]))
    long = p.read("long", hf.records([{"k": 2, "t": t} for t in range(200)], per_epoch=20))
    both = short.union(long).event_time("t", unit="s")
    both.key_by("k").window(hf.tumbling("10s")).aggregate("w", n=hf.count()).write("out", hf.memory())
    result = hf.testing.run(p, max_records=20)
    assert len([c for c in result.commits if c.records_out.get("out")]) > 5
    assert len(result.rows("out")) == 21


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
@given(recipes().filter(lambda recipe: "branch" in recipe.before), st.integers(1, 3))
def test_before_an_exchange_there_is_what_plain_python_makes_of_all_sources(
    recipe: Recipe, tasks: int
) -> None:
    result = hf.testing.run(
        recipe.build(), parallelism=recipe.parallelism, max_records=recipe.max_records, source_tasks=tasks
    )
    expected = recipe.branched()
    assert expected is not None
    assert _bag(result.rows("a.branch")) == _bag(expected)


def _bag(rows: list[dict[str, Any]]) -> list[str]:
    """Rows in any order; a field that is null is as good as one that is not there."""
    return sorted(repr(sorted((n, v) for n, v in row.items() if v is not None)) for row in rows)


def _facts(commit: Any) -> Any:
    files = {u: [(f.rows, f.size_bytes, f.crc32) for f in fs] for u, fs in commit.sinks.items()}
    return files, {u: [s.sealed.digest for s in shards] for u, shards in commit.shards.items()}


def test_order_of_keyed_output_does_not_depend_on_parallelism() -> None:
    data = [{"k": i % 17, "v": i} for i in range(200)]
    outs = [
        run(lambda s: s.key_by("k").process("run", Running()), data, parallelism=n, per_epoch=50)
        for n in (1, 2, 5)
    ]
    assert outs[0] == outs[1] == outs[2]


# Schemas


def test_the_first_epoch_shows_the_schema_and_later_ones_keep_to_it() -> None:
    data = [{"n": 1}, {"n": 2}]
    out = run(lambda s: s.map(lambda r: {"a": 1} if r["n"] == 1 else {"a": 2, "b": 3}), data, per_epoch=2)
    assert out == [{"a": 1, "b": None}, {"a": 2, "b": 3}]
    with pytest.raises(SchemaError, match="field 'b'") as caught:
        run(lambda s: s.map(lambda r: {"a": 1} if r["n"] == 1 else {"a": 2, "b": 3}), data, per_epoch=1)
    assert "[map-1]" in str(caught.value)


def test_tasks_that_disagree_on_types_settle_on_one() -> None:
    data = [{"n": i} for i in range(4)]
    out = run(lambda s: s.map(lambda r: {"x": 1 if r["n"] < 2 else 0.5}), data, source_tasks=2)
    assert [type(r["x"]) for r in out] == [float] * 4


@pytest.mark.parametrize("kind", ["aggregate", "reduce"])
@pytest.mark.parametrize("per_epoch", [1, 2, 4])
def test_a_field_that_is_null_in_one_task_and_a_number_in_another_is_aggregated_all_the_same(
    kind: str, per_epoch: int
) -> None:
    def stream(s: hf.Stream) -> hf.Stream:
        keyed = s.map(lambda r: {"k": 1, "v": r["v"]}).key_by("k")
        if kind == "reduce":
            return keyed.reduce("r", lambda a, b: {"k": 1, "v": (a["v"] or 0) + (b["v"] or 0)})
        return keyed.aggregate("r", v=hf.sum("v"))

    data = [{"v": None}, {"v": None}, {"v": 3}, {"v": 4}]
    for backend in ("heap", "rocksdb"):
        assert run(stream, data, per_epoch=per_epoch, backend=backend)[-1] == {"k": 1, "v": 7}


def test_a_declared_schema_is_kept_from_the_start() -> None:
    out = run(lambda s: s.map(lambda r: {"x": 1}, schema={"x": float, "y": str}), [{"n": 1}])
    assert out == [{"x": 1.0, "y": None}]


# Errors


def boom(record: Row) -> Row:
    return {"x": 1 / record["n"]}


def test_an_exception_names_uid_line_and_record_and_shows_the_users_traceback() -> None:
    with pytest.raises(UserCodeError) as caught:
        run(lambda s: s.map(boom, uid="divide"), [{"n": 1}, {"n": 0}])
    text = str(caught.value)
    assert "[divide] ZeroDivisionError: division by zero" in text
    assert "test_runner.py:" in text
    assert "record: {'n': 0}" in text
    assert "in boom\n" in text
    assert "engine/chain.py" not in text


def test_an_exception_in_process_names_the_key_too() -> None:
    class Fails(hf.KeyedProcess):
        def process(self, key: Any, record: Row, ctx: hf.Context) -> Any:
            if record["n"] == 3:
                raise ValueError("three")
            yield record

    with pytest.raises(UserCodeError, match=r"\[fails\] ValueError: three") as caught:
        run(lambda s: s.key_by("n").process("fails", Fails()), [{"n": i} for i in range(5)])
    assert "key: 3" in str(caught.value)
    assert "record: {'n': 3}" in str(caught.value)


@pytest.mark.parametrize(
    ("stream", "error", "message"),
    [
        (
            lambda s: s.key_by("nope").process("p", Running()),
            PipelineError,
            r"\[p\] There is no column 'nope'",
        ),
        (lambda s: s.key_by("f").process("p", Running()), SchemaError, "key can't be of type double"),
        (lambda s: s.map(lambda r: None), SchemaError, "must be a dict, not NoneType"),
        (lambda s: s.map_batches(lambda t: 3), SchemaError, "must return a pyarrow.Table"),
        (
            lambda s: s.key_by("n").aggregate("a", s=hf.sum("nope")),
            PipelineError,
            r"\[a\] There is no column 'nope'",
        ),
        (
            lambda s: s.map(dict).key_by("nope").process("p", Running()),
            PipelineError,
            r"\[p\] There is no column 'nope'",
        ),
        (
            lambda s: s.map(dict).key_by("n").aggregate("a", s=hf.sum("x")),
            SchemaError,
            r"\[a\] There is no column 'x'",
        ),
    ],
)
def test_what_does_not_fit_says_so(stream: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(stream, [{"n": 1, "f": 0.5, "v": 1}])


def test_a_state_of_the_wrong_type_is_an_error_and_not_a_surprise() -> None:
    class Wrong(hf.KeyedProcess):
        total = hf.ValueState(int)

        def process(self, key: Any, record: Row, ctx: hf.Context) -> Any:
            self.total.value = "text"

    with pytest.raises(
        StateError, match=r"\[wrong\] State 'total' is declared as int64, but key 1 was given 'text'"
    ):
        run(lambda s: s.key_by("n").process("wrong", Wrong()), [{"n": 1}])


# The harness


def test_the_harness_runs_one_function_with_state_time_and_side_outputs() -> None:
    class Visits(hf.KeyedProcess):
        last = hf.ValueState(int, ttl="10s")
        side_outputs = ("new",)

        def process(self, key: str, record: Row, ctx: hf.Context) -> Any:
            if self.last.value is None:
                ctx.emit("new", {"user": key})
            self.last.value = ctx.now_ms
            return []

    for backend in ("heap", "rocksdb"):
        harness = hf.testing.Harness(Visits(), backend=backend)
        harness.process("ann", {})
        harness.advance(9_000)
        harness.process("ann", {})
        harness.advance(10_001)
        harness.process("ann", {})
        assert harness.side["new"] == [{"user": "ann"}] * 2


def test_recorded_plans_can_be_followed_exactly(tmp_path: Path) -> None:
    data = [{"k": i % 3, "v": i} for i in range(20)]

    def build() -> hf.Pipeline:
        p = hf.Pipeline("p")
        p.read("in", hf.records(data, per_epoch=7)).key_by("k").process("run", Running()).write(
            "out", hf.memory()
        )
        return p

    first = hf.testing.run(build(), directory=tmp_path / "a")
    second = hf.testing.run(build(), plans=first.plans, directory=tmp_path / "b")
    assert second.rows("out") == first.rows("out")
    assert first.epochs == 3
    assert first.state("run")["total"].to_pylist() == second.state("run")["total"].to_pylist()
    totals = {r["k0"]: r["value"] for r in first.state("run")["total"].to_pylist()}
    assert totals == {k: sum(r["v"] for r in data if r["k"] == k) for k in range(3)}


def test_randomness_and_ids_are_the_same_when_an_epoch_is_run_again() -> None:
    class Dice(hf.KeyedProcess):
        def process(self, key: Any, record: Row, ctx: hf.Context) -> Any:
            yield {"n": ctx.random.random(), "id": str(ctx.uuid())}

    data = [{"k": i} for i in range(50)]
    outs = [run(lambda s: s.key_by("k").process("dice", Dice()), data, parallelism=n) for n in (1, 2, 3)]
    assert outs[0] == outs[1] == outs[2]
    assert len({r["id"] for r in outs[0]}) == 50


def test_writing_the_same_value_again_renews_its_ttl_on_either_backend() -> None:
    class Open(hf.KeyedProcess):
        status = hf.ValueState(str, default="closed", ttl="10s")

        def process(self, key: str, record: Row, ctx: hf.Context) -> Any:
            before = self.status.value
            self.status.value = "open"
            yield {"before": before}

    for backend in ("heap", "rocksdb"):
        harness = hf.testing.Harness(Open(), backend=backend)
        seen = []
        for _ in range(4):
            seen.append(harness.process("a", {})[0]["before"])
            harness.advance(6_000)
        assert seen == ["closed", "open", "open", "open"]


def test_a_state_cannot_be_replaced_by_a_value() -> None:
    class Wrong(hf.KeyedProcess):
        total = hf.ValueState(int, default=0)

        def process(self, key: Any, record: Row, ctx: hf.Context) -> Any:
            self.total = 5

    with pytest.raises(PipelineError, match=r"self.total is a state") as caught:
        run(lambda s: s.key_by("n").process("wrong", Wrong()), [{"n": 1}])
    assert "self.total.value = " in str(caught.value)


def test_redacted_errors_show_nothing_of_the_data() -> None:
    from holdfast.data.shown import hide_values
    from holdfast.engine.calls import user_error
    from holdfast.plan.graph import Node

    hide_values(True)
    try:
        error = ValueError("secret 42")
        text = str(
            user_error(error, Node(0, "map", "m", None), {"card": "secret"}, redact=True, key="secret")
        )
        with pytest.raises(SchemaError) as caught:
            run(lambda s: s.map(lambda r: {"x": "secret"}, schema={"x": int}), [{"n": 1}])
    finally:
        hide_values(False)
    assert "secret" not in text
    assert "[m] ValueError: (redacted)" in text
    assert "does not fit" in str(caught.value)
