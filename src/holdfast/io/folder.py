"""Folders of Parquet and JSON lines files that any reader may read as usual.

This is the sinks' own room: an attempt stages files, a decided epoch's files are renamed into the folder, and
what nobody decided is swept away. Names, the hidden work folder and whose the folder is are `place`; cutting by
columns is `partition`; small files become large ones in `merge`.

What a reader may see: nothing of an undecided epoch, ever; of the newest decided one perhaps a part, until
it is published; every row once.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import logging
import os
import shutil
import uuid
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.errors import PipelineError, SinkError
from holdfast.io import jsontext, merge, partition
from holdfast.io.base import Decided, Sink, SinkWriter, StagedFile, Target
from holdfast.io.place import Place, local_path, parse_part, part_name
from holdfast.log.disk import sync_folder, write_durably

BUFFER_BYTES = 64 << 20
"""How much an attempt holds before it stages a file and goes on with the next."""
_ONE_BY_ONE = 16
"""More files or folders than this are brought to disk by one sync of all."""
_LOG = logging.getLogger("holdfast.io.folder")


def parquet(
    path: str | os.PathLike[str],
    *,
    partition_by: str | Sequence[str] | None = None,
    compression: str = "snappy",
    merge: bool = True,
    append: bool = False,
) -> ParquetSink:
    """Parquet files in a folder, for Spark, DuckDB, pyarrow and any other reader.

    Each decided epoch adds files (`part-<epoch>-<number>.parquet`); the same rows give the same bytes. In
    the background the files of a hundred epochs become one, and later those of ten thousand, up to 128 MB. That
    happens in one step: a listing shows the files before or after it. A reader that listed before and opens files
    after gets an error and must list again; one caught in the few milliseconds between listing and asking for the
    files' sizes may skip those that are gone (Spark and pyarrow do), so a count that must be sure is one with the
    same listing before and after. Use `merge=False` where that can't be borne, and where something
    watches for new files (`files`, for one): a merged file would look new.

    Beside the folder stands a hidden one, `.<name>.holdfast`, with what is not decided yet. One folder belongs
    to one sink: another pipeline, or this one started afresh while earlier output is still there, is refused.

    Args:
        path: the folder; made where it is missing. On a cluster every host must see it.
        partition_by: a column or several, whose values become folders (`country=KR/`) as Hive does it; null
            and the empty text are `__HIVE_DEFAULT_PARTITION__`.
        compression: "snappy", "zstd", "lz4", "gzip" or "none".
        merge: whether small files are merged.
        append: whether the folder may hold other data files already; they are left alone, and nothing is merged.

    >>> import tempfile
    >>> parquet(tempfile.mkdtemp() + "/out", partition_by="country").describe().startswith(
    ...     "Parquet files in"
    ... )
    True
    """
    if compression not in ("snappy", "zstd", "lz4", "gzip", "none"):
        raise PipelineError(
            f"compression={compression!r} is no choice.",
            remedy='Choose "snappy", "zstd", "lz4", "gzip" or "none".',
        )
    return ParquetSink(local_path(path), _columns(partition_by), compression, merge=merge, append=append)


def jsonl(
    path: str | os.PathLike[str],
    *,
    partition_by: str | Sequence[str] | None = None,
    compression: str | None = None,
    merge: bool = True,
    append: bool = False,
) -> JsonlSink:
    """JSON lines files in a folder: one object a line.

    Timestamps are ISO 8601 (with a zone: in UTC, with `Z`), decimals texts with all their digits, bytes base64,
    durations ISO 8601, maps objects; NaN and infinities are null, for JSON has none. Everything else is as
    with `parquet`.

    Args:
        path: the folder; made where it is missing. On a cluster every host must see it.
        partition_by: a column or several, whose values become folders.
        compression: None, "gzip" or "zstd".
        merge: whether small files are merged.
        append: whether the folder may hold other data files already; they are left alone, and nothing is merged.

    >>> import tempfile
    >>> jsonl(tempfile.mkdtemp() + "/out").describe().startswith("JSON lines files in")
    True
    """
    if compression not in (None, "gzip", "zstd"):
        raise PipelineError(
            f"compression={compression!r} is no choice.", remedy='Choose None, "gzip" or "zstd".'
        )
    return JsonlSink(local_path(path), _columns(partition_by), compression, merge=merge, append=append)


def _columns(partition_by: str | Sequence[str] | None) -> list[str]:
    return [partition_by] if isinstance(partition_by, str) else list(partition_by or ())


class FolderSink(Sink):
    """What the folder sinks share: staging, publishing and tidying up."""

    kind = ""
    suffix = ""

    def __init__(self, path: str, partition_by: list[str], *, merge: bool, append: bool) -> None:
        self.path = path
        self.place = Place(os.path.realpath(path))
        self.partition_by = partition_by
        self.merge_epochs = 100
        self._merging = merge and not append
        self._append = append
        self._claimed: tuple[str, str] | None = None
        self._merged_before = 0

    def encode(self, table: pa.Table) -> bytes | memoryview:
        """A file's bytes: the same for the same rows."""
        raise NotImplementedError

    def join(self, files: list[str], target: str) -> bool:
        """Write the rows of several files, in order, to one; False where they don't go together."""
        raise NotImplementedError

    def describe(self) -> str:
        by = f" by {', '.join(self.partition_by)}" if self.partition_by else ""
        return f"{self.kind} files in {self.path}{by}"

    def check(self) -> None:
        root = self.place.root
        if os.path.exists(root) and not os.path.isdir(root):
            raise SinkError(
                f"{root} is a file, not a folder.", remedy="Choose another path, or take the file away."
            )
        try:
            os.makedirs(root, exist_ok=True)
            self._probe()
        except OSError as error:
            raise SinkError(
                f"The folder {root} can't be written to: {error.strerror}.",
                remedy="Mend its permissions or choose another.",
            ) from None
        foreign = None if self._append else self.place.foreign(self.suffix)
        if foreign is not None:
            raise SinkError(
                f"The folder {root} holds files that are not this sink's: {foreign}.",
                remedy="Choose another folder, or say append=True if readers should see both.",
            )

    def _probe(self) -> None:
        """Rename a file from the work folder into the folder, as publishing does."""
        name = f".probe-{uuid.uuid4().hex}"
        staged, shown = os.path.join(self.place.work, name), os.path.join(self.place.root, name)
        write_durably(staged, b"")
        try:
            os.rename(staged, shown)
            os.unlink(shown)
        except OSError as error:
            os.unlink(staged)
            if error.errno != errno.EXDEV:
                raise
            os.makedirs(os.path.join(self.place.root, "_holdfast"), exist_ok=True)

    def claim(self, uid: str, folder: str) -> None:
        if self._claimed != (uid, folder):
            self.place.claim(uid, folder, self._append)
            self._claimed = (uid, folder)

    def writer(self, target: Target) -> SinkWriter:
        return _Writer(target, self.place.folder("staging"), self.encode, self.partition_by)

    def publish(self, decided: Decided) -> None:
        self.claim(decided.uid, decided.folder)
        if not decided.files:
            return
        staging = self.place.folder("staging")
        leaves = {os.path.join(self.place.root, file.partition) for file in decided.files}
        with self.place.locked("publish"):
            self._make(leaves)
            for number, file in enumerate(decided.files):
                staged = os.path.join(staging, file.path)
                name = part_name(decided.epoch, number, self.suffix)
                shown = os.path.join(self.place.root, file.partition, name)
                if not self._is_shown(file, staged, shown, decided.epoch):
                    try:
                        os.replace(staged, shown)
                    except (
                        FileNotFoundError
                    ):  # a driver that was replaced may be at it still: it shows the same
                        self._is_shown(file, staged, shown, decided.epoch)
        _sync_folders(leaves)  # also of files shown before: who renamed them may have died before the sync

    def _make(self, leaves: set[str]) -> None:
        for leaf in leaves:
            if len(leaves) > _ONE_BY_ONE:
                os.makedirs(leaf, exist_ok=True)  # and the sync of all, later, brings it to disk
            else:
                self.place.make(leaf)

    def _is_shown(self, file: StagedFile, staged: str, shown: str, epoch: int) -> bool:
        """Whether a file was published before: then it is no longer staged, but shown, or merged into another."""
        with contextlib.suppress(FileNotFoundError):
            size = os.stat(staged).st_size
            if size != file.size_bytes:
                raise SinkError(
                    f"The staged file {staged} has {size} bytes; {file.size_bytes} were decided on.",
                    remedy="The disk lost or changed it: restore it from a backup, or delete the pipeline's directory "
                    "and output and run again.",
                )
            return False
        if os.path.exists(shown) and os.stat(shown).st_size == file.size_bytes:
            return True
        if self._is_merged(os.path.dirname(shown), epoch):
            return True
        raise SinkError(
            f"Epoch {epoch} decided on the file {file.path}, which is neither in {os.path.dirname(staged)} nor published.",
            remedy="Somebody deleted it: restore it from a backup, or delete the pipeline's directory and output and "
            "run again.",
        )

    def _is_merged(self, leaf: str, epoch: int) -> bool:
        names = os.listdir(leaf) if os.path.isdir(leaf) else []
        parts = [parse_part(name, self.suffix) for name in names]
        return any(p is not None and p.is_merged and p.first <= epoch <= p.last for p in parts)

    def maintain(self, decided_epoch: int) -> None:
        """Sweep out what attempts of earlier epochs staged in vain, and merge small files.

        Staged files are told by their epoch and not by their generation, for those of a decided epoch may
        still wait to be published when a driver starts.
        """
        if self._claimed is None:
            return
        self._sweep(decided_epoch)
        before = decided_epoch // self.merge_epochs * self.merge_epochs
        if not self._merging or before == self._merged_before:
            return
        with self.place.locked("merge", wait=False) as mine:
            if mine:
                self._merge(before)
                self._merged_before = before

    def _sweep(self, decided_epoch: int) -> None:
        staging = self.place.folder("staging")
        for name in os.listdir(staging):
            epoch = name.split("~", 1)[0]
            if epoch.isdigit() and int(epoch) < decided_epoch:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(staging, name))

    def _merge(self, before: int) -> None:
        try:
            if not self.place.may_merge:
                raise merge.NotSupported("the work folder can't stand beside the folder")
            leftover = self.place.folder("merge")
            shutil.rmtree(leftover, ignore_errors=True)
            for leaf in list(self.place.leaves()):
                try:
                    merge.merge_leaf(self.place, leaf, self.suffix, before, self.merge_epochs, self.join)
                except FileNotFoundError as error:
                    _LOG.warning("%s is left unmerged for now: %s", leaf, error)
        except merge.NotSupported as error:
            self._merging = False
            _LOG.warning("small files are not merged in %s: %s", self.place.root, error)


