"""Two inputs of one function: what comes first, whose time it is, and who holds it, against SQL where it can say so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.time.units import MIN_TIME
from tests.arrivals import Run, Way, hard_ways, ran, ways
from tests.drivers import live
from tests.unit.time.test_event_time import S, Script, at

Row = dict[str, Any]


class Paired(hf.TwoInputProcess):
    """Each record of the right with how many of the left its key had, and the last of them."""

    seen = hf.ValueState(int, default=0)
    last = hf.ValueState(int)

    def process_left(self, key: Any, record: Row, ctx: hf.Context) -> None:
        self.seen.value += 1
        self.last.value = record["n"]

    def process_right(self, key: Any, record: Row, ctx: hf.Context) -> Any:
        yield {"k": key, "n": record["n"], "seen": self.seen.value, "last": self.last.value}


def paired(left: list[Row], right: list[Row], out: hf.Sink, per_epoch: int, splits: int = 1) -> hf.Pipeline:
    schema = {"k": int, "n": int}
    pipeline = hf.Pipeline("paired")
    sides = [
        pipeline.read(name, hf.records(rows, schema=schema, per_epoch=per_epoch, splits=splits)).key_by("k")
        for name, rows in (("left", left), ("right", right))
    ]
    sides[0].connect(sides[1]).process("pairs", Paired()).write("out", out)
    return pipeline


def expected(left: list[Row], right: list[Row], per_epoch: int) -> list[tuple[Any, ...]]:
    """By SQL: the left of an epoch comes before its right, and what came in earlier epochs before both."""
    tables = {
        name: pa.table(
            {
                "k": pa.array([r["k"] for r in rows], pa.int64()),
                "n": pa.array([r["n"] for r in rows], pa.int64()),
                "place": pa.array(range(len(rows)), pa.int64()),
            }
        )
        for name, rows in (("l", left), ("r", right))
    }
    sql = duckdb.connect()
    for name, table in tables.items():
        sql.register(name, table)
    return sql.execute(
        f"""select r.k, r.n, count(l.n), arg_max(l.n, l.place) from r left join l
        on l.k = r.k and l.place // {per_epoch} <= r.place // {per_epoch}
        group by r.k, r.n, r.place order by all"""
    ).fetchall()


def tuples(rows: list[Row]) -> list[tuple[Any, ...]]:
    return sorted(((r["k"], r["n"], r["seen"], r["last"]) for r in rows), key=str)


ROWS = st.lists(st.fixed_dictionaries({"k": st.integers(0, 3), "n": st.integers(0, 99)}), max_size=25)


@given(ROWS, ROWS, st.integers(1, 8), st.integers(1, 4), st.sampled_from(["heap", "rocksdb"]))
def test_the_left_of_an_epoch_comes_before_its_right(
    left: list[Row], right: list[Row], per_epoch: int, parallelism: int, backend: str
) -> None:
    found = hf.testing.run(
        paired(left, right, hf.memory(), per_epoch), parallelism=parallelism, backend=backend
    )
    assert tuples(found.rows("out")) == sorted(expected(left, right, per_epoch), key=str)


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_both_sides_of_a_key_are_there_again_after_their_shard_was_lost(tmp_path: Path, backend: str) -> None:
    rows = [{"k": n % 5, "n": n} for n in range(40)]
    options: dict[str, Any] = {"backend": backend, "checkpoint": "2 epochs", "checkpoint_on_stop": False}

    def build() -> hf.Pipeline:
        return paired(rows, rows[::-1], hf.jsonl(str(tmp_path / "out")), 4)

    first = live(build(), tmp_path / "dir", epochs=5, **options)
    shutil.rmtree(Path(first.program.state_root) / first.program.home / "pairs" / "00001")
    live(build(), tmp_path / "dir", **options)
    texts = [path.read_text() for path in sorted((tmp_path / "out").glob("*.jsonl"))]
    found = [json.loads(line) for text in texts for line in text.splitlines()]
    assert tuples(found) == sorted(expected(rows, rows[::-1], 4), key=str)


class Alarm(hf.TwoInputProcess):
    """A timer five seconds after each record of the left; both sides say what the clock is."""

    def process_left(self, key: Any, record: Row, ctx: hf.Context) -> Any:
        assert ctx.time_ms is not None
        ctx.set_timer(ctx.time_ms + 5_000)

    def process_right(self, key: Any, record: Row, ctx: hf.Context) -> None:
        return

    def on_timer(self, key: Any, timer: hf.Timer, ctx: hf.Context) -> Any:
        yield {"at": timer.at_ms // 1000}


def alarms(left: list[Any], right: list[Any], **right_time: Any) -> hf.testing.Result:
    pipeline = hf.Pipeline("alarms")
    fast = pipeline.read("fast", Script(left, bounded=False)).event_time("at", unit="s", uid="fast.time")
    slow = pipeline.read("slow", Script(right, bounded=False)).event_time(
        "at", unit="s", uid="slow.time", **right_time
    )
    fast.key_by("k").connect(slow.key_by("k")).process("alarm", Alarm()).write("out", hf.memory())
    return hf.testing.run(pipeline, step_ms=1000)


def fired(result: hf.testing.Result) -> list[tuple[int, int]]:
    return [
        (epoch, second)
        for epoch, table in sorted(result._captured["out"].tables.items())
        for second in table["at"].to_pylist()
    ]


def test_the_event_clock_of_both_is_that_of_the_slower_one() -> None:
    left = [{"0": at(1)}, {"0": at(20)}, {"0": at(40)}, {"0": at(60)}]
    result = alarms(left, [{"0": at(1)}, {"0": at(3)}, {"0": at(8)}, {"0": at(26)}])
    assert [c.clocks["alarm"] for c in result.commits] == [s * S - 1 for s in (1, 3, 8, 26)]
    assert fired(result) == [(3, 6), (4, 25)]


def test_a_side_that_is_idle_does_not_hold_the_other_and_comes_back_without_turning_time_back() -> None:
    left = [{"0": at(1)}, {"0": at(20)}, {"0": at(40)}, {"0": at(60)}, {"0": at(80)}]
    right = [{"0": at(1)}, {}, {}, {}, {"0": at(50)}]
    result = alarms(left, right, idle_after="2s")
    clocks = [c.clocks["alarm"] for c in result.commits]
    assert clocks == [s * S - 1 for s in (1, 1, 40, 60, 60)]
    assert fired(result) == [(3, 6), (3, 25), (4, 45)]


# However records come


class Asked(hf.TwoInputProcess):
    """The left asks: it is told ten seconds of event time later what the right had said. The right is told who had asked."""

    asked = hf.ValueState(int, default=0)
    last_asked = hf.ValueState(int)
    said = hf.ValueState(int, default=0)
    last_said = hf.ValueState(int)

    def process_left(self, key: Any, record: Row, ctx: hf.Context) -> None:
        assert ctx.time_ms is not None
        self.asked.value += 1
        self.last_asked.value = record["n"]
        ctx.set_timer(ctx.time_ms + 10_000)

    def process_right(self, key: Any, record: Row, ctx: hf.Context) -> Any:
        self.said.value += 1
        self.last_said.value = record["n"]
        yield self._row(key, "told", record["n"], self.asked.value, self.last_asked.value)

    def on_timer(self, key: Any, timer: hf.Timer, ctx: hf.Context) -> Any:
        yield self._row(key, "rang", timer.at_ms // 1000, self.said.value, self.last_said.value)

    def _row(self, key: Any, what: str, of: int, count: int, last: int | None) -> Row:
        return {"k": key, "what": what, "of": of, "count": count, "last": last}


TOLD = """
    select r.k, 'told', r.n, count(l.n), arg_max(l.n, l.i) from r left join l
    on l.k is not distinct from r.k and l.epoch <= r.epoch group by r.k, r.n, r.i
