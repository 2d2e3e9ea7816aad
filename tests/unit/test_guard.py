"""A pipeline held to its deadline, without Spark: the real driver, log and checkpoints over the in-process runner."""

import logging
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.checkpoint.calibrate import Reading, chosen
from holdfast.checkpoint.metadata import Checkpoint, StoredFile, StoredVersion
from holdfast.config import resolve
from holdfast.engine.local import LocalRunner
from holdfast.engine.tasks import Shards
from holdfast.errors import InfeasibleError
from holdfast.faults.kinds import Fault
from holdfast.log.records import Commit, ShardCommit
from holdfast.recovery.chance import Linear, Prior
from holdfast.recovery.decide import Decision
from holdfast.recovery.estimate import (
    FAMILIES,
    History,
    Learned,
    Notice,
    Outcome,
    Parts,
    Situation,
    covered,
    estimate,
    estimates,
)
from holdfast.recovery.explain import explain
from holdfast.recovery.guard import Guard
from holdfast.recovery.memory import OUTCOMES, read_learned, read_memory, read_outcomes, write_outcome
from holdfast.recovery.replay import Took
from holdfast.recovery.standing import Standing
from holdfast.recovery.trace import BackupLine, EpochLine, read_trace
from holdfast.state.shard import Sealed
from holdfast.state.versions import Manifest
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
    guard.learned.replay = Known(1.0, 1e-9, 0.001)
    guard.learned.upload = Known(0.01, 1e-9)
    guard.learned._families = {name: Known(2.0, *[1e-9] * (len(of) - 1)) for name, of in FAMILIES.items()}
    return life


def lived(life: Life) -> tuple[list[EpochLine], list[BackupLine]]:
    life.driver.start()
    life.driver.run()
    lines = list(read_trace(life.driver._guard._directory))  # type: ignore[union-attr]
    return [x for x in lines if isinstance(x, EpochLine)], [x for x in lines if isinstance(x, BackupLine)]


def test_backups_are_made_when_the_deadline_asks_and_the_bound_stays_under_it(tmp_path: Path) -> None:
    epochs, backups = lived(held(tmp_path, deadline="18s", interval="20ms"))
    assert len(epochs) == 12
    assert max(e.bound_s for e in epochs) <= 18
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
    assert second.guard.learned.memory().seen["read"].count >= 1, "the store was tried"
    assert second.guard.learned.fetch.seen.count == 1, "and then really loaded from"


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


def committed(epoch: int, records: int = 1000, executor: str = "e") -> Commit:
    sealed = Sealed(f"{epoch}", 1, 1000, 100_000, {}, 1)
    return Commit(epoch, 1, {"k": [ShardCommit(sealed, "h", executor)]}, {}, {}, records_in=records)


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


