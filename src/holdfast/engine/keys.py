"""The key of a record inside an exchange: which columns hold it, and its values."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.data.rows import column_values, one_array
from holdfast.errors import SchemaError
from holdfast.plan import graph as g
from holdfast.state.index import plain

KEY = "__key"
"""Columns that carry the key through an exchange where it is a function of the record."""


def key_names(key: g.Key, schema: pa.Schema) -> list[str]:
    """The columns that hold the key inside an exchange."""
    if key.columns:
        return list(key.columns)
    return [n for n in schema.names if n.startswith(KEY)]


def keys_in(table: pa.Table, names: list[str]) -> list[Any]:
    """The keys of a table's rows as Python values."""
    columns = [column_values(table.column(n)) for n in names]
    return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))


def key_ids(table: pa.Table, names: list[str]) -> npt.NDArray[np.int64]:
    """A number for each row that rows with the same key share: 0, 1, and so on, as keys come for the first time.

    >>> key_ids(pa.table({"a": [7, 7, 5, 7], "b": ["x", "y", "x", "x"]}), ["a", "b"]).tolist()
    [0, 1, 2, 0]
    """
    ids = np.zeros(table.num_rows, np.int64)
    for place, name in enumerate(names):
        codes, count = _codes(one_array(table[name]))
        ids = codes if place == 0 else _codes(pa.array(ids * (count + 1) + codes))[0]
    return ids


def _codes(column: pa.Array) -> tuple[npt.NDArray[np.int64], int]:
    """A column's values as numbers from 0, as they come for the first time, and how many there are."""
    column = plain(column)  # a dictionary's own codes may come in any order
    coded = column.dictionary_encode(null_encoding="encode")
    codes = coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return codes, len(coded.dictionary)


def numbering() -> dict[Any, int]:
    """Numbers for keys as they are asked for: 0, 1, and so on.

    >>> known = numbering()
    >>> [known[key] for key in "abac"]
    [0, 1, 0, 2]
    """
    return defaultdict(itertools.count().__next__)


def check_alike(node: g.Node, one: Sequence[pa.DataType], other: Sequence[pa.DataType]) -> None:
    """Raise unless the keys of an operator's two sides can be equal, and one type holds those of both."""
    null = pa.types.is_null
    if len(one) == len(other) and all(
        a.equals(b) or (fits_int64(a) and fits_int64(b)) or null(a) or null(b)
        for a, b in zip(one, other, strict=True)
    ):
        return
    raise SchemaError(
        f"The two sides are keyed by different types: {[str(t) for t in one]} and {[str(t) for t in other]}.",
        uid=node.uid,
        where=node.where,
        remedy="Key both by columns of one type; cast one of them before.",
    )


def check_kinds(node: g.Node, known: Sequence[pa.DataType], found: Sequence[pa.DataType]) -> None:
    """Raise where keys that come are of another kind than those that are kept: equal ones would not meet."""
    for before, now in zip(known, found, strict=False):
        if None not in (kinds := {_kind(before), _kind(now)}) and len(kinds) > 1:
            raise SchemaError(
                f"The key was {before} and is {now} now.",
                uid=node.uid,
                where=node.where,
                remedy="Cast it to one type before key_by.",
            )


def _kind(kind: pa.DataType) -> str | None:
    """What keys of a type are hashed by: those of one kind may differ in width; None for nulls, which fit any."""
    t = pa.types
    if t.is_dictionary(kind):
        kind = kind.value_type
    if t.is_null(kind):
        return None
    if t.is_decimal(kind):
        return f"decimals with {kind.scale} digits behind the point"
    kinds = {"integers": t.is_integer, "times": t.is_timestamp, "days": t.is_date, "times of day": t.is_time}
    return next((name for name, is_one in kinds.items() if is_one(kind)), "others")


def fits_int64(kind: pa.DataType) -> bool:
    """Whether an int64 can hold all integers of a type."""
    return bool(pa.types.is_integer(kind) and not pa.types.is_uint64(kind))


def public_names(key: g.Key, count: int) -> list[str]:
    """What the columns of a key are called in results: as the user calls them, or `key` where it is a function."""
    if key.columns:
        return list(key.columns)
    return ["key"] if count == 1 else [f"key{i}" for i in range(count)]
