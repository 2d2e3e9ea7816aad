"""Sessions of aggregates, all keys at once: what a shard keeps of them, merges and emits.

The sessions of a key are in slots 0, 1, 2 …, in any order; the first says how many there are. One that goes leaves its slot
to the last. So what is written is what came, what goes, and as many others as go, however many are kept.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.data.rows import canonical, one_array
from holdfast.engine.aggregate import key_columns_of
from holdfast.engine.keyed import Work
from holdfast.engine.keys import key_ids, keys_in, numbering
from holdfast.engine.window_combiners import END, START, Mask, Times, integers
from holdfast.engine.windowed import DUE, Windows
from holdfast.state.tables import TableSpec
from holdfast.time.merging import Merged, merge_sessions
from holdfast.time.windows import late

_FROM, _TO, _SLOTS = "window.start", "window.end", "window.slots"
_SESSION = "__session"
_NOWHERE = np.iinfo(np.int64).max


@dataclasses.dataclass(frozen=True)
class Stored:
    """Sessions that are kept, a row for each that was read."""

    ids: Times
    """The number of its key."""
    starts: Times
    ends: Times
    values: list[pa.Array]
    at: Times
    """Its slot."""
    dues: Times
    counts: Times
    """How many slots its key has, where it is the first; 0 elsewhere."""
    slots: Times
    """Of each key, whatever was read: how many slots it has."""


class Sessions(Windows):
    """The open sessions of a shard, and those that are kept for late records."""

    bounds = (START, END)
    fields = ((DUE, pa.int64()), (_FROM, pa.int64()), (_TO, pa.int64()), (_SLOTS, pa.int64()))

    def apply(self, work: Work) -> None:
        kept = self._kept(work)
        table, names = self._came(work)
        due = kept.due(work.after)
        owners = numbering()
        """Each key without its slot, and a number for it."""

        def number(keys: list[Any]) -> Times:
            return np.fromiter(map(owners.__getitem__, keys), np.int64, count=len(keys))

        sides: list[tuple[Times, Times, Times, list[pa.Array]]] = []
        if table is not None:
            came = number(_tuples(keys_in(table, names)))
            sides.append((came, integers(table[START]), integers(table[END]), self._values(table, kept.spec)))
        behind_rows, behind_of = np.empty(0, np.int64), np.empty(0, np.int64)
        if work.behind is not None:
            mine, behind_of = self._maybe_late(work, number, kept.spec)
            sides.append(mine)
            behind_rows = np.arange(len(mine[0]))
        touched = len(owners)
        number([k[:-1] for k in due])
        stored = self._stored(work, owners, touched, due)
        if not len(stored.ids) and not sides:
            return
        parts = [(stored.ids, stored.starts, stored.ends, stored.values), *sides]
        ids, starts, ends = (np.concatenate([np.asarray(p[i]) for p in parts]) for i in range(3))
        values = [pa.concat_arrays([p[3][i] for p in parts]) for i in range(len(self._parts.names))]
        kind = np.concatenate([np.full(len(p[0]), min(n, 1)) for n, p in enumerate(parts)])
        if work.behind is not None:
            kind[len(kind) - len(behind_rows) :] = 2
        self._settle(work, list(owners), stored, ids, starts, ends, values, kind, behind_of)

    def _maybe_late(
        self, work: Work, number: Any, spec: TableSpec
    ) -> tuple[tuple[Times, Times, Times, list[pa.Array]], Times]:
        """Records that are late unless they touch an open session: as partial sessions, and which one each is in."""
        table = work.behind
        assert table is not None
        names = key_columns_of(work.key, table.schema)
        if not work.state.key_types:
            work.state.key_types = [table.schema.field(n).type for n in names]
        merged = merge_sessions(integers(table[START]), integers(table[END]), key_ids(table, names))
        rows = table.drop_columns(list(self.bounds)).append_column(_SESSION, pa.array(merged.rows))
        made = self._parts.partial(rows, [*names, _SESSION], self.redact, (_SESSION,))
        which = integers(made[_SESSION])
        ids = number(_tuples(keys_in(made, names)))
        place = np.empty(len(which), np.int64)
        place[which] = np.arange(len(which))
        return (ids, merged.starts[which], merged.ends[which], self._values(made, spec)), place[merged.rows]

    def _stored(self, work: Work, owners: dict[Any, int], touched: int, due: list[Any]) -> Stored:
        """The sessions that are kept of keys: of those that something came for all, of others what is due.

        And as many of the last as are due: they take the places of those that go.
        """
        names = list(owners)
        known, heads = self._find(work, [(*o, 0) for o in names])
        slots = heads[3].fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        wanted: dict[tuple[int, int], None] = {}
        for i in np.flatnonzero(slots[:touched] > 1).tolist():
            wanted.update(dict.fromkeys((i, slot) for slot in range(1, slots[i])))
        last = slots.copy()
        for key in due:
            i = owners[key[:-1]]
            if i >= touched:
                last[i] -= 1
                wanted.update(dict.fromkeys(((i, key[-1]), (i, int(last[i])))))
        rest = [(i, slot) for i, slot in wanted if slot > 0]
        there, found = self._find(work, [(*names[i], slot) for i, slot in rest])
        assert there.all(), f"{work.ctx.uid}: a session is gone"
        hits = np.flatnonzero(known)
        taken = pa.array(hits)
        columns = [pa.concat_arrays([h.take(taken), f]) for h, f in zip(heads, found, strict=True)]
        ids = np.concatenate([hits, np.fromiter((i for i, _ in rest), np.int64, count=len(rest))])
        at = np.concatenate(
            [np.zeros(len(hits), np.int64), np.fromiter((s for _, s in rest), np.int64, count=len(rest))]
        )
        dues, starts, ends, counts = (
            np.asarray(columns[i].to_numpy(zero_copy_only=False), np.int64) for i in range(4)
        )
        return Stored(ids, starts, ends, columns[4:], at, dues, counts, slots)

    def _settle(
        self,
        work: Work,
        owners: list[Any],
        stored: Stored,
        ids: Times,
        starts: Times,
        ends: Times,
        values: list[pa.Array],
        kind: Times,
        behind_of: Times,
    ) -> None:
        """Merge what is kept with what came; emit what has ended, keep the rest, and give back what is too late."""
        kept = self._kept(work)
        merged = merge_sessions(starts, ends, ids)
        count = len(merged.starts)
        table = pa.table({_SESSION: merged.rows, **dict(zip(self._parts.names, values, strict=True))})
        made = self._parts.merged(table, [_SESSION], self.redact)
        back = np.argsort(integers(made[_SESSION]))
        parts = [canonical(one_array(made[n]).take(pa.array(back))) for n in self._parts.names]

        def any_of(mask: Mask) -> Mask:
            return np.bincount(merged.rows[mask], minlength=count) > 0

        fired, waits = np.zeros(len(ids), bool), np.zeros(len(ids), bool)
        mine = slice(len(stored.ids))
        fired[mine] = stored.dues != stored.ends - 1  # kept for its lateness, whatever that is by now
        waits[mine] = stored.dues > work.after
        solid, touched, had = any_of(kind < 2), any_of(kind > 0), any_of(fired)
        if work.behind is not None:
            first = len(kind) - int((kind == 2).sum())
            lost = ~solid[merged.rows[first:]]
            rows = lost[behind_of]
            if rows.any():
                self._push_late(work, work.behind.filter(pa.array(rows)))
        last = merged.ends - 1
        fires = solid & (last <= work.after) & (touched | ~had)
        # What nothing came to stays until it is due, whatever lateness is by now: of other keys only what is due was read.
        stays = any_of(waits) & ~touched
        lives = solid & (stays | ~late(last, work.after, self._body.lateness_us))
        self._keep(work, owners, stored, merged, np.flatnonzero(lives), parts)
        work.state.check_memory()
        at = np.flatnonzero(fires)
        names = [owners[i] for i in merged.groups[at].tolist()]
        groups = work.state.groups([(*n, 0) for n in names], kept.spec)
        taken = pa.array(at)
        self._emit(work, names, merged.starts[at], merged.ends[at], [p.take(taken) for p in parts], groups)

    def _keep(
        self,
        work: Work,
        owners: list[Any],
        stored: Stored,
        merged: Merged,
        at: Times,
        parts: list[pa.Array],
    ) -> None:
        """Write the sessions that go on and are not as they were, and forget the slots that are left over."""
        mine = merged.groups[at]
        read = np.bincount(stored.ids, minlength=len(owners))
        used = np.bincount(mine, minlength=len(owners)) + stored.slots - read
        homes, was = self._as_they_were(stored, merged)
        slot = seated(mine, homes[at], used, stored)
        due = self._due_after(merged.ends[at] - 1, work.after)
        due = np.where((was[at, 0] >= 0) & (was[at, 1] > work.after), was[at, 1], due)
        told = np.where(slot == 0, used[mine], 0)
        changed = np.flatnonzero((was[at] != np.stack([slot, due, told], axis=1)).any(axis=1))
        at, mine, slot, due, told = at[changed], mine[changed], slot[changed], due[changed], told[changed]
        keys = [(*owners[i], s) for i, s in zip(mine.tolist(), slot.tolist(), strict=True)]
        over = np.flatnonzero(stored.slots > used)
        left = [(*owners[i], s) for i in over.tolist() for s in range(used[i], stored.slots[i])]
        if not keys and not left:
            return
        taken = pa.array(at)
        columns = [pa.array(due), pa.array(merged.starts[at]), pa.array(merged.ends[at]), pa.array(told)]
        columns += [p.take(taken) for p in parts]
        gone = np.zeros(len(keys) + len(left), bool)
        gone[len(keys) :] = True
        if left:
            zeros = pa.array(np.zeros(len(left), np.int64))
            blank = [zeros] * 4 + [pa.nulls(len(left), c.type) for c in columns[4:]]
            columns = [pa.concat_arrays([c, b]) for c, b in zip(columns, blank, strict=True)]
        self._kept(work).stage(keys + left, columns, gone)

    @staticmethod
    def _as_they_were(stored: Stored, merged: Merged) -> tuple[Times, Times]:
        """Of each session a slot that it had, -1 for none; and if nothing came to it, what its entry says besides its values."""
        count = len(merged.starts)
        mine = merged.rows[: len(stored.ids)]
        homes = np.full(count, _NOWHERE)
        np.minimum.at(homes, mine, stored.at)
        homes[homes == _NOWHERE] = -1
        was = np.full((count, 3), -1, np.int64)
        was[mine] = np.stack([stored.at, stored.dues, stored.counts], axis=1)
        was[np.bincount(merged.rows, minlength=count) > 1] = -1
        return homes, was


def seated(mine: Times, homes: Times, used: Times, stored: Stored) -> Times:
    """A slot for each session that goes on, below the number that its key has now: the one it had, if it can stay.

    `mine` are the numbers of their keys, in order; sessions that were not read stay where they are.
    """
    seats = np.where((homes >= 0) & (homes < used[mine]), homes, -1)
    standing = np.flatnonzero(seats < 0)
    new = standing[stored.slots[mine[standing]] == 0]
    begins = np.flatnonzero(np.r_[True, mine[new][1:] != mine[new][:-1]]) if len(new) else new
    seats[new] = np.arange(len(new)) - np.repeat(begins, np.diff(np.append(begins, len(new))))
    others: dict[int, list[int]] = {}
    for place in standing[stored.slots[mine[standing]] > 0].tolist():
        others.setdefault(int(mine[place]), []).append(place)
    if others:
        order = np.argsort(stored.ids, kind="stable")
        ids, slots = stored.ids[order], stored.at[order]
    for key, places in others.items():
        low, high = np.searchsorted(mine, [key, key + 1])
        taken = set(seats[low:high].tolist())
        first, last = np.searchsorted(ids, [key, key + 1])
        there = {*slots[first:last].tolist(), *range(int(stored.slots[key]), int(used[key]))}
        free = sorted(slot for slot in there - taken if slot < used[key])
        seats[places] = free
    return seats


def _tuples(keys: list[Any]) -> list[Any]:
    return keys if keys and isinstance(keys[0], tuple) else [(k,) for k in keys]
