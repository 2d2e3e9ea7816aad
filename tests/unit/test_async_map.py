"""Calls of the outside world: order, bounds, errors, and that a replay reads what the committed run was answered."""

import asyncio
import dataclasses
import gc
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.config import Settings
from holdfast.engine import asynchronous
from holdfast.engine.asynchronous import Answers, Failure, Recorded
from holdfast.engine.build import build_program, build_stages, impatient
from holdfast.engine.epoch import Again, Done, assign, judge, texts
from holdfast.engine.local import LocalRunner
from holdfast.engine.program import Header, Program, Report, SourceTask, declared_schemas
from holdfast.engine.tasks import Shards, Where, run_shard_task, run_source_task
from holdfast.errors import CallError, DivergedError, EngineError, PipelineError, SchemaError, StateLostError
from holdfast.io.base import Limit
from holdfast.log import answers as files
from holdfast.log.answers import AnswerWriter, Damaged
from holdfast.plan.draw import draw
from holdfast.plan.fingerprint import fingerprint
from tests.drivers import Life, Waiting, live, make
from tests.pipelines import Row, rows
from tests.spark.test_equals_runner import bytes_in
from tests.unit.forgetful import ForgetfulDisk

RELAXED = settings(deadline=None, suppress_health_check=list(HealthCheck))
NUMBERS = [{"n": i, "k": i % 5} for i in range(40)]
SCHEMA = {"n": int, "k": int, "said": int}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asynchronous, "FIRST_PAUSE_S", 0.0)


class World:
    """A service that never gives the same answer twice, and counts who asks."""

    def __init__(self) -> None:
        self.calls = 0
        self.under_way = self.most = 0
        self.asked: list[int] = []

    async def ask(self, record: Row) -> Row:
        self.calls += 1
        said = self.calls
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.asked.append(record["n"])
        await asyncio.sleep(0)
        self.under_way -= 1
        return {**record, "said": said}


def mapped(function: Any, given: list[Row] = NUMBERS, per_epoch: int = 10, **options: Any) -> hf.Pipeline:
    """Records, a call for each, and what comes out."""
    pipeline = hf.Pipeline("mapped")
    stream = pipeline.read("numbers", hf.records(given, per_epoch=per_epoch))
    answered = stream.async_map(function, uid="lookup", **options)
    if options.get("on_error") == "dead_letter":
        answered.side("dead_letter").write("dead", hf.memory())
    answered.write("out", hf.memory())
    return pipeline


class Sum(hf.KeyedProcess):
    total = hf.ValueState(int, default=0)

    def process(self, key: Any, record: Row, ctx: hf.Context) -> Any:
        self.total.value += record["said"]
        yield {"n": self.total.value, "k": key % 3}


def summed(world: World, out: Path, given: list[Row] = NUMBERS, per_epoch: int = 4) -> hf.Pipeline:
    """Calls in the chain of a source and in that of a keyed stage, each with a keyed stage behind it."""
    pipeline = hf.Pipeline("summed")
    stream = pipeline.read("numbers", hf.records(given, splits=3, per_epoch=per_epoch))
    first = stream.map(lambda r: {**r, "n": r["n"] + 1}).async_map(world.ask, uid="lookup", schema=SCHEMA)
    first.write("answers", hf.parquet(str(out / "answers")))
    second = first.key_by("k").process("first", Sum()).async_map(world.ask, uid="again", schema=SCHEMA)
    second.key_by("k").process("second", Sum()).write("end", hf.parquet(str(out / "end")))
    return pipeline


OPTIONS: dict[str, Any] = {
    "checkpoint": "3 epochs",
    "checkpoint_on_stop": False,
    "trim_log": False,
    "max_records": 4,
}


def lose(life: Life, uid: str, shard: int) -> None:
    shutil.rmtree(Path(life.program.state_root) / life.program.home / uid / f"{shard:05d}")


def check(life: Life, folder: Path) -> None:
    """Output and digests are those of the runner over the same plans and answers, which asks nobody."""
    silent = World()
    plans = [life.journal.plan(e) for e in range(1, life.driver.last_epoch + 1)]
    expected = hf.testing.run(
        summed(silent, folder / "runner"),
        plans=[p for p in plans if p],
        answers=folder / "dir",
        capture=False,
        directory=folder / "oracle",
    )
    assert silent.calls == 0
    assert bytes_in(folder / "ours") == bytes_in(folder / "runner")
    for commit in expected.commits:
        ours = life.journal.commit(commit.epoch)
        assert ours is not None
        for uid, shards in commit.shards.items():
            assert [s.sealed.digest for s in ours.shards[uid]] == [s.sealed.digest for s in shards]
            assert [s.sent for s in ours.shards[uid]] == [s.sent for s in shards]


