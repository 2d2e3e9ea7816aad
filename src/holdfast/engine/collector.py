"""Python's cycle collector in workers that hold state: it looks at what is new, and rarely at all there is.

PySpark's daemon collects all garbage after each task of a worker. That walks through every object that the worker holds,
so an epoch would cost what is kept; and even with no state it takes ten milliseconds a task, on cores that the next
stage is waiting for. Here the cycles of a task are looked for among the objects that it made. All objects are walked
only when there are twice as many as after the last time, or when memory has grown by half: so what is kept is paid for
once for each time it grows that much, and garbage that outlived its task goes before it is more than what is kept.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import psutil

GROWN, GROWN_BYTES, ROOM_BYTES = 2.0, 1.5, 64 << 20
"""All objects are walked when there are so many times as many as after the last time, or memory is so many times as large
and some room more: numpy's and Arrow's is in no object that Python counts."""


def _memory() -> int:
    return int(psutil.Process().memory_info().rss)


class Collector:
    """Stands where PySpark's daemon has the module `gc`."""

    def __init__(
        self, blocks: Callable[[], int] = sys.getallocatedblocks, memory: Callable[[], int] = _memory
    ) -> None:
        self._blocks, self._memory = blocks, memory
        self._kept = self._kept_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(gc, name)

    def collect(self, generation: int = 2) -> int:
        """Called after each task, whatever it asks for."""
        found = gc.collect(1)
        blocks, size_bytes = self._blocks(), self._memory()
        if blocks >= GROWN * self._kept or size_bytes >= GROWN_BYTES * self._kept_bytes + ROOM_BYTES:
            found += gc.collect()
            self._kept, self._kept_bytes = self._blocks(), self._memory()
        else:
            self._kept, self._kept_bytes = min(self._kept, blocks), min(self._kept_bytes, size_bytes)
        return found


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
    number = next(_tasks)
    if number == 1:
        gc.freeze()  # modules, which are never garbage; the program and state are still to come
    if number % _TASKS_BETWEEN == 0:
        _own.collect()
