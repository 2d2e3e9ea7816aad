"""The index from keys to rows, held against a dict."""

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import SchemaError, StateError
from holdfast.state import index
from holdfast.state.index import KeyColumns, KeyIndex
from holdfast.state.indexed import HeapIndexed
from holdfast.state.tables import TableSpec

KINDS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), st.integers(-3, 3) | st.sampled_from([-(1 << 63), (1 << 63) - 1])),
    (pa.uint64(), st.integers(0, 2) | st.just((1 << 64) - 1)),
    (pa.int16(), st.integers(-3, 3)),
    (pa.string(), st.sampled_from(["", "a", "b", "\x00", "aa"])),
    (pa.large_binary(), st.sampled_from([b"", b"a", b"\x00"])),
    (pa.bool_(), st.booleans()),
    (pa.date32(), st.dates(dt.date(2020, 1, 1), dt.date(2020, 1, 3))),
    (pa.timestamp("ms"), st.sampled_from([dt.datetime(2020, 1, 1), dt.datetime(2020, 1, 1, 0, 0, 1)])),
    (pa.decimal128(5, 2), st.sampled_from([Decimal("1.00"), Decimal("-2.50")])),
    (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["a", "b"])),
    (pa.null(), st.none()),
]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[pa.DataType], list[list[tuple[Any, ...]]]]:
    """The types of a key, and batches of keys, each once in its batch; some parts are null."""
    chosen = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
    key = st.tuples(*(values | st.none() for _, values in chosen))
    return [kind for kind, _ in chosen], draw(
        st.lists(st.lists(key, unique=True, max_size=12), min_size=1, max_size=6)
    )


def columns(keys: list[tuple[Any, ...]], kinds: list[pa.DataType]) -> list[pa.Array]:
    return [pa.array([k[i] for k in keys], kind) for i, kind in enumerate(kinds)]


def agrees_with_a_dict(kinds: list[pa.DataType], given: list[list[tuple[Any, ...]]]) -> None:
    mine, model = KeyIndex(), dict[tuple[Any, ...], int]()
    for keys in given:
        found = mine.find(columns(keys, kinds))
        assert found.rows.tolist() == [model.get(k, -1) for k in keys]
        mine.add(found)
        for key in keys:
            model.setdefault(key, len(model))
        assert len(mine) == len(model)
    everything = list(model)
    assert mine.find(columns(everything, kinds)).rows.tolist() == list(model.values())


@given(batches())
def test_it_finds_what_a_dict_finds(drawn: tuple[list[pa.DataType], list[list[tuple[Any, ...]]]]) -> None:
    agrees_with_a_dict(*drawn)


@given(batches(), st.integers(1, 3))
def test_keys_whose_hashes_agree_are_told_apart(
    drawn: tuple[list[pa.DataType], list[list[tuple[Any, ...]]]], hashes: int
) -> None:
    real = index.hash_columns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "hash_columns", lambda columns: real(columns) % np.uint64(hashes))
        patch.setattr(index, "_SPREAD", np.uint64(0))
        agrees_with_a_dict(*drawn)


def test_it_grows_and_keeps_all_of_its_keys() -> None:
    mine, count = KeyIndex(), 200_000
    numbers = np.random.default_rng(1).permutation(count)
    for part in np.array_split(numbers, 7):
        mine.add(mine.find([pa.array(part), pa.array(part % 10).cast(pa.string())]))
    shuffled = np.random.default_rng(2).permutation(count)
    rows = mine.find([pa.array(shuffled), pa.array(shuffled % 10).cast(pa.string())]).rows
    assert np.array_equal(numbers[rows], shuffled)
    assert (mine.find([pa.array(shuffled), pa.array((shuffled + 1) % 10).cast(pa.string())]).rows == -1).all()


def test_a_key_is_the_same_whatever_its_width() -> None:
    mine = KeyIndex()
    mine.add(mine.find([pa.array([7, None], pa.int16()), pa.array(["a", "b"])]))
    wider = [pa.array([None, 7], pa.int64()), pa.array(["b", "a"], pa.large_string())]
    assert mine.find(wider).rows.tolist() == [1, 0]


def test_a_column_of_nulls_may_get_a_type_later() -> None:
    mine = KeyIndex()
    mine.add(mine.find([pa.nulls(1), pa.array(["a"])]))
    assert mine.find([pa.array([0, None]), pa.array(["a", "a"])]).rows.tolist() == [-1, 0]


