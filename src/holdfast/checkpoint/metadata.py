"""The metadata record of a checkpoint: everything that is needed to go on from it, and no secret.

The record is created put-if-absent in the pipeline's log, under the next number. It counts from then on;
before, the files in the store are nobody's. Each record carries its own checksum: a damaged one is told
from one that never was.
"""

from __future__ import annotations

import zlib
from typing import Any

import msgspec

from holdfast.formats import Told, check_format, refuse_the_future
from holdfast.state.versions import FORMAT as MANIFEST_FORMAT
from holdfast.state.versions import Manifest

FORMAT = 1


class StoredFile(msgspec.Struct, frozen=True):
    """A file of a version: its name in the shard's folder, and where the store has it."""

    name: str
    key: str
    size_bytes: int
    crc32: int
    seen: str = ""
    """What the host knew the file by (inode and time), so that an unchanged one need not be read again."""


class StoredVersion(msgspec.Struct, frozen=True):
    """A shard's version in the store."""

    manifest: Manifest
    files: list[StoredFile]
    host: str = ""

    @property
    def stamp(self) -> str:
        return self.manifest.stamp

    @property
    def size_bytes(self) -> int:
        return sum(f.size_bytes for f in self.files)


class Checkpoint(msgspec.Struct, frozen=True):
    """A completed checkpoint: version t of every shard, and where everything else stood after epoch t."""

    number: int
    epoch: int
    generation: int
    pipeline: str
    fingerprint: str
    """Of the pipeline's code, so that a change since then can be told."""
    trigger: str
    started_ms: int
    completed_ms: int
    key_groups: int
    parallelism: int
    backend: str
    operators: dict[str, dict[str, Any]]
    positions: dict[str, Any]
    now_ms: int
    watermarks: dict[str, dict[str, int]]
    """Of each split, by uid of the `event_time` operator, in microseconds since 1970."""
    schemas: dict[str, str]
    shards: dict[str, list[StoredVersion | None]]
    """By uid of the keyed stage; None for a shard in which nothing has happened yet."""
    storage: str = ""
    new_bytes: int = 0
    """What was uploaded for it; the rest the store had already."""
    format: int = FORMAT

    @property
    def size_bytes(self) -> int:
        return sum(v.size_bytes for versions in self.shards.values() for v in versions if v is not None)

    @property
    def files(self) -> list[StoredFile]:
        return [f for versions in self.shards.values() for v in versions if v is not None for f in v.files]

    def version(self, uid: str, shard: int) -> StoredVersion | None:
        """A shard's version; None where it has none yet."""
        versions = self.shards.get(uid, [])
        return versions[shard] if shard < len(versions) else None

    def stamp(self, uid: str, shard: int) -> str:
        """The stamp of a shard's version; empty where nothing has happened yet."""
        found = self.version(uid, shard)
        return "" if found is None else found.stamp


class DamagedRecord(Exception):
    """A metadata record that is not what was written."""


class _Envelope(msgspec.Struct):
    crc32: int
    checkpoint: msgspec.Raw


class _ToldVersion(msgspec.Struct):
    manifest: Told


class _ToldShards(msgspec.Struct):
    """The formats of the manifests in a metadata record whose own format is known."""

    shards: dict[str, list[_ToldVersion | None]] = {}


_VOID = b"null"


def pack(checkpoint: Checkpoint | None) -> bytes:
    """A record's bytes; None makes one that only takes its number away from drivers of the past."""
    body = _VOID if checkpoint is None else msgspec.json.encode(checkpoint)
    return msgspec.json.encode(_Envelope(zlib.crc32(body), msgspec.Raw(body)))


def unpack(data: bytes, name: str = "A checkpoint") -> Checkpoint | None:
    """The checkpoint in a record; None where its number was only taken. Raises for damage and for the future."""
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
    except msgspec.DecodeError as error:
        raise DamagedRecord(f"its metadata can't be read ({error})") from None
    body = bytes(envelope.checkpoint)
    if zlib.crc32(body) != envelope.crc32:
        raise DamagedRecord("its metadata does not match its checksum")
    if body == _VOID:
        return None
    refuse_the_future(body, FORMAT, name)
    for uid, versions in msgspec.json.decode(body, type=_ToldShards).shards.items():
        for version in filter(None, versions):
            check_format(version.manifest.format, MANIFEST_FORMAT, f"The state of {uid!r} in {name}")
    return msgspec.json.decode(body, type=Checkpoint)
