"""What Spark's JVM prints on standard error while a live view owns the terminal: kept in a file beside it.

A child keeps the standard error it was born with, so it is enough to lend it another one while Spark starts.
Where Spark does not start, what it printed is the explanation, and is shown.
"""

from __future__ import annotations

import os
import sys
import tempfile


class SparkNoise:
    """Standard error lent out to a file, from `begin` to `end`."""

    def __init__(self) -> None:
        self._lent: int | None = None
        self._file = ""

    def begin(self) -> None:
        """From here on children write to a file."""
        sys.stderr.flush()
        handle, self._file = tempfile.mkstemp(prefix="holdfast-spark-", suffix=".log")
        self._lent = os.dup(2)
        os.dup2(handle, 2)
        os.close(handle)

    def end(self, *, show: bool) -> None:
        """Standard error is ours again; `show` what was written meanwhile. A second call does nothing."""
        if self._lent is None:
            return
        sys.stderr.flush()
        os.dup2(self._lent, 2)
        os.close(self._lent)
        self._lent = None
        if show:
            with open(self._file, errors="replace") as file:
                sys.stderr.write(file.read())
