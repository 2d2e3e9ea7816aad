"""Why checkpoints fail: each reason led to for real, by a driver in this process, and what the run makes of it."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.checkpoint import lifecycle
from holdfast.checkpoint.coordinator import Expired
from holdfast.checkpoint.lifecycle import FailedCheckpoint, Reason
from holdfast.checkpoint.metadata import Checkpoint
from holdfast.checkpoint.upload import Request, ShardUpload, Uploads
from holdfast.engine.local import LocalRunner
from holdfast.errors import FencedError, JobLostError, UserCodeError
from holdfast.log.journal import Journal
from tests.drivers import Life, Waiting, make

ROWS = [{"k": i % 7} for i in range(120)]
BROKEN_AT = 5


class Count(hf.KeyedProcess):
    n = hf.ValueState(int, default=0)

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def process(self, key: int, record: dict[str, Any], ctx: hf.Context) -> Any:
        if ctx.epoch == self._limit:
            raise ValueError("enough")
        self.n.value += 1
        yield {"k": key, "n": self.n.value}


def counting(limit: int = 0) -> hf.Pipeline:
    made = hf.Pipeline("counting")
    counted = made.read("in", hf.records(ROWS, per_epoch=10)).key_by("k").process("count", Count(limit))
    counted.write("out", hf.memory())
    return made


class Stuck(LocalRunner):
    """The first upload never ends by itself: like Spark's runner, it asks whether to give up."""

    uploads = 0

    def upload(self, folder: str, shards: Any, give_up: Any) -> Any:
        self.uploads += 1
        if self.uploads > 1:
            return super().upload(folder, shards, give_up)
        while not give_up():
            time.sleep(0.001)
        raise Expired


class Patient(Stuck, Waiting):
    """The same, and epochs wait for it."""


class Lonely(Waiting):
    """Whoever has the versions dies during the first upload, as Spark says it."""

    uploads = 0

    def upload(self, folder: str, shards: Any, give_up: Any) -> Any:
        self.uploads += 1
        if self.uploads == 1:
            raise JobLostError("Spark gave a job up: ExecutorLostFailure")
        return super().upload(folder, shards, give_up)


def options(**more: Any) -> dict[str, Any]:
    return {"checkpoint": "1 epochs", "max_records": 10, **more}


def ticking() -> Any:
    """A clock on which nothing is ever too early to be tried again."""
    clock = iter(range(0, 10**12, 100_000))
    return lambda: next(clock)


def run(life: Life) -> Life:
    life.driver.start()
    life.driver.run()
    return life


def failures(life: Life) -> list[Reason]:
    return [o.reason for o in life.outcomes if isinstance(o, FailedCheckpoint)]


def assert_next_one_succeeds(life: Life) -> None:
    assert life.driver.last_epoch == 12
    assert isinstance(life.outcomes[-1], Checkpoint)


def test_a_checkpoint_that_takes_longer_than_its_timeout_has_expired(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    life = run(make(counting(), tmp_path, runner=Patient, **options(checkpoint_timeout="50ms")))
    assert failures(life) == [Reason.EXPIRED]
    assert "failed: it took longer than checkpoint_timeout" in caplog.text
    assert_next_one_succeeds(life)


def test_an_upload_that_hangs_is_tried_anew_soon_where_the_deadline_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "_LEAST_PATIENCE_S", 0.2)
    life = make(counting(), tmp_path, runner=Patient, checkpoint="deadline", max_records=10)
    life.journal.ask_for_checkpoint()
    life.driver.start()
    monkeypatch.setattr(life.coordinator, "consider", partial(life.coordinator.consider, at_most_s=0.01))
    life.driver.run()
    assert failures(life) == [Reason.SLOW]
    assert life.driver.last_epoch == 12


