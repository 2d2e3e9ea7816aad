"""Which key group a key belongs to, and which shard owns it. Pure, vectorised, the same for ever.

The hash is part of every stored state: it must never change, whatever the machine, the Python or the
pyarrow version. It works on a key's value and not on its width (int32 7 and int64 7 are one key; so are
string and large_string), in 64-bit arithmetic that is spelled out here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.data.rows import one_array
from holdfast.errors import SchemaError

Hashes = npt.NDArray[np.uint64]

_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NULL = np.uint64(0x6E756C6C6E756C6C)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_MASKS = np.array([(1 << (8 * n)) - 1 for n in range(8)] + [(1 << 64) - 1], dtype=np.uint64)


def _mix(h: Hashes) -> Hashes:
    """The finaliser of splitmix64: every bit of the input reaches every bit of the output."""
    h = h + _GOLDEN
    h = (h ^ (h >> _S30)) * _M1
    h = (h ^ (h >> _S27)) * _M2
    return h ^ (h >> _S31)


def hash_columns(columns: Sequence[pa.Array | pa.ChunkedArray]) -> Hashes:
    """A 64-bit hash for each row of a key's columns.

    >>> hash_columns([pa.array([1, 2], pa.int32())]).tolist() == hash_columns([pa.array([1, 2])]).tolist()
    True
    """
    with np.errstate(over="ignore"):
        result = _hash_one(columns[0])
        for column in columns[1:]:
            result = _mix(result ^ _hash_one(column))
        return result


def _hash_one(column: pa.Array | pa.ChunkedArray) -> Hashes:
    array = one_array(column)
    kind = array.type
    if pa.types.is_dictionary(kind):
        array = array.cast(kind.value_type)
        kind = array.type
    if pa.types.is_null(kind):
        return np.full(len(array), _NULL, dtype=np.uint64)
    if _is_text(kind):
        hashes = _hash_bytes(array)
    elif pa.types.is_decimal(kind):
        hashes = _hash_bytes(array.cast(pa.string()))
    else:
        hashes = _mix(_as_uint64(array))
    if array.null_count:
        hashes[np.asarray(array.is_null())] = _NULL
    return hashes


def _is_text(kind: pa.DataType) -> bool:
    t = pa.types
    return bool(
        t.is_string(kind)
        or t.is_large_string(kind)
        or t.is_binary(kind)
        or t.is_large_binary(kind)
        or t.is_fixed_size_binary(kind)
    )


def _as_uint64(array: pa.Array) -> Hashes:
    kind = array.type
    check_key_type(kind)
    if pa.types.is_timestamp(kind):
        array = array.cast(pa.timestamp("us", tz=kind.tz), safe=False).cast(pa.int64())
    elif pa.types.is_boolean(kind):
        array = array.cast(pa.int8())
    elif pa.types.is_date32(kind) or pa.types.is_time32(kind):
        array = array.cast(pa.int32())
    elif not pa.types.is_integer(kind):
        array = array.cast(pa.int64())
    if array.null_count:
        array = array.fill_null(0)
    return array.to_numpy(zero_copy_only=False).astype(np.uint64)  # type: ignore[no-any-return]


def check_key_type(kind: pa.DataType, uid: str | None = None) -> None:
    """Raise for a type that can't be a key."""
    t = pa.types
    if t.is_floating(kind) or t.is_nested(kind):
        raise SchemaError(
            f"A key can't be of type {kind}.",
            uid=uid,
            remedy="Round floats to an integer or a decimal; key by several columns instead of a struct or list.",
        )


def _hash_bytes(array: pa.Array) -> Hashes:
    array = array.cast(pa.large_binary())
    size = len(array)
    if size == 0:
        return np.empty(0, dtype=np.uint64)
    _, offsets_buffer, data_buffer = array.buffers()
    offsets = np.frombuffer(offsets_buffer, dtype=np.int64)[array.offset : array.offset + size + 1]
    low, high = int(offsets[0]), int(offsets[-1])
    padded = np.zeros(high - low + 8, dtype=np.uint8)
    if high > low:
        padded[: high - low] = np.frombuffer(data_buffer, dtype=np.uint8)[low:high]
    words = np.ndarray(shape=(high - low + 1,), dtype="<u8", buffer=padded.data, strides=(1,))
    starts, lengths = offsets[:-1] - low, np.diff(offsets)
    hashes = _mix(lengths.astype(np.uint64))
    active, step = np.arange(size), 0
    while True:
        active = active[lengths[active] > step]
        if not len(active):
            return hashes
        left = np.minimum(lengths[active] - step, 8)
        word = words[starts[active] + step] & _MASKS[left]
        hashes[active] = _mix(hashes[active] ^ word)
        step += 8


def key_groups(columns: Sequence[pa.Array | pa.ChunkedArray], groups: int) -> npt.NDArray[np.uint16]:
    """The key group of each row."""
    with np.errstate(over="ignore"):
        return ((hash_columns(columns) >> np.uint64(33)) % np.uint64(groups)).astype(np.uint16)


def group_of(key: Any, types: Sequence[pa.DataType], groups: int) -> int:
    """The key group of one key (a tuple where it has several columns)."""
    parts = key if len(types) > 1 else (key,)
    return int(key_groups([pa.array([p], type=t) for p, t in zip(parts, types, strict=True)], groups)[0])


def shard_of(group: int, parallelism: int, groups: int) -> int:
    """The shard that owns a key group.

    >>> [shard_of(g, 3, 8) for g in range(8)]
    [0, 0, 0, 1, 1, 1, 2, 2]
    """
    return group * parallelism // groups


def groups_of(shard: int, parallelism: int, groups: int) -> range:
    """The key groups that a shard owns.

    >>> groups_of(1, 3, 8)
    range(3, 6)
    """
    first = -(-shard * groups // parallelism)
    return range(first, -(-(shard + 1) * groups // parallelism))
