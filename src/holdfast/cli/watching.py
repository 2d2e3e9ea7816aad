"""What a view knows of a run: the newest status and the last epochs, gathered from the engine's listener.

Plain data and no drawing: `view` draws it, `lines` prints it, `demo` sums it up.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from holdfast.engine.handle import STOPPING
from holdfast.metrics import EpochFacts, Status

KEPT = 4096


class Seen:
    """A run as it was heard of. Fed by the driver's thread, read by whoever draws."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self.started_s = now_s()
        self.ended_s: float | None = None
        self.status: Status | None = None
        self.epochs = 0
        self.rates: deque[float] = deque(maxlen=KEPT)
        self.first_ms = 0.0
        """The latency of the first epoch: it starts the workers, and stands apart from the others."""
        self.latencies_ms: deque[float] = deque(maxlen=KEPT)
        self.messages: deque[str] = deque(maxlen=3)
        self._last_ms: int | None = None

    def hear(self, status: Status, facts: EpochFacts | None) -> None:
        """Take in what the engine says."""
        self.status = status
        if status.state in ("stopped", "failed"):
            self.ended_s = self._now_s()
        if facts is not None:
            self._hear_epoch(facts)
        elif status.message and (not self.messages or self.messages[-1] != status.message):
            self.messages.append(status.message)

    def _hear_epoch(self, facts: EpochFacts) -> None:
        self.epochs += 1
        if self.epochs == 1:
            self.first_ms = facts.latency_ms
        else:
            self.latencies_ms.append(facts.latency_ms)
        if self._last_ms is not None and facts.now_ms > self._last_ms:
            self.rates.append(facts.records_in * 1000 / (facts.now_ms - self._last_ms))
        self._last_ms = facts.now_ms

    @property
    def stopping(self) -> bool:
        return self.status is not None and self.status.message == STOPPING

    @property
    def uptime_s(self) -> float:
        return (self.ended_s or self._now_s()) - self.started_s

    @property
    def bad_records(self) -> int:
        return 0 if self.status is None else sum(self.status.bad_records.values())

    def latency_ms(self, share: float) -> float:
        """A percentile of the latencies; 0 before there is one.

        >>> seen = Seen()
        >>> seen.latencies_ms.extend([10.0, 20.0, 30.0, 400.0])
        >>> seen.latency_ms(0.5), seen.latency_ms(0.99)
        (20.0, 400.0)
        """
        found = sorted(self.latencies_ms.copy())
        return found[max(0, math.ceil(share * len(found)) - 1)] if found else 0.0


def set_aside(told: Status | EpochFacts) -> list[tuple[str, int]]:
    """How many records were in no result because of their time, by what was the matter with them."""
    counts = (
        ("late", told.late_records),
        ("untimed", told.untimed_records),
        ("unseen", told.unseen_records),
    )
    return [(name, sum(found.values())) for name, found in counts]
