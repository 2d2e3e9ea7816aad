"""Whether a driver that ended is started again, and when: pure decisions over how its lives ended.

Whatever the strategy:

| the child ended with | |
| --- | --- |
| 0 | it is done |
| 2, 4, 5 | another life would end the same way, or harm a newer driver: stop with that code |
| 6, 7, 12, 13 for the first time at an epoch | restart: data may have been half written, a service out of reach |
| 6, 7, 12, 13 again at the same epoch | stop with that error: the plan is fixed, so the same records would fail for ever |
| anything else, a signal, silence | what the strategy says |

No clock, process or file in here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from holdfast.config import parse_duration_s
from holdfast.errors import ConfigError

DONE = 0
FINAL = {
    2: "command, settings or pipeline can't run as written",
    4: "the directory is another pipeline's, or another driver lives there",
    5: "a newer driver has taken the pipeline over",
}
"""Exit codes after which there is no other life, with the reason."""
USERS = (6, 7, 12, 13)
"""Exit codes of errors in the user's data, code or settings, a replay that differs and a full heap among them."""
MOST_FAILURES = 1000
"""The most failures that a strategy may count, so that a history of that length is enough for every decision."""
RATE_DELAY_S = 1.0
"""Before each restart of the failure rate: so that a failure at start does not use up its count in a moment."""


@dataclass(frozen=True)
class End:
    """How one life of the driver ended."""

    at_s: float
    exit_code: int
    """As the system tells it: below zero, the number of the signal that killed it."""
    epoch: int = 0
    """The last epoch that was decided, as far as the status tells."""
    error: str = ""
    """What it told of its error, where it could."""
    silent_s: float = 0.0
    """How long it had been silent when we killed it for that; 0 where we did not."""
    healthy_s: float = 0.0
    """From the first epoch that this life decided to its last sign of life."""

    @property
    def silent(self) -> bool:
        """Whether it was killed by us for its silence."""
        return self.silent_s > 0


@dataclass(frozen=True)
class NoRestart:
    """One life only."""


@dataclass(frozen=True)
class FixedDelay:
    """Always again, after the same delay."""

    delay_s: float


@dataclass(frozen=True)
class Exponential:
    """Always again, after a delay that doubles up to a cap, and starts anew after a life healthy for longer than that."""

    first_s: float = 1.0
    cap_s: float = 60.0


@dataclass(frozen=True)
class FailureRate:
    """Again, unless there were more than so many failures in a window."""

    failures: int
    window_s: float


Strategy: TypeAlias = NoRestart | FixedDelay | Exponential | FailureRate


@dataclass(frozen=True)
class Restart:
    """Start again after a delay."""

    after_s: float


@dataclass(frozen=True)
class GiveUp:
    """No other life; the reason is a part of a sentence."""

    reason: str


def parse_restart(text: str) -> Strategy:
    """The strategy that a setting names.

    >>> parse_restart("exponential 1s 60s"), parse_restart("rate 5 10m")
    (Exponential(first_s=1.0, cap_s=60.0), FailureRate(failures=5, window_s=600.0))
    """
    try:
        strategy = _parsed(text.lower().split())
    except (ConfigError, ValueError):
        strategy = None
    if strategy is None or not _sensible(strategy):
        raise ConfigError(
            f"restart={text!r} is no way to restart.",
            remedy='Write "none", "fixed 5s", "exponential", "exponential 1s 60s" (the first delay, its cap) or'
            f' "rate 5 10m" (at most so many failures, up to {MOST_FAILURES}, in so long).',
        )
    return strategy


def _parsed(words: list[str]) -> Strategy | None:
    match words:
        case ["none"]:
            return NoRestart()
        case ["fixed", delay]:
            return FixedDelay(parse_duration_s(delay))
        case ["exponential"]:
            return Exponential()
        case ["exponential", first, cap]:
            return Exponential(parse_duration_s(first), parse_duration_s(cap))
        case ["rate", failures, window]:
            return FailureRate(int(failures), parse_duration_s(window))
    return None


