"""When a checkpoint is due. Pure: a policy and what is known, in; a trigger or nothing, out."""

from __future__ import annotations

import dataclasses
import enum
import math
import re

from holdfast.config import parse_duration_s
from holdfast.errors import ConfigError


class Trigger(enum.Enum):
    """Why a checkpoint was made."""

    DEADLINE = "waiting would let recovery take longer than the deadline"
    EPOCHS = "so many epochs have passed"
    INTERVAL = "the interval has passed"
    ASKED = "somebody asked for it"
    STOPPING = "the pipeline was stopped"
    SOURCE_EXPIRES = "source data that a replay would need is about to expire"
    CODE_CHANGED = "the pipeline's code has changed"
    DAMAGED = "the newest checkpoint was found to be damaged"


@dataclasses.dataclass(frozen=True)
class Deadline:
    """Exactly when the bound on recovery time would otherwise cross the deadline: `recovery.decide` says when."""


@dataclasses.dataclass(frozen=True)
class YoungDaly:
    """At the interval that loses least on average, for a mean time between failures."""

    mtbf_s: float

    def interval_s(self, backup_s: float) -> float:
        """Young's first-order optimum: the square root of twice a backup's time and the time between failures.

        >>> YoungDaly(3600.0).interval_s(2.0)
        120.0
        """
        return math.sqrt(2 * max(backup_s, 1e-3) * self.mtbf_s)


@dataclasses.dataclass(frozen=True)
class EveryEpochs:
    """A checkpoint every n epochs."""

    epochs: int


@dataclasses.dataclass(frozen=True)
class EveryInterval:
    """A checkpoint once so many seconds have passed since the last one."""

    seconds: float


@dataclasses.dataclass(frozen=True)
class Manual:
    """Only when asked."""


@dataclasses.dataclass(frozen=True)
class Never:
    """Not even when asked: recovery replays everything."""


Policy = Deadline | EveryEpochs | EveryInterval | YoungDaly | Manual | Never


def parse_policy(text: str) -> Policy:
    """A policy from its setting.

    >>> parse_policy("10 epochs"), parse_policy("30s"), parse_policy("deadline")
    (EveryEpochs(epochs=10), EveryInterval(seconds=30.0), Deadline())
    """
    words = text.strip().lower()
    if words == "deadline":
        return Deadline()
    if words in ("every epoch", "every-epoch"):
        return EveryEpochs(1)
    if words in ("manual", "never"):
        return Manual() if words == "manual" else Never()
    counted = re.fullmatch(r"(\d+)\s*epochs?", words)
    if counted is not None and int(counted[1]) > 0:
        return EveryEpochs(int(counted[1]))
    young = re.fullmatch(r"young-daly\s+(.+)", words)
    try:
        seconds = parse_duration_s(young[1] if young else words)
    except ConfigError:
        seconds = 0.0
    if seconds <= 0:
        raise ConfigError(
            f"checkpoint={text!r} is no policy.",
            remedy='Write "deadline", an interval ("30s"), a number of epochs ("10 epochs"), "young-daly" with a mean time '
            'between failures ("young-daly 24h"), "manual" or "never".',
        )
    return YoungDaly(seconds) if young else EveryInterval(seconds)


@dataclasses.dataclass(frozen=True)
class Known:
    """What the decision stands on: times in milliseconds of one clock, epochs since the newest checkpoint."""

    epochs_since: int
    last_started_ms: int
    now_ms: int
    endangered: bool = False
    """Whether waiting would endanger the deadline."""
    backup_s: float = 1.0
    """What the last backup took."""
    asked: bool = False
    stopping: bool = False
    code_changed: bool = False
    damaged: bool = False
    """Whether the newest checkpoint was found to be damaged."""
    expires_ms: int | None = None
    """When the first source range since that checkpoint can't be read any more."""
    margin_ms: int = 0
    """How long before that the checkpoint must be begun."""


def due(policy: Policy, known: Known) -> Trigger | None:
    """Whether to back up the newest version now, and why."""
    if known.epochs_since <= 0 or isinstance(policy, Never):
        return None
    if known.asked:
        return Trigger.ASKED
    if known.damaged:
        return Trigger.DAMAGED
    if known.expires_ms is not None and known.now_ms + known.margin_ms >= known.expires_ms:
        return Trigger.SOURCE_EXPIRES
    if isinstance(policy, Manual):
        return None
    if known.stopping:
        return Trigger.STOPPING
    if known.code_changed:
        return Trigger.CODE_CHANGED
    if isinstance(policy, Deadline):
        return Trigger.DEADLINE if known.endangered else None
    if isinstance(policy, EveryEpochs):
        return Trigger.EPOCHS if known.epochs_since >= policy.epochs else None
    every_s = policy.interval_s(known.backup_s) if isinstance(policy, YoungDaly) else policy.seconds
    passed = known.now_ms - known.last_started_ms >= every_s * 1000
    return Trigger.INTERVAL if passed else None
