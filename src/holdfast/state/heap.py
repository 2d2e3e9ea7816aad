"""State in the memory of the pinned workers, with base and deltas on the host's disk behind it."""

from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import psutil
import pyarrow as pa

from holdfast.data.rows import column_values
from holdfast.errors import MemoryLimitError
from holdfast.state.columns import HeapColumns
from holdfast.state.indexed import HeapIndexed
from holdfast.state.shard import Place, ShardState
from holdfast.state.tables import (
    GONE,
    MISSING,
    EntryTable,
    Table,
    TableSpec,
    ValueTable,
    decode_values,
    keys_of,
    order_bytes,
)
from holdfast.state.versions import Manifest


class _Expiry:
    """Which entries were written when, so that expiry costs what expires.

    An entry that was written again is in two buckets; the older one finds it younger and leaves it.
    """

    def __init__(self, ttl_ms: int) -> None:
        self.ttl_ms = ttl_ms
        self.written: dict[Any, int] = {}
        self._buckets: deque[tuple[int, list[Any]]] = deque()

    def note(self, entries: list[Any], at_ms: int) -> None:
        self.written.update(dict.fromkeys(entries, at_ms))
        self._buckets.append((at_ms, entries))

    def due(self, now_ms: int) -> list[Any]:
        """Entries whose time is over, in an order that depends on nothing but them. Asks nothing twice."""
        found: dict[Any, None] = {}
        for at_ms, entries in self._buckets:
            if at_ms + self.ttl_ms > now_ms:
                break
            found.update(dict.fromkeys(e for e in entries if self.written.get(e) == at_ms))
        return sorted(found, key=order_bytes)

    def forget(self, entries: Iterable[Any], now_ms: int) -> None:
        for entry in entries:
            self.written.pop(entry, None)
        while self._buckets and self._buckets[0][0] + self.ttl_ms <= now_ms:
            self._buckets.popleft()


class _HeapValues(ValueTable):
    """All values of a state in one dict."""

    def __init__(self, spec: TableSpec) -> None:
        super().__init__(spec)
        self.expiry = None if spec.ttl_ms is None else _Expiry(spec.ttl_ms)

    def absorb(self, at_ms: int) -> None:
        gone = [k for k, v in self.changes.items() if v is GONE] if self.forgets else []
        self.view.update(self.changes)
        for key in gone:
            self.view.pop(key, None)
        if self.expiry is not None:
            self.expiry.note([k for k, v in self.changes.items() if v is not GONE], at_ms)
            self.expiry.forget(gone, at_ms)
        self.changes = {}

    def load(self, rows: pa.Table) -> None:
        self.view.update(zip(keys_of(rows), _alive(rows, self.spec), strict=True))

    def loaded(self) -> None:
        for key in [k for k, v in self.view.items() if v is GONE]:
            del self.view[key]

    def expire(self, now_ms: int) -> None:
        if self.expiry is not None:
            self.changes.update(dict.fromkeys(self.expiry.due(now_ms), GONE))

    def live(self) -> int:
        return len(self.view) + self.new_keys()


class _HeapEntries(EntryTable):
    """All entries of a state in a dict of dicts."""

    def __init__(self, spec: TableSpec) -> None:
        super().__init__(spec)
        self.view: dict[Any, dict[Any, Any]] = {}
        self.expiry = None if spec.ttl_ms is None else _Expiry(spec.ttl_ms)
        self._count = 0

    def committed(self, key: Any) -> dict[Any, Any]:
        return self.view.get(key, _NOTHING)

    def committed_end(self, key: Any) -> int:
        own = self.view.get(key)
        return int(next(reversed(own))) + 1 if own else 0  # places only ever grow, so they stand in order

    def absorb(self, at_ms: int) -> None:
        self._count = self.live()
        written, gone = [], []
        for key, own in self.changes.items():
            if key in self.cleared:
                gone += [(key, s) for s in self.view.pop(key, _NOTHING)]
            into = self.view.setdefault(key, {})
            for sub, value in own.items():
                if value is GONE:
                    into.pop(sub, None)
                    gone.append((key, sub))
                else:
                    into[sub] = value
                    written.append((key, sub))
            if not into:
                del self.view[key]
        if self.expiry is not None:
            self.expiry.forget(gone, at_ms)
            self.expiry.note(written, at_ms)
        self.drop()

    def load(self, rows: pa.Table) -> None:
        subs = column_values(rows["sub"])
        for key, sub, value in zip(keys_of(rows), subs, _alive(rows, self.spec), strict=True):
            if value is not GONE:
                self.view.setdefault(key, {})[sub] = value
            elif sub is None:
                self.view.pop(key, None)
            elif key in self.view:
                self.view[key].pop(sub, None)

    def loaded(self) -> None:
        for key in [k for k, v in self.view.items() if not v]:
            del self.view[key]
        self._count = sum(map(len, self.view.values()))

    def expire(self, now_ms: int) -> None:
        if self.expiry is not None:
            for key, sub in self.expiry.due(now_ms):
                self.put(key, sub, GONE)

    def live(self) -> int:
        count = self._count
        for key, own in self.changes.items():
            before = self.view.get(key, _NOTHING)
            count -= len(before) if key in self.cleared else 0
            known = _NOTHING if key in self.cleared else before
            count += sum(1 if v is not GONE else -1 for s, v in own.items() if (s in known) == (v is GONE))
        return count


