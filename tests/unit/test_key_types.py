"""Keys of two sides: of types that can be one, or refused before a value is lost."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import holdfast as hf
from holdfast.engine.build import build_stages
from holdfast.errors import SchemaError
from tests.unit.time.test_connect import Paired

UNLIKE = [(pa.int64(), pa.uint64()), (pa.uint64(), pa.int64()), (pa.uint64(), pa.int8())]


def unlike(kinds: tuple[pa.DataType, pa.DataType], rights: list[int], known: bool) -> hf.testing.Result:
    """A run over sides with keys of these types, both 7; the right one's come in these epochs."""
    pipeline = hf.Pipeline("unlike")
    left, right = (pa.table({"k": pa.array([7, 7], kind), "n": pa.array([0, 1])}) for kind in kinds)
    sides = [
        pipeline.read("left", hf.records(left, per_epoch=1)),
        pipeline.read("right", hf.records(right, per_epoch=1)),
    ]
    if not known:
        sides = [
            sides[0].map_batches(lambda t: t),
            sides[1].map_batches(lambda t: t.filter(pc.is_in(t["n"], pa.array(rights)))),
        ]
    sides[0].key_by("k").connect(sides[1].key_by("k")).process("pairs", Paired()).write("out", hf.memory())
    return hf.testing.run(pipeline)


@pytest.mark.parametrize("kinds", UNLIKE)
@pytest.mark.parametrize(
    ("rights", "known"), [([0, 1], True), ([0, 1], False), ([1], False)], ids=["known", "together", "in turn"]
)
def test_keys_that_no_integer_type_holds_together_are_refused(
    kinds: tuple[pa.DataType, pa.DataType], rights: list[int], known: bool
) -> None:
    with pytest.raises(SchemaError, match=r"keyed by different types.*uint64") as caught:
        unlike(kinds, rights, known)
    assert caught.value.uid == "pairs"
    assert "cast one of them" in str(caught.value)


def test_keys_of_known_types_are_refused_before_there_is_a_record() -> None:
    pipeline = hf.Pipeline("unlike")
    left, right = (pa.table({"k": pa.array([], kind), "n": pa.array([], pa.int64())}) for kind in UNLIKE[0])
    sides = pipeline.read("left", hf.records(left)), pipeline.read("right", hf.records(right))
    sides[0].key_by("k").connect(sides[1].key_by("k")).process("pairs", Paired()).write("out", hf.memory())
    with pytest.raises(SchemaError, match=r"keyed by different types.*uint64"):
        build_stages(pipeline)


def test_keys_of_other_widths_are_one_key() -> None:
    assert len(unlike((pa.uint32(), pa.int8()), [0, 1], True).rows("out")) == 2


def counted(pipeline: hf.Pipeline, keyed: hf.KeyedStream, how: str, backend: str) -> list[tuple[object, ...]]:
    made = keyed.aggregate("x", n=hf.count()) if how == "aggregate" else keyed.deduplicate("x")
    made.write("out", hf.memory())
    rows = hf.testing.run(pipeline, backend=backend, parallelism=1).rows("out")
    return [(row["k"], row["n"]) if how == "aggregate" else (row["k"],) for row in rows]


def as_decimals(table: pa.Table) -> pa.Table:
    table = table.filter(pc.greater(table["k"], 0))
    return table.set_column(0, "k", table["k"].cast(pa.decimal128(38, 18)))


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
@pytest.mark.parametrize("how", ["aggregate", "deduplicate"])
def test_keys_that_become_another_kind_later_are_refused(how: str, backend: str) -> None:
    pipeline = hf.Pipeline("kinds")
    whole, later = pa.table({"k": [0, 1], "n": [0, 1]}), pa.table({"k": [0, 0, 5, 6], "n": [0, 1, 2, 3]})
    one = pipeline.read("one", hf.records(whole, per_epoch=1))
    other = pipeline.read("other", hf.records(later, per_epoch=1)).map_batches(as_decimals)
    with pytest.raises(SchemaError, match=r"key was int64 and is decimal128.*now") as caught:
        counted(pipeline, one.union(other).key_by("k"), how, backend)
    assert caught.value.uid == "x" and "Cast it to one type before key_by" in str(caught.value)


def with_a_null_among_the_values(table: pa.Table) -> pa.Table:
    places = pc.if_else(pc.equal(table["k"], "none"), 1, 0).combine_chunks()
    return table.set_column(0, "k", pa.DictionaryArray.from_arrays(places, pa.array(["a", None])))


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
@pytest.mark.parametrize(
    ("how", "found"),
    [("aggregate", [("a", 1), (None, 1), (None, 2), ("a", 2)]), ("deduplicate", [("a",), (None,)])],
)
def test_a_null_that_a_dictionary_holds_is_a_key_of_its_own(
    how: str, found: list[tuple[object, ...]], backend: str
) -> None:
    pipeline = hf.Pipeline("coded")
    rows = pa.table({"k": ["a", "none", "none", "a"], "n": [0, 1, 2, 3]})
    coded = pipeline.read("rows", hf.records(rows, per_epoch=1)).map_batches(with_a_null_among_the_values)
    assert counted(pipeline, coded.key_by("k"), how, backend) == found


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
@pytest.mark.parametrize("per_epoch", [1, 2])
@pytest.mark.parametrize(
    ("how", "ends"), [("aggregate", {1: 1, 2: 1, 3: 2, 4: 2}), ("deduplicate", {1: 1, 2: 1})]
)
def test_the_hour_that_comes_twice_when_clocks_go_back_is_two_keys(
    how: str, ends: dict[int, int], per_epoch: int, backend: str
) -> None:
    pipeline = hf.Pipeline("clocks")
    at = pa.array([1729989000, 1729992600] * 2, pa.int64()).cast(pa.timestamp("s", "Europe/Berlin"))
    rows = pa.table({"k": at, "n": [0, 1, 2, 3]})
    keyed = pipeline.read("rows", hf.records(rows, per_epoch=per_epoch)).key_by("k")
    found = counted(pipeline, keyed, how, backend)
    instants = {key.timestamp() for key, *_ in found}  # type: ignore[attr-defined]
    assert instants == {1729989000, 1729992600}
    assert sorted(row[-1] for row in found if how == "aggregate") == (
        sorted(ends.values()) if how == "aggregate" else []
    )
    assert len(found) == len(ends)
