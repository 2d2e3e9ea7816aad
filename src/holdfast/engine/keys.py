"""The key of a record inside an exchange: which columns hold it, and its values."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from holdfast.data.rows import column_values
from holdfast.plan import graph as g

KEY = "__key"
"""Columns that carry the key through an exchange where it is a function of the record."""


def key_names(key: g.Key, schema: pa.Schema) -> list[str]:
    """The columns that hold the key inside an exchange."""
    if key.columns:
        return list(key.columns)
    return [n for n in schema.names if n.startswith(KEY)]


def keys_in(table: pa.Table, names: list[str]) -> list[Any]:
    """The keys of a table's rows as Python values."""
    columns = [column_values(table.column(n)) for n in names]
    return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))


def public_names(key: g.Key, count: int) -> list[str]:
    """What the columns of a key are called in results: as the user calls them, or `key` where it is a function."""
    if key.columns:
        return list(key.columns)
    return ["key"] if count == 1 else [f"key{i}" for i in range(count)]
