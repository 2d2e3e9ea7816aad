"""A small pipeline without an end, for faults: two keyed stages, each with a sink, over numbered records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import holdfast as hf


class Count(hf.KeyedProcess):
    """How often a key came, and which values it brought."""

    n = hf.ValueState(int, default=0)
    seen = hf.MapState(int, float)

    def process(self, key: int, record: dict[str, Any], ctx: hf.Context) -> Iterator[dict[str, Any]]:
        self.n.value += 1
        self.seen[record["id"] % 5] = record["value"]
        yield {"id": record["id"], "key": key, "n": self.n.value, "half": key % 3}


pipeline = hf.Pipeline("counted")
counted = pipeline.read("numbers", hf.rate(400, keys=40)).key_by("key").process("counts", Count())
counted.write("every-count", hf.memory())
counted.key_by("half").aggregate("halves", n=hf.count(), most=hf.max("n")).write("half-counts", hf.memory())
