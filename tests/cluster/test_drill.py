"""`holdfast drill` as a user types it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

APP = Path(__file__).with_name("counted.py")
EXAMPLES = Path(__file__).parents[2] / "examples"


def drilled(folder: Path, app: Path, *words: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A drill's trials and its last line."""
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "drill", str(app), "--json", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    *trials, outcome = [json.loads(line) for line in ended.stdout.splitlines()]
    assert " left" in ended.stderr, "progress is on standard error"
    return trials, outcome


def test_a_small_drill_times_each_recovery_and_loses_nothing(tmp_path: Path) -> None:
    words = ["--faults", "worker-kill,executor-kill", "--trials", "2", "--deadline", "40s"]
    trials, outcome = drilled(tmp_path, APP, *words, "--pause", "1s..2s", "--seed", "5")
    assert {t["fault"] for t in trials} == {"worker-kill", "executor-kill"}
    assert all(0 < t["recovery_s"] < 120 and t["estimate_s"] > 0 for t in trials)
    assert all(t["bounds_s"]["0.99"] > t["estimate_s"] for t in trials)
    assert outcome["trials"] == 2 and outcome["policy"] == "deadline" and outcome["deadline_s"] == 40.0
    assert (outcome["lost"], outcome["doubled"], outcome["different_states"]) == (0, 0, 0)


@pytest.mark.slow
def test_a_drill_of_hosts_drivers_and_executors_writes_a_report_and_keeps_what_was_learned(
    tmp_path: Path,
) -> None:
    words = ["--faults", "host,driver-kill,executor", "--trials", "4", "--deadline", "60s", "--seed", "3"]
    trials, outcome = drilled(
        tmp_path, EXAMPLES / "vehicle_map.py", *words, "--report", "drill.html", "--folder", "home"
    )
    assert len({t["fault"] for t in trials}) == len(trials) == outcome["trials"] == 4
    assert (outcome["lost"], outcome["doubled"], outcome["different_states"]) == (0, 0, 0)
    page = (tmp_path / "drill.html").read_text()
    assert page.count("<svg") == 4 and "http" not in page
    assert all(abs(sum(t["measured"].values()) - t["recovery_s"]) < 0.1 for t in trials)
    outcomes = list((tmp_path / "home" / "dir" / "recoveries").glob("*.drill.json"))
    assert len(outcomes) == 4, "the pipeline is told of each"
    assert not (tmp_path / "out").exists(), "a drill must not write to the pipeline's own sinks"


@pytest.mark.slow
def test_windows_and_what_came_too_late_for_them_are_the_same_after_every_recovery(tmp_path: Path) -> None:
    words = ["--faults", "executor-kill,driver-kill", "--trials", "2", "--deadline", "30s", "--seed", "2"]
    trials, outcome = drilled(
        tmp_path, EXAMPLES / "speeds.py", *words, "--pause", "1s..2s", "--folder", "home"
    )
    assert {t["fault"] for t in trials} == {"executor-kill", "driver-kill"}
    assert (outcome["lost"], outcome["doubled"], outcome["different_states"]) == (0, 0, 0)
    assert outcome["misses"] == 0
    for sink in ("road-speeds", "late-reports"):
        assert pq.read_table(tmp_path / "home" / "out" / sink).num_rows > 0, sink


@pytest.mark.slow
def test_without_backups_a_deadline_that_is_missed_is_counted_and_no_error(tmp_path: Path) -> None:
    words = ["--faults", "host", "--trials", "1", "--deadline", "3s", "--policy", "never", "--seed", "1"]
    trials, outcome = drilled(tmp_path, APP, *words)
    assert outcome["misses"] == 1 and trials[0]["missed"] is True
    assert outcome["backups"] == 0 and outcome["near_deadline"] == 1.0
    assert (outcome["lost"], outcome["doubled"], outcome["different_states"]) == (0, 0, 0)
