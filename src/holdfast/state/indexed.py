"""State in memory whose keys are columns too: of aggregates, and of what was seen. Nothing in it is forgotten.

As `columns`, without due times, owners or rows that are used again, so that an index in numpy can find rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.data.rows import one_array
from holdfast.state.columns import Column, Mask
from holdfast.state.index import Found, KeyColumns, KeyIndex
from holdfast.state.tables import TableSpec, ValueTable, delta_rows, key_names, parts_of


class HeapIndexed(ValueTable):
    """Values by keys that are only ever asked for as columns."""

    def __init__(self, spec: TableSpec) -> None:
        super().__init__(spec)
        assert not (spec.extra or spec.due), f"{spec.name}: such tables can't be indexed by columns"
        self._index = KeyIndex()
        self._columns = [Column(spec.value_type.field(i).type) for i in range(spec.value_type.num_fields)]
        self._staged: tuple[KeyColumns, Found, list[pa.Array]] | None = None

    def find_columns(self, keys: KeyColumns) -> tuple[Mask, list[pa.Array]]:
        keys.found = self._index.find(keys.columns)
        rows = keys.found.rows
        return rows >= 0, [c.take(rows) for c in self._columns]

    def stage_columns(self, keys: KeyColumns, columns: list[pa.Array]) -> None:
        assert keys.found is not None, f"{self.spec.name}: keys are found before they are staged"
        self._staged = keys, keys.found, columns

    def find(self, keys: list[Any]) -> tuple[Mask, list[pa.Array]]:
        raise NotImplementedError(f"{self.spec.name} is asked by columns")

    def stage(self, keys: list[Any], columns: list[pa.Array], gone: Mask | None = None) -> None:
        raise NotImplementedError(f"{self.spec.name} is written by columns")

    def drop(self) -> None:
        self._staged = None

    def to_arrow(self, key_types: Sequence[pa.DataType], now_ms: int, uid: str) -> pa.Table | None:
        if self._staged is None or not len(self._staged[0]):
            return None
        keys, _, columns = self._staged
        fields = [self.spec.value_type.field(i) for i in range(self.spec.value_type.num_fields)]
        value = pa.StructArray.from_arrays(columns, fields=fields)
        live = pa.array(np.ones(len(keys), bool))
        return delta_rows(keys.cast(key_types), None, value, live, self.spec, now_ms)

    def live(self) -> int:
        """Keys, as what is staged leaves them."""
        return len(self._index) + (0 if self._staged is None else int((self._staged[1].rows < 0).sum()))

    def absorb(self, at_ms: int) -> None:
        """Make what is staged part of the columns."""
        if self._staged is not None:
            _, found, columns = self._staged
            self._write(found, columns)
        self._staged = None

    def load(self, rows: pa.Table) -> None:
        """Take over the rows of a file; what it says of a key counts more than the files before it."""
        assert rows["live"].to_numpy().all(), f"{self.spec.name}: a key was forgotten"
        found = self._index.find([one_array(rows[name]) for name in key_names(rows.schema)])
        self._write(found, parts_of(one_array(rows["value"]), self.spec))

    def loaded(self) -> None:
        """All files are in."""

    def _write(self, keys: Found, columns: list[pa.Array]) -> None:
        self._index.add(keys)
        for column, array in zip(self._columns, columns, strict=True):
            column.reserve(len(self._index))
            column.put(keys.rows, array)

    def expire(self, now_ms: int) -> None:
        """What is indexed has no TTL."""
