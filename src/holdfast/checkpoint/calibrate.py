"""How fast a store gives back what it was given: a few files of a checkpoint, read as a recovery would."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import msgspec

from holdfast.checkpoint.metadata import Checkpoint, StoredFile
from holdfast.checkpoint.storage import Storage

MOST_BYTES = 16 << 20
MOST_FILES = 8


class Reading(msgspec.Struct, frozen=True):
    """What was read, and how long that took."""

    bytes: int
    files: int
    seconds: float


def chosen(
    files: list[StoredFile], most_bytes: int = MOST_BYTES, most_files: int = MOST_FILES
) -> list[StoredFile]:
    """The largest files that are not too large together: they tell most. One is always taken. Pure."""
    found: list[StoredFile] = []
    for file in sorted(files, key=lambda f: -f.size_bytes):
        if len(found) < most_files and sum(f.size_bytes for f in found) + file.size_bytes <= most_bytes:
            found.append(file)
    return found or sorted(files, key=lambda f: f.size_bytes)[:1]


def calibrate(storage: Storage, checkpoint: Checkpoint) -> Reading | None:
    """Read a part of a checkpoint, and drop it; None if it has no files. Raises what the store raises."""
    files = chosen(checkpoint.files)
    if not files:
        return None
    with tempfile.TemporaryDirectory(prefix="holdfast-read-") as folder:
        started = time.perf_counter()
        size = sum(storage.get_file(f.key, Path(folder) / f"{n}")[0] for n, f in enumerate(files))
        return Reading(size, len(files), time.perf_counter() - started)
