"""Triggers are state machines over what the operator keeps: here it is a dict and two sets of timers."""

import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import PipelineError
from holdfast.time.merging import merge
from holdfast.time.triggers import (
    Decision,
    Small,
    Trigger,
    continuous_event_time,
    count,
    event_time,
    never,
    processing_time,
    purging,
)
from holdfast.time.units import MAX_TIME, MIN_TIME
from holdfast.time.windows import Window, global_window, session

CONTINUE, FIRE, PURGE, FIRE_AND_PURGE = Decision
WINDOW = Window(0, 100)


@dataclasses.dataclass
class Time:
    """How far the watermark and the clock are, for all windows."""

    watermark_us: int = MIN_TIME
    now_ms: int = 0


@dataclasses.dataclass
class FakeContext:
    """A trigger's context in memory, with its timers to look at."""

    time: Time = dataclasses.field(default_factory=Time)
    state: dict[str, Small] = dataclasses.field(default_factory=dict)
    event_timers: set[int] = dataclasses.field(default_factory=set)
    processing_timers: set[int] = dataclasses.field(default_factory=set)

    @property
    def watermark_us(self) -> int:
        return self.time.watermark_us

    @property
    def now_ms(self) -> int:
        return self.time.now_ms

    def set_event_timer(self, at_us: int) -> None:
        self.event_timers.add(at_us)

    def delete_event_timer(self, at_us: int) -> None:
        self.event_timers.discard(at_us)

    def set_processing_timer(self, at_ms: int) -> None:
        self.processing_timers.add(at_ms)

    def delete_processing_timer(self, at_ms: int) -> None:
        self.processing_timers.discard(at_ms)

    @property
    def is_clear(self) -> bool:
        return not self.event_timers and not self.processing_timers


class Operator:
    """One window of one key under a trigger: what the operator does with it, without the records."""

    def __init__(self, trigger: Trigger, window: Window = WINDOW) -> None:
        self.trigger, self.window, self.ctx = trigger, window, FakeContext()

    def record(self, at_us: int = 0) -> Decision:
        return self.trigger.on_record({}, at_us, self.window, self.ctx)

    def watermark(self, to_us: int) -> list[Decision]:
        """Let the watermark go on, and call what is due."""
        self.ctx.time.watermark_us = to_us
        decisions = []
        while due := sorted(t for t in self.ctx.event_timers if t <= to_us):
            self.ctx.event_timers.discard(due[0])
            decisions.append(self.trigger.on_event_time(due[0], self.window, self.ctx))
            assert len(decisions) < 100, "timers are set for ever"
        return decisions

    def clock(self, to_ms: int) -> list[Decision]:
        """Let the clock go on, and call what is due."""
        self.ctx.time.now_ms = to_ms
        decisions = []
        while due := sorted(t for t in self.ctx.processing_timers if t <= to_ms):
            self.ctx.processing_timers.discard(due[0])
            decisions.append(self.trigger.on_processing_time(due[0], self.window, self.ctx))
            assert len(decisions) < 100, "timers are set for ever"
        return decisions


BUILT_IN = [
    event_time(),
    event_time(early="10s", early_count=3, late_count=2),
    processing_time(),
    count(3),
    continuous_event_time(0.00001),
    never(),
    purging(count(2)),
    purging(event_time(early="1s")),
]


# Event time.


@given(st.lists(st.integers(0, 99), min_size=1, max_size=10), st.lists(st.integers(0, 99), max_size=10))
def test_event_time_fires_once_at_the_end_and_once_for_each_late_record(
    early: list[int], late: list[int]
) -> None:
    operator = Operator(event_time())
    assert [operator.record(at) for at in early] == [CONTINUE] * len(early)
    assert operator.watermark(98) == []
    assert operator.watermark(99) == [FIRE]
    assert [operator.record(at) for at in late] == [FIRE] * len(late)
    assert operator.watermark(1000) == []


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(1, 5), st.integers(1, 5))
def test_however_the_watermark_walks_it_fires_once_for_the_end(
    steps: list[int], early_count: int, late_count: int
) -> None:
    operator = Operator(event_time(early_count=early_count, late_count=late_count))
    watermark, on_time, before, behind = 0, 0, [], []
    for step in steps:
        decision = operator.record()
        (behind if watermark >= WINDOW.last else before).append(decision)
        watermark += step
        on_time += len(operator.watermark(watermark))
    assert on_time == (1 if watermark >= WINDOW.last else 0)
    assert before == [FIRE if n % early_count == 0 else CONTINUE for n in range(1, len(before) + 1)]
    assert behind == [FIRE if n % late_count == 0 else CONTINUE for n in range(1, len(behind) + 1)]


