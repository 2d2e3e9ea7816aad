"""How commands write: to a standard output that may break or be no terminal, as tables or as JSON."""

from __future__ import annotations

import datetime as dt
import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

PLAIN_WIDTH = 160
"""How wide tables are where there is no terminal to ask."""


class Unbroken:
    """Standard output that goes quiet when its reader has gone, so that a pipeline outlives `| head`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (BrokenPipeError, ValueError):
            self._silence()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (BrokenPipeError, ValueError):
            self._silence()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:
        return self._stream.encoding

    def _silence(self) -> None:
        """What is still buffered goes nowhere, and the interpreter's last flush finds nothing wrong."""
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        except (OSError, ValueError):
            return


def console() -> Console:
    """Standard output for people: as wide as the terminal, or wide enough for a log."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH
    return Console(file=Unbroken(sys.stdout), width=width, highlight=False)  # type: ignore[arg-type]


def print_json(value: Any) -> None:
    """One JSON object on a line of its own, at once."""
    stream = Unbroken(sys.stdout)
    stream.write(msgspec.json.encode(value, enc_hook=str).decode() + "\n")
    stream.flush()


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[str] = ()) -> Table:
    """A table in the house's style; columns named in `right` hold numbers."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return made


def amount(number: float) -> str:
    """A number for people: thousands apart, no decimals.

    >>> amount(1234567.8)
    '1,234,568'
    """
    return f"{number:,.0f}"


def size(number: float) -> str:
    """Bytes for people.

    >>> size(5), size(1536), size(5 << 20)
    ('5 B', '1.5 KB', '5.0 MB')
    """
    for unit in ("B", "KB", "MB", "GB"):
        if number < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TB"


def clock(seconds: float) -> str:
    """A time span as a clock shows it.

    >>> clock(59), clock(3661), clock(90000)
    ('0:59', '1:01:01', '1d 1:00:00')
    """
    days, rest = divmod(int(seconds), 86400)
    hours, rest = divmod(rest, 3600)
    minutes, left = divmod(rest, 60)
    shown = f"{hours}:{minutes:02d}:{left:02d}" if hours or days else f"{minutes}:{left:02d}"
    return f"{days}d {shown}" if days else shown


def moment(ms: int) -> str:
    """A moment for people, in UTC; one that no calendar has, as it is.

    >>> moment(1_714_564_805_999), moment(10**17)
    ('2024-05-01 12:00:05Z', '100000000000000000 ms')
    """
    try:
        return f"{dt.datetime.fromtimestamp(ms // 1000, dt.timezone.utc):%Y-%m-%d %H:%M:%S}Z"
    except (OverflowError, ValueError, OSError):
        return f"{ms} ms"


def millis(number: float) -> str:
    """A latency for people.

    >>> millis(7.26), millis(182.4), millis(2500)
    ('7.3 ms', '182 ms', '2.50 s')
    """
    if number >= 1000:
        return f"{number / 1000:.2f} s"
    return f"{number:.1f} ms" if number < 10 else f"{number:.0f} ms"
