"""Values in messages: cut where they are long, left out where the user asked for that.

Whether they are left out is a matter of the task at hand, so it is kept here for the process, and set by
whoever starts a task.
"""

from __future__ import annotations

from typing import Any

_HIDDEN = "(redacted)"
_redaction = {"on": False}


def hide_values(on: bool) -> None:
    """From here on, leave values out of messages, or don't."""
    _redaction["on"] = on


def shown(value: Any, limit: int = 200) -> str:
    """A value as text for a message.

    >>> shown("x" * 300, limit=10)
    "'xxxxxxxx…"
    """
    if _redaction["on"]:
        return _HIDDEN
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
