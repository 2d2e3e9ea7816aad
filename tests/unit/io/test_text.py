"""JSON lines and CSV: what is a record, what is a bad one, and which types come out."""

from __future__ import annotations

import datetime as dt
import decimal
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import BadRecordError, PipelineError, SchemaError
from holdfast.io import jsontext
from holdfast.io.base import Limit, Reading, Source
from holdfast.io.csvtext import CsvParser
from holdfast.io.files import files

Make = Callable[[Source], Any]

UTC = dt.timezone.utc


def put(folder: Path, name: str, text: str | bytes) -> None:
    data = text.encode() if isinstance(text, str) else text
    if name.endswith(".gz"):
        data = gzip.compress(data[: len(data) // 2]) + gzip.compress(data[len(data) // 2 :])
    if name.endswith(".zst"):
        pack = zstandard.ZstdCompressor().compress
        data = pack(data[: len(data) // 2]) + pack(data[len(data) // 2 :])
    (folder / name).write_bytes(data)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("policy", ["skip", "dead_letter"])
def test_bad_lines_are_counted_with_file_and_line_and_the_rest_is_read(
    tmp_path: Path, reader: Make, suffix: str, policy: str
) -> None:
    content = [f'{{"n": {n}}}' for n in range(3_000)]
    content[1_000] = '{"n": "one thousand"}'
    content[2_500] = "no JSON"
    put(tmp_path, f"a.jsonl{suffix}", "\n".join(content) + "\n")
    source = reader(files(tmp_path, "jsonl", {"n": int}, policy))
    found = [row["n"] for row in source.take()]
    assert found == [n for n in range(3_000) if n not in (1_000, 2_500)]
    assert source.reading.bad == 2
    if policy == "dead_letter":
        assert [(d["line"], d["record"]) for d in source.reading.dead] == [
            (1_001, '{"n": "one thousand"}'),
            (2_501, "no JSON"),
        ]
        assert all(d["file"].endswith(f"a.jsonl{suffix}") and d["reason"] for d in source.reading.dead)


def test_the_line_number_is_right_in_a_range_that_starts_in_the_middle(tmp_path: Path, reader: Make) -> None:
    content = [f'{{"n": {n}}}' for n in range(1_000)]
    content[900] = "bad"
    put(tmp_path, "a.jsonl", "\n".join(content))
    source = reader(files(tmp_path, "jsonl", {"n": int}, "dead_letter"))
    while source.take(records=100):
        pass
    assert [d["line"] for d in source.reading.dead] == [901]


def test_a_bad_line_fails_with_file_line_and_remedy_unless_told_otherwise(
    tmp_path: Path, reader: Make
) -> None:
    put(tmp_path, "a.jsonl", '{"n": 1}\n{"n": 1.5}\n')
    with pytest.raises(BadRecordError, match=r"a\.jsonl, line 2") as caught:
        reader(files(tmp_path, "jsonl", {"n": int})).take()
    assert caught.value.remedy and "on_bad_record" in caught.value.remedy


@pytest.mark.parametrize("format", ["jsonl", "csv"])
def test_a_compressed_file_that_breaks_off_is_a_bad_record_behind_what_could_be_read(
    tmp_path: Path, reader: Make, format: str
) -> None:
    rows = [f'{{"n": {n}}}' if format == "jsonl" else str(n) for n in range(200_000)]
    packed = gzip.compress("\n".join((["n"] if format == "csv" else []) + rows).encode())
    (tmp_path / f"a.{format}.gz").write_bytes(packed[: len(packed) // 2])
    source = reader(files(tmp_path, format, {"n": int}, "skip"))
    source.take()
    assert source.reading.bad == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-5, 99_999), min_size=1, max_size=200), st.integers(1, 60), st.integers(1, 3))
def test_however_small_the_epochs_are_each_line_comes_once(
    tmp_path_factory: pytest.TempPathFactory, content: list[int], limit: int, tasks: int
) -> None:
    folder = tmp_path_factory.mktemp("text")
    put(folder, "a.jsonl", "\n".join(f'{{"n":{n}}}' for n in content))
    put(folder, "b.csv", "n\n" + "\n".join(map(str, content)))
    for format in ("jsonl", "csv"):
        source = files(folder, format, {"n": int}, pattern=f"*.{format}")
        position, found = None, []
        while True:
            offer = source.plan(position, Limit(limit, tasks, 0))
            if not offer.ranges:
                break
            position = offer.position
            found += [
                n
                for r in offer.ranges
                for t in source.read(r, Reading("s"))
                for n in t.column("n").to_pylist()
            ]
        assert found == content


def test_a_large_text_file_is_cut_for_every_core(tmp_path: Path, reader: Make) -> None:
    put(tmp_path, "a.jsonl", "".join(f'{{"n": {n}, "pad": "{"x" * 80}"}}\n' for n in range(40_000)))
    source = reader(files(tmp_path, "jsonl"))
    offer = source.plan(tasks=2)
    assert len(offer.ranges) == 2
    assert offer.ranges[0].records == -1
    assert [row["n"] for row in source.read()] == list(range(40_000))


def test_tables_hold_at_most_65536_rows(tmp_path: Path, reader: Make) -> None:
    put(tmp_path, "a.jsonl", '{"n":1}\n' * 150_000)
    sizes = [t.num_rows for t in reader(files(tmp_path, "jsonl")).tables()]
    assert sum(sizes) == 150_000
    assert max(sizes) <= 65_536


JSON_TYPES: list[tuple[pa.DataType, str, Any]] = [
    (pa.decimal128(20, 2), '"123456789012345678.90"', decimal.Decimal("123456789012345678.90")),
    (pa.decimal128(20, 2), "1.5", decimal.Decimal("1.50")),
    (pa.timestamp("us", tz="UTC"), '"2024-01-01T09:00:00+09:00"', dt.datetime(2024, 1, 1, tzinfo=UTC)),
    (
        pa.timestamp("us", tz="UTC"),
        '"2024-01-01T00:00:00.5Z"',
        dt.datetime(2024, 1, 1, microsecond=500_000, tzinfo=UTC),
    ),
    (pa.timestamp("ms"), '"2024-01-01T00:00:00.123"', dt.datetime(2024, 1, 1, microsecond=123_000)),
    (pa.date32(), '"2024-01-01"', dt.date(2024, 1, 1)),
    (pa.time64("us"), '"10:00:00.5"', dt.time(10, microsecond=500_000)),
    (pa.list_(pa.int32()), "[1, null]", [1, None]),
    (pa.struct({"a": pa.int64(), "b": pa.string()}), '{"a": 1}', {"a": 1, "b": None}),
    (pa.bool_(), "true", True),
    (pa.float64(), "1", 1.0),
    (pa.uint64(), "18446744073709551615", (1 << 64) - 1),
    (pa.string(), '"\\u00e4"', "ä"),
    (pa.binary(), '"AP8="', b"\x00\xff"),
    (pa.map_(pa.string(), pa.int64()), '{"k": 1}', [("k", 1)]),
    (pa.duration("us"), '"PT1.5S"', dt.timedelta(seconds=1.5)),
    (pa.list_(pa.date32()), '["2024-01-01"]', [dt.date(2024, 1, 1)]),
]


@pytest.mark.parametrize(("kind", "text", "value"), JSON_TYPES, ids=[f"{k}-{t}" for k, t, _ in JSON_TYPES])
def test_json_is_read_as_the_declared_type_with_nulls(
    tmp_path: Path, reader: Make, kind: pa.DataType, text: str, value: Any
) -> None:
    put(tmp_path, "a.jsonl", f'{{"v": {text}}}\n{{"v": null}}\n{{}}\n')
    source = files(tmp_path, "jsonl", pa.schema({"v": kind}))
    tables = list(reader(source).tables())
    assert [t.schema.field("v").type for t in tables] == [kind]
    assert tables[0].column("v").to_pylist() == [value, None, None]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (pa.int64(), "1.0"),
        (pa.int64(), '"1"'),
        (pa.int32(), "3000000000"),
        (pa.string(), "1"),
        (pa.bool_(), "1"),
        (pa.decimal128(5, 2), '"1.555"'),
        (pa.timestamp("s"), '"2024-01-01T00:00:00.5"'),
        (pa.date32(), '"2024-13-01"'),
        (pa.binary(), '"not base64!"'),
        (pa.map_(pa.string(), pa.int64()), '{"k": "x"}'),
        (pa.struct({"b": pa.binary(), "n": pa.int64()}), '{"n": true}'),
    ],
)
def test_json_that_does_not_fit_its_type_is_a_bad_record(
    tmp_path: Path, reader: Make, kind: pa.DataType, text: str
) -> None:
    put(tmp_path, "a.jsonl", f'{{"v": null}}\n{{"v": {text}}}\n{{"v": null}}\n')
    source = reader(files(tmp_path, "jsonl", pa.schema({"v": kind}), "skip"))
    assert source.take() == [{"v": None}, {"v": None}]
    assert source.reading.bad == 1


def test_a_field_given_twice_or_a_field_too_many(tmp_path: Path, reader: Make) -> None:
    put(tmp_path, "a.jsonl", '{"a": 1, "a": 2}\n')
    assert reader(files(tmp_path, "jsonl", {"a": int}, "skip")).take() == []
    put(tmp_path, "a.jsonl", '{"a": 1}\n{"a": 2, "extra": 3}\n')
    with pytest.raises(SchemaError, match=r"a\.jsonl, line 2: .*'extra'") as caught:
        reader(files(tmp_path, "jsonl", {"a": int})).take()
    assert caught.value.remedy and "on_drift" in caught.value.remedy
    assert reader(files(tmp_path, "jsonl", {"a": int}, on_drift="ignore")).take() == [{"a": 1}, {"a": 2}]


def test_a_field_too_many_is_seen_beside_bytes_and_maps_too(tmp_path: Path, reader: Make) -> None:
    put(tmp_path, "a.jsonl", '{"b": "AA=="}\n{"b": null, "extra": 3}\n')
    with pytest.raises(SchemaError, match=r"line 2: .*'extra'"):
        reader(files(tmp_path, "jsonl", {"b": bytes})).take()
    ignoring = reader(files(tmp_path, "jsonl", {"b": bytes}, on_drift="ignore"))
    assert ignoring.take() == [{"b": b"\x00"}, {"b": None}]


def test_a_schema_is_read_from_json_without_guessing_at_texts(tmp_path: Path) -> None:
    put(
        tmp_path,
        "a.jsonl",
        '{"n": 1, "at": "2024-01-01T00:00:00", "x": 1, "l": ["a"], "s": {"q": true}}\n{"x": 1.5}\n',
    )
    assert files(tmp_path, "jsonl").schema() == pa.schema(
        {
            "n": pa.int64(),
            "at": pa.string(),
            "x": pa.float64(),
            "l": pa.list_(pa.string()),
            "s": pa.struct({"q": pa.bool_()}),
        }
    )


def test_a_column_that_is_only_null_or_a_file_without_records_needs_a_declared_schema(tmp_path: Path) -> None:
    put(tmp_path, "a.jsonl", '{"n": null}\n')
    with pytest.raises(PipelineError, match="'n' can't be read") as caught:
        files(tmp_path, "jsonl").schema()
    assert "schema=" in str(caught.value)
    put(tmp_path, "a.jsonl", "nothing\n")
    with pytest.raises(PipelineError, match="no line of it"):
        files(tmp_path, "jsonl").schema()


scalars: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), st.integers(-(1 << 63), (1 << 63) - 1)),
    (pa.float64(), st.floats(allow_nan=False, allow_infinity=False)),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.text(max_size=8)),
    (pa.binary(), st.binary(max_size=8)),
    (pa.date32(), st.dates()),
    (pa.timestamp("us"), st.datetimes(min_value=dt.datetime(1700, 1, 1), max_value=dt.datetime(2200, 1, 1))),
    (
        pa.timestamp("us", tz="UTC"),
        st.datetimes(
            min_value=dt.datetime(1700, 1, 1), max_value=dt.datetime(2200, 1, 1), timezones=st.just(UTC)
        ),
    ),
    (pa.decimal128(20, 4), st.decimals(-(10**12), 10**12, places=4)),
    (pa.duration("us"), st.timedeltas(dt.timedelta(0), dt.timedelta(days=99))),
]


