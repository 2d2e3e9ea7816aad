"""Whatever order Spark delivers in, a shard applies the same records in the same order, or nothing at all."""

import random
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.config import Settings
from holdfast.engine.build import build_program, build_stages
from holdfast.engine.epoch import assign, texts
from holdfast.engine.exchange import Control, DataHead, by_key_group, control_blob, data_blob, divide, inboxes
from holdfast.engine.program import Header, Program, Report, SourceTask, declared_schemas
from holdfast.engine.tasks import Shards, Where, run_shard_task, run_source_task
from holdfast.errors import EngineError
from holdfast.io.base import Limit
from tests.pipelines import Everything

ROWS = [{"k": i % 9, "n": i % 13} for i in range(300)]


def prepared(folder: Path) -> tuple[Program, list[bytes]]:
    """A program with one keyed stage, and what its shard is sent for one epoch."""
    p = hf.Pipeline("order")
    p.read("in", hf.records(ROWS, splits=6)).key_by("k").process("all", Everything()).write(
        "out", hf.memory()
    )
    stages = build_stages(p)
    program = build_program(stages, Settings(), 1, str(folder))
    offer = stages.graph.by_uid("in").body.plan(None, Limit(1000, 3, 1))
    tasks = assign({"in": offer}, 3)
    header = msgspec.msgpack.encode(Header(1, 1, 1, len(tasks), {}, texts(declared_schemas(stages))))
    sent = [
        s
        for n, ranges in enumerate(tasks)
        for s in run_source_task(program, SourceTask(n, header, ranges), Where())
    ]
    return program, [blob for _, blob in sent]


def apply(program: Program, blobs: list[bytes], attempt: int) -> Report:
    """What the shard reports for these blobs."""
    _, reports = run_shard_task(program, program.stages.keyed[0], 0, blobs, Where(str(attempt)), Shards())
    own = [msgspec.msgpack.decode(r, type=Report) for r in reports]
    return next(r for r in own if r.stage)


def facts(report: Report) -> Any:
    assert report.error is None, report.error
    assert report.sealed is not None
    return report.sealed.digest, [(f.rows, f.crc32) for f in report.sinks["out"]]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_any_order_of_delivery_gives_the_same_bytes_of_state_and_output(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        program, blobs = prepared(Path(folder))
        expected = facts(apply(program, blobs, 0))
        random.Random(seed).shuffle(blobs)
        assert facts(apply(program, blobs, 1)) == expected


@pytest.mark.parametrize("lost", ["a control record", "a data blob"])
def test_a_shard_that_has_not_heard_everything_changes_nothing(tmp_path: Path, lost: str) -> None:
    program, blobs = prepared(tmp_path)
    kind = b"C" if lost == "a control record" else b"D"
    blobs.remove(next(b for b in blobs if b[:1] == kind))
    report = apply(program, blobs, 0)
    assert report.error is not None
    assert report.sealed is None
    assert not (tmp_path / "state").exists()


def test_a_channel_that_speaks_twice_is_an_error() -> None:
    control = control_blob(Control("src0", 0, False, b"", []))
    with pytest.raises(EngineError, match="spoke twice"):
        inboxes([control, control])


def test_channels_that_don_t_agree_on_the_barrier_are_an_error() -> None:
    said = [
        control_blob(Control(f"src{i}", 0, False, b"", [], 3, barrier)) for i, barrier in enumerate([4, 4, 5])
    ]
    inboxes(said[:2])[3].check(2)
    with pytest.raises(EngineError, match=r"don't agree on the checkpoint under way: \[4, 5\]"):
        inboxes(said)[3].check(3)


def test_a_failed_task_upstream_makes_a_shard_skip_the_epoch(tmp_path: Path) -> None:
    program, blobs = prepared(tmp_path)
    first = next(b for b in blobs if b[:1] == b"C")
    control = msgspec.msgpack.decode(first[1:], type=Control)
    blobs[blobs.index(first)] = control_blob(msgspec.structs.replace(control, failed=True))
    report = apply(program, blobs, 0)
    assert report.skipped
    assert report.sealed is None


def test_records_are_divided_by_shard_and_stay_in_order_within_a_key_group() -> None:
    groups = np.array([5, 0, 5, 2, 0], dtype=np.uint16)
    parts = divide(pa.table({"n": range(5)}), groups, np.array([0, 3, 9]))
    assert [(shard, t["n"].to_pylist()) for shard, t in parts] == [(0, [1, 4, 3]), (1, [0, 2])]
    merged, seen = by_key_group([t for _, t in parts])
    assert merged["n"].to_pylist() == [1, 4, 3, 0, 2]
    assert seen.tolist() == [0, 0, 2, 5, 5]


def test_blobs_come_back_in_the_order_of_the_plan() -> None:
    blobs = [data_blob(DataHead(0, 0, upstream, 0), pa.table({"u": [upstream]})) for upstream in (2, 0, 1)]
    tables = inboxes([*blobs, control_blob(Control("c", 3, False, b"", []))])[0].tables()
    assert [t["u"].to_pylist() for _, t in tables] == [[0], [1], [2]]
