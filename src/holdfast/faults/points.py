"""Named points in the code at which a fault can be asked for.

`HOLDFAST_FAULT="shard.start:raise:<marker file>"` makes the first task that reaches the point raise, once
for each marker file; `:lose-shuffle:` deletes the shuffle files that the task is about to need. Points are
free when nothing is asked for.
"""

from __future__ import annotations

import contextlib
import glob
import os

_ASKED = "HOLDFAST_FAULT"


class InjectedFault(BaseException):
    """Raised at a point; not an `Exception`, so that nothing reports it as a value: Spark must retry."""


def reach(point: str, task: str = "") -> None:
    """Say that a point is reached; fails if a fault was asked for here."""
    asked = os.environ.get(_ASKED)
    if not asked:
        return
    for one in asked.split(";"):
        wanted, _, rest = one.partition(":")
        action, _, marker = rest.partition(":")
        if wanted == point and _first(f"{marker}.{task}" if marker.endswith("*") else marker):
            _act(action, point)


def _first(marker: str) -> bool:
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _act(action: str, point: str) -> None:
    if action == "lose-shuffle":
        for root in os.environ.get("SPARK_EXECUTOR_DIRS", os.environ.get("SPARK_LOCAL_DIRS", "")).split(","):
            for file in glob.glob(os.path.join(root, "**", "shuffle_*.*"), recursive=True):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file)
    raise InjectedFault(f"A fault was asked for at {point}.")
