"""What calls of the outside world answered, on the pipeline's own disk, so that a replay need not ask again.

Each attempt writes a file of its own for each operator that calls, synced before the attempt reports. A commit names the
winners' files; nobody ever reads another. They go with the commits that name them.

::

    answers/00000007-2-src1-31-0~lookup.answers     epoch, generation, task, attempt, stage; the operator
    part | part | …                                 one for each range, or the one of the shard
    part = length, frame | length, frame | …        one for each batch of records that came

What a frame holds is its writer's business.
"""

from __future__ import annotations

import contextlib
import os
import re
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from holdfast.log.disk import make_folder, sync_folder
from holdfast.log.records import AnswerFile, AnswerPart

_SUFFIX = ".answers"
_LENGTH_BYTES = 8
_FOLDERS: set[str] = set()


class Damaged(Exception):
    """A part is not what was written, or is gone."""


class AnswerWriter:
    """One attempt's answers of one operator. Raises `OSError` if the disk fails."""

    def __init__(self, folder: str, attempt: str, uid: str, root: str) -> None:
        self._folder, self._root = folder, root
        self._name = f"{attempt}~{uid}{_SUFFIX}"
        self._file: BinaryIO | None = None
        self._parts: list[AnswerPart] = []
        self._start = self._crc = self._records = 0
        self._size = 0

    def write(self, frame: bytes, records: int) -> None:
        """Add the answers to a batch of records to the part under way."""
        if self._file is None:
            make_folder(self._folder, _FOLDERS)
            self._file = open(os.path.join(self._folder, self._name), "wb")  # noqa: SIM115
        for data in (len(frame).to_bytes(_LENGTH_BYTES, "little"), frame):
            self._file.write(data)
            self._crc = zlib.crc32(data, self._crc)
            self._size += len(data)
        self._records += records

    def end(self, upstream: int) -> None:
        """The part is whole: a range is through, or a shard's epoch."""
        if self._size > self._start:
            size = self._size - self._start
            self._parts.append(AnswerPart(upstream, self._start, size, self._crc, self._records))
        self._start, self._crc, self._records = self._size, 0, 0

    def close(self) -> AnswerFile | None:
        """Wait until everything is on disk: a commit may name it next. None where nothing was written."""
        if self._file is None:
            return None
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self._folder)
        return AnswerFile(self._name, self._root, self._parts)

    def abort(self) -> None:
        """Drop what was written; does not raise."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._folder, self._name))
            self._file = None


def find(files: list[AnswerFile], root: str, upstream: int) -> tuple[AnswerFile, AnswerPart] | None:
    """Where the answers to a range's records, or to a shard's, are; None where nothing was asked."""
    for file in files:
        for part in file.parts if file.root == root else []:
            if part.upstream == upstream:
                return file, part
    return None


def read(folder: str, file: AnswerFile, part: AnswerPart) -> list[bytes]:
    """The frames of a part, checked."""
    path = os.path.join(folder, file.path)
    try:
        with open(path, "rb") as source:
            source.seek(part.offset)
            data = source.read(part.size_bytes)
    except FileNotFoundError:
        raise Damaged(f"{path} is gone") from None
    except OSError as error:
        raise Damaged(f"{path} can't be read: {error.strerror or error}") from None
    if len(data) != part.size_bytes:
        raise Damaged(f"{path} ends before byte {part.offset + part.size_bytes}")
    if zlib.crc32(data) != part.crc32:
        raise Damaged(f"{path} is not what was written: its checksum differs")
    return list(_frames(data))


def _frames(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        start = at + _LENGTH_BYTES
        at = start + int.from_bytes(data[at:start], "little")
        yield data[start:at]


def forget(folder: str, before: int) -> int:
    """Delete the answers of epochs before this one: how many files went."""
    gone = 0
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder):
            epoch = re.match(r"(\d{8,})-", name)
            if name.endswith(_SUFFIX) and epoch is not None and int(epoch[1]) < before:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, name))
                    gone += 1
    return gone
