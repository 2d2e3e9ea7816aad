"""Versions on the host's disk: immutable delta files, the manifest that names them, and their merging.

A shard's folder holds

    d-<epoch>-<attempt>.delta    the changes of one epoch, by one attempt
    m-<epoch>-<random>.delta     several deltas merged into one, in the background
    b-<epoch>-<random>/          a RocksDB checkpoint (backend `rocksdb` only)
    v-<epoch>-<attempt>.json     the manifest: version = base, then these deltas in this order

A manifest is written last. Nothing here is synced: a version is a cache of what plans and checkpoints
can re-create, and every file is checked against its checksum when it is read.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

from holdfast.formats import refuse_the_future
from holdfast.log.disk import ABANDONED_S
from holdfast.state.tables import key_names

FORMAT = 1
"""Of manifests, and with them of the files that they name."""
MAGIC = b"HFD1"
_ALIGN = 64
"""Arrow reads fastest, and without complaint, what starts at a multiple of this."""
FAN = 7
"""So many neighbours of one tier are merged into one."""
_TIER_BYTES = 64 << 10
"""Files below this are all of the lowest tier; each tier above holds files up to `FAN` times as large."""
MERGED_GRACE_S = 600.0
_CONDEMNED = "x-condemned"


class DeltaFile(msgspec.Struct, frozen=True):
    """A delta file as a manifest names it."""

    name: str
    size_bytes: int
    crc32: int
    rows: int

    @property
    def tier(self) -> int:
        """How large it is, on a scale in which a tier is `FAN` times the one below."""
        tier, size = 0, self.size_bytes
        while size >= _TIER_BYTES:
            tier, size = tier + 1, size // FAN
        return tier


class Manifest(msgspec.Struct, frozen=True):
    """What a version consists of. `live` counts the entries of each state."""

    stamp: str
    epoch: int
    files: list[DeltaFile]
    states: list[str]
    """The names of the states, in the order of their numbers."""
    schemas: dict[str, str]
    """The schema of each state's rows, for those that have had any."""
    base: str | None = None
    base_bytes: int = 0
    live: dict[str, int] = {}
    format: int = FORMAT

    def names(self) -> set[str]:
        """The files and folders in a shard's folder that this version needs."""
        return {f.name for f in self.files} | {f"v-{self.stamp}.json", self.base or ""}

    @property
    def size_bytes(self) -> int:
        return self.base_bytes + self.delta_bytes

    @property
    def delta_bytes(self) -> int:
        return sum(f.size_bytes for f in self.files)


class Damaged(Exception):
    """A file of a version is missing or is not what its manifest says."""


def delta_bytes(tables: dict[str, pa.Table]) -> bytes:
    """Tables as the bytes of a delta file: Arrow streams, then an index, its length and its checksum."""
    parts, index, at = [MAGIC.ljust(_ALIGN, b"\0")], [], _ALIGN
    for name, table in tables.items():
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table.combine_chunks())
        part = sink.getvalue()
        padding = -part.size % _ALIGN
        parts += [part, b"\0" * padding]
        index.append((name, at, part.size))
        at += part.size + padding
    footer = msgspec.msgpack.encode(index)
    parts += [footer, len(footer).to_bytes(4, "little")]
    return b"".join(parts)


def read_delta(data: pa.Buffer | bytes) -> dict[str, pa.Table]:
    """The tables of a delta file."""
    view = memoryview(data)
    length = int.from_bytes(view[-4:], "little")
    index = msgspec.msgpack.decode(view[-4 - length : -4], type=list[tuple[str, int, int]])
    buffer = pa.py_buffer(data)
    return {name: pa.ipc.open_stream(buffer.slice(at, size)).read_all() for name, at, size in index}


class Folder:
    """One shard's folder on this host."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write_delta(self, name: str, tables: dict[str, pa.Table]) -> DeltaFile:
        """Write a delta under a name that is ours alone."""
        data = delta_bytes(tables)
        with open(self.path / name, "wb") as file:
            file.write(data)
        rows = sum(t.num_rows for t in tables.values())
        return DeltaFile(name, len(data), zlib.crc32(data), rows)

    def read(self, file: DeltaFile) -> dict[str, pa.Table]:
        """A delta's tables, checked against size and checksum."""
        try:
            data = (self.path / file.name).read_bytes()
        except FileNotFoundError:
            raise Damaged(f"{file.name} is missing") from None
        if len(data) != file.size_bytes or zlib.crc32(data) != file.crc32:
            raise Damaged(f"{file.name} is not what was written")
        return read_delta(data)

    def write_manifest(self, manifest: Manifest) -> None:
        """Write the manifest of a version: from here on it exists."""
        temporary = self.path / f".v-{manifest.stamp}.{secrets.token_hex(4)}"
        temporary.write_bytes(msgspec.json.encode(manifest))
        os.replace(temporary, self.path / f"v-{manifest.stamp}.json")

    def has(self, stamp: str) -> bool:
        """Whether this host has a version."""
        return (self.path / f"v-{stamp}.json").exists()

    def manifest(self, stamp: str) -> Manifest | None:
        """The manifest of a version; None where this host has none. Raises for one of the future."""
        path = self.path / f"v-{stamp}.json"
        try:
            data = path.read_bytes()
            refuse_the_future(data, FORMAT, f"The manifest {path}")
            return msgspec.json.decode(data, type=Manifest)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def condemn(self) -> None:
        """Say that files here turned out to be missing or damaged; the shard sees it before its next epoch."""
        (self.path / _CONDEMNED).touch()

    def is_condemned(self) -> bool:
        """Whether that was said. If so, no version here exists any more."""
        if not (self.path / _CONDEMNED).exists():
            return False
        self.forget_all()
        (self.path / _CONDEMNED).unlink(missing_ok=True)
        return True

    def forget_all(self) -> None:
        """Let no version here exist any more: they share files, and some of those are damaged."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.path):
                if name.startswith("v-"):
                    (self.path / name).unlink(missing_ok=True)

    def forget(self, stamp: str) -> None:
        """Let a version that turned out to be damaged not exist any more."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / f"v-{stamp}.json").unlink()

    def collect(self, committed: Manifest, own: Iterable[str] = (), keeping: Iterable[str] = ()) -> None:
        """Delete what no version from the committed one on can need, nor those that are being uploaded.

        Only what belongs to earlier epochs goes, or to losers of the committed one: an attempt of a later
        epoch may be writing here right now. Merged files of unknown origin get a grace.
        """
        keep = set(own)
        for manifest in (committed, *map(self.manifest, keeping)):
            if manifest is not None:
                keep |= manifest.names()
        now = time.time()
        for name in os.listdir(self.path):
            if name.startswith("."):
                _sweep(self.path / name, now)
                continue
            epoch = _epoch_of(name)
            if name in keep or epoch is None or epoch > committed.epoch:
                continue
            with contextlib.suppress(OSError):
                if name[0] in "mb" and now - os.stat(self.path / name).st_mtime < MERGED_GRACE_S:
                    continue
                _remove(self.path / name)


