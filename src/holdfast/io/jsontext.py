"""JSON lines: one object a line, as tables of a schema and back.

Arrow's own parser reads what it can (numbers, texts, booleans, timestamps, decimals, lists, structs, and
dates at the top level). A schema with anything else (bytes, maps, times, durations, dates inside lists) is
read by msgspec, line by line. Either way the same texts are taken, and both directions agree:

==========  ==================================================================================
type        in JSON
==========  ==================================================================================
timestamp   ISO 8601. With a zone it is written in UTC (`…Z`) and read with any offset, without
            one as UTC; a column without a zone is written and read without
decimal     a text with all its digits; a number is read too
bytes       base64
date, time  ISO 8601
duration    ISO 8601 (`PT1.5S`)
map         an object; keys are texts
NaN, inf    null: JSON has no such numbers
==========  ==================================================================================

A field that is absent is null. A number with a fraction is no integer, a text is no number: that is a bad
record. So is a field given twice.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from holdfast.data import schemas
from holdfast.data.rows import Row, to_rows, to_table
from holdfast.errors import PipelineError, SchemaError
from holdfast.io.lines import Drift, Parser

SAMPLE_RECORDS = 1_000
Convert = Callable[[Any], Any]


class JsonParser(Parser):
    """JSON lines as tables of one schema.

    >>> JsonParser(pa.schema({"a": pa.int64()})).parse(b'{"a": 1}\\n{}\\n').to_pylist()
    [{'a': 1}, {'a': None}]
    """

    def __init__(
        self, schema: pa.Schema, on_drift: str = "fail", timestamp_format: str | None = None
    ) -> None:
        self._schema = schema
        self._on_drift = on_drift
        self._wire = pa.schema([_wire_field(f, timestamp_format) for f in schema])
        self._format = timestamp_format
        self._by_arrow = all(_arrow_reads(f.type) for f in self._wire)
        self._converters = [_converter(f.type, f.name) for f in self._wire] if not self._by_arrow else []

    def parse(self, lines: bytes) -> pa.Table:
        lines.decode("utf-8")
        found = self._parse_arrow(lines, self._on_drift) if self._by_arrow else self._parse_python(lines)
        if found.schema.equals(self._schema):
            return found
        columns = [self._from_wire(found.column(f.name), f) for f in self._schema]
        return pa.Table.from_arrays(columns, schema=self._schema)

    def parse_one(self, line: bytes) -> pa.Table:
        try:
            return super().parse_one(line)
        except pa.ArrowInvalid as error:
            if "unexpected field" in str(error):
                raise self._drift(line) from None
            raise
        except Drift:
            raise self._drift(line) from None

    def is_blank(self, line: bytes) -> bool:
        return not line.strip()

    def matches(self, lines: bytes, rows: int) -> bool:
        """Inside an object no `}` is followed by a `{`: where each line is in braces, none goes over its end."""
        text = lines.strip()
        if text[:1] == b"{" and text[-1:] == b"}" and text.count(b"\n") == text.count(b"}\n{") == rows - 1:
            return True
        found = [line.strip() for line in text.split(b"\n")]
        held = [line for line in found if line]
        return len(held) == rows and all(line[:1] == b"{" and line[-1:] == b"}" for line in held)

    def _parse_arrow(self, lines: bytes, on_drift: str) -> pa.Table:
        if not lines.strip():
            return self._wire.empty_table()
        return pj.read_json(
            pa.BufferReader(lines),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(lines) + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=self._wire,
                unexpected_field_behavior="error" if on_drift == "fail" else "ignore",
            ),
        )

    def _parse_python(self, lines: bytes) -> pa.Table:
        objects = [_decode(line) for line in lines.split(b"\n") if line.strip()]
        names = set(self._wire.names)
        if self._on_drift == "fail" and any(not names.issuperset(o) for o in objects):
            raise Drift("a record has a field that the schema does not")
        arrays = [
            pa.array([convert(o.get(field.name)) for o in objects], type=field.type)
            for field, convert in zip(self._wire, self._converters, strict=True)
        ]
        return pa.Table.from_arrays(arrays, schema=self._wire)

    def _from_wire(self, column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
        if column.type.equals(field.type):
            return column
        if self._format is not None and pa.types.is_timestamp(field.type):
            found = pc.strptime(column, format=self._format, unit=field.type.unit)
            return found.cast(field.type)
        return column.cast(field.type)

    def _drift(self, line: bytes) -> Drift:
        extra = [name for name in _decode(line) if name not in self._schema.names]
        if extra:
            return Drift(f"the record has the field {extra[0]!r}, which the schema does not")
        return Drift("the record has a field inside a struct that the schema does not")


def _decode(line: bytes) -> Row:
    found = msgspec.json.decode(line)
    if not isinstance(found, dict):
        raise ValueError("a line must hold a JSON object")
    return found


def _wire_field(field: pa.Field, timestamp_format: str | None) -> pa.Field:
    """The type that a column has until it is cast: dates are texts first."""
    kind = field.type
    as_text = pa.types.is_date(kind)
    as_text |= timestamp_format is not None and pa.types.is_timestamp(kind)
    return pa.field(field.name, pa.string() if as_text else kind)


def _arrow_reads(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _arrow_reads(kind.value_type)
    if pa.types.is_struct(kind):
        return all(_arrow_reads(f.type) for f in kind)
    return any(
        test(kind)
        for test in (
            pa.types.is_boolean,
            pa.types.is_integer,
            pa.types.is_float32,
            pa.types.is_float64,
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_timestamp,
            pa.types.is_decimal,
            pa.types.is_null,
        )
    )


def _converter(kind: pa.DataType, name: str) -> Convert:
    """A function from JSON's value to the one that Arrow takes; raises ValueError where it does not fit."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = _converter(kind.value_type, name)
        return _nullable(lambda v: [inner(x) for x in _expect(v, list, kind)])
    if pa.types.is_struct(kind):
        fields = {f.name: _converter(f.type, f"{name}.{f.name}") for f in kind}
        return _nullable(lambda v: {n: c(_expect(v, dict, kind).get(n)) for n, c in fields.items()})
    if pa.types.is_map(kind):
        return _map_converter(kind, name)
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        raise PipelineError(
            f"Column {name!r} ({kind}) can't be read from JSON together with bytes, maps or durations.",
            remedy="Declare it with microseconds.",
        )
    convert = next((convert for test, convert in _SCALARS if test(kind)), None)
    if convert is not None:
        return _nullable(lambda v: convert(v, kind))
    raise PipelineError(
        f"Column {name!r}: {kind} can't be read from JSON.", remedy="Declare another type for it."
    )


