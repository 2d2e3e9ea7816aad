"""What a shard does to get a version back: find it on the host's disk, or fetch it from a checkpoint's store.

Runs where the shard runs, in its own worker, so that what was loaded is in memory for the next epoch.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec

from holdfast.checkpoint.metadata import StoredFile, StoredVersion
from holdfast.checkpoint.storage import Missing, Storage, open_storage
from holdfast.engine.keyed import stored_schema
from holdfast.engine.program import Program, read_schemas
from holdfast.engine.tasks import Shards, Where, facts_of, state_root
from holdfast.state.deltas import Damaged, checksum
from holdfast.state.shard import is_damage
from holdfast.state.versions import Folder


class Prepare(msgspec.Struct, frozen=True):
    """What a shard is asked: to stand at a version, fetching it where it is `stored` and the disk lacks it."""

    uid: str
    shard: int
    stamp: str
    schemas: dict[str, str]
    stored: StoredVersion | None = None
    scratch: bool = False
    drop: bool = False
    """Forget a scratch copy instead."""


class Prepared(msgspec.Struct, frozen=True):
    """What a shard answers."""

    uid: str
    shard: int
    host: str = ""
    lacking: bool = False
    fetched_bytes: int = 0
    took_ms: float = 0.0
    damaged: str = ""
    """What is wrong with the checkpoint that it was told to fetch from."""
    error: dict[str, Any] | None = None


def prepare(program: Program, asked: Prepare, where: Where, shards: Shards) -> Prepared:
    """Stand at a version, or say why not."""
    started = time.perf_counter()
    fetched = 0
    root = state_root(program, where, asked.scratch)
    folder = Folder(Path(root) / asked.uid / f"{asked.shard:05d}")
    answer = Prepared(asked.uid, asked.shard, where.host)
    try:
        if asked.drop:
            shards.drop(root, asked.uid, asked.shard)
            shutil.rmtree(folder.path, ignore_errors=True)
            return answer
        stands = _stands(program, asked, shards, root)
        if not stands and asked.stored is not None:
            folder.forget(asked.stamp)  # it is there, and can't be read
            fetched = fetch(open_storage(program.checkpoint_url, program.storage), asked.stored, folder)
            stands = _stands(program, asked, shards, root)
        answer = msgspec.structs.replace(answer, lacking=not stands)
    except (Damaged, Missing) as error:
        answer = msgspec.structs.replace(answer, lacking=True, damaged=str(error))
    except Exception as error:
        answer = msgspec.structs.replace(answer, lacking=True, error=facts_of(error, asked.uid))
    took_ms = (time.perf_counter() - started) * 1e3
    return msgspec.structs.replace(answer, fetched_bytes=fetched, took_ms=took_ms)


def _stands(program: Program, asked: Prepare, shards: Shards, root: str) -> bool:
    node = program.stages.graph.by_uid(asked.uid)
    operator = shards.operator(program, node)
    schema = stored_schema(node, read_schemas(asked.schemas), len(node.inputs))
    state = shards.state(program, asked.uid, asked.shard, operator, schema, root)
    if state is None:
        return not asked.stamp
    try:
        return state.stand_at(asked.stamp)
    except Exception as error:
        if not is_damage(error):
            raise
        state.distrust()
        return False


def fetch(storage: Storage, stored: StoredVersion, folder: Folder) -> int:
    """Bring a version's files into a shard's folder, checked, and its manifest last: how many bytes came."""
    os.makedirs(folder.path, exist_ok=True)
    fetched = 0
    base = stored.manifest.base
    under = folder.path / f".fetch-{secrets.token_hex(6)}"
    try:
        if base and not _is_whole(folder.path / base, stored):
            os.makedirs(under)
            for file in stored.files:
                if file.name.startswith(f"{base}/"):
                    fetched += _fetch(storage, file, under / file.name.partition("/")[2])
            shutil.rmtree(folder.path / base, ignore_errors=True)
            os.replace(under, folder.path / base)
        for file in stored.files:
            if "/" not in file.name and not _is_here(folder.path / file.name, file):
                part = folder.path / f".{file.name}.{secrets.token_hex(4)}"
                try:
                    fetched += _fetch(storage, file, part)
                    os.replace(part, folder.path / file.name)
                finally:
                    part.unlink(missing_ok=True)
    finally:
        shutil.rmtree(under, ignore_errors=True)
    folder.write_manifest(stored.manifest)
    return fetched


def _fetch(storage: Storage, file: StoredFile, path: Path) -> int:
    size, crc = storage.get_file(file.key, path)
    if (size, crc) != (file.size_bytes, file.crc32):
        raise Damaged(f"{file.key} is not what was uploaded: {size} bytes, {file.size_bytes} were written")
    return size


def _is_here(path: Path, file: StoredFile) -> bool:
    with contextlib.suppress(OSError):
        return path.stat().st_size == file.size_bytes and checksum(path)[1] == file.crc32
    return False


def _is_whole(base: Path, stored: StoredVersion) -> bool:
    files = [f for f in stored.files if f.name.startswith(f"{stored.manifest.base}/")]
    return all(_is_here(base / f.name.partition("/")[2], f) for f in files)
