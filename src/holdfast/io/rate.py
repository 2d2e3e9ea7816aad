"""A generator of records at a steady rate: the same record for the same offset, for ever.

Nothing is remembered between records: each is a hash of its number and the seed, made with integer
arithmetic and with floating-point operations that every processor rounds alike (products and square roots).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.data.rows import conform
from holdfast.errors import PipelineError, UserCodeError
from holdfast.io.base import Limit, Offer, Range, Reading, Source

TABLE_ROWS = 131_072
START_MS = 1_704_067_200_000
"""The event time of the first record, unless the caller says otherwise: 2024-01-01 00:00 UTC."""

SCHEMA = pa.schema({"id": pa.int64(), "key": pa.int64(), "ts": pa.timestamp("ms"), "value": pa.float64()})

_LEAST_ROWS = 4_096
_UNIT = 2.0**-53

Make = Callable[[pa.Table], pa.Table]
Words = npt.NDArray[np.uint64]


def rate(
    records_per_s: float | None = 1_000,
    *,
    keys: int = 1_000,
    skew: float = 0.0,
    total: int | None = None,
    splits: int = 2,
    seed: int = 0,
    start_ms: int = START_MS,
    make: Make | None = None,
) -> RateSource:
    """Records made up at a steady rate, the same for the same seed, run after run and machine after machine.

    Columns: `id` (int64: 0, 1, 2 …), `key` (int64, below `keys`), `ts` (timestamp in ms: `start_ms` plus the
    time that the record's number takes at this rate), `value` (float64 in [0, 1)).

    Args:
        records_per_s: how many are due each second of the epochs' clock; None: all at once, as fast as they are
            taken (event time then goes on by a millisecond a record).
        keys: how many keys there are.
        skew: 0 spreads records evenly over keys; towards 1 more and more go to the small ones.
        total: stop after so many; without it there is no end.
        splits: in how many parts they are made.
        seed: another seed gives other keys and values.
        start_ms: event time of the first record.
        make: a function of a table that makes other records of them. It must give the same for the same rows,
            however they are divided into tables.

    >>> from holdfast.io.base import Limit, Reading
    >>> source = rate(None, total=4, keys=10)
    >>> offer = source.plan(None, Limit(records=100, tasks=2, now_ms=0))
    >>> [t.column("id").to_pylist() for r in offer.ranges for t in source.read(r, Reading("numbers"))]
    [[0, 2], [1, 3]]
    """
    _check(records_per_s, keys, skew, total, splits)
    return RateSource(records_per_s, keys, skew, total, splits, seed, start_ms, make)


def _check(records_per_s: float | None, keys: int, skew: float, total: int | None, splits: int) -> None:
    wrong = {
        "records_per_s": records_per_s is not None and not 0 < records_per_s < 1e9,
        "keys": not 1 <= keys < 1 << 62,
        "skew": not 0 <= skew < 1,
        "total": total is not None and total < 0,
        "splits": not 1 <= splits <= 10_000,
    }
    name = next((name for name, is_wrong in wrong.items() if is_wrong), None)
    if name is not None:
        raise PipelineError(
            f"rate: {name} has no sense.",
            remedy="records_per_s > 0 (or None), keys >= 1, 0 <= skew < 1, total >= 0 (or None), splits >= 1.",
        )


class RateSource(Source):
    """Makes records up; made by `rate`."""

    def __init__(
        self,
        records_per_s: float | None,
        keys: int,
        skew: float,
        total: int | None,
        splits: int,
        seed: int,
        start_ms: int,
        make: Make | None,
    ) -> None:
        self._records_per_s = records_per_s
        self._keys, self._skew, self._seed = keys, skew, seed
        self._total, self._splits, self._start_ms = total, splits, start_ms
        self._make = make
        self._made_schema: pa.Schema | None = None
        self._began_ms: int | None = None

    def describe(self) -> str:
        pace = "as fast as can be" if self._records_per_s is None else f"{self._records_per_s:g}/s"
        return f"made-up records, {pace}, {self._keys} keys"

    def schema(self) -> pa.Schema:
        if self._make is None:
            return SCHEMA
        if self._made_schema is None:
            sample = self._rows(0, np.arange(16, dtype=np.int64))
            self._made_schema = self._apply(sample).schema.remove_metadata()
        return self._made_schema

    def plan(self, position: Any, limit: Limit) -> Offer:
        began_ms, first = self._at(position, limit.now_ms)
        due = self._due(limit.now_ms - began_ms, first + 2 * limit.records)
        last = min(due, first + limit.records)
        return Offer(
            ranges=list(self._ranges(first, last, limit.tasks)) if last > first else [],
            position={"began_ms": began_ms, "next": max(first, last)},
            backlog=max(due - last, 0),
            exhausted=self._total is not None and last >= self._total,
            splits=[f"{split:04d}" for split in range(self._splits)],
        )

    def _at(self, position: Any, now_ms: int) -> tuple[int, int]:
        """When it all began, and the next record.

        Before a first epoch is planned there is no position: then this object remembers.
        """
        if position is not None:
            return int(position["began_ms"]), int(position["next"])
        if self._began_ms is None or self._began_ms > now_ms:
            self._began_ms = now_ms
        return self._began_ms, 0

    def _due(self, passed_ms: int, unlimited: int) -> int:
        """How many records should be out by now; the first is due at once."""
        if self._records_per_s is None:
            due = unlimited if self._total is None else self._total
        else:
            due = 1 + int(passed_ms * self._records_per_s / 1000)
        return due if self._total is None else min(due, self._total)

    def _ranges(self, first: int, last: int, tasks: int) -> Iterator[Range]:
        """Numbers are dealt to splits in turn: number n is offset n // splits of split n % splits."""
        for split in range(self._splits):
            start = max(0, -((split - first) // self._splits))
            end = max(0, -((split - last) // self._splits))
            pieces = max(1, min(-(-tasks // self._splits), (end - start) // _LEAST_ROWS))
            for piece in range(pieces):
                one = start + (end - start) * piece // pieces
                other = start + (end - start) * (piece + 1) // pieces
                if other > one:
                    yield Range(f"{split:04d}", one, other, records=other - one)

    def read(self, piece: Range, reading: Reading) -> Iterator[pa.Table]:
        for start in range(piece.start, piece.end, TABLE_ROWS):
            offsets = np.arange(start, min(start + TABLE_ROWS, piece.end), dtype=np.int64)
            table = self._rows(int(piece.split), offsets)
            yield table if self._make is None else conform(self._apply(table), self.schema())

    def _rows(self, split: int, offsets: npt.NDArray[np.int64]) -> pa.Table:
        ids = offsets * self._splits + split
        words = ids.astype(np.uint64)
        step_ms = 1.0 if self._records_per_s is None else 1000.0 / self._records_per_s
        ts = self._start_ms + np.floor(ids * step_ms).astype(np.int64)
        columns = [
            pa.array(ids),
            pa.array(_keys(_hash(words, 2 * self._seed), self._keys, self._skew)),
            pa.array(ts, pa.int64()).view(pa.timestamp("ms")),
            pa.array(_uniform(_hash(words, 2 * self._seed + 1))),
        ]
        return pa.Table.from_arrays(columns, schema=SCHEMA)

    def _apply(self, table: pa.Table) -> pa.Table:
        assert self._make is not None
        try:
            made = self._make(table)
        except Exception as error:
            raise UserCodeError(
                f"The function make= of rate raised {type(error).__name__}: {error}",
                detail=traceback.format_exc(limit=-5),
            ) from error
        if not isinstance(made, pa.Table):
            raise UserCodeError(
                f"The function make= of rate must return a pyarrow.Table, not {type(made).__name__}."
            )
        return made


def _hash(numbers: Words, seed: int) -> Words:
    """splitmix64 of each number: independent of all others, and alike on every machine.

    >>> int(_hash(np.array([0], dtype=np.uint64), 0)[0])
    16294208416658607535
    """
    origin = np.uint64((seed * 0xD1342543DE82EF95) & 0xFFFFFFFFFFFFFFFF)
    z: Words = origin + (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _uniform(words: Words) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1), from the upper 53 bits."""
    return (words >> np.uint64(11)).astype(np.float64) * _UNIT


def _keys(words: Words, keys: int, skew: float) -> npt.NDArray[np.int64]:
    """Keys below `keys`, the small ones the more often the greater the skew."""
    share = _uniform(words)
    if skew:
        share = _power(share, 1.0 / (1.0 - skew))
    return np.minimum((share * keys).astype(np.int64), keys - 1)


def _power(base: npt.NDArray[np.float64], exponent: float) -> npt.NDArray[np.float64]:
    """base ** exponent, to a 256th, by products and square roots alone: `pow` differs from machine to machine."""
    whole, part = divmod(round(exponent * 256), 256)
    result = np.ones_like(base)
    square = base.copy()
    while whole:
        if whole & 1:
            result = result * square
        square = square * square
        whole >>= 1
    root = base
    for bit in (128, 64, 32, 16, 8, 4, 2, 1):
        root = np.sqrt(root)
        if part & bit:
            result = result * root
    return result
