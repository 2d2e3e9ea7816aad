"""A source of your own: the rows of a table in SQLite, taken as they are added.

    python examples/custom_source.py                # checks the source's promises, then runs the pipeline
    holdfast run examples/custom_source.py --drain

A source says what is there after a position (`plan`, on the driver) and reads exactly that, the same every time
(`read`, on an executor). Rows are only ever added to this table, so ranges of row numbers are all it takes.
`hf.testing.check_source` tries what can go wrong: small epochs, ranges read twice and backwards, growth.
Output: out/levels (JSON lines): how often each level was logged, and when last.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

import holdfast as hf

TABLE_ROWS = 10_000


class SqliteRows(hf.Source):
    """The rows of a table that only grows, by their rowid."""

    def __init__(self, path: str, table: str, schema: pa.Schema) -> None:
        self.path = str(Path(path).absolute())
        self.table = table
        self._schema = schema

    def schema(self) -> pa.Schema:
        return self._schema

    def plan(self, position: Any, limit: hf.Limit) -> hf.Offer:
        start = position or 0
        (newest,) = next(self.query(f"SELECT coalesce(max(rowid), 0) FROM {self.table}"))
        end = min(newest, start + limit.records)
        share = max(1, -(-(end - start) // limit.tasks))
        ranges = [
            hf.Range("0", low, min(low + share, end), records=min(share, end - low))
            for low in range(start, end, share)
        ]
        return hf.Offer(ranges=ranges, position=end, backlog=newest - end)

    def read(self, piece: hf.Range, reading: hf.Reading) -> Iterator[pa.Table]:
        columns = ", ".join(self._schema.names)
        for low in range(piece.start, piece.end, TABLE_ROWS):
            high = min(low + TABLE_ROWS, piece.end)
            rows = self.query(
                f"SELECT {columns} FROM {self.table} WHERE rowid > ? AND rowid <= ? ORDER BY rowid", low, high
            )
            yield pa.Table.from_pylist(
                [dict(zip(self._schema.names, row, strict=True)) for row in rows], self._schema
            )

    def query(self, sql: str, *values: Any) -> Iterator[Any]:
        """Rows of a query, through a connection of its own: a source is pickled and holds none open."""
        connection = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)
        try:
            yield from connection.execute(sql, values)
        finally:
            connection.close()

    def describe(self) -> str:
        return f"table {self.table} of {self.path}"


def add_rows(path: str, count: int) -> None:
    """Log entries, the same every time."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    levels = ("debug", "info", "info", "info", "warning", "error")
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS entries (at INTEGER, level TEXT, text TEXT)")
        (before,) = connection.execute("SELECT count(*) FROM entries").fetchone()
        rows = [(1_000 * n, levels[n * 7 % 6], f"entry {n}") for n in range(before, before + count)]
        connection.executemany("INSERT INTO entries VALUES (?, ?, ?)", rows)


DATABASE = "data/log.db"
SCHEMA = pa.schema({"at": pa.int64(), "level": pa.string(), "text": pa.string()})

if not Path(DATABASE).exists():
    add_rows(DATABASE, 3_000)

pipeline = hf.Pipeline("custom-source")
(
    pipeline.read("entries", SqliteRows(DATABASE, "entries", SCHEMA))
    .key_by("level")
    .aggregate("levels", entries=hf.count(), last_at=hf.max("at"))
    .write("level-counts", hf.jsonl("out/levels"))
)

if __name__ == "__main__":
    hf.testing.check_source(
        lambda: SqliteRows(DATABASE, "entries", SCHEMA), grow=lambda: add_rows(DATABASE, 500)
    )
    pipeline.run(drain=True)
