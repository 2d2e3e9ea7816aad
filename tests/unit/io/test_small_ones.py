"""Records in memory, the memory sink, the console and foreach_epoch."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from holdfast.errors import PipelineError, SchemaError, UserCodeError
from holdfast.io.base import Decided, Limit, Sink, Target
from holdfast.io.console import ConsoleSink, console
from holdfast.io.foreach import foreach_epoch
from holdfast.io.memory import memory, records


def write(sink: Sink, tmp_path: Path, epoch: int, table: pa.Table | None, fence: int = 1) -> Decided:
    writer = sink.writer(Target("sink", epoch, "0", f"{epoch}-{fence}", str(tmp_path)))
    if table is not None:
        writer.write(table)
    decided = Decided("sink", epoch, fence, writer.close(), str(tmp_path))
    sink.publish(decided)
    return decided


def test_records_come_in_order_and_end(reader: Any) -> None:
    source = reader(records([{"n": n} for n in range(10)], per_epoch=4))
    assert [[r["n"] for r in source.take()] for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert source.offer.exhausted
    assert source.take() == []


def test_records_are_read_in_splits_that_share_an_epoch(reader: Any) -> None:
    source = reader(records(pa.table({"n": range(10)}), splits=3))
    offer = source.plan(records=5)
    assert [(r.split, r.start, r.end) for r in offer.ranges] == [
        ("0000", 0, 2),
        ("0001", 3, 4),
        ("0002", 6, 8),
    ]
    assert offer.backlog == 5
    assert offer.waiting == ["0000", "0001", "0002"]


def test_records_follow_the_declared_schema() -> None:
    source = records([{"n": 1}], schema={"n": float, "m": str})
    assert source.schema() == pa.schema({"n": pa.float64(), "m": pa.string()})
    with pytest.raises(SchemaError):
        records([{"n": "x"}], schema={"n": int})
    with pytest.raises(PipelineError, match="no schema"):
        records([])
    assert records([], schema={"n": int}).plan(None, Limit(1, 1, 0)).exhausted


def test_memory_keeps_epochs_apart_and_takes_each_once(tmp_path: Path) -> None:
    sink = memory()
    write(sink, tmp_path, 2, pa.table({"n": [3]}))
    decided = write(sink, tmp_path, 1, pa.table({"n": [1, 2]}))
    sink.publish(decided)
    write(sink, tmp_path, 3, None)
    assert sink.epochs == [1, 2]
    assert sink.rows() == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert sink.table(2).to_pylist() == [{"n": 3}] and sink.table().num_rows == 3  # type: ignore[union-attr]
    assert pickle.loads(pickle.dumps(sink)).rows() == []
    sink.clear()
    assert sink.table() is None


def test_a_function_is_called_with_each_epoch_that_has_rows(tmp_path: Path) -> None:
    seen: list[Any] = []
    sink = foreach_epoch(lambda table, epoch: seen.append((table.to_pylist(), epoch)))
    write(sink, tmp_path, 1, pa.table({"n": [1]}))
    write(sink, tmp_path, 2, None)
    assert seen == [([{"n": 1}], 1)]


def test_a_function_that_wants_the_fence_gets_it(tmp_path: Path) -> None:
    seen: list[Any] = []

    def save(table: pa.Table, epoch: int, fence: int) -> None:
        seen.append((epoch, fence))

    write(foreach_epoch(save), tmp_path, 5, pa.table({"n": [1]}), fence=3)
    assert seen == [(5, 3)]


def test_a_function_that_raises_shows_the_users_lines_and_the_uid(tmp_path: Path) -> None:
    def save(table: pa.Table, epoch: int) -> None:
        raise ValueError("the target is down")

    with pytest.raises(UserCodeError, match="the target is down") as caught:
        write(foreach_epoch(save), tmp_path, 5, pa.table({"n": [1]}))
    assert caught.value.uid == "sink"
    assert (
        caught.value.detail and "in save" in caught.value.detail and "foreach.py" not in caught.value.detail
    )


def test_a_function_of_the_wrong_shape_is_refused() -> None:
    for wrong in (lambda: None, lambda table: None, 3):
        with pytest.raises(PipelineError):
            foreach_epoch(wrong)  # type: ignore[arg-type]


def test_the_console_prints_lines_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = console(rows=2)
    decided = write(sink, tmp_path, 1, pa.table({"n": [1, 2, 3], "x": [0.5, None, 1234.5]}))
    sink.publish(decided)
    out = capsys.readouterr().out.splitlines()
    assert out == [
        "[sink] epoch 1: 3 rows, the last 2:",
        "[sink] epoch 1: n=2 x=-",
        "[sink] epoch 1: n=3 x=1,234.5",
    ]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_console_draws_a_table_that_refreshes_on_a_terminal(tmp_path: Path) -> None:
    screen = _Terminal()
    sink = ConsoleSink(3, "balances", screen)
    for epoch in (1, 2):
        write(sink, tmp_path, epoch, pa.table({"account": [f"a{epoch}", "b"], "balance": [epoch * 1.5, 2.0]}))
    sink.close()
    shown = screen.getvalue()
    assert "balances" in shown and "a2" in shown and "epoch 2 · 4 rows" in shown
    assert "\x1b[" in shown


def test_the_console_can_be_drawn_by_somebody_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = console()
    sink.embedded = True
    write(sink, tmp_path, 1, pa.table({"n": [1]}))
    assert capsys.readouterr().out == ""
    assert sink.renderable("sink").row_count == 1
    with pytest.raises(PipelineError):
        console(rows=0)
