"""Files that appear in a folder: Parquet, JSON lines and CSV, each file taken once.

This is the source's own room: what it offers for an epoch and how it reads a range again. Which files are
new is `listing`; rows of Parquet are `parquetfile`; lines of text are `lines`, `jsontext` and `csvtext`; a
file whose columns are not the schema's is `drift`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.config import parse_duration_s
from holdfast.data.types import arrow_schema
from holdfast.errors import DataError, PipelineError, SourceChangedError
from holdfast.io import csvtext, drift, jsontext, lines, parquetfile
from holdfast.io.base import Limit, Offer, Range, Reading, Source, check_policy
from holdfast.io.listing import REMEMBERED, Folder, Found, Open, Taken, after, news
from holdfast.io.place import local_path

FILES_AN_EPOCH = 1_000
_LEAST_ROWS = 4_096
_LEAST_BYTES = 1 << 20
_WHOLE = ""
"""Files come and go: the folder as a whole is one split, with one watermark."""
_LOG = logging.getLogger("holdfast.io.files")
_TOO_LATE = (
    "%s was added or changed, but is older than what late_window remembers: it is not read. "
    "If it is new, touch it, and it is taken."
)
_AFTER_THE_END = "%s came after the end of its source, which does not watch for more: it is not read."


def files(
    path: str | os.PathLike[str],
    format: str = "parquet",
    schema: Any = None,
    on_bad_record: str = "fail",
    *,
    pattern: str | None = None,
    on_drift: str = "fail",
    watch: bool = True,
    late_window: str | float = "1h",
    settle: str | float = "0s",
    retention: str | float | None = None,
    header: bool = True,
    delimiter: str = ",",
    multiline: bool = False,
    nulls: tuple[str, ...] = ("",),
    timestamp_format: str | None = None,
) -> FilesSource:
    """Files that appear in a folder or below it, each taken once, by modification time and then by name.

    Write a file under a hidden or temporary name and rename it into place once it is whole. Names that
    start with `.` or `_`, or end in `.tmp`, `.part`, `.staged`, `.crc` and the like, are left alone. A
    writer that can't rename needs `settle`: a file is then taken only when it has not been touched for so long.

    A taken file must stay as it is for as long as an epoch may be run again: one that has changed, shrunk
    or gone is a `SourceChangedError`. Appending to a taken file is such a change. A file that is moved to another
    name below the folder is a new file: move what is done with out of it. Links to folders are not followed,
    and what only a folder's name tells (`country=KR/`) is not read.

    A file that turns up with an older time than one already taken is still taken, once, if it is at most
    `late_window` older than the newest one (or newer than the 5,000 newest taken, whichever is
    shorter). One older than that can't be told from a file taken long ago: it is not read, and a warning names
    it. `touch` it, and it is taken.

    Columns that differ from the schema: one that is missing is null; one too many is an error, or is left
    out with `on_drift="ignore"`; another type is cast where nothing is lost, and is an error otherwise.

    Args:
        path: the folder, or one file.
        format: "parquet", "jsonl" or "csv"; the last two may be compressed (`.gz`, `.zst`), and are then read
            by one task a file.
        schema: an Arrow schema, a dict of names to types, or a TypedDict. Without it the first file decides,
            when the pipeline starts.
        on_bad_record: "fail", "skip" (counted) or "dead_letter" (counted and kept), with file and line. A file
            that can't be read at all is one bad record.
        pattern: only files whose name matches, as in a shell ("*.csv"); with a slash it must match the path below the folder.
        on_drift: "fail" or "ignore": what a column that the schema does not have is.
        watch: whether to wait for more files. Without it the stream ends when no file is left, and event time with it, so
            that every window is emitted. A file that comes after the end is not read, and a warning names it.
        late_window: how much older than the newest taken file a file may be and still be taken.
        settle: how long a file must have been left alone before it is taken.
        retention: how long after its modification somebody else deletes a file. A checkpoint is made before that, so
            that no recovery needs one that has gone.
        header: CSV: whether the first line names the columns; if not, the schema's order counts.
        delimiter: CSV: what stands between cells.
        multiline: CSV: whether cells in quotes may hold newlines; each file is then read by one task.
        nulls: CSV: the texts that mean null where they stand without quotes.
        timestamp_format: how timestamps are written in text, as for `strptime`; ISO 8601 without it.

    >>> import tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.jsonl").write_text('{"account": "a", "amount": 1.5}\\n')
    >>> files(folder, format="jsonl").schema()
    account: string
    amount: double
    """
    settings = _Text(header, delimiter, multiline, tuple(nulls), timestamp_format)
    return FilesSource(
        local_path(path),
        _format(format, settings),
        None if schema is None else arrow_schema(schema),
        on_bad_record=check_policy(on_bad_record),
        pattern=pattern,
        on_drift=drift.check_choice(on_drift),
        watch=watch,
        late_window_s=parse_duration_s(late_window),
        settle_s=parse_duration_s(settle),
        retention_s=None if retention is None else parse_duration_s(retention),
    )


@dataclasses.dataclass(frozen=True)
class Measure:
    """What a look at a file tells: how long it is, in the units of its ranges, and where it is best cut."""

    length: int
    records_a_unit: float
    exact: bool
    """Whether a unit is a record."""
    whole: bool = False
    """Whether it must be read by one task."""
    cuts: tuple[int, ...] = ()
    fault: str | None = None
    """Why it can't be read at all."""