def test_each_fault_for_which_it_can_no_longer_be_held_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One flag stood for all faults: that a second one had joined the first was never said."""
    now = [1000.0]
    settings = resolve({"deadline": "70s"}, environment={}).settings
    guard = Guard(settings, NOTICE, tmp_path, environment={}, clock_s=lambda: now[0])
    guard.start(None, [], None)
    families = guard.learned._families
    with caplog.at_level(logging.WARNING, "holdfast.deadline"):
        for name in ("frozen executor", "host"):
            families[name] = Known(90.0)
            for _ in range(3):
                now[0] += 100
                assert not guard.decide().feasible
    first, second = (record.getMessage() for record in caplog.records)
    assert "can't be held: after executor-freeze" in first and "after host" not in first
    assert "after host" in second and "after executor-freeze" in second


@pytest.mark.parametrize("policy", ["deadline", "1h"])
def test_what_the_log_says_of_a_deadline_explain_says_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    """State that was never backed up takes no time to load as it stands; a backup of it would, and that was judged."""
    guard = guarded(tmp_path, deadline="70s", checkpoint=policy)
    guard.learned.reload = Known(0.05, 1e-12)  # of the host's own disk: only a lost host loads slowly
    sealed = Sealed("1", 1, 1000, 4 << 30, {}, 1)
    large = Commit(1, 1, {"k": [ShardCommit(sealed, "h", "e")]}, {}, {}, records_in=10)
    guard.epoch_done(large, 0.1, clean=True, reloads=0, took=Took(), run_s=0.1)
    assert not guard.decision.feasible and guard.worst()[1] < 70
    assert "can't be held: after host" in caplog.text and "Most of it is loading" in caplog.text
    guard.stop()
    memory = read_memory(tmp_path)
    assert memory is not None and memory.floor is not None and memory.situation is not None
    host = [
        estimate(Fault.HOST, there, Learned(memory), NOTICE).bound(0.999)
        for there in (memory.situation, memory.floor)
    ]
    assert host[0] < 70 < host[1]


def test_what_a_backup_buys_counts_that_it_has_to_be_loaded() -> None:
    there = Situation(history=History(2000, 10_000_000))
    (cheap, dear) = (
        explain(there, Learned(), NOTICE, 0.999, Situation(stored_bytes=size)) for size in (0, 1 << 30)
    )
    assert cheap is not None and dear is not None and cheap.fault == dear.fault == "host"
    buys = [next(b.buys_s for b in told.bargains if b.change == "A backup now") for told in (cheap, dear)]
    loaded = estimate(Fault.HOST, Situation(stored_bytes=1 << 30), Learned(), NOTICE).bound(0.999)
    assert buys[1] == pytest.approx(cheap.bound_s - loaded) and buys[0] > buys[1]


def test_the_last_recovery_is_known_with_what_was_estimated_also_to_the_next_life(tmp_path: Path) -> None:
    guard = guarded(tmp_path)
    assert guard.recovered() is None
    done(guard, 1)
    before = next(e for e in guard.estimates if e.fault is Fault.EXECUTOR_KILL)
    guard.fault(Fault.EXECUTOR_KILL, time.time() - 5)
    done(guard, 2, clean=False)
    told = guard.recovered()
    assert told is not None and told.fault == "executor-kill" and told.took_s == pytest.approx(5.0, abs=0.5)
    assert told.estimate_s == pytest.approx(before.sum.mean) and told.caught_up_s is None
    assert told.bound_s == pytest.approx(before.bound(0.999))
    done(guard, 3)
    assert (guard.recovered() or told).caught_up_s is not None
    assert guarded(tmp_path).recovered() == guard.recovered()


def test_an_upload_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    guard = guarded(tmp_path, deadline="40s")
    guard.learned.epoch = Known(0.05, 0.05)
    guard.learned.replay = Known(1.0, 1e-9, 0.001)
    done(guard, 1)
    assert guard.decide().back_up
    guard.backing_up(1)
    assert not guard.decide().back_up, "never two at once"
    guard.backing_up(None)  # it ended while it was looked at, and its note was taken in before
    assert guard.decide().back_up


# What is known of a situation


def two_hosts(epoch: int, records: int = 1000, size: int = 10**6) -> Commit:
    """Two stages with a shard on each of two hosts."""
    shards = [ShardCommit(Sealed(f"{epoch}", 1, 1000, size, {}, 7), host, "e") for host in ("one", "other")]
    return Commit(epoch, 1, {"first": shards, "second": shards}, {}, {}, records_in=records)


def stored(epoch: int, size: int = 10**6) -> Checkpoint:
    files = [StoredFile("f", "f", size, 0)]
    versions: list[StoredVersion | None] = [StoredVersion(Manifest(f"{epoch}", 1, [], [], {}), files)] * 2
    shards = {"first": versions, "second": versions}
    return Checkpoint(1, epoch, 1, "p", "f", "DEADLINE", 0, 1000, 128, 2, "heap", {}, {}, 0, {}, {}, shards)


def test_an_epoch_has_not_many_times_as_many_records_as_any_before(tmp_path: Path) -> None:
    guard = guarded(tmp_path, max_records=500_000)
    assert (guard.limit, guard.busy_limit) == (20_000, 20_000)
    facts: dict[str, Any] = {"clean": True, "reloads": 0, "took": Took(), "run_s": 0.1}
    for epoch, records, most in ((1, 100, 20_000), (2, 20_000, 80_000), (3, 80_000, 320_000)):
        guard.epoch_done(committed(epoch, records), 0.1, **facts)
        assert guard.limit == most and guard.busy_limit <= most
    guard.stop()
    again = guarded(tmp_path, max_records=500_000)
    assert again.most_records == 320_000


def test_what_feeds_a_lost_shard_is_loaded_with_it(tmp_path: Path) -> None:
    def loads(lost: list[tuple[str, int]]) -> list[tuple[str, int]]:
        return [*lost, ("first", 0 if ("first", 1) in lost else 1)]

    settings = resolve({}, environment={}).settings
    guard = Guard(settings, NOTICE, tmp_path, environment={}, loads=loads)
    guard.start(two_hosts(5), [], stored(5))
    assert guard._standing.situation.stored_bytes == 3 * 10**6
    assert guard._standing.situation.stored_files == 3
    assert guard._standing._now == (3 * 10**6, 21)


def test_a_backup_counts_from_the_moment_it_is_there(tmp_path: Path) -> None:
    guard = guarded(tmp_path)
    facts: dict[str, Any] = {"clean": True, "reloads": 0, "took": Took(), "run_s": 0.1}
    guard.epoch_done(two_hosts(1), 0.1, **facts)
    before = next(e for e in guard.estimates if e.fault is Fault.HOST)
    assert before.loading.mean == 0 and len(before.recomputing.parts) == 2
    guard.backup_ended(stored(1))
    guard.decide()
    assert guard._standing.situation.stored_bytes == 2 * 10**6 and guard._standing.situation.stored_files == 2
    after = next(e for e in guard.estimates if e.fault is Fault.HOST)
    assert after.loading.mean > 0
    assert guard._standing.situation.older == History(1, 1000)


def test_a_checkpoint_that_turned_out_damaged_is_not_counted_on(tmp_path: Path) -> None:
    guard = guarded(tmp_path)
    facts: dict[str, Any] = {"clean": True, "reloads": 0, "took": Took(), "run_s": 0.1}
    commits = [two_hosts(epoch) for epoch in range(1, 7)]
    for commit in commits:
        guard.epoch_done(commit, 0.1, **facts)
    guard.backup_ended(stored(6))
    guard.decide()
    assert guard._standing.history == History()
    guard.rebuilt(commits, stored(6))
    assert guard._standing.history == History(), "the same: nothing is counted again"
    guard.rebuilt(commits[2:], stored(2))
    assert guard._standing.history == History(4, 4000) and guard._standing.situation.history == History(
        4, 4000
    )
    guard.rebuilt(commits, None)
    assert guard._standing.history == History(6, 6000) and guard._standing.situation.stored_bytes == 0


def test_the_driver_tells_of_a_checkpoint_that_a_recovery_has_condemned(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint": "2 epochs", "trim_log": False, "max_records": 20, "epochs": 7}
    first = make(
        ONE.build(sinks_in(tmp_path / "ours")),
        tmp_path / "dir",
        notice=NOTICE,
        runner=Losing,
        checkpoint_on_stop=False,
        **options,
    )
    guard, known = first.guard, []
    assert guard is not None
    rebuilt = guard.rebuilt

    def hear(*told: Any) -> None:
        guard._take_in_backups()
        before = guard._standing.history
        rebuilt(*told)
        known.append((before, guard._standing.history, first.coordinator.newest_epoch))

    guard.rebuilt = hear  # type: ignore[method-assign]
    first.driver.start()
    Losing.life = first
    try:
        first.driver.run()
    finally:
        Losing.life = None
    assert first.recovery.last is not None and first.recovery.last.replayed == 2
    assert known == [(History(), History(2, 40), 4)]


class Losing(Waiting):
    """Before its last epoch, a shard's state is lost and the newest checkpoint's files are torn."""

    life: Life | None = None

    def run(self, plan: Any, header: Any) -> Any:
        self.wait()
        if plan.epoch == 7 and Losing.life is not None:
            life, Losing.life = Losing.life, None
            before, newest = life.catalog.completed()
            assert newest.epoch == 6
            for key in {f.key for f in newest.files} - {f.key for f in before.files}:
                path = Path(life.program.checkpoint_url) / key
                path.write_bytes(path.read_bytes()[:-1])
            self.close()
            self._shards = Shards()  # as if all workers had died, and one of them with its disk
            lose(life, "first", 1)
        return super().run(plan, header)


def test_a_lost_host_is_held_against_its_own_forecast(tmp_path: Path) -> None:
    guard = guarded(tmp_path)
    done(guard, 1)
    forecast = next(e for e in guard.estimates if e.fault is Fault.HOST)
    assert guard.fault(Fault.EXECUTOR_KILL, time.time() - 15)
    done(guard, 2, clean=False, took=Took(rebuilt=1))
    (outcome,) = read_outcomes(tmp_path)
    assert outcome.fault == "host"
    assert outcome.estimated == forecast.parts
    assert outcome.bounds["0.99"] == pytest.approx(forecast.bound(0.99))


@pytest.mark.parametrize(
    ("took_s", "reloads", "fault"),
    [
        (0.4, 1, "worker-kill"),
        (4.5, 1, "worker-freeze"),
        (5.0, 0, "executor-kill"),
        (40.0, 0, "executor-kill"),
    ],
)
def test_what_was_silent_for_its_time_out_and_took_so_long_froze(
    tmp_path: Path, took_s: float, reloads: int, fault: str
) -> None:
    now = [1000.0]
    settings = resolve({}, environment={}).settings
    guard = Guard(settings, NOTICE, tmp_path, environment={}, clock_s=lambda: now[0])
    guard.start(None, [], None)
    done(guard, 1)
    now[0] += took_s
    if not reloads:
        guard.fault(Fault.EXECUTOR_KILL, 1000.0)
    facts: dict[str, Any] = {"clean": False, "reloads": reloads, "took": Took(), "run_s": 0.1}
    guard.epoch_done(committed(2), took_s, **facts)
    assert [o.fault for o in read_outcomes(tmp_path)] == [fault]


@pytest.mark.parametrize("reloads", [0, 1])
def test_an_executor_whose_death_spark_repaired_within_a_job_is_not_taken_for_a_worker(
    tmp_path: Path, reloads: int
) -> None:
    now = [1000.0]
    settings = resolve({}, environment={}).settings
    guard = Guard(settings, NOTICE, tmp_path, environment={}, clock_s=lambda: now[0])
    guard.start(None, [], None)
    facts: dict[str, Any] = {"clean": False, "reloads": reloads, "took": Took(), "run_s": 0.1}
    for epoch, executor in ((1, "0"), (2, "1"), (3, "1")):
        now[0] += 3.0
        guard.epoch_done(committed(epoch, executor=executor), 3.0, **facts)
    first, *later = [o.fault for o in read_outcomes(tmp_path)]
    assert first == "executor-kill"
    assert later == (["worker-kill"] if reloads else []), "it lived on after that"
    assert guard.learned.times_seen(Fault.EXECUTOR_KILL) == 1


def test_what_was_waited_before_an_epoch_is_not_taken_from_its_outage(tmp_path: Path) -> None:
    now = [1000.0]
    settings = resolve({}, environment={}).settings
    guard = Guard(settings, NOTICE, tmp_path, environment={}, clock_s=lambda: now[0])
    guard.start(None, [], None)
    done(guard, 1)
    now[0] += 5.0
    facts: dict[str, Any] = {"clean": False, "reloads": 1, "took": Took(), "run_s": 0.1, "idle_s": 2.0}
    guard.epoch_done(committed(2), 2.5, **facts)
    (outcome,) = read_outcomes(tmp_path)
    assert outcome.took_s == pytest.approx(2.5)


def test_a_run_tells_itself_when_it_had_caught_up_after_a_recovery(tmp_path: Path) -> None:
    now = [1000.0]
    settings = resolve({}, environment={}).settings
    guard = Guard(settings, NOTICE, tmp_path, environment={}, clock_s=lambda: now[0])
    guard.start(None, [], None)
    done(guard, 1, backlog=70)
    guard.fault(Fault.EXECUTOR_KILL, now[0])
    # The epoch that ended the recovery was planned before the fault, when no more waited than usual.
    for epoch, backlog, told in ((2, 70, None), (3, 900, None), (4, 70, 15.0), (5, 0, 15.0)):
        now[0] += 5
        done(guard, epoch, backlog=backlog)
        (outcome,) = read_outcomes(tmp_path)
        assert outcome.took_s == pytest.approx(5.0) and outcome.caught_up_s == told


@pytest.mark.parametrize("policy", ["deadline", "never"])
def test_only_who_holds_the_deadline_pauses_for_it(tmp_path: Path, policy: str) -> None:
    guard = guarded(tmp_path, deadline="30s", checkpoint=policy)
    guard.learned.epoch = Known(0.05, 0.01)
    guard.learned.replay = Known(1.0, 1e-9, 0.001)
    for epoch in range(1, 4):
        done(guard, epoch)
    assert guard.decision.pause and guard.pauses == (policy == "deadline")
    assert guard.cut == (guard.decision.limit if policy == "deadline" else None)
    host = next(e for e in guard.estimates if e.fault is Fault.HOST)
    planned_s = host.recomputing.parts[1].bound(0.5)
    assert planned_s == pytest.approx(0.05 if policy == "deadline" else 10.05, rel=0.05)


def test_where_backups_fail_again_and_again_the_deadline_is_not_said_to_be_held(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guard = guarded(tmp_path, deadline="40s")
    guard.learned.epoch = Known(0.05, 0.05)
    guard.learned.replay = Known(1.0, 1e-9, 0.001)
    done(guard, 1)
    assert guard.decide().feasible and guard.decision.back_up
    guard.backing_up(None, hopeless=True)
    with caplog.at_level(logging.WARNING):
        assert not guard.decide().feasible and guard.decision.back_up and not guard.decision.pause
    bound_s = next(e for e in guard.estimates if e.fault is Fault.HOST).bound(0.999)
    assert "backups keep failing" in caplog.text and f"recovery may take {bound_s:.1f} s now" in caplog.text


def test_an_epoch_that_is_larger_than_those_before_it_is_counted_as_soon_as_it_begins(tmp_path: Path) -> None:
    guard = guarded(tmp_path, deadline="600s")
    guard.learned.epoch = Known(0.05, 0.01)
    for epoch in range(1, 4):
        done(guard, epoch)
    before_s = guard.worst()[1]
    guard.planned(900)
    assert guard.worst()[1] == before_s, "no larger than the others"
    guard.planned(2000)
    assert guard.worst()[1] == pytest.approx(before_s + 10.0, abs=1.0)
    planned_s = guard.worst()[0].recomputing.parts[-1].mean
    lately = guard.learned.lately  # its epochs take far less than it is made to believe
    assert planned_s == pytest.approx(20.05 * lately, rel=0.01), "the estimate counts it too: it is under way"
    done(guard, 4)
    assert guard._standing.situation.planned == 1000, "and no longer than it is"


def test_a_backup_that_ends_while_nothing_comes_is_kept_for_who_asks(tmp_path: Path) -> None:
    """`holdfast estimate` showed the history from before it until the next epoch, hours later."""
    now = [1000.0]
    settings = resolve({}, environment={}).settings
    guard = Guard(settings, NOTICE, tmp_path, environment={}, clock_s=lambda: now[0])
    guard.start(None, [], None)
    done(guard, 1)
    now[0] += 3.0
    guard.backup_ended(stored(1))
    guard.refresh()
    now[0] += 60.0
    guard.refresh()
    kept = read_memory(tmp_path)
    assert kept is not None and kept.situation is not None and kept.situation.history == History()


def test_what_is_kept_is_what_was_forecast(tmp_path: Path) -> None:
    """While intake pauses nothing is planned; `holdfast explain` counted an epoch all the same, and called it too much."""
    guard = guarded(tmp_path, deadline="30s")
    guard.learned.epoch = Known(0.05, 0.01)
    guard.learned.replay = Known(1.0, 1e-9, 0.001)
    for epoch in range(1, 4):
        done(guard, epoch)
    assert guard.decision.pause
    guard.stop()
    kept = read_memory(tmp_path)
    assert kept is not None and kept.situation is not None and kept.situation.planned == 0


def test_a_driver_that_fell_often_can_buy_seconds_with_another_restart() -> None:
    notice = msgspec.structs.replace(NOTICE, restart_s=32.0)
    told = explain(Situation(), Learned(), notice, 0.999)
    assert told is not None
    (bargain,) = [b for b in told.bargains if b.change.startswith("restart")]
    assert bargain.buys_s == pytest.approx(31.0)


def test_what_no_bound_covers_is_said_with_its_figure() -> None:
    there = Situation(history=History(10, 10_000), stored_bytes=10**7, older=History(500, 5_000_000))
    told = explain(there, Learned(), NOTICE, 0.999)
    assert told is not None
    second, damaged = (n for n in told.notes if "fault at a time" in n or "is damaged" in n)
    bounds = sorted(
        (e.bound(0.999) for e in estimates(there, Learned(), NOTICE, covered(NOTICE))), reverse=True
    )
    assert f"{bounds[0] + bounds[1]:.1f} s" in second
    farther = Situation(history=History(510, 5_010_000), stored_bytes=10**7)
    bound_s = estimate(Fault.HOST, farther, Learned(), NOTICE).bound(0.999)
    assert "500 epochs more" in damaged and f"{bound_s:.1f} s" in damaged
    assert not any("damaged" in n for n in explain(Situation(), Learned(), NOTICE, 0.999).notes)  # type: ignore[union-attr]


def test_what_waited_when_all_was_well_is_known_to_the_next_life(tmp_path: Path) -> None:
    """A pipeline that always has a backlog was never said to have caught up after its driver died."""
    guard = guarded(tmp_path)
    done(guard, 1, backlog=500)
    guard.stop()
    settings = resolve({}, environment={}).settings
    told = {"HOLDFAST_FELL": f"{int(time.time() * 1000) - 9000} killed"}
    later = Guard(settings, NOTICE, tmp_path, environment=told)
    later.start(committed(1), [committed(1)], None)
    for epoch, backlog in ((2, 500), (3, 40_000), (4, 450)):
        done(later, epoch, backlog=backlog)
        caught = [o.caught_up_s is not None for o in read_outcomes(tmp_path)]
        assert caught == [epoch == 4]


def test_a_deadline_that_is_refused_can_be_explained(tmp_path: Path) -> None:
    with pytest.raises(InfeasibleError):
        guarded(tmp_path, deadline="2s", on_infeasible="refuse").decide()
    memory = read_memory(tmp_path)
    assert memory is not None and memory.deadline_s == 2.0 and memory.notice is not None
    assert memory.floor is not None and memory.floor.history.epochs == 1, "as it was judged"


def test_a_store_that_was_tried_makes_loading_slower_and_never_faster(tmp_path: Path) -> None:
    """Three readings from a cache weighed more than every real load after them."""
    guard, fresh = guarded(tmp_path), Learned()
    big = [1.0, 10.0**9, 40.0]
    for _ in range(3):
        guard.store_read(Reading(16 << 20, 8, 0.01))
    guard.decide()
    assert guard.learned.fetch.predict(big) == fresh.fetch.predict(big)
    for _ in range(3):
        guard.learned.fetch.learn([1.0, 10.0**8, 40.0], 4.0)
    assert guard.learned.fetch.predict([1.0, 10.0**8, 40.0]).mean == pytest.approx(4.0, rel=0.3)
    slow = guarded(tmp_path / "slow")
    slow.store_read(Reading(16 << 20, 8, 8.0))
    slow.decide()
    assert slow.learned.fetch.predict(big).mean > 2 * fresh.fetch.predict(big).mean
    again = Learned(slow.learned.memory())
    assert again.fetch.predict(big) == slow.learned.fetch.predict(big)


def test_the_back_off_before_the_next_restart_is_counted_until_the_driver_was_well_for_long(
    tmp_path: Path,
) -> None:
    now = [1000.0]
    settings = resolve({}, environment={}).settings
    guard = Guard(
        settings,
        NOTICE,
        tmp_path,
        environment={"HOLDFAST_RESTARTS": "16 60 1 8"},
        clock_s=lambda: now[0],
    )
    guard.start(None, [], None)

    def environment_s() -> float:
        guard.decide()
        return next(e for e in guard.estimates if e.fault is Fault.DRIVER_KILL).environment.mean

    base = Learned().environment(Fault.DRIVER_KILL).mean
    assert environment_s() == pytest.approx(base + 16)
    done(guard, 1)
    now[0] += 59
    assert environment_s() == pytest.approx(base + 16)
    now[0] += 2
    assert environment_s() == pytest.approx(base + 1)


def test_who_recovers_is_not_kept_waiting_for_a_backup(tmp_path: Path) -> None:
    """The recovery from a fault during a pause had the rest of the pause, a failed upload and another in it."""
    guard = guarded(tmp_path, deadline="30s")
    guard.learned.epoch = Known(0.05, 0.01)
    guard.learned.replay = Known(1.0, 1e-9, 0.001)
    for epoch in range(1, 4):
        done(guard, epoch)
    assert guard.decision.pause and not guard.recovering and guard.limit > 1
    guard.fault(Fault.EXECUTOR_KILL, time.time())
    assert guard.recovering and guard.limit == 1
    done(guard, 4, clean=False)
    assert not guard.recovering


def test_the_epoch_that_ends_a_recovery_is_as_large_as_a_usual_one(tmp_path: Path) -> None:
    """It took in all that had built up, and the estimate had counted a usual one."""
    guard = guarded(tmp_path, deadline="10m")
    for epoch in range(1, 9):
        done(guard, epoch)
    usual = guard._standing.situation.usual
    assert usual and guard.limit > usual
    guard.fault(Fault.EXECUTOR_KILL, time.time())
    assert guard.limit == usual
    done(guard, 9, clean=False)
    assert guard.limit > usual


class Pausing(Waiting):
    """An executor is found to be gone while intake is paused."""

    gone = False

    def unsettled(self) -> bool:
        return Pausing.gone


def test_a_fault_that_is_noticed_during_a_pause_ends_it(tmp_path: Path) -> None:
    life = held(tmp_path, runner=Pausing, deadline="15s", interval="20ms", epochs=3)
    guard = life.guard
    assert guard is not None
    life.driver.start()
    life.driver.run()
    guard.decision = Decision(pause=True)
    guard.decide = lambda: guard.decision  # type: ignore[method-assign]
    guard.refresh = lambda: None  # type: ignore[method-assign]
    Pausing.gone = True
    try:
        assert life.driver._await_backup()
    finally:
        Pausing.gone = False
    assert guard.recovering and guard._paused_s < 5


def test_a_job_of_a_replay_is_as_large_as_can_be_computed_before_a_worker_is_taken_for_frozen(
    tmp_path: Path,
) -> None:
    """Also where all epochs are as large, and nobody can tell what of their time is the records'."""
    guard = guarded(tmp_path)
    facts: dict[str, Any] = {"clean": True, "reloads": 0, "took": Took(), "run_s": 1.2, "busy_s": 1.0}
    for epoch in range(1, 200):
        guard.epoch_done(committed(epoch, 10_000), 1.2, **facts)
    assert NOTICE.worker_s is not None
    assert 0.1 * NOTICE.worker_s <= guard.job_records * 1e-4 <= NOTICE.worker_s / 2
    assert guard.busy_limit * 1e-4 <= NOTICE.worker_s / 2
    jobs = History(199, 1_990_000).jobs(guard.job_records)
    fixed_s, _ = guard.learned.epoch.weights
    features = guard.learned.replay_features(History(199, 1_990_000))
    assert features[0] == pytest.approx(jobs * fixed_s + 199.0, rel=0.01), "it takes so many jobs"
    guard.stop()
    assert guarded(tmp_path).job_records == guard.job_records, "a replay may be the first thing a life does"
    patient = msgspec.structs.replace(NOTICE, worker_s=30.0)
    later = Guard(resolve({}, environment={}).settings, patient, tmp_path, environment={})
    assert later.job_records == pytest.approx(10 * guard.job_records, rel=0.01), (
        "by the time-outs of this life"
    )


