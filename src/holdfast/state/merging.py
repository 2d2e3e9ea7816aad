"""Merging of deltas: which to merge when, and how; so that a version has few files, and not many times its rows."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.state import deltas
from holdfast.state.deltas import BATCH_BYTES, Damaged, DeltaFile
from holdfast.state.tables import key_names

FAN = 7
"""So many neighbours of one tier are merged into one."""
WASTE = 3
"""All files are merged into one when they have so many times the rows that live: then two of three are read in vain."""
_TIER_BYTES = 64 << 10
"""Files below this are all of the lowest tier; each tier above holds files up to `FAN` times as large."""
_SPARE_BYTES = 16 << 20
"""Below this nobody minds what is read in vain."""

Positions = npt.NDArray[np.int64]


def tier(size_bytes: int) -> int:
    """How large a file is, on a scale in which a tier is `FAN` times the one below."""
    found = 0
    while size_bytes >= _TIER_BYTES:
        found, size_bytes = found + 1, size_bytes // FAN
    return found


def pick_merge(files: Sequence[DeltaFile], live: int | None = None) -> tuple[int, int] | None:
    """Which neighbours to merge next, as a slice, or None: the newest `FAN` of one tier, or all. Pure.

    A file counts as of the largest tier among itself and all newer ones: what stands before a large file
    can be merged with it at no more than its cost. So a row is rewritten a few times a tier and not with
    each merge, and a version has fewer than `FAN` files a tier.

    Args:
        live: the rows that live, if these files are the whole version: once there are `WASTE` times as many, all are merged.

    >>> files = [DeltaFile(str(i), 1, 0, 1) for i in range(FAN + 1)]
    >>> pick_merge(files) == (1, FAN + 1), pick_merge(files[: FAN - 1])
    (True, None)
    >>> pick_merge([DeltaFile("large", 1 << 30, 0, 1), *files[: FAN - 1]])
    >>> large = [DeltaFile("a", 1 << 30, 0, 1000), DeltaFile("b", 1 << 30, 0, 1001)]
    >>> pick_merge(large, live=1000), pick_merge(large, live=666)
    (None, (0, 2))
    """
    if live is not None and _wasteful(files, live):
        return 0, len(files)
    end, highest = len(files), 0
    start = end
    while start > 0:
        highest = max(highest, tier(files[start - 1].size_bytes))
        start -= 1
        if end - start >= FAN:
            return start, end
        if start > 0 and tier(files[start - 1].size_bytes) > highest:
            end = start
    return None


def _wasteful(files: Sequence[DeltaFile], live: int) -> bool:
    large = len(files) > 1 and sum(f.size_bytes for f in files) > _SPARE_BYTES
    return large and sum(f.rows for f in files) > WASTE * live


def merge_tables(tables: Sequence[pa.Table], *, oldest: bool) -> pa.Table:
    """Rows of several deltas as one, the newest of each entry; with the oldest among them, none that forget."""
    table = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
    return table.take(pa.array(newest(table, oldest=oldest)))


def newest(rows: pa.Table, *, oldest: bool) -> Positions:
    """Which rows still count where later ones of the same entry win; of the value of a row nothing need be known.

    A row that clears its key stays in front of what came after it, unless there is nothing older to clear.
    """
    names = _names(rows.schema)
    keys = rows.select(names).append_column("__row", pa.array(np.arange(rows.num_rows)))
    last = keys.group_by(names, use_threads=False).aggregate([("__row", "max")])["__row_max"].to_numpy()
    keep = np.sort(last)
    if "sub" in names:
        keep = keep[_not_cleared(keys, keep, [n for n in names if n != "sub"])]
    return keep[np.asarray(rows["live"])[keep]] if oldest else keep


def _names(schema: pa.Schema) -> list[str]:
    """The columns that say which entry a row is of."""
    return key_names(schema) + (["sub"] if "sub" in schema.names else [])


def _not_cleared(table: pa.Table, keep: Positions, keys: list[str]) -> npt.NDArray[np.bool_]:
    cleared = np.flatnonzero(np.asarray(table["sub"].is_null()))
    if not len(cleared):
        return np.ones(len(keep), dtype=bool)
    ids = _identities(table, keys)
    latest = np.full(int(ids.max()) + 1, -1)
    latest[ids[cleared]] = cleared
    return np.asarray(keep >= latest[ids[keep]])


def _identities(table: pa.Table, keys: list[str]) -> Positions:
    """A small number for each row, equal where the keys are; null is a key like any other."""
    ids = np.zeros(table.num_rows, dtype=np.int64)
    for name in keys:
        codes = table[name].combine_chunks().dictionary_encode(null_encoding="encode")
        codes = codes.combine_chunks() if isinstance(codes, pa.ChunkedArray) else codes
        indices = codes.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        _, ids = np.unique(ids * (len(codes.dictionary) + 1) + indices, return_inverse=True)
    return ids


def merge_files(folder: Path, files: Sequence[DeltaFile], *, oldest: bool, epoch: int) -> DeltaFile:
    """Merge neighbouring deltas into one. In memory are the keys of all, and a batch of values.

    They are read twice: once to see which rows count, once to write those.
    """
    paths = [folder / f.name for f in files]
    keys: dict[str, list[pa.Table]] = {}
    schemas: dict[str, dict[pa.Schema, None]] = {}
    for path, file in zip(paths, files, strict=True):
        deltas.check(path, file)
        for name, rows in deltas.read(path):
            keys.setdefault(name, []).append(_apart(rows.select([*_names(rows.schema), "live"])))
            schemas.setdefault(name, {})[rows.schema] = None
    states = {}
    for name, parts in keys.items():
        schema = pa.unify_schemas(list(schemas[name]), promote_options="permissive")
        keep = newest(pa.concat_tables(parts, promote_options="permissive").combine_chunks(), oldest=oldest)
        states[name] = (schema, _batches(_kept(paths, name, keep, schema)))
    return deltas.write_batches(folder / f"m-{epoch}-{secrets.token_hex(6)}.delta", states)


def _apart(rows: pa.Table) -> pa.Table:
    """A copy: columns of a batch that was read are parts of it, and would hold all of it in memory."""
    return rows.take(pa.array(np.arange(rows.num_rows)))


def _kept(paths: Iterable[Path], name: str, keep: Positions, schema: pa.Schema) -> Iterator[pa.Table]:
    """The rows of one state that count, by their positions in all of its rows, as they are read."""
    none, first = schema.empty_table(), 0
    for path in paths:
        for _, rows in deltas.read(path, name):
            low, high = np.searchsorted(keep, [first, first + rows.num_rows])
            chosen = rows.take(pa.array(keep[low:high] - first))
            first += rows.num_rows
            yield pa.concat_tables([none, chosen], promote_options="permissive")


def _batches(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same rows in pieces of about `BATCH_BYTES`."""
    waiting: list[pa.Table] = []
    size = 0
    for table in tables:
        rows = max(1, table.num_rows * BATCH_BYTES // max(1, table.nbytes))
        for start in range(0, table.num_rows, rows):
            waiting.append(table.slice(start, rows))
            size += waiting[-1].nbytes
            if size >= BATCH_BYTES:
                yield pa.concat_tables(waiting)
                waiting, size = [], 0
    if waiting:
        yield pa.concat_tables(waiting)


class Merging(threading.Thread):
    """A merge of neighbouring deltas beside the epochs; its result is used from the next epoch on."""

    def __init__(self, folder: Path, files: Sequence[DeltaFile], oldest: bool, epoch: int) -> None:
        super().__init__(daemon=True, name="holdfast-merge")
        self._folder, self._files, self._oldest, self._epoch = folder, list(files), oldest, epoch
        self.result: DeltaFile | None = None

    def run(self) -> None:
        try:
            self.result = merge_files(self._folder, self._files, oldest=self._oldest, epoch=self._epoch)
        except (Damaged, OSError, pa.ArrowException):
            self.result = None  # nothing is lost: the parts stay, and the next epoch tries again

    def replaced(self, files: list[DeltaFile]) -> list[DeltaFile]:
        """The list with the merged file in place of its parts; unchanged where they are not there any more."""
        parts = [f.name for f in self._files]
        names = [f.name for f in files]
        for start in range(len(names) - len(parts) + 1):
            if names[start : start + len(parts)] == parts and self.result is not None:
                return [*files[:start], self.result, *files[start + len(parts) :]]
        return files
