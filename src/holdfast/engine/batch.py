"""A batch inside a chain: a table or dicts, whichever the last operator made, the other on demand."""

from __future__ import annotations

import pyarrow as pa

from holdfast.data import rows as conversion
from holdfast.data.rows import Row
from holdfast.data.schemas import to_text


class Batch:
    """Records between two operators of a chain."""

    __slots__ = ("_rows", "_table")

    def __init__(self, *, table: pa.Table | None = None, rows: list[Row] | None = None) -> None:
        self._table = table
        self._rows = rows

    def __len__(self) -> int:
        if self._rows is not None:
            return len(self._rows)
        return int(self._table.num_rows) if self._table is not None else 0

    @property
    def known_table(self) -> pa.Table | None:
        """The table, where it is one already."""
        return self._table if self._rows is None else None

    def rows(self) -> list[Row]:
        """The records as dicts that belong to whoever asks first: a table gives new ones each time."""
        return self._rows if self._rows is not None else conversion.to_rows(self._table)

    def table(self, pinned: pa.Schema | None) -> pa.Table:
        """The records as a table with the pinned schema."""
        if self._rows is not None:
            return conversion.to_table(self._rows, pinned)
        return conversion.conform(self._table, pinned)

    def copy(self) -> Batch:
        """A batch whose dicts can be changed without this one seeing it."""
        if self._rows is None:
            return self
        return Batch(rows=[conversion.copy_value(r) for r in self._rows])


class SchemaBook:
    """The schemas that are pinned, and those that this task has seen, by edge."""

    def __init__(self, pinned: dict[str, pa.Schema]) -> None:
        self.pinned = pinned
        self._seen: dict[str, list[pa.Schema]] = {}

    def table(self, edge: str, batch: Batch) -> pa.Table:
        """A batch as a table with the schema of its edge, noting what it is."""
        table = batch.table(self.pinned.get(edge))
        self.note(edge, table.schema)
        return table

    def note(self, edge: str, schema: pa.Schema) -> None:
        seen = self._seen.setdefault(edge, [])
        if not any(s.equals(schema) for s in seen):
            seen.append(schema)

    def seen(self) -> dict[str, list[str]]:
        """What was seen, as text for a report."""
        return {edge: [to_text(s) for s in schemas] for edge, schemas in self._seen.items()}
