"""Chaos without a cluster: what is drawn from a seed, when a recovery is over, and what a comparison finds."""

import collections
import contextlib
import importlib
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
from holdfast.cli.app import main
from holdfast.errors import ConfigError, EngineError
from holdfast.faults import chaos
from holdfast.faults.chaos import draw, parse_faults
from holdfast.faults.cluster import Cluster
from holdfast.faults.compare import (
    Verdict,
    beginnings,
    compare,
    folders_compared,
    plans_compared,
    rows_compared,
    stretches,
)
from holdfast.faults.experiment import Struck, StuckError
from holdfast.faults.kinds import Fault
from holdfast.faults.standins import into_folders
from holdfast.faults.victims import Nobody, Victims, Worker, chosen, holding
from holdfast.io.base import Range
from holdfast.io.place import Part, merged_name, part_name
from holdfast.log.journal import Journal
from holdfast.log.records import Commit, Plan, PlannedRange, ShardCommit
from holdfast.state.shard import Sealed
from tests.drivers import live, state_in


def test_the_same_seed_draws_the_same_faults_and_moments() -> None:
    assert draw(list(Fault), 50, 3) == draw(list(Fault), 50, 3)
    assert draw(list(Fault), 50, 3) != draw(list(Fault), 50, 4)


def test_a_host_to_which_no_shard_has_come_back_holds_no_state() -> None:
    """A drill struck it, and compared a recovery in no time with the forecast for state that is lost."""
    sealed = Sealed("7-a", 0, 10, 10, {}, 1)
    at = [
        ShardCommit(sealed, f"127.0.0.{n}:/c/host{n - 1}/state", "0", str(pid)) for n, pid in ((2, 8), (2, 9))
    ]
    roots = ["/c/host0/state", "/c/host1/state"]
    assert holding(Commit(7, 1, {"tiles": at}, {}, {}), roots) == {(1, "8"), (1, "9")}
    both = [at[0], ShardCommit(sealed, "127.0.0.1:/c/host0/state", "1", "7")]
    found = holding(Commit(7, 1, {"tiles": at, "vehicles": both}, {}, {}), roots)
    assert found == {(0, "7"), (1, "8"), (1, "9")}


def test_a_worker_of_a_shards_slot_that_does_not_hold_it_is_not_struck(tmp_path: Path) -> None:
    """It was left where the shard had run for a moment, and freezing it was compared with the forecast for one that is needed."""
    homes = ["127.0.0.1:/c/host0", "127.0.0.2:/c/host1"]
    cluster = SimpleNamespace(
        hosts=range(2), host=lambda n: f"127.0.0.{n + 1}", state_root=lambda n: f"/c/host{n}"
    )
    journal = Journal.at(tmp_path)
    shard = ShardCommit(Sealed("1-a", 0, 10, 10, {}, 1), homes[1], "0", "22")
    journal.take()
    journal.put_commit(Commit(1, journal.generation, {"vehicles": [shard]}, {}, {}))
    left, holds = (
        Worker(SimpleNamespace(pid=pid), "vehicles-0", f"127.0.0.{n}") for n, pid in ((1, 22), (2, 22))
    )
    upload = Worker(SimpleNamespace(pid=23), "upload", "127.0.0.2")
    victims = Victims(cast(Cluster, cluster), tmp_path)
    victims.workers = lambda: [left, holds, upload]  # type: ignore[method-assign]
    assert {victims.aim(Fault.WORKER_FREEZE, share / 9).victim for share in range(10)} == {
        str(left),
        str(holds),
        str(upload),
    }
    victims.shards_only = True
    assert {victims.aim(Fault.WORKER_FREEZE, share / 9).victim for share in range(10)} == {str(holds)}


def test_every_kind_of_fault_comes_about_equally_often() -> None:
    counts = collections.Counter(blow.fault for blow in draw(list(Fault), 83, 1))
    assert set(counts) == set(Fault)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_some_faults_come_before_the_recovery_from_the_one_before_but_never_the_first() -> None:
    for seed in range(50):
        assert not draw(list(Fault), 1, seed)[0].overlaps
    overlapping = [b for b in draw(list(Fault), 400, 1) if b.overlaps]
    assert 60 < len(overlapping) < 140
    assert any(b.pause_s < 3 for b in overlapping) and any(b.pause_s > 3 for b in overlapping)
    assert all(0.2 <= b.pause_s <= 1.5 for b in draw(list(Fault), 400, 1) if not b.overlaps)


def test_faults_are_named_and_an_unknown_one_lists_them() -> None:
    assert parse_faults("all") == list(Fault)
    assert parse_faults("host, host,driver-kill") == [Fault.HOST, Fault.DRIVER_KILL]
    with pytest.raises(ConfigError, match="no fault 'hots'") as caught:
        parse_faults("hots")
    assert "executor-freeze" in str(caught.value)
    assert all(fault.sentence for fault in Fault)


