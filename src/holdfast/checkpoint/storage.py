"""Where the bulk files of checkpoints go: a folder that every host sees, or an object store.

A file that was put is there after a power failure, whole or not at all; nothing here says whether it counts. That
is for the log, whose records name these files with their sizes and checksums. Names are relative, with '/'
between folders, and no part of one starts with '.'.

What goes wrong is an `OSError`: the system's own (a full disk), or a `StorageError` with a sentence. Options
may hold credentials; none shows in an error or a description. Stores are sent to executors, and connect where they
are first used.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import re
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.parse import unquote, urlsplit

from holdfast.errors import ConfigError
from holdfast.log.disk import ABANDONED_S, sync_above, sync_folder

CHUNK_BYTES = 1 << 20
"""How much of a file is held at once while it is read, written and summed up."""

_SWEEP_EVERY_S = 600.0
_PART_BYTES = 8 << 20
_MOST_PARTS = 9_000  # S3 takes 10,000
_PARTS_AT_ONCE = 4
_OBJECT_SCHEMES = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss")
_SECRET = re.compile(r"key|secret|token|password|credential|sas|signature", re.IGNORECASE)
_USER_PART = re.compile(r"//[^/@\s]*@")
_QUERY = re.compile(r"\?\S*")
_CLIENT_OPTIONS = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "default_content_type",
        "http1_only",
        "http2_only",
        "http2_keep_alive_interval",
        "http2_keep_alive_timeout",
        "http2_keep_alive_while_idle",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_url",
        "proxy_ca_certificate",
        "proxy_excludes",
        "randomize_addresses",
        "read_timeout",
        "root_certificate",
        "timeout",
        "user_agent",
    }
)
"""Options of the connection. obstore takes them apart from the store's own, and panics where they are mixed."""
_PATIENCE = {"timeout": "30 minutes", "read_timeout": "60 seconds"}
"""obstore's own 30 seconds for a whole file are too few for gigabytes; a store that falls silent is given up sooner."""


class StorageError(OSError):
    """The checkpoints' store can't do what was asked."""


class Missing(StorageError):
    """There is no file of that name."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"The checkpoints' store has no file {name}.")

    def __reduce__(self) -> tuple[type[Missing], tuple[str]]:
        return Missing, (self.name,)


class Storage(Protocol):
    """Eight verbs."""

    def put_file(self, name: str, path: Path) -> tuple[int, int]:
        """Copy a local file durably; the size in bytes and the crc32 of what was read."""

    def put(self, name: str, data: bytes) -> None:
        """Store bytes durably."""

    def get_file(self, name: str, path: Path) -> tuple[int, int]:
        """Fetch into a new local file, which is a cache and not synced; size and crc32, or `Missing`."""

    def get(self, name: str) -> bytes | None:
        """A file's bytes; None where there is none."""

    def size(self, name: str) -> int | None:
        """How large a file is, asked for by its name, since a listing may be out of date; None where there is none."""

    def list(self, prefix: str) -> builtins.list[tuple[str, int]]:
        """All names below a folder ("" is the whole store), at any depth, with sizes; sorted."""

    def delete(self, names: Sequence[str]) -> None:
        """Remove files; what is absent is no error."""

    def describe(self) -> str:
        """Where this is, for people; never with a credential."""


def open_storage(url: str, options: Mapping[str, str]) -> Storage:
    """The storage that a path or URL names.

    >>> open_storage("/data/checkpoints", {}).describe()
    'the folder /data/checkpoints'
    """
    scheme = urlsplit(url).scheme.lower() if "://" in url else ""
    if not scheme:
        return LocalStorage(Path(url))
    if scheme == "file":
        return LocalStorage(_path_of(url))
    if scheme not in _OBJECT_SCHEMES:
        raise ConfigError(
            f"checkpoint_dir names a kind of store that is not known: {scheme}://.",
            remedy="Set checkpoint_dir to a folder, file:///…, s3://bucket/…, gs://bucket/… or az://account/container/….",
        )
    storage = ObjectStorage(url, dict(options))
    try:
        storage.connect()
    except StorageError as error:
        raise ConfigError(
            f"checkpoint_dir can't be opened: {error}",
            remedy="Mend checkpoint_dir, or the options in storage (endpoint, region, …).",
        ) from None
    return storage


