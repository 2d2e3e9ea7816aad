"""The driver killed, and frozen, replaced and woken, on Spark: some points in `make test`, all of them in `make test-slow`.

One life for each point, as Spark takes its time to start: it comes back from what happened to the one before. Each
point with a new start of its own is the business of `tests/unit/test_crash_points.py`.
"""

from pathlib import Path

import pytest

from tests.crashes import BACKENDS, WALK, crash_along, freeze_along


def test_on_spark_the_driver_is_killed_after_a_decision_and_in_the_recovery_from_that(tmp_path: Path) -> None:
    crash_along(tmp_path, "rocksdb", ["commit.after_record", "recovery.loaded"], "spark")


@pytest.mark.slow
def test_on_spark_the_driver_is_frozen_before_a_decision_replaced_and_woken(tmp_path: Path) -> None:
    freeze_along(tmp_path, "heap", ["commit.before_record"], "spark")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_spark_the_driver_is_killed_at_every_point(tmp_path: Path, backend: str) -> None:
    crash_along(tmp_path, backend, WALK, "spark")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_spark_the_driver_is_frozen_replaced_and_woken_at_every_point(
    tmp_path: Path, backend: str
) -> None:
    freeze_along(tmp_path, backend, WALK, "spark")
