"""The state of one shard in one worker: at which version it stands, and how it gets to the next.

    committed t-1 ── begin ──> standing at t-1 ── handles write ──> overlay ── seal ──> sealed t (pending)
         ^                                                                                   |
         └───────────── begin with the stamp of t: absorbed; with another: dropped ──────────┘

Memory is a cache: it is believed only if its stamp is the committed one. Otherwise the version is read
from the host's disk, and where the disk lacks it, `begin` says so and changes nothing. Both backends keep
to this file and to one test suite; they differ in what stands behind a table.
"""

from __future__ import annotations

import abc
import os
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.data import schemas
from holdfast.errors import HoldfastError, StateError
from holdfast.state.deltas import Damaged
from holdfast.state.index import KeyColumns
from holdfast.state.keygroups import key_groups
from holdfast.state.merging import Merging, pick_merge
from holdfast.state.tables import Table, TableSpec, key_columns, key_names
from holdfast.state.versions import Folder, Manifest

EMPTY = ""
"""The stamp of a version in which nothing has happened yet."""


class Place(msgspec.Struct, frozen=True):
    """Which shard this is and what it may use."""

    uid: str
    shard: int
    folder: str
    key_groups: int
    heap_limit_bytes: int = 4 << 30
    rocksdb_cache_bytes: int = 64 << 20


class Sealed(msgspec.Struct, frozen=True):
    """A version as its shard reports it: the stamp, its size, and a digest of what the epoch changed."""

    stamp: str
    digest: int
    delta_bytes: int
    size_bytes: int
    live: dict[str, int]
    files: int