@settings(deadline=None)
@given(st.data())
def test_what_is_written_as_json_lines_is_read_as_the_same(data: st.DataObject) -> None:
    kind, values = data.draw(st.sampled_from(scalars))
    shape = data.draw(st.sampled_from(["plain", "list", "struct", "map"]))
    column: pa.DataType = kind
    strategy: st.SearchStrategy[Any] = st.none() | values
    if shape == "list":
        column, strategy = pa.list_(kind), st.none() | st.lists(strategy, max_size=3)
    elif shape == "struct":
        column, strategy = pa.struct({"x": kind}), st.none() | st.fixed_dictionaries({"x": strategy})
    elif shape == "map":
        column = pa.map_(pa.string(), kind)
        strategy = st.none() | st.dictionaries(st.text(max_size=3), strategy, max_size=3).map(
            lambda d: list(d.items())
        )
    table = pa.table({"v": pa.array(data.draw(st.lists(strategy, min_size=1, max_size=5)), column)})
    text = jsontext.encode(table)
    assert text.count(b"\n") == table.num_rows
    found = jsontext.JsonParser(table.schema).parse(text)
    assert found.equals(table)


def test_json_lines_have_the_encodings_that_the_docs_name() -> None:
    table = pa.table(
        {
            "zoned": pa.array([0], pa.timestamp("ms", tz="Asia/Seoul")),
            "nanos": pa.array([1], pa.timestamp("ns")),
            "decimal": pa.array([decimal.Decimal("1.50")], pa.decimal128(10, 2)),
            "bytes": pa.array([b"\x00\xff"]),
            "nan": pa.array([float("nan")]),
            "inf": pa.array([float("inf")]),
            "map": pa.array([[(1, "x")]], pa.map_(pa.int64(), pa.string())),
            "nested": pa.array(
                [[{"at": dt.datetime(2024, 1, 1, tzinfo=UTC)}]],
                pa.list_(pa.struct({"at": pa.timestamp("s", tz="Asia/Seoul")})),
            ),
            "dictionary": pa.array(["x"]).dictionary_encode(),
        }
    )
    assert json.loads(jsontext.encode(table)) == {
        "zoned": "1970-01-01T00:00:00.000Z",
        "nanos": "1970-01-01T00:00:00.000000001",
        "decimal": "1.50",
        "bytes": "AP8=",
        "nan": None,
        "inf": None,
        "map": {"1": "x"},
        "nested": [{"at": "2024-01-01T00:00:00Z"}],
        "dictionary": "x",
    }


