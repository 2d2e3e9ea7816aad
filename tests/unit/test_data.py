"""Tables to dicts and back, and how the schema of dicts is found and kept."""

import datetime as dt
import decimal
import zoneinfo
from typing import Any, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.data import schemas
from holdfast.data.rows import canonical, column_values, conform, copier, copy_value, to_rows, to_table
from holdfast.data.types import arrow_schema, arrow_type
from holdfast.errors import PipelineError, SchemaError

SEOUL = zoneinfo.ZoneInfo("Asia/Seoul")
TYPES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int32(), [1, None, -5]),
    (pa.float64(), [1.5, None, float("inf")]),
    (pa.bool_(), [True, False, None]),
    (pa.string(), ["a", None, "ü"]),
    (pa.large_string(), ["a", None, ""]),
    (pa.binary(), [b"\x00", None]),
    (pa.date32(), [dt.date(2024, 2, 29), None]),
    (pa.timestamp("ms"), [dt.datetime(2024, 1, 1, 12, 30), None]),
    (pa.timestamp("us"), [dt.datetime(2024, 1, 1, 12, 30, 0, 5)]),
    (pa.timestamp("ns"), [dt.datetime(2024, 1, 1, 12, 30, 0, 5), None]),
    (pa.timestamp("us", tz="Asia/Seoul"), [dt.datetime(2024, 1, 1, 12, 30, tzinfo=SEOUL), None]),
    (pa.decimal128(10, 2), [decimal.Decimal("1.25"), None]),
    (pa.duration("us"), [dt.timedelta(seconds=3), None]),
    (pa.list_(pa.int64()), [[1, 2], [], None]),
    (pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))]), [{"a": 1, "b": ["x"]}, None]),
    (pa.map_(pa.string(), pa.int64()), [{"x": 1}, {}, None]),
]


@pytest.mark.parametrize(("kind", "values"), TYPES, ids=lambda p: str(p)[:30])
def test_every_type_comes_back_as_it_went(kind: pa.DataType, values: list[Any]) -> None:
    schema = pa.schema({"c": kind, "n": pa.int64()})
    rows = [{"c": v, "n": i} for i, v in enumerate(values)]
    table = to_table(rows, schema)
    assert table.schema.equals(schema)
    assert to_rows(table) == rows
    assert to_table(to_rows(table), schema).equals(table)


NESTED = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {
            "n": st.one_of(st.none(), st.integers(-5, 5)),
            "t": st.one_of(st.none(), st.datetimes(dt.datetime(1970, 1, 1), dt.datetime(2200, 1, 1))),
            "l": st.one_of(
                st.none(), st.lists(st.one_of(st.none(), st.fixed_dictionaries({"s": st.text(max_size=2)})))
            ),
            "m": st.one_of(st.none(), st.dictionaries(st.text(max_size=2), st.lists(st.booleans()))),
        }
    ),
)
NESTED_TYPE = pa.struct(
    {
        "n": pa.int64(),
        "t": pa.timestamp("us"),
        "l": pa.list_(pa.struct({"s": pa.string()})),
        "m": pa.map_(pa.string(), pa.list_(pa.bool_())),
    }
)


@given(st.lists(NESTED, max_size=8), st.integers(0, 3))
def test_what_is_nested_comes_back_as_arrow_would_give_it(values: list[Any], cut: int) -> None:
    array = pa.array(values, NESTED_TYPE)[cut:]
    assert column_values(array) == array.to_pylist(maps_as_pydicts="strict") == values[cut:]
    chunks = pa.chunked_array([array, array[:1], array[2:]], NESTED_TYPE)
    assert column_values(chunks) == chunks.to_pylist(maps_as_pydicts="strict")


@pytest.mark.parametrize(("kind", "values"), TYPES, ids=lambda p: str(p)[:30])
def test_a_copy_shares_nothing_that_can_change(kind: pa.DataType, values: list[Any]) -> None:
    for value in values:
        copied = copier(kind)(value)
        assert copied == copy_value(value) == value
        assert copied is not value or not isinstance(value, (list, dict))


@pytest.mark.parametrize(("kind", "values"), TYPES, ids=lambda p: str(p)[:30])
@pytest.mark.parametrize("keep_nulls", [True, False])
def test_values_have_one_form_in_bytes_whatever_computed_them(
    kind: pa.DataType, values: list[Any], keep_nulls: bool
) -> None:
    values = [v for v in values * 5 if keep_nulls or v is not None]
    made = pa.array(values, kind)
    places = pa.array(range(1, len(values)))
    ways = [made[1:], made.take(places), pa.concat_arrays([made[1:2], made[2:]])]
    ways.append(pc.if_else(pa.array([True] * len(values)), made, made.take(pa.array(range(len(values)))))[1:])

    def stored(array: pa.Array) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, pa.schema([("c", kind)])) as writer:
            writer.write_table(pa.table([array], names=["c"]))
        return bytes(sink.getvalue())

    assert {stored(canonical(way)) for way in ways} == {stored(pa.array(values[1:], kind))}


