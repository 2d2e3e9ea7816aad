"""What one task does: read ranges and run their chain, or apply an epoch to a shard.

Plain functions from inputs to blobs and reports, with no Spark in them: `worker` runs them on executors,
`holdfast.testing` in one process. What goes wrong is reported as a value; a task that raises would only
be run again by Spark, and fail again.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pyarrow as pa

from holdfast.data.schemas import unify
from holdfast.data.shown import hide_values
from holdfast.engine.aggregate import partial_edge
from holdfast.engine.asynchronous import Desk
from holdfast.engine.batch import Batch, SchemaBook
from holdfast.engine.calls import method_error, user_traceback
from holdfast.engine.chain import Chain, Shape
from holdfast.engine.divergence import came_to, difference, sent_by
from holdfast.engine.exchange import Control, DataHead, Inbox, by_key_group, control_blob, inboxes
from holdfast.engine.keyed import Operator, Side, Work, operator_for, stored_schema
from holdfast.engine.keys import check_alike, check_kinds, fits_int64, key_names
from holdfast.engine.program import (
    Header,
    Program,
    Replayed,
    Report,
    SourceTask,
    WantedError,
    read_schemas,
)
from holdfast.engine.timing import split_name
from holdfast.errors import EngineError, HoldfastError, PipelineError, UserCodeError
from holdfast.faults.points import reach
from holdfast.functions import Context
from holdfast.io.base import DEAD_LETTER, DEAD_LETTER_SCHEMA, Reading, Source, Target
from holdfast.log.records import PlannedRange
from holdfast.plan import graph as g
from holdfast.plan.stages import Stage
from holdfast.plan.times import Stamp, clocked_by, delay_us, follows_clock, input_stamp
from holdfast.state.backends import open_state
from holdfast.state.keygroups import groups_of
from holdfast.state.shard import EMPTY, Place, Sealed, ShardState, is_damage
from holdfast.time.units import LIMIT, MAX_TIME, MIN_TIME
from holdfast.time.watermarks import (
    Clocks,
    Marks,
    delayed,
    event_clock,
    merge,
    reached,
    still_idle,
    watermark,
)


class Where(msgspec.Struct, frozen=True):
    """Where an attempt runs: ids that only this attempt, worker, executor and host have."""

    attempt: str = "0"
    host: str = "local"
    executor: str = "driver"
    state_root: str | None = None


Sent = tuple[int, bytes]
"""A partition of the exchange, and a blob for it."""


def run_source_task(program: Program, task: SourceTask, where: Where) -> list[Sent]:
    """Read a task's ranges, run their chains, and send records, control records and a report."""
    hide_values(program.redact)
    header = msgspec.msgpack.decode(task.header, type=Header)
    attempt = f"{header.epoch:08d}-{header.generation}{header.attempt}-src{task.number}-{where.attempt}"
    report = Report(
        task=f"source-{task.number}",
        epoch=header.epoch,
        attempt=attempt,
        host=where.host,
        executor=where.executor,
        worker=_worker(),
    )
    started = time.perf_counter()
    book = SchemaBook(read_schemas(header.schemas))
    chains: dict[str, Chain] = {}
    try:
        reach("source.start", task=report.task)
        _read_ranges(program, task, header, attempt, book, chains, report)
        for chain in chains.values():
            for uid, files in chain.close().items():  # one sink may stand behind several sources
                report.sinks.setdefault(uid, []).extend(files)
            for sink in chain.sinks.values():
                report.records_out[sink.uid] = report.records_out.get(sink.uid, 0) + sink.rows
            _note_calls(chain, report)
    except (Exception, SystemExit) as error:
        report.error = facts_of(error)
        for chain in chains.values():
            chain.abort()
    report.schemas = book.seen()
    report.took_ms = (time.perf_counter() - started) * 1e3
    for chain in chains.values():
        merge(report.marks, chain.seen.marks)
        merge(report.greatest, chain.seen.greatest)
        _add(report.untimed, chain.seen.untimed)
        _add(report.unseen, chain.outside)
    exchanges = [e for chain in chains.values() for e in chain.exchanges.values()]
    packed = (header, task.header)
    return _send(program, None, f"src{task.number}", packed, exchanges, [report], marks=report.marks)


