"""State in RocksDB on the host's disk, for state bigger than memory.

Each worker works on a database of its own: a clone, by hard links, of the newest base (a RocksDB
checkpoint, never changed), brought up to date from the deltas after it. An epoch's changes stay in the
overlay until they are decided, so the database only ever holds what was committed. A new base is made
when the deltas since the last one pass a size.

An entry's key is

    key group (2 bytes) · state (1 byte) · length (2 bytes) · key (MessagePack) [· place (8 bytes) or inner key]

and, for states with a TTL, a second one under the reserved group 0xffff orders entries by the time they
were written, so that expiry reads what expires. For tables with due times it is one under 0xfffe: state
(1 byte) · due (8 bytes) · key. Entries there that are stale by now are removed by whoever finds them. No key
group comes near: there are 32768 at most.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import psutil
import pyarrow as pa
import rocksdict as rd

from holdfast.data import schemas
from holdfast.data.rows import column_values
from holdfast.state import codec
from holdfast.state.deltas import Damaged
from holdfast.state.due import EARLIEST, LATEST
from holdfast.state.index import KeyColumns
from holdfast.state.keygroups import key_groups
from holdfast.state.shard import Place, ShardState
from holdfast.state.tables import (
    FIRST_NUMBER,
    GONE,
    MISSING,
    EntryTable,
    Table,
    TableSpec,
    ValueTable,
    decode_values,
    key_names,
    keys_of,
    order_bytes,
)
from holdfast.state.versions import Manifest

BASE_AFTER_BYTES = 32 << 20
BASE_AFTER_DELTAS = 100
_TIME_GROUP = b"\xff\xff"
_DUE_GROUP = b"\xff\xfe"
_DUE_CHUNK = 1000
_AT = struct.Struct(">Q")
_PLACE = struct.Struct(">q")
_LAST_PLACE = _PLACE.pack((1 << 63) - 1)
_ENTRY = struct.Struct(">HBH")


class _Values(ValueTable):
    """One value for each key, looked up for the keys of an epoch at once."""

    def __init__(self, spec: TableSpec, number: int, state: RocksState) -> None:
        super().__init__(spec)
        self.number = number
        self._state = state
        self.decode, self.encode = codec.decoder(spec), codec.encoder(spec)
        self.count = 0
        self._floor = EARLIEST
        """No entry is due before this."""

    def prefetch_groups(self, keys: list[Any], groups: list[int]) -> None:
        pairs = zip(keys, groups, strict=True)
        named = [(entry_key(g, self.number, k), k) for k, g in pairs if k not in self.view]
        named.sort(key=itemgetter(0))  # in the order of the disk, where neighbours share blocks
        names, wanted = [n for n, _ in named], [k for _, k in named]
        found: Any = self._state.db.get(names)  # type: ignore[arg-type]
        skip = 8 if self.spec.ttl_ms is not None else 0
        decode = self.decode
        self.view.update((k, decode(v[skip:])) for k, v in zip(wanted, found, strict=True) if v is not None)

    def live(self) -> int:
        return self.count + self.new_keys()

    def put_due(self, batch: rd.WriteBatch, name: bytes, key: Any, value: Any) -> None:
        """Index when an entry is due from now on, and no more when it was, as far as that is known."""
        at = self.spec.due_at
        if at is None:
            return
        before = self.view.get(key)
        if before is not None and (value is GONE or before[at] != value[at]):
            batch.delete(self._due_name(before[at]) + order_bytes(key))
        if value is not GONE:
            batch.put(self._due_name(value[at]) + order_bytes(key), name)
            self._floor = min(self._floor, value[at])

    def _due_name(self, due: int) -> bytes:
        return _DUE_GROUP + bytes((self.number,)) + _AT.pack(due - EARLIEST)

    def under(self, owners: list[Any], groups: Callable[[], npt.NDArray[np.uint16]]) -> list[Any]:
        found: list[Any] = []
        if self._state.is_empty:
            return found
        for owner, group in zip(owners, groups().tolist(), strict=True):
            prefix = entry_key(group, self.number, (*owner, FIRST_NUMBER))[:-8]
            for name, data in scan(self._state.db, prefix):
                key = (*owner, int.from_bytes(name[-8:], "big"))
                self.view[key] = self.decode(data)
                found.append(key)
        return found

    def next_due(self, since: int = EARLIEST) -> int | None:
        return next((due for due, _ in self._look(since, LATEST, 16)), None)

    def _due_keys(self, first: int, last: int) -> list[Any]:
        return [key for _, key in self._look(first, last, _DUE_CHUNK)]

    def _look(self, first: int, last: int, chunk: int) -> Iterator[tuple[int, Any]]:
        """Due times and keys from `first` to `last`, in order. The values are in `view` from then on.

        Stale entries are removed. The floor follows: a scan from below it would wade through what was removed.
        """
        at = self.spec.due_at
        assert at is not None, f"{self.spec.name} has no due times"
        if self._state.is_empty or last < self._floor:
            return
        lowest = first <= self._floor
        decode_key = codec.entry_decoder(self._state.key_types, self.spec)
        end = int.from_bytes(self._due_name(last), "big") + 1
        scanned = scan(self._state.db, self._due_name(max(first, self._floor)), end.to_bytes(11, "big"))
        while part := list(itertools.islice(scanned, chunk)):
            stored: Any = self._state.db.get([name for _, name in part])
            stale = rd.WriteBatch(raw_mode=True)
            found = []
            for (mark, _), data in zip(part, stored, strict=True):
                value = None if data is None else self.decode(data)
                if value is not None and self._due_name(value[at]) == mark[:11]:
                    key = decode_key(mark[11:])
                    self.view[key] = value
                    found.append((int(value[at]), key))
                else:
                    stale.delete(mark)
            self._state.db.write(stale)
            if lowest and found:
                self._floor, lowest = found[0][0], False
            yield from found
        if lowest:
            self._floor = min(last + 1, LATEST)


class _Entries(EntryTable):
    """Entries under each key, looked up one by one or by a scan of their common prefix."""

    def __init__(self, spec: TableSpec, number: int, state: RocksState) -> None:
        super().__init__(spec)
        self.number = number
        self._state = state
        self.decode, self.encode = codec.decoder(spec), codec.encoder(spec)
        assert spec.sub_type is not None
        self.decode_sub = _decode_place if spec.kind == "list" else codec.key_decoder(spec.sub_type)
        self._skip = 8 if spec.ttl_ms is not None else 0

    def sub_bytes(self, sub: Any) -> bytes:
        return _PLACE.pack(sub) if self.spec.kind == "list" else codec.encode(sub)

    def committed(self, key: Any) -> dict[Any, Any]:
        prefix = entry_key(self._state.group, self.number, key)
        scanned = scan(self._state.db, prefix)
        return {self.decode_sub(k[len(prefix) :]): self.decode(v[self._skip :]) for k, v in scanned}

    def committed_subs(self, key: Any) -> Iterator[Any]:
        prefix = entry_key(self._state.group, self.number, key)
        return (self.decode_sub(k[len(prefix) :]) for k, _ in scan(self._state.db, prefix))

    def committed_end(self, key: Any) -> int:
        prefix = entry_key(self._state.group, self.number, key)
        cursor = self._state.db.iter()
        cursor.seek_for_prev(prefix + _LAST_PLACE)
        if not cursor.valid():
            cursor.status()  # it may not be the end, but damage
        found = cursor.key() if cursor.valid() else b""
        return _decode_place(found[len(prefix) :]) + 1 if found.startswith(prefix) else 0

    def committed_entry(self, key: Any, sub: Any) -> Any:
        stored = self._state.db.get(entry_key(self._state.group, self.number, key) + self.sub_bytes(sub))
        return MISSING if stored is None else self.decode(stored[self._skip :])

    def live(self) -> int:
        return 0


def _decode_place(data: bytes) -> int:
    return int(_PLACE.unpack(data)[0])


def entry_key(group: int, number: int, key: Any) -> bytes:
    """Where a key's entries stand. The length keeps one key from being the prefix of another."""
    packed = codec.encode(key)
    return _ENTRY.pack(group, number, len(packed)) + packed


