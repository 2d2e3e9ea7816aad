"""A state of one shard while an epoch is applied: what was committed, and the changes of this attempt.

The changes are an overlay: nothing that was committed is touched before the driver's decision is known.
A table is filled by a backend, read and written by handles, and sealed into Arrow rows (`to_arrow`):

    key columns k0, k1, …   [x0, x1, …]   [sub]   value   live   [at]

The columns x0, x1, … are parts of the key beside the operator's own (`TableSpec.extra`). `sub` is a map's inner key or a list's place; a row with `live` false forgets, and with a null `sub` as
well it forgets everything under its key. `at` is when the value was written, where the state has a TTL.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.data.exact import MISFITS, exact_array
from holdfast.data.rows import column_values, one_array
from holdfast.data.shown import shown
from holdfast.errors import StateError, StateTypeError
from holdfast.state.due import EARLIEST, LATEST
from holdfast.state.index import KeyColumns

_COUNTED = 10_000
FIRST_NUMBER = 1 << 32
"""Numbers of entries that are owned start here, and stay below 1 << 63: so all take the same room in bytes."""


class _Gone:
    def __repr__(self) -> str:
        return "GONE"

    def __reduce__(self) -> str:
        return "GONE"


GONE: Any = _Gone()
"""In an overlay: this was forgotten."""

MISSING: Any = object()
"""From a look-up: there is nothing."""


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """What a state is: name, kind, types. `tuples`: values are tuples (of an aggregate), stored as structs.

    Tables of tuples may have two more. `extra`: types of key parts behind the operator's own key, as a window's
    start; keys are flat tuples then, also where the operator's key is one column. `due`: the field of the value,
    int64 and never null, that says at which microsecond the entry is due. `owned`: the last part of the key is a
    number from `FIRST_NUMBER` on, and all entries that share the rest, their owner, can be asked for (`under`).
    `named`: which fields the value has, and their order, may change as more of the records is known; they are stored
    by their names, and what is not there is null. `indexed`: keys are only found and staged as columns, and none is
    ever forgotten.
    """

    name: str
    kind: str
    value_type: pa.DataType
    sub_type: pa.DataType | None = None
    ttl_ms: int | None = None
    default: Any = None
    tuples: bool = False
    extra: tuple[pa.DataType, ...] = ()
    due: str | None = None
    owned: bool = False
    named: bool = False
    indexed: bool = False

    def __post_init__(self) -> None:
        assert self.tuples or not (self.extra or self.due), f"{self.name}: only tables of tuples have these"
        assert self.extra or not self.owned, f"{self.name}: what is owned has a number behind its key"

    @property
    def due_at(self) -> int | None:
        """Where in the value the due time stands."""
        return None if self.due is None else int(self.value_type.get_field_index(self.due))


class ValueTable:
    """One value for each key."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.view: dict[Any, Any] = {}
        self.changes: dict[Any, Any] = {}
        self.forgets = True
        """Whether some change forgets a key; known once the changes are sealed."""

    def prefetch(self, keys: Iterable[Any]) -> None:
        """Have `view` hold what is committed for these keys. The heap has all of them anyway."""

    def get(self, key: Any) -> Any:
        """The value of a key as this attempt sees it, or MISSING."""
        value = self.changes.get(key, MISSING)
        if value is MISSING:
            value = self.view.get(key, MISSING)
        return MISSING if value is GONE else value

    def drop(self) -> None:
        """Forget the changes of this attempt."""
        self.changes = {}

    def find(self, keys: list[Any]) -> tuple[npt.NDArray[np.bool_], list[pa.Array]]:
        """For tuples: which keys have a committed value, and the values as columns, null where there is none."""
        lookup = self.view.get
        found = [lookup(k, MISSING) for k in keys]
        known = np.fromiter((f is not MISSING for f in found), dtype=bool, count=len(found))
        kinds = [self.spec.value_type.field(i).type for i in range(self.spec.value_type.num_fields)]
        blank = (None,) * len(kinds)
        values = [f if k else blank for f, k in zip(found, known.tolist(), strict=True)]
        columns = zip(*values, strict=True) if values else ((),) * len(kinds)
        return known, [pa.array(list(c), type=t) for c, t in zip(columns, kinds, strict=True)]

    def stage(
        self, keys: list[Any], columns: list[pa.Array], gone: npt.NDArray[np.bool_] | None = None
    ) -> None:
        """For tuples: the new values of keys, as columns. Where `gone`, the key is forgotten, whatever they hold.

        Keys come once each and were prefetched. A second call in an epoch replaces the first.
        """
        values: Iterable[Any] = zip(*(column_values(c) for c in columns), strict=True)
        if gone is not None:
            values = (GONE if dead else v for v, dead in zip(values, gone.tolist(), strict=True))
        self.changes = dict(zip(keys, values, strict=True))

    def find_columns(self, keys: KeyColumns) -> tuple[npt.NDArray[np.bool_], list[pa.Array]]:
        """`find`, for keys as columns."""
        return self.find(keys.values())

    def stage_columns(self, keys: KeyColumns, columns: list[pa.Array]) -> None:
        """`stage`, for keys as columns, of which none is forgotten."""
        self.stage(keys.values(), columns)

    def due(self, upto: int) -> list[Any]:
        """Committed keys that are due at `upto` or before, by due time and then by their bytes."""
        return self.between(EARLIEST, upto + 1)

    def between(self, low: int, high: int) -> list[Any]:
        """Committed keys that are due from `low` on and before `high`, in the order of `due`."""
        first, last = max(low, EARLIEST), min(high - 1, LATEST)
        return self._due_keys(first, last) if first <= last else []

    def under(self, owners: list[Any], groups: Callable[[], npt.NDArray[np.uint16]]) -> list[Any]:
        """Committed keys of these owners; their values can be found from then on. `groups` are the owners', if need be."""
        raise NotImplementedError

    def next_due(self, since: int = EARLIEST) -> int | None:
        """The earliest due time, from `since` on, of all that is committed; None where there is nothing."""
        raise NotImplementedError

    def first_due(self, since: int) -> int | None:
        """The earliest due time from `since` on, with what this attempt changes; what it has put off counts as it was."""
        found = [due for due in self._staged_dues() if due >= since]
        stored = self.next_due(since)
        return min(found if stored is None else [*found, stored], default=None)

    def _staged_dues(self) -> Iterable[int]:
        """When what is staged is due."""
        at = self.spec.due_at
        assert at is not None, f"{self.spec.name} has no due times"
        return (value[at] for value in self.changes.values() if value is not GONE)

    def _due_keys(self, first: int, last: int) -> list[Any]:
        """Committed keys that are due from `first` to `last`, both included, in order."""
        raise NotImplementedError

    def new_keys(self) -> int:
        """By how many keys the changes make the table grow; `view` must know which of them it has.

        For many changes to a large table it is projected from a sample: to look all of them up once more
        would cost more than writing them. Not so where keys come and go: there an error would stay for ever.
        """
        lasting = not (self.forgets or self.spec.extra or self.spec.due)
        if len(self.changes) > _COUNTED and len(self.view) > _COUNTED and lasting:
            sample = list(itertools.islice(self.changes, 0, None, len(self.changes) // _COUNTED))
            known = sum(k in self.view for k in sample)
            return len(self.changes) * (len(sample) - known) // len(sample)
        if self.forgets:
            changes = self.changes.items()
            return sum(1 if v is not GONE else -1 for k, v in changes if (k in self.view) == (v is GONE))
        return len(self.changes) - len(self.changes.keys() & self.view.keys())

    def to_arrow(self, key_types: Sequence[pa.DataType], now_ms: int, uid: str) -> pa.Table | None:
        """The changes as rows, and the overlay normalised to exactly what a reload would read."""
        if not self.changes:
            return None
        keys, values = list(self.changes), list(self.changes.values())
        gone = [v is GONE for v in values] if values.count(GONE) else None
        if gone is not None:
            blank = (None,) * self.spec.value_type.num_fields if self.spec.tuples else None
            values = [blank if dead else v for v, dead in zip(values, gone, strict=True)]
        array = encode_values(values, self.spec, keys, uid)
        if gone is not None or not _reads_back(values, self.spec.value_type):
            normal = decode_values(array, self.spec)
            if gone is not None:
                normal = [GONE if dead else v for v, dead in zip(normal, gone, strict=True)]
            self.changes = dict(zip(keys, normal, strict=True))
        self.forgets = gone is not None
        live = pa.array([True] * len(keys)) if gone is None else pa.array([not dead for dead in gone])
        return delta_rows(key_columns(keys, key_types, uid), None, array, live, self.spec, now_ms)


_EXACT = {pa.float64(): float, pa.int64(): int, pa.string(): str, pa.bool_(): bool, pa.binary(): bytes}


def _reads_back(values: list[Any], kind: pa.DataType) -> bool:
    """Whether values are already what a reload would read, so that nothing needs to be normalised."""
    return set(map(type, values)) == {_EXACT.get(kind)}


class EntryTable:
    """A map of entries for each key: `MapState` by inner key, `ListState` by place."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.changes: dict[Any, dict[Any, Any]] = {}
        self.cleared: set[Any] = set()
        self._ends: dict[Any, int] = {}
        """For lists that were appended to: the place behind the last."""

    def committed(self, key: Any) -> dict[Any, Any]:
        """The committed entries of a key. Not to be changed by the caller."""
        raise NotImplementedError

    def committed_subs(self, key: Any) -> Iterable[Any]:
        """The committed inner keys or places of a key, one after the other."""
        return self.committed(key)

    def committed_entry(self, key: Any, sub: Any) -> Any:
        """One committed entry, or MISSING."""
        return self.committed(key).get(sub, MISSING)

    def committed_end(self, key: Any) -> int:
        """For lists: the place behind the last one that is committed."""
        raise NotImplementedError

    def get(self, key: Any, sub: Any) -> Any:
        """One entry as this attempt sees it, or MISSING."""
        own = self.changes.get(key)
        if own is not None:
            value = own.get(sub, MISSING)
            if value is not MISSING:
                return MISSING if value is GONE else value
        return MISSING if key in self.cleared else self.committed_entry(key, sub)

    def entries(self, key: Any) -> list[tuple[Any, Any]]:
        """All entries of a key as this attempt sees them, sorted by inner key or place."""
        seen = {} if key in self.cleared else self.committed(key)
        own = self.changes.get(key)
        if own:
            seen = {s: v for s, v in {**seen, **own}.items() if v is not GONE}
        if not seen:
            return []
        order = sorted(seen) if _sortable(seen) else sorted(seen, key=repr)
        return [(s, seen[s]) for s in order]

    def has_any(self, key: Any) -> bool:
        """Whether a key has entries, as this attempt sees it."""
        own = self.changes.get(key) or _NOTHING
        if own and any(v is not GONE for v in own.values()):
            return True
        if key in self.cleared:
            return False
        return next((True for s in self.committed_subs(key) if s not in own), False)

    def drop(self) -> None:
        """Forget the changes of this attempt."""
        self.changes, self.cleared, self._ends = {}, set(), {}

    def put(self, key: Any, sub: Any, value: Any) -> None:
        self.changes.setdefault(key, {})[sub] = value

    def append(self, key: Any, values: Iterable[Any]) -> None:
        """For lists: put values behind the last, without a look at what is there."""
        end = self._ends.get(key)
        if end is None:
            end = self._end(key)
        for place, value in enumerate(values, end):
            self.put(key, place, value)
            self._ends[key] = place + 1

    def _end(self, key: Any) -> int:
        if self.changes.get(key):  # what outlived its TTL, for appends have their end in `_ends`
            entries = self.entries(key)
            return int(entries[-1][0]) + 1 if entries else 0
        return 0 if key in self.cleared else self.committed_end(key)

    def clear(self, key: Any) -> None:
        self.cleared.add(key)
        self.changes[key] = {}
        self._ends.pop(key, None)

    def to_arrow(self, key_types: Sequence[pa.DataType], now_ms: int, uid: str) -> pa.Table | None:
        """The changes as rows, and the overlay normalised to exactly what a reload would read."""
        keys: list[Any] = []
        subs: list[Any] = []
        values: list[Any] = []
        live: list[bool] = []
        for key, own in self.changes.items():
            if key in self.cleared:
                keys.append(key)
                subs.append(None)
                values.append(None)
                live.append(False)
            for sub, value in own.items():
                keys.append(key)
                subs.append(sub)
                values.append(None if value is GONE else value)
                live.append(value is not GONE)
        if not keys:
            return None
        array = encode_values(values, self.spec, keys, uid)
        assert self.spec.sub_type is not None
        inner = _array(subs, self.spec.sub_type, self.spec, keys, uid)
        rebuilt: dict[Any, dict[Any, Any]] = {key: {} for key in self.changes}
        for key, sub, value, alive in zip(
            keys, column_values(inner), decode_values(array, self.spec), live, strict=True
        ):
            if sub is not None or key not in self.cleared:
                rebuilt[key][sub] = value if alive else GONE
        self.changes = rebuilt
        return delta_rows(key_columns(keys, key_types, uid), inner, array, pa.array(live), self.spec, now_ms)


Table = ValueTable | EntryTable


_NOTHING: dict[Any, Any] = {}
_SORTED = {int, str, bytes, float, bool}


def _sortable(seen: dict[Any, Any]) -> bool:
    kinds = set(map(type, seen))
    return len(kinds) == 1 and kinds <= _SORTED


def delta_rows(
    keys: list[pa.Array], sub: pa.Array | None, value: pa.Array, live: pa.Array, spec: TableSpec, now_ms: int
) -> pa.Table:
    own = len(keys) - len(spec.extra)
    names = [f"k{i}" if i < own else f"x{i - own}" for i in range(len(keys))]
    arrays = list(keys)
    if sub is not None:
        names.append("sub")
        arrays.append(sub)
    names += ["value", "live"]
    arrays += [value, live]
    if spec.ttl_ms is not None:
        names.append("at")
        arrays.append(pa.array([now_ms] * len(value), pa.int64()))
    return pa.Table.from_arrays(arrays, names=names)


def key_columns(keys: list[Any], types: Sequence[pa.DataType], uid: str) -> list[pa.Array]:
    """Keys as Arrow columns: one, or one for each part of a tuple."""
    if len(types) == 1:
        return [pa.array(keys, type=types[0])]
    return [pa.array(list(part), type=t) for part, t in zip(zip(*keys, strict=True), types, strict=True)]


def key_names(schema: pa.Schema, marks: str = "kx") -> list[str]:
    """The names of stored key columns: the operator's own (`k`), those beside it (`x`), or both."""
    return [n for n in schema.names if n[0] in marks and n[1:].isdigit()]


def keys_of(table: pa.Table) -> list[Any]:
    """The keys of stored rows as Python values: tuples where the key has several columns."""
    columns = [column_values(table.column(n)) for n in key_names(table.schema)]
    return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))