# Order and bounds


@settings(RELAXED, max_examples=30)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 20))
def test_records_stay_in_order_and_so_many_calls_are_under_way(turns: list[int], capacity: int) -> None:
    under_way = most = 0

    async def ask(record: Row) -> Row:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        for _ in range(1 + record["turns"]):
            await asyncio.sleep(0)
        under_way -= 1
        return {"n": record["n"]}

    given = [{"n": n, "turns": t} for n, t in enumerate(turns)]
    pipeline = mapped(ask, given, per_epoch=1000, capacity=capacity, schema={"n": int})
    result = hf.testing.run(pipeline, source_tasks=1)
    assert [r["n"] for r in result.rows("out")] == list(range(len(turns)))
    assert most == min(capacity, len(turns))


@settings(RELAXED, max_examples=30)
@given(rows(40), st.integers(1, 30), st.integers(1, 3), st.integers(1, 3))
def test_in_a_chain_it_gives_what_a_map_gives(
    given: list[Row], per_epoch: int, splits: int, parallelism: int
) -> None:
    def plain(record: Row) -> Row:
        record["twice"] = (record["n"] or 0) * 2
        return record

    async def asking(record: Row) -> Row:
        await asyncio.sleep(0)
        return plain(record)

    found = []
    for call in (True, False):
        pipeline = hf.Pipeline("chained")
        source = hf.records(given, splits=splits, per_epoch=per_epoch, schema=pa.schema(_FIELDS))
        stream = pipeline.read("in", source).map(lambda r: {**r, "m": 1})
        answered = stream.async_map(asking, uid="call") if call else stream.map(plain)
        kept = answered.filter(lambda r: r["twice"] >= 0)
        kept.union(stream.map(lambda r: {**r, "twice": -1})).write("all", hf.memory())
        kept.key_by("k").aggregate("sums", s=hf.sum("twice"), c=hf.count()).write("out", hf.memory())
        result = hf.testing.run(pipeline, parallelism=parallelism)
        found.append(
            [(result.rows(uid), result.state("sums") if result.commits else {}) for uid in ("all", "out")]
        )
    assert found[0] == found[1]


_FIELDS = {"id": pa.int64(), "k": pa.int64(), "name": pa.string(), "v": pa.float64(), "n": pa.int64()}


def test_the_record_is_the_functions_own_and_other_branches_do_not_see_its_changes() -> None:
    async def spoil(record: Row) -> Row:
        record["n"] = -1
        return record

    pipeline = hf.Pipeline("branches")
    stream = pipeline.read("in", hf.records([{"n": 1}, {"n": 2}])).map(lambda r: r)
    stream.async_map(spoil, uid="spoil").write("spoilt", hf.memory())
    stream.write("whole", hf.memory())
    result = hf.testing.run(pipeline)
    assert [r["n"] for r in result.rows("whole")] == [1, 2]
    assert [r["n"] for r in result.rows("spoilt")] == [-1, -1]


def test_event_time_goes_through_a_call() -> None:
    async def same(record: Row) -> Row:
        return record

    pipeline = hf.Pipeline("timed")
    given = [{"k": "a", "at": at} for at in (1_000, 9_000, 12_000)]
    stream = pipeline.read("in", hf.records(given)).event_time("at", unit="ms").async_map(same, uid="call")
    stream.key_by("k").window(hf.tumbling("10s")).aggregate("n", n=hf.count()).write("out", hf.memory())
    assert [r["n"] for r in hf.testing.run(pipeline).rows("out")] == [2, 1]


def test_an_undeclared_schema_is_settled_by_running_again() -> None:
    async def half(record: Row) -> Row:
        return {"n": record["n"] if record["n"] % 2 else record["n"] / 2}

    result = hf.testing.run(mapped(half))
    table = result.table("out")
    assert table is not None and table.schema.field("n").type == pa.float64()
    assert result.commits[0].answers["lookup"]
    assert "lookup" in result.commits[0].schemas


def test_what_is_no_record_is_an_error_that_names_the_operator() -> None:
    async def nothing(record: Row) -> Any:
        return None

    with pytest.raises(SchemaError) as caught:
        hf.testing.run(mapped(nothing))
    assert caught.value.uid == "lookup"


# Errors


def test_a_call_that_is_not_answered_in_time_ends_the_run_and_says_what_to_do() -> None:
    async def ask(record: Row) -> Row:
        if record["n"] == 13:
            await asyncio.Event().wait()
        return record

    with pytest.raises(CallError) as caught:
        hf.testing.run(mapped(ask, timeout="50ms"))
    error = caught.value
    assert error.uid == "lookup" and error.exit_code == 11
    assert error.message == "A call had no answer within 0.05 s."
    assert "timeout=" in str(error.remedy) and 'on_error="skip"' in str(error.remedy)
    assert "'n': 13" in str(error.detail)
    assert error.where is not None and "test_async_map.py" in error.where


