"""Functions that are called in the order of event time: beside DuckDB's SQL, however their records come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.engine.build import build_stages
from holdfast.engine.keyed import operator_for
from holdfast.errors import PipelineError, UserCodeError
from tests.arrivals import Run, Way, hard_ways, ran, ways
from tests.unit.time.test_arrivals import Batches

Row = dict[str, Any]
SCHEMA = pa.schema([("k", pa.string()), ("at", pa.int64()), ("v", pa.int64()), ("n", pa.int64())])
QUICK = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
EVENTS = st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.integers(0, 60)), min_size=1, max_size=40)
MANY = [(k, (7 * n + n * n) % 60) for n in range(40) for k in ("a", None)]


def events(found: list[tuple[Any, int]]) -> list[Row]:
    return [{"k": k, "at": t, "v": n * 10, "n": n, "t": t} for n, (k, t) in enumerate(found)]


def asked(sql: str, **tables: list[Row]) -> list[tuple[Any, ...]]:
    """SQL over the records that were not late, as `name`, and those that were, as `late_name`."""
    con = duckdb.connect()
    for name, rows in tables.items():
        more = [("i", pa.int64()), ("clock", pa.int64()), ("epoch", pa.int64())]
        con.register("arrived", pa.Table.from_pylist(rows, pa.schema([*SCHEMA, *more])))
        con.execute(f"create table {name} as select * from arrived where arrived.at * 1000000 > clock")
        con.execute(f"create table late_{name} as select * from arrived where arrived.at * 1000000 <= clock")
    return con.execute(sql).fetchall()


def late(run: Run, uid: str, **tables: list[Row]) -> bool:
    """Whether what came out as late is what SQL says."""
    (name,) = tables
    return sorted(r["n"] for r in run.rows(uid)) == [
        n for (n,) in asked(f"select n from late_{name} order by n", **tables)
    ]


class Priced(hf.TwoInputProcess):
    """The newest price at the time of each order."""

    price = hf.ValueState(int, default=-1)

    def process_left(self, key: Any, price: Row, ctx: hf.Context) -> None:
        self.price.value = price["n"]

    def process_right(self, key: Any, order: Row, ctx: hf.Context) -> Iterator[Row]:
        assert ctx.time_ms == order["at"] * 1000 and ctx.watermark_ms == ctx.time_ms - 1
        yield {"n": order["n"], "price": self.price.value}


AS_OF = """
    select n, coalesce((select p.n from prices p where p.k is not distinct from o.k and p.at <= o.at
        order by p.at desc, p.i desc limit 1), -1) from orders o order by n
"""


@QUICK
@hard_ways(prices=MANY, orders=MANY[::-1])
@given(prices=EVENTS, orders=EVENTS, way=ways())
def test_each_side_sees_what_the_other_has_said_by_its_time(prices: Any, orders: Any, way: Way) -> None:
    def build(left: hf.KeyedStream, right: hf.KeyedStream) -> hf.Stream:
        return left.connect(right).process("x", Priced(), in_order=True, schema={"n": int, "price": int})

    run = ran(way, {"l": events(prices), "r": events(orders)}, SCHEMA, build, "late", "late_right")
    came = {"prices": run.arrived("l"), "orders": run.arrived("r")}
    assert sorted((r["n"], r["price"]) for r in run.rows("out")) == asked(AS_OF, **came)
    assert late(run, "late", prices=came["prices"]) and late(run, "late_right", orders=came["orders"])
    assert run.late == len(run.rows("late")) + len(run.rows("late_right"))


class Quiet(hf.KeyedProcess):
    """Says when a key has been silent for ten seconds, and how much it had said by then."""

    seen = hf.ValueState(int, default=0)
    last_ms = hf.ValueState(int, default=-1)

    def process(self, key: Any, record: Row, ctx: hf.Context) -> None:
        assert ctx.time_ms is not None
        if self.last_ms.value >= 0:
            ctx.delete_timer(self.last_ms.value + 10_000)
        self.seen.value, self.last_ms.value = self.seen.value + 1, ctx.time_ms
        ctx.set_timer(ctx.time_ms + 10_000)

    def on_timer(self, key: Any, timer: hf.Timer, ctx: hf.Context) -> Iterator[Row]:
        assert ctx.watermark_ms == timer.at_ms - 1
        yield {"k": key, "at": timer.at_ms // 1000, "seen": self.seen.value}


SILENCES = """
    select distinct k, a.at + 10, (select count(*) from said b where b.k is not distinct from a.k and b.at <= a.at)
    from said a where not exists (
        select 1 from said b where b.k is not distinct from a.k and b.at > a.at and b.at <= a.at + 10)
