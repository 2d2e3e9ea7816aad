"""The log: records are created once, and who loses a race must end."""

import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import DirectoryError, FencedError, IncompatibleError
from holdfast.log.journal import Journal
from holdfast.log.records import Commit, Identity, Plan
from holdfast.log.store import LocalStore, LogStore, ObjectStore


@pytest.fixture(params=["local", "object"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> LogStore:
    return LocalStore(tmp_path) if request.param == "local" else ObjectStore("memory:///")


def plan(epoch: int, generation: int = 1) -> Plan:
    return Plan(epoch, generation, 1000, [[]], {}, {})


def commit(epoch: int) -> Commit:
    return Commit(epoch, 1, {}, {}, {})


def test_the_second_of_two_writers_is_refused_and_changes_nothing(store: LogStore) -> None:
    assert store.put_if_absent("a/x", b"first")
    assert not store.put_if_absent("a/x", b"second")
    assert store.get("a/x") == b"first"
    assert store.list("a") == ["x"]
    store.delete("a/x")
    store.delete("a/x")
    assert store.get("a/x") is None


def test_of_many_who_race_for_a_name_exactly_one_wins(store: LogStore) -> None:
    won: list[int] = []
    start = threading.Barrier(8)

    def race(n: int) -> None:
        start.wait()
        if store.put_if_absent("race", str(n).encode()):
            won.append(n)

    threads = [threading.Thread(target=race, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.get("race") == str(won[0]).encode()


def test_a_store_that_overwrites_is_refused() -> None:
    class Careless(ObjectStore):
        def put_if_absent(self, name: str, data: bytes) -> bool:
            return True

    with pytest.raises(DirectoryError, match="only if it is absent"):
        Careless("memory:///")


def test_a_newer_generation_fences_off_every_older_one(store: LogStore) -> None:
    old, new = Journal(store), Journal(store)
    assert old.take().number == 1
    old.put_plan(plan(1))
    assert new.take().number == 2
    with pytest.raises(FencedError, match="Generation 2 has taken this pipeline over"):
        old.check_fence()
    new.put_commit(commit(1))
    with pytest.raises(FencedError, match="Generation 2 has taken this pipeline over"):
        old.put_commit(commit(1))
    with pytest.raises(FencedError, match="Generation 2 has taken this pipeline over"):
        old.put_plan(plan(1, 2))


def test_whoever_wakes_up_after_its_epoch_was_trimmed_decides_nothing(store: LogStore) -> None:
    """The names are free again, and it used to take them: it published an old epoch over what was merged by then."""
    old, new = Journal(store), Journal(store)
    old.take()
    old.put_plan(plan(1))
    new.take()
    for epoch in (1, 2, 3):
        new.put_plan(plan(epoch, 2))
        new.put_commit(commit(epoch))
    assert new.trim(2) == 2
    with pytest.raises(FencedError):
        old.put_commit(commit(1))
    with pytest.raises(FencedError):
        old.put_plan(plan(2))
    assert new.epochs() == [3] and new.plan(2) is None


class Overtaken(Journal):
    """Is replaced at the very moment at which it creates a record of an epoch."""

    def __init__(self, store: LogStore, other: Journal) -> None:
        super().__init__(store)
        self._other = other

    def _create(self, name: str, data: bytes) -> bool:
        if name.startswith(("plans", "commits")):
            self._other.take()
        return super()._create(name, data)


def test_whoever_is_replaced_while_it_records_ends_and_the_newest_one_goes_on_from_it(
    store: LogStore,
) -> None:
    new = Journal(store)
    old = Overtaken(store, new)
    old.take()
    with pytest.raises(FencedError):
        old.put_plan(plan(1))
    assert new.put_plan(plan(1, 2)) == plan(1)
    newest = Journal(store)
    between = Overtaken(store, newest)
    between.take()
    with pytest.raises(FencedError):
        between.put_commit(commit(1))
    assert newest.put_commit(commit(1)) == newest.commit(1)


def test_what_a_driver_of_the_past_recorded_first_holds_for_the_newest_one(store: LogStore) -> None:
    old, new = Journal(store), Journal(store)
    old.take()
    assert old.put_plan(plan(1)) == plan(1)
    assert old.put_commit(commit(1)).epoch == 1
    new.take()
    assert new.put_plan(plan(1, 2)) == plan(1)
    assert new.put_commit(commit(1)) == old.commit(1)


def test_trimming_leaves_the_newest_commit_and_what_comes_after_the_checkpoint(store: LogStore) -> None:
    journal = Journal(store)
    for epoch in range(1, 6):
        journal.put_plan(plan(epoch))
        journal.put_commit(commit(epoch))
    assert journal.trim(3) == 3
    assert journal.epochs() == [4, 5]
    assert journal.plan(3) is None and journal.plan(4) is not None
    assert journal.trim(5) == 1
    assert journal.epochs() == [5]
    assert journal.plan(5) is not None


def test_the_newest_replan_is_the_plan_that_holds(store: LogStore) -> None:
    journal = Journal(store)
    journal.put_plan(plan(3))
    journal.put_plan(Plan(3, 1, 2000, [[]], {}, {}, replan=1))
    found = journal.plan(3)
    assert found is not None
    assert (found.replan, found.now_ms) == (1, 2000)
    assert journal.plan(4) is None


def test_what_was_decided_is_read_back(store: LogStore) -> None:
    journal = Journal(store)
    assert journal.last_epoch() == 0
    for epoch in (1, 2, 10):
        journal.put_commit(commit(epoch))
    assert journal.last_epoch() == 10
    assert journal.commit(2) == commit(2)


def test_a_wish_to_stop_reaches_the_newest_generation_only(store: LogStore) -> None:
    old, new = Journal(store), Journal(store)
    old.take()
    new.take()
    Journal(store).ask_to_stop()
    assert new.asked_to_stop()
    assert not old.asked_to_stop()


def test_what_generations_with_an_epoch_have_run_belongs_to_the_directory(store: LogStore) -> None:
    journal = Journal(store)
    journal.create_identity(Identity("p", 128, 2, "heap", {"a": {"kind": "source"}}))

    def operators() -> dict[str, dict[str, Any]]:
        found = journal.identity()
        assert found is not None
        return found.operators

    journal.take(operators={"b": {"kind": "sink"}})
    assert set(operators()) == {"a"}
    journal.put_commit(commit(1))
    assert set(operators()) == {"a", "b"}
    journal.take(operators={"c": {"kind": "reduce"}})
    journal.put_plan(plan(2, generation=2))
    assert set(operators()) == {"a", "b", "c"}
    journal.take(operators={"b": {"kind": "process"}})
    journal.put_commit(Commit(2, 3, {}, {}, {}))
    kinds = {uid: facts["kind"] for uid, facts in operators().items()}
    assert kinds == {"a": "source", "b": "process", "c": "reduce"}
    journal.take(operators={"d": {"kind": "sink"}})
    assert "d" not in operators()


def test_a_format_from_the_future_is_refused(store: LogStore) -> None:
    Journal(store).create_identity(Identity("p", 128, 2, "heap", {}, format=99))
    with pytest.raises(IncompatibleError, match="format 99"):
        Journal(store).identity()