def test_csv_columns_are_found_by_name_and_missing_ones_are_null(tmp_path: Path, reader: Make) -> None:
    put(tmp_path, "a.csv", "b,a\nx,1\n,2\n")
    source = reader(files(tmp_path, "csv", {"a": int, "b": str, "c": float}))
    assert source.take() == [{"a": 1, "b": "x", "c": None}, {"a": 2, "b": None, "c": None}]


def test_csv_tells_null_from_an_empty_text(tmp_path: Path, reader: Make) -> None:
    put(tmp_path, "a.csv", 'a,b\n1,\n2,""\n3,NA\n')
    assert [r["b"] for r in reader(files(tmp_path, "csv", {"a": int, "b": str})).take()] == [None, "", "NA"]
    source = reader(files(tmp_path, "csv", {"a": int, "b": str}, nulls=("", "NA")))
    assert [r["b"] for r in source.take()] == [None, "", None]


def test_csv_without_a_header_follows_the_schema(tmp_path: Path, reader: Make) -> None:
    put(tmp_path, "a.csv", "1;x\n2;y\n")
    source = reader(files(tmp_path, "csv", {"a": int, "b": str}, header=False, delimiter=";"))
    assert source.take() == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    with pytest.raises(PipelineError, match="without a header"):
        files(tmp_path, "csv", header=False).schema()


