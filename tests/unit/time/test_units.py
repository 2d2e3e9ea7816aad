"""Whatever a column holds time in, it comes back as it was; and no time is silently another one."""

import datetime as dt
import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.config import parse_duration_s
from holdfast.data.rows import to_rows
from holdfast.errors import ConfigError, PipelineError, SchemaError
from holdfast.time.units import (
    LIMIT,
    MAX_TIME,
    MIN_TIME,
    TimeType,
    duration_us,
    positive_us,
    us_to_ms_floor,
    watermark_ms,
)

UTC = dt.timezone.utc
KINDS = [
    (pa.timestamp("s"), None),
    (pa.timestamp("ms", "UTC"), None),
    (pa.timestamp("us"), None),
    (pa.timestamp("us", "America/New_York"), None),
    (pa.timestamp("us", "+09:00"), "us"),
    (pa.timestamp("ns"), None),
    (pa.timestamp("ns", "Asia/Seoul"), None),
    (pa.date32(), None),
    (pa.date64(), None),
    (pa.int64(), "s"),
    (pa.int64(), "ms"),
    (pa.int64(), "us"),
    (pa.int64(), "ns"),
    (pa.uint64(), "us"),
    (pa.int32(), "s"),
]
WIDTH_US = {"s": 10**6, "ms": 1000, "us": 1, "ns": 1, "date32": 86_400 * 10**6, "date64": 86_400 * 10**6}

moments = st.integers(0, 2**31 * 10**6 - 1) | st.sampled_from([0, 1, 999, 1000, 10**6 - 1, 10**6])


