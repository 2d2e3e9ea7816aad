"""Two keyed stages, one behind the other: what each device says, then what each region is like.

    holdfast run examples/two_stages.py --epochs 20
    holdfast plan examples/two_stages.py --svg two_stages.svg

The first stage smooths the temperature of each device and passes it on only when it has moved; the second
aggregates devices by region. Both run in one Spark job an epoch, and both keep their state from epoch to
epoch. Output: out/regions (Parquet).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

import holdfast as hf

REGIONS = np.array(["north", "east", "south", "west"])
DEVICES = 2_000


def readings(table: pa.Table) -> pa.Table:
    """The generator's rows as readings: each device near its region's temperature, with noise."""
    device = table["key"].to_numpy()
    region = device % len(REGIONS)
    warmth = 12.0 + 4.0 * region + 10.0 * (table["value"].to_numpy() - 0.5)
    return pa.table({"device": device, "region": REGIONS[region], "celsius": np.round(warmth, 2)})


class Smooth(hf.KeyedProcess):
    """A device's temperature without its noise; told again when it has moved by half a degree."""

    celsius = hf.ValueState(float)
    told = hf.ValueState(float)

    def process(self, device: int, reading: dict[str, Any], ctx: hf.Context) -> Iterator[dict[str, Any]]:
        before = self.celsius.value
        self.celsius.value = reading["celsius"] if before is None else 0.9 * before + 0.1 * reading["celsius"]
        if self.told.value is None or abs(self.celsius.value - self.told.value) >= 0.5:
            self.told.value = self.celsius.value
            yield {"device": device, "region": reading["region"], "celsius": self.celsius.value}


def build(rate: float | None = 10_000, out: str = "out/regions", total: int | None = None) -> hf.Pipeline:
    """The pipeline, at a rate of readings a second (None: as fast as they are taken)."""
    made = hf.Pipeline("two-stages")
    (
        made.read("readings", hf.rate(rate, keys=DEVICES, total=total, make=readings))
        .key_by("device")
        .process("devices", Smooth())
        .key_by("region")
        .aggregate(
            "regions",
            told=hf.count(),
            devices=hf.approx_distinct("device"),
            mean=hf.mean("celsius"),
            coldest=hf.min("celsius"),
            warmest=hf.max("celsius"),
        )
        .write("region-figures", hf.parquet(out))
    )
    return made


pipeline = build()

if __name__ == "__main__":
    pipeline.run()
