"""Who lives in a directory now: a lock that the kernel frees when its holder dies, however it dies.

Each generation holds a lock file of its own. Whoever wants to start looks at the newest one: held, the
pipeline is in use. Taking over does not need the other's lock: a newer generation fences it off in the log.
Where the directory is on a disk that several hosts share, locks reach as far as that file system carries them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from holdfast.errors import InUseError
from holdfast.log.journal import Journal
from holdfast.log.records import Generation


class Tenancy:
    """One driver's hold on a directory."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / "locks"
        self._handle: int | None = None

    def check(self, journal: Journal, take_over: bool) -> None:
        """Raise if another driver lives here, unless it is to be replaced."""
        newest = journal.newest_generation()
        if newest and not take_over and self._is_held(newest):
            raise _in_use(journal.read_generation(newest))

    def hold(self, journal: Journal, take_over: bool) -> None:
        """Hold the lock of the generation that we are about to become."""
        self.check(journal, take_over)
        os.makedirs(self._folder, exist_ok=True)
        number = journal.newest_generation() + 1
        handle = os.open(self._path(number), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise InUseError(
                "Another driver is starting here at this very moment.",
                remedy="Look at it with `holdfast status`, or start again in a moment.",
            ) from None
        self._handle = handle
        self._sweep(number)

    def release(self) -> None:
        """Let go; the kernel does it for those who don't come to this."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _is_held(self, number: int) -> bool:
        try:
            handle = os.open(self._path(number), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:012d}.lock"

    def _sweep(self, number: int) -> None:
        for name in os.listdir(self._folder):
            if name < f"{number - 1:012d}":
                with contextlib.suppress(OSError):
                    os.unlink(self._folder / name)


def _in_use(other: Generation | None) -> InUseError:
    who = "another driver"
    if other is not None:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(other.started_ms / 1000))
        who = f"process {other.pid} on {other.host}, generation {other.number}, since {since}"
    return InUseError(
        f"This pipeline is run already: by {who}.",
        remedy="Stop that one with `holdfast stop`, or take the pipeline from it with --take-over.",
    )
