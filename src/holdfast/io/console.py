"""The newest rows on the screen: a table that refreshes in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import atexit
import sys
from collections import deque
from typing import TYPE_CHECKING, Any, TextIO

from holdfast.data.rows import Row, to_rows
from holdfast.errors import PipelineError
from holdfast.io.base import Decided, Sink, SinkWriter, TableWriter, Target, staged_table

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

_WIDEST = 60


def console(rows: int = 20, title: str | None = None) -> ConsoleSink:
    """Show the newest rows: a table that refreshes in place on a terminal, a line for each row elsewhere.

    Args:
        rows: how many rows the table holds, or how many lines are printed for an epoch.
        title: what stands above it; the sink's uid if there is none.

    >>> console(rows=5).describe()
    'the console, 5 rows'
    """
    if rows < 1:
        raise PipelineError("console needs at least one row.")
    return ConsoleSink(rows, title)


class ConsoleSink(Sink):
    """Shows rows to a person; made by `console`.

    Set `embedded` to True where something else draws the screen: then nothing is printed, and `renderable()` is
    what to draw.
    """

    def __init__(self, rows: int, title: str | None, stream: TextIO | None = None) -> None:
        self._count = rows
        self._title = title
        self._stream = stream
        self._rows: deque[Row] = deque(maxlen=rows)
        self._names: list[str] = []
        self._epoch = 0
        self._total = 0
        self._live: Live | None = None
        self.embedded = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_live": None, "_stream": None, "_rows": deque(maxlen=self._count)}

    def describe(self) -> str:
        return f"the console, {self._count} rows"

    def writer(self, target: Target) -> SinkWriter:
        return TableWriter(target)

    def publish(self, decided: Decided) -> None:
        table = staged_table(decided)
        if decided.epoch <= self._epoch or table is None or not table.num_rows:
            return
        self._epoch = decided.epoch
        self._total += table.num_rows
        self._names = table.schema.names
        newest = to_rows(table.slice(max(0, table.num_rows - self._count)))
        self._rows.extend(newest)
        if self.embedded:
            return
        if (self._stream or sys.stdout).isatty():
            self._draw(decided.uid)
        else:
            self._print(newest, table.num_rows, decided.uid)

    def renderable(self, uid: str = "") -> Table:
        """The newest rows as a rich table."""
        from rich.table import Table

        drawn = Table(
            title=self._title or uid or None,
            caption=f"epoch {self._epoch} · {self._total:,} rows",
            title_justify="left",
        )
        for name in self._names:
            drawn.add_column(name, overflow="ellipsis", no_wrap=True, max_width=_WIDEST)
        for row in self._rows:
            drawn.add_row(*(_cell(row.get(name)) for name in self._names))
        return drawn

    def _draw(self, uid: str) -> None:
        from rich.console import Console
        from rich.errors import LiveError
        from rich.live import Live

        if self._live is None:
            live = Live(console=Console(file=self._stream), auto_refresh=False)
            try:
                live.start()
            except LiveError:
                self.embedded = True  # somebody else draws this screen
                return
            self._live = live
            atexit.register(self.close)  # the cursor is hidden meanwhile
        self._live.update(self.renderable(uid), refresh=True)

    def _print(self, newest: list[Row], count: int, uid: str) -> None:
        out = self._stream or sys.stdout
        name = self._title or uid
        if count > len(newest):
            print(f"[{name}] epoch {self._epoch}: {count:,} rows, the last {len(newest)}:", file=out)
        for row in newest:
            cells = " ".join(f"{key}={_cell(value)}" for key, value in row.items())
            print(f"[{name}] epoch {self._epoch}: {cells}", file=out)
        out.flush()

    def close(self) -> None:
        """Leave the table as it stands and give the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    text = f"{value:,.6g}" if isinstance(value, float) else str(value)
    text = text.replace("\n", "⏎")
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"
