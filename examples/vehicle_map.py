"""A road map that keeps itself up to date from what vehicles report.

Twenty thousand vehicles drive through a country of 330 km by 330 km and report where they are, how fast, and
now and then what they saw: a sign, a pothole, a closure, or that one which the map knows is no longer there.
The pipeline keeps one state for each map tile of 5 km (reports, smoothed speed, the road features in it) and
flags a change once several vehicles agree. A second branch keeps figures for each vehicle.

    holdfast demo                                   # on a small cluster; an executor and the driver are killed
    holdfast run examples/vehicle_map.py            # until Ctrl-C; started again it goes on where it stopped
    holdfast plan examples/vehicle_map.py --svg map.svg
    holdfast state .holdfast/vehicle-map --operator tiles --key 32,30

Output: out/vehicle_map/tiles and /vehicles (Parquet), out/vehicle_map/changes (JSON lines).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

import holdfast as hf

COUNTRY_M = 330_000
TILE_M = 5_000
VEHICLES = 20_000

CONFIRMED_AT = 3
"""So many more vehicles saw a feature than missed it: then it is on the map."""
PUBLISH_EVERY_MS = 1_000
"""A tile is published at most so often, and at once when something on it changed."""

CITIES_KM = np.array(
    [
        (92, 38),
        (214, 52),
        (292, 118),
        (160, 150),
        (42, 168),
        (252, 214),
        (118, 246),
        (54, 300),
        (206, 292),
        (304, 296),
    ],
    dtype=float,
)
ROADS = np.array(
    [
        (0, 1),
        (1, 2),
        (0, 3),
        (1, 3),
        (0, 4),
        (3, 4),
        (3, 5),
        (2, 5),
        (3, 6),
        (4, 6),
        (6, 7),
        (6, 8),
        (5, 8),
        (5, 9),
        (8, 9),
        (4, 7),
    ]
)
BENDS = np.array(
    [0.1, -0.15, 0.05, 0.1, -0.2, 0.08, -0.06, 0.14, 0.12, -0.1, 0.16, 0.08, -0.12, 0.1, -0.16, 0.18]
)
FEATURES = np.array(["sign", "pothole", "closure"])


def mixed(numbers: np.ndarray, salt: int) -> np.ndarray:
    """A hash of each number: the same on every machine, so that a report is the same whenever it is made."""
    z = (numbers.astype(np.uint64) + np.uint64(salt + 1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(numbers: np.ndarray, salt: int) -> np.ndarray:
    """A number in [0, 1) for each number."""
    return (mixed(numbers, salt) >> np.uint64(11)).astype(float) * 2.0**-53


def reports(table: pa.Table) -> pa.Table:
    """The generator's rows as vehicles' reports, all at once."""
    ids, vehicle = table["id"].to_numpy(), table["key"].to_numpy()
    at_s = (table["ts"].to_numpy().astype("datetime64[ms]").astype(np.int64) - 1_704_067_200_000) / 1000
    x, y, speed = drive(vehicle, at_s)
    observed, present, value = look(ids, x, y, at_s)
    return pa.table(
        {
            "vehicle": vehicle,
            "x_m": np.round(x, 1),
            "y_m": np.round(y, 1),
            "speed_kmh": np.round(speed, 1),
            "observed": observed,
            "present": present,
            "value": value,
            "tile_x": (x // TILE_M).astype(np.int64),
            "tile_y": (y // TILE_M).astype(np.int64),
        }
    )


def drive(vehicle: np.ndarray, at_s: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where each vehicle is at a time, and how fast: on a motorway, in a city, or somewhere in the country."""
    style, phase = uniform(vehicle, 1), uniform(vehicle, 2)
    on_road, in_city = style < 0.62, (style >= 0.62) & (style < 0.95)
    speed = np.where(on_road, 95, np.where(in_city, 30, 60)) + 30 * uniform(vehicle, 3)

    start, end, bend = (
        a[mixed(vehicle, 4) % np.uint64(len(ROADS))] for a in (ROADS[:, 0], ROADS[:, 1], BENDS)
    )
    (ax, ay), (bx, by) = CITIES_KM[start].T, CITIES_KM[end].T
    length_km = np.sqrt((bx - ax) ** 2 + (by - ay) ** 2)
    along = (phase * 2 + at_s * speed / 3600 / length_km) % 2
    u = np.where(along > 1, 2 - along, along)
    cx, cy = (ax + bx) / 2 - bend * (by - ay), (ay + by) / 2 + bend * (bx - ax)
    road_x = (1 - u) ** 2 * ax + 2 * u * (1 - u) * cx + u**2 * bx
    road_y = (1 - u) ** 2 * ay + 2 * u * (1 - u) * cy + u**2 * by

    home_x, home_y = CITIES_KM[mixed(vehicle, 5) % np.uint64(len(CITIES_KM))].T
    spread_x, spread_y = (
        uniform(vehicle, s) + uniform(vehicle, s + 1) + uniform(vehicle, s + 2) - 1.5 for s in (6, 9)
    )
    city_x, city_y = home_x + 13 * spread_x + along, home_y + 13 * spread_y

    wild_x, wild_y = uniform(vehicle, 12) * 330, uniform(vehicle, 13) * 330
    x = np.where(on_road, road_x, np.where(in_city, city_x, wild_x)) * 1000
    y = np.where(on_road, road_y, np.where(in_city, city_y, wild_y)) * 1000
    return np.clip(x, 0, COUNTRY_M - 1), np.clip(y, 0, COUNTRY_M - 1), speed


