"""Entries under more than the operator's key, forgotten and found by due time: one suite for both backends."""

import datetime as dt
import math
import shutil
import tempfile
import zoneinfo
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.state import due, merging, rocksdb
from holdfast.state.backends import open_state
from holdfast.state.columns import HeapColumns
from holdfast.state.due import EARLIEST, LATEST, DueIndex
from holdfast.state.inspect import shard_tables
from holdfast.state.keygroups import key_groups
from holdfast.state.merging import merge_tables
from holdfast.state.shard import EMPTY, Place, Sealed, ShardState, key_types_of
from holdfast.state.tables import FIRST_NUMBER, GONE, TableSpec, ValueTable, order_bytes
from holdfast.state.versions import Folder

GROUPS = 128
VALUE = pa.struct([("n", pa.int64()), ("due", pa.int64()), ("note", pa.string())])
WINDOWS = TableSpec("windows", "value", VALUE, tuples=True, extra=(pa.int64(),), due="due")
TIMERS = TableSpec("timers", "value", VALUE, tuples=True, due="due")
OWNED = TableSpec("owned", "value", VALUE, tuples=True, extra=(pa.int64(),) * 2, due="due", owned=True)
COUNTS = TableSpec("counts", "value", pa.struct([("n", pa.int64())]), tuples=True)

Changes = dict[Any, Any]


