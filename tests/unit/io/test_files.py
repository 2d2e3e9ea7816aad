"""Files that appear in a folder: what is offered, what is refused, and that ranges read the same again."""

from __future__ import annotations

import json
import logging
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import BadRecordError, DataError, PipelineError, SchemaError, SourceChangedError
from holdfast.io.base import Limit, Reading, Source
from holdfast.io.files import files

Make = Callable[[Source], Any]


def numbers(path: Path, start: int, count: int, mtime: int | None = None, row_group: int = 10_000) -> None:
    pq.write_table(
        pa.table({"n": pa.array(range(start, start + count), pa.int64())}), path, row_group_size=row_group
    )
    if mtime is not None:
        os.utime(path, (mtime, mtime))


def values(rows: list[dict[str, Any]]) -> list[int]:
    return [row["n"] for row in rows]


def test_files_are_taken_once_by_time_and_then_by_name(tmp_path: Path, reader: Make) -> None:
    numbers(tmp_path / "b.parquet", 10, 2, mtime=100)
    numbers(tmp_path / "c.parquet", 0, 2, mtime=50)
    numbers(tmp_path / "a.parquet", 20, 2, mtime=100)
    source = reader(files(tmp_path))
    assert values(source.take()) == [0, 1, 20, 21, 10, 11]
    assert source.take() == []
    numbers(tmp_path / "d.parquet", 30, 1, mtime=200)
    assert values(source.take()) == [30]


def test_a_late_file_with_an_older_time_is_taken_once_even_after_a_restart(
    tmp_path: Path, reader: Make
) -> None:
    numbers(tmp_path / "new.parquet", 0, 1, mtime=10_000)
    first = reader(files(tmp_path))
    assert values(first.take()) == [0]
    numbers(tmp_path / "late.parquet", 5, 1, mtime=9_000)
    second = reader(files(tmp_path))
    second.position = first.position
    assert values(second.take()) == [5]
    assert second.take() == []


