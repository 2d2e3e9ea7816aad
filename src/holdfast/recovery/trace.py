"""A run as it was, a line an epoch and a line a backup: what simulations and plots are made of.

The log is trimmed behind checkpoints; this is not. It is for people and tools: nothing is recovered from it, it
is not synced, and when it has grown too large its older half goes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

FILE = "trace.jsonl"
MOST_BYTES = 16 << 20


class EpochLine(msgspec.Struct, frozen=True, tag="epoch", tag_field="line", omit_defaults=True):
    """One epoch."""

    epoch: int
    at_ms: int
    """When it was decided."""
    records: int
    took_s: float
    """From its plan to its commit."""
    state_bytes: int = 0
    """Of all shards."""
    host_bytes: int = 0
    shard_bytes: int = 0
    new_bytes: int = 0
    """By how much the versions' files grew: what a backup would have to upload of this epoch."""
    estimate_s: float = 0.0
    bound_s: float = 0.0
    """Of the worst fault, after it."""
    fault: str = ""
    """Which one that is."""
    parts: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Detection, environment, loading and recomputing of that one, as estimated."""
    paused_s: float = 0.0
    """How long intake was paused before it."""


class BackupLine(msgspec.Struct, frozen=True, tag="backup", tag_field="line", omit_defaults=True):
    """One backup that ended."""

    epoch: int
    """Of the version that was backed up."""
    at_ms: int
    """When it was begun."""
    took_s: float
    new_bytes: int = 0
    size_bytes: int = 0
    failed: str = ""
    """Why, if it failed."""
    trigger: str = ""


Line = EpochLine | BackupLine


class Trace:
    """Appends to a pipeline's trace."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._encoder = msgspec.json.Encoder()

    def add(self, line: Line) -> None:
        """Write one line. A disk that does not take it is no reason to end."""
        try:
            with open(self._path, "ab") as file:
                file.write(self._encoder.encode(line) + b"\n")
                large = file.tell() > MOST_BYTES
            if large:
                self._halve()
        except OSError:
            return

    def _halve(self) -> None:
        data = self._path.read_bytes()
        kept = data[data.index(b"\n", len(data) // 2) + 1 :]
        temporary = self._path.with_suffix(".tmp")
        temporary.write_bytes(kept)
        os.replace(temporary, self._path)


def read_trace(directory: Path) -> Iterator[Line]:
    """The lines of a pipeline's trace; one that was cut off by a crash is passed over."""
    decoder = msgspec.json.Decoder(Line)
    try:
        with open(directory / FILE, "rb") as file:
            for line in file:
                try:
                    yield decoder.decode(line)
                except msgspec.DecodeError:
                    continue
    except FileNotFoundError:
        return
