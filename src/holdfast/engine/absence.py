"""When no executor is there: how long they are waited for, and who ends a job that waits for them in vain.

Spark lets a job wait for executors without end. Whoever runs one here is told once they have been away for too long,
or once somebody wants the end while there are none.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Set

_log = logging.getLogger("holdfast.driver")
_LOOK_EVERY_S = 1.0
_LONG_JOB_S = 2.0
"""A job that is over sooner is not looked at."""
_IDLE_LOOKS = 60
"""After so many looks without a job the thread ends; the next job starts another."""


class Go(enum.Enum):
    """What to do about hosts that have state, and no executor."""

    ON = "run on the executors that are there"
    WAIT = "wait for the others"
    GIVE_UP = "no executor comes any more"


def go(
    here: Set[str],
    homes: Set[str],
    deserted: Set[str],
    *,
    waited_s: float,
    wait_for_home_s: float,
    gone_for_s: float,
    wait_for_executors_s: float,
) -> Go:
    """Whether a job can be placed.

    Args:
        here: hosts with an executor.
        homes: hosts that have state.
        deserted: those of them that have had their time to come back.
        waited_s: for how long this job has waited.
        gone_for_s: for how long there has been no executor at all.

    >>> times = {"wait_for_home_s": 3.0, "wait_for_executors_s": 120.0}
    >>> go({"a"}, {"a", "b"}, set(), waited_s=1.0, gone_for_s=0.0, **times).name
    'WAIT'
    >>> go({"a"}, {"a", "b"}, set(), waited_s=3.0, gone_for_s=0.0, **times).name
    'ON'
    >>> go(set(), {"a", "b"}, set(), waited_s=3.0, gone_for_s=120.0, **times).name
    'GIVE_UP'
    """
    if not here:
        return Go.GIVE_UP if gone_for_s >= wait_for_executors_s else Go.WAIT
    return Go.WAIT if homes - here - deserted and waited_s < wait_for_home_s else Go.ON


class Absence:
    """For how long there has been no executor, by those who looked."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._since_s: float | None = None

    def seen(self, live: bool) -> float:
        """Note whether there is one: for how long there was none."""
        if live:
            self._since_s = None
            return 0.0
        now_s, since_s = self._clock_s(), self._since_s  # another thread may have seen one meanwhile
        if since_s is None:
            since_s = self._since_s = now_s
        return now_s - since_s


class Watch:
    """Ends jobs that wait in vain, from a thread of its own.

    Args:
        in_vain: asked once a second while a job takes long.
        end: ends all jobs.
    """

    def __init__(
        self, in_vain: Callable[[], bool], end: Callable[[], None], *, look_every_s: float = _LOOK_EVERY_S
    ) -> None:
        self._in_vain, self._end, self._look_every_s = in_vain, end, look_every_s
        self._jobs: dict[int, float] = {}
        self._number = itertools.count()
        self._lock = threading.Lock()
        self._watched = False

    @contextlib.contextmanager
    def job(self) -> Iterator[None]:
        """While a job runs."""
        number = next(self._number)
        with self._lock:
            self._jobs[number] = time.monotonic()
            if not self._watched:
                self._watched = True
                threading.Thread(target=self._loop, name="holdfast-executors", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                del self._jobs[number]

    def _loop(self) -> None:
        long_s, idle = min(_LONG_JOB_S, 2 * self._look_every_s), 0
        while True:
            time.sleep(self._look_every_s)
            with self._lock:
                oldest = min(self._jobs.values(), default=None)
                idle = 0 if self._jobs else idle + 1
                self._watched = idle < _IDLE_LOOKS
            if not self._watched:
                return
            if oldest is None or time.monotonic() - oldest < long_s:
                continue
            try:
                if self._in_vain():
                    self._end()
            except Exception as error:  # a context that is being stopped answers with anything
                _log.debug("looking for executors: %s", error)
