"""What policies would have cost over a run, against the least, and the command that shows it."""

import itertools
import json
import math
import random
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from holdfast.checkpoint.policy import Never, parse_policy
from holdfast.cli.app import app
from holdfast.cli.simulate import _notice
from holdfast.config import resolve
from holdfast.errors import ConfigError, DirectoryError, MissingExtraError
from holdfast.faults.kinds import Fault
from holdfast.recovery.estimate import History, Learned, Notice
from holdfast.recovery.simulate import Run, clairvoyant, simulate, taught
from holdfast.recovery.trace import FILE, BackupLine, EpochLine, Trace

ROOT = Path(__file__).resolve().parents[2]
NOTICE = Notice(worker_s=8.0, executor_s=5.0, executor_check_s=1.0, driver_s=5.0, host_s=3.0)
FAULTS = [Fault.WORKER_FREEZE, Fault.HOST]
POLICIES = ["deadline", "every-epoch", "3 epochs", "2s", "30s", "young-daly 1h", "never"]


def learned(upload_s: float = 0.5, each_s: float = 1e-4) -> Learned:
    """Of epochs that cost a tenth of a millisecond a record, so that a few of them matter."""
    found = Learned()
    for records in (100, 5000, 20_000) * 10:
        found.epoch.learn([1.0, float(records)], 0.1 + records * each_s)
        found.replay.learn(found.replay_features(History(5, 5 * records)), 0.2 + 5 * records * each_s)
        found.upload.learn([1.0, records * 100.0], upload_s + records * 100 / 50e6)
        found.recovered(Fault.DRIVER_KILL, 8.0)
        found.recovered(Fault.EXECUTOR_KILL, 4.0)
    return found


def epochs_of(records: Sequence[int], gaps_s: Sequence[float], first: int = 1) -> list[EpochLine]:
    lines, at_s, state = [], 1000.0, 0
    for number, (count, gap_s) in enumerate(zip(records, gaps_s, strict=True), start=first):
        at_s += gap_s
        state += count * 20
        lines.append(
            EpochLine(
                number,
                int(at_s * 1000),
                count,
                min(gap_s, 0.1 + count * 1e-4),
                state,
                state,
                state // 2,
                count * 100,
            )
        )
    return lines


def run_of(
    records: Sequence[int], gaps_s: Sequence[float], knows: Learned | None = None, first: int = 1
) -> Run:
    lines = epochs_of(records, gaps_s, first)
    return Run(lines, [], knows or learned(), NOTICE, confidence=0.999, max_records=500_000, faults=FAULTS)


def holds(run: Run, versions: Sequence[int], deadline_s: float) -> bool:
    """Whether backups of exactly these versions hold the bound: worked out step by step, on its own."""
    newest, uploading, at_s = -1, None, run.times_s
    for at in range(-1, len(run.epochs)):
        now_s = at_s[at] if at >= 0 else 0.0
        if uploading is not None and uploading[1] <= now_s:
            newest, uploading = uploading[0], None
        if at in versions:
            if uploading is not None:
                return False
            new_bytes = sum(e.new_bytes for e in run.epochs[newest + 1 : at + 1])
            uploading = (at, now_s + run.upload_s(new_bytes))
        history = History(at - newest, sum(e.records for e in run.epochs[newest + 1 : at + 1]))
        planned = run.epochs[at + 1].records if at + 1 < len(run.epochs) else 0
        if run.bound(at, run.stored_bytes(newest), history, planned) > deadline_s:
            return False
    return True


def fewest(run: Run, deadline_s: float) -> int | None:
    """By trying all of them."""
    size = len(run.epochs)
    for count in range(size + 1):
        for versions in itertools.combinations(range(size), count):
            if holds(run, versions, deadline_s):
                return count
    return None


FLOOR_S = run_of([0], [1.0]).bound(0, 0, History(), 0)
runs = st.lists(
    st.tuples(st.sampled_from([0, 2000, 6000, 9000, 30_000]), st.sampled_from([0.2, 0.5, 1.0, 4.0])),
    min_size=1,
    max_size=9,
)


def between(run: Run, share: float) -> float:
    """A deadline between what holds with nothing to replay, and what holds without any backup."""
    most = simulate(run, parse_policy("never"), 1.0).worst_s
    least = max(run.bound(at, 0, History(), e.records) for at, e in enumerate(run.epochs))
    return least + share * (most - least)


