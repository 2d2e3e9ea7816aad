"""State and checkpoints that are damaged, or go: noticed, said, and rebuilt from what is left."""

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import holdfast as hf
from holdfast.checkpoint import coordinator, storage
from holdfast.checkpoint.lifecycle import FailedCheckpoint, Reason
from holdfast.checkpoint.metadata import Checkpoint
from holdfast.errors import CheckpointError, EngineError, FencedError, StateLostError, UserCodeError
from holdfast.log.disk import ABANDONED_S
from holdfast.log.journal import Journal
from holdfast.recovery.estimate import Notice
from holdfast.state import rocksdb
from holdfast.state.rocksdb import RocksState
from holdfast.state.versions import Folder, Manifest
from tests.drivers import Life, Waiting, live, make
from tests.spark.test_equals_runner import sinks_in
from tests.unit.test_recovery import ONE, ROWS, check


def test_a_file_that_has_gone_from_the_store_is_noticed_and_the_next_checkpoint_is_made_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Checkpoints share files: one that is gone made all kept ones useless, while older ones and the log were deleted."""
    lost: list[str] = []
    clear_up = coordinator.Coordinator._clear_up

    def lose_a_file(self: Any) -> None:
        completed = self._catalog.completed()
        if len(completed) == 2 and not lost:
            lost.append(min({f.key for f in completed[0].files} & {f.key for f in completed[1].files}))
            (Path(life.program.checkpoint_url) / lost[0]).unlink()
        clear_up(self)

    monkeypatch.setattr(coordinator.Coordinator, "_clear_up", lose_a_file)
    monkeypatch.setattr(coordinator, "FIRST_RETRY_S", 0.0)
    options: dict[str, Any] = {"parallelism": ONE.parallelism, "max_records": 20, "trim_log": False}
    options |= {
        "checkpoint": "3 epochs",
        "checkpoint_keep": 2,
        "checkpoint_on_stop": False,
        "runner": Waiting,
    }
    notice = Notice(10.0, 10.0, 2.0, 10.0)
    pipeline = ONE.build(sinks_in(tmp_path / "ours"))
    life = make(pipeline, tmp_path / "dir", notice=notice, deadline="10m", **options)
    life.driver.start()
    life.driver.run()
    made = [o for o in life.outcomes if isinstance(o, Checkpoint)]
    assert [(o.epoch, o.trigger) for o in made[:3]] == [(3, "EPOCHS"), (6, "EPOCHS"), (7, "DAMAGED")]
    assert list(life.catalog.unusable()) == [] and "is gone from the store" in caplog.text
    assert "recovery would replay everything since epoch 0" in caplog.text
    assert life.guard is not None and life.guard._standing.backed_epoch == made[-1].epoch
    stored = Path(life.program.checkpoint_url)
    assert all((stored / f.key).is_file() for c in life.catalog.completed() for f in c.files)
    shutil.rmtree(life.program.state_root)
    again = live(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", **options)
    assert again.recovery.last is not None and again.recovery.last.lacking == ONE.parallelism
    check(ONE, again, tmp_path)


def lost_each_time(life: Life, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Somebody deletes a file of every checkpoint as soon as it is completed: the numbers of those."""
    numbers: list[int] = []
    clear_up = coordinator.Coordinator._clear_up

    def delete_one(self: Any) -> None:
        newest = self._catalog.completed()[-1]
        numbers.append(newest.number)
        (Path(life.program.checkpoint_url) / newest.files[0].key).unlink()
        clear_up(self)

    monkeypatch.setattr(coordinator.Coordinator, "_clear_up", delete_one)
    return numbers


