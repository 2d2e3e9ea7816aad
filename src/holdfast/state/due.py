"""Which rows are due when, so that asking costs what is due and not what is kept.

The index is a few sorted runs of (due time, row), in numpy. A row that gets another due time is added once more;
what its old entry says is stale from then on, and so is the entry of a row that was let go. Stale entries are
skipped by whoever meets them, and dropped from the front of a run and when runs are merged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

EARLIEST, LATEST = -(1 << 63), (1 << 63) - 1
"""The bounds of a due time."""

Numbers = npt.NDArray[np.int64]

_FIRST_CAPACITY = 1024
_LOOK = 1024
"""So many entries are looked at together in search of the first that is not stale."""
_SPARE = 1024
"""So many stale entries are never worth a merge."""


@dataclasses.dataclass
class _Run:
    """Entries in the order of their due times; those before `start` are dropped."""

    dues: Numbers
    rows: Numbers
    start: int = 0

    def __len__(self) -> int:
        return len(self.dues) - self.start

    def slice(self, first: int, last: int) -> tuple[int, int]:
        """Where the entries stand that are due from `first` to `last`."""
        left = self.dues[self.start :]
        low, high = np.searchsorted(left, first, "left"), np.searchsorted(left, last, "right")
        return self.start + int(low), self.start + int(high)


class DueIndex:
    """The rows of a table by due time.

    >>> index = DueIndex()
    >>> index.note(np.array([0, 1, 2]), np.array([30, 10, 20]))
    >>> index.note(np.array([1]), np.array([25]))
    >>> index.between(EARLIEST, 25).tolist(), index.first()
    ([1, 2], 20)
    """

    def __init__(self) -> None:
        self._due: Numbers = np.zeros(_FIRST_CAPACITY, np.int64)
        self._kept = np.zeros(_FIRST_CAPACITY, bool)
        self._living = 0
        self._runs: list[_Run] = []

    def __len__(self) -> int:
        """Entries, the stale ones included."""
        return sum(map(len, self._runs))

    def note(self, rows: Numbers, dues: Numbers) -> None:
        """From now on these rows are due at these times, whatever was known of them before."""
        if not len(rows):
            return
        self._reserve(int(rows.max()) + 1)
        known = self._kept[rows]
        fresh = ~known | (self._due[rows] != dues)
        self._due[rows], self._kept[rows] = dues, True
        self._living += len(rows) - int(known.sum())
        rows, dues = rows[fresh], dues[fresh]
        order = np.argsort(dues, kind="stable")
        if len(order):
            self._runs.append(_Run(dues[order], rows[order]))
        self._tidy()

    def forget(self, rows: Numbers) -> None:
        """These rows are let go; they may come back for something else."""
        self._kept[rows] = False
        self._living -= len(rows)
        self._tidy()

    def dues(self, rows: Numbers) -> Numbers:
        """When rows are due."""
        return self._due[rows]

    def between(self, first: int, last: int) -> Numbers:
        """The rows that are due from `first` to `last`, both included; each once, by number."""
        found = [self._taken(run, first, last) for run in self._runs]
        self._runs = [run for run in self._runs if len(run)]
        # A row that was let go and came back with the due time it had is there twice.
        return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)

    def first(self, since: int = EARLIEST) -> int | None:
        """The earliest due time from `since` on; None where nothing is kept."""
        found = []
        for run in self._runs:
            at, _ = run.slice(since, LATEST)
            front = at == run.start
            while at < len(run.dues):
                alive = np.flatnonzero(self._alive(run, at, at + _LOOK))
                at = at + int(alive[0]) if len(alive) else min(at + _LOOK, len(run.dues))
                if len(alive):
                    found.append(int(run.dues[at]))
                    break
            if front:
                run.start = at
        self._runs = [run for run in self._runs if len(run)]
        return min(found, default=None)

    def _reserve(self, rows: int) -> None:
        if rows > len(self._due):
            room = max(rows, 2 * len(self._due)) - len(self._due)
            self._due = np.concatenate([self._due, np.zeros(room, np.int64)])
            self._kept = np.concatenate([self._kept, np.zeros(room, bool)])

    def _alive(self, run: _Run, low: int, high: int) -> npt.NDArray[np.bool_]:
        rows = run.rows[low:high]
        alive: npt.NDArray[np.bool_] = self._kept[rows] & (self._due[rows] == run.dues[low:high])
        return alive

    def _taken(self, run: _Run, first: int, last: int) -> Numbers:
        """The living rows of a run in a span; at its front, the stale ones are dropped."""
        low, high = run.slice(first, last)
        alive = self._alive(run, low, high)
        rows = run.rows[low:high][alive]
        if low == run.start and len(rows) < high - low:
            run.start = high - len(rows)
            run.dues[run.start : high] = run.dues[low:high][alive]
            run.rows[run.start : high] = rows
        return rows

    def _tidy(self) -> None:
        """Merge runs so that each is at least twice the next, and all of them when most entries are stale."""
        if len(self) > 3 * self._living + _SPARE:
            self._runs = self._merged(self._runs)
            return
        since = len(self._runs) - 1
        size = len(self._runs[since]) if self._runs else 0
        while since > 0 and len(self._runs[since - 1]) < 2 * size:
            since -= 1
            size += len(self._runs[since])
        if 0 <= since < len(self._runs) - 1:
            self._runs[since:] = self._merged(self._runs[since:])

    def _merged(self, runs: Sequence[_Run]) -> list[_Run]:
        """Runs as one, without what is stale or there twice; none where nothing is left."""
        alive = [run.start + np.flatnonzero(self._alive(run, run.start, len(run.dues))) for run in runs]
        dues = np.concatenate([run.dues[a] for run, a in zip(runs, alive, strict=True)])
        rows = np.concatenate([run.rows[a] for run, a in zip(runs, alive, strict=True)])
        place = np.arange(len(rows))
        last = np.empty(len(self._due), np.int64)
        last[rows] = place
        once = last[rows] == place
        dues, rows = dues[once], rows[once]
        order = np.argsort(dues, kind="stable")  # linear where the parts are sorted already
        return [_Run(dues[order], rows[order])] if len(order) else []