def test_a_file_older_than_the_late_window_is_warned_of_once_and_taken_when_touched(
    tmp_path: Path, reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    numbers(tmp_path / "new.parquet", 0, 1, mtime=10_000)
    source = reader(files(tmp_path, late_window="10s"))
    source.take()
    time.sleep(0.02)  # so that the next file's change is later than the last one's, on any clock
    numbers(tmp_path / "old.parquet", 5, 1, mtime=9_000)
    with caplog.at_level(logging.WARNING):
        assert source.take() == []
        assert source.take() == []
    assert len(caplog.records) == 1
    assert "old.parquet" in caplog.text and "touch it" in caplog.text
    assert source.position["ignored"] == 1
    time.sleep(0.02)
    os.utime(tmp_path / "old.parquet", (10_001, 10_001))
    assert values(source.take()) == [5]


def test_a_large_file_goes_over_several_epochs_and_keeps_to_the_limit(tmp_path: Path, reader: Make) -> None:
    numbers(tmp_path / "a.parquet", 0, 2_500, row_group=1_000)
    numbers(tmp_path / "b.parquet", 2_500, 100)
    source = reader(files(tmp_path))
    found, sizes = [], []
    while rows := values(source.take(records=900)):
        found += rows
        sizes.append(len(rows))
        left = 2_600 - len(found)
        assert bool(source.offer.backlog) == bool(left) and abs(source.offer.backlog - left) < 100
    assert found == list(range(2_600))
    assert max(sizes) <= 900


def test_a_cut_falls_on_a_row_group_where_one_is_near(tmp_path: Path, reader: Make) -> None:
    numbers(tmp_path / "a.parquet", 0, 100_000, row_group=30_000)
    source = reader(files(tmp_path))
    assert [(r.start, r.end) for r in source.plan(tasks=2).ranges] == [(0, 60_000), (60_000, 100_000)]
    other = reader(files(tmp_path))
    assert [(r.start, r.end) for r in other.plan(records=70_000).ranges] == [(0, 60_000)]


def test_ranges_give_every_core_the_same_to_do(tmp_path: Path, reader: Make) -> None:
    for name, count in (("a", 30_000), ("b", 30_000), ("c", 30_000)):
        numbers(tmp_path / f"{name}.parquet", 0, count, row_group=1_000)
    offer = reader(files(tmp_path)).plan(tasks=2)
    assert [(r.split, r.info["path"], r.start, r.end) for r in offer.ranges] == [
        ("0000", "a.parquet", 0, 30_000),
        ("0000", "b.parquet", 0, 15_000),
        ("0001", "b.parquet", 15_000, 30_000),
        ("0001", "c.parquet", 0, 30_000),
    ]


def test_small_files_are_not_cut(tmp_path: Path, reader: Make) -> None:
    numbers(tmp_path / "a.parquet", 0, 3_000)
    assert len(reader(files(tmp_path)).plan(tasks=8).ranges) == 1


def test_only_the_row_groups_of_a_range_are_read(
    tmp_path: Path, reader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers(tmp_path / "a.parquet", 0, 100, row_group=10)
    source = files(tmp_path)
    piece = reader(source).plan().ranges[0]
    wanted = type(piece)(piece.split, 25, 41, piece.info, 16)
    asked: list[list[int]] = []
    read = pq.ParquetFile.read_row_groups
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_groups", lambda self, g, **k: asked.append(list(g)) or read(self, g, **k)
    )
    tables = list(source.read(wanted, Reading("s")))
    assert asked == [[2, 3, 4]]
    assert [n for t in tables for n in t.column("n").to_pylist()] == list(range(25, 41))


def test_a_huge_row_group_is_read_in_batches(
    tmp_path: Path, reader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.io.parquetfile._HUGE_ROWS", 1_000)
    monkeypatch.setattr("holdfast.io.parquetfile.TABLE_ROWS", 300)
    numbers(tmp_path / "a.parquet", 0, 5_000, row_group=5_000)
    source = files(tmp_path)
    piece = reader(source).plan().ranges[0]
    wanted = type(piece)(piece.split, 1_234, 2_345, piece.info)
    tables = list(source.read(wanted, Reading("s")))
    assert [n for t in tables for n in t.column("n").to_pylist()] == list(range(1_234, 2_345))
    assert max(t.num_rows for t in tables) <= 300


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 20_000), min_size=1, max_size=4),
    st.integers(2_000, 30_000),
    st.integers(500, 9_000),
    st.integers(1, 5),
)
def test_whatever_the_limits_every_row_comes_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], limit: int, row_group: int, tasks: int
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    start = 0
    for place, count in enumerate(counts):
        numbers(folder / f"{place}.parquet", start, count, mtime=100 + place, row_group=row_group)
        start += count
    source, position, found = files(folder), None, []
    for _ in range(100):
        offer = source.plan(position, Limit(limit, tasks, 0))
        position = offer.position
        assert sum(r.records for r in offer.ranges) <= limit
        found += [
            n for r in offer.ranges for t in source.read(r, Reading("s")) for n in t.column("n").to_pylist()
        ]
        if not offer.ranges:
            break
    assert found == list(range(start))


def test_one_file_may_be_named_instead_of_a_folder(tmp_path: Path, reader: Make) -> None:
    numbers(tmp_path / "a.parquet", 0, 2)
    numbers(tmp_path / "b.parquet", 2, 2)
    assert values(reader(files(tmp_path / "b.parquet")).take()) == [2, 3]


def test_an_empty_file_is_taken_without_a_range(tmp_path: Path, reader: Make) -> None:
    numbers(tmp_path / "a.parquet", 0, 0)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_text("")
    assert reader(files(tmp_path, pattern="*.parquet")).plan().ranges == []
    assert reader(files(tmp_path / "text", "jsonl", {"n": int})).plan().ranges == []


