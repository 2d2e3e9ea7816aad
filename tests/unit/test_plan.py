"""From the user's graph to stages, epochs' plans and outcomes: all of it pure."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
from holdfast.config import Settings
from holdfast.data import schemas
from holdfast.engine.build import build_program, build_stages, check_identity, identity_of
from holdfast.engine.cut import Wait, shares, when_to_cut
from holdfast.engine.epoch import Again, Done, Failed, Lacking, Mixed, Skipped, assign, judge
from holdfast.engine.placement import Placement, place
from holdfast.engine.program import Report
from holdfast.errors import IncompatibleError, PipelineError, UidError
from holdfast.io.base import Offer, Range
from holdfast.state.shard import Sealed
from tests.drivers import make

ROWS = [{"k": 1, "v": 1.0}]
TEN = hf.tumbling("10s")


def pair(record: dict[str, Any]) -> tuple[Any, Any]:
    return record["k"], record["v"]


class Keep(hf.KeyedProcess):
    n = hf.ValueState(int, default=0)
    side_outputs = ("odd",)

    def process(self, key: Any, record: dict[str, Any], ctx: hf.Context) -> Any:
        yield record


def diamond() -> hf.Pipeline:
    """Two sources, a union, a branch that is keyed twice and one that is not."""
    p = hf.Pipeline("diamond")
    one, two = p.read("one", hf.records(ROWS)), p.read("two", hf.records(ROWS))
    both = one.union(two).map(lambda r: r)
    both.write("raw", hf.memory())
    kept = both.key_by("k").process("keep", Keep())
    kept.filter(bool).key_by("k").aggregate("sums", total=hf.sum("v")).write("out", hf.memory())
    kept.side("odd").write("odds", hf.memory())
    return p


def test_a_graph_is_cut_at_its_exchanges_and_chains_hold_the_rest() -> None:
    stages = build_stages(diamond())
    uid = lambda n: stages.node(n).uid  # noqa: E731
    shown = [
        (uid(s.root), s.wave, [uid(n) for n in s.nodes[1:]], [uid(n) for n in s.sinks]) for s in stages.stages
    ]
    assert shown == [
        ("one", 0, ["map-2", "raw"], ["raw"]),
        ("two", 0, ["map-2", "raw"], ["raw"]),
        ("keep", 1, ["filter-5", "odds"], ["odds"]),
        ("sums", 2, ["out"], ["out"]),
    ]
    assert [uid(s.root) for s in stages.feeding(stages.stages[2])] == ["one", "two"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda p, s: p.read("", hf.records(ROWS)), "A source needs a uid"),
        (lambda p, s: s.write(None, hf.memory()), "A sink needs a uid"),
        (lambda p, s: s.key_by("k").process(None, Keep()), "A process needs a uid"),
        (lambda p, s: s.write("read", hf.memory()), "The uid 'read' is used twice"),
        (lambda p, s: s.write("no spaces", hf.memory()), "can't be a uid"),
        (lambda p, s: s.key_by(), "is no key"),
        (lambda p, s: s.side("odd"), "There is no side output 'odd'"),
        (lambda p, s: s.key_by("k").aggregate("a"), "at least one aggregate"),
        (lambda p, s: s.key_by("k").aggregate("a", k=hf.count()), "both a key and an aggregate"),
        (lambda p, s: s.key_by(pair).aggregate("a", key0=hf.count()), "both a key and an aggregate"),
        (lambda p, s: s.key_by(pair).window(TEN).aggregate("a", key1=hf.count()), "both a key and an aggr"),
        (lambda p, s: s.key_by("k").window(TEN).aggregate("a", window_end=hf.count()), "a bound of the w"),
        (lambda p, s: s.key_by("window_end").window(TEN).aggregate("a", n=hf.count()), "key and a bound"),
        (lambda p, s: s.key_by("window_start").window(TEN).reduce("a", max), "both a key and a bound"),
        (lambda p, s: s.key_by("k").process("p", len), "needs a KeyedProcess"),
        (lambda p, s: s.write("w", "folder"), "is not a sink"),
        (lambda p, s: p.read("r2", "folder"), "is not a source"),
        (lambda p, s: s.map(3), "map needs a function"),
    ],
)
def test_what_cannot_run_is_refused_where_it_is_written(
    wrong: Callable[[Any, Any], Any], message: str
) -> None:
    p = hf.Pipeline("p")
    stream = p.read("read", hf.records(ROWS))
    with pytest.raises((PipelineError, UidError), match=message) as caught:
        wrong(p, stream)
    assert f"{__file__}:" in str(caught.value)


def test_a_pipeline_that_reads_or_writes_nothing_is_refused() -> None:
    p = hf.Pipeline("p")
    with pytest.raises(PipelineError, match="reads nothing"):
        p.graph()
    p.read("r", hf.records(ROWS))
    with pytest.raises(PipelineError, match="writes nothing"):
        p.graph()


SIZES = st.lists(st.lists(st.integers(0, 1000), max_size=6), max_size=3)


@given(SIZES, st.integers(1, 5))
def test_every_range_is_in_one_task_and_ordinals_follow_the_sources(
    sizes: list[list[int]], tasks: int
) -> None:
    offers = {f"s{i}": Offer([Range("x", 0, n, {}, n) for n in mine], None) for i, mine in enumerate(sizes)}
    assigned = assign(offers, tasks)
    assert 1 <= len(assigned) <= tasks
    flat = sorted((r for task in assigned for r in task), key=lambda r: r.ordinal)
    assert [r.ordinal for r in flat] == list(range(len(flat)))
    assert [(r.source, r.piece.records) for r in flat] == [
        (f"s{i}", n) for i, m in enumerate(sizes) for n in m
    ]
    assert all([r.ordinal for r in t] == sorted(r.ordinal for r in t) for t in assigned)
    loads = [sum(max(1, r.piece.records) for r in t) for t in assigned]
    if flat:
        assert max(loads) - min(loads) <= max(max(1, r.piece.records) for r in flat)


def program() -> Any:
    return build_program(build_stages(diamond()), Settings(), 2, "/nowhere")


def reports() -> list[Report]:
    sealed = Sealed("00000001-x", 7, 1, 1, {"n": 1}, 1)
    shards = [
        Report(task=f"{u}-{n}", stage=u, shard=n, sealed=sealed) for u in ("keep", "sums") for n in (0, 1)
    ]
    return [Report(task="source-0", records_in=5), *shards]


def test_an_epoch_is_done_when_every_task_has_reported() -> None:
    outcome = judge(program(), 1, {}, reports())
    assert isinstance(outcome, Done)
    assert outcome.records_in == 5
    assert [len(s) for s in outcome.shards.values()] == [2, 2]


def test_an_epoch_in_which_shards_rest_on_answers_of_two_attempts_of_a_task_is_run_again() -> None:
    found = reports()
    found[1].answered = {"source-0": ["a"]}
    found[2].answered = {"source-0": ["a"]}
    assert isinstance(judge(program(), 1, {}, found), Done)
    found[2].answered = {"source-0": ["b"]}
    assert judge(program(), 1, {}, found) == Mixed(["source-0"])
    found[0].attempt, found[0].answers = "b", {"lookup": []}
    found[1].answered = found[2].answered = {"source-0": ["a"]}
    assert judge(program(), 1, {}, found) == Mixed(["source-0"])  # the winner itself is another


def test_a_task_that_did_not_report_or_reported_twice_fails_the_epoch() -> None:
    assert isinstance(judge(program(), 1, {}, reports()[:-1]), Failed)
    assert isinstance(judge(program(), 1, {}, [*reports()[:-1], reports()[1]]), Failed)


def test_one_error_is_worth_more_than_a_lacking_shard_and_that_more_than_schemas() -> None:
    text = [schemas.to_text(pa.schema({"a": t})) for t in (pa.int64(), pa.float64())]
    found = reports()
    found[1].schemas = {"e": text}
    assert isinstance(judge(program(), 1, {}, found), Again)
    found[2].lacking = True
    assert judge(program(), 1, {}, found) == Lacking([("keep", 1)])
    found[3].error = {"type": "SinkError", "message": "full"}
    outcome = judge(program(), 1, {}, found)
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, hf.errors.SinkError)


def cut(mode: str, **facts: Any) -> Wait:
    base: dict[str, Any] = {
        "waited_s": 0.0,
        "records": 0,
        "full": False,
        "backlog": 0,
        "exhausted": False,
        "drain": False,
    }
    return when_to_cut(mode, 1.0, **{**base, **facts})


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 1000)), st.integers(1, 2000))
def test_sources_share_what_an_epoch_may_have(offered: dict[str, int], most: int) -> None:
    less = shares(offered, most)
    taken = {uid: less.get(uid, records) for uid, records in offered.items()}
    assert all(0 < records < offered[uid] for uid, records in less.items())
    assert sum(taken.values()) <= max(most, len(offered)), "together no more than an epoch has"
    if sum(offered.values()) <= most:
        assert not less
    elif most >= len(offered):
        assert sum(taken.values()) > most - len(offered), "and no less than that"
    assert all(records <= min(less.values()) for uid, records in taken.items() if less and uid not in less)


def test_an_epoch_of_several_sources_has_no_more_records_than_it_may(tmp_path: Path) -> None:
    """Each source took as many as an epoch may have, so that the deadline was held for a part of it."""
    made = hf.Pipeline("three")
    streams = [
        made.read(f"in{n}", hf.records([{"k": n, "v": float(i)} for i in range(count)]))
        for n, count in enumerate((50, 50, 4))
    ]
    streams[0].union(*streams[1:]).key_by("k").aggregate("counts", n=hf.count()).write("out", hf.memory())
    life = make(made, tmp_path, max_records=12)
    life.driver.start()
    life.driver.run()
    sizes = [f.records_in for f in life.facts if f.records_in]
    assert max(sizes) <= 12 and sum(sizes) == 104
    assert len(sizes) <= 11, "as full as may be"
    (first, *_) = [life.journal.plan(f.epoch) for f in life.facts]
    assert first is not None and {r.source for r in first.ranges} == {"in0", "in1", "in2"}
    runner = hf.testing.run(made, max_records=12)
    assert max(c.records_in for c in runner.commits) <= 12, "the in-process runner does the same"


def test_an_epoch_is_cut_by_interval_by_data_or_when_full() -> None:
    assert cut("interval", records=5) is Wait.WAIT
    assert cut("interval", records=5, waited_s=1.0) is Wait.CUT
    assert cut("interval", waited_s=9.0) is Wait.WAIT
    assert cut("interval", waited_s=9.0, empty=True) is Wait.CUT
    assert cut("data", records=1) is Wait.CUT
    assert cut("full", records=5, waited_s=99.0) is Wait.WAIT
    assert cut("full", records=5, full=True) is Wait.CUT
    assert cut("full", records=5, exhausted=True) is Wait.CUT
    assert cut("interval", records=5, backlog=1) is Wait.CUT


def test_draining_ends_when_there_is_nothing_and_not_before() -> None:
    assert cut("full", drain=True) is Wait.END
    assert cut("full", drain=True, records=1) is Wait.CUT
    assert cut("interval", exhausted=True) is Wait.END


EXECUTORS = st.lists(st.sampled_from([(str(i), f"h{i % 2}") for i in range(4)]), unique=True, max_size=4)


@given(st.integers(1, 8), EXECUTORS, EXECUTORS)
def test_a_shard_stays_while_its_executor_lives_and_all_are_placed(n: int, first: Any, then: Any) -> None:
    shards = [("u", i) for i in range(n)]
    before = place(shards, first, Placement({}), {}, {})
    after = place(shards, then, before, {}, {})
    assert set(after.executors) == (set(shards) if then else set())
    for shard in shards:
        was = before.executors.get(shard)
        if was in then:
            assert after.executors[shard] == was
    if first:
        loads = [list(before.executors.values()).count(e) for e in first]
        assert max(loads) - min(loads) <= 1


def test_a_shard_that_must_move_goes_to_the_host_that_has_its_version() -> None:
    live = [("5", "127.0.0.1"), ("6", "127.0.0.2")]
    homes = {("u", 0): "/root-b", ("u", 1): "/root-a"}
    placed = place([("u", 0), ("u", 1)], live, Placement({}), homes, {"5": "/root-a", "6": "/root-b"})
    assert placed.executor("u", 0) == "6"
    assert placed.location("u", 1) == "executor_127.0.0.1_5"


def test_a_directory_of_another_pipeline_or_with_other_types_is_refused_with_the_reason() -> None:
    stages = build_stages(diamond())
    here = identity_of(stages, Settings(), 2)
    check_identity(here, here, "d")

    class Other(Keep):
        n = hf.ValueState(float, default=0.0)

    p = hf.Pipeline("diamond")
    p.read("one", hf.records(ROWS)).key_by("k").process("keep", Other()).write("out", hf.memory())
    there = identity_of(build_stages(p), Settings(backend="rocksdb"), 2)
    with pytest.raises(IncompatibleError) as caught:
        check_identity(here, there, "d")
    text = str(caught.value)
    for reason in (
        "backend was 'heap' and is 'rocksdb'",
        "'two' is stored there and missing",
        "'keep': states was",
    ):
        assert reason in text
    with pytest.raises(IncompatibleError, match="belongs to the pipeline 'diamond', this is 'other'"):
        p2 = hf.Pipeline("other")
        p2.read("r", hf.records(ROWS)).write("w", hf.memory())
        check_identity(here, identity_of(build_stages(p2), Settings(), 2), "d")


def test_a_shard_that_heard_of_a_failure_nobody_reports_makes_the_epoch_run_again() -> None:
    """It was taken for done: the driver ended with an assertion, where Spark had run a task again on another host."""
    found = reports()
    found[2].skipped, found[2].sealed = True, None
    assert judge(program(), 1, {}, found) == Skipped(["keep-1"])
    found[1].lacking = True
    assert judge(program(), 1, {}, found) == Lacking([("keep", 0)]), (
        "who is known to lack something comes first"
    )