def _add(into: dict[str, int], counts: Mapping[str, int]) -> None:
    for uid, count in counts.items():
        into[uid] = into.get(uid, 0) + count


def _read_ranges(
    program: Program,
    task: SourceTask,
    header: Header,
    attempt: str,
    book: SchemaBook,
    chains: dict[str, Chain],
    report: Report,
) -> None:
    shape = Shape(program.parallelism, program.key_groups)
    for planned in task.ranges:
        node = program.stages.graph.by_uid(planned.source)
        if planned.source not in chains:
            stage = program.stages.of(node.id)
            target = Target(
                node.uid,
                header.epoch,
                f"{stage.id:03d}-{task.number:05d}",
                f"{attempt}-{stage.id}",
                program.staging,
            )
            chains[planned.source] = Chain(
                program.stages,
                stage,
                shape,
                book,
                target,
                program.redact,
                _targets(program, header),
                header.clocks,
                _desk(program, header, target, node),
                header.greatest,
                header.now_ms,
            )
        chain = chains[planned.source]
        source: Source = node.body
        chain.begin(split_name(node.uid, source.split_of(planned.piece)), planned.ordinal)
        reading = Reading(node.uid, source.on_bad_record)
        try:
            for table in _tables(node, planned, reading):
                report.records_in += table.num_rows
                chain.outputs[g.MAIN].push(Batch(table=table))
        except HoldfastError as error:
            raise error.at(node.uid, node.where) from None
        report.bad[node.uid] = report.bad.get(node.uid, 0) + reading.bad
        if reading.dead:
            chain.outputs[DEAD_LETTER].push(
                Batch(table=pa.Table.from_pylist(reading.dead, DEAD_LETTER_SCHEMA))
            )
        chain.flush(planned.ordinal)


def _tables(node: g.Node, planned: PlannedRange, reading: Reading) -> Iterator[pa.Table]:
    """What a source reads. What goes wrong with it afterwards is no fault of the source."""
    source: Source = node.body
    try:
        yield from source.read(planned.piece, reading)
    except HoldfastError:
        raise
    except Exception as error:
        raise method_error(error, node, f"The source can't read {planned.piece.split}") from None


class Shards:
    """The shards that this worker holds, and the operators that run over them."""

    def __init__(self) -> None:
        self._states: dict[tuple[str, str, int], ShardState] = {}
        self._operators: dict[tuple[int, str], Operator] = {}

    def operator(self, program: Program, node: g.Node) -> Operator:
        key = (id(program), node.uid)
        if key not in self._operators:
            self._operators[key] = operator_for(node, program.redact)
        return self._operators[key]

    def state(
        self, program: Program, uid: str, shard: int, operator: Operator, schema: Any, root: str
    ) -> ShardState | None:
        """The state of a shard; None while it is not known what it will hold."""
        specs = operator.specs(schema)
        if specs is None:
            return None
        key = (root, uid, shard)
        held = self._states.get(key)
        if held is not None and held.specs == specs:
            return held
        if held is not None:
            held.close()
        folder = Path(root) / uid / f"{shard:05d}"
        place = Place(
            uid, shard, str(folder), program.key_groups, program.heap_limit_bytes, program.rocksdb_cache_bytes
        )
        self._states[key] = open_state(program.backend, place, specs)
        return self._states[key]

    def drop(self, root: str, uid: str, shard: int) -> None:
        """Forget a shard's state."""
        held = self._states.pop((root, uid, shard), None)
        if held is not None:
            held.close()

    def settle(self) -> None:
        """Wait until what shards do beside the epochs is done: their folders are still then."""
        for state in self._states.values():
            state.settle()

    def close(self) -> None:
        for state in self._states.values():
            state.close()
        for operator in self._operators.values():
            with contextlib.suppress(Exception):
                operator.close()
        self._states = {}
        self._operators = {}


