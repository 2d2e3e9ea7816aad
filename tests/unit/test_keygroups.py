"""The hash that decides where a key lives is part of every stored state."""

import decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import SchemaError
from holdfast.state.keygroups import group_of, groups_of, hash_columns, key_groups, shard_of


def test_the_hash_is_what_it_was_on_the_day_state_was_first_stored() -> None:
    golden = {
        "int": hash_columns([pa.array([0, 1, -1, 2**40])]).tolist(),
        "text": hash_columns(
            [pa.array(["", "a", "account-17", "ünïcödé and longer than eight bytes"])]
        ).tolist(),
        "null": hash_columns([pa.array([None], pa.int64())]).tolist(),
        "two": hash_columns([pa.array([1]), pa.array(["a"])]).tolist(),
    }
    assert golden == {
        "int": [16294208416658607535, 10451216379200822465, 16490336266968443936, 2296115805719413641],
        "text": [16294208416658607535, 6774081908283191102, 13117832231342138962, 10018458486317412286],
        "null": [7959387129412676716],
        "two": [9117565028427062814],
    }


def reference(data: bytes) -> int:
    """The hash of a text as its definition reads, one step at a time."""

    def mix(h: int) -> int:
        h = (h + 0x9E3779B97F4A7C15) % 2**64
        h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        h = (h ^ (h >> 27)) * 0x94D049BB133111EB % 2**64
        return h ^ (h >> 31)

    h = mix(len(data))
    for at in range(0, len(data), 8):
        h = mix(h ^ int.from_bytes(data[at : at + 8], "little"))
    return h


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=20))
def test_the_vectorised_hash_is_the_one_that_is_defined(texts: list[bytes]) -> None:
    assert hash_columns([pa.array(texts, pa.binary())]).tolist() == [reference(t) for t in texts]


@pytest.mark.parametrize("kind", [pa.int8(), pa.int16(), pa.int32(), pa.uint8(), pa.uint64()])
def test_a_key_is_its_value_and_not_its_width(kind: pa.DataType) -> None:
    values = [0, 1, 7, 100]
    assert hash_columns([pa.array(values, kind)]).tolist() == hash_columns([pa.array(values)]).tolist()


@given(st.lists(st.text(), min_size=1, max_size=50), st.integers(0, 5))
def test_a_text_hashes_the_same_in_any_array_it_stands_in(texts: list[str], before: int) -> None:
    alone = [hash_columns([pa.array([t])])[0] for t in texts]
    sliced = pa.array(["x" * i for i in range(before)] + texts).slice(before)
    assert hash_columns([sliced]).tolist() == alone
    assert hash_columns([pa.array(texts, pa.large_string())]).tolist() == alone
    assert hash_columns([pa.chunked_array([pa.array(texts)])]).tolist() == alone
    assert hash_columns([pa.array(texts).dictionary_encode()]).tolist() == alone


def test_keys_spread_evenly_over_key_groups() -> None:
    for column in (pa.array(range(128_000)), pa.array([f"vehicle-{i}" for i in range(128_000)])):
        counts = np.bincount(key_groups([column], 128), minlength=128)
        assert counts.min() > 800
        assert counts.max() < 1200


@given(st.integers(1, 128), st.integers(1, 300).filter(lambda n: n >= 1))
def test_every_key_group_has_exactly_one_shard(parallelism: int, groups: int) -> None:
    if parallelism > groups:
        return
    owned = [list(groups_of(s, parallelism, groups)) for s in range(parallelism)]
    assert [g for one in owned for g in one] == list(range(groups))
    assert all(owned)
    for shard, mine in enumerate(owned):
        assert all(shard_of(g, parallelism, groups) == shard for g in mine)


def test_decimals_dates_and_bools_can_be_keys_and_floats_cannot() -> None:
    assert group_of(decimal.Decimal("1.50"), [pa.decimal128(10, 2)], 128) < 128
    assert group_of(True, [pa.bool_()], 128) == group_of(1, [pa.int64()], 128)
    with pytest.raises(SchemaError, match="key can't be of type double"):
        key_groups([pa.array([1.5])], 128)
