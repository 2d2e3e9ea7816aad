"""What lies in a folder, and which of it is new: the bookkeeping behind `files`.

`Folder` looks at the disk, and looks again only where something moved. `Taken` is the position that is
kept in plans: which files were taken, in a size that does not grow with the folder's age. `news` is the
decision between the two, and is pure. How a file is cut and read is left to `files`.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import stat
import time
from collections.abc import Iterable, Iterator

import msgspec

from holdfast.errors import DataError

_TEMPORARY = (
    ".tmp",
    ".temp",
    ".staged",
    ".crc",
    ".part",
    ".partial",
    ".inprogress",
    ".swp",
    "._copying_",
    "~",
)
_SETTLED_NS = 2_000_000_000
"""A folder's own modification time is believed only once it is older than any clock's step."""

REMEMBERED = 5_000
"""The most taken files that a position names; it is written with every plan."""

Key = tuple[int, str]
_BEFORE_ALL: Key = (-(1 << 62), "")


class Found(msgspec.Struct, frozen=True):
    """A file as it was seen."""

    path: str
    """Below the folder, with forward slashes."""
    mtime_ns: int
    size: int
    ctime_ns: int

    @property
    def key(self) -> Key:
        """Files are taken in this order: by modification time, then by name."""
        return (self.mtime_ns, self.path)


class Open(msgspec.Struct, frozen=True):
    """A file of which a part was taken: the next epoch goes on at `next`."""

    path: str
    mtime_ns: int
    size: int
    next: int


class Taken(msgspec.Struct, frozen=True):
    """A position: which files were taken.

    Of the files that come before `floor` in order nothing is remembered: they count as taken. From
    `floor` on, exactly those in `files` were taken. `newest_ctime_ns` is the last change of any file
    seen, so that one which turns up below the floor later is noticed, and counted in `ignored`.
    """

    floor: Key = _BEFORE_ALL
    high_ns: int = -(1 << 62)
    files: dict[str, tuple[int, int]] = {}
    open: Open | None = None
    newest_ctime_ns: int = 0
    ignored: int = 0
    ended: bool = False
    """Whether no file was left, for a source that ends there."""


@dataclasses.dataclass(frozen=True)
class News:
    """What a look into the folder brought: files to take, in order, and two kinds of trouble."""

    waiting: list[Found]
    changed: list[Found]
    """Taken before, and now of another size or time."""
    too_late: list[Found]
    """New or changed since the last look, but older than what is remembered: can't be told from taken."""


def news(found: Iterable[Found], taken: Taken) -> News:
    """Which files wait to be taken.

    >>> a, b = Found("a", 10, 1, 10), Found("b", 20, 1, 20)
    >>> [f.path for f in news([b, a], Taken()).waiting]
    ['a', 'b']
    >>> news([b, a], Taken(files={"a": (10, 1)})).waiting[0].path
    'b'
    """
    waiting, changed, too_late = [], [], []
    for file in found:
        if taken.open is not None and file.path == taken.open.path:
            continue
        known = taken.files.get(file.path)
        if known is not None:
            if known != (file.mtime_ns, file.size):
                changed.append(file)
        elif file.key >= taken.floor:
            waiting.append(file)
        elif file.ctime_ns > taken.newest_ctime_ns:
            too_late.append(file)
    return News(sorted(waiting, key=lambda f: f.key), changed, too_late)