def run_shard_task(
    program: Program, stage: Stage, shard: int, blobs: Iterable[bytes], where: Where, shards: Shards
) -> tuple[list[Sent], list[bytes]]:
    """Apply an epoch to a shard, or in a replay several: what it sends on, and the reports it has for the driver."""
    hide_values(program.redact)
    sent: list[Sent] = []
    reports: list[bytes] = []
    usable = True
    for inbox in inboxes(blobs).values():
        on, last, usable = _run_epoch(program, stage, shard, inbox, where, shards, usable)
        (reports if last else sent).extend(on)  # type: ignore[arg-type]
    return sent, reports


def _run_epoch(
    program: Program, stage: Stage, shard: int, inbox: Inbox, where: Where, shards: Shards, usable: bool
) -> tuple[list[Sent] | list[bytes], bool, bool]:
    """One epoch: blobs or, in the last stage of a job, reports; and whether the next one can be built on it."""
    started = time.perf_counter()
    uid = program.uid(stage)
    report = Report(
        task=f"{uid}-{shard}",
        stage=uid,
        shard=shard,
        host=where.host,
        executor=where.executor,
        worker=_worker(),
    )
    exchanges: list[Any] = []
    header_bytes = inbox.header
    header = msgspec.msgpack.decode(header_bytes, type=Header)
    report.epoch = header.epoch
    try:
        inbox.check(program.channels(stage, header.source_tasks, header.only))
        reach("shard.start", task=report.task)
        if inbox.failed or not usable:
            report.skipped = True
        else:
            chain = _apply(program, stage, shard, inbox, header, where, shards, report)
            exchanges = list(chain.exchanges.values()) if chain else []
    except (Exception, SystemExit) as error:
        report.error = facts_of(error, uid)
        exchanges = []
    report.took_ms = (time.perf_counter() - started) * 1e3
    usable = not (report.error or report.lacking or report.skipped)
    report.answered = {**inbox.answered, **report.answered}
    packed = (header, header_bytes)
    heard = merge(inbox.marks, report.marks)
    sent = _send(program, stage, f"{uid}-{shard:05d}", packed, exchanges, [report], inbox.reports, heard)
    if program.terminal(stage, header.only):
        return [blob for _, blob in sent], True, usable
    return sent, False, usable


def state_root(program: Program, where: Where, scratch: bool = False) -> str:
    """Where this host keeps the pipeline's state, or the copies that a replay works on."""
    root = where.state_root or program.state_root
    return os.path.join(root, f"{program.home}.scratch" if scratch else program.home)


