"""Faults at named points of tasks, asked for and done: `HOLDFAST_FAULT` while a context lasts."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FAULT = "HOLDFAST_FAULT"


@contextmanager
def injected(spark: Any, fault: str) -> Iterator[Path]:
    """Ask for a fault in the tasks of a session: the marker, which exists once the fault was done.

    While a test has created the marker itself, nothing happens: to remove it arms the fault.
    """
    # One name for each kind of fault: a worker pool is keyed by its environment, and pools never end.
    name = re.sub(r"\W", "-", fault)
    marker = Path(tempfile.gettempdir()) / f"holdfast-fault-{os.getpid()}-{name}"
    marker.unlink(missing_ok=True)
    asked = f"{fault}:{marker}"
    os.environ[FAULT] = spark.sparkContext.environment[FAULT] = asked
    try:
        yield marker
    finally:
        os.environ.pop(FAULT, None)
        spark.sparkContext.environment.pop(FAULT, None)
        marker.unlink(missing_ok=True)
