"""The driver killed, and frozen, replaced and woken, at every named step. Real processes, real signals.

Here over the in-process runner, as the driver's own code is the same; `tests/spark/test_crash_points.py` does it on
Spark. `make test` kills and freezes at every point with one of the backends, in one life after the other; in
`make test-slow` every point, backend and signal has a pipeline of its own.
"""

import signal
from pathlib import Path

import pytest

from holdfast.log.journal import Journal
from tests import victim
from tests.crashes import (
    BACKENDS,
    FIRST_LIFE,
    MATRIX,
    WALK,
    check_state,
    crash,
    crash_along,
    end,
    first_life,
    freeze,
    freeze_along,
    frozen_at,
    run,
    start,
    wake,
)
from tests.spark.test_equals_runner import bytes_in

PUBLISHING = ["publish.before_sink@6", "publish.after_sink@6", "commit.before_record", "commit.after_record"]
"""In the order in which they come where output is published before the decision. A start publishes to four sinks again."""
UNDECIDED = ["plan.before_record", "plan.after_record", "epoch.after_run", "commit.before_record"]
"""Where the next record that a driver creates is one of its epoch."""
IN_TURN = list(zip(BACKENDS, (WALK[::2], WALK[1::2]), strict=True))
"""Every second point with one backend, the others with the other."""


@pytest.mark.parametrize(("backend", "points"), IN_TURN, ids=BACKENDS)
def test_the_driver_is_killed_at_one_point_after_the_other(
    tmp_path: Path, backend: str, points: list[str]
) -> None:
    crash_along(tmp_path, backend, points)


@pytest.mark.parametrize(("backend", "points"), IN_TURN, ids=BACKENDS)
def test_the_driver_is_frozen_replaced_and_woken_at_one_point_after_the_other(
    tmp_path: Path, backend: str, points: list[str]
) -> None:
    freeze_along(tmp_path, backend, points)


@pytest.mark.parametrize(("point", "backend"), list(zip(PUBLISHING, BACKENDS * 2, strict=True)))
def test_at_least_once_a_driver_that_is_killed_around_the_decision_loses_no_output_and_state_is_exact(
    tmp_path: Path, point: str, backend: str
) -> None:
    first_life(tmp_path, backend, "at_least_once")
    process = start(tmp_path, backend, "at_least_once", HOLDFAST_CRASH_AT=point)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, f"{point} was not reached: {errors.decode()[-2000:]}"
    struck = FIRST_LIFE + 1
    decided = Journal.at(tmp_path / "dir").last_epoch()
    assert decided == (struck if point == "commit.after_record" else FIRST_LIFE)
    run(tmp_path, backend, "at_least_once")
    sinks = victim.sinks(tmp_path / "runner", tmp_path / "runner-called")
    check_state(tmp_path, sinks)
    assert bytes_in(tmp_path / "runner").items() <= bytes_in(tmp_path / "ours").items()
    called = (tmp_path / "called").read_text().splitlines()
    assert set(called) == set((tmp_path / "runner-called").read_text().splitlines())
    if point.startswith("commit"):
        assert len([call for call in called if call.startswith(f"{struck} ")]) == 2, (
            "once before the decision"
        )


def test_at_least_once_a_driver_that_wakes_up_before_it_publishes_publishes_nothing(tmp_path: Path) -> None:
    first_life(tmp_path, "heap", "at_least_once")
    frozen = frozen_at(tmp_path, "heap", "epoch.after_run", "at_least_once")
    try:
        run(tmp_path, "heap", "at_least_once")
        called = (tmp_path / "called").read_bytes()
        wake(tmp_path, frozen)
        assert (tmp_path / "called").read_bytes() == called
    finally:
        end(frozen)


@pytest.mark.parametrize("point", UNDECIDED)
def test_a_driver_that_wakes_up_when_the_log_of_its_epoch_is_trimmed_changes_nothing(
    tmp_path: Path, point: str
) -> None:
    freeze(tmp_path, "heap", point, "trim")


@pytest.mark.slow
@pytest.mark.parametrize(("point", "backend"), MATRIX)
def test_the_driver_is_killed_at(tmp_path: Path, point: str, backend: str) -> None:
    crash(tmp_path, backend, point)


@pytest.mark.slow
@pytest.mark.parametrize(("point", "backend"), MATRIX)
def test_the_driver_is_frozen_replaced_and_woken_at(tmp_path: Path, point: str, backend: str) -> None:
    freeze(tmp_path, backend, point)