_NOTHING: dict[Any, Any] = {}
_TABLES = (_HeapValues, _HeapEntries, HeapColumns, HeapIndexed)


def _alive(rows: pa.Table, spec: TableSpec) -> list[Any]:
    values = decode_values(rows["value"], spec)
    live = rows["live"]
    if live.num_chunks and not live.combine_chunks().to_numpy(zero_copy_only=False).all():
        return [v if alive else GONE for v, alive in zip(values, column_values(live), strict=True)]
    return values


class HeapState(ShardState):
    """A shard's states in memory."""

    def __init__(self, place: Place, specs: Sequence[TableSpec]) -> None:
        super().__init__(place, specs)
        self._process = psutil.Process(os.getpid())

    def _new_table(self, spec: TableSpec) -> Table:
        if spec.tuples:
            return HeapIndexed(spec) if spec.indexed else HeapColumns(spec)
        return _HeapValues(spec) if spec.kind == "value" else _HeapEntries(spec)

    def _reset(self) -> None:
        self.tables.update({s.name: self._new_table(s) for s in self.specs})

    def _load(self, manifest: Manifest) -> None:
        written: dict[str, dict[Any, int]] = {}
        for file in manifest.files:
            for name, rows in self._folder.rows(file):
                table = self.tables.get(name)
                if isinstance(table, _TABLES):
                    table.load(rows)
                    if "at" in rows.schema.names:
                        entries = _entries_of(rows)
                        written.setdefault(name, {}).update(
                            zip(entries, column_values(rows["at"]), strict=True)
                        )
                    self.check_memory()
        for name, table in self.tables.items():
            if isinstance(table, _TABLES):
                table.loaded()
                if isinstance(table, _HeapValues | _HeapEntries):
                    _remember(table, written.get(name, {}))

    def _absorb(self, now_ms: int) -> None:
        for table in self.tables.values():
            if isinstance(table, _TABLES):
                table.absorb(now_ms)

    def _expire(self, now_ms: int) -> None:
        for table in self.tables.values():
            if isinstance(table, _TABLES):
                table.expire(now_ms)

    def _live(self) -> dict[str, int]:
        return {n: t.live() for n, t in self.tables.items() if isinstance(t, _TABLES)}

    def check_memory(self) -> None:
        used = self._process.memory_info().rss
        if used > self.place.heap_limit_bytes:
            gc.collect()  # what is garbage in a circle is not looked for after each epoch
            used = self._process.memory_info().rss
        if used > self.place.heap_limit_bytes:
            raise MemoryLimitError(
                f"Shard {self.place.shard} takes {used >> 20} MB of memory; the limit is "
                f"{self.place.heap_limit_bytes >> 20} MB.",
                uid=self.place.uid,
                remedy='Raise heap_limit, use more shards in a new directory, or choose backend="rocksdb".',
            )


def _entries_of(rows: pa.Table) -> list[Any]:
    keys = keys_of(rows)
    return list(zip(keys, column_values(rows["sub"]), strict=True)) if "sub" in rows.schema.names else keys


def _remember(table: _HeapValues | _HeapEntries, written: dict[Any, int]) -> None:
    """Rebuild the buckets of expiry after a load."""
    if table.expiry is None:
        return
    buckets: dict[int, list[Any]] = {}
    for entry, at_ms in written.items():
        if isinstance(table, _HeapValues):
            alive = entry in table.view
        else:
            alive = table.view.get(entry[0], _NOTHING).get(entry[1], MISSING) is not MISSING
        if alive:
            buckets.setdefault(at_ms, []).append(entry)
    for at_ms in sorted(buckets):
        table.expiry.note(buckets[at_ms], at_ms)
