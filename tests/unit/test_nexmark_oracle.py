"""The truth about Nexmark's queries, checked against answers written out by hand."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from bench.nexmark import SCHEMAS, events
from bench.nexmark.oracle import QUERIES, answer, equal, side_input
from holdfast.io.rate import START_MS

Rows = list[tuple[Any, ...]]


def at(second: float) -> dt.datetime:
    """A time so many seconds after the start of 2024."""
    return dt.datetime(2024, 1, 1) + dt.timedelta(seconds=second)


def person(id: int, second: float = 0, *, name: str = "Ada", state: str = "OR") -> dict[str, Any]:
    return {
        "id": id,
        "name": name,
        "email_address": "a@b.com",
        "credit_card": "1 2 3 4",
        "city": "Bend",
        "state": state,
        "date_time": at(second),
        "extra": "",
    }


def auction(
    id: int, second: float = 0, *, seller: int = 1, category: int = 10, lasts: float = 10
) -> dict[str, Any]:
    return {
        "id": id,
        "item_name": f"item {id}",
        "description": "old",
        "initial_bid": 1,
        "reserve": 2,
        "date_time": at(second),
        "expires": at(second + lasts),
        "seller": seller,
        "category": category,
        "extra": "a",
    }


def bid(
    auction: int,
    price: int = 100,
    second: float = 0,
    *,
    bidder: int = 7,
    channel: str = "Apple",
    url: str = "https://www.nexmark.com/a/b/c/item.htm?query=1",
    extra: str = "",
) -> dict[str, Any]:
    return {
        "auction": auction,
        "bidder": bidder,
        "price": price,
        "channel": channel,
        "url": url,
        "date_time": at(second),
        "extra": extra,
    }


def asked(query: str, *, columns: str = "", options: dict[str, int] | None = None, **rows: Any) -> Rows:
    """The answer's rows as tuples, of all columns or of those named."""
    tables = {kind: pa.Table.from_pylist(rows.get(kind, []), SCHEMAS[kind]) for kind in SCHEMAS}
    found = answer(query, tables, **(options or {}))
    names = columns.split() or found.column_names
    return list(zip(*(found[name].to_pylist() for name in names), strict=True))


# Each query by hand


def test_q0_lets_bids_through() -> None:
    assert asked("q0", bid=[bid(2, 100, 1, extra="x"), bid(1, 50, 2)]) == [
        (1, 7, 50, at(2), ""),
        (2, 7, 100, at(1), "x"),
    ]


def test_q1_converts_prices_exactly() -> None:
    assert asked("q1", bid=[bid(1, 100_000_001, 1, extra="x"), bid(1, 10, 2)]) == [
        (1, 7, Decimal("9.080"), at(2), ""),
        (1, 7, Decimal("90800000.908"), at(1), "x"),
    ]


def test_q2_keeps_every_123rd_auction() -> None:
    assert asked("q2", bid=[bid(1107, 5), bid(1108, 6), bid(1230, 7), bid(1107, 5)]) == [
        (1107, 5),
        (1107, 5),
        (1230, 7),
    ]


def test_q3_joins_sellers_of_three_states_with_auctions_of_category_10() -> None:
    people = [
        person(1, 5, name="Ann", state="OR"),
        person(2, name="Bea", state="WA"),
        person(3, name="Cid", state="CA"),
    ]
    auctions = [
        auction(10, seller=1),
        auction(11, seller=2),
        auction(12, seller=3, category=11),
        auction(13, seller=3),
        auction(14, seller=1),
        auction(15, seller=9),
    ]
    assert asked("q3", person=people, auction=auctions) == [
        ("Ann", "Bend", "OR", 10),
        ("Ann", "Bend", "OR", 14),
        ("Cid", "Bend", "CA", 13),
    ]


AUCTIONS = [auction(1, 10), auction(2, 10), auction(3, 10, category=11), auction(4, 10)]
BIDS = [
    bid(1, 999, 9.999),  # before it was put up
    bid(1, 100, 10),
    bid(1, 300, 15, bidder=9),
    bid(1, 300, 15, bidder=8),  # the same price at the same time: the smaller bidder
    bid(1, 300, 16, bidder=6),
    bid(2, 401, 20, extra="last"),  # as it expires
    bid(2, 900, 20.001),
    bid(3, 5, 12),
    bid(5, 5, 12),  # no such auction
]


def test_q4_averages_the_winning_prices_of_each_category() -> None:
    assert asked("q4", auction=AUCTIONS, bid=BIDS) == [(10, 350), (11, 5)]


