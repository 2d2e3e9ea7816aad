"""The engine on a local Spark: starting, stopping, going on, and what it refuses."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.checkpoint.catalog import Catalog
from holdfast.engine.doors import PinnedDoors, PublicDoors, open_doors
from holdfast.engine.session import check_session, problems
from holdfast.engine.spark_runner import SparkRunner
from holdfast.errors import (
    DivergedError,
    FencedError,
    IncompatibleError,
    InUseError,
    SessionError,
    StateLostError,
    UserCodeError,
)
from holdfast.log.journal import Journal
from holdfast.metrics import read_status

Row = dict[str, Any]


class Running(hf.KeyedProcess):
    total = hf.ValueState(int, default=0)

    def process(self, key: Any, record: Row, ctx: hf.Context) -> Any:
        self.total.value += record["v"]
        yield {"k": key, "total": self.total.value}


DATA = [{"k": i % 7, "v": i} for i in range(120)]
EXPECTED = {k: sum(r["v"] for r in DATA if r["k"] == k) for k in range(7)}


def running(sink: hf.Sink, source: hf.Source | None = None, name: str = "running") -> hf.Pipeline:
    p = hf.Pipeline(name)
    p.read("in", source or hf.records(DATA, per_epoch=20)).key_by("k").process("run", Running()).write(
        "out", sink
    )
    return p


def last_totals(sink: Any) -> dict[int, int]:
    return {r["k"]: r["total"] for r in sink.rows()}


def test_started_again_it_goes_on_where_it_stopped(spark: Any, tmp_path: Path) -> None:
    first, second = hf.memory(), hf.memory()
    one = running(first).run(spark=spark, dir=str(tmp_path), epochs=2)
    two = running(second).run(spark=spark, dir=str(tmp_path), drain=True)
    assert (one.last_epoch, two.last_epoch) == (2, 6)
    assert two.status().generation == 2
    assert last_totals(second) == EXPECTED
    # The last epoch before the stop is published again at the next start: a sink in memory sees it twice.
    assert len(first.rows()) + len(second.rows()) == len(DATA) + 20


def test_a_directory_is_refused_to_another_pipeline_and_to_other_types(spark: Any, tmp_path: Path) -> None:
    running(hf.memory()).run(spark=spark, dir=str(tmp_path), epochs=1)
    with pytest.raises(IncompatibleError, match="belongs to the pipeline 'running', this is 'other'"):
        running(hf.memory(), name="other").run(spark=spark, dir=str(tmp_path), epochs=1)
    with pytest.raises(IncompatibleError, match="parallelism was 2 and is 3"):
        running(hf.memory()).run(spark=spark, dir=str(tmp_path), epochs=1, parallelism=3)


def who_collects(record: Row) -> Row:
    """By whom PySpark's daemon has the cycles of this worker collected after each task."""
    found = [m.gc for n in ("pyspark.daemon", "__main__") if hasattr(m := sys.modules.get(n), "manager")]
    return {**record, "by": [getattr(one, "__module__", "the module gc") for one in found]}


def test_no_worker_walks_through_all_its_objects_after_each_task(spark: Any, tmp_path: Path) -> None:
    sink = hf.memory()
    p = hf.Pipeline("collected")
    p.read("in", hf.records(DATA[:10])).map(who_collects).write("out", sink)
    p.run(spark=spark, dir=str(tmp_path), drain=True)
    assert {tuple(r["by"]) for r in sink.rows()} == {("holdfast.engine.collector",)}


def test_a_handle_reports_waits_and_stops(spark: Any, tmp_path: Path) -> None:
    sink = hf.memory()
    handle = running(sink, hf.records(DATA, per_epoch=1)).start(spark=spark, dir=str(tmp_path))
    assert not handle.wait(0.01)
    while handle.last_epoch < 3:
        time.sleep(0.02)
    handle.stop()
    status = handle.status()
    assert status.state == "stopped"
    assert status.epoch == handle.last_epoch == Journal.at(tmp_path).last_epoch()
    assert status.records == status.epoch
    assert len(sink.rows()) == status.epoch


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_a_worker_that_was_ended_costs_a_reload_and_no_result(
    spark: Any, tmp_path: Path, backend: str
) -> None:
    sink = hf.memory()
    options: dict[str, Any] = {"spark": spark, "dir": str(tmp_path), "backend": backend}
    journal = Journal.at(tmp_path)
    handle = running(sink, Killing(journal)).run(drain=True, **options)
    assert handle.last_epoch == 6
    assert last_totals(sink) == EXPECTED


