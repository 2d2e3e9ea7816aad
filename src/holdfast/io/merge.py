"""Small files of a folder sink become large ones, in one step for all who look at the folder.

What to merge is a pure decision (`runs`): epochs in hundreds, then those in ten thousands, as long as the
result stays small. How: a new folder is built out of sight, with the merged files and hard links to all the
others, and then the two folders change places in one step of the file system's (`renameat2` with
RENAME_EXCHANGE on Linux, `renamex_np` on macOS). So every listing shows the old files or the new ones, and
never a row twice. Where the system has no such step, or no hard links, nothing is merged.

What no folder of plain files can give: a reader lists names first and asks for each file afterwards. One that
opens a file of the old listing after the exchange gets an error, and must list again. One that is caught
between listing and asking for sizes, some milliseconds, skips the names that are gone, in silence (pyarrow and
Spark do; DuckDB raises). A result is sure if the folder's listing is the same before and after reading.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.io.place import Part, Place, is_visible, merged_name, parse_part
from holdfast.log.disk import sync_folder

FAN = 100
TARGET_BYTES = 128 << 20
ROW_GROUP_ROWS = 131_072

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_SYSCALL = {"x86_64": 316, "aarch64": 276}
_LOG = logging.getLogger("holdfast.io.folder")
_UNSUPPORTED = (
    errno.EINVAL,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EXDEV,
    errno.EPERM,
    errno.EBUSY,
    errno.EMLINK,
)


class NotSupported(Exception):
    """This file system can't do what merging needs."""


class Run(msgspec.Struct, frozen=True):
    """Files that become one."""

    parts: list[Part]
    name: str


def runs(
    parts: Iterable[Part], before: int, suffix: str, fan: int = FAN, target_bytes: int = TARGET_BYTES
) -> list[Run]:
    """What to merge of a folder's files: neighbours within each full bucket of `fan` epochs, or of `fan` squared
    and so on, none of an epoch from `before` on, and no result larger than the target.

    >>> files = [Part(e, e, 0, f"{e}", 10) for e in range(5)]
    >>> [r.name for r in runs(files, before=5, suffix="jsonl", fan=2)]
    ['part-00000000-00000003.m000.jsonl']
    """
    parts = sorted(parts)
    names = {part.name for part in parts}
    found: list[Run] = []
    merged: set[Part] = set()
    width = fan
    while width <= before:
        width *= fan
    while width >= fan:
        groups = _neighbours(parts, merged, before, width, target_bytes)
        for group in groups:
            if len(group) > 1:
                found.append(Run(group, _free_name(group, suffix, names)))
                names.add(found[-1].name)
        merged = {part for run in found for part in run.parts}
        width //= fan
    return found


def _neighbours(
    parts: list[Part], merged: set[Part], before: int, width: int, target_bytes: int
) -> list[list[Part]]:
    """Files in groups that lie within one full bucket, with none that is merged already between, and are not too large."""
    groups: list[list[Part]] = []
    for part in parts:
        bucket = part.first // width
        if part in merged or (bucket + 1) * width > before or part.last // width != bucket:
            groups.append([])
            continue
        last = groups[-1] if groups else []
        fits = last and last[0].first // width == bucket
        if fits and sum(p.size for p in last) + part.size <= target_bytes:
            last.append(part)
        else:
            groups.append([part])
    return groups


def _free_name(group: list[Part], suffix: str, names: set[str]) -> str:
    number = 0
    while True:
        name = merged_name(group[0].first, max(p.last for p in group), number, suffix)
        if name not in names:
            return name
        number += 1


Join = Callable[[list[str], str], bool]
"""Writes the rows of several files, in order, to one; False where they don't go together."""


def merge_leaf(place: Place, leaf: str, suffix: str, before: int, fan: int, join: Join) -> int:
    """Merge the files of one folder; how many were merged away."""
    listed = _parts(leaf, suffix)
    wanted = [] if listed is None else runs(listed, before, suffix, fan)
    if not wanted:
        return 0
    built = os.path.join(place.folder("merge"), uuid.uuid4().hex)
    os.mkdir(built)
    try:
        done = [run for run in wanted if _build(leaf, built, run, join)]
        return _swap(place, leaf, built, suffix, done) if done else 0
    finally:
        shutil.rmtree(built, ignore_errors=True)


