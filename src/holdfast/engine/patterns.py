"""Patterns: the records of a key in the order of their times, and what has begun in them.

Records wait until the clock has passed them. Then each goes to all that has begun, in order; it may end one of them,
carry it on, or begin one of its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.data.rows import column_values, copy_value, to_rows
from holdfast.engine.batch import Batch
from holdfast.engine.calls import user_error
from holdfast.engine.kept import KeepingOperator, Rows, Shelf, joined, shelf_spec
from holdfast.engine.keyed import Held, Work
from holdfast.engine.keys import numbering
from holdfast.errors import HoldfastError
from holdfast.plan import graph as g
from holdfast.plan.bodies import ENDED, TIMEOUT, PatternBody
from holdfast.plan.times import LATE
from holdfast.state.tables import TableSpec, ValueTable

_WAITING, _BEGUN = "waiting", "begun"
_DUE, _STEP = "begun.due", "begun.step"


@dataclasses.dataclass
class _Begun:
    """A pattern that has begun: its number, until when it may go on, and the records of its steps so far."""

    number: int
    until: int
    records: list[Any]
    stored: bool
    changed: bool = False


class Patterns(KeepingOperator):
    """Finds a pattern in the records of each key."""

    def __init__(self, node: g.Node, redact: bool) -> None:
        super().__init__(node, redact)
        self._body: PatternBody = node.body

    def specs(self, schema: pa.Schema | None) -> list[TableSpec] | None:
        fields = [pa.field(_DUE, pa.int64()), pa.field(_STEP, pa.int64())]
        if schema is not None and "0" in schema.names:
            kind = schema.field("0").type
            fields += [pa.field(step.name, kind) for step in self._body.steps[:-1]]
        begun = TableSpec(
            _BEGUN,
            "value",
            pa.struct(fields),
            tuples=True,
            extra=(pa.int64(),),
            due=_DUE,
            owned=True,
            named=True,
        )
        return [shelf_spec(_WAITING, schema, 0), begun]

    def apply(self, work: Work) -> None:
        shelf = Shelf(work, _WAITING)
        came = self.on_time(work, shelf, 0, LATE)
        rows = joined(shelf.rows(shelf.due(work.after)), came)
        ready = rows.times <= work.after
        changed = np.flatnonzero(rows.stored | ~ready)
        shelf.stage(rows.take(changed), rows.times[changed], ready[changed])
        rows = rows.where(ready)
        ids = rows.ids(numbering())
        rows = rows.take(np.lexsort((rows.numbers, rows.times, ids, rows.groups)))
        self._run(work, rows, to_rows(shelf.table(rows)) if len(rows) else [])

    def _run(self, work: Work, rows: Rows, records: list[Any]) -> None:
        """Take records, sorted by key and time, to what has begun."""
        table = work.state.tables[_BEGUN]
        assert isinstance(table, ValueTable)
        groups = dict(zip(rows.owners, rows.groups.tolist(), strict=True))
        begun = self._begun(work, table, groups)
        names = self._key_names(work)
        held = Held()
        out: list[Any] = []
        lost: dict[str, list[Any]] = {TIMEOUT: []}
        left: list[tuple[Any, _Begun, bool]] = []
        spans = _spans(rows.owners)
        for owner, group in sorted(groups.items(), key=lambda item: item[1]):
            mine = _Key(
                self, owner, dict(zip(names, owner, strict=True)), begun.get(owner, []), out, lost[TIMEOUT]
            )
            for place in range(*spans.get(owner, (0, 0))):
                mine.take(int(rows.times[place]), int(rows.numbers[place]), records[place])
            mine.end(work.after)
            left += [(owner, one, True) for one in mine.gone] + [(owner, one, False) for one in mine.going]
            held.take(group, out, lost)
        self._stage(work, table, [(o, b, dead) for o, b, dead in left if dead or b.changed])
        made, sides = held.by_group((g.MAIN, TIMEOUT))
        try:
            work.outputs[g.MAIN].push(Batch(rows=made))
            work.outputs[TIMEOUT].push(Batch(rows=sides[TIMEOUT]))
        except HoldfastError as error:
            raise error.at(self.node.uid, self.node.where) from None

    def _begun(self, work: Work, table: ValueTable, groups: dict[Any, int]) -> dict[Any, list[_Begun]]:
        """What has begun for the keys at hand, and for those that it is over for; `groups` learns of these."""
        own = len(work.state.key_types)
        due = table.due(work.after)
        found = [k[:own] for k in due]
        places = work.state.groups([(*o, 0) for o in found], table.spec).tolist()
        groups.update(zip(found, places, strict=True))
        below = table.under(list(groups), lambda: np.fromiter(groups.values(), np.uint16, count=len(groups)))
        keys = list(dict.fromkeys([*due, *below]))
        if not keys:
            return {}
        _, columns = table.find(keys)
        begun: dict[Any, list[_Begun]] = {}
        for key, until, step, *steps in zip(keys, *map(column_values, columns), strict=True):
            begun.setdefault(key[:own], []).append(_Begun(key[-1], until, steps[:step], True))
        for several in begun.values():
            several.sort(key=lambda one: one.number)
        return begun

    def _stage(self, work: Work, table: ValueTable, left: list[tuple[Any, _Begun, bool]]) -> None:
        if not left:
            return
        kind = table.spec.value_type
        keys = [(*owner, one.number) for owner, one, _ in left]
        ones = [one for _, one, _ in left]
        columns = [
            pa.array([o.until for o in ones], pa.int64()),
            pa.array([len(o.records) for o in ones], pa.int64()),
        ]
        for place in range(len(self._body.steps) - 1):
            values = [o.records[place] if place < len(o.records) else None for o in ones]
            columns.append(pa.array(values, kind.field(place + 2).type))
        table.stage(keys, columns, np.array([dead for *_, dead in left], bool))
        work.state.check_memory()

    def _key_names(self, work: Work) -> list[str]:
        if work.key.columns:
            return list(work.key.columns)
        count = len(work.state.key_types)
        return ["key"] if count == 1 else [f"key{i}" for i in range(count)]


class _Key:
    """The records of one key on their way through what has begun."""

    def __init__(
        self,
        operator: Patterns,
        owner: Any,
        names: dict[str, Any],
        going: list[_Begun],
        out: list[Any],
        lost: list[Any],
    ) -> None:
        self._node, self._redact, self._steps = operator.node, operator.redact, operator._body.steps
        self._within, self._owner, self._names = operator._body.within_us, owner, names
        self._out, self._lost = out, lost
        self.going, self.gone = going, []

    gone: list[_Begun]

    def take(self, at: int, number: int, record: Any) -> None:
        """The next record in the order of time."""
        answers: dict[str, bool] = {}

        def is_(name: str, test: Any) -> bool:
            if name not in answers:
                try:
                    answers[name] = bool(test(record))
                except Exception as error:
                    raise user_error(error, self._node, record, self._redact, self._owner) from None
            return answers[name]

        self.end(at - 1)
        still = []
        for one in self.going:
            step = self._steps[len(one.records)]
            if is_(step.name, step.test):
                one.records = [*one.records, record]
                one.changed = True
                if len(one.records) == len(self._steps):
                    self._close(one)
                    self._out.append(self._shown(one))
                    continue
            else:
                hit = next((name for name, test in step.without if is_(name, test)), None)
                if hit is not None:
                    self._lose(one, hit)
                    continue
            still.append(one)
        first = self._steps[0]
        if is_(first.name, first.test):
            still.append(_Begun(number, at + self._within, [record], stored=False, changed=True))
        self.going = still

    def end(self, upto: int) -> None:
        """Let go of what can't be completed any more."""
        for one in [o for o in self.going if o.until <= upto]:
            self._lose(one, TIMEOUT)
        self.going = [o for o in self.going if o.until > upto]

    def _lose(self, one: _Begun, why: str) -> None:
        self._close(one)
        self._lost.append({**self._shown(one), ENDED: why})

    def _close(self, one: _Begun) -> None:
        if one.stored:
            self.gone.append(one)

    def _shown(self, one: _Begun) -> dict[str, Any]:
        records = [*map(copy_value, one.records), *[None] * (len(self._steps) - len(one.records))]
        return {**self._names, **{s.name: r for s, r in zip(self._steps, records, strict=True)}}


def _spans(owners: list[Any]) -> dict[Any, tuple[int, int]]:
    """Where the records of each key start and end; they stand together."""
    spans: dict[Any, tuple[int, int]] = {}
    for place, owner in enumerate(owners):
        spans[owner] = (spans[owner][0] if owner in spans else place, place + 1)
    return spans
