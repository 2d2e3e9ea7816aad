"""What a run looks like on a terminal."""

import io
import time
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console, RenderableType

from holdfast.checkpoint.policy import Trigger
from holdfast.cli.view import narrow_view, run_view, sparkline
from holdfast.cli.watching import Seen
from holdfast.engine.handle import STOPPING
from holdfast.metrics import EpochFacts, Forecast, Recovered, Status, Watermark


def drawn(view: RenderableType, width: int = 100) -> str:
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(view)
    return console.export_text()


def status(**changes: Any) -> Status:
    return Status("orders", "/data/orders", 3, 42, "here", **{"state": "running", **changes})


def facts(epoch: int, records: int, latency_ms: float = 100.0) -> EpochFacts:
    return EpochFacts(
        epoch, 1_000_000 + epoch * 500, records, {}, {}, 0, 0.0, latency_ms, 0.0, 0.0, 7, 2048, 1, 0
    )


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def seen(clock: list[float]) -> Seen:
    made = Seen(lambda: clock[0])
    made.hear(status(state="starting", message="starting Spark"), None)
    return made


def run_epochs(seen: Seen, clock: list[float], records: Callable[[int], int] = lambda n: 1000) -> None:
    for number in range(1, 21):
        clock[0] += 0.5
        now = status(
            epoch=number,
            records=number * 1000,
            records_per_s=2000.4,
            latency_ms=182.4,
            backlog=12345,
            state_keys=8712,
            state_bytes=5 << 20,
        )
        seen.hear(now, facts(number, records(number), 100.0 + number))


def test_before_the_first_epoch_the_view_says_what_is_waited_for(seen: Seen) -> None:
    seen.hear(status(state="starting", message="waiting for executors of spark://h:7077"), None)
    text = drawn(run_view(seen))
    assert "● starting" in text
    assert "starting Spark…" in text and "waiting for executors of spark://h:7077…" in text


def test_the_view_shows_every_figure(seen: Seen, clock: list[float]) -> None:
    run_epochs(seen, clock)
    text = drawn(run_view(seen))
    for part in ("orders · generation 3 · ● running", "2,000", "182 ms", "12,345", "8,712", "5.0 MB", "0:10"):
        assert part in text, part
    assert "Ctrl-C finishes the epoch and stops" in text
    assert "p50 111 ms · p99 120 ms" in text
    assert "███" in text
    assert "starting Spark" not in text


def test_a_run_that_was_asked_to_stop_says_so(seen: Seen, clock: list[float]) -> None:
    run_epochs(seen, clock)
    seen.hear(status(message=STOPPING), None)
    assert "stopping after this epoch" in drawn(run_view(seen))
    assert seen.stopping


def test_the_clock_stands_still_after_the_end(seen: Seen, clock: list[float]) -> None:
    run_epochs(seen, clock)
    seen.hear(status(state="stopped", epoch=20), None)
    clock[0] += 3600
    text = drawn(run_view(seen))
    assert "● stopped" in text and "ran for 0:10" in text


def test_bad_records_are_counted_over_all_sources(seen: Seen) -> None:
    seen.hear(status(bad_records={"a": 2, "b": 5}), None)
    assert seen.bad_records == 7
    assert "7" in drawn(run_view(seen))


def test_what_other_sinks_draw_stands_below(seen: Seen) -> None:
    text = drawn(run_view(seen, ["a table of rows"]))
    assert text.index("orders") < text.index("a table of rows")


def test_a_long_directory_keeps_its_end(seen: Seen) -> None:
    seen.hear(status(), None)
    assert seen.status is not None
    seen.status.directory = "/a" * 60 + "/the-end"
    assert "/the-end" in drawn(run_view(seen))


def test_the_sparkline_scales_from_nothing_to_the_greatest() -> None:
    assert sparkline([], 5) == ""
    assert sparkline([0, 0], 5) == "▁▁"
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8], 4) == "▅▆▇█"


def test_the_first_epoch_stands_apart_from_the_percentiles(clock: list[float]) -> None:
    seen = Seen(lambda: clock[0])
    seen.hear(status(), facts(1, 1, latency_ms=9000.0))
    seen.hear(status(), facts(2, 1, latency_ms=50.0))
    assert seen.first_ms == 9000.0 and seen.latency_ms(0.99) == 50.0


def test_the_narrow_view_holds_its_width(seen: Seen, clock: list[float]) -> None:
    assert "starting Spark…" in drawn(narrow_view(seen, 44))
    run_epochs(seen, clock)
    assert {len(line) for line in drawn(narrow_view(seen, 44)).rstrip("\n").split("\n")} == {44}


