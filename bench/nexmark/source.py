"""A source of Nexmark's events for pipelines: bounded, split, and the same for ever.

Every kind of event can be read by a source of its own, or all of them in one. What the events are is
`generator`'s affair; here it is decided which come when: dealt to splits in turn, and shuffled a little if asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from bench.nexmark.generator import DEFAULT, KINDS, ROUND, SCHEMAS, Config, Numbers, made
from holdfast.io.base import Limit, Offer, Range, Reading, Source
from holdfast.io.rate import _hash

TABLE_ROWS = 65_536
_LEAST_ROWS = 4_096
_SHUFFLE = 255
"""The stream of random words that arrivals are sorted by; the generator's own are well below."""


class NexmarkSource(Source):
    """The events of one kind ("person", "auction", "bid", or "event" for all) among the first `events` numbers.

    Args:
        kind: what is read.
        events: how many events there are, of all kinds together.
        seed: another seed gives other events.
        splits: in how many parts they are dealt.
        config: how they are made; its seed is replaced by `seed` where that is given.
        per_epoch: how many events, of all kinds together, an epoch takes at most; a multiple of 50. Sources of
            different kinds with the same figure stay side by side in event time, unless the engine's own limit
            on records is smaller. None: that limit alone counts.
        shuffle_within: events arrive shuffled within blocks of so many numbers of all kinds, so that none is later
            than `shuffle_within / first_event_rate` seconds; 0: in order.
    """

    def __init__(
        self,
        kind: str,
        events: int,
        seed: int | None = None,
        splits: int = 2,
        *,
        config: Config = DEFAULT,
        per_epoch: int | None = None,
        shuffle_within: int = 0,
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"There is no kind {kind!r} of events; the kinds are {', '.join(KINDS)}.")
        if events < 0 or splits < 1 or shuffle_within < 0:
            raise ValueError("events and shuffle_within must be at least 0, splits at least 1.")
        if per_epoch is not None and (per_epoch < ROUND or per_epoch % ROUND):
            # With less, some epochs would hold no person, and look like the end.
            raise ValueError(f"per_epoch must be a multiple of {ROUND}, not {per_epoch}.")
        self._name, self._kind = kind, KINDS[kind]
        self._events, self._splits = events, splits
        self._config = config if seed is None else replace(config, seed=seed)
        self._per_epoch, self._shuffle_within = per_epoch, shuffle_within
        self._records = self._kind.before(events)

    def describe(self) -> str:
        return f"Nexmark's {self._name}s among {self._events:,} events"

    def schema(self) -> pa.Schema:
        return SCHEMAS[self._name]

    def plan(self, position: Any, limit: Limit) -> Offer:
        """The position is the number of the next event of any kind."""
        start = int(position or 0)
        end = self._events
        if self._per_epoch is not None:
            end = min(end, (start // self._per_epoch + 1) * self._per_epoch)
        first = self._kind.before(start)
        last = min(self._kind.before(end), first + limit.records)
        if last < self._kind.before(end):
            end = self._kind.number(last)
        if last == self._records:
            end = self._events
        return Offer(
            ranges=list(self._ranges(first, last, limit.tasks)),
            position=end,
            backlog=self._records - last,
            exhausted=last == self._records,
            splits=[f"{split:04d}" for split in range(self._splits)],
        )

    def _ranges(self, first: int, last: int, tasks: int) -> Iterator[Range]:
        """Records are dealt to splits in turn: the i-th of the kind is offset i // splits of split i % splits."""
        for split in range(self._splits):
            start, end = self._offset(first, split), self._offset(last, split)
            pieces = max(1, min(-(-tasks // self._splits), (end - start) // _LEAST_ROWS))
            for piece in range(pieces):
                one = start + (end - start) * piece // pieces
                other = start + (end - start) * (piece + 1) // pieces
                if other > one:
                    yield Range(f"{split:04d}", one, other, records=other - one)

    def _offset(self, index: int, split: int) -> int:
        """The first offset of a split whose record is the index-th of the kind or a later one."""
        return max(0, -((split - index) // self._splits))

    def read(self, piece: Range, reading: Reading) -> Iterator[pa.Table]:
        numbers = self._arrivals(int(piece.split), piece.start, piece.end)
        for start in range(0, len(numbers), TABLE_ROWS):
            yield made(self._name, numbers[start : start + TABLE_ROWS], self._config)

    def _arrivals(self, split: int, start: int, end: int) -> Numbers:
        """The event numbers at a split's offsets, in order of arrival."""
        within = self._shuffle_within
        if within <= 1 or start == end:
            return self._in_order(split, start, end)
        first, last = self._in_order(split, start, start + 1)[0], self._in_order(split, end - 1, end)[0]
        whole_start = self._offset(self._kind.before(int(first) // within * within), split)
        after = min((int(last) // within + 1) * within, self._events)
        numbers = self._in_order(split, whole_start, self._offset(self._kind.before(after), split))
        words = _hash(numbers.astype(np.uint64), self._config.seed << 10 | _SHUFFLE)
        numbers = numbers[np.lexsort((words, numbers // within))]
        return numbers[start - whole_start : end - whole_start]

    def _in_order(self, split: int, start: int, end: int) -> Numbers:
        return self._kind.numbers(np.arange(start, end, dtype=np.int64) * self._splits + split)
