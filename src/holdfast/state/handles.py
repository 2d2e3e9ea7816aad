"""What `self.total` is while `process` runs: the declared state, bound to the key of the record at hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from holdfast.data.rows import copy_value
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


class NestedValue:
    """A value with lists or dicts in it, or with a TTL: copied when it is first looked at.

    It is stored if it came out different; with a TTL also if the same was assigned again, which renews it.
    """

    __slots__ = ("_assigned", "_key", "_loaded", "_table", "_value")

    def __init__(self, table: ValueTable) -> None:
        self._table = table
        self._loaded = self._assigned = False

    def bind(self, key: Any) -> None:
        self._key = key
        self._loaded = self._assigned = False

    @property
    def value(self) -> Any:
        if not self._loaded:
            stored = self._table.get(self._key)
            self._value = copy_value(self._table.spec.default if stored is MISSING else stored)
            self._loaded = True
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        self._value = value
        self._loaded = self._assigned = True

    def clear(self) -> None:
        """Forget the key's value."""
        self._value = GONE
        self._loaded = True

    def flush(self) -> None:
        if not self._loaded:
            return
        stored = self._table.get(self._key)
        if self._value is GONE:
            if stored is not MISSING:
                self._table.changes[self._key] = GONE
        elif self._assigned and self._table.spec.ttl_ms is not None:
            self._table.changes[self._key] = copy_value(self._value)
        elif stored is MISSING and self._value == self._table.spec.default:
            return
        elif stored is MISSING or stored != self._value:
            self._table.changes[self._key] = copy_value(self._value)


class Entries:
    """What maps and lists have in common: the key they are bound to."""

    __slots__ = ("_key", "_table")

    def __init__(self, table: EntryTable) -> None:
        self._table = table
        self._key: Any = None

    def bind(self, key: Any) -> None:
        self._key = key

    def flush(self) -> None:
        return

    def clear(self) -> None:
        """Forget everything under this key."""
        if self._table.entries(self._key):
            self._table.clear(self._key)

    def __len__(self) -> int:
        return len(self._table.entries(self._key))

    def __bool__(self) -> bool:
        return len(self) > 0


class MapEntries(Entries):
    """A `MapState`, used like a dict; iterates in the order of its keys."""

    __slots__ = ()

    def __getitem__(self, sub: Any) -> Any:
        value = self._table.get(self._key, sub)
        if value is MISSING:
            raise KeyError(sub)
        return copy_value(value)

    def __setitem__(self, sub: Any, value: Any) -> None:
        self._table.put(self._key, sub, copy_value(value))

    def __delitem__(self, sub: Any) -> None:
        if self._table.get(self._key, sub) is MISSING:
            raise KeyError(sub)
        self._table.put(self._key, sub, GONE)

    def __contains__(self, sub: Any) -> bool:
        return self._table.get(self._key, sub) is not MISSING

    def __iter__(self) -> Iterator[Any]:
        return iter([s for s, _ in self._table.entries(self._key)])

    def get(self, sub: Any, default: Any = None) -> Any:
        value = self._table.get(self._key, sub)
        return default if value is MISSING else copy_value(value)

    def pop(self, sub: Any, default: Any = None) -> Any:
        value = self._table.get(self._key, sub)
        if value is MISSING:
            return default
        self._table.put(self._key, sub, GONE)
        return value

    def items(self) -> Iterator[tuple[Any, Any]]:
        return iter([(s, copy_value(v)) for s, v in self._table.entries(self._key)])

    def keys(self) -> Iterator[Any]:
        return iter(self)

    def values(self) -> Iterator[Any]:
        return iter([copy_value(v) for _, v in self._table.entries(self._key)])


class ListEntries(Entries):
    """A `ListState`; appending stores only what was appended."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return iter([copy_value(v) for _, v in self._table.entries(self._key)])

    def add(self, value: Any) -> None:
        self._table.put(self._key, self._next(), copy_value(value))

    def extend(self, values: Iterable[Any]) -> None:
        place = self._next()
        for offset, value in enumerate(values):
            self._table.put(self._key, place + offset, copy_value(value))

    def update(self, values: Iterable[Any]) -> None:
        """Replace the whole list."""
        values = list(values)
        self.clear()
        self.extend(values)

    def _next(self) -> int:
        entries = self._table.entries(self._key)
        return int(entries[-1][0]) + 1 if entries else 0


Handle = PlainValue | NestedValue | MapEntries | ListEntries


def handle_for(state: State, table: Table) -> Handle:
    """The handle for a declared state over its table."""
    if isinstance(table, ValueTable):
        assert isinstance(state, ValueState)
        plain = is_immutable(state.value_type) and state.ttl_s is None
        return PlainValue(table) if plain else NestedValue(table)
    return MapEntries(table) if state.kind == "map" else ListEntries(table)