@settings(max_examples=150, deadline=None)
@given(runs, st.floats(0, 1.02), st.sampled_from([0.02, 0.3, 1.0]), st.sampled_from([1, 8]))
def test_the_clairvoyant_minimum_is_what_trying_everything_finds(
    drawn: list[tuple[int, float]], share: float, upload_s: float, first: int
) -> None:
    run = run_of([r for r, _ in drawn], [g for _, g in drawn], learned(upload_s), first)
    deadline_s = between(run, share)
    assert clairvoyant(run, deadline_s) == fewest(run, deadline_s)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(1, 40), st.sampled_from(POLICIES))
def test_no_policy_that_keeps_the_deadline_needs_fewer_backups_than_the_clairvoyant(
    seed: int, above_s: float, policy: str
) -> None:
    draw = random.Random(seed)
    size = draw.randrange(1, 80)
    run = run_of(
        [draw.choice([0, 300, 3000, 15_000]) for _ in range(size)],
        [draw.choice([0.3, 0.5, 2.0]) for _ in range(size)],
    )
    least = clairvoyant(run, FLOOR_S + above_s)
    result = simulate(run, parse_policy(policy), FLOOR_S + above_s)
    through = [b for b in result.backups if b.begun_s + b.took_s <= result.run_s]
    if result.kept and not result.paused_s and not result.cut:
        assert least is not None and len(through) >= least
    pairs = itertools.pairwise(result.backups)
    assert all(a.begun_s + a.took_s <= b.begun_s + 1e-9 for a, b in pairs), "never two at once"
    assert result.new_bytes <= sum(e.new_bytes for e in run.epochs), "nothing is uploaded twice"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(3, 60))
def test_the_deadline_policy_keeps_what_can_be_kept(seed: int, above_s: float) -> None:
    """State is small here: what a first backup adds to the time of loading is the guard's to foresee."""
    draw = random.Random(seed)
    records = [draw.choice([0, 300, 3000, 15_000]) for _ in range(60)]
    run = run_of(records, [draw.choice([0.3, 0.5, 2.0]) for _ in records], first=5)
    deadline_s = FLOOR_S + 3 + above_s
    result = simulate(run, parse_policy("deadline"), deadline_s)
    least = clairvoyant(run, deadline_s)
    if least is not None:
        assert result.kept and result.worst_s <= deadline_s
        assert len(result.backups) >= least or result.paused_s or result.cut


def test_a_first_backup_of_much_state_is_foreseen() -> None:
    """What a backup adds to the time of loading came as a surprise: the first one broke the deadline."""
    lines = [
        msgspec.structs.replace(e, state_bytes=10**9, host_bytes=10**9)
        for e in epochs_of([3000] * 400, [0.5] * 400)
    ]
    run = Run(lines, [], learned(), NOTICE, confidence=0.999, max_records=500_000, faults=[Fault.HOST])
    loaded_s = run.host_bound(10**9, History(1, 3000), 3000)
    result = simulate(run, parse_policy("deadline"), loaded_s + 15)
    assert result.backups and result.kept


def test_a_fault_that_no_backup_helps_against_does_not_end_all_backups() -> None:
    slow = msgspec.structs.replace(NOTICE, worker_s=500.0)
    lines = epochs_of([3000] * 400, [0.5] * 400)
    run = Run(lines, [], learned(), slow, confidence=0.999, max_records=500_000, faults=FAULTS)
    deadline_s = run.host_bound(0, History(1, 3000), 3000) + 20
    result = simulate(run, parse_policy("deadline"), deadline_s)
    assert not result.kept and result.backups
    newest = max(b.begun_s for b in result.backups)
    assert newest > run.times_s[-100], "to the end"


def test_a_policy_costs_what_its_uploads_take_and_history_starts_anew_at_their_version() -> None:
    run = run_of([1000] * 100, [0.5] * 100)
    never = simulate(run, parse_policy("never"), 60.0)
    often = simulate(run, parse_policy("every-epoch"), 60.0)
    tens = simulate(run, parse_policy("10 epochs"), 60.0)
    timed = simulate(run, parse_policy("5s"), 60.0)
    assert never.backups == [] and never.overhead == 0.0
    assert [b.epoch for b in tens.backups][:3] == [10, 20, 30]
    assert [b.epoch for b in timed.backups][:2] == [11, 21], "the first epoch took less"
    assert often.worst_s < tens.worst_s < never.worst_s
    assert often.overhead > tens.overhead > 0 and often.overhead <= 1.01
    assert tens.run_s == pytest.approx(run.run_s) == pytest.approx(49.6 + 0.2, abs=0.5)
    grown = [bound for _, bound in never.curve]
    assert grown == sorted(grown), "history only grows"