def test_a_record_after_the_end_fires_at_once_even_if_it_is_the_first() -> None:
    operator = Operator(event_time())
    operator.watermark(99)
    assert operator.record(5) is FIRE
    assert operator.ctx.is_clear


@pytest.mark.parametrize("trigger", BUILT_IN, ids=repr)
def test_a_timer_that_a_trigger_did_not_set_is_nothing_to_it(trigger: Trigger) -> None:
    operator = Operator(trigger)
    operator.record(5)
    state = dict(operator.ctx.state)
    assert trigger.on_event_time(77, WINDOW, operator.ctx) is CONTINUE
    assert trigger.on_processing_time(77, WINDOW, operator.ctx) is CONTINUE
    assert operator.ctx.state == state


def test_firing_early_waits_for_a_record_that_no_result_has_seen() -> None:
    operator = Operator(event_time(early="10s"))
    operator.clock(5_000)
    assert operator.record() is CONTINUE
    assert operator.clock(9_000) == []
    assert operator.record() is CONTINUE
    assert operator.clock(14_999) == []
    assert operator.clock(15_000) == [FIRE]
    assert operator.clock(99_000) == []
    assert operator.record() is CONTINUE
    assert operator.clock(109_000) == [FIRE]
    assert operator.watermark(99) == [FIRE]


def test_the_end_makes_an_early_firing_needless() -> None:
    operator = Operator(event_time(early="10s"))
    operator.record()
    assert operator.watermark(99) == [FIRE]
    assert operator.clock(99_000) == []
    assert operator.ctx.is_clear and not operator.ctx.state


def test_early_by_count_and_by_clock_start_anew_with_each_firing() -> None:
    operator = Operator(event_time(early="10s", early_count=2))
    assert [operator.record(), operator.record()] == [CONTINUE, FIRE]
    assert operator.clock(10_000) == []
    assert operator.record() is CONTINUE
    assert operator.clock(20_000) == [FIRE]
    assert [operator.record(), operator.record()] == [CONTINUE, FIRE]


def test_the_global_window_fires_at_the_end_of_time() -> None:
    operator = Operator(event_time(), global_window().WINDOW)
    operator.record()
    assert operator.watermark(MAX_TIME - 2) == []
    assert operator.watermark(MAX_TIME) == [FIRE]


# The others.


@given(st.integers(1, 10), st.integers(0, 40))
def test_count_fires_exactly_for_every_nth(n: int, records: int) -> None:
    operator = Operator(count(n))
    assert [operator.record() for _ in range(records)] == [
        FIRE if i % n == 0 else CONTINUE for i in range(1, records + 1)
    ]
    assert operator.watermark(MAX_TIME) == [] and operator.clock(10**15) == []


@pytest.mark.parametrize(("end_us", "due_ms"), [(5_000, 5), (5_001, 6), (5_999, 6), (-1, 0), (-1_000, -1)])
def test_processing_time_fires_at_the_first_millisecond_that_is_not_in_the_window(
    end_us: int, due_ms: int
) -> None:
    operator = Operator(processing_time(), Window(end_us - 5_000, end_us))
    operator.ctx.time.now_ms = -100
    assert [operator.record(), operator.record()] == [CONTINUE, CONTINUE]
    assert operator.clock(due_ms - 1) == []
    assert operator.clock(due_ms) == [FIRE]
    assert operator.watermark(MAX_TIME) == []


def test_processing_time_never_comes_for_the_global_window() -> None:
    operator = Operator(processing_time(), global_window().WINDOW)
    operator.record()
    assert operator.ctx.is_clear


def test_continuous_event_time_fires_at_each_multiple_with_something_new_and_at_the_end() -> None:
    operator = Operator(continuous_event_time(0.00001))
    assert operator.record(3) is CONTINUE
    assert operator.watermark(8) == []
    assert operator.watermark(9) == [FIRE]
    assert operator.watermark(29) == []
    assert operator.record(35) is CONTINUE
    assert operator.record(31) is CONTINUE
    assert operator.watermark(60) == [FIRE]
    operator.record(95)
    assert operator.watermark(99) == [FIRE]
    assert operator.record(95) is FIRE
    assert operator.ctx.is_clear


def test_continuous_event_time_heeds_an_earlier_record_that_comes_later() -> None:
    operator = Operator(continuous_event_time(0.00001))
    operator.record(55)
    operator.record(12)
    assert operator.watermark(19) == [FIRE]


def test_a_watermark_that_jumps_over_years_fires_once_and_not_for_each_period() -> None:
    operator = Operator(continuous_event_time(0.00001), Window(0, 10**15))
    operator.record(3)
    assert operator.watermark(10**14) == [FIRE]
    operator.record(5)
    assert min(operator.ctx.event_timers) > 10**14
    assert operator.watermark(10**14 + 10) == [FIRE]