def test_nobody_is_chosen_among_none() -> None:
    with pytest.raises(Nobody):
        chosen([], 0.5)


@pytest.mark.parametrize(("epoch", "planned", "awaited"), [(4, 5, 5), (4, 4, 5), (0, 0, 1)])
def test_a_recovery_ends_with_the_last_planned_epoch_or_the_next_one(
    epoch: int, planned: int, awaited: int
) -> None:
    assert Struck(Fault.HOST, "host", 0, 0.0, 0.0, epoch, planned).awaited == awaited


def test_rows_are_compared_as_multisets_whatever_their_order() -> None:
    one, other = pa.table({"n": [1, 2, 2]}), pa.table({"n": [2, 1, 2]})
    assert rows_compared("out", [one], [other]).exact
    found = rows_compared("out", [pa.table({"n": [1, 3]})], [one])
    assert (found.lost, found.doubled) == (2, 1)
    assert rows_compared("out", [], [one]).lost == 3
    assert rows_compared("out", [], []).exact


def folder_of(folder: Path, files: dict[tuple[int, int], list[int]]) -> Path:
    """A sink's folder: what the epochs from one to another have written."""
    folder.mkdir()
    for (first, last), rows in files.items():
        one = first == last
        name = part_name(first, 0, "parquet") if one else merged_name(first, last, 0, "parquet")
        pq.write_table(pa.table({"n": rows}), folder / name)
    return folder


def test_folders_are_compared_whichever_epochs_were_merged_into_one_file(tmp_path: Path) -> None:
    one = folder_of(tmp_path / "one", {(1, 1): [1], (2, 2): [3, 2], (3, 3): [4], (5, 5): [6]})
    other = folder_of(tmp_path / "other", {(1, 2): [1, 2, 3], (3, 4): [4], (5, 5): [6]})
    assert folders_compared("out", one, other).exact
    moved = folder_of(tmp_path / "moved", {(1, 2): [1, 2, 3, 4], (5, 5): [6, 6]})
    found = folders_compared("out", moved, one)
    assert (found.lost, found.doubled) == (1, 2), "rows of other epochs don't make up for those that lack"
    assert folders_compared("out", tmp_path / "none", one).lost == 5
    assert folders_compared("out", tmp_path / "none", tmp_path / "nor").exact


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 5))))
def test_stretches_cut_through_no_file(spans: list[tuple[int, int]]) -> None:
    parts = [Part(first, first + more, 0, "") for first, more in spans]
    ends = stretches(parts)
    assert ends == sorted(set(ends))
    assert all(p.last <= min(e for e in ends if e >= p.first) for p in parts)
    assert all(any(p.last == e for p in parts) for e in ends)


def _plan(epoch: int, *ranges: Range) -> Plan:
    tasks = [[PlannedRange(n, "numbers", piece) for n, piece in enumerate(ranges)]]
    return Plan(epoch, 1, 0, tasks, {}, {})


def test_a_gap_between_plans_is_lost_and_an_overlap_is_doubled() -> None:
    begins = {("numbers", "0000"): 0}
    good = [_plan(1, Range("0000", 0, 10)), _plan(2, Range("0000", 10, 15))]
    assert plans_compared(good, begins).exact
    assert plans_compared([good[0], _plan(2, Range("0000", 12, 15))], begins).lost == 2
    assert plans_compared([good[0], _plan(2, Range("0000", 7, 15))], begins).doubled == 3
    assert plans_compared([_plan(1, Range("0000", 4, 10))], begins).lost == 4


def test_files_are_followed_by_path_and_not_by_the_lane_of_an_epoch() -> None:
    info = {"path": "a.jsonl"}
    plans = [_plan(1, Range("0000", 0, 10, info)), _plan(2, Range("0001", 10, 20, info))]
    assert plans_compared(plans, {}).exact
    assert plans_compared([plans[0], _plan(2, Range("0001", 11, 20, info))], {}).lost == 1


def test_the_beginning_of_every_split_of_a_source_with_a_clock_is_known() -> None:
    sources = {"rate": hf.rate(100, splits=3), "list": hf.records([{"n": i} for i in range(10)], splits=2)}
    assert beginnings(sources) == {
        ("rate", "0000"): 0,
        ("rate", "0001"): 0,
        ("rate", "0002"): 0,
        ("list", "0000"): 0,
        ("list", "0001"): 5,
    }