def _map_converter(kind: pa.MapType, name: str) -> Convert:
    value = _converter(kind.item_type, name)
    if pa.types.is_string(kind.key_type) or pa.types.is_large_string(kind.key_type):
        return _nullable(lambda v: [(k, value(x)) for k, x in _expect(v, dict, kind).items()])
    if pa.types.is_integer(kind.key_type):
        return _nullable(lambda v: [(int(k), value(x)) for k, x in _expect(v, dict, kind).items()])
    raise PipelineError(
        f"Column {name!r}: a map from JSON has texts or integers as keys, not {kind.key_type}."
    )


def _nullable(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)


def _expect(value: Any, wanted: type | tuple[type, ...], kind: pa.DataType) -> Any:
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise ValueError(f"{value!r} is no {kind}")
    return value


def _timestamp(value: Any, kind: pa.DataType) -> dt.datetime:
    text = _expect(value, str, kind)
    try:
        found = msgspec.convert(text, dt.datetime)
    except msgspec.ValidationError:
        found = dt.datetime.fromisoformat(text)
    if found.tzinfo is not None:
        found = found.astimezone(dt.timezone.utc)
    return found if kind.tz else found.replace(tzinfo=None)


def _decimal(value: Any, kind: pa.DataType) -> decimal.Decimal:
    return decimal.Decimal(str(_expect(value, (str, int, float), kind)))