def test_a_csv_column_too_many_is_an_error_or_left_out(tmp_path: Path, reader: Make) -> None:
    put(tmp_path, "a.csv", "a,extra\n1,2\n")
    with pytest.raises(SchemaError, match="'extra'"):
        reader(files(tmp_path, "csv", {"a": int})).take()
    assert reader(files(tmp_path, "csv", {"a": int}, on_drift="ignore")).take() == [{"a": 1}]


def test_bad_csv_lines_are_found_with_their_number(tmp_path: Path, reader: Make) -> None:
    content = ["a,b", "1,x", "2", "3,y,z", "four,x", '5,"x', "6,x", '7,"q""q"', "", "8,é"]
    put(tmp_path, "a.csv", "\n".join(content) + "\n")
    source = reader(files(tmp_path, "csv", {"a": int, "b": str}, "dead_letter"))
    assert [(r["a"], r["b"]) for r in source.take()] == [(1, "x"), (6, "x"), (7, 'q"q'), (8, "é")]
    assert [(d["line"], d["record"]) for d in source.reading.dead] == [
        (3, "2"),
        (4, "3,y,z"),
        (5, "four,x"),
        (6, '5,"x'),
    ]


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from(["1,x", "2,", "bad", '3,"x', '4,"y"', "", '5,x"y', '"6",z', "7,a\rb", '8,"a\rb"']),
        max_size=12,
    )
)
def test_a_csv_line_is_good_or_bad_whatever_stands_around_it(content: list[str]) -> None:
    schema = pa.schema({"a": pa.int64(), "b": pa.string()})
    parser = CsvParser(schema, ["a", "b"])
    expected = []
    for line in content:
        if line:
            try:
                expected += parser.parse_one(line.encode()).to_pylist()
            except (pa.ArrowInvalid, ValueError):
                expected.append("bad")
    from holdfast.io import lines

    reading = Reading("s", "dead_letter")
    text = "".join(line + "\n" for line in content).encode()
    trouble = lines.Trouble(reading, "f", lambda: pa.BufferReader(text))
    found = [
        row
        for t in lines.tables(lines.blocks(pa.BufferReader(text), 0, None), parser, trouble)
        for row in t.to_pylist()
    ]
    assert found == [row for row in expected if row != "bad"]
    assert reading.bad == expected.count("bad")


