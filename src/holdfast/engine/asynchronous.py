"""Calls of the outside world from a chain: an `async_map` operator asks, records what was answered, and reads it again.

::

    first run   records ── at most `capacity` calls at once ──> answers, in order of records ──> file ──> next operator
    replay      records, counted ──> the answers of the file that the commit names ──> next operator

Answers pass on as they are read from their frame, the first time too, so that a replay gives the same bytes. The file is
synced before the attempt reports, so what a commit was made of can be read again; calls of attempts that no commit names
are made again. Files and their parts are `log/answers`' business.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Coroutine, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pyarrow as pa

from holdfast.data.rows import Row, copy_value
from holdfast.data.shown import shown
from holdfast.engine.batch import Batch, SchemaBook
from holdfast.engine.calls import said, user_error
from holdfast.errors import CallError, DivergedError, EngineError, HoldfastError, SchemaError, StateLostError
from holdfast.io.base import DEAD_LETTER_SCHEMA
from holdfast.log.answers import AnswerWriter, Damaged, find, read
from holdfast.log.records import AnswerFile
from holdfast.plan import graph as g
from holdfast.plan.bodies import AsyncBody

if TYPE_CHECKING:
    from holdfast.engine.chain import Fan

T = TypeVar("T")

FIRST_PAUSE_S = 0.1
"""Before the second try of a call; before each further one twice as long."""
GRACE_S = 1.0
"""So long a call that was told to end may take for it; then nobody waits for it any more."""
_RECORD_LIMIT = 500
_GO_ON = 'To go on without such records: on_error="skip" or "dead_letter".'
_AGAIN = "The epoch was not committed and runs again as planned."


@dataclasses.dataclass(frozen=True)
class Desk:
    """Where one attempt of a stage records answers, or finds those of the run that was committed."""

    folder: str
    epoch: int
    attempt: str
    root: str
    """The uid of the stage's first operator."""
    recorded: Mapping[str, list[AnswerFile]] | None = None
    """What was answered when the epoch was committed, by uid; None: the calls are made."""
    strict: bool = True
    """Whether answers that are lost end the replay; otherwise the calls are made again."""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """A record that has no answer: its place in the batch, why, and the record as JSON."""

    place: int
    reason: str
    record: str


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    """The answers to a batch as they are stored: an Arrow stream with one row for each record that has one."""

    records: int
    failed: list[Failure]
    table: bytes


@dataclasses.dataclass(frozen=True)
class Answers:
    """The answers to a batch of records, in their order."""

    records: int
    failed: list[Failure]
    table: pa.Table | None

    def packed(self) -> bytes:
        """As a frame of a file."""
        data = b""
        if self.table is not None:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, self.table.schema) as writer:
                writer.write_table(self.table)
            data = sink.getvalue().to_pybytes()
        return msgspec.msgpack.encode(_Frame(self.records, self.failed, data))

    @staticmethod
    def unpacked(frame: bytes) -> Answers:
        """What `packed` made."""
        found = msgspec.msgpack.decode(frame, type=_Frame)
        table = pa.ipc.open_stream(pa.py_buffer(found.table)).read_all() if found.table else None
        return Answers(found.records, found.failed, table)

    def cut(self, records: int) -> tuple[Answers, Answers]:
        """Those to the first records, and the rest."""
        before = [f for f in self.failed if f.place < records]
        after = [msgspec.structs.replace(f, place=f.place - records) for f in self.failed[len(before) :]]
        rows = records - len(before)
        tables = (None, None) if self.table is None else (self.table.slice(0, rows), self.table.slice(rows))
        return Answers(records, before, tables[0]), Answers(self.records - records, after, tables[1])


class Recorded:
    """The answers to one range's records, or to one shard's, taken in the order in which the records come."""

    def __init__(self, answers: list[Answers]) -> None:
        self._left = collections.deque(answers)

    @property
    def records(self) -> int:
        """To how many records there are answers still."""
        return sum(a.records for a in self._left)

    def take(self, records: int) -> Iterator[Answers]:
        """The answers to the next records, which may be divided into other batches than the first time."""
        while records:
            found = self._left.popleft()
            if found.records > records:
                found, rest = found.cut(records)
                self._left.appendleft(rest)
            records -= found.records
            yield found