def test_a_file_is_taken_only_when_it_has_settled(tmp_path: Path, reader: Make) -> None:
    numbers(tmp_path / "a.parquet", 0, 1, mtime=100)
    numbers(tmp_path / "b.parquet", 1, 1, mtime=109)
    source = reader(files(tmp_path, settle="10s"))
    assert values(source.read(source.plan(now_ms=112_000))) == [0]
    waiting = source.plan(now_ms=115_000)
    assert (waiting.ranges, waiting.backlog) == ([], 0)
    assert waiting.waiting == waiting.splits, "a folder in which a file settles is not idle"
    assert values(source.read(source.plan(now_ms=119_000))) == [1]
    assert source.plan(now_ms=120_000).waiting == []


def test_a_source_that_does_not_watch_ends_with_the_last_file_that_is_left(
    tmp_path: Path, reader: Make
) -> None:
    numbers(tmp_path / "a.parquet", 0, 3, mtime=100)
    numbers(tmp_path / "b.parquet", 3, 2, mtime=101)
    source = reader(files(tmp_path, watch=False))
    ends = []
    while rows := values(source.take(records=2)):
        ends.append((rows, source.offer.exhausted))
    assert ends == [([0, 1], False), ([2, 3], False), ([4], True)]
    assert source.offer.exhausted
    watching = reader(files(tmp_path))
    assert values(watching.take()) == [0, 1, 2, 3, 4] and not watching.offer.exhausted


def test_what_has_not_settled_is_waited_for_before_the_end(tmp_path: Path, reader: Make) -> None:
    numbers(tmp_path / "a.parquet", 0, 1, mtime=100)
    source = reader(files(tmp_path, watch=False, settle="10s"))
    assert not source.plan(now_ms=105_000).exhausted
    assert source.plan(now_ms=110_000).exhausted and len(source.offer.ranges) == 1


def test_a_file_that_comes_after_the_end_is_told_of_once_and_not_read_unless_it_is_watched_for(
    tmp_path: Path, reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    numbers(tmp_path / "a.parquet", 0, 1, mtime=100)
    source = reader(files(tmp_path, watch=False))
    source.take()
    numbers(tmp_path / "b.parquet", 1, 1, mtime=200)
    with caplog.at_level(logging.WARNING):
        assert source.take() == source.take() == []
    assert source.offer.exhausted
    assert len(caplog.records) == 1 and "b.parquet came after the end" in caplog.text
    again = reader(files(tmp_path))
    again.position = source.position
    assert values(again.take()) == [1]


def test_a_file_that_is_too_late_is_told_of_once_however_often_the_folder_is_looked_at(
    tmp_path: Path, reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    numbers(tmp_path / "new.parquet", 0, 1, mtime=10_000)
    source = reader(files(tmp_path, late_window="10s"))
    source.take()
    time.sleep(0.02)  # so that the next file's change is later than the last one's, on any clock
    numbers(tmp_path / "old.parquet", 5, 1, mtime=9_000)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):  # no epoch is cut for it, so the position stays
            source.source.plan(source.position, Limit(10, 1, 20_000_000))
    assert len(caplog.records) == 1


def test_without_files_and_without_a_schema_it_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="no files yet") as caught:
        files(tmp_path).schema()
    assert "schema=" in str(caught.value)
    with pytest.raises(PipelineError, match="does not exist"):
        files(tmp_path / "missing", schema={"n": int}).schema()
    assert files(tmp_path, schema={"n": int}).schema() == pa.schema({"n": pa.int64()})


