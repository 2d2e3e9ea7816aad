"""What the tests of sources and sinks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from holdfast.io.base import Limit, Offer, Reading, Source

NOW_MS = 1_800_000_000_000


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "spark: starts a local Spark session")


class Reader:
    """Plays the engine for one source: takes offers, keeps the position, reads."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.position: Any = None
        self.offer: Offer | None = None
        self.reading = Reading("source", source.on_bad_record)

    def plan(self, records: int = 1_000_000, tasks: int = 1, now_ms: int = NOW_MS) -> Offer:
        self.offer = self.source.plan(self.position, Limit(records, tasks, now_ms))
        self.position = self.offer.position
        return self.offer

    def read(self, offer: Offer | None = None) -> list[dict[str, Any]]:
        offer = offer or self.offer
        assert offer is not None
        return [row for r in offer.ranges for t in self.source.read(r, self.reading) for row in t.to_pylist()]

    def take(self, records: int = 1_000_000, tasks: int = 1) -> list[dict[str, Any]]:
        return self.read(self.plan(records, tasks))

    def tables(self, tasks: int = 1) -> Iterator[pa.Table]:
        for piece in self.plan(tasks=tasks).ranges:
            yield from self.source.read(piece, self.reading)


@pytest.fixture
def reader() -> Callable[[Source], Reader]:
    return Reader
