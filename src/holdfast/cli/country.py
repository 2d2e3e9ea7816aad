"""The demo's map: what the vehicle-map pipeline has published so far, and its picture in half blocks.

It reads the output folders as any reader would: Parquet and JSON lines, file by file as they appear.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from rich.color import Color
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from holdfast.data.rows import to_rows

TILES = 66
"""Tiles on each side of the country."""
FLASH_MS = 2_500
"""How long a tile glows after a change was flagged on it."""
_FADE_MS = 9_000
_LEVELS = 14
_RAMP = np.array(
    [
        (24, 22, 62),
        (64, 28, 110),
        (126, 37, 130),
        (196, 64, 118),
        (248, 118, 92),
        (254, 190, 110),
        (252, 246, 196),
    ]
)
_SEA = (14, 17, 23)
_FLASH = {"new": (64, 224, 255), "gone": (150, 160, 175)}
_MARKS = {"closure": "red", "pothole": "yellow", "sign": "cyan"}


class Country:
    """The published tiles and changes, gathered from the output folders.

    Args:
        out: the folder that has them.
        tiles: the folder of tiles in it, Parquet.
        changes: the folder of changes, Parquet or JSON lines.
    """

    def __init__(self, out: Path, tiles: str = "tiles", changes: str = "changes") -> None:
        self._tiles, self._changes = out / tiles, out / changes
        self._read: set[Path] = set()
        self.reports = np.zeros((TILES, TILES), dtype=np.int64)
        self.seen_ms = np.zeros((TILES, TILES), dtype=np.int64)
        self.flash_ms = np.zeros((TILES, TILES), dtype=np.int64)
        self.flash_gone = np.zeros((TILES, TILES), dtype=bool)
        self.now_ms = 0
        self.changes: deque[dict[str, Any]] = deque(maxlen=100)
        self._known: set[tuple[int, str, str]] = set()

    def catch_up(self) -> None:
        """Take in what was published since the last time. A file may be merged into a larger one meanwhile."""
        for file in self._new(self._tiles):
            with contextlib.suppress(FileNotFoundError):
                self._take_tiles(pq.read_table(file, partitioning=None))
        for file in self._new(self._changes):
            with contextlib.suppress(FileNotFoundError):
                for change in _rows(file):
                    self._take_change(change)

    def _new(self, folder: Path) -> list[Path]:
        visible = (f for f in folder.glob("*.*") if f.name[0] not in "._")
        found = sorted(f for f in visible if f not in self._read)
        self._read.update(found)
        return found

    def _take_tiles(self, table: pa.Table) -> None:
        x, y, at, reports = (table[n].to_numpy() for n in ("tile_x", "tile_y", "at_ms", "reports"))
        np.maximum.at(self.seen_ms, (y, x), at)
        np.maximum.at(self.reports, (y, x), reports)
        self.now_ms = max(self.now_ms, int(at.max(initial=0)))

    def _take_change(self, change: dict[str, Any]) -> None:
        name = (change["at_ms"], change["feature"], change["change"])
        if name in self._known:
            return
        self._known.add(name)
        self.changes.append(change)
        at = change["tile_y"], change["tile_x"]
        self.flash_ms[at], self.flash_gone[at] = change["at_ms"], change["change"] == "gone"

    @property
    def flagged(self) -> int:
        """How many changes there were."""
        return len(self._known)

    def busiest(self) -> tuple[int, int]:
        """The tile with the most reports."""
        y, x = np.unravel_index(int(self.reports.argmax()), self.reports.shape)
        return int(x), int(y)


def _rows(file: Path) -> list[dict[str, Any]]:
    if file.suffix == ".parquet":
        return to_rows(pq.read_table(file, partitioning=None))
    return [json.loads(line) for line in file.read_text().splitlines()]


def colours(country: Country, cells: int) -> npt.NDArray[np.uint8]:
    """The picture as so many by so many colours: bright where many report, dim where nobody did for a while."""
    edges = np.arange(cells) * TILES // cells
    reports = _blocks(np.add, country.reports, edges)
    seen = _blocks(np.maximum, country.seen_ms, edges)
    flash = _blocks(np.maximum, country.flash_ms, edges)
    gone = _blocks(np.logical_and, country.flash_gone | (country.flash_ms == 0), edges)
    top = math.log1p(max(20.0, float(np.quantile(reports[reports > 0], 0.97)) if reports.any() else 20.0))
    level = np.round(np.minimum(np.log1p(reports) / top, 1.0) ** 1.6 * (_LEVELS - 1)) / (_LEVELS - 1)
    fresh = 0.3 + 0.7 * np.round(np.clip(1 - (country.now_ms - seen) / _FADE_MS, 0, 1) * 6) / 6
    ramp = np.stack([np.interp(level, np.linspace(0, 1, len(_RAMP)), _RAMP[:, c]) for c in range(3)], axis=-1)
    picture = np.where((reports > 0)[..., None], ramp * fresh[..., None], _SEA)
    glowing = (flash > 0) & (country.now_ms - flash < FLASH_MS)
    picture[glowing & ~gone] = _FLASH["new"]
    picture[glowing & gone] = _FLASH["gone"]
    return picture.astype(np.uint8)


def _blocks(operation: np.ufunc, tiles: npt.NDArray[Any], edges: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Tiles gathered into fewer cells."""
    return operation.reduceat(operation.reduceat(tiles, edges, axis=0), edges, axis=1)


@lru_cache(maxsize=8192)
def _style(upper: tuple[int, int, int], lower: tuple[int, int, int]) -> Style:
    return Style(color=Color.from_rgb(*upper), bgcolor=Color.from_rgb(*lower))


class MapPicture:
    """The map for a terminal: two cells in each character, one above the other."""

    def __init__(self, country: Country, cells: int) -> None:
        self._picture = colours(country, cells - cells % 2)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        rows = self._picture.tolist()
        for upper, lower in zip(rows[::2], rows[1::2], strict=True):
            for above, below in zip(upper, lower, strict=True):
                yield Segment("▀", _style(tuple(above), tuple(below)))
            yield Segment.line()


def change_lines(country: Country, lines: int) -> list[Text]:
    """The last flagged changes, newest first."""
    newest = list(country.changes)[::-1][: max(0, lines)]
    return [_change(c) for c in newest]


def _change(change: dict[str, Any]) -> Text:
    kind = change["feature"].split()[0]
    if change["change"] == "gone":
        return Text(f"- {change['feature']}", style="dim")
    units = {
        "sign": f"{change['value']:.0f} km/h",
        "pothole": f"{change['value']:.0f} cm deep",
        "closure": "closed",
    }
    return Text.assemble(
        (f"+ {change['feature']}", _MARKS.get(kind, "default")), (f"  {units.get(kind, '')}", "dim")
    )