def test_never_never_fires() -> None:
    operator = Operator(never())
    assert operator.record() is CONTINUE
    assert operator.watermark(MAX_TIME) == [] and operator.clock(10**15) == []


class Scripted(Trigger):
    """Answers what it is told to."""

    def __init__(self, answer: Decision) -> None:
        self.answer = answer

    def on_record(self, record: dict[str, Any], at_us: int, window: Window, ctx: Any) -> Decision:
        return self.answer

    def on_event_time(self, at_us: int, window: Window, ctx: Any) -> Decision:
        return self.answer

    def on_processing_time(self, at_ms: int, window: Window, ctx: Any) -> Decision:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "purged"),
    [(CONTINUE, CONTINUE), (FIRE, FIRE_AND_PURGE), (PURGE, PURGE), (FIRE_AND_PURGE, FIRE_AND_PURGE)],
)
def test_purging_purges_whenever_the_other_fires(answer: Decision, purged: Decision) -> None:
    trigger, ctx = purging(Scripted(answer)), FakeContext()
    assert trigger.on_record({}, 0, WINDOW, ctx) is purged
    assert trigger.on_event_time(99, WINDOW, ctx) is purged
    assert trigger.on_processing_time(99, WINDOW, ctx) is purged


@given(
    st.sampled_from(
        [count(3), event_time(), event_time(early="1ms", early_count=2), continuous_event_time(0.00001)]
    ),
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 30)), max_size=20),
)
def test_purging_fires_when_the_other_does(trigger: Trigger, steps: list[tuple[int, int]]) -> None:
    plain, purges = Operator(trigger), Operator(purging(trigger))
    watermark = 0
    for at, step in steps:
        watermark += step
        for one, other in (
            ([plain.record(at)], [purges.record(at)]),
            (plain.watermark(watermark), purges.watermark(watermark)),
            (plain.clock(watermark), purges.clock(watermark)),
        ):
            assert [d.fires for d in one] == [d.fires for d in other]
            assert not any(d.purges for d in one)
            assert [d.purges for d in other] == [d.fires for d in other]


# Merging.


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.booleans())
def test_counts_of_windows_that_merge_add_up(counts: list[int], into_new: bool) -> None:
    trigger = count(100)
    contexts = []
    for n in counts:
        ctx = FakeContext()
        for _ in range(n):
            trigger.on_record({}, 0, WINDOW, ctx)
        contexts.append(ctx)
    own = FakeContext() if into_new else contexts.pop(0)
    trigger.on_merge(WINDOW, own, contexts)
    assert own.state.get("n", 0) == sum(counts)


def test_counts_that_are_enough_together_fire_with_the_record_that_made_them_merge() -> None:
    trigger, left, right, ctx = count(4), FakeContext(), FakeContext(), FakeContext()
    for each in (left, left, left, right, right):
        assert trigger.on_record({}, 0, WINDOW, each) is CONTINUE
    trigger.on_merge(WINDOW, ctx, [left, right])
    assert trigger.on_record({}, 0, WINDOW, ctx) is FIRE
    assert ctx.state == {}


class Sessions:
    """One key under a trigger, with windows that merge as the contract of `on_merge` says."""

    def __init__(self, trigger: Trigger, gap: float) -> None:
        self.trigger, self.assigner, self.time = trigger, session(gap), Time()
        self.open: dict[Window, FakeContext] = {}

    def record(self, at_us: int) -> tuple[Window, Decision]:
        (new,) = self.assigner.assign(at_us, {})
        whole, parts = next(m for m in merge([*self.open, *({new} - set(self.open))]) if new in m[1])
        gone = [w for w in parts if w in self.open and w != whole]
        ctx = self.open.setdefault(whole, FakeContext(self.time))
        if gone:
            self.trigger.on_merge(whole, ctx, [self.open[w] for w in gone])
        for window in gone:
            self.trigger.clear(window, self.open[window])
            assert self.open.pop(window).is_clear
        return whole, self.trigger.on_record({}, at_us, whole, ctx)

    def watermark(self, to_us: int) -> list[Window]:
        self.time.watermark_us = to_us
        fired = []
        for window, ctx in self.open.items():
            for at in sorted(t for t in ctx.event_timers if t <= to_us):
                ctx.event_timers.discard(at)
                if self.trigger.on_event_time(at, window, ctx).fires:
                    fired.append(window)
        return fired


@given(st.lists(st.integers(0, 200), min_size=1, max_size=20), st.integers(1, 30))
def test_each_merged_session_fires_once_when_the_watermark_passes_its_end(times: list[int], gap: int) -> None:
    sessions = Sessions(event_time(), gap / 10**6)
    assert {sessions.record(at)[1] for at in times} == {CONTINUE}
    expected = [whole for whole, _ in merge([Window(at, at + gap) for at in times])]
    assert sorted(sessions.open) == expected
    fired = [w for watermark in range(250) for w in sessions.watermark(watermark)]
    assert sorted(fired) == expected


