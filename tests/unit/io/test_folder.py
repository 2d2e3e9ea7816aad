"""Folder sinks: nothing undecided is visible, everything decided is, once, and a crash leaves it so."""

from __future__ import annotations

import datetime as dt
import decimal
import errno
import fcntl
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from holdfast.errors import PipelineError, SinkError
from holdfast.io import folder as folder_module
from holdfast.io import place as place_module
from holdfast.io.base import Decided, StagedFile, Target
from holdfast.io.files import files
from holdfast.io.folder import FolderSink, jsonl, parquet
from holdfast.io.partition import split
from holdfast.io.place import Place

ROWS = pa.table({"id": pa.array(range(6), pa.int64()), "name": ["a", "b", None, "a", "b/c", ""]})


class Driver:
    """Plays the engine for one sink."""

    def __init__(self, sink: FolderSink, tmp_path: Path, name: str = "pipeline") -> None:
        self.sink = sink
        self.folder = str(tmp_path / name / "staging")

    def stage(self, epoch: int, table: pa.Table, task: int = 0, attempt: int = 0) -> list[StagedFile]:
        writer = self.sink.writer(
            Target("sink", epoch, f"{task}", f"{epoch:08d}-1-{task}-{attempt}", self.folder)
        )
        writer.write(table)
        return writer.close()

    def publish(self, epoch: int, staged: list[StagedFile]) -> None:
        self.sink.publish(Decided("sink", epoch, 1, staged, self.folder))

    def run(self, epoch: int, table: pa.Table) -> list[StagedFile]:
        staged = self.stage(epoch, table)
        self.publish(epoch, staged)
        return staged


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def driver(tmp_path: Path, out: Path) -> Driver:
    return Driver(parquet(out), tmp_path)


def work(out: Path) -> Path:
    return out.parent / f".{out.name}.holdfast"


def test_a_folder_holds_data_files_and_nothing_else(driver: Driver, out: Path) -> None:
    driver.sink.check()
    driver.run(3, ROWS)
    driver.run(12, ROWS)
    assert sorted(os.listdir(out)) == ["part-00000003-00000.parquet", "part-00000012-00000.parquet"]
    assert os.listdir(work(out) / "staging") == []


def test_what_is_staged_has_no_suffix_that_a_reader_would_take(driver: Driver, out: Path) -> None:
    staged = driver.stage(1, ROWS)
    assert [p.suffix for p in (work(out) / "staging").iterdir()] == [".staged"]
    path = work(out) / "staging" / staged[0].path
    assert (staged[0].size_bytes, staged[0].rows) == (path.stat().st_size, 6)


@pytest.mark.parametrize(
    "make",
    [parquet, jsonl, lambda p: jsonl(p, compression="gzip"), lambda p: parquet(p, partition_by="name")],
)
def test_the_same_rows_give_the_same_bytes_however_they_are_divided(
    tmp_path: Path, make: Callable[..., FolderSink]
) -> None:
    table = pa.table(
        {
            "n": pa.array(range(300_000), pa.int64()),
            "name": [f"name {n % 3}" for n in range(300_000)],
            "x": [n / 7 for n in range(300_000)],
        }
    )
    seen = []
    for number, step in enumerate((300_000, 300_000, 77_777)):
        sink = make(tmp_path / str(number))
        writer = sink.writer(Target("sink", 1, "0", f"00000001-{number}-0-0", str(tmp_path / "pipeline")))
        for first in range(0, table.num_rows, step):
            writer.write(table.slice(first, step))
        staged = writer.close()
        seen.append([(f.crc32, f.size_bytes, f.partition) for f in staged])
    assert seen[0] == seen[1] == seen[2]


def test_publishing_is_told_when_a_staged_file_is_gone_or_cut_short(driver: Driver, out: Path) -> None:
    staged = driver.stage(1, ROWS)
    path = work(out) / "staging" / staged[0].path
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(SinkError, match="were decided on") as caught:
        driver.publish(1, staged)
    assert caught.value.remedy
    path.unlink()
    with pytest.raises(SinkError, match="neither in"):
        driver.publish(1, staged)