@dataclasses.dataclass(frozen=True)
class _Span:
    """What an epoch takes of one file."""

    file: Found
    measure: Measure
    start: int
    end: int

    @property
    def records(self) -> float:
        return (self.end - self.start) * self.measure.records_a_unit


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """What an epoch takes, what is done with then, what is left for later, and the file that is left in part."""

    spans: list[_Span]
    done: list[Found]
    rest: list[Found]
    unsettled: list[Found]
    part: Open | None


class FilesSource(Source):
    """Reads files that appear in a folder; made by `files`."""

    def __init__(
        self,
        path: str,
        format: Format,
        schema: pa.Schema | None,
        *,
        on_bad_record: str,
        pattern: str | None,
        on_drift: str,
        watch: bool,
        late_window_s: float,
        settle_s: float,
        retention_s: float | None = None,
    ) -> None:
        self._retention_ms = None if retention_s is None else int(retention_s * 1000)
        self.path = os.path.abspath(path)
        self.on_bad_record = on_bad_record
        self._format = format
        self._schema = schema
        self._on_drift = on_drift
        self._watch = watch
        self._window_ns = int(late_window_s * 1e9)
        self._settle_ns = int(settle_s * 1e9)
        one_file = os.path.isfile(self.path)
        self._root = os.path.dirname(self.path) if one_file else self.path
        self._only = os.path.basename(self.path) if one_file else None
        self._pattern = pattern
        self._folder = Folder(self._root, pattern, self._only)
        self._measures: dict[tuple[str, int, int], Measure] = {}
        self._told: set[tuple[str, int]] = set()
        self._records_a_byte = 0.01
        if schema is not None:
            format.check_schema(schema)

    def __getstate__(self) -> dict[str, Any]:
        folder = Folder(self._root, self._pattern, self._only)
        return {**self.__dict__, "_folder": folder, "_measures": {}, "_told": set()}

    def split_of(self, piece: Range) -> str:
        return _WHOLE

    def expires_ms(self, piece: Range) -> int | None:
        if self._retention_ms is None:
            return None
        return int(piece.info["mtime_ns"]) // 1_000_000 + self._retention_ms

    def describe(self) -> str:
        return f"{self._format.name} files in {self.path}"

    def schema(self) -> pa.Schema:
        if not os.path.isdir(self._root):
            raise PipelineError(
                f"The folder {self._root} does not exist.", remedy="Make it, or mend the path."
            )
        if self._schema is None:
            self._schema = self._first_schema()
        return self._schema

    def _first_schema(self) -> pa.Schema:
        waiting = news(self._folder.look(), Taken()).waiting
        if not waiting:
            raise PipelineError(
                f"The folder {self._root} holds no files yet, so there is no schema to read.",
                remedy='Declare it: files(…, schema={"account": str, "amount": float}), or put a first file there.',
            )
        first = os.path.join(self._root, waiting[0].path)
        try:
            found = self._format.infer(first)
        except (pa.ArrowInvalid, OSError) as error:
            raise PipelineError(
                f"No schema can be read from {first}: {error}.",
                remedy="Declare schema=, or take the file away if it is no data.",
            ) from None
        self._format.check_schema(found)
        return found

    def plan(self, position: Any, limit: Limit) -> Offer:
        taken = Taken() if position is None else msgspec.convert(position, Taken)
        found = self._folder.look()
        seen = news(found, taken)
        self._complain(seen.changed, taken)
        self._warn(seen.too_late, _TOO_LATE)
        if taken.ended and not self._watch:
            self._warn(seen.waiting, _AFTER_THE_END)
            return Offer([], position, exhausted=True, splits=[_WHOLE])
        newest = max((f.ctime_ns for f in found), default=0)
        taken = msgspec.structs.replace(
            taken,
            newest_ctime_ns=max(taken.newest_ctime_ns, newest),
            ignored=taken.ignored + len(seen.too_late),
        )
        chosen = self._choose(seen.waiting, taken, limit)
        left = min([*chosen.rest, *chosen.unsettled], key=lambda f: f.key, default=None)
        ends = not self._watch and left is None and chosen.part is None
        taken = after(
            msgspec.structs.replace(taken, ended=ends),
            chosen.done,
            left,
            part=chosen.part,
            window_ns=self._window_ns,
            now_ns=limit.now_ms * 1_000_000,
        )
        return Offer(
            ranges=_ranges(chosen.spans, limit.tasks),
            position=msgspec.json.decode(msgspec.json.encode(taken)),
            backlog=self._backlog(chosen.rest, chosen.part),
            exhausted=ends,
            splits=[_WHOLE],
            # A file that has yet to settle is not idleness.
            waiting=[_WHOLE] if left is not None or chosen.part is not None else [],
        )

    def _choose(self, waiting: list[Found], taken: Taken, limit: Limit) -> _Chosen:
        near, far = waiting[:FILES_AN_EPOCH], waiting[FILES_AN_EPOCH:]
        queue, unsettled = self._settled(near, limit.now_ms)
        starts = {}
        if taken.open is not None:
            queue = [self._unfinished(taken.open), *queue]
            starts[taken.open.path] = taken.open.next
        spans: list[_Span] = []
        budget = float(limit.records)
        for place, file in enumerate(queue):
            start = starts.get(file.path, 0)
            measure = self._measure(file)
            end = _take_until(measure, start, budget, first=not spans)
            if end > start:
                spans.append(_Span(file, measure, start, end))
                budget -= spans[-1].records
            if end < measure.length:
                part = Open(file.path, file.mtime_ns, file.size, end) if end else None
                rest = queue[place + (part is not None) :] + far
                return _Chosen(spans, queue[:place], rest, unsettled, part)
        return _Chosen(spans, queue, far, unsettled, None)

    def _settled(self, waiting: list[Found], now_ms: int) -> tuple[list[Found], list[Found]]:
        fresh = sorted(self._folder.fresh(waiting), key=lambda f: f.key)
        if not self._settle_ns:
            return fresh, []
        latest = now_ms * 1_000_000 - self._settle_ns
        ready = [f for f in fresh if f.mtime_ns <= latest]
        return ready, fresh[len(ready) :]

    def _unfinished(self, part: Open) -> Found:
        now = next(self._folder.fresh([Found(part.path, part.mtime_ns, part.size, 0)]), None)
        _check_unchanged(
            os.path.join(self._root, part.path),
            part.size,
            part.mtime_ns,
            None if now is None else (now.size, now.mtime_ns),
        )
        assert now is not None
        return now

    def _measure(self, file: Found) -> Measure:
        key = (file.path, file.mtime_ns, file.size)
        if key not in self._measures:
            if len(self._measures) >= 2 * FILES_AN_EPOCH:
                self._measures.clear()
            self._measures[key] = self._measured(os.path.join(self._root, file.path), file.size)
        measure = self._measures[key]
        if file.size and measure.length:
            self._records_a_byte = measure.length * measure.records_a_unit / file.size
        return measure

    def _measured(self, place: str, size: int) -> Measure:
        try:
            return self._format.measure(place, size)
        except FileNotFoundError:
            return Measure(0, 0.0, exact=False)  # gone since it was seen: nothing of it was planned
        except OSError as error:
            raise DataError(_reason(error, place)) from error

    def _backlog(self, rest: list[Found], part: Open | None) -> int:
        records = sum(f.size for f in rest) * self._records_a_byte
        if part is not None:
            measure = self._measure(Found(part.path, part.mtime_ns, part.size, 0))
            records += (measure.length - part.next) * measure.records_a_unit
        return max(round(records), len(rest) + (part is not None))

    def _complain(self, changed: list[Found], taken: Taken) -> None:
        for file in changed:
            mtime_ns, size = taken.files[file.path]
            place = os.path.join(self._root, file.path)
            _check_unchanged(place, size, mtime_ns, (file.size, file.mtime_ns))

    def _warn(self, unread: list[Found], why: str) -> None:
        """Tell of each file once, however often the folder is looked at before the next epoch."""
        for file in unread:
            if (file.path, file.mtime_ns) not in self._told:
                if len(self._told) >= REMEMBERED:
                    self._told.clear()
                self._told.add((file.path, file.mtime_ns))
                _LOG.warning(why, os.path.join(self._root, file.path))

    def read(self, piece: Range, reading: Reading) -> Iterator[pa.Table]:
        place = os.path.join(self._root, piece.info["path"])
        planned = (place, piece.info["size"], piece.info["mtime_ns"])
        _check_unchanged(*planned, _now(place))
        if "fault" in piece.info:
            reading.bad_record("", piece.info["fault"], place, None)
            return
        try:
            yield from self._format.read(place, piece, self.schema(), self._on_drift, reading)
        except (pa.ArrowInvalid, OSError) as error:
            _check_unchanged(*planned, _now(place))
            reading.bad_record("", f"{_extent(piece)} can't be read: {_reason(error, place)}", place, None)
        _check_unchanged(*planned, _now(place))