class ShardState(abc.ABC):
    """The states of one shard, at one version."""

    def __init__(self, place: Place, specs: Sequence[TableSpec]) -> None:
        self.place = place
        self.specs = list(specs)
        self.group = 0
        """The key group whose records are being processed; backends that look keys up need it."""
        self.key_types: list[pa.DataType] = []
        self.tables: dict[str, Table] = {s.name: self._new_table(s) for s in specs}
        self.reloads = 0
        self._folder = Folder(Path(place.folder))
        self._at: Manifest | None = None
        self._standing = EMPTY
        self._pending: Manifest | None = None
        self._merging: Merging | None = None
        self._sealed_at_ms = 0
        self._keeping: Sequence[str] = ()

    @abc.abstractmethod
    def _new_table(self, spec: TableSpec) -> Table:
        """An empty table of this backend."""

    @abc.abstractmethod
    def _reset(self) -> None:
        """Forget everything: stand at the empty version."""

    @abc.abstractmethod
    def _load(self, manifest: Manifest) -> None:
        """Stand at a version that the disk has; raises Damaged."""

    @abc.abstractmethod
    def _absorb(self, now_ms: int) -> None:
        """Make the overlays part of what is committed."""

    @abc.abstractmethod
    def _expire(self, now_ms: int) -> None:
        """Put into the overlays that what outlived its TTL is gone."""

    @abc.abstractmethod
    def _live(self) -> dict[str, int]:
        """Entries of each state, the overlays included."""

    def prefetch(self, keys: list[Any], groups: npt.NDArray[np.uint16], table: str | None = None) -> None:
        """Have the values of these keys at hand: in one table, or in all that are keyed by them alone."""
        return

    def prefetch_columns(self, keys: KeyColumns, table: str) -> None:
        """`prefetch` of one table, for keys as columns."""
        return

    def groups(self, keys: list[Any], spec: TableSpec) -> npt.NDArray[np.uint16]:
        """The key groups of a table's keys, by the operator's own part of them."""
        if not keys:
            return np.zeros(0, np.uint16)
        if spec.extra:
            own = len(self.key_types)
            keys = [k[0] for k in keys] if own == 1 else [k[:own] for k in keys]
        return key_groups(key_columns(keys, self.key_types, self.place.uid), self.place.key_groups)

    def check_memory(self) -> None:
        """Raise before the operating system kills."""
        return

    def close(self) -> None:
        """Let go of files and memory."""
        return

    def settle(self) -> None:
        """Wait until nothing is written beside the epochs any more."""
        if self._merging is not None:
            self._merging.join()

    def begin(self, committed: str, now_ms: int, keeping: Sequence[str] = ()) -> bool:
        """Stand at the committed version and let expire what is due. False: this host lacks it.

        The files of the versions `keeping` stay, whatever is committed: they are being uploaded.
        """
        self._keeping = keeping
        if not self.stand_at(committed):
            return False
        self._harvest()
        self._expire(now_ms)
        return True

    def advance(self, now_ms: int) -> None:
        """In a replay: what was sealed last counts, for it was decided long ago; go on from it."""
        if self._pending is not None:
            self._absorb(self._sealed_at_ms)
            self._at, self._standing, self._pending = self._pending, self._pending.stamp, None
        else:
            self._drop_overlays()
        self._harvest()
        self._expire(now_ms)

    def become(self, stamp: str) -> bool:
        """At the end of a replay: be the committed version that it led to. False: it led to nothing of that kind."""
        if self._pending is not None:
            self._absorb(self._sealed_at_ms)
            self._at, self._pending = self._pending, None
        if (self._at is None) != (stamp == EMPTY):
            return False
        if self._at is not None:
            self._at = msgspec.structs.replace(self._at, stamp=stamp, epoch=epoch_of(stamp))
            self._folder.write_manifest(self._at)
            self._stands(self._at)
        return True

    def distrust(self) -> None:
        """What files here hold turned out to be damaged: from here on this host lacks every version of the shard.

        In a replay the damage may be in what was loaded for it, many epochs before the one that finds it.
        """
        self._folder.forget_all()
        self._drop_overlays()
        self._reset()
        self._standing, self._at = "?", None

    def stand_at(self, committed: str) -> bool:
        """Hold the committed version in memory. False: this host lacks it."""
        if self._folder.is_condemned():
            self._standing, self._pending = "?", None
        if committed != EMPTY and not self._folder.has(committed):
            return False  # what memory may still hold can't be built upon: the files below it are gone
        if self._pending is not None and self._pending.stamp == committed:
            self._absorb(self._sealed_at_ms)
            self._stands(self._pending)
            return True
        self._drop_overlays()
        if self._standing == committed:
            return True
        if committed == EMPTY:
            self._reset()
            self._standing, self._at = EMPTY, None
            return True
        return self._reload(committed)

    def _reload(self, committed: str) -> bool:
        manifest = self._folder.manifest(committed)
        if manifest is None:
            return False
        self._reset()
        self._standing = "?"
        self.key_types = key_types_of(manifest)
        try:
            self._load(manifest)
        except Exception as error:
            if isinstance(error, Damaged) or is_damage(error):
                return False
            raise
        self.reloads += 1
        self._stands(manifest)
        return True

    def _stands(self, manifest: Manifest) -> None:
        self._at, self._standing, self._pending = manifest, manifest.stamp, None
        own = (self._merging.result.name,) if self._merging and self._merging.result else ()
        self._folder.collect(manifest, own, self._keeping)

    def _drop_overlays(self) -> None:
        self._pending = None
        for table in self.tables.values():
            table.drop()

    def seal(self, stamp: str, epoch: int, now_ms: int, *, resumable: bool = True) -> Sealed:
        """Write what this attempt changed as the version `stamp`. The overlay stays until the decision.

        In a replay only the last version is `resumable`; those on the way to it get no manifest.
        """
        before = self._at
        files = [] if before is None else list(before.files)
        changed = {}
        for name, table in self.tables.items():
            types = [*self.key_types, *table.spec.extra]
            rows = table.to_arrow(types, now_ms, self.place.uid) if self.key_types else None
            if rows is not None:
                changed[name] = rows
        if not changed:
            return self._report(before, 0, 0)
        os.makedirs(self._folder.path, exist_ok=True)
        delta = self._folder.write_delta(f"d-{stamp}.delta", changed)
        self._sealed_at_ms = now_ms
        self._pending = Manifest(
            stamp=stamp,
            epoch=epoch,
            files=[*files, delta],
            states=[s.name for s in self.specs],
            schemas={**({} if before is None else before.schemas), **_schemas_of(changed)},
            base=None if before is None else before.base,
            base_bytes=0 if before is None else before.base_bytes,
            live=self._live(),
        )
        if resumable:
            self._folder.write_manifest(self._pending)
        return self._report(self._pending, delta.crc32, delta.size_bytes)

    def _report(self, manifest: Manifest | None, digest: int, delta_bytes: int) -> Sealed:
        if manifest is None:
            return Sealed(EMPTY, digest, delta_bytes, 0, {}, 0)
        return Sealed(
            manifest.stamp, digest, delta_bytes, manifest.size_bytes, manifest.live, len(manifest.files)
        )

    def _harvest(self) -> None:
        """Take over a merge that has finished, and start the next one that is due."""
        if self._at is None:
            return
        merging = self._merging
        if merging is not None:
            if merging.is_alive():
                return
            self._merging = None
            if merging.result is not None:
                self._at = msgspec.structs.replace(self._at, files=merging.replaced(self._at.files))
        files, whole = self._at.files, not self._at.base
        due = pick_merge(files, sum(self._at.live.values()) if whole else None)
        if due is not None:
            start, end = due
            self._merging = Merging(self._folder.path, files[start:end], start == 0 and whole, self._at.epoch)
            self._merging.start()


class DamageFound(StateError):
    """A function of the user's asked for state whose files are gone, or are not what was written."""


def is_damage(error: BaseException) -> bool:
    """Whether RocksDB found that its files are gone, or are not what it wrote. It has no types for that."""
    if isinstance(error, HoldfastError):
        return isinstance(error, DamageFound)
    text = str(error)
    return "Corruption:" in text or "IO error: No such file" in text


def is_own_damage(error: BaseException) -> bool:
    """Whether it is state that is damaged, and came to light in here: a database of the user's own may be, too."""
    frames = [f.filename for f in traceback.extract_tb(error.__traceback__) if "rocksdict" not in f.filename]
    here = os.path.dirname(os.path.abspath(__file__))
    return is_damage(error) and bool(frames) and os.path.dirname(os.path.abspath(frames[-1])) == here


def epoch_of(stamp: str) -> int:
    """The epoch that made a version, from its stamp."""
    return int(stamp.split("-", 1)[0])


def _schemas_of(changed: dict[str, pa.Table]) -> dict[str, str]:
    return {name: schemas.to_text(table.schema) for name, table in changed.items()}


def key_types_of(manifest: Manifest) -> list[pa.DataType]:
    """The types of the operator's key in a stored version, such that they hold the keys of all its states.

    A state that was written last before the key's type grew wider still says the narrow one.
    """
    found = [schemas.from_text(text) for text in manifest.schemas.values()]
    keys = [pa.schema([s.field(n) for n in key_names(s, "k")]) for s in found]
    return list(schemas.unify(keys).types) if keys else []