def _parts(leaf: str, suffix: str) -> list[Part] | None:
    """The data files of a folder; None where it holds what is not ours, or folders."""
    found = []
    with os.scandir(leaf) as entries:
        for entry in entries:
            part = parse_part(entry.name, suffix, entry.stat().st_size)
            if part is not None:
                found.append(part)
            elif is_visible(entry.name) or entry.is_dir():
                return None
    return found


_BUILDING = ".building"
"""Until the exchange a merged file has no suffix that a reader would take, however deep it looks."""


def _build(leaf: str, built: str, run: Run, join: Join) -> bool:
    target = os.path.join(built, run.name + _BUILDING)
    if join([os.path.join(leaf, part.name) for part in run.parts], target):
        return True
    if os.path.exists(target):
        os.unlink(target)
    return False


def _swap(place: Place, leaf: str, built: str, suffix: str, done: list[Run]) -> int:
    """Link what was not merged, and let the folders change places; nothing is published meanwhile."""
    gone = {part.name for run in done for part in run.parts}
    with place.locked("publish"):
        names = set(os.listdir(leaf))
        if not gone <= names or _parts(leaf, suffix) is None:
            return 0
        for name in sorted(names - gone):
            _link(os.path.join(leaf, name), os.path.join(built, name))
        for run in done:
            os.rename(os.path.join(built, run.name + _BUILDING), os.path.join(built, run.name))
        shutil.copymode(leaf, built)  # not its times: whoever watches them must see that names changed
        sync_folder(built)
        exchange(built, leaf)
        sync_folder(os.path.dirname(leaf))
        sync_folder(os.path.dirname(built))
        for name in set(os.listdir(built)) - names:  # came in from outside while we swapped
            _link(os.path.join(built, name), os.path.join(leaf, name))
    return len(gone)


def _link(old: str, new: str) -> None:
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            raise NotSupported(f"hard links: {error.strerror}") from None
        raise


def exchange(one: str, other: str) -> None:
    """Let two folders change places in one step, or raise NotSupported."""
    if sys.platform == "darwin":
        failed = _libc().renamex_np(os.fsencode(one), os.fsencode(other), _RENAME_EXCHANGE)
    elif hasattr(_libc(), "renameat2"):
        failed = _libc().renameat2(
            _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE
        )
    elif platform.machine() in _SYSCALL:
        number = _SYSCALL[platform.machine()]
        failed = _libc().syscall(
            number, _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE
        )
    else:
        raise NotSupported("this system can't exchange two folders")
    if failed:
        number = ctypes.get_errno()
        if number in _UNSUPPORTED:
            raise NotSupported(f"exchanging two folders: {os.strerror(number)}")
        raise OSError(number, os.strerror(number), one)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def join_bytes(files: list[str], target: str) -> bool:
    """Concatenate files, for formats of which a concatenation is a file again."""
    with open(target, "wb") as out:
        for path in files:
            with open(path, "rb") as file:
                shutil.copyfileobj(file, out, 1 << 20)
        out.flush()
        os.fsync(out.fileno())
    return True


def join_parquet(files: list[str], target: str, options: dict[str, object]) -> bool:
    """Write the rows of Parquet files to one, in row groups of a good size; False if their schemas differ."""
    schema = pq.read_schema(files[0])
    if any(not pq.read_schema(path).equals(schema) for path in files[1:]):
        _LOG.info("files of different schemas are left unmerged in %s", os.path.dirname(files[0]))
        return False
    held: list[pa.Table] = []
    rows = 0
    with pa.OSFile(target, "wb") as out, pq.ParquetWriter(out, schema, **options) as writer:
        for path in files:
            with pq.ParquetFile(path) as file:
                for group in range(file.metadata.num_row_groups):
                    held.append(file.read_row_group(group, use_threads=False))
                    rows += held[-1].num_rows
                    if rows >= ROW_GROUP_ROWS:
                        writer.write_table(pa.concat_tables(held).combine_chunks(), row_group_size=rows)
                        held, rows = [], 0
        if held:
            writer.write_table(pa.concat_tables(held).combine_chunks(), row_group_size=rows)
    sync_file(target)
    return True


def sync_file(path: str) -> None:
    """Wait until a file's bytes are on disk."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
