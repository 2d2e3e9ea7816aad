"""Windows record by record after a loss, and with memory that forgets: the same as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from tests.contents import build
from tests.drivers import live
from tests.rebuilt import BOTH_WAYS, check, rebuilt
from tests.windowed import sinks_in

OPERATORS = ["values", "visits", "batches", "sums", "busy"]
OUTPUTS = ("told", "late", "sessions", "reduced", "summed", "busiest")


@pytest.mark.parametrize(("checkpoint", "backend"), BOTH_WAYS)
def test_windows_are_the_same_after_everything_but_the_log_was_lost(
    tmp_path: Path, backend: str, checkpoint: str
) -> None:
    second = rebuilt(build, OPERATORS, "values", tmp_path, backend=backend, checkpoint=checkpoint)
    assert second.recovery.last is not None
    assert second.recovery.last.lacking >= 4
    check(build, OUTPUTS, second, tmp_path)


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_windows_are_the_same_with_a_new_process_for_each_epoch(tmp_path: Path, backend: str) -> None:
    options: dict[str, Any] = {
        "backend": backend,
        "checkpoint": "never",
        "trim_log": False,
        "max_records": 32,
    }
    life = live(build(sinks_in(tmp_path / "ours")), tmp_path / "dir", epochs=1, **options)
    while life.driver.last_epoch < 8:
        before = life.driver.last_epoch
        life = live(build(sinks_in(tmp_path / "ours")), tmp_path / "dir", epochs=1, **options)
        assert life.driver.last_epoch == before + 1
    life = live(build(sinks_in(tmp_path / "ours")), tmp_path / "dir", **options)
    check(build, OUTPUTS, life, tmp_path)


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_the_same_on_any_parallelism(tmp_path: Path, backend: str) -> None:
    made = []
    for parallelism in (1, 2, 4):
        folder = tmp_path / str(parallelism)
        result = hf.testing.run(build(sinks_in(folder)), parallelism=parallelism, backend=backend)
        made.append({uid: result.rows(uid) for uid in OUTPUTS})
    assert made[0] == made[1] == made[2]
    assert all(made[0].values()), {uid: len(rows) for uid, rows in made[0].items()}
