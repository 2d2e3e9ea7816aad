"""Delta files: rows of some states as Arrow streams, one behind the other, then an index of them and its length.

What an epoch changed is written whole, for its checksum is the epoch's digest: its bytes depend on nothing but the rows.
What was merged is as large as a state, so it is written in batches, and whoever reads has one batch in memory at a time.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec
import pyarrow as pa

MAGIC = b"HFD1"
BATCH_BYTES = 8 << 20
"""About so large are the batches of a merged file: of what is larger than memory likes, only so much is held at once."""
_ALIGN = 64
"""Arrow reads fastest, and without complaint, what starts at a multiple of this."""
_CHUNK_BYTES = 1 << 20

_Index = list[tuple[str, int, int]]
"""Of each state: its name, where its stream starts, and how long it is."""


class DeltaFile(msgspec.Struct, frozen=True):
    """A delta file as a manifest names it."""

    name: str
    size_bytes: int
    crc32: int
    rows: int


class Damaged(Exception):
    """A file of a version is missing or is not what its manifest says."""


def checksum(path: Path) -> tuple[int, int]:
    """A file's size and CRC-32, whatever its size is."""
    size = crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc


def check(path: Path, file: DeltaFile) -> None:
    """Raise unless a file is there and is what was written."""
    try:
        found = checksum(path)
    except FileNotFoundError:
        raise Damaged(f"{file.name} is missing") from None
    if found != (file.size_bytes, file.crc32):
        raise Damaged(f"{file.name} is not what was written")


def write(path: Path, tables: Mapping[str, pa.Table]) -> DeltaFile:
    """Write tables under a name that is ours alone, a batch each."""
    return write_batches(path, {name: (table.schema, [table]) for name, table in tables.items()})


def write_batches(path: Path, states: Mapping[str, tuple[pa.Schema, Iterable[pa.Table]]]) -> DeltaFile:
    """Write each state's tables as they come, under a name that is ours alone: a batch for each.

    If that fails, nothing is left of it: a disk that is full needs the room.
    """
    try:
        with open(path, "wb") as file:
            return _written(path.name, _Counted(file), states)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _written(
    name: str, out: _Counted, states: Mapping[str, tuple[pa.Schema, Iterable[pa.Table]]]
) -> DeltaFile:
    index: _Index = []
    rows = 0
    out.write(MAGIC.ljust(_ALIGN, b"\0"))
    for state, (schema, tables) in states.items():
        start = out.size
        with pa.ipc.new_stream(pa.PythonFile(out, mode="w"), schema) as writer:
            for table in tables:
                rows += table.num_rows
                writer.write_table(table.combine_chunks())
        index.append((state, start, out.size - start))
        out.write(b"\0" * (-out.size % _ALIGN))
    footer = msgspec.msgpack.encode(index)
    out.write(footer + len(footer).to_bytes(4, "little"))
    return DeltaFile(name, out.size, out.crc32, rows)


class _Counted:
    """A file that knows the size and checksum of what went into it. Arrow takes it for one of Python's."""

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size = self.crc32 = 0

    def write(self, data: Any) -> int:
        self.size, self.crc32 = self.size + len(data), zlib.crc32(data, self.crc32)
        return self._file.write(data)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """It is flushed when it is closed."""


def read(path: Path, only: str | None = None) -> Iterator[tuple[str, pa.Table]]:
    """A file's rows with the names of their states, batch by batch and in the order they were written.

    Args:
        only: the rows of this state alone.
    """
    with pa.OSFile(str(path)) as file:
        for name, start, _ in _index(file):
            if only in (None, name):
                file.seek(start)
                for batch in pa.ipc.open_stream(file):
                    yield name, pa.Table.from_batches([batch])


def _index(file: pa.NativeFile) -> _Index:
    end = file.size() - 4
    file.seek(end)
    length = int.from_bytes(file.read(4), "little")
    file.seek(end - length)
    return msgspec.msgpack.decode(file.read(length), type=_Index)
