"""Windows of aggregates beside DuckDB's SQL over the same events: whatever order they come in, and however they are run."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast as hf

Row = dict[str, Any]

TUMBLING = """
    select k, (t - t % 10) as s, (t - t % 10) + 10 as e, count(*) as n, sum(v) as total, min(v) as least
    from events group by all
"""
SLIDING = """
    select k, w as s, w + 30 as e, count(*) as n, sum(v) as total, min(v) as least
    from events, unnest(generate_series(t - t % 10 - 20, t - t % 10, 10)) as g(w) group by all
"""
UNEVEN = """
    select k, w as s, w + 25 as e, count(*) as n, sum(v) as total, min(v) as least
    from events, unnest(generate_series((t // 10) * 10 - 20, (t // 10) * 10, 10)) as g(w)
    where t < w + 25 group by all
"""
SESSION = """
    with cut as (
        select *, case when t - lag(t) over (partition by k order by t) <= 7 then 0 else 1 end as opens from events
    ), told as (select *, sum(opens) over (partition by k order by t rows unbounded preceding) as id from cut)
    select k, min(t) as s, max(t) + 7 as e, count(*) as n, sum(v) as total, min(v) as least from told group by k, id
"""
KINDS: dict[str, tuple[Callable[[], Any], str]] = {
    "tumbling": (lambda: hf.tumbling("10s"), TUMBLING),
    "sliding": (lambda: hf.sliding("30s", "10s"), SLIDING),
    "uneven": (lambda: hf.sliding("25s", "10s"), UNEVEN),
    "session": (lambda: hf.session("7s"), SESSION),
}


def truth(sql: str, events: list[Row]) -> set[tuple[Any, ...]]:
    if not events:
        return set()
    table = pa.table({c: [e[n] for e in events] for c, n in (("k", "k"), ("t", "at"), ("v", "v"))})
    con = duckdb.connect()
    con.register("events", table)
    return set(con.execute(sql).fetchall())


def build(
    events: list[Row], window: Any, *, splits: int, per_epoch: int, lag: str, lateness: str = "0s"
) -> hf.Pipeline:
    made = hf.Pipeline("windows")
    stream = made.read("in", hf.records(events, splits=splits, per_epoch=per_epoch, schema=SCHEMA))
    timed = stream.event_time("at", unit="s", out_of_order=lag).key_by("k")
    out = (
        timed.window(window)
        .allowed_lateness(lateness)
        .aggregate("w", n=hf.count(), total=hf.sum("v"), least=hf.min("v"))
    )
    out.write("out", hf.memory())
    out.side("late").write("late", hf.memory())
    return made


SCHEMA = {"k": str, "at": int, "v": int}


def seconds(row: Row) -> tuple[Any, ...]:
    start, end = (
        int(row[n].timestamp()) if row[n].tzinfo else _utc(row[n]) for n in ("window_start", "window_end")
    )
    return row["k"], start, end, row["n"], row["total"], row["least"]


def _utc(naive: Any) -> int:
    import datetime as dt

    return int(naive.replace(tzinfo=dt.timezone.utc).timestamp())


EVENTS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", None]), st.integers(0, 200), st.integers(-5, 5)), max_size=60
)


def events_of(drawn: list[tuple[Any, int, int]]) -> list[Row]:
    return [{"k": k, "at": at, "v": v} for k, at, v in drawn]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    drawn=EVENTS,
    shuffle=st.integers(0, 1000),
    splits=st.integers(1, 3),
    per_epoch=st.sampled_from([3, 7, 50]),
    parallelism=st.sampled_from([1, 2, 4]),
    backend=st.sampled_from(["heap", "heap", "rocksdb"]),
)
def test_with_time_enough_every_window_is_what_sql_says_once(
    kind: str, drawn: Any, shuffle: int, splits: int, per_epoch: int, parallelism: int, backend: str
) -> None:
    window, sql = KINDS[kind]
    events = events_of(drawn)
    random.Random(shuffle).shuffle(events)
    pipeline = build(events, window(), splits=splits, per_epoch=per_epoch, lag="200s")
    result = hf.testing.run(pipeline, parallelism=parallelism, backend=backend)
    rows = [seconds(r) for r in result.rows("out")]
    assert len(rows) == len(set(rows))
    assert set(rows) == truth(sql, events)
    assert result.rows("late") == []
    assert sum(sum(c.late.values()) for c in result.commits) == 0


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    drawn=EVENTS,
    splits=st.integers(1, 3),
    per_epoch=st.sampled_from([2, 5, 9]),
    lag=st.sampled_from(["0s", "5s", "20s"]),
    lateness=st.sampled_from(["0s", "8s", "50s"]),
    parallelism=st.sampled_from([1, 3]),
    backend=st.sampled_from(["heap", "heap", "rocksdb"]),
)
def test_what_is_late_comes_out_at_the_side_and_the_rest_is_what_sql_says(
    kind: str,
    drawn: Any,
    splits: int,
    per_epoch: int,
    lag: str,
    lateness: str,
    parallelism: int,
    backend: str,
) -> None:
    window, sql = KINDS[kind]
    events = [{**e, "v": n} for n, e in enumerate(events_of(drawn))]
    pipeline = build(events, window(), splits=splits, per_epoch=per_epoch, lag=lag, lateness=lateness)
    result = hf.testing.run(pipeline, parallelism=parallelism, backend=backend)
    late = result.rows("late")
    assert sum(c.late.get("w", 0) for c in result.commits) == len(late)
    lost = {r["v"] for r in late}
    assert len(lost) == len(late), "a record came out as late twice"
    kept = [e for e in events if e["v"] not in lost]
    final = {r[:3]: r for r in map(seconds, result.rows("out"))}
    if kind == "session":  # a session that has had its result may grow: its earlier result stays
        assert truth(sql, kept) <= set(final.values())
    elif kind == "tumbling":
        assert set(final.values()) == truth(sql, kept)
    else:  # a record may be too late for its first windows only: those lack it
        assert {r[:3] for r in final.values()} >= {r[:3] for r in truth(sql, kept) if r[2] > 200}


def test_the_same_plans_lead_to_the_same_bytes_with_any_parallelism() -> None:
    events = [{"k": f"k{i % 17}", "at": (i * 7919) % 300, "v": i} for i in range(400)]
    for window, _ in KINDS.values():
        made = []
        for parallelism in (1, 2, 4):
            pipeline = build(events, window(), splits=2, per_epoch=40, lag="20s", lateness="10s")
            result = hf.testing.run(pipeline, parallelism=parallelism)
            made.append((result.rows("out"), result.rows("late")))
        assert made[0] == made[1] == made[2]
        assert made[0][0]
