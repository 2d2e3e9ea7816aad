"""What is done while there is no executor, without a cluster."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine import spark_runner
from holdfast.engine.absence import Absence, Go, Watch, go
from holdfast.engine.driver import Driver
from holdfast.engine.local import LocalRunner
from holdfast.engine.spark_runner import SparkRunner
from holdfast.errors import FencedError, JobLostError
from holdfast.log.journal import Journal
from tests.drivers import live, make
from tests.pipelines import Recipe
from tests.spark.test_equals_runner import sinks_in

hosts = st.sets(st.sampled_from("abcd"))
seconds = st.floats(0, 100)
ROWS = [{"id": i, "k": i % 7, "name": "ann", "v": i * 0.5, "n": i % 11} for i in range(100)]
ONE = Recipe([ROWS], 20, 2, ["map"], "process", "k", [], None, 2, 20)
OPTIONS: dict[str, Any] = {"max_records": 20, "checkpoint_on_stop": False, "trim_log": False}


@given(hosts, hosts, hosts, seconds, seconds, seconds, seconds)
def test_a_job_waits_only_for_what_may_still_come(
    here: set[str],
    homes: set[str],
    deserted: set[str],
    waited_s: float,
    wait_for_home_s: float,
    gone_for_s: float,
    wait_for_executors_s: float,
) -> None:
    verdict = go(
        here,
        homes,
        deserted,
        waited_s=waited_s,
        wait_for_home_s=wait_for_home_s,
        gone_for_s=gone_for_s,
        wait_for_executors_s=wait_for_executors_s,
    )
    if not here:
        assert (verdict is Go.GIVE_UP) == (gone_for_s >= wait_for_executors_s)
        assert verdict is not Go.ON, "there is nowhere to run"
    elif homes <= here | deserted or waited_s >= wait_for_home_s:
        assert verdict is Go.ON
    else:
        assert verdict is Go.WAIT


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 10))))
def test_an_absence_lasts_since_somebody_first_saw_it(looks: list[tuple[bool, float]]) -> None:
    now = 0.0
    absence, since = Absence(lambda: now), None
    for there, passed in looks:
        now += passed
        since = None if there else (now if since is None else since)
        assert absence.seen(there) == (0.0 if since is None else now - since)


def test_a_job_that_waits_in_vain_is_ended_and_one_that_runs_is_not() -> None:
    vain, ended = threading.Event(), threading.Event()
    watch = Watch(vain.is_set, ended.set, look_every_s=0.01)
    with watch.job():
        time.sleep(0.1)
        assert not ended.is_set()
        vain.set()
        assert ended.wait(10)
    ended.clear()
    time.sleep(0.1)
    assert not ended.is_set(), "no job runs"


def test_who_can_not_say_whether_executors_are_there_ends_nothing() -> None:
    asked, ended = threading.Event(), threading.Event()

    def in_vain() -> bool:
        asked.set()
        raise RuntimeError("the context is being stopped")

    watch = Watch(in_vain, ended.set, look_every_s=0.01)
    with watch.job():
        assert asked.wait(10)
        asked.clear()
        assert asked.wait(10), "it goes on looking"
    assert not ended.is_set()


@pytest.mark.parametrize("dies", [True, False])
def test_who_can_not_say_on_which_host_it_is_is_asked_again_only_if_it_has_died(
    monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """One that lives and can't, for want of Python perhaps, will not learn it: that is an error, and no loop."""
    runner = SparkRunner.__new__(SparkRunner)
    runner._sc, runner._hosts, runner._homes, runner._deserted = None, {}, {}, set()  # type: ignore[assignment]
    runner._absence, runner._wait_for_home_s, runner._wait_for_executors_s = Absence(), 0.0, 60.0
    there = [("1", "a")]
    asked: list[str] = []

    def learn(unknown: list[tuple[str, str]]) -> None:
        asked.extend(name for name, _ in unknown)
        if unknown == [("1", "a")]:
            if dies:
                there[:] = [("2", "a")]
            raise JobLostError("Spark gave a job up")
        runner._hosts.update(unknown)

    monkeypatch.setattr(runner, "_learn_hosts", learn)
    monkeypatch.setattr(runner, "_check_runs", lambda: None)
    monkeypatch.setattr(spark_runner, "executors", lambda sc: list(there))
    if dies:
        assert runner._await_homes(time.monotonic()) == [("2", "a")] and asked == ["1", "2"]
        return
    with pytest.raises(JobLostError):
        runner._await_homes(time.monotonic())
    assert asked == ["1"]


class Deserted(LocalRunner):
    """No executor is there from the third epoch on; what a runner does then, it does for the driver it is given."""

    driver: Driver

    def run(self, plan: Any, header: Any) -> Any:
        while plan.epoch >= 3:
            self.driver.check_wanted()
            time.sleep(0.01)
        return super().run(plan, header)


def deserted(directory: Path) -> threading.Thread:
    """A run that waits for executors; its error, if any, is its thread's."""
    life = make(ONE.build(sinks_in(directory.parent / "ours")), directory, runner=Deserted, **OPTIONS)
    life.driver._runner.driver = life.driver  # type: ignore[attr-defined]
    thread = threading.Thread(target=lambda: _run(thread, life.driver))
    thread.driver, thread.error = life.driver, None  # type: ignore[attr-defined]
    thread.start()
    until = time.monotonic() + 30
    while life.journal.plan(3) is None and time.monotonic() < until:
        time.sleep(0.01)
    return thread


def _run(thread: Any, driver: Driver) -> None:
    try:
        driver.start()
        driver.run()
    except BaseException as error:
        thread.error = error


@pytest.mark.parametrize("how", ["here", "from outside"])
def test_who_waits_for_executors_stops_when_asked_and_the_epoch_runs_at_the_next_start(
    tmp_path: Path, how: str
) -> None:
    thread: Any = deserted(tmp_path / "dir")
    journal = Journal.at(tmp_path / "dir")
    thread.driver.stop() if how == "here" else journal.ask_to_stop()
    thread.join(30)
    assert not thread.is_alive() and thread.error is None
    assert journal.last_epoch() == 2 and journal.plan(3) is not None
    again = live(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", **OPTIONS)
    assert again.driver.last_epoch == 5 and sum(f.records_in for f in again.facts) == 60


def test_who_waits_for_executors_at_its_start_stops_when_asked_and_changes_nothing(tmp_path: Path) -> None:
    """It ended with an error: a supervisor started it again, and the wish to stop was forgotten."""
    live(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", epochs=2, **OPTIONS)
    life = make(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", **OPTIONS)
    monkeyed: Any = life.driver._runner
    monkeyed.prepare = lambda asked: life.driver.check_wanted()
    life.driver.stop()
    life.driver.start()
    life.driver.run()
    assert life.driver.last_epoch == 2 and life.facts == [] and life.outcomes == []
    again = live(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", **OPTIONS)
    assert again.driver.last_epoch == 5


def test_who_waits_for_executors_sees_that_another_has_taken_over(tmp_path: Path) -> None:
    thread: Any = deserted(tmp_path / "dir")
    live(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", **OPTIONS)
    thread.join(30)
    assert isinstance(thread.error, FencedError)
