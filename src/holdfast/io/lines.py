"""Text files as ranges of bytes: the lines that start within a range, in blocks, and the bad ones found.

A range holds the lines whose first byte lies in it, wherever they end, so any cut of a file gives each
line exactly once. A block is parsed as a whole; only where that fails is it halved, again and again,
until the bad line stands alone, so one bad line costs a few calls and not one for each line beside it.

What a line means is left to `jsontext` and `csvtext`, which decide alone: a line is good or bad
whatever stands around it.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator

import msgspec
import pyarrow as pa

from holdfast.errors import SchemaError
from holdfast.io.base import Reading

BLOCK_BYTES = 4 << 20
LONGEST_LINE_BYTES = 64 << 20
TABLE_ROWS = 65_536
SAMPLE_BYTES = 1 << 20
_READ_BYTES = 1 << 16

_CODECS = {".gz": "gzip", ".zst": "zstd"}
_MARK = b"\xef\xbb\xbf"
_WRONG = (
    pa.ArrowInvalid,
    msgspec.MsgspecError,
    ValueError,
    TypeError,
    OverflowError,
    KeyError,
    ArithmeticError,
)


class Drift(ValueError):
    """A record has what its schema does not: that is the file's fault, not the record's."""


class Parser(abc.ABC):
    """Makes tables of lines, and says why not."""

    multiline = False

    @abc.abstractmethod
    def parse(self, lines: bytes) -> pa.Table:
        """A table with a row for each record; raises if any can't be read."""

    @abc.abstractmethod
    def is_blank(self, line: bytes) -> bool:
        """Whether a line holds no record and is no error."""

    @abc.abstractmethod
    def matches(self, lines: bytes, rows: int) -> bool:
        """Whether so many rows can only be one record for each line: parsers look beyond the end of a line."""

    def parse_one(self, line: bytes) -> pa.Table:
        """The table of a line that stands alone, which must hold one record."""
        table = self.parse(line)
        if table.num_rows != 1:
            raise ValueError(f"it holds {table.num_rows} records, not one")
        return table


def codec(path: str) -> str | None:
    """How a file is compressed, by its name.

    >>> codec("a.jsonl.gz"), codec("a.jsonl")
    ('gzip', None)
    """
    return next((kind for suffix, kind in _CODECS.items() if path.endswith(suffix)), None)


def open_text(path: str) -> pa.NativeFile:
    """A file's bytes, decompressed where its name says so."""
    raw = pa.OSFile(path, "rb")
    kind = codec(path)
    return raw if kind is None else pa.CompressedInputStream(raw, kind)


@dataclasses.dataclass(frozen=True)
class Block:
    """Whole lines, and the offset of the first of them."""

    offset: int
    lines: bytes
    too_long: bool = False
    """The head of one line that is longer than any record may be."""


def blocks(file: pa.NativeFile, start: int, end: int | None, multiline: bool = False) -> Iterator[Block]:
    """The lines that start in [start, end), in blocks; `end` None is the file's end.

    >>> text = pa.BufferReader(b"one\\ntwo\\nthree\\n")
    >>> [b.lines for b in blocks(text, 1, 5)]
    [b'two\\n']
    """
    window = _Window(file, multiline)
    if start > 0:
        file.seek(start - 1)
        window.offset = start - 1
        if not window.skip_line():
            return
    while end is None or window.offset < end:
        block = window.next_block(None if end is None else end - window.offset)
        if block is None:
            return
        if block.offset == 0 and block.lines.startswith(_MARK):
            block = Block(len(_MARK), block.lines[len(_MARK) :])
        yield block


class _Window:
    """A buffer that moves over a file; `offset` is where it starts, always at the start of a line."""

    def __init__(self, file: pa.NativeFile, multiline: bool) -> None:
        self._file = file
        self._buffer = b""
        self._ended = False
        self._multiline = multiline
        self.offset = 0

    def skip_line(self) -> bool:
        """Move behind the next newline; False where the file ends before it."""
        while True:
            cut = self._buffer.find(b"\n")
            if cut >= 0:
                self._drop(cut + 1)
                return True
            self._drop(len(self._buffer))
            if not self._fill(_READ_BYTES):
                return False

    def next_block(self, most: int | None) -> Block | None:
        """The next lines, of which the last starts before `most` bytes from here; None at the end."""
        wanted = BLOCK_BYTES if most is None else min(most, BLOCK_BYTES)
        if len(self._buffer) < wanted:
            self._fill(wanted - len(self._buffer))
        while True:
            if not self._buffer:
                return None
            cut = self._cut(most)
            if cut > 0:
                return self._take(cut)
            if len(self._buffer) > LONGEST_LINE_BYTES:
                return self._take_too_long()
            if not self._fill(len(self._buffer)):
                return self._take(len(self._buffer))

    def _cut(self, most: int | None) -> int:
        """Behind the last newline that may be in the block; 0 where there is none yet."""
        if self._multiline:
            return _last_record_end(self._buffer)
        if most is None or most > len(self._buffer):
            return self._buffer.rfind(b"\n") + 1
        return self._buffer.find(b"\n", most - 1) + 1

    def _take(self, size: int) -> Block:
        block = Block(self.offset, self._buffer[:size])
        self._drop(size)
        return block

    def _take_too_long(self) -> Block:
        block = Block(self.offset, self._buffer[:200], too_long=True)
        if not self.skip_line():
            self._drop(len(self._buffer))
        return block

    def _drop(self, size: int) -> None:
        self._buffer = self._buffer[size:]
        self.offset += size

    def _fill(self, size: int) -> bool:
        more = b"" if self._ended else self._file.read(max(size, _READ_BYTES))
        self._ended = not more
        self._buffer += more
        return bool(more)


