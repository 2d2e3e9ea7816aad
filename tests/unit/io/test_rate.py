"""The generator: the same record for the same offset, for ever."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import PipelineError, UserCodeError
from holdfast.io.base import Limit, Range, Reading
from holdfast.io.rate import START_MS, RateSource, _power, rate


def read(source: RateSource, *ranges: Range) -> pa.Table:
    return pa.concat_tables([t for r in ranges for t in source.read(r, Reading("s"))])


def splitmix64(number: int, seed: int) -> int:
    """The same hash, written down once more with Python's own integers."""
    mask = (1 << 64) - 1
    z = (seed * 0xD1342543DE82EF95 + (number + 1) * 0x9E3779B97F4A7C15) & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


def test_records_are_what_they_were_when_this_was_written() -> None:
    table = read(rate(1_000, keys=100, skew=0.3, seed=7), Range("0001", 0, 3))
    assert table.column("id").to_pylist() == [1, 3, 5]
    assert table.column("ts").cast(pa.int64()).to_pylist() == [START_MS + 1, START_MS + 3, START_MS + 5]
    assert table.column("key").to_pylist() == [13, 52, 52]
    assert table.column("value").to_pylist() == [(splitmix64(n, 15) >> 11) / 2**53 for n in (1, 3, 5)]
    assert splitmix64(0, 0) == 0xE220A8397B1DCDAF  # as published


@settings(deadline=None)
@given(st.integers(0, 1 << 40), st.integers(1, 300), st.integers(1, 5), st.integers(0, 1 << 31))
def test_a_record_does_not_depend_on_the_range_it_is_read_with(
    start: int, count: int, splits: int, seed: int
) -> None:
    source = rate(None, splits=splits, seed=seed, skew=0.5)
    whole = read(source, Range("0000", start, start + count))
    middle = start + count // 2
    halves = [
        r for r in (Range("0000", start, middle), Range("0000", middle, start + count)) if r.end > r.start
    ]
    assert read(pickle.loads(pickle.dumps(source)), *halves).combine_chunks() == whole.combine_chunks()


def test_ids_are_dealt_to_splits_and_none_is_missing() -> None:
    source = rate(None, total=100_000, splits=3)
    position, ids = None, []
    while True:
        offer = source.plan(position, Limit(30_011, 6, 0))
        position = offer.position
        for piece in offer.ranges:
            ids += read(source, piece).column("id").to_pylist()
        if offer.exhausted:
            break
    assert sorted(ids) == list(range(100_000))


def test_what_is_due_follows_the_clock_and_the_rest_is_backlog() -> None:
    source = rate(1_000, splits=1)
    first = source.plan(None, Limit(1_000_000, 1, 5_000))
    assert sum(r.records for r in first.ranges) == 1
    second = source.plan(first.position, Limit(200, 1, 5_500))
    assert [(r.start, r.end) for r in second.ranges] == [(1, 201)]
    assert second.backlog == 300
    third = source.plan(second.position, Limit(1_000, 1, 5_500))
    assert [(r.start, r.end) for r in third.ranges] == [(201, 501)]
    assert source.plan(third.position, Limit(1_000, 1, 5_500)).ranges == []
    assert not third.exhausted


def test_before_the_first_plan_is_kept_the_clock_runs_already() -> None:
    source = rate(1_000, splits=1)
    source.plan(None, Limit(1_000_000, 1, 5_000))
    assert sum(r.records for r in source.plan(None, Limit(1_000_000, 1, 6_000)).ranges) == 1_001
    assert sum(r.records for r in source.plan(None, Limit(1_000_000, 1, 1_000)).ranges) == 1


def test_it_ends_with_its_total() -> None:
    offer = rate(None, total=10).plan(None, Limit(100, 2, 0))
    assert (sum(r.records for r in offer.ranges), offer.exhausted, offer.backlog) == (10, True, 0)
    endless = rate(None).plan(None, Limit(100, 2, 0))
    assert (sum(r.records for r in endless.ranges), endless.exhausted, endless.backlog > 0) == (
        100,
        False,
        True,
    )
    assert rate(None, total=0).plan(None, Limit(100, 2, 0)).exhausted


def test_ranges_are_cut_further_where_there_are_more_cores_than_splits() -> None:
    offer = rate(None, splits=2).plan(None, Limit(100_000, 8, 0))
    assert len(offer.ranges) == 8


def test_keys_are_spread_evenly_or_as_skewed_as_asked() -> None:
    def share_of_first_tenth(skew: float) -> float:
        keys = read(rate(None, keys=1_000, skew=skew), Range("0000", 0, 50_000)).column("key")
        assert pc.min(keys).as_py() >= 0 and pc.max(keys).as_py() < 1_000
        return float(pc.mean(pc.less(keys, 100)).as_py())

    shares = [share_of_first_tenth(skew) for skew in (0.0, 0.5, 0.9)]
    assert shares[0] == pytest.approx(0.1, abs=0.01)
    assert shares[1] == pytest.approx(0.1**0.5, abs=0.01)
    assert shares[2] == pytest.approx(0.1**0.1, abs=0.01)


def test_a_power_by_products_and_roots_is_a_power() -> None:
    base = np.linspace(0, 1, 1_000)
    for exponent in (1.0, 1.25, 2.0, 3.7, 10.0):
        np.testing.assert_allclose(_power(base, exponent), base ** (round(exponent * 256) / 256), rtol=1e-12)


def test_a_function_makes_other_records_of_them() -> None:
    source = rate(
        None,
        total=4,
        splits=1,
        make=lambda t: t.append_column("double", pc.multiply(t["id"], 2)).select(["double"]),
    )
    assert source.schema() == pa.schema({"double": pa.int64()})
    assert read(source, Range("0000", 0, 4)).column("double").to_pylist() == [0, 2, 4, 6]


def test_a_function_that_raises_or_returns_no_table_is_the_users_error() -> None:
    with pytest.raises(UserCodeError, match="ZeroDivisionError"):
        rate(None, make=lambda t: 1 // 0).schema()  # type: ignore[arg-type,return-value]
    with pytest.raises(UserCodeError, match="must return"):
        rate(None, make=lambda t: 1).schema()  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    "wrong", [{"records_per_s": 0}, {"keys": 0}, {"skew": 1.0}, {"total": -1}, {"splits": 0}]
)
def test_settings_without_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(PipelineError, match=next(iter(wrong))):
        rate(**wrong)
