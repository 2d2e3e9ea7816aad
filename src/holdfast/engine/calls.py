"""Calls of the user's functions: what they raise becomes an error with uid, place, record and their traceback."""

from __future__ import annotations

import os
import traceback
from typing import Any

from holdfast.data.shown import shown
from holdfast.errors import EngineError, HoldfastError, UserCodeError
from holdfast.plan.graph import Node
from holdfast.state.shard import DamageFound, is_own_damage

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_RECORD_LIMIT = 500
LOOP_FILE = "<holdfast loop>"
"""What tracebacks call the loop over records, which is written at run time."""


def user_error(
    error: BaseException, node: Node, record: Any, redact: bool, key: Any = None, window: Any = None
) -> HoldfastError:
    """The error to report for an exception in a user's function. One of ours keeps its type."""
    if isinstance(error, HoldfastError):
        return error.at(node.uid, node.where)
    if is_own_damage(error):
        return DamageFound(said(error), uid=node.uid, where=node.where)
    lines = [f"  record: {shown(record, _RECORD_LIMIT)}"]
    if window is not None:
        lines.insert(0, f"  window: {shown(window)}")
    if key is not None:
        lines.insert(0, f"  key: {shown(key)}")
    return UserCodeError(
        f"{type(error).__name__}: {'(redacted)' if redact else said(error)}",
        uid=node.uid,
        where=node.where,
        remedy="Mend the function and start again: the epoch was not committed and runs again as planned.",
        detail="\n".join([*lines, "  " + user_traceback(error, redact).replace("\n", "\n  ")]),
    )


def method_error(error: Exception, node: Node, what: str) -> HoldfastError:
    """The error to report for an exception in a method of a source or a sink.

    Somebody's own class is their code, and fails again with the same plan. Where the system failed them (a disk, a
    connection) or the class is ours, another try may help.
    """
    own = not type(node.body).__module__.startswith("holdfast.")
    kind = UserCodeError if own and not isinstance(error, OSError) else EngineError
    return kind(
        f"{what}: {type(error).__name__}: {said(error)}",
        uid=node.uid,
        where=node.where,
        remedy=f"Mend {type(node.body).__name__} and start again: nothing is lost." if own else None,
        detail=user_traceback(error),
    )


def said(error: BaseException) -> str:
    """An error's own words; not every error of a user can be asked for them."""
    try:
        return str(error)
    except Exception:
        return "(it can't say why)"


def user_traceback(error: BaseException, redact: bool = False) -> str:
    """The traceback from the user's first frame on; redacted, without the exception's own words."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not _is_ours(f.filename)] or list(frames)
    last = [type(error).__name__] if redact else traceback.format_exception_only(error)
    return "".join(["Traceback (most recent call last):\n", *traceback.format_list(own), *last]).rstrip()


def _is_ours(filename: str) -> bool:
    return filename == LOOP_FILE or os.path.abspath(filename).startswith(_PACKAGE)


def reached(items: list[Any], iterator: Any) -> Any:
    """The item that a list iterator gave last: the one at hand when a loop over it raised."""
    left = iterator.__length_hint__()
    place = len(items) - left - 1
    return items[place] if 0 <= place < len(items) else None