def _apply(
    program: Program,
    stage: Stage,
    shard: int,
    inbox: Inbox,
    header: Header,
    where: Where,
    shards: Shards,
    report: Report,
) -> Chain | None:
    node = program.stages.node(stage.root)
    pinned = read_schemas(header.schemas)
    book = SchemaBook(pinned)
    operator = shards.operator(program, node)
    groups_owned = groups_of(shard, program.parallelism, program.key_groups)
    attempt = f"{header.epoch:08d}-{header.generation}{header.attempt}-{shard}-{where.attempt}"
    report.attempt = attempt
    before, after = _clock(program, node, header, inbox)
    report.clock = after
    tables, late = inbox.tables(), inbox.tables(late=True)
    sides = _sides(program, node, tables)
    schema = stored_schema(node, pinned, len(node.inputs), {s.number: s.table.schema for s in sides})
    if node.kind not in g.LIBRARY and len(sides) == 1 and sides[0].number == 0:
        # Wider than what is pinned, where a field that was open has a value now: then the epoch runs again.
        seen = sides[0].table.schema
        schema = seen if schema is None else unify([schema, seen], node.uid)
    again = header.replayed
    root = state_root(program, where, again is not None and shard in again.scratch.get(node.uid, []))
    state = shards.state(program, node.uid, shard, operator, schema, root)
    if state is None and late:
        raise WantedError(
            "All its records are late, and what it keeps of one is not known yet.",
            node,
            [partial_edge(f"{node.uid}<{n}") for n in range(len(node.inputs))],
            "Declare schema= on the operator before it.",
        )
    if state is None:
        report.sealed = Sealed(EMPTY, 0, 0, 0, {}, 0)
        return None
    reloads = state.reloads
    if not _stand(state, node.uid, shard, header, report):
        report.lacking = True
        return None
    target = Target(
        node.uid, header.epoch, f"{stage.id:03d}-{shard:05d}", f"{attempt}-{stage.id}", program.staging
    )
    shape = Shape(program.parallelism, program.key_groups)
    chain = Chain(
        program.stages,
        stage,
        shape,
        book,
        target,
        program.redact,
        _targets(program, header),
        header.clocks,
        _desk(program, header, target, node),
        header.greatest,
        header.now_ms,
    )
    chain.begin(node.uid, groups_owned.start)
    try:
        if sides or late or (operator.timed and state.key_types):
            report.records_in = sum(s.table.num_rows for s in sides)
            state.key_types = _wider(node, state.key_types, _key_types(node, sides))
            clocked = bool(clocked_by(program.stages.graph, node))
            context = Context(node.uid, header.epoch, header.now_ms, watermark=before, clocked=clocked)
            context._torn = _torn(program, node)
            behind = by_key_group([t for _, t in late])[0] if late else None
            key = sides[0].key if sides else _key_of(node)
            work = Work(sides, key, state, context, chain.outputs, book, behind, before, after)
            work.stamp = _stamp(program, node, 0) if node.kind == g.WINDOW else None
            operator.apply(work)
            report.late = {node.uid: work.late_records} if work.late_records else {}
            report.unseen = {node.uid: work.unseen_records} if work.unseen_records else {}
            report.wake_ms = _wake_ms(program, node, operator, work, header.start)
        reach("shard.applied", task=report.task)
        state.check_memory()
        chain.flush(groups_owned.start)
        report.sealed = state.seal(attempt, header.epoch, header.now_ms, resumable=again is None)
        report.came, report.sent = came_to(program, node, inbox), sent_by(chain)
        report.marks, report.untimed = chain.seen.marks, chain.seen.untimed
        _add(report.unseen, chain.outside)
        report.greatest = chain.seen.greatest
        if again is not None:
            _compare(program, again, node, shard, state, report)
        report.sinks = chain.close()
        report.records_out = {s.uid: s.rows for s in chain.sinks.values()}
        _note_calls(chain, report)
        report.schemas = book.seen()
        report.reloads = state.reloads - reloads
        report.rss_bytes = psutil.Process().memory_info().rss
    except Exception as error:
        chain.abort()
        if is_damage(error):
            _distrust(state, error, report)  # the version is rebuilt
            return None
        raise
    except BaseException:
        chain.abort()
        raise
    return chain


def _stand(state: ShardState, uid: str, shard: int, header: Header, report: Report) -> bool:
    """Have a shard stand where the epoch begins. False: it lacks its version, or finds now that it is damaged."""
    again = header.replayed
    try:
        if again is None or again.first:
            return state.begin(
                _of(header.stamps, uid, shard), header.now_ms, _kept(header.keeping, uid, shard)
            )
        state.advance(header.now_ms)
    except Exception as error:
        if not is_damage(error):
            raise
        _distrust(state, error, report)
        return False
    return True


def _distrust(state: ShardState, error: Exception, report: Report) -> None:
    state.distrust()
    report.lacking, report.damaged = True, str(error)


def _clock(program: Program, node: g.Node, header: Header, inbox: Inbox) -> tuple[int, int]:
    """An operator's event clock before and after the epoch. In a replay it is what it was the first time."""
    before = header.clocks.get(node.uid, MIN_TIME)
    if header.replayed is not None:
        return before, header.replayed.clocks.get(node.uid, before)
    assigners = clocked_by(program.stages.graph, node)
    idle = still_idle(header.idle, inbox.marks)
    clock = event_clock(reached(header.start, inbox.marks), idle, assigners)
    return before, max(before, delayed(clock, delay_us(program.stages.graph, node)))


