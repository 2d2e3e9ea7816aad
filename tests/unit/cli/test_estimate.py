"""`holdfast estimate` and `holdfast explain` over what a run has learned, and what a drill teaches a directory."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.cli.drill import check_pupil
from holdfast.errors import ConfigError, DirectoryError, HoldfastError
from holdfast.faults.kinds import Fault
from holdfast.log.journal import Journal
from holdfast.log.records import Identity
from holdfast.metrics import Recovered, Status, write_status
from holdfast.recovery.estimate import (
    History,
    Learned,
    Memory,
    Notice,
    Outcome,
    Parts,
    Situation,
    covered,
    estimate,
)
from holdfast.recovery.memory import read_memory, teach, write_memory, write_outcome

NOTICE = Notice(worker_s=14.0, executor_s=10.0, executor_check_s=2.0, driver_s=10.0)
SURE = 0.999


def directory(folder: Path, situation: Situation, floor: Situation | None = None, **more: Any) -> Path:
    """The directory of a pipeline that has stood there when it was last heard of."""
    folder.mkdir(exist_ok=True)
    Journal.at(folder).create_identity(Identity("orders", 128, 2, "heap", {}))
    write_memory(folder, Memory(notice=NOTICE, situation=situation, floor=floor, deadline_s=70.0, **more))
    return folder


def told(*words: Any) -> Any:
    result = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def said(*words: Any) -> str:
    result = CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def bound(fault: Fault, there: Situation) -> float:
    return estimate(fault, there, Learned(), NOTICE).bound(SURE)


def test_estimate_has_a_row_for_each_fault_and_how_well_earlier_ones_were_foretold(tmp_path: Path) -> None:
    there = Situation(History(20, 100_000), planned=5000, stored_bytes=10**8)
    directory(tmp_path, there)
    took = Outcome("host", 7, 1, 20.0, Parts(), Parts(environment=18.0), {"0.99": 30.0}, 70.0)
    write_outcome(tmp_path, took)
    found = told("estimate", tmp_path)
    assert [row["fault"] for row in found["faults"]] == [fault.label for fault in covered(NOTICE)]
    host = next(row for row in found["faults"] if row["fault"] == "host")
    assert host["bound"] == pytest.approx(bound(Fault.HOST, there))
    parts = sum(host[part] for part in ("detection", "environment", "loading", "recomputing"))
    assert host["estimate"] == pytest.approx(parts)
    assert found["calibration"] == {"recoveries": 1, "mean_abs_error": pytest.approx(0.1), "under_0.99": 1.0}
    text = said("estimate", tmp_path)
    assert "executor-freeze" in text and "off by 10% in the mean; 100% under the 99.0% bound" in text
    less = told("estimate", tmp_path, "--confidence", 0.9)["faults"]
    assert all(a["bound"] < b["bound"] for a, b in zip(less, found["faults"], strict=True))


@pytest.mark.parametrize("confidence", [0, 0.4, 1, 7])
def test_what_is_no_confidence_is_refused(tmp_path: Path, confidence: float) -> None:
    directory(tmp_path, Situation())
    result = CliRunner().invoke(app, ["estimate", str(tmp_path), "--confidence", str(confidence)])
    assert isinstance(result.exception, ConfigError) and "is no confidence" in str(result.exception)


@pytest.mark.parametrize("command", ["estimate", "explain"])
def test_a_directory_that_has_learned_nothing_says_what_to_do(tmp_path: Path, command: str) -> None:
    Journal.at(tmp_path).create_identity(Identity("orders", 128, 2, "heap", {}))
    result = CliRunner().invoke(app, [command, str(tmp_path)])
    assert isinstance(result.exception, HoldfastError) and "Nothing was learned" in str(result.exception)


def test_a_deadline_that_holds_is_said_to(tmp_path: Path) -> None:
    directory(tmp_path, Situation(), Situation(History(1, 1), 1))
    found = told("explain", tmp_path)
    assert found["held"] and found["feasible"] and found["bound_s"] <= 70
    assert f"holds now: recovery takes at most {found['bound_s']:.1f} s" in said("explain", tmp_path)
    assert "can't be held" in said("explain", tmp_path, "--deadline", "5s")


def test_a_history_that_is_too_long_is_a_backup_away_from_the_deadline(tmp_path: Path) -> None:
    there = Situation(History(5000, 30_000_000), planned=5000, stored_bytes=10**6)
    floor = Situation(History(1, 100), planned=100, stored_bytes=10**6)
    directory(tmp_path, there, floor)
    found = told("explain", tmp_path)
    assert not found["held"] and found["feasible"] and found["fault"] == "host"
    text = said("explain", tmp_path)
    assert "is not held now: after host" in text and "A backup now buys" in text
    assert f"Once state is backed up it is {found['floor_s']:.1f} s at the most." in text


def test_what_no_backup_can_help_is_not_said_to_hold(tmp_path: Path) -> None:
    """Nothing is stored yet, so nothing would be loaded now: `explain` said that it holds, and the log that it can't be."""
    floor = Situation(History(1, 1), planned=1, stored_bytes=40 << 30)
    directory(tmp_path, Situation(), floor)
    found = told("explain", tmp_path)
    assert not found["feasible"] and found["fault"] == "host" and found["largest"] == "loading"
    text = said("explain", tmp_path)
    assert "can't be held: after host (" in text and f"recovery may take {found['bound_s']:.1f} s" in text
    assert "A backup now" not in text and "Twice as many hosts" in text


