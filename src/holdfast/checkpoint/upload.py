"""What an upload does on the host that has a version: copies what the store lacks, and lists the rest.

Runs in a worker of its own beside the shards (`Uploads` keeps it going on a thread there), and in this
process for the in-process runner. A plain function from a request to what was stored; it decides nothing.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import msgspec

from holdfast.checkpoint.lifecycle import Reason
from holdfast.checkpoint.metadata import StoredFile, StoredVersion
from holdfast.checkpoint.storage import Storage, open_storage
from holdfast.faults.points import reach
from holdfast.state.deltas import checksum
from holdfast.state.versions import Folder, Manifest

_TRIES = 5
"""A version may be put into other files while it is read (a new base); then its manifest is read again."""


_SHORT_S = 0.05
"""An upload that is through so soon is answered for at once: to be asked again would take longer."""


class ShardUpload(msgspec.Struct, frozen=True):
    """One shard's part of a request: which version, and what the store has of it already."""

    uid: str
    shard: int
    stamp: str
    known: list[StoredFile]


class Request(msgspec.Struct, frozen=True):
    """What one host is to upload for one checkpoint."""

    folder: str
    """Of the upload: the first part of every key it makes."""
    url: str
    options: dict[str, str]
    root: str
    """The state root where a host has none of its own."""
    home: str
    """The pipeline's folder below it."""
    shards: list[ShardUpload]


class Uploaded(msgspec.Struct, frozen=True):
    """How far a host is: bytes so far, and when it has ended the versions or the reason of a failure."""

    host: str
    done: bool = False
    bytes_done: int = 0
    versions: dict[str, dict[int, StoredVersion]] = {}
    new_bytes: int = 0
    reason: str = ""
    detail: str = ""
    lost: list[tuple[str, int]] = []
    """Shards whose version this host does not have, or not whole."""


class _Lost(Exception):
    """A version's files are not on this host, or not what they were."""

    def __init__(self, reason: Reason, uid: str, shard: int, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.uid, self.shard = reason, uid, shard


class Upload:
    """One host's part of one checkpoint."""

    def __init__(self, request: Request, host: str, root: str | None) -> None:
        self._request, self._host = request, host
        self._root = Path(root or request.root) / request.home
        self._bytes = 0
        self._new = 0
        self._result: Uploaded | None = None

    def progress(self) -> Uploaded:
        """How far it is."""
        return self._result or Uploaded(self._host, bytes_done=self._bytes)

    def run(self) -> Uploaded:
        """Upload everything; what goes wrong becomes a reason."""
        try:
            storage = open_storage(self._request.url, self._request.options)
            versions: dict[str, dict[int, StoredVersion]] = {}
            for one in self._request.shards:
                versions.setdefault(one.uid, {})[one.shard] = self._shard(storage, one)
            self._result = Uploaded(self._host, True, self._bytes, versions, self._new)
        except _Lost as lost:
            self._failed(lost.reason, str(lost), [(lost.uid, lost.shard)])
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            self._failed(Reason.STORE_FULL if full else Reason.STORE, str(error))
        except Exception as error:
            self._failed(Reason.UNEXPECTED, f"{type(error).__name__}: {error}")
        assert self._result is not None
        return self._result

    def _failed(self, reason: Reason, detail: str, lost: list[tuple[str, int]] | None = None) -> None:
        self._result = Uploaded(
            self._host, True, self._bytes, reason=reason.name, detail=detail, lost=lost or []
        )

    def _shard(self, storage: Storage, one: ShardUpload) -> StoredVersion:
        folder = Folder(self._root / one.uid / f"{one.shard:05d}")
        reach("upload.shard", task=f"{one.uid}-{one.shard}")
        missing = ""
        for _ in range(_TRIES):
            manifest = folder.manifest(one.stamp)
            if manifest is None:
                raise _Lost(
                    Reason.MISSING, one.uid, one.shard, f"{one.uid}, shard {one.shard}: version {one.stamp}"
                )
            try:
                return StoredVersion(manifest, list(self._files(storage, one, folder, manifest)), self._host)
            except FileNotFoundError as error:
                missing = str(error)
        folder.condemn()
        raise _Lost(Reason.MISSING, one.uid, one.shard, missing)

    def _files(
        self, storage: Storage, one: ShardUpload, folder: Folder, manifest: Manifest
    ) -> list[StoredFile]:
        known = {f.name: f for f in one.known}
        by_content = {(_leaf(f.name), f.size_bytes, f.crc32): f for f in one.known}
        files = []
        for delta in manifest.files:
            found = known.get(delta.name)
            if found is None or (found.size_bytes, found.crc32) != (delta.size_bytes, delta.crc32):
                found = self._put(storage, one, folder, delta.name)
                if (found.size_bytes, found.crc32) != (delta.size_bytes, delta.crc32):
                    folder.condemn()
                    raise _Lost(Reason.DAMAGED, one.uid, one.shard, f"{delta.name} is not what was written")
            files.append(found)
        if manifest.base:
            seen = {f.seen: f for f in one.known if f.seen}
            for path in sorted((folder.path / manifest.base).iterdir()):
                name = f"{manifest.base}/{path.name}"
                had = known.get(name)  # bases never change
                files.append(had or self._base_file(storage, one, folder, name, seen, by_content))
        return files

    def _base_file(
        self,
        storage: Storage,
        one: ShardUpload,
        folder: Folder,
        name: str,
        seen: dict[str, StoredFile],
        by_content: dict[tuple[str, int, int], StoredFile],
    ) -> StoredFile:
        """A file of RocksDB's: hard links tell that it is one which the store has, without reading it."""
        mark = _mark(folder.path / name, self._host)
        had = seen.get(mark) if name.endswith(".sst") else None
        if had is None and name.endswith(".sst"):
            size, crc = checksum(folder.path / name)
            had = by_content.get((_leaf(name), size, crc))
        if had is not None:
            return msgspec.structs.replace(had, name=name, seen=mark)
        return msgspec.structs.replace(self._put(storage, one, folder, name), seen=mark)

    def _put(self, storage: Storage, one: ShardUpload, folder: Folder, name: str) -> StoredFile:
        key = f"{self._request.folder}/{one.uid}/{one.shard:05d}/{name}"
        reach("upload.file", task=f"{one.uid}-{one.shard}")
        size, crc = storage.put_file(key, folder.path / name)
        self._bytes += size
        self._new += size
        return StoredFile(name, key, size, crc)


def _leaf(name: str) -> str:
    return name.rsplit("/", 1)[-1]


def _mark(path: Path, host: str) -> str:
    found = os.stat(path)
    return f"{host}:{found.st_dev}:{found.st_ino}:{found.st_mtime_ns}:{found.st_size}"


class Uploads:
    """The uploads that go on in this worker while its tasks come and go: a task starts one, or asks how far it is."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, ...], Upload] = {}

    def ask(self, request: Request, host: str, root: str | None) -> Uploaded:
        """Begin an upload, or tell how far it is."""
        of = (request.url, request.home, request.folder)  # a worker may serve several pipelines in its life
        # The request for another host may come here as well, if that is lost: each is answered for itself.
        key = (*of, *(f"{one.uid}-{one.shard}" for one in request.shards))
        if key not in self._running:
            for old in [k for k in self._running if k[: len(of)] != of]:
                del self._running[old]  # it was given up by the driver
            upload = self._running[key] = Upload(request, host, root)
            os.nice(5 if os.nice(0) < 5 else 0)  # shards come first
            thread = threading.Thread(target=upload.run, daemon=True, name="holdfast-upload")
            thread.start()
            thread.join(_SHORT_S)
        return self._running[key].progress()
