"""Parquet files as ranges of rows: only the row groups that a range needs, in one thread.

Two cores run two tasks, so a task reads with one thread. Files are mapped into memory, which saves a quarter of
the time; one that is truncated at that very moment kills the worker, and the next attempt says what happened.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

TABLE_ROWS = 131_072
_RUN_ROWS = 2 * TABLE_ROWS
_HUGE_ROWS = 8 * TABLE_ROWS


def schema_of(path: str) -> pa.Schema:
    """A file's schema as a stream's: any field may be null, and dictionaries are plain values."""
    with pq.ParquetFile(path) as file:
        return plain(file.schema_arrow)


def plain(schema: pa.Schema) -> pa.Schema:
    """A schema without what only a file needs: metadata, field ids, dictionaries.

    >>> plain(pa.schema([pa.field("a", pa.dictionary(pa.int8(), pa.string()), nullable=False)]))
    a: string
    """
    return pa.schema([pa.field(f.name, _plain_type(f.type)) for f in schema])


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return kind.value_type
    if pa.types.is_list(kind):
        return pa.list_(_plain_type(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _plain_type(f.type)) for f in kind])
    if pa.types.is_map(kind):
        return pa.map_(_plain_type(kind.key_type), _plain_type(kind.item_type))
    return kind


def boundaries(path: str) -> list[int]:
    """The row at which each row group ends; the last is the number of rows."""
    metadata = pq.read_metadata(path)
    ends, row = [], 0
    for group in range(metadata.num_row_groups):
        row += metadata.row_group(group).num_rows
        ends.append(row)
    return ends


def read_rows(file: pq.ParquetFile, start: int, end: int, columns: list[str] | None) -> Iterator[pa.Table]:
    """The rows [start, end) of a file, in order, in tables of at most 131,072."""
    run: list[int] = []
    run_start = row = 0
    for group in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if row + rows > start and row < end:
            if not run:
                run_start = row
            if rows > _HUGE_ROWS and not run:
                yield from _huge(file, group, start - row, end - row, columns)
            else:
                run.append(group)
        row += rows
        if run and (row - run_start >= _RUN_ROWS or row >= end):
            yield from _run(file, run, start - run_start, end - run_start, columns)
            run = []
    if run:
        yield from _run(file, run, start - run_start, end - run_start, columns)


def _run(
    file: pq.ParquetFile, groups: list[int], start: int, end: int, columns: list[str] | None
) -> Iterator[pa.Table]:
    table = file.read_row_groups(groups, columns=columns, use_threads=False)
    start, end = max(start, 0), min(end, table.num_rows)
    for first in range(start, end, TABLE_ROWS):
        yield table.slice(first, min(TABLE_ROWS, end - first))


def _huge(
    file: pq.ParquetFile, group: int, start: int, end: int, columns: list[str] | None
) -> Iterator[pa.Table]:
    """A row group too large to hold at once, batch by batch, and no further than needed."""
    row = 0
    for batch in file.iter_batches(TABLE_ROWS, row_groups=[group], columns=columns, use_threads=False):
        first, last = max(start - row, 0), min(end - row, batch.num_rows)
        if first < last:
            yield pa.Table.from_batches([batch.slice(first, last - first)])
        row += batch.num_rows
        if row >= end:
            return