def test_a_checkpoint_whose_executors_were_lost_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    life = run(make(counting(), tmp_path, runner=Lonely, clock_ms=ticking(), **options()))
    assert failures(life) == [Reason.EXECUTORS]
    assert "ExecutorLostFailure" in caplog.text
    assert_next_one_succeeds(life)


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_a_version_that_is_damaged_on_its_host_is_not_uploaded_and_is_rebuilt(
    tmp_path: Path, backend: str
) -> None:
    life = make(
        counting(),
        tmp_path,
        runner=Waiting,
        clock_ms=ticking(),
        **options(checkpoint="manual", backend=backend, trim_log=False),
    )
    host = Path(life.program.state_root) / life.program.home / "count" / "00000"

    def spoil(facts: Any) -> None:
        if facts.epoch == BROKEN_AT:
            newest = max(host.glob("d-*.delta"))
            data = bytearray(newest.read_bytes())
            data[len(data) // 2] ^= 1
            newest.write_bytes(data)
            life.journal.ask_for_checkpoint()

    life.driver._on_epoch = spoil
    run(life)
    assert failures(life) == [Reason.DAMAGED]
    assert life.recovery.last is not None and life.recovery.last.lacking == 1
    assert_next_one_succeeds(life)
    expected = hf.testing.run(
        counting(), parallelism=2, plans=[p for e in range(1, 13) if (p := life.journal.plan(e))]
    )
    for commit in expected.commits:
        ours = life.journal.commit(commit.epoch)
        assert ours is not None
        assert [s.sealed.digest for s in ours.shards["count"]] == [
            s.sealed.digest for s in commit.shards["count"]
        ]


def test_a_checkpoint_of_a_driver_that_was_replaced_is_fenced_and_the_driver_ends(tmp_path: Path) -> None:
    class Replaced(Waiting):
        def upload(self, folder: str, shards: Any, give_up: Any) -> Any:
            stored = super().upload(folder, shards, give_up)
            Journal.at(tmp_path).take()
            return stored

    life = make(counting(), tmp_path, runner=Replaced, **options())
    with pytest.raises(FencedError, match="Generation 2 has taken this pipeline over"):
        run(life)
    assert failures(life) == [Reason.FENCED]
    assert life.catalog.completed() == []


def test_a_checkpoint_that_is_under_way_when_the_run_fails_is_stopped_and_nobody_is_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    life = make(counting(BROKEN_AT), tmp_path, runner=Stuck, **options())
    with pytest.raises(UserCodeError, match="enough"):
        run(life)
    assert failures(life) == [Reason.STOPPED]
    assert "failed" not in caplog.text
    assert life.catalog.completed() == []


def test_a_request_that_comes_to_another_host_than_it_was_for_is_answered_for_itself(tmp_path: Path) -> None:
    """It got the answer to the other's, and the checkpoint failed for a reason that nobody had foreseen."""
    life = run(make(counting(), tmp_path / "p", checkpoint="never", parallelism=2, epochs=3, drain=False))
    commit, program = life.journal.commit(3), life.program
    assert commit is not None
    (uid,) = commit.shards
    stamps = [shard.sealed.stamp for shard in commit.shards[uid]]

    def request(shard: int, folder: str = "c00000001-g1-1") -> Request:
        one = ShardUpload(uid, shard, stamps[shard], [])
        return Request(folder, str(tmp_path / "store"), {}, program.state_root, program.home, [one])

    here, uploads = str(tmp_path / "elsewhere"), Uploads()
    done = {}
    for shard, root in ((0, None), (1, here)):
        while not (told := uploads.ask(request(shard), "host", root)).done:
            time.sleep(0.01)
        done[shard] = told
    assert list(done[0].versions[uid]) == [0] and not done[0].reason
    assert done[1].reason == Reason.MISSING.name and done[1].lost == [(uid, 1)]
    assert uploads.ask(request(0), "host", None) == done[0], "it is not begun again"
    uploads.ask(request(0, "c00000002-g1-2"), "host", None)
    assert len(uploads._running) == 1, "what was given up is forgotten"