def test_a_call_that_raises_is_tried_again_and_then_ends_the_run_with_the_users_lines_alone() -> None:
    tried: list[int] = []

    async def ask(record: Row) -> Row:
        if record["n"] == 13:
            tried.append(record.pop("n"))
            raise ValueError("no such number")
        return record

    with pytest.raises(CallError) as caught:
        hf.testing.run(mapped(ask, retries=3))
    error = caught.value
    assert tried == [13] * 4, "each try gets the record as it came"
    assert error.uid == "lookup"
    assert error.message == "A call failed, 4 times: ValueError: no such number"
    assert "'n': 13" in str(error.detail)
    assert "in ask" in str(error.detail)
    assert "asyncio" not in str(error.detail) and "asynchronous.py" not in str(error.detail)


def test_a_call_that_works_at_a_later_try_is_as_good_as_any() -> None:
    tries = dict.fromkeys(range(40), 0)

    async def ask(record: Row) -> Row:
        tries[record["n"]] += 1
        if tries[record["n"]] < 3:
            raise ConnectionError
        return record

    assert hf.testing.run(mapped(ask, schema={"n": int, "k": int})).rows("out") == NUMBERS
    assert set(tries.values()) == {3}


@pytest.mark.parametrize("on_error", ["skip", "dead_letter"])
def test_records_without_an_answer_are_counted_and_can_be_had(on_error: str) -> None:
    async def ask(record: Row) -> Row:
        if record["n"] % 10 == 3:
            raise KeyError(record["n"])
        if record["n"] % 10 == 7:
            await asyncio.Event().wait()
        return record

    result = hf.testing.run(mapped(ask, on_error=on_error, timeout="20ms", schema={"n": int, "k": int}))
    assert [r["n"] for r in result.rows("out")] == [n for n in range(40) if n % 10 not in (3, 7)]
    assert [c.bad_records for c in result.commits] == [{"lookup": 2}] * 4
    if on_error == "dead_letter":
        dead = result.rows("dead")
        assert [d["reason"] for d in dead[:2]] == ["KeyError: 3", "no answer within 0.02 s"]
        assert dead[0]["source"] == "lookup" and dead[0]["record"] == '{"n":3,"k":3}'
        assert len(dead) == 8


def test_all_records_may_be_without_an_answer() -> None:
    async def ask(record: Row) -> Row:
        raise OSError("down")

    result = hf.testing.run(mapped(ask, on_error="dead_letter", retries=0))
    assert result.rows("out") == []
    assert [r["reason"] for r in result.rows("dead")] == ["OSError: down"] * 40


def test_a_failed_attempt_leaves_no_file(tmp_path: Path) -> None:
    async def ask(record: Row) -> Row:
        if record["n"] == 13:
            raise ValueError
        return record

    with pytest.raises(CallError):
        hf.testing.run(mapped(ask, schema={"n": int, "k": int}), directory=tmp_path)
    left = os.listdir(tmp_path / "answers")
    assert left and all(name.startswith("00000001-") for name in left)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"function": lambda r: r}, "needs an `async def`"),
        ({"capacity": 0}, "capacity=0 is no number"),
        ({"capacity": "5"}, "capacity='5' is no number"),
        ({"retries": -1}, "retries=-1 is no number"),
        ({"retries": 0.5}, "retries=0.5 is no number"),
        ({"timeout": "0s"}, "timeout=0 leaves no time"),
        ({"on_error": "ignore"}, "on_error='ignore' is not known"),
    ],
)
def test_what_can_not_be_is_refused_where_it_is_written(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PipelineError, match=says) as caught:
        mapped(options.pop("function", World().ask), **options)
    assert caught.value.uid == "lookup" and caught.value.remedy
    assert caught.value.where is not None and "test_async_map.py" in caught.value.where


def test_answers_are_kept_under_a_uid_that_the_user_gives() -> None:
    with pytest.raises(PipelineError, match="uid"):
        hf.Pipeline("p").read("in", hf.records(NUMBERS)).async_map(World().ask, uid=None)  # type: ignore[arg-type]


def test_after_a_failure_no_further_records_are_asked_for() -> None:
    asked = 0

    async def ask(record: Row) -> Row:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        if record["n"] == 50:
            raise ValueError("no")
        return record

    given = [{"n": n} for n in range(5_000)]
    with pytest.raises(CallError):
        hf.testing.run(mapped(ask, given, per_epoch=5_000, retries=0, capacity=20), source_tasks=1)
    assert asked < 200


