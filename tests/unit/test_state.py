"""One suite for every state backend: what a version is, and what an attempt may not touch."""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import rocksdict as rd
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.errors import MemoryLimitError, StateError
from holdfast.state import heap
from holdfast.state.backends import open_state
from holdfast.state.inspect import shard_tables
from holdfast.state.keygroups import key_groups
from holdfast.state.merging import FAN
from holdfast.state.rocksdb import scan
from holdfast.state.shard import EMPTY, Place, ShardState, is_damage
from holdfast.state.tables import GONE, MISSING, EntryTable, TableSpec, ValueTable
from holdfast.state.versions import Folder, Manifest

SPECS = [
    TableSpec("total", "value", pa.float64()),
    TableSpec("pages", "map", pa.int64(), sub_type=pa.string()),
    TableSpec("seen", "value", pa.int64(), ttl_ms=1000),
    TableSpec("recent", "map", pa.int64(), sub_type=pa.string(), ttl_ms=1000),
    TableSpec("steps", "list", pa.int64(), sub_type=pa.int64()),
    TableSpec("latest", "list", pa.int64(), sub_type=pa.int64(), ttl_ms=1000),
]


@pytest.fixture(params=["heap", "rocksdb"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Shard:
    """A shard driven as the engine drives it: begin, write, seal; commit or forget."""

    def __init__(self, backend: str, folder: Path, **limits: Any) -> None:
        self._make = lambda: open_state(backend, Place("op", 0, str(folder), 128, **limits), SPECS)
        self.state: ShardState = self._make()
        self.folder = folder
        self.committed, self.epoch, self.now_ms = EMPTY, 0, 1000

    def attempt(self, writes: dict[str, dict[Any, Any]], keys: list[str] | None = None) -> str:
        """Apply writes as one attempt of the next epoch; the stamp it was sealed with."""
        assert self.state.begin(self.committed, self.now_ms)
        self.state.key_types = [pa.string()]
        touched = sorted({k for w in writes.values() for k in w} | set(keys or []))
        if touched:
            self.state.prefetch(touched, key_groups([pa.array(touched)], 128))
        for name, changes in writes.items():
            table = self.state.tables[name]
            for key, value in changes.items():
                self.state.group = int(key_groups([pa.array([key])], 128)[0])
                if isinstance(table, ValueTable):
                    table.changes[key] = value
                elif value is GONE:
                    table.clear(key)
                elif isinstance(value, list):
                    table.append(key, value)
                else:
                    for sub, one in value.items():
                        table.put(key, sub, one)
        self.tries = getattr(self, "tries", 0) + 1
        return self.state.seal(f"{self.epoch + 1:08d}-{self.tries}", self.epoch + 1, self.now_ms).stamp

    def commit(self, stamp: str) -> None:
        self.committed = stamp
        self.epoch += 1
        self.now_ms += 100

    def write(self, **writes: dict[Any, Any]) -> None:
        self.commit(self.attempt(writes))

    def restart(self) -> None:
        """The worker ends; the next one has nothing but the disk."""
        self.state.close()
        self.state = self._make()

    def read(self) -> dict[str, dict[Any, Any]]:
        """Everything that is stored, as someone reads it who does not run the pipeline."""
        if not self.committed:
            return {}
        found: dict[str, dict[Any, Any]] = {}
        for name, table in shard_tables(Folder(self.folder), self.committed, "op", 0):
            columns = [c for c in table.schema.names if c != "value"]
            for row in table.to_pylist():
                key = row[columns[0]] if len(columns) == 1 else tuple(row[c] for c in columns)
                found.setdefault(name, {})[key] = row["value"]
        return found

    def seen(self, name: str, key: str) -> Any:
        """A key's value or entries as an attempt sees them."""
        assert self.state.begin(self.committed, self.now_ms)
        self.state.key_types = self.state.key_types or [pa.string()]
        groups = key_groups([pa.array([key])], 128)
        self.state.prefetch([key], groups)
        self.state.group = int(groups[0])
        table = self.state.tables[name]
        return table.get(key) if isinstance(table, ValueTable) else dict(table.entries(key))


@pytest.fixture
def shard(backend: str, tmp_path: Path) -> Iterator[Shard]:
    made = Shard(backend, tmp_path)
    yield made
    made.state.close()


def test_what_was_committed_is_seen_by_the_next_epoch(shard: Shard) -> None:
    shard.write(total={"a": 1.0, "b": 2.0}, pages={"a": {"/": 1, "/x": 2}})
    shard.write(total={"a": 3.0}, pages={"a": {"/": GONE}})
    assert shard.seen("total", "a") == 3.0
    assert shard.seen("total", "b") == 2.0
    assert shard.seen("pages", "a") == {"/x": 2}
    assert shard.read() == {"total": {"a": 3.0, "b": 2.0}, "pages": {("a", "/x"): 2}}


def test_an_attempt_that_was_not_committed_leaves_no_trace(shard: Shard) -> None:
    shard.write(total={"a": 1.0}, pages={"a": {"/": 1}})
    shard.attempt({"total": {"a": 99.0, "c": 1.0}, "pages": {"a": GONE}})
    assert shard.seen("total", "a") == 1.0
    assert shard.seen("total", "c") is MISSING
    assert shard.seen("pages", "a") == {"/": 1}


def test_the_winner_of_two_attempts_is_the_one_that_was_committed(shard: Shard) -> None:
    first = shard.attempt({"total": {"a": 1.0}})
    second = shard.attempt({"total": {"a": 2.0}})
    shard.commit(first)
    assert first != second
    assert shard.seen("total", "a") == 1.0
    assert shard.read() == {"total": {"a": 1.0}}


def test_a_worker_that_ended_costs_a_reload_and_no_result(shard: Shard) -> None:
    for i in range(30):
        shard.write(total={f"k{i % 7}": float(i)}, pages={f"k{i % 3}": {f"/{i % 4}": i}})
        before = shard.read()
        shard.restart()
        assert shard.read() == before
        assert shard.seen("total", f"k{i % 7}") == float(i)
    assert shard.state.reloads == 1


def test_a_host_without_the_version_says_so_and_changes_nothing(shard: Shard, tmp_path: Path) -> None:
    shard.write(total={"a": 1.0})
    shard.restart()
    assert not shard.state.begin("00000009-7", shard.now_ms)
    assert shard.seen("total", "a") == 1.0


def test_a_torn_delta_is_noticed(shard: Shard, tmp_path: Path) -> None:
    shard.write(total={"a": 1.0})
    delta = next(tmp_path.glob("d-*.delta"))
    delta.write_bytes(delta.read_bytes()[:-9])
    shard.restart()
    assert not shard.state.begin(shard.committed, shard.now_ms)


def test_clearing_a_map_forgets_its_entries_and_keeps_what_comes_after(shard: Shard) -> None:
    shard.write(pages={"a": {"/": 1, "/x": 2}, "b": {"/": 5}})
    assert shard.state.begin(shard.committed, shard.now_ms)
    table = shard.state.tables["pages"]
    assert isinstance(table, EntryTable)
    table.clear("a")
    table.put("a", "/new", 3)
    shard.commit(shard.state.seal("00000002-z", 2, shard.now_ms).stamp)
    assert shard.seen("pages", "a") == {"/new": 3}
    shard.restart()
    assert shard.seen("pages", "a") == {"/new": 3}
    assert shard.seen("pages", "b") == {"/": 5}


def test_a_list_grows_behind_its_last_place_and_begins_anew_when_nothing_is_left(shard: Shard) -> None:
    shard.write(steps={"a": [1, 2], "b": [7]}, latest={"a": [1, 2]})
    assert shard.state.begin(shard.committed, shard.now_ms)
    shard.write(steps={"a": [3], "b": GONE}, latest={"a": [3]})
    shard.restart()
    shard.write(steps={"a": [4, 5], "b": [8, 9]})
    assert shard.seen("steps", "a") == {0: 1, 1: 2, 2: 3, 3: 4, 4: 5}
    assert shard.seen("steps", "b") == {0: 8, 1: 9}
    shard.now_ms = 2050  # the first two are over, and the third when it is looked at
    shard.write(latest={"a": [4]})
    assert shard.seen("latest", "a") == {3: 4}
    shard.now_ms = 9000
    shard.write(latest={"a": [5]})
    shard.restart()
    shard.write(latest={"a": [6]})
    assert shard.seen("latest", "a") == {0: 5, 1: 6}


def test_whether_there_are_entries_is_known_without_a_look_at_all(shard: Shard) -> None:
    shard.write(pages={"a": {"/": 1, "/x": 2}})
    shard.attempt({"pages": {"a": {"/": GONE}}})
    table = shard.state.tables["pages"]
    assert isinstance(table, EntryTable)
    assert table.has_any("a") and not table.has_any("b")
    table.put("a", "/x", GONE)
    assert not table.has_any("a")
    table.put("a", "/y", 3)
    assert table.has_any("a")
    table.clear("a")
    assert not table.has_any("a")


def test_what_outlives_its_ttl_is_gone_and_what_was_written_again_is_not(shard: Shard) -> None:
    shard.write(seen={"a": 1, "b": 1}, recent={"a": {"/": 1}})
    shard.now_ms += 600
    shard.write(seen={"b": 2}, recent={"a": {"/x": 2}})
    shard.now_ms += 600
    shard.write(total={"t": 0.0})
    assert shard.seen("seen", "a") is MISSING
    assert shard.seen("seen", "b") == 2
    assert shard.seen("recent", "a") == {"/x": 2}
    shard.restart()
    assert shard.seen("seen", "a") is MISSING
    assert shard.seen("seen", "b") == 2
    shard.now_ms += 5000
    shard.write(total={"t": 1.0})
    assert shard.read() == {"total": {"t": 1.0}}


def test_a_value_of_the_wrong_type_names_state_key_and_value(shard: Shard) -> None:
    with pytest.raises(
        StateError, match=r"\[op\] State 'total' is declared as double, but key 'b' was given 'much'"
    ):
        shard.attempt({"total": {"a": 1.0, "b": "much"}})


def test_what_is_in_memory_is_what_a_reload_would_read(shard: Shard) -> None:
    shard.write(total={"a": 1})
    assert isinstance(shard.seen("total", "a"), float)


def test_an_epoch_that_changes_nothing_makes_no_new_version(shard: Shard, tmp_path: Path) -> None:
    shard.write(total={"a": 1.0})
    stamp, there = shard.committed, sorted(p.name for p in tmp_path.iterdir() if p.name[0] in "dv")
    shard.write()
    assert shard.committed == stamp
    assert sorted(p.name for p in tmp_path.iterdir() if p.name[0] in "dv") == there


def test_the_heap_says_it_is_full_before_it_is_killed(tmp_path: Path) -> None:
    shard = Shard("heap", tmp_path, heap_limit_bytes=1 << 20)
    with pytest.raises(MemoryLimitError, match="limit is 1 MB"):
        shard.state.check_memory()


def test_circles_of_garbage_are_collected_before_memory_is_said_to_be_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = Shard("heap", tmp_path, heap_limit_bytes=1 << 20)
    walks: list[int] = []
    monkeypatch.setattr(heap.gc, "collect", lambda: walks.append(1))
    held = iter([2 << 20, 1 << 19, 1 << 19])
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=next(held)))
    monkeypatch.setattr(shard.state, "_process", process)
    shard.state.check_memory()
    assert walks
    walks.clear()
    shard.state.check_memory()
    assert not walks


