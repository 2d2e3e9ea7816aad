"""Tables cut by the values of columns, and the folders that Hive names for them. Pure."""

from __future__ import annotations

import datetime as dt
import decimal
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.errors import SinkError

NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"
_ESCAPED = {chr(n) for n in range(1, 32)} | set("\x7f\"#%'*/:=?\\{[]^")


def escape(text: str) -> str:
    """A name or value as Hive writes it in a path.

    >>> escape("a/b=c")
    'a%2Fb%3Dc'
    """
    return "".join(f"%{ord(c):02X}" if c in _ESCAPED else c for c in text)


def label(value: Any) -> str:
    """A value as a folder's name has it; null and the empty text have no name of their own.

    >>> label(True), label(dt.date(2024, 1, 1)), label(None)
    ('true', '2024-01-01', '__HIVE_DEFAULT_PARTITION__')
    """
    if value is None or value == "":
        return NULL_FOLDER
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dt.datetime) and value.tzinfo is not None:
        value = value.astimezone(dt.timezone.utc).replace(tzinfo=None)
    if isinstance(value, decimal.Decimal):
        return escape(format(value, "f"))
    return escape(str(value))


def split(table: pa.Table, columns: list[str]) -> list[tuple[str, pa.Table]]:
    """A table cut by the values of columns: the folder of each part, sorted, and its rows in their order.

    >>> made = split(pa.table({"k": ["b", "a", "b"], "n": [1, 2, 3]}), ["k"])
    >>> [(folder, part.to_pylist()) for folder, part in made]
    [('k=a', [{'n': 2}]), ('k=b', [{'n': 1}, {'n': 3}])]
    """
    check(table.schema, columns)
    code = np.zeros(table.num_rows, dtype=np.int64)
    labels: list[list[str]] = []
    encoded: list[np.ndarray[Any, Any]] = []
    for column in columns:
        array = table.column(column).combine_chunks()
        array = (
            array if pa.types.is_dictionary(array.type) else array.dictionary_encode(null_encoding="encode")
        )
        labels.append([f"{escape(column)}={label(v)}" for v in array.dictionary.to_pylist()])
        encoded.append(array.indices.to_numpy(zero_copy_only=False).astype(np.int64))
        code = np.unique(code * len(labels[-1]) + encoded[-1], return_inverse=True)[1]
    order = np.argsort(code, kind="stable")
    starts = np.flatnonzero(np.diff(code[order], prepend=-1))
    data = table.drop_columns(columns).take(pa.array(order))
    found = []
    for place, start in enumerate(starts):
        end = starts[place + 1] if place + 1 < len(starts) else table.num_rows
        row = order[start]
        folder = "/".join(names[codes[row]] for names, codes in zip(labels, encoded, strict=True))
        found.append((folder, data.slice(start, end - start)))
    return sorted(found, key=lambda part: part[0])


def check(schema: pa.Schema, columns: list[str]) -> None:
    """Raise where a table can't be cut by these columns."""
    for column in columns:
        if column not in schema.names:
            raise SinkError(
                f"There is no column {column!r} to partition by: {schema.names}.", remedy="Mend partition_by."
            )
        kind = schema.field(column).type
        if pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            raise SinkError(
                f"Column {column!r} is {kind}, which can't name a folder.",
                remedy="Partition by another column.",
            )
    if len(schema.names) <= len(columns):
        raise SinkError(
            f"All columns are in partition_by={columns}, so the files would be empty.",
            remedy="Leave at least one column to be stored.",
        )
