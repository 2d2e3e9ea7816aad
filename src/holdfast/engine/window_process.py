"""Windows record by record: any assigner, any trigger, and functions that see a whole window.

    records, in the order they came ──> their windows (merged with what is open) ──> trigger: fire? purge?
    event timers up to the clock, in the order of time ──> trigger; then timers on processing time
    windows that are past by the allowed lateness ──> forgotten, with what they hold

A table has one entry for each key and window, ordered by when it is forgotten: how many records it holds, what its trigger
keeps, and what `window_contents` keeps with it. Where windows merge, another has the open windows of each key. An
epoch reads and writes the windows that its records fall into, that have a timer due, or that go.

A record is late for a window that was past when the epoch began. Where windows merge, one that is late by itself waits
until those that are not are in their windows, and belongs to what it touches then. So which records are late does
not depend on the order within an epoch.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from holdfast.data.rows import column_values, conform, to_rows
from holdfast.data.shown import shown
from holdfast.engine.batch import Batch
from holdfast.engine.calls import user_error
from holdfast.engine.exchange import GROUP
from holdfast.engine.keyed import Operator, Side, Work
from holdfast.engine.keys import KEY, key_names
from holdfast.engine.timed import table_times
from holdfast.engine.timers import TABLES as TIMER_TABLES
from holdfast.engine.timers import Timers, upto_clock
from holdfast.engine.window_contents import KINDS, Contents, Open, Setting
from holdfast.errors import PipelineError, SchemaError
from holdfast.functions import CLOCK, EVENT, Timer, WindowFunction
from holdfast.plan import graph as g
from holdfast.plan.times import LATE, Stamp, WindowBody
from holdfast.state.tables import TableSpec, ValueTable, order_bytes
from holdfast.time.merging import merge
from holdfast.time.triggers import Decision, Small
from holdfast.time.units import MAX_TIME, MIN_TIME, TimeType
from holdfast.time.windows import Window, late

WINDOWS, OPEN = "windows", "open"
"""The tables of windows by key and bounds, and of the open windows of each key."""
DUE, HOLDS, TRIGGER = "window.due", "window.holds", "window.trigger"
SEEN = "window.seen"
"""Beside what a trigger keeps: how many records of the window have been in a result, where any has."""
_BOUNDS = pa.struct([pa.field("start", pa.int64()), pa.field("end", pa.int64())])
_FIELDS = [pa.field(DUE, pa.int64()), pa.field(HOLDS, pa.int64()), pa.field(TRIGGER, pa.string())]
_TIMERS = [
    TableSpec(
        name,
        "value",
        pa.struct([pa.field("at", pa.int64())]),
        tuples=True,
        extra=(pa.int64(), pa.int64(), pa.int64(), pa.string()),
        due="at",
    )
    for name in TIMER_TABLES.values()
]


class WindowProcess(Operator):
    """The operator for windows of every kind."""

    timed = True

    def __init__(self, node: g.Node, redact: bool) -> None:
        super().__init__(node, redact)
        self.body: WindowBody = node.body
        self.kind: type[Contents] = KINDS[self.body.kind]
        self._schema: pa.Schema | None = None
        self._specs: list[TableSpec] = []
        self._function: WindowFunction | None = None
        if isinstance(self.body.function, WindowFunction):
            self._function = copy.copy(self.body.function)
            try:
                self._function.open()
            except Exception as error:
                raise user_error(error, node, "(open)", redact) from None

    def close(self) -> None:
        if self._function is not None:
            self._function.close()

    def specs(self, schema: pa.Schema | None) -> list[TableSpec] | None:
        if schema is None:
            return None
        own = pa.schema([f for f in schema if not f.name.startswith(KEY) and f.name != GROUP])
        if self._schema is None or not own.equals(self._schema):
            self._schema, self._specs = own, self._specs_of(own)
        return self._specs

    def _specs_of(self, schema: pa.Schema) -> list[TableSpec]:
        try:
            fields = _FIELDS + self.kind.fields(self.node, schema)
        except SchemaError as error:
            raise error.at(self.node.uid, self.node.where) from None
        two = (pa.int64(), pa.int64())
        specs = [TableSpec(WINDOWS, "value", pa.struct(fields), tuples=True, extra=two, due=DUE)]
        if self.body.assigner.merging:
            value = pa.struct([pa.field("windows", pa.list_(_BOUNDS))])
            specs.append(TableSpec(OPEN, "value", value, tuples=True))
        return specs + self.kind.tables(schema) + _TIMERS

    def apply(self, work: Work) -> None:
        assert work.stamp is not None and self._schema is not None
        time = TimeType.of(pa.timestamp("us", _zone(self._schema, work.stamp)))
        setting = Setting(self.node, self.redact, self._schema, time, self._function)
        _Epoch(setting, work, self.kind(setting, work), work.stamp).run()


def _zone(schema: pa.Schema, stamp: Stamp) -> str | None:
    """The zone of the records' time."""
    kind = schema.field(stamp.column).type if stamp.column in schema.names else None
    return kind.tz if kind is not None and pa.types.is_timestamp(kind) else None


