"""Merging of deltas: which and when, that nothing is lost by it, and what it takes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.state import deltas, merging
from holdfast.state.deltas import Damaged, DeltaFile
from holdfast.state.merging import FAN, WASTE, merge_files, merge_tables, pick_merge, tier


def merged_away(files: list[DeltaFile]) -> tuple[list[DeltaFile], int]:
    """Files after all merges that are due, and how many bytes those wrote."""
    written = 0
    while (due := pick_merge(files)) is not None:
        start, end = due
        size = sum(f.size_bytes for f in files[start:end])
        files = [*files[:start], DeltaFile("m", size, 0, 1), *files[end:]]
        written += size
    return files, written


@given(st.lists(st.integers(1, 1 << 26), max_size=200))
def test_a_version_has_few_files_and_no_byte_is_merged_often(sizes: list[int]) -> None:
    files: list[DeltaFile] = []
    written = 0
    for size in sizes:
        files, more = merged_away([*files, DeltaFile("d", size, 0, 1)])
        written += more
    tiers = 1 + max((tier(f.size_bytes) for f in files), default=0)
    assert len(files) < FAN * tiers
    small = len(sizes) * (64 << 10)  # below this size merging again and again costs next to nothing
    assert written <= FAN * tiers * (sum(sizes) + small)


def test_small_changes_to_a_large_state_do_not_rewrite_it() -> None:
    large, small = 50 << 20, 500 << 10
    files = [DeltaFile("a", large, 0, 1), DeltaFile("b", large, 0, 1)]
    total = 0
    for _ in range(20):
        files, written = merged_away([*files, DeltaFile("d", small, 0, 1)])
        total += small + written
    assert total / 20 < 0.05 * (2 * large)


def test_merging_keeps_the_newest_of_each_entry_and_null_is_a_key() -> None:
    def rows(keys: list[Any], subs: list[Any], values: list[Any], live: list[bool]) -> pa.Table:
        return pa.table(
            {
                "k0": pa.array(keys, pa.string()),
                "sub": pa.array(subs, pa.string()),
                "value": pa.array(values, pa.int64()),
                "live": pa.array(live),
            }
        )

    old = rows(["a", None, "b"], ["x", "x", "x"], [1, 2, 3], [True] * 3)
    new = rows([None, None, "b"], [None, "y", "x"], [None, 5, None], [False, True, False])
    merged = merge_tables([old, new], oldest=True).to_pylist()
    assert merged == [
        {"k0": "a", "sub": "x", "value": 1, "live": True},
        {"k0": None, "sub": "y", "value": 5, "live": True},
    ]
    kept = merge_tables([old, new], oldest=False)
    assert kept["live"].to_pylist().count(False) == 2


def test_however_often_rows_are_written_again_a_version_has_not_many_times_what_lives() -> None:
    live, changed, row_bytes = 12_000, 250, 32 << 10
    files = [DeltaFile("first", live * row_bytes, 0, live)]
    most = written = 0
    for _ in range(1_000):
        files.append(DeltaFile("d", changed * row_bytes, 0, changed))
        while (due := pick_merge(files, live)) is not None:
            start, end = due
            rows = min(live, sum(f.rows for f in files[start:end]))
            files = [*files[:start], DeltaFile("m", rows * row_bytes, 0, rows), *files[end:]]
            written += rows
        most = max(most, sum(f.rows for f in files))
    assert most <= WASTE * live
    assert written <= 4 * 1_000 * changed, "and what is written again stays in proportion to what is new"


def test_what_a_base_holds_besides_is_nobody_s_waste() -> None:
    rewritten = [DeltaFile(str(n), 64 << 20, 0, 1_000) for n in range(FAN - 1)]
    assert pick_merge(rewritten, live=1_000) == (0, FAN - 1)
    assert pick_merge(rewritten) is None, "with a base below them, how many rows live says nothing of them"


KEYS = st.sampled_from(["a", "b", "c", None])
ROWS = st.lists(
    st.tuples(KEYS, st.sampled_from(["x", "y", None]), st.integers(0, 99), st.booleans()), max_size=8
)


def entries(rows: list[tuple[Any, Any, int, bool]], wide: bool) -> pa.Table:
    """Rows as a state with entries writes them: without a sub it clears its key."""
    rows = [(k, s, v, live and s is not None) for k, s, v, live in rows]
    return pa.table(
        {
            "k0": pa.array([r[0] for r in rows], pa.string()),
            "sub": pa.array([r[1] for r in rows], pa.string()),
            "value": pa.array([r[2] if r[3] else None for r in rows], pa.int64() if wide else pa.int32()),
            "live": pa.array([r[3] for r in rows], pa.bool_()),
        }
    )


@settings(max_examples=60)
@given(
    files=st.lists(st.tuples(ROWS, ROWS), min_size=1, max_size=6),
    widened_at=st.integers(0, 6),
    oldest=st.booleans(),
    batch_bytes=st.sampled_from([1, 40, 1 << 20]),
)
def test_files_merged_batch_by_batch_are_what_their_rows_merged_at_once_are(
    files: list[tuple[Any, Any]], widened_at: int, oldest: bool, batch_bytes: int
) -> None:
    """Values of a state grow wider at some time, and not every file has rows of every state."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "BATCH_BYTES", batch_bytes)
        folder, written = Path(name), []
        states: dict[str, list[pa.Table]] = {}
        for number, of_states in enumerate(files):
            tables = {s: entries(rows, number >= widened_at) for s, rows in zip("pq", of_states, strict=True)}
            for state, table in tables.items():
                if table.num_rows:
                    states.setdefault(state, []).append(table)
            written.append(
                deltas.write(folder / f"d-{number}.delta", {s: t for s, t in tables.items() if t.num_rows})
            )
        merged = merge_files(folder, written, oldest=oldest, epoch=9)
        deltas.check(folder / merged.name, merged)
        found: dict[str, list[pa.Table]] = {}
        for state, rows in deltas.read(folder / merged.name):
            found.setdefault(state, []).append(rows)
        wanted = {s: merge_tables(tables, oldest=oldest) for s, tables in states.items()}
        assert {s: pa.concat_tables(t).to_pylist() for s, t in found.items()} == {
            s: t.to_pylist() for s, t in wanted.items() if t.num_rows
        }
        assert all(t.schema.equals(wanted[s].schema) for s, tables in found.items() for t in tables)
        assert merged.rows == sum(t.num_rows for t in wanted.values())