def test_a_function_that_cancels_what_it_waits_for_has_failed_like_any_other() -> None:
    async def ask(record: Row) -> Row:
        task = asyncio.ensure_future(asyncio.sleep(60))
        await asyncio.sleep(0)
        if record["n"] % 2:
            task.cancel()
            await task
        task.cancel()
        return record

    result = hf.testing.run(mapped(ask, retries=1, on_error="dead_letter"))
    assert [r["n"] for r in result.rows("out")] == list(range(0, 40, 2))
    assert len(result.rows("dead")) == 20
    assert all(r["reason"].startswith("CancelledError") for r in result.rows("dead"))
    with pytest.raises(CallError, match="CancelledError"):
        hf.testing.run(mapped(ask, retries=1))


def test_time_is_up_also_for_a_function_that_turns_its_end_into_an_error_of_its_own() -> None:
    tries = 0

    async def ask(record: Row) -> Row:
        nonlocal tries
        tries += 1
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise RuntimeError("closed") from None
        return record

    given = [{"n": 0}]
    result = hf.testing.run(mapped(ask, given, timeout="50ms", retries=5, on_error="dead_letter"))
    assert [r["reason"] for r in result.rows("dead")] == ["no answer within 0.05 s"]
    assert tries == 1


def test_nobody_waits_for_a_thread_that_hangs_or_for_a_call_that_will_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asynchronous, "GRACE_S", 0.05)
    go_on = threading.Event()

    async def in_thread(record: Row) -> Row:
        await asyncio.to_thread(go_on.wait, 60)
        return record

    async def stubborn(record: Row) -> Row:
        while not go_on.is_set():
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue
        return record

    try:
        for function in (in_thread, stubborn):
            result = hf.testing.run(mapped(function, [{"n": 0}], timeout="50ms", on_error="dead_letter"))
            assert len(result.rows("dead")) == 1
        assert not go_on.is_set()  # it ended before them
    finally:
        go_on.set()


class Door:
    """Is entered before the calls of a batch and left after them, in its own way."""

    def __init__(self, leave: Callable[[], Any]) -> None:
        self._leave = leave

    async def __aenter__(self) -> "Door":
        return self

    async def __aexit__(self, *error: Any) -> Any:
        return self._leave()

    async def __call__(self, record: Row) -> Row:
        raise ValueError("the real cause")


def _slammed() -> Any:
    raise OSError("close failed")


@pytest.mark.parametrize("leave", [lambda: True, _slammed], ids=["swallows", "raises"])
def test_what_went_wrong_is_told_however_the_function_is_left(leave: Callable[[], Any]) -> None:
    with pytest.raises(CallError, match="the real cause"):
        hf.testing.run(mapped(Door(leave), retries=0))


@pytest.mark.parametrize("on_error", ["skip", "fail"])
def test_a_failed_call_leaves_nothing_behind_for_the_collector(on_error: str) -> None:
    """Where failures end the run, those that the next try makes good."""
    tried: set[int] = set()

    async def ask(record: Row) -> Row:
        if record["n"] % 2 and (on_error == "skip" or record["n"] not in tried):
            tried.add(record["n"])
            raise ValueError("no")
        return record

    node = mapped(ask, retries=1, on_error=on_error).graph().by_uid("lookup")
    caller = asynchronous._Caller(node, redact=False)
    caller.run(NUMBERS)
    gc.collect()
    gc.disable()
    try:
        caller.run(NUMBERS)
        few = gc.collect()
        caller.run([{"n": n} for n in range(1_000)])
        many = gc.collect()
    finally:
        gc.enable()
    assert many < few + 200  # what a loop leaves, and nothing for each of 500 failed calls


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("error", [ValueError("bad \udc80"), Mute()], ids=["surrogate", "mute"])
def test_any_error_can_be_a_dead_letter(error: Exception) -> None:
    async def ask(record: Row) -> Row:
        raise error

    result = hf.testing.run(mapped(ask, [{"n": 1}], retries=0, on_error="dead_letter"))
    (letter,) = result.rows("dead")
    assert letter["reason"].startswith(type(error).__name__)


def test_a_client_may_have_fields_that_are_set_when_it_is_entered() -> None:
    @dataclasses.dataclass
    class Client:
        url: str
        session: Any = dataclasses.field(init=False)

        async def __call__(self, record: Row) -> Row:
            return record

    one, other = (fingerprint(mapped(Client(url)).graph()) for url in ("a", "b"))
    assert one != other