def _extent(piece: Range) -> str:
    return (
        f"what lies from {piece.start} to {piece.end}"
        if piece.records < 0
        else f"rows {piece.start} to {piece.end}"
    )


def _reason(error: Exception, place: str) -> str:
    """Why a file's content can't be read; an error of the operating system's says nothing of content."""
    if isinstance(error, OSError) and error.errno is not None:
        raise DataError(
            f"{place} can't be opened or read: {error.strerror}.", remedy="Mend the disk or the permissions."
        ) from error
    return str(error)


def _now(place: str) -> tuple[int, int] | None:
    try:
        status = os.stat(place)
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns


def _check_unchanged(place: str, size: int, mtime_ns: int, now: tuple[int, int] | None) -> None:
    if now == (size, mtime_ns):
        return
    if now is None:
        what = "it has gone"
    elif now[0] < size:
        what = f"it has shrunk to {now[0]} bytes"
    elif now[0] > size:
        what = f"it has grown to {now[0]} bytes"
    else:
        what = f"it was written again (modified at {now[1]} ns, {size} bytes as before)"
    raise SourceChangedError(
        f"The file {place} was planned with {size} bytes, modified at {mtime_ns} ns; now {what}.",
        remedy="Put the file back as it was (with its time: cp -p, touch -d). "
        "Files must not change once they are in the folder: add records in new files.",
    )