_SCALARS: list[tuple[Callable[[pa.DataType], bool], Callable[[Any, pa.DataType], Any]]] = [
    (pa.types.is_boolean, lambda v, kind: _expect(v, bool, kind)),
    (pa.types.is_integer, lambda v, kind: _expect(v, int, kind)),
    (pa.types.is_floating, lambda v, kind: float(_expect(v, (int, float), kind))),
    (pa.types.is_string, lambda v, kind: _expect(v, str, kind)),
    (pa.types.is_large_string, lambda v, kind: _expect(v, str, kind)),
    (pa.types.is_binary, lambda v, kind: base64.b64decode(_expect(v, str, kind), validate=True)),
    (pa.types.is_large_binary, lambda v, kind: base64.b64decode(_expect(v, str, kind), validate=True)),
    (pa.types.is_fixed_size_binary, lambda v, kind: base64.b64decode(_expect(v, str, kind), validate=True)),
    (pa.types.is_timestamp, _timestamp),
    (pa.types.is_date, lambda v, kind: dt.date.fromisoformat(_expect(v, str, kind))),
    (pa.types.is_time, lambda v, kind: dt.time.fromisoformat(_expect(v, str, kind))),
    (pa.types.is_duration, lambda v, kind: msgspec.convert(_expect(v, str, kind), dt.timedelta)),
    (pa.types.is_decimal, _decimal),
]


def infer(sample: bytes, path: str) -> pa.Schema:
    """The schema of a file by its first records: JSON's own types, and nothing guessed from texts.

    >>> infer(b'{"a": 1, "at": "2024-01-01"}', "a.jsonl")
    a: int64
    at: string
    """
    rows: list[Row] = []
    for line in sample.split(b"\n")[:SAMPLE_RECORDS]:
        try:
            found = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if isinstance(found, dict):
            rows.append(found)
    if not rows:
        raise PipelineError(
            f"No schema can be read from {path}: no line of it is a JSON object.", remedy=_DECLARE
        )
    try:
        schema = to_table(rows, None).schema
    except SchemaError as error:
        raise PipelineError(f"No schema can be read from {path}: {error.message}", remedy=_DECLARE) from None
    undecided = [f.name for f in schema if schemas.is_open(f.type)]
    if undecided:
        raise PipelineError(
            f"The type of {undecided[0]!r} can't be read from {path}: its first {len(rows)} records have no value there.",
            remedy=_DECLARE,
        )
    return schema


_DECLARE = 'Declare it: files(…, schema={"account": str, "amount": float}).'

_ENCODER = msgspec.json.Encoder(decimal_format="string", uuid_format="canonical")


def encode(table: pa.Table) -> bytes:
    """A table as JSON lines, as the table above says.

    >>> encode(pa.table({"a": [1, None], "x": [float("nan"), 0.5]}))
    b'{"a":1,"x":null}\\n{"a":null,"x":0.5}\\n'
    """
    columns = [_encodable(column) for column in table.columns]
    rows = to_rows(pa.Table.from_arrays(columns, names=table.schema.names))
    return _ENCODER.encode_lines(rows)


def _encodable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    if pa.types.is_timestamp(kind):
        if kind.tz is not None:
            column = column.cast(pa.timestamp(kind.unit, tz="UTC"))
        return pc.replace_substring(column.cast(pa.string()), " ", "T", max_replacements=1)
    if pa.types.is_dictionary(kind):
        return _encodable(column.cast(kind.value_type))
    if pa.types.is_nested(kind):
        wanted = _in_utc(kind)
        return column if wanted.equals(kind) else column.cast(wanted)
    return column


def _in_utc(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, tz="UTC")
    if pa.types.is_list(kind):
        return pa.list_(_in_utc(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([f.with_type(_in_utc(f.type)) for f in kind])
    return kind


def check_schema(schema: pa.Schema, timestamp_format: str | None = None) -> None:
    """Raise for a schema that JSON lines can't carry."""
    JsonParser(schema, timestamp_format=timestamp_format)
    _no_doubles(schema.names, "The schema")


def _no_doubles(names: Iterable[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SchemaError(
                f"{what} has the column {name!r} twice.", remedy="Give each column a name of its own."
            )
        seen.add(name)
