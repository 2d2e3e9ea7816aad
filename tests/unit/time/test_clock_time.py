"""Streams whose time is the clock on the wall: windows and timers by it, whether records come or not, and in a replay the same."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.errors import SchemaError
from holdfast.log.records import Plan
from holdfast.testing import FIRST_MS
from tests.drivers import Waiting, live
from tests.unit.time.test_event_time import Script, at

Row = dict[str, Any]
BACKENDS = ["heap", "rocksdb"]
EPOCHS = [{"0": at(*range(n % 3), k="ab"[n % 2]), "1": at(n, k="a")} for n in range(12)]
WINDOWS = {
    "tumbling": (
        hf.tumbling("4s"),
        "select *, now // 4000 * 4000 as s, now // 4000 * 4000 + 4000 as e from came",
    ),
    "sliding": (
        hf.sliding("4s", "2s"),
        "select *, unnest([now // 2000 * 2000 - 2000, now // 2000 * 2000]) as s, s + 4000 as e from came",
    ),
    "session": (
        hf.session("1500ms"),
        """select k, now, min(now) over w as s, max(now) over w + 1500 as e from (
            select *, sum(opens) over (partition by k order by now rows unbounded preceding) as id from (
                select *, coalesce(now - lag(now) over (partition by k order by now) > 1500, true)::int as opens from came
            )) window w as (partition by k, id)""",
    ),
}


def counts(source: Script, window: Any, out: hf.Sink) -> hf.Pipeline:
    made = hf.Pipeline("clicks")
    stream = made.read("in", source).clock_time("seen_at").key_by("k")
    stream.window(window).aggregate("counts", n=hf.count()).write("out", out)
    return made


def expected(plans: list[Plan], windows: str, upto_ms: int) -> list[tuple[Any, ...]]:
    """By SQL: how many records each window has, of those that have ended by then."""
    came = [
        {"k": row["k"], "now": plan.now_ms}
        for plan in plans
        for one in plan.ranges
        for row in EPOCHS[one.piece.start][one.piece.split]
    ]
    con = duckdb.connect()
    con.register("came", pa.Table.from_pylist(came))
    return con.execute(
        f"select k, s, e, count(*) from ({windows}) where e <= {upto_ms} group by k, s, e order by all"
    ).fetchall()


def told(rows: list[Row]) -> list[tuple[Any, ...]]:
    ms = [
        (r["k"], *(round(r[n].timestamp() * 1000) for n in ("window_start", "window_end")), r["n"])
        for r in rows
    ]
    return sorted(ms)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parallelism", [1, 4])
@pytest.mark.parametrize("kind", WINDOWS)
def test_windows_by_the_clock_are_what_sql_says_of_when_records_were_read(
    kind: str, parallelism: int, backend: str
) -> None:
    window, sql = WINDOWS[kind]
    made = counts(Script(EPOCHS, bounded=False), window, hf.memory())
    result = hf.testing.run(made, parallelism=parallelism, backend=backend, step_ms=700, linger_ms=20_000)
    plans = result.plans
    assert told(result.rows("out")) == expected(plans, sql, plans[-1].now_ms)
    assert sum(r["n"] for r in result.rows("out")) >= sum(
        p.piece.records for plan in plans for p in plan.ranges
    )
    assert not any(c.late for c in result.commits)
    assert all(s.sealed.live.get("windows", 0) == 0 for s in result.commits[-1].shards["counts"])


@pytest.mark.parametrize("kind", WINDOWS)
def test_an_epoch_comes_when_a_window_ends_and_none_before(kind: str) -> None:
    window, _ = WINDOWS[kind]
    made = counts(Script([{"0": at(1)}], bounded=False), window, hf.memory())
    result = hf.testing.run(made, step_ms=100, linger_ms=60_000)
    ends = sorted({end for _, _, end, _ in told(result.rows("out"))})
    assert [plan.now_ms for plan in result.plans][1:] == [
        -(-(end - FIRST_MS) // 100) * 100 + FIRST_MS for end in ends
    ]


def test_when_the_source_ends_all_windows_do() -> None:
    made = counts(Script([{"0": at(1, 2)}]), hf.tumbling("1d"), hf.memory())
    assert [r["n"] for r in hf.testing.run(made).rows("out")] == [2]


class Nagging(hf.KeyedProcess):
    """Tells of each key two seconds after its last record."""

    last_ms = hf.ValueState(int, default=0)

    def process(self, key: Any, record: Row, ctx: hf.Context) -> None:
        assert ctx.time_ms == ctx.now_ms
        ctx.delete_timer(self.last_ms.value + 2_000)
        self.last_ms.value = ctx.now_ms
        ctx.set_timer(ctx.now_ms + 2_000)

    def on_timer(self, key: Any, timer: hf.Timer, ctx: hf.Context) -> Iterator[Row]:
        yield {"k": key, "after": timer.at_ms - self.last_ms.value, "at": ctx.now_ms - timer.at_ms}


def test_timers_on_the_time_of_such_a_stream_go_by_the_clock() -> None:
    made = hf.Pipeline("p")
    stream = made.read("in", Script([{"0": at(1)}, {"0": at(2)}], bounded=False)).clock_time("seen_at")
    stream.key_by("k").process("nag", Nagging()).write("out", hf.memory())
    result = hf.testing.run(made, step_ms=300, linger_ms=30_000)
    assert result.rows("out") == [{"k": "a", "after": 2_000, "at": 100}]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", WINDOWS)
def test_what_was_lost_is_rebuilt_with_the_clock_of_its_plans(
    tmp_path: Path, kind: str, backend: str
) -> None:
    window, _ = WINDOWS[kind]
    now = [FIRST_MS]

    def clock() -> int:
        now[0] += 400
        return now[0]

    out = hf.memory()
    options: dict[str, Any] = {
        "backend": backend, "clock_ms": clock, "trim_log": False, "checkpoint": "3 epochs", "runner": Waiting,
        "checkpoint_on_stop": False, "max_records": 100,
    }  # fmt: skip
    first = live(counts(Script(EPOCHS), window, out), tmp_path / "dir", epochs=8, **options)
    shutil.rmtree(Path(first.program.state_root) / first.program.home / "counts" / "00001")
    second = live(counts(Script(EPOCHS), window, out), tmp_path / "dir", **options)
    plans = [second.journal.plan(e) for e in range(1, second.driver.last_epoch + 1)]
    again = hf.testing.run(
        counts(Script(EPOCHS), window, hf.memory()), parallelism=2, plans=[p for p in plans if p is not None]
    )
    assert told(out.rows()) == told(again.rows("out")) != []
    for commit in again.commits:
        ours = second.journal.commit(commit.epoch)
        assert ours is not None and (ours.clocks, ours.wake_ms) == (commit.clocks, commit.wake_ms)


def test_a_column_that_is_there_is_not_overwritten() -> None:
    for known in (True, False):
        made = hf.Pipeline("p")
        stream = made.read("in", hf.records([{"k": "a", "seen_at": 1}]))
        stream = stream if known else stream.map(dict)
        keyed = stream.clock_time("seen_at").key_by("k")
        keyed.window(hf.tumbling("1s")).aggregate("w", n=hf.count()).write("out", hf.memory())
        with pytest.raises(SchemaError, match=r"have a column 'seen_at' already") as caught:
            hf.testing.run(made)
        assert "clock_time(" in str(caught.value)


def test_a_source_that_has_no_split_yet_does_not_hold_the_clock() -> None:
    made = hf.Pipeline("p")
    ended, silent = hf.records([{"k": "a", "at": 1, "v": 1}]), Script([], bounded=False)
    stream = made.read("ended", ended).union(made.read("silent", silent)).clock_time("seen_at")
    counted = stream.key_by("k").window(hf.tumbling("10s")).aggregate("w", n=hf.count())
    counted.write("out", hf.memory())
    result = hf.testing.run(made, step_ms=100, linger_ms=60_000)
    assert [r["n"] for r in result.rows("out")] == [1]
    assert len(result.commits) <= 3, "no epoch after the other until the window ends"


class Echo(hf.TwoInputProcess):
    """Answers each record of the right two seconds later."""

    def process_left(self, key: Any, record: Row, ctx: hf.Context) -> None:
        return

    def process_right(self, key: Any, record: Row, ctx: hf.Context) -> None:
        ctx.set_timer(ctx.now_ms + 2_000)

    def on_timer(self, key: Any, timer: hf.Timer, ctx: hf.Context) -> Iterator[Row]:
        yield {"k": key, "behind": ctx.now_ms - timer.at_ms}


@pytest.mark.parametrize("rests", ["ended", "idle"])
def test_beside_a_stream_that_nobody_waits_for_the_clock_wakes_its_operator(rests: str) -> None:
    made = hf.Pipeline("p")
    other = Script([{"0": at(1)}], splits=["0"], bounded=rests == "ended")
    left = made.read("left", other).event_time("at", unit="s", idle_after="1s").key_by("k")
    live_one = Script([{"0": at(n)} for n in range(5)], bounded=False)
    right = made.read("right", live_one).clock_time("seen_at").key_by("k")
    left.connect(right).process("echo", Echo()).write("out", hf.memory())
    result = hf.testing.run(made, step_ms=300, linger_ms=30_000)
    rows = result.rows("out")
    assert len(rows) == 5 and all(0 <= row["behind"] < 1_500 for row in rows[1:])
    assert len(result.commits) < 20
