"""Monitoring: machines report their load, and whoever is on duty wants to hear of trouble once, and of its end.

    holdfast run examples/monitoring.py --epochs 20
    holdfast chaos examples/monitoring.py --trials 10       # and nothing is told twice, whatever dies

For each machine the pipeline keeps its last readings, how many of each service's it has seen, and the incident that
is open, if one is. An incident gets an id of its own (`ctx.uuid`, so that a replay gives it the same one); readings that
are hard to believe go to a side output. Output: out/incidents and out/doubtful (JSON lines).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

import holdfast as hf

MACHINES = 1_500
SERVICES = np.array(["web", "search", "billing", "mail", "reports"])
WATCHED = 5
"""So many readings decide."""
HIGH, LOW = 0.8, 0.6


def loads(table: pa.Table) -> pa.Table:
    """The generator's rows as readings: now and then a machine has a bad spell."""
    machine, noise = table["key"].to_numpy(), table["value"].to_numpy()
    spell = (table["id"].to_numpy() // (MACHINES * 20) + machine) % 7 == 0
    load = np.round(np.where(spell, 0.7 + 0.3 * noise, 0.7 * noise), 3)
    load = np.where(noise > 0.999, 7.5, load)
    return pa.table({"machine": machine, "service": SERVICES[machine % len(SERVICES)], "load": load})


class Watch(hf.KeyedProcess):
    """Opens an incident when the last readings are high on average, and closes it when they are low."""

    last = hf.ListState(float)
    seen = hf.MapState(str, int)
    incident = hf.ValueState(str)
    side_outputs = ("doubtful",)

    def process(self, machine: int, reading: dict[str, Any], ctx: hf.Context) -> Iterator[dict[str, Any]]:
        service, load = reading["service"], reading["load"]
        if load > 1:
            ctx.emit("doubtful", reading)
            return
        self.seen[service] = self.seen.get(service, 0) + 1
        self.last.update([*self.last, load][-WATCHED:])
        mean = sum(self.last) / len(self.last)
        if self.incident.value is None and len(self.last) == WATCHED and mean >= HIGH:
            self.incident.value = str(ctx.uuid())
            yield self.told(machine, service, "opened", mean)
        elif self.incident.value is not None and mean <= LOW:
            yield self.told(machine, service, "closed", mean)
            self.incident.clear()

    def told(self, machine: int, service: str, what: str, mean: float) -> dict[str, Any]:
        """An incident as it is told."""
        return {
            "incident": self.incident.value,
            "machine": machine,
            "service": service,
            "what": what,
            "load": round(mean, 3),
            "readings": self.seen[service],
        }


def build(rate: float | None = 5_000, out: str = "out", total: int | None = None) -> hf.Pipeline:
    """The pipeline, at a rate of readings a second (None: as fast as they are taken), writing below a folder."""
    made = hf.Pipeline("monitoring")
    watched = (
        made.read("readings", hf.rate(rate, keys=MACHINES, total=total, make=loads))
        .key_by("machine")
        .process("watch", Watch())
    )
    watched.write("incidents", hf.jsonl(f"{out}/incidents"))
    watched.side("doubtful").write("doubtful", hf.jsonl(f"{out}/doubtful"))
    return made


pipeline = build()

if __name__ == "__main__":
    pipeline.run()
