"""Small files become large ones, and no reader sees a row twice or misses one."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.io import merge
from holdfast.io.base import Decided, StagedFile, Target
from holdfast.io.folder import FolderSink, jsonl, parquet
from holdfast.io.merge import runs
from holdfast.io.place import Part, parse_part, part_name

EPOCHS = 10


def epoch_table(epoch: int) -> pa.Table:
    return pa.table({"epoch": [epoch] * 3, "n": [0, 1, 2], "k": ["a", "b", "a"]})


class Driver:
    def __init__(self, sink: FolderSink, tmp_path: Path) -> None:
        self.sink = sink
        sink.merge_epochs = EPOCHS
        self.folder = str(tmp_path / "staging")
        self.staged: dict[int, list[StagedFile]] = {}

    def run(self, *epochs: int) -> Driver:
        for epoch in epochs:
            self.staged[epoch] = []
            for task in range(2):
                writer = self.sink.writer(
                    Target("sink", epoch, f"{task}", f"{epoch:08d}-1-{task}", self.folder)
                )
                writer.write(epoch_table(epoch).slice(task * 2, 2 - task))
                self.staged[epoch] += writer.close()
            self.publish(epoch)
        return self

    def publish(self, epoch: int) -> None:
        self.sink.publish(Decided("sink", epoch, 1, self.staged[epoch], self.folder))


def rows(out: Path) -> list[tuple[int, int]]:
    found = ds.dataset(out, partitioning="hive").to_table().to_pylist()
    return [(row["epoch"], row["n"]) for row in found]


def everything(epochs: int) -> list[tuple[int, int]]:
    return [(epoch, n) for epoch in range(epochs) for n in range(3)]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def leftovers(out: Path) -> list[str]:
    folder = out.parent / f".{out.name}.holdfast" / "merge"
    return os.listdir(folder) if folder.exists() else []


def test_full_buckets_become_one_file_each_with_rows_in_order(tmp_path: Path, out: Path) -> None:
    driver = Driver(parquet(out), tmp_path).run(*range(25))
    driver.sink.maintain(24)
    names = sorted(os.listdir(out))
    assert names[:2] == ["part-00000000-00000009.m000.parquet", "part-00000010-00000019.m000.parquet"]
    assert len(names) == 2 + 2 * 5
    assert rows(out) == everything(25)
    assert leftovers(out) == []


def test_buckets_of_buckets_are_merged_in_turn(tmp_path: Path, out: Path) -> None:
    driver = Driver(parquet(out), tmp_path)
    for epoch in range(110):
        driver.run(epoch)
        driver.sink.maintain(epoch)
    assert sorted(os.listdir(out))[:2] == [
        "part-00000000-00000099.m000.parquet",
        "part-00000100-00000.parquet",
    ]
    assert rows(out) == everything(110)


def test_the_same_merge_gives_the_same_bytes(tmp_path: Path) -> None:
    made = []
    for name in ("one", "two"):
        driver = Driver(parquet(tmp_path / name), tmp_path / f"{name}-pipeline").run(*range(10))
        driver.sink.maintain(10)
        made.append((tmp_path / name / "part-00000000-00000009.m000.parquet").read_bytes())
    assert made[0] == made[1]


def test_an_epoch_published_again_after_its_bucket_was_merged_changes_nothing(
    tmp_path: Path, out: Path
) -> None:
    driver = Driver(parquet(out), tmp_path).run(*range(10))
    driver.sink.maintain(10)
    again = Driver(parquet(out), tmp_path)
    again.staged = driver.staged
    again.publish(9)
    assert rows(out) == everything(10)


def test_an_epoch_that_was_slow_to_be_published_is_still_shown_after_a_merge(
    tmp_path: Path, out: Path
) -> None:
    driver = Driver(parquet(out), tmp_path).run(*range(9))
    late = Driver(driver.sink, tmp_path)
    writer = driver.sink.writer(Target("sink", 9, "0", "a", driver.folder))
    writer.write(epoch_table(9))
    late.staged[9] = writer.close()
    merge.merge_leaf(driver.sink.place, driver.sink.place.root, "parquet", 10, EPOCHS, driver.sink.join)
    late.publish(9)
    assert rows(out) == everything(10)
    merge.merge_leaf(driver.sink.place, driver.sink.place.root, "parquet", 10, EPOCHS, driver.sink.join)
    assert sorted(os.listdir(out)) == ["part-00000000-00000009.m000.parquet"]
    assert rows(out) == everything(10)


def test_json_lines_are_merged_too(tmp_path: Path) -> None:
    for suffix, make in (("jsonl", jsonl), ("jsonl.gz", lambda p: jsonl(p, compression="gzip"))):
        out = tmp_path / suffix
        driver = Driver(make(out), tmp_path / f"pipeline-{suffix}").run(*range(10))
        driver.sink.maintain(10)
        assert os.listdir(out) == [f"part-00000000-00000009.m000.{suffix}"]
        found = duckdb.sql(
            f"select epoch, n from read_json('{out}/*', format='newline_delimited')"
        ).fetchall()
        assert found == everything(10)


def test_each_partition_is_merged_by_itself(tmp_path: Path, out: Path) -> None:
    driver = Driver(parquet(out, partition_by="k"), tmp_path).run(*range(12))
    driver.sink.maintain(12)
    assert [len(os.listdir(out / folder)) for folder in ("k=a", "k=b")] == [1 + 2 * 2, 1 + 2]
    assert sorted(rows(out)) == everything(12)


def test_files_of_different_schemas_are_left_alone(tmp_path: Path, out: Path) -> None:
    driver = Driver(parquet(out), tmp_path).run(*range(10))
    path = out / "part-00000004-00000.parquet"
    pq.write_table(pq.read_table(path).append_column("extra", pa.array([1, 2])), path)
    driver.sink.maintain(10)
    assert len(os.listdir(out)) == 20


def test_a_folder_with_somebody_elses_file_is_left_alone(tmp_path: Path, out: Path) -> None:
    driver = Driver(parquet(out), tmp_path).run(*range(10))
    (out / "notes.txt").write_text("mine")
    driver.sink.maintain(10)
    assert len(os.listdir(out)) == 21


def test_hidden_files_of_others_survive_a_merge(tmp_path: Path, out: Path) -> None:
    driver = Driver(parquet(out), tmp_path).run(*range(10))
    (out / "_SUCCESS").write_text("theirs")
    os.chmod(out, 0o750)
    driver.sink.maintain(10)
    assert sorted(os.listdir(out)) == ["_SUCCESS", "part-00000000-00000009.m000.parquet"]
    assert out.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOSYS])
def test_where_folders_can_not_be_exchanged_nothing_is_merged_and_that_is_said_once(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    def refuse(one: str, other: str) -> None:
        raise merge.NotSupported(os.strerror(error))

    monkeypatch.setattr(merge, "exchange", refuse)
    driver = Driver(parquet(out), tmp_path).run(*range(25))
    for epoch in (10, 20, 25):
        driver.sink.maintain(epoch)
    assert caplog.text.count("not merged") == 1
    assert rows(out) == everything(25)
    assert leftovers(out) == []


@pytest.mark.parametrize("place", ["join_parquet", "_link", "exchange", "sync_folder", "rmtree"])
def test_a_crash_anywhere_in_a_merge_leaves_the_folder_whole_and_the_next_one_tidies_up(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    driver = Driver(parquet(out), tmp_path).run(*range(11))
    with monkeypatch.context() as patch:

        def crash(*args: Any, **named: Any) -> None:
            raise KeyboardInterrupt

        owner: Any = merge.shutil if place == "rmtree" else merge
        after_crash = owner.rmtree if place == "rmtree" else None
        patch.setattr(merge.shutil, "rmtree", lambda *a, **k: None)  # a process that died tidies nothing
        if after_crash is None:
            patch.setattr(owner, place, crash)
            with pytest.raises(KeyboardInterrupt):
                driver.sink.maintain(10)
        else:
            driver.sink.maintain(10)
    assert leftovers(out)
    assert sorted(rows(out)) == everything(11)
    again = Driver(parquet(out), tmp_path)
    again.staged = driver.staged
    again.publish(10)
    again.sink.maintain(10)
    assert leftovers(out) == []
    assert rows(out) == everything(11)
    assert len(os.listdir(out)) == 3


def test_a_merge_that_fails_for_a_file_gone_missing_does_no_harm(
    tmp_path: Path, out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(parquet(out), tmp_path).run(*range(10))
    join = driver.sink.join

    def and_delete(files: list[str], target: str) -> bool:
        os.unlink(files[0])
        return join(files, target)

    driver.sink.join = and_delete  # type: ignore[method-assign]
    driver.sink.maintain(10)
    assert "left unmerged" in caplog.text
    assert len(os.listdir(out)) == 19


def count_by_pyarrow(out: Path) -> int:
    return int(ds.dataset(out, format="parquet").count_rows())


def count_by_duckdb(out: Path) -> int:
    with duckdb.connect() as connection:
        found = connection.execute(f"select count(*) from read_parquet('{out}/**/*.parquet')").fetchone()
    assert found is not None
    return int(found[0])


def count_by_handle(out: Path) -> int:
    """A reader that opens the folder once: what it lists is what it reads."""
    handle = os.open(out, os.O_RDONLY)
    try:
        total = 0
        for name in os.listdir(handle):
            with open(os.open(name, os.O_RDONLY, dir_fd=handle), "rb") as file:
                total += pq.read_metadata(file).num_rows
        return total
    finally:
        os.close(handle)


@pytest.mark.parametrize("count", [count_by_pyarrow, count_by_duckdb, count_by_handle])
def test_a_reader_beside_the_merging_counts_the_same_rows_every_time(
    tmp_path: Path, out: Path, count: Callable[[Path], int]
) -> None:
    driver = Driver(parquet(out), tmp_path).run(*range(100))
    counts: list[int] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            before = sorted(os.listdir(out))
            try:
                found = count(out)
            except (OSError, duckdb.Error):
                continue  # listed before the exchange, opened after it: an error, and never a wrong count
            if count is count_by_handle or sorted(os.listdir(out)) == before:
                counts.append(found)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for epoch in range(10, 101, 10):
            driver.sink.maintain(epoch)
    finally:
        done.set()
        thread.join()
    counts.append(count(out))
    assert set(counts) == {3 * 100}
    assert len(os.listdir(out)) == 1


def test_publishing_goes_on_while_files_are_merged(tmp_path: Path, out: Path) -> None:
    driver = Driver(parquet(out), tmp_path).run(*range(20))
    done = threading.Event()

    def upkeep() -> None:
        while not done.is_set():
            driver.sink._merged_before = 0
            driver.sink.maintain(max(driver.staged) - 1)

    thread = threading.Thread(target=upkeep)
    thread.start()
    try:
        driver.run(*range(20, 120))
    finally:
        done.set()
        thread.join()
    assert sorted(rows(out)) == everything(120)


def test_two_folders_change_places_in_one_step(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "x").write_text("")
    merge.exchange(str(tmp_path / "a"), str(tmp_path / "b"))
    assert (tmp_path / "b" / "x").exists() and not (tmp_path / "a" / "x").exists()
    with pytest.raises(FileNotFoundError):
        merge.exchange(str(tmp_path / "a"), str(tmp_path / "missing"))


parts = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 3), st.integers(1, 60)),
    max_size=40,
    unique_by=lambda p: p[:2],
).map(lambda found: [Part(e, e, n, part_name(e, n, "x"), size) for e, n, size in found])


@settings(deadline=None)
@example(
    [
        Part(e, e, n, part_name(e, n, "x"), s)
        for e, n, s in [(32, 0, 41), (32, 1, 60), (33, 0, 1), (34, 0, 40)]
    ],
    40,
    2,
)
@given(parts, st.integers(0, 70), st.integers(2, 5))
def test_runs_are_of_neighbours_in_full_buckets_and_never_too_large(
    found: list[Part], before: int, fan: int
) -> None:
    made = runs(found, before, "x", fan, target_bytes=100)
    merged = [part for run in made for part in run.parts]
    assert len(merged) == len(set(merged)) and set(merged) <= set(found)
    names = [run.name for run in made]
    assert len(names) == len(set(names))
    for run in made:
        first, last = run.parts[0].first, run.parts[-1].last
        assert len(run.parts) > 1 and sum(p.size for p in run.parts) <= 100 and last < before
        inside = [p for p in found if first < p.first < last]
        assert set(inside) <= set(run.parts)
        named = parse_part(run.name, "x")
        assert named is not None and named.is_merged and (named.first, named.last) == (first, last)


@settings(deadline=None)
@given(parts, st.integers(0, 70), st.integers(2, 5))
def test_merging_comes_to_rest(found: list[Part], before: int, fan: int) -> None:
    for _ in range(8):
        made = runs(found, before, "x", fan, target_bytes=100)
        if not made:
            return
        gone = {part.name for run in made for part in run.parts}
        found = [part for part in found if part.name not in gone]
        for run in made:
            named = parse_part(run.name, "x", sum(p.size for p in run.parts))
            assert named is not None
            found.append(named)
    raise AssertionError("still merging")
