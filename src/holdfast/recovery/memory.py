"""What a pipeline's directory remembers of recovery: what was learned, and each recovery's estimate and outcome.

    recovery.json                 what was learned, kept across runs
    recoveries/<epoch>.json       a recovery as the run saw it, by the epoch whose commit ended it
    recoveries/<epoch>.drill.json the same as a drill saw it, which knows the fault and when it came

For people and for the guard: nothing is recovered from these files, they are not synced, and one that can't be read
taught nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container, Iterator
from pathlib import Path

import msgspec

from holdfast.faults.kinds import Fault
from holdfast.recovery.estimate import ENVIRONMENT, LIKELY, Learned, Memory, Outcome, split

MEMORY = "recovery.json"
OUTCOMES = "recoveries"
_MOST_OUTCOMES = 1000


def read_memory(directory: Path) -> Memory | None:
    """What was learned in earlier runs; a file that can't be read is one that taught nothing."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((directory / MEMORY).read_bytes(), type=Memory)
    return None


def write_memory(directory: Path, memory: Memory) -> None:
    """Keep what was learned. A disk that does not take it is no reason to end."""
    with contextlib.suppress(OSError):
        temporary = directory / f".{MEMORY}.{os.getpid()}"
        temporary.write_bytes(msgspec.json.encode(memory))
        os.replace(temporary, directory / MEMORY)


def taught_by(memory: Memory, by: Memory) -> Memory:
    """What is known after hearing of another directory's recoveries, of the same pipeline. Pure.

    How long what died takes to stand again is learned, and how replays compare with epochs. How fast a store or a
    disk is, and what an epoch takes, is not: each directory has its own, and sees that by itself.
    """
    seen = dict(memory.seen)
    for name, told in by.seen.items():
        if name == "replay" or name.startswith((ENVIRONMENT, LIKELY)):
            mine = seen.get(name)
            fits = mine is not None and len(mine.xy) == len(told.xy)
            seen[name] = mine.and_(told) if mine is not None and fits else told
    faults = {**memory.counts, **by.counts}
    counts = {fault: memory.counts.get(fault, 0) + by.counts.get(fault, 0) for fault in faults}
    return msgspec.structs.replace(memory, seen=seen, counts=counts)


def teach(directory: Path, by: Path) -> int:
    """Let one directory learn from the recoveries of another, as a drill's: how many those were."""
    told = read_memory(by)
    if told is None:
        return 0
    write_memory(directory, taught_by(read_memory(directory) or Memory(), told))
    return sum(told.counts.values())


def read_learned(directory: Path) -> Learned:
    """What a pipeline has learned so far."""
    return Learned(read_memory(directory))


def write_outcome(directory: Path, outcome: Outcome) -> None:
    """Leave what a recovery took: a run's own record, or a drill's beside it, from which the run learns."""
    with contextlib.suppress(OSError):
        folder = directory / OUTCOMES
        folder.mkdir(exist_ok=True)
        suffix = ".drill.json" if outcome.by == "drill" else ".json"
        temporary = folder / f".{outcome.epoch:08d}{suffix}.{os.getpid()}"
        temporary.write_bytes(msgspec.json.encode(outcome))
        os.replace(temporary, folder / f"{outcome.epoch:08d}{suffix}")
        for old in sorted(folder.glob("*.json"))[: -2 * _MOST_OUTCOMES]:
            old.unlink(missing_ok=True)


def read_newest(directory: Path) -> Outcome | None:
    """The last recovery that a run saw."""
    folder = directory / OUTCOMES
    found = max((p for p in folder.glob("*.json") if not p.name.endswith(".drill.json")), default=None)
    return None if found is None else read_outcome(found)


def read_outcome(path: Path) -> Outcome | None:
    """One outcome; None where there is none that can be read."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(path.read_bytes(), type=Outcome)
    return None


def drilled(directory: Path, known: Container[str]) -> Iterator[tuple[Outcome, Fault, Outcome | None]]:
    """What a drill measured and is not known yet: that, which fault it was, and what the run saw itself of it."""
    folder = directory / OUTCOMES
    for path in sorted(folder.glob("*.drill.json")) if folder.is_dir() else []:
        key = path.name.split(".")[0]
        told = None if key in known else read_outcome(path)
        fault = None if told is None else Fault.named(told.fault)
        if told is not None and fault is not None:
            yield told, fault, read_outcome(folder / f"{key}.json")


def read_outcomes(directory: Path) -> list[Outcome]:
    """Every recovery of a pipeline, what a drill measured in front of what the run saw itself."""
    folder = directory / OUTCOMES
    found: dict[str, Outcome] = {}
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        outcome, key = read_outcome(path), path.name.split(".")[0]
        if outcome is None or outcome.by == "drill":
            continue
        told = read_outcome(folder / f"{key}.drill.json")
        found[key] = outcome if told is None else _joined(told, outcome)
    for path in folder.glob("*.drill.json"):
        told = read_outcome(path)
        if told is not None:
            found.setdefault(path.name.split(".")[0], told)
    return [found[key] for key in sorted(found)]


def _joined(told: Outcome, own: Outcome) -> Outcome:
    """A drill's time, in the parts that the run saw; it may have taken the fault for another one."""
    parts = split(told.took_s, told.estimated.detection, own.measured.loading, own.measured.recomputing)
    caught_up_s = own.caught_up_s if told.caught_up_s is None else told.caught_up_s
    return msgspec.structs.replace(told, measured=parts, caught_up_s=caught_up_s)
