"""A disk that loses, at a power failure, all that was not synced: a double for tests of durability.

It watches `os.fsync`, `os.fdatasync` and `os.sync` in this process and keeps what a disk must keep: of a synced
file its bytes, of a synced folder its names and what each led to. `power_failure()` turns the tree into that, and
nothing more. Real disks often keep more; none may keep less.

What other processes sync, and libraries below Python, it does not see. Linux only: it looks through /proc/self/fd.
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from unittest import mock

_DELETED = " (deleted)"


class _Entry(NamedTuple):
    """What a name leads to: a file or folder by its inode, or a symbolic link by its target."""

    kind: int
    inode: int
    target: str = ""


class ForgetfulDisk:
    """Everything below `root` for as long as the context lasts; what is there at its start counts as synced.

    A folder that its parent was never synced with vanishes, and all in it; one that was itself never synced
    is empty; a file that was never synced, under a name that was, has no bytes.
    """

    def __init__(self, root: Path) -> None:
        self._root = os.path.realpath(root)
        self._files: dict[int, bytes] = {}
        self._folders: dict[int, dict[str, _Entry]] = {}
        self._held: dict[int, int] = {}
        self._lock = threading.RLock()
        self._patches: list[Any] = [
            mock.patch.object(os, "fsync", self._fsync),
            mock.patch.object(os, "fdatasync", self._fsync),
            mock.patch.object(os, "sync", self._sync_all),
        ]

    def __enter__(self) -> ForgetfulDisk:
        self._sync_all()
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for patch in self._patches:
            patch.stop()
        self._forget_all()

    def power_failure(self) -> None:
        """Make the tree what was durable. The disk goes on, with that as its start."""
        with self._lock:
            entries = self._folders[os.stat(self._root).st_ino]
            with os.scandir(self._root) as found:
                for entry in list(found):
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path)
                    else:
                        os.unlink(entry.path)
            self._restore(self._root, entries, {})
            self._forget_all()
            self._sync_all()

    def _restore(self, folder: str, entries: dict[str, _Entry], made: dict[int, str]) -> None:
        """Write a folder's durable entries; `made` has the files written so far, so that links stay links."""
        for name, entry in sorted(entries.items()):
            path = os.path.join(folder, name)
            if stat.S_ISLNK(entry.kind):
                os.symlink(entry.target, path)
            elif stat.S_ISDIR(entry.kind):
                os.mkdir(path)
                self._restore(path, self._folders.get(entry.inode, {}), made)
            elif entry.inode in made:
                os.link(made[entry.inode], path)
            else:
                Path(path).write_bytes(self._files.get(entry.inode, b""))
                made[entry.inode] = path

    def _fsync(self, file: int) -> None:
        number = file if isinstance(file, int) else file.fileno()
        kind = os.fstat(number).st_mode
        path = os.readlink(f"/proc/self/fd/{number}").removesuffix(_DELETED)
        if path != self._root and not path.startswith(self._root + os.sep):
            return
        with self._lock:
            if stat.S_ISDIR(kind):
                self._keep_folder(f"/proc/self/fd/{number}")
            elif stat.S_ISREG(kind):
                self._keep_file(f"/proc/self/fd/{number}")

    def _sync_all(self) -> None:
        with self._lock:
            for folder, _, names in os.walk(self._root):
                self._keep_folder(folder)
                for name in names:
                    path = os.path.join(folder, name)
                    if stat.S_ISREG(os.lstat(path).st_mode):
                        self._keep_file(path)

    def _keep_file(self, path: str) -> None:
        self._hold(path)
        self._files[os.stat(path).st_ino] = Path(path).read_bytes()

    def _keep_folder(self, path: str) -> None:
        self._hold(path)
        entries = {}
        with os.scandir(path) as found:
            for entry in found:
                facts = entry.stat(follow_symlinks=False)
                target = os.readlink(entry.path) if stat.S_ISLNK(facts.st_mode) else ""
                if stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode):
                    self._hold(entry.path)
                entries[entry.name] = _Entry(facts.st_mode, facts.st_ino, target)
        self._folders[os.stat(path).st_ino] = entries

    def _hold(self, path: str) -> None:
        """Keep an inode open: its number must not go to another file while we know it by that number."""
        inode = os.stat(path).st_ino
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_RDONLY)

    def _forget_all(self) -> None:
        for handle in self._held.values():
            os.close(handle)
        self._files, self._folders, self._held = {}, {}, {}