def test_a_null_among_the_values_of_a_dictionary_is_null() -> None:
    mine = KeyIndex()
    coded = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["a", None]))
    mine.add(mine.find([coded]))
    assert len(mine) == 2
    assert mine.find([pa.array([None, "a", "b"])]).rows.tolist() == [1, 0, -1]


def test_a_value_that_a_dictionary_holds_twice_is_one() -> None:
    coded = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["a", "a"]))
    found = KeyIndex().find([coded])
    assert found.codes[0][0] == found.codes[0][1] and found.hashes[0] == found.hashes[1]


def test_an_hour_that_comes_twice_is_two_keys() -> None:
    zone = pa.timestamp("us", "Europe/Berlin")
    instants = pa.array([1729989000_000_000, 1729992600_000_000], pa.int64()).cast(zone)
    mine = KeyIndex()
    mine.add(mine.find([instants]))
    assert mine.find([instants]).rows.tolist() == [0, 1]
    assert len(set(KeyColumns([instants]).values())) == 2
    assert mine.find([instants.cast(pa.timestamp("s", "Europe/Berlin"))]).rows.tolist() == [0, 1]


@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_times_that_microseconds_cannot_tell_apart_are_refused_as_keys(zone: str | None) -> None:
    kind = pa.timestamp("ns", zone)
    assert KeyIndex().find([pa.array([1_000, 2_000], pa.int64()).cast(kind)]).codes[0].tolist() == [1, 2]
    with pytest.raises(SchemaError, match="nanoseconds"):
        KeyIndex().find([pa.array([1_000, 1_001], pa.int64()).cast(kind)])


def test_a_key_may_have_more_columns_than_there_are_marks_for_nulls() -> None:
    rows = [[(row >> (place % 3)) % 3 for place in range(70)] for row in range(9)]
    kinds = [pa.int64() if place % 2 else pa.string() for place in range(70)]
    values = [
        [None if (v := row[place]) == 0 else v if place % 2 else str(v) for row in rows]
        for place in range(70)
    ]
    mine = KeyIndex()
    keys = [pa.array(column, kind) for column, kind in zip(values, kinds, strict=True)]
    mine.add(mine.find(keys))
    assert mine.find(keys).rows.tolist() == list(range(9))


def test_narrow_decimals_are_keys() -> None:
    mine = KeyIndex()
    narrow = pa.array([Decimal("1.50"), None], pa.decimal32(5, 2))
    mine.add(mine.find([narrow]))
    assert mine.find([narrow.cast(pa.decimal128(9, 2))]).rows.tolist() == [0, 1]


def test_a_column_whose_kind_changes_is_refused() -> None:
    mine = KeyIndex()
    mine.add(mine.find([pa.array([0, 1])]))
    with pytest.raises(StateError, match="had another kind of values before"):
        mine.find([pa.array([Decimal(5)])])


def table() -> HeapIndexed:
    return HeapIndexed(
        TableSpec("t", "value", pa.struct([pa.field("n", pa.int64())]), tuples=True, indexed=True)
    )


def test_what_an_attempt_staged_is_gone_if_it_is_dropped() -> None:
    mine, keys = table(), KeyColumns([pa.array(["a", "b"])])
    mine.find_columns(keys)
    mine.stage_columns(keys, [pa.array([1, 2])])
    assert mine.live() == 2
    mine.drop()
    mine.absorb(0)
    assert mine.live() == 0 and not mine.find_columns(keys)[0].any()


def test_what_is_absorbed_is_found_and_what_is_sealed_can_be_loaded() -> None:
    mine = table()
    first, second = KeyColumns([pa.array(["a", "b"])]), KeyColumns([pa.array(["c", "b"])])
    other = table()
    for keys, values in ((first, [1, 2]), (second, [3, 4])):
        mine.find_columns(keys)
        mine.stage_columns(keys, [pa.array(values)])
        sealed = mine.to_arrow([pa.string()], 0, "u")
        assert sealed is not None
        other.load(sealed)
        mine.absorb(0)
    for one in (mine, other):
        known, (found,) = one.find_columns(KeyColumns([pa.array(["a", "b", "c", "d"])]))
        assert known.tolist() == [True, True, True, False] and found.to_pylist() == [1, 4, 3, None]
        assert one.live() == 3


def test_some_of_the_keys_can_be_staged_with_what_is_known_of_them() -> None:
    mine, keys = table(), KeyColumns([pa.array([1, 2, 3])])
    mine.find_columns(keys)
    some = keys.where(np.array([True, False, True]))
    assert some.values() == [1, 3]
    mine.stage_columns(some, [pa.array([10, 30])])
    mine.absorb(0)
    assert mine.find_columns(keys)[1][0].to_pylist() == [10, None, 30]
