"""Values and keys as bytes, for stores that hold bytes: typed MessagePack, exact to what Arrow gives back."""

from __future__ import annotations

import datetime as dt
import decimal
import zoneinfo
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import msgspec
import pyarrow as pa

from holdfast.state.tables import TableSpec

encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder(decimal_format="string").encode


def python_type(kind: pa.DataType) -> Any:
    """The Python type that values of an Arrow type have."""
    t = pa.types
    simple: list[tuple[Any, Any]] = [
        (t.is_boolean, bool),
        (t.is_integer, int),
        (t.is_floating, float),
        (t.is_string, str),
        (t.is_large_string, str),
        (t.is_binary, bytes),
        (t.is_large_binary, bytes),
        (t.is_timestamp, dt.datetime),
        (t.is_date, dt.date),
        (t.is_time, dt.time),
        (t.is_duration, dt.timedelta),
        (t.is_decimal, decimal.Decimal),
        (t.is_null, None),
    ]
    for test, python in simple:
        if test(kind):
            return python
    if t.is_list(kind) or t.is_large_list(kind):
        return list[_nullable(kind.value_type)]  # type: ignore[misc]
    if t.is_map(kind):
        return dict[python_type(kind.key_type), _nullable(kind.item_type)]  # type: ignore[misc]
    if t.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return TypedDict("Struct", {f.name: _nullable(f.type) for f in fields}, total=False)  # type: ignore[operator]
    return Any


def _nullable(kind: pa.DataType) -> Any:
    python = python_type(kind)
    return None if python is None else python | None


def decoder(spec: TableSpec) -> Callable[[bytes], Any]:
    """Bytes of a state's value back to the value."""
    if spec.named:
        decode, names = _decoder(spec.value_type), [f.name for f in spec.value_type]
        return lambda data: tuple(map(decode(data).get, names))
    if spec.tuples:
        return _tuple_decoder([spec.value_type.field(i).type for i in range(spec.value_type.num_fields)])
    return _decoder(spec.value_type)


def encoder(spec: TableSpec) -> Callable[[Any], bytes]:
    """A state's value to bytes."""
    if not spec.named:
        return encode
    names = [f.name for f in spec.value_type]
    return lambda value: encode(dict(zip(names, value, strict=True)))


def _tuple_decoder(types: Sequence[pa.DataType]) -> Callable[[bytes], Any]:
    kind: Any = tuple[tuple(_nullable(t) for t in types)]  # type: ignore[misc]
    decode = msgspec.msgpack.Decoder(kind).decode
    zones = [_zone(t) for t in types]
    if not any(zones):
        return decode
    return lambda data: tuple(z(v) if z else v for z, v in zip(zones, decode(data), strict=True))


def _decoder(kind: pa.DataType) -> Callable[[bytes], Any]:
    decode = msgspec.msgpack.Decoder(_nullable(kind)).decode
    restore = _zone(kind)
    return decode if restore is None else lambda data: restore(decode(data))


def key_decoder(kind: pa.DataType) -> Callable[[bytes], Any]:
    """Bytes of an inner key back to the key."""
    return _decoder(kind)


def entry_decoder(key_types: Sequence[pa.DataType], spec: TableSpec) -> Callable[[bytes], Any]:
    """Bytes of an entry's full key (the key, or key and inner key) back to Python values."""
    types = [*key_types, *spec.extra]
    if spec.sub_type is None:
        return _decoder(types[0]) if len(types) == 1 else _tuple_decoder(types)
    parts = [_nullable(t) for t in types]
    key: Any = parts[0] if len(parts) == 1 else tuple[tuple(parts)]  # type: ignore[misc]
    entry: Any = tuple[key, python_type(spec.sub_type)]  # type: ignore[misc]
    return msgspec.msgpack.Decoder(entry).decode


def _zone(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """What puts datetimes back into their column's zone; None where there is nothing to do."""
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        zone = zoneinfo.ZoneInfo(kind.tz) if kind.tz[0] not in "+-" else None
        return lambda v: v if v is None or zone is None else v.astimezone(zone)
    if pa.types.is_list(kind):
        inner = _zone(kind.value_type)
        return None if inner is None else lambda v: v if v is None else [inner(x) for x in v]
    if pa.types.is_struct(kind):
        inners = {kind.field(i).name: _zone(kind.field(i).type) for i in range(kind.num_fields)}
        if not any(inners.values()):
            return None
        return lambda v: v if v is None else {n: (f(v[n]) if (f := inners.get(n)) else v[n]) for n in v}
    return None
