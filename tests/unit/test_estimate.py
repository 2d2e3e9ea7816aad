"""What is known of recovery times, and what is decided from it: no Spark, no clock."""

import math
import random

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.config import resolve
from holdfast.engine.session import notice_of, timeouts
from holdfast.faults.kinds import Fault
from holdfast.recovery.chance import Guess, Linear, Prior, Sum, t_quantile
from holdfast.recovery.decide import Outlook, _limit, decide, lead_epochs, least_epoch
from holdfast.recovery.estimate import (
    Bounds,
    History,
    Learned,
    Memory,
    Notice,
    Situation,
    covered,
    detection,
    environment,
    estimate,
    estimates,
    replaying,
    worst,
)

NOTICE = Notice(worker_s=14.0, executor_s=10.0, executor_check_s=2.0, driver_s=10.0, host_s=8.0)
SURE = 0.999


@pytest.mark.parametrize(
    ("confidence", "df", "value"),
    [
        (0.95, 1, 6.314),
        (0.975, 4, 2.776),
        (0.99, 10, 2.764),
        (0.995, 5, 4.032),
        (0.999, 4, 7.173),
        (0.999, 30, 3.385),
        (0.9995, 20, 3.850),
    ],
)
def test_quantiles_are_those_of_the_tables(confidence: float, df: float, value: float) -> None:
    assert t_quantile(confidence, df) == pytest.approx(value, abs=1e-3)


@given(st.floats(0.5, 0.9999), st.floats(1, 200), st.floats(0, 50))
def test_quantiles_fall_with_what_was_seen_and_rise_with_confidence(
    confidence: float, df: float, more: float
) -> None:
    here = t_quantile(confidence, df)
    assert t_quantile(confidence, df + more) <= here + 1e-6
    assert t_quantile(confidence + (1 - confidence) / 2, df) >= here - 1e-6
    assert t_quantile(confidence, df + 0.1) <= here + 1e-6


guesses = st.builds(Guess, st.floats(0, 100), st.floats(0, 100), st.floats(2, 200), st.floats(0, 30))


@given(st.lists(guesses, min_size=1, max_size=6), st.floats(0.5, 0.9999))
def test_the_bound_of_a_sum_lies_between_the_largest_and_the_sum_of_bounds(
    parts: list[Guess], confidence: float
) -> None:
    alone = [part.bound(confidence) for part in parts]
    together = Sum(tuple(parts)).bound(confidence)
    assert max(alone) - 1e-6 <= together <= sum(alone) + 1e-6


times = st.lists(st.tuples(st.integers(0, 500_000), st.floats(0.001, 60, allow_subnormal=False)), max_size=30)


@given(times)
def test_weights_are_never_negative_and_more_work_never_takes_less(seen: list[tuple[int, float]]) -> None:
    model = Linear(Prior([0.15, 4e-6], [1.0, 1.0], df=4))
    for records, seconds in seen:
        model.learn([1.0, float(records)], seconds)
    assert min(model.weights) >= 0
    few, many = model.predict([1.0, 1000.0]), model.predict([1.0, 2000.0])
    assert few.mean <= many.mean and few.bound(SURE) <= many.bound(SURE)
    assert few.variance > 0 and math.isfinite(many.bound(SURE))


@pytest.mark.parametrize("seconds", [0.2, 1.0, 5.0, 30.0])
def test_a_steady_time_narrows_its_bound(seconds: float) -> None:
    model = Linear(Prior([5.0], [0.5], noise=0.2, df=6, keep=0.95))
    excess = []
    for _ in range(40):
        model.learn([1.0], seconds)
        guess = model.predict([1.0])
        excess.append((guess.bound(SURE) - seconds) / seconds)
    assert excess[4] > excess[14] > excess[39] > 0
    assert model.predict([1.0]).mean == pytest.approx(seconds, rel=0.1)


def test_records_that_take_far_longer_than_thought_before_are_learned_all_the_same() -> None:
    """The prior weighed as much as all that was seen: the estimate stayed a third too low for ever."""
    learned = Learned()
    for records in (1000, 5000, 20_000) * 10:
        learned.epoch.learn([1.0, float(records)], 0.1 + records * 1e-4)
    assert learned.epoch.predict([1.0, 10_000.0]).mean == pytest.approx(1.1, rel=0.05)


