"""What is left out before an exchange is nothing that could have counted, and it is left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
from holdfast.data.rows import to_rows
from holdfast.engine.aggregate import Combiner
from holdfast.engine.keyed import Work
from holdfast.engine.keys import key_ids
from holdfast.engine.ranked import Top
from holdfast.engine.thinning import hopeful, places, thinner_for
from holdfast.errors import SchemaError

Row = dict[str, Any]
SCHEMA = pa.schema({"k": pa.string(), "j": pa.int64(), "v": pa.int64(), "w": pa.string(), "n": pa.int64()})
ROWS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", None]),
        st.sampled_from([0, 1]),
        st.sampled_from([None, -(2**63), -1, 0, 1, 2**63 - 1]),
        st.sampled_from([None, "x", "y"]),
    ),
    max_size=40,
).map(lambda found: [dict(zip("kjvw", one, strict=True), n=n) for n, one in enumerate(found)])
ORDERS = st.sampled_from([("v",), ("w",), ("v", "w"), ("w", "v")])


def thinner(build: Any) -> Combiner:
    """The combiner in front of what is built."""
    pipeline = hf.Pipeline("thin")
    build(pipeline.read("e", hf.records([], schema=SCHEMA)).key_by("k", "j"))
    node = pipeline._nodes[-1]
    key = node.inputs[0].key
    assert key is not None
    made = thinner_for(node, key)
    assert made is not None
    return made


def cut(rows: list[Row], lengths: list[int]) -> list[list[Row]]:
    """Rows as they may be divided into ranges."""
    parts = []
    for length in lengths:
        parts.append(rows[:length])
        rows = rows[length:]
    return [part for part in [*parts, rows] if part]


def passed(made: Combiner, rows: list[Row], lengths: list[int]) -> list[Row]:
    """What passes of rows that come in ranges."""
    tables = [made.partial(pa.Table.from_pylist(part, SCHEMA)) for part in cut(rows, lengths)]
    return [row for table in tables for row in to_rows(table)]


def best(
    rows: list[Row], n: int, by: tuple[str, ...], upwards: list[bool], ties: str
) -> dict[Any, list[int]]:
    """The numbers of the best rows of each key, by Python's own sorting; nulls come last, up- or downwards."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault((row["k"], row["j"]), []).append(row)
    for mine in found.values():
        mine.sort(key=lambda row: row["n"], reverse=ties == "last")
        for name, up in reversed(list(zip(by, upwards, strict=True))):
            known = [r for r in mine if r[name] is not None]
            known.sort(key=lambda row: row[name], reverse=not up)
            mine[:] = known + [r for r in mine if r[name] is None]
    return {key: [row["n"] for row in mine[:n]] for key, mine in found.items()}


LENGTHS = st.lists(st.integers(0, 15), max_size=4)


@given(
    ROWS, LENGTHS, ORDERS, st.integers(1, 3), st.booleans(), st.booleans(), st.sampled_from(["first", "last"])
)
def test_what_passes_has_the_same_best_as_all(
    rows: list[Row], lengths: list[int], by: tuple[str, ...], n: int, up: bool, other: bool, ties: str
) -> None:
    upwards = [up, other][: len(by)]
    made = thinner(lambda keyed: keyed.top("best", n, by=by, ascending=upwards, ties=ties))
    left = passed(made, rows, lengths)
    assert best(left, n, by, upwards, ties) == best(rows, n, by, upwards, ties)
    keys = {(row["k"], row["j"]) for row in rows}
    assert len(left) <= n * len(keys) * len(cut(rows, lengths)), "no more than can count of each range"
    assert [row["n"] for row in left] == sorted(row["n"] for row in left), "in the order in which they came"


@pytest.mark.parametrize("n", [2**63 - 1, 2**70])
def test_the_best_may_be_more_than_there_can_ever_be(n: int) -> None:
    rows = [{"k": k, "j": 0, "v": v, "w": None, "n": v} for v in range(3) for k in ("a", "b")]
    assert passed(thinner(lambda keyed: keyed.top("best", n, by="v")), rows, []) == rows


@pytest.mark.parametrize("key", [[1], {"a": 1}], ids=["a list", "a struct"])
@pytest.mark.parametrize(
    "build", [lambda keyed: keyed.deduplicate("once"), lambda keyed: keyed.top("once", 1, by="v")]
)
def test_a_key_that_can_be_none_is_refused_before_records_are_left_out(key: Any, build: Any) -> None:
    pipeline = hf.Pipeline("nested")
    build(pipeline.read("e", hf.records([{"k": key, "v": 1}])).key_by("k")).write("out", hf.memory())
    with pytest.raises(SchemaError, match="A key can't be of type") as caught:
        hf.testing.run(pipeline)
    assert caught.value.uid == "once"


