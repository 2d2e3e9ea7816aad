"""Calls of the user's functions: what they raise becomes an error with uid, place, record and their traceback."""

from __future__ import annotations

import os
import traceback
from typing import Any

from holdfast.errors import HoldfastError, UserCodeError
from holdfast.plan.graph import Node

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_RECORD_LIMIT = 500


def user_error(error: Exception, node: Node, record: Any, redact: bool, key: Any = None) -> HoldfastError:
    """The error to report for an exception in a user's function. One of ours keeps its type."""
    if isinstance(error, HoldfastError):
        return error.at(node.uid, node.where)
    shown = "(redacted)" if redact else cut(record)
    lines = [f"  record: {shown}"]
    if key is not None and not redact:
        lines.insert(0, f"  key: {cut(key)}")
    return UserCodeError(
        f"{type(error).__name__}: {'(redacted)' if redact else error}",
        uid=node.uid,
        where=node.where,
        remedy="Mend the function and start again: the epoch was not committed and runs again as planned.",
        detail="\n".join([*lines, "  " + user_traceback(error).replace("\n", "\n  ")]),
    )


def user_traceback(error: Exception) -> str:
    """The traceback from the user's first frame on."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not os.path.abspath(f.filename).startswith(_PACKAGE)] or list(frames)
    text = ["Traceback (most recent call last):\n", *traceback.format_list(own)]
    return "".join([*text, *traceback.format_exception_only(error)]).rstrip()


def cut(value: Any) -> str:
    """A value as text, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _RECORD_LIMIT else text[: _RECORD_LIMIT - 1] + "…"


def reached(items: list[Any], iterator: Any) -> Any:
    """The item that a list iterator gave last: the one at hand when a loop over it raised."""
    left = iterator.__length_hint__()
    place = len(items) - left - 1
    return items[place] if 0 <= place < len(items) else None
