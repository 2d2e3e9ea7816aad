"""CSV: cells between delimiters, as tables of a schema.

Arrow's parser does the work. An empty cell is null, an empty text in quotes is a text; `nulls` names other
texts that mean null. Columns are found by the header's names, in any order; without a header by their
place. Numbers, booleans (true, false, 1, 0), decimals, ISO 8601 dates, times and timestamps are read; a
timestamp column with a zone needs an offset in each cell, one without must have none. Bytes are the cell
as it is. Lists, structs and maps don't fit into cells.
"""

from __future__ import annotations

import csv
import io

import pyarrow as pa
import pyarrow.csv as pcsv

from holdfast.data import schemas
from holdfast.errors import PipelineError, SchemaError
from holdfast.io.lines import Parser, split_records

_DECLARE = 'Declare it: files(…, schema={"account": str, "amount": float}).'


class CsvParser(Parser):
    """Lines of one CSV file, whose columns are `names`, as tables of one schema.

    >>> parser = CsvParser(pa.schema({"b": pa.string(), "a": pa.int64()}), ["a", "b"])
    >>> parser.parse(b"1,x\\n2,\\n").to_pylist()
    [{'b': 'x', 'a': 1}, {'b': None, 'a': 2}]
    """

    def __init__(
        self,
        schema: pa.Schema,
        names: list[str],
        *,
        delimiter: str = ",",
        multiline: bool = False,
        nulls: tuple[str, ...] = ("",),
        timestamp_format: str | None = None,
    ) -> None:
        self._schema = schema
        self._names = names
        self.multiline = multiline
        self._parse = pcsv.ParseOptions(delimiter=delimiter, newlines_in_values=multiline)
        self._convert = pcsv.ConvertOptions(
            column_types={f.name: f.type for f in schema},
            include_columns=schema.names,
            include_missing_columns=True,
            null_values=list(nulls),
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
            timestamp_parsers=[timestamp_format] if timestamp_format else [],
        )

    def parse(self, lines: bytes) -> pa.Table:
        if self.multiline and lines.count(b'"') % 2:
            raise ValueError("a quote is not closed")
        if not lines.strip(b"\r\n"):
            return self._schema.empty_table()
        table = pcsv.read_csv(
            pa.BufferReader(lines),
            read_options=pcsv.ReadOptions(
                use_threads=False, column_names=self._names, block_size=len(lines) + 1
            ),
            parse_options=self._parse,
            convert_options=self._convert,
        )
        return pa.Table.from_arrays(table.columns, schema=self._schema)

    def parse_one(self, line: bytes) -> pa.Table:
        """The record of a line that stands alone.

        An open quote swallows what follows, so the line is set twice: only if both come back is it whole.
        """
        line = line.rstrip(b"\r\n") + b"\n"
        table = self.parse(line + line)
        if table.num_rows != 2:
            raise ValueError("a quote is not closed on its line, or the line holds more than one record")
        return table.slice(0, 1)

    def is_blank(self, line: bytes) -> bool:
        return not line.strip(b"\r\n")

    def matches(self, lines: bytes, rows: int) -> bool:
        """An open quote takes lines away, which shows in the number of rows, except at the very end."""
        text = lines.rstrip(b"\r\n")
        if not self.multiline and lines.count(b"\r") != lines.count(b"\r\n"):
            return False
        if text.count(b"\n") != rows - 1 or self.multiline:
            records = split_records(lines, self.multiline)
            if sum(not self.is_blank(record) for record in records) != rows:
                return False
        last = text[text.rfind(b"\n") + 1 :]
        return self.multiline or b'"' not in last or self._is_closed(last)

    def _is_closed(self, line: bytes) -> bool:
        try:
            return bool(self.parse_one(line).num_rows)
        except (pa.ArrowInvalid, ValueError):
            return False


def header(line: bytes, delimiter: str, path: str) -> list[str]:
    """The names in a header line.

    >>> header(b'a,"b c"\\n', ",", "x.csv")
    ['a', 'b c']
    """
    try:
        names = next(csv.reader(io.StringIO(line.decode("utf-8-sig")), delimiter=delimiter), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise SchemaError(
            f"The header of {path} can't be read: {error}.", remedy="Write it as UTF-8."
        ) from None
    doubled = {name for name in names if names.count(name) > 1}
    if doubled:
        raise SchemaError(
            f"{path} has the column {sorted(doubled)[0]!r} twice.",
            remedy="Give each column a name of its own.",
        )
    return names


def infer(
    sample: bytes, delimiter: str, nulls: tuple[str, ...], path: str, *, multiline: bool = False
) -> pa.Schema:
    """The schema of a file with a header, by its first lines; timestamps get microseconds.

    >>> infer(b"a,at\\n1,2024-01-01T00:00:00\\n", ",", ("",), "x.csv")
    a: int64
    at: timestamp[us]
    """
    line, _, rest = sample.partition(b"\n")
    names = header(line, delimiter, path)
    if not names or not rest.strip():
        raise PipelineError(f"No schema can be read from {path}: it has no records.", remedy=_DECLARE)
    try:
        found = pcsv.read_csv(
            pa.BufferReader(rest),
            read_options=pcsv.ReadOptions(use_threads=False, column_names=names, block_size=len(rest) + 1),
            parse_options=pcsv.ParseOptions(
                delimiter=delimiter, newlines_in_values=multiline, invalid_row_handler=lambda row: "skip"
            ),
            convert_options=pcsv.ConvertOptions(null_values=list(nulls), strings_can_be_null=True),
        ).schema
    except pa.ArrowInvalid as error:
        raise PipelineError(f"No schema can be read from {path}: {error}.", remedy=_DECLARE) from None
    undecided = [f.name for f in found if schemas.is_open(f.type)]
    if undecided:
        raise PipelineError(
            f"The type of {undecided[0]!r} can't be read from {path}: its first records have no value there.",
            remedy=_DECLARE,
        )
    return pa.schema([pa.field(f.name, _lasting(f.type)) for f in found])


def _lasting(kind: pa.DataType) -> pa.DataType:
    """A type that holds what later records may show: fractions of seconds."""
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", tz=kind.tz)
    return pa.time64("us") if pa.types.is_time(kind) else kind


def check_schema(schema: pa.Schema) -> None:
    """Raise for a schema that CSV can't carry."""
    for field in schema:
        try:
            CsvParser(pa.schema([field]), [field.name], nulls=("", "x")).parse(b"x\n")
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid, ValueError) as error:
            if isinstance(error, pa.ArrowNotImplementedError):
                raise PipelineError(
                    f"Column {field.name!r}: {field.type} can't be read from CSV.",
                    remedy="Declare another type for it, or use JSON lines or Parquet.",
                ) from None