def _sync_folders(leaves: set[str]) -> None:
    if len(leaves) > _ONE_BY_ONE:
        os.sync()
        return
    for leaf in leaves:
        sync_folder(leaf)


class ParquetSink(FolderSink):
    """Writes Parquet files; made by `parquet`."""

    kind = "Parquet"
    suffix = "parquet"

    def __init__(
        self, path: str, partition_by: list[str], compression: str, *, merge: bool, append: bool
    ) -> None:
        super().__init__(path, partition_by, merge=merge, append=append)
        self._compression = compression

    def encode(self, table: pa.Table) -> memoryview:
        out = pa.BufferOutputStream()
        pq.write_table(table, out, row_group_size=merge.ROW_GROUP_ROWS, **self._options(table.schema))
        return memoryview(out.getvalue())

    def join(self, files: list[str], target: str) -> bool:
        return merge.join_parquet(files, target, self._options(pq.read_schema(files[0])))

    def _options(self, schema: pa.Schema) -> dict[str, Any]:
        """Dictionaries only for texts and bytes: for numbers they cost three times the writing and save nothing."""
        texts = [f.name for f in schema if _is_text(f.type)]
        return {"compression": self._compression, "use_dictionary": texts or False, "write_statistics": True}


def _is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_large_binary(kind)
    )


