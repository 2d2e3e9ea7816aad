"""Tables to dicts and back, and how the schema of dicts is found and kept."""

import datetime as dt
import decimal
import zoneinfo
from typing import Any, TypedDict

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.data import schemas
from holdfast.data.rows import conform, to_rows, to_table
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
        (pa.float32(), 1e300),
        (pa.string(), 5),
    ],
    ids=str,
)
def test_no_value_is_changed_on_its_way_into_a_column(kind: pa.DataType, value: Any) -> None:
    with pytest.raises(SchemaError, match="does not fit its type"):
        to_table([{"c": value}], pa.schema({"c": kind}))


def test_a_record_without_any_field_is_not_lost_in_silence() -> None:
    with pytest.raises(SchemaError, match="no fields at all"):
        to_table([{}], None)
