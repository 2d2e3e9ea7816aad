"""Which executor each shard runs on. Pure: what is live and what was, in; where each shard goes, out.

A shard stays where it is while its executor lives. One that must move goes to an executor on the host
that has its version, where there is one; otherwise to the executor with the fewest shards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

Shard = tuple[str, int]
"""The uid of a stage, and the number of a shard."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """An executor for each shard: (id, host)."""

    executors: Mapping[Shard, tuple[str, str]]

    def location(self, uid: str, shard: int) -> str | None:
        """The executor as Spark names a preferred location; None: anywhere."""
        found = self.executors.get((uid, shard))
        return None if found is None else f"executor_{found[1]}_{found[0]}"

    def executor(self, uid: str, shard: int) -> str | None:
        """The id of a shard's executor."""
        found = self.executors.get((uid, shard))
        return None if found is None else found[0]


def place(
    shards: Sequence[Shard],
    live: Sequence[tuple[str, str]],
    before: Placement,
    homes: Mapping[Shard, str],
    host_of: Mapping[str, str],
) -> Placement:
    """Where each shard runs.

    Args:
        shards: all of them, in order.
        live: executors as (id, host).
        before: where they ran last.
        homes: the host that has each shard's version, as its reports name it.
        host_of: the host of an executor, as reports name it; not known before something ran there.
    """
    if not live:
        return Placement({})
    alive = set(live)
    placed: dict[Shard, tuple[str, str]] = {}
    for shard in shards:
        was = before.executors.get(shard)
        if was in alive and was is not None:
            placed[shard] = was
    for shard in shards:
        if shard not in placed:
            placed[shard] = _choose(shard, live, placed, homes, host_of)
    return Placement(placed)


def _choose(
    shard: Shard,
    live: Sequence[tuple[str, str]],
    placed: Mapping[Shard, tuple[str, str]],
    homes: Mapping[Shard, str],
    host_of: Mapping[str, str],
) -> tuple[str, str]:
    home = homes.get(shard)
    at_home = [e for e in live if home is not None and home in (host_of.get(e[0]), e[1])]
    loads = {e: 0 for e in live}
    for executor in placed.values():
        loads[executor] += 1
    return min(at_home or live, key=lambda e: (loads[e], e))