def encode_values(values: list[Any], spec: TableSpec, keys: list[Any], uid: str) -> pa.Array:
    """Values as an Arrow array of the declared type, or an error that names state, key and value."""
    if spec.tuples:
        fields = [spec.value_type.field(i) for i in range(spec.value_type.num_fields)]
        columns = zip(*values, strict=True)
        return pa.StructArray.from_arrays(
            [_array(list(c), f.type, spec, keys, uid) for c, f in zip(columns, fields, strict=True)],
            fields=fields,
        )
    return _array(values, spec.value_type, spec, keys, uid)


def _array(values: list[Any], kind: pa.DataType, spec: TableSpec, keys: list[Any], uid: str) -> pa.Array:
    try:
        return exact_array(values, kind)
    except MISFITS as error:
        for key, value in zip(keys, values, strict=True):
            try:
                exact_array([value], kind)
            except MISFITS:
                raise StateTypeError(
                    f"State {spec.name!r} is declared as {kind}, but key {shown(key)} was given {shown(value)}.",
                    uid=uid,
                    remedy="Convert the value before you store it, or declare the state with a type that fits.",
                ) from None
        raise StateError(f"State {spec.name!r} can't be stored: {error}", uid=uid) from None


def decode_values(array: pa.Array | pa.ChunkedArray, spec: TableSpec) -> list[Any]:
    """Stored values as Python values."""
    if not spec.tuples:
        return column_values(array)
    return list(zip(*(column_values(c) for c in parts_of(one_array(array), spec)), strict=True))


def parts_of(array: pa.StructArray, spec: TableSpec) -> list[pa.Array]:
    """The columns of stored tuples, by name: they may have been written when there were others."""
    found = dict(zip((f.name for f in array.type), array.flatten(), strict=True))
    return [
        found[f.name].cast(f.type) if f.name in found else pa.nulls(len(array), f.type)
        for f in spec.value_type
    ]


def order_bytes(key: Any) -> bytes:
    """Bytes that order keys the same everywhere."""
    return _ENCODE(key)


_ENCODE: Callable[[Any], bytes] = msgspec.msgpack.Encoder(decimal_format="string").encode