@pytest.mark.parametrize("policy", ["never", "1h"])
def test_without_backups_for_the_deadline_it_is_said_when_the_bound_has_crossed_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    guard = guarded(tmp_path, checkpoint=policy, deadline="70s")
    guard.decide()
    assert guard.decision.feasible and not caplog.records
    facts: dict[str, Any] = {"clean": True, "reloads": 0, "took": Took(), "run_s": 1.0, "busy_s": 0.8}
    for epoch in range(1, 400):
        guard.epoch_done(committed(epoch, 10_000), 1.0, **facts)
    assert guard.worst()[1] > 70.0
    assert not guard.decision.feasible
    assert "The deadline of 70 s can't be held: after host" in caplog.text


def test_shards_that_have_gathered_on_one_host_are_loaded_by_its_own_cores() -> None:
    standing = Standing(4, 500_000)
    standing.stand(two_hosts(1))
    apart = standing.situation.host_bytes
    gathered = [ShardCommit(Sealed("2", 1, 1000, 10**6, {}, 7), "one", "e")] * 2
    standing.stand(Commit(2, 1, {"first": gathered, "second": gathered}, {}, {}, records_in=1000))
    assert standing.situation.host_bytes == 2 * apart


def test_an_estimate_counts_epochs_as_they_are_now_and_a_bound_the_largest_of_late() -> None:
    standing = Standing(2, 500_000)
    for epoch, records in enumerate([50_000] * 12 + [10_000] * 3, start=1):
        standing.committed(committed(epoch, records))
    assert (standing.situation.usual, standing.situation.planned) == (10_000, 50_000)


def test_an_epoch_that_is_larger_than_allowed_counts_as_large_as_it_is() -> None:
    """A file that can't be cut is taken whole."""
    standing = Standing(2, 500_000)
    standing.committed(committed(1, 5_000_000))
    assert standing.situation.planned == 5_000_000
    later = Standing(2, 500_000)
    later.begin([committed(1, 5_000_000)], None)
    later.stand(committed(1, 5_000_000))
    assert later.situation.planned == 500_000, "an earlier life may have been allowed more"


def test_what_a_drill_told_an_earlier_life_is_kept_with_where_the_pipeline_stands(tmp_path: Path) -> None:
    """A start that learned from a drill kept what it knew as of a pipeline without history."""
    told = Outcome("host", 3, 0, 9.0, Parts(environment=8.0), Parts(environment=8.0), by="drill")
    write_outcome(tmp_path, told)
    guard = Guard(resolve({}, environment={}).settings, NOTICE, tmp_path, environment={})
    guard.start(committed(3), [committed(epoch) for epoch in (1, 2, 3)], None)
    kept = read_memory(tmp_path)
    assert kept is not None and kept.situation is not None and kept.situation.history == History(3, 3000)