def test_the_first_file_decides_the_schema(tmp_path: Path) -> None:
    numbers(tmp_path / "b.parquet", 0, 1, mtime=100)
    pq.write_table(pa.table({"other": ["x"]}), tmp_path / "a.parquet")
    assert files(tmp_path).schema().names == ["n"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"format": "xml"},
        {"on_drift": "maybe"},
        {"on_bad_record": "ignore"},
        {"format": "csv", "schema": {"a": list[int]}},
    ],
)
def test_a_senseless_choice_is_refused_with_the_sensible_ones(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(PipelineError) as caught:
        files(tmp_path, **wrong)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda p: p.unlink(), "has gone"),
        (lambda p: p.write_bytes(p.read_bytes()[:-10]), "has shrunk"),
        (lambda p: p.write_bytes(p.read_bytes() + b"x"), "has grown"),
        (lambda p: os.utime(p, (5, 5)), "written again"),
    ],
)
def test_a_planned_file_that_changed_is_an_error_that_says_so(
    tmp_path: Path, reader: Make, change: Callable[[Path], Any], what: str
) -> None:
    numbers(tmp_path / "a.parquet", 0, 10)
    source = reader(files(tmp_path))
    offer = source.plan()
    change(tmp_path / "a.parquet")
    with pytest.raises(SourceChangedError, match=what) as caught:
        source.read(offer)
    assert (
        "a.parquet" in str(caught.value) and "was planned with" in str(caught.value) and caught.value.remedy
    )


def test_a_file_appended_to_after_it_was_taken_is_an_error(tmp_path: Path, reader: Make) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n')
    source = reader(files(tmp_path, "jsonl"))
    source.take()
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"n": 2}\n')
    (tmp_path / "b.jsonl").write_text('{"n": 3}\n')
    with pytest.raises(SourceChangedError, match="has grown"):
        source.plan()


def test_a_file_half_taken_that_changed_is_an_error_at_the_next_plan(tmp_path: Path, reader: Make) -> None:
    numbers(tmp_path / "a.parquet", 0, 100)
    source = reader(files(tmp_path))
    source.take(records=10)
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(SourceChangedError, match="has gone"):
        source.plan(records=10)


def test_a_folder_that_vanishes_is_an_error_and_not_an_empty_folder(tmp_path: Path, reader: Make) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    source = reader(files(folder, schema={"n": int}))
    folder.rmdir()
    with pytest.raises(DataError, match="has gone"):
        source.plan()


def test_a_file_that_is_no_parquet_is_one_bad_record(tmp_path: Path, reader: Make) -> None:
    numbers(tmp_path / "a.parquet", 0, 1, mtime=100)
    (tmp_path / "b.parquet").write_text("nothing of the kind")
    numbers(tmp_path / "c.parquet", 1, 1)
    source = reader(files(tmp_path, on_bad_record="dead_letter"))
    assert values(source.take()) == [0, 1]
    assert source.reading.bad == 1
    assert source.reading.dead[0]["file"].endswith("b.parquet")
    with pytest.raises(BadRecordError, match=r"b\.parquet"):
        reader(files(tmp_path)).take()


def test_a_parquet_file_with_a_broken_page_is_one_bad_record(tmp_path: Path, reader: Make) -> None:
    numbers(tmp_path / "a.parquet", 0, 10_000)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[20:200] = b"\xff" * 180
    (tmp_path / "a.parquet").write_bytes(bytes(data))
    source = reader(files(tmp_path, schema={"n": int}, on_bad_record="skip"))
    source.take()
    assert source.reading.bad == 1


TYPED = pa.table(
    {
        "decimal": pa.array([None, "12345678901234567890.12"]).cast(pa.decimal128(30, 2)),
        "zoned": pa.array([0, None], pa.timestamp("us", tz="Asia/Seoul")),
        "naive": pa.array([1, 2], pa.timestamp("ns")),
        "list": pa.array([[1, None], None], pa.list_(pa.int32())),
        "struct": pa.array(
            [{"a": 1, "b": ["x"]}, None], pa.struct({"a": pa.int8(), "b": pa.list_(pa.string())})
        ),
        "map": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int64())),
        "null": pa.nulls(2),
        "date": pa.array([None, 3], pa.date32()),
        "bytes": pa.array([b"\x00\xff", None]),
        "large": pa.array(["x", None], pa.large_string()),
        "flag": pa.array([True, None]),
        "float": pa.array([float("nan"), None]),
        "duration": pa.array([5, None], pa.duration("ms")),
    }
)


