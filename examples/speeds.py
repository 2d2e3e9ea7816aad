"""How fast traffic is on each road, in windows of five seconds of the time at which speeds were measured.

    holdfast run examples/speeds.py --epochs 40
    holdfast status .holdfast/speeds                # how far event time is behind, and what came too late
    holdfast drill examples/speeds.py --deadline 30s --faults executor-kill,driver-kill --trials 4

Vehicles measure their speed and send it when they can: most within a second, some within five, and one in five
hundred only when it is out of the tunnel. A window is emitted when the watermark has passed it, two seconds behind the
newest report, and comes again for a report that is up to three seconds later than that. What comes later still is
written apart, and nothing is dropped. Output: out/speeds/roads (Parquet), out/speeds/late (JSON lines).
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

import holdfast as hf

ROADS = 200
TUNNEL_MS = 30_000


def reports(table: pa.Table) -> pa.Table:
    """The generator's rows as vehicles' reports, in the order in which they arrive."""
    ids, vehicle, noise = (table[name].to_numpy() for name in ("id", "key", "value"))
    arrived_ms = table["ts"].to_numpy().astype("datetime64[ms]").astype(np.int64)
    road = vehicle % ROADS
    usual_kmh = 30.0 + 10.0 * (road % 8)
    return pa.table(
        {
            "road": np.char.mod("road-%03d", road),
            "measured_at": (arrived_ms - delays_ms(ids)).astype("datetime64[ms]"),
            "speed_kmh": np.round(usual_kmh * (0.5 + 0.6 * noise), 1),
        }
    )


def delays_ms(ids: np.ndarray) -> np.ndarray:
    """How long each report was on its way: a hash of its number, so that it is the same whenever it is made."""
    chance = (ids * 7_919 + 12_345) % 10_007
    return np.where(chance < 20, TUNNEL_MS, np.where(chance < 500, 10 * chance, chance // 10))


def build(rate: float | None = 5_000, out: str = "out/speeds", total: int | None = None) -> hf.Pipeline:
    """The pipeline, at a rate of reports a second (None: as fast as they are taken), writing below a folder."""
    made = hf.Pipeline("speeds")
    roads = (
        made.read("reports", hf.rate(rate, keys=20_000, total=total, make=reports))
        .event_time("measured_at", out_of_order="2s")
        .key_by("road")
        .window(hf.tumbling("5s"))
        .allowed_lateness("3s")
        .aggregate(
            "roads",
            reports=hf.count(),
            mean_kmh=hf.mean("speed_kmh"),
            slowest_kmh=hf.min("speed_kmh"),
        )
    )
    roads.write("road-speeds", hf.parquet(f"{out}/roads"))
    roads.side("late").write("late-reports", hf.jsonl(f"{out}/late"))
    return made


pipeline = build()

if __name__ == "__main__":
    pipeline.run()
