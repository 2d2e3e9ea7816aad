"""Nexmark's events as Parquet files that every side reads, and our source of them.

A folder for each kind, in it files of so many events of all kinds together, alike in number, so that sides that take
a file of each kind at a time stay side by side in event time. A manifest, written last, says what is there. Beside
them stands an event of each kind from far in the future (`closing`), for sides on which a source can't end.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import holdfast as hf
from bench.nexmark.generator import KINDS, ROUND, SCHEMAS, Config, events
from holdfast.io.rate import START_MS

THREE = ("person", "auction", "bid")
CLOSING = "closing.parquet"
"""The file with an event from far in the future, in each kind's folder; its ids are nobody's."""
MANIFEST = "_manifest.json"
_FORMAT_VERSION = 1
_FUTURE = dt.datetime(2100, 1, 1)
_ROW_GROUPS_A_FILE = 2


def prepare(folder: Path, count: int, per_file: int, config: Config) -> None:
    """Write the first `count` events, `per_file` of all kinds to each file, unless the manifest says they are there."""
    if per_file < ROUND or per_file % ROUND:
        raise ValueError(f"per_file must be a multiple of {ROUND}, not {per_file}.")
    wanted = {"version": _FORMAT_VERSION, "events": count, "per_file": per_file, "config": asdict(config)}
    manifest = folder / MANIFEST
    if manifest.exists() and json.loads(manifest.read_text()) == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    for kind in THREE:
        (folder / kind).mkdir(parents=True)
    starts = range(0, count, per_file)
    for number, start in enumerate(starts):
        for kind, table in events(start, min(start + per_file, count), config).items():
            _write(table, folder / kind / f"part-{number:05d}.parquet", number)
    for kind in THREE:
        _write(closing(kind), folder / kind / CLOSING, len(starts))
    manifest.write_text(json.dumps(wanted) + "\n")


def _write(table: pa.Table, path: Path, number: int) -> None:
    pq.write_table(table, path, row_group_size=max(1, -(-table.num_rows // _ROW_GROUPS_A_FILE)))
    # Files are taken in order of their time, by Spark to the millisecond.
    os.utime(path, (START_MS // 1000 + number,) * 2)


def closing(kind: str) -> pa.Table:
    """An event from far in the future."""
    values: dict[pa.DataType, Any] = {pa.int64(): -1, pa.string(): "", pa.timestamp("ms"): _FUTURE}
    return pa.Table.from_pylist([{f.name: values[f.type] for f in SCHEMAS[kind]}], SCHEMAS[kind])


def tables(folder: Path) -> dict[str, pa.Table]:
    """All events of a prepared folder, for the oracle."""
    return {
        kind: pa.concat_tables(pq.read_table(path) for path in sorted((folder / kind).glob("part-*.parquet")))
        for kind in THREE
    }


def records_a_round(kinds: Iterable[str]) -> int:
    """How many of so many events in a row are of these kinds.

    >>> records_a_round(["person", "auction"]), records_a_round(THREE)
    (4, 50)
    """
    return sum(KINDS[kind].count for kind in kinds)


class Prepared(hf.Source):
    """The events of one kind in a prepared folder: `hf.files`, which never ends, with an end and so many files an epoch.

    Args:
        folder: the prepared folder.
        kind: "person", "auction" or "bid".
        columns: what is read of the files; None: all.
        files: how many an epoch takes.
        beside: the kinds that are read together, this one among them.
        linger_ms: so long after the last file it says that it ends, for queries that wait for the clock.
    """

    def __init__(
        self,
        folder: Path,
        kind: str,
        columns: tuple[str, ...] | None = None,
        *,
        files: int = 1,
        beside: Iterable[str] = THREE,
        linger_ms: int = 0,
    ) -> None:
        facts = json.loads((folder / MANIFEST).read_text())
        names = SCHEMAS[kind].names if columns is None else columns
        schema = pa.schema([SCHEMAS[kind].field(name) for name in names])
        self._files = hf.files(folder / kind, schema=schema, pattern="part-*.parquet", on_drift="ignore")
        self._kind = KINDS[kind]
        self._rows = files * self._kind.before(facts["per_file"])
        self._together = records_a_round(beside)
        self._linger_ms = linger_ms
        self._over_ms: int | None = None

    def describe(self) -> str:
        return self._files.describe()

    def schema(self) -> pa.Schema:
        return self._files.schema()

    def plan(self, position: Any, limit: hf.Limit) -> hf.Offer:
        # An epoch may have fewer records: each kind takes its share, so that all stay side by side in event time.
        share = max(1, limit.records * self._kind.count // self._together)
        limit = hf.Limit(min(share, self._rows), limit.tasks, limit.now_ms)
        offer = self._files.plan(position, limit)
        if offer.backlog:
            return offer
        if self._over_ms is None or offer.ranges:
            self._over_ms = limit.now_ms
        return hf.Offer(
            offer.ranges, offer.position, exhausted=limit.now_ms >= self._over_ms + self._linger_ms
        )

    def read(self, piece: hf.Range, reading: hf.Reading) -> Iterator[pa.Table]:
        return self._files.read(piece, reading)

    def split_of(self, piece: hf.Range) -> str:
        return self._files.split_of(piece)