@pytest.fixture(params=["heap", "rocksdb"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Shard:
    """A shard driven as an operator with windows drives it."""

    def __init__(
        self,
        backend: str,
        folder: Path,
        spec: TableSpec = WINDOWS,
        types: tuple[pa.DataType, ...] = (pa.string(),),
    ) -> None:
        self._make = lambda: open_state(backend, Place("op", 0, str(folder), GROUPS), [spec, COUNTS])
        self.state: ShardState = self._make()
        self.folder, self.spec, self.types = folder, spec, list(types)
        self.committed, self.epoch, self.tries = EMPTY, 0, 0

    @property
    def table(self) -> ValueTable:
        table = self.state.tables[self.spec.name]
        assert isinstance(table, ValueTable)
        return table

    def begin(self) -> None:
        if self.state._merging is not None:
            self.state._merging.join()
        assert self.state.begin(self.committed, 1000)
        self.state.key_types = list(self.types)

    def fetch(self, keys: list[Any]) -> None:
        """As operators do it, who know the group of a record and not that of a window."""
        width = len(self.types)
        own = (
            [[k[i] for k in keys] if isinstance(keys[0], tuple) else keys for i in range(width)]
            if keys
            else []
        )
        columns = [pa.array(part, t) for part, t in zip(own, self.types, strict=True)] if keys else []
        groups = key_groups(columns, GROUPS) if keys else np.zeros(0, np.uint16)
        self.state.prefetch(keys, groups, self.spec.name)

    def find(self, keys: list[Any]) -> Changes:
        self.fetch(keys)
        known, columns = self.table.find(keys)
        values = list(zip(*(c.to_pylist() for c in columns), strict=True))
        return {k: v for k, v, ok in zip(keys, values, known.tolist(), strict=True) if ok}

    def attempt(self, changes: Changes) -> Sealed:
        self.begin()
        keys = list(changes)
        self.find(keys)
        gone = np.array([v is GONE for v in changes.values()], bool)
        # What a forgotten key's columns hold is nobody's business: here it is something.
        values = [(self.tries, None, "junk") if v is GONE else v for v in changes.values()]
        columns = [pa.array([v[i] for v in values], VALUE.field(i).type) for i in range(VALUE.num_fields)]
        self.table.stage(keys, columns, gone if gone.any() or self.tries % 2 else None)
        self.tries += 1
        return self.state.seal(f"{self.epoch + 1:08d}-{self.tries}", self.epoch + 1, 1000)

    def commit(self, sealed: Sealed) -> None:
        self.committed = sealed.stamp
        self.epoch += 1

    def write(self, changes: Changes) -> Sealed:
        sealed = self.attempt(changes)
        self.commit(sealed)
        self.begin()
        return sealed

    def restart(self) -> None:
        """The worker ends; the next one has nothing but the disk."""
        self.state.close()
        self.state = self._make()

    def stored(self) -> Changes:
        """What is on the disk, as someone reads it who does not run the pipeline."""
        if not self.committed:
            return {}
        table = dict(shard_tables(Folder(self.folder), self.committed, "op", 0)).get(self.spec.name)
        rows = [] if table is None else table.to_pylist()
        return {
            tuple(v for n, v in row.items() if n != "value"): tuple(row["value"].values()) for row in rows
        }


@pytest.fixture
def shard(backend: str, tmp_path: Path) -> Iterator[Shard]:
    made = Shard(backend, tmp_path)
    yield made
    made.state.close()


def in_order(model: Changes, low: int, high: int) -> list[Any]:
    found = [(v[1], order_bytes(k), k) for k, v in model.items() if low <= v[1] < high]
    return [k for _, _, k in sorted(found)]


DUES = st.one_of(st.integers(-4, 12), st.sampled_from([EARLIEST, LATEST]))
KEYS = st.tuples(st.sampled_from(["a", "b", None]), st.integers(-1, 2))
VALUES = st.tuples(st.integers(0, 5), DUES, st.sampled_from([None, "x", "y"]))
STEPS = st.tuples(
    st.dictionaries(KEYS, st.one_of(st.just(GONE), VALUES), max_size=6),
    st.sampled_from(["committed", "committed", "committed", "dropped", "tried again"]),
    st.booleans(),
    st.tuples(st.integers(-5, 13), st.integers(-5, 13)),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(STEPS, max_size=20), st.booleans())
def test_any_sequence_of_epochs_leaves_what_a_dict_would_hold(steps: list[Any], wide: bool) -> None:
    """One worker lives on, one is ended by chance, on both backends; all seal the same, and find the same."""
    types = (pa.string(), pa.int64()) if wide else (pa.string(),)
    folder = Path(tempfile.mkdtemp(prefix="holdfast-due-"))
    shards = {
        (backend, ends): Shard(backend, folder / f"{backend}-{ends}", types=types)
        for backend in ("heap", "rocksdb")
        for ends in (False, True)
    }
    model: Changes = {}
    keys: list[Any] = [(k, x) for k in ("a", "b", None) for x in range(-1, 3)]
    if wide:
        keys = [(k, 7, x) for k, x in keys]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(due, "_SPARE", 0)
        patch.setattr(due, "_LOOK", 2)
        patch.setattr(merging, "FAN", 3)
        patch.setattr(rocksdb, "BASE_AFTER_DELTAS", 4)
        patch.setattr(rocksdb, "_DUE_CHUNK", 3)
        try:
            for changes, fate, ends, (low, high) in steps:
                if wide:
                    changes = {(k, 7, x): v for (k, x), v in changes.items()}
                after = {k: v for k, v in {**model, **changes}.items() if v is not GONE}
                sealed = {}
                for name, one in shards.items():
                    if fate == "tried again":
                        one.attempt(dict.fromkeys(keys, (9, 0, "never")))
                    if ends and name[1]:
                        one.restart()
                    sealed[name] = one.attempt(changes)
                    assert in_order(model, low, high) == one.table.between(low, high)
                    if fate != "dropped":
                        one.commit(sealed[name])
                assert len({s.digest for s in sealed.values()}) == 1
                if changes:
                    assert {s.live[WINDOWS.name] for s in sealed.values()} == {len(after)}
                if fate != "dropped":
                    model = after
                for one in shards.values():
                    one.begin()
                    assert one.table.due(high) == in_order(model, EARLIEST, high + 1)
                    assert one.table.between(low, high) == in_order(model, low, high)
                    assert one.table.next_due() == min((v[1] for v in model.values()), default=None)
                    later = [v[1] for v in model.values() if v[1] >= 3]
                    assert one.table.next_due(3) == min(later, default=None)
                    assert one.find(keys) == model
                    assert one.table.live() == len(model)
            for one in shards.values():
                assert one.table.due(LATEST) == one.table.between(EARLIEST, LATEST + 1)
                assert one.table.due(LATEST) == in_order(model, EARLIEST, LATEST + 1)
                assert one.stored() == model
        finally:
            for one in shards.values():
                one.state.close()
            shutil.rmtree(folder, ignore_errors=True)


def test_what_is_staged_is_not_due_before_it_is_committed(shard: Shard) -> None:
    shard.write({("a", 0): (1, 10, None), ("b", 0): (1, 20, None)})
    sealed = shard.attempt({("a", 0): GONE, ("b", 0): (2, 5, None), ("c", 0): (1, 1, None)})
    assert shard.table.due(100) == [("a", 0), ("b", 0)]
    assert shard.table.next_due() == 10
    shard.commit(sealed)
    shard.begin()
    assert shard.table.due(100) == [("c", 0), ("b", 0)]
    assert shard.table.next_due() == 1


def test_a_key_that_is_forgotten_and_comes_back_with_its_due_time_is_due_once(shard: Shard) -> None:
    for _ in range(5):
        shard.write({("a", 0): (1, 10, None)})
        shard.write({("a", 0): GONE})
    assert shard.table.due(10) == []
    shard.write({("b", 3): (1, 10, None)})
    assert shard.table.due(10) == [("b", 3)]
    assert shard.table.due(9) == []


def test_forgetting_what_was_never_there_changes_nothing(shard: Shard) -> None:
    sealed = shard.write({("a", 0): GONE})
    assert sealed.live[WINDOWS.name] == 0
    shard.restart()
    shard.begin()
    assert (shard.table.due(LATEST), shard.table.next_due(), shard.table.live()) == ([], None, 0)


def test_a_state_that_was_all_forgotten_and_merged_can_be_loaded(shard: Shard) -> None:
    for i in range(30):
        shard.write({("a", i): (1, i, None)})
        shard.write({("a", i): GONE})
    shard.restart()
    shard.begin()
    assert (shard.table.due(LATEST), shard.stored()) == ([], {})


def test_to_look_for_no_keys_and_to_stage_none_is_no_change(shard: Shard) -> None:
    before = shard.write({("a", 0): (1, 10, None)}).stamp
    assert shard.find([]) == {}
    assert shard.attempt({}).stamp == before


def test_entries_need_no_extra_part_to_be_due(backend: str, tmp_path: Path) -> None:
    shard = Shard(backend, tmp_path, TIMERS, (pa.int64(),))
    shard.write({-1: (1, LATEST, None), 300: (1, -5, None), 2: (1, -5, None)})
    for _ in range(2):
        assert shard.table.due(LATEST - 1) == [2, 300]
        assert shard.table.due(LATEST) == shard.table.due(LATEST + 9) == [2, 300, -1]
        assert shard.table.between(EARLIEST - 9, LATEST) == [2, 300]
        assert shard.table.due(EARLIEST - 9) == shard.table.between(LATEST + 1, LATEST + 9) == []
        assert shard.table.next_due() == -5
        shard.restart()
        shard.begin()
    shard.state.close()


def test_a_key_comes_back_in_its_own_zone(backend: str, tmp_path: Path) -> None:
    zone = zoneinfo.ZoneInfo("Europe/Berlin")
    spec = TableSpec(
        "windows", "value", VALUE, tuples=True, extra=(pa.timestamp("us", "Europe/Berlin"),), due="due"
    )
    shard = Shard(backend, tmp_path, spec)
    start = dt.datetime(2024, 7, 1, 12, tzinfo=zone)
    shard.write({("a", start): (1, 10, None)})
    for _ in range(2):
        ((_, found),) = shard.table.due(10)
        assert (found, found.utcoffset()) == (start, dt.timedelta(hours=2))
        shard.restart()
        shard.begin()
    shard.state.close()


def test_entries_stay_in_the_key_group_of_the_operators_key(shard: Shard) -> None:
    keys = [(name, x) for name in "abcdefgh" for x in range(20)]
    shard.write({k: (1, 1, None) for k in keys})
    groups = shard.state.groups(keys, WINDOWS)
    assert groups.tolist() == key_groups([pa.array([k for k, _ in keys])], GROUPS).tolist()
    assert shard.state.groups([], WINDOWS).tolist() == []
    if isinstance(shard.state, rocksdb.RocksState):
        stored = [k for k, _ in rocksdb._entries(shard.state.db, 0)]
        assert sorted(int.from_bytes(k[:2], "big") for k in stored) == sorted(groups.tolist())


def test_a_stored_version_knows_the_operators_key_from_what_is_beside_it(shard: Shard) -> None:
    shard.write({("a", 5): (1, 1, None)})
    manifest = Folder(shard.folder).manifest(shard.committed)
    assert manifest is not None
    assert key_types_of(manifest) == [pa.string()]
    (table,) = [t for _, t in shard_tables(Folder(shard.folder), shard.committed, "op", 0)]
    assert table.schema.names == ["k0", "x0", "value"]


def test_keys_are_fetched_for_the_tables_that_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []
    monkeypatch.setattr(rocksdb._Values, "prefetch_groups", lambda self, *_: fetched.append(self.spec.name))
    shard = Shard("rocksdb", tmp_path)
    shard.state.prefetch(["a"], np.zeros(1, np.uint16))
    assert fetched == ["counts"]
    shard.state.prefetch([("a", 0)], np.zeros(1, np.uint16), WINDOWS.name)
    assert fetched == ["counts", "windows"]


def test_what_is_due_can_be_forgotten_without_fetching_it_again(shard: Shard) -> None:
    shard.write({("a", x): (1, x, None) for x in range(10)})
    shard.restart()
    shard.begin()
    keys = shard.table.due(3)
    shard.table.stage(keys, [pa.nulls(4, f.type) for f in VALUE], np.ones(4, bool))
    sealed = shard.state.seal("00000002-9", 2, 1000)
    assert sealed.live[WINDOWS.name] == 6
    shard.commit(sealed)
    shard.begin()
    assert shard.table.due(LATEST) == [("a", x) for x in range(4, 10)]


def test_keys_that_come_and_go_are_counted_one_by_one_however_many(shard: Shard) -> None:
    shard.write({("a", x): (1, x, None) for x in range(12_000)})
    later = {
        ("a", x if known else x + 12_000): (2, x, None) for x in range(12_000) for known in (True, False)
    }
    assert shard.write(later).live[WINDOWS.name] == 24_000


def test_what_was_found_before_a_commit_is_not_believed_after_it(shard: Shard) -> None:
    shard.write({("a", 0): (1, 1, None)})
    keys = [("b", 0)]
    sealed = shard.attempt({("b", 0): (1, 2, None), ("a", 0): GONE})
    shard.find(keys)
    shard.commit(sealed)
    shard.begin()
    shard.fetch(keys)
    shard.table.stage(keys, [pa.array([5]), pa.array([7]), pa.array(["y"])])
    shard.commit(shard.state.seal("00000003-9", 3, 1000))
    shard.begin()
    assert shard.table.due(LATEST) == keys
    assert shard.find(keys) == {("b", 0): (5, 7, "y")}


def test_merging_keeps_entries_of_one_key_apart() -> None:
    def rows(keys: list[Any], starts: list[int], values: list[Any]) -> pa.Table:
        return pa.table(
            {
                "k0": pa.array(keys, pa.string()),
                "x0": pa.array(starts, pa.int64()),
                "value": pa.array(values, pa.int64()),
                "live": pa.array([v is not None for v in values]),
            }
        )

    old = rows(["a", "a", "b", None], [0, 1, 0, 1], [1, 2, 3, 4])
    new = rows(["a", "b", None], [1, 1, 1], [5, 6, None])
    merged = merge_tables([old, new], oldest=True).drop_columns(["live"]).to_pylist()
    assert [tuple(r.values()) for r in merged] == [("a", 0, 1), ("b", 0, 3), ("a", 1, 5), ("b", 1, 6)]
    assert merge_tables([old, new], oldest=False).num_rows == 5


def test_rows_of_what_is_forgotten_are_used_again(tmp_path: Path) -> None:
    shard = Shard("heap", tmp_path)
    for i in range(50):
        old = {("a", j): GONE for j in range(100 * (i - 1), 100 * i)} if i else {}
        shard.write({**old, **{("a", j): (j, j, f"note {j}") for j in range(100 * i, 100 * (i + 1))}})
    table = shard.table
    assert isinstance(table, HeapColumns)
    assert table._rows == 100
    assert shard.find([("a", 4999), ("a", 4899)]) == {("a", 4999): (4999, 4999, "note 4999")}
    shard.write({("a", j): GONE for j in range(4900, 5000)})
    assert not any(table._names) and not any(table._columns[2]._values)


def test_stale_entries_of_a_database_are_removed_when_they_are_found(tmp_path: Path) -> None:
    shard = Shard("rocksdb", tmp_path)
    for when in range(5):
        shard.write({("a", x): (1, 10 * when + x, None) for x in range(10)})
        shard.restart()
    shard.begin()
    assert len(index_rows(shard)) == 50
    assert shard.table.due(40) == [("a", 0)]
    assert len(index_rows(shard)) == 10
    shard.write({("a", x): (1, 100, None) if x % 2 else GONE for x in range(10)})
    assert len(index_rows(shard)) == 5
    shard.state.close()


def index_rows(shard: Shard) -> list[Any]:
    assert isinstance(shard.state, rocksdb.RocksState)
    return list(rocksdb.scan(shard.state.db, rocksdb._DUE_GROUP))


ROWS = st.integers(0, 30)
NOTES = st.tuples(st.just("note"), st.dictionaries(ROWS, DUES, max_size=12))
FORGETS = st.tuples(st.just("forget"), st.sets(ROWS, max_size=12))
ASKS = st.tuples(st.just("ask"), st.tuples(DUES, DUES))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(NOTES, FORGETS, ASKS), max_size=40))
def test_an_index_of_due_times_finds_each_row_once_whatever_happened_to_it(steps: list[Any]) -> None:
    index, model = DueIndex(), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(due, "_SPARE", 0)
        patch.setattr(due, "_LOOK", 2)
        for what, arg in steps:
            if what == "note":
                index.note(np.array(list(arg), np.int64), np.array(list(arg.values()), np.int64))
                model.update(arg)
            elif what == "forget":
                known = [r for r in arg if r in model]
                index.forget(np.array(known, np.int64))
                for row in known:
                    del model[row]
            else:
                low, high = arg
                asked = index.between(low, high).tolist()
                assert asked == sorted(r for r, d in model.items() if low <= d <= high)
                assert index.first() == min(model.values(), default=None)
            assert len(index) <= 3 * len(model)
        assert index.between(EARLIEST, LATEST).tolist() == sorted(model)


