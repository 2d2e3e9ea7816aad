"""The log of a run on standard error: one line a record, `key=value`, quiet unless asked (`log_level`)."""

from __future__ import annotations

import json
import logging
import sys
import time


class _Lines(logging.Handler):
    """Writes to whatever standard error is now: a live view may have put itself in front of it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(line(record) + "\n")
        except (OSError, ValueError):
            return


def line(record: logging.LogRecord) -> str:
    """A log record as one line."""
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    text = record.getMessage()
    if record.exc_info:
        text += "\n" + logging.Formatter().formatException(record.exc_info)
    return (
        f"at={at}.{int(record.msecs):03d}Z level={record.levelname.lower()} "
        f"logger={record.name} message={json.dumps(text, ensure_ascii=False)}"
    )


def start_log(level: str) -> None:
    """Send what holdfast's rooms log to standard error, from a level on."""
    logger = logging.getLogger("holdfast")
    logger.handlers = [_Lines()]
    logger.setLevel(level)
    logger.propagate = False
