"""The library's operators after a loss: the same as if nothing had happened, over the real loop without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from tests.drivers import live
from tests.joined import OPERATORS, SINKS, build
from tests.rebuilt import BOTH_WAYS, check, rebuilt
from tests.windowed import sinks_in


@pytest.mark.parametrize(("checkpoint", "backend"), BOTH_WAYS)
def test_the_library_is_the_same_after_everything_but_the_log_was_lost(
    tmp_path: Path, backend: str, checkpoint: str
) -> None:
    second = rebuilt(build, OPERATORS, OPERATORS[0], tmp_path, backend=backend, checkpoint=checkpoint)
    assert second.recovery.last is not None
    assert second.recovery.last.lacking >= len(OPERATORS)
    check(build, SINKS, second, tmp_path)


@pytest.mark.parametrize("backend", ["heap", pytest.param("rocksdb", marks=pytest.mark.slow)])
def test_the_same_on_any_parallelism_and_backend(tmp_path: Path, backend: str) -> None:
    made = []
    for parallelism in (1, 2, 4):
        result = hf.testing.run(build(lambda uid: hf.memory()), parallelism=parallelism, backend=backend)
        made.append({uid: result.rows(uid) for uid in SINKS})
        for uid in OPERATORS:
            assert sum(t.num_rows for t in result.state(uid).values()) == (21 if uid == "ever" else 0), uid
    assert made[0] == made[1] == made[2]
    assert all(made[0].values()), {uid: len(rows) for uid, rows in made[0].items()}


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_a_worker_that_is_new_reads_the_state_and_goes_on(tmp_path: Path, backend: str) -> None:
    options: dict[str, Any] = {"backend": backend, "max_records": 32, "trim_log": False}
    for _ in range(5):
        life = live(build(sinks_in(tmp_path / "ours")), tmp_path / "dir", epochs=3, **options)
    life = live(build(sinks_in(tmp_path / "ours")), tmp_path / "dir", **options)
    check(build, SINKS, life, tmp_path)
