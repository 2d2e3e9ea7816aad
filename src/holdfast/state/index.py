"""Keys as columns, and an index from them to rows, in numpy: no Python object is made for a key that is looked up.

An index is a hash table with open addressing over 64-bit hashes of keys. A hash that is found is believed only if the
key's *codes* agree, one for each of its columns: integers and times are their own, any other value has a number that the
index gave it when it came first. So the answer is exact, and what an epoch pays for is its keys and not the table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.data.rows import canonical, column_values
from holdfast.errors import StateError
from holdfast.state.keygroups import hash_columns

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_FIRST_SLOTS = 1 << 10
_FREE = -1
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
MARKED_COLUMNS = 64
"""Which of so many columns of a key are null is one bit each; further ones have a name for null."""


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
        """Each as a Python value: a tuple where the key has several columns.

        Times with a zone are told in UTC: elsewhere two of them may be equal that are an hour apart.
        """
        if self._values is None:
            parts = [column_values(_in_utc(c)) for c in self.columns]
            self._values = parts[0] if len(parts) == 1 else list(zip(*parts, strict=True))
        return self._values

    def cast(self, types: Sequence[pa.DataType]) -> list[pa.Array]:
        """The columns with the types that are stored."""
        return [canonical(c.cast(t)) for c, t in zip(self.columns, types, strict=True)]


def _in_utc(column: pa.Array) -> pa.Array:
    kind = column.type
    zoned = pa.types.is_timestamp(kind) and kind.tz is not None
    return column.cast(pa.timestamp(kind.unit, "UTC")) if zoned else column


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
        self._own: list[bool | None] = []
        """Of each column of the key, whether its values are their own numbers; None while only nulls have come."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def find(self, columns: Sequence[pa.Array]) -> Found:
        """What is known of keys. Values that never came are given their number here."""
        while len(self._names) < len(columns):
            self._names.append({})
            self._own.append(None)
        codes, nulls = [], np.zeros(len(columns[0]), np.uint64)
        for place, column in enumerate(columns):
            column = plain(column)
            own = place < MARKED_COLUMNS and _is_own(column.type)
            if not pa.types.is_null(column.type):
                if self._own[place] not in (own, None):
                    raise StateError(
                        f"Column {place} of a key had another kind of values before: {column.type}."
                    )
                self._own[place] = own
            if place < MARKED_COLUMNS and column.null_count:
                missing = column.is_null().to_numpy(zero_copy_only=False)
                nulls |= missing.astype(np.uint64) << np.uint64(place)
            codes.append(
                _numbers(column) if own else _named(column, self._names[place], place < MARKED_COLUMNS)
            )
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


def plain(column: pa.Array) -> pa.Array:
    """A column as Arrow can encode it, with its nulls where they are counted."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if pa.types.is_decimal(kind) and kind.bit_width < 128:
        return column.cast(pa.decimal128(kind.precision, kind.scale))
    return column


def _is_own(kind: pa.DataType) -> bool:
    """Whether values of a type are their own numbers: integers, and points in time."""
    t = pa.types
    return bool(t.is_integer(kind) or t.is_date(kind) or t.is_timestamp(kind) or t.is_time(kind))


def _numbers(column: pa.Array) -> Rows:
    """The same number for equal values, whatever the width of their type; 0 for null."""
    kind = column.type
    if pa.types.is_timestamp(kind):
        try:
            column = column.cast(pa.timestamp("us", kind.tz)).cast(pa.int64())
        except pa.ArrowInvalid:
            column_values(column)  # what Python can't hold is refused, as everywhere
            raise
    elif pa.types.is_time(kind):
        column = column.cast(pa.time64("us")).cast(pa.int64())
    elif pa.types.is_date(kind):
        column = column.cast(pa.date32()).cast(pa.int32())
    whole = column.fill_null(0) if column.null_count else column
    return whole.to_numpy(zero_copy_only=False).astype(np.int64)  # type: ignore[no-any-return]


def _named(column: pa.Array, names: dict[Any, int], marked: bool) -> Rows:
    """A number for each value, by the names that were given: new ones get the next. Null is 0 if it is marked elsewhere."""
    if pa.types.is_null(column.type) and marked:
        return np.zeros(len(column), np.int64)
    coded = column.dictionary_encode(null_encoding="encode")
    numbers = [
        0 if value is None and marked else names.setdefault(value, len(names))
        for value in column_values(coded.dictionary)
    ]
    found: Rows = np.array(numbers or [0], np.int64)[coded.indices.to_numpy(zero_copy_only=False)]
    return found