class Count(hf.KeyedProcess):
    n = hf.ValueState(int, default=0)

    def process(self, key, record, ctx):  # type: ignore[no-untyped-def]
        self.n.value += 1
        yield {"id": record["id"], "n": self.n.value}


def build() -> hf.Pipeline:
    made = hf.Pipeline("counted")
    source = hf.records([{"id": i, "k": i % 7} for i in range(100)], splits=2, per_epoch=10)
    made.read("numbers", source).key_by("k").process("counts", Count()).write("out", hf.memory())
    return made


@pytest.fixture
def lived(tmp_path: Path) -> Path:
    live(into_folders(build(), tmp_path / "out"), tmp_path / "dir", checkpoint="never", trim_log=False)
    return tmp_path


def judged(folder: Path) -> Verdict:
    return compare(build, folder / "dir", folder / "out", folder / "runner")


def test_a_run_without_faults_is_exact_and_the_pipelines_own_sinks_are_left_alone(lived: Path) -> None:
    verdict = judged(lived)
    assert verdict.exact, verdict.findings
    assert (verdict.epochs, verdict.records) == (10, 100)
    assert not judged(lived).findings, "a second comparison starts afresh"


def test_a_file_that_vanished_is_lost_and_one_too_many_is_doubled(lived: Path) -> None:
    parts = sorted((lived / "out" / "out").glob("*.parquet"))
    shutil.copy(parts[0], parts[0].with_name("part-00000099-00000.parquet"))
    found = judged(lived)
    assert (found.lost, found.different_states) == (0, 0) and found.doubled > 0
    parts[0].unlink()
    moved = judged(lived)
    assert moved.lost == moved.doubled > 0, "rows belong to an epoch"
    parts[1].unlink()
    assert judged(lived).lost > 0


def test_state_that_is_gone_or_another_is_different(lived: Path) -> None:
    journal = Journal.at(lived / "dir")
    commit = journal.commit(10)
    assert commit is not None
    file = lived / "dir" / "log" / "commits" / f"{10:012d}.json"
    shard = commit.shards["counts"][0]
    sealed = msgspec.structs.replace(shard.sealed, digest=shard.sealed.digest + 1)
    wrong = msgspec.structs.replace(
        commit,
        shards={"counts": [msgspec.structs.replace(shard, sealed=sealed), *commit.shards["counts"][1:]]},
    )
    file.write_bytes(msgspec.json.encode(wrong))
    assert judged(lived).different_states == 1
    file.write_bytes(msgspec.json.encode(commit))
    shutil.rmtree(state_in(lived / "dir") / "counts" / "00001")
    assert judged(lived).different_states == 1


def test_a_trimmed_log_can_not_be_compared(lived: Path) -> None:
    Journal.at(lived / "dir").trim(3)
    with pytest.raises(EngineError, match="lacks epoch 1"):
        judged(lived)


class Unlucky:
    """An experiment whose application comes back from one fault, and from the next one no more."""

    def __init__(self) -> None:
        self.struck: list[Fault] = []

    def strike(self, fault: Fault, share: float, timeout_s: float) -> Struck:
        self.struck.append(fault)
        return Struck(fault, "executor 1 on 127.0.0.1", 1000, 1.0, 1.0, 4, 5)

    def await_recovery(self, struck: Struck, timeout_s: float) -> float:
        if len(self.struck) > 1:
            raise StuckError("Epoch 5 was not decided within 120 s.", remedy="See below.", detail="--- log")
        return 2.5


def test_when_the_application_is_stuck_the_last_line_is_still_one_object_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "app.py").write_text("import holdfast as hf\npipeline = hf.Pipeline('empty')\n")
    for name, value in (("PAUSE_S", (0.0, 0.0)), ("IN_A_ROW", 0.0), ("DURING_RECOVERY", 0.0)):
        monkeypatch.setattr(chaos, name, value)
    stuck = contextlib.nullcontext(Unlucky())
    monkeypatch.setattr(importlib.import_module("holdfast.cli.chaos"), "experiment_on", lambda *given: stuck)
    words = ["chaos", str(tmp_path / "app.py"), "--faults", "executor-kill", "--trials", "3", "--seed", "4"]
    monkeypatch.setattr(sys, "argv", ["holdfast", *words, "--folder", str(tmp_path / "home"), "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == StuckError.exit_code
    first, second, end = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (first["recovery_s"], first["stuck"]) == (2.5, False)
    assert (second["recovery_s"], second["stuck"]) == (None, True)
    assert end["faults"] == 2 and end["seed"] == 4 and end["backend"] == "heap"
    assert [end[name] for name in ("lost", "doubled", "different_states")] == [None, None, None]
    assert end["error"]["type"] == "StuckError"
    assert "the last executor-kill: Epoch 5 was not decided" in end["error"]["message"]
