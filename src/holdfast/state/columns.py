"""State of aggregates in memory: one numpy column for each part, and an index from key to row.

An epoch looks all its keys up at once and writes all its rows at once; no Python object is made for a value.
The row of a key that is forgotten is the next new key's, so memory holds what was kept at most at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.data.rows import canonical, column_values, one_array
from holdfast.state.due import EARLIEST, DueIndex
from holdfast.state.tables import (
    TableSpec,
    ValueTable,
    delta_rows,
    key_columns,
    keys_of,
    order_bytes,
    parts_of,
)

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_FIRST_CAPACITY = 1024


class Column:
    """One growing column: a numpy array where the type has one, Python objects otherwise, and what is not null."""

    def __init__(self, kind: pa.DataType) -> None:
        self._kind = kind
        self._stored = pa.int64() if pa.types.is_timestamp(kind) else kind
        self._plain = bool(pa.types.is_integer(self._stored) or pa.types.is_floating(kind))
        self._values: npt.NDArray[Any] = np.zeros(
            _FIRST_CAPACITY, self._stored.to_pandas_dtype() if self._plain else object
        )
        self._valid = np.zeros(_FIRST_CAPACITY, bool)

    def reserve(self, rows: int) -> None:
        """Have room for so many rows; doubling, so that growing costs a constant a row."""
        if rows > len(self._values):
            room = max(rows, 2 * len(self._values)) - len(self._values)
            self._values = np.concatenate([self._values, np.zeros(room, self._values.dtype)])
            self._valid = np.concatenate([self._valid, np.zeros(room, bool)])

    def take(self, rows: Rows) -> pa.Array:
        """The values of some rows; a row below zero is null."""
        valid = self._valid[rows] & (rows >= 0)
        values = self._values[rows]
        if self._plain:
            return pa.array(values, type=self._stored, mask=None if valid.all() else ~valid).view(self._kind)
        if not valid.all():
            values[~valid] = None
        return pa.array(values.tolist(), type=self._kind)

    def put(self, rows: Rows, array: pa.Array) -> None:
        """Write some rows."""
        whole = array.null_count == 0
        self._valid[rows] = True if whole else array.is_valid().to_numpy(zero_copy_only=False)
        if self._plain:
            array = array.view(self._stored)
            self._values[rows] = (array if whole else array.fill_null(0)).to_numpy(zero_copy_only=False)
        else:
            self._values[rows] = np.fromiter(column_values(array), object, count=len(array))

    def clear(self, rows: Rows) -> None:
        """Let some rows go, and the objects in them."""
        self._valid[rows] = False
        if not self._plain:
            self._values[rows] = None


class HeapColumns(ValueTable):
    """The state of an aggregate on the heap."""

    def __init__(self, spec: TableSpec) -> None:
        super().__init__(spec)
        kinds = [spec.value_type.field(i).type for i in range(spec.value_type.num_fields)]
        self._index: dict[Any, int] = {}
        self._columns = [Column(k) for k in kinds]
        self._rows = 0
        self._free: list[Rows] = []
        self._names: npt.NDArray[Any] = np.empty(0, object)
        """Where entries have due times: the key of each row."""
        self._due = None if spec.due is None else DueIndex()
        self._owned: dict[Any, Any] = {}
        """Where entries have owners: the key of each, or a dict of them where there are several."""
        self._staged: tuple[list[Any], Rows, list[pa.Array], Mask | None] | None = None
        self._found: tuple[list[Any], Rows] | None = None

    def _rows_of(self, keys: Sequence[Any]) -> Rows:
        return np.fromiter(map(self._index.get, keys, repeat(-1)), np.int64, count=len(keys))

    def find(self, keys: list[Any]) -> tuple[Mask, list[pa.Array]]:
        rows = self._rows_of(keys)
        self._found = (keys, rows)
        return rows >= 0, [c.take(rows) for c in self._columns]

    def stage(self, keys: list[Any], columns: list[pa.Array], gone: Mask | None = None) -> None:
        rows = self._found[1] if self._found is not None and self._found[0] is keys else self._rows_of(keys)
        if gone is not None and not gone.any():
            gone = None
        self._staged, self._found = (keys, rows, columns, gone), None

    def drop(self) -> None:
        self._staged = self._found = None

    def to_arrow(self, key_types: Sequence[pa.DataType], now_ms: int, uid: str) -> pa.Table | None:
        if self._staged is None or not self._staged[0]:
            return None
        keys, _, columns, gone = self._staged
        live = pa.array(np.ones(len(keys), bool) if gone is None else ~gone)
        if gone is not None:
            columns = [canonical(pc.if_else(live, c, pa.scalar(None, c.type))) for c in columns]
        fields = [self.spec.value_type.field(i) for i in range(self.spec.value_type.num_fields)]
        value = pa.StructArray.from_arrays(columns, fields=fields)
        return delta_rows(key_columns(keys, key_types, uid), None, value, live, self.spec, now_ms)

    def live(self) -> int:
        """Keys, as what is staged leaves them."""
        if self._staged is None:
            return len(self._index)
        _, rows, _, gone = self._staged
        if gone is None:
            return len(self._index) + int((rows < 0).sum())
        return len(self._index) + int((~gone & (rows < 0)).sum()) - int((gone & (rows >= 0)).sum())

    def absorb(self, at_ms: int) -> None:
        """Make what is staged part of the columns."""
        if self._staged is not None:
            self._write(*self._staged)
        self._staged = self._found = None

    def load(self, rows: pa.Table) -> None:
        """Take over the rows of a file; what it says of a key counts more than the files before it."""
        keys = keys_of(rows)
        live = rows["live"].to_numpy()
        value = one_array(rows["value"])
        self._due = None
        self._write(keys, self._rows_of(keys), parts_of(value, self.spec), None if live.all() else ~live)

    def loaded(self) -> None:
        """Index the due times of all that was loaded."""
        if self.spec.due is not None:
            rows = np.fromiter(self._index.values(), np.int64, count=len(self._index))
            self._due = DueIndex()
            self._due.note(rows, self._dues([c.take(rows) for c in self._columns]))

    def _write(self, keys: list[Any], rows: Rows, columns: list[pa.Array], gone: Mask | None) -> None:
        if gone is not None:
            self._forget([keys[i] for i in np.flatnonzero(gone & (rows >= 0)).tolist()])
            keys, rows = [keys[i] for i in np.flatnonzero(~gone).tolist()], rows[~gone]
            columns = [c.filter(pa.array(~gone)) for c in columns]
        new = np.flatnonzero(rows < 0)
        if len(new):
            rows = rows.copy()
            rows[new] = self._room(len(new))
            self._name([keys[i] for i in new.tolist()], rows[new])
        for column, array in zip(self._columns, columns, strict=True):
            column.reserve(self._rows)
            column.put(rows, array)
        if self._due is not None:
            self._due.note(rows, self._dues(columns))

    def _dues(self, columns: list[pa.Array]) -> Rows:
        assert self.spec.due_at is not None
        dues = columns[self.spec.due_at]
        assert dues.null_count == 0, f"{self.spec.name}: an entry without a due time"
        return np.asarray(dues.to_numpy(), np.int64)

    def _forget(self, keys: list[Any]) -> None:
        rows = np.fromiter(map(self._index.pop, keys), np.int64, count=len(keys))
        self._free.append(rows)
        if self.spec.owned:
            self._disown(keys)
        for column in self._columns:
            column.clear(rows)
        if self.spec.due is not None:
            self._names[rows] = None
        if self._due is not None:
            self._due.forget(rows)

    def _room(self, count: int) -> Rows:
        """Rows for so many new keys, those of forgotten ones first."""
        parts = []
        while count and self._free:
            free = self._free.pop()
            if len(free) > count:
                self._free.append(free[count:])
            parts.append(free[:count])
            count -= len(parts[-1])
        parts.append(np.arange(self._rows, self._rows + count))
        self._rows += count
        return np.concatenate(parts)

    def _name(self, keys: list[Any], rows: Rows) -> None:
        self._index.update(zip(keys, rows.tolist(), strict=True))
        if self.spec.owned:
            self._own(keys)
        if self.spec.due is not None:
            if self._rows > len(self._names):
                room = max(self._rows, 2 * len(self._names)) - len(self._names)
                self._names = np.concatenate([self._names, np.empty(room, object)])
            self._names[rows] = np.fromiter(keys, object, count=len(keys))

    def _own(self, keys: list[Any]) -> None:
        owned = self._owned
        for key in keys:
            owner = key[:-1]
            mine = owned.setdefault(owner, key)
            if type(mine) is dict:
                mine[key] = None
            elif mine is not key:
                owned[owner] = {mine: None, key: None}

    def _disown(self, keys: list[Any]) -> None:
        owned = self._owned
        for key in keys:
            owner = key[:-1]
            mine = owned[owner]
            if type(mine) is tuple:
                del owned[owner]
                continue
            del mine[key]
            if not mine:
                del owned[owner]

    def under(self, owners: list[Any], groups: Callable[[], npt.NDArray[np.uint16]]) -> list[Any]:
        found: list[Any] = []
        for mine in map(self._owned.get, owners):
            if type(mine) is tuple:
                found.append(mine)
            elif mine is not None:
                found += mine
        return found

    def next_due(self, since: int = EARLIEST) -> int | None:
        assert self._due is not None, f"{self.spec.name} has no due times"
        return self._due.first(since)

    def _staged_dues(self) -> list[int]:
        if self._staged is None:
            return []
        _, _, columns, gone = self._staged
        dues = self._dues(columns)
        found: list[int] = (dues if gone is None else dues[~gone]).tolist()
        return found

    def _due_keys(self, first: int, last: int) -> list[Any]:
        assert self._due is not None, f"{self.spec.name} has no due times"
        rows = self._due.between(first, last)
        marks = [order_bytes(k) for k in self._names[rows].tolist()]
        rows = rows[sorted(range(len(marks)), key=marks.__getitem__)]
        rows = rows[np.argsort(self._due.dues(rows), kind="stable")]
        return self._names[rows].tolist()  # type: ignore[no-any-return]

    def expire(self, now_ms: int) -> None:
        """Aggregates have no TTL."""