def _last_record_end(buffer: bytes) -> int:
    """Behind the last newline that stands outside quotes; the buffer starts outside them."""
    end = len(buffer)
    quotes = buffer.count(b'"')
    while True:
        cut = buffer.rfind(b"\n", 0, end)
        if cut < 0:
            return 0
        quotes -= buffer.count(b'"', cut, end)
        if quotes % 2 == 0:
            return cut + 1
        end = cut


def split_records(lines: bytes, multiline: bool) -> list[bytes]:
    """The records of a block, one line each, or with newlines inside quotes where that is allowed."""
    found = lines.splitlines(keepends=True) if b"\r" not in lines else _split_newlines(lines)
    if not multiline:
        return found
    records, open_record = [], b""
    for line in found:
        open_record += line
        if open_record.count(b'"') % 2 == 0:
            records.append(open_record)
            open_record = b""
    return [*records, open_record] if open_record else records


def _split_newlines(lines: bytes) -> list[bytes]:
    parts = [part + b"\n" for part in lines.split(b"\n")]
    if lines.endswith(b"\n"):
        return parts[:-1]
    return [*parts[:-1], parts[-1][:-1]]


def tables(found: Iterator[Block], parser: Parser, trouble: Trouble) -> Iterator[pa.Table]:
    """The records of blocks as tables; what can't be read goes to `trouble`."""
    for block in found:
        if block.too_long:
            trouble.bad(block.offset, block.lines, f"the line is longer than {LONGEST_LINE_BYTES >> 20} MB")
            continue
        table = _whole(block.lines, parser)
        if table is None:
            table = _halved(block, parser, trouble)
        if table is not None:
            for first in range(0, table.num_rows, TABLE_ROWS):
                yield table.slice(first, TABLE_ROWS)


def _whole(lines: bytes, parser: Parser) -> pa.Table | None:
    """The table of all lines; None where any is bad, or lines and records don't match one to one."""
    try:
        table = parser.parse(lines)
    except _WRONG:
        return None
    return table if parser.matches(lines, table.num_rows) else None


def _halved(block: Block, parser: Parser, trouble: Trouble) -> pa.Table | None:
    records = split_records(block.lines, parser.multiline)
    offsets = [block.offset]
    for record in records:
        offsets.append(offsets[-1] + len(record))
    good: list[pa.Table] = []
    todo = [(0, len(records))]
    while todo:
        first, last = todo.pop()
        if last - first > 1:
            table = _whole(b"".join(records[first:last]), parser)
            if table is not None:
                good.append(table)
                continue
            middle = (first + last) // 2
            todo += [(middle, last), (first, middle)]
        elif not parser.is_blank(records[first]):
            try:
                good.append(parser.parse_one(records[first]))
            except Drift as error:
                raise trouble.drift(offsets[first], str(error)) from None
            except _WRONG as error:
                trouble.bad(offsets[first], records[first], str(error).removesuffix(" in row 0"))
    return pa.concat_tables(good).combine_chunks() if good else None


class LineNumbers:
    """Which line an offset is in, counted only when somebody asks, and only onwards."""

    def __init__(self, open_again: Callable[[], pa.NativeFile]) -> None:
        self._open_again = open_again
        self._file: pa.NativeFile | None = None
        self._offset = 0
        self._lines = 0

    def at(self, offset: int) -> int:
        """The line, from 1, that starts at an offset; offsets must not fall from call to call."""
        if self._file is None:
            self._file = self._open_again()
        while self._offset < offset:
            chunk = self._file.read(min(offset - self._offset, BLOCK_BYTES))
            if not chunk:
                break
            self._lines += chunk.count(b"\n")
            self._offset += len(chunk)
        return self._lines + 1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Trouble:
    """Takes what can't be read in one file, and gives it its line number."""

    def __init__(self, reading: Reading, name: str, open_again: Callable[[], pa.NativeFile]) -> None:
        self._reading = reading
        self._name = name
        self._numbers = LineNumbers(open_again)

    def bad(self, offset: int, line: bytes, reason: str) -> None:
        """A record that can't be read: what becomes of it is the user's choice."""
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        self._reading.bad_record(text, reason, self._name, self._numbers.at(offset))

    def drift(self, offset: int, reason: str) -> SchemaError:
        """The error for a record with what its schema does not have."""
        return SchemaError(
            f"{self._name}, line {self._numbers.at(offset)}: {reason}.",
            remedy='Declare schema= with it, or leave such fields out with on_drift="ignore".',
        )

    def close(self) -> None:
        self._numbers.close()


def sample(path: str) -> bytes:
    """The first lines of a file, for finding its schema; whole ones, except where there is only one."""
    with open_text(path) as file:
        head: bytes = file.read(SAMPLE_BYTES)
    head = head.removeprefix(_MARK)
    cut = head.rfind(b"\n") + 1
    return head[:cut] if cut and len(head) >= SAMPLE_BYTES - len(_MARK) else head


def records_a_byte(path: str) -> float:
    """About how many lines a byte of the file (compressed, where it is) holds."""
    with pa.OSFile(path, "rb") as raw:
        head: bytes = raw.read(1 << 16)
    size = len(head)
    if not size:
        return 0.0
    kind = codec(path)
    text = head if kind is None else _unpacked(head, kind)
    return max(text.count(b"\n"), 1) / size


def _unpacked(head: bytes, kind: str) -> bytes:
    found = []
    stream = pa.CompressedInputStream(pa.BufferReader(head), kind)
    try:
        while chunk := stream.read(1 << 16):
            found.append(chunk)
    except OSError:
        pass  # the head of a file ends in the middle of a frame
    return b"".join(found)
