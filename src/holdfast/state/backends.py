"""The backends by name."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.state.shard import Place, ShardState
from holdfast.state.tables import TableSpec


def open_state(backend: str, place: Place, specs: Sequence[TableSpec]) -> ShardState:
    """A shard's state in the backend that the user chose."""
    if backend == "rocksdb":
        from holdfast.state.rocksdb import RocksState

        return RocksState(place, specs)
    from holdfast.state.heap import HeapState

    return HeapState(place, specs)
