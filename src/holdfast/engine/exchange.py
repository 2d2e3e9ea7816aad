"""What passes from stage to stage: blobs of Arrow batches, and control records in the same channel.

A blob is one kind byte, a MessagePack head with its length, and for data an Arrow stream. Every task
sends every shard of the stages it feeds exactly one control record, which says how many data blobs it
sent there: a shard that has the control record of every channel knows whether it has everything. Spark
delivers in any order; `Inbox` restores the one order that the plan defines. A job of a replay brings several
epochs at once; each has an inbox of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.errors import EngineError
from holdfast.time.watermarks import Marks, merge

GROUP = "__g"
"""The column that carries each record's key group through an exchange."""
_DATA, _CONTROL = b"D", b"C"


class DataHead(msgspec.Struct, frozen=True, array_like=True):
    """Where a data blob belongs: exchange, and its place in the order of the plan.

    `upstream` is the ordinal of the range it comes from, or the first key group of the shard that sent it.
    """

    exchange: int
    order: int
    upstream: int
    sequence: int
    epoch: int = 0
    late: bool = False
    """Records that came too late, or may have, and were not combined."""
    stage: int = 0
    """The keyed stage that sent it, 0 for sources: behind a union several send by one exchange, and `upstream` counts in
    each of them from 0."""


class Control(msgspec.Struct, frozen=True, array_like=True):
    """What every shard hears from every channel.

    `barrier` is the number of the checkpoint under way, 0 for none: all channels must say the same.
    """

    channel: str
    sent: int
    failed: bool
    header: bytes
    reports: list[bytes]
    epoch: int = 0
    barrier: int = 0
    marks: dict[str, dict[str, int]] = {}
    """The watermarks that were seen in this epoch, here and further up."""
    answered: dict[str, list[str]] = {}
    """Whose answers of the outside world are in what was sent: attempts by task, here and further up."""


