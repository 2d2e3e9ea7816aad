"""The paper's scenario as a pipeline: a country's map in tiles, each of them pixels that vehicles' reports redraw.

The country is 330 km by 330 km, cut into tiles. The state of a tile is its pixels, a blob; a report blends a patch
into it, so a tile depends on all its reports and on their order. First every tile is drawn once, which makes the
state as large as it is wanted; from then on each epoch has so many reports, on a share of the tiles. Everything is a
hash of the report's number: the same, however often it is read.

How large all that is comes in the environment, since whoever strikes a pipeline starts it by its file:

    HOLDFAST_PAPER='{"side": 8, "tile_bytes": 4096}' holdfast run bench/paper_app.py
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

import holdfast as hf

ASKED = "HOLDFAST_PAPER"
COUNTRY_KM = 330
TILE_BYTES = 32 << 10
"""About what a tile takes: a picture of 256 by 256 pixels, half a byte each. A larger map has finer tiles."""
LEAST_SIDE = 8
PATCH_BYTES = 1024
"""What one report redraws."""
FILL_BYTES = 48 << 20
"""So much state one epoch of the first ones makes."""
MOST_TOUCHED_BYTES = 16 << 20
"""Of a large map an epoch redraws less than the share: one machine writes the state of all hosts."""
EMITTED_EVERY = 16


@dataclass(frozen=True)
class Work:
    """How large the map is, and how much of it is redrawn."""

    side: int
    """Tiles along an edge of the country."""
    tile_bytes: int
    reports: int = 20_000
    """Of one epoch."""
    touched: int = 16
    """On so many tiles."""
    seed: int = 1

    @property
    def tiles(self) -> int:
        return self.side * self.side

    @property
    def state_bytes(self) -> int:
        return self.tiles * self.tile_bytes

    @property
    def tile_km(self) -> float:
        return COUNTRY_KM / self.side

    @property
    def fill_epochs(self) -> int:
        """So many epochs draw every tile once."""
        return math.ceil(self.tiles / self._fill)

    @property
    def _fill(self) -> int:
        return max(1, FILL_BYTES // self.tile_bytes)

    def until(self, first: int) -> int:
        """Where the epoch that begins with a record ends."""
        if first < self.tiles:
            return min(first + self._fill, self.tiles)
        done = (first - self.tiles) // self.reports
        return self.tiles + (done + 1) * self.reports

    def environment(self) -> dict[str, str]:
        """As the application reads it."""
        return {ASKED: json.dumps(asdict(self))}


def sized(state_bytes: int, share: float = 0.02, reports: int = 20_000, seed: int = 1) -> Work:
    """A map that is about as large as wanted, of which each epoch redraws a share.

    >>> work = sized(805_306_368)
    >>> work.tiles, work.tile_bytes, abs(work.state_bytes - 805_306_368) < 40_000, work.touched
    (24649, 32671, True, 493)
    """
    side = max(LEAST_SIDE, math.ceil(math.sqrt(state_bytes / TILE_BYTES)))
    tile_bytes = max(PATCH_BYTES, math.ceil(state_bytes / side**2))
    most = max(1, MOST_TOUCHED_BYTES // tile_bytes)
    return Work(side, tile_bytes, reports, max(1, min(round(share * side**2), most)), seed)


def asked(environment: Mapping[str, str]) -> Work:
    """The map that the environment asks for, or a small one."""
    told = environment.get(ASKED)
    return Work(**json.loads(told)) if told else sized(4 << 20)


def mixed(numbers: np.ndarray, salt: int) -> np.ndarray:
    """A hash of each number, the same on every machine."""
    z = (numbers.astype(np.uint64) + np.uint64(salt + 1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def reports(work: Work, first: int, last: int) -> pa.Table:
    """The reports of some numbers: on which tile, which patch of it, how bright."""
    ids = np.arange(first, last, dtype=np.int64)
    drawn = mixed(ids, 3 * work.seed)
    period = (ids - work.tiles) // work.reports
    place = drawn % np.uint64(work.touched)
    redrawn = mixed(period * np.int64(work.touched) + place.astype(np.int64), 3 * work.seed + 1)
    every = (ids.astype(np.uint64) * np.uint64(7919)) % np.uint64(work.tiles)
    # 7919 is a prime, so every tile is met once unless their number is a multiple of it.
    every = ids.astype(np.uint64) if work.tiles % 7919 == 0 else every
    tile = np.where(ids < work.tiles, every, redrawn % np.uint64(work.tiles))
    at = mixed(ids, 3 * work.seed + 2) % np.uint64(work.tile_bytes - PATCH_BYTES + 1)
    return pa.table(
        {
            "id": ids,
            "tile": tile.astype(np.int64),
            "at": at.astype(np.int64),
            "tone": (drawn >> np.uint64(40)).astype(np.int64) & 127,
        }
    )


class Reports(hf.Source):
    """What vehicles send: an epoch's worth whenever an epoch is cut."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def schema(self) -> pa.Schema:
        return pa.schema({"id": pa.int64(), "tile": pa.int64(), "at": pa.int64(), "tone": pa.int64()})

    def plan(self, position: Any, limit: hf.Limit) -> hf.Offer:
        first = int(position or 0)
        last = min(self._work.until(first), first + limit.records)
        step = max(1, -(-(last - first) // limit.tasks))
        cuts = range(first, last, step)
        ranges = [hf.Range("0", a, min(a + step, last), {}, min(a + step, last) - a) for a in cuts]
        return hf.Offer(ranges, last)

    def read(self, piece: hf.Range, reading: hf.Reading) -> Iterator[pa.Table]:
        yield reports(self._work, piece.start, piece.end)


def drawn_first(tile: int, tile_bytes: int, seed: int) -> bytes:
    """A tile before anybody has reported of it: noise, which no storage packs smaller."""
    return np.random.Generator(np.random.SFC64([seed, tile])).bytes(tile_bytes)


def redrawn(pixels: bytes, at: int, tone: int) -> bytes:
    """The tile after a report: a patch of it is half what it was and half what was seen."""
    picture = np.frombuffer(pixels, np.uint8).copy()
    patch = picture[at : at + PATCH_BYTES]
    np.right_shift(patch, 1, out=patch)
    np.add(patch, tone, out=patch, casting="unsafe")
    return picture.tobytes()


class Tile(hf.KeyedProcess):
    """One tile of the map."""

    pixels = hf.ValueState(bytes, default=b"")

    def __init__(self, tile_bytes: int, seed: int) -> None:
        self._tile_bytes, self._seed = tile_bytes, seed

    def process(self, tile: int, report: dict[str, Any], ctx: hf.Context) -> Iterator[dict[str, Any]]:
        pixels = self.pixels.value
        if pixels:
            self.pixels.value = redrawn(pixels, report["at"], report["tone"])
        else:
            self.pixels.value = drawn_first(tile, self._tile_bytes, self._seed)
        if report["id"] % EMITTED_EVERY == 0:
            yield {"id": report["id"], "tile": tile, "tone": report["tone"]}


def build(work: Work) -> hf.Pipeline:
    """The pipeline; what it emits goes to nobody unless the sink is replaced."""
    made = hf.Pipeline("paper-map")
    tiles = (
        made.read("reports", Reports(work)).key_by("tile").process("tiles", Tile(work.tile_bytes, work.seed))
    )
    tiles.write("tile-updates", hf.parquet("out/paper_map"))
    return made


pipeline = build(asked(os.environ))
