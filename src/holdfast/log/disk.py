"""What it takes for files and their names to outlast a power failure on a local disk.

A file's bytes, the name that leads to it, and each folder on the way are synced separately; whoever leaves one
out loses all behind it. The log, the folder sinks and the checkpoints' storage all come here for that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import MutableSet

ABANDONED_S = 6 * 3600.0
"""A file under a temporary name that nobody has written to for so long was begun by somebody who was killed."""


def write_durably(path: str, data: bytes | memoryview) -> None:
    """Write a file and wait until its bytes are on disk: a commit record may name it next."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: str) -> None:
    """Wait until a folder's names are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_above(path: str) -> None:
    """Wait until the way to a folder is on disk: its name in the folder above, that one's, up to the mount.

    All of the way, not only what this process made: another may have made it and not come to its sync.
    """
    path = os.path.realpath(path)
    while not os.path.ismount(path):
        path = os.path.dirname(path)
        with contextlib.suppress(PermissionError):  # a folder we can't open is none that we put a name into
            sync_folder(path)


def make_folder(path: str, known: MutableSet[str]) -> None:
    """Make a folder, and those above it, and wait until the way to it is on disk.

    Args:
        path: the folder.
        known: those the caller has been here for already, which cost nothing as long as they stand.
    """
    if path in known and os.path.isdir(path):
        return
    os.makedirs(path, exist_ok=True)
    sync_above(path)
    known.add(path)
