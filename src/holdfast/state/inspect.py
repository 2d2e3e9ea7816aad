"""Stored state as tables, read from a directory without running the pipeline or anybody's code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from holdfast.errors import StateLostError
from holdfast.log.records import Commit
from holdfast.state.deltas import Damaged
from holdfast.state.merging import merge_tables
from holdfast.state.versions import Folder

_HIDDEN = ("live", "at")


def read_state(root: Path, home: str, commit: Commit, uid: str) -> dict[str, pa.Table]:
    """Every state of an operator as a table: key, [sub], value; in the order of shards, then of keys' first writing."""
    found: dict[str, list[pa.Table]] = {}
    for shard, committed in enumerate(commit.shards.get(uid, [])):
        if not committed.sealed.stamp:
            continue
        folder = Folder(root / home / uid / f"{shard:05d}")
        for state, table in shard_tables(folder, committed.sealed.stamp, uid, shard):
            found.setdefault(state, []).append(table)
    return {s: pa.concat_tables(t, promote_options="permissive") for s, t in found.items()}


def shard_tables(folder: Folder, stamp: str, uid: str, shard: int) -> Iterator[tuple[str, pa.Table]]:
    """The states of one shard at one version."""
    manifest = folder.manifest(stamp)
    if manifest is None:
        raise StateLostError(
            f"Version {stamp} of shard {shard} is not in {folder.path}.",
            uid=uid,
            remedy="Run the command on the host that keeps this shard, or give its --state-root.",
        )
    parts: dict[str, list[pa.Table]] = {}
    if manifest.base:
        from holdfast.state.rocksdb import read_base

        for state, table in read_base(folder.path / manifest.base, manifest).items():
            parts[state] = [table]
    try:
        for file in manifest.files:
            for state, table in folder.rows(file):
                parts.setdefault(state, []).append(table)
    except Damaged as error:
        raise StateLostError(f"Shard {shard} can't be read: {error}.", uid=uid) from None
    for state, tables in parts.items():
        merged = merge_tables(tables, oldest=True)
        keep = [n for n in merged.schema.names if n not in _HIDDEN]
        yield state, merged.select(keep)
