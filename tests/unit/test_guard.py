"""A pipeline held to its deadline, without Spark: the real driver, log and checkpoints over the in-process runner."""

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.calibrate import chosen
from holdfast.checkpoint.metadata import Checkpoint, StoredFile
from holdfast.config import resolve
from holdfast.engine.local import LocalRunner
from holdfast.errors import InfeasibleError
from holdfast.faults.kinds import Fault
from holdfast.log.records import Commit, ShardCommit
from holdfast.recovery.chance import Linear, Prior
from holdfast.recovery.estimate import FAMILIES, Notice, Outcome, Parts
from holdfast.recovery.guard import Guard
from holdfast.recovery.memory import OUTCOMES, read_learned, read_outcomes, write_outcome
from holdfast.recovery.replay import Took
from holdfast.recovery.trace import BackupLine, EpochLine, read_trace
from holdfast.state.shard import Sealed
from tests.drivers import Life, Waiting, make
from tests.spark.test_equals_runner import sinks_in
from tests.unit.test_recovery import ONE, lose

NOTICE = Notice(worker_s=3.0, executor_s=3.0, executor_check_s=0.5, driver_s=3.0, host_s=3.0)


class Known(Linear):
    """A time that is known, whatever is seen."""

    def __init__(self, *weights: float) -> None:
        super().__init__(Prior(list(weights), [1e-3] * len(weights), noise=0.01, df=100))

    def learn(self, features: Any, seconds: float) -> None:
        return


def held(folder: Path, *, record_s: float = 0.05, runner: Any = Waiting, **given: Any) -> Life:
    """A life in which a record costs so much to replay, and everything else little that is known."""
    options = {"parallelism": 2, "max_records": 20, "backend": "heap", "checkpoint_on_stop": False, **given}
    life = make(ONE.build(sinks_in(folder / "ours")), folder / "dir", runner=runner, notice=NOTICE, **options)
    guard = life.guard
    assert guard is not None
    guard.retry_s = 0.02
    guard.learned.epoch = Known(0.05, record_s)
    guard.learned.replay = Known(1.0, 0.001)
    guard.learned.upload = Known(0.01, 1e-9)
    guard.learned._families = {name: Known(2.0, *[1e-9] * (len(of) - 1)) for name, of in FAMILIES.items()}
    return life


def lived(life: Life) -> tuple[list[EpochLine], list[BackupLine]]:
    life.driver.start()
    life.driver.run()
    lines = list(read_trace(life.driver._guard._directory))  # type: ignore[union-attr]
    return [x for x in lines if isinstance(x, EpochLine)], [x for x in lines if isinstance(x, BackupLine)]


def test_backups_are_made_when_the_deadline_asks_and_the_bound_stays_under_it(tmp_path: Path) -> None:
    epochs, backups = lived(held(tmp_path, deadline="15s", interval="20ms"))
    assert len(epochs) == 12
    assert max(e.bound_s for e in epochs) <= 15
    assert 1 <= len(backups) < 8
    assert {b.trigger for b in backups} == {"DEADLINE"}


def test_with_time_enough_nothing_is_backed_up(tmp_path: Path) -> None:
    epochs, backups = lived(held(tmp_path, deadline="300s", interval="20ms"))
    assert len(epochs) == 12 and not backups
    bounds = [e.bound_s for e in epochs]
    assert bounds == sorted(bounds) and bounds[-1] > bounds[0] + 5


def test_intake_pauses_while_a_slow_backup_would_let_the_bound_cross(tmp_path: Path) -> None:
    class Slow(LocalRunner):
        def upload(self, *args: Any) -> Any:
            time.sleep(0.4)
            return super().upload(*args)

    epochs, backups = lived(held(tmp_path, runner=Slow, deadline="15s", interval="10ms"))
    assert len(epochs) == 12
    assert max(e.bound_s for e in epochs) <= 15
    assert backups and any(e.paused_s > 0.1 for e in epochs)


def test_epochs_are_cut_smaller_where_one_alone_would_be_too_much(tmp_path: Path) -> None:
    epochs, _ = lived(held(tmp_path, deadline="20s", max_records=200, interval="10ms", record_s=0.1))
    assert sum(e.records for e in epochs) == 240
    assert max(e.bound_s for e in epochs[1:]) <= 20