def _take_until(measure: Measure, start: int, budget: float, first: bool) -> int:
    """The end of what an epoch takes of a file; `start` where nothing of it fits any more."""
    left = measure.length - start
    if measure.whole or measure.fault or left <= 0:
        fits = first or left * measure.records_a_unit <= budget
        return measure.length if fits else start
    units = int(budget / measure.records_a_unit) if measure.records_a_unit else left
    if first:
        units = max(units, 1)
    if units >= left:
        return measure.length
    return _aligned(start + max(units, 0), start, measure.cuts)


def _aligned(end: int, start: int, cuts: tuple[int, ...]) -> int:
    """The last cut before `end`, if most of what was meant lies before it."""
    near = [cut for cut in cuts if start < cut <= end]
    return near[-1] if near and near[-1] - start >= (end - start) / 2 else end


def _ranges(spans: list[_Span], tasks: int) -> list[Range]:
    """Spans cut so that every core has work, in order, dealt out to as many splits as there are tasks.

    A file has no lasting split: a split is a lane of this epoch, and holds its ranges in order.
    """
    share = sum(span.records for span in spans) / max(tasks, 1)
    found: list[Range] = []
    before = 0.0
    for span in spans:
        info: dict[str, Any] = {
            "path": span.file.path,
            "size": span.file.size,
            "mtime_ns": span.file.mtime_ns,
        }
        if span.measure.fault:
            info["fault"] = span.measure.fault
        for start, end in _pieces(span, before, share):
            records = (end - start) * span.measure.records_a_unit
            lane = int((before + records / 2) / share) if share else 0
            found.append(Range(f"{lane:04d}", start, end, info, end - start if span.measure.exact else -1))
            before += records
    return found


