"""Keys as columns, and an index from them to rows, in numpy: no Python object is made for a key that is looked up.

An index is a hash table with open addressing over 64-bit hashes of keys. A hash that is found is believed only if the
key's *codes* agree, one for each of its columns: an integer is its own, any other value has a number that the index
gave it when it came first. So the answer is exact, and what an epoch pays for is its keys and not the table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.data.rows import canonical, column_values
from holdfast.state.keygroups import hash_columns

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_FIRST_SLOTS = 1 << 10
_FREE = -1
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
MOST_COLUMNS = 64
"""Which of a key's columns are null is one bit each."""


@dataclasses.dataclass
class Found:
    """What an index knows of keys: their codes, which columns are null, their hashes, and their rows; -1 for none."""

    codes: list[Rows]
    nulls: npt.NDArray[np.uint64]
    hashes: npt.NDArray[np.uint64]
    rows: Rows

    def where(self, mask: Mask) -> Found:
        """The same of some of them."""
        return Found([c[mask] for c in self.codes], self.nulls[mask], self.hashes[mask], self.rows[mask])


class KeyColumns:
    """Keys, column by column; as Python values only for those who ask."""

    def __init__(self, columns: Sequence[pa.Array], found: Found | None = None) -> None:
        self.columns = list(columns)
        self.found = found
        """What an index said of them."""
        self._values: list[Any] | None = None

    def __len__(self) -> int:
        return len(self.columns[0])

    def where(self, mask: Mask) -> KeyColumns:
        """Some of them."""
        chosen = pa.array(mask)
        found = None if self.found is None else self.found.where(mask)
        return KeyColumns([c.filter(chosen) for c in self.columns], found)

    def values(self) -> list[Any]:
        """Each as a Python value: a tuple where the key has several columns."""
        if self._values is None:
            parts = [column_values(c) for c in self.columns]
            self._values = parts[0] if len(parts) == 1 else list(zip(*parts, strict=True))
        return self._values

    def cast(self, types: Sequence[pa.DataType]) -> list[pa.Array]:
        """The columns with the types that are stored."""
        return [canonical(c.cast(t)) for c, t in zip(self.columns, types, strict=True)]


class KeyIndex:
    """Rows 0, 1, 2 … by key. Keys are added and never leave.

    >>> index = KeyIndex()
    >>> keys = index.find([pa.array(["a", "b"]), pa.array([1, 1])])
    >>> keys.rows.tolist(), index.add(keys), len(index)
    ([-1, -1], None, 2)
    >>> index.find([pa.array(["b", "a"]), pa.array([1, 2])]).rows.tolist()
    [1, -1]
    """

    def __init__(self) -> None:
        self._slots: Rows = np.full(_FIRST_SLOTS, _FREE, np.int64)
        self._hashes = np.empty(0, np.uint64)
        self._nulls = np.empty(0, np.uint64)
        self._codes: list[Rows] = []
        self._names: list[dict[Any, int]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def find(self, columns: Sequence[pa.Array]) -> Found:
        """What is known of keys. Values that never came are given their number here."""
        assert len(columns) <= MOST_COLUMNS
        while len(self._names) < len(columns):
            self._names.append({})
        codes, nulls = [], np.zeros(len(columns[0]), np.uint64)
        for place, (column, names) in enumerate(zip(columns, self._names, strict=True)):
            if column.null_count:
                missing = column.is_null().to_numpy(zero_copy_only=False)
                nulls |= missing.astype(np.uint64) << np.uint64(place)
            codes.append(_codes(column, names))
        # A row's hash must not depend on the others: what has no null is hashed as if nothing had.
        hashes = hash_columns([pa.array(c) for c in codes]) ^ (nulls * _SPREAD)
        found = Found(codes, nulls, hashes, np.full(len(nulls), _FREE, np.int64))
        self._look(found)
        return found

    def _look(self, found: Found) -> None:
        mask = len(self._slots) - 1
        at = (found.hashes & np.uint64(mask)).astype(np.int64)
        rows = self._slots[at]
        open_ = np.flatnonzero(rows != _FREE)
        rows = rows[open_]
        while len(open_):
            same = self._same(rows, found, open_)
            found.rows[open_[same]] = rows[same]
            open_ = open_[~same]
            at[open_] = (at[open_] + 1) & mask
            rows = self._slots[at[open_]]
            there = rows != _FREE
            open_, rows = open_[there], rows[there]

    def _same(self, rows: Rows, asked: Found, at: Rows) -> Mask:
        same: Mask = self._hashes[rows] == asked.hashes[at]
        for kept, codes in zip(self._codes, asked.codes, strict=True):
            same &= kept[rows] == codes[at]
        same &= self._nulls[rows] == asked.nulls[at]
        return same

    def add(self, keys: Found) -> None:
        """Give the next rows to the keys that have none, in their order; each comes once."""
        at = np.flatnonzero(keys.rows < 0)
        first, count = self._count, self._count + len(at)
        while len(self._codes) < len(keys.codes):
            self._codes.append(np.empty(len(self._hashes), np.int64))
        if count > len(self._hashes):
            room = max(count, 2 * len(self._hashes), _FIRST_SLOTS) - len(self._hashes)
            self._hashes = np.concatenate([self._hashes, np.empty(room, np.uint64)])
            self._nulls = np.concatenate([self._nulls, np.empty(room, np.uint64)])
            self._codes = [np.concatenate([c, np.empty(room, np.int64)]) for c in self._codes]
        new = slice(first, count)
        self._hashes[new], self._nulls[new] = keys.hashes[at], keys.nulls[at]
        for kept, codes in zip(self._codes, keys.codes, strict=True):
            kept[new] = codes[at]
        keys.rows[at] = np.arange(first, count)
        self._count = count
        if 2 * count > len(self._slots):
            self._slots = np.full(1 << (4 * count - 1).bit_length(), _FREE, np.int64)
            first = 0
        self._seat(np.arange(first, count))

    def _seat(self, rows: Rows) -> None:
        """Put rows into slots: each into the first free one from where its hash points to."""
        mask = len(self._slots) - 1
        at = (self._hashes[rows] & np.uint64(mask)).astype(np.int64)
        while len(rows):
            free = self._slots[at] == _FREE
            self._slots[at[free]] = rows[free]  # of several that want one, the last has it
            left = self._slots[at] != rows
            rows, at = rows[left], (at[left] + 1) & mask


def _codes(column: pa.Array, names: dict[Any, int]) -> Rows:
    """A number for each value: the same for equal ones, whatever the width of their type; 0 for null."""
    kind = column.type
    if pa.types.is_null(kind):
        return np.zeros(len(column), np.int64)
    if pa.types.is_integer(kind):
        whole = column.fill_null(0) if column.null_count else column
        return whole.to_numpy(zero_copy_only=False).astype(np.int64)  # type: ignore[no-any-return]
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
    coded = column.dictionary_encode()
    numbers = [names.setdefault(value, len(names)) for value in column_values(coded.dictionary)]
    at = coded.indices.fill_null(0) if column.null_count else coded.indices
    found: Rows = np.array(numbers or [0], np.int64)[at.to_numpy(zero_copy_only=False)]
    if column.null_count:
        found[column.is_null().to_numpy(zero_copy_only=False)] = 0
    return found
