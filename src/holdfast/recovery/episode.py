"""A fault that is being recovered from, as its pipeline sees it: who told of it, and which one it was. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from holdfast.faults.kinds import Fault
from holdfast.recovery.estimate import OF_DRIVER, Estimate, Notice, detection

_FROZEN = {Fault.WORKER_KILL: Fault.WORKER_FREEZE, Fault.EXECUTOR_KILL: Fault.EXECUTOR_FREEZE}


class Episode(msgspec.Struct):
    """A fault that is being recovered from, as seen from inside."""

    fault: Fault
    began_s: float
    """On the wall clock, which outlives a driver."""
    estimates: dict[Fault, Estimate] = {}
    """What was forecast then, for whichever fault it turns out to be."""
    within: bool = False
    """Whether it was found when its epoch was through: then nobody waited for data since it began."""

    def took_s(self, now_s: float, idle_s: float) -> float:
        """How long recovery took if it ends now, without the time in which nothing came."""
        return max(0.0, now_s - self.began_s - (0.0 if self.within else idle_s))


class Restarts(msgspec.Struct, frozen=True):
    """How a supervisor waits before it starts a driver again: the longer the more often it fell, until it was well for a while."""

    soon_s: float
    """Before the next start, as things stand; infinite: there would be none."""
    after_s: float
    """Who was well for so long has its falls forgotten."""
    later_s: float
    """Before the next start from then on."""
    waited_s: float
    """Before this one."""

    def next_s(self, well_s: float | None) -> float:
        """How long it would wait now, after a run that was well for so long; None: it has not been yet."""
        return self.later_s if well_s is not None and well_s > self.after_s else self.soon_s


def restarts(told: str, usual_s: float) -> Restarts:
    """What a supervisor tells of its next restart, and of this one; where none does, as the settings say.

    >>> restarts("1.0 60 0.5 2.0", 0.5).next_s(70.0), restarts("", 0.5).next_s(None)
    (0.5, 0.5)
    """
    try:
        soon_s, after_s, later_s, waited_s = map(float, told.split())
    except ValueError:
        return Restarts(usual_s, 0.0, usual_s, usual_s)
    return Restarts(soon_s, after_s, later_s, waited_s)


def fallen(told: str) -> Episode | None:
    """The fault that a supervisor tells of: "<milliseconds> killed" or "<milliseconds> silent"."""
    at, _, how = told.partition(" ")
    if not at.isdigit():
        return None
    fault = Fault.DRIVER_FREEZE if how == "silent" else Fault.DRIVER_KILL
    return Episode(fault, int(at) / 1000)


def which(
    fault: Fault,
    took_s: float,
    known: Mapping[Fault, Estimate],
    notice: Notice,
    covered: Collection[Fault],
    *,
    rebuilt: bool,
    told: bool,
) -> Fault:
    """Which fault it was, as far as can be told: one that was silent for its time-out, and took about so long, froze.

    Args:
        known: what each would have taken.
        rebuilt: whether shards were rebuilt, so their host had lost them.
        told: whether somebody knows, and will say so.
    """
    if fault in OF_DRIVER:
        return fault
    if rebuilt:
        return Fault.HOST
    frozen = _FROZEN.get(fault)
    if frozen is None or frozen not in covered or told:
        return fault
    if not detection(frozen, notice).mean <= took_s <= known[frozen].bound(0.99):
        return fault
    return min((fault, frozen), key=lambda one: abs(known[one].sum.mean - took_s))