class JsonlSink(FolderSink):
    """Writes JSON lines files; made by `jsonl`."""

    kind = "JSON lines"

    def __init__(
        self, path: str, partition_by: list[str], compression: str | None, *, merge: bool, append: bool
    ) -> None:
        super().__init__(path, partition_by, merge=merge, append=append)
        self._compression = compression
        self.suffix = {None: "jsonl", "gzip": "jsonl.gz", "zstd": "jsonl.zst"}[compression]

    def encode(self, table: pa.Table) -> bytes:
        data = jsontext.encode(table)
        if self._compression == "gzip":
            return gzip.compress(data, 6, mtime=0)
        if self._compression == "zstd":
            import zstandard

            return zstandard.ZstdCompressor().compress(data)
        return data

    def join(self, files: list[str], target: str) -> bool:
        return merge.join_bytes(files, target)


class _Writer(SinkWriter):
    """Buffers one attempt's tables, and stages a file for each partition when there is enough of them."""

    def __init__(
        self,
        target: Target,
        staging: str,
        encode: Callable[[pa.Table], bytes | memoryview],
        partition_by: list[str],
    ) -> None:
        self._target = target
        self._staging = staging
        self._encode = encode
        self._partition_by = partition_by
        self._held: dict[str, list[pa.Table]] = {}
        self._held_bytes = 0
        self._files: list[StagedFile] = []

    def write(self, table: pa.Table) -> None:
        if not table.num_rows:
            return
        parts = partition.split(table, self._partition_by) if self._partition_by else [("", table)]
        for folder, part in parts:
            self._held.setdefault(folder, []).append(part)
        self._held_bytes += table.nbytes
        if self._held_bytes >= BUFFER_BYTES:
            self._stage()

    def close(self) -> list[StagedFile]:
        self._stage()
        if len(self._files) > _ONE_BY_ONE:
            os.sync()
        elif self._files:
            for file in self._files:
                merge.sync_file(os.path.join(self._staging, file.path))
            sync_folder(self._staging)
        return self._files

    def abort(self) -> None:
        self._held = {}
        for file in self._files:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._staging, file.path))
        self._files = []

    def _stage(self) -> None:
        for folder in sorted(self._held):
            table = pa.concat_tables(self._held[folder]).replace_schema_metadata(None).combine_chunks()
            data = self._encode(table)
            name = f"{self._target.epoch:08d}~{self._target.attempt}~{self._target.uid}~{len(self._files):05d}.staged"
            with open(os.path.join(self._staging, name), "wb") as file:
                file.write(data)
            self._files.append(StagedFile(name, table.num_rows, len(data), zlib.crc32(data), folder))
        self._held = {}
        self._held_bytes = 0