def _epoch_of(name: str) -> int | None:
    if name[:2] not in ("d-", "m-", "b-", "v-"):
        return None
    digits = name[2:].split("-", 1)[0]
    return int(digits) if digits.isdigit() else None


def _sweep(path: Path, now: float) -> None:
    """Remove what somebody began to write, or to fetch, and was killed over long ago."""
    with contextlib.suppress(OSError):
        if now - os.stat(path).st_mtime > ABANDONED_S:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()


def pick_merge(files: Sequence[DeltaFile]) -> tuple[int, int] | None:
    """Which neighbours to merge next, as a slice, or None: the newest `FAN` of one tier. Pure.

    A file counts as of the largest tier among itself and all newer ones: what stands before a large file
    can be merged with it at no more than its cost. So a row is rewritten a few times a tier and not with
    each merge, and a version has fewer than `FAN` files a tier.

    >>> files = [DeltaFile(str(i), 1, 0, 1) for i in range(FAN + 1)]
    >>> pick_merge(files) == (1, FAN + 1), pick_merge(files[: FAN - 1])
    (True, None)
    >>> pick_merge([DeltaFile("large", 1 << 30, 0, 1), *files[: FAN - 1]])
    """
    end, tier = len(files), 0
    start = end
    while start > 0:
        tier = max(tier, files[start - 1].tier)
        start -= 1
        if end - start >= FAN:
            return start, end
        if start > 0 and files[start - 1].tier > tier:
            end = start
    return None


def merge_tables(tables: Sequence[pa.Table], *, oldest: bool) -> pa.Table:
    """Rows of several deltas as one, the newest of each entry; with the oldest among them, none that forget.

    A row that clears its key stays in front of what came after it, unless there is nothing older to clear.
    """
    table = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
    keys = key_names(table.schema) + (["sub"] if "sub" in table.schema.names else [])
    position = np.arange(table.num_rows)
    table = table.append_column("__row", pa.array(position))
    last = table.group_by(keys, use_threads=False).aggregate([("__row", "max")])["__row_max"].to_numpy()
    keep = np.sort(last)
    if "sub" in keys:
        keep = keep[_not_cleared(table, keep, [k for k in keys if k != "sub"])]
    result = table.drop_columns(["__row"]).take(pa.array(keep))
    return result.filter(result["live"]) if oldest else result


def _not_cleared(table: pa.Table, keep: np.ndarray, keys: list[str]) -> np.ndarray:
    cleared = np.flatnonzero(np.asarray(table["sub"].is_null()))
    if not len(cleared):
        return np.ones(len(keep), dtype=bool)
    ids = _identities(table, keys)
    newest = np.full(int(ids.max()) + 1, -1)
    newest[ids[cleared]] = cleared
    return np.asarray(keep >= newest[ids[keep]])


def _identities(table: pa.Table, keys: list[str]) -> np.ndarray:
    """A small number for each row, equal where the keys are; null is a key like any other."""
    ids = np.zeros(table.num_rows, dtype=np.int64)
    for name in keys:
        codes = table[name].combine_chunks().dictionary_encode(null_encoding="encode")
        codes = codes.combine_chunks() if isinstance(codes, pa.ChunkedArray) else codes
        indices = codes.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        _, ids = np.unique(ids * (len(codes.dictionary) + 1) + indices, return_inverse=True)
    return ids


def merge_files(folder: Folder, files: Sequence[DeltaFile], *, oldest: bool, epoch: int) -> DeltaFile:
    """Merge neighbouring deltas into one."""
    parts: dict[str, list[pa.Table]] = {}
    for file in files:
        for name, table in folder.read(file).items():
            parts.setdefault(name, []).append(table)
    merged = {name: merge_tables(tables, oldest=oldest) for name, tables in parts.items()}
    name = f"m-{epoch}-{secrets.token_hex(6)}.delta"
    return folder.write_delta(name, merged)