def _path_of(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ConfigError(
            f"checkpoint_dir={_shown(url)} names a file on another host, or no absolute path.",
            remedy="Write checkpoint_dir as file:///absolute/path, or as a plain path.",
        )
    return Path(unquote(parts.path))


class LocalStorage:
    """Files in a folder: written under a name starting with '.', synced, renamed, and all folders synced."""

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.abspath(root))
        self._way_is_synced = False
        self._swept_s = 0.0

    def __reduce__(self) -> tuple[type[LocalStorage], tuple[Path]]:
        return LocalStorage, (self._root,)

    def put_file(self, name: str, path: Path) -> tuple[int, int]:
        with open(path, "rb") as source:
            return self._write(name, _chunks(source))

    def put(self, name: str, data: bytes) -> None:
        self._write(name, [data])

    def get_file(self, name: str, path: Path) -> tuple[int, int]:
        source = self._root / _checked(name)
        if not source.is_file():
            raise Missing(name)
        with open(source, "rb") as file:
            return _save(path, _chunks(file))

    def get(self, name: str) -> bytes | None:
        try:
            return (self._root / _checked(name)).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def size(self, name: str) -> int | None:
        try:
            # A shared disk may know better once it is opened.
            with open(self._root / _checked(name), "rb") as file:
                return os.fstat(file.fileno()).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def list(self, prefix: str) -> builtins.list[tuple[str, int]]:
        found = []
        for folder, folders, names in os.walk(self._root / _checked_prefix(prefix)):
            folders[:] = [f for f in folders if not f.startswith(".")]
            for name in names:
                path = Path(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    if not name.startswith("."):
                        found.append((path.relative_to(self._root).as_posix(), path.stat().st_size))
        return sorted(found)

    def delete(self, names: Sequence[str]) -> None:
        folders: set[Path] = set()
        for name in names:
            path = self._root / _checked(name)
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()
            folders.update(p for p in path.parents if self._root in p.parents)
        for folder in sorted(folders, key=lambda f: len(f.parts), reverse=True):
            with contextlib.suppress(OSError):  # not empty, or gone
                folder.rmdir()
        if time.monotonic() - self._swept_s > _SWEEP_EVERY_S or not self._swept_s:
            self._swept_s = time.monotonic()
            self._sweep(time.time() - ABANDONED_S)

    def _sweep(self, before_s: float) -> None:
        """Remove files that somebody began to write and did not end, and the folders that only those were in."""
        for folder, _, names in os.walk(self._root, topdown=False):
            for name in names:
                path = Path(folder, name)
                with contextlib.suppress(OSError):
                    if name.startswith(".") and path.stat().st_mtime < before_s:
                        path.unlink()
                        if path.parent != self._root:
                            path.parent.rmdir()

    def describe(self) -> str:
        return f"the folder {self._root}"

    def _write(self, name: str, chunks: Iterable[bytes]) -> tuple[int, int]:
        target = self._root / _checked(name)
        temporary = target.parent / f".{target.name}.{secrets.token_hex(6)}"
        try:
            with self._create(temporary) as file:
                size, crc = _copy(chunks, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        self._sync(target.parent)
        return size, crc

    def _create(self, path: Path) -> IO[bytes]:
        """Open a new file; its folder is made again if `delete`, here or on another host, takes it away meanwhile."""
        for _ in range(8):
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                return open(path, "xb")
        raise StorageError(f"The folder {path.parent} is deleted as often as it is made.")

    def _sync(self, folder: Path) -> None:
        """Bring all names on the way to disk. Only now: a folder with a file in it is not removed by `delete`."""
        while folder != self._root:
            sync_folder(str(folder))
            folder = folder.parent
        sync_folder(str(folder))
        if not self._way_is_synced:
            sync_above(str(folder))
            self._way_is_synced = True


class ObjectStorage:
    """Files in an object store (obstore). An object is there whole once it is put, or not at all."""

    def __init__(self, url: str, options: dict[str, str]) -> None:
        self._url = url
        self._options = dict(options)
        self._secrets = [value for key, value in options.items() if value and _SECRET.search(key)]
        self._store: Any = None

    def __reduce__(self) -> tuple[type[ObjectStorage], tuple[str, dict[str, str]]]:
        return ObjectStorage, (self._url, self._options)

    def __repr__(self) -> str:
        return f"ObjectStorage({self.describe()!r})"

    def connect(self) -> Any:
        """The store, opened at the first call. Nothing is sent yet, but options are looked at."""
        if self._store is None:
            import obstore

            client = {k: v for k, v in self._options.items() if k in _CLIENT_OPTIONS}
            config: Any = {k: v for k, v in self._options.items() if k not in _CLIENT_OPTIONS}
            client_options: Any = {**_PATIENCE, **client}
            with self._told("opened"):
                self._store = obstore.store.from_url(self._url, config=config, client_options=client_options)
        return self._store

    def put_file(self, name: str, path: Path) -> tuple[int, int]:
        store, key = self.connect(), _checked(name)
        with open(path, "rb") as source:
            part = max(_PART_BYTES, -(-os.fstat(source.fileno()).st_size // _MOST_PARTS))
            counted = _Counted(_chunks(source))
            first = list(_up_to(part, counted))
            with self._told("written to", name):
                if sum(map(len, first)) < part:
                    store.put(key, b"".join(first), use_multipart=False)
                else:
                    store.put(key, _chain(first, counted), chunk_size=part, max_concurrency=_PARTS_AT_ONCE)
        return counted.size, counted.crc

    def put(self, name: str, data: bytes) -> None:
        store, key = self.connect(), _checked(name)
        with self._told("written to", name):
            store.put(key, data)

    def get_file(self, name: str, path: Path) -> tuple[int, int]:
        store, key = self.connect(), _checked(name)
        with self._told("read", name, absent=Missing):
            return _save(path, (bytes(c) for c in store.get(key).stream(min_chunk_size=CHUNK_BYTES)))

    def get(self, name: str) -> bytes | None:
        store, key = self.connect(), _checked(name)
        try:
            with self._told("read", name, absent=Missing):
                return bytes(store.get(key).bytes())
        except Missing:
            return None

    def size(self, name: str) -> int | None:
        store, key = self.connect(), _checked(name)
        try:
            with self._told("asked for", name, absent=Missing):
                return int(store.head(key)["size"])
        except Missing:
            return None

    def list(self, prefix: str) -> builtins.list[tuple[str, int]]:
        store, prefix = self.connect(), _checked_prefix(prefix)
        with self._told("listed"):
            return sorted((o["path"], o["size"]) for page in store.list(prefix or None) for o in page)

    def delete(self, names: Sequence[str]) -> None:
        """Remove files; in bulk, and one by one only where the store finds fault with an absent one."""
        store, keys = self.connect(), [_checked(name) for name in names]
        if not keys:
            return
        with self._told("cleaned up"):
            try:
                store.delete(keys)
            except FileNotFoundError:
                for key in keys:
                    with contextlib.suppress(FileNotFoundError):
                        store.delete(key)

    def describe(self) -> str:
        endpoint = next((v for k, v in self._options.items() if k.lower().endswith("endpoint")), None)
        return self._clean(self._url + (f" at {endpoint}" if endpoint else ""))

    @contextlib.contextmanager
    def _told(
        self, verb: str, name: str = "", absent: Callable[[str], StorageError] | None = None
    ) -> Iterator[None]:
        """Turn what obstore raises into a `StorageError` with one sentence, and leave the system's errors alone.

        The original is not chained: its text may hold what was sent, credentials and all.
        """
        try:
            yield
        except BaseException as error:
            if isinstance(error, StorageError) or (isinstance(error, OSError) and error.errno is not None):
                raise
            if absent is not None and isinstance(error, FileNotFoundError):
                raise absent(name) from None
            # A panic inside obstore is no Exception: a malformed endpoint is enough for one.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            what = f" ({name})" if name else ""
            raise StorageError(
                f"The store {self.describe()} can't be {verb}{what}: {self._clean(_sentence(error))}"
            ) from None

    def _clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "…")
        return _shown(text)


def _shown(text: str) -> str:
    """A text whose URLs lost user names, passwords and queries (which may hold signatures)."""
    return _QUERY.sub("", _USER_PART.sub("//", text))


def _sentence(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0].strip() if lines else type(error).__name__


class _Counted:
    """Chunks that are counted and summed up as they pass."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self.size = 0
        self.crc = 0

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        chunk = next(self._chunks)
        self.size += len(chunk)
        self.crc = zlib.crc32(chunk, self.crc)
        return chunk


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def _up_to(size: int, chunks: Iterator[bytes]) -> Iterator[bytes]:
    while size > 0 and (chunk := next(chunks, b"")):
        yield chunk
        size -= len(chunk)


def _chain(first: list[bytes], rest: Iterator[bytes]) -> Iterator[bytes]:
    yield from first
    yield from rest


def _copy(chunks: Iterable[bytes], target: IO[bytes]) -> tuple[int, int]:
    counted = _Counted(chunks)
    for chunk in counted:
        target.write(chunk)
    return counted.size, counted.crc


def _save(path: Path, chunks: Iterable[bytes]) -> tuple[int, int]:
    """Write a new local file; nothing is left of it where that fails."""
    with open(path, "xb") as file:
        try:
            return _copy(chunks, file)
        except BaseException:
            path.unlink()
            raise


def _checked(name: str) -> str:
    """A name that stays below the root and that `list` shows."""
    if not name or any(not part or part.startswith(".") for part in name.split("/")):
        raise ValueError(f"{name!r} is no name of a stored file")
    return name


def _checked_prefix(prefix: str) -> str:
    prefix = prefix.rstrip("/")
    return _checked(prefix) if prefix else ""
