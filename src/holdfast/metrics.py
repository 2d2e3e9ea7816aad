"""What a run is doing, as plain data: one `EpochFacts` an epoch, and the status that others may read.

`holdfast run` shows it, `--json` prints it, `holdfast status` reads it from the directory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import deque
from pathlib import Path

import msgspec

_NUMBERS = itertools.count()


class Watermark(msgspec.Struct, frozen=True):
    """How far event time is at one `event_time` operator, and who holds it."""

    ms: int | None
    """The watermark in milliseconds since 1970; None: nothing is known yet, or everything has ended."""
    lag_ms: int | None
    """How far it is behind the epoch's processing time."""
    split: str
    """The split that holds it back; empty where nobody does."""
    still_ms: int
    """For how long it has not moved, while epochs went on."""
    idle: list[str] = []
    """Splits that are not waited for."""
    ended: bool = False
    waits: bool = False
    """Whether nothing is read for it until others of its group are as far (`align`)."""
    waits_for: str = ""
    """Then: the operator of its group that is furthest behind, and what holds that back."""
    sources: dict[str, int] = {}
    """How far each source that is waited for is behind, by its slowest split; none of those of which nothing is known."""


class EpochFacts(msgspec.Struct, frozen=True):
    """What one epoch did. Times are milliseconds from the start of planning."""

    epoch: int
    now_ms: int
    records_in: int
    records_out: dict[str, int]
    bad_records: dict[str, int]
    backlog: int
    plan_ms: float
    run_ms: float
    commit_ms: float
    publish_ms: float
    state_keys: int
    state_bytes: int
    runs: int
    reloads: int
    worker_rss_bytes: int = 0
    """The memory of the largest worker that holds a shard."""
    late_records: dict[str, int] = {}
    """Records that came too late for an operator, by its uid."""
    untimed_records: dict[str, int] = {}
    """Records without a time, by uid of the `event_time` operator."""
    unseen_records: dict[str, int] = {}
    """Records that were in no result when their window was forgotten, by uid of the window."""
    watermarks: dict[str, Watermark] = {}
    """Event time, by uid of the operator that assigns it."""

    @property
    def latency_ms(self) -> float:
        """From the start of planning until the output was visible."""
        return self.plan_ms + self.run_ms + self.commit_ms + self.publish_ms


class Forecast(msgspec.Struct, frozen=True):
    """What recovery from one fault would take, in seconds."""

    detection_s: float
    environment_s: float
    loading_s: float
    recomputing_s: float
    bound_s: float
    """At the confidence of the settings."""
    bound_99_s: float
    seen: int = 0
    """From how many recoveries of this kind it was learned."""

    @property
    def estimate_s(self) -> float:
        """The sum of the four parts."""
        return self.detection_s + self.environment_s + self.loading_s + self.recomputing_s


class Recovered(msgspec.Struct, frozen=True):
    """A recovery that was: from the fault to the commit of the last epoch planned before it, in seconds."""

    fault: str
    at_ms: int
    """When the fault came, as far as it is known."""
    took_s: float
    estimate_s: float
    """What it was thought to take, and what it was not to pass, when the fault came."""
    bound_s: float
    deadline_s: float
    caught_up_s: float | None = None
    """From the fault until no more waited than before it; None: that is not so yet."""


class Status(msgspec.Struct):
    """Where a run stands: what `handle.status()` gives and `holdfast status` prints."""

    pipeline: str
    directory: str
    generation: int
    pid: int
    host: str
    state: str
    """starting, recovering, running, waiting, stopped or failed."""
    epoch: int = 0
    records: int = 0
    records_per_s: float = 0.0
    latency_ms: float = 0.0
    backlog: int = 0
    state_keys: int = 0
    state_bytes: int = 0
    bad_records: dict[str, int] = {}
    late_records: dict[str, int] = {}
    untimed_records: dict[str, int] = {}
    """Records without a time, by uid of the `event_time` operator."""
    unseen_records: dict[str, int] = {}
    """Records that were in no result when their window was forgotten, by uid of the window."""
    watermarks: dict[str, Watermark] = {}
    """Event time, by uid of the operator that assigns it."""
    policy: str = ""
    """When checkpoints are made."""
    checkpoint: int = 0
    """The number of the newest completed checkpoint; 0: none yet."""
    checkpoint_epoch: int = 0
    checkpoint_ms: int = 0
    """When it was completed."""
    checkpoint_bytes: int = 0
    checkpoint_new_bytes: int = 0
    """What was uploaded for it; the store had the rest."""
    checkpoint_failures: int = 0
    """Failed checkpoints since then."""
    recovered: Recovered | None = None
    """The last recovery; None: there was none."""
    rebuilt_shards: int = 0
    """How many shards were rebuilt for the last recovery of this run, and what that took: a part of it."""
    rebuild_ms: float = 0.0
    loaded_bytes: int = 0
    replayed_epochs: int = 0
    replay_ms: float = 0.0
    deadline_s: float = 0.0
    """Within which recovery must end; 0: no deadline."""
    bound_s: float = 0.0
    """What recovery from the worst fault would not pass now, and which fault that is."""
    worst_fault: str = ""
    forecasts: dict[str, Forecast] = {}
    """By fault: what recovery would take if it happened now."""
    feasible: bool = True
    """Whether the deadline can be held at all."""
    paused: bool = False
    """Whether intake waits for a backup."""
    epoch_limit: int | None = None
    """The most records an epoch may have, where the deadline wants smaller epochs than the settings."""
    backup_reason: str = ""
    """Why the newest checkpoint was made."""
    started_ms: int = 0
    updated_ms: int = 0
    message: str = ""
    error: str = ""


class Recent:
    """The last epochs, for rates over a few seconds."""

    def __init__(self, keep: int = 60) -> None:
        self._epochs: deque[tuple[float, int]] = deque(maxlen=keep)

    def add(self, at_s: float, records: int) -> None:
        self._epochs.append((at_s, records))

    def per_second(self) -> float:
        """Records a second over what is kept; 0 before there are two epochs."""
        if len(self._epochs) < 2:
            return 0.0
        span = self._epochs[-1][0] - self._epochs[0][0]
        return sum(r for _, r in list(self._epochs)[1:]) / span if span > 0 else 0.0


def write_status(directory: Path, status: Status) -> None:
    """Put the status where `holdfast status` finds it. Not synced, and no reason to end: it is for people.

    Several threads may do so at once, each through a file of its own.
    """
    with contextlib.suppress(OSError):
        temporary = directory / f".status.{os.getpid()}.{next(_NUMBERS)}"
        temporary.write_bytes(msgspec.json.encode(status))
        os.replace(temporary, directory / "status.json")


def read_status(directory: Path) -> Status | None:
    """The last status that a run left in a directory."""
    try:
        return msgspec.json.decode((directory / "status.json").read_bytes(), type=Status)
    except FileNotFoundError:
        return None
