"""Triggers of windows in the in-process runner: when results come, what they hold, and what is kept."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import PipelineError, UserCodeError
from tests.unit.time.test_event_time import Script, at
from tests.unit.time.test_window_functions import BACKENDS, Row, bounds, came, epochs, over, timed


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_count_fires_for_every_nth_record_and_what_is_left_is_in_no_result(backend: str) -> None:
    source = epochs(at(1, 2, 3, 11), at(4, 5, 6, 12), at(60), bounded=True)
    result = over(source, hf.tumbling("10s"), hf.triggers.count(2), lag="5s", backend=backend)
    assert came(result) == [[1, 2], [1, 2, 3, 5], [1, 2, 3, 5, 6, 7], [4, 8]]


KINDS_OF_RESULTS = ("values", "reduced", "aggregated")


@pytest.mark.parametrize("backend", BACKENDS)
def test_records_that_no_result_has_seen_when_their_window_goes_are_counted(backend: str) -> None:
    source = epochs(at(1, 2, 3), at(4, 5, 12), at(60), at(61))
    result = over(source, hf.tumbling("10s"), hf.triggers.count(2), lag="5s", backend=backend)
    assert came(result) == [[1, 2], [1, 2, 3, 4], [7, 8]]
    assert [c.unseen for c in result.commits] == [{}, {}, dict.fromkeys(KINDS_OF_RESULTS, 2), {}]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_sessions_bring_along_is_counted_where_they_are_one(backend: str) -> None:
    source = epochs(at(1, 2), at(9), at(6), at(60))
    result = over(source, hf.session("5s"), hf.triggers.never(), lag="10s", backend=backend)
    assert [c.unseen for c in result.commits] == [{}, {}, {}, dict.fromkeys(KINDS_OF_RESULTS, 4)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_session_had_shown_is_not_counted_when_it_becomes_part_of_another(backend: str) -> None:
    source = epochs(at(1, 2, 3), at(9), at(6), at(60))
    result = over(source, hf.session("5s"), hf.triggers.count(3), lag="10s", backend=backend)
    assert came(result) == [[1, 2, 3]]
    assert [c.unseen for c in result.commits] == [{}, {}, {}, dict.fromkeys(KINDS_OF_RESULTS, 2)]


@pytest.mark.parametrize("trigger", [None, hf.triggers.purging(hf.triggers.event_time(early_count=2))])
def test_where_every_record_is_in_a_result_none_is_counted(trigger: hf.Trigger | None) -> None:
    source = epochs(at(1, 2, 3), at(15), at(4), at(60), bounded=True)
    result = over(source, hf.tumbling("10s"), trigger, lateness="20s")
    assert all(c.unseen == {} for c in result.commits)


@pytest.mark.parametrize("backend", BACKENDS)
def test_purging_leaves_each_result_with_what_is_new(backend: str) -> None:
    trigger = hf.triggers.purging(hf.triggers.count(2))
    source = epochs(at(1, 2, 3, 4, 5), at(6), at(7, 8), at(9), bounded=True)
    result = over(source, hf.tumbling("10s"), trigger, lag="60s", backend=backend)
    assert came(result) == [[1, 2], [3, 4], [5, 6], [7, 8]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_that_holds_nothing_any_more_does_not_fire_at_its_end_and_leaves_nothing(
    backend: str,
) -> None:
    trigger = hf.triggers.purging(hf.triggers.event_time(early_count=3))
    result = over(epochs(at(1, 2, 3), at(4, 5), at(30)), hf.tumbling("10s"), trigger, backend=backend)
    assert came(result) == [[1, 2, 3], [4, 5]]
    result = over(epochs(at(1, 2, 3), at(30)), hf.tumbling("10s"), trigger, backend=backend)
    assert came(result) == [[1, 2, 3]]
    left = result.state("values")
    assert left["windows"].num_rows == left["records"].num_rows == left["timers.event"].num_rows == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_of_a_global_kind_is_counted_and_kept_for_keys_that_hold_something(backend: str) -> None:
    trigger = hf.triggers.purging(hf.triggers.count(3))
    source = epochs(at(1, 2), at(50, 3), at(4, k="b"), at(5, 6, k="b"))
    result = over(source, hf.global_window(), trigger, backend=backend)
    assert came(result) == [[1, 2, 3], [5, 6, 7]]
    assert {bounds(r)[1:] for r in result.rows("totals")} == {(None, None)}
    assert [r["k0"] for r in result.state("values")["windows"].to_pylist()] == ["a"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_a_window_that_holds_nothing_not_even_a_timer_is_kept(backend: str) -> None:
    trigger = hf.triggers.purging(hf.triggers.event_time(early_count=2))
    source = epochs(at(1, 2), at(3, 4, k="b"), at(5, k="c"), at(6, 7))
    result = over(source, hf.global_window(), trigger, backend=backend)
    assert came(result) == [[1, 2], [3, 4], [6, 7]]
    for uid in ("values", "reduced", "aggregated"):
        left = result.state(uid)
        assert [r["k0"] for r in left["windows"].to_pylist()] == ["c"]
        assert [r["k0"] for r in left["timers.event"].to_pylist()] == ["c"]


def test_without_a_trigger_a_global_window_fires_at_the_end_of_time() -> None:
    assert came(over(epochs(at(1), at(99), at(50), bounded=True), hf.global_window())) == [[1, 2, 3]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_early_results_come_by_processing_time_and_wake_the_pipeline(backend: str) -> None:
    trigger = hf.triggers.event_time(early="2500ms")
    source = epochs(at(1), at(2))
    result = over(source, hf.tumbling("10s"), trigger, backend=backend, step_ms=1000, linger_ms=20_000)
    assert came(result) == [[1, 2]]
    assert result.commits[-1].records_in == 0
    assert [c.wake_ms for c in result.commits] == [1_700_000_002_500] * 2 + [None]
    assert result.plans[-1].now_ms == 1_700_000_003_000


def test_an_early_result_is_followed_by_that_of_the_end() -> None:
    trigger = hf.triggers.event_time(early="1s")
    source = epochs(at(1), at(2), at(3), at(4), at(30))
    result = over(source, hf.tumbling("10s"), trigger, step_ms=1000)
    assert came(result) == [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4], [5]]


def test_processing_time_fires_when_the_clock_passes_the_end_of_a_window() -> None:
    now_s = 1_700_000_000
    source = epochs(at(now_s, now_s + 1), at(now_s + 11))
    trigger = hf.triggers.processing_time()
    result = over(source, hf.tumbling("10s"), trigger, lag="60s", step_ms=1000, linger_ms=30_000)
    assert came(result) == [[1, 2], [3]]
    assert [p.now_ms - now_s * 1000 for p in result.plans] == [0, 1000, 10_000, 20_000]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_continuous_trigger_fires_at_each_period_that_has_records_in_the_order_of_time(
    backend: str,
) -> None:
    trigger = hf.triggers.continuous_event_time("5s")
    result = over(epochs(at(1, 6, 7), at(12), at(40)), hf.tumbling("20s"), trigger, backend=backend)
    assert came(result) == [[1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]]
    result = over(epochs(at(1, 21), at(90)), hf.tumbling("20s"), trigger, lag="30s", backend=backend)
    assert came(result) == [[1], [1], [2], [2]]


class OnAlarm(hf.Trigger):
    """Fires at once for a record above 100, and otherwise two seconds of event time behind the window's end."""

    def on_record(self, record: Row, at_us: int, window: hf.Window, ctx: Any) -> hf.Decision:
        ctx.set_event_timer(window.last + 2_000_000)
        ctx.state["seen"] = ctx.state.get("seen", 0) + 1
        ctx.state["about"] = f"{ctx.state['seen']} seen"
        return hf.Decision.FIRE if record["v"] > 100 else hf.Decision.CONTINUE

    def on_event_time(self, at_us: int, window: hf.Window, ctx: Any) -> hf.Decision:
        assert ctx.state["about"] == f"{ctx.state['seen']} seen"
        return hf.Decision.FIRE_AND_PURGE

    def clear(self, window: hf.Window, ctx: Any) -> None:
        ctx.delete_event_timer(window.last + 2_000_000)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_trigger_of_ones_own_keeps_its_state_with_the_window(backend: str) -> None:
    def rows(*pairs: tuple[int, int]) -> dict[str, list[Row]]:
        return {"0": [{"at": s, "v": v} for s, v in pairs]}

    source = Script([rows((1, 5), (2, 500)), rows((3, 6)), rows((11, 7)), rows((13, 8))], bounded=False)
    result = over(source, hf.tumbling("10s"), OnAlarm(), lateness="5s", backend=backend)
    assert came(result) == [[5, 500], [5, 500, 6]]
    kept = result.state("values")["windows"].to_pylist()
    assert [k["value"]["window.trigger"] for k in kept] == [
        '{"about":"3 seen","seen":3}',
        '{"about":"2 seen","seen":2}',
    ]


