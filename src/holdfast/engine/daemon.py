"""PySpark's daemon of Python workers, with an eye on those that don't die when Spark tells them to.

Spark ends a worker that has been silent for too long by SIGTERM. A worker that is frozen (stopped, or stuck in the
kernel) does not act on it, and its task would wait for ever. So once a second the daemon looks at its workers: one
that has had a SIGTERM waiting for two looks is killed. Used as `spark.python.daemon.module` in sessions that we make.

What workers need is imported here once, before they are forked, so that a worker that replaces another is there
in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType

EVERY_S = 1.0
_SIGTERM_BIT = 1 << (signal.SIGTERM - 1)


class Undertaker:
    """Looks at a process's children, and kills those that have been told to end and can't."""

    def __init__(self) -> None:
        self._told: set[int] = set()

    def look(self, number: int = 0, frame: FrameType | None = None) -> None:
        """One look; a signal handler."""
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


def main() -> None:
    """Be PySpark's daemon. The timer is not inherited by the workers."""
    from pyspark import daemon

    from holdfast.engine import worker

    assert worker
    signal.signal(signal.SIGALRM, Undertaker().look)
    signal.setitimer(signal.ITIMER_REAL, EVERY_S, EVERY_S)
    daemon.manager()


if __name__ == "__main__":
    main()
