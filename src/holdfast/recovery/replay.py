"""What a replay takes: which shards, which copies, which sources, in which jobs. Pure.

A shard that lost its version needs every record it was sent since the checkpoint. Those come from sources,
which can be read again, and from earlier keyed stages, which must be run again: all shards of those take part,
on scratch copies where they still have their own version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from holdfast.engine.program import Part, Program

MAX_RECORDS = 2_000_000
"""So many records one job of a replay reads, unless a single epoch has more."""
MAX_EPOCHS = 500
"""So many epochs one job replays: each has an inbox of its own."""


@dataclasses.dataclass(frozen=True)
class Needs:
    """Who takes part in a replay."""

    real: Part
    scratch: Part
    sources: frozenset[str]

    @property
    def parts(self) -> list[tuple[str, int]]:
        """Every shard that takes part, by uid and number."""
        return [(uid, shard) for uid, shards in self.only.items() for shard in shards]

    @property
    def only(self) -> Part:
        """Every shard that takes part."""
        uids = [*self.real, *(u for u in self.scratch if u not in self.real)]
        return {u: sorted([*self.real.get(u, []), *self.scratch.get(u, [])]) for u in uids}


def needs(program: Program, lacking: Iterable[tuple[str, int]]) -> Needs:
    """Who must take part so that these shards can be rebuilt."""
    real: Part = {}
    for uid, shard in sorted(lacking):
        real.setdefault(uid, []).append(shard)
    scratch: Part = {}
    sources: set[str] = set()
    wanted = {s.id for s in program.stages.keyed if program.uid(s) in real}
    for stage in reversed(program.stages.keyed):
        if stage.id not in wanted:
            continue
        for feeder in program.stages.feeding(stage):
            if feeder.reads:
                sources.add(program.stages.node(feeder.root).uid)
                continue
            wanted.add(feeder.id)
            uid = program.uid(feeder)
            own = real.get(uid, [])
            others = [n for n in range(program.parallelism) if n not in own]
            if others:
                scratch[uid] = others
    return Needs(real, scratch, frozenset(sources))


@dataclasses.dataclass(frozen=True)
class Load:
    """What one epoch costs to replay, and the schemas it was run with."""

    epoch: int
    records: int
    schemas: dict[str, str]


def jobs(
    loads: Sequence[Load], max_records: int = MAX_RECORDS, max_epochs: int = MAX_EPOCHS
) -> list[list[int]]:
    """Epochs in order, cut into jobs of bounded size. A job has one set of schemas: state is typed by them.

    >>> jobs([Load(e, 10, {}) for e in range(1, 6)], max_records=25)
    [[1, 2], [3, 4], [5]]
    """
    made: list[list[int]] = []
    records = 0
    for before, load in zip([None, *loads], loads, strict=False):
        fits = records + load.records <= max_records and bool(made) and len(made[-1]) < max_epochs
        if fits and before is not None and before.schemas == load.schemas:
            made[-1].append(load.epoch)
            records += load.records
        else:
            made.append([load.epoch])
            records = load.records
    return made


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a recovery is."""

    lacking: int
    loaded: int = 0
    to_load: int = 0
    loaded_bytes: int = 0
    replayed: int = 0
    to_replay: int = 0
    took_s: float = 0.0
    replaying_s: float = 0.0

    def left_s(self) -> float | None:
        """About how long the rest of the replay takes, from what has been replayed; None before that is known."""
        if not self.replayed or not self.to_replay:
            return None
        return self.replaying_s / self.replayed * (self.to_replay - self.replayed)

    def sentence(self) -> str:
        """What to tell people."""
        text = f"recovering {self.lacking} shards: {self.loaded} of {self.to_load} loaded"
        if self.to_replay:
            text += f", {self.replayed} of {self.to_replay} epochs replayed"
            left = self.left_s()
            if left is not None:
                text += f", about {left:.0f} s left"
        return text


@dataclasses.dataclass
class Took:
    """What bringing shards back has taken since somebody asked last, in seconds, and how much it was."""

    checked_s: float = 0.0
    """Asking every shard whether it stands, which loads those that are on the host's disk."""
    fetched_s: float = 0.0
    fetched_bytes: int = 0
    fetched_files: int = 0
    replayed_s: float = 0.0
    replayed_epochs: int = 0
    replayed_records: int = 0
    rebuilt: int = 0
    """Shards that had lost their version."""
    share: float = 1.0
    """Of all shards, those that took part in a replay."""