@given(ROWS, LENGTHS)
def test_of_each_range_the_first_of_each_key_passes(rows: list[Row], lengths: list[int]) -> None:
    left = passed(thinner(lambda keyed: keyed.deduplicate("once")), rows, lengths)
    firsts: list[int] = []
    for part in cut(rows, lengths):
        seen: dict[Any, int] = {}
        for row in part:
            seen.setdefault((row["k"], row["j"]), row["n"])
        firsts += seen.values()
    assert [row["n"] for row in left] == firsts


@given(ROWS, ORDERS, st.integers(1, 3), st.booleans(), st.booleans())
def test_places_are_those_of_a_plain_sort(
    rows: list[Row], by: tuple[str, ...], n: int, up: bool, other: bool
) -> None:
    table, upwards = pa.Table.from_pylist(rows, SCHEMA), [up, other][: len(by)]
    columns = [table[name].combine_chunks() for name in by]
    found = places(key_ids(table, ["k", "j"]), columns, upwards, np.arange(len(rows)), n)
    expected = best(rows, n, by, upwards, "first")
    for row, place in zip(rows, found.tolist(), strict=True):
        mine = expected[(row["k"], row["j"])]
        assert place == (mine.index(row["n"]) if row["n"] in mine else n)


def test_what_the_first_column_decides_is_not_compared_by_the_others() -> None:
    prices = pa.array([5, 7, 7, 6, 1], pa.int64())
    ids = np.array([0, 0, 0, 0, 1])
    assert hopeful(ids, prices, False, 1).tolist() == [False, True, True, False, True]
    assert hopeful(ids, prices, True, 2).tolist() == [True, False, False, True, True]
    assert hopeful(ids, pa.array(["a"] * 5), True, 1).all(), "texts are left to the comparison"


@pytest.mark.parametrize(
    "build",
    [
        lambda keyed: keyed.deduplicate("x", within=9),
        lambda keyed: keyed.window(hf.tumbling("10s")).top("x", 1, by="v"),
    ],
)
def test_where_event_time_decides_all_pass(build: Any) -> None:
    pipeline = hf.Pipeline("timed")
    stream = pipeline.read("e", hf.records([], schema=SCHEMA)).event_time("n", unit="s")
    build(stream.key_by("k"))
    node = next(n for n in pipeline._nodes if n.uid == "x")
    key = node.inputs[0].key
    assert key is not None and thinner_for(node, key) is None


def test_what_is_sent_shrinks_before_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[int] = []
    apply = Top.apply

    def counted(self: Top, work: Work) -> None:
        came.extend(side.table.num_rows for side in work.sides)
        apply(self, work)

    monkeypatch.setattr(Top, "apply", counted)
    pipeline = hf.Pipeline("less")
    rows = [{"k": "a", "v": n} for n in range(1000)]
    source = hf.records(rows, splits=2, schema={"k": str, "v": int})
    pipeline.read("e", source).key_by("k").top("best", 3, by="v").write("out", hf.memory())
    result = hf.testing.run(pipeline)
    assert came == [6], "three of each split"
    assert [row["v"] for row in result.rows("out")] == [999, 998, 997]


@pytest.mark.parametrize(
    "build",
    [
        lambda keyed: keyed.deduplicate("x"),
        lambda keyed: keyed.top("x", 1, by="v"),
        lambda keyed: keyed.aggregate("x", v=hf.max("v")),
    ],
)
def test_keys_whose_codes_are_in_another_order_are_told_apart(build: Any) -> None:
    """A dictionary's codes say nothing of which key came first."""
    codes, names = pa.array([2, 0, 1, 0, 2]), pa.array(["c", "a", "b"])
    table = pa.table({"k": pa.DictionaryArray.from_arrays(codes, names), "v": pa.array([1, 1, 1, 1, 1])})
    pipeline = hf.Pipeline("coded")
    build(pipeline.read("e", hf.records(table)).key_by("k")).write("out", hf.memory())
    assert sorted(row["k"] for row in hf.testing.run(pipeline).rows("out")) == ["a", "b", "c"]


def test_sessions_of_such_keys_are_told_apart() -> None:
    codes, names = pa.array([1, 0, 1]), pa.array(["b", "a"])
    at = pa.array([0, 1, 2], pa.timestamp("s"))
    table = pa.table({"k": pa.DictionaryArray.from_arrays(codes, names), "at": at})
    pipeline = hf.Pipeline("coded")
    timed = pipeline.read("e", hf.records(table)).event_time("at").key_by("k")
    timed.window(hf.session("5s")).aggregate("x", n=hf.count()).write("out", hf.memory())
    assert sorted((r["k"], r["n"]) for r in hf.testing.run(pipeline).rows("out")) == [("a", 2), ("b", 1)]