def test_a_zoned_time_keeps_its_hour() -> None:
    table = to_table(
        [{"t": dt.datetime(2024, 1, 1, 12, tzinfo=SEOUL)}], pa.schema({"t": pa.timestamp("us", "Asia/Seoul")})
    )
    assert to_rows(table)[0]["t"].hour == 12


def test_nanoseconds_that_python_cannot_hold_are_an_error_and_not_cut_off() -> None:
    table = pa.table({"t": pa.array([1], pa.timestamp("ns"))})
    with pytest.raises(SchemaError, match="nanoseconds"):
        to_rows(table)


CELLS = st.one_of(st.none(), st.integers(-(2**40), 2**40))


@given(st.lists(st.fixed_dictionaries({"a": CELLS}, optional={"b": CELLS, "c": st.text()}), max_size=20))
def test_a_field_that_is_missing_is_null(rows: list[dict[str, Any]]) -> None:
    table = to_table(rows, None)
    names = table.schema.names
    assert to_rows(table) == [{n: r.get(n) for n in names} for r in rows]


def test_a_field_that_is_not_in_the_schema_is_an_error_that_names_it() -> None:
    with pytest.raises(SchemaError, match="field 'b'") as caught:
        to_table([{"a": 1}, {"a": 1, "b": 2}], pa.schema({"a": pa.int64()}))
    assert "Declare schema=" in str(caught.value)


def test_a_value_that_does_not_fit_is_an_error_that_shows_it() -> None:
    with pytest.raises(SchemaError, match="The value 'x' of field 'a' does not fit its type int64"):
        to_table([{"a": 1}, {"a": "x"}], pa.schema({"a": pa.int64()}))


def test_values_without_a_common_type_are_an_error() -> None:
    with pytest.raises(SchemaError, match="no common Arrow type"):
        to_table([{"a": 1}, {"a": "x"}], None)


def test_what_is_not_a_dict_is_an_error_that_shows_it() -> None:
    for schema in (None, pa.schema({"a": pa.int64()})):
        with pytest.raises(SchemaError, match="must be a dict, not int"):
            to_table([3], schema)  # type: ignore[list-item]


def test_decimals_are_wide_enough_for_what_comes_later() -> None:
    first = to_table([{"d": decimal.Decimal("1.5")}], None)
    assert first.schema.field("d").type == pa.decimal128(38, 18)
    assert to_rows(to_table([{"d": decimal.Decimal("12345678.123456")}], first.schema))[0][
        "d"
    ] == decimal.Decimal("12345678.123456")


def test_a_field_of_nulls_takes_the_first_type_that_comes() -> None:
    pinned = to_table([{"a": 1, "b": None}], None).schema
    later = to_table([{"a": 2, "b": "x"}], pinned)
    settled, again = schemas.settle(pinned, [later.schema])
    assert settled is not None
    assert settled.field("b").type == pa.string()
    assert not again


def test_tasks_that_saw_different_types_make_the_epoch_run_again_with_one_that_holds_both() -> None:
    ints, floats = pa.schema({"a": pa.int64()}), pa.schema({"a": pa.float64(), "b": pa.string()})
    settled, again = schemas.settle(None, [ints, floats])
    assert settled == pa.schema({"a": pa.float64(), "b": pa.string()})
    assert again
    assert schemas.settle(settled, [settled]) == (settled, False)


def test_a_schema_survives_its_record() -> None:
    schema = pa.schema(
        {"t": pa.timestamp("us", "Asia/Seoul"), "m": pa.map_(pa.string(), pa.decimal128(9, 2))}
    )
    assert schemas.from_text(schemas.to_text(schema)).equals(schema)


def test_a_table_of_the_users_is_brought_to_the_schema_or_refused() -> None:
    pinned = pa.schema({"a": pa.float64(), "b": pa.string()})
    assert conform(pa.table({"a": [1]}), pinned).to_pylist() == [{"a": 1.0, "b": None}]
    with pytest.raises(SchemaError, match="column 'z'"):
        conform(pa.table({"z": [1]}), pinned)
    with pytest.raises(SchemaError, match="'a' is string here and double in the schema"):
        conform(pa.table({"a": ["x"]}), pinned)


class Stop(TypedDict):
    name: str
    at: dt.datetime