def _sensible(strategy: Strategy) -> bool:
    match strategy:
        case Exponential(first_s, cap_s):
            return 0 < first_s <= cap_s
        case FailureRate(failures, window_s):
            return 1 <= failures <= MOST_FAILURES and window_s > 0
    return True


def decide(history: Sequence[End], strategy: Strategy, now: float) -> Restart | GiveUp:
    """What comes after the last of these ends.

    >>> decide([End(at_s=9.0, exit_code=-9)], FixedDelay(5.0), now=9.0)
    Restart(after_s=5.0)
    """
    last = history[-1]
    if last.exit_code == DONE:
        return GiveUp("it is done")
    if last.exit_code in FINAL:
        return GiveUp(FINAL[last.exit_code])
    if _came_back(history):
        return GiveUp(f"the same error came back after epoch {last.epoch}")
    return _by_strategy(history, strategy, now)


def _came_back(history: Sequence[End]) -> bool:
    """Not only in the life before: one that was killed in between has mended nothing."""
    last = history[-1]
    same = (end.exit_code == last.exit_code and end.epoch == last.epoch for end in history[:-1])
    return last.exit_code in USERS and any(same)


def delay_s(strategy: Strategy) -> float:
    """How long a driver that was well before is waited with, before it is started again."""
    match strategy:
        case FixedDelay(delay):
            return delay
        case Exponential(first_s):
            return first_s
        case FailureRate():
            return RATE_DELAY_S
    return 0.0


def delays_s(history: Sequence[End], strategy: Strategy, now: float) -> tuple[float, float, float]:
    """How long a driver that falls next is waited with: so long; from so long a health on so long. Infinite: for ever.

    >>> fell = End(at_s=9.0, exit_code=-9)
    >>> delays_s([], Exponential(1.0, 60.0), 9.0), delays_s([fell, fell], Exponential(1.0, 60.0), 9.0)
    ((1.0, 60.0, 1.0), (4.0, 60.0, 1.0))
    >>> delays_s([], NoRestart(), 9.0), delays_s([fell], FailureRate(1, 60.0), 19.0)
    ((inf, inf, inf), (inf, 50.0, 1.0))
    """
    match strategy:
        case NoRestart():
            return math.inf, math.inf, math.inf
        case Exponential(first_s, cap_s):
            return _backed_off_s([*history, End(at_s=0.0, exit_code=-1)], strategy), cap_s, first_s
        case FailureRate(failures, window_s):
            recent = [end.at_s for end in history if now - end.at_s < window_s]
            if len(recent) >= failures:  # until enough of them are long ago
                return math.inf, recent[-failures] + window_s - now, RATE_DELAY_S
    return delay_s(strategy), 0.0, delay_s(strategy)


def _by_strategy(history: Sequence[End], strategy: Strategy, now: float) -> Restart | GiveUp:
    match strategy:
        case NoRestart():
            return GiveUp('restart is "none"')
        case FixedDelay(delay_s):
            return Restart(delay_s)
        case Exponential():
            return Restart(_backed_off_s(history, strategy))
        case FailureRate(failures, window_s):
            recent = sum(now - end.at_s < window_s for end in history)
            if recent > failures:
                return GiveUp(f"{recent} failures within {window_s:g} s are more than {failures}")
            return Restart(RATE_DELAY_S)


def _backed_off_s(history: Sequence[End], strategy: Exponential) -> float:
    """Doubled for each end since that of the last healthy life, or since the first."""
    doublings = -1
    for end in reversed(history):
        doublings += 1
        if end.healthy_s > strategy.cap_s:
            break
    # A float has no room for 2**1024, and no cap is 2**64 times the first delay.
    return min(strategy.cap_s, strategy.first_s * 2.0 ** min(doublings, 64))
