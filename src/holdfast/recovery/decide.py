"""Whether to back up now, to pause intake, or to cut epochs smaller: from the bound, nothing else. Pure.

    back up   exactly when waiting for one more epoch would let the bound cross the deadline before a backup
              that is begun then, fails once and is made again, could be through
    pause     while the bound would cross with the next epoch, and a backup that would lower it is under way
    cut       when an epoch as large as allowed would be too much: alone, with what passes during a backup, or
              beside the history that there is

If none of these helps, the deadline is infeasible, and that is said. It may be so for one fault and not for others:
then it is held for the others, and what a backup can gain for the one it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from holdfast.recovery.estimate import History

Bound = Callable[[History, int], float]
"""The seconds that recovery does not pass with a history and so many records planned."""
WORTH = 0.1
"""Where the deadline can't be held, a backup is worth its cost from so much of the deadline on that it saves."""


class Outlook(msgspec.Struct, frozen=True):
    """What a decision stands on, besides the bound."""

    deadline_s: float
    history: History
    """The epochs since the newest complete checkpoint."""
    epoch_s: float
    """How long one epoch passes after the other."""
    epoch_records: int
    """How many records the next epoch may have: the most of the recent ones."""
    max_records: int
    backup_s: float
    """How long a backup takes at the most."""
    failed_s: float | None = None
    """How long one takes usually, which then fails; None: as long as at the most."""
    retry_s: float = 1.0
    """How long after a failed backup the next is begun."""
    uploading: int | None = None
    """How many epochs have passed since the version that is being backed up; None: none is."""
    usual_records: int | None = None
    """How many records the next epoch has if it is a usual one; None: as many as it may have."""
    mean_records: float | None = None
    """How many records epochs have that pass while a backup is made: the mean of the recent; None: as many as the next."""


class Decision(msgspec.Struct, frozen=True):
    """What to do."""

    back_up: bool = False
    pause: bool = False
    """Plan no epoch before the backup is through."""
    limit: int | None = None
    """The most records the next epoch may have; None: as many as the settings allow."""
    feasible: bool = True
    """Whether the bound can be held under the deadline at all."""


def least_epoch(fixed_s: float, each_s: float, records: float, pace_s: float) -> int:
    """The smallest epochs that are worth their while: they keep up with what comes, one right after the other.

    Where more comes than half of what can be done, they need not keep up with it, but half of their time is spent on
    records: smaller ones would mostly stop the pipeline.

    Args:
        fixed_s, each_s: what an epoch takes, and each of its records.
        records, pace_s: how many came in an epoch, and how long one passed after the other.

    >>> least_epoch(0.1, 1e-6, 10_000, 1.0), least_epoch(0.1, 1e-3, 10_000, 1.0)
    (1011, 100)
    """
    busy = records / max(pace_s, 1e-3) * each_s
    if busy <= 0:
        return 1
    share = 1.0 if busy >= 0.5 else busy / (1 - busy)
    return max(1, min(math.ceil(records), math.ceil(share * fixed_s / each_s)))


def lead_epochs(outlook: Outlook) -> int:
    """How many epochs pass while a backup is made, fails, and is made again."""
    failed_s = outlook.backup_s if outlook.failed_s is None else outlook.failed_s
    lead_s = failed_s + outlook.retry_s + outlook.backup_s
    return math.ceil(lead_s / max(outlook.epoch_s, 1e-3))


def decide(outlook: Outlook, bound: Bound, beyond: Bound | None = None) -> Decision:
    """What to do after an epoch was decided.

    Args:
        bound: of the faults that can be recovered from within the deadline, or of all if none can.
        beyond: of those that can't be, whatever is done.
    """
    if beyond is not None:
        made = decide(outlook, bound)
        return msgspec.structs.replace(made, back_up=made.back_up or _gains(outlook, beyond), feasible=False)
    limit = _limit(outlook, bound)
    wait = lead_epochs(outlook) + 1
    if limit == 0:  # pausing would only stop the pipeline
        return Decision(back_up=_gains(outlook, bound), feasible=False)
    most = outlook.max_records if limit is None else limit
    size = max(1, min(outlook.epoch_records, most))
    usual = size if outlook.usual_records is None else max(1, min(outlook.usual_records, size))
    full = not _has_room(outlook, bound, usual)
    if not full and not _has_room(outlook, bound, most):
        # More than usual may have come: as much as fits beside this history, and the rest an epoch later.
        limit = _largest(lambda records: _has_room(outlook, bound, records), usual, most)
    if outlook.uploading is not None:
        return Decision(pause=full, limit=limit)
    due = outlook.history.epochs > 0 and bound(_later(outlook, wait, size), size) > outlook.deadline_s
    return Decision(back_up=due, pause=due and full, limit=limit)


def _gains(outlook: Outlook, bound: Bound) -> bool:
    """Whether a backup makes recovery much shorter than it would be, though the deadline can't be held."""
    size = min(outlook.epoch_records, outlook.max_records)
    saved_s = bound(_later(outlook, lead_epochs(outlook) + 1, size), size) - bound(History(), size)
    may = outlook.history.epochs > 0 and outlook.uploading is None
    return may and saved_s > WORTH * outlook.deadline_s


def _later(outlook: Outlook, epochs: int, size: int) -> History:
    """The history when so many more have passed. One of them may be the largest; all of them are not.

    Where more comes than that, intake is paused until the backup is through: what passes here decides how often
    that happens, and not whether the bound holds.
    """
    mean = size if outlook.mean_records is None else min(outlook.mean_records, float(size))
    return outlook.history.and_(epochs, max(size, math.ceil(epochs * mean)))


def _has_room(outlook: Outlook, bound: Bound, records: int) -> bool:
    """Whether an epoch of so many records can run now: the bound holds while it runs, and when it is history."""
    after = outlook.history.and_(1, records)
    return max(bound(outlook.history, records), bound(after, 0)) <= outlook.deadline_s


def _limit(outlook: Outlook, bound: Bound) -> int | None:
    """The most records an epoch may have, whatever the history: None as many as allowed, 0 if none are few enough."""

    def fits(records: int) -> bool:
        # Intake is paused where more would be too much while a backup is made: one behind another must fit.
        return bound(History(1, records), records) <= outlook.deadline_s

    if fits(outlook.max_records):
        return None
    usual = min(outlook.max_records, max(1, outlook.epoch_records))
    return _largest(fits, usual if fits(usual) else 1, outlook.max_records) if fits(1) else 0


def _largest(fits: Callable[[int], bool], fitting: int, most: int) -> int:
    """About the largest number that fits, a few in a hundred below it at the worst, from one that does."""
    low, high = fitting, most + 1
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