def test_declared_python_types_are_arrow_types() -> None:
    assert arrow_type(Stop) == pa.struct([("name", pa.string()), ("at", pa.timestamp("us", tz="UTC"))])
    assert arrow_type(list[float] | None) == pa.list_(pa.float64())
    assert arrow_schema({"a": int}) == pa.schema({"a": pa.int64()})
    with pytest.raises(PipelineError, match="is not a type"):
        arrow_type(object)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int64(), 0.5),
        (pa.int32(), decimal.Decimal("1.5")),
        (pa.timestamp("us"), dt.datetime(2024, 1, 1, tzinfo=SEOUL)),
        (pa.struct([("a", pa.int64())]), {"a": 1, "b": 2}),
        (pa.list_(pa.int64()), [1, 0.5]),
        (pa.map_(pa.string(), pa.int64()), {"a": 0.5}),
        (pa.list_(pa.struct([("a", pa.int32())])), [{"a": 1}, None, {"a": 1.5}]),
        (pa.float32(), 1e300),
        (pa.string(), 5),
        (pa.string(), b"text"),
        (pa.binary(), "bytes"),
        (pa.string(), "\udc80"),
        (pa.int64(), np.float32(0.5)),
        (pa.float16(), 70_000.0),
        (pa.timestamp("ms"), dt.datetime(2024, 1, 1, 0, 0, 0, 5)),
        (pa.timestamp("s", "UTC"), dt.datetime(2024, 1, 1, 0, 0, 0, 5, tzinfo=dt.timezone.utc)),
        (pa.date32(), dt.datetime(2024, 1, 1, 12)),
        (pa.time32("s"), dt.time(1, 2, 3, 4)),
        (pa.time64("us"), dt.time(1, tzinfo=dt.timezone.utc)),
        (pa.duration("s"), dt.timedelta(microseconds=5)),
        (pa.list_(pa.int64(), 2), [0.5, 1.5]),
        (pa.dictionary(pa.int8(), pa.int64()), 0.5),
        (pa.struct([("a", pa.int64())]), [("a", 0.5)]),
    ],
    ids=str,
)
def test_no_value_is_changed_on_its_way_into_a_column(kind: pa.DataType, value: Any) -> None:
    with pytest.raises(SchemaError, match="does not fit its type"):
        to_table([{"c": value}], pa.schema({"c": kind}))


ZONED = dt.datetime(2024, 1, 1, 12, tzinfo=SEOUL)


@pytest.mark.parametrize(
    "values",
    [
        [dt.date(2024, 1, 1), dt.datetime(2024, 1, 1, 12, 30)],
        [dt.datetime(2024, 1, 1, 12), ZONED],
        [ZONED, dt.datetime(2024, 1, 1, 12)],
        ["a", b"b"],
        ["\udc80"],
    ],
    ids=str,
)
def test_a_type_is_found_only_if_it_holds_all_values(values: list[Any]) -> None:
    with pytest.raises(SchemaError, match="no common Arrow type"):
        to_table([{"c": v} for v in values], None)


@pytest.mark.parametrize(
    "kind", [pa.timestamp("s"), pa.timestamp("ms"), pa.timestamp("us"), pa.timestamp("us", "UTC")], ids=str
)
@pytest.mark.parametrize("more", [[], [None]], ids=["", "and null"])
def test_a_time_that_no_datetime_can_be_is_an_error(kind: pa.DataType, more: list[None]) -> None:
    for seconds in (253_402_300_800, -62_135_596_801, 1 << 50):
        ticks = min(seconds * {"s": 1, "ms": 1_000, "us": 1_000_000}[kind.unit], (1 << 63) - 1)
        array = pa.array([ticks, *more], pa.int64()).cast(kind)
        with pytest.raises(SchemaError, match="year"):
            column_values(array)


def test_a_map_with_a_key_twice_is_an_error_for_dicts_and_kept_as_it_is_elsewhere() -> None:
    array = pa.array([[("a", 1), ("a", 2)], None], pa.map_(pa.string(), pa.int64()))
    with pytest.raises(SchemaError, match="twice"):
        column_values(array)
    assert canonical(array).equals(array)


def test_what_python_can_not_hold_has_one_form_too() -> None:
    kind = pa.list_(pa.timestamp("ns"))
    array = pa.array([[1, 2], None, [3]], pa.list_(pa.int64())).cast(kind)
    hidden = pa.ListArray.from_arrays(
        pa.array([0, 2, 4, 5]),
        pa.array([1, 2, 8, 9, 3]).cast(pa.timestamp("ns")),
        mask=pa.array([False, True, False]),
    )
    assert canonical(array).equals(array)
    assert canonical(hidden).values.equals(canonical(array).values)
    assert column_values(hidden.slice(1, 1)) == [None]


def test_only_what_is_open_of_a_field_takes_another_type() -> None:
    pinned = pa.schema({"s": pa.struct({"a": pa.int64(), "b": pa.null()})})
    made = to_table([{"s": {"a": 1, "b": "x"}}], pinned)
    assert made.schema.field("s").type == pa.struct({"a": pa.int64(), "b": pa.string()})
    for wrong in ({"a": 0.5, "b": None}, {"a": 1, "b": None, "c": 2}):
        with pytest.raises(SchemaError):
            to_table([{"s": wrong}], pinned)
    wide = pa.table({"s": pa.array([{"a": 0.5, "b": None}], pa.struct({"a": pa.float64(), "b": pa.null()}))})
    with pytest.raises(SchemaError):
        conform(wide, pinned)
    narrow = pa.table({"s": pa.array([{"a": 1}], pa.struct({"a": pa.int64()}))})
    assert conform(narrow, pinned).schema.equals(pinned)
    assert conform(pa.table({"s": pa.nulls(1)}), pa.schema({"s": pa.list_(pa.null())})).schema == pa.schema(
        {"s": pa.list_(pa.null())}
    )


def test_a_record_without_any_field_is_not_lost_in_silence() -> None:
    with pytest.raises(SchemaError, match="no fields at all"):
        to_table([{}], None)
