"""Faults at random moments, one after the other: what is done when is drawn from a seed, and then done.

Most faults come a moment after the recovery from the one before, so that they hit any phase of an epoch, of a
commit, of publishing or of a checkpoint. Some come sooner: in a row with the one before, or while it is being
recovered from. The same seed draws the same faults, pauses and choices; what runs at that moment is not up to us.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence

from holdfast.errors import ConfigError, HoldfastError
from holdfast.faults.experiment import Experiment, Struck
from holdfast.faults.kinds import GROUPS, Fault

PAUSE_S = (0.2, 1.5)
"""Between a recovery and the next fault."""
IN_A_ROW_S = (0.1, 3.0)
"""Between a fault and one that does not wait for the recovery from it."""
DURING_RECOVERY_S = (3.0, 9.0)
"""The same, for one that is to meet a recovery that is well under way."""
IN_A_ROW, DURING_RECOVERY = 0.15, 0.1
"""How likely each of the two is."""


@dataclasses.dataclass(frozen=True)
class Blow:
    """A fault that is going to be done."""

    fault: Fault
    pause_s: float
    """After the recovery from the one before; after that one itself, if it overlaps."""
    overlaps: bool
    """Whether it does not wait for the recovery from the one before."""
    share: float
    """Who among those whom it can strike, from 0 to 1."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """A fault that was done, and how it ended."""

    number: int
    struck: Struck
    overlaps: bool
    recovery_s: float | None
    """None where the next fault came before the recovery was over, or where there was none."""
    stuck: bool = False
    """Whether the application did not come back: then it is the last one."""


def draw(faults: Sequence[Fault], trials: int, seed: int) -> list[Blow]:
    """What will be done: every kind about equally often, in an order and at moments that the seed decides."""
    chance = random.Random(seed)
    return [_blow(fault, chance, first=n == 0) for n, fault in enumerate(in_turn(faults, trials, chance))]


def in_turn(faults: Sequence[Fault], trials: int, chance: random.Random) -> list[Fault]:
    """So many faults, every kind once before any comes again, in an order that chance decides."""
    kinds: list[Fault] = []
    while len(kinds) < trials:
        kinds += chance.sample(list(faults), len(faults))
    return kinds[:trials]


def _blow(fault: Fault, chance: random.Random, *, first: bool) -> Blow:
    kind, share = chance.random(), chance.random()
    if first or kind >= IN_A_ROW + DURING_RECOVERY:
        return Blow(fault, chance.uniform(*PAUSE_S), False, share)
    return Blow(fault, chance.uniform(*(IN_A_ROW_S if kind < IN_A_ROW else DURING_RECOVERY_S)), True, share)


def parse_faults(text: str) -> list[Fault]:
    """The faults that a text names: `all`, or names with commas between; `executor` is both of its kinds.

    >>> [fault.label for fault in parse_faults("host,driver")]
    ['host', 'driver-kill', 'driver-freeze']
    """
    if text.strip() == "all":
        return list(Fault)
    found: list[Fault] = []
    for name in (part.strip() for part in text.split(",")):
        fault = Fault.named(name)
        of = GROUPS.get(name, () if fault is None else (fault,))
        if not of:
            raise ConfigError(
                f"There is no fault {name!r}.",
                remedy=f"The faults are: all, {', '.join(GROUPS)}, {', '.join(f.label for f in Fault)}.",
            )
        found += [one for one in of if one not in found]
    return found


def inflict(
    experiment: Experiment,
    blows: Sequence[Blow],
    *,
    timeout_s: float = 120.0,
    tell: Callable[[Trial], None] = lambda trial: None,
) -> list[Trial]:
    """Do it all, each fault as its blow says, and be told of each; raises where there is no recovery in time.

    Whoever listens is told of that fault too, before it is raised.
    """
    trials = []
    for number, blow in enumerate(blows, start=1):
        time.sleep(blow.pause_s)
        struck = experiment.strike(blow.fault, blow.share, timeout_s)
        overtaken = number < len(blows) and blows[number].overlaps
        try:
            recovery_s = None if overtaken else experiment.await_recovery(struck, timeout_s)
        except HoldfastError:
            tell(Trial(number, struck, blow.overlaps, None, stuck=True))
            raise
        trials.append(Trial(number, struck, blow.overlaps, recovery_s))
        tell(trials[-1])
    return trials