def test_parquet_keeps_every_type_nulls_zones_decimals_and_nesting(tmp_path: Path, reader: Make) -> None:
    pq.write_table(TYPED, tmp_path / "a.parquet")
    source = files(tmp_path)
    assert source.schema() == TYPED.schema
    tables = list(reader(source).tables())
    assert pa.concat_tables(tables).drop_columns("float").equals(TYPED.drop_columns("float"))
    assert tables[0].schema.equals(TYPED.schema, check_metadata=True)


def test_a_dictionary_is_read_as_its_values(tmp_path: Path, reader: Make) -> None:
    pq.write_table(pa.table({"d": pa.array(["x", "y", "x"]).dictionary_encode()}), tmp_path / "a.parquet")
    source = files(tmp_path)
    assert source.schema() == pa.schema({"d": pa.string()})
    assert next(reader(source).tables()).column("d").to_pylist() == ["x", "y", "x"]


def test_a_missing_column_is_null_and_a_narrower_type_is_widened(tmp_path: Path, reader: Make) -> None:
    pq.write_table(pa.table({"b": pa.array([1], pa.int16())}), tmp_path / "a.parquet")
    source = reader(files(tmp_path, schema={"a": str, "b": int}))
    assert source.take() == [{"a": None, "b": 1}]


def test_a_column_too_many_is_an_error_or_left_out(tmp_path: Path, reader: Make) -> None:
    pq.write_table(pa.table({"a": [1], "extra": [1]}), tmp_path / "a.parquet")
    with pytest.raises(SchemaError, match="'extra'") as caught:
        reader(files(tmp_path, schema={"a": int})).take()
    assert "a.parquet" in str(caught.value) and "on_drift" in str(caught.value)
    assert reader(files(tmp_path, schema={"a": int}, on_drift="ignore")).take() == [{"a": 1}]


def test_a_column_of_another_type_is_an_error_that_names_file_column_and_both_types(
    tmp_path: Path, reader: Make
) -> None:
    pq.write_table(pa.table({"a": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(SchemaError, match=r"a\.parquet: column 'a' is string there and int64 in the schema"):
        reader(files(tmp_path, schema={"a": int})).take()


def test_a_source_travels_with_its_schema_and_without_what_it_has_seen(tmp_path: Path, reader: Make) -> None:
    for n in range(50):
        (tmp_path / f"{n}.jsonl").write_text(json.dumps({"n": n}) + "\n")
    source = files(tmp_path, "jsonl")
    source.schema()
    empty = len(pickle.dumps(source))
    offer = reader(source).plan()
    assert len(pickle.dumps(source)) == empty
    copy: Any = pickle.loads(pickle.dumps(source))
    assert copy._schema == source.schema()
    assert len([t for r in offer.ranges for t in copy.read(r, Reading("s"))]) == 50


def test_at_most_a_thousand_files_are_offered_at_once_and_the_rest_is_backlog(
    tmp_path: Path, reader: Make
) -> None:
    for n in range(1_200):
        (tmp_path / f"{n}.jsonl").write_text('{"n": 1}\n')
    source = reader(files(tmp_path, "jsonl", {"n": int}))
    offer = source.plan()
    assert (len(offer.ranges), offer.backlog) == (1_000, 200)
    assert len(source.plan().ranges) == 200


def test_a_file_expires_so_long_after_its_modification_as_it_is_said_to_be_kept(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    os.utime(tmp_path / "a.jsonl", (1_000, 1_000))
    kept = files(tmp_path, format="jsonl", retention="1h")
    (piece,) = kept.plan(None, Limit(10, 1, 2_000_000)).ranges
    assert kept.expires_ms(piece) == 1_000_000 + 3_600_000
    assert files(tmp_path, format="jsonl").expires_ms(piece) is None