def test_csv_cells_may_hold_newlines_when_asked_for(tmp_path: Path, reader: Make) -> None:
    put(tmp_path, "a.csv", 'a,b\n1,"x\ny"\n2,z\nbad,"q\nr"\n3,w\n')
    source = reader(files(tmp_path, "csv", {"a": int, "b": str}, "dead_letter", multiline=True))
    offer = source.plan(records=1, tasks=4)
    assert len(offer.ranges) == 1
    assert [(r["a"], r["b"]) for r in source.read()] == [(1, "x\ny"), (2, "z"), (3, "w")]
    assert [d["line"] for d in source.reading.dead] == [5]


def test_a_quote_that_is_never_closed_is_a_bad_record_and_not_half_a_file(
    tmp_path: Path, reader: Make
) -> None:
    put(tmp_path, "a.csv", 'a,b\n1,x\n2,"never\n')
    source = reader(files(tmp_path, "csv", {"a": int, "b": str}, "skip", multiline=True))
    assert source.take() == [{"a": 1, "b": "x"}]
    assert source.reading.bad == 1


def test_csv_types_decimals_zones_dates(tmp_path: Path, reader: Make) -> None:
    schema = pa.schema(
        {
            "d": pa.decimal128(20, 2),
            "z": pa.timestamp("us", tz="Asia/Seoul"),
            "t": pa.timestamp("ms"),
            "day": pa.date32(),
            "ok": pa.bool_(),
        }
    )
    put(
        tmp_path,
        "a.csv",
        "d,z,t,day,ok\n1.50,2024-01-01T00:00:00Z,2024-01-01T00:00:00.5,2024-01-01,true\n,,,,\n",
    )
    tables = list(reader(files(tmp_path, "csv", schema)).tables())
    assert tables[0].schema == schema
    row = tables[0].to_pylist()[0]
    assert row["d"] == decimal.Decimal("1.50")
    assert row["z"] == dt.datetime(2024, 1, 1, tzinfo=UTC)
    assert tables[0].to_pylist()[1] == dict.fromkeys(schema.names)


def test_a_schema_is_read_from_csv_with_room_for_fractions(tmp_path: Path) -> None:
    put(tmp_path, "a.csv", "n,x,day,at,s\n1,1.5,2024-01-01,2024-01-01T00:00:00,x\n")
    assert files(tmp_path, "csv").schema() == pa.schema(
        {"n": pa.int64(), "x": pa.float64(), "day": pa.date32(), "at": pa.timestamp("us"), "s": pa.string()}
    )


def test_a_header_with_a_name_twice_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "a.csv", "a,a\n1,2\n")
    with pytest.raises(SchemaError, match="twice"):
        files(tmp_path, "csv").schema()


@pytest.mark.parametrize("format", ["csv", "jsonl"])
def test_timestamps_are_read_in_the_format_given(tmp_path: Path, reader: Make, format: str) -> None:
    put(tmp_path, "a", "at\n03.02.2024 10:00\n" if format == "csv" else '{"at": "03.02.2024 10:00"}\n')
    source = reader(
        files(tmp_path, format, pa.schema({"at": pa.timestamp("ms")}), timestamp_format="%d.%m.%Y %H:%M")
    )
    assert source.take() == [{"at": dt.datetime(2024, 2, 3, 10)}]


def test_a_file_with_carriage_returns_reads_the_same(tmp_path: Path, reader: Make) -> None:
    put(tmp_path, "a.csv", "a,b\r\n1,x\r\n2,y\r\n")
    put(tmp_path, "b.jsonl", '{"a": 1}\r\n{"a": 2}\r\n')
    assert [r["a"] for r in reader(files(tmp_path, "csv", pattern="*.csv")).take()] == [1, 2]
    assert [r["a"] for r in reader(files(tmp_path, "jsonl", pattern="*.jsonl")).take()] == [1, 2]
