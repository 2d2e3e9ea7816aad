"""The pipelines that are measured, written as a user would write them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

import holdfast as hf


class Balance(hf.KeyedProcess):
    """The benchmark's user function: the limit runs this very method."""

    total = hf.ValueState(float, default=0.0)

    def process(self, account: int, transfer: dict[str, Any], ctx: hf.Context) -> Iterator[dict[str, Any]]:
        self.total.value += transfer["v"]
        yield {"account": account, "balance": self.total.value}


def keyed_python(source: hf.Source, sink: hf.Sink) -> hf.Pipeline:
    """A Python function with state for each key, one output a record."""
    pipeline = hf.Pipeline("keyed-python")
    pipeline.read("events", source).key_by("k").process("balance", Balance()).write("balances", sink)
    return pipeline


def aggregate(source: hf.Source, sink: hf.Sink) -> hf.Pipeline:
    """Sum and count for each key."""
    pipeline = hf.Pipeline("aggregate")
    stream = pipeline.read("events", source).key_by("k")
    stream.aggregate("totals", total=hf.sum("v"), n=hf.count()).write("sums", sink)
    return pipeline


class Silence(hf.Source):
    """A source that never has anything, and never says that it ends."""

    def schema(self) -> pa.Schema:
        return pa.schema({"k": pa.int64(), "v": pa.float64()})

    def plan(self, position: Any, limit: hf.Limit) -> hf.Offer:
        return hf.Offer([], None)

    def read(self, piece: hf.Range, reading: hf.Reading) -> Iterator[pa.Table]:
        return iter(())


class Growing(hf.Source):
    """First every key once, in an order that is all mixed up; then records of keys drawn from all of them.

    The first `keys` records make the state as large as it is wanted; what comes after is the same work
    whatever its size.
    """

    def __init__(self, keys: int, fill_epoch: int, epoch: int, epochs: int) -> None:
        self._keys, self._fill_epoch, self._epoch = keys, fill_epoch, epoch
        self._end = keys + epoch * epochs

    def schema(self) -> pa.Schema:
        return pa.schema({"k": pa.int64(), "ts": pa.timestamp("ms"), "v": pa.float64()})

    def plan(self, position: Any, limit: hf.Limit) -> hf.Offer:
        start = int(position or 0)
        size = self._fill_epoch if start < self._keys else self._epoch
        end = min(start + size, self._keys if start < self._keys else self._end)
        step = max(1, -(-(end - start) // limit.tasks))
        cuts = range(start, end, step)
        ranges = [hf.Range("0", a, min(a + step, end), {}, min(a + step, end) - a) for a in cuts]
        return hf.Offer(ranges, end, backlog=self._end - end, exhausted=end >= self._end)

    def read(self, piece: hf.Range, reading: hf.Reading) -> Iterator[pa.Table]:
        offsets = np.arange(piece.start, piece.end, dtype=np.uint64)
        mixed = (offsets * np.uint64(0x9E3779B97F4A7C15)) ^ (offsets >> np.uint64(7))
        drawn = (mixed >> np.uint64(11)) % np.uint64(self._keys)
        keys = np.where(offsets < self._keys, (offsets * np.uint64(7919)) % np.uint64(self._keys), drawn)
        times = pa.array((1_700_000_000_000 + offsets).astype(np.int64), pa.timestamp("ms"))
        yield pa.table(
            {"k": keys.astype(np.int64), "ts": times, "v": (mixed & np.uint64(1023)).astype(np.float64)}
        )