def test_a_field_that_some_answers_lack_is_null_also_where_another_task_got_it() -> None:
    async def ask(record: Row) -> Row:
        return {**record, "more": 5} if record["n"] else record

    p = hf.Pipeline("p")
    a, b = p.read("a", hf.records([{"n": 0}])), p.read("b", hf.records([{"n": 1}]))
    answered = a.union(b).async_map(ask, uid="lookup")
    answered.map(lambda r: {"n": r["n"], "more": r["more"]}).write("out", hf.memory())
    result = hf.testing.run(p, source_tasks=2)
    assert result.rows("out") == [{"n": 0, "more": None}, {"n": 1, "more": 5}]


def test_a_wider_schema_can_be_declared_for_answers_that_changed_their_type(tmp_path: Path) -> None:
    async def ask(record: Row) -> Row:
        return {"n": record["n"], "x": 1 if record["n"] < 2 else 0.5}

    given = [{"n": n} for n in range(4)]
    with pytest.raises(SchemaError, match="wider"):
        live(mapped(ask, given, per_epoch=2), tmp_path / "dir")
    wider = {"n": int, "x": float}
    life = live(mapped(ask, given, per_epoch=2, schema=wider), tmp_path / "dir")
    assert life.driver.last_epoch == 2


def test_dead_letters_must_be_taken_and_are_there_only_if_asked_for() -> None:
    pipeline = hf.Pipeline("dead")
    stream = pipeline.read("in", hf.records(NUMBERS))
    answered = stream.async_map(World().ask, uid="lookup", on_error="dead_letter")
    answered.write("out", hf.memory())
    with pytest.raises(PipelineError, match="nobody takes them"):
        hf.testing.run(pipeline)
    with pytest.raises(PipelineError) as caught:
        stream.async_map(World().ask, uid="other").side("dead_letter")
    assert 'on_error="dead_letter"' in str(caught.value.remedy)


def test_a_timeout_longer_than_a_worker_may_be_silent_is_told_of() -> None:
    stages = build_stages(mapped(World().ask, timeout="20s"))
    assert "[lookup] a call may take 20 s" in impatient(stages, 14.0)[0]
    assert impatient(stages, 30.0) == impatient(stages, None) == []


# The loop and what is in it


class Session:
    """A function with something to open and to close."""

    def __init__(self) -> None:
        self.story: list[str] = []

    async def __aenter__(self) -> "Session":
        self.story.append("open")
        return self

    async def __aexit__(self, *error: Any) -> None:
        self.story.append("close")

    async def __call__(self, record: Row) -> Row:
        assert self.story[-1] == "open"
        if record["n"] == 25:
            raise ValueError
        return record


def test_a_function_with_a_session_is_entered_once_a_batch_and_always_left() -> None:
    session = Session()
    with pytest.raises(CallError):
        hf.testing.run(mapped(session, schema={"n": int, "k": int}), source_tasks=1)
    assert session.story == ["open", "close"] * 3


def test_a_session_that_can_not_be_opened_is_an_error_that_names_the_operator() -> None:
    class Closed(Session):
        async def __aenter__(self) -> "Session":
            raise ConnectionRefusedError("nobody there")

    with pytest.raises(CallError, match="nobody there") as caught:
        hf.testing.run(mapped(Closed()))
    assert caught.value.uid == "lookup"


def test_loops_are_closed_and_nothing_of_them_stays() -> None:
    hf.testing.run(mapped(World().ask))
    files_before, threads_before = len(os.listdir("/proc/self/fd")), threading.active_count()
    hf.testing.run(mapped(World().ask, per_epoch=2))
    assert len(os.listdir("/proc/self/fd")) <= files_before
    assert threading.active_count() <= threads_before


def test_it_runs_where_a_loop_is_running_already() -> None:
    async def notebook() -> list[Row]:
        return hf.testing.run(mapped(World().ask)).rows("out")

    assert len(asyncio.run(notebook())) == 40


# Replay


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
@pytest.mark.parametrize("lost", ["first", "second"])
@pytest.mark.parametrize("checkpoint", ["3 epochs", "never"])
def test_a_replay_asks_nobody_and_comes_to_what_was_committed(
    tmp_path: Path, lost: str, backend: str, checkpoint: str
) -> None:
    world, options = World(), {**OPTIONS, "backend": backend, "checkpoint": checkpoint, "runner": Waiting}
    first = live(summed(world, tmp_path / "ours"), tmp_path / "dir", epochs=8, **options)
    lose(first, lost, 1)
    asked = world.calls
    assert asked == 2 * 8 * 4
    second = live(summed(world, tmp_path / "ours"), tmp_path / "dir", **options)
    assert second.recovery.last is not None
    assert second.recovery.last.replayed == (8 if checkpoint == "never" else 2)
    assert world.calls == asked + 2 * 2 * 4, "only the two epochs that were left have asked"
    check(second, tmp_path)