@settings(max_examples=40)
@given(times, st.integers(0, 10**9))
def test_what_was_learned_comes_back_from_its_file_the_same(seen: list[tuple[int, float]], size: int) -> None:
    learned = Learned()
    for records, seconds in seen:
        learned.epoch.learn([1.0, float(records)], seconds)
        learned.recovered(Fault.EXECUTOR_KILL, seconds)
    learned.outcomes.add("7")
    again = Learned(msgspec.json.decode(msgspec.json.encode(learned.memory()), type=Memory))
    there = Situation(History(30, 60_000), 2000, size, 5, size, size)
    faults = covered(NOTICE)
    assert estimates(there, again, NOTICE, faults) == estimates(there, learned, NOTICE, faults)
    assert again.outcomes == {"7"} and again.times_seen(Fault.EXECUTOR_KILL) == len(seen)


histories = st.builds(History, st.integers(0, 3000), st.integers(0, 5_000_000))


@settings(max_examples=60)
@given(times, histories, st.integers(0, 2000), st.integers(0, 3_000_000), st.integers(0, 100_000))
def test_more_history_and_more_planned_never_lower_estimate_or_bound(
    seen: list[tuple[int, float]], history: History, epochs: int, records: int, planned: int
) -> None:
    learned = Learned()
    for had, seconds in seen:
        learned.epoch.learn([1.0, float(had)], seconds)
        learned.replay.learn(learned.replay_features(History(1 + had % 7, had)), seconds)
    little, much = Situation(history), Situation(history.and_(epochs, records), planned)
    for fault in Fault:
        less, more = (estimate(fault, s, learned, NOTICE) for s in (little, much))
        assert less.sum.mean <= more.sum.mean + 1e-9
        assert less.bound(SURE) <= more.bound(SURE) + 1e-9


@settings(max_examples=60)
@given(times, histories, st.floats(0, 1), st.floats(0, 1))
def test_more_shards_that_are_lost_never_lower_estimate_or_bound(
    seen: list[tuple[int, float]], history: History, one: float, other: float
) -> None:
    learned = Learned()
    for had, seconds in seen:
        learned.replay.learn(learned.replay_features(History(1 + had % 7, had), had % 5 / 4), seconds)
    few, many = (Situation(history, share=share) for share in sorted((one, other)))
    less, more = (estimate(Fault.HOST, s, learned, NOTICE) for s in (few, many))
    assert less.sum.mean <= more.sum.mean + 1e-9
    assert less.bound(SURE) <= more.bound(SURE) + 1e-9


def test_what_was_learned_with_half_of_the_shards_lost_is_not_taken_for_what_all_of_them_take() -> None:
    """Shards that had gathered on one host took twice as long to replay as was learned when two hosts had them."""
    learned, history = Learned(), History(100, 1_000_000)
    for _ in range(20):
        learned.epoch.learn([1.0, 10_000.0], 0.15 + 10_000 * 2e-5)
        learned.computed(10_000 * 2e-5, 10_000)
        learned.replay.learn(learned.replay_features(history, 0.5), 0.2 + 1_000_000 * 2e-5 * 0.5)
    half, all_ = (
        estimate(Fault.HOST, Situation(history, share=share), learned, NOTICE) for share in (0.5, 1.0)
    )
    assert half.recomputing.mean == pytest.approx(10.2, rel=0.15)
    assert all_.recomputing.mean > 1.5 * half.recomputing.mean
    assert all_.bound(SURE) > 20.2