class Killing(hf.Source):
    """Kills the workers of the last epoch's shards before it offers the next."""

    def __init__(self, journal: Journal) -> None:
        self._directory = str(journal._store._root)  # type: ignore[attr-defined]
        self._records = hf.records(DATA, per_epoch=20)

    def schema(self) -> Any:
        return self._records.schema()

    def plan(self, position: Any, limit: hf.Limit) -> hf.Offer:
        journal = Journal.at(Path(self._directory).parent)
        commit = journal.commit(journal.last_epoch())
        for shard in commit.shards["run"] if commit else []:
            try:
                os.kill(int(shard.worker), signal.SIGKILL)
            except ProcessLookupError:
                continue
        return self._records.plan(position, limit)

    def read(self, piece: hf.Range, reading: hf.Reading) -> Any:
        return self._records.read(piece, reading)


def test_more_shards_than_slots(spark: Any, tmp_path: Path) -> None:
    sink = hf.memory()
    running(sink).run(spark=spark, dir=str(tmp_path), drain=True, parallelism=5)
    assert last_totals(sink) == EXPECTED


def test_without_the_private_doors_it_is_slower_and_never_wrong(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(open_doors(spark.sparkContext), PinnedDoors)
    monkeypatch.setattr("holdfast.engine.handle.open_doors", lambda sc, known: PublicDoors(sc))
    pins: list[bool] = []
    original = SparkRunner.run
    monkeypatch.setattr(SparkRunner, "run", lambda self, *a: (pins.append(self.pins), original(self, *a))[1])
    sink = hf.memory()
    running(sink).run(spark=spark, dir=str(tmp_path), drain=True)
    assert not any(pins)
    assert last_totals(sink) == EXPECTED


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
@pytest.mark.parametrize("checkpoint", ["1 epochs", "never"])
def test_state_that_was_lost_is_rebuilt(spark: Any, tmp_path: Path, backend: str, checkpoint: str) -> None:
    options: dict[str, Any] = {
        "spark": spark,
        "dir": str(tmp_path),
        "backend": backend,
        "checkpoint": checkpoint,
    }
    running(hf.memory()).run(epochs=4, **options)
    shutil.rmtree(tmp_path / "state")
    sink = hf.memory()
    handle = running(sink).run(drain=True, **options)
    assert last_totals(sink) == EXPECTED
    assert handle.last_epoch == 6


def test_without_history_and_checkpoints_it_stops_and_loses_nothing(spark: Any, tmp_path: Path) -> None:
    running(hf.memory()).run(spark=spark, dir=str(tmp_path), epochs=2, checkpoint_keep=1)
    shutil.move(str(tmp_path / "state"), str(tmp_path / "away"))
    shutil.move(str(tmp_path / "checkpoints"), str(tmp_path / "gone"))
    with pytest.raises(StateLostError, match="No checkpoint can be used, and the log begins at epoch 2"):
        running(hf.memory()).run(spark=spark, dir=str(tmp_path), drain=True)
    shutil.rmtree(tmp_path / "state")
    shutil.move(str(tmp_path / "away"), str(tmp_path / "state"))
    sink = hf.memory()
    running(sink).run(spark=spark, dir=str(tmp_path), drain=True)
    assert last_totals(sink) == EXPECTED


def test_an_exception_of_the_users_ends_the_run_with_their_traceback_and_no_jvm(
    spark: Any, tmp_path: Path
) -> None:
    class Fails(hf.KeyedProcess):
        def process(self, key: Any, record: Row, ctx: hf.Context) -> Any:
            raise ValueError("no good")

    p = hf.Pipeline("fails")
    p.read("in", hf.records(DATA)).key_by("k").process("fails", Fails()).write("out", hf.memory())
    with pytest.raises(UserCodeError, match=r"\[fails\] ValueError: no good") as caught:
        p.run(spark=spark, dir=str(tmp_path), drain=True)
    text = str(caught.value)
    assert "test_engine.py" in text
    assert "java" not in text
    assert len(text.splitlines()) < 20
    assert Journal.at(tmp_path).last_epoch() == 0


def test_a_driver_that_was_replaced_ends(spark: Any, tmp_path: Path) -> None:
    handle = running(hf.memory(), hf.records(DATA, per_epoch=1)).start(spark=spark, dir=str(tmp_path))
    while handle.last_epoch < 2:
        time.sleep(0.02)
    Journal.at(tmp_path).take()
    with pytest.raises(FencedError):
        handle.wait(30)


def test_a_second_start_is_refused_with_the_first_ones_identity_and_may_take_over(
    spark: Any, tmp_path: Path
) -> None:
    first = running(hf.memory(), hf.records(DATA, per_epoch=1)).start(spark=spark, dir=str(tmp_path))
    while first.last_epoch < 2:
        time.sleep(0.02)
    with pytest.raises(InUseError, match=rf"process {os.getpid()} on .*, generation 1, since"):
        running(hf.memory()).run(spark=spark, dir=str(tmp_path))
    second = running(hf.memory(), hf.records(DATA, per_epoch=1)).start(
        spark=spark, dir=str(tmp_path), take_over=True, epochs=2
    )
    with pytest.raises(FencedError):
        first.wait(30)
    assert second.wait(30)
    assert second.status().generation == 2


def test_changed_code_goes_on_after_a_checkpoint_and_what_is_missing_is_refused(
    spark: Any, tmp_path: Path
) -> None:
    class Sum(hf.KeyedProcess):
        total = hf.ValueState(int, default=0)

        def process(self, key: Any, record: Row, ctx: hf.Context) -> Any:
            self.total.value += record["v"] * 1
            yield {"k": key, "total": self.total.value}

    def changed(sink: hf.Sink, uid: str = "run", more: str = "more") -> hf.Pipeline:
        p = hf.Pipeline("running")
        stream = p.read("in", hf.records(DATA, per_epoch=20)).key_by("k").process(uid, Sum())
        stream.write("out", sink)
        stream.write(more, hf.memory())
        return p

    options: dict[str, Any] = {"spark": spark, "dir": str(tmp_path), "checkpoint_on_stop": False}
    running(hf.memory()).run(epochs=3, **options)
    sink = hf.memory()
    changed(sink).run(epochs=1, **options)
    made = Catalog(Journal.at(tmp_path)).completed()
    assert [(c.epoch, c.trigger) for c in made] == [(3, "CODE_CHANGED")]
    changed(sink).run(drain=True, **options)
    assert last_totals(sink) == EXPECTED
    with pytest.raises(
        IncompatibleError, match="the process 'run' is stored there and missing here"
    ) as caught:
        changed(hf.memory(), uid="other").run(drain=True, **options)
    assert "in the directory: running" in str(caught.value)
    assert "in this pipeline: running" in str(caught.value)
    with pytest.raises(IncompatibleError, match="the sink 'more' is stored there and missing here"):
        changed(hf.memory(), more="other").run(drain=True, **options)


class Unsteady(hf.KeyedProcess):
    n = hf.ValueState(int, default=0)

    def process(self, key: Any, record: Row, ctx: hf.Context) -> Any:
        self.n.value = time.monotonic_ns()
        yield {"n": self.n.value}


def test_a_start_whose_replay_differs_ends_with_a_code_of_its_own_at_the_epoch_that_was_decided(
    spark: Any, tmp_path: Path
) -> None:
    p = hf.Pipeline("unsteady")
    p.read("in", hf.records(DATA, per_epoch=20)).key_by("k").process("n", Unsteady()).write(
        "out", hf.memory()
    )
    options: dict[str, Any] = {"spark": spark, "dir": str(tmp_path), "checkpoint": "1h"}
    p.run(epochs=2, **options)  # which leaves a checkpoint, to be loaded before the replay
    p.run(epochs=1, checkpoint_on_stop=False, **options)
    shutil.rmtree(tmp_path / "state")
    with pytest.raises(DivergedError, match=r"\[n\] Shard \d gave another result") as caught:
        p.run(epochs=1, **options)
    assert caught.value.exit_code == 12
    status = read_status(tmp_path)
    assert status is not None and (status.generation, status.epoch) == (3, 3)


def test_sessions_that_break_the_engine_are_refused_at_once() -> None:
    assert problems({}, cluster=False) == []
    assert (
        len(problems({"spark.python.worker.reuse": "false", "spark.speculation": "true"}, cluster=False)) == 2
    )
    assert "reduceLocality" in problems({}, cluster=True)[0]

    class Connect:
        """As a Spark Connect session looks from here."""

    Connect.__module__ = "pyspark.sql.connect.session"
    with pytest.raises(SessionError, match="Spark Connect"):
        check_session(Connect())


APP = """
    import holdfast as hf
    from beside import double          # a module beside this file
    from package.inner import LABEL

    class Sum(hf.KeyedProcess):
        total = hf.ValueState(int, default=0)

        def process(self, key, record, ctx):
            import beside              # found on executors too
            self.total.value += double(record["v"])
            yield {"k": key, "total": self.total.value, "label": LABEL + beside.SUFFIX}

    pipeline = hf.Pipeline("app")
    (pipeline.read("in", hf.records([{"k": i % 2, "v": i} for i in range(10)]))
             .key_by("k").process("sum", Sum()).write("out", hf.jsonl("out")))

    if __name__ == "__main__":
        pipeline.run(drain=True)
"""


def test_spark_submit_brings_modules_beside_the_file_to_the_executors(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(textwrap.dedent(APP))
    (tmp_path / "beside.py").write_text("SUFFIX = '!'\ndef double(v):\n    return 2 * v\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "inner.py").write_text("LABEL = 'inner'\n")
    submit = Path(sys.executable).parent / "spark-submit"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYSPARK", "SPARK_"))}
    done = subprocess.run(
        [str(submit), "--master", "local[2]", "--conf", "spark.ui.enabled=false", "app.py"],
        cwd=tmp_path,
        env={**environment, "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = "".join(p.read_text() for p in sorted((tmp_path / "out").glob("*.jsonl"))).splitlines()
    assert '{"k":1,"total":50,"label":"inner!"}' in lines
    assert len(lines) == 10
