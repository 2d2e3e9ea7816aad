"""The pure parts of `bench paper` and `bench deadline`: sizes, maps, forms, tables; nothing is measured here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from bench import deadline, paper, paper_figures
from bench.deadline_sides import Turns
from bench.machine import Kept, carried_over, carries, source_of
from bench.paper_app import MOST_TOUCHED_BYTES, Reports, Work, asked, drawn_first, redrawn, reports, sized
from bench.recoveries import Map, Setup
from holdfast.checkpoint.policy import Deadline, EveryEpochs, Never
from holdfast.config import parse_bytes, resolve
from holdfast.recovery.estimate import Learned
from holdfast.recovery.simulate import Run
from holdfast.recovery.trace import EpochLine

GB = 2**30


# The map


@pytest.mark.parametrize("size", ["1MB", "50MB", "0.75GB", "2.88GB", "10.6GB"])
def test_a_map_is_as_large_as_it_is_wanted_and_its_tiles_are_a_square(size: str) -> None:
    work = sized(parse_bytes(size))
    assert work.tiles == work.side**2
    assert 0 <= work.state_bytes - parse_bytes(size) < work.tiles
    assert work.tile_bytes <= 32 << 10


def test_an_epoch_redraws_a_share_of_a_small_map_and_bounded_bytes_of_a_large_one() -> None:
    assert sized(50 << 20, share=0.02).touched == round(0.02 * sized(50 << 20).tiles)
    large = sized(10 * GB)
    assert large.touched * large.tile_bytes <= MOST_TOUCHED_BYTES


def test_the_first_epochs_draw_every_tile_once() -> None:
    for work in (sized(2 << 20), Work(side=89, tile_bytes=2048)):
        found = reports(work, 0, work.tiles)["tile"].to_numpy()
        assert sorted(found) == list(range(work.tiles))


def test_epochs_after_that_touch_no_more_tiles_than_asked() -> None:
    work = sized(50 << 20, reports=5_000)
    first = work.tiles
    for _ in range(3):
        last = work.until(first)
        assert last - first == work.reports
        found = reports(work, first, last)
        assert 0 < len(np.unique(found["tile"].to_numpy())) <= work.touched
        assert found["at"].to_numpy().max() + 1024 <= work.tile_bytes
        first = last


def test_reports_are_the_same_however_they_are_cut() -> None:
    work = sized(4 << 20, reports=1_000)
    whole = reports(work, 100, 2_000)
    assert reports(work, 700, 900).equals(whole.slice(600, 200))


def test_the_source_offers_an_epoch_at_a_time_and_no_more_than_it_may() -> None:
    work = sized(4 << 20, reports=1_000)
    source = Reports(work)
    limit = hf.Limit(records=1_000_000, tasks=2, now_ms=0)
    offer = source.plan(None, limit)
    assert offer.ranges[0].start == 0 and offer.position == work.until(0)
    cut = source.plan(offer.position, hf.Limit(records=10, tasks=2, now_ms=0))
    assert sum(r.records for r in cut.ranges) == 10


def test_the_map_survives_the_way_through_the_environment() -> None:
    work = sized(64 << 20, reports=77, seed=5)
    assert asked(work.environment()) == work
    assert asked({}) == sized(4 << 20)


def test_a_tile_depends_on_the_order_of_its_reports() -> None:
    first = drawn_first(3, 4096, seed=1)
    assert first == drawn_first(3, 4096, seed=1) != drawn_first(4, 4096, seed=1)
    one = redrawn(redrawn(first, 0, 100), 512, 7)
    other = redrawn(redrawn(first, 512, 7), 0, 100)
    assert len(one) == 4096 and one != other


# What is run


def form(*words: str) -> paper.Form:
    return paper.form_of(paper.parser().parse_args(list(words)))


def test_without_arguments_the_small_form_is_run() -> None:
    assert form() == paper.SMALL
    assert form("--full").sizes == ("0.75GB", "2.88GB", "10.6GB") and form("--full").trials == 40


def test_a_large_state_gets_the_time_of_the_full_form() -> None:
    asked_for = form("--state-size", "0.75GB", "--trials", "5")
    assert (asked_for.sizes, asked_for.trials) == (("0.75GB",), 5)
    assert asked_for.draw_s == paper.FULL.draw_s
    assert form("--state-size", "20MB").draw_s == paper.SMALL.draw_s
    assert form("--state-size", "1GB", "--quick").lengths == paper.QUICK.lengths


def test_numbers_of_the_command_line_win() -> None:
    asked_for = form("--quick", "--lengths", "3,9", "--phase-time", "2m", "--rounds", "4", "--reports", "50")
    assert asked_for.lengths == (3, 9) and asked_for.phase_s == 120.0
    assert asked_for.rounds == 4 and asked_for.reports == 50


def test_a_setup_leaves_to_the_deadline_what_follows_from_it() -> None:
    settings = Setup(sized(1 << 20), "deadline", 70.0, more={"confidence": "0.99"}).settings()
    assert settings["executor_timeout"] is None and settings["confidence"] == "0.99"
    resolved = resolve({k: v for k, v in settings.items() if v is not None}, environment={}).settings
    assert resolved.executor_timeout_s == 10.0 and resolved.deadline_s == 70.0


def test_what_a_machine_does_not_carry_is_said_in_a_sentence() -> None:
    assert carries(GB, "heap", 24 * GB, 100 * GB) == ""
    assert "memory" in carries(20 * GB, "heap", 24 * GB, 500 * GB)
    assert "disk" in carries(20 * GB, "rocksdb", 24 * GB, 50 * GB)


def test_arguments_of_the_deadline_benchmark_win_over_its_sizes() -> None:
    chosen = deadline.parser().parse_args(["--rounds", "2", "--lengths", "50,10", "--deadline", "40s"])
    size = deadline.size_of(chosen)
    assert (size.rounds, size.lengths, size.deadline_s) == (2, (10, 50), 40.0)


@pytest.mark.parametrize("run", [paper.run, deadline.run])
def test_an_unknown_case_is_named_before_anything_is_started(run: Any) -> None:
    option = "--phases" if run is paper.run else "--cases"
    with pytest.raises(SystemExit, match="nonsense"):
        run([option, "nonsense"])


# A deadline from a recorded run


def recorded_run(deadline_s: float, epochs: int = 200) -> Run:
    learned = Learned()
    for _ in range(50):
        learned.epoch.learn([1.0, 100_000.0], 0.5)
        learned.upload.learn([1.0, 1e6], 0.5)
    lines = [
        EpochLine(n, 1_000 + 500 * n, 100_000, 0.5, state_bytes=10**7, new_bytes=10**6)
        for n in range(1, epochs + 1)
    ]
    return Run(lines, [], learned, deadline.notice_for(deadline_s), confidence=0.999, max_records=100_000)


def test_fewer_backups_ask_for_a_longer_deadline() -> None:
    often, seldom = (deadline.deadline_for(recorded_run, most) for most in (20, 4))
    assert often < seldom
    made = len(deadline.simulate(recorded_run(seldom), deadline.Deadline(), seldom).backups)
    assert 1 <= made <= 4


# What came of it


def series(size: str, policy: str, *took: float, **more: Any) -> dict[str, Any]:
    points = [
        {"trial": n, "epochs": 10 * n, "history": 5 * n, "recovery_s": t, "bound_s": 60.0}
        for n, t in enumerate(took, start=1)
    ]
    return {"size": size, "policy": policy, "deadline_s": 70.0, "points": points, **more}


RESULTS: dict[str, Any] = {
    "machine": {"cores": 2, "memory_gb": 24, "python": "3.11.7", "java": "17.0.15", "pyspark": "4.3.0"},
    "deadline_s": 70.0,
    "history": [series("50MB", "manual", 12.0, 90.5), series("50MB", "deadline", 11.0, 40.25)],
    "trials": [
        series("50MB", "120 epochs", 20.0, 80.0, run={"backups": 3}),
        series("50MB", "deadline", 15.0, 50.0, run={"backups": 7}),
    ],
    "peer": [
        {"size": "50MB", "who": "ours", "deadline_s": 70.0, "points": [{"restart_s": 9.0}]},
        {"size": "50MB", "who": "structured-streaming", "deadline_s": 70.0, "points": []},
    ],
    "skipped": [{"what": "10.6GB, deadline", "why": "It does not fit."}],
    "failed": [],
}


def test_the_table_has_a_row_a_series_with_its_spread() -> None:
    rows = paper.table(RESULTS)
    assert all(len(row) == len(paper.COLUMNS) for row in rows)
    assert rows[0] == ["history", "50MB", "manual", "2", "12.0", "51.2", "90.5", "1", ""]
    assert rows[3] == ["trials", "50MB", "deadline", "2", "15.0", "32.5", "50.0", "0", "7"]
    assert rows[5][3] == "0"


def test_the_page_is_filled_between_its_marks_and_again(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "paper.md"
    once = paper_figures.filled(page.read_text(), paper_figures.measured(RESULTS))
    assert "| 50MB | without the deadline | 20 | 10 | 90.5 | 60.0 |" in once
    assert "2 cores and 24 GB" in once and "10.6GB, deadline: It does not fit." in once
    assert paper_figures.filled(once, paper_figures.measured(RESULTS)) == once
    with pytest.raises(ValueError, match="once each"):
        paper_figures.filled("no marks", "text")


def test_figures_are_drawn_the_same_twice_and_copied_to_the_docs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "paper.md").write_text(f"# Page\n{paper_figures.BEGIN}\n{paper_figures.END}\n")
    drawn = paper_figures.draw(RESULTS, tmp_path / "plots")
    before = [file.read_bytes() for file in drawn]
    assert [file.read_bytes() for file in paper_figures.draw(RESULTS, tmp_path / "plots")] == before
    paper_figures.into_docs(RESULTS, tmp_path / "plots", docs)
    for name in (paper_figures.HISTORY, paper_figures.TRIALS):
        assert (docs / "img" / name).exists() and f"img/{name}" in (docs / "paper.md").read_text()


def test_results_are_kept_as_they_come(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "deep" / "paper.json", {"points": []})
    kept.results["points"].append(1)
    kept.write()
    assert json.loads(kept.file.read_text()) == {"points": [1]}


def test_phases_that_are_not_run_again_stay_and_other_conditions_put_results_aside(tmp_path: Path) -> None:
    def fresh(seed: int) -> dict[str, Any]:
        return {"seed": seed, "sizes": ("1GB",), "history": [], "peer": [], "skipped": [], "failed": []}

    file = tmp_path / "paper.json"
    failed = [{"phase": "peer", "why": "x"}, {"phase": "history", "why": "y"}]
    Kept(file, {**fresh(1), "history": [1], "peer": [2], "failed": failed}).write()
    again = fresh(1)
    carried_over(file, again, ("history", "peer"), ["peer"])
    assert (again["history"], again["peer"], again["failed"]) == ([1], [], failed[1:])
    other = fresh(2)
    carried_over(file, other, ("history", "peer"), ["peer"])
    assert other == fresh(2) and not file.exists()
    assert json.loads((tmp_path / "paper.previous.json").read_text())["history"] == [1]


def test_sizes_that_were_run_one_by_one_come_together_if_they_are_of_one_machine(tmp_path: Path) -> None:
    files = []
    for size, cores in (("0.75GB", 2), ("2.88GB", 2), ("10.6GB", 4)):
        found = {"machine": {"cores": cores}, "deadline_s": 70.0, "trials": [], "peer": [], "failed": []}
        files.append(tmp_path / f"{size}.json")
        files[-1].write_text(json.dumps({**found, "history": [{"size": size}], "skipped": [size]}))
    both = paper.together(files[:2])
    assert [s["size"] for s in both["history"]] == both["skipped"] == ["0.75GB", "2.88GB"]
    with pytest.raises(SystemExit, match="not of one machine"):
        paper.together(files)


def test_figures_are_of_another_source_once_any_file_is_another(tmp_path: Path) -> None:
    for name in ("src/a.py", "bench/b.py", "tests/c.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x = 1\n")
    names = [source_of(tmp_path)]
    for name, text in (("src/a.py", "x = 2\n"), ("bench/b.py", "x = 2\n"), ("src/new.py", "")):
        (tmp_path / name).write_text(text)
        names.append(source_of(tmp_path))
    assert len(set(names)) == len(names)
    (tmp_path / "tests/c.py").write_text("x = 2\n")
    assert source_of(tmp_path) == names[-1]


def test_throughput_counts_only_with_backups_at_least_as_often_as_asked() -> None:
    assert deadline.throughput_case([0.98, 0.99], [14.0, 16.0], 0.0, {}).met
    assert not deadline.throughput_case([0.95], [15.0], 0.0, {}).met
    assert deadline.throughput_case([0.99], [4.0], 0.0, {}).met
    assert not deadline.throughput_case([0.99], [24.0], 0.0, {}).met
    assert not deadline.throughput_case([0.99], [], 0.0, {}).met


def test_throughput_pays_for_every_pause_also_for_one_that_a_median_would_not_see() -> None:
    runs = [{"turns_paused_s": 3.0, "on_s": [40.0, 57.0]}, {"turns_paused_s": 0.0, "on_s": [100.0]}]
    assert deadline.paused_share(runs) == pytest.approx(0.015)
    case = deadline.throughput_case([0.98, 0.98, 0.98], [15.0], deadline.paused_share(runs), {})
    assert case.value == pytest.approx(0.98 * 0.985) and not case.met
    assert case.detail["without_pauses"] == 0.98


def test_a_curve_with_the_deadline_is_met_only_if_every_point_is_there_and_in_time() -> None:
    size = deadline.replace(deadline.QUICK, lengths=(10, 20), deadline_s=70.0)
    points = series("8MB", "deadline", 12.0, 69.0)["points"]
    assert deadline.history_case("deadline", points, size, {}).met
    assert not deadline.history_case("deadline", points[:1], size, {}).met
    late = series("8MB", "deadline", 12.0, 71.0)["points"]
    assert not deadline.history_case("deadline", late, size, {}).met
    without = deadline.history_case("manual", late, size, {})
    assert without.met and without.value == pytest.approx(71 / 12)
    assert (
        deadline.lines([without])[0].startswith("history-without") and "met" in deadline.lines([without])[0]
    )


def test_only_hosts_that_have_state_are_struck() -> None:
    there = SimpleNamespace(victims=SimpleNamespace(shards_only=False))
    Map(there, Setup(sized(1 << 20), "deadline", 70.0))  # type: ignore[arg-type]
    assert there.victims.shards_only


def test_the_profile_tells_epochs_beside_a_backup_from_the_others() -> None:
    epochs: list[dict[str, Any]] = [
        {"on": False, "beside": False, "s": 1.0, "workers": 1.8},
        {"on": True, "beside": True, "s": 1.2, "workers": 1.9, "uploader": 0.2},
        {"on": True, "beside": True, "s": 1.4, "workers": 1.7},
        {"on": True, "beside": False, "s": 1.1, "workers": 1.6},
    ]
    assert deadline.profile(epochs) == {
        "off": {"epochs": 1, "s": 1.0, "workers": 1.8, "uploader": 0.0},
        "on": {"epochs": 1, "s": 1.1, "workers": 1.6, "uploader": 0.0},
        "beside a backup": {"epochs": 2, "s": 1.3, "workers": 1.8, "uploader": 0.1},
    }
    assert deadline.profile([]) == {}


class FakeCoordinator:
    """As much of one as turns look at: a backup takes two epochs and is due by the policy that they set."""

    def __init__(self, natural: int) -> None:
        self.newest_epoch, self.epoch, self._natural = 0, 0, natural
        self._policy: Any = Never()
        self.pending_epoch: int | None = None
        self.begun: list[tuple[int, str]] = []

    def another(self) -> None:
        """An epoch passes."""
        self.epoch += 1
        if self.pending_epoch is not None and self.epoch >= self.pending_epoch + 2:
            self.newest_epoch, self.pending_epoch = self.pending_epoch, None
        every = {EveryEpochs: 1, Deadline: self._natural}.get(type(self._policy))
        if every is not None and self.pending_epoch is None and self.epoch - self.newest_epoch >= every:
            self.pending_epoch = self.epoch
            self.begun.append((self.epoch, type(self._policy).__name__))


def test_a_turn_with_backups_pays_for_one_each_time_that_one_comes() -> None:
    there, turns = FakeCoordinator(natural=12), Turns(3, 8, Deadline())
    while not turns.over:
        there.another()
        turns.ended(there, 100)  # type: ignore[arg-type]
        assert there.epoch < 500
    assert [on for on, _, _ in turns.found] == [False, True, False, True, False, True, False]
    lengths = [records // 100 for _, records, _ in turns.found]
    with_backups, without = lengths[1::2], lengths[2::2]
    assert without == with_backups, "as long as the turn before"
    assert all(12 <= length <= 14 for length in with_backups), "from one backup to the next, as they come"
    asked = [n for n, policy in there.begun if policy == "Deadline"]
    assert len(asked) == 3 and len(there.begun) == 7 - 1, "one of each turn, and one of nobody's before it"
    assert not any(e["beside"] for e in turns.epochs if not e["on"])


@pytest.mark.parametrize(
    ("backups", "simulated", "value", "met"),
    [(25, 30, 30 / 26, True), (30, 25, 30 / 26, True), (25, 32, 32 / 26, False), (19, 19, 19 / 26, False)],
)
def test_the_larger_of_what_was_made_and_what_the_policy_makes_in_hindsight_is_held_against_the_fewest(
    backups: int, simulated: int, value: float, met: bool
) -> None:
    last = {"deadline_s": 70.0, "fewest": 26, "backups": backups, "simulated": simulated}
    case = deadline.fewest_case(last, 20, {})
    assert (case.value, case.met) == (pytest.approx(value), met)
    for nothing in (None, 0):
        with pytest.raises(deadline.SideFailed, match="a deadline of 70 s"):
            deadline.fewest_case({**last, "fewest": nothing}, 20, {})
