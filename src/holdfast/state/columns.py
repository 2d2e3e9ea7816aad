"""State of aggregates in memory: one numpy column for each part, and an index from key to row.

An epoch looks all its keys up at once and writes all its rows at once; no Python object is made for a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.data.rows import column_values
from holdfast.state.tables import TableSpec, ValueTable, delta_rows, key_columns, keys_of

_FIRST_CAPACITY = 1024


class Column:
    """One growing column: a numpy array where the type has one, Python objects otherwise, and what is not null."""

    def __init__(self, kind: pa.DataType) -> None:
        self._kind = kind
        self._plain = bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))
        self._values: npt.NDArray[Any] = np.zeros(
            _FIRST_CAPACITY, kind.to_pandas_dtype() if self._plain else object
        )
        self._valid = np.zeros(_FIRST_CAPACITY, bool)

    def reserve(self, rows: int) -> None:
        """Have room for so many rows; doubling, so that growing costs a constant a row."""
        if rows > len(self._values):
            room = max(rows, 2 * len(self._values)) - len(self._values)
            self._values = np.concatenate([self._values, np.zeros(room, self._values.dtype)])
            self._valid = np.concatenate([self._valid, np.zeros(room, bool)])

    def take(self, rows: npt.NDArray[np.int64]) -> pa.Array:
        """The values of some rows; a row below zero is null."""
        valid = self._valid[rows] & (rows >= 0)
        values = self._values[rows]
        if self._plain:
            return pa.array(values, type=self._kind, mask=None if valid.all() else ~valid)
        return pa.array([v if ok else None for v, ok in zip(values, valid, strict=True)], type=self._kind)

    def put(self, rows: npt.NDArray[np.int64], array: pa.Array) -> None:
        """Write some rows."""
        if self._plain:
            self._valid[rows] = (
                True if array.null_count == 0 else array.is_valid().to_numpy(zero_copy_only=False)
            )
            full = array if array.null_count == 0 else array.fill_null(0)
            self._values[rows] = full.to_numpy(zero_copy_only=False)
        else:
            values = column_values(array)
            self._valid[rows] = [v is not None for v in values]
            made = np.empty(len(values), object)
            made[:] = values
            self._values[rows] = made


class HeapColumns(ValueTable):
    """The state of an aggregate on the heap."""

    def __init__(self, spec: TableSpec) -> None:
        super().__init__(spec)
        kinds = [spec.value_type.field(i).type for i in range(spec.value_type.num_fields)]
        self._index: dict[Any, int] = {}
        self._columns = [Column(k) for k in kinds]
        self._staged: tuple[list[Any], npt.NDArray[np.int64], list[pa.Array]] | None = None
        self._found: tuple[list[Any], npt.NDArray[np.int64]] | None = None

    def _rows_of(self, keys: Sequence[Any]) -> npt.NDArray[np.int64]:
        return np.fromiter(map(self._index.get, keys, repeat(-1)), np.int64, count=len(keys))

    def find(self, keys: list[Any]) -> tuple[npt.NDArray[np.bool_], list[pa.Array]]:
        rows = self._rows_of(keys)
        self._found = (keys, rows)
        return rows >= 0, [c.take(rows) for c in self._columns]

    def stage(self, keys: list[Any], columns: list[pa.Array]) -> None:
        rows = self._found[1] if self._found is not None and self._found[0] is keys else self._rows_of(keys)
        self._staged, self._found = (keys, rows, columns), None

    def drop(self) -> None:
        self._staged = None

    def to_arrow(self, key_types: Sequence[pa.DataType], now_ms: int, uid: str) -> pa.Table | None:
        if self._staged is None:
            return None
        keys, _, columns = self._staged
        fields = [self.spec.value_type.field(i) for i in range(self.spec.value_type.num_fields)]
        value = pa.StructArray.from_arrays(columns, fields=fields)
        live = pa.array(np.ones(len(keys), bool))
        return delta_rows(key_columns(keys, key_types, uid), None, value, live, self.spec, now_ms)

    def live(self) -> int:
        """Keys, those that are staged included."""
        return len(self._index) + (0 if self._staged is None else int((self._staged[1] < 0).sum()))

    def absorb(self, at_ms: int) -> None:
        """Make what is staged part of the columns."""
        if self._staged is not None:
            self._write(*self._staged)
            self._staged = None

    def load(self, rows: pa.Table) -> None:
        """Take over stored rows; of a key that comes twice, the later one."""
        keys = keys_of(rows)
        value = rows["value"].combine_chunks()
        value = pa.concat_arrays(value.chunks) if isinstance(value, pa.ChunkedArray) else value
        columns = [c.cast(k._kind) for c, k in zip(value.flatten(), self._columns, strict=True)]
        self._write(keys, self._rows_of(keys), columns)

    def _write(self, keys: list[Any], rows: npt.NDArray[np.int64], columns: list[pa.Array]) -> None:
        new = np.flatnonzero(rows < 0)
        if len(new):
            first = len(self._index)
            self._index.update(
                zip((keys[i] for i in new.tolist()), range(first, first + len(new)), strict=True)
            )
            rows = rows.copy()
            rows[new] = np.arange(first, first + len(new))
        for column, array in zip(self._columns, columns, strict=True):
            column.reserve(len(self._index))
            column.put(rows, array)

    def loaded(self) -> None:
        """Nothing to tidy up after a load."""

    def expire(self, now_ms: int) -> None:
        """Aggregates have no TTL."""