def test_a_crash_in_the_middle_of_publishing_is_rolled_forward(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(parquet(out), tmp_path)
    staged = driver.stage(1, ROWS, task=0) + driver.stage(1, ROWS, task=1) + driver.stage(1, ROWS, task=2)
    replace, calls = os.replace, []

    def crash(old: str, new: str) -> None:
        if new.endswith(".parquet"):
            calls.append(new)
            if len(calls) == 2:
                raise KeyboardInterrupt
        replace(old, new)

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        driver.publish(1, staged)
    monkeypatch.setattr(os, "replace", replace)
    assert len(os.listdir(out)) == 1
    Driver(parquet(out), tmp_path).publish(1, staged)
    assert ds.dataset(out).count_rows() == 18


def test_a_file_that_a_replaced_driver_shows_at_the_same_moment_is_shown(
    driver: Driver, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer driver ended with an error, though the file was where it belongs."""
    staged, replace = driver.stage(1, ROWS), os.replace

    def other_is_faster(old: str, new: str) -> None:
        replace(old, new)
        if new.endswith(".parquet"):
            replace(old, new)

    monkeypatch.setattr(os, "replace", other_is_faster)
    driver.publish(1, staged)
    assert ds.dataset(out).count_rows() == ROWS.num_rows


def test_attempts_that_were_not_decided_are_swept_out_once_their_epoch_is_over(
    driver: Driver, out: Path
) -> None:
    driver.stage(1, ROWS, attempt=7)
    driver.run(1, ROWS)
    waiting = driver.stage(2, ROWS)
    driver.sink.maintain(2)
    assert [p.name for p in (work(out) / "staging").iterdir()] == [waiting[0].path]
    driver.publish(2, waiting)
    assert ds.dataset(out).count_rows() == 12


def test_a_new_generation_does_not_discard_what_is_decided_and_waits_to_be_published(
    driver: Driver, tmp_path: Path, out: Path
) -> None:
    driver.run(1, ROWS)
    decided = driver.stage(2, ROWS)
    driver.stage(3, ROWS)
    again = Driver(parquet(out), tmp_path)
    again.sink.check()
    again.sink.discard("2")
    again.publish(2, decided)
    again.sink.maintain(2)
    assert ds.dataset(out).count_rows() == 12
    again.run(3, ROWS)
    again.run(4, ROWS)
    again.sink.maintain(4)
    assert os.listdir(work(out) / "staging") == []


def test_aborting_leaves_nothing_behind(driver: Driver, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "BUFFER_BYTES", 10)
    writer = driver.sink.writer(Target("sink", 1, "0", "a", driver.folder))
    writer.write(ROWS)
    assert len(os.listdir(work(out) / "staging")) == 1
    writer.abort()
    assert os.listdir(work(out) / "staging") == []


def test_an_attempt_holds_a_bounded_amount(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, out: Path
) -> None:
    monkeypatch.setattr(folder_module, "BUFFER_BYTES", 1_000)
    table = pa.table({"n": pa.array(range(100), pa.int64())})
    writer = driver.sink.writer(Target("sink", 1, "0", "a", driver.folder))
    for _ in range(10):
        writer.write(table)
    staged = writer.close()
    assert [f.rows for f in staged] == [200] * 5
    driver.publish(1, staged)
    assert len(os.listdir(out)) == 5


def test_a_writer_that_gets_nothing_or_empty_tables_stages_nothing(driver: Driver) -> None:
    writer = driver.sink.writer(Target("sink", 1, "0", "a", driver.folder))
    writer.write(ROWS.slice(0, 0))
    assert writer.close() == []


def test_check_refuses_a_file_a_foreign_folder_and_one_it_may_not_write_to(tmp_path: Path, out: Path) -> None:
    out.write_text("x")
    with pytest.raises(SinkError, match="is a file"):
        parquet(out).check()
    out.unlink()
    out.mkdir()
    (out / "somebody.parquet").write_text("x")
    with pytest.raises(SinkError, match=r"somebody\.parquet") as caught:
        parquet(out).check()
    assert caught.value.remedy and "append=True" in caught.value.remedy
    parquet(out, append=True).check()
    with pytest.raises(SinkError, match="can't be written to"):
        parquet("/proc/nobody/out").check()


def test_check_takes_a_folder_of_its_own_and_hidden_files_in_it(driver: Driver, out: Path) -> None:
    driver.run(1, ROWS)
    (out / "_SUCCESS").write_text("")
    (out / ".hidden").write_text("")
    driver.sink.check()
    assert "probe" not in "".join(os.listdir(out))


def test_a_pipeline_that_starts_afresh_does_not_mix_with_what_an_earlier_one_left(
    driver: Driver, tmp_path: Path, out: Path
) -> None:
    driver.run(1, ROWS)
    afresh = Driver(parquet(out), tmp_path, "another")
    afresh.sink.check()
    with pytest.raises(SinkError, match="another run") as caught:
        afresh.run(1, ROWS)
    assert caught.value.remedy and "delete this one" in caught.value.remedy
    shutil.rmtree(out)
    afresh.run(1, ROWS)
    assert ds.dataset(out).count_rows() == 6


def test_a_pipeline_whose_directory_was_moved_goes_on(driver: Driver, tmp_path: Path, out: Path) -> None:
    driver.run(1, ROWS)
    (tmp_path / "pipeline").rename(tmp_path / "moved")
    Driver(parquet(out), tmp_path, "moved").run(2, ROWS)
    assert ds.dataset(out).count_rows() == 12


def test_two_sinks_of_one_pipeline_can_not_share_a_folder(tmp_path: Path, out: Path) -> None:
    driver = Driver(parquet(out), tmp_path)
    driver.run(1, ROWS)
    with pytest.raises(SinkError, match="another pipeline or sink"):
        driver.sink.claim("other", driver.folder)


def test_files_of_others_stay_beside_ours_where_the_user_says_so(tmp_path: Path, out: Path) -> None:
    out.mkdir()
    pq.write_table(ROWS, out / "theirs.parquet")
    driver = Driver(parquet(out, append=True), tmp_path)
    driver.sink.check()
    driver.run(1, ROWS)
    driver.sink.maintain(1_000)
    assert ds.dataset(out).count_rows() == 12


def test_where_the_work_folder_can_not_stand_beside_it_stands_inside_and_nothing_is_merged(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    driver = Driver(parquet(out), tmp_path)
    driver.sink.check()
    for epoch in range(100):
        driver.run(epoch, ROWS)
    driver.sink.maintain(200)
    driver.sink.maintain(300)
    assert (out / "_holdfast").is_dir() and not work(out).exists()
    assert caplog.text.count("not merged") == 1
    assert ds.dataset(out).count_rows() == 600


def test_rows_go_to_a_folder_for_each_value_as_hive_has_it(tmp_path: Path, out: Path) -> None:
    driver = Driver(parquet(out, partition_by="name"), tmp_path)
    driver.run(1, ROWS)
    assert sorted(os.listdir(out)) == ["name=__HIVE_DEFAULT_PARTITION__", "name=a", "name=b", "name=b%2Fc"]
    found = ds.dataset(out, partitioning="hive").to_table().sort_by("id").to_pylist()
    assert [(r["id"], r["name"]) for r in found] == [
        (0, "a"),
        (1, "b"),
        (2, None),
        (3, "a"),
        (4, "b/c"),
        (5, None),
    ]


def test_several_columns_make_nested_folders(tmp_path: Path, out: Path) -> None:
    table = pa.table(
        {
            "day": pa.array([dt.date(2024, 1, 1), dt.date(2024, 1, 2), dt.date(2024, 1, 1)]),
            "ok": [True, False, False],
            "n": [1, 2, 3],
        }
    )
    driver = Driver(jsonl(out, partition_by=["day", "ok"]), tmp_path)
    driver.run(1, table)
    made = sorted(str(p.relative_to(out).parent) for p in out.rglob("*.jsonl"))
    assert made == ["day=2024-01-01/ok=false", "day=2024-01-01/ok=true", "day=2024-01-02/ok=false"]
    assert json.loads((out / made[0] / "part-00000001-00000.jsonl").read_text()) == {"n": 3}


def test_many_partitions_at_once_are_fine(tmp_path: Path, out: Path) -> None:
    table = pa.table({"k": [n % 300 for n in range(900)], "n": range(900)})
    driver = Driver(parquet(out, partition_by="k"), tmp_path)
    driver.run(1, table)
    assert len(os.listdir(out)) == 300
    assert ds.dataset(out, partitioning="hive").count_rows() == 900


@pytest.mark.parametrize(
    ("columns", "what"),
    [(["missing"], "no column 'missing'"), (["id", "name"], "All columns"), (["l"], "can't name a folder")],
)
def test_columns_that_can_not_make_folders_are_refused(columns: list[str], what: str) -> None:
    table = ROWS if "l" not in columns else pa.table({"l": [[1]], "n": [1]})
    with pytest.raises(SinkError, match=what):
        split(table, columns)


def test_partitions_keep_rows_in_order_and_values_apart() -> None:
    table = pa.table(
        {"d": [decimal.Decimal("1.50"), decimal.Decimal("1.50"), None], "f": [1.5, 1.5, 2.0], "n": [3, 1, 2]}
    )
    made = {folder: part.column("n").to_pylist() for folder, part in split(table, ["d", "f"])}
    assert made == {"d=1.50/f=1.5": [3, 1], "d=__HIVE_DEFAULT_PARTITION__/f=2.0": [2]}


def test_a_sink_that_has_published_can_still_travel(driver: Driver) -> None:
    driver.run(1, ROWS)
    copy = pickle.loads(pickle.dumps(driver.sink))
    assert Driver(copy, Path(driver.folder).parent.parent).stage(2, ROWS)


def test_what_a_folder_sink_wrote_a_files_source_reads(tmp_path: Path, out: Path, reader: Any) -> None:
    for suffix, make in (("p", parquet), ("j", jsonl), ("z", lambda p: jsonl(p, compression="zstd"))):
        place = tmp_path / suffix
        driver = Driver(make(place), tmp_path, f"pipeline-{suffix}")
        driver.run(1, ROWS)
        driver.run(2, ROWS)
        rows = reader(files(place, "parquet" if suffix == "p" else "jsonl", ROWS.schema)).take()
        assert rows == ROWS.to_pylist() * 2


def test_choices_without_sense_are_refused(out: Path) -> None:
    with pytest.raises(PipelineError, match="compression"):
        parquet(out, compression="rar")
    with pytest.raises(PipelineError, match="compression"):
        jsonl(out, compression="snappy")
    with pytest.raises(PipelineError, match="no folder of a file system"):
        parquet("s3://bucket/out")
    with pytest.raises(PipelineError, match="no folder of a file system"):
        files("s3://bucket/in")


def test_a_disk_without_locks_can_still_be_published_to(
    driver: Driver, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    for epoch in range(100):
        driver.run(epoch, ROWS)
    driver.sink.maintain(100)
    assert len(os.listdir(out)) == 100


def test_a_lock_is_held_against_others(tmp_path: Path) -> None:
    place = Place(str(tmp_path / "out"))
    with place.locked("merge") as mine:
        assert mine
        with place.locked("merge", wait=False) as theirs:
            assert not theirs
    with place.locked("merge", wait=False) as mine:
        assert mine


FROZEN = """
import os, signal, sys
from holdfast.io import merge
from holdfast.io.place import Place

place, leaf = Place(sys.argv[1]), sys.argv[1]
really = merge.exchange

def exchange(built, leaf):
    os.kill(os.getpid(), signal.SIGSTOP)
    really(built, leaf)

merge.exchange = exchange
try:
    merge.merge_leaf(place, leaf, "parquet", 100, 100, lambda files, target: merge.join_parquet(files, target, {}))
except FileNotFoundError:
    sys.exit(3)
"""


def test_a_frozen_merger_stops_nobody_and_takes_nothing_back_when_it_wakes(
    driver: Driver, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_module, "BREAK_AFTER_S", 0.2)
    for epoch in range(100):
        driver.run(epoch, ROWS)
    merger = subprocess.Popen([sys.executable, "-c", FROZEN, str(out)])
    try:
        _, status = os.waitpid(merger.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        driver.run(100, ROWS)
        driver.run(101, ROWS)
        before = sorted(os.listdir(out))
        os.kill(merger.pid, signal.SIGCONT)
        assert merger.wait(30) == 3
    finally:
        merger.kill()
        merger.wait()
    assert sorted(os.listdir(out)) == before and len(before) == 102
    driver.sink.maintain(102)  # and the next merge goes on as ever
    assert len(os.listdir(out)) == 3