def test_a_row_that_was_let_go_and_is_back_with_the_due_time_it_had_is_found_once() -> None:
    index, rows, dues = DueIndex(), np.arange(10), np.arange(10) // 2
    index.note(rows, dues)
    for _ in range(3):
        index.forget(rows[:2])
        index.note(rows[:2], dues[:2])
    assert len(index) > 10
    assert index.between(EARLIEST, LATEST).tolist() == rows.tolist()
    index.note(np.arange(10, 20), np.arange(10))
    assert len(index._runs) == 1
    assert len(index) == 20


def test_an_index_grows_with_what_is_kept_and_not_with_what_was_said() -> None:
    index = DueIndex()
    rows = np.arange(100)
    for i in range(1000):
        index.note(rows, rows + i)
        assert len(index) <= 300 + due._SPARE
        index.forget(rows[:50])
        index.note(rows[:50], rows[:50] + i)
    assert len(index) <= 300 + due._SPARE
    rows = np.arange(10_000)
    index.note(rows, rows)
    index.forget(rows[100:])
    assert len(index) == 100


def test_an_index_has_few_runs_and_no_entry_is_merged_often() -> None:
    written = 0

    class Counting(DueIndex):
        def _merged(self, runs: Any) -> Any:
            nonlocal written
            written += sum(map(len, runs))
            return super()._merged(runs)

    index, count = Counting(), 4000
    for i in range(count):
        index.note(np.array([i]), np.array([i * 7919 % count]))
        assert len(index._runs) <= 1 + math.log2(i + 1)
    assert written <= count * (2 + math.log2(count))