"""
RANG = """
    with due as (
        select distinct l.k, l.at + 10 as at, (
            select min(t.epoch) from epochs t where t.epoch >= l.epoch and t.after >= (l.at + 10) * 1000000
        ) as epoch from l
    )
    select due.k, 'rang', due.at, count(r.n), arg_max(r.n, r.i) from due left join r
    on r.k is not distinct from due.k and r.epoch <= due.epoch group by due.k, due.at, due.epoch
"""
"""A timer fires at the end of the first epoch that took the clock to it; one of the past at that of its own epoch."""
SIDE = pa.schema([("k", pa.string()), ("at", pa.int64()), ("n", pa.int64())])


def by_sql(run: Run) -> list[tuple[Any, ...]]:
    sql = duckdb.connect()
    more = [(name, pa.int64()) for name in ("i", "clock", "epoch")]
    for name in ("l", "r"):
        sql.register(name, pa.Table.from_pylist(run.arrived(name), pa.schema([*SIDE, *more])))
    after = [{"epoch": c.epoch, "after": c.clocks.get("x", MIN_TIME)} for c in run.commits]
    sql.register("epochs", pa.Table.from_pylist(after, pa.schema({"epoch": pa.int64(), "after": pa.int64()})))
    return [row for text in (TOLD, RANG) for row in sql.execute(text).fetchall()]


def sides(left: list[Drawn], right: list[Drawn]) -> dict[str, list[Row]]:
    return {
        name: [{"k": k, "at": t, "n": n, "t": t} for n, (k, t) in enumerate(drawn)]
        for name, drawn in (("l", left), ("r", right))
    }


Drawn = tuple[Any, int]
MOMENTS = st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.integers(0, 60)), max_size=30)
SOME: list[list[Drawn]] = [[("ab"[n % 2], n * step % 61) for n in range(30)] for step in (7, 11)]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@hard_ways(left=SOME[0], right=SOME[1])
@given(left=MOMENTS, right=MOMENTS, way=ways())
def test_two_inputs_and_their_timers_are_what_sql_says_however_their_records_come(
    left: list[Drawn], right: list[Drawn], way: Way
) -> None:
    schema = {"k": str, "what": str, "of": int, "count": int, "last": int}

    def build(asks: hf.KeyedStream, says: hf.KeyedStream) -> hf.Stream:
        return asks.connect(says).process("x", Asked(), schema=schema)

    run = ran(way, sides(left, right), SIDE, build)
    found = [(r["k"], r["what"], r["of"], r["count"], r["last"]) for r in run.rows("out")]
    assert sorted(found, key=repr) == sorted(by_sql(run), key=repr)