def data_blob(head: DataHead, table: pa.Table) -> bytes:
    """A table on its way to one shard."""
    packed = msgspec.msgpack.encode(head)
    sink = pa.BufferOutputStream()
    sink.write(_DATA + len(packed).to_bytes(2, "little") + packed)
    sink.write(bytes(_body(len(packed)) - 3 - len(packed)))
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def _body(length: int) -> int:
    """Where the Arrow stream of a blob starts, whose head has this length: Arrow wants its buffers aligned."""
    return -(-(3 + length) // 8) * 8


def control_blob(control: Control) -> bytes:
    """A control record on its way to one shard."""
    return _CONTROL + msgspec.msgpack.encode(control)


def inboxes(blobs: Iterable[bytes]) -> dict[int, Inbox]:
    """Everything that one shard was sent, by epoch and in their order."""
    found: dict[int, Inbox] = {}
    for blob in blobs:
        view = memoryview(blob)
        if blob[:1] == _CONTROL:
            control = msgspec.msgpack.decode(view[1:], type=Control)
            found.setdefault(control.epoch, Inbox()).hear(control)
        else:
            length = int.from_bytes(view[1:3], "little")
            head = msgspec.msgpack.decode(view[3 : 3 + length], type=DataHead)
            found.setdefault(head.epoch, Inbox()).take(head, view[_body(length) :])
    return {epoch: found[epoch] for epoch in sorted(found)}


class Inbox:
    """Everything that one shard was sent for one epoch."""

    def __init__(self) -> None:
        self.controls: dict[str, Control] = {}
        self._data: list[tuple[DataHead, memoryview]] = []

    def hear(self, control: Control) -> None:
        """Take a control record."""
        if control.channel in self.controls:
            raise EngineError(f"The channel {control.channel} spoke twice in one epoch.")
        self.controls[control.channel] = control

    def take(self, head: DataHead, view: memoryview) -> None:
        """Take a data blob."""
        self._data.append((head, view))

    def check(self, channels: int) -> None:
        """Raise unless every channel has spoken and everything that was sent is here."""
        if len(self.controls) != channels:
            raise EngineError(f"A shard heard from {len(self.controls)} of its {channels} channels.")
        sent = sum(c.sent for c in self.controls.values())
        if sent != len(self._data):
            raise EngineError(f"A shard got {len(self._data)} of the {sent} blobs that were sent to it.")

        barriers = {c.barrier for c in self.controls.values()}
        if len(barriers) > 1:
            raise EngineError(
                f"The channels of a shard don't agree on the checkpoint under way: {sorted(barriers)}.",
                remedy="This looks like a fault of holdfast itself: please report it.",
            )

    @property
    def header(self) -> bytes:
        if not self.controls:
            raise EngineError("A shard got records and no control record.")
        return next(iter(self.controls.values())).header

    @property
    def failed(self) -> bool:
        return any(c.failed for c in self.controls.values())

    @property
    def reports(self) -> list[bytes]:
        """Reports of earlier tasks that travel with the control records, in the order of channels."""
        return [r for name in sorted(self.controls) for r in self.controls[name].reports]

    @property
    def marks(self) -> Marks:
        """The watermarks that were seen on the way here."""
        found: Marks = {}
        for control in self.controls.values():
            merge(found, control.marks)
        return found

    @property
    def answered(self) -> dict[str, list[str]]:
        """Whose answers are in what came: attempts by task; more than one of a task where attempts are mixed."""
        found: dict[str, set[str]] = {}
        for control in self.controls.values():
            for task, attempts in control.answered.items():
                found.setdefault(task, set()).update(attempts)
        return {task: sorted(attempts) for task, attempts in sorted(found.items())}

    def tables(self, *, late: bool = False) -> list[tuple[DataHead, pa.Table]]:
        """The head and the table of each data blob, in the order of the plan: those on time, or those that are late."""
        chosen = [d for d in self._ordered() if d[0].late == late]
        return [(head, pa.ipc.open_stream(pa.py_buffer(view)).read_all()) for head, view in chosen]

    def digests(self) -> dict[int, int]:
        """Of what came by each exchange, in the order of the plan. Heads are left out: a blob's sequence depends on
        what else its task had to read."""
        found: dict[int, int] = {}
        for head, view in self._ordered():
            found[head.exchange] = zlib.crc32(view, found.get(head.exchange, 0))
        return found

    def _ordered(self) -> list[tuple[DataHead, memoryview]]:
        return sorted(self._data, key=lambda d: (d[0].order, d[0].stage, d[0].upstream, d[0].sequence))


def by_key_group(tables: list[pa.Table]) -> tuple[pa.Table, npt.NDArray[np.uint16]]:
    """Tables of one exchange as one, its rows by key group and within it in the order they came."""
    table = pa.concat_tables(tables, promote_options="permissive") if len(tables) > 1 else tables[0]
    groups = _groups(table)
    if len(tables) > 1:
        order = np.argsort(groups, kind="stable")
        table = table.drop_columns([GROUP]).take(pa.array(order))
        return table, groups[order]
    return table.drop_columns([GROUP]), groups


def _groups(table: pa.Table) -> npt.NDArray[np.uint16]:
    column = table.column(GROUP)
    if column.num_chunks == 1:
        return column.chunk(0).to_numpy()  # type: ignore[no-any-return]
    return column.to_numpy()  # type: ignore[no-any-return]


def divide(
    table: pa.Table, groups: npt.NDArray[np.uint16], first_groups: npt.NDArray[np.int64]
) -> list[tuple[int, pa.Table]]:
    """A table cut by shard, each part's rows by key group; parts without rows are left out."""
    order = np.argsort(groups, kind="stable")
    sorted_groups = groups[order]
    table = table.append_column(GROUP, pa.array(groups)).take(pa.array(order))
    bounds = [*np.searchsorted(sorted_groups, first_groups, side="left").tolist(), table.num_rows]
    parts: list[tuple[int, Any]] = []
    for shard in range(len(first_groups)):
        low, high = bounds[shard], bounds[shard + 1]
        if high > low:
            parts.append((shard, table.slice(low, high - low)))
    return parts