def scan(db: rd.Rdict, prefix: bytes, end: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
    """Entries that start with a prefix, or that stand between it and `end`, in order."""
    cursor = db.iter()
    cursor.seek(prefix)
    while cursor.valid():
        key = cursor.key()
        if (end is None and not key.startswith(prefix)) or (end is not None and key >= end):
            return
        yield key, cursor.value()
        cursor.next()
    cursor.status()  # a damaged block ends a scan as if nothing came behind it


class RocksState(ShardState):
    """A shard's states in RocksDB."""

    def __init__(self, place: Place, specs: Sequence[TableSpec]) -> None:
        self._numbers = {s.name: n for n, s in enumerate(specs)}
        super().__init__(place, specs)
        self._work: Path | None = None
        self._db: rd.Rdict | None = None
        self._sweep()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is committed, so that there is no database to ask."""
        return self._db is None

    @property
    def db(self) -> rd.Rdict:
        """The database of this worker, opened when it is first needed."""
        if self._db is None:
            self._open(None)
        assert self._db is not None
        return self._db

    def _new_table(self, spec: TableSpec) -> Table:
        number = self._numbers[spec.name]
        return _Values(spec, number, self) if spec.kind == "value" else _Entries(spec, number, self)

    def prefetch(self, keys: list[Any], groups: npt.NDArray[np.uint16], table: str | None = None) -> None:
        distinct = dict(zip(keys, groups.tolist(), strict=True))
        for name, one in self.tables.items():
            wanted = not one.spec.extra if table is None else name == table
            if wanted and isinstance(one, _Values):
                one.prefetch_groups(list(distinct), list(distinct.values()))

    def prefetch_columns(self, keys: KeyColumns, table: str) -> None:
        self.prefetch(keys.values(), key_groups(keys.columns, self.place.key_groups), table)

    def _sweep(self) -> None:
        """Remove the databases of workers that are gone."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._folder.path):
                if name.startswith("w-") and not psutil.pid_exists(int(name.split("-")[1])):
                    shutil.rmtree(self._folder.path / name, ignore_errors=True)

    def _open(self, base: Path | None) -> None:
        self.close()
        self._work = self._folder.path / f"w-{os.getpid()}-{secrets.token_hex(4)}"
        os.makedirs(self._folder.path, exist_ok=True)
        if base is not None:
            clone(base, self._work)
        self._db = rd.Rdict(str(self._work), options=_options(self.place.rocksdb_cache_bytes))
        without_log = rd.WriteOptions()
        without_log.disable_wal = True  # type: ignore[method-assign,assignment]
        self._db.set_write_options(without_log)

    def close(self) -> None:
        if self._db is not None:
            with contextlib.suppress(Exception):  # its files may be gone; nothing in them is needed again
                self._db.close()
            self._db = None
        if self._work is not None:
            shutil.rmtree(self._work, ignore_errors=True)
            self._work = None

    def _reset(self) -> None:
        self.close()
        self.tables.update({s.name: self._new_table(s) for s in self.specs})

    def _load(self, manifest: Manifest) -> None:
        base = self._folder.path / manifest.base if manifest.base else None
        if base is not None and folder_bytes(base) != manifest.base_bytes:
            raise Damaged(f"{manifest.base} is missing or not whole")
        try:
            self._open(base)
        except FileNotFoundError as error:
            raise Damaged(f"{manifest.base}: {error}") from None
        except OSError:
            raise
        except Exception as error:  # rocksdict has no type of its own for what RocksDB says
            if "No space left" in str(error):
                raise OSError(errno.ENOSPC, str(error)) from None
            raise Damaged(f"{manifest.base}: {error}") from None
        for file in manifest.files:
            for name, rows in self._folder.rows(file):
                table = self.tables.get(name)
                if isinstance(table, (_Values, _Entries)):
                    self._apply(table, rows)
        for table in self.tables.values():
            if isinstance(table, _Values):
                table.count = manifest.live.get(table.spec.name, 0)

    def _apply(self, table: _Values | _Entries, rows: pa.Table) -> None:
        """Stored rows into the database, in their order."""
        live, values = column_values(rows["live"]), decode_values(rows["value"], table.spec)
        subs = column_values(rows["sub"]) if "sub" in rows.schema.names else [MISSING] * len(live)
        ats = column_values(rows["at"]) if "at" in rows.schema.names else [0] * len(live)
        keys = keys_of(rows)
        groups = self.groups(keys, table.spec).tolist()
        batch = rd.WriteBatch(raw_mode=True)
        for key, group, sub, value, alive, at in zip(keys, groups, subs, values, live, ats, strict=True):
            name = entry_key(group, table.number, key)
            if sub is None and not alive and isinstance(table, _Entries):
                self.db.write(batch)
                batch = rd.WriteBatch(raw_mode=True)
                for stored, _ in list(scan(self.db, name)):
                    batch.delete(stored)
                continue
            if isinstance(table, _Entries):
                name += table.sub_bytes(sub)
            self._put(batch, table, name, key, sub, value if alive else GONE, at)
        self.db.write(batch)

    def _put(
        self,
        batch: rd.WriteBatch,
        table: _Values | _Entries,
        name: bytes,
        key: Any,
        sub: Any,
        value: Any,
        at_ms: int,
    ) -> None:
        if isinstance(table, _Values):
            table.put_due(batch, name, key, value)
        if value is GONE:
            batch.delete(name)
        elif table.spec.ttl_ms is None:
            batch.put(name, table.encode(value))
        else:
            at = _AT.pack(at_ms)
            batch.put(name, at + table.encode(value))
            entry = key if sub is MISSING else (key, sub)
            batch.put(_TIME_GROUP + bytes((table.number,)) + at + order_bytes(entry), name)

    def _absorb(self, now_ms: int) -> None:
        for table in self.tables.values():
            if isinstance(table, _Values):
                table.count = table.live()
                self._absorb_values(table, now_ms)
            elif isinstance(table, _Entries):
                self._absorb_entries(table, now_ms)
        self._rebase()

    def _absorb_values(self, table: _Values, now_ms: int) -> None:
        batch = rd.WriteBatch(raw_mode=True)
        groups = self.groups(list(table.changes), table.spec).tolist()
        for (key, value), group in zip(table.changes.items(), groups, strict=True):
            self._put(batch, table, entry_key(group, table.number, key), key, MISSING, value, now_ms)
        self.db.write(batch)
        table.changes, table.view = {}, {}

    def _absorb_entries(self, table: _Entries, now_ms: int) -> None:
        batch = rd.WriteBatch(raw_mode=True)
        groups = self.groups(list(table.changes), table.spec).tolist()
        for (key, own), group in zip(table.changes.items(), groups, strict=True):
            prefix = entry_key(group, table.number, key)
            if key in table.cleared:
                for stored, _ in scan(self.db, prefix):
                    batch.delete(stored)
            for sub, value in own.items():
                self._put(batch, table, prefix + table.sub_bytes(sub), key, sub, value, now_ms)
        self.db.write(batch)
        table.drop()

    def _drop_overlays(self) -> None:
        super()._drop_overlays()
        for table in self.tables.values():
            if isinstance(table, _Values):
                table.view = {}

    def _rebase(self) -> None:
        """Make what is committed the new base, once the deltas since the last one are many or large."""
        manifest = self._pending
        if manifest is None or (
            manifest.delta_bytes < BASE_AFTER_BYTES and len(manifest.files) < BASE_AFTER_DELTAS
        ):
            return
        name = f"b-{manifest.epoch}-{secrets.token_hex(6)}"
        rd.Checkpoint(self.db).create_checkpoint(str(self._folder.path / name))
        size = folder_bytes(self._folder.path / name)
        self._pending = msgspec.structs.replace(manifest, base=name, base_bytes=size, files=[])
        # The same version in other files; before the old ones go, the manifest on disk must name the new.
        self._folder.write_manifest(self._pending)

    def _harvest(self) -> None:
        """Deltas are not merged here: they end in the next base."""

    def _expire(self, now_ms: int) -> None:
        for table in self.tables.values():
            if table.spec.ttl_ms is None or self._db is None:
                continue
            assert isinstance(table, (_Values, _Entries))
            start = _TIME_GROUP + bytes((table.number,))
            end = start + _AT.pack(max(0, now_ms - table.spec.ttl_ms) + 1)
            batch = rd.WriteBatch(raw_mode=True)
            due: dict[bytes, None] = {}
            for time_key, name in scan(self._db, start, end):
                stored = self._db.get(name)
                if stored is not None and stored[:8] == time_key[3:11]:
                    due[time_key[11:]] = None
                else:
                    batch.delete(time_key)
            self._db.write(batch)
            decode = codec.entry_decoder(self.key_types, table.spec)
            for entry in sorted(due):
                self._forget(table, decode(entry))

    def _forget(self, table: _Values | _Entries, entry: Any) -> None:
        if isinstance(table, _Values):
            table.changes[entry] = GONE
            table.view.setdefault(entry, None)
        else:
            key, sub = entry
            table.put(key, sub, GONE)

    def _live(self) -> dict[str, int]:
        return {n: t.live() for n, t in self.tables.items() if isinstance(t, _Values)}


def read_base(base: Path, manifest: Manifest) -> dict[str, pa.Table]:
    """The states in a base as rows of a delta, for those who look at a version without running it."""
    rows: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="holdfast-read-") as folder:
        clone(base, Path(folder) / "db")
        db = rd.Rdict(str(Path(folder) / "db"), options=_options(8 << 20))
        for number, name in enumerate(manifest.states):
            if name in manifest.schemas:
                schema = schemas.from_text(manifest.schemas[name])
                rows[name] = [_stored_row(k, v, schema) for k, v in _entries(db, number)]
        db.close()
    return {
        name: pa.Table.from_pylist(found, schemas.from_text(manifest.schemas[name]))
        for name, found in rows.items()
    }


