"""Drills without a cluster: what is drawn, how long a recovery took, what a drill comes to, and its report."""

import builtins
import collections
import dataclasses
import re
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.cli.drill import check_report, told_in_words
from holdfast.config import resolve
from holdfast.errors import ConfigError, MissingExtraError
from holdfast.faults import drill as drills
from holdfast.faults import experiment as experiments
from holdfast.faults.cluster import Cluster
from holdfast.faults.compare import Verdict
from holdfast.faults.drill import (
    FROM_DEADLINE,
    Drill,
    Trial,
    as_drilled,
    by_fault,
    draw,
    facts_of,
    inflict,
    outcome_of,
    parse_pause,
    recorded,
    seen_inside,
    summary,
    timeout_s,
)
from holdfast.faults.experiment import SETTINGS, Experiment, Struck, StuckError, waiting_s
from holdfast.faults.kinds import Fault
from holdfast.faults.report import render
from holdfast.faults.victims import Aim
from holdfast.log.records import Plan
from holdfast.metrics import Forecast, Status
from holdfast.recovery.estimate import Outcome, Parts
from holdfast.recovery.memory import write_outcome
from holdfast.recovery.trace import BackupLine, EpochLine, Trace

DEADLINE_S = 30.0
EVERY_HALF_SECOND = [8_000, 8_500, 9_000, 9_500, 10_000]
FORECAST = Forecast(1.0, 5.0, 0.5, 1.5, 20.0, 12.0)


# What is drawn


def test_the_same_seed_draws_the_same_faults_pauses_and_victims() -> None:
    faults = [Fault.HOST, Fault.DRIVER_KILL]
    assert draw(faults, 30, 3, (1, 8)) == draw(faults, 30, 3, (1, 8))
    assert draw(faults, 30, 3, (1, 8)) != draw(faults, 30, 4, (1, 8))


def test_no_fault_of_a_drill_overlaps_another_and_kinds_come_about_equally_often() -> None:
    blows = draw(list(Fault), 83, 1, (2.0, 12.0))
    assert not any(blow.overlaps for blow in blows)
    assert all(2.0 <= blow.pause_s <= 12.0 for blow in blows)
    counts = collections.Counter(blow.fault for blow in blows)
    assert set(counts) == set(Fault) and max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("text", ["soon", "2s..", "..3s", "5s..1s", "2..4"])
