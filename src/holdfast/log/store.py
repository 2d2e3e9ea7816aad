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
from holdfast.log.disk import make_folder, sync_folder, write_durably


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
        self._known: set[str] = set()
        self._settled: set[str] = set()

    def put_if_absent(self, name: str, data: bytes) -> bool:
        target = self._root / name
        make_folder(str(target.parent), self._known)
        temporary = target.parent / f".{target.name}.{secrets.token_hex(6)}"
        try:
            write_durably(str(temporary), data)
            os.link(temporary, target)
            created = True
        except FileExistsError:
            created = False
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
        # Also where somebody else's record stands: its writer may have died before this, and it will be believed.
        sync_folder(str(target.parent))
        return created

    def get(self, name: str) -> bytes | None:
        try:
            found = (self._root / name).read_bytes()
        except FileNotFoundError:
            return None
        self._settle(name.rpartition("/")[0])
        return found

    def list(self, folder: str) -> list[str]:
        try:
            self._settle(folder)
            return sorted(n for n in os.listdir(self._root / folder) if not n.startswith("."))
        except FileNotFoundError:
            return []

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._root / name).unlink()

    def _settle(self, folder: str) -> None:
        """Bring to disk, once, the names that a driver left when it died before its sync: they are believed now."""
        if folder not in self._settled:
            sync_folder(str(self._root / folder))
            self._settled.add(folder)


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