def test_to_ask_what_is_due_costs_what_is_due() -> None:
    looked = 0

    class Counting(DueIndex):
        def _alive(self, run: Any, low: int, high: int) -> Any:
            nonlocal looked
            alive = super()._alive(run, low, high)
            looked += len(alive)
            return alive

    index, count = Counting(), 100_000
    for part in np.split(np.arange(count), 10):
        index.note(part, part * 7919 % count)
    looked = 0
    for upto in range(99, 10_000, 100):
        found = index.between(EARLIEST, upto)
        assert len(found) == 100
        index.forget(found)
    assert looked <= 3 * 10_000
    assert len(index) == count - 10_000 + 100


def test_what_is_owned_is_found_under_its_owner_as_it_was_committed(backend: str, tmp_path: Path) -> None:
    shard = Shard(backend, tmp_path, OWNED)
    first, value = FIRST_NUMBER, (1, 5, "x")

    def under(*owners: Any) -> set[Any]:
        found = shard.table.under(list(owners), lambda: shard.state.groups([(*o, 0) for o in owners], OWNED))
        known, _ = shard.table.find(found)
        assert known.all() and len(found) == len(set(found))
        return set(found)

    shard.begin()
    assert under(("a", 7)) == set()
    far = first + (5 << 32)
    keys = [("a", 7, first), ("a", 7, first + 1), ("a", 70_000, first), ("b", 7, far)]
    shard.write(dict.fromkeys(keys, value))
    for _ in range(2):
        assert under(("a", 7)) == set(keys[:2])
        assert under(("b", 7), ("c", 7), ("a", 70_000)) == {keys[3], keys[2]}
        shard.restart()
        shard.begin()
    shard.write({keys[0]: GONE, keys[3]: GONE})
    shard.attempt({("a", 7, first + 9): value})  # nobody decides for it
    shard.begin()
    for _ in range(2):
        assert under(("a", 7), ("b", 7)) == {keys[1]}
        shard.restart()
        shard.begin()