class _TriggerContext:
    """What a trigger may know and do for one window."""

    __slots__ = ("_epoch", "_open")

    def __init__(self, epoch: _Epoch, one: Open) -> None:
        self._epoch, self._open = epoch, one

    @property
    def state(self) -> dict[str, Small]:
        return self._open.state

    @state.setter
    def state(self, state: dict[str, Small]) -> None:
        self._open.state = state

    @property
    def watermark_us(self) -> int:
        return self._epoch.watermark_us

    @property
    def now_ms(self) -> int:
        return self._epoch.now_ms

    def set_event_timer(self, at_us: int) -> None:
        # One behind the time at which the window is forgotten would be kept, and call nobody.
        if _instant(at_us) <= self._epoch.forgotten_at(self._open.window):
            self._epoch.timers.set(EVENT, self._open.full, at_us, "")

    def delete_event_timer(self, at_us: int) -> None:
        self._epoch.timers.delete(EVENT, self._open.full, _instant(at_us), "")

    def set_processing_timer(self, at_ms: int) -> None:
        self._epoch.timers.set(CLOCK, self._open.full, _instant(at_ms) * 1000, "")

    def delete_processing_timer(self, at_ms: int) -> None:
        self._epoch.timers.delete(CLOCK, self._open.full, _instant(at_ms) * 1000, "")


def _instant(at: int) -> int:
    if isinstance(at, bool) or not isinstance(at, int):
        raise PipelineError(
            f"{shown(at)} is no time for a trigger's timer.",
            remedy="Give a whole number: microseconds of event time, or milliseconds of processing time.",
        )
    return at


def _is_window(window: Any) -> bool:
    if not isinstance(window, Window) or not (isinstance(window.start, int) and isinstance(window.end, int)):
        return False
    return MIN_TIME <= window.start < window.end <= MAX_TIME


