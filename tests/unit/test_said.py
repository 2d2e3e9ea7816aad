"""What is said of a deadline that is not held, before anything dies: each reason, at once, and not for ever."""

from __future__ import annotations

import itertools
import logging
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config import resolve
from holdfast.faults.kinds import Fault
from holdfast.recovery.estimate import OF_DRIVER, Learned, Notice, detection
from holdfast.recovery.explain import UNSEEN_WORKER, explain
from holdfast.recovery.feasible import TELL_EVERY_S, Said
from holdfast.recovery.guard import Guard
from holdfast.recovery.memory import read_memory, read_outcomes
from holdfast.supervise.strategies import (
    End,
    FailureRate,
    GiveUp,
    NoRestart,
    Restart,
    Strategy,
    decide,
    delays_s,
)
from tests.unit.test_guard import NOTICE, Known, committed, done

LONG = [committed(epoch, 10_000) for epoch in range(1, 2001)]
"""What a run without backups leaves to be replayed."""


def made(
    folder: Path, notice: Notice = NOTICE, environment: dict[str, str] | None = None, **given: Any
) -> Guard:
    clock = given.pop("clock_s", time.time)
    settings = resolve({"deadline": "70s", **given}, environment={}).settings
    guard = Guard(settings, notice, folder, environment=environment or {}, clock_s=clock)
    guard.learned.epoch = Known(0.1, 1e-5)
    return guard


# When