def test_a_timer_behind_the_time_at_which_a_window_is_forgotten_never_fires() -> None:
    result = over(epochs(at(1), at(10), at(50)), hf.tumbling("10s"), OnAlarm())
    assert came(result) == []
    result = over(epochs(at(1), at(50)), hf.tumbling("10s"), OnAlarm())
    assert came(result) == []
    kept = {name: table.num_rows for name, table in result.state("values").items() if table.num_rows}
    assert kept == {"windows": 1, "records": 1}  # the window from 50


def test_timers_that_would_call_nobody_are_not_kept_whatever_a_trigger_clears() -> None:
    class Careless(OnAlarm):
        def clear(self, window: hf.Window, ctx: Any) -> None:
            ctx.set_event_timer(window.last + 1)

    result = over(epochs(at(1), at(2), at(50)), hf.tumbling("10s"), Careless())
    assert came(result) == []
    kept = {name: table.num_rows for name, table in result.state("values").items() if table.num_rows}
    assert kept == {"windows": 1, "records": 1}


class Forgetful(hf.Trigger):
    """Wants to be called in two seconds of processing time and at the window's end, and never clears."""

    def on_record(self, record: Row, at_us: int, window: hf.Window, ctx: Any) -> hf.Decision:
        ctx.set_processing_timer(ctx.now_ms + 2000)
        ctx.set_event_timer(window.last)
        return hf.Decision.CONTINUE

    def on_event_time(self, at_us: int, window: hf.Window, ctx: Any) -> hf.Decision:
        assert at_us == window.last <= ctx.watermark_us
        return hf.Decision.FIRE

    def on_processing_time(self, at_ms: int, window: hf.Window, ctx: Any) -> hf.Decision:
        assert ctx.watermark_us < window.last, "called for a window that is forgotten"
        return hf.Decision.FIRE


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_trigger_that_never_clears_is_not_called_for_windows_that_are_forgotten(backend: str) -> None:
    source = epochs(at(1), at(50), at(51), at(52))
    result = over(source, hf.tumbling("10s"), Forgetful(), backend=backend, step_ms=1000)
    assert came(result) == [[1], [2, 3, 4], [2, 3, 4], [2, 3, 4]]  # the last two in epochs without data
    kept = {name: table.num_rows for name, table in result.state("values").items() if table.num_rows}
    assert kept == {"windows": 1, "records": 3, "timers.event": 1}


