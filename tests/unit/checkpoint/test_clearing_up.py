"""Clearing a store up stands in no backup's way for long, and what woke up late changes nothing."""

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import coordinator
from holdfast.checkpoint.metadata import Checkpoint
from holdfast.checkpoint.retention import upload_folder
from holdfast.checkpoint.storage import LocalStorage
from holdfast.errors import FencedError
from holdfast.log.journal import Journal
from tests.drivers import Life, make
from tests.unit.checkpoint.test_failures import counting

WAKES_S = 60.0
LEFTOVER = upload_folder(1, 1, 99) + "/of nobody"


class Hanging(LocalStorage):
    """Hangs at one call, from when it is told to until it is let go."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.at = ""
        self.hangs, self.go = threading.Event(), threading.Event()
        self.calls: Counter[str] = Counter()
        self.deleted: set[str] = set()
        self.error: Exception | None = None

    def _reach(self, call: str) -> None:
        self.calls[call] += 1
        if call == self.at:
            self.hangs.set()
            assert self.go.wait(WAKES_S)
            if self.error is not None:
                raise self.error

    def list(self, prefix: str) -> Any:
        self._reach("list")
        return super().list(prefix)

    def size(self, name: str) -> int | None:
        self._reach("size")
        return super().size(name)

    def delete(self, names: Any) -> None:
        self._reach("delete")
        self.deleted.update(names)
        super().delete(names)


class Scene:
    """A driver that backs every epoch up and keeps one checkpoint, with a store that can hang and a clock that is set."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.life: Life = make(
            counting(), directory, checkpoint="1 epochs", checkpoint_keep=1, max_records=10, interval="0s"
        )
        self.store = Hanging(Path(self.life.program.checkpoint_url))
        self.now_s = 1000.0
        self.coordinator = self.life.coordinator
        monkeypatch.setattr(coordinator, "open_storage", lambda url, options: self.store)
        monkeypatch.setattr(self.coordinator, "_clock_s", lambda: self.now_s)
        self.life.driver.start()

    def epoch(self) -> None:
        """One more epoch, and the backup that is begun after it, as far as its outcome."""
        plan = self.life.driver._new_plan()
        assert plan is not None
        self.life.driver._run_epoch(plan)
        self.backup_ends()

    def backup_ends(self) -> None:
        if self.coordinator._thread is not None:
            self.coordinator._thread.join(WAKES_S)
            assert not self.coordinator._thread.is_alive()
        assert self.coordinator.barrier == 0

    def consider(self, **more: Any) -> int | None:
        """Ask what is due: the epoch that is being backed up then."""
        last, plan = self.life.driver._last, self.life.driver._last_plan
        assert last is not None and plan is not None
        self.coordinator.consider(last, plan, **more)
        return self.coordinator.pending_epoch

    def hang(self, at: str = "list") -> None:
        """Two epochs: after the first all is cleared up; after the second, with something to delete, the store hangs."""
        self.epoch()
        assert self.coordinator.wait(WAKES_S) and not tidying()
        self.store.put(LEFTOVER, b"uploaded in vain")
        self.store.at = at
        self.epoch()
        assert self.store.hangs.wait(WAKES_S)

    def wake(self) -> None:
        """Let it go, and wait for whoever hung in it."""
        self.store.at = ""
        self.store.go.set()
        for thread in tidying():
            thread.join(WAKES_S)
        assert not tidying()

    def backed_up(self) -> list[int]:
        return [o.epoch for o in self.life.outcomes if isinstance(o, Checkpoint)]

    def kept(self) -> Any:
        """All that clearing up takes away or condemns."""
        files = {name for name, _ in LocalStorage(Path(self.life.program.checkpoint_url)).list("")}
        journal = self.life.journal
        return files, journal.checkpoints(), journal.epochs(), journal.condemned()


def tidying() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "holdfast-tidy"]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(tmp_path, monkeypatch)
    yield made
    made.wake()
    made.coordinator.stop()


def test_a_backup_is_over_while_its_store_is_cleared_up_and_the_next_waits_but_not_for_ever(
    scene: Scene,
) -> None:
    scene.hang()
    assert scene.backed_up() == [1, 2] and tidying()
    assert (scene.coordinator.pending_epoch, scene.coordinator.barrier) == (None, 0)
    assert scene.coordinator.keeping == {}
    assert scene.coordinator.wait(0.001), "no backup is under way"
    scene.epoch()
    scene.now_s += 5.0
    assert scene.consider() is None
    scene.now_s += 2.0
    assert scene.consider(at_most_s=7.0) is None, "a backup may take as long"
    assert scene.consider(at_most_s=6.9) == 3
    scene.backup_ends()
    assert scene.backed_up() == [1, 2, 3]


def test_the_last_backup_of_a_run_is_begun_once_somebody_has_waited_for_the_store(scene: Scene) -> None:
    scene.hang()
    scene.epoch()
    assert scene.coordinator.wait(0.001)
    assert scene.consider(at_most_s=100.0) is None
    assert scene.consider(stopping=True, at_most_s=100.0) == 3


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("at", ["list", "size"])
def test_a_store_that_wakes_up_after_the_next_backup_loses_nothing_and_condemns_nothing(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, at: str, damaged: bool
) -> None:
    """No backup began any more, and once a replay would have been too long the pipeline stood still."""
    if at == "size":
        monkeypatch.setattr(coordinator, "doubtful", lambda completed, stored: [completed[-1].files[0].key])
    scene.hang(at)
    scene.epoch()
    scene.now_s += 6.0
    assert scene.consider() == 3
    scene.backup_ends()
    assert scene.backed_up() == [1, 2, 3], "nobody waits for the store any more"
    scene.epoch()
    assert scene.backed_up() == [1, 2, 3, 4] and len(tidying()) == 1, "one hangs, another is not begun"
    number = scene.life.catalog.completed()[1].number
    assert caplog.text.count(f"Clearing up after checkpoint {number} has taken longer than 6 s") == 1
    if damaged:
        lose_a_file(scene)
    before, calls = scene.kept(), Counter(scene.store.calls)
    scene.wake()
    assert scene.kept() == before and len(scene.life.catalog.completed()) == 4
    assert scene.store.calls == calls, "the store is not even asked"
    assert scene.life.catalog.unusable() == {} and scene.coordinator.newest_epoch == 4