def look(
    ids: np.ndarray, x: np.ndarray, y: np.ndarray, at_s: np.ndarray
) -> tuple[pa.Array, pa.Array, pa.Array]:
    """What each vehicle saw in its square kilometre: a feature that is there, one that has gone, or nothing.

    One square in twelve has a feature, there for half a minute or more and then gone for as long. Three readings
    in a hundred are wrong.
    """
    square = mixed((x // 1000) * 1000 + y // 1000, 21)
    period_s = 25 + (square >> np.uint64(32)) % np.uint64(60)
    there = ((at_s + (square >> np.uint64(16)) % np.uint64(500)) // period_s) % 2 == 0
    wrong = uniform(ids, 22) < 0.03
    noticed = (square % np.uint64(12) == 0) & (uniform(ids, 23) < 0.5)
    kind = ((square >> np.uint64(8)) % np.uint64(3)).astype(np.int64)
    value = np.choose(
        kind, [60 + 20 * ((square >> np.uint64(40)) % np.uint64(4)), 3 + square % np.uint64(9), 1 + kind * 0]
    )
    return (
        pa.array(FEATURES[kind], mask=~noticed),
        pa.array(there ^ wrong, mask=~noticed),
        pa.array(value.astype(float), mask=~noticed),
    )


class TileMap(hf.KeyedProcess):
    """One tile of the map."""

    side_outputs = ("changes",)

    reports = hf.ValueState(int, default=0)
    speed_kmh = hf.ValueState(float, default=0.0)
    published_ms = hf.ValueState(int, default=0)
    features = hf.MapState(str, {"score": int, "confirmed": bool, "value": float})

    def process(
        self, tile: tuple[int, int], report: dict[str, Any], ctx: hf.Context
    ) -> Iterator[dict[str, Any]]:
        self.reports.value += 1
        weight = max(0.02, 1 / self.reports.value)
        self.speed_kmh.value += weight * (report["speed_kmh"] - self.speed_kmh.value)
        changed = report["observed"] is not None and self.weigh(tile, report, ctx)
        if changed or ctx.now_ms - self.published_ms.value >= PUBLISH_EVERY_MS:
            self.published_ms.value = ctx.now_ms
            yield {
                "tile_x": tile[0],
                "tile_y": tile[1],
                "at_ms": ctx.now_ms,
                "reports": self.reports.value,
                "speed_kmh": round(self.speed_kmh.value, 1),
                "features": len(self.features),
            }

    def weigh(self, tile: tuple[int, int], report: dict[str, Any], ctx: hf.Context) -> bool:
        """Weigh an observation against what the map says; whether the map changed."""
        name = f"{report['observed']} at {int(report['x_m'] // 1000)},{int(report['y_m'] // 1000)} km"
        known = self.features.get(name)
        was, score = (known["confirmed"], known["score"]) if known else (False, 0)
        score = min(score + 1, CONFIRMED_AT + 2) if report["present"] else max(score - 1, 0)
        confirmed = score > 0 if was else score >= CONFIRMED_AT
        if score:
            self.features[name] = {"score": score, "confirmed": confirmed, "value": report["value"]}
        elif known:
            del self.features[name]
        if confirmed != was:
            change = {"at_ms": ctx.now_ms, "tile_x": tile[0], "tile_y": tile[1], "feature": name}
            ctx.emit(
                "changes", {**change, "change": "new" if confirmed else "gone", "value": report["value"]}
            )
        return bool(confirmed != was)


def build(rate: float | None = 20_000, out: str = "out/vehicle_map", total: int | None = None) -> hf.Pipeline:
    """The pipeline, at a rate of reports a second (None: as fast as they are taken), writing below a folder."""
    made = hf.Pipeline("vehicle-map")
    stream = made.read("reports", hf.rate(rate, keys=VEHICLES, total=total, make=reports))

    tiles = stream.key_by("tile_x", "tile_y").process("tiles", TileMap())
    tiles.write("tile-updates", hf.parquet(f"{out}/tiles"))
    tiles.side("changes").write("road-changes", hf.jsonl(f"{out}/changes"))

    vehicles = stream.key_by("vehicle").aggregate(
        "vehicles", reports=hf.count(), speed_kmh=hf.mean("speed_kmh"), x_m=hf.last("x_m"), y_m=hf.last("y_m")
    )
    vehicles.write("vehicle-figures", hf.parquet(f"{out}/vehicles"))
    return made


pipeline = build()
busy = build(rate=40_000)
"""Twice the reports: `holdfast drill examples/vehicle_map.py:busy` has more to replay."""

if __name__ == "__main__":
    pipeline.run()
