"""PySpark's daemon of Python workers, with an eye on those that don't die when Spark tells them to.

Spark ends a worker that has been silent for too long by SIGTERM. A worker that is frozen (stopped, or stuck in the
kernel) does not act on it, and its task would wait for ever. So once a second the daemon looks at its workers: one
that has had a SIGTERM waiting for two looks is killed. Used as `spark.python.daemon.module` in sessions that we make.

What workers need is imported here once, so that a worker that replaces another is there in milliseconds. But not
before the first one is forked: Spark starts one daemon after the other and waits for each, and a pipeline has a
daemon for every shard. So the first worker imports for itself, beside the others, and the daemon a moment later.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

EVERY_S = 1.0
_IMPORT_AT_LOOK = 5
"""Later than a start takes, so that imports don't compete with it."""
_SIGTERM_BIT = 1 << (signal.SIGTERM - 1)


class Undertaker:
    """Looks at a process's children, and kills those that have been told to end and can't."""

    def __init__(self) -> None:
        self._told: set[int] = set()
        self._looks = 0

    def look(self, number: int = 0, frame: FrameType | None = None) -> None:
        """One look; a signal handler."""
        self._looks += 1
        if self._looks == _IMPORT_AT_LOOK:
            importlib.import_module("holdfast.engine.worker")
        waiting = {pid for pid in children(os.getpid()) if has_sigterm_waiting(pid)}
        for pid in waiting & self._told:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._told = waiting


def children(pid: int) -> list[int]:
    """A process's children, where the system tells."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def has_sigterm_waiting(pid: int) -> bool:
    """Whether a process was sent a SIGTERM that it has not acted on."""
    try:
        with open(f"/proc/{pid}/status") as file:
            lines = file.read().splitlines()
    except OSError:
        return False
    pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(bits & _SIGTERM_BIT for bits in pending)


def unzipped(path: Sequence[str], is_file: Callable[[str], bool] = os.path.isfile) -> list[str]:
    """The module path with PySpark's zip replaced by the folder beside it that holds the same, where there is one.

    Spark puts a zip of PySpark's sources first, and Python compiles what it takes from a zip anew in each process:
    half a second for every shard at every start.

    >>> unzipped(["", "/s/pyspark/python/lib/pyspark.zip"], lambda file: file == "/s/pyspark/__init__.py")
    ['', '/s']
    """
    found = []
    for entry in path:
        if entry.endswith("/python/lib/pyspark.zip"):
            home = entry[: -len("/python/lib/pyspark.zip")]
            beside = [os.path.join(home, "python"), os.path.dirname(home)]
            entry = next((b for b in beside if is_file(os.path.join(b, "pyspark", "__init__.py"))), entry)
        found.append(entry)
    return found


def main() -> None:
    """Be PySpark's daemon. The timer is not inherited by the workers."""
    sys.path[:] = unzipped(sys.path)
    from pyspark import daemon

    signal.signal(signal.SIGALRM, Undertaker().look)
    signal.setitimer(signal.ITIMER_REAL, EVERY_S, EVERY_S)
    daemon.manager()


if __name__ == "__main__":
    main()