def test_every_fault_that_is_too_long_is_named(tmp_path: Path) -> None:
    directory(tmp_path, Situation(), Situation(History(1, 1), 1))
    worst = sorted(((bound(f, Situation(History(1, 1), 1)), f.label) for f in covered(NOTICE)), reverse=True)
    text = said("explain", tmp_path, "--deadline", f"{worst[2][0] + 0.01:.3f}s")
    assert f"after {worst[0][1]} (" in text and f", after {worst[1][1]} {worst[1][0]:.1f} s." in text


# What a drill teaches


def drilled(folder: Path, times: int) -> Path:
    """The directory of a drill in which a host was lost so often, and was always back after 15 s."""
    folder.mkdir()
    learned = Learned()
    for _ in range(times):
        learned.recovered(Fault.HOST, 15.0)
        learned.epoch.learn([1.0, 1000.0], 2.0)
        learned.fetch.learn([1.0, 1e6, 1.0], 0.01)
    write_memory(folder, learned.memory())
    return folder


def test_a_drill_teaches_what_died_takes_to_stand_and_not_how_fast_its_disk_was(tmp_path: Path) -> None:
    pupil = directory(tmp_path / "dir", Situation(), outcomes=["00000007"])
    assert teach(pupil, drilled(tmp_path / "drill", 8)) == 8
    memory = read_memory(pupil)
    assert memory is not None and memory.outcomes == ["00000007"] and memory.deadline_s == 70.0
    known, new = Learned(memory), Learned()
    assert known.times_seen(Fault.HOST) == 8
    assert known.environment(Fault.HOST).mean == pytest.approx(15.0, rel=0.05)
    assert known.environment(Fault.HOST).bound(SURE) < new.environment(Fault.HOST).bound(SURE)
    assert known.environment(Fault.DRIVER_KILL) == new.environment(Fault.DRIVER_KILL)
    assert known.epoch.weights == new.epoch.weights and known.fetch.weights == new.fetch.weights


def test_drills_add_up_with_what_a_directory_has_seen_itself(tmp_path: Path) -> None:
    pupil = drilled(tmp_path / "dir", 3)
    teach(pupil, drilled(tmp_path / "drill", 5))
    memory = read_memory(pupil)
    assert memory is not None and memory.counts == {"host": 8}
    assert memory.seen["environment.host"].count == 8 and memory.seen["epoch"].count == 3


def test_a_drill_that_has_learned_nothing_teaches_nothing(tmp_path: Path) -> None:
    pupil = directory(tmp_path / "dir", Situation())
    before = read_memory(pupil)
    assert teach(pupil, tmp_path) == 0 and read_memory(pupil) == before


def test_only_a_directory_of_this_pipeline_in_which_nobody_lives_is_taught(tmp_path: Path) -> None:
    directory(tmp_path, Situation())
    check_pupil(tmp_path, "orders")
    with pytest.raises(ConfigError, match="of the pipeline 'orders', and the drill of 'speeds'"):
        check_pupil(tmp_path, "speeds")
    write_status(tmp_path, Status("orders", str(tmp_path), 1, 1, "elsewhere", "running"))
    with pytest.raises(DirectoryError, match="in use") as caught:
        check_pupil(tmp_path, "orders")
    assert "holdfast stop" in caught.value.remedy
    with pytest.raises(DirectoryError, match="no directory"):
        check_pupil(tmp_path / "none", "orders")


def test_status_says_what_the_last_recovery_took(tmp_path: Path) -> None:
    directory(tmp_path, Situation())
    last = Recovered("host", 1, 14.94, 17.1, 60.0, 70.0, 21.0)
    write_status(tmp_path, Status("orders", str(tmp_path), 1, 1, "elsewhere", "stopped", recovered=last))
    text = said("status", tmp_path)
    assert "last fault" in text and "14.9 s, 17.1 s estimated; caught up after 21.0 s" in text
    assert told("status", tmp_path)["recovered"]["took_s"] == 14.94