def lose_a_file(scene: Scene) -> None:
    """Of the checkpoint that is cleared up after: who looks condemns it."""
    made = scene.life.catalog.completed()[1]
    (Path(scene.life.program.checkpoint_url) / made.files[0].key).unlink()


def test_what_is_left_by_one_that_was_disowned_is_cleared_up_by_the_next(scene: Scene) -> None:
    scene.hang()
    scene.epoch()
    scene.now_s += 6.0
    assert scene.consider() == 3
    scene.backup_ends()
    scene.wake()
    scene.epoch()
    assert scene.coordinator.wait(WAKES_S)
    (newest,) = scene.life.catalog.completed()
    files, _, epochs, _ = scene.kept()
    assert newest.epoch == 4 and epochs == [4] and files == {f.key for f in newest.files}


def test_a_deletion_that_goes_on_when_it_is_disowned_takes_nothing_of_the_next_backup(scene: Scene) -> None:
    scene.hang("delete")
    scene.epoch()
    scene.now_s += 6.0
    assert scene.consider() == 3
    scene.backup_ends()
    scene.wake()
    files = scene.kept()[0]
    assert scene.store.deleted == {LEFTOVER}
    assert files >= {f.key for c in scene.life.catalog.completed() for f in c.files}


class Trimming:
    """A log that takes long to trim: of records, not of the store, so it is not given up in the middle."""

    def __init__(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hangs, self.go = threading.Event(), threading.Event()
        trim = scene.coordinator._journal.trim

        def slowly(upto: int) -> int:
            self.hangs.set()
            assert self.go.wait(WAKES_S)
            return trim(upto)

        monkeypatch.setattr(scene.coordinator._journal, "trim", slowly)


def test_a_log_that_takes_long_to_trim_holds_no_epoch_up_and_the_next_backup_until_it_is_through(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.epoch()
    assert scene.coordinator.wait(WAKES_S)
    log = Trimming(scene, monkeypatch)
    scene.epoch()
    assert log.hangs.wait(WAKES_S)
    scene.epoch()
    scene.now_s += 6.0
    assert scene.consider() is None, "asked, and answered at once"
    assert scene.backed_up() == [1, 2]
    log.go.set()
    for thread in tidying():
        thread.join(WAKES_S)
    assert scene.consider() == 3
    scene.backup_ends()
    newest = scene.life.catalog.completed()[-1]
    assert newest.epoch == 3 and scene.kept()[0] >= {f.key for f in newest.files}


def test_who_has_stopped_deletes_nothing_any_more_when_its_store_wakes_up(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook the next generation may be running in the same process by then."""
    monkeypatch.setattr(coordinator, "_JOIN_S", 0.01)
    scene.hang()
    scene.coordinator.stop()
    before = scene.kept()
    scene.wake()
    assert scene.kept() == before and not scene.store.deleted


def test_a_driver_that_was_replaced_while_its_store_hung_deletes_nothing(
    scene: Scene, tmp_path: Path
) -> None:
    scene.hang()
    Journal.at(tmp_path).take(operators={})
    before = scene.kept()
    scene.wake()
    assert scene.kept() == before and not scene.store.deleted
    with pytest.raises(FencedError, match="Generation 2"):
        scene.coordinator.wait(WAKES_S)


def test_a_driver_that_was_replaced_hears_of_it_from_clearing_up(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        scene.coordinator, "_on_outcome", lambda outcome: Journal.at(tmp_path).take(operators={})
    )
    with pytest.raises(FencedError, match="Generation 2 has taken this pipeline over"):
        scene.epoch()
        scene.coordinator.wait(WAKES_S)


@pytest.mark.parametrize("disowned", [False, True])
def test_what_ends_a_clearing_up_ends_the_driver_unless_it_was_disowned(scene: Scene, disowned: bool) -> None:
    scene.store.error = FencedError("another driver is there")
    scene.hang()
    if disowned:
        scene.epoch()
        scene.now_s += 6.0
        assert scene.consider() == 3
        scene.backup_ends()
    scene.wake()
    if disowned:
        assert scene.coordinator.wait(WAKES_S)
        return
    with pytest.raises(FencedError, match="another driver is there"):
        scene.coordinator.wait(WAKES_S)


@pytest.mark.parametrize("how", ["wait", "stop"])
def test_whoever_waits_for_a_backup_finds_the_store_cleared_up(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    join = coordinator.ClearingUp.join

    def let_go_and_join(self: Any, timeout: float | None = None) -> None:
        scene.store.go.set()
        join(self, timeout)

    scene.hang("delete")
    monkeypatch.setattr(coordinator.ClearingUp, "join", let_go_and_join)
    if how == "wait":
        assert scene.coordinator.wait(WAKES_S)
    else:
        scene.coordinator.stop()
    assert scene.store.deleted == {LEFTOVER} and not tidying()