def test_q5_finds_the_auctions_with_most_bids_in_each_sliding_window() -> None:
    bids = [bid(1, second=10), bid(1, second=11.999), bid(2, second=12), bid(2, second=13), bid(3, second=20)]
    assert sorted(asked("q5", bid=bids, columns="starttime endtime auction num")) == [
        (at(2), at(12), 1, 2),
        (at(4), at(14), 1, 2),
        (at(4), at(14), 2, 2),
        (at(6), at(16), 1, 2),
        (at(6), at(16), 2, 2),
        (at(8), at(18), 1, 2),
        (at(8), at(18), 2, 2),
        (at(10), at(20), 1, 2),
        (at(10), at(20), 2, 2),
        (at(12), at(22), 2, 2),
        (at(14), at(24), 3, 1),
        (at(16), at(26), 3, 1),
        (at(18), at(28), 3, 1),
        (at(20), at(30), 3, 1),
    ]


def test_q5_takes_windows_that_are_no_multiple_of_the_slide() -> None:
    found = asked("q5", bid=[bid(1, second=3)], options={"window_ms": 5_000, "slide_ms": 2_000})
    assert [(start, end) for _, _, start, end in found] == [(at(0), at(5)), (at(2), at(7))]


def test_q6_averages_a_sellers_last_eleven_winning_prices() -> None:
    auctions = [auction(n, n, seller=1, lasts=100) for n in range(1, 14)] + [auction(20, seller=2)]
    bids = [bid(n, 100 * n, n) for n in range(1, 14)] + [bid(20, 7, 3), bid(20, 8, 3)]
    expected: Rows = [(1, n, at(n), (100 + 100 * n) // 2) for n in range(1, 12)]
    expected += [(1, 12, at(12), 700), (1, 13, at(13), 800), (2, 20, at(3), 8)]
    assert asked("q6", auction=auctions, bid=bids) == expected


def test_q7_finds_all_highest_bids_of_a_window() -> None:
    bids = [bid(1, 10, 0), bid(2, 30, 9.999), bid(3, 30, 5), bid(4, 20, 10), bid(4, 30, 30), bid(5, 29, 39)]
    assert asked("q7", bid=bids) == [
        (2, 7, 30, at(9.999), ""),
        (3, 7, 30, at(5), ""),
        (4, 7, 20, at(10), ""),
        (4, 7, 30, at(30), ""),
    ]


def test_q8_finds_who_registered_and_sold_in_one_window() -> None:
    people = [person(1, 0, name="Ann"), person(2, 9.999, name="Bea"), person(3, 12, name="Cid")]
    auctions = [
        auction(10, 9.999, seller=1),
        auction(11, 3, seller=1),
        auction(12, 10, seller=2),
        auction(13, 11, seller=3),
        auction(14, 25, seller=3),
    ]
    assert asked("q8", person=people, auction=auctions) == [(1, "Ann", at(0)), (3, "Cid", at(10))]


def test_q9_gives_each_auction_its_winner() -> None:
    found = asked("q9", auction=AUCTIONS, bid=BIDS)
    own = ("old", 1, 2, at(10), at(20), 1)
    assert found == [
        (1, "item 1", *own, 10, "a", 1, 8, 300, at(15), ""),
        (2, "item 2", *own, 10, "a", 2, 7, 401, at(20), "last"),
        (3, "item 3", *own, 11, "a", 3, 7, 5, at(12), ""),
    ]


def test_q10_names_the_day_and_the_minute() -> None:
    assert asked("q10", bid=[bid(1, second=86_399)], columns="dt hm") == [("2024-01-01", "23:59")]


def test_q11_counts_bids_by_session_and_one_gap_apart_is_the_same_session() -> None:
    bids = [
        bid(1, second=20.001),
        bid(2, second=0),
        bid(1, second=10),
        bid(1, second=0),
        bid(1, second=3, bidder=8),
    ]
    assert asked("q11", bid=bids) == [
        (7, 1, at(20.001), at(30.001)),
        (7, 3, at(0), at(20)),
        (8, 1, at(3), at(13)),
    ]
    assert asked("q11", bid=bids, options={"gap_ms": 10_001}, columns="bidder bid_count") == [(7, 4), (8, 1)]


def test_q12_counts_bids_by_when_they_were_processed() -> None:
    bids = pa.Table.from_pylist([bid(1), bid(2), bid(3), bid(4, bidder=8)], SCHEMAS["bid"])
    processed = pa.array([START_MS, START_MS + 9_999, START_MS + 10_000, START_MS + 5])
    found = answer("q12", {"bid": bids.append_column("processed_ms", processed)})
    assert found.to_pylist() == [
        {"bidder": 7, "bid_count": 1, "starttime": at(10), "endtime": at(20)},
        {"bidder": 7, "bid_count": 2, "starttime": at(0), "endtime": at(10)},
        {"bidder": 8, "bid_count": 1, "starttime": at(0), "endtime": at(10)},
    ]


def test_q13_looks_the_auction_up() -> None:
    assert asked("q13", bid=[bid(10_007, 5, 1)]) == [(10_007, 7, 5, at(1), "7")]
    tables = {"bid": pa.Table.from_pylist([bid(1), bid(2)], SCHEMAS["bid"]), "side_input": side_input(2)}
    assert answer("q13", tables)["value"].to_pylist() == ["1"]


def test_q14_takes_prices_between_two_and_names_the_time_of_day() -> None:
    hours = (6, 7, 8, 18, 19, 20)
    bids = [bid(h, 2_000_000, h * 3_600 + 3_599, extra="cacc") for h in hours]
    bids += [bid(99, 1_101_321), bid(98, 1_101_322), bid(97, 55_066_079), bid(96, 55_066_080)]
    kinds = ("nightTime", "otherTime", "dayTime", "dayTime", "otherTime", "nightTime")
    found = asked("q14", bid=bids, columns="auction price bid_time_type c_counts")
    assert found[:6] == [(h, Decimal("1816000.000"), kind, 3) for h, kind in zip(hours, kinds, strict=True)]
    assert found[6:] == [
        (97, Decimal("49999999.732"), "nightTime", 0),
        (98, Decimal("1000000.376"), "nightTime", 0),
    ]


RANKED = [
    bid(1, 9_999, 60, bidder=1),
    bid(1, 10_000, 61, bidder=1),
    bid(2, 999_999, 125, bidder=2, channel="Baidu"),
    bid(2, 1_000_000, 62, bidder=2),
    bid(2, 1_000_001, 63, bidder=2),
    bid(3, 5, 86_400, bidder=1),
]


def test_q15_counts_bids_bidders_and_auctions_by_day_and_price() -> None:
    assert asked("q15", bid=RANKED) == [
        ("2024-01-01", 5, 1, 2, 2, 2, 1, 2, 1, 2, 1, 2, 1),
        ("2024-01-02", 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0),
    ]


def test_q16_counts_them_by_channel_as_well() -> None:
    assert asked("q16", bid=RANKED) == [
        ("Apple", "2024-01-01", "00:01", 4, 1, 1, 2, 2, 1, 1, 1, 2, 1, 1, 1),
        ("Apple", "2024-01-02", "00:00", 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0),
        ("Baidu", "2024-01-01", "00:02", 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0),
    ]


def test_q17_sums_up_each_auctions_day_and_cuts_the_average() -> None:
    assert asked("q17", bid=RANKED) == [
        (1, "2024-01-01", 2, 1, 1, 0, 9_999, 10_000, 9_999, 19_999),
        (2, "2024-01-01", 3, 0, 1, 2, 999_999, 1_000_001, 1_000_000, 3_000_000),
        (3, "2024-01-02", 1, 1, 0, 0, 5, 5, 5, 5),
    ]


def test_q18_keeps_the_last_bid_of_a_bidder_on_an_auction() -> None:
    bids = [
        bid(1, 900, 1),
        bid(1, 100, 2, extra="a"),
        bid(1, 300, 2, extra="b"),
        bid(1, 300, 2, extra="c"),
        bid(1, 50, 3, bidder=8),
        bid(2, 10, 0),
    ]
    assert asked("q18", bid=bids, columns="auction bidder price date_time extra") == [
        (1, 7, 300, at(2), "c"),
        (1, 8, 50, at(3), ""),
        (2, 7, 10, at(0), ""),
    ]


def test_q19_ranks_the_highest_bids_of_each_auction() -> None:
    bids = [bid(1, 100 + n, n) for n in range(12)] + [
        bid(2, 5, 2),
        bid(2, 5, 1, bidder=9),
        bid(2, 5, 1, bidder=8),
    ]
    found = asked("q19", bid=bids, columns="auction rank_number price bidder")
    assert sorted(found) == [
        *((1, n + 1, 111 - n, 7) for n in range(10)),
        (2, 1, 5, 8),
        (2, 2, 5, 9),
        (2, 3, 5, 7),
    ]
    assert len(asked("q19", bid=bids, options={"top": 2})) == 4


def test_q20_joins_bids_with_auctions_of_category_10() -> None:
    link = "https://www.nexmark.com/a/b/c/item.htm?query=1"
    auctions = [auction(1, 10), auction(2, category=11)]
    assert asked("q20", auction=auctions, bid=[bid(1, 5, 1, extra="x"), bid(2, 6), bid(3, 7)]) == [
        (1, 7, 5, "Apple", link, at(1), "x", "item 1", "old", 1, 2, at(10), at(20), 1, 10, "a")
    ]


def test_q21_knows_four_channels_and_reads_the_others_from_the_url() -> None:
    bids = [bid(n, channel=name) for n, name in enumerate(["Apple", "Google", "Facebook", "BAIDU"])]
    bids += [
        bid(4, channel="channel-1", url="https://x/y?query=1&channel_id=42&z=1"),
        bid(5, channel="channel-2", url="https://x/y?query=1"),
        bid(6, channel="channel-3", url="channel_id="),
        bid(7, channel="channel-4", url="https://x/y?channel_id=3"),
    ]
    assert asked("q21", bid=bids, columns="auction channel_id") == [
        (0, "0"),
        (1, "1"),
        (2, "2"),
        (3, "3"),
        (4, "42"),
        (6, ""),
    ]


def test_q22_splits_the_url() -> None:
    bids = [bid(1), bid(2, url="https://www.nexmark.com/a//")]
    assert asked("q22", bid=bids, columns="dir1 dir2 dir3") == [("a", "b", "c"), ("a", "", "")]
    assert asked("q22", bid=[bid(1, url="https://www.nexmark.com/a")], columns="dir1 dir2 dir3") == [
        ("a", None, None)
    ]


# All of them


@pytest.fixture(scope="module")
def tables() -> dict[str, pa.Table]:
    made = events(0, 100_000)
    processed = pa.array(START_MS + np.arange(made["bid"].num_rows) // 4)
    return {**made, "bid": made["bid"].append_column("processed_ms", processed)}


@pytest.mark.parametrize("query", list(QUERIES))
def test_every_query_gives_rows_that_its_key_identifies(query: str, tables: dict[str, pa.Table]) -> None:
    info = QUERIES[query]
    found = answer(query, tables)
    assert found.num_rows > 0
    assert tuple(found.column_names) == info.columns
    assert set(info.key) <= set(info.columns)
    if info.key:
        assert found.group_by(list(info.key)).aggregate([]).num_rows == found.num_rows
    shuffled = {
        name: table.take(np.random.default_rng(1).permutation(len(table))) for name, table in tables.items()
    }
    again = answer(query, shuffled)
    assert again == found
    assert (
        info.about.endswith(".")
        and sum(word in (info.sql.__doc__ or "") for word in ("Columns:", "identif")) == 2
    )
    assert ("Updating:" in (info.sql.__doc__ or "")) == info.updating


def test_the_queries_are_all_there() -> None:
    assert list(QUERIES) == [f"q{n}" for n in range(23)]
    assert not any(info.updating and not info.stateful for info in QUERIES.values())
    with pytest.raises(TypeError, match="widow_ms"):
        answer("q7", {}, widow_ms=1)


# Comparing


def test_tables_are_equal_in_any_order_and_whatever_their_types_are_called() -> None:
    truth = pa.table(
        {
            "k": pa.array([1, 2, 2], pa.int64()),
            "s": ["a", "b", None],
            "t": pa.array([1, 2, 3], pa.timestamp("ms")),
            "p": pa.array([Decimal("1.500"), Decimal("0.333"), None], pa.decimal128(23, 3)),
        }
    )
    ours = pa.table(
        {
            "p": [None, 0.333 * (1 + 1e-12), 1.5],
            "t": pa.array([3_000, 2_000, 1_000], pa.timestamp("us", tz="UTC")),
            "s": pa.array([None, "b", "a"]).dictionary_encode(),
            "k": pa.array([2, 2, 1], pa.int32()),
        }
    )
    assert equal(ours, truth) == (True, "")
    assert equal(truth, truth) == (True, "")
    assert equal(truth.slice(0, 0), truth.slice(0, 0)) == (True, "")


def test_what_differs_is_said() -> None:
    truth = pa.table({"k": [1, 1, 2], "v": [0.5, 0.5, 0.25]})
    same, what = equal(pa.table({"k": [1, 2, 2], "v": [0.5, 0.25, 0.26]}), truth)
    assert not same
    assert what == (
        "3 rows, and there should be 3.\n"
        "1 are missing:\n  {'k': 1, 'v': 0.5}\n"
        "1 are too many:\n  {'k': 2, 'v': 0.26}"
    )
    assert equal(truth.slice(1), truth)[1].startswith("2 rows, and there should be 3.")
    assert equal(pa.table({"k": [1, 1, 2], "v": [0.5, 0.5, 0.2500001]}), truth)[0] is False
    assert "columns" in equal(truth.select(["k"]), truth)[1]
    assert equal(truth.set_column(0, "k", pa.array(["1", "1", "2"])), truth)[1] == (
        "k is of type string, but should be int64."
    )