class AsyncStep:
    """An `async_map` operator in one attempt of a chain."""

    mutates = False

    def __init__(self, node: g.Node, out: Fan, dead: Fan, book: SchemaBook, redact: bool, desk: Desk) -> None:
        self.uid = node.uid
        self.failed = 0
        """Records that have no answer."""
        self._node, self._out, self._dead, self._book, self._desk = node, out, dead, book, desk
        self._caller = _Caller(node, redact)
        self._writer = AnswerWriter(desk.folder, desk.attempt, node.uid, desk.root)
        self._upstream = 0
        self._recorded: Recorded | None = None

    def begin(self, upstream: int) -> None:
        """From here on the records are of this range, or of this shard."""
        self._upstream, self._recorded = upstream, None

    def push(self, batch: Batch) -> None:
        if self._desk.recorded is None:
            frame = self._ask(batch).packed()
            with self._naming_disk():
                self._writer.write(frame, len(batch))
            self._pass_on(Answers.unpacked(frame))
            return
        recorded = self._read()
        if len(batch) > recorded.records:
            self._refuse(f"{len(batch)} records came where the first run had {recorded.records} more")
            self._recorded = Recorded([])  # what is left of it answers others
            self._pass_on(self._ask(batch))
            return
        for answers in recorded.take(len(batch)):
            self._pass_on(answers)

    def end(self, upstream: int) -> None:
        """The range is through, or the shard's epoch."""
        if self._desk.recorded is None:
            self._writer.end(upstream)
        elif left := self._read().records:
            self._refuse(f"{left} records of the first run did not come")
        self._recorded = None

    def close(self) -> AnswerFile | None:
        """What was recorded, on disk; None where nothing was."""
        with self._naming_disk():
            return self._writer.close()

    def abort(self) -> None:
        """Drop what was recorded."""
        self._writer.abort()

    def _ask(self, batch: Batch) -> Answers:
        try:
            rows = batch.rows()
            outcomes = self._caller.run(rows)
            answered = [o for o in outcomes if not isinstance(o, Failure)]
            table = Batch(rows=answered).table(self._book.pinned.get(self.uid)) if answered else None
        except SchemaError as error:
            raise error.at(self.uid, self._node.where) from None
        return Answers(len(rows), [o for o in outcomes if isinstance(o, Failure)], table)

    def _pass_on(self, answers: Answers) -> None:
        self.failed += len(answers.failed)
        if answers.table is not None and answers.table.num_rows:
            self._book.note(self.uid, answers.table.schema)
            try:
                self._out.push(Batch(table=answers.table))
            except SchemaError as error:
                raise error.at(self.uid, self._node.where) from None
        if answers.failed and len(self._dead):
            letters = [
                {"source": self.uid, "file": None, "line": None, "reason": f.reason, "record": f.record}
                for f in answers.failed
            ]
            self._dead.push(Batch(table=pa.Table.from_pylist(letters, DEAD_LETTER_SCHEMA)))

    # A replay

    def _read(self) -> Recorded:
        """What was answered to the records at hand the first time."""
        if self._recorded is None:
            assert self._desk.recorded is not None
            found = find(self._desk.recorded.get(self.uid, []), self._desk.root, self._upstream)
            frames: list[bytes] = []
            try:
                frames = [] if found is None else read(self._desk.folder, *found)
            except Damaged as error:
                self._lose(error)
            self._recorded = Recorded([Answers.unpacked(f) for f in frames])
        return self._recorded

    def _lose(self, error: Damaged) -> None:
        if self._desk.strict:
            raise StateLostError(
                f"What its calls answered in epoch {self._desk.epoch} is lost: {error}.",
                uid=self.uid,
                where=self._node.where,
                remedy="Bring the file back and start again. If it is gone for good, accept with "
                'on_divergence="warn" that the calls are made again: their answers may differ from those that '
                "output was made of.",
            )

    def _refuse(self, what: str) -> None:
        if self._desk.strict:
            raise DivergedError(
                f"Other records came to it when epoch {self._desk.epoch} was replayed: {what}.",
                uid=self.uid,
                where=self._node.where,
                remedy="The operators before it must give the same records each time. If the code was changed, bring it "
                'back, or accept the difference with on_divergence="warn".',
            )

    @contextlib.contextmanager
    def _naming_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EngineError(
                f"Answers can't be recorded: {error}",
                uid=self.uid,
                where=self._node.where,
                remedy="Make room on the disk of the pipeline's directory, or mend it, and start again: the epoch was "
                "not committed, nothing is lost.",
            ) from None


@dataclasses.dataclass(frozen=True)
class _Raised:
    error: BaseException


@dataclasses.dataclass
class _Call:
    record: Row
    over: bool = False
    """Nobody waits for its answer any more."""


