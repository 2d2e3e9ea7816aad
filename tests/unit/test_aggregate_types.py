"""The house's aggregates over columns of each type: right in every epoch, or refused before there is one."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.engine.build import build_stages
from holdfast.errors import SchemaError

Row = dict[str, Any]
BACKENDS = st.sampled_from(["heap", "rocksdb"])
WAYS = {
    "in all": None,
    "tumbling": hf.tumbling("100s"),
    "sliding": hf.sliding("100s", "50s"),
    "session": hf.session("50s"),
    "by trigger": hf.tumbling("100s"),
}
EVERYWHERE = pytest.mark.parametrize("way", WAYS)
ZONED = pa.timestamp("us", "Asia/Seoul")
HOURS = [dt.datetime(2026, 10, 25, hour, tzinfo=dt.timezone.utc) for hour in (1, 0, 2)]
DAYS = [dt.date(2026, 1, day) for day in (2, 1, 3)]
VALUES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.bool_(), [True, False, True]),
    (pa.string(), ["b", "a", "c"]),
    (pa.large_string(), ["b", "a", "c"]),
    (pa.dictionary(pa.int8(), pa.string()), ["b", "a", "c"]),
    (pa.binary(), [b"b", b"a", b"c"]),
    (pa.binary(1), [b"b", b"a", b"c"]),
    (pa.date32(), DAYS),
    (pa.date64(), DAYS),
    (ZONED, HOURS),
    (pa.timestamp("ms"), [hour.replace(tzinfo=None) for hour in HOURS]),
    (pa.time64("us"), [dt.time(2), dt.time(1), dt.time(3)]),
    (pa.decimal128(12, 2), [Decimal("2.50"), Decimal("-1.25"), Decimal("3.00")]),
    (pa.decimal256(50, 2), [Decimal("2.50"), Decimal("-1.25"), Decimal("3.00")]),
    (pa.uint64(), [2, 1, 2**64 - 1]),
    (pa.float32(), [2.0, -1.0, math.inf]),
]
REFUSED = [
    ("min", pa.duration("us")),
    ("max", pa.list_(pa.int64())),
    ("min", pa.struct([("a", pa.int64())])),
    ("max", pa.float16()),
    ("min", pa.decimal32(5, 2)),
    ("sum", ZONED),
    ("sum", pa.string()),
    ("mean", pa.date32()),
    ("sum", pa.dictionary(pa.int8(), pa.string())),
    ("first", pa.decimal128(12, 2)),
    ("sum", pa.decimal128(12, -2)),
    ("approx_distinct", pa.list_(pa.int64())),
]


def last(
    values: list[Any],
    kind: pa.DataType,
    way: str = "in all",
    backend: str = "heap",
    per_epoch: int = 1,
    **of: Any,
) -> Row:
    """What aggregates say of some values in the end, or of the window that all of them are in."""
    rows = pa.table(
        {
            "k": pa.array([1] * len(values)),
            "at": pa.array([50] * len(values)),
            "v": pa.array(values, kind),
        }
    )
    pipeline = hf.Pipeline("types")
    stream = pipeline.read("in", hf.records(rows, per_epoch=per_epoch))
    assigner = WAYS[way]
    if assigner is None:
        made = stream.key_by("k").aggregate("made", **of)
    else:
        windows = stream.event_time("at", unit="s").key_by("k").window(assigner)
        windows = windows.trigger(hf.triggers.count(len(values))) if way == "by trigger" else windows
        made = windows.aggregate("made", **of)
    made.write("out", hf.memory())
    return hf.testing.run(pipeline, backend=backend).rows("out")[-1]


@EVERYWHERE
@pytest.mark.parametrize(("kind", "values"), VALUES, ids=[str(kind) for kind, _ in VALUES])
def test_the_smallest_and_the_largest_are_pythons(kind: pa.DataType, values: list[Any], way: str) -> None:
    found = last([*values, None], kind, way, low=hf.min("v"), high=hf.max("v"))
    assert (found["low"], found["high"]) == (min(values), max(values))


@EVERYWHERE
def test_what_is_no_number_is_neither_smallest_nor_largest(way: str) -> None:
    values = [math.nan, 2.0, math.nan, -1.0, None]
    found = last(values, pa.float64(), way, low=hf.min("v"), high=hf.max("v"))
    assert (found["low"], found["high"]) == (-1.0, 2.0)


@settings(max_examples=60)
@given(
    st.sampled_from(list(WAYS)),
    st.sampled_from([pa.decimal128(38, 18), pa.decimal128(18, 2), pa.decimal256(50, 2)]),
    st.lists(st.none() | st.decimals(-(10**15), 10**15, places=2), min_size=1, max_size=8),
    st.integers(1, 8),
    BACKENDS,
)
def test_decimals_are_summed_exactly_and_their_mean_is_a_float(
    way: str, kind: pa.DataType, values: list[Decimal | None], per_epoch: int, backend: str
) -> None:
    found = last(values, kind, way, backend, per_epoch, total=hf.sum("v"), mean=hf.mean("v"))
    known = [value for value in values if value is not None]
    assert found["total"] == (sum(known) if known else None)
    assert found["mean"] == (pytest.approx(float(sum(known) / len(known))) if known else None)


@pytest.mark.parametrize("per_epoch", [1, 3], ids=["by epochs", "in one"])
@pytest.mark.parametrize(
    ("kind", "digits"), [(pa.decimal128(38, 2), 36), (pa.decimal256(76, 2), 74)], ids=str
)
def test_a_sum_of_more_digits_than_a_decimal_has_is_an_error(
    kind: pa.DataType, digits: int, per_epoch: int
) -> None:
    largest = Decimal("9" * digits + ".99")
    with pytest.raises(SchemaError, match="A sum is too large for decimal") as caught:
        last([largest, largest, largest], kind, per_epoch=per_epoch, total=hf.sum("v"))
    assert caught.value.uid == "made"
    assert "digits behind the point" in str(caught.value)


@pytest.mark.parametrize("per_epoch", [1, 3], ids=["by epochs", "in one"])
def test_the_largest_decimal_can_be_a_sum(per_epoch: int) -> None:
    largest, one = Decimal("9" * 36 + ".99"), Decimal("0.01")
    found = last(
        [largest.copy_negate(), one, largest], pa.decimal128(38, 2), per_epoch=per_epoch, s=hf.sum("v")
    )
    assert found["s"] == one
    assert last([largest, None], pa.decimal128(38, 2), per_epoch=per_epoch, s=hf.sum("v"))["s"] == largest


@pytest.mark.parametrize(("aggregate", "kind"), REFUSED, ids=[f"{a} of {k}" for a, k in REFUSED])
@pytest.mark.parametrize("way", ["in all", "tumbling", "by trigger"])
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_what_a_type_has_no_aggregate_for_is_refused(
    aggregate: str, kind: pa.DataType, way: str, known: bool
) -> None:
    pipeline = hf.Pipeline("refused")
    rows = pa.table({"k": [1], "at": [50], "v": pa.nulls(1, kind)})
    stream = pipeline.read("in", hf.records(rows))
    stream = stream if known else stream.map_batches(lambda table: table)
    keyed = stream.event_time("at", unit="s").key_by("k")
    of = getattr(hf, aggregate)("v")
    assigner = WAYS[way]
    if assigner is None:
        made = keyed.aggregate("made", of=of)
    else:
        windows = keyed.window(assigner)
        made = (windows.trigger(hf.triggers.count(1)) if way == "by trigger" else windows).aggregate(
            "made", of=of
        )
    made.write("out", hf.memory())
    with pytest.raises(SchemaError) as caught:
        hf.testing.run(pipeline)
    assert f"[made] hf.{aggregate} can't be taken of the column 'v', which is {kind}." in str(caught.value)
    assert "Cast it before" in str(caught.value)


@pytest.mark.parametrize(("aggregate", "kind"), REFUSED, ids=[f"{a} of {k}" for a, k in REFUSED])
def test_a_type_that_is_known_is_refused_before_there_is_a_record(aggregate: str, kind: pa.DataType) -> None:
    pipeline = hf.Pipeline("refused")
    rows = pa.table({"k": pa.array([], pa.int64()), "v": pa.array([], kind)})
    made = pipeline.read("in", hf.records(rows)).key_by("k").aggregate("made", of=getattr(hf, aggregate)("v"))
    made.write("out", hf.memory())
    with pytest.raises(SchemaError, match=r"can't be taken of the column 'v'"):
        build_stages(pipeline)