@settings(max_examples=60)
@given(
    histories,
    st.integers(0, 500_000),
    st.none() | st.integers(0, 500_000),
    st.integers(0, 10**10),
    st.booleans(),
)
def test_many_bounds_at_once_are_those_of_single_estimates(
    history: History, planned: int, usual: int | None, size: int, local: bool
) -> None:
    learned, notice = Learned(), msgspec.structs.replace(NOTICE, local=local)
    learned.recovered(Fault.EXECUTOR_KILL, 3.0)
    there = Situation(history, planned, size, size % 50, size // 4, size // 2, usual)
    faults = covered(notice)
    expected = worst(estimates(there, learned, notice, faults), SURE).bound(SURE)
    assert Bounds(there, learned, notice, faults, SURE)(history, planned) == pytest.approx(expected)


@settings(max_examples=60)
@given(st.integers(0, 500_000), st.integers(0, 500_000))
def test_an_estimate_counts_a_usual_epoch_and_a_bound_the_largest(planned: int, usual: int) -> None:
    learned = Learned()
    learned.epoch.learn([1.0, 100_000.0], 0.8)
    there = Situation(planned=planned)
    largest = estimate(Fault.WORKER_KILL, there, learned, NOTICE)
    as_usual = estimate(Fault.WORKER_KILL, msgspec.structs.replace(there, usual=usual), learned, NOTICE)
    assert as_usual.bound(SURE) == pytest.approx(largest.bound(SURE))
    counted = learned.epoch.predict([1.0, float(min(planned, usual))]).mean
    assert as_usual.recomputing.mean == pytest.approx(counted)


def test_an_estimate_counts_epochs_as_they_are_of_late_and_a_bound_as_they_have_been() -> None:
    """After a driver's start they are slow; that stays in the mean long after they are fast again."""
    learned, fast = Learned(), Learned()
    for took_s in [*[1.2] * 20, *[0.5] * 5]:
        learned.ran(50_000, took_s)
        fast.epoch.learn([1.0, 50_000.0], took_s)
    there = Situation(planned=50_000)
    late, mean = (estimate(Fault.WORKER_KILL, there, known, NOTICE) for known in (learned, fast))
    assert late.recomputing.mean == pytest.approx(0.5, rel=0.2) and mean.recomputing.mean > 0.8
    assert late.bound(SURE) == pytest.approx(mean.bound(SURE))
    kept = Learned(learned.memory())
    assert estimate(Fault.WORKER_KILL, there, kept, NOTICE).sum.mean == pytest.approx(late.sum.mean)
    for _ in range(5):
        learned.ran(50_000, 3.0)
    slow = estimate(Fault.WORKER_KILL, there, learned, NOTICE)
    assert slow.recomputing.mean == pytest.approx(learned.epoch.predict([1.0, 50_000.0]).mean), (
        "never over it"
    )


def test_only_a_lost_host_depends_on_history() -> None:
    long = Situation(History(500, 10**6), 100, 10**9)
    short = msgspec.structs.replace(long, history=History())
    for fault in Fault:
        differs = estimate(fault, long, Learned(), NOTICE) != estimate(fault, short, Learned(), NOTICE)
        assert differs == (fault is Fault.HOST)


def test_what_nothing_notices_is_not_covered() -> None:
    blind = Notice(worker_s=None, executor_s=None, executor_check_s=1.0, driver_s=None)
    assert covered(blind) == [Fault.WORKER_KILL, Fault.EXECUTOR_KILL, Fault.HOST]
    assert covered(NOTICE) == list(Fault)
    local = covered(msgspec.structs.replace(NOTICE, local=True))
    assert Fault.EXECUTOR_KILL not in local and Fault.EXECUTOR_FREEZE not in local
    assert Fault.DRIVER_FREEZE in local


def test_silence_is_noticed_as_late_as_the_settings_say() -> None:
    assert detection(Fault.EXECUTOR_FREEZE, NOTICE).bound(SURE) == 14.0
    assert detection(Fault.DRIVER_FREEZE, NOTICE).bound(SURE) == 10.5
    assert detection(Fault.DRIVER_KILL, NOTICE).bound(SURE) < 1


def test_what_tasks_try_to_fetch_from_a_silent_executor_takes_is_counted() -> None:
    """A frozen executor takes connections: with Spark's three retries it held a stage up for a quarter of a minute."""
    others = {"local": False, "supervised_s": 5.0, "wait_for_home_s": 3.0}
    spark = {"spark.network.timeout": "6s", "spark.network.timeoutInterval": "1s"}
    assert notice_of(spark, **others).fetch_s == 6 + 3 * (6 + 5)
    ours = timeouts(resolve({"executor_timeout": "6s"}, environment={}).settings)
    notice = notice_of(ours, **others)
    assert notice.fetch_s == 3.0
    assert detection(Fault.EXECUTOR_FREEZE, notice).bound(SURE) == 6 + 2 * 1 + 3
    assert detection(Fault.EXECUTOR_KILL, notice).bound(SURE) < 1


# Deciding


def bounds_of(each_s: float = 4e-6, fixed_s: float = 0.15) -> Bounds:
    """The bound of a pipeline that has seen a few epochs and replays."""
    learned = Learned()
    for records in (100, 2000, 10_000, 40_000) * 8:
        learned.epoch.learn([1.0, float(records)], fixed_s + records * each_s)
        history = History(20, 20 * records)
        learned.replay.learn(learned.replay_features(history), 0.3 + 20 * records * each_s)
    there = Situation(stored_bytes=10**7, shard_bytes=10**6, host_bytes=10**6)
    return Bounds(there, learned, NOTICE, list(Fault), SURE)


SLOW = bounds_of(each_s=2e-5)
FLOOR_S = SLOW(History(), 0)

outlooks = st.builds(
    Outlook,
    deadline_s=st.floats(FLOOR_S * 0.9, FLOOR_S + 120),
    history=st.builds(History, st.integers(0, 2000), st.integers(0, 3_000_000)),
    epoch_s=st.floats(0.05, 10),
    epoch_records=st.integers(0, 200_000),
    max_records=st.just(500_000),
    backup_s=st.floats(0.1, 60),
    uploading=st.one_of(st.none(), st.integers(0, 50)),
    mean_records=st.one_of(st.none(), st.floats(0, 200_000)),
    usual_records=st.one_of(st.none(), st.integers(0, 200_000)),
)


@settings(max_examples=300)
@given(outlooks)
@example(
    Outlook(
        deadline_s=FLOOR_S + 30,
        history=History(900, 900_000),
        epoch_s=0.5,
        epoch_records=1000,
        max_records=500_000,
        backup_s=2.0,
    )
)
def test_a_decision_backs_up_only_when_waiting_is_not_safe_and_limits_to_what_fits(outlook: Outlook) -> None:
    made = decide(outlook, SLOW)
    wait = lead_epochs(outlook) + 1
    most = outlook.max_records if made.limit is None else made.limit
    alone = _limit(outlook, SLOW)  # whatever the history
    size = max(1, min(outlook.epoch_records, outlook.max_records if alone is None else alone))
    if outlook.uploading is not None:
        assert not made.back_up
    elif made.feasible:
        mean = size if outlook.mean_records is None else min(size, outlook.mean_records)
        passed = max(size, math.ceil(wait * mean))
        later = SLOW(outlook.history.and_(wait, passed), size)
        assert made.back_up == (outlook.history.epochs > 0 and later > outlook.deadline_s)
    if not made.feasible:
        assert not made.pause and SLOW(History(1, 1), 1) > outlook.deadline_s
        return
    assert 1 <= most <= outlook.max_records
    assert SLOW(History(1, most), most) <= outlook.deadline_s, "alone, with a pause"
    after = outlook.history.and_(1, most)
    if not made.pause and outlook.history.epochs:
        holds = SLOW(outlook.history, most) <= outlook.deadline_s and SLOW(after, 0) <= outlook.deadline_s
        assert holds, "beside the history that there is"
    if made.pause:
        assert made.back_up or outlook.uploading is not None, "nobody waits for nothing"
        usual = size if outlook.usual_records is None else max(1, min(outlook.usual_records, size))
        crosses = max(SLOW(outlook.history, usual), SLOW(outlook.history.and_(1, usual), 0))
        assert crosses > outlook.deadline_s, "nor while a usual epoch has room"
    always = SLOW(History(wait, wait * outlook.max_records), outlook.max_records) <= outlook.deadline_s
    now = max(
        SLOW(outlook.history, outlook.max_records), SLOW(outlook.history.and_(1, outlook.max_records), 0)
    )
    if always and now <= outlook.deadline_s:
        assert made.limit is None and not made.pause


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.floats(2, 60), st.floats(0.3, 20), st.booleans())
@example(seed=1, above_s=25.0, backup_s=1.0, fails=True)
def test_the_bound_never_passes_the_deadline_with_one_failed_backup_and_any_epochs(
    seed: int, above_s: float, backup_s: float, fails: bool
) -> None:
    """Quiet and busy stretches with bursts; each upload takes what it may; the decider pauses, cuts and backs up."""
    draw, level = random.Random(seed), 8000
    deadline_s = FLOOR_S + above_s
    history, uploading = History(), None
    recent = [0]
    now_s, begun, gaps = 0.0, 0, [0.5]
    limit = decide(Outlook(deadline_s, history, 0.5, 0, 500_000, backup_s), SLOW).limit
    for _ in range(150):
        if draw.random() < 0.05:
            level = draw.choice([0, 1000, 8000, 20_000])
        waiting = draw.randrange(level // 2, level + 50) if draw.random() > 0.03 else 500_000
        records = min(waiting, 500_000 if limit is None else limit)
        assert SLOW(history, records) <= deadline_s + 1e-9, "while it runs"
        gaps.append(draw.choice([0.2, 0.5, 3.0]))
        now_s += gaps[-1]
        history, recent = history.and_(1, records), [*recent, records][-20:]
        for _ in range(1000):
            if uploading is not None and uploading[1] <= now_s:
                before, _, failed = uploading
                uploading = None
                if not failed:
                    history = History(history.epochs - before.epochs, history.records - before.records)
            assert SLOW(history, 0) <= deadline_s + 1e-9, "when it is history"
            outlook = Outlook(
                deadline_s,
                history,
                epoch_s=sum(gaps[-20:]) / len(gaps[-20:]),
                epoch_records=max(recent),
                max_records=500_000,
                backup_s=backup_s,
                uploading=None if uploading is None else history.epochs - uploading[0].epochs,
                mean_records=sum(recent) / len(recent),
                usual_records=sorted(recent[-3:])[len(recent[-3:]) // 2],
            )
            made = decide(outlook, SLOW)
            if not made.feasible:
                assert SLOW(History(1, 1), 1) > deadline_s
                return
            if made.back_up:
                assert uploading is None, "never two at once"
                failed = fails and begun == draw.randrange(3)
                uploading, begun = (history, now_s + draw.uniform(0.1, backup_s), failed), begun + 1
            limit = made.limit
            if not made.pause:
                break
            assert uploading is not None
            now_s = uploading[1]
        else:
            pytest.fail("paused for ever")


def test_after_a_burst_epochs_are_cut_where_a_usual_one_has_room_and_nothing_is_paused() -> None:
    """Intake stopped for a whole upload, though what came was small: one of the last twenty epochs had been large."""
    deadline_s = SLOW(History(60, 1_000_000), 50_000)
    outlook = Outlook(
        deadline_s, History(59, 999_000), 0.5, 400_000, 500_000, 2.0, uploading=2, usual_records=1000
    )
    made = decide(outlook, SLOW)
    assert not made.pause and made.limit is not None and 1000 <= made.limit < 400_000
    assert decide(msgspec.structs.replace(outlook, usual_records=None), SLOW).pause


def test_what_built_up_during_a_recovery_is_not_taken_for_what_comes() -> None:
    """One large epoch among the recent ones, and it backed up as if all the next were as large."""
    deadline_s = SLOW(History(40, 800_000), 100_000)
    outlook = Outlook(deadline_s, History(5, 180_000), 0.5, 100_000, 500_000, backup_s=2.0, mean_records=9000)
    assert not decide(outlook, SLOW).back_up
    assert decide(msgspec.structs.replace(outlook, mean_records=None), SLOW).back_up
    assert decide(msgspec.structs.replace(outlook, mean_records=90_000), SLOW).back_up


def test_a_burst_beside_a_long_history_is_cut_to_what_fits() -> None:
    """It was let through whole: alone it fits, and nothing asked for the history that had built up."""
    deadline_s = SLOW(History(1, 500_000), 500_000) + 20
    history = History(1, 1000)
    while SLOW(history.and_(8, 8000), 1000) <= deadline_s:
        history = history.and_(1, 1000)
    outlook = Outlook(deadline_s, history, 0.5, 1000, 500_000, backup_s=0.5)
    made = decide(outlook, SLOW)
    assert SLOW(history, 500_000) > deadline_s
    assert made.limit is not None and 1000 <= made.limit < 500_000
    assert SLOW(history, made.limit) <= deadline_s


def test_where_only_pauses_help_epochs_are_still_as_large_as_they_may_be() -> None:
    """They were cut to one record each."""
    deadline_s = SLOW(History(1, 50_000), 50_000)
    outlook = Outlook(deadline_s, History(), 0.1, 1000, 500_000, backup_s=600.0)
    made = decide(outlook, SLOW)
    assert made.feasible and made.limit is not None and 45_000 <= made.limit <= 50_000


def test_where_the_deadline_can_not_be_held_backups_are_made_only_where_they_help() -> None:
    """They were made as fast as they came, though the driver's own restart was what took too long."""
    learned = Learned()
    there = Situation(stored_bytes=10**7)
    slow_driver = Bounds(there, learned, msgspec.structs.replace(NOTICE, driver_s=60.0), list(Fault), SURE)
    outlook = Outlook(50.0, History(5, 5000), 0.5, 1000, 500_000, backup_s=1.0)
    made = decide(outlook, slow_driver)
    assert not made.feasible and not made.back_up
    long = msgspec.structs.replace(outlook, history=History(20_000, 20_000_000))
    assert decide(long, slow_driver).back_up, "before history makes it worse still"
    lost_host = Bounds(there, learned, msgspec.structs.replace(NOTICE, host_s=60.0), [Fault.HOST], SURE)
    assert not decide(outlook, lost_host).back_up, "for a tenth of a second"
    assert decide(long, lost_host).back_up


def test_a_fault_that_takes_too_long_does_not_keep_others_from_being_held() -> None:
    """With a driver that starts too slowly, no backup was made, and a lost host took three times the deadline."""
    learned, deadline_s = Learned(), 70.0
    notice = msgspec.structs.replace(NOTICE, driver_s=80.0)
    bounds = Bounds(Situation(stored_bytes=10**7), learned, notice, list(Fault), SURE)
    within, beyond = bounds.parted(deadline_s)
    assert within is not None and beyond is not None
    outlook = Outlook(deadline_s, History(), 0.5, 1000, 500_000, backup_s=1.0)
    backups, epochs = 0, 20_000
    for _ in range(epochs):
        outlook = msgspec.structs.replace(outlook, history=outlook.history.and_(1, 1000))
        made = decide(outlook, within, beyond)
        assert not made.feasible and not made.pause
        if made.back_up:
            backups += 1
            outlook = msgspec.structs.replace(outlook, history=History())
        assert within(outlook.history, 1000) <= deadline_s
    assert 1 <= backups < epochs / 100


@given(st.floats(1, 200), st.integers(0, 2000), st.integers(0, 100_000))
def test_faults_are_parted_by_what_a_deadline_leaves_room_for(
    deadline_s: float, epochs: int, planned: int
) -> None:
    there = Situation(stored_bytes=10**8, shard_bytes=10**6, host_bytes=10**7)
    single = [Bounds(there, Learned(), NOTICE, [fault], SURE) for fault in Fault]
    history = History(epochs, 1000 * epochs)
    within, beyond = Bounds(there, Learned(), NOTICE, list(Fault), SURE).parted(deadline_s)
    for part, wanted in ((within, True), (beyond, False)):
        of = [b(history, planned) for b in single if (b(History(1, 1), 1) <= deadline_s) is wanted]
        assert (part is None) is (not of)
        if part is not None:
            assert part(history, planned) == pytest.approx(max(of))


def test_steady_small_epochs_say_little_about_large_ones() -> None:
    """After many of ten records, a hundred thousand were bounded by less than a second more than their mean."""
    learned = Learned()
    before = learned.epoch.predict([1.0, 100_000.0])
    for _ in range(199):
        learned.epoch.learn([1.0, 10.0], 0.16)
    after = learned.epoch.predict([1.0, 100_000.0])
    assert after.variance >= 0.7 * before.variance
    assert learned.epoch.predict([1.0, 10.0]).bound(SURE) < 0.3, "what was seen is known well"


def test_executors_that_are_slow_to_start_are_counted_on_before_one_dies() -> None:
    learned = Learned()
    usual = {f: learned.environment(f).mean for f in Fault}
    learned.executors_started(4.0)
    assert {f: learned.environment(f).mean for f in Fault} == usual, "as quick as thought"
    learned.executors_started(120.0)
    for fault in (Fault.EXECUTOR_KILL, Fault.EXECUTOR_FREEZE, Fault.HOST):
        assert 90 < learned.environment(fault).mean < 160
        assert learned.environment(fault).bound(SURE) > 120
    assert learned.environment(Fault.WORKER_KILL).mean == usual[Fault.WORKER_KILL]
    assert Learned(learned.memory()).environment(Fault.HOST) == learned.environment(Fault.HOST)


def test_what_a_supervisor_waits_is_counted_for_all_faults_of_the_driver() -> None:
    waits = msgspec.structs.replace(NOTICE, restart_s=30.0)
    for fault in Fault:
        more = estimate(fault, Situation(), Learned(), waits).sum.mean
        less = estimate(fault, Situation(), Learned(), NOTICE).sum.mean
        of_driver = fault in (Fault.DRIVER_KILL, Fault.DRIVER_FREEZE, Fault.APPLICATION)
        assert more - less == pytest.approx(30.0 if of_driver else 0.0)


def stepped(outlook: Outlook, size: int, epochs: int) -> float:
    """The largest bound if a backup is begun so many epochs from now, fails and is made again: step by step in time."""
    worst_s, now_s, history = 0.0, 0.0, outlook.history
    begun_s = epochs * outlook.epoch_s
    through_s = begun_s + outlook.backup_s + outlook.retry_s + outlook.backup_s
    while now_s + outlook.epoch_s <= through_s + 1e-9:
        worst_s = max(worst_s, SLOW(history, size))
        now_s, history = now_s + outlook.epoch_s, history.and_(1, size)
    return max(worst_s, SLOW(history, size))


@settings(max_examples=100)
@given(st.floats(5, 100), st.integers(100, 20_000), st.floats(0.1, 5), st.floats(0.1, 30))
def test_the_first_epoch_that_is_backed_up_is_the_first_at_which_waiting_is_not_safe(
    above_s: float, size: int, epoch_s: float, backup_s: float
) -> None:
    """Against time that passes step by step, and not against the decider's own formula."""

    def at(epochs: int) -> Outlook:
        return Outlook(FLOOR_S + above_s, History(epochs, epochs * size), epoch_s, size, size, backup_s)

    waits, backs_up = 0, 20_000
    while backs_up - waits > 1:
        middle = (waits + backs_up) // 2
        waits, backs_up = (waits, middle) if decide(at(middle), SLOW).back_up else (middle, backs_up)
    if backs_up < 20_000:
        assert stepped(at(backs_up), size, 3) > FLOOR_S + above_s, "sooner than needed"
    if waits > 0:
        assert stepped(at(waits), size, 1) <= FLOOR_S + above_s, "too late"


@pytest.mark.parametrize("seen", [0, 1, 3, 20])
@pytest.mark.parametrize(("noise", "share"), [(0.05, 0.99), (0.15, 0.98), (0.3, 0.9)])
def test_bounds_hold_about_as_often_as_they_say_for_times_that_are_skewed(
    seen: int, noise: float, share: float
) -> None:
    """Log-normal times of pipelines that are not alike. Where starts differ by a third from one to the next, a 99% bound
    is passed more often than it says: the guide tells so."""
    draw, under, trials = random.Random(seen), 0, 600
    for _ in range(trials):
        usual_s = 9.0 * math.exp(draw.gauss(0, 0.2))
        learned = Learned()
        for _ in range(seen):
            learned.recovered(Fault.HOST, usual_s * math.exp(draw.gauss(0, noise)))
        bound_s = learned.environment(Fault.HOST).bound(0.99)
        under += usual_s * math.exp(draw.gauss(0, noise)) <= bound_s
    assert under / trials >= share


@given(
    st.sampled_from(list(Fault)), st.lists(st.tuples(st.sampled_from(list(Fault)), st.floats(0.01, 200.0)))
)
def test_an_estimate_may_be_below_the_mean_and_takes_nothing_off_the_bound(
    fault: Fault, seen: list[tuple[Fault, float]]
) -> None:
    learned = Learned()
    for one, took_s in seen:
        learned.recovered(one, took_s)
    mean, guess = (
        learned.environment(fault),
        environment(learned, fault, msgspec.structs.replace(NOTICE, host_s=0.0)),
    )
    assert guess.mean <= mean.mean + 1e-9
    assert guess.bound(SURE) == pytest.approx(mean.bound(SURE))
    kept = Learned(msgspec.json.decode(msgspec.json.encode(learned.memory()), type=Memory))
    assert environment(kept, fault, NOTICE) == environment(learned, fault, NOTICE)


def test_where_a_recovery_now_and_then_takes_far_longer_the_estimate_is_what_it_takes_most_times() -> None:
    """An executor that dies in the middle of a job costs a second run of it: the mean was off by a third each time."""
    learned, errors = Learned(), {"mean": 0.0, "estimate": 0.0}
    for took_s in [2.3, 2.5, 7.2, 2.4, 4.3, 2.2, 2.5, 2.4, 4.2, 2.3] * 4:
        errors["mean"] += abs(learned.environment(Fault.EXECUTOR_KILL).mean - took_s) / took_s
        errors["estimate"] += abs(environment(learned, Fault.EXECUTOR_KILL, NOTICE).mean - took_s) / took_s
        learned.recovered(Fault.EXECUTOR_KILL, took_s)
    assert errors["estimate"] < 0.85 * errors["mean"]


def test_what_an_older_directory_knows_of_the_mean_is_its_estimate_until_it_has_learned_more() -> None:
    old = Learned()
    for _ in range(5):
        old.recovered(Fault.HOST, 30.0)
    memory = old.memory()
    before = {name: seen for name, seen in memory.seen.items() if not name.startswith("likely.")}
    known = Learned(msgspec.structs.replace(memory, seen=before))
    assert known.likely_s(Fault.HOST) == known.environment(Fault.HOST).mean > 20


def _steady() -> Learned:
    """Drivers stand again after ten seconds, executors after three, hosts after eight."""
    learned = Learned()
    for _ in range(12):
        learned.recovered(Fault.DRIVER_KILL, 10.0)
        learned.recovered(Fault.EXECUTOR_KILL, 3.0)
        learned.recovered(Fault.HOST, 8.0)
    return learned


def test_a_machine_that_has_become_slow_is_slow_for_faults_that_were_not_seen_since() -> None:
    learned = _steady()
    before_s, bound_s = (
        learned.likely_s(Fault.DRIVER_KILL),
        learned.environment(Fault.DRIVER_KILL).bound(0.99),
    )
    told_s = estimate(Fault.DRIVER_KILL, Situation(), learned, NOTICE).parts.environment
    assert learned.pace == pytest.approx(1.0, abs=0.03)
    for _ in range(4):
        learned.recovered(Fault.EXECUTOR_KILL, 4.5)
        learned.recovered(Fault.HOST, 12.0)
    assert 1.1 * before_s < learned.likely_s(Fault.DRIVER_KILL) < 1.5 * before_s
    assert learned.environment(Fault.DRIVER_KILL).bound(0.99) > 1.1 * bound_s
    assert estimate(Fault.DRIVER_KILL, Situation(), learned, NOTICE).parts.environment > 1.1 * told_s
    assert learned.environment(Fault.WORKER_KILL).mean < 1.0, "what takes no time to start does not follow"
    again = Learned(learned.memory())
    assert again.pace == learned.pace > 1.1
    assert again.likely_s(Fault.DRIVER_KILL) == learned.likely_s(Fault.DRIVER_KILL)


def test_one_recovery_that_took_very_long_says_little_of_other_faults() -> None:
    learned = _steady()
    before_s = learned.likely_s(Fault.DRIVER_KILL)
    learned.recovered(Fault.HOST, 80.0)
    assert learned.likely_s(Fault.DRIVER_KILL) < 1.15 * before_s


@given(
    st.lists(st.tuples(st.sampled_from([Fault.HOST, Fault.EXECUTOR_KILL]), st.floats(0.1, 60.0)), max_size=20)
)
def test_what_other_faults_took_never_lowers_a_bound(seen: list[tuple[Fault, float]]) -> None:
    learned = Learned()
    learned.recovered(Fault.DRIVER_KILL, 12.0)
    alone = Learned(msgspec.structs.replace(learned.memory(), pace=(0.0, 0.0)))
    for fault, seconds in seen:
        learned.recovered(fault, seconds)
    for fault in (Fault.DRIVER_KILL, Fault.DRIVER_FREEZE, Fault.APPLICATION):
        assert learned.environment(fault).bound(0.999) >= alone.environment(fault).bound(0.999)


def test_a_fault_is_held_only_with_epochs_that_keep_up() -> None:
    """A floor just under the deadline cut epochs to a few records, without a word, while the backlog grew."""
    floor_s = SLOW(History(1, 1), 1)
    within, beyond = SLOW.parted(floor_s + 0.05)
    assert within is not None and beyond is None
    least = least_epoch(0.15, 2e-5, 20_000, 1.0)
    assert 1 < least < 20_000
    within, beyond = SLOW.parted(floor_s + 0.05, least)
    assert beyond is not None, "it is said that it can't be held"
    within, _ = SLOW.parted(SLOW(History(1, least), least), least)
    assert within is not None
    outlook = Outlook(SLOW(History(1, least), least) + 0.01, History(1, 1), 1.0, 20_000, 500_000, 1.0)
    limit = decide(outlook, SLOW).limit
    assert limit is not None and limit >= 0.9 * least


def test_epochs_that_are_all_as_large_take_nothing_away_from_what_is_known_of_a_record() -> None:
    """A replay runs the records without most of what an epoch costs by itself, so it matters which is which."""
    learned, draw = Learned(), random.Random(3)

    def took_s(records: int) -> float:
        return (0.2 + 1e-4 * records) * draw.uniform(0.95, 1.05)

    for _ in range(100):
        records = draw.randrange(1_000, 20_000)
        learned.epoch.learn([1.0, float(records)], took_s(records))
    before = learned.epoch.weights[1]
    for _ in range(2_000):
        learned.epoch.learn([1.0, 10_000.0], took_s(10_000))
    assert learned.epoch.weights[1] == pytest.approx(before, rel=0.1) == pytest.approx(1e-4, rel=0.2)
    for _ in range(300):
        learned.epoch.learn([1.0, 10_000.0], 2 * took_s(10_000))
    assert learned.epoch.predict([1.0, 10_000.0]).mean == pytest.approx(2.4, rel=0.1), (
        "what changes is learned"
    )


def test_a_replay_costs_what_its_records_do_though_no_epoch_was_ever_larger_than_another() -> None:
    learned = Learned()
    for _ in range(300):
        learned.epoch.learn([1.0, 10_000.0], 1.2)
        learned.computed(1.0, 10_000)
    history = History(300, 3_000_000)
    assert replaying(learned, history).mean == pytest.approx(300.0, rel=0.25)
    assert replaying(learned, history).bound(SURE) >= 300.0