def test_a_part_that_is_damaged_or_gone_is_not_merged(tmp_path: Path) -> None:
    parts = [
        deltas.write(tmp_path / f"{n}", {"p": entries([("a", "x", n, True)], wide=True)}) for n in range(2)
    ]
    whole = (tmp_path / "1").read_bytes()
    (tmp_path / "1").write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with pytest.raises(Damaged, match="1 is not what was written"):
        merge_files(tmp_path, parts, oldest=True, epoch=1)
    (tmp_path / "1").unlink()
    with pytest.raises(Damaged, match="1 is missing"):
        merge_files(tmp_path, parts, oldest=True, epoch=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0"]


def test_what_can_not_be_written_to_its_end_leaves_nothing(tmp_path: Path) -> None:
    rows = pa.table({"k": [1, 2]})

    def tables() -> Any:
        yield rows
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        deltas.write_batches(tmp_path / "m-1", {"s": (rows.schema, tables())})
    assert not list(tmp_path.iterdir())


def test_the_bytes_of_what_an_epoch_changed_stay_as_they_are(tmp_path: Path) -> None:
    """Their checksum is the epoch's digest, which replays by later releases are held against."""
    table = pa.table(
        {
            "k0": pa.array(["x", "yy", None], pa.string()),
            "value": pa.array([1, 2, 3], pa.int64()),
            "live": pa.array([True, False, True]),
        }
    )
    assert deltas.write(tmp_path / "d", {"a": table}) == DeltaFile("d", 652, 4026216971, 3)


MERGE = """
import resource, sys
from pathlib import Path
import pyarrow as pa
from holdfast.state import deltas
from holdfast.state.merging import merge_files

folder, megabyte = Path(sys.argv[1]), 1 << 20
keys = pa.array(range(32))
files = []
for number in range(7):
    values = pa.array([bytes([number]) * megabyte] * 32)
    rows = pa.table({"k0": keys, "value": values, "live": pa.array([True] * 32)})
    pieces = [rows.slice(n, 8) for n in range(0, 32, 8)]
    files.append(deltas.write_batches(folder / str(number), {"p": (rows.schema, pieces)}))
    del values, rows, pieces
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
merged = merge_files(folder, files, oldest=True, epoch=1)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert merged.rows == 32, merged
print((after - before) // 1024)
"""


def test_merging_holds_a_part_of_what_it_merges_in_memory(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MERGE, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 112, "half of the seven files of 32 MB each"


class Last(hf.KeyedProcess):
    seen = hf.ValueState(int, default=0)

    def process(self, key: int, record: dict[str, int], ctx: hf.Context) -> Any:
        self.seen.value = record["n"]
        yield record


def test_when_a_run_in_this_process_has_ended_its_folder_is_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, whole = threading.Event(), merging.merge_files

    def slow(*given: Any, **options: Any) -> DeltaFile:
        begun.set()
        time.sleep(0.3)  # long enough to outlive the epochs, which take a few milliseconds
        return whole(*given, **options)

    monkeypatch.setattr(merging, "merge_files", slow)
    pipeline = hf.Pipeline("p")
    numbers = pipeline.read("in", hf.records([{"n": n} for n in range(2 * FAN)], per_epoch=1))
    numbers.key_by("n").process("last", Last()).write("out", hf.memory())
    hf.testing.run(pipeline, directory=tmp_path, parallelism=1)
    assert begun.is_set()
    assert not [t for t in threading.enumerate() if t.name == "holdfast-merge"]
    assert list(tmp_path.rglob("m-*.delta"))
