"""When a checkpoint is due. Pure: a policy and what is known, in; a trigger or nothing, out."""

from __future__ import annotations

import dataclasses
import enum
import re

from holdfast.config import parse_duration_s
from holdfast.errors import ConfigError


class Trigger(enum.Enum):
    """Why a checkpoint was made."""

    EPOCHS = "so many epochs have passed"
    INTERVAL = "the interval has passed"
    ASKED = "somebody asked for it"
    STOPPING = "the pipeline was stopped"
    SOURCE_EXPIRES = "source data that a replay would need is about to expire"
    CODE_CHANGED = "the pipeline's code has changed"


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


Policy = EveryEpochs | EveryInterval | Manual | Never


def parse_policy(text: str) -> Policy:
    """A policy from its setting.

    >>> parse_policy("10 epochs"), parse_policy("30s"), parse_policy("manual")
    (EveryEpochs(epochs=10), EveryInterval(seconds=30.0), Manual())
    """
    words = text.strip().lower()
    if words in ("manual", "never"):
        return Manual() if words == "manual" else Never()
    counted = re.fullmatch(r"(\d+)\s*epochs?", words)
    if counted is not None and int(counted[1]) > 0:
        return EveryEpochs(int(counted[1]))
    try:
        seconds = parse_duration_s(words)
    except ConfigError:
        seconds = 0.0
    if seconds <= 0:
        raise ConfigError(
            f"checkpoint={text!r} is no policy.",
            remedy='Write an interval ("30s"), a number of epochs ("10 epochs"), "manual" or "never".',
        )
    return EveryInterval(seconds)


@dataclasses.dataclass(frozen=True)
class Known:
    """What the decision stands on: times in milliseconds of one clock, epochs since the newest checkpoint."""

    epochs_since: int
    last_started_ms: int
    now_ms: int
    asked: bool = False
    stopping: bool = False
    code_changed: bool = False
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
    if known.expires_ms is not None and known.now_ms + known.margin_ms >= known.expires_ms:
        return Trigger.SOURCE_EXPIRES
    if isinstance(policy, Manual):
        return None
    if known.stopping:
        return Trigger.STOPPING
    if known.code_changed:
        return Trigger.CODE_CHANGED
    if isinstance(policy, EveryEpochs):
        return Trigger.EPOCHS if known.epochs_since >= policy.epochs else None
    passed = known.now_ms - known.last_started_ms >= policy.seconds * 1000
    return Trigger.INTERVAL if passed else None
