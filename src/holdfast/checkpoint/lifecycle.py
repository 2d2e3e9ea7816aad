"""The life of a checkpoint, in its types.

    PendingCheckpoint ── everything is stored, the record is created ──> Checkpoint (completed)
           └────────── one of the reasons below ──────────────────────> FailedCheckpoint

A pending one has a number, an epoch and a trigger, and nothing that anyone could restore from. A failed one
leaves files in the store that nobody names; they go with the next clearing up.
"""

from __future__ import annotations

import dataclasses
import enum

from holdfast.checkpoint.policy import Trigger


class Reason(enum.Enum):
    """Why a checkpoint failed: all there is."""

    STORE = "the store failed or refused"
    STORE_FULL = "the store has no room left"
    MISSING = "a host no longer has the version"
    DAMAGED = "a file on a host is not what was written"
    EXECUTORS = "the executors that have the versions were lost"
    LOST = "the store no longer has all of its files"
    EXPIRED = "it took longer than checkpoint_timeout"
    SLOW = "it took many times as long as usual, and the deadline waits for it"
    FENCED = "a newer driver has taken over"
    STOPPED = "the run ended first"
    UNEXPECTED = "something nobody foresaw"


@dataclasses.dataclass(frozen=True)
class PendingCheckpoint:
    """A checkpoint under way."""

    number: int
    epoch: int
    trigger: Trigger
    started_ms: int

    def failed(self, reason: Reason, detail: str, at_ms: int) -> FailedCheckpoint:
        """What becomes of it when it can't be completed."""
        return FailedCheckpoint(self.number, self.epoch, self.trigger, self.started_ms, at_ms, reason, detail)


@dataclasses.dataclass(frozen=True)
class FailedCheckpoint:
    """A checkpoint that was given up."""

    number: int
    epoch: int
    trigger: Trigger
    started_ms: int
    failed_ms: int
    reason: Reason
    detail: str

    def sentence(self) -> str:
        """What happened, for people."""
        return f"Checkpoint {self.number} of epoch {self.epoch} failed: {self.reason.value} ({self.detail})."


def patience_s(timeout_s: float, at_most_s: float, failures: int) -> float:
    """How long an upload may take while intake may have to wait for it.

    Several times what one is thought to take at the most, and longer after every failure in a row: one that hangs is tried
    anew soon, and a store that has become slow is given the time. Never longer than the time-out.

    >>> [
    ...     patience_s(600.0, at_most_s, failures)
    ...     for at_most_s, failures in ((2.0, 0), (20.0, 0), (2.0, 1), (2.0, 5))
    ... ]
    [30.0, 100.0, 120.0, 600.0]
    """
    longer = 4.0 ** min(failures, 10)
    return min(timeout_s, max(_LEAST_PATIENCE_S, 5 * at_most_s) * longer)


_LEAST_PATIENCE_S = 30.0


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How many failures in a row are borne. Pure: outcomes in, the next count out."""

    allowed: int
    in_a_row: int = 0

    def after(self, succeeded: bool) -> Tolerance:
        """What is left after one more outcome."""
        return dataclasses.replace(self, in_a_row=0 if succeeded else self.in_a_row + 1)

    @property
    def spent(self) -> bool:
        """Whether it is time to say so loudly."""
        return self.in_a_row >= self.allowed
