"""Event time on Spark: the same output, clocks and state as the in-process runner, with a loss on the way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.log.journal import Journal
from tests import contents, joined, windowed
from tests.drivers import state_in
from tests.spark.test_equals_runner import bytes_in
from tests.windowed import sinks_in


@pytest.mark.parametrize(
    ("build", "lost", "backend"),
    [
        (windowed.build, ("totals/00001", "quiet/00000"), "heap"),
        (windowed.build, ("totals/00001", "quiet/00000"), "rocksdb"),
        (
            joined.build,
            ("close/00001", "priced/00000", "together/00000", "rises/00001", "best/00000"),
            "heap",
        ),
        (contents.build, ("values/00001", "visits/00000", "batches/00001", "sums/00000"), "heap"),
        pytest.param(joined.build, ("close/00000", "rises/00000"), "rocksdb", marks=pytest.mark.slow),
    ],
    ids=["windows, heap", "windows, rocksdb", "library, heap", "contents, heap", "library, rocksdb"],
)
def test_event_time_is_as_in_the_runner_after_a_loss(
    spark: Any, tmp_path: Path, build: Any, lost: tuple[str, ...], backend: str
) -> None:
    options: dict[str, Any] = {
        "dir": str(tmp_path / "dir"),
        "parallelism": 2,
        "max_records": 32,
        "backend": backend,
        "interval": "0s",
        "drain": True,
        "checkpoint": "3 epochs",
        "trim_log": False,
    }
    build(sinks_in(tmp_path / "ours")).run(spark=spark, epochs=5, checkpoint_on_stop=False, **options)
    for shard in lost:
        shutil.rmtree(state_in(tmp_path / "dir") / shard)
    build(sinks_in(tmp_path / "ours")).run(spark=spark, **options)
    journal = Journal.at(tmp_path / "dir")
    plans = [journal.plan(e) for e in range(1, journal.last_epoch() + 1)]
    expected = hf.testing.run(
        build(sinks_in(tmp_path / "runner")),
        parallelism=2,
        plans=[p for p in plans if p],
        capture=False,
        directory=tmp_path / "oracle",
    )
    assert bytes_in(tmp_path / "ours") == bytes_in(tmp_path / "runner")
    for commit in expected.commits:
        ours = journal.commit(commit.epoch)
        assert ours is not None
        assert (ours.clocks, ours.marks) == (commit.clocks, commit.marks)
        assert (ours.late, ours.unseen) == (commit.late, commit.unseen)
        for uid, shards in commit.shards.items():
            assert [s.sealed.digest for s in ours.shards[uid]] == [s.sealed.digest for s in shards]


def test_windows_that_a_folder_left_open_are_emitted_once_it_is_said_to_be_complete(
    spark: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()

    def put(name: str, *times: int) -> None:
        (folder / name).write_text("".join(json.dumps({"k": "a", "at": at}) + "\n" for at in times))

    def run(watch: bool) -> list[int]:
        made = hf.Pipeline("bounded")
        source = hf.files(folder, "jsonl", {"k": str, "at": int}, watch=watch)
        timed = made.read("in", source).event_time("at", unit="s", out_of_order="10s")
        counts = timed.key_by("k").window(hf.tumbling("10s")).aggregate("counts", n=hf.count())
        counts.write("out", hf.jsonl(tmp_path / "out"))
        made.run(spark=spark, dir=str(tmp_path / "dir"), drain=True, interval="0s", parallelism=2)
        files = sorted((tmp_path / "out").glob("*.jsonl"))
        return [json.loads(line)["n"] for file in files for line in file.read_text().splitlines()]

    put("a.jsonl", 1, 2, 25)
    assert run(watch=True) == [2]
    put("b.jsonl", 21)
    assert run(watch=True) == [2], "of what --drain leaves open nothing is emitted, for more may come"
    assert run(watch=False) == [2, 2]
    put("c.jsonl", 22)
    assert run(watch=False) == [2, 2], "after the end nothing is read"
