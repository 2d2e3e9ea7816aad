"""Nexmark's events: the published proportions and ids, and the same events however they are read."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.nexmark import KINDS, SCHEMAS, Config, NexmarkSource, events, mixed
from bench.nexmark.generator import _Draws, _numbers
from holdfast.io.base import Limit, Range, Reading
from holdfast.io.contract import check_source
from holdfast.io.rate import START_MS, _hash

THREE = ("person", "auction", "bid")
CONFIG = Config(seed=3, first_event_rate=1_000)
"""One event a millisecond, so that an event's time tells its number."""


@pytest.fixture(scope="module")
def tables() -> dict[str, pa.Table]:
    return events(0, 200_000, CONFIG)


def ints(table: pa.Table, column: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.asarray(table.column(column).cast(pa.int64()))


def numbers(table: pa.Table) -> np.ndarray[Any, np.dtype[np.int64]]:
    return ints(table, "date_time") - START_MS


# Events


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1 << 40), st.integers(1, 20))
def test_of_fifty_events_one_is_a_person_three_are_auctions_and_46_are_bids(start: int, rounds: int) -> None:
    made = events(start, start + 50 * rounds, CONFIG)
    assert [made[kind].num_rows for kind in THREE] == [rounds, 3 * rounds, 46 * rounds]
    assert all(made[kind].schema == SCHEMAS[kind] for kind in THREE)


def test_every_event_number_is_one_event(tables: dict[str, pa.Table]) -> None:
    every = np.concatenate([numbers(tables[kind]) for kind in THREE])
    assert np.array_equal(np.sort(every), np.arange(200_000))
    assert set(numbers(tables["person"]) % 50) == {0}
    assert set(numbers(tables["auction"]) % 50) == {1, 2, 3}


def test_ids_count_up_from_1000(tables: dict[str, pa.Table]) -> None:
    for kind in ("person", "auction"):
        ids = ints(tables[kind], "id")
        assert np.array_equal(ids, 1000 + np.arange(len(ids)))


def test_sellers_and_bidders_are_active_people_or_will_register_soon(tables: dict[str, pa.Table]) -> None:
    for kind, column in (("auction", "seller"), ("bid", "bidder")):
        last = numbers(tables[kind]) // 50
        ahead = ints(tables[kind], column) - 1000 - last
        assert ahead.max() == 10
        assert (ahead >= -np.minimum(last, 999)).all()
        assert (ints(tables[kind], column) >= 1000).all()


def test_bids_are_for_auctions_in_flight_or_put_up_soon(tables: dict[str, pa.Table]) -> None:
    last = numbers(tables["bid"]) // 50 * 3 + 2
    ahead = ints(tables["bid"], "auction") - 1000 - last
    assert (ahead.min(), ahead.max()) == (-100, 10)
    assert (ints(tables["bid"], "auction") >= 1000).all()