def test_old_versions_are_deleted_and_the_chain_stays_short(backend: str, tmp_path: Path) -> None:
    shard = Shard(backend, tmp_path)
    for i in range(150):
        shard.write(total={f"k{i}": float(i)})
        if shard.state._merging is not None:
            shard.state._merging.join()
    assert shard.read()["total"] == {f"k{i}": float(i) for i in range(150)}
    assert len([p for p in tmp_path.iterdir() if p.name.startswith("v-")]) <= 2
    manifest = Folder(tmp_path).manifest(shard.committed)
    assert manifest is not None
    assert len(manifest.files) <= (3 * FAN if backend == "heap" else 101)
    assert manifest.live["total"] == 150


def test_a_new_base_is_there_for_a_worker_that_starts_right_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.state.rocksdb.BASE_AFTER_DELTAS", 3)
    shard = Shard("rocksdb", tmp_path)
    for i in range(12):
        shard.write(total={f"k{i}": float(i)})
        assert shard.seen("total", f"k{i}") == float(i)
        shard.restart()
        assert shard.seen("total", "k0") == 0.0
        assert shard.read()["total"] == {f"k{j}": float(j) for j in range(i + 1)}
    assert any(p.name.startswith("b-") for p in tmp_path.iterdir())


def test_what_was_replaced_leaves_the_disk_at_once(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that is filled fast replaces several times its size in the time of a grace."""
    monkeypatch.setattr("holdfast.state.rocksdb.BASE_AFTER_DELTAS", 3)
    shard = Shard(backend, tmp_path)
    made = set()
    for i in range(60):
        shard.write(total={f"k{i}": float(i)})
        shard.state.settle()
        there = {p.name for p in tmp_path.iterdir() if p.name[0] in "mb"}
        made |= there
        named = Folder(tmp_path).manifest(shard.committed)
        assert named is not None
        # The one before, one that is yet to be named, and what each worker that ended left without a name.
        assert len(there - named.names()) <= 2 + (i + 1) // 20
        if i % 20 == 19:
            shard.restart()
    assert len(made) > 8
    shard.state.close()


def test_a_base_of_unknown_origin_gets_a_grace_and_one_that_was_replaced_does_not(tmp_path: Path) -> None:
    for name in ("b-00000001-a", "b-00000002-b", "b-00000002-stray", "b-00000001-old"):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / "b-00000001-old", (1, 1))
    folder = Folder(tmp_path)
    first = Manifest("00000001-1", 1, [], ["n"], {}, base="b-00000001-a")
    second = Manifest("00000002-1", 2, [], ["n"], {}, base="b-00000001-a")
    rebased = Manifest("00000002-1", 2, [], ["n"], {}, base="b-00000002-b")
    for manifest in (first, second, rebased):
        folder.write_manifest(manifest)
    folder.collect(rebased, keeping=[second.stamp])  # who uploads it may have read the manifest before that
    assert (tmp_path / "b-00000001-a").exists()
    assert not (tmp_path / "b-00000001-old").exists()
    folder.collect(rebased)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "b-00000002-b",
        "b-00000002-stray",
        "v-00000002-1.json",
    ]


WRITES = st.dictionaries(
    st.sampled_from("abcdef"),
    st.one_of(
        st.just(GONE), st.dictionaries(st.sampled_from("xyz"), st.one_of(st.just(GONE), st.integers(0, 9)))
    ),
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(WRITES, st.booleans(), st.booleans()), max_size=25), st.integers(0, 10**6))
def test_any_sequence_of_attempts_commits_and_restarts_leaves_what_was_committed(
    steps: list[tuple[dict[str, Any], bool, bool]], seed: int
) -> None:
    for backend in ("heap", "rocksdb"):
        folder = Path(f"/tmp/holdfast-test-{seed}-{random.random()}")
        shard = Shard(backend, folder)
        model: dict[str, dict[str, int]] = {}
        try:
            for writes, committed, restarted in steps:
                stamp = shard.attempt({"pages": writes})
                if committed:
                    shard.commit(stamp)
                    for key, change in writes.items():
                        if change is GONE:
                            model.pop(key, None)
                            continue
                        mine = model.setdefault(key, {})
                        for sub, value in change.items():
                            mine.pop(sub, None) if value is GONE else mine.__setitem__(sub, value)
                if restarted:
                    shard.restart()
                for key in "abcdef":
                    assert shard.seen("pages", key) == model.get(key, {})
        finally:
            shard.state.close()
            shutil.rmtree(folder, ignore_errors=True)


def test_a_version_that_is_being_uploaded_keeps_its_files_whatever_is_committed(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    made = []
    for epoch in (1, 2, 3):
        delta = folder.write_delta(f"d-{epoch:08d}-1.delta", {"n": pa.table({"k0": [epoch]})})
        made.append(Manifest(f"{epoch:08d}-1", epoch, [delta], ["n"], {}))
        folder.write_manifest(made[-1])
    folder.collect(made[2], keeping=[made[0].stamp])
    assert {p.name for p in tmp_path.iterdir()} == made[0].names() - {""} | made[2].names() - {""}
    folder.collect(made[2])
    assert {p.name for p in tmp_path.iterdir()} == made[2].names() - {""}


class Steps(hf.KeyedProcess):
    """Takes orders: what to do with its states, and tells what they hold then."""

    place = hf.ValueState(pa.struct({"x": pa.int64(), "y": pa.int64()}))
    path = hf.ValueState(list[int], default=[])
    seen = hf.ListState(list[int])

    def process(self, key: Any, record: dict[str, Any], ctx: Any) -> Iterator[dict[str, Any]]:
        if "clear" in record:
            self.place.clear()
            self.path.clear()
            assert (self.place.value, self.path.value) == (None, [])
        if "x" in record:
            self.place.value = {"x": record["x"], "y": 0}
            self.place.value["y"] = -record["x"]
            self.path.value.append(record["x"])
            self.seen.add(self.path.value)
        yield {"place": self.place.value, "path": self.path.value, "seen": list(self.seen)}


@pytest.mark.parametrize("kind", ["heap", "rocksdb"])
def test_what_is_nested_is_changed_in_place_and_forgotten_by_its_own_key_alone(kind: str) -> None:
    harness = hf.testing.Harness(Steps(), backend=kind)
    nothing = {"place": None, "path": [], "seen": []}
    assert harness.process("a", {}) == [nothing]
    for key in ("a", "b"):
        assert harness.process(key, {"x": 1}) == [{"place": {"x": 1, "y": -1}, "path": [1], "seen": [[1]]}]
    assert harness.process("a", {"x": 2}) == [
        {"place": {"x": 2, "y": -2}, "path": [1, 2], "seen": [[1], [1, 2]]}
    ]
    assert harness.process("a", {"clear": True}) == [{"place": None, "path": [], "seen": [[1], [1, 2]]}]
    assert harness.state("place") == {"b": {"x": 1, "y": -1}}
    assert harness.state("path") == {"b": [1]}
    assert harness.process("a", {"clear": True, "x": 3})[0]["path"] == [3]
    assert harness.state("path") == {"a": [3], "b": [1]}


def test_a_scan_that_runs_into_a_damaged_block_says_so_and_does_not_end_early(tmp_path: Path) -> None:
    """RocksDB's iterators end at damage as they do behind the last entry: a map lost what came after it, in silence."""
    options = rd.Options(raw_mode=True)
    db = rd.Rdict(str(tmp_path / "db"), options=options)
    for number in range(5_000):
        db[b"k%06d" % number] = os.urandom(200)
    db.flush()
    db.close()
    (file,) = (tmp_path / "db").glob("*.sst")
    with open(file, "r+b") as damaged:
        damaged.seek(file.stat().st_size // 2)
        damaged.write(b"\xff" * 64)
    db = rd.Rdict(str(tmp_path / "db"), options=options)
    assert len(list(scan(db, b"k0000"))) == 100, "what is whole can be read"
    with pytest.raises(Exception, match="Corruption") as told:
        list(scan(db, b"k"))
    assert is_damage(told.value)