def _pieces(span: _Span, before: float, share: float) -> Iterator[tuple[int, int]]:
    """A span cut where one task's share ends and the next one's begins, unless a piece would be tiny."""
    start = span.start
    least = _LEAST_ROWS if span.measure.exact else _LEAST_BYTES
    if share and not span.measure.whole and not span.measure.fault:
        for number in range(int(before / share) + 1, math.ceil((before + span.records) / share)):
            ideal = span.start + round((number * share - before) / span.measure.records_a_unit)
            cut = _nearest(ideal, span.measure.cuts, (span.end - span.start) // 8)
            if cut - start >= least and span.end - cut >= least:
                yield start, cut
                start = cut
    yield start, span.end


def _nearest(ideal: int, cuts: tuple[int, ...], slack: int) -> int:
    best = min(cuts, key=lambda cut: abs(cut - ideal), default=ideal)
    return best if abs(best - ideal) <= slack else ideal


class Format:
    """What a file format knows: its schema, its length and how to read a piece of it."""

    name = ""

    def check_schema(self, schema: pa.Schema) -> None:
        """Raise for a schema that the format can't carry."""
        return

    def infer(self, path: str) -> pa.Schema:
        """The schema of a file."""
        raise NotImplementedError

    def measure(self, path: str, size: int) -> Measure:
        """How long a file is."""
        raise NotImplementedError

    def read(
        self, path: str, piece: Range, schema: pa.Schema, on_drift: str, reading: Reading
    ) -> Iterator[pa.Table]:
        """The records of a range."""
        raise NotImplementedError


class _Parquet(Format):
    name = "Parquet"

    def infer(self, path: str) -> pa.Schema:
        return parquetfile.schema_of(path)

    def measure(self, path: str, size: int) -> Measure:
        try:
            cuts = parquetfile.boundaries(path)
        except (pa.ArrowInvalid, OSError) as error:
            return Measure(
                max(size, 1), 0.0, exact=False, fault=f"it is no Parquet file: {_reason(error, path)}"
            )
        return Measure(cuts[-1] if cuts else 0, 1.0, exact=True, cuts=tuple(cuts))

    def read(
        self, path: str, piece: Range, schema: pa.Schema, on_drift: str, reading: Reading
    ) -> Iterator[pa.Table]:
        with pq.ParquetFile(path, memory_map=True) as file:
            names = file.schema_arrow.names
            drift.check_names(names, schema, on_drift, path)
            wanted = [name for name in names if name in schema.names]
            columns = None if len(wanted) == len(names) else wanted
            for table in parquetfile.read_rows(file, piece.start, piece.end, columns):
                yield drift.fit(table, schema, path)


@dataclasses.dataclass(frozen=True)
class _Text:
    """What the user said of text files."""

    header: bool
    delimiter: str
    multiline: bool
    nulls: tuple[str, ...]
    timestamp_format: str | None


class _Lines(Format):
    """What JSON lines and CSV share: ranges of bytes."""

    multiline = False

    def measure(self, path: str, size: int) -> Measure:
        whole = self.multiline or lines.codec(path) is not None
        return Measure(size, lines.records_a_byte(path), exact=False, whole=whole)

    def read(
        self, path: str, piece: Range, schema: pa.Schema, on_drift: str, reading: Reading
    ) -> Iterator[pa.Table]:
        compressed = lines.codec(path) is not None
        trouble = lines.Trouble(reading, path, lambda: lines.open_text(path))
        try:
            parser, skip = self.parser(path, schema, on_drift)
            with lines.open_text(path) as file:
                end = None if compressed or self.multiline else piece.end
                found = lines.blocks(file, piece.start, end, self.multiline)
                if skip and not piece.start:
                    found = _without_header(found)
                yield from lines.tables(found, parser, trouble)
        finally:
            trouble.close()

    def parser(self, path: str, schema: pa.Schema, on_drift: str) -> tuple[lines.Parser, bool]:
        """A parser for one file, and whether its first line is a header."""
        raise NotImplementedError


def _without_header(found: Iterator[lines.Block]) -> Iterator[lines.Block]:
    first = next(found, None)
    if first is not None:
        cut = first.lines.find(b"\n") + 1 or len(first.lines)
        if cut < len(first.lines):
            yield lines.Block(first.offset + cut, first.lines[cut:])
    yield from found


class _Jsonl(_Lines):
    name = "JSON lines"

    def __init__(self, text: _Text) -> None:
        self._text = text

    def check_schema(self, schema: pa.Schema) -> None:
        jsontext.check_schema(schema, self._text.timestamp_format)

    def infer(self, path: str) -> pa.Schema:
        return jsontext.infer(lines.sample(path), path)

    def parser(self, path: str, schema: pa.Schema, on_drift: str) -> tuple[lines.Parser, bool]:
        return jsontext.JsonParser(schema, on_drift, self._text.timestamp_format), False


class _Csv(_Lines):
    name = "CSV"

    def __init__(self, text: _Text) -> None:
        self._text = text
        self.multiline = text.multiline

    def check_schema(self, schema: pa.Schema) -> None:
        csvtext.check_schema(schema)

    def infer(self, path: str) -> pa.Schema:
        if not self._text.header:
            raise PipelineError(
                "CSV files without a header have no names for their columns.",
                remedy='Declare them in order: files(…, header=False, schema={"account": str, "amount": float}).',
            )
        text = self._text
        return csvtext.infer(lines.sample(path), text.delimiter, text.nulls, path, multiline=self.multiline)

    def parser(self, path: str, schema: pa.Schema, on_drift: str) -> tuple[lines.Parser, bool]:
        names = schema.names
        if self._text.header:
            with lines.open_text(path) as file:
                first = next(lines.blocks(file, 0, 1), None)
            names = csvtext.header(first.lines if first else b"", self._text.delimiter, path)
            drift.check_names(names, schema, on_drift, path)
        parser = csvtext.CsvParser(
            schema,
            names,
            delimiter=self._text.delimiter,
            multiline=self.multiline,
            nulls=self._text.nulls,
            timestamp_format=self._text.timestamp_format,
        )
        return parser, self._text.header


_FORMATS: dict[str, Callable[[_Text], Format]] = {
    "parquet": lambda _: _Parquet(),
    "jsonl": _Jsonl,
    "csv": _Csv,
}


def _format(name: str, text: _Text) -> Format:
    if name not in _FORMATS:
        raise PipelineError(f"format={name!r} is no format.", remedy='Choose "parquet", "jsonl" or "csv".')
    return _FORMATS[name](text)