def test_event_time_is_shown_for_each_operator_the_slowest_first(seen: Seen, clock: list[float]) -> None:
    run_epochs(seen, clock)
    marks = {
        "a.time": Watermark(ms=1, lag_ms=5_000, split="a/0", still_ms=0),
        "b.time": Watermark(ms=1, lag_ms=65_000, split="b/1", still_ms=12_000),
        "c.time": Watermark(ms=1, lag_ms=1_000, split="c/0", still_ms=0, waits=True),
        "d.time": Watermark(ms=None, lag_ms=None, split="", still_ms=0, ended=True),
    }
    seen.hear(status(watermarks=marks, late_records={"w": 3}), None)
    lines = [line for line in drawn(run_view(seen)).splitlines() if "behind" in line]
    assert ["b/1 holds b.time, still for 0:12" in lines[0], "a/0 holds a.time" in lines[1]] == [True, True]
    assert "c.time waits for its group" in lines[2]
    assert "event time" in lines[0] and "late" in lines[0] and "late" not in lines[1]
    assert "00:00:00Z, 0:05 behind" in lines[1]
    assert len(lines) == 3
    assert "1:05 behind" in drawn(narrow_view(seen, 60))
    ended = {uid: Watermark(ms=None, lag_ms=None, split="", still_ms=0, ended=True) for uid in marks}
    seen.hear(status(watermarks=ended), None)
    assert "ended" in drawn(run_view(seen))


def test_records_that_are_in_no_result_because_of_their_time_are_shown_by_what_is_the_matter(
    seen: Seen, clock: list[float]
) -> None:
    run_epochs(seen, clock)
    one = Watermark(ms=1, lag_ms=5_000, split="a/0", still_ms=0)
    counts = {"late_records": {"w": 3}, "untimed_records": {"a.time": 41}, "unseen_records": {"w": 52}}
    seen.hear(status(watermarks={"a.time": one}, **counts), None)
    lines = drawn(run_view(seen)).splitlines()
    for name, count in (("late", "3"), ("untimed", "41"), ("unseen", "52")):
        assert any(name in line and count in line for line in lines)
    seen.hear(status(watermarks={"a.time": one}, late_records={"w": 3}), None)
    assert "untimed" not in drawn(run_view(seen)) and "unseen" not in drawn(run_view(seen))


def test_united_sources_say_each_how_far_it_is_the_furthest_behind_first(
    seen: Seen, clock: list[float]
) -> None:
    run_epochs(seen, clock)
    lags = {"web": 1_000, "shops": 65_000, "phone": 5_000, "post": 3_000}
    both = {
        "all.time": Watermark(ms=1, lag_ms=65_000, split="shops/2", still_ms=0, sources=lags),
        "one.time": Watermark(ms=1, lag_ms=2_000, split="one/0", still_ms=0, sources={"one": 2_000}),
    }
    seen.hear(status(watermarks=both), None)
    lines = [line for line in drawn(run_view(seen)).splitlines() if "behind" in line]
    told = ["shops/2 holds all.time", " shops ", " phone ", " post ", "one/0 holds one.time"]
    assert [text in line for text, line in zip(told, lines, strict=True)] == [True] * 5
    assert "0:05 behind" in lines[2] and "web" not in "".join(lines)


def test_the_view_holds_the_bound_and_its_parts_against_the_deadline(seen: Seen, clock: list[float]) -> None:
    run_epochs(seen, clock)
    forecast = Forecast(10.0, 5.0, 2.0, 3.0, 41.5, 33.0)
    held: dict[str, Any] = {
        "epoch": 21,
        "policy": "deadline",
        "deadline_s": 70.0,
        "bound_s": 41.5,
        "worst_fault": "executor-freeze",
        "forecasts": {"executor-freeze": forecast},
    }
    seen.hear(status(**held), None)
    text = drawn(run_view(seen), 120)
    for part in ("≤ 41.5 s", "70 s", "10.0 + 5.0 + 2.0 + 3.0 s, executor-freeze", "not needed yet"):
        assert part in text, part
    assert "last fault" not in text
    made = {
        "checkpoint": 3,
        "checkpoint_ms": int(time.time() * 1000) - 65_000,
        "backup_reason": Trigger.DEADLINE.value,
    }
    seen.hear(status(**held, **made), None)
    assert "1:05 ago, deadline" in drawn(run_view(seen), 100)
    for there in ({}, made):
        seen.hear(status(**held, **there, paused=True), None)
        assert "intake paused" in drawn(run_view(seen), 100)
    seen.hear(status(**{**held, "feasible": False}), None)
    assert "70 s can't be held" in drawn(run_view(seen), 120)


def test_the_view_says_what_the_last_recovery_took_beside_its_estimate(
    seen: Seen, clock: list[float]
) -> None:
    run_epochs(seen, clock)
    last = Recovered("host", 1, 14.94, 17.1, 60.0, 70.0)
    seen.hear(status(epoch=21, recovered=last), None)
    text = drawn(run_view(seen), 120)
    assert "last fault" in text and "14.9 s" in text and "host, 17.1 s estimated" in text