@given(st.lists(st.frozensets(st.sampled_from("abc")), max_size=300))
def test_a_new_reason_is_said_at_once_and_what_comes_and_goes_twice_a_minute_at_most(
    seconds: list[frozenset[str]],
) -> None:
    said, heard, at = Said(), list[tuple[int, list[str]]](), 0
    known: set[str] = set()
    for at, reasons in enumerate(seconds):
        news = said.news(sorted(reasons), float(at))
        assert set(news or []) == reasons - known, "what was not said yet is said now"
        known = set() if news == [] else known | reasons
        if news is not None:
            heard.append((at, news))
    cleared = [when for when, news in heard if not news]
    assert all(b - a >= TELL_EVERY_S for a, b in itertools.pairwise(cleared))
    assert len(heard) <= 4 * (1 + at // TELL_EVERY_S)


def test_a_clock_that_is_set_back_does_not_make_it_silent() -> None:
    said = Said()
    assert said.news(["host"], 10_000.0) == ["host"]
    assert said.news([], 10.0) == []


# What


def test_a_run_that_begins_with_a_long_history_says_that_the_deadline_is_not_held_yet(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only what can never be held was said: that it is not held until the first backup is through was not."""
    now = [1000.0]
    guard = made(tmp_path, on_infeasible="refuse", clock_s=lambda: now[0])
    guard.start(LONG[-1], LONG, None)
    decided = guard.decide()
    assert decided.back_up and decided.pause and decided.feasible
    (told,) = (record.getMessage() for record in caplog.records)
    bound_s = next(e.bound(0.999) for e in guard.estimates if e.fault is Fault.HOST)
    assert bound_s > 70
    assert "The deadline of 70 s is not held now: after host " in told
    assert f"recovery may take {bound_s:.1f} s. Once state is backed up it is " in told
    guard.decide()
    assert len(caplog.records) == 1, "once"
    now[0] += 2 * TELL_EVERY_S
    guard.rebuilt([], None)
    guard._standing.begin([], None)  # as if all were backed up
    guard.decide()
    assert "the deadline of 70 s is held again" in caplog.records[-1].getMessage()


def test_what_cannot_be_held_any_more_is_not_said_to_be_held_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault that moved from "not held now" to "can't be held" was gone from the first, which said that all was well."""
    now = [1000.0]
    guard = made(tmp_path, clock_s=lambda: now[0])
    guard.start(LONG[-1], LONG, None)
    guard.decide()
    assert "is not held now: after host " in caplog.text
    guard.learned.fetch = Known(500.0, 1e-9, 1e-9)  # what is there takes so long to load that no backup helps
    now[0] += 2 * TELL_EVERY_S
    guard.decide()
    now[0] += 2 * TELL_EVERY_S
    guard.decide()
    assert guard._over() and "can't be held" in caplog.text
    assert "held again" not in caplog.text


def test_an_epoch_that_cannot_be_cut_and_is_too_large_is_said_when_it_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guard = made(tmp_path)
    guard.start(None, [], None)
    for epoch in range(1, 4):
        done(guard, epoch)
    assert not caplog.records
    guard.planned(20_000_000)
    assert "is not held now" in caplog.text


def test_who_goes_on_whatever_happens_is_told_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guard = made(tmp_path, msgspec.structs.replace(NOTICE, worker_s=None), on_infeasible="go_on")
    guard.start(LONG[-1], LONG, None)
    guard.decide()
    guard.planned(20_000_000)
    assert not caplog.records


@pytest.mark.parametrize(("restarts", "then"), [("inf inf inf 0", False), ("inf 50 1 1", True)])
def test_a_driver_that_nobody_would_start_again_is_not_taken_for_one_that_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, restarts: str, then: bool
) -> None:
    """With restart="none", or a rate that is spent, the next fall is the last: its faults looked held."""
    now = [1000.0]
    guard = made(
        tmp_path, environment={"HOLDFAST_RESTARTS": restarts}, clock_s=lambda: now[0], restart="none"
    )
    with caplog.at_level(logging.WARNING, "holdfast.deadline"):
        guard.start(None, [], None)
        guard.decide()
    assert not set(OF_DRIVER) & {e.fault for e in guard.estimates}
    assert [r.getMessage() for r in caplog.records if "not started again" in r.getMessage()] == [
        "If the driver dies now it is not started again (restart = 'none'): no deadline is held for its faults."
    ]
    guard.stop()
    memory = read_memory(tmp_path)
    assert memory is not None and memory.notice is not None and memory.situation is not None
    told = explain(memory.situation, Learned(memory), memory.notice, 0.999)
    assert told is not None and any("Nobody starts the driver again" in note for note in told.notes)
    done(guard, 1)
    now[0] += 60
    guard.decide()
    assert (set(OF_DRIVER) <= {e.fault for e in guard.estimates}) is then, "once the falls are long ago"


def test_a_driver_that_froze_teaches_no_silence_when_it_is_the_last_to_be_started(tmp_path: Path) -> None:
    """Nobody would notice the next fall, but this one was noticed: its silence is detection, and no start of anything."""
    now = [1000.0]
    fell = {"HOLDFAST_FELL": f"{int(1000 * (now[0] - 20))} silent", "HOLDFAST_RESTARTS": "inf 570 1 1"}
    guard = made(tmp_path, environment=fell, clock_s=lambda: now[0])
    guard.start(None, [], None)
    guard.decide()
    assert Fault.DRIVER_FREEZE not in {e.fault for e in guard.estimates}
    done(guard, 1)
    (outcome,) = read_outcomes(tmp_path)
    assert NOTICE.driver_s is not None and outcome.fault == "driver-freeze"
    assert outcome.measured.detection == pytest.approx(detection(Fault.DRIVER_FREEZE, NOTICE).mean)
    assert outcome.measured.environment <= 20 - NOTICE.driver_s


STRATEGIES: list[Strategy] = [NoRestart(), FailureRate(1, 60.0), FailureRate(3, 20.0)]


@given(
    st.sampled_from(STRATEGIES),
    st.lists(st.integers(1, 30), max_size=6),
    st.integers(0, 30),
    st.integers(0, 90),
)
def test_what_is_told_of_the_next_restart_is_what_is_decided_then(
    strategy: Strategy, gaps: list[int], since: int, well: int
) -> None:
    falls = [End(at_s=float(sum(gaps[: n + 1])), exit_code=-9) for n in range(len(gaps))]
    now = float(sum(gaps) + since)
    soon_s, after_s, later_s = delays_s(falls, strategy, now)
    then = now + well
    decided = decide([*falls, End(at_s=then, exit_code=-9)], strategy, then)
    told_s = later_s if well > after_s else soon_s
    if isinstance(decided, GiveUp):
        assert told_s == float("inf")
    elif well > after_s or not well:
        assert decided == Restart(told_s)


def test_a_session_that_ends_no_frozen_worker_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guard = made(tmp_path, msgspec.structs.replace(NOTICE, worker_s=None))
    guard.start(None, [], None)
    guard.decide()
    assert UNSEEN_WORKER in caplog.text
    told = explain(guard._forecast_for, guard.learned, guard._notice, 0.999)
    assert told is not None and UNSEEN_WORKER in told.notes


# What it stands on


@given(
    st.lists(st.tuples(st.integers(0, 50), st.floats(1e-3, 5e-3)), min_size=1, max_size=400),
    st.integers(1, 30),
)
def test_epochs_without_records_or_with_a_few_say_nothing_of_what_a_record_costs(
    small: list[tuple[int, float]], usual: int
) -> None:
    """Two hundred epochs that only moved timers on made a record look a thousand times as dear."""
    learned = Learned()
    for _ in range(usual):
        learned.computed(20_000 * 4e-6, 20_000)
    for records, seconds in small:
        learned.computed(seconds, records)
    assert learned.computing_s == pytest.approx(4e-6, rel=0.5)
    largest = learned.computing_s or 0.0
    learned.computed(20_000 * 8e-6, 20_000)
    assert (learned.computing_s or 0.0) > largest, "and one as large as usual does"


def test_where_all_epochs_are_small_a_record_costs_what_they_take() -> None:
    learned = Learned()
    learned.computed(0.01, 0)
    assert learned.computing_s is None
    for _ in range(50):
        learned.computed(0.004, 100)
    assert learned.computing_s == pytest.approx(4e-5)
