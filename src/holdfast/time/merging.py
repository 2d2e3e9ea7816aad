"""Windows that merge: those of a key that overlap or touch become one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast.time.units import Times
from holdfast.time.windows import Window


class Merged(NamedTuple):
    """What `merge_sessions` found: the sessions in order of group and start, and the one of each row."""

    rows: npt.NDArray[np.int64]
    """For each row that was given, the index of its session below."""
    groups: npt.NDArray[np.int64]
    starts: Times
    ends: Times


def merge_sessions(starts: Times, ends: Times, groups: npt.NDArray[np.int64]) -> Merged:
    """Sessions of many keys, merged where those of one key overlap or touch.

    >>> merged = merge_sessions(np.array([5, 0, 0]), np.array([9, 5, 3]), np.array([7, 7, 8]))
    >>> merged.groups.tolist(), merged.starts.tolist(), merged.ends.tolist(), merged.rows.tolist()
    ([7, 8], [0, 0], [9, 3], [0, 0, 1])
    """
    count = len(starts)
    if not count:
        none = np.empty(0, dtype=np.int64)
        return Merged(none, none, none, none)
    order = np.lexsort((starts, groups))
    start, end, group = starts[order], ends[order], groups[order]
    first_of_group = np.ones(count, dtype=np.bool_)
    first_of_group[1:] = group[1:] != group[:-1]
    # A running maximum that starts anew with each group: the group's rank weighs more than any end's.
    by_end, rank_of_end = np.unique(end, return_inverse=True)
    rank = np.maximum.accumulate((np.cumsum(first_of_group) - 1) * len(by_end) + rank_of_end)
    furthest = by_end[rank % len(by_end)]
    opens = first_of_group.copy()
    opens[1:] |= start[1:] > furthest[:-1]
    rows = np.empty(count, dtype=np.int64)
    rows[order] = np.cumsum(opens) - 1
    at = np.flatnonzero(opens)
    closes = np.append(at[1:], count) - 1
    return Merged(rows, group[at], start[at], furthest[closes])


def merge(windows: Sequence[Window]) -> list[tuple[Window, list[Window]]]:
    """The windows of one key, merged where they overlap or touch: each result with those it is made of.

    >>> [(m.start, m.end, len(parts)) for m, parts in merge([Window(8, 9), Window(0, 5), Window(5, 7)])]
    [(0, 7, 2), (8, 9, 1)]
    """
    merged: list[tuple[Window, list[Window]]] = []
    for window in sorted(windows):
        if merged and window.start <= merged[-1][0].end:
            whole, parts = merged[-1]
            parts.append(window)
            merged[-1] = (Window(whole.start, max(whole.end, window.end)), parts)
        else:
            merged.append((window, [window]))
    return merged