def test_what_is_no_pause_is_said(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_pause(text)
    assert caught.value.remedy


def test_an_application_is_stuck_only_long_after_its_deadline() -> None:
    assert timeout_s(5.0) == 120.0 and timeout_s(70.0) == 280.0


def test_a_setting_of_the_experiment_can_be_left_to_the_deadline(tmp_path: Path) -> None:
    wanted = {**FROM_DEADLINE, "deadline": None, "checkpoint": "deadline"}
    found = Experiment(Cluster(tmp_path), "app.py", tmp_path, settings=wanted).settings
    assert not {"driver_timeout", "executor_timeout", "worker_timeout", "deadline"} & set(found)
    assert found["checkpoint"] == "deadline" and found["trim_log"] is False
    assert found["spark"] == SETTINGS["spark"]


def test_a_drill_runs_with_its_users_restart_and_spark_and_without_the_doubling() -> None:
    def drilled(**given: Any) -> dict[str, Any]:
        return as_drilled(resolve(given, environment={}).settings)

    assert drilled()["restart"] == "fixed 1s"
    assert drilled(restart="fixed 30s")["restart"] == "fixed 30s"
    assert drilled(restart="exponential 4s 60s")["restart"] == "fixed 4s"
    assert "restart" not in drilled(restart="none"), "a drill without restarts is none"
    spark = drilled(spark={"spark.executor.memory": "3g"})["spark"]
    assert spark == {**SETTINGS["spark"], "spark.executor.memory": "3g"}


# How long it took


def test_an_epoch_that_was_planned_before_the_fault_waited_for_nothing() -> None:
    assert waiting_s(Fault.EXECUTOR_KILL, 10_600, 10_500, EVERY_HALF_SECOND) == 0.0
    assert waiting_s(Fault.EXECUTOR_KILL, 10_500, 10_500, EVERY_HALF_SECOND) == 0.0


def test_until_the_next_plan_was_due_a_healthy_driver_waited_for_data() -> None:
    assert waiting_s(Fault.HOST, 10_100, 10_480, EVERY_HALF_SECOND) == pytest.approx(0.38)


def test_what_the_plan_came_later_than_due_is_recovery() -> None:
    assert waiting_s(Fault.HOST, 10_100, 18_000, EVERY_HALF_SECOND) == pytest.approx(0.4)
    assert waiting_s(Fault.HOST, 10_700, 18_000, EVERY_HALF_SECOND) == 0.0, "it was due before the fault"


def test_one_long_pause_before_does_not_make_the_next_plan_due_late() -> None:
    assert waiting_s(Fault.HOST, 30_100, 40_000, [9_000, 29_000, 29_500, 30_000]) == pytest.approx(0.4)


@pytest.mark.parametrize("fault", [Fault.DRIVER_KILL, Fault.DRIVER_FREEZE, Fault.APPLICATION])
def test_without_a_driver_nobody_waits_for_data(fault: Fault) -> None:
    assert waiting_s(fault, 10_100, 10_480, EVERY_HALF_SECOND) == 0.0


def test_with_too_few_plans_to_know_when_one_is_due_all_of_it_is_recovery() -> None:
    assert waiting_s(Fault.HOST, 10_100, 10_480, [10_000]) == 0.0
    assert waiting_s(Fault.HOST, 10_100, 10_480, []) == 0.0


class Log:
    """A log that stands where a test says."""

    def __init__(self, decided: int, plans_ms: dict[int, int]) -> None:
        self.decided, self.plans_ms = decided, plans_ms

    def last_epoch(self) -> int:
        return self.decided

    def commit(self, epoch: int) -> object:
        return self if epoch <= self.decided else None

    def plan(self, epoch: int) -> Plan | None:
        return Plan(epoch, 1, self.plans_ms[epoch], [], {}, {}) if epoch in self.plans_ms else None


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    made = Experiment(Cluster(tmp_path), "app.py", tmp_path)
    monkeypatch.setattr(made, "_check_lives", lambda: None)
    return made


def test_an_epoch_that_is_decided_while_the_fault_is_being_done_does_not_end_the_recovery(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(4, {4: 1_000, 5: 1_500})

    def last_call() -> None:
        log.decided = 5
        log.plans_ms[6] = 2_000

    def strike() -> None:
        threading.Timer(0.02, last_call).start()  # a record was about to be created when the signal came

    monkeypatch.setattr(experiment, "journal", log)
    monkeypatch.setattr(experiment.victims, "aim", lambda fault, share: Aim("driver 1", strike))
    found = experiment.strike(Fault.DRIVER_KILL)
    assert (found.epoch, found.planned, found.awaited) == (5, 6, 6)


def test_a_recovery_is_shorter_by_the_waiting_for_data(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "journal", Log(6, {3: 8_500, 4: 9_000, 5: 9_500, 6: 10_000}))
    monkeypatch.setattr(experiments, "_TRACED_S", 0.0)
    began_s = time.monotonic() - 5.0
    waited = Struck(Fault.EXECUTOR_KILL, "executor 1", 9_600, 0.0, began_s, 5, 5)
    assert experiment.await_recovery(waited) == pytest.approx(4.6, abs=0.2)
    planned = dataclasses.replace(waited, at_ms=10_001, planned=6)
    assert experiment.await_recovery(planned) == pytest.approx(5.0, abs=0.2)


def test_a_pause_that_the_run_tells_of_after_the_commit_is_taken_off_all_the_same(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "journal", Log(6, {3: 8_500, 4: 9_000, 5: 9_500, 6: 13_000}))
    line = EpochLine(6, 13_100, 10, 0.1, 0, 0, 0, 0, 0.0, 0.0, "host", (0.0, 0.0, 0.0, 0.0), 3.0)
    experiment.directory.mkdir(parents=True, exist_ok=True)
    told = threading.Timer(0.1, lambda: Trace(experiment.directory).add(line))
    told.start()
    waited = Struck(Fault.WORKER_KILL, "worker", 9_600, 0.0, time.monotonic() - 3.9, 5, 5)
    assert experiment.await_recovery(waited) == pytest.approx(0.5, abs=0.2)
    told.join()


@pytest.mark.parametrize(("seen", "awaited"), [("worker-kill", 7), (None, 7), ("host", 6)])
def test_a_lost_host_is_felt_by_the_epoch_that_rebuilt_its_shards_however_slow_the_one_before_it_was(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, seen: str | None, awaited: int
) -> None:
    """An epoch that was slow for another reason, and no longer needed the host, was taken for the recovery from its loss."""
    monkeypatch.setattr(experiment, "journal", Log(7, {3: 8_500, 4: 9_000, 5: 9_500, 6: 10_000, 7: 11_500}))
    monkeypatch.setattr(experiments, "_TRACED_S", 0.0)
    experiment.directory.mkdir(parents=True, exist_ok=True)
    if seen is not None:
        write_outcome(experiment.directory, Outcome(seen, 6, 10_000, 1.4, Parts()))
    lost = Struck(Fault.HOST, "host", 10_100, 0.0, time.monotonic() - 9.0, 5, 6)
    met, took_s = experiment.await_felt_recovery(lost)
    assert met.awaited == awaited and took_s <= 9.1


# What comes of it


def struck(fault: Fault = Fault.HOST, epoch: int = 10, at_ms: int = 60_000) -> Struck:
    return Struck(fault, f"one <of> {fault.label}", at_ms, at_ms / 1000, 0.0, epoch - 1, epoch)


def trial(
    number: int, took_s: float, fault: Fault = Fault.HOST, worst_s: float = 20.0, caught_up_s: float = 0.0
) -> Trial:
    blow = struck(fault, epoch=10 * number, at_ms=60_000 * number)
    outcome = outcome_of(blow, took_s, FORECAST, DEADLINE_S, 0.999)
    parts = Parts(1.0, took_s - 2.0, 0.5, 0.5)
    outcome = msgspec.structs.replace(outcome, measured=parts, caught_up_s=caught_up_s or None)
    return Trial(number, blow, outcome, worst_s)


@pytest.fixture
def drill() -> Drill:
    return Drill(
        app="vehicle_map.py",
        trials=[
            trial(1, 10.0, caught_up_s=11.5),
            trial(2, 16.0, Fault.DRIVER_FREEZE, worst_s=25.0),
            trial(3, 31.0, worst_s=24.1),
            trial(4, 4.0, Fault.EXECUTOR_KILL, worst_s=24.0),
        ],
        verdict=Verdict(1, 2, 3, epochs=400, records=9000),
        policy="deadline",
        deadline_s=DEADLINE_S,
        confidence=0.999,
        seed=7,
        backend="heap",
        seconds=90.04,
        epochs=[
            EpochLine(n, 50_000 + n * 500, 100, 0.2, estimate_s=8.0, bound_s=10 + n / 20) for n in range(400)
        ],
        backups=[BackupLine(20, 60_000, 1.0), BackupLine(90, 95_000, 1.0, failed="TIMEOUT")],
    )


def test_an_outcome_has_the_forecast_that_stood_before_the_fault() -> None:
    found = outcome_of(struck(epoch=12), 10.0, FORECAST, DEADLINE_S, 0.999)
    assert found.by == "drill" and found.fault == "host" and found.epoch == 12
    assert found.estimated == Parts(1.0, 5.0, 0.5, 1.5) and found.bounds == {"0.99": 12.0, "0.999": 20.0}
    assert found.error == pytest.approx(0.2)


def test_the_summary_has_what_a_script_reads(drill: Drill) -> None:
    found = summary(drill)
    assert found["trials"] == 4
    assert found["misses"] == 1
    assert found["mean_abs_error"] == pytest.approx((2 / 10 + 8 / 16 + 23 / 31 + 4 / 4) / 4, abs=1e-4)
    assert found["under_bound"] == 2
    assert found["backups"] == 1, "one that failed does not count"
    assert found["near_deadline"] == 0.5
    assert found["host_near_deadline"] == 0.0
    assert (found["lost"], found["doubled"], found["different_states"]) == (1, 2, 3)
    assert (found["median_recovery_s"], found["longest_recovery_s"]) == (13.0, 31.0)
    assert (found["seed"], found["policy"], found["deadline_s"]) == (7, "deadline", 30.0)


def test_a_trial_is_one_flat_line_with_its_parts(drill: Drill) -> None:
    found = facts_of(drill.trials[2])
    assert found["trial"] == 3 and found["fault"] == "host" and found["missed"] is True
    assert found["recovery_s"] == 31.0 and found["estimate_s"] == 8.0 and found["caught_up_s"] is None
    assert found["measured"] == {"detection": 1.0, "environment": 29.0, "loading": 0.5, "recomputing": 0.5}


def test_what_is_backed_up_at_the_end_is_no_backup_of_the_deadline(drill: Drill) -> None:
    more = [*drill.backups, BackupLine(399, 99_000, 1.0, trigger="STOPPING")]
    assert summary(dataclasses.replace(drill, backups=more))["backups"] == 1


class Gone:
    """An experiment whose application does not come back from its second fault."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.victims, self.strikes = directory, self, 0
        self.shards_only = False

    def aim(self, fault: Fault, share: float, timeout_s: float) -> Aim:
        return Aim("somebody", lambda: None)

    def strike(self, fault: Fault, aim: Aim) -> Struck:
        self.strikes += 1
        return struck(fault, epoch=10 * self.strikes)

    def await_felt_recovery(self, struck: Struck, timeout_s: float) -> tuple[Struck, float]:
        if self.strikes == 2:
            raise StuckError("It was not back.")
        return struck, 5.0

    def tails(self) -> str:
        return ""


def test_a_recovery_that_does_not_end_is_a_miss_and_told_before_the_drill_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forecasts = {Fault.HOST.label: FORECAST}
    status = Status("p", "d", 1, 1, "h", state="running", forecasts=forecasts, bound_s=20.0, epoch=99)
    monkeypatch.setattr(drills, "read_status", lambda directory: status)
    told: list[Trial] = []
    blows = draw([Fault.HOST], 5, 1, (0.0, 0.0))
    with pytest.raises(StuckError):
        inflict(Gone(tmp_path), blows, deadline_s=30.0, confidence=0.999, tell=told.append)  # type: ignore[arg-type]
    assert [(t.stuck, t.missed) for t in told] == [(False, False), (True, True)]
    assert told[1].outcome.took_s == 120.0 and told[1].host_s == FORECAST.bound_s


def test_a_drill_that_was_cut_short_has_a_summary_and_a_report(drill: Drill) -> None:
    cut = dataclasses.replace(drill, verdict=None)
    found = summary(cut)
    assert found["misses"] == 1 and found["lost"] is None and found["epochs"] == 400
    assert "nothing was compared" in " ".join(told_in_words(cut))
    assert "nothing was compared" in render(cut)


def test_kinds_of_faults_are_told_apart(drill: Drill) -> None:
    hosts = next(one for one in by_fault(drill.trials) if one.fault == "host")
    assert (hosts.times, hosts.longest_s, hosts.missed, hosts.under_bound) == (2, 31.0, 1, 1)
    assert hosts.median_s == 20.5 and hosts.estimate_s == 8.0


def test_the_words_say_what_was_late_and_what_was_lost(drill: Drill) -> None:
    words = " ".join(told_in_words(drill))
    assert "1 was late" in words and "31.0 s" in words and "1 lost, 2 doubled, 3 states" in words
    kept = dataclasses.replace(drill, trials=drill.trials[:1])
    assert "none was late" in " ".join(told_in_words(kept))


def test_the_parts_are_those_that_the_run_saw_and_the_rest_is_the_environments(tmp_path: Path) -> None:
    told = outcome_of(struck(), 10.0, FORECAST, DEADLINE_S, 0.999)
    write_outcome(tmp_path, told)
    assert seen_inside(tmp_path, told).measured == Parts(environment=10.0), "the run did not notice"
    write_outcome(tmp_path, Outcome("worker-kill", 10, 0, 9.0, Parts(0.1, 5.9, 1.0, 2.0)))
    assert seen_inside(tmp_path, told).measured == Parts(1.0, 6.0, 1.0, 2.0)
    assert seen_inside(tmp_path, told).took_s == 10.0


def test_when_the_next_fault_came_before_the_backlog_was_worked_off_the_runs_own_word_counts(
    tmp_path: Path,
) -> None:
    told = outcome_of(struck(), 10.0, FORECAST, DEADLINE_S, 0.999)
    write_outcome(tmp_path, Outcome("host", 10, 0, 9.0, Parts(), caught_up_s=14.0))
    assert seen_inside(tmp_path, told).caught_up_s == 14.0
    told = msgspec.structs.replace(told, caught_up_s=15.0)
    assert seen_inside(tmp_path, told).caught_up_s == 15.0


def test_the_parts_never_come_to_more_than_the_recovery_took(tmp_path: Path) -> None:
    told = outcome_of(struck(), 4.0, FORECAST, DEADLINE_S, 0.999)
    write_outcome(tmp_path, told)
    write_outcome(tmp_path, Outcome("host", 10, 0, 9.0, Parts(0.1, 0.0, 1.0, 8.0)))
    assert seen_inside(tmp_path, told).measured == Parts(1.0, 0.0, 1.0, 2.0)


def test_epochs_and_backups_come_from_the_trace(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    trace.add(EpochLine(1, 1000, 10, 0.1))
    trace.add(BackupLine(1, 1100, 0.2))
    epochs, backups = recorded(tmp_path)
    assert [e.epoch for e in epochs] == [1] and [b.epoch for b in backups] == [1]
    assert recorded(tmp_path / "gone") == ([], [])


# The report


def test_the_report_is_one_file_that_needs_no_network(drill: Drill) -> None:
    pytest.importorskip("matplotlib")
    page = render(drill)
    assert page.count("<svg") == page.count("</svg>") == 4
    assert not re.search(r"https?:|//\w|<script|<link|@import|src=", page)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', page))


def test_the_report_says_what_the_drill_found(drill: Drill) -> None:
    pytest.importorskip("matplotlib")
    page = render(drill)
    for text in ("vehicle_map.py", "driver-freeze", "detection", "recomputing", "deadline", "backup", "31.0"):
        assert text in page
    assert "one &lt;of&gt; host" in page, "what comes from outside is escaped"
    assert "currentColor" in page and "#010203" not in page, "letters are in the page's colour"
    assert render(drill) == page


def test_a_drill_without_a_trace_has_a_report_too(drill: Drill) -> None:
    pytest.importorskip("matplotlib")
    bare = dataclasses.replace(drill, epochs=[], backups=[], trials=drill.trials[:1])
    assert "no epoch was recorded" in render(bare)


def test_a_report_without_matplotlib_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    check_report(None)
    with pytest.raises(MissingExtraError) as caught:
        check_report(Path("drill.html"))
    assert "pip install matplotlib" in str(caught.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--faults", "hots"], "no fault 'hots'"),
        (["--policy", "sometimes"], "no policy"),
        (["--deadline", "0s"], "deadline"),
        (["--pause", "soon"], "soon"),
        (["--report", "drill.pdf"], "no HTML file"),
    ],
)
def test_what_can_not_be_done_is_said_before_a_cluster_is_started(words: list[str], says: str) -> None:
    error = CliRunner().invoke(app, ["drill", "examples/wordcount.py", *words]).exception
    assert isinstance(error, ConfigError) and says in str(error) and error.remedy


def test_a_pause_for_a_backup_is_waiting_and_what_lasts_longer_is_not() -> None:
    """A worker killed while intake was paused had the rest of the pause in its recovery."""
    last_ms = EVERY_HALF_SECOND[-1]
    assert waiting_s(Fault.WORKER_KILL, last_ms + 100, last_ms + 3_000, EVERY_HALF_SECOND, 4.0) == 2.9
    assert waiting_s(Fault.WORKER_KILL, last_ms + 100, last_ms + 9_000, EVERY_HALF_SECOND, 4.0) == 4.4
