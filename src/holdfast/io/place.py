"""Where a folder sink keeps what nobody may see yet, and whose the folder is.

Beside the folder `out` stands the hidden work folder `.out.holdfast`, on the same disk, so that staged
files reach `out` by a rename. It is not inside `out`: some readers look into hidden folders too (DuckDB's
`**`), and so `out` holds data files and nothing else. Where the parent can't be written to or is another
disk, the work folder is `out/_holdfast`, and small files are not merged.

::

    out/part-00000007-00000.parquet            one file of epoch 7
    out/part-00000000-00000099.m000.parquet    epochs 0 to 99, merged
    .out.holdfast/staging/                     what attempts wrote
    .out.holdfast/merge/                       folders being built, or done with
    .out.holdfast/owner.json                   which pipeline writes here
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator

import msgspec

from holdfast.errors import PipelineError, SinkError
from holdfast.log.disk import make_folder, sync_folder, write_durably

BREAK_AFTER_S = 5.0
"""Who holds a lock longer is frozen: what is done under one takes milliseconds."""

_LOG = logging.getLogger("holdfast.io.folder")
_PART = re.compile(r"part-(\d{8,})-(\d{5,})\.(.+)")
_MERGED = re.compile(r"part-(\d{8,})-(\d{8,})\.m(\d{3,})\.(.+)")


class Part(msgspec.Struct, frozen=True, order=True):
    """A data file of ours, as its name tells: epochs `first` to `last`."""

    first: int
    last: int
    number: int
    name: str
    size: int = 0

    @property
    def is_merged(self) -> bool:
        """Whether it was made of several files."""
        return _MERGED.fullmatch(self.name) is not None


class Owner(msgspec.Struct, frozen=True):
    """Who writes to a folder."""

    id: str
    uid: str


def part_name(epoch: int, number: int, suffix: str) -> str:
    """The name of one file of an epoch; names sort as epochs do.

    >>> part_name(7, 0, "parquet")
    'part-00000007-00000.parquet'
    """
    return f"part-{epoch:08d}-{number:05d}.{suffix}"


def merged_name(first: int, last: int, number: int, suffix: str) -> str:
    """The name of a file that holds several epochs.

    >>> merged_name(0, 99, 0, "parquet")
    'part-00000000-00000099.m000.parquet'
    """
    return f"part-{first:08d}-{last:08d}.m{number:03d}.{suffix}"


def parse_part(name: str, suffix: str, size: int = 0) -> Part | None:
    """What a file's name tells; None if it is not ours.

    >>> parse_part("part-00000000-00000099.m000.parquet", "parquet")
    Part(first=0, last=99, number=0, name='part-00000000-00000099.m000.parquet', size=0)
    """
    if match := _MERGED.fullmatch(name):
        first, last, number, ending = match.groups()
    elif match := _PART.fullmatch(name):
        first, number, ending = match.groups()
        last = first
    else:
        return None
    return Part(int(first), int(last), int(number), name, size) if ending == suffix else None


def local_path(path: str | os.PathLike[str]) -> str:
    """A path on a file system, or an error for what is none.

    >>> local_path("out")
    'out'
    """
    text = os.fspath(path)
    if "://" in text:
        raise PipelineError(
            f"{text} is no folder of a file system.",
            remedy="Give a path that every host sees, such as a mounted share.",
        )
    return text


def is_visible(name: str) -> bool:
    """Whether readers take a name for data."""
    return not name.startswith((".", "_"))


class Place:
    """A sink's folder and the work folder that belongs to it."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._known: set[str] = set()

    def __reduce__(self) -> tuple[type[Place], tuple[str]]:
        """What is known to be on disk is not sent along: a program's bytes must not depend on it."""
        return Place, (self.root,)

    @property
    def work(self) -> str:
        """The work folder, made where it is missing."""
        inside, beside = os.path.join(self.root, "_holdfast"), self._beside
        if os.path.isdir(inside) or os.path.isdir(beside):
            return inside if os.path.isdir(inside) else beside
        os.makedirs(self.root, exist_ok=True)
        try:
            if os.path.ismount(self.root):
                raise PermissionError
            os.makedirs(beside, exist_ok=True)
            return beside
        except OSError:
            os.makedirs(inside, exist_ok=True)
            return inside

    @property
    def _beside(self) -> str:
        parent, name = os.path.split(self.root)
        return os.path.join(parent, f".{name}.holdfast")

    @property
    def may_merge(self) -> bool:
        """Whether folders can be built out of every reader's sight."""
        return self.work == self._beside

    def folder(self, name: str) -> str:
        """A folder of the work folder, made durably where it is missing."""
        return self.make(os.path.join(self.work, name))

    def make(self, path: str) -> str:
        """Make a folder durably where it is missing: what is decided on may stand in it."""
        make_folder(path, self._known)
        return path

    def leaves(self) -> Iterator[str]:
        """Every folder that holds data files."""
        for folder, folders, names in os.walk(self.root):
            folders[:] = sorted(f for f in folders if is_visible(f))
            if any(is_visible(n) for n in names):
                yield folder

    def foreign(self, suffix: str) -> str | None:
        """A data file that is not ours, if there is one."""
        for folder in self.leaves():
            for name in sorted(os.listdir(folder)):
                path = os.path.join(folder, name)
                if is_visible(name) and parse_part(name, suffix) is None and not os.path.isdir(path):
                    return path
        return None

    def claim(self, uid: str, folder: str, append: bool) -> None:
        """Take the folder for one sink of one pipeline, whose own folder this is, or raise.

        Both sides keep the same id: a pipeline that starts afresh has none, and would mix its epochs with
        those of an earlier one that are still there.
        """
        mine_at = os.path.join(folder, f"owner-{uid}.json")
        theirs_at = os.path.join(self.work, "owner.json")
        mine, theirs = _read_owner(mine_at), _read_owner(theirs_at)
        if theirs is not None and theirs == mine:
            return
        has_data = next(self.leaves(), None) is not None
        if has_data and (theirs is not None or (mine is None and not append)):
            whose = (
                f"sink {theirs.uid!r} of another run"
                if theirs and theirs.uid == uid
                else "another pipeline or sink"
            )
            raise SinkError(
                f"The folder {self.root} holds the output of {whose}.",
                uid=uid,
                remedy="Give each sink a folder of its own; to start afresh, delete this one, or choose another.",
            )
        owner = mine or Owner(uuid.uuid4().hex, uid)
        self.make(folder)
        self.make(self.work)
        _write_owner(mine_at, owner)
        _write_owner(theirs_at, owner)

    @contextlib.contextmanager
    def locked(self, name: str, wait: bool = True) -> Iterator[bool]:
        """Hold a lock against other threads and drivers on this host; False where somebody else has it.

        A driver that was fenced off may still be publishing or merging; the kernel frees its lock when it dies.
        One that is frozen does not die: who waits for it takes the lock away after a while (`_take_away`).
        """
        path = os.path.join(self.work, f"{name}.lock")
        handle, mine = _open_locked(path, BREAK_AFTER_S if wait else 0.0)
        if handle is None:
            mine = wait
            if wait:
                self._take_away(path)
                handle, _ = _open_locked(path, 0.0)
        try:
            yield mine
        finally:
            if handle is not None:
                os.close(handle)

    def _take_away(self, path: str) -> None:
        """Go on without a lock's frozen holder, so that it can do nothing when it wakes.

        Two may publish at once: a file is moved by one of them, and both see that it is there. A merge must not
        end any more; the folder that it would put in place is taken from it.
        """
        _LOG.warning(
            "another process holds %s and does not move: its lock and its merge are taken away", path
        )
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        for name in os.listdir(self.folder("merge")):
            gone = os.path.join(self.folder("gone"), uuid.uuid4().hex)
            with contextlib.suppress(OSError):
                os.rename(os.path.join(self.work, "merge", name), gone)  # first out of its reach, in one step
                shutil.rmtree(gone, ignore_errors=True)


def _open_locked(path: str, wait_s: float) -> tuple[int | None, bool]:
    """Open and lock a file; the handle, or None if another holder kept it all the time, and whether it is locked.

    Where a disk knows no locks the handle comes without one: publishing needs none, and merging then waits.
    """
    until = time.monotonic() + wait_s
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(handle, path):
                return handle, True
        except BlockingIOError:
            if time.monotonic() >= until:
                os.close(handle)
                return None, False
            time.sleep(0.01)
        except OSError:
            return handle, wait_s > 0
        os.close(handle)


def _is_at(handle: int, path: str) -> bool:
    """Whether a lock's file is still the one that others will open."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), os.stat(path))
    return False


def _read_owner(path: str) -> Owner | None:
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=Owner)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _write_owner(path: str, owner: Owner) -> None:
    write_durably(path + ".tmp", msgspec.json.encode(owner))
    os.replace(path + ".tmp", path)
    sync_folder(os.path.dirname(path))