@pytest.mark.parametrize(("kind", "unit"), KINDS, ids=str)
@given(times=st.lists(moments, max_size=8))
def test_a_time_comes_back_cut_to_the_unit_of_its_column(
    kind: pa.DataType, unit: str | None, times: list[int]
) -> None:
    time = TimeType.of(kind, unit)
    width = WIDTH_US[time.unit]
    array = time.from_us(np.array(times, dtype=np.int64))
    assert array.type.equals(kind) and time.arrow.equals(kind)
    back, nulls = time.to_us(array)
    assert back.dtype == np.int64
    assert back.tolist() == [t // width * width for t in times]
    assert not nulls.any()


@pytest.mark.parametrize(("kind", "unit"), KINDS, ids=str)
@given(times=st.lists(moments, min_size=1, max_size=8))
def test_records_and_columns_agree(kind: pa.DataType, unit: str | None, times: list[int]) -> None:
    time = TimeType.of(kind, unit)
    column = time.from_us(np.array(times))
    us, _ = time.to_us(column)
    values = [row["t"] for row in to_rows(pa.table({"t": column}))]
    assert [time.scalar_us(v) for v in values] == us.tolist()
    assert [time.value(t) for t in times] == values
    assert [type(time.value(t)) for t in times] == [type(v) for v in values]


@given(st.integers(-(2**62), 2**62))
@example(-1)
@example(-1000)
def test_nanoseconds_are_cut_to_the_microsecond_below_also_before_1970(ns: int) -> None:
    us, _ = TimeType.of(pa.timestamp("ns")).to_us(pa.array([ns], pa.int64()).cast(pa.timestamp("ns")))
    assert us.tolist() == [ns // 1000]
    us, _ = TimeType.of(pa.int64(), "ns").to_us(pa.array([ns], pa.int64()))
    assert us.tolist() == [ns // 1000]


def test_times_before_1970_are_cut_downwards() -> None:
    assert TimeType.of(pa.timestamp("s")).from_us([-1]).to_pylist() == [dt.datetime(1969, 12, 31, 23, 59, 59)]
    assert TimeType.of(pa.timestamp("s")).value(-1) == dt.datetime(1969, 12, 31, 23, 59, 59)
    assert TimeType.of(pa.date32()).value(-1) == dt.date(1969, 12, 31)
    assert TimeType.of(pa.date64()).from_us([-1]).to_pylist() == [dt.date(1969, 12, 31)]


def test_nulls_are_told_apart_and_have_no_time() -> None:
    time = TimeType.of(pa.timestamp("ms"))
    chunks = pa.chunked_array([pa.array([1, None], pa.timestamp("ms")), pa.array([3], pa.timestamp("ms"))])
    us, nulls = time.to_us(chunks)
    assert us.tolist() == [1000, MIN_TIME, 3000]
    assert nulls.tolist() == [False, True, False]
    us, nulls = time.to_us(pa.array([None, 1, None], pa.timestamp("ms"))[1:])
    assert (us.tolist(), nulls.tolist()) == ([1000, MIN_TIME], [False, True])
    us, nulls = time.to_us(pa.chunked_array([], pa.timestamp("ms")))
    assert len(us) == len(nulls) == 0


@pytest.mark.parametrize(("kind", "unit"), KINDS, ids=str)
def test_what_is_no_time_becomes_null(kind: pa.DataType, unit: str | None) -> None:
    time = TimeType.of(kind, unit)
    array = time.from_us(np.array([MIN_TIME, 0, MAX_TIME]))
    assert array.is_null().to_pylist() == [True, False, True]
    assert time.value(MIN_TIME) is None and time.value(MAX_TIME) is None


@pytest.mark.parametrize(
    ("kind", "unit", "first_too_far"),
    [
        (pa.timestamp("s"), None, -(-LIMIT // 10**6)),
        (pa.timestamp("ms"), None, -(-LIMIT // 1000)),
        (pa.timestamp("us", "UTC"), None, LIMIT),
        (pa.int64(), "s", -(-LIMIT // 10**6)),
        (pa.uint64(), "us", LIMIT),
        (pa.date32(), None, -(-LIMIT // (86_400 * 10**6))),
    ],
    ids=str,
)
def test_a_time_out_of_range_is_an_error_and_never_another_time(
    kind: pa.DataType, unit: str | None, first_too_far: int
) -> None:
    time = TimeType.of(kind, unit)
    plain = kind if pa.types.is_integer(kind) else pa.int32() if pa.types.is_date32(kind) else pa.int64()

    def column(count: int) -> pa.Array:
        return pa.array([0, count], plain).cast(kind)

    us, _ = time.to_us(column(first_too_far - 1))
    assert 0 <= us[1] < LIMIT
    largest = np.iinfo(plain.to_pandas_dtype()).max
    for count in (first_too_far, int(largest)):
        with pytest.raises(SchemaError, match="no event time") as error:
            time.to_us(column(count))
        assert error.value.remedy
    if plain != pa.uint64():
        with pytest.raises(SchemaError, match="no event time"):
            time.to_us(column(-first_too_far))


def test_a_null_may_hide_any_bits() -> None:
    hidden = pa.Array.from_buffers(
        pa.timestamp("s"), 2, [pa.py_buffer(b"\x01"), pa.py_buffer(np.array([1, 2**62]).tobytes())]
    )
    us, nulls = TimeType.of(pa.timestamp("s")).to_us(hidden)
    assert (us.tolist(), nulls.tolist()) == ([10**6, MIN_TIME], [False, True])


def test_a_record_out_of_range_is_an_error_too() -> None:
    with pytest.raises(SchemaError, match="no event time"):
        TimeType.of(pa.int64(), "s").scalar_us(LIMIT)
    with pytest.raises(SchemaError, match="does not fit timestamp"):
        TimeType.of(pa.timestamp("ms")).value(LIMIT - 1)
    with pytest.raises(SchemaError, match="does not fit date32"):
        TimeType.of(pa.date32()).value(LIMIT - 1)


@pytest.mark.parametrize(
    ("kind", "unit", "us"),
    [
        (pa.int32(), "us", 2**31),
        (pa.uint32(), "s", -1),
        (pa.timestamp("ns"), None, LIMIT - 1),
        (pa.int64(), "ns", LIMIT - 1),
        (pa.int64(), "ns", 1 - LIMIT),
    ],
    ids=str,
)
def test_a_time_that_its_column_has_no_room_for_is_an_error(
    kind: pa.DataType, unit: str | None, us: int
) -> None:
    with pytest.raises(SchemaError, match="does not fit") as error:
        TimeType.of(kind, unit).from_us(np.array([0, us]))
    assert "room" in (error.value.remedy or "")


def test_a_time_past_the_year_9999_is_a_number_in_rows() -> None:
    time = TimeType.of(pa.timestamp("us"))
    assert time.value(LIMIT - 1) == LIMIT - 1
    assert time.scalar_us(LIMIT - 1) == LIMIT - 1


@pytest.mark.parametrize(
    ("kind", "unit", "says"),
    [
        (pa.int64(), None, "not in which unit"),
        (pa.string(), None, "can't hold event time"),
        (pa.float64(), "s", "can't hold event time"),
        (pa.duration("s"), None, "can't hold event time"),
        (pa.time64("us"), None, "can't hold event time"),
        (pa.timestamp("ms"), "s", "declared in 's'"),
    ],
    ids=str,
)
def test_a_column_that_is_no_time_is_refused_with_a_remedy(
    kind: pa.DataType, unit: str | None, says: str
) -> None:
    with pytest.raises(SchemaError, match=says) as error:
        TimeType.of(kind, unit)
    assert error.value.remedy


def test_a_unit_that_there_is_not_is_refused() -> None:
    with pytest.raises(PipelineError, match="'minutes' is not a unit"):
        TimeType.of(pa.int64(), "minutes")


@pytest.mark.parametrize(
    ("kind", "unit", "value"),
    [
        (pa.timestamp("us"), None, None),
        (pa.timestamp("us"), None, "2024-01-01"),
        (pa.timestamp("us"), None, dt.date(2024, 1, 1)),
        (pa.timestamp("us"), None, dt.datetime(2024, 1, 1, tzinfo=UTC)),
        (pa.timestamp("us", "UTC"), None, 5),
        (pa.timestamp("s"), None, 5),
        (pa.date32(), None, 5),
        (pa.int64(), "s", 0.5),
        (pa.int64(), "s", float("nan")),
        (pa.int64(), "s", True),
        (pa.int64(), "s", dt.datetime(2024, 1, 1)),
    ],
    ids=str,
)
def test_a_value_that_is_no_time_of_its_column_is_refused(
    kind: pa.DataType, unit: str | None, value: object
) -> None:
    with pytest.raises(SchemaError) as error:
        TimeType.of(kind, unit).scalar_us(value)
    assert error.value.remedy


def test_a_column_of_another_type_than_declared_is_refused() -> None:
    with pytest.raises(SchemaError, match="declared as timestamp"):
        TimeType.of(pa.timestamp("us")).to_us(pa.array([1]))


def test_values_that_a_function_may_return_are_read_as_a_table_would() -> None:
    assert TimeType.of(pa.int64(), "ms").scalar_us(2.0) == 2000
    assert TimeType.of(pa.int64(), "ms").scalar_us(np.int32(2)) == 2000
    summer = dt.datetime(2024, 7, 1, 9, tzinfo=dt.timezone(dt.timedelta(hours=9)))
    assert TimeType.of(pa.timestamp("us", "UTC")).scalar_us(summer) == 1_719_792_000_000_000
    naive = dt.datetime(2024, 7, 1)
    assert TimeType.of(pa.timestamp("us", "Asia/Seoul")).scalar_us(naive) == 1_719_792_000_000_000
    assert TimeType.of(pa.date32()).scalar_us(dt.datetime(1970, 1, 2, 23)) == 86_400 * 10**6


def test_the_hour_that_a_clock_shows_twice_is_two_hours() -> None:
    time = TimeType.of(pa.timestamp("us", "America/New_York"))
    first = int(dt.datetime(2024, 11, 3, 5, 30, tzinfo=UTC).timestamp()) * 10**6
    for us in (first, first + 3600 * 10**6):
        assert time.scalar_us(time.value(us)) == us
        assert time.value(us).hour == 1


def test_a_time_type_is_a_value() -> None:
    time = TimeType.of(pa.timestamp("ns", "Asia/Seoul"))
    assert pickle.loads(pickle.dumps(time)) == time
    assert hash(time) == hash(TimeType.of(pa.timestamp("ns", "Asia/Seoul")))
    with pytest.raises(AttributeError):
        time.unit = "s"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("written", "us"),
    [
        ("10s", 10 * 10**6),
        ("5m", 300 * 10**6),
        ("2h", 7200 * 10**6),
        ("1d", 86_400 * 10**6),
        ("500ms", 500_000),
        ("7us", 7),
        ("0.1s", 100_000),
        ("2147483648.1s", 2_147_483_648_100_000),
        ("2000000000001s", 2_000_000_000_001_000_000),
        (3, 3 * 10**6),
        (0.000001, 1),
        (0, 0),
        (dt.timedelta(days=-1, microseconds=1), -86_400 * 10**6 + 1),
    ],
    ids=str,
)
def test_a_duration_is_exact(written: str | float | dt.timedelta, us: int) -> None:
    assert duration_us(written) == us


@given(st.integers(0, 10**9), st.sampled_from(["us", "ms", "s", "m", "min", "h", "d"]))
def test_durations_are_those_of_the_settings(n: int, unit: str) -> None:
    scale = {"us": 1, "ms": 10**3, "s": 10**6, "m": 6 * 10**7, "min": 6 * 10**7, "h": 36 * 10**8}
    us = n * scale.get(unit, 864 * 10**8)
    if us < LIMIT:
        assert duration_us(f"{n}{unit}") == us
        assert abs(duration_us(f"{n}{unit}") - parse_duration_s(f"{n}{unit}") * 1e6) <= us * 1e-15


@pytest.mark.parametrize(
    "wrong",
    ["soon", "5 parsecs", "", "-3s", "0.5us", 1e-9, float("inf"), "99999999d", True, None, [1]],
    ids=str,
)
def test_what_is_no_duration_is_refused_with_a_remedy(wrong: object) -> None:
    with pytest.raises(ConfigError) as error:
        duration_us(wrong)  # type: ignore[arg-type]
    assert error.value.remedy
    with pytest.raises(PipelineError, match=r"^gap: ") as written:
        positive_us("gap", wrong)  # type: ignore[arg-type]
    assert written.value.remedy == error.value.remedy


def test_a_duration_that_must_be_longer_than_nothing() -> None:
    with pytest.raises(PipelineError, match="gap is '0s'"):
        positive_us("gap", "0s")


times = st.integers(-LIMIT, LIMIT) | st.integers(-5000, 5000)


@given(watermark=times, after=st.integers(1, 5000))
@example(watermark=1999, after=1)
def test_a_watermark_in_milliseconds_promises_no_more_than_the_one_in_microseconds(
    watermark: int, after: int
) -> None:
    assert us_to_ms_floor(watermark + after) > watermark_ms(watermark)


@given(watermark=times)
def test_a_watermark_in_milliseconds_promises_as_much_as_it_can(watermark: int) -> None:
    assert us_to_ms_floor(watermark + 1) == watermark_ms(watermark) + 1


@pytest.mark.parametrize("end", [MIN_TIME, MAX_TIME])
def test_nothing_known_and_the_end_of_time_have_no_unit(end: int) -> None:
    assert watermark_ms(end) == us_to_ms_floor(end) == end


@pytest.mark.parametrize(
    ("kind", "unit", "raw", "finer"),
    [
        (pa.timestamp("ns"), None, [1_000, None, -3_000], False),
        (pa.timestamp("ns", "Asia/Seoul"), None, [1_000, 1_001], True),
        (pa.int64(), "ns", [-1], True),
        (pa.int64(), "us", [1, 2, 3], False),
        (pa.timestamp("ns"), None, [], False),
    ],
)
def test_times_between_two_microseconds_are_found(
    kind: pa.DataType, unit: str | None, raw: list[int | None], finer: bool
) -> None:
    for array in (
        pa.array(raw, pa.int64()).cast(kind),
        pa.chunked_array([pa.array(raw, pa.int64()).cast(kind)]),
    ):
        assert TimeType.of(kind, unit).finer(array) is finer
