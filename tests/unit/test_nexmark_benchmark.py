"""`bench nexmark` without Spark: what is asked for, how it is counted, and what the JSON holds."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import holdfast as hf
from bench.machine import Kept
from bench.nexmark import Config, NexmarkSource, benchmark, oracle
from bench.nexmark.benchmark import (
    LEFT_OUT,
    LIMITS,
    Result,
    Truth,
    arguments,
    last_gap_s,
    settle,
    summary,
    table,
    their_check,
)
from bench.nexmark.files import Prepared, prepare
from bench.nexmark.queries import build
from bench.nexmark.side import sources, speed
from bench.peers import structured_streaming_nexmark as peer
from bench.peers.environments import PeerError
from tests.drivers import live


def test_without_arguments_it_is_all_that_is_asked_for() -> None:
    plan, peers, as_json = arguments([])
    assert (plan.events, plan.epochs, plan.queries, peers, as_json) == (
        1_000_000,
        4,
        tuple(oracle.QUERIES),
        True,
        False,
    )
    assert (plan.source, plan.parallelism, plan.rounds, plan.crash) == ("files", (2,), 3, True)
    assert plan.check_parallelism == (1, 4)
    assert (plan.per_file, plan.files, plan.their_files) == (25_000, (10, 20), (10, 20))
    assert json.loads(json.dumps(asdict(plan)))["events"] == 1_000_000


def test_what_is_asked_for_is_run() -> None:
    asked = (
        "--json --events 3000 --per-file 100 --files 1 --queries q3,q5 --rounds 2 --parallelism 1,2,4 --crash"
    )
    plan, peers, as_json = arguments([*asked.split(), "--no-peers"])
    assert (plan.queries, plan.rounds, plan.parallelism, plan.crash) == (("q3", "q5"), 2, (1, 2, 4), True)
    assert (peers, as_json, plan.epochs) == (False, True, 30)


def test_the_commands_that_the_docs_print_can_be_run() -> None:
    page = (Path(benchmark.__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    found = [shlex.split(line.split("#")[0]) for line in page.splitlines() if "-m bench nexmark" in line]
    commands = [words[words.index("nexmark") + 1 :] for words in found if words[0].endswith("python")]
    assert len(commands) >= 4
    for command in commands:
        plan = arguments(command)[0]
        assert all(plan.batches(files) >= 2 for files in (*plan.files, *plan.their_files))


@pytest.mark.parametrize("events", [400, 1_000, 20_000, 100_000, 123_456, 10_000_000])
def test_files_fit_the_number_of_events(events: int) -> None:
    plan = arguments(["--events", str(events)])[0]
    assert plan.per_file % 50 == 0
    assert plan.files and plan.their_files
    assert all(plan.batches(files) >= 2 for files in (*plan.files, *plan.their_files))
    assert events < 1_000 or 20 <= plan.batches(1) <= 60


def test_what_leaves_fewer_than_two_batches_is_left_out() -> None:
    events = ["--events", "1000", "--per-file", "100"]
    plan = arguments([*events, "--files", "4,5,10", "--their-files", "10,20,1"])[0]
    assert (plan.files, plan.their_files) == ((4, 5), (1,))
    assert arguments([*events, "--their-files", "10", "--no-peers"])[0].their_files == ()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("--queries q3,q99", "unknown queries: q99"),
        ("--per-file 60", "multiple of 50"),
        ("--events 50", "at least two"),
        ("--events 1000 --per-file 100 --their-files 10", "at least two"),
        ("--files 0", "at least 1"),
        ("--stores disk", "unknown stores: disk"),
        ("--rounds 0", "at least 1"),
    ],
)
def test_what_has_no_sense_is_told(asked: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(asked.split())
    assert said in " ".join(capsys.readouterr().err.split())


def test_it_is_found_by_its_name() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "nexmark", "--help"],
        cwd=Path(benchmark.__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--crash" in done.stdout


# Speed


def test_what_is_read_before_a_side_is_warm_and_what_reads_nothing_is_not_counted() -> None:
    assert speed(1_000, [(10.0, 46), (11.0, 46), (13.0, 92), (25.0, 0)]) == {
        "events_per_s": 250,
        "seconds": 3.0,
        "epochs": [46, 46, 92],
    }
    small_first = [(10.0, 2), (11.0, 8), (12.0, 40), (13.0, 50), (15.0, 100)]
    assert speed(2_000, small_first)["events_per_s"] == round(2_000 * 150 / 200 / 3)
    assert speed(100, [(10.0, 1), (12.0, 9)])["events_per_s"] == 45, "there is nothing behind it otherwise"
    assert speed(1_000, [(10.0, 46)])["events_per_s"] is None


def test_theirs_are_counted_alike() -> None:
    batches = [
        {"timestamp": f"2024-01-01T00:00:{at:02d}.000Z", "batchDuration": 1_000, "numInputRows": rows}
        for at, rows in ((9, 46), (10, 46), (12, 92), (20, 1), (24, 0))
    ]
    assert peer.speed(1_000, batches) == {"records_per_s": 250, "seconds": 3.0}
    batches[0]["numInputRows"] = 10
    assert peer.speed(1_480, batches)["records_per_s"] == round(1_480 * 92 / 148 / 2)
    with pytest.raises(SystemExit, match="two batches"):
        peer.speed(1_000, batches[:1])


# Results


def result(query: str, mine: list[float], other: dict[str, list[float]], **facts: Any) -> Result:
    found = Result(
        query, 2, oracle.QUERIES[query].stateful, "", **{"equal": True, "theirs_equal": True, **facts}
    )
    found.spread = {
        "ours": [],
        "theirs": [],
        **({"ours 4": mine} if mine else {}),
        **{f"theirs {mode}": values for mode, values in other.items()},
    }
    settle(found)
    return found


def test_medians_are_compared_and_the_best_mode_of_theirs_counts() -> None:
    found = result("q3", [300, 100, 200], {"hdfs 4": [50, 40, 45], "rocksdb 4": [100, 20, 10]})
    assert (found.ours, found.theirs, found.mode, found.ratio) == (200, 45, "hdfs 4", 4.44)
    assert found.modes == {"hdfs 4": 45, "rocksdb 4": 20}
    assert found.spread["theirs"] == [50, 40, 45]


def test_the_best_choice_of_ours_counts_too() -> None:
    found = result("q3", [300, 100, 200], {"hdfs 4": [100]})
    found.spread["ours 10"] = [250, 240, 245]
    settle(found)
    assert (found.ours, found.our_mode, found.ratio) == (245, "10", 2.45)
    assert found.our_modes == {"4": 200, "10": 245}
    assert found.spread["ours"] == [250, 240, 245]
    found.spread["ours 20"] = [900]
    settle(found)
    assert (found.ours, found.our_mode) == (245, "10"), "one that was given up has been measured once"


def test_there_is_no_ratio_where_a_side_is_wrong_or_not_there() -> None:
    assert result("q3", [200], {"hdfs 4": [50]}, equal=False).ratio is None
    assert result("q3", [200], {"hdfs 4": [50]}, theirs_equal=False).ratio is None
    assert result("q3", [200], {}, theirs_equal=None).ratio is None
    assert result("q3", [], {"hdfs 4": [50]}).ratio is None


def everywhere(*results: Result) -> list[Result]:
    """The same, run with one and four shards too, and killed once."""
    for one in results:
        one.checks = [{"parallelism": n, "equal": True} for n in (1, 4)]
        one.crash = {"equal": True, "parallelism": 2}
    return list(results)


def test_the_summary_is_over_stateful_queries_that_both_ran() -> None:
    found = [
        result("q0", [900], {"hdfs 4": [1]}),
        result("q3", [200], {"hdfs 4": [100]}),
        result("q5", [600], {"hdfs 4": [100]}, crash={"equal": True, "parallelism": 2}),
        result("q7", [400], {"hdfs 4": [100]}, crash={"equal": False, "parallelism": 4}),
        result("q4", [400], {}, theirs_equal=None),
        result("q8", [400], {"hdfs 4": [100]}, equal=False),
    ]
    found[1].checks = [
        {"parallelism": 1, "equal": True},
        {"parallelism": 4, "equal": False},
    ]
    found[2].checks = [{"parallelism": 1, "equal": True}]
    assert summary(found) == {
        "median_ratio_stateful": 4.0,
        "stateful_on_both": 3,
        "least_ratio_stateful": 2.0,
        "equal": 5,
        "of": 6,
        "theirs_equal": 5,
        "checks_equal": 2,
        "checks": 3,
        "crashes_equal": 1,
        "crashes": 2,
        "asked": "all equal, with 1, 2 and 4 shards and after a crash, and at least 3x in the median",
        "met": False,
    }
    assert summary([])["median_ratio_stateful"] is None and not summary([])["met"]
    fast = [*found[:1], *found[2:5]]
    assert not summary(fast)["met"], "not everywhere, and not all were killed"
    assert summary(everywhere(*map(replace, fast)))["met"]
    assert not summary(everywhere(*map(replace, found[:2])))["met"], "2x are too few"
    lacking = [replace(found[2]), result("q7", [400], {}, theirs_equal=None)]
    assert not summary(everywhere(*lacking))["met"], "theirs is missing"
    assert "| q7 | 2 | yes, crashed with 4: NO | 400 (4) | 100 (hdfs 4) | 4x |" in table(found)
    assert "| q3 | 2 | yes, with 1: yes, with 4: NO | 200 (4) |" in table(found)
    assert {"query", "equal", "ours", "theirs", "ratio", "stateful", "spread", "note"} <= asdict(
        found[0]
    ).keys()


def test_every_query_is_run_by_both_or_it_is_said_why_not() -> None:
    assert peer.QUERIES.keys() | LEFT_OUT.keys() == oracle.QUERIES.keys()
    assert not peer.QUERIES.keys() & LEFT_OUT.keys()
    assert LIMITS.keys() <= peer.QUERIES.keys()
    for name, (mode, closed, _) in peer.QUERIES.items():
        assert mode == (
            "update" if (oracle.QUERIES[name].updating and name != "q9") or name == "q12" else "append"
        )
        assert not (closed and mode == "update")


# A round without Spark


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nexmark") / "data"
    prepare(folder, 2_000, 250, Config(first_event_rate=100))
    return folder


def test_our_side_reads_the_files_or_the_same_events_from_the_generator(data: Path) -> None:
    of_files, generated = (sources("q3", data, kind, 2, 2) for kind in ("files", "generator"))
    assert all(isinstance(s, Prepared) for s in of_files.values())
    assert all(isinstance(s, NexmarkSource) for s in generated.values())
    first, second = (hf.testing.run(build("q3", read, hf.memory())) for read in (of_files, generated))
    assert first.epochs == second.epochs == 4
    assert [c.records_in for c in first.commits] == [c.records_in for c in second.commits]
    assert sorted(map(repr, first.rows("out"))) == sorted(map(repr, second.rows("out")))
    assert isinstance(sources("q12", data, "generator", 2, 2)["bid"], Prepared)


def plan_of(data: Path, monkeypatch: pytest.MonkeyPatch, more: str = "") -> benchmark.Plan:
    monkeypatch.setattr(benchmark.Plan, "data", property(lambda self: data))
    asked = "--events 2000 --per-file 250 --files 2 --rate 100 --stores hdfs --their-files 2"
    return arguments([*asked.split(), *more.split()])[0]


def in_process(
    query: str, folder: Path, plan: benchmark.Plan, parallelism: int, files: int
) -> dict[str, Any]:
    """Stands where our process is: the runner instead of Spark."""
    read = sources(query, plan.data, plan.source, files, parallelism)
    pipeline = build(query, read, hf.parquet(str(folder / "out"), merge=False))
    hf.testing.run(pipeline, parallelism=parallelism, capture=False, directory=folder / "dir")
    return {"events_per_s": 100, "late": {}}


@pytest.mark.parametrize("query", ["q5", "q19"])
def test_what_ours_wrote_is_checked(query: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, known = plan_of(data, monkeypatch), Truth(data)
    monkeypatch.setattr(benchmark, "our_run", in_process)
    found = Result(query, 2, True, "")
    benchmark.ours(found, plan, known)
    assert (found.equal, found.spread["ours 2"], found.note) == (True, [100], "")
    known._answers[query] = known.answer(query).slice(1)
    known._sorted.clear()
    benchmark.ours(found, plan, known)
    assert found.equal is False and "not equal" in found.note


def test_other_parallelisms_are_checked_once_and_crashes_are_dealt_out(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = "--check-parallelism 1,4 --crash --rounds 2 --queries q5,q3,q19,q1 --no-peers --files 2,1"
    plan = plan_of(data, monkeypatch, asked)
    ran: list[tuple[str, int, int]] = []

    def run(query: str, folder: Path, plan: benchmark.Plan, parallelism: int, files: int) -> dict[str, Any]:
        ran.append((query, parallelism, files))
        found = in_process(query, folder, plan, parallelism, files)
        return {**found, "events_per_s": 100 if files == 2 or query == "q5" else 70}

    def run_all(queries: list[str], folder: Path, plan: benchmark.Plan, parallelism: int) -> dict[str, str]:
        for query in queries[:-1]:
            run(query, folder / query, plan, parallelism, plan.files[0])
        return {query: "it broke\nin detail" if query == queries[-1] else "" for query in queries}

    killed: list[tuple[str, int]] = []

    def crash(query: str, plan: benchmark.Plan, known: Truth, parallelism: int) -> dict[str, Any]:
        killed.append((query, parallelism))
        return {"equal": True}

    monkeypatch.setattr(benchmark, "our_run", run)
    monkeypatch.setattr(benchmark, "our_runs", run_all)
    monkeypatch.setattr(benchmark, "crash_of", crash)
    monkeypatch.setattr(benchmark, "prepare", lambda *facts: None)
    monkeypatch.setattr(benchmark, "ROOT", data.parent)
    found = benchmark.measured(plan, Kept(data.parent / "kept.json", {}), peers=False)
    assert [(parallelism, files) for query, parallelism, files in ran if query == "q5"] == [
        *[(2, 2), (2, 1)],
        *[(1, 2), (4, 2)],
        *[(2, 2), (2, 1)],
    ]
    assert [r for r in ran if r[0] == "q3"][-1:] == [("q3", 2, 2)], (
        "what is far from the best is not run again"
    )
    assert killed == [("q5", 2), ("q3", 1), ("q19", 4), ("q1", 2)]
    assert [r.crash for r in found[:2]] == [
        {"parallelism": 2, "equal": True},
        {"parallelism": 1, "equal": True},
    ]
    *fine, broken = ([(c["parallelism"], c["equal"], c["note"]) for c in r.checks] for r in found)
    assert fine == [[(1, True, ""), (4, True, "")]] * 3
    assert broken == [(1, False, "it broke"), (4, False, "it broke")]
    assert found[-1].equal is False, "equal is what is equal each time"
    assert found[0].equal and found[0].our_modes == {"2": 100, "1": 100}


def test_a_crash_after_which_it_is_wrong_or_that_came_too_late_counts_against_the_query(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, known = plan_of(data, monkeypatch), Truth(data)
    for found_by_crash, said in (
        ({"equal": False, "why": "3 rows are missing"}, "after a crash it is not equal: 3 rows are missing"),
        (OSError("no room"), "after a crash it is not equal: no room"),
    ):

        def crash(*facts: Any, outcome: Any = found_by_crash) -> Any:
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        monkeypatch.setattr(benchmark, "crash_of", crash)
        found = Result("q3", 2, True, "", equal=True)
        benchmark.crashed(found, plan, known, 4)
        assert found.equal is False and found.note == said and found.crash is not None
        assert found.crash["parallelism"] == 4


def test_rows_that_were_published_twice_are_seen_though_the_last_of_each_key_counts(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, known = plan_of(data, monkeypatch), Truth(data)
    pipeline = build(
        "q17", sources("q17", data, "files", 2, 2), hf.parquet(str(tmp_path / "out"), merge=False)
    )
    live(pipeline, tmp_path / "dir", trim_log=False)
    assert benchmark.our_check("q17", tmp_path, plan, known, 2) == (True, "")
    part = max((tmp_path / "out").glob("part-*.parquet"))
    shutil.copy(part, part.with_name("part-00000099-00000.parquet"))
    same, why = benchmark.our_check("q17", tmp_path, plan, known, 2)
    assert not same and "were decided on" in why


def test_parts_are_kept_together_as_long_as_nothing_else_has_changed(tmp_path: Path) -> None:
    plan = arguments(["--queries", "q5"])[0]
    report = {"machine": {"cores": 2}, "source": "abc", "plan": asdict(plan), "queries": [], "summary": {}}
    kept = Kept(tmp_path / "nexmark.json", dict(report))
    benchmark._keep(kept, everywhere(result("q5", [600], {"hdfs 4": [100]})))
    now = {**report, "plan": asdict(arguments(["--queries", "q3"])[0])}
    later = Kept(kept.file, {**now, "queries": benchmark.earlier(kept.file, now)})
    benchmark._keep(later, everywhere(result("q3", [400], {"hdfs 4": [100]})))
    assert [r["query"] for r in later.results["queries"]] == ["q3", "q5"]
    assert later.results["summary"]["median_ratio_stateful"] == 5.0 and later.results["summary"]["met"]
    benchmark._keep(later, [result("q3", [200], {"hdfs 4": [100]})])
    assert [r["ratio"] for r in later.results["queries"]] == [2.0, 6.0]
    printed = benchmark.only(later.results, ["q3"])
    assert [r["query"] for r in printed["queries"]] == ["q3"] and printed["summary"]["of"] == 1
    assert benchmark.earlier(kept.file, {**now, "source": "abd"}) == []
    assert not kept.file.exists() and kept.file.with_suffix(".previous.json").exists()


def test_a_side_that_fails_is_told_of_and_the_rest_goes_on(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, known = plan_of(data, monkeypatch), Truth(data)

    def fail(*arguments: Any, **options: Any) -> Any:
        raise (PeerError if options else OSError)("it broke\nin detail")

    monkeypatch.setattr(benchmark, "our_run", fail)
    monkeypatch.setattr(benchmark, "run_peer", fail)
    found = Result("q3", 2, True, "")
    benchmark.ours(found, plan, known)
    benchmark.theirs(found, plan, known)
    settle(found)
    assert (found.equal, found.theirs_equal, found.ratio) == (False, None, None)
    assert found.note == "ours failed: it broke; theirs failed (hdfs 2): it broke"


def test_what_theirs_wrote_is_checked(data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan, known = plan_of(data, monkeypatch), Truth(data)

    def write(peer_name: str, query: str, *, out: Path, **options: Any) -> dict[str, Any]:
        assert options["script"] == "structured_streaming_nexmark.py"
        answer = known.answer(query)
        for number, rows in ((2, answer), (10, answer.slice(0, 1))):
            (out / f"batch-{number:08d}").mkdir(parents=True)
            pq.write_table(rows, out / f"batch-{number:08d}" / "part-00000-x.snappy.parquet")
        return {"records_per_s": 50}

    monkeypatch.setattr(benchmark, "run_peer", write)
    updating, once = Result("q17", 2, True, ""), Result("q3", 2, True, "")
    benchmark.theirs(updating, plan, known)
    benchmark.theirs(once, plan, known)
    assert (updating.theirs_equal, once.theirs_equal) == (True, False)
    assert updating.spread["theirs hdfs 2"] == [50]


def test_their_q12_is_compared_by_bidder(data: Path, tmp_path: Path) -> None:
    known = Truth(data)
    each = known.bids_of_each()
    at = pa.array([0] * each.num_rows, pa.timestamp("us"))
    rows = each.append_column("starttime", at).append_column("endtime", at)
    early = rows.set_column(1, "bid_count", pa.array([1] * rows.num_rows, pa.int64()))
    for number, batch in enumerate((early, rows)):
        (tmp_path / f"batch-{number}").mkdir()
        pq.write_table(batch, tmp_path / f"batch-{number}" / "part-0.parquet")
    assert their_check("q12", tmp_path, known) == (True, "")
    pq.write_table(
        early.slice(0, 1).set_column(1, "bid_count", pa.array([10_000])),
        tmp_path / "batch-1" / "part-1.parquet",
    )
    assert their_check("q12", tmp_path, known)[0] is False


def test_a_kill_comes_within_an_epoch_as_long_as_the_last_one(tmp_path: Path) -> None:
    for number, at in ((9, 100.0), (10, 103.0), (11, 103.25)):
        (tmp_path / f"{number:020d}.json").touch()
        os.utime(tmp_path / f"{number:020d}.json", (at, at))
    (tmp_path / "half-written.tmp").touch()
    assert last_gap_s(tmp_path) == 0.25
