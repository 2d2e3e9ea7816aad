"""Python's cycle collector in workers that hold state: it looks at what is new, and rarely at all there is.

PySpark's daemon collects all garbage after each task of a worker. That walks through every object that the worker holds,
so an epoch would cost what is kept; and even with no state it takes ten milliseconds a task, on cores that the next
stage is waiting for. Here the cycles of a task are looked for among the objects that it made. All objects are walked only when there are twice
as many as after the last time, so that what is kept is paid for once for each time it doubles, and cycles that live
longer than a task can't fill the memory either.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Mapping
from typing import Any

GROWN = 2.0
"""All objects are walked when there are so many times as many as after the last time."""


class Collector:
    """Stands where PySpark's daemon has the module `gc`."""

    def __init__(self, blocks: Callable[[], int] = sys.getallocatedblocks) -> None:
        self._blocks = blocks
        self._after = 0

    def collect(self) -> None:
        """Called after each task."""
        gc.collect(1)
        if self._blocks() >= GROWN * self._after:
            gc.collect()
            # What stays from the first task are modules and the program. They will never be garbage.
            if not self._after:
                gc.freeze()
            self._after = self._blocks()


_own = Collector()
_TASKS_BETWEEN = 64
_tasks = itertools.count(1)


def quiet(modules: Mapping[str, Any] = sys.modules) -> None:
    """Called at the start of each task: from here on nobody else collects, while it runs or after it.

    A worker is a fork of its daemon, whose module is either main or was imported by ours. Should PySpark change, so
    that its collector isn't where it was, ours runs now and then.
    """
    gc.disable()
    for name in ("pyspark.daemon", "__main__"):
        module = modules.get(name)
        if getattr(module, "gc", None) is gc and hasattr(module, "manager"):
            module.gc = _own  # type: ignore[union-attr]
    if next(_tasks) % _TASKS_BETWEEN == 0:
        _own.collect()
