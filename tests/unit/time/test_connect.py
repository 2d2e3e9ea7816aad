"""Two inputs of one function: what comes first, whose time it is, and who holds it, against SQL where it can say so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
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