def test_a_late_record_that_joins_two_sessions_fires_at_once() -> None:
    sessions = Sessions(event_time(), 0.00001)
    sessions.record(0)
    sessions.record(15)
    assert len(sessions.watermark(30)) == 2
    assert sessions.record(8) == (Window(0, 25), FIRE)


def test_a_late_record_that_joins_an_open_session_waits_for_its_end() -> None:
    sessions = Sessions(event_time(), 0.00001)
    sessions.record(0)
    sessions.record(18)
    assert sessions.watermark(12) == [Window(0, 10)]
    assert sessions.record(9) == (Window(0, 28), CONTINUE)
    assert sessions.watermark(27) == [Window(0, 28)]


def test_merged_windows_fire_early_when_the_first_of_them_would_have() -> None:
    trigger = event_time(early="10s")
    time = Time(now_ms=1_000)
    first, second, ctx = FakeContext(time), FakeContext(time), FakeContext(time)
    trigger.on_record({}, 0, Window(0, 50), first)
    time.now_ms = 4_000
    trigger.on_record({}, 60, Window(60, 100), second)
    trigger.on_merge(WINDOW, ctx, [second, first])
    for window, old in ((Window(0, 50), first), (Window(60, 100), second)):
        trigger.clear(window, old)
        assert old.is_clear
    assert ctx.processing_timers == {11_000} and ctx.event_timers == {99}
    assert trigger.on_processing_time(11_000, WINDOW, ctx) is FIRE


def test_a_window_that_takes_in_another_keeps_one_timer_for_firing_early() -> None:
    trigger = event_time(early="10s")
    time = Time(now_ms=1_000)
    small, large = FakeContext(time), FakeContext(time)
    trigger.on_record({}, 0, Window(0, 10), small)
    time.now_ms = 4_000
    trigger.on_record({}, 0, WINDOW, large)
    trigger.on_merge(WINDOW, large, [small])
    assert large.processing_timers == {11_000}


@pytest.mark.parametrize("trigger", BUILT_IN, ids=repr)
@given(steps=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 30)), max_size=12))
def test_clear_leaves_no_timer_behind(trigger: Trigger, steps: list[tuple[int, int]]) -> None:
    operator = Operator(trigger)
    watermark = 0
    for at, step in steps:
        operator.record(at)
        watermark += step
        operator.watermark(watermark)
    trigger.clear(WINDOW, operator.ctx)
    assert operator.ctx.is_clear


@pytest.mark.parametrize("trigger", BUILT_IN, ids=repr)
def test_what_is_built_in_merges_keeps_nothing_in_itself_and_travels(trigger: Trigger) -> None:
    assert trigger.can_merge
    before = pickle.dumps(trigger)
    operator = Operator(trigger)
    for at in range(0, 90, 10):
        operator.record(at)
        operator.clock(at * 1000)
        operator.watermark(at)
    trigger.on_merge(WINDOW, FakeContext(), [operator.ctx])
    assert pickle.dumps(trigger) == before
    assert pickle.loads(before) == trigger
    assert all(isinstance(v, (int, float, str, bool)) for v in operator.ctx.state.values())


def test_a_trigger_that_can_t_merge_says_so() -> None:
    trigger = Scripted(FIRE)
    assert not trigger.can_merge and not purging(trigger).can_merge
    with pytest.raises(PipelineError, match="Scripted can't be used with windows that merge") as error:
        purging(trigger).on_merge(WINDOW, FakeContext(), [])
    assert "on_merge" in (error.value.remedy or "")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: count(0), "n is 0"),
        (lambda: count(2.5), "n is 2.5"),
        (lambda: count(True), "n is True"),
        (lambda: event_time(early="0s"), "early is '0s'"),
        (lambda: event_time(early="soon"), "early: 'soon' is not a duration"),
        (lambda: event_time(early="10us"), "counted in milliseconds"),
        (lambda: event_time(early_count=0), "early_count is 0"),
        (lambda: event_time(late_count=0), "late_count is 0"),
        (lambda: continuous_event_time(0), "every is 0"),
    ],
)
def test_what_makes_no_trigger_is_refused_with_a_remedy(make: Any, says: str) -> None:
    with pytest.raises(PipelineError, match=says) as error:
        make()
    assert error.value.remedy


def test_triggers_are_told_apart_by_what_they_were_made_with() -> None:
    assert event_time() == event_time() != event_time(early="1s")
    assert purging(count(2)) == purging(count(2)) != purging(count(3))
    assert hash(purging(count(2))) == hash(purging(count(2)))
