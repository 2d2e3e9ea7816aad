"""What Spark's JVM and its workers print on standard error: kept in a file of the pipeline's directory.

A child keeps the standard error it was born with, so it is enough to lend it another one while Spark starts;
this process writes to the real one all the while. Where Spark does not start, what it printed is the
explanation, and is shown.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import TextIO

FILE = "spark.log"


class SparkNoise:
    """Standard error as children see it, lent out to a file from `begin` to `end`.

    The file is `spark.log` in a directory, or a temporary one where there is none or it can't be written.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._ours: TextIO | None = None
        self._before: TextIO = sys.stderr
        self._file, self._start = "", 0

    def begin(self) -> None:
        """From here on new children write to the file."""
        sys.stderr.flush()
        handle = self._open()
        self._start = os.lseek(handle, 0, os.SEEK_END)
        self._before = sys.stderr
        self._ours = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
        sys.stderr = self._ours
        os.dup2(handle, 2)
        os.close(handle)

    def _open(self) -> int:
        if self._directory is not None:
            with contextlib.suppress(OSError):
                self._directory.mkdir(parents=True, exist_ok=True)
                self._file = str(self._directory / FILE)
                return os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        handle, self._file = tempfile.mkstemp(prefix="holdfast-", suffix=f"-{FILE}")
        return handle

    def end(self, *, show: bool) -> None:
        """New children write to standard error again; `show` what was written. A second call does nothing."""
        if self._ours is None:
            return
        ours, self._ours = self._ours, None
        ours.flush()
        os.dup2(ours.fileno(), 2)
        if sys.stderr is ours:
            sys.stderr = self._before
        ours.close()
        if show:
            sys.stderr.write(self._written())

    def _written(self) -> str:
        with open(self._file, errors="replace") as file:
            file.seek(self._start)
            return file.read()