def _entries(db: rd.Rdict, number: int) -> Iterator[tuple[bytes, bytes]]:
    for key, value in scan(db, b"", _DUE_GROUP):
        if key[2] == number:
            yield key, value


def _stored_row(name: bytes, value: bytes, schema: pa.Schema) -> dict[str, Any]:
    length = _ENTRY.unpack(name[:5])[2]
    kind = schema.field("value").type
    sub_type = schema.field("sub").type if "sub" in schema.names else None
    spec = TableSpec("", "value", kind)
    names = key_names(schema)
    key = codec.entry_decoder([schema.field(n).type for n in names], spec)(name[5 : 5 + length])
    row: dict[str, Any] = dict(zip(names, key if len(names) > 1 else (key,), strict=True))
    rest = name[5 + length :]
    if sub_type is not None:
        row["sub"] = (
            _decode_place(rest)
            if len(rest) == 8 and pa.types.is_int64(sub_type)
            else codec.key_decoder(sub_type)(rest)
        )
    if "at" in schema.names:
        row["at"] = _AT.unpack(value[:8])[0]
        value = value[8:]
    decoded = msgspec.msgpack.decode(value)
    if isinstance(decoded, list) and pa.types.is_struct(kind):
        decoded = codec.decoder(TableSpec("", "value", kind, tuples=True))(value)
        row["value"] = {kind.field(i).name: part for i, part in enumerate(decoded)}
    else:
        row["value"] = codec.decoder(spec)(value)
    row["live"] = True
    return row