"""


@QUICK
@hard_ways(found=MANY)
@given(found=EVENTS, way=ways())
def test_timers_fire_between_the_records_before_and_behind_them(found: Any, way: Way) -> None:
    def build(stream: hf.KeyedStream) -> hf.Stream:
        return stream.process("x", Quiet(), in_order=True, schema={"k": str, "at": int, "seen": int})

    run = ran(way, {"e": events(found)}, SCHEMA, build, "late")
    came = run.arrived("e")
    rows = [(r["k"], r["at"], r["seen"]) for r in run.rows("out")]
    assert sorted(rows, key=repr) == sorted(asked(SILENCES, said=came), key=repr)
    assert late(run, "late", said=came)


class Reminder(hf.KeyedProcess):
    """An order that was not paid within ten minutes."""

    paid = hf.ValueState(bool, default=False)

    def process(self, order: Any, event: Row, ctx: hf.Context) -> None:
        assert ctx.time_ms is not None
        if event["kind"] == "paid":
            self.paid.value = True
        else:
            ctx.set_timer(ctx.time_ms + 600_000)

    def on_timer(self, order: Any, timer: hf.Timer, ctx: hf.Context) -> Iterator[Row]:
        if not self.paid.value:
            yield {"order": order}


@pytest.mark.parametrize("in_order", [True, False])
def test_where_epochs_are_cut_tells_only_who_is_not_in_order(in_order: bool) -> None:
    placed = {"k": 1, "at": 0, "kind": "placed"}
    other, paid = {"k": 2, "at": 650, "kind": "paid"}, {"k": 1, "at": 700, "kind": "paid"}
    unpaid = []
    for batches in ([placed, other, paid],), ([placed], [other], [paid]):
        p = hf.Pipeline("p")
        stream = p.read("in", Batches(*batches)).event_time("at", unit="s").key_by("k")
        stream.process("remind", Reminder(), in_order=in_order).write("out", hf.memory())
        unpaid.append(hf.testing.run(p).rows("out"))
    assert unpaid[1] == [{"order": 1}]
    assert unpaid[0] == ([{"order": 1}] if in_order else [])


class Beating(hf.KeyedProcess):
    """Tells of each record, and every ten seconds how many there were: without end."""

    seen = hf.ValueState(int, default=0)

    def process(self, key: Any, record: Row, ctx: hf.Context) -> Iterator[Row]:
        assert ctx.time_ms is not None
        if not self.seen.value:
            ctx.set_timer(ctx.time_ms + 10_000)
        self.seen.value += 1
        yield {"k": key, "at": record["at"], "seen": 0}

    def on_timer(self, key: Any, timer: hf.Timer, ctx: hf.Context) -> Iterator[Row]:
        ctx.set_timer(timer.at_ms + 10_000)
        yield {"k": key, "at": timer.at_ms // 1000, "seen": self.seen.value}


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
@pytest.mark.parametrize("per_epoch", [1, 2, 100])
def test_a_timer_that_sets_itself_anew_beats_between_records_and_comes_to_an_end(
    backend: str, per_epoch: int
) -> None:
    rows = [{"k": 1, "at": at} for at in (0, 5, 31, 30, 52)]
    p = hf.Pipeline("p")
    stream = p.read("in", hf.records(rows, per_epoch=per_epoch)).event_time("at", unit="s", out_of_order="5s")
    stream.key_by("k").process("beat", Beating(), in_order=True).write("out", hf.memory())
    result = hf.testing.run(p, backend=backend)
    found = [(r["at"], r["seen"]) for r in result.rows("out")]
    told = [(0, 0), (5, 0), (10, 2), (20, 2), (30, 0), (30, 3), (31, 0), (40, 4), (50, 4), (52, 0)]
    assert found == told
    left = result.state("beat").get("waiting.left")
    assert left is None or left.num_rows == 0


class Clocked(hf.KeyedProcess):
    """Sets a timer on processing time, which sets one on event time that has passed."""

    def process(self, key: Any, record: Row, ctx: hf.Context) -> None:
        ctx.set_clock_timer(ctx.now_ms + 1)

    def on_timer(self, key: Any, timer: hf.Timer, ctx: hf.Context) -> Iterator[Row]:
        if timer.kind == "clock":
            ctx.set_timer(1_000)
        yield {"k": key, "kind": timer.kind}


def test_timers_on_processing_time_take_turns_with_those_on_event_time() -> None:
    p = hf.Pipeline("p")
    batches = Batches([{"k": k, "at": 10} for k in range(3)], *([{"k": 9, "at": at}] for at in (30, 40, 50)))
    stream = p.read("in", batches).event_time("at", unit="s").key_by("k")
    stream.process("x", Clocked(), in_order=True).write("out", hf.memory())
    rows = hf.testing.run(p, step_ms=1000).rows("out")
    assert sorted((r["k"], r["kind"]) for r in rows if r["k"] < 3) == [
        (k, kind) for k in range(3) for kind in ("clock", "event")
    ]


def test_what_comes_out_does_not_depend_on_the_parallelism() -> None:
    rows = [{"k": f"k{n % 13}", "at": n * 7919 % 200, "v": n, "n": n} for n in range(300)]
    made = []
    for parallelism in (1, 2, 4):
        p = hf.Pipeline("p")
        source = hf.records(rows, splits=2, per_epoch=50, schema=SCHEMA)
        stream = p.read("in", source).event_time("at", unit="s", out_of_order="40s").key_by("k")
        out = stream.process("x", Quiet(), in_order=True)
        out.write("out", hf.memory())
        out.side("late").write("late", hf.memory())
        result = hf.testing.run(p, parallelism=parallelism)
        made.append((result.rows("out"), result.rows("late")))
    assert made[0] == made[1] == made[2]
    assert made[0][0] and made[0][1]


def test_without_event_time_there_is_no_order() -> None:
    p = hf.Pipeline("p")
    stream = p.read("in", hf.records([{"k": 1, "at": 1}])).key_by("k")
    stream.process("x", Quiet(), in_order=True).write("out", hf.memory())
    with pytest.raises(PipelineError, match=r"\[x\] A process in order needs event time"):
        hf.testing.run(p)


class Failing(hf.KeyedProcess):
    def process(self, key: Any, record: Row, ctx: hf.Context) -> None:
        if record["v"] == 2:
            raise ValueError("no twos")


def test_an_error_shows_the_record_and_its_key() -> None:
    p = hf.Pipeline("p")
    rows = [{"k": f"key {v}", "at": v, "v": v} for v in (3, 2, 1)]
    stream = p.read("in", hf.records(rows)).event_time("at", unit="s", out_of_order="9s").key_by("k")
    stream.process("x", Failing(), in_order=True).write("out", hf.memory())
    with pytest.raises(UserCodeError, match="no twos") as caught:
        hf.testing.run(p)
    assert "key: 'key 2'" in str(caught.value) and "'v': 2" in str(caught.value)


class Late(hf.KeyedProcess):
    side_outputs = ("late", "odd")

    def process(self, key: Any, record: Row, ctx: hf.Context) -> None:
        if record["v"] % 2:
            ctx.emit("odd", record)
        if record["v"] > 100:
            ctx.late(record)


def test_late_records_of_the_function_and_of_the_clock_come_out_together() -> None:
    p = hf.Pipeline("p")
    batches = Batches(
        [{"k": 1, "at": 50, "v": 101}], [{"k": 1, "at": 10, "v": 1}], [{"k": 1, "at": 60, "v": 3}]
    )
    stream = p.read("in", batches).event_time("at", unit="s").key_by("k")
    found = stream.process("x", Late(), in_order=True)
    found.write("out", hf.memory())
    for side in Late.side_outputs:
        found.side(side).write(side, hf.memory())
    result = hf.testing.run(p)
    assert sorted(r["v"] for r in result.rows("late")) == [1, 101]
    assert [r["v"] for r in result.rows("odd")] == [101, 3]
    assert sum(c.late.get("x", 0) for c in result.commits) == 2


class Plain(hf.KeyedProcess):
    seen = hf.ValueState(int, default=0)

    def process(self, key: Any, record: Row, ctx: hf.Context) -> None:
        self.seen.value += 1


class Timed(Plain):
    def on_timer(self, key: Any, timer: hf.Timer, ctx: hf.Context) -> None:
        return


def test_a_function_that_is_given_timers_finds_what_it_kept_in_its_place() -> None:
    """RocksDB knows a table by its place: what waited stood behind the timers."""
    places = []
    for function in (Plain(), Timed()):
        p = hf.Pipeline("p")
        stream = p.read("in", hf.records([{"k": 1, "at": 1}])).event_time("at", unit="s").key_by("k")
        stream.process("x", function, in_order=True).write("out", hf.memory())
        node = next(n for n in build_stages(p).graph.nodes if n.uid == "x")
        found = operator_for(node, redact=False).specs(pa.schema([("0", pa.struct(SCHEMA))]))
        assert found is not None
        places.append([spec.name for spec in found])
    assert places == [["waiting.left", "seen"], ["waiting.left", "seen", "timers.event", "timers.clock"]]
