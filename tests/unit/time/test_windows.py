"""Windows tile time, whatever the clocks do; and the vectorised way is the one that reads like the definition."""

import datetime as dt
import json
import pickle
from itertools import pairwise
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from holdfast.errors import PipelineError
from holdfast.time.merging import merge, merge_sessions
from holdfast.time.units import LIMIT, MAX_TIME, MIN_TIME
from holdfast.time.windows import (
    Assigner,
    Sliding,
    Tumbling,
    Window,
    global_window,
    late,
    session,
    sliding,
    tumbling,
)

UTC = dt.timezone.utc
SECOND, MINUTE, HOUR, DAY = 10**6, 60 * 10**6, 3600 * 10**6, 86_400 * 10**6
ZONES = [
    "Asia/Seoul",
    "America/New_York",
    "Europe/Berlin",
    "America/Sao_Paulo",  # clocks went forward at midnight: some days started at 1:00
    "America/St_Johns",  # and here back at a minute past midnight
    "Australia/Lord_Howe",  # by half an hour
    "Pacific/Apia",  # 30 December 2011 was left out
    "Pacific/Noumea",  # changed its clock in 1978 where clocks are read in two pieces
    "Asia/Kathmandu",
    "UTC",
]
FIXED = ["1us", "7s", "1m", "1h", "7h", "1d", "10d", "1w", "2w"]
ZONED = ["15m", "1h", "2h", "6h", "12h", "1d", "7d", "10d", "1w", "1mo", "3mo", "1y", "2y"]


def us(*when: int, zone: str = "UTC", fold: int = 0) -> int:
    time = dt.datetime(*when, tzinfo=ZoneInfo(zone), fold=fold)  # type: ignore[misc,arg-type]
    return (time.astimezone(UTC) - dt.datetime(1970, 1, 1, tzinfo=UTC)) // dt.timedelta(microseconds=1)