def test_young_and_daly_wait_longer_the_rarer_faults_are() -> None:
    run = run_of([1000] * 400, [0.5] * 400)
    counts = [len(simulate(run, parse_policy(f"young-daly {m}"), 60.0).backups) for m in ("1m", "1h", "24h")]
    assert counts[0] > counts[1] > counts[2] == 0


def test_the_deadline_policy_backs_up_less_the_longer_the_deadline() -> None:
    run = run_of([2000] * 600, [0.5] * 600)
    above = [4.0, 10.0, 30.0, 1000.0]
    results = [simulate(run, parse_policy("deadline"), FLOOR_S + 3 + more) for more in above]
    counts = [len(r.backups) for r in results]
    assert counts == sorted(counts, reverse=True) and counts[-1] == 0 < counts[-2] < counts[0]
    assert all(r.kept for r in results)
    least = [clairvoyant(run, FLOOR_S + 3 + more) for more in above]
    assert all(few is not None and few <= count for few, count in zip(least, counts, strict=True))


def test_a_burst_is_cut_and_the_run_grows_by_what_the_pieces_cost() -> None:
    run = run_of([2000] * 40 + [400_000] + [2000] * 40, [0.5] * 81)
    deadline_s = FLOOR_S + 20
    assert clairvoyant(run, deadline_s) is None, "whole, it is too much"
    result = simulate(run, parse_policy("deadline"), deadline_s)
    assert result.kept and result.cut > 0 and result.run_s > run.run_s
    assert not simulate(run, parse_policy("every-epoch"), deadline_s).kept


def test_pauses_of_the_recorded_run_are_no_time_of_another_policy() -> None:
    epochs = epochs_of([1000] * 10, [1.0] * 10)
    run = run_of([1000] * 10, [1.0] * 10)
    late = [
        msgspec.structs.replace(e, at_ms=e.at_ms + 5000 * (n >= 4), paused_s=5.0 if n == 4 else 0.0)
        for n, e in enumerate(epochs)
    ]
    paused = Run(late, [], learned(), NOTICE, confidence=0.999, max_records=500_000, faults=FAULTS)
    assert paused.times_s == pytest.approx(run.times_s)
    assert simulate(paused, Never(), 70.0).run_s == pytest.approx(simulate(run, Never(), 70.0).run_s)


def test_a_run_without_epochs_costs_nothing() -> None:
    run = run_of([], [])
    assert clairvoyant(run, 10.0) == 0
    assert simulate(run, parse_policy("deadline"), 10.0).backups == []


def test_what_was_not_kept_is_learned_from_the_trace() -> None:
    lines = epochs_of([1000, 5000, 20_000] * 20, [3.0] * 60)
    found = taught(lines, [BackupLine(5, 0, 2.0, 10**8), BackupLine(6, 0, 99.0, 0, failed="STORE")])
    assert found.epoch.predict([1.0, 10_000.0]).mean == pytest.approx(1.1, rel=0.05)
    assert found.upload.seen.count == 1


