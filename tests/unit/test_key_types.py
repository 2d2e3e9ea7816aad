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