def _wake_ms(program: Program, node: g.Node, operator: Operator, work: Work, start: Clocks) -> int | None:
    """When the next epoch is due even if nothing comes: for a timer on processing time, or where event time is the clock."""
    graph = program.stages.graph
    idle = (uid for uid, splits in start.idle.items() if watermark(start.marks.get(uid, {}), splits) is None)
    if work.after >= MAX_TIME or not follows_clock(graph, node, {*start.ended, *idle}):
        return work.wake_ms
    soonest = operator.next_due(work)
    if soonest is None or soonest >= LIMIT:
        return work.wake_ms
    # The clock is at the last microsecond of its millisecond.
    due_ms = -((999 - soonest - delay_us(graph, node)) // 1000)
    return due_ms if work.wake_ms is None else min(work.wake_ms, due_ms)


def _sides(program: Program, node: g.Node, tables: list[tuple[DataHead, pa.Table]]) -> list[Side]:
    """What came, by the side it came on, each as one table."""
    found = []
    for number in sorted({node.inputs[head.order].side for head, _ in tables}):
        mine = [(h, t) for h, t in tables if node.inputs[h.order].side == number]
        table, groups = by_key_group([t for _, t in mine])
        key = program.stages.exchanges[mine[0][0].exchange].key
        found.append(Side(number, table, groups, key, _stamp(program, node, number)))
    return found


def _key_types(node: g.Node, sides: list[Side]) -> list[pa.DataType]:
    """The types of the key, 64 bits wide where one side may have wider integers; both must have keys that can be equal."""
    found = [[s.table.schema.field(n).type for n in key_names(s.key, s.table.schema)] for s in sides]
    for other in found[1:]:
        check_alike(node, found[0], other)
    types = [next((t for t in ts if not pa.types.is_null(t)), ts[0]) for ts in zip(*found, strict=True)]
    if len({i.side for i in node.inputs}) > 1:
        return [pa.int64() if fits_int64(t) else t for t in types]
    return types


def _wider(node: g.Node, known: list[pa.DataType], found: list[pa.DataType]) -> list[pa.DataType]:
    """Types that hold the keys in the state and those that come."""
    if not known or not found or known == found:
        return found or known
    check_kinds(node, known, found)
    sides = len({i.side for i in node.inputs})  # they may have come in different epochs
    if sides > 1 and any({a, b} == {pa.int64(), pa.uint64()} for a, b in zip(known, found, strict=False)):
        check_alike(node, known, found)
    columns = [pa.schema({str(n): t for n, t in enumerate(types)}) for types in (known, found)]
    return list(unify(columns, node.uid).types)


def _stamp(program: Program, node: g.Node, side: int) -> Stamp | None:
    """Where the records of a side have their time. Only a window insists that all of them agree on it."""
    try:
        return input_stamp(program.stages.graph, node, side)
    except PipelineError:
        if node.kind == g.WINDOW:
            raise
        return None


def _torn(program: Program, node: g.Node) -> PipelineError | None:
    """What there is to say to a function that asks for the time of its records, where they don't agree on it."""
    for side in sorted({i.side for i in node.inputs}):
        try:
            input_stamp(program.stages.graph, node, side)
        except PipelineError as error:
            return error
    return None


def _key_of(node: g.Node) -> g.Key:
    key = node.inputs[0].key
    assert key is not None
    return key


def _of(stamps: dict[str, list[str]], uid: str, shard: int) -> str:
    """A shard's stamp; empty where its stage has none yet."""
    return stamps[uid][shard] if uid in stamps else EMPTY


def _kept(keeping: dict[str, list[str]], uid: str, shard: int) -> list[str]:
    return [s for s in [_of(keeping, uid, shard)] if s]


def _targets(program: Program, header: Header) -> set[int] | None:
    """The operators that take part in a replay; None: everything runs."""
    if header.only is None:
        return None
    return {s.root for s in program.stages.keyed if header.only.get(program.uid(s))}


def _desk(program: Program, header: Header, target: Target, root: g.Node) -> Desk:
    """Where the calls of an attempt's chain are recorded, or were."""
    strict = header.replayed is None or header.replayed.strict
    return Desk(program.answers, header.epoch, target.attempt, root.uid, header.answers, strict)


def _note_calls(chain: Chain, report: Report) -> None:
    """Report what calls answered, and that what this task sends rests on this attempt's answers."""
    for uid, file in chain.answers().items():
        report.answers.setdefault(uid, []).append(file)
        report.answered = {report.task: [report.attempt]}
    for step in chain.calling.values():
        if step.failed:
            report.bad[step.uid] = report.bad.get(step.uid, 0) + step.failed


def _compare(
    program: Program, again: Replayed, node: g.Node, shard: int, state: ShardState, report: Report
) -> None:
    """Hold a replayed epoch against the first run, and at the end of a job be what was committed then."""
    if node.uid not in again.digests:
        return  # an operator that the pipeline did not have then
    error = difference(program, again, node, report)
    if error is not None and again.strict:
        raise error
    report.diverged = "" if error is None else f"[{error.uid}] {error.message}"
    if again.last and not state.become(again.stamps[node.uid][shard]):
        raise EngineError(
            f"The replay of shard {shard} ended at epoch {report.epoch} with no state, or with state where there was none.",
            uid=node.uid,
        )


def _send(
    program: Program,
    stage: Stage | None,
    channel: str,
    header: tuple[Header, bytes],
    exchanges: list[Any],
    reports: list[Report],
    earlier: Iterable[bytes] = (),
    marks: Marks | None = None,
) -> list[Sent]:
    """Blobs and one control record for every shard; reports go with the first. With nobody next: the reports."""
    failed = any(r.error is not None or r.lacking or r.skipped for r in reports)
    packed = [*earlier, *(msgspec.msgpack.encode(r) for r in reports)]
    used = program.used(stage, header[0].only)
    if not used:
        return [(0, r) for r in packed]
    sent: list[Sent] = []
    counts = dict.fromkeys(used, 0)
    for exchange in [] if failed else exchanges:
        first = program.first_partition(stage, exchange.target)
        for shard, blob in exchange.blobs:
            if first + shard in counts:
                counts[first + shard] += 1
                sent.append((first + shard, blob))
    for partition, count in counts.items():
        carried = packed if partition == used[0] else []
        control = Control(
            channel,
            count,
            failed,
            header[1],
            carried,
            header[0].epoch,
            header[0].barrier,
            marks or {},
            reports[0].answered,
        )
        sent.append((partition, control_blob(control)))
    return sent


def facts_of(error: Exception | SystemExit, uid: str | None = None) -> dict[str, Any]:
    """An error as a task hands it to the driver."""
    if isinstance(error, HoldfastError):
        return dict(error.at(uid, None).facts())
    made: HoldfastError
    if isinstance(error, SystemExit):  # it would end the worker, and Spark would only run the task again
        made = UserCodeError(
            f"A function of the pipeline ended its process: {type(error).__name__}({error}).",
            uid=uid,
            remedy="Raise an error, or filter the record out: sys.exit() ends no pipeline.",
            detail=user_traceback(error),
        )
    elif _is_disk(error):
        made = EngineError(f"The host's disk fails: {error}", uid=uid, remedy=_MAKE_ROOM)
    else:
        detail = traceback.format_exc(limit=-6)
        made = EngineError(f"{type(error).__name__}: {error}", uid=uid, remedy=_REPORT, detail=detail)
    return dict(made.facts())


_MAKE_ROOM = (
    "Make room on the disk of the host that ran the task, or mend it, and start again: the epoch was not committed, "
    "and nothing is lost."
)
_REPORT = "This looks like a fault of holdfast itself: please report it with the lines below."


def _is_disk(error: Exception) -> bool:
    """Whether it is the disk: Python says so by type, RocksDB only in words."""
    return isinstance(error, OSError) or "IO error: No space left" in str(error)


def _worker() -> str:
    return str(os.getpid())