class _Epoch:
    """One epoch of one shard."""

    def __init__(self, setting: Setting, work: Work, contents: Contents, stamp: Stamp) -> None:
        self._node, self._redact, self._setting = setting.node, setting.redact, setting
        self._work, self._contents, self._stamp = work, contents, stamp
        self._trigger = setting.body.trigger
        self._assigner = setting.body.assigner
        self._lateness_us = setting.body.lateness_us
        self._merging = self._assigner.merging
        self.timers = Timers(work.state, beside=2)
        self.watermark_us, self.now_ms = work.before, work.ctx.now_ms
        self._opens: dict[tuple[Any, ...], Open] = {}
        self._of_key: dict[Any, list[Open]] = {}
        """Where windows merge: those of each key, in the order of time."""
        self._committed: dict[Any, list[Window]] = {}

    def run(self) -> None:
        work = self._work
        if work.sides:
            self._records(work.sides[0])
        self.watermark_us = work.ctx._watermark = work.after
        for _ in self.timers.turns(work.after, upto_clock(self.now_ms)):
            self._fire()
        self._forget()
        self._stage()
        if self._merging:
            self._stage_open()
        self._contents.finish(work.outputs)
        self.timers.seal()
        wake = self.timers.wake_us(upto_clock(self.now_ms))
        work.wake_ms = None if wake is None else -(-wake // 1000)
        work.state.check_memory()

    # Records

    def _records(self, side: Side) -> None:
        """Put each record into its windows, and ask the trigger."""
        hidden = [] if side.key.function is None else key_names(side.key, side.table.schema)
        own = side.table.drop_columns(hidden) if hidden else side.table
        records = conform(own, self._setting.schema)
        rows, keys, groups = to_rows(records), side.keys(), side.groups.tolist()
        times = table_times(own, self._stamp, self._node).tolist()
        for name in hidden:
            records = records.append_column(name, side.table.column(name))
        self._contents.begin(keys, rows, records)
        found = [self._assign(*row) for row in zip(keys, rows, times, strict=True)]
        self._work.unseen_records += sum(not windows for windows in found)
        on_time: list[tuple[int, Window]] = []
        behind: list[tuple[int, Window]] = []
        for row, windows in enumerate(found):
            for window in windows:
                (behind if self._is_late(window) else on_time).append((row, window))
        self._load([_full(keys[row], w) for row, w in (on_time + behind if self._merging else on_time)])
        inside = {row for row, _ in on_time}
        for row, window in on_time:
            one = self._into(keys[row], groups[row], window)
            self._add(one, row, rows[row], times[row])
        if self._merging and behind:
            inside |= self._add_behind(behind, keys, groups, rows, times)
        lost = [row for row, _ in behind if row not in inside]
        if lost:
            taken = own.take(pa.array(list(dict.fromkeys(lost))))
            self._work.late_records += taken.num_rows
            self._work.outputs[LATE].push(Batch(table=taken))

    def _assign(self, key: Any, record: Any, at_us: int) -> list[Window]:
        try:
            windows = list(dict.fromkeys(self._assigner.assign(at_us, record)))
            for window in windows:
                if not _is_window(window):
                    raise PipelineError(
                        f"{type(self._assigner).__name__} gave {shown(window)}, which is no window.",
                        remedy="Yield hf.Window(start, end), in whole microseconds, with the start before the end.",
                    )
        except Exception as error:
            raise user_error(error, self._node, record, self._redact, key) from None
        return windows

    def _is_late(self, window: Window) -> bool:
        return late(window.last, self._work.before, self._lateness_us)

    def _into(self, key: Any, group: int, window: Window) -> Open:
        """The window that a record goes into."""
        if self._merging:
            return self._merged(key, group, window)
        return self._opens.get(_full(key, window)) or self._new(key, group, window)

    def _new(self, key: Any, group: int, window: Window) -> Open:
        full = _full(key, window)
        one = self._opens[full] = Open(key, group, window, full)
        return one

    def _merged(self, key: Any, group: int, window: Window) -> Open:
        """What becomes of the windows that one touches, and of itself."""
        mine = self._of_key[key]
        high = bisect_right(mine, window.end, key=lambda one: one.window.start)
        low = high
        while low and mine[low - 1].window.end >= window.start:
            low -= 1
        parts = mine[low:high]
        bounds = [window, *(p.window for p in parts)]
        whole = Window(min(w.start for w in bounds), max(w.end for w in bounds))
        into = next((p for p in parts if p.window == whole), None) or self._new(key, group, whole)
        gone = [p for p in parts if p is not into]
        if gone:
            self._call(into, self._trigger.on_merge, whole, self._ctx(into), [self._ctx(p) for p in gone])
            self._contents.merge(into, parts)
            into.n, into.seen = sum(p.n for p in parts), sum(p.seen for p in parts)
            into.touched = True
            for part in gone:
                self._call(part, self._trigger.clear, part.window, self._ctx(part))
                part.n, part.seen, part.held, part.alive, part.touched = 0, 0, None, False, True
        mine[low:high] = [into]
        return into

    def _add(self, one: Open, row: int, record: Any, at_us: int) -> None:
        self._contents.add(one, row)
        one.n += 1
        decision = self._call(
            one, self._trigger.on_record, record, at_us, one.window, self._ctx(one), record=record
        )
        self._follow(one, self._checked(decision))

    def _add_behind(
        self,
        behind: list[tuple[int, Window]],
        keys: list[Any],
        groups: list[int],
        rows: list[Any],
        times: list[int],
    ) -> set[int]:
        """Records that are late by themselves, but touch an open window, directly or through each other."""
        by_key: dict[Any, list[tuple[int, Window]]] = {}
        for row, window in behind:
            by_key.setdefault(keys[row], []).append((row, window))
        inside: set[int] = set()
        for key, waiting in by_key.items():
            still_open = {one.window for one in self._of_key[key]}
            wholes = merge([*still_open, *(w for _, w in waiting)])
            home = {p: whole for whole, parts in wholes if not still_open.isdisjoint(parts) for p in parts}
            for row, window in waiting:
                if window in home:
                    one = self._merged(key, groups[row], home[window])
                    self._add(one, row, rows[row], times[row])
                    inside.add(row)
        return inside

    # Triggers

    def _ctx(self, one: Open) -> _TriggerContext:
        return _TriggerContext(self, one)

    def _call(self, one: Open, method: Callable[..., Any], *args: Any, record: Any = "none at hand") -> Any:
        try:
            return method(*args)
        except Exception as error:
            raise user_error(error, self._node, record, self._redact, one.key, one.window) from None

    def _checked(self, decision: Any) -> Decision:
        if not isinstance(decision, Decision):
            raise PipelineError(
                f"{type(self._trigger).__name__} answered {shown(decision)}.",
                uid=self._node.uid,
                where=self._node.where,
                remedy="Return hf.Decision.CONTINUE, FIRE, PURGE or FIRE_AND_PURGE.",
            )
        return decision

    def _follow(self, one: Open, decision: Decision) -> None:
        one.touched = True
        if decision.fires and one.n:
            self._contents.fire(one)
            one.fired, one.seen = one.fired + 1, one.n
        if decision.purges:
            self._contents.purge(one)
            one.n = one.seen = 0

    def _fire(self) -> None:
        """Ask the trigger for what is due, a key's in the order of time."""
        while due := self.timers.take():
            self._load([full for full, _ in due])
            groups = self._work.state.groups([full for full, _ in due], self._table(WINDOWS).spec).tolist()
            asked: list[tuple[Open, Decision]] = []
            for (full, timer), group in zip(due, groups, strict=True):
                one = self._timed(full, group)
                if one is not None:
                    decision = self._on_timer(one, timer)
                    asked.append((one, decision))
            self._contents.prepare([one for one, decision in asked if decision.fires and one.n])
            for one, decision in asked:
                self._follow(one, decision)

    def _timed(self, full: tuple[Any, ...], group: int) -> Open | None:
        """The window of a timer. One of which nothing was kept begins anew; one that is forgotten is called no more."""
        one = self._opens.get(full)
        if one is not None:
            return one if one.alive else None
        window = Window(*full[-2:])
        if self._merging or self._is_late(window):
            return None
        return self._new(self._key(full), group, window)

    def _on_timer(self, one: Open, timer: Timer) -> Decision:
        window, ctx = one.window, self._ctx(one)
        if timer.kind == CLOCK:
            answer = self._call(one, self._trigger.on_processing_time, timer.at_ms, window, ctx)
        else:
            answer = self._call(one, self._trigger.on_event_time, timer.at_us, window, ctx)
        return self._checked(answer)

    def forgotten_at(self, window: Window) -> int:
        """When a window is past by the allowed lateness."""
        return min(window.last + self._lateness_us, MAX_TIME)

    def _forget(self) -> None:
        """Let windows go that are past, and unless they merge, those of which there is nothing to keep."""
        self._load(self._table(WINDOWS).due(self._work.after))
        for one in self._opens.values():
            if one.alive and (self.forgotten_at(one.window) <= self._work.after or self._is_void(one)):
                self._call(one, self._trigger.clear, one.window, self._ctx(one))
                self._work.unseen_records += one.n - one.seen
                self._contents.purge(one)
                one.n, one.seen, one.alive, one.touched = 0, 0, False, True
        for key, mine in self._of_key.items():
            self._of_key[key] = [one for one in mine if one.alive]

    def _is_void(self, one: Open) -> bool:
        """Whether a window holds nothing, and its trigger keeps nothing of it; the next record makes a new one."""
        return not self._merging and one.n == 0 and not one.state

    # State

    def _table(self, name: str) -> ValueTable:
        table = self._work.state.tables[name]
        assert isinstance(table, ValueTable)
        return table

    def _key(self, full: tuple[Any, ...]) -> Any:
        return full[0] if len(self._work.state.key_types) == 1 else full[:-2]

    def _load(self, fulls: Sequence[tuple[Any, ...]]) -> None:
        """Have windows at hand that are committed; where they merge, all of their keys."""
        if self._merging:
            fulls = self._load_keys(list(dict.fromkeys(self._key(f) for f in fulls)))
        wanted = [f for f in dict.fromkeys(fulls) if f not in self._opens]
        if not wanted:
            return
        state, table = self._work.state, self._table(WINDOWS)
        groups = state.groups(wanted, table.spec)
        state.prefetch(wanted, groups, WINDOWS)
        known, columns = table.find(wanted)
        rows = np.flatnonzero(known)
        columns = [c.take(pa.array(rows)) for c in columns]
        opens = []
        holds, kept = column_values(columns[1]), column_values(columns[2])
        for place, n, packed in zip(rows.tolist(), holds, kept, strict=True):
            full = wanted[place]
            one = Open(self._key(full), int(groups[place]), Window(*full[-2:]), full, True, n)
            one.state = {} if packed is None else msgspec.json.decode(packed)
            one.seen = int(one.state.pop(SEEN, 0))
            self._opens[full] = one
            opens.append(one)
        if opens:
            self._contents.load(opens, columns[len(_FIELDS) :])
        for one in opens if self._merging else ():
            self._of_key[one.key].append(one)

    def _load_keys(self, keys: list[Any]) -> list[tuple[Any, ...]]:
        """The open windows of keys that are not at hand yet."""
        wanted = [k for k in keys if k not in self._of_key]
        if not wanted:
            return []
        state, table = self._work.state, self._table(OPEN)
        state.prefetch(wanted, state.groups(wanted, table.spec), OPEN)
        _, (column,) = table.find(wanted)
        fulls = []
        for key, bounds in zip(wanted, column_values(column), strict=True):
            windows = [Window(b["start"], b["end"]) for b in bounds or ()]
            self._of_key[key], self._committed[key] = [], windows
            fulls += [_full(key, w) for w in windows]
        return fulls

    def _stage(self) -> None:
        """Put the windows that were touched into the state."""
        chosen = [one for one in self._opens.values() if one.touched and (one.alive or one.known)]
        chosen.sort(key=lambda one: order_bytes(one.full))
        columns = [
            pa.array([self.forgotten_at(o.window) for o in chosen], pa.int64()),
            pa.array([o.n for o in chosen], pa.int64()),
            pa.array([self._packed(o) if o.alive else None for o in chosen], pa.string()),
        ]
        columns += self._contents.columns(chosen)
        gone = np.fromiter((not o.alive for o in chosen), bool, count=len(chosen))
        if chosen:
            self._table(WINDOWS).stage([o.full for o in chosen], columns, gone)

    def _stage_open(self) -> None:
        now = {key: [one.window for one in mine] for key, mine in self._of_key.items()}
        changed = [k for k, windows in now.items() if windows != self._committed[k]]
        changed = [k for k in changed if now[k] or self._committed[k]]
        if not changed:
            return
        changed.sort(key=order_bytes)
        lists = [[{"start": w.start, "end": w.end} for w in now[k]] for k in changed]
        gone = np.fromiter((not now[k] for k in changed), bool, count=len(changed))
        self._table(OPEN).stage(changed, [pa.array(lists, pa.list_(_BOUNDS))], gone)

    def _packed(self, one: Open) -> str | None:
        """What a trigger keeps, and how much of the window has been in a result, as text."""
        for name, value in one.state.items():
            if not isinstance(name, str) or not _is_small(value):
                raise PipelineError(
                    f"{type(self._trigger).__name__} keeps {name!r}: {shown(value)}, which can't be stored.",
                    uid=self._node.uid,
                    where=self._node.where,
                    remedy="Keep ints of 64 bits, finite floats, strings and bools in ctx.state, under names.",
                )
        kept = {**one.state, SEEN: one.seen} if one.seen else one.state
        return msgspec.json.encode(dict(sorted(kept.items()))).decode() if kept else None


def _is_small(value: Any) -> bool:
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 63
    return isinstance(value, str) or (isinstance(value, float) and math.isfinite(value))


def _full(key: Any, window: Window) -> tuple[Any, ...]:
    return (*key, window.start, window.end) if isinstance(key, tuple) else (key, window.start, window.end)
