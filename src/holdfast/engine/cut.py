"""When an epoch is cut, and how much of each source it takes. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Wait(enum.Enum):
    """What to do now."""

    CUT = "cut"
    WAIT = "wait"
    END = "end"


def when_to_cut(
    cut: str,
    interval_s: float,
    *,
    waited_s: float,
    records: int,
    full: bool,
    backlog: int,
    exhausted: bool,
    drain: bool,
    empty: bool = False,
    due: bool = False,
    risen: bool = False,
    after_records: bool = True,
) -> Wait:
    """Whether to cut an epoch now.

    "interval": when the interval is over and there is data (or without, if `empty` ones are wanted), or at
    once when an epoch is full or more is waiting; "data": as soon as there is any; "full": only when an epoch
    is full, or nothing more can come. Where time itself is `due` (a timer, a split that has become idle, the end of a
    source), an epoch is cut at once, with data or without. Where a source says that a watermark has `risen`, one is cut when the
    interval is over. Draining, whatever is there is taken at once, and the end comes when there is nothing; a watermark
    alone is worth an epoch then only after one with records, as it may rise with the clock, for ever.

    >>> when_to_cut("data", 1, waited_s=0, records=0, full=False, backlog=0, exhausted=False, drain=False)
    <Wait.WAIT: 'wait'>
    """
    if due:
        return Wait.CUT
    if records == 0 and (exhausted or drain):
        return Wait.CUT if risen and after_records else Wait.END
    if full or backlog > 0 or drain:
        return Wait.CUT
    if exhausted and records:
        return Wait.CUT
    if cut == "data" and records:
        return Wait.CUT
    if cut == "interval" and waited_s >= interval_s and (records or empty):
        return Wait.CUT
    if risen and waited_s >= interval_s:
        return Wait.CUT
    return Wait.WAIT


def shares(offered: Mapping[str, int], most: int) -> dict[str, int]:
    """Of sources that offer more than an epoch may have together: those that must offer less, and how much.

    Who offers little is taken whole; the others share what is left evenly. None is left out, so that each goes on.

    >>> shares({"bids": 90, "people": 5, "auctions": 40}, 45), shares({"bids": 40, "people": 5}, 45)
    ({'bids': 20, 'auctions': 20}, {})
    """
    left, large = most, dict(offered)
    while large:
        share = max(1, left // len(large))
        small = {uid: records for uid, records in large.items() if records <= share}
        if not small:
            return dict.fromkeys(large, share)
        left -= sum(small.values())
        large = {uid: records for uid, records in large.items() if uid not in small}
    return {}