def array(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


anywhen = st.integers(1 - LIMIT, LIMIT - 1) | st.integers(-3 * DAY, 3 * DAY)
thiswhen = st.integers(us(1965, 1, 1), us(2045, 1, 1))


def changes(zone: str, first: int = 1976, last: int = 2030) -> list[int]:
    """Every instant at which the clock of a zone jumps, by the minute, as zoneinfo has it."""
    info = ZoneInfo(zone)

    def offset(minute: int) -> dt.timedelta | None:
        return dt.datetime.fromtimestamp(minute * 60, UTC).astimezone(info).utcoffset()

    found = []
    for day in range(us(first, 1, 1) // MINUTE, us(last, 1, 1) // MINUTE, 1440):
        before, after = day, day + 1440
        if offset(before) == offset(after):
            continue
        while after - before > 1:
            middle = (before + after) // 2
            before, after = (middle, after) if offset(middle) == offset(day) else (before, middle)
        found.append(after * MINUTE)
    return found


CHANGES = {zone: changes(zone) for zone in ZONES}


@st.composite
def near_changes(draw: st.DrawFn, zone: str) -> int:
    if not CHANGES[zone]:
        return draw(thiswhen)
    return draw(st.sampled_from(CHANGES[zone])) + draw(st.integers(-30 * HOUR, 30 * HOUR))


@st.composite
def tumbling_and_time(draw: st.DrawFn) -> tuple[Tumbling, int]:
    offset = draw(st.sampled_from(["0s", "90s", "6h", -3600, "400d"]))
    zone = draw(st.none() | st.sampled_from(ZONES))
    if zone is None:
        return tumbling(draw(st.sampled_from([*FIXED, "1mo", "1y"])), offset), draw(anywhen)
    size = draw(st.sampled_from(ZONED))
    return tumbling(size, offset, zone), draw(anywhen | thiswhen | near_changes(zone))


@settings(deadline=None)
@given(tumbling_and_time())
def test_every_instant_is_in_exactly_one_window_and_windows_touch(given_: tuple[Tumbling, int]) -> None:
    windows, at = given_
    (window,) = windows.assign(at, {})
    assert window.start <= at < window.end
    assert windows.assign(window.start, {}) == (window,)
    assert windows.assign(window.last, {}) == (window,)
    (after,) = windows.assign(window.end, {})
    (before,) = windows.assign(window.start - 1, {})
    assert after.start == window.end
    assert before.end == window.start


@settings(deadline=None)
@given(tumbling_and_time(), st.lists(st.integers(-40 * DAY, 40 * DAY), max_size=8))
def test_columns_of_tumbling_windows_are_those_of_records(
    given_: tuple[Tumbling, int], apart: list[int]
) -> None:
    windows, at = given_
    times = array(*(t for t in (at + a for a in [0, *apart]) if -LIMIT < t < LIMIT))
    starts = windows.starts(times)
    ends = windows.ends(starts)
    assert starts.dtype == ends.dtype == np.int64
    assert [(Window(s, e),) for s, e in zip(starts.tolist(), ends.tolist(), strict=True)] == [
        windows.assign(t, {}) for t in times.tolist()
    ]


@pytest.mark.parametrize("windows", [tumbling("1h"), tumbling("1mo", zone="Asia/Seoul")], ids=str)
def test_no_times_have_no_windows(windows: Tumbling) -> None:
    assert len(windows.ends(windows.starts(array()))) == 0


def test_a_null_s_time_does_no_harm_to_its_neighbours() -> None:
    for zone in (None, "America/New_York"):
        windows = tumbling("1d", zone=zone)
        assert windows.starts(array(MIN_TIME, 0))[1] == windows.starts(array(0))[0]


@given(anywhen, st.integers(1, 10 * DAY), st.integers(-20 * DAY, 20 * DAY))
def test_without_a_zone_windows_are_counted_from_1970_plus_the_offset(
    at: int, size: int, offset: int
) -> None:
    windows = tumbling(dt.timedelta(microseconds=size), dt.timedelta(microseconds=offset))
    (window,) = windows.assign(at, {})
    assert window.end - window.start == size
    assert (window.start - offset) % size == 0


# What zoneinfo says, day by day and hour by hour.


def local_date(at: int, zone: str) -> dt.date:
    return (
        (dt.datetime(1970, 1, 1, tzinfo=UTC) + dt.timedelta(microseconds=at))
        .astimezone(ZoneInfo(zone))
        .date()
    )


@pytest.mark.parametrize("zone", ["Asia/Seoul", "America/New_York", "Europe/Berlin", "Asia/Kathmandu"])
@settings(deadline=None)
@given(day=st.dates(dt.date(1970, 1, 2), dt.date(2040, 12, 31)), within=st.integers(0, 23 * HOUR - 1))
def test_a_day_with_a_zone_is_that_of_the_calendar_there(zone: str, day: dt.date, within: int) -> None:
    midnight = us(day.year, day.month, day.day, zone=zone)
    next_day = day + dt.timedelta(days=1)
    (window,) = tumbling("1d", zone=zone).assign(midnight + within, {})
    assert window == Window(midnight, us(next_day.year, next_day.month, next_day.day, zone=zone))
    assert local_date(window.start, zone) == local_date(window.last, zone) == day
    assert local_date(window.end, zone) == next_day


@pytest.mark.parametrize("zone", ["America/New_York", "Europe/Berlin", "Asia/Seoul"])
def test_days_around_every_change_of_clocks_are_those_of_the_calendar(zone: str) -> None:
    """Asia/Seoul changed its clocks in 1987 and 1988."""
    windows = tumbling("1d", zone=zone)
    lengths = set()
    for change in CHANGES[zone]:
        times = np.arange(change - 36 * HOUR, change + 36 * HOUR, HOUR // 2)
        starts = windows.starts(times)
        ends = windows.ends(starts)
        for t, start, end in zip(times.tolist(), starts.tolist(), ends.tolist(), strict=True):
            day = local_date(t, zone)
            after = day + dt.timedelta(days=1)
            assert start == us(day.year, day.month, day.day, zone=zone)
            assert end == us(after.year, after.month, after.day, zone=zone)
            lengths.add((end - start) // HOUR)
    assert lengths == {23, 24, 25}


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("size", ["15m", "1h", "6h", "1d"])
def test_a_window_begins_when_the_clock_first_shows_its_start(zone: str, size: str) -> None:
    """The definition, walked through minute by minute: the latest that the clock has shown decides."""
    info = ZoneInfo(zone)
    step = {"15m": 15 * MINUTE, "1h": HOUR, "6h": 6 * HOUR, "1d": DAY}[size]
    for change in CHANGES[zone][:: max(1, len(CHANGES[zone]) // 6)] or [us(2024, 1, 1)]:
        times = np.arange(change - 50 * HOUR, change + 50 * HOUR, MINUTE)
        shown = []
        for t in times.tolist():
            offset = dt.datetime.fromtimestamp(t // SECOND, UTC).astimezone(info).utcoffset()
            assert offset is not None
            shown.append(t + offset // dt.timedelta(microseconds=1))
        marks = np.maximum.accumulate(np.array(shown)) // step
        starts = tumbling(size, zone=zone).starts(times)
        settled = times >= change - 25 * HOUR
        begins = np.append(False, marks[1:] != marks[:-1])
        assert (starts[begins & settled] == times[begins & settled]).all()
        assert ((np.append(0, np.diff(starts)) != 0) == begins)[settled].all()


NY = "America/New_York"


def clock(at: int, zone: str = NY) -> str:
    time = (dt.datetime(1970, 1, 1, tzinfo=UTC) + dt.timedelta(microseconds=at)).astimezone(ZoneInfo(zone))
    return time.strftime("%H:%M %Z")


def walk(windows: Tumbling, at: int, until: int) -> list[str]:
    found = []
    while at < until:
        (window,) = windows.assign(at, {})
        found.append(f"{clock(window.start)} {(window.end - window.start) // MINUTE}m")
        at = window.end
    return found


def test_an_hour_that_the_clock_skips_is_not_there() -> None:
    night = us(2024, 3, 10, 0, zone=NY), us(2024, 3, 10, 5, zone=NY)
    assert walk(tumbling("1h", zone=NY), *night) == [
        "00:00 EST 60m",
        "01:00 EST 60m",
        "03:00 EDT 60m",
        "04:00 EDT 60m",
    ]
    assert walk(tumbling("2h", zone=NY), *night) == ["00:00 EST 120m", "03:00 EDT 60m", "04:00 EDT 120m"]


def test_an_hour_that_the_clock_shows_twice_is_one_window_of_two_hours() -> None:
    night = us(2024, 11, 3, 0, zone=NY), us(2024, 11, 3, 4, zone=NY)
    assert walk(tumbling("1h", zone=NY), *night) == [
        "00:00 EDT 60m",
        "01:00 EDT 120m",
        "02:00 EST 60m",
        "03:00 EST 60m",
    ]
    quarters = walk(tumbling("15m", zone=NY), *night)
    assert quarters[6:9] == ["01:30 EDT 15m", "01:45 EDT 75m", "02:00 EST 15m"]


def test_a_day_that_starts_twice_starts_the_first_time() -> None:
    """In 2010 St. John's went back from 0:01 to 23:01."""
    zone = "America/St_Johns"
    (window,) = tumbling("1d", zone=zone).assign(us(2010, 11, 7, 12, zone=zone), {})
    assert window == Window(us(2010, 11, 7, zone=zone), us(2010, 11, 8, zone=zone))
    assert window.end - window.start == 25 * HOUR


def test_a_day_that_was_left_out_has_no_window() -> None:
    zone = "Pacific/Apia"
    (window,) = tumbling("1d", zone=zone).assign(us(2011, 12, 29, 12, zone=zone), {})
    (after,) = tumbling("1d", zone=zone).assign(window.end, {})
    assert local_date(after.start, zone) == local_date(after.last, zone) == dt.date(2011, 12, 31)
    (month,) = tumbling("1mo", zone=zone).assign(window.start, {})
    assert month.end - month.start == 30 * DAY


@pytest.mark.parametrize("zone", [None, "Asia/Seoul", "America/New_York", "Europe/Berlin", "Asia/Kathmandu"])
@settings(deadline=None)
@given(at=thiswhen)
def test_weeks_start_on_monday_and_months_and_years_on_the_first(zone: str | None, at: int) -> None:
    def starts(size: str) -> dt.date:
        (window,) = tumbling(size, zone=zone).assign(at, {})
        return local_date(window.start, zone or "UTC")

    today = local_date(at, zone or "UTC")
    monday = today - dt.timedelta(days=today.weekday())
    assert starts("1w") == starts("1 week") == monday
    assert starts("1mo") == starts("1 month") == today.replace(day=1)
    assert starts("3 months") == today.replace(month=(today.month - 1) // 3 * 3 + 1, day=1)
    assert starts("1y") == starts("1 year") == today.replace(month=1, day=1)


def test_an_offset_may_be_before() -> None:
    for size in ("1d", "12h"):
        assert tumbling(size, offset="-9h").facts() == tumbling(size, offset=-32_400).facts()
    assert sliding("1d", "1h", offset="-30m").facts() == sliding("1d", "1h", offset="30m").facts()


def test_a_month_may_start_later_in_the_day() -> None:
    (window,) = tumbling("1mo", offset="6h", zone="Asia/Seoul").assign(
        us(2024, 3, 1, 5, 59, zone="Asia/Seoul"), {}
    )
    assert window == Window(us(2024, 2, 1, 6, zone="Asia/Seoul"), us(2024, 3, 1, 6, zone="Asia/Seoul"))


def test_far_from_now_clocks_are_taken_not_to_change() -> None:
    for at in (LIMIT - 1, 1 - LIMIT, us(9999, 6, 1), us(1, 6, 1)):
        (window,) = tumbling("1d", zone=NY).assign(at, {})
        assert window.end - window.start == DAY


# Windows that slide.

lengths = st.integers(1, 60)


@given(anywhen, lengths, lengths, st.integers(-100, 100))
def test_sliding_windows_are_all_those_that_hold_the_time(
    at: int, size: int, slide: int, offset: int
) -> None:
    windows = sliding(*(dt.timedelta(microseconds=n) for n in (size, slide, offset)))
    around = (at - offset) // slide
    expected = [
        Window(start, start + size)
        for start in (offset + k * slide for k in range(around - size - 1, around + 2))
        if start <= at < start + size
    ]
    assert list(windows.assign(at, {})) == expected


@st.composite
def sliding_and_time(draw: st.DrawFn) -> tuple[Sliding, int]:
    offset = draw(st.sampled_from(["0s", "20m", "31h"]))
    zone = draw(st.none() | st.sampled_from(ZONES))
    if zone is None:
        size, slide = draw(lengths), draw(lengths)
        return sliding(size, slide, offset), draw(anywhen)
    some = st.sampled_from(["20m", "30m", "1h", "2h", "3h", "8h", "1d", "2d", "3d", "1w"])
    return sliding(draw(some), draw(some), offset, zone), draw(anywhen | thiswhen | near_changes(zone))


@settings(deadline=None)
@given(sliding_and_time())
def test_panes_are_a_way_to_the_same_windows(given_: tuple[Sliding, int]) -> None:
    windows, at = given_
    assume(-LIMIT + 30 * DAY < at < LIMIT - 30 * DAY)
    (pane,) = windows.pane_starts(array(at)).tolist()
    assigned = windows.assign(at, {})
    assert pane <= at
    assert windows.windows_of_pane(pane) == [w.start for w in assigned]
    assert windows.ends(array(*(w.start for w in assigned))).tolist() == [w.end for w in assigned]
    assert all(w.start <= at < w.end for w in assigned)
    for window in {*assigned[:2], *assigned[-2:]}:
        assert pane in windows.panes_of(window.start)


@settings(deadline=None)
@given(sliding_and_time())
def test_a_window_s_panes_cover_it_and_nothing_else(given_: tuple[Sliding, int]) -> None:
    windows, at = given_
    assume(-LIMIT + 30 * DAY < at < LIMIT - 30 * DAY)
    assigned = windows.assign(at, {})
    for window in {*assigned[:2], *assigned[-2:]}:
        panes = windows.panes_of(window.start)
        assert panes[0] == window.start
        assert all(left < right for left, right in pairwise(panes))
        assert windows.pane_starts(array(*panes)).tolist() == panes
        last_of_each = array(*(p - 1 for p in [*panes[1:], window.end]))
        assert windows.pane_starts(last_of_each).tolist() == panes
        assert all(window.start in windows.windows_of_pane(p) for p in panes)
        assert window.start not in windows.windows_of_pane(
            int(windows.pane_starts(array(window.start - 1))[0])
        )
        assert window.start not in windows.windows_of_pane(int(windows.pane_starts(array(window.end))[0]))


@settings(deadline=None)
@given(sliding_and_time())
def test_a_start_belongs_to_one_window_and_no_instant_is_left_out(given_: tuple[Sliding, int]) -> None:
    windows, at = given_
    assigned = windows.assign(at, {})
    assert len({w.start for w in assigned}) == len(assigned)
    assert assigned == sorted(assigned)
    if windows.slide_us <= windows.size_us:
        assert assigned


@settings(deadline=None)
@given(tumbling_and_time())
def test_windows_that_slide_by_their_size_tumble(given_: tuple[Tumbling, int]) -> None:
    tumbles, at = given_
    facts = tumbles.facts()
    assume("size_us" in facts)
    size = dt.timedelta(microseconds=facts["size_us"])
    slides = sliding(size, size, dt.timedelta(microseconds=facts["offset_us"]), facts["zone"])
    assert tuple(slides.assign(at, {})) == tumbles.assign(at, {})
    assert slides.pane_starts(array(at)).tolist() == tumbles.starts(array(at)).tolist()


def test_a_record_between_two_windows_is_in_none() -> None:
    windows = sliding("10s", "1m")
    assert windows.assign(10 * SECOND, {}) == []
    assert windows.windows_of_pane(10 * SECOND) == []
    assert windows.assign(10 * SECOND - 1, {}) == [Window(0, 10 * SECOND)]


def test_windows_that_slide_by_weeks_start_on_monday() -> None:
    for window in sliding("4w", "1w", zone="Asia/Seoul").assign(us(2024, 6, 5), {}):
        assert local_date(window.start, "Asia/Seoul").weekday() == 0
        assert window.end - window.start == 28 * DAY


def test_of_two_windows_that_would_begin_at_one_instant_the_later_is_there() -> None:
    at = us(2024, 3, 10, 3, 30, zone=NY)
    found = sliding("2h", "1h", zone=NY).assign(at, {})
    assert [(clock(w.start), clock(w.end)) for w in found] == [("03:00 EDT", "05:00 EDT")]


# Sessions.


def merged_by_hand(windows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge any two that overlap or touch, until there are none."""
    left = list(windows)
    while True:
        for i, a in enumerate(left):
            j = next((j for j, b in enumerate(left) if j > i and a[0] <= b[1] and b[0] <= a[1]), None)
            if j is not None:
                b = left.pop(j)
                left[i] = (min(a[0], b[0]), max(a[1], b[1]))
                break
        else:
            return sorted(left)


rows_of_sessions = st.lists(
    st.tuples(st.integers(-2, 2), st.integers(-30, 30), st.integers(1, 12)).map(
        lambda r: (r[0], r[1], r[1] + r[2])
    ),
    max_size=30,
)


def columns(rows: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return array(*(r[1] for r in rows)), array(*(r[2] for r in rows)), array(*(r[0] for r in rows))


@given(rows_of_sessions)
def test_sessions_merge_as_they_would_by_hand_key_by_key(rows: list[tuple[int, int, int]]) -> None:
    merged = merge_sessions(*columns(rows))
    found = list(zip(merged.groups.tolist(), merged.starts.tolist(), merged.ends.tolist(), strict=True))
    expected = [
        (group, start, end)
        for group in sorted({r[0] for r in rows})
        for start, end in merged_by_hand([r[1:] for r in rows if r[0] == group])
    ]
    assert found == expected
    assert len(merged.rows) == len(rows)
    for (group, start, end), index in zip(rows, merged.rows.tolist(), strict=True):
        assert found[index][0] == group
        assert found[index][1] <= start and end <= found[index][2]


@given(rows_of_sessions, st.randoms())
def test_the_order_of_rows_does_not_matter_to_sessions(
    rows: list[tuple[int, int, int]], random: object
) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    one = merge_sessions(*columns(rows))
    other = merge_sessions(*columns([rows[i] for i in order]))
    for name in ("groups", "starts", "ends"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist()
    assert other.rows.tolist() == [one.rows[i] for i in order]


@given(rows_of_sessions)
def test_merged_sessions_merge_no_further(rows: list[tuple[int, int, int]]) -> None:
    once = merge_sessions(*columns(rows))
    twice = merge_sessions(once.starts, once.ends, once.groups)
    assert twice.rows.tolist() == list(range(len(once.starts)))
    assert (twice.ends == once.ends).all()


@given(rows_of_sessions)
def test_merging_windows_of_one_key_is_merging_columns_of_one_group(rows: list[tuple[int, int, int]]) -> None:
    windows = [Window(r[1], r[2]) for r in rows]
    columns_ = merge_sessions(*columns([(0, r[1], r[2]) for r in rows]))
    found = merge(windows)
    assert [w.start for w, _ in found] == columns_.starts.tolist()
    assert [w.end for w, _ in found] == columns_.ends.tolist()
    assert sorted(p for _, parts in found for p in parts) == sorted(windows)
    for whole, parts in found:
        assert all(whole.start <= p.start and p.end <= whole.end for p in parts)


def test_sessions_at_the_ends_of_the_range_don_t_overflow() -> None:
    far = LIMIT - 1
    merged = merge_sessions(array(far, -far), array(2 * far, 0), array(2**62, -(2**62)))
    assert merged.starts.tolist() == [-far, far]
    assert merged.ends.tolist() == [0, 2 * far]


@pytest.mark.parametrize(
    ("apart", "sessions"), [(10 * SECOND - 1, 1), (10 * SECOND, 1), (10 * SECOND + 1, 2)]
)
def test_two_records_exactly_the_gap_apart_are_in_one_session(apart: int, sessions: int) -> None:
    windows = session("10s")
    both = [*windows.assign(0, {}), *windows.assign(apart, {})]
    assert len(merge(both)) == sessions
    merged = merge_sessions(array(0, apart), array(*(w.end for w in both)), array(0, 0))
    assert len(merged.starts) == sessions


def test_a_gap_may_depend_on_the_record() -> None:
    windows = session(lambda r: r["gap"])
    assert windows.dynamic and windows.merging and windows.gap_us is None
    assert windows.assign(5, {"gap": "1m"}) == (Window(5, 5 + MINUTE),)
    assert windows.assign(5, {"gap": 2}) == (Window(5, 5 + 2 * SECOND),)
    with pytest.raises(PipelineError, match="The gap of a session is 0"):
        windows.assign(5, {"gap": 0})
    fixed = session("1m")
    assert not fixed.dynamic and fixed.gap_us == MINUTE


# Windows as values, and what is refused.


def test_a_window_knows_its_times() -> None:
    window = Window(0, HOUR)
    assert window.last == HOUR - 1
    assert window.start_time == dt.datetime(1970, 1, 1, tzinfo=UTC)
    assert window.end_time == dt.datetime(1970, 1, 1, 1, tzinfo=UTC)
    assert sorted([Window(1, 2), Window(0, 9), Window(0, 3)]) == [Window(0, 3), Window(0, 9), Window(1, 2)]
    assert pickle.loads(pickle.dumps(window)) == window and len({window, Window(0, HOUR)}) == 1
    with pytest.raises(AttributeError):
        window.start = 1  # type: ignore[misc]


def test_a_window_past_what_a_datetime_holds_still_has_a_name() -> None:
    (window,) = global_window().assign(0, {})
    assert (window.start, window.end) == (MIN_TIME, MAX_TIME)
    assert window.start_time is None and window.end_time is None
    assert repr(window) == "Window[-∞, ∞)"
    assert repr(Window(LIMIT, LIMIT + 1)) == f"Window[{LIMIT}us, {LIMIT + 1}us)"


@pytest.mark.parametrize(
    ("windows", "facts"),
    [
        (tumbling("1h"), {"kind": "tumbling", "size_us": HOUR, "offset_us": 0, "zone": None}),
        (tumbling("1h", "61m"), {"kind": "tumbling", "size_us": HOUR, "offset_us": MINUTE, "zone": None}),
        (tumbling("1w"), {"kind": "tumbling", "size_us": 7 * DAY, "offset_us": 4 * DAY, "zone": None}),
        (
            tumbling("1y", zone=NY),
            {"kind": "tumbling", "size_months": 12, "offset_us": 0, "zone": "America/New_York"},
        ),
        (
            sliding("10m", "5m", "6m"),
            {
                "kind": "sliding",
                "size_us": 10 * MINUTE,
                "slide_us": 5 * MINUTE,
                "offset_us": MINUTE,
                "zone": None,
            },
        ),
        (session("1m"), {"kind": "session", "gap_us": MINUTE, "dynamic": False}),
        (session(lambda r: "1m"), {"kind": "session", "gap_us": None, "dynamic": True}),
        (global_window(), {"kind": "global"}),
    ],
    ids=str,
)
def test_what_must_not_change_under_stored_state_is_plain_data(
    windows: Assigner, facts: dict[str, object]
) -> None:
    assert windows.facts() == facts
    assert json.loads(json.dumps(facts)) == facts


def test_an_assigner_of_the_user_s_own_is_known_by_its_name() -> None:
    class Shifts(Assigner):
        pass

    assert Shifts().facts() == {"kind": "Shifts"}
    assert not Shifts().merging
    assert repr(Shifts()) == "Shifts()"
    assert repr(tumbling("1h", zone="UTC")) == "tumbling(size_us=3600000000, offset_us=0, zone='UTC')"


def test_assigners_travel() -> None:
    for windows in (tumbling("1mo", zone=NY), sliding("2h", "1h"), session("1m"), global_window()):
        again = pickle.loads(pickle.dumps(windows))
        assert again.facts() == windows.facts()
        assert list(again.assign(5, {})) == list(windows.assign(5, {}))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: tumbling("0s"), "size is '0s'"),
        (lambda: tumbling(-5), "size is -5"),
        (lambda: tumbling("0mo"), "no time at all"),
        (lambda: tumbling("soon"), "size: 'soon' is not a duration"),
        (lambda: tumbling("1h", offset="x"), "offset: 'x' is not a duration"),
        (lambda: tumbling("1h", zone="Asia/Soul"), "'Asia/Soul' is not a time zone"),
        (lambda: tumbling("1h", zone="America"), "'America' is not a time zone"),
        (lambda: tumbling("1h", zone="../etc/passwd"), "not a time zone"),
        (lambda: tumbling("1h", zone=""), "not a time zone"),
        (lambda: tumbling("7h", zone="Asia/Seoul"), "neither divides a day"),
        (lambda: tumbling("36h", zone="Asia/Seoul"), "neither divides a day"),
        (lambda: sliding("1d", "7h", zone="Asia/Seoul"), "slide='7h' neither divides a day"),
        (lambda: sliding("1mo", "1d"), "can't be counted in months"),
        (lambda: sliding("1y", "1mo"), "can't be counted in months"),
        (lambda: sliding("1h", "0s"), "slide is '0s'"),
        (lambda: sliding("1d", "1us"), "more than 100,000 panes"),
        (lambda: sliding("1us", "1d"), "more than 100,000 panes"),
        (lambda: session("0s"), "gap is '0s'"),
        (lambda: session("nope"), "gap: 'nope' is not a duration"),
    ],
)
def test_what_makes_no_windows_is_refused_with_a_remedy(make: object, says: str) -> None:
    with pytest.raises(PipelineError, match=says) as error:
        make()  # type: ignore[operator]
    assert error.value.remedy


@given(st.integers(-50, 50), st.integers(-50, 50), st.integers(0, 20))
def test_a_window_is_past_when_the_watermark_has_reached_its_end_and_the_lateness(
    last: int, watermark: int, lateness: int
) -> None:
    past = late(last, watermark, lateness)
    assert past == (watermark >= last + lateness)
    assert late(array(last, last + 1), watermark, lateness).tolist() == [
        past,
        late(last + 1, watermark, lateness),
    ]


@pytest.mark.parametrize("last", [0, LIMIT, MAX_TIME - 1])
def test_every_window_is_past_at_the_end_of_time_and_none_before_anything_is_known(last: int) -> None:
    for lateness in (0, LIMIT):
        assert late(last, MAX_TIME, lateness) and late(array(last), MAX_TIME, lateness).all()
        assert not late(last, MIN_TIME, lateness) and not late(array(last), MIN_TIME, lateness).any()
    assert not late(MAX_TIME - 1, MAX_TIME - 1, 1)