def after(
    taken: Taken,
    done: Iterable[Found | Open],
    rest: Found | None,
    *,
    part: Open | None,
    window_ns: int,
    now_ns: int,
) -> Taken:
    """The position once `done` was taken as a whole and `part` in part, with `rest` the first left waiting.

    The floor rises with the newest file taken, less the window, but never past a file that still waits,
    and a file dated in the future does not lift it past now.

    >>> later = after(Taken(), [Found("a", 50, 1, 50)], None, part=None, window_ns=20, now_ns=100)
    >>> later.floor, later.files
    ((30, ''), {'a': (50, 1)})
    """
    files = dict(taken.files)
    high_ns = taken.high_ns
    for file in done:
        files[file.path] = (file.mtime_ns, file.size)
        high_ns = max(high_ns, min(file.mtime_ns, now_ns))
    floor = max(taken.floor, (high_ns - window_ns, ""))
    if len(files) > REMEMBERED:
        order = sorted((mtime_ns, path) for path, (mtime_ns, _) in files.items())
        floor = max(floor, order[-REMEMBERED])
    for waits in (rest, part):
        if waits is not None:
            floor = max(taken.floor, min(floor, (waits.mtime_ns, waits.path)))
    kept = {path: seen for path, seen in files.items() if (seen[0], path) >= floor}
    return msgspec.structs.replace(taken, floor=floor, high_ns=high_ns, files=kept, open=part)


@dataclasses.dataclass
class _Listed:
    mtime_ns: int
    at_ns: int
    files: dict[str, Found]
    folders: list[str]


class Folder:
    """A folder on disk, looked at again and again.

    A subfolder whose own modification time has not moved since it was listed holds the same names, and
    is not listed again: an idle look costs one call for each folder, not one for each file.
    """

    def __init__(self, root: str, pattern: str | None = None, only: str | None = None) -> None:
        self.root = root
        self._pattern = pattern
        self._only = only
        self._listed: dict[str, _Listed] = {}

    def look(self) -> list[Found]:
        """All files that a reader may take, in no particular order."""
        if self._only is not None:
            file = _found(os.path.join(self.root, self._only), self._only)
            return [] if file is None else [file]
        listed: dict[str, _Listed] = {}
        todo = [""]
        while todo:
            folder = todo.pop()
            now = self._list(folder)
            if now is None:
                continue
            listed[folder] = now
            todo.extend(now.folders)
        self._listed = listed
        return [file for one in listed.values() for file in one.files.values()]

    def fresh(self, files: Iterable[Found]) -> Iterator[Found]:
        """The same files as they are at this moment, without those that have gone."""
        for file in files:
            now = _found(os.path.join(self.root, file.path), file.path)
            parent = self._listed.get(os.path.dirname(file.path))
            if parent is not None and now is not None:
                parent.files[file.path] = now
            if now is not None:
                yield now

    def _list(self, folder: str) -> _Listed | None:
        place = os.path.join(self.root, folder)
        at_ns = time.time_ns()
        try:
            mtime_ns = os.stat(place).st_mtime_ns
            known = self._listed.get(folder)
            if known and known.mtime_ns == mtime_ns and known.at_ns - mtime_ns > _SETTLED_NS:
                return known
            return self._scan(place, folder, mtime_ns, at_ns)
        except FileNotFoundError:
            if folder:
                return None
            raise DataError(
                f"The folder {self.root} has gone.",
                remedy="Put it back (is a disk not mounted?) and start again.",
            ) from None

    def _scan(self, place: str, folder: str, mtime_ns: int, at_ns: int) -> _Listed:
        files, folders = {}, []
        with os.scandir(place) as entries:
            for entry in entries:
                if hidden(entry.name):
                    continue
                path = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir(follow_symlinks=False):
                    folders.append(path)
                elif self._matches(path):
                    file = _found(entry.path, path)
                    if file is not None:
                        files[path] = file
        return _Listed(mtime_ns, at_ns, files, folders)

    def _matches(self, path: str) -> bool:
        if self._pattern is None:
            return True
        subject = path if "/" in self._pattern else path.rpartition("/")[2]
        return fnmatch.fnmatchcase(subject, self._pattern)


def hidden(name: str) -> bool:
    """Whether a name says that a file is not for readers: hidden, private or still being written.

    >>> [hidden(n) for n in ("a.csv", ".a.csv", "_SUCCESS", "a.csv.tmp")]
    [False, True, True, True]
    """
    return name[:1] in ("", ".", "_") or name.lower().endswith(_TEMPORARY)


def _found(place: str, path: str) -> Found | None:
    try:
        status = os.stat(place)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return Found(path, status.st_mtime_ns, status.st_size, status.st_ctime_ns)