class _Caller:
    """Makes the calls for a batch of records, in a loop that lives as long as they do."""

    def __init__(self, node: g.Node, redact: bool) -> None:
        self._node, self._redact = node, redact
        self._body: AsyncBody = node.body
        self._under_way: set[asyncio.Future[Any]] = set()

    def run(self, rows: list[Row]) -> list[Row | Failure]:
        """What each record led to, in the order of records."""
        try:
            return _run(self._all(rows), self._body.capacity)
        except HoldfastError:
            raise
        except (Exception, asyncio.CancelledError) as error:  # from entering or leaving the function
            raise self._call_error(error, None) from None

    async def _all(self, rows: list[Row]) -> list[Row | Failure]:
        function: Any = self._body.function
        outcomes: list[Any] = [None] * len(rows)
        failed: Exception | None = None
        try:
            async with contextlib.AsyncExitStack() as stack:
                if hasattr(type(function), "__aenter__"):
                    await stack.enter_async_context(function)
                try:
                    await self._serve_all(rows, outcomes)
                except Exception as error:
                    failed = error
                    raise
        except Exception:
            if failed is None:
                raise
        if failed is not None:  # leaving the function neither hides it nor takes its place
            raise failed
        return outcomes

    async def _serve_all(self, rows: list[Row], outcomes: list[Any]) -> None:
        places = iter(range(len(rows)))
        servers = [
            asyncio.ensure_future(self._serve(rows, places, outcomes))
            for _ in range(min(self._body.capacity, len(rows)))
        ]
        try:
            await asyncio.gather(*servers)
        finally:
            for server in servers:
                server.cancel()
            await asyncio.gather(*servers, return_exceptions=True)
            if self._under_way:
                await asyncio.wait(self._under_way, timeout=GRACE_S)

    async def _serve(self, rows: list[Row], places: Iterator[int], outcomes: list[Any]) -> None:
        """One of `capacity` that take the next record whenever they are free."""
        for place in places:
            outcomes[place] = await self._outcome(place, rows[place])

    async def _outcome(self, place: int, record: Row) -> Row | Failure:
        call = _Call(record)
        tries = asyncio.ensure_future(self._tries(call))
        self._under_way.add(tries)
        tries.add_done_callback(self._under_way.discard)
        try:
            await asyncio.wait({tries}, timeout=self._body.timeout_s)
        finally:
            if not tries.done():
                call.over = True
                tries.cancel()
        if call.over:
            await asyncio.wait({tries}, timeout=GRACE_S)
            return self._no_answer(place, record, None)
        answer = tries.result()
        return self._no_answer(place, record, answer.error) if isinstance(answer, _Raised) else answer

    async def _tries(self, call: _Call) -> Row | _Raised:
        """The answer, or what the last try raised."""
        raised: _Raised | None = None
        for tried in range(self._body.retries + 1):
            if tried:
                await asyncio.sleep(FIRST_PAUSE_S * 2.0 ** (tried - 1))
            try:
                answer: Row = await self._body.function(copy_value(call.record))
            except (
                Exception,
                asyncio.CancelledError,
            ) as error:  # a function may cancel what it waits for itself
                if call.over:
                    raise asyncio.CancelledError from None
                raised = _Raised(error if self._body.on_error == "fail" else error.with_traceback(None))
                continue
            raised = None  # its traceback holds this frame, and so itself
            return answer
        assert raised is not None
        return raised

    def _no_answer(self, place: int, record: Row, error: BaseException | None) -> Failure:
        if self._body.on_error == "fail":
            raise self._late(record) if error is None else self._call_error(error, record)
        reason = self._too_late() if error is None else _reason(error)
        return Failure(place, reason, _as_json(record))

    def _too_late(self) -> str:
        return f"no answer within {self._body.timeout_s:g} s"

    def _late(self, record: Row) -> CallError:
        return CallError(
            f"A call had {self._too_late()}.",
            uid=self._node.uid,
            where=self._node.where,
            remedy="Give it more time (timeout=) or ask less at once (capacity=), and start again. "
            f"{_AGAIN} {_GO_ON}",
            detail=f"  record: {shown(record, _RECORD_LIMIT)}",
        )

    def _call_error(self, error: BaseException, record: Row | None) -> HoldfastError:
        made = user_error(error, self._node, record, self._redact)
        if isinstance(error, HoldfastError):
            return made
        tries = f", {self._body.retries + 1} times" if self._body.retries and record is not None else ""
        return CallError(
            f"A call failed{tries}: {made.message}",
            uid=made.uid,
            where=made.where,
            remedy=f"Mend the function, or wait until what it calls is back, and start again. {_AGAIN} {_GO_ON}",
            detail=made.detail,
        )


def _reason(error: BaseException) -> str:
    """What an error says, in characters that can be stored."""
    return _storable(f"{type(error).__name__}: {said(error)}")


def _as_json(record: Row) -> str:
    try:
        return msgspec.json.encode(record, enc_hook=str).decode()
    except (TypeError, ValueError, OverflowError):
        return _storable(shown(record, _RECORD_LIMIT))


def _storable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _run(calls: Coroutine[Any, Any, T], threads: int) -> T:
    """Run in a loop of its own; on another thread where this one has a loop running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _in_loop(calls, threads)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(_in_loop, calls, threads).result()


def _in_loop(calls: Coroutine[Any, Any, T], threads: int) -> T:
    """Run in a new loop with so many threads for `asyncio.to_thread`.

    What is still under way afterwards is told to end, and waited for a moment only: one that hangs, in a thread too,
    would take away the time-out from all others.
    """
    loop = asyncio.new_event_loop()
    loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(threads, "async_map"))
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(calls)
    finally:
        try:
            loop.run_until_complete(_leave())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()


async def _leave() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=GRACE_S)