def test_most_go_to_the_hot_ones(tables: dict[str, pa.Table]) -> None:
    bids, auctions = tables["bid"], tables["auction"]
    hot_auction = 1000 + (numbers(bids) // 50 * 3 + 2) // 100 * 100
    hot_bidder = 1001 + numbers(bids) // 50 // 100 * 100
    hot_seller = 1000 + numbers(auctions) // 50 // 100 * 100
    assert np.mean(ints(bids, "auction") == hot_auction) == pytest.approx(1 / 2, abs=0.02)
    assert np.mean(ints(bids, "bidder") == hot_bidder) == pytest.approx(3 / 4, abs=0.02)
    assert np.mean(ints(auctions, "seller") == hot_seller) == pytest.approx(3 / 4, abs=0.02)


def test_auctions_last_as_long_as_it_takes_to_put_up_a_hundred_more(tables: dict[str, pa.Table]) -> None:
    auctions = tables["auction"]
    lasts = ints(auctions, "expires") - ints(auctions, "date_time")
    assert (lasts.min(), lasts.max()) == (1, 2 * 1666)
    assert lasts.mean() == pytest.approx(1666, rel=0.02)
    assert set(ints(auctions, "category")) == {10, 11, 12, 13, 14}
    assert (ints(auctions, "reserve") > ints(auctions, "initial_bid")).all()


def test_prices_are_spread_evenly_over_their_digits(tables: dict[str, pa.Table]) -> None:
    prices = ints(tables["bid"], "price")
    assert prices.min() >= 100 and prices.max() <= 100_000_000
    digits = np.bincount(np.log10(prices).astype(int), minlength=8)[2:8] / len(prices)
    assert digits == pytest.approx([1 / 6] * 6, abs=0.01)


def test_prices_are_the_power_of_ten_that_is_asked_for() -> None:
    at = np.arange(10_000, dtype=np.int64)
    share = (_hash(at.astype(np.uint64), 1) >> np.uint64(31)) / 2**33
    assert _Draws(at, 0, 0).price() == pytest.approx(np.power(10.0, share * 6) * 100, abs=0.501)


def test_half_of_the_bids_come_by_four_channels(tables: dict[str, pa.Table]) -> None:
    bids = tables["bid"]
    hot = pc.is_in(bids["channel"], pa.array(["Google", "Facebook", "Baidu", "Apple"]))
    assert pc.mean(pc.cast(hot, pa.int8())).as_py() == pytest.approx(0.5, abs=0.01)
    pairs = bids.group_by(["channel", "url"]).aggregate([])
    assert pairs.num_rows == 10_004 == pc.count_distinct(pairs["channel"]).as_py()
    plain = r"^https://www\.nexmark\.com/[a-z_]{3,4}/[a-z_]{3,4}/[a-z_]{3,4}/item\.htm\?query=1(&channel_id=\d+)?$"
    assert pc.all(pc.match_substring_regex(pairs["url"], plain)).as_py()
    tagged = pc.cast(pc.match_substring(pairs["url"], "&channel_id="), pa.int8())
    assert pc.mean(tagged).as_py() == pytest.approx(0.9, abs=0.01)


def test_records_have_their_published_sizes(tables: dict[str, pa.Table]) -> None:
    for kind, texts, rest, size in (
        ("person", ("name", "email_address", "credit_card", "city", "state", "extra"), 8, 200),
        ("auction", ("item_name", "description", "extra"), 48, 500),
        ("bid", ("extra",), 32, 100),
    ):
        found = rest + sum(pc.mean(pc.binary_length(tables[kind][text])).as_py() for text in texts)
        assert found == pytest.approx(size, rel=0.01)


def test_extra_can_be_left_out_and_the_rest_stays(tables: dict[str, pa.Table]) -> None:
    for kind, table in events(0, 1_000, Config(seed=3, first_event_rate=1_000, extra=False)).items():
        assert set(table["extra"].to_pylist()) == {""}
        assert table.drop(["extra"]) == tables[kind].slice(0, len(table)).drop(["extra"])


def test_people_are_as_published(tables: dict[str, pa.Table]) -> None:
    people = tables["person"]
    assert pc.count_distinct(people["name"]).as_py() == 99
    assert pc.count_distinct(people["city"]).as_py() == 10
    assert set(people["state"].to_pylist()) == {"AZ", "CA", "ID", "OR", "WA", "WY"}
    assert pc.all(pc.match_substring_regex(people["credit_card"], r"^\d{4} \d{4} \d{4} \d{4}$")).as_py()
    assert pc.all(
        pc.match_substring_regex(people["email_address"], r"^[a-z ]{0,6}@[a-z ]{0,4}\.com$")
    ).as_py()


def test_event_time_goes_on_with_the_number() -> None:
    bids = events(0, 100_000, Config(first_event_rate=10_000, start_ms=5))["bid"]
    assert np.array_equal(ints(bids, "date_time"), 5 + _numbers("bid", 0, 100_000) // 10)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1 << 40), st.integers(0, 300), st.integers(0, 300), st.integers(0, 1 << 40))
def test_an_event_does_not_depend_on_the_range_it_is_made_in(a: int, one: int, two: int, seed: int) -> None:
    config = Config(seed=seed)
    whole = events(a, a + one + two, config)
    parts = [events(a, a + one, config), events(a + one, a + one + two, config)]
    for kind in THREE:
        assert (
            pa.concat_tables([part[kind] for part in parts]).combine_chunks() == whole[kind].combine_chunks()
        )


def test_events_are_what_they_were_when_this_was_written() -> None:
    made = events(7_000, 7_050, Config(seed=7))
    person, auction, bid = (made[kind].to_pylist()[-1] for kind in THREE)
    assert (person["id"], person["name"], person["extra"][:8]) == (1140, "John Bartels", "viiesiva")
    assert person["email_address"] == "gycz@heg.com"
    assert (auction["id"], auction["item_name"]) == (1422, "ajhi bofqz cg vz")
    assert (auction["reserve"], auction["seller"]) == (177554, 1100)
    assert (bid["auction"], bid["bidder"], bid["price"], bid["channel"]) == (1400, 1101, 304621, "Google")
    assert bid["url"] == "https://www.nexmark.com/tzgo/jrj/jvu/item.htm?query=1"


def test_another_seed_gives_other_events(tables: dict[str, pa.Table]) -> None:
    other = events(0, 5_000, Config(seed=4, first_event_rate=1_000))
    for kind, column in (("person", "name"), ("auction", "seller"), ("bid", "price"), ("bid", "extra")):
        assert other[kind][column] != tables[kind][column].slice(0, len(other[kind]))


def test_all_kinds_stand_in_one_table_in_order(tables: dict[str, pa.Table]) -> None:
    table = mixed(30, 10_000, CONFIG)
    assert table.schema == SCHEMAS["event"]
    assert np.array_equal(numbers(table), np.arange(30, 10_000))
    separate = events(30, 10_000, CONFIG)
    for type_number, kind in enumerate(THREE):
        mine = pc.equal(table["event_type"], type_number)
        assert pc.is_valid(table[kind]) == mine
        rows = pa.Table.from_struct_array(table.filter(mine)[kind].combine_chunks())
        assert rows.combine_chunks() == separate[kind].combine_chunks()


@pytest.mark.parametrize(
    "setting", [{"first_event_rate": 0}, {"hot_auction_ratio": 0}, {"avg_bid_bytes": 1 << 20}]
)
def test_a_setting_without_sense_is_named(setting: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        Config(**setting)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no range"):
        events(5, 4)


# The source


def drained(source: NexmarkSource, records: int = 1 << 30, tasks: int = 1) -> list[list[pa.Table]]:
    """What each epoch read, a table a range."""
    position, epochs = None, []
    for _ in range(1_000):
        offer = source.plan(position, Limit(records, tasks, 0))
        epochs.append([pa.concat_tables(source.read(piece, Reading("s"))) for piece in offer.ranges])
        position = offer.position
        if offer.exhausted:
            return epochs
    raise AssertionError("no end")


def together(epochs: list[list[pa.Table]]) -> pa.Table:
    return pa.concat_tables([table for epoch in epochs for table in epoch])


@pytest.mark.parametrize("kind", [*THREE, "event"])
def test_the_source_keeps_the_contract(kind: str) -> None:
    count = 1_003 if kind in ("bid", "event") else 5_003
    check_source(lambda: NexmarkSource(kind, count, seed=1, splits=3))
    check_source(lambda: NexmarkSource(kind, count, seed=1, splits=2, shuffle_within=77, per_epoch=250))


@pytest.mark.parametrize("shuffle_within", [0, 1_000, 777])
@pytest.mark.parametrize("kind", THREE)
def test_however_it_is_split_and_cut_the_events_are_the_same(
    tables: dict[str, pa.Table], kind: str, shuffle_within: int
) -> None:
    wanted = tables[kind].sort_by("date_time")
    for splits, records, tasks in ((1, 1 << 30, 1), (3, 30_011, 8), (7, 50_000, 2)):
        source = NexmarkSource(kind, 200_000, 3, splits, config=CONFIG, shuffle_within=shuffle_within)
        found = together(drained(pickle.loads(pickle.dumps(source)), records, tasks))
        assert found.sort_by("date_time").combine_chunks() == wanted.combine_chunks()


def test_in_order_it_is_what_the_generator_makes(tables: dict[str, pa.Table]) -> None:
    source = NexmarkSource("bid", 200_000, 3, 1, config=CONFIG)
    assert together(drained(source)).combine_chunks() == tables["bid"].combine_chunks()


@pytest.mark.parametrize(("kind", "splits"), [("bid", 1), ("bid", 3), ("auction", 2), ("event", 1)])
def test_a_shuffled_event_stays_in_its_block(kind: str, splits: int) -> None:
    source = NexmarkSource(kind, 50_000, 3, splits, config=CONFIG, shuffle_within=640)
    for split in range(splits):
        pieces = [r for r in source.plan(None, Limit(1 << 30, 1, 0)).ranges if int(r.split) == split]
        arrived = numbers(pa.concat_tables([t for r in pieces for t in source.read(r, Reading("s"))]))
        in_order = np.sort(arrived)
        assert np.array_equal(arrived // 640, in_order // 640)
        assert np.abs(arrived - in_order).max() < 640
        assert np.mean(arrived == in_order) < 0.1
        late = np.maximum.accumulate(arrived) - arrived
        assert 320 < late.max() < 640


def test_another_seed_shuffles_otherwise_and_blocks_are_shuffled_each_in_its_own_way() -> None:
    one, other = (
        numbers(together(drained(NexmarkSource("event", 1_000, seed, 1, config=CONFIG, shuffle_within=500))))
        for seed in (1, 2)
    )
    assert not np.array_equal(one, other)
    assert not np.array_equal(one[:500], one[500:] - 500)


def test_sources_of_different_kinds_stay_side_by_side_in_event_time() -> None:
    epochs = {kind: drained(NexmarkSource(kind, 10_020, 3, config=CONFIG, per_epoch=1_000)) for kind in THREE}
    assert [len(found) for found in epochs.values()] == [11, 11, 11]
    for found in epochs.values():
        for number, epoch in enumerate(found):
            assert set(numbers(pa.concat_tables(epoch)) // 1_000) == {number}


def test_the_last_offer_says_that_it_is_the_last() -> None:
    # The last person is number 100; the bids after it are none of this source's.
    source = NexmarkSource("person", 149)
    offer = source.plan(None, Limit(2, 1, 0))
    assert (offer.backlog, offer.exhausted, offer.splits) == (1, False, ["0000", "0001"])
    offer = source.plan(offer.position, Limit(2, 1, 0))
    assert [sum(r.records for r in offer.ranges), offer.backlog, offer.exhausted] == [1, 0, True]
    assert NexmarkSource("bid", 3).plan(None, Limit(9, 1, 0)).exhausted


def test_a_range_is_read_in_tables_of_bounded_size() -> None:
    source = NexmarkSource("bid", 200_000, splits=1, config=Config(extra=False))
    assert [t.num_rows for t in source.read(Range("0000", 10, 150_010), Reading("s"))] == [
        65_536,
        65_536,
        18_928,
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"kind": "seller"}, "no kind 'seller'"),
        ({"splits": 0}, "splits at least 1"),
        ({"per_epoch": 70}, "multiple of 50"),
    ],
)
def test_a_source_without_sense_is_told_so(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        NexmarkSource(**{"kind": "bid", "events": 100, **arguments})


@given(st.sampled_from(list(KINDS)), st.integers(0, 10_000))
def test_kinds_know_their_numbers(kind: str, index: int) -> None:
    of = KINDS[kind]
    number = of.number(index)
    assert of.before(number) == index and of.before(number + 1) == index + 1
    assert of.numbers(np.array([index]))[0] == number
