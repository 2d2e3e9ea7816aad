"""One contract for every source and one for every sink, to be called from anybody's tests.

Each function raises an AssertionError with a sentence that says what was broken.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import msgspec
import pyarrow as pa

from holdfast.data.rows import Row, to_rows
from holdfast.io.base import Decided, Limit, Offer, Range, Reading, Sink, Source, StagedFile, Target

_MOST_EPOCHS = 10_000
_NOW_MS = 1_700_000_000_000
_DAY_MS = 86_400_000


def check_source(make_source: Callable[[], Source], grow: Callable[[], None] | None = None) -> None:
    """Check that a source keeps its promises.

    Args:
        make_source: makes the source anew, over the same data each time: at most some 10,000 records.
        grow: adds records to that data, where it can grow.

    >>> from holdfast.io.memory import records
    >>> check_source(lambda: records([{"n": n} for n in range(10)], splits=2))
    """
    whole = _drain(make_source(), None, records=1_000_000, tasks=1)
    _check_reading(make_source, whole)
    _check_limits(make_source, whole)
    _check_nothing_new(make_source(), whole)
    if grow is not None:
        grow()
        _check_growth(make_source, whole)


class _Drained:
    """All that a source offered from a position on, epoch by epoch."""

    def __init__(self, offers: list[Offer], rows: list[Row], start: Any) -> None:
        self.offers = offers
        self.rows = rows
        self.position = offers[-1].position if offers else start

    @property
    def ranges(self) -> list[Range]:
        return [piece for offer in self.offers for piece in offer.ranges]


def _drain(source: Source, position: Any, records: int, tasks: int) -> _Drained:
    """Take offers until there is nothing new; positions and ranges pass through JSON on the way."""
    offers: list[Offer] = []
    rows: list[Row] = []
    start = position
    for number in range(_MOST_EPOCHS):
        offer = source.plan(position, Limit(records, tasks, _NOW_MS + _DAY_MS + number))
        offers.append(offer)
        again = msgspec.json.decode(msgspec.json.encode(offer), type=Offer)
        assert again == offer, f"An offer must survive JSON, but {offer} came back as {again}."
        _check_offer(offer, records)
        for piece in again.ranges:
            rows += _read(source, piece)
        position = again.position
        if not offer.ranges:
            return _Drained(offers, rows, start)
        if offer.exhausted:
            assert offer.backlog == 0, f"An exhausted offer can't leave {offer.backlog} records behind."
    raise AssertionError(f"After {_MOST_EPOCHS} epochs the source still offered more; give it less data.")


def _check_offer(offer: Offer, records: int) -> None:
    known = sum(piece.records for piece in offer.ranges if piece.records > 0)
    assert known <= records, f"The limit was {records} records, but the offer holds {known}."
    assert offer.backlog >= 0, f"A backlog can't be {offer.backlog}."
    seen: dict[tuple[str, str], list[Range]] = {}
    for piece in offer.ranges:
        assert piece.start < piece.end, f"A range must not be empty: {piece}."
        key = (piece.split, msgspec.json.encode(piece.info, order="sorted").decode())
        for other in seen.setdefault(key, []):
            apart = piece.start >= other.end or other.start >= piece.end
            assert apart, f"Two ranges of one offer overlap: {other} and {piece}."
        seen[key].append(piece)


def _read(source: Source, piece: Range) -> list[Row]:
    rows: list[Row] = []
    schema = source.schema()
    for table in source.read(piece, Reading("contract", source.on_bad_record)):
        assert isinstance(table, pa.Table), f"read must yield tables, not {type(table).__name__}."
        assert table.schema.equals(schema), (
            f"A table's schema is\n{table.schema}\nbut the source's is\n{schema}"
        )
        rows += to_rows(table)
    if piece.records >= 0:
        assert len(rows) == piece.records, f"{piece} promised {piece.records} records, but {len(rows)} came."
    return rows


def _check_reading(make_source: Callable[[], Source], whole: _Drained) -> None:
    """A range gives the same records every time, in any order, from any copy of the source."""
    assert whole.rows, "Give check_source a source with some records."
    source = make_source()
    source.schema()
    copy: Source = _shipped(source)
    backwards = [_read(copy, piece) for piece in reversed(whole.ranges)]
    again = [row for rows in reversed(backwards) for row in rows]
    _same(whole.rows, again, "Ranges read again, last first, in a pickled copy, gave other records")


def _check_limits(make_source: Callable[[], Source], whole: _Drained) -> None:
    """However small the epochs are, each record comes once."""
    size = max(1, len(whole.rows) // 7)
    for records, tasks in ((size, 1), (size, 3), (1_000_000, 4)):
        cut = _drain(make_source(), None, records=records, tasks=tasks)
        what = f"Epochs of at most {records} records for {tasks} tasks gave other records than one epoch"
        _same(sorted(map(repr, whole.rows)), sorted(map(repr, cut.rows)), what)


def _check_nothing_new(source: Source, whole: _Drained) -> None:
    offer = source.plan(whole.position, Limit(1_000_000, 2, _NOW_MS + _DAY_MS + _MOST_EPOCHS))
    assert not offer.ranges, f"Nothing is new, and still {offer.ranges} is offered."
    assert not offer.backlog, f"Nothing is new, and still a backlog of {offer.backlog} is told."


def _check_growth(make_source: Callable[[], Source], before: _Drained) -> None:
    """What comes later is offered after what came before, and what was planned before reads the same."""
    new = _drain(make_source(), before.position, records=1_000_000, tasks=2)
    assert new.rows, "grow() was called, but nothing new was offered."
    source = make_source()
    again = [row for piece in before.ranges for row in _read(source, piece)]
    _same(before.rows, again, "After the data grew, ranges planned before gave other records")
    everything = _drain(make_source(), None, records=1_000_000, tasks=1)
    both = sorted(map(repr, [*before.rows, *new.rows]))
    _same(
        sorted(map(repr, everything.rows)),
        both,
        "What was offered before and after growth is not everything once",
    )


def _shipped(thing: Any) -> Any:
    """A copy as an executor gets it."""
    from pyspark import cloudpickle

    return pickle.loads(cloudpickle.dumps(thing))  # type: ignore[no-untyped-call]


def _same(expected: list[Any], found: list[Any], what: str) -> None:
    if expected == found:
        return
    place = next((n for n, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), -1)
    where = (
        f"at place {place}: {expected[place]!r} became {found[place]!r}" if place >= 0 else "one is longer"
    )
    raise AssertionError(f"{what}: {len(expected)} records against {len(found)}; {where}.")


SAMPLE = pa.table({"id": pa.array(range(8), pa.int64()), "name": [f"name {n}" for n in range(8)]})


def check_sink(
    make_sink: Callable[[], Sink],
    read_back: Callable[[Sink], list[Row] | pa.Table],
    table: pa.Table = SAMPLE,
) -> None:
    """Check that a sink keeps its promises.

    Args:
        make_sink: makes the sink anew, for a place of its own each time.
        read_back: what a reader of that place sees, as dicts or as a table; order does not matter.
        table: rows to write, at least four and all different, if the sink needs certain columns.

    >>> from holdfast.io.memory import memory
    >>> check_sink(memory, lambda sink: sink.rows())
    """
    assert table.num_rows >= 4, "Give check_sink a table with at least four rows."
    for check in (_check_visibility, _check_attempts, _check_abort, _check_upkeep, _check_order):
        folder = tempfile.mkdtemp(prefix="holdfast-contract-")
        try:
            check(_Bench(make_sink(), read_back, table, folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class _Bench:
    """A sink, and what a driver and its tasks do with it."""

    def __init__(self, sink: Sink, read_back: Callable[[Sink], Any], table: pa.Table, folder: str) -> None:
        self.sink = sink
        self._read_back = read_back
        self.table = table
        self._folder = os.path.join(folder, "staging")
        sink.check()
        sink.claim("contract", self._folder)

    def target(self, epoch: int, task: int, attempt: int) -> Target:
        return Target("contract", epoch, f"{task:05d}", f"{epoch:08d}-1-{task}-{attempt}", self._folder)

    def stage(self, epoch: int, task: int, table: pa.Table, attempt: int = 0) -> list[StagedFile]:
        """What a task does, in a process of its own."""
        executor: Sink = _shipped(self.sink)
        writer = executor.writer(self.target(epoch, task, attempt))
        half = table.num_rows // 2
        for part in (table.slice(0, half), table.slice(half)):
            if part.num_rows:
                writer.write(part)
        files = writer.close()
        again = msgspec.json.decode(msgspec.json.encode(files), type=list[StagedFile])
        assert again == files, f"Staged files must survive JSON, but {files} came back as {again}."
        rows = sum(file.rows for file in files)
        assert rows == table.num_rows, f"{table.num_rows} rows were written, but {rows} staged."
        return files

    def publish(self, epoch: int, files: list[StagedFile]) -> None:
        self.sink.publish(Decided("contract", epoch, 1, files, self._folder))

    def expect(self, table: pa.Table, when: str) -> None:
        seen = self._read_back(self.sink)
        seen = to_rows(seen) if isinstance(seen, pa.Table) else seen
        wanted = to_rows(table)
        found, missing = sorted(map(_row, seen)), sorted(map(_row, wanted))
        assert found == missing, (
            f"{when}, a reader must see {len(wanted)} rows, but sees {len(seen)}: {seen[:5]}."
        )


def _row(row: Row) -> str:
    return repr(sorted(row.items()))


def _check_visibility(bench: _Bench) -> None:
    table = bench.table
    bench.expect(table.slice(0, 0), "Before anything is written")
    files = bench.stage(1, 0, table)
    bench.expect(table.slice(0, 0), "While an epoch is staged but not published")
    bench.publish(1, files)
    bench.expect(table, "Once it is published")
    bench.publish(1, files)
    bench.expect(table, "Once it is published twice")
    bench.publish(2, [])
    bench.expect(table, "After an epoch without rows")


def _check_attempts(bench: _Bench) -> None:
    table = bench.table
    lost = bench.stage(1, 0, table, attempt=0)
    won = bench.stage(1, 0, table, attempt=1)
    assert not {f.path for f in lost} & {f.path for f in won}, "Two attempts staged under one name."
    bench.publish(1, won)
    bench.expect(table, "With two attempts of one task, one of them decided,")
    nothing = bench.sink.writer(bench.target(2, 0, 0)).close()
    assert nothing == [], f"A writer that was given nothing must stage nothing, not {nothing}."


def _check_abort(bench: _Bench) -> None:
    writer = bench.sink.writer(bench.target(1, 0, 0))
    writer.write(bench.table)
    writer.abort()
    writer.abort()
    bench.expect(bench.table.slice(0, 0), "After an attempt was aborted")
    bench.publish(1, bench.stage(1, 0, bench.table, attempt=1))
    bench.expect(bench.table, "After one attempt was aborted and another published")


def _check_upkeep(bench: _Bench) -> None:
    table = bench.table
    bench.stage(1, 0, table, attempt=0)
    decided = bench.stage(1, 0, table, attempt=1)
    bench.sink.discard("2")
    bench.publish(1, decided)
    bench.expect(table, "After a new generation discarded what nobody decided, and published what was")
    bench.sink.maintain(1)
    bench.sink.maintain(1_000_000)
    bench.expect(table, "After upkeep")
    bench.publish(1, decided)
    bench.expect(table, "When an epoch is published again after upkeep")


def _check_order(bench: _Bench) -> None:
    table = bench.table
    first, second, third = table.slice(0, 1), table.slice(1, 1), table.slice(2)
    bench.publish(1, [*bench.stage(1, 0, first), *bench.stage(1, 1, second)])
    bench.expect(table.slice(0, 2), "After two tasks of one epoch")
    bench.publish(2, bench.stage(2, 1, third))
    bench.expect(table, "After two epochs")
