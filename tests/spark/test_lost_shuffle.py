"""What two keyed stages exchange is lost after shards of the first have sealed: Spark runs them again, and it is exact."""

import collections
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.log.journal import Journal
from tests.injected import injected
from tests.spark.test_equals_runner import bytes_in

ROWS = [{"id": i, "k": i % 7} for i in range(80)]
PER_EPOCH = 10
STRUCK = 4
"""Late enough for every shard to have a committed version that it must go back to."""


class Noted(hf.KeyedProcess):
    """Counts, and leaves a line for every record that it is given, so that a shard which runs again can be told."""

    n = hf.ValueState(int, default=0)

    def __init__(self, notes: Path) -> None:
        self._notes = notes

    def process(self, key: int, record: dict[str, Any], ctx: hf.Context) -> Any:
        with open(self._notes, "a") as notes:
            notes.write(f"{record['id']}\n")
        self.n.value += 1
        yield {"id": record["id"], "k": key % 3, "n": self.n.value}


def build(folder: Path, name: str, marker: Path) -> hf.Pipeline:
    """Two keyed stages; once the epoch before the struck one is published, the fault is armed."""

    def arm(table: Any, epoch: int) -> None:
        if epoch == STRUCK - 1:
            marker.unlink(missing_ok=True)

    pipeline = hf.Pipeline("noted")
    stream = pipeline.read("in", hf.records(ROWS, splits=2, per_epoch=PER_EPOCH))
    stream.write("seen", hf.foreach_epoch(arm))
    first = stream.key_by("k").process("first", Noted(folder / f"{name}-first"))
    first.write("counts", hf.parquet(str(folder / name / "counts")))
    second = first.key_by("k").process("second", Noted(folder / f"{name}-second"))
    second.write("end", hf.parquet(str(folder / name / "end")))
    return pipeline


def times(notes: Path) -> collections.Counter[int]:
    return collections.Counter(map(int, notes.read_text().split()))


def options(spark: Any, folder: Path, backend: str) -> dict[str, Any]:
    given = {"spark": spark, "dir": str(folder / "dir"), "backend": backend, "parallelism": 2}
    return {**given, "max_records": PER_EPOCH, "checkpoint": "never", "trim_log": False, "drain": True}


@pytest.mark.parametrize(
    ("task", "backend"),
    [
        pytest.param("second-0", "heap", marks=pytest.mark.slow),
        ("second-1", "rocksdb"),
        pytest.param("second-0", "rocksdb", marks=pytest.mark.slow),
        pytest.param("second-1", "heap", marks=pytest.mark.slow),
    ],
)
def test_keyed_shards_that_have_sealed_run_again_when_what_they_sent_is_lost(
    spark: Any, tmp_path: Path, task: str, backend: str
) -> None:
    with injected(spark, f"shard.start@{task}:lose-shuffle") as marker:
        marker.touch()
        handle = build(tmp_path, "ours", marker).run(**options(spark, tmp_path, backend))
        assert marker.exists(), "the fault did not come"
    first = times(tmp_path / "ours-first")
    again = {row["id"] for row in ROWS if first[row["id"]] > 1}
    journal = Journal.at(tmp_path / "dir")
    plans = [plan for e in range(1, handle.last_epoch + 1) if (plan := journal.plan(e)) is not None]
    struck = {i for task in plans[STRUCK - 1].tasks for r in task for i in range(r.piece.start, r.piece.end)}
    assert again, "no shard of the first stage was run again"
    assert again <= struck, "more was run again than the epoch that was struck"
    expected = hf.testing.run(
        build(tmp_path, "runner", marker),
        parallelism=2,
        plans=plans,
        capture=False,
        directory=tmp_path / "oracle",
    )
    assert bytes_in(tmp_path / "ours") == bytes_in(tmp_path / "runner")
    for commit in expected.commits:
        ours = journal.commit(commit.epoch)
        assert ours is not None
        for uid, shards in commit.shards.items():
            assert [s.sealed.digest for s in ours.shards[uid]] == [s.sealed.digest for s in shards]
