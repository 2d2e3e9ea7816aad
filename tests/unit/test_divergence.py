"""A replay that differs names the operator whose fault it is, or those whose fault it may be."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.errors import DivergedError
from holdfast.log.records import Commit, Plan
from tests.drivers import live
from tests.pipelines import Recipe, recipes

ROWS = [{"k": n % 5, "v": n} for n in range(60)]
CALLS = itertools.count(1)
"""What makes a function here give something else each time it is asked."""


class Steady(hf.KeyedProcess):
    n = hf.ValueState(int, default=0)

    def process(self, key: Any, record: Any, ctx: Any) -> Any:
        self.n.value += record["v"]
        yield {"k": key, "v": self.n.value}


class UnsteadyState(Steady):
    def process(self, key: Any, record: Any, ctx: Any) -> Any:
        self.n.value = next(CALLS)
        yield {"k": key, "v": record["v"]}


class UnsteadyOutput(Steady):
    def process(self, key: Any, record: Any, ctx: Any) -> Any:
        self.n.value += 1
        yield {"k": key, "v": next(CALLS)}


class UnsteadySum(hf.Aggregate):
    accumulator = int

    def create(self) -> int:
        return 0

    def add(self, accumulator: int, record: Any) -> int:
        return accumulator + next(CALLS)

    def merge(self, left: int, right: int) -> int:
        return left + right


def unsteady(record: Any) -> Any:
    return {**record, "v": next(CALLS)}


def keeps(record: Any) -> bool:
    return True


def read(p: hf.Pipeline, uid: str = "in") -> hf.Stream:
    return p.read(uid, hf.records(ROWS, splits=3, per_epoch=12))


def build(draw: Callable[[hf.Pipeline], hf.Stream]) -> hf.Pipeline:
    p = hf.Pipeline("divergent")
    draw(p).write("out", hf.memory())
    return p


def before(p: hf.Pipeline) -> hf.Stream:
    return read(p).filter(keeps).map(unsteady, uid="stamped").key_by("k").process("count", Steady())


def only_before(p: hf.Pipeline) -> hf.Stream:
    return read(p).map(unsteady, uid="stamped").key_by("k").process("count", Steady())


def by_key(p: hf.Pipeline) -> hf.Stream:
    return read(p).key_by(lambda r: next(CALLS) % 7).process("count", Steady())


def combined(p: hf.Pipeline) -> hf.Stream:
    return read(p).key_by("k").aggregate("sums", s=UnsteadySum())


def inside(p: hf.Pipeline) -> hf.Stream:
    return read(p).map(lambda r: r, uid="same").key_by("k").process("count", UnsteadyState())


def of_two(p: hf.Pipeline) -> hf.Stream:
    streams = [read(p, "left"), read(p, "right").map(unsteady, uid="stamped")]
    return streams[0].union(streams[1]).key_by("k").process("count", Steady())


def sent(p: hf.Pipeline) -> hf.Stream:
    return read(p).key_by("k").process("first", UnsteadyOutput()).key_by("k").process("second", Steady())


def sent_through(p: hf.Pipeline) -> hf.Stream:
    made = read(p).key_by("k").process("first", Steady()).map(unsteady, uid="stamped")
    return made.key_by("k").process("second", Steady())


CASES: dict[str, tuple[Callable[[hf.Pipeline], hf.Stream], str, str]] = {
    "a map before the exchange": (
        before,
        "filter-1",
        r"Other records than the first time came to shard \d of 'count' when epoch 1 was replayed\. "
        r"At fault is one of: filter 'filter-1', map 'stamped', source 'in'\.",
    ),
    "a map alone": (only_before, "stamped", r"At fault is one of: map 'stamped', source 'in'\."),
    "a key": (by_key, "count", r"At fault is one of: process 'count', source 'in'\."),
    "an aggregate that is combined": (
        combined,
        "sums",
        r"At fault is one of: aggregate 'sums', source 'in'\.",
    ),
    "one side of a union": (
        of_two,
        "stamped",
        r"At fault is one of: map 'stamped', source 'right'\.",
    ),
    "the keyed operator": (
        inside,
        "count",
        r"Shard \d gave another result when epoch 1 was replayed: its changes to state have digest",
    ),
    "what a keyed operator sent": (
        sent,
        "first",
        r"Shard \d gave another result when epoch 1 was replayed: what it sent to 'second' has another digest than the "
        r"first time\.",
    ),
    "a map behind a keyed operator": (
        sent_through,
        "first",
        r"what it sent to 'second' has another digest than the first time; it, or what its records pass then: map "
        r"'stamped'\.",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_replay_that_differs_names_those_who_may_be_at_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    draw, uid, says = CASES[case]
    options: dict[str, Any] = {"checkpoint": "never", "max_records": 12}
    first = live(build(draw), tmp_path, epochs=3, **options)
    shutil.rmtree(first.program.state_root)
    with pytest.raises(DivergedError, match=says) as caught:
        live(build(draw), tmp_path, **options)
    assert caught.value.uid == uid
    assert "test_divergence.py" in str(caught.value.where)
    life = live(build(draw), tmp_path, on_divergence="warn", **options)
    assert life.driver.last_epoch > 3
    assert f"[{uid}] " in caplog.text


def test_a_commit_without_digests_of_what_came_blames_the_keyed_operator(tmp_path: Path) -> None:
    """As those of a holdfast that did not record them."""
    options: dict[str, Any] = {"checkpoint": "never", "max_records": 12}
    first = live(build(before), tmp_path, epochs=2, **options)
    for path in (tmp_path / "log" / "commits").iterdir():
        commit = msgspec.json.decode(path.read_bytes(), type=Commit)
        shards = {u: [msgspec.structs.replace(s, came={}) for s in all] for u, all in commit.shards.items()}
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(commit, shards=shards)))
    shutil.rmtree(first.program.state_root)
    with pytest.raises(DivergedError, match=r"\[count\] Shard \d gave another result"):
        live(build(before), tmp_path, **options)


def regrouped(plan: Plan, tasks: int) -> Plan:
    """The same ranges, read by other tasks, as in a replay."""
    ranges = plan.ranges
    return msgspec.structs.replace(plan, tasks=[ranges[n::tasks] for n in range(tasks)])


@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(recipes(60), st.integers(1, 4))
def test_what_came_has_the_same_digest_whichever_task_read_it(recipe: Recipe, tasks: int) -> None:
    options: dict[str, Any] = {"parallelism": recipe.parallelism, "max_records": recipe.max_records}
    one = hf.testing.run(recipe.build(), source_tasks=3, **options)
    other = hf.testing.run(recipe.build(), plans=[regrouped(p, tasks) for p in one.plans], **options)
    for mine, yours in zip(one.commits, other.commits, strict=True):
        for uid, shards in mine.shards.items():
            assert [s.came for s in shards] == [s.came for s in yours.shards[uid]]
            assert all(s.came or not s.sealed.stamp for s in shards)
