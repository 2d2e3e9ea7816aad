"""The driver killed, and frozen, replaced and woken, on Spark: a few points in `make test`, all of them in `make test-slow`."""

from pathlib import Path

import pytest

from tests.crashes import MATRIX, crash, freeze

COVERING = ["commit.after_record", "recovery.loaded"]


@pytest.mark.parametrize("point", COVERING)
def test_on_spark_the_driver_is_killed_at(tmp_path: Path, point: str) -> None:
    crash(tmp_path, "rocksdb", point, "spark")


def test_on_spark_the_driver_is_frozen_replaced_and_woken(tmp_path: Path) -> None:
    freeze(tmp_path, "heap", "commit.before_record", "spark")


@pytest.mark.slow
@pytest.mark.parametrize(("point", "backend"), MATRIX)
def test_on_spark_the_driver_is_killed_at_every_point(tmp_path: Path, point: str, backend: str) -> None:
    crash(tmp_path, backend, point, "spark")


@pytest.mark.slow
@pytest.mark.parametrize(("point", "backend"), MATRIX)
def test_on_spark_the_driver_is_frozen_replaced_and_woken_at_every_point(
    tmp_path: Path, point: str, backend: str
) -> None:
    freeze(tmp_path, backend, point, "spark")