def test_a_trigger_that_can_not_merge_is_refused_for_sessions() -> None:
    made = hf.Pipeline("p")
    stream = timed(made, epochs(at(1))).window(hf.session("5s"))
    with pytest.raises(PipelineError, match=r"OnAlarm\(\) can't be used with windows that merge"):
        stream.trigger(OnAlarm())


def test_a_trigger_that_raises_or_says_nothing_is_named() -> None:
    class Silent(hf.Trigger):
        def on_record(self, record: Row, at_us: int, window: hf.Window, ctx: Any) -> Any:
            if record["v"] == 2:
                raise ValueError("no")

    with pytest.raises(PipelineError, match="Silent answered None"):
        over(epochs(at(1)), hf.tumbling("10s"), Silent())

    class Loud(Silent):
        def on_record(self, record: Row, at_us: int, window: hf.Window, ctx: Any) -> Any:
            raise ValueError("no")

    with pytest.raises(UserCodeError, match="ValueError: no") as raised:
        over(epochs(at(1)), hf.tumbling("10s"), Loud())
    assert "window: Window[" in str(raised.value.facts())


def test_what_a_trigger_keeps_must_be_small() -> None:
    class Hoarder(hf.Trigger):
        def on_record(self, record: Row, at_us: int, window: hf.Window, ctx: Any) -> hf.Decision:
            ctx.state["all"] = [record]
            return hf.Decision.CONTINUE

    with pytest.raises(PipelineError, match="Hoarder keeps 'all'"):
        over(epochs(at(1)), hf.tumbling("10s"), Hoarder())

    class Vast(hf.Trigger):
        def on_record(self, record: Row, at_us: int, window: hf.Window, ctx: Any) -> hf.Decision:
            ctx.state["much"] = 1 << 63
            return hf.Decision.CONTINUE

    with pytest.raises(PipelineError, match="Vast keeps 'much'"):
        over(epochs(at(1)), hf.tumbling("10s"), Vast())


def test_the_timers_of_a_trigger_are_whole_numbers() -> None:
    class Half(hf.Trigger):
        def on_record(self, record: Row, at_us: int, window: hf.Window, ctx: Any) -> hf.Decision:
            ctx.set_processing_timer(ctx.now_ms + 0.5)
            return hf.Decision.CONTINUE

    with pytest.raises(PipelineError, match="is no time for a trigger's timer"):
        over(epochs(at(1)), hf.tumbling("10s"), Half())