def test_a_deadline_that_cannot_be_held_is_refused_or_told_with_its_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    life = held(tmp_path, deadline="2s", on_infeasible="refuse")
    with pytest.raises(InfeasibleError, match="2 s can't be held") as caught:
        life.driver.start()
    assert "executor_timeout" in str(caught.value) or "worker_timeout" in str(caught.value)
    with caplog.at_level(logging.WARNING, "holdfast.deadline"):
        epochs, _ = lived(held(tmp_path / "warn", deadline="2s"))
    assert len(epochs) == 12
    told = [r.getMessage() for r in caplog.records if "can't be held" in r.getMessage()]
    assert len(told) == 1 and "buys" in told[0]


def test_what_was_learned_is_there_in_the_next_life(tmp_path: Path) -> None:
    options: dict[str, Any] = {"parallelism": 2, "max_records": 20, "epochs": 6}
    first = make(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", notice=NOTICE, **options)
    first.driver.start()
    first.driver.run()
    learned = read_learned(tmp_path / "dir")
    assert learned.epoch.seen.count >= 4
    second = make(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", notice=NOTICE, **options)
    assert second.guard is not None
    assert second.guard.learned.epoch.weights == learned.epoch.weights


def test_a_driver_that_replaces_another_tells_what_its_recovery_took(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "parallelism": 3,
        "max_records": 20,
        "checkpoint": "4 epochs",
        "trim_log": False,
        "checkpoint_on_stop": False,
        "runner": Waiting,
    }
    first = make(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", notice=NOTICE, epochs=6, **options)
    first.driver.start()
    first.driver.run()
    lose(first, "first", 1)
    fell = {"HOLDFAST_FELL": f"{int(time.time() * 1000) - 2000} silent"}
    second = make(
        ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", notice=NOTICE, environment=fell, **options
    )
    second.driver.start()
    second.driver.run()
    (outcome,) = read_outcomes(tmp_path / "dir")
    assert outcome.fault == "driver-freeze" and outcome.epoch == 7 and outcome.by == "run"
    assert 2.0 <= outcome.took_s < 60
    assert outcome.measured.total == pytest.approx(outcome.took_s)
    assert second.guard is not None
    assert second.guard.learned.times_seen(Fault.DRIVER_FREEZE) == 1
    assert second.guard.learned.replay.seen.count == 1  # epochs 5 and 6
    assert second.guard.learned.fetch.seen.count >= 2  # the store was tried, and then really loaded from


def test_a_drill_teaches_what_it_measured_and_once(tmp_path: Path) -> None:
    options: dict[str, Any] = {"parallelism": 2, "max_records": 20, "environment": {"HOLDFAST_DRILL": "1"}}
    life = make(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", notice=NOTICE, **options)
    told = Outcome("host", 5, 0, 9.0, Parts(), Parts(0.1, 5.0, 0.5, 1.0), {"0.99": 12.0}, 30.0, by="drill")
    write_outcome(tmp_path / "dir", told)
    life.driver.start()
    assert life.guard is not None
    assert life.guard.learned.times_seen(Fault.HOST) == 1
    life.driver.run()
    assert life.guard.learned.times_seen(Fault.HOST) == 1
    assert (
        7.5 < life.guard.learned.environment(Fault.HOST).mean < 9.0
    )  # told: nine less detection and recomputing
    assert read_outcomes(tmp_path / "dir")[0].took_s == 9.0


def test_damaged_files_teach_nothing_and_harm_nobody(tmp_path: Path) -> None:
    (tmp_path / OUTCOMES).mkdir()
    (tmp_path / OUTCOMES / "00000001.drill.json").write_bytes(b"{")
    (tmp_path / "recovery.json").write_bytes(b"not json")
    guard = Guard(resolve({}, environment={}).settings, NOTICE, tmp_path, environment={})
    guard.start(None, [], None)
    assert guard.learned.epoch.seen.count == 0
    assert read_outcomes(tmp_path) == []


def test_a_failed_backup_is_made_again_and_the_bound_stays_under_the_deadline(tmp_path: Path) -> None:
    class Failing(Waiting):
        times = 0

        def upload(self, *args: Any) -> Any:
            Failing.times += 1
            if Failing.times == 1:
                raise OSError("the store is away")
            return super().upload(*args)

    life = held(tmp_path, runner=Failing, deadline="15s", interval="20ms")
    epochs, backups = lived(life)
    assert max(e.bound_s for e in epochs) <= 15
    assert backups[0].failed and not backups[-1].failed
    assert any(isinstance(outcome, Checkpoint) for outcome in life.outcomes)


def test_the_store_is_tried_with_the_largest_files_that_are_not_too_much() -> None:
    files = [StoredFile(f"{n}", f"{n}", n, 0) for n in (1, 50, 7, 900)]
    assert [f.size_bytes for f in chosen(files, most_bytes=60, most_files=2)] == [50, 7]
    assert [f.size_bytes for f in chosen(files[3:], most_bytes=60)] == [900]
    assert chosen([]) == []


def guarded(folder: Path, **given: Any) -> Guard:
    guard = Guard(resolve(given, environment={}).settings, NOTICE, folder, environment={})
    guard.start(None, [], None)
    return guard


def committed(epoch: int, records: int = 1000) -> Commit:
    sealed = Sealed(f"{epoch}", 1, 1000, 100_000, {}, 1)
    return Commit(epoch, 1, {"k": [ShardCommit(sealed, "h", "e")]}, {}, {}, records_in=records)


def done(guard: Guard, epoch: int, **given: Any) -> None:
    facts: dict[str, Any] = {"clean": True, "reloads": 0, "took": Took(), "run_s": 0.1, **given}
    guard.epoch_done(committed(epoch), 0.1, **facts)


def test_waiting_for_data_is_no_recovery(tmp_path: Path) -> None:
    guard = guarded(tmp_path)
    done(guard, 1)
    assert guard.fault(Fault.EXECUTOR_KILL, time.time() - 600)
    assert not guard.fault(Fault.WORKER_KILL, time.time()), "one at a time"
    done(guard, 2, clean=False, idle_s=595.0)
    (outcome,) = read_outcomes(tmp_path)
    assert outcome.fault == "executor-kill" and outcome.took_s == pytest.approx(5.0, abs=0.5)


def test_workers_that_spark_ended_for_their_idleness_are_no_fault(tmp_path: Path) -> None:
    now = [1000.0]
    guard = Guard(
        resolve({}, environment={}).settings, NOTICE, tmp_path, environment={}, clock_s=lambda: now[0]
    )
    guard.start(None, [], None)
    done(guard, 1)
    now[0] += 90
    done(guard, 2, clean=False, reloads=1)
    assert read_outcomes(tmp_path) == []
    now[0] += 1
    done(guard, 3, clean=False, reloads=1)
    assert [o.fault for o in read_outcomes(tmp_path)] == ["worker-kill"]


def test_a_driver_that_comes_back_is_not_refused_and_one_that_runs_is_not_ended(tmp_path: Path) -> None:
    options = {"deadline": "2s", "on_infeasible": "refuse"}
    with pytest.raises(InfeasibleError):
        guarded(tmp_path, **options).decide()
    settings = resolve(options, environment={}).settings
    back = Guard(settings, NOTICE, tmp_path, environment={"HOLDFAST_FELL": "1000 killed"})
    back.start(None, [], None)
    assert not back.decide().feasible


def test_it_is_told_once_a_minute_where_it_comes_and_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    settings = resolve({"deadline": "2s"}, environment={}).settings
    guard = Guard(settings, NOTICE, tmp_path, environment={}, clock_s=lambda: now[0])
    guard.start(None, [], None)
    with caplog.at_level(logging.WARNING, "holdfast.deadline"):
        for _ in range(20):
            now[0] += 1
            guard.decide()
            guard._infeasible_told = False  # as if it had been held in between
    assert len(caplog.records) == 1


def test_an_upload_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    guard = guarded(tmp_path, deadline="40s")
    guard.learned.epoch = Known(0.05, 0.05)
    guard.learned.replay = Known(1.0, 0.001)
    done(guard, 1)
    assert guard.decide().back_up
    guard.backing_up(1)
    assert not guard.decide().back_up, "never two at once"
    guard.backing_up(None)  # it ended while it was looked at, and its note was taken in before
    assert guard.decide().back_up
