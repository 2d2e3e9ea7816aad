"""What a run of a query came to, as a table that `oracle.equal` can compare with the truth."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.nexmark.oracle import QUERIES, answer
from holdfast.io.base import Reading, Source
from holdfast.log.records import Plan

_ROW = "__row"


def final(query: str, rows: pa.Table | None) -> pa.Table:
    """What remains of everything that a run wrote, in order: of each key the last row, where the query has keys.

    >>> rows = pa.table({"category": [1, 2, 1], "final": [5, 6, 7]})
    >>> final("q4", rows).to_pylist()
    [{'category': 2, 'final': 6}, {'category': 1, 'final': 7}]
    """
    info = QUERIES[query]
    if rows is None:
        return pa.table({name: pa.nulls(0) for name in info.columns})
    rows = rows.select(list(info.columns))
    if not info.updating:
        return rows
    numbered = rows.append_column(_ROW, pa.array(np.arange(rows.num_rows)))
    last = numbered.group_by(list(info.key)).aggregate([(_ROW, "max")]).column(f"{_ROW}_max")
    return rows.take(pa.array(np.sort(last.to_numpy())))


def written(folder: Path) -> pa.Table | None:
    """All rows of a folder of Parquet files in the order of their names, which is that of epochs; None: no files."""
    tables = [pq.ParquetFile(path).read() for path in sorted(folder.rglob("part-*.parquet"))]
    return pa.concat_tables(tables, promote_options="permissive") if tables else None


def processed(plans: Iterable[Plan], bids: Source, uid: str = "bid") -> pa.Table:
    """All bids that some plans read, with the clock of their epoch (`processed_ms`): what q12's truth is about."""
    return pa.concat_tables(_processed(plans, bids, uid))


def _processed(plans: Iterable[Plan], bids: Source, uid: str) -> Iterator[pa.Table]:
    for plan in plans:
        for planned in plan.ranges:
            if planned.source == uid:
                for table in bids.read(planned.piece, Reading(uid)):
                    clock = pa.array(np.full(table.num_rows, plan.now_ms))
                    yield table.append_column("processed_ms", clock)


def truth(query: str, tables: dict[str, pa.Table], **options: Any) -> pa.Table:
    """The answer of DuckDB; what only a pipeline has options for is left out."""
    known = {name: value for name, value in options.items() if name != "out_of_order_ms"}
    return answer(query, tables, **known)