# The command


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A directory with the trace of two minutes."""
    draw = random.Random(7)
    trace = Trace(tmp_path)
    for line in epochs_of([draw.randrange(1500, 2500) for _ in range(240)], [0.5] * 240):
        trace.add(line)
        if line.epoch % 60 == 0:
            trace.add(BackupLine(line.epoch, line.at_ms, 0.9, 10**7, 10**7, trigger="INTERVAL"))
    (tmp_path / "recovery.json").write_bytes(msgspec.json.encode(learned().memory()))
    return tmp_path


def call(*words: Any) -> Any:
    return CliRunner().invoke(app, ["simulate", *map(str, words)], env={"COLUMNS": "160"})


def test_the_command_shows_each_policy_beside_the_least(recorded: Path) -> None:
    done = call(recorded, "--deadlines", "40s,70s")
    assert done.exit_code == 0, done.output
    for word in ("deadline 40 s", "deadline 70 s", "every-epoch", "young-daly 24h", "never", "clairvoyant"):
        assert word in done.output
    assert "240 epochs" in done.output and "4 backups" in done.output


@pytest.mark.slow
def test_the_guide_shows_what_the_command_prints_of_its_made_up_run(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "tools" / "made_up_run.py", tmp_path / "run"], check=True)
    printed = call(tmp_path / "run", "--deadlines", "20s,40s,70s").output
    page = (ROOT / "docs" / "guide" / "simulate.md").read_text()
    shown = page.split("--deadlines 20s,40s,70s\n3,600", 1)[1].split("```", 1)[0]
    assert [line.rstrip() for line in printed.strip().splitlines()] == f"3,600{shown}".strip().splitlines()


def test_the_command_prints_one_json_object(recorded: Path) -> None:
    done = call(recorded, "--deadlines", "40s, 70s", "--policies", "deadline,never", "--json")
    found = json.loads(done.output)
    assert [d["deadline_s"] for d in found["deadlines"]] == [40.0, 70.0]
    assert found["epochs"] == 240 and found["recorded"]["backups"] == 4
    tight = found["deadlines"][0]
    assert [p["policy"] for p in tight["policies"]] == ["deadline", "never"]
    ours, never = tight["policies"]
    assert ours["kept"] and ours["backups"] >= tight["clairvoyant"] > 0
    assert ours["worst_s"] <= 40.0 < never["worst_s"] and not never["kept"] and never["over"] > 0


def test_faults_that_no_backup_helps_against_are_named_and_can_be_left_out(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_WORKER_TIMEOUT", "120s")
    done = call(recorded, "--deadlines", "70s", "--policies", "deadline,every-epoch")
    assert done.exit_code == 0 and "yes" not in done.output
    assert "No backup helps against: worker-freeze (12" in done.output
    found = json.loads(call(recorded, "--deadlines", "70s", "--json").output)["deadlines"][0]
    assert list(found["beyond_backups"]) == ["worker-freeze"] and found["clairvoyant"] is None
    assert not any(policy["kept"] for policy in found["policies"])
    rest = done.output.split("--faults ")[1].split(".")[0]
    found = json.loads(call(recorded, "--deadlines", "70s", "--faults", rest, "--json").output)["deadlines"][
        0
    ]
    assert found["beyond_backups"] == {} and found["policies"][0]["kept"]


def test_the_plot_has_a_panel_a_deadline_and_a_line_a_policy(recorded: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plots" / "cost.svg"
    done = call(recorded, "--deadlines", "40s,70s", "--plot", file)
    assert done.exit_code == 0 and str(file) in done.output.replace("\n", "")
    text = file.read_text()
    assert ET.fromstring(text).tag.endswith("svg")
    for word in ("deadline 40 s", "deadline 70 s", "every-epoch", "young-daly 24h"):
        assert f"<!-- {word}" in text


def test_without_matplotlib_the_extra_is_named(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    error = call(recorded, "--deadlines", "70s", "--plot", "cost.svg").exception
    assert isinstance(error, MissingExtraError) and "pip install matplotlib" in (error.remedy or "")


@pytest.mark.parametrize(
    ("words", "kind", "says"),
    [
        (["--deadlines", "soon"], ConfigError, "soon"),
        (["--deadlines", ""], ConfigError, "deadline"),
        (["--deadlines", "0s"], ConfigError, "0s"),
        (["--deadlines", "10s", "--policies", "sometimes"], ConfigError, "sometimes"),
        (["--deadlines", "10s", "--faults", "flood"], ConfigError, "flood"),
        (["--deadlines", "10s", "--confidence", "1.5"], ConfigError, "1.5"),
        (["--deadlines", "10s", "--plot", "cost.txt"], ConfigError, ".svg"),
    ],
)
def test_what_can_not_be_read_is_said_with_a_remedy(
    recorded: Path, words: list[str], kind: type[ConfigError], says: str
) -> None:
    error = call(recorded, *words).exception
    assert isinstance(error, kind) and says in f"{error}" and error.remedy


def test_a_directory_without_a_trace_is_said(tmp_path: Path) -> None:
    error = call(tmp_path, "--deadlines", "10s").exception
    assert isinstance(error, DirectoryError) and FILE in error.message and error.remedy
    gone = call(tmp_path / "gone", "--deadlines", "10s").exception
    assert isinstance(gone, DirectoryError) and gone.remedy


@pytest.mark.parametrize(("restart", "again"), [("none", False), ("exponential", True), ("rate 1 10m", True)])
def test_a_driver_that_nobody_starts_again_is_not_simulated_to_come_back(restart: str, again: bool) -> None:
    notice = _notice(resolve({"restart": restart}, environment={}).settings)
    assert (notice.driver_s is not None) is again and math.isfinite(notice.restart_s)
