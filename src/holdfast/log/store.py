"""Where records are created put-if-absent: a local disk or an object store.

A store that can't refuse the second of two writers is refused itself. Bulk data needs no such promise
and does not come here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Any, Protocol

from holdfast.errors import DirectoryError


class LogStore(Protocol):
    """Four verbs. Names are relative, with '/' between folders."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create a record durably; False, and nothing changed, where the name is taken."""

    def get(self, name: str) -> bytes | None:
        """A record's bytes; None where there is none."""

    def list(self, folder: str) -> list[str]:
        """The names in a folder, sorted, without the folder."""

    def delete(self, name: str) -> None:
        """Remove a record; none is no error."""


class LocalStore:
    """Records on a local disk: written, synced, linked under their name, and the folder synced."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: set[Path] = set()

    def put_if_absent(self, name: str, data: bytes) -> bool:
        target = self._root / name
        if target.parent not in self._made:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._made.add(target.parent)
        temporary = target.parent / f".{target.name}.{secrets.token_hex(6)}"
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, target)
        except FileExistsError:
            return False
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
        _sync_folder(target.parent)
        return True

    def get(self, name: str) -> bytes | None:
        try:
            return (self._root / name).read_bytes()
        except FileNotFoundError:
            return None

    def list(self, folder: str) -> list[str]:
        try:
            return sorted(n for n in os.listdir(self._root / folder) if not n.startswith("."))
        except FileNotFoundError:
            return []

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._root / name).unlink()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class ObjectStore:
    """Records in an object store, by conditional PUT (obstore)."""

    def __init__(self, url: str, **options: Any) -> None:
        import obstore

        self._obstore = obstore
        self._store = obstore.store.from_url(url, **options)
        self._refuse_if_it_overwrites(url)

    def _refuse_if_it_overwrites(self, url: str) -> None:
        name = f"probe/{secrets.token_hex(8)}"
        first, second = self.put_if_absent(name, b"1"), self.put_if_absent(name, b"2")
        self.delete(name)
        if not first or second:
            raise DirectoryError(
                f"The store {url} can't create a record only if it is absent.",
                remedy="Use a store with conditional writes (S3, GCS, Azure), or a local disk.",
            )

    def put_if_absent(self, name: str, data: bytes) -> bool:
        try:
            self._obstore.put(self._store, name, data, mode="create")
        except (self._obstore.exceptions.AlreadyExistsError, FileExistsError):
            return False
        return True

    def get(self, name: str) -> bytes | None:
        try:
            return bytes(self._obstore.get(self._store, name).bytes())
        except FileNotFoundError:
            return None

    def list(self, folder: str) -> list[str]:
        found = self._obstore.list_with_delimiter(self._store, folder)["objects"]
        return sorted(o["path"].rsplit("/", 1)[-1] for o in found)

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._obstore.delete(self._store, name)
