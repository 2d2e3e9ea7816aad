"""Starting again with changed code: what the directory holds something for must still be there, whenever it came."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import holdfast as hf
from holdfast.cli.app import app
from holdfast.errors import IncompatibleError, SessionError
from holdfast.log.journal import Journal
from tests.drivers import live, make
from tests.unit.time.test_event_time import Script, at, counted

ROWS = [{"k": n % 3, "v": n} for n in range(40)]


def counting(kind: type = int) -> hf.KeyedProcess:
    class Count(hf.KeyedProcess):
        n = hf.ValueState(kind, default=kind())

        def process(self, key: Any, record: Any, ctx: Any) -> Any:
            self.n.value += kind(1)
            yield {"k": key, "n": self.n.value}

    return Count()


def first() -> hf.Pipeline:
    p = hf.Pipeline("grown")
    p.read("in", hf.records(ROWS, per_epoch=4)).key_by("k").process("count", counting()).write(
        "out", hf.memory()
    )
    return p


def grown(
    kind: type = int, *, source: bool = True, sink: bool = True, operator: str = "late", key: str = "k"
) -> hf.Pipeline:
    """The same with a source, a keyed operator and a sink more."""
    p = first()
    stream = p.read("more", hf.records(ROWS, per_epoch=4)) if source else p.read("in2", hf.records(ROWS))
    late = stream.key_by(key).process(operator, counting(kind)) if operator else stream
    late.write("log" if sink else "log2", hf.memory())
    return p


class Connect:
    """A session that is refused: a start that comes as far as this was not."""


Connect.__module__ = "pyspark.sql.connect.session"


def start(pipeline: hf.Pipeline, directory: Path) -> None:
    """As a user does, as far as it goes without Spark."""
    with pytest.raises(SessionError, match="Connect"):
        pipeline.start(spark=Connect(), dir=str(directory), parallelism=2)


def without_operators(directory: Path) -> None:
    """What a holdfast left that did not record them."""
    for path in (directory / "log" / "generations").iterdir():
        record = json.loads(path.read_text())
        del record["operators"]
        path.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (lambda: grown(float), r"'late': states was .*int64.* and is .*double"),
        (lambda: grown(key="v"), "'late': key was k and is v now"),
        (lambda: grown(operator="other"), "the process 'late' is stored there and missing here"),
        (lambda: grown(source=False), "the source 'more' is stored there and missing here"),
        (lambda: grown(sink=False), "the sink 'log' is stored there and missing here"),
        (first, "the process 'late' is stored there and missing here"),
    ],
    ids=["types", "key", "uid", "source", "sink", "all"],
)
def test_what_a_later_run_added_is_held_to_like_what_was_there_first(
    tmp_path: Path, changed: Callable[[], hf.Pipeline], says: str
) -> None:
    live(first(), tmp_path, epochs=2)
    live(grown(), tmp_path, epochs=2)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(IncompatibleError, match=says) as caught:
        changed().start(spark=Connect(), dir=str(tmp_path), parallelism=2)
    there, here = str(caught.value).split("in this pipeline: grown")
    assert "process 'late': states" in there.split("in the directory: grown")[1]
    assert "process 'count': states" in here
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    start(grown(), tmp_path)


def test_it_is_remembered_over_runs_that_add_nothing_and_once_commits_are_trimmed(tmp_path: Path) -> None:
    live(first(), tmp_path, epochs=2)
    live(grown(), tmp_path, epochs=1)
    life = live(grown(), tmp_path, epochs=2, checkpoint="1 epochs", checkpoint_keep=1)
    assert len(life.journal.epochs()) < 5
    with pytest.raises(IncompatibleError, match="'late': states was"):
        grown(float).start(spark=Connect(), dir=str(tmp_path), parallelism=2)


def test_what_was_added_by_a_run_without_an_epoch_can_still_be_changed(tmp_path: Path) -> None:
    live(first(), tmp_path, epochs=2)
    make(grown(), tmp_path)
    start(grown(float), tmp_path)
    start(first(), tmp_path)
    live(grown(float), tmp_path, epochs=1)
    with pytest.raises(IncompatibleError, match="'late': states was"):
        grown().start(spark=Connect(), dir=str(tmp_path), parallelism=2)


def test_a_plan_alone_holds_to_what_it_reads(tmp_path: Path) -> None:
    live(first(), tmp_path, epochs=1, checkpoint="never")
    life = live(grown(), tmp_path, epochs=1, checkpoint="never")
    (tmp_path / "log" / "commits" / f"{life.journal.last_epoch():012d}.json").unlink()
    with pytest.raises(IncompatibleError, match="the source 'more' is stored there and missing here"):
        grown(source=False).start(spark=Connect(), dir=str(tmp_path), parallelism=2)


def test_a_directory_whose_generations_have_no_operators_still_works(tmp_path: Path) -> None:
    live(first(), tmp_path, epochs=1)
    live(grown(), tmp_path, epochs=1)
    without_operators(tmp_path)
    start(grown(), tmp_path)
    with pytest.raises(
        IncompatibleError, match="the operator 'late' is stored there and missing here"
    ) as caught:
        first().start(spark=Connect(), dir=str(tmp_path), parallelism=2)
    assert "operator 'late'" in str(caught.value).split("in the directory")[1]
    live(grown(), tmp_path, epochs=1)
    assert "late" in Journal.at(tmp_path).identity().operators  # type: ignore[union-attr]


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_holdfast_state_lists_and_shows_what_a_later_run_added(tmp_path: Path, backend: str) -> None:
    live(first(), tmp_path, epochs=2, backend=backend)
    live(grown(), tmp_path, epochs=2, backend=backend)
    result = CliRunner().invoke(app, ["state", str(tmp_path), "--json"])
    assert [r["operator"] for r in json.loads(result.output)["operators"]] == ["count", "late"]
    result = CliRunner().invoke(app, ["state", str(tmp_path), "--json", "--operator", "late"])
    rows = json.loads(result.output)["states"]["n"]["rows"]
    assert {r["k"]: r["value"] for r in rows} == {0: 3, 1: 3, 2: 2}


@pytest.mark.parametrize(("was", "now"), [("10s", "0s"), ("0s", "10s")])
def test_whether_tumbling_windows_wait_for_late_records_is_fixed(tmp_path: Path, was: str, now: str) -> None:
    def build(lateness: str) -> hf.Pipeline:
        source = Script([{"0": at(1)}, {"0": at(11)}, {"0": at(30)}], bounded=False)
        return counted(source, lateness=lateness)

    live(build(was), tmp_path, epochs=2)
    with pytest.raises(IncompatibleError, match="'w'"):
        build(now).start(spark=Connect(), dir=str(tmp_path), parallelism=2)
    start(build("20s" if was != "0s" else was), tmp_path)