def folder_bytes(base: Path) -> int:
    """The size of a base; -1 where there is none."""
    try:
        return sum(f.stat().st_size for f in base.iterdir())
    except FileNotFoundError:
        return -1


def clone(base: Path, into: Path) -> None:
    """A database of one's own that shares its immutable files with the base."""
    os.makedirs(into)
    for file in base.iterdir():
        if file.suffix == ".sst":
            os.link(file, into / file.name)
        elif file.name != "LOCK":
            shutil.copy(file, into / file.name)


def _options(cache_bytes: int) -> rd.Options:
    options = rd.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_write_buffer_size(max(cache_bytes // 4, 4 << 20))
    options.set_max_write_buffer_number(2)
    options.set_compression_type(rd.DBCompressionType.lz4())
    options.set_max_background_jobs(2)
    options.set_keep_log_file_num(1)
    options.set_stats_dump_period_sec(0)
    options.set_max_open_files(256)
    table = rd.BlockBasedOptions()
    table.set_block_cache(rd.Cache(max(cache_bytes // 2, 8 << 20)))
    table.set_bloom_filter(10, False)
    # Index and filters in small parts, in the cache like everything else: memory stays within it, and one
    # look-up does not push a whole file's filter out for the next.
    table.set_index_type(rd.BlockBasedIndexType.two_level_index_search())
    table.set_partition_filters(True)
    table.set_metadata_block_size(4096)
    table.set_pin_top_level_index_and_filter(True)
    table.set_cache_index_and_filter_blocks(True)
    table.set_pin_l0_filter_and_index_blocks_in_cache(True)
    table.set_format_version(5)
    options.set_block_based_table_factory(table)
    return options
