"""What `self.total` is while `process` runs: the declared state, bound to the key of the record at hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from holdfast.data.rows import copier
from holdfast.data.types import is_immutable
from holdfast.state.descriptors import State, ValueState
from holdfast.state.tables import GONE, MISSING, EntryTable, Table, TableSpec, ValueTable


def spec_of(state: State) -> TableSpec:
    """The table that a declared state needs."""
    return TableSpec(
        name=state.name,
        kind=state.kind,
        value_type=state.value_type,
        sub_type=state.sub_type,
        ttl_ms=None if state.ttl_s is None else int(state.ttl_s * 1000),
        default=getattr(state, "default", None),
    )


class PlainValue:
    """A value that can't be changed in place: loaded before a record and stored after it, by the loop.

    `value` is a bare slot, so that reading and writing it costs as little as Python allows.
    """

    __slots__ = ("default", "gone", "table", "value")

    def __init__(self, table: ValueTable) -> None:
        self.table = table
        self.default = table.spec.default
        self.value = self.default
        self.gone = False

    def clear(self) -> None:
        """Forget the key's value."""
        self.value = self.default
        self.gone = True


class Hand:
    """The key of the record at hand, for all handles that look their state up only when they are asked."""

    __slots__ = ("key", "touched")

    def __init__(self) -> None:
        self.key: Any = None
        self.touched: list[NestedValue] = []
        """Those that may have to store something when the record is through."""

    def flush(self) -> None:
        """A record is through that touched some."""
        for one in self.touched:
            one.flush()
        self.touched.clear()


class NestedValue:
    """A value with lists or dicts in it, or with a TTL: copied when it is first looked at.

    It is stored if it came out different; with a TTL also if the same was assigned again, which renews it.
    """

    __slots__ = ("_assigned", "_cleared", "_copy", "_hand", "_loaded", "_table", "_value")

    def __init__(self, table: ValueTable, hand: Hand) -> None:
        self._table = table
        self._hand = hand
        self._copy = copier(table.spec.value_type)
        self._value: Any = None
        self._loaded = self._assigned = self._cleared = False

    @property
    def value(self) -> Any:
        if not self._loaded:
            stored = self._table.get(self._hand.key)
            self._hold(self._copy(self._table.spec.default if stored is MISSING else stored))
        elif self._value is GONE:
            self._value, self._cleared = self._copy(self._table.spec.default), True
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        self._hold(value)
        self._assigned = True

    def clear(self) -> None:
        """Forget the key's value."""
        self._hold(GONE)
        self._assigned = False

    def _hold(self, value: Any) -> None:
        self._value = value
        if not self._loaded:
            self._loaded = True
            self._hand.touched.append(self)

    def flush(self) -> None:
        key, value, table = self._hand.key, self._value, self._table
        renewed = self._assigned and table.spec.ttl_ms is not None
        unset = self._cleared and not self._assigned and value == table.spec.default
        forgotten = value is GONE or unset
        self._loaded = self._assigned = self._cleared = False
        stored = table.get(key)
        if forgotten:
            if stored is not MISSING:
                table.changes[key] = GONE
        elif renewed:
            table.changes[key] = self._copy(value)
        elif stored is MISSING and value == table.spec.default:
            return
        elif stored is MISSING or stored != value:
            table.changes[key] = self._copy(value)


class Entries:
    """What maps and lists have in common."""

    __slots__ = ("_copy", "_hand", "_table")

    def __init__(self, table: EntryTable, hand: Hand) -> None:
        self._table = table
        self._hand = hand
        self._copy = copier(table.spec.value_type)

    def clear(self) -> None:
        """Forget everything under this key."""
        if self._table.has_any(self._hand.key):
            self._table.clear(self._hand.key)

    def __len__(self) -> int:
        return len(self._table.entries(self._hand.key))

    def __bool__(self) -> bool:
        return self._table.has_any(self._hand.key)


class MapEntries(Entries):
    """A `MapState`, used like a dict; iterates in the order of its keys."""

    __slots__ = ()

    def __getitem__(self, sub: Any) -> Any:
        value = self._table.get(self._hand.key, sub)
        if value is MISSING:
            raise KeyError(sub)
        return self._copy(value)

    def __setitem__(self, sub: Any, value: Any) -> None:
        self._table.put(self._hand.key, sub, self._copy(value))

    def __delitem__(self, sub: Any) -> None:
        if self._table.get(self._hand.key, sub) is MISSING:
            raise KeyError(sub)
        self._table.put(self._hand.key, sub, GONE)

    def __contains__(self, sub: Any) -> bool:
        return self._table.get(self._hand.key, sub) is not MISSING

    def __iter__(self) -> Iterator[Any]:
        return iter([s for s, _ in self._table.entries(self._hand.key)])

    def get(self, sub: Any, default: Any = None) -> Any:
        value = self._table.get(self._hand.key, sub)
        return default if value is MISSING else self._copy(value)

    def pop(self, sub: Any, default: Any = None) -> Any:
        value = self._table.get(self._hand.key, sub)
        if value is MISSING:
            return default
        self._table.put(self._hand.key, sub, GONE)
        return self._copy(value)

    def items(self) -> Iterator[tuple[Any, Any]]:
        return iter([(s, self._copy(v)) for s, v in self._table.entries(self._hand.key)])

    def keys(self) -> Iterator[Any]:
        return iter(self)

    def values(self) -> Iterator[Any]:
        return iter([self._copy(v) for _, v in self._table.entries(self._hand.key)])


class ListEntries(Entries):
    """A `ListState`; appending stores only what was appended."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return iter([self._copy(v) for _, v in self._table.entries(self._hand.key)])

    def add(self, value: Any) -> None:
        self._table.append(self._hand.key, (self._copy(value),))

    def extend(self, values: Iterable[Any]) -> None:
        self._table.append(self._hand.key, map(self._copy, values))

    def update(self, values: Iterable[Any]) -> None:
        """Replace the whole list."""
        values = list(values)
        self.clear()
        self.extend(values)


Handle = PlainValue | NestedValue | MapEntries | ListEntries


def handle_for(state: State, table: Table, hand: Hand) -> Handle:
    """The handle for a declared state over its table."""
    if isinstance(table, ValueTable):
        assert isinstance(state, ValueState)
        plain = is_immutable(state.value_type) and state.ttl_s is None
        return PlainValue(table) if plain else NestedValue(table, hand)
    return MapEntries(table, hand) if state.kind == "map" else ListEntries(table, hand)