def test_a_store_that_keeps_nothing_counts_as_failed_checkpoints_and_the_user_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each was completed, so none had failed: one full upload after the other, for ever."""
    monkeypatch.setattr(coordinator, "FIRST_RETRY_S", 0.0)
    options: dict[str, Any] = {"parallelism": 2, "max_records": 20, "checkpoint": "2 epochs"}
    options |= {"checkpoint_failures": 3, "on_checkpoint_failure": "stop", "runner": Waiting}
    life = make(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", **options)
    numbers = lost_each_time(life, monkeypatch)
    life.driver.start()
    with pytest.raises(
        CheckpointError, match="3 checkpoints in a row have failed, the last because the store no"
    ):
        life.driver.run()
    assert len(numbers) == 3 and life.catalog.completed() == []
    failed = [o for o in life.outcomes if isinstance(o, FailedCheckpoint)]
    assert [o.reason for o in failed] == [Reason.LOST] * 3
    assert life.journal.epochs()[0] == 1 and "recovery would replay everything since epoch 0" in caplog.text


def test_after_a_lost_checkpoint_the_next_one_is_not_begun_before_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"parallelism": 2, "max_records": 20, "checkpoint": "2 epochs"}
    options |= {"checkpoint_on_stop": False, "runner": Waiting}
    monkeypatch.setattr(coordinator, "FIRST_RETRY_S", 3600.0)
    monkeypatch.setattr(coordinator, "_LAST_RETRY_S", 3600.0)
    life = make(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", **options)
    lost_each_time(life, monkeypatch)
    life.driver.start()
    life.driver.run()
    epochs = [o.epoch for o in life.outcomes if isinstance(o, Checkpoint)]
    assert epochs == [2, 12], "one more when it stops"


def test_a_listing_that_is_out_of_date_condemns_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients of a shared disk remember for a while what was in a folder."""
    listed = storage.LocalStorage.list
    monkeypatch.setattr(storage.LocalStorage, "list", lambda self, prefix: listed(self, prefix)[:1])
    options: dict[str, Any] = {"parallelism": 2, "max_records": 20, "checkpoint": "2 epochs"}
    life = live(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", runner=Waiting, **options)
    made = [o for o in life.outcomes if isinstance(o, Checkpoint)]
    assert len(made) >= 3 and all(o.trigger != "DAMAGED" for o in made) and life.catalog.unusable() == {}


def test_without_a_checkpoint_and_with_a_trimmed_log_it_is_said_that_state_is_only_on_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"parallelism": 2, "max_records": 20, "checkpoint": "2 epochs"}
    options |= {"checkpoint_keep": 1, "checkpoint_on_stop": False, "runner": Waiting}
    first = live(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", epochs=7, **options)
    assert first.journal.epochs()[0] > 1
    life = make(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", **options)
    lost_each_time(life, monkeypatch)
    life.driver.start()
    life.driver.run()
    assert "state is only on the hosts that have it" in caplog.text


def test_damage_that_is_found_where_a_shard_is_asked_to_stand_is_a_reason_to_rebuild(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"parallelism": ONE.parallelism, "max_records": 20, "trim_log": False}
    options |= {"backend": "rocksdb", "checkpoint": "3 epochs", "runner": Waiting}
    live(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", epochs=5, **options)
    met: list[str] = []
    stand_at = RocksState.stand_at

    def damaged(self: Any, stamp: str) -> bool:
        if not met:
            met.append(stamp)
            raise Exception("Corruption: block checksum mismatch")
        return stand_at(self, stamp)

    monkeypatch.setattr(RocksState, "stand_at", damaged)
    life = live(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", **options)
    assert met and life.recovery.last is not None and life.recovery.last.lacking == 1
    check(ONE, life, tmp_path)


def rocks_error(text: str) -> Any:
    """A function that fails as RocksDB does: with a bare Exception, out of its own library."""
    made: dict[str, Any] = {}
    source = f"def fail(*_):\n    raise Exception({text!r})\n"
    exec(compile(source, "site-packages/rocksdict/native.py", "exec"), made)
    return made["fail"]


class Unsound:
    """A database whose blocks are damaged where a map is looked up."""

    get = staticmethod(rocks_error("Corruption: block checksum mismatch"))


@pytest.mark.parametrize(("always", "trim_log"), [(False, False), (True, False), (True, True)])
def test_damage_that_a_users_function_runs_into_is_not_taken_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, always: bool, trim_log: bool
) -> None:
    """State is rebuilt. If that does not help, the disk is at fault, and the pipeline ends with a word on that.

    A checkpoint that state was loaded from is blamed, but never the only one there is.
    """
    met: list[int] = []
    entry = rocksdb._Entries.committed_entry

    def damaged(self: Any, key: Any, sub: Any) -> Any:
        sound = self._state
        at = sound._at
        if at is not None and at.epoch == 4 and (always or not met):
            met.append(at.epoch)
            self._state = SimpleNamespace(db=Unsound(), group=sound.group)
        try:
            return entry(self, key, sub)
        finally:
            self._state = sound

    monkeypatch.setattr(rocksdb._Entries, "committed_entry", damaged)
    options: dict[str, Any] = {"parallelism": ONE.parallelism, "max_records": 20, "trim_log": trim_log}
    options |= {"backend": "rocksdb", "checkpoint": "2 epochs", "checkpoint_keep": 1, "runner": Waiting}
    life = make(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", **options)
    life.driver.start()
    if always:
        with pytest.raises(StateLostError, match="Epoch 5 found state missing or damaged 20 times") as told:
            life.driver.run()
        assert told.value.uid == "first" and "Corruption: block checksum mismatch" in str(told.value)
        assert len(life.catalog.completed()) == trim_log and life.driver.last_epoch == 4
        return
    life.driver.run()
    assert met and life.recovery.last is not None
    check(ONE, life, tmp_path)


def test_a_database_of_the_users_own_that_is_damaged_is_their_error(tmp_path: Path) -> None:
    class Own(hf.KeyedProcess):
        def process(self, key: Any, record: Any, ctx: hf.Context) -> Any:
            rocks_error("Corruption: of a database of my own")()

    pipeline = hf.Pipeline("own")
    pipeline.read("rows", hf.records(ROWS)).key_by("k").process("own", Own()).write("out", hf.memory())
    with pytest.raises(UserCodeError, match="of a database of my own"):
        live(pipeline, tmp_path / "dir")


def test_what_was_begun_and_never_ended_is_swept_after_hours_and_not_before(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    (tmp_path / ".fetch-old").mkdir()
    for name in (".fetch-old/part", ".v-1.old", ".v-2.new"):
        (tmp_path / name).write_bytes(b"half")
    long_ago = time.time() - ABANDONED_S - 60
    for name in (".fetch-old", ".v-1.old"):
        os.utime(tmp_path / name, (long_ago, long_ago))
    folder.collect(Manifest("00000001-1-0-1", 1, [], ["n"], {}))
    assert [p.name for p in tmp_path.iterdir()] == [".v-2.new"]


@pytest.mark.parametrize("replaced", [True, False])
def test_a_driver_that_was_replaced_does_not_take_its_successor_s_work_for_a_broken_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    """It may wake between two steps of writing a version, whose folder is no longer there."""
    life = make(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", max_records=20)
    write_manifest = Folder.write_manifest

    def cleared_away(self: Folder, manifest: Manifest) -> None:
        if manifest.epoch == 3:
            if replaced:
                Journal.at(tmp_path / "dir").take()
            shutil.rmtree(self.path)
        write_manifest(self, manifest)

    monkeypatch.setattr(Folder, "write_manifest", cleared_away)
    life.driver.start()
    with pytest.raises(
        FencedError if replaced else EngineError, match=r"taken this pipeline over|disk fails"
    ):
        life.driver.run()
    assert life.journal.last_epoch() == 2
