"""What holdfast calls durable is still there after a power failure, on a disk that forgets all it may forget."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from holdfast.checkpoint.storage import LocalStorage
from holdfast.io import folder as folder_module
from holdfast.io.base import Decided, StagedFile, Target
from holdfast.io.folder import FolderSink, jsonl, parquet
from holdfast.io.place import Place
from holdfast.log.store import LocalStore
from tests.unit.forgetful import ForgetfulDisk

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the forgetful disk looks through /proc")

ROWS = pa.table({"id": pa.array(range(4), pa.int64()), "name": ["a", "b", "a", "c"]})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


@pytest.fixture
def disk(root: Path) -> Iterator[ForgetfulDisk]:
    with ForgetfulDisk(root) as disk:
        yield disk


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def tree(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*"))


class Died(BaseException):
    """The process ended here; the power came later."""


def test_a_plain_write_is_lost(root: Path, disk: ForgetfulDisk) -> None:
    (root / "x").write_bytes(b"1")
    disk.power_failure()
    assert tree(root) == []


def test_a_synced_file_whose_folder_was_not_synced_is_lost(root: Path, disk: ForgetfulDisk) -> None:
    (root / "x").write_bytes(b"1")
    sync(root / "x")
    disk.power_failure()
    assert tree(root) == []


def test_a_synced_name_of_a_file_that_was_never_synced_leads_to_no_bytes(
    root: Path, disk: ForgetfulDisk
) -> None:
    (root / "x").write_bytes(b"1")
    sync(root)
    disk.power_failure()
    assert (root / "x").read_bytes() == b""


def test_a_file_has_the_bytes_of_its_last_sync(root: Path, disk: ForgetfulDisk) -> None:
    (root / "x").write_bytes(b"first")
    sync(root / "x")
    sync(root)
    (root / "x").write_bytes(b"second, longer")
    disk.power_failure()
    assert (root / "x").read_bytes() == b"first"


def test_a_folder_its_parent_does_not_know_vanishes_with_all_in_it(root: Path, disk: ForgetfulDisk) -> None:
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "x").write_bytes(b"1")
    for path in (root / "a" / "b" / "x", root / "a" / "b", root / "a"):
        sync(path)
    disk.power_failure()
    assert tree(root) == []


def test_a_folder_that_was_never_synced_itself_is_empty(root: Path, disk: ForgetfulDisk) -> None:
    (root / "a").mkdir()
    (root / "a" / "x").write_bytes(b"1")
    sync(root / "a" / "x")
    sync(root)
    disk.power_failure()
    assert tree(root) == ["a"]


def test_what_was_there_before_and_what_a_sync_of_all_found_stays(root: Path) -> None:
    (root / "old").write_bytes(b"old")
    with ForgetfulDisk(root) as disk:
        (root / "a").mkdir()
        (root / "a" / "x").write_bytes(b"1")
        os.symlink("a/x", root / "link")
        os.sync()
        (root / "a" / "y").write_bytes(b"2")
        disk.power_failure()
        assert tree(root) == ["a", "a/x", "link", "old"]
        disk.power_failure()
    assert (root / "link").read_bytes() == b"1"
    assert (root / "old").read_bytes() == b"old"


def test_a_removal_that_was_not_synced_did_not_happen(root: Path, disk: ForgetfulDisk) -> None:
    (root / "x").write_bytes(b"1")
    sync(root / "x")
    sync(root)
    (root / "x").unlink()
    for number in range(50):  # none of these may be taken for the old inode
        (root / f"other-{number}").write_bytes(b"other")
    disk.power_failure()
    assert tree(root) == ["x"]
    assert (root / "x").read_bytes() == b"1"


def test_a_rename_counts_from_the_folders_sync_on(root: Path, disk: ForgetfulDisk) -> None:
    for name in ("x", "new"):
        (root / name).write_bytes(name.encode())
        sync(root / name)
    sync(root)
    os.replace(root / "new", root / "x")
    disk.power_failure()
    assert ((root / "x").read_bytes(), (root / "new").read_bytes()) == (b"x", b"new")
    os.replace(root / "new", root / "x")
    sync(root)
    disk.power_failure()
    assert tree(root) == ["x"]
    assert (root / "x").read_bytes() == b"new"


def test_two_links_are_one_file_still(root: Path, disk: ForgetfulDisk) -> None:
    (root / "x").write_bytes(b"1")
    os.link(root / "x", root / "y")
    sync(root / "y")
    sync(root)
    disk.power_failure()
    assert (root / "x").read_bytes() == b"1"
    assert (root / "x").stat().st_ino == (root / "y").stat().st_ino


def test_outside_the_context_the_systems_own_calls_are_back(root: Path) -> None:
    before = (os.fsync, os.fdatasync, os.sync)
    with ForgetfulDisk(root):
        assert os.fsync is not before[0]
    assert (os.fsync, os.fdatasync, os.sync) == before


def test_a_record_is_there_once_put_if_absent_returned(root: Path, disk: ForgetfulDisk) -> None:
    assert LocalStore(root / "pipeline" / "log").put_if_absent("plans/1", b"plan")
    disk.power_failure()
    again = LocalStore(root / "pipeline" / "log")
    assert again.get("plans/1") == b"plan"
    assert again.list("plans") == ["1"]
    assert not again.put_if_absent("plans/1", b"other")


@pytest.mark.parametrize("look", ["list", "get", "put_if_absent"])
def test_a_record_that_a_dead_driver_did_not_sync_is_synced_before_it_is_believed(
    root: Path, disk: ForgetfulDisk, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    LocalStore(root).put_if_absent("plans/1", b"plan")

    def die(path: str) -> None:
        raise Died

    with monkeypatch.context() as patch, pytest.raises(Died):
        patch.setattr("holdfast.log.store.sync_folder", die)
        LocalStore(root).put_if_absent("plans/2", b"plan")
    next_driver = LocalStore(root)
    if look == "list":
        assert next_driver.list("plans") == ["1", "2"]
    elif look == "get":
        assert next_driver.get("plans/2") == b"plan"
    else:
        assert not next_driver.put_if_absent("plans/2", b"other")
    disk.power_failure()
    assert LocalStore(root).get("plans/2") == b"plan"


def test_a_stored_file_is_there_once_put_returned(root: Path, disk: ForgetfulDisk, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"state" * 1000)
    store = LocalStorage(root / "some" / "store")
    store.put_file("a/b/file", tmp_path / "file")
    store.put("a/c/bytes", b"1")
    disk.power_failure()
    assert store.list("") == [("a/b/file", 5000), ("a/c/bytes", 1)]
    assert store.get("a/b/file") == b"state" * 1000


def test_a_stored_file_replaced_by_another_is_the_new_one(root: Path, disk: ForgetfulDisk) -> None:
    store = LocalStorage(root)
    store.put("x", b"first")
    store.put("x", b"second")
    disk.power_failure()
    assert store.get("x") == b"second"


def test_a_stored_file_in_a_folder_deleted_and_made_again_is_there(root: Path, disk: ForgetfulDisk) -> None:
    store = LocalStorage(root)
    store.put("a/x", b"1")
    store.delete(["a/x"])
    store.put("a/y", b"2")
    disk.power_failure()
    assert store.get("a/y") == b"2"


class Driver:
    """Plays the engine for one folder sink; a new one is a new life."""

    def __init__(self, root: Path, sink: FolderSink) -> None:
        self.sink = sink
        self.folder = str(root / "pipeline" / "staging")

    def stage(self, epoch: int, table: pa.Table = ROWS) -> list[StagedFile]:
        writer = self.sink.writer(Target("sink", epoch, "0", f"{epoch:08d}-1-0-0", self.folder))
        writer.write(table)
        return writer.close()

    def publish(self, epoch: int, staged: list[StagedFile]) -> None:
        self.sink.publish(Decided("sink", epoch, 1, staged, self.folder))


def sinks(root: Path) -> list[FolderSink]:
    return [
        parquet(root / "deep" / "out"),
        jsonl(root / "deep" / "out"),
        parquet(root / "deep" / "out", partition_by="name"),
    ]


def ids(root: Path, sink: FolderSink) -> list[int]:
    form = "parquet" if sink.suffix == "parquet" else "json"
    table = ds.dataset(root / "deep" / "out", format=form, partitioning="hive").to_table()
    return sorted(table["id"].to_pylist())


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["parquet", "jsonl", "by a column"])
def test_staged_files_can_be_published_after_a_power_failure_and_published_ones_stay(
    root: Path, disk: ForgetfulDisk, kind: int
) -> None:
    driver = Driver(root, sinks(root)[kind])
    driver.sink.check()
    staged = driver.stage(1)
    disk.power_failure()
    driver = Driver(root, sinks(root)[kind])
    driver.publish(1, staged)
    assert ids(root, driver.sink) == [0, 1, 2, 3]
    disk.power_failure()
    assert ids(root, driver.sink) == [0, 1, 2, 3]
    Driver(root, sinks(root)[kind]).publish(1, staged)
    assert ids(root, driver.sink) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["parquet", "jsonl", "by a column"])
def test_the_next_life_after_a_power_failure_is_still_the_folders_owner(
    root: Path, disk: ForgetfulDisk, kind: int
) -> None:
    driver = Driver(root, sinks(root)[kind])
    driver.publish(1, driver.stage(1))
    disk.power_failure()
    driver = Driver(root, sinks(root)[kind])
    driver.publish(2, driver.stage(2))
    disk.power_failure()
    assert ids(root, driver.sink) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_files_renamed_by_a_driver_that_died_before_its_sync_are_synced_by_the_next(
    root: Path, disk: ForgetfulDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(root, sinks(root)[0])
    driver.publish(1, driver.stage(1))
    staged = driver.stage(2)

    def die(leaves: Any) -> None:
        raise Died

    with monkeypatch.context() as patch, pytest.raises(Died):
        patch.setattr(folder_module, "_sync_folders", die)
        driver.publish(2, staged)
    Driver(root, sinks(root)[0]).publish(2, staged)
    disk.power_failure()
    assert ids(root, driver.sink) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_more_partitions_than_are_synced_one_by_one_stay_too(root: Path, disk: ForgetfulDisk) -> None:
    many = pa.table({"id": pa.array(range(40), pa.int64()), "name": [f"n{i}" for i in range(40)]})
    driver = Driver(root, sinks(root)[2])
    staged = driver.stage(1, many)
    disk.power_failure()
    driver.publish(1, staged)
    disk.power_failure()
    assert ids(root, driver.sink) == list(range(40))


def test_merged_files_stay(root: Path, disk: ForgetfulDisk) -> None:
    driver = Driver(root, sinks(root)[0])
    driver.sink.merge_epochs = 5
    for epoch in range(6):
        driver.publish(epoch, driver.stage(epoch))
    driver.sink.maintain(5)
    assert len(os.listdir(root / "deep" / "out")) == 2
    disk.power_failure()
    assert ids(root, driver.sink) == sorted([0, 1, 2, 3] * 6)


def test_what_a_place_knows_is_not_sent_to_others(root: Path) -> None:
    import pickle

    place = Place(str(root / "out"))
    before = pickle.dumps(place)
    place.folder("staging")
    assert pickle.dumps(place) == before
