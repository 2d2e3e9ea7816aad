"""A file whose columns are not the schema's: which casts are made, and which are refused."""

from __future__ import annotations

import datetime as dt
import decimal
from typing import Any

import pyarrow as pa
import pytest

from holdfast.errors import SchemaError
from holdfast.io.drift import fit, may_cast

WIDENED: list[tuple[pa.Array, pa.DataType, list[Any]]] = [
    (pa.array([1, None], pa.int8()), pa.int64(), [1, None]),
    (pa.array([1], pa.int64()), pa.int32(), [1]),
    (pa.array([1], pa.int64()), pa.float64(), [1.0]),
    (pa.array([1], pa.int32()), pa.decimal128(20, 2), [decimal.Decimal("1.00")]),
    (pa.array([1.5], pa.float32()), pa.float64(), [1.5]),
    (pa.array([decimal.Decimal("1.5")]), pa.decimal128(38, 18), [decimal.Decimal("1.5")]),
    (pa.array([1], pa.timestamp("s")), pa.timestamp("us"), [dt.datetime(1970, 1, 1, 0, 0, 1)]),
    (pa.array([1_000], pa.timestamp("ns")), pa.timestamp("us"), [dt.datetime(1970, 1, 1, 0, 0, 0, 1)]),
    (pa.array(["x"], pa.large_string()), pa.string(), ["x"]),
    (pa.array(["x"]).dictionary_encode(), pa.string(), ["x"]),
    (pa.nulls(1), pa.map_(pa.string(), pa.int64()), [None]),
    (pa.array([[1]], pa.list_(pa.int8())), pa.list_(pa.int64()), [[1]]),
    (pa.array([{"a": 1}], pa.struct({"a": pa.int8()})), pa.struct({"a": pa.int64()}), [{"a": 1}]),
    (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int8())), pa.map_(pa.string(), pa.int64()), [[("k", 1)]]),
]


@pytest.mark.parametrize(
    ("column", "wanted", "values"), WIDENED, ids=[f"{c.type}-{w}" for c, w, _ in WIDENED]
)
def test_a_type_is_cast_where_nothing_is_lost(
    column: pa.Array, wanted: pa.DataType, values: list[Any]
) -> None:
    made = fit(pa.table({"v": column}), pa.schema({"v": wanted}), "f")
    assert made.schema == pa.schema({"v": wanted})
    assert made.column("v").to_pylist() == values


def test_the_same_instants_are_read_in_another_zone() -> None:
    column = pa.array([0], pa.timestamp("us", tz="UTC"))
    made = fit(pa.table({"v": column}), pa.schema({"v": pa.timestamp("us", tz="Asia/Seoul")}), "f")
    assert made.column("v").cast(pa.int64()).to_pylist() == [0]


REFUSED: list[tuple[pa.Array, pa.DataType]] = [
    (pa.array(["1"]), pa.int64()),
    (pa.array([1]), pa.string()),
    (pa.array([1 << 40]), pa.int32()),
    (pa.array([(1 << 60) + 1]), pa.float64()),
    (pa.array([1.5]), pa.int64()),
    (pa.array([1.5]), pa.float32()),
    (pa.array([1], pa.timestamp("ns")), pa.timestamp("us")),
    (pa.array([1], pa.timestamp("us")), pa.timestamp("us", tz="UTC")),
    (pa.array([decimal.Decimal("1.55")]), pa.decimal128(5, 1)),
    (pa.array([{"a": 1}]), pa.struct({"b": pa.int64()})),
    (pa.array([[1]]), pa.int64()),
    (pa.array([True]), pa.int64()),
]


@pytest.mark.parametrize(("column", "wanted"), REFUSED, ids=[f"{c.type}-{w}" for c, w in REFUSED])
def test_anything_else_is_refused_with_file_column_and_both_types(
    column: pa.Array, wanted: pa.DataType
) -> None:
    with pytest.raises(SchemaError) as caught:
        fit(pa.table({"v": column}), pa.schema({"v": wanted}), "the/file")
    assert all(text in str(caught.value) for text in ("the/file", "'v'", str(column.type), str(wanted)))


def test_text_is_no_number_and_a_list_is_no_struct() -> None:
    assert not may_cast(pa.string(), pa.float64())
    assert not may_cast(pa.list_(pa.int64()), pa.struct({"a": pa.int64()}))
