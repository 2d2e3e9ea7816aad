"""What need not pass an exchange: records of a range that can be neither the first nor among the best of their key.

`deduplicate` without a time and `top` without windows look at all records of a key, and few of them count: which of a
range surely don't is known before it is sent. What is left passes as it came, in its order, so that `ranked` finds
the same as in all of them. Where event time decides, late records must be told of, and all pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.data.rows import one_array
from holdfast.engine.aggregate import Combiner
from holdfast.engine.keys import key_ids, key_names
from holdfast.plan import graph as g
from holdfast.plan.bodies import TopBody
from holdfast.state.keygroups import check_key_type

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def thinner_for(target: g.Node, key: g.Key) -> Combiner | None:
    """What an exchange to an operator leaves out; None where all must pass."""
    if target.kind == g.DEDUPLICATE and target.body.within_us is None:
        return _Firsts(key)
    if target.kind == g.TOP and target.body.assigner is None:
        return _Best(key, target.body)
    return None


class _Thinner(Combiner):
    """Keeps some records of a table, as they are."""

    own_schema = False

    def __init__(self, key: g.Key) -> None:
        self._key = key

    def partial(self, table: pa.Table) -> pa.Table:
        names = key_names(self._key, table.schema)
        if not table.num_rows or not names or not set(names) <= set(table.schema.names):
            return table  # what is wrong with it is said where it is sent
        for name in names:
            check_key_type(table.schema.field(name).type)
        kept = self.kept(table, key_ids(table, names))
        return table if kept.all() else table.filter(pa.array(kept))

    def merged(self, table: pa.Table) -> pa.Table:
        return self.partial(table)

    def kept(self, table: pa.Table, ids: Numbers) -> Mask:
        """Which records may count; `ids` are the same for those of one key."""
        raise NotImplementedError


class _Firsts(_Thinner):
    def kept(self, table: pa.Table, ids: Numbers) -> Mask:
        return firsts(ids)


class _Best(_Thinner):
    def __init__(self, key: g.Key, body: TopBody) -> None:
        super().__init__(key)
        self._body = body

    def kept(self, table: pa.Table, ids: Numbers) -> Mask:
        body = self._body
        if not set(body.by) <= set(table.schema.names):
            return np.ones(len(ids), bool)  # `ranked` says that they are missing
        kept, contested = settled(
            ids, hopeful(ids, one_array(table[body.by[0]]), body.ascending[0], body.n), body.n
        )
        at = np.flatnonzero(contested)
        if not len(at):
            return kept
        columns = [one_array(table[name].take(pa.array(at))) for name in body.by]
        try:
            ranks = places(ids[at], columns, body.ascending, at if body.ties == "first" else -at, body.n)
        except UNRANKABLE:
            return np.ones(len(ids), bool)  # as above
        kept[at] = ranks < body.n
        return kept


def settled(ids: Numbers, hope: Mask, wanted: int) -> tuple[Mask, Mask]:
    """Which records count for certain, as their id has no more that may; and those of ids that have too many of them.

    Most ids are settled by one column, so that nobody looks at the others, which may be long texts.

    >>> kept, contested = settled(np.array([0, 0, 1, 1]), np.array([True, False, True, True]), 1)
    >>> kept.tolist(), contested.tolist()
    ([True, False, False, False], [False, False, True, True])
    """
    many = np.bincount(ids[hope], minlength=int(ids.max(initial=-1)) + 1) > wanted
    contested = hope & many[ids]
    return hope & ~contested, contested


def firsts(ids: Numbers) -> Mask:
    """Which of some ids come for the first time. They are numbered as they come.

    >>> firsts(np.array([0, 1, 0, 2, 1])).tolist()
    [True, True, False, True, False]
    """
    found = np.ones(len(ids), bool)
    found[1:] = ids[1:] > np.maximum.accumulate(ids)[:-1]
    return found


UNRANKABLE = (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError)
"""What `places` raises for columns that have no order."""


def places(
    ids: Numbers, columns: Sequence[pa.Array], ascending: Sequence[bool], arrival: Numbers, wanted: int
) -> Numbers:
    """The place of each record among those of its id, from 0: by columns, each up- or downwards, then by arrival.

    Places from `wanted` on are of no interest: any of them may be told as `wanted`.

    >>> price = pa.array([3, 5, 5, 1])
    >>> places(np.array([0, 0, 0, 1]), [price], [False], np.arange(4), 2).tolist()
    [2, 0, 1, 0]
    """
    wanted = min(wanted, len(ids))  # more than there are, and maybe more than numpy's integers can count
    found = np.full(len(ids), wanted, np.int64)
    at = np.flatnonzero(hopeful(ids, columns[0], ascending[0], wanted))
    if not len(at):
        return found
    if len(at) < len(ids):
        columns = [column.take(pa.array(at)) for column in columns]
    table, keys = {"id": ids[at]}, [("id", "ascending")]
    for place, (column, up) in enumerate(zip(columns, ascending, strict=True)):
        table[f"by{place}"] = column.cast(pa.int64()) if pa.types.is_null(column.type) else column
        keys.append((f"by{place}", "ascending" if up else "descending"))
    table["arrival"] = arrival[at]
    keys.append(("arrival", "ascending"))
    order = pc.sort_indices(pa.table(table), sort_keys=keys).to_numpy()
    begins = np.flatnonzero(starts(ids[at][order]))
    sizes = np.diff(np.append(begins, len(order)))
    found[at[order]] = np.minimum(np.arange(len(order)) - np.repeat(begins, sizes), wanted)
    return found


def hopeful(ids: Numbers, column: pa.Array, ascending: bool, wanted: int) -> Mask:
    """Which records may be among so many first of their id: by the first column alone fewer others are ahead of them.

    Texts and what has nulls are left to a whole comparison.

    >>> hopeful(np.array([0, 0, 0, 1]), pa.array([3, 5, 5, 1]), False, 1).tolist()
    [False, True, True, True]
    """
    kind = column.type
    counts = pa.types.is_integer(kind) and not pa.types.is_uint64(kind)
    if column.null_count or not (counts or pa.types.is_timestamp(kind)):
        return np.ones(len(ids), bool)
    values = column.cast(pa.int64()).to_numpy()
    values = values if ascending else ~values
    wanted = min(wanted, len(ids))
    order = np.lexsort((values, ids))
    begins = np.flatnonzero(starts(ids[order]))
    ends = np.append(begins[1:], len(order))
    worst = values[order[np.minimum(begins + wanted, ends) - 1]]
    found = np.empty(len(order), bool)
    found[order] = values[order] <= np.repeat(worst, ends - begins)
    return found


def starts(ids: Numbers) -> Mask:
    """Where runs of one id start."""
    found = np.ones(len(ids), bool)
    found[1:] = ids[1:] != ids[:-1]
    return found
