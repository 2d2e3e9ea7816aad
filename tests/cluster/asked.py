"""A small pipeline without an end that asks a world which never gives the same answer twice, for faults."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import holdfast as hf


class Total(hf.KeyedProcess):
    """What was answered for a key, all in all."""

    total = hf.ValueState(int, default=0)

    def process(self, key: int, record: dict[str, Any], ctx: hf.Context) -> Iterator[dict[str, Any]]:
        self.total.value += record["said"]
        yield {"id": record["id"], "third": key % 3}


async def ask(record: dict[str, Any]) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {**record, "said": time.time_ns() % 1_000_000}


pipeline = hf.Pipeline("asked")
answered = pipeline.read("numbers", hf.rate(400, keys=40)).async_map(ask, uid="first", timeout="2s")
answered.write("every-answer", hf.memory())
again = answered.key_by("key").process("totals", Total()).async_map(ask, uid="second", timeout="2s")
again.key_by("third").aggregate("thirds", s=hf.sum("said")).write("third-sums", hf.memory())
