"""Versions on the host's disk: immutable files, and the manifest that names them.

A shard's folder holds

    d-<epoch>-<attempt>.delta    the changes of one epoch, by one attempt
    m-<epoch>-<random>.delta     several deltas merged into one, in the background (`merging`)
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
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pyarrow as pa

from holdfast.formats import refuse_the_future
from holdfast.log.disk import ABANDONED_S
from holdfast.state import deltas
from holdfast.state.deltas import DeltaFile

FORMAT = 1
"""Of manifests, and with them of the files that they name."""
MERGED_GRACE_S = 600.0
_CONDEMNED = "x-condemned"


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


class Folder:
    """One shard's folder on this host."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._named: dict[str, set[str]] = {}
        """What the manifests of each version have named, since files were last deleted here. They have an owner."""

    def write_delta(self, name: str, tables: dict[str, pa.Table]) -> DeltaFile:
        """Write a delta under a name that is ours alone."""
        return deltas.write(self.path / name, tables)

    def rows(self, file: DeltaFile) -> Iterator[tuple[str, pa.Table]]:
        """A delta's rows with the names of their states, batch by batch. Checked before the first is given."""
        deltas.check(self.path / file.name, file)
        yield from deltas.read(self.path / file.name)

    def write_manifest(self, manifest: Manifest) -> None:
        """Write the manifest of a version: from here on it exists."""
        temporary = self.path / f".v-{manifest.stamp}.{secrets.token_hex(4)}"
        temporary.write_bytes(msgspec.json.encode(manifest))
        os.replace(temporary, self.path / f"v-{manifest.stamp}.json")
        self._note(manifest)

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
        epoch may be writing here right now. Merged files and bases that no manifest seen here has named get a
        grace: somebody may have made them a moment ago. Those that one has named, and that are replaced, go at
        once; a state that is filled fast replaces several times its size in minutes.
        """
        self._note(committed)
        keep = {*own, *committed.names()}
        for stamp in keeping:
            # Its manifest may name other files by now; whoever uploads it may have read the one before.
            manifest = self.manifest(stamp)
            keep |= self._named.get(stamp, set()) | (set() if manifest is None else manifest.names())
        known = set[str]().union(*self._named.values())
        self._named = {s: n for s, n in self._named.items() if s == committed.stamp or s in keeping}
        now = time.time()
        for name in os.listdir(self.path):
            if name.startswith("."):
                _sweep(self.path / name, now)
                continue
            epoch = _epoch_of(name)
            if name in keep or epoch is None or epoch > committed.epoch:
                continue
            with contextlib.suppress(OSError):
                if (
                    name[0] in "mb"
                    and name not in known
                    and not _older(self.path / name, now, MERGED_GRACE_S)
                ):
                    continue
                _remove(self.path / name)

    def _note(self, manifest: Manifest) -> None:
        self._named[manifest.stamp] = self._named.get(manifest.stamp, set()) | manifest.names()


def _epoch_of(name: str) -> int | None:
    if name[:2] not in ("d-", "m-", "b-", "v-"):
        return None
    digits = name[2:].split("-", 1)[0]
    return int(digits) if digits.isdigit() else None


def _sweep(path: Path, now: float) -> None:
    """Remove what somebody began to write, or to fetch, and was killed over long ago."""
    with contextlib.suppress(OSError):
        if _older(path, now, ABANDONED_S):
            _remove(path)


def _older(path: Path, now: float, age_s: float) -> bool:
    return now - os.stat(path).st_mtime > age_s


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()