@settings(RELAXED, max_examples=15)
@given(
    st.integers(1, 12),
    st.integers(1, 4),
    st.sets(st.tuples(st.sampled_from(["first", "second"]), st.integers(0, 1)), min_size=1),
    st.integers(1, 12),
)
def test_whatever_is_lost_whenever_the_runner_agrees(
    tmp_path_factory: pytest.TempPathFactory,
    stop: int,
    every: int,
    lost: set[tuple[str, int]],
    per_epoch: int,
) -> None:
    folder = tmp_path_factory.mktemp("any")
    options = {**OPTIONS, "checkpoint": f"{every} epochs", "max_records": 100}
    world = World()
    try:
        first = live(
            summed(world, folder / "ours", per_epoch=per_epoch), folder / "dir", epochs=stop, **options
        )
        for uid, shard in lost:
            path = Path(first.program.state_root) / first.program.home / uid / f"{shard:05d}"
            shutil.rmtree(path, ignore_errors=True)
        second = live(summed(world, folder / "ours", per_epoch=per_epoch), folder / "dir", **options)
        assert world.calls == 2 * len(NUMBERS)
        check(second, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_records_without_an_answer_are_the_same_in_a_replay(tmp_path: Path) -> None:
    class Moody(World):
        async def ask(self, record: Row) -> Row:
            answer = await super().ask(record)
            if answer["said"] % 3 == 0:
                raise OSError(f"busy at call {answer['said']}")
            return answer

    def pipeline(world: World) -> hf.Pipeline:
        made = hf.Pipeline("moody")
        stream = made.read("numbers", hf.records(NUMBERS, splits=2, per_epoch=4))
        asking = {"on_error": "dead_letter", "retries": 0, "schema": SCHEMA}
        answered = stream.async_map(world.ask, uid="lookup", **asking)
        answered.key_by("k").process("first", Sum()).write("out", hf.memory())
        dead = answered.side("dead_letter").map(
            lambda r: {"k": msgspec.json.decode(r["record"])["k"], "said": len(r["record"] + r["reason"])}
        )
        dead.key_by("k").process("second", Sum()).write("dead", hf.memory())
        return made

    world, options = Moody(), {**OPTIONS, "runner": Waiting}
    first = live(pipeline(world), tmp_path / "dir", epochs=8, **options)
    for uid in ("first", "second"):
        for shard in (0, 1):
            lose(first, uid, shard)
    second = live(pipeline(world), tmp_path / "dir", **options)
    assert second.recovery.last is not None and second.recovery.last.replayed == 2
    assert world.calls == len(NUMBERS)
    silent = Moody()
    plans = [second.journal.plan(e) for e in range(1, 11)]
    expected = hf.testing.run(pipeline(silent), plans=[p for p in plans if p], answers=tmp_path / "dir")
    assert silent.calls == 0
    for commit in expected.commits:
        ours = second.journal.commit(commit.epoch)
        assert ours is not None
        assert ours.bad_records == commit.bad_records
        for uid, shards in commit.shards.items():
            assert [s.sealed.digest for s in ours.shards[uid]] == [s.sealed.digest for s in shards]


def test_an_epoch_that_was_not_committed_asks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    life = make(summed(world, tmp_path / "ours"), tmp_path / "dir", **OPTIONS)
    life.driver.start()

    def die(commit: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(life.journal, "put_commit", die)
        with pytest.raises(KeyboardInterrupt):
            life.driver.run()
    assert world.calls == 8
    second = live(summed(world, tmp_path / "ours"), tmp_path / "dir", **OPTIONS)
    assert world.calls == 8 + 2 * len(NUMBERS)
    check(second, tmp_path)


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [tear, flip, Path.unlink], ids=["torn", "flipped", "gone"])
def test_answers_that_are_lost_stop_a_replay_with_a_remedy_that_works(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    world = World()
    first = live(
        summed(world, tmp_path / "ours"), tmp_path / "dir", epochs=8, **{**OPTIONS, "checkpoint": "never"}
    )
    lose(first, "second", 1)
    commit = first.journal.commit(5)
    assert commit is not None
    for file in commit.answers["again"]:
        damage(tmp_path / "dir" / "answers" / file.path)
    asked = world.calls
    with pytest.raises(StateLostError) as caught:
        live(summed(world, tmp_path / "ours"), tmp_path / "dir", **OPTIONS)
    error = caught.value
    assert error.uid == "again" and "answered in epoch 5" in error.message
    assert commit.answers["again"][0].path.rpartition("~")[2] in error.message
    assert "Bring the file back" in str(error.remedy) and 'on_divergence="warn"' in str(error.remedy)
    assert world.calls == asked
    second = live(summed(world, tmp_path / "ours"), tmp_path / "dir", **{**OPTIONS, "on_divergence": "warn"})
    assert second.driver.last_epoch == 10
    assert asked < world.calls <= asked + 4 + 2 * 2 * 4


def test_operators_before_it_that_give_other_records_stop_a_replay(tmp_path: Path) -> None:
    world, odd = World(), [True]

    def pipeline() -> hf.Pipeline:
        made = hf.Pipeline("fickle")
        stream = made.read("numbers", hf.records(NUMBERS, per_epoch=4)).filter(
            lambda r: odd[0] or r["n"] != 5
        )
        answered = stream.async_map(world.ask, uid="lookup", schema=SCHEMA)
        answered.key_by("k").process("first", Sum()).write("out", hf.memory())
        return made

    options = {**OPTIONS, "checkpoint": "never"}
    for before, after, says in ((True, False, "did not come"), (False, True, "records came where")):
        folder = tmp_path / says
        odd[0] = before
        lose(live(pipeline(), folder, epochs=5, **options), "first", 0)
        odd[0] = after
        with pytest.raises(DivergedError, match=says) as caught:
            live(pipeline(), folder, **options)
        assert caught.value.uid == "lookup" and "epoch 2" in caught.value.message


def test_answers_go_with_the_commits_that_name_them(tmp_path: Path) -> None:
    options = {**OPTIONS, "trim_log": True, "checkpoint": "2 epochs", "runner": Waiting}
    life = live(summed(World(), tmp_path / "ours"), tmp_path / "dir", **options)
    kept = life.journal.epochs()
    assert 1 < len(kept) < 10
    there = os.listdir(tmp_path / "dir" / "answers")
    assert {int(name.split("-")[0]) for name in there} == set(kept)
    for epoch in kept:
        commit = life.journal.commit(epoch)
        assert commit is not None
        named = {f.path for made in commit.answers.values() for f in made}
        assert named and named <= set(there)
    with pytest.raises(EngineError, match="lacks epoch 1"):
        plan = life.journal.plan(kept[0])
        assert plan is not None
        first = msgspec.structs.replace(plan, epoch=1)
        hf.testing.run(summed(World(), tmp_path / "x"), plans=[first], answers=tmp_path / "dir")


# Attempts


class Twice(LocalRunner):
    """Runs source tasks twice, as Spark does when their output is lost, and lets one shard hear the second attempt."""

    limit = 2
    """So often."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.torn = 0

    def _job(self, tasks: Any, only: Any) -> list[Report]:
        if only is not None or self.torn >= self.limit:
            return super()._job(tasks, only)
        self.torn += 1
        program = self._program
        sent = []
        for number in range(2):
            where = Where(attempt=f"{self.torn}.{number}")
            sent.append([s for task in tasks for one in task for s in run_source_task(program, one, where)])
        reports: list[Report] = []
        on: dict[int | None, Any] = {}
        for stage in program.stages.keyed:
            on[stage.id] = []
            for shard in range(program.parallelism):
                on[None] = sent[shard % 2]
                blobs = self._blobs(stage, shard, on)
                here = Where(attempt=str(self.torn))
                passed, done = run_shard_task(program, stage, shard, blobs, here, self._shards)
                on[stage.id] += passed
                reports += [_report(r) for r in done]
        return reports


def _report(data: bytes) -> Report:
    return msgspec.msgpack.decode(data, type=Report)


def test_shards_that_heard_different_attempts_of_a_task_are_no_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    life = live(summed(world, tmp_path / "ours"), tmp_path / "dir", **{**OPTIONS, "runner": Twice})
    assert caplog.text.count("answers of two attempts of source-0, source-1 are mixed") == 2
    assert life.facts[0].runs == 3
    check(life, tmp_path)


def test_output_that_is_lost_again_and_again_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Twice, "limit", 1000)
    with pytest.raises(EngineError, match="lost output on its way 6 times") as caught:
        live(summed(World(), tmp_path / "ours"), tmp_path / "dir", **{**OPTIONS, "runner": Twice})
    assert "source-0" in str(caught.value.detail)


def test_an_attempt_has_a_file_of_its_own_and_the_commit_names_one(tmp_path: Path) -> None:
    pipeline = hf.Pipeline("twice")
    stream = pipeline.read("numbers", hf.records(NUMBERS))
    answered = stream.async_map(World().ask, uid="lookup", schema=SCHEMA)
    answered.key_by("k").process("first", Sum()).write("out", hf.memory())
    stages = build_stages(pipeline)
    program = build_program(stages, Settings(), 1, str(tmp_path))
    source = stages.graph.by_uid("numbers").body
    tasks = assign({"numbers": source.plan(None, Limit(100, 1, 0))}, 1)
    pinned = texts(declared_schemas(stages))
    header = Header(1, 1, 0, 1, {}, pinned)
    task = SourceTask(0, msgspec.msgpack.encode(header), tasks[0])
    attempts = [run_source_task(program, task, Where(attempt=str(n))) for n in range(2)]
    assert len(os.listdir(tmp_path / "answers")) == 2
    for number, sent in enumerate(attempts):
        _, done = run_shard_task(
            program, stages.keyed[0], 0, [b for _, b in sent], Where(attempt="s"), Shards()
        )
        reports = [_report(r) for r in done]
        outcome = judge(program, 1, pinned, reports)
        if isinstance(outcome, Again):
            outcome = judge(program, 1, outcome.schemas, reports)
        assert isinstance(outcome, Done)
        assert [f.path for f in outcome.answers["lookup"]] == [f"00000001-1-src0-{number}-0~lookup.answers"]


# Files


def answers_of(fates: list[bool], start: int) -> Answers:
    """Answers to records numbered from `start` on; False: there is none."""
    there = [start + i for i, fate in enumerate(fates) if fate]
    failed = [Failure(i, str(start + i), "{}") for i, fate in enumerate(fates) if not fate]
    return Answers(len(fates), failed, pa.table({"n": there}) if there else None)


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), max_size=6), st.randoms())
def test_answers_fit_their_records_whatever_batches_these_come_in(
    fates: list[list[bool]], random: Any
) -> None:
    frames, start = [], 0
    for one in fates:
        frames.append(Answers.unpacked(answers_of(one, start).packed()))
        start += len(one)
    recorded, at = Recorded(frames), 0
    flat = [fate for one in fates for fate in one]
    while at < len(flat):
        size = random.randint(1, len(flat) - at)
        there: list[int] = []
        failed: list[int] = []
        for answers in recorded.take(size):
            there += [] if answers.table is None else answers.table.column("n").to_pylist()
            failed += [int(f.reason) for f in answers.failed]
        assert there == [n for n in range(at, at + size) if flat[n]]
        assert failed == [n for n in range(at, at + size) if not flat[n]]
        at += size
    assert recorded.records == 0


@RELAXED
@given(st.lists(st.lists(st.binary(max_size=40), max_size=4), max_size=5))
def test_a_part_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[bytes]]
) -> None:
    folder = str(tmp_path_factory.mktemp("parts"))
    writer = AnswerWriter(folder, "00000003-1-0-0", "lookup", "numbers")
    for upstream, frames in enumerate(parts):
        for frame in frames:
            writer.write(frame, 2)
        writer.end(upstream)
    file = writer.close()
    assert (file is None) == (not any(parts))
    for upstream, frames in enumerate(parts if file else []):
        assert file is not None
        found = files.find([file], "numbers", upstream)
        assert (found is None) == (not frames)
        if found is not None:
            assert files.read(folder, *found) == frames
            assert found[1].records == 2 * len(frames)
        assert files.find([file], "other", upstream) is None
    assert files.forget(folder, before=3) == 0
    assert files.forget(folder, before=4) == (file is not None)


def test_what_a_commit_may_name_outlasts_a_power_failure(tmp_path: Path) -> None:
    files._FOLDERS.clear()
    with ForgetfulDisk(tmp_path) as disk:
        folder = str(tmp_path / "dir" / "answers")
        writer = AnswerWriter(folder, "00000001-1-0-0", "lookup", "numbers")
        writer.write(b"frame", 1)
        writer.end(0)
        file = writer.close()
        disk.power_failure()
    assert file is not None
    found = files.find([file], "numbers", 0)
    assert found is not None and files.read(folder, *found) == [b"frame"]
    with pytest.raises(Damaged, match="is gone"):
        files.read(str(tmp_path), *found)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_named_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    live(summed(world, tmp_path / "ours"), tmp_path / "dir", epochs=2, **OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr(files, "open", lambda *_: open("/dev/full", "wb"), raising=False)  # noqa: SIM115
        with pytest.raises(EngineError) as caught:
            live(summed(world, tmp_path / "ours"), tmp_path / "dir", **OPTIONS)
    error = caught.value
    assert error.uid == "lookup" and "No space left on device" in error.message
    assert "Make room" in str(error.remedy) and error.where
    check(live(summed(world, tmp_path / "ours"), tmp_path / "dir", **OPTIONS), tmp_path)


def test_the_picture_shows_what_is_called() -> None:
    picture = draw(build_stages(mapped(World().ask, capacity=7)))
    assert "lookup" in picture and "7 at once" in picture
