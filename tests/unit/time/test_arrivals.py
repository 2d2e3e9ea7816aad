"""What must not depend on which records come first, on whom they come with, or on what came before them."""

from typing import Any, ClassVar

import pytest

import holdfast as hf
from holdfast.data.rows import to_table
from holdfast.io.base import Offer, Range
from holdfast.io.memory import RecordsSource

Row = dict[str, Any]
BACKENDS = ["heap", "rocksdb"]


class Batches(RecordsSource):
    """Each inner list is what one epoch reads, which may be nothing."""

    def __init__(self, *batches: list[Row]) -> None:
        super().__init__(to_table([row for batch in batches for row in batch], None), 1, None)
        self._sizes = [len(batch) for batch in batches]

    def plan(self, position: Any, limit: hf.Limit) -> Offer:
        number, first = position or (0, 0)
        ranges = []
        if number < len(self._sizes):
            last = first + self._sizes[number]
            ranges = [Range("0000", first, last, records=last - first)] if last > first else []
            number, first = number + 1, last
        return Offer(ranges, (number, first), sum(self._sizes[number:]), number >= len(self._sizes))


def timed(pipeline: hf.Pipeline, uid: str, *batches: list[Row], **options: Any) -> hf.Stream:
    """A stream whose schema nobody has declared."""
    options = {"unit": "s", **options}
    return pipeline.read(uid, Batches(*batches)).map(dict).event_time("at", **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("more", [{}, {"w": 3}], ids=["other order", "more columns"])
def test_kept_records_are_the_same_whichever_edge_shows_its_columns_first(backend: str, more: Row) -> None:
    p = hf.Pipeline("p")
    late = {"out_of_order": "30s"}
    a = timed(p, "a", [], [{"at": 20, "k": 1, "v": 7, **more}], [{"at": 21, "k": 1, "v": 8, **more}], **late)
    b = timed(
        p,
        "b",
        [{"k": 1, "v": 5, "at": 10}],
        [{"k": 1, "v": 6, "at": 15}],
        [{"k": 2, "v": 6, "at": 15}],
        **late,
    )
    c = timed(p, "c", [], [], [{"k": 1, "at": 16, "r": 1}], **late)
    joined = a.union(b).key_by("k").join(c.key_by("k")).between("-60s", "60s")
    joined.select("j", lambda left, right: {n: left[n] for n in ("k", "v", "at")}).write("out", hf.memory())
    best = a.union(b).key_by("k").top("best", 2, by="v")
    best.map(lambda r: {n: r[n] for n in ("k", "v", "at")}).write("ranks", hf.memory())
    result = hf.testing.run(p, backend=backend)
    rows = sorted(result.rows("out"), key=lambda r: r["v"])
    assert rows == [{"k": 1, "v": v, "at": at} for v, at in ((5, 10), (6, 15), (7, 20), (8, 21))]
    last = [r for r in result.rows("ranks") if r["k"] == 1][-2:]
    assert [(r["v"], r["at"]) for r in last] == [(8, 21), (7, 20)]


def test_a_function_behind_event_time_changes_nothing_for_others() -> None:
    p = hf.Pipeline("p")
    s = p.read("in", hf.records([{"k": 1, "at": 1, "v": 1}, {"k": 1, "at": 2, "v": 2}])).map(dict)
    s.event_time("at", unit="s").map(lambda r: r.update(v=1000) or r).write("changed", hf.memory())
    s.filter(lambda r: True).write("filtered", hf.memory())
    s.key_by("k").aggregate("sum", total=hf.sum("v")).write("sums", hf.memory())
    result = hf.testing.run(p)
    assert [r["v"] for r in result.rows("changed")] == [1000, 1000]
    assert [r["v"] for r in result.rows("filtered")] == [1, 2]
    assert [r["total"] for r in result.rows("sums")] == [3]


def _add(left: Row, right: Row) -> Row:
    left["v"] += right["v"]
    return left


def test_a_reduce_that_changes_its_left_record_changes_nothing_for_others() -> None:
    p = hf.Pipeline("p")
    s = p.read("in", hf.records([{"k": 1, "v": v} for v in (1, 2, 5)])).map(dict)
    for uid in ("one", "two"):
        s.key_by("k").reduce(uid, _add).write(f"{uid}.out", hf.memory())
    s.key_by("k").aggregate("sum", total=hf.sum("v")).write("sums", hf.memory())
    s.map(lambda r: r.update(v=1000) or r).write("changed", hf.memory())
    result = hf.testing.run(p)
    assert [r["v"] for uid in ("one", "two") for r in result.rows(f"{uid}.out")] == [8, 8]
    assert [r["total"] for r in result.rows("sums")] == [8]


@pytest.mark.parametrize(
    "assigner", [hf.tumbling("10s"), hf.sliding("10s", "5s"), hf.session("10s")], ids=str
)
def test_the_first_records_of_a_window_are_counted_if_all_of_them_are_late(assigner: Any) -> None:
    p = hf.Pipeline("p")
    first, second = [{"k": "x", "at": 100, "use": False}], [{"k": "x", "at": 1, "use": True}]
    used = timed(p, "in", first, second).filter(lambda r: r["use"])
    counts = used.key_by("k").window(assigner).aggregate("w", n=hf.count())
    counts.write("out", hf.memory())
    counts.side("late").write("late", hf.memory())
    result = hf.testing.run(p)
    assert result.rows("late") == second and result.rows("out") == []
    assert [c.late for c in result.commits if c.late] == [{"w": 1}]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("keys", [("x", None), (1 << 40, 5)], ids=str)
def test_keys_in_the_state_outlive_an_epoch_with_keys_of_a_narrower_type(
    backend: str, keys: tuple[Any, Any]
) -> None:
    p = hf.Pipeline("p")
    a = timed(p, "a", [{"k": keys[0], "at": 1}], [], idle_after="1ms")
    b = timed(p, "b", [], [{"k": keys[1], "at": 100}], [{"k": keys[1], "at": 200}], idle_after="1ms")
    keyed = a.union(b).key_by("k")
    keyed.window(hf.tumbling("10s")).aggregate("w", n=hf.count()).write("windows", hf.memory())
    keyed.window(hf.session("10s")).aggregate("s", n=hf.count()).write("sessions", hf.memory())
    keyed.deduplicate("once").write("distinct", hf.memory())
    result = hf.testing.run(p, backend=backend, parallelism=1)
    for uid, expected in (("windows", 3), ("sessions", 3), ("distinct", 2)):
        found = result.rows(uid)
        assert len(found) == expected and {r["k"] for r in found} == set(keys)


@pytest.mark.parametrize("turned", [False, True])
def test_null_joins_with_null_also_where_a_side_has_nothing_else(turned: bool) -> None:
    p = hf.Pipeline("p")
    sides = [[{"k": None, "at": 1, "n": 1}], [{"k": "x", "at": 1, "m": 2}, {"k": None, "at": 1, "m": 3}]]
    left, right = (
        timed(p, uid, rows).key_by("k") for uid, rows in zip("ab", sides[:: -1 if turned else 1], strict=True)
    )
    left.join(right).between("0s", "0s").select("j", lambda a, b: {**a, **b}).write("out", hf.memory())
    assert hf.testing.run(p).rows("out") == [{"k": None, "at": 1, "n": 1, "m": 3}]


class Alarm(hf.WindowFunction):
    row: ClassVar[Row] = {"alarm": True}

    def process(self, key: Any, window: hf.Window, records: list[Row], ctx: hf.Context) -> Any:
        for record in records:
            if record["v"] < 0:
                ctx.late(record)
        yield self.row


def test_a_window_function_may_yield_what_it_keeps_and_call_records_late() -> None:
    p = hf.Pipeline("p")
    rows = [{"k": 1, "at": at, "v": v} for at, v in ((1, 1), (11, -1), (21, -2))]
    made = timed(p, "in", rows).key_by("k").window(hf.tumbling("10s")).process("w", Alarm())
    made.write("out", hf.memory())
    made.side("late").write("late", hf.memory())
    result = hf.testing.run(p)
    assert [r["window_start"].second for r in result.rows("out")] == [0, 10, 20]
    assert [r["v"] for r in result.rows("late")] == [-1, -2]
    assert sum(c.late.get("w", 0) for c in result.commits) == 2


class Beating(hf.KeyedProcess):
    """Sets its timer anew whenever it fires."""

    def process(self, key: Any, record: Row, ctx: hf.Context) -> Any:
        ctx.set_timer(record["at"] * 1000 + 60_000)
        return ()

    def on_timer(self, key: Any, timer: hf.Timer, ctx: hf.Context) -> Any:
        ctx.set_timer(timer.at_ms + 60_000)
        yield {"key": key, "at_ms": timer.at_ms}


def test_a_timer_that_sets_itself_anew_comes_to_an_end_with_the_stream() -> None:
    p = hf.Pipeline("p")
    beats = (
        timed(p, "in", [{"k": 1, "at": 1}], [{"k": 2, "at": 200}], []).key_by("k").process("beat", Beating())
    )
    beats.write("out", hf.memory())
    found = hf.testing.run(p).rows("out")
    assert [r["at_ms"] for r in found if r["key"] == 1] == [61_000, 121_000, 181_000, 241_000]
    assert [r["at_ms"] for r in found if r["key"] == 2] == [260_000]


@pytest.mark.parametrize("backend", BACKENDS)
def test_nor_does_it_beat_on_while_another_stream_goes_on(backend: str) -> None:
    p = hf.Pipeline("p")
    ends = timed(p, "in", [{"k": 1, "at": 1}], [{"k": 2, "at": 200}], [])
    beats = ends.key_by("k").process("beat", Beating())
    beats.write("out", hf.memory())
    p.read("other", Batches(*([{"n": n}] for n in range(6)))).write("rest", hf.memory())
    result = hf.testing.run(p, backend=backend)
    assert len(result.commits) >= 6
    found = result.rows("out")
    assert [r["at_ms"] for r in found if r["key"] == 1] == [61_000, 121_000, 181_000, 241_000]
    assert [r["at_ms"] for r in found if r["key"] == 2] == [260_000]
    assert not [t for name, t in result.state("beat").items() if name.startswith("timers") and t.num_rows], (
        "timers that nobody calls are kept"
    )


class Anew(hf.KeyedProcess):
    """Deletes its last timer and sets it again."""

    def process(self, key: Any, record: Row, ctx: hf.Context) -> Any:
        ctx.set_timer(record["at"] * 1000 + 10_000)
        ctx.set_timer(record["at"] * 1000 + 20_000)
        return ()

    def on_timer(self, key: Any, timer: hf.Timer, ctx: hf.Context) -> Any:
        if timer.at_ms == 11_000:
            ctx.delete_timer(21_000)
            ctx.set_timer(21_000)
        yield {"at_ms": timer.at_ms}


def test_a_timer_that_was_set_by_the_end_and_is_deleted_and_set_again_fires() -> None:
    p = hf.Pipeline("p")
    timed(p, "in", [{"k": 1, "at": 1}]).key_by("k").process("anew", Anew()).write("out", hf.memory())
    assert [r["at_ms"] for r in hf.testing.run(p).rows("out")] == [11_000, 21_000]


class Drawing(hf.KeyedProcess):
    def process(self, key: Any, record: Row, ctx: hf.Context) -> Any:
        if key == 0:
            ctx.set_clock_timer(ctx.now_ms + 1)
        for n in range(key):
            ctx.set_timer(record["at"] * 1000 + n)
        return ()

    def on_timer(self, key: Any, timer: hf.Timer, ctx: hf.Context) -> Any:
        if key == 0:
            yield {"drawn": ctx.random.random()}


def test_what_a_timer_draws_does_not_depend_on_who_shares_its_shard() -> None:
    p = hf.Pipeline("p")
    rows = [{"k": k, "at": 1} for k in range(8)]
    drawn = timed(p, "in", rows, [{"k": 9, "at": 100}]).key_by("k").process("draw", Drawing())
    drawn.write("out", hf.memory())
    runs = [hf.testing.run(p, parallelism=n, linger_ms=5_000).rows("out") for n in (1, 2, 8)]
    assert len(runs[0]) == 1 and runs[0] == runs[1] == runs[2]
