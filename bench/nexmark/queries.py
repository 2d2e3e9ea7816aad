"""Nexmark's queries as pipelines, with the public API alone: `build("q5", sources, sink)`.

What is done with whole tables is in `columns`, functions with state are in `functions`; here is what stands behind
what. The meaning of each query, its columns and how ties are decided is said in `oracle`. Where Flink's result is
a stream of changes, rows are upserts: the last row of a key counts, by epoch and then by order (`results.final`).

What passes an exchange is first shrunk by Arrow where that can be: a table's highest bids, its counts, what it saw.
Winners (q4, q6, q9) are told when event time has passed an auction's end, so nothing of it stays in state after that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import holdfast as hf
from bench.nexmark import columns as c
from bench.nexmark import functions as f
from bench.nexmark.generator import AUCTION, BID, SCHEMAS


@dataclass(frozen=True)
class Options:
    """What of a query can be changed: as `oracle.Options`, and how far out of order events may come."""

    window_ms: int = 10_000
    slide_ms: int = 2_000
    gap_ms: int = 10_000
    top: int = 10
    out_of_order_ms: int = 0


@dataclass(frozen=True)
class Query:
    """How a query is built: the columns it reads of each kind, and the function that puts the rest behind them."""

    reads: dict[str, tuple[str, ...]]
    timed: bool
    build: Callable[..., hf.Stream]


QUERIES: dict[str, Query] = {}
"""All queries by name, in order."""

Built = Callable[..., hf.Stream]


def query(*, timed: bool = False, **reads: str) -> Callable[[Built], Built]:
    """Put a query into `QUERIES`; `timed`: its streams have event time."""

    def put(build: Built) -> Built:
        QUERIES[build.__name__] = Query({k: tuple(v.split()) for k, v in reads.items()}, timed, build)
        return build

    return put


def build(query: str, sources: Mapping[str, hf.Source], out: hf.Sink, **options: int) -> hf.Pipeline:
    """The pipeline of a query.

    Args:
        query: a name in `QUERIES`.
        sources: a source for each kind of events that the query reads; it may leave columns out that are not read.
        out: where the result goes, under the uid "out".
        options: fields of `Options`.
    """
    chosen, asked = Options(**options), QUERIES[query]
    pipeline = hf.Pipeline(f"nexmark-{query}")
    streams: dict[str, hf.Stream] = {}
    for kind, names in asked.reads.items():
        stream = pipeline.read(kind, sources[kind])
        stream = stream.map_batches(partial(c.select, columns=names), schema=_schema(SCHEMAS[kind], names))
        if asked.timed:
            late = f"{chosen.out_of_order_ms}ms"
            stream = stream.event_time("date_time", out_of_order=late, uid=f"{kind}.time")
        streams[kind] = stream
    asked.build(chosen, **streams).write("out", out)
    return pipeline


def _schema(of: pa.Schema, names: Any, **more: pa.DataType) -> pa.Schema:
    return pa.schema([*f.fields(of, names), *(pa.field(n, kind) for n, kind in more.items())])


def _ms(length: int) -> str:
    return f"{length}ms"


# Records one by one


@query(bid="auction bidder price date_time extra")
def q0(options: Options, bid: hf.Stream) -> hf.Stream:
    return bid


@query(bid="auction bidder price date_time extra")
def q1(options: Options, bid: hf.Stream) -> hf.Stream:
    return bid.map_batches(c.euros)


@query(bid="auction price")
def q2(options: Options, bid: hf.Stream) -> hf.Stream:
    return bid.map_batches(c.every_123rd)


@query(bid="auction bidder price date_time extra")
def q10(options: Options, bid: hf.Stream) -> hf.Stream:
    return bid.map_batches(c.filed)


@query(bid="auction bidder price date_time")
def q13(options: Options, bid: hf.Stream) -> hf.Stream:
    return bid.map_batches(c.looked_up)


@query(bid="auction bidder price date_time extra")
def q14(options: Options, bid: hf.Stream) -> hf.Stream:
    return bid.map_batches(c.between_prices)


@query(bid="auction bidder price channel url")
def q21(options: Options, bid: hf.Stream) -> hf.Stream:
    return bid.map_batches(c.with_channel_ids)


@query(bid="auction bidder price channel url")
def q22(options: Options, bid: hf.Stream) -> hf.Stream:
    return bid.map_batches(c.with_folders)


# Joins


@query(person="id name city state", auction="id seller category")
def q3(options: Options, person: hf.Stream, auction: hf.Stream) -> hf.Stream:
    here = person.map_batches(_in_three_states)
    sold = auction.map_batches(_of_category_10)
    joined = here.key_by("id").connect(sold.key_by("seller"))
    return joined.process("sellers", f.SellerOf(), schema={"name": str, "city": str, "state": str, "id": int})


def _in_three_states(person: pa.Table) -> pa.Table:
    return person.filter(pc.is_in(person.column("state"), pa.array(["OR", "ID", "CA"])))


def _of_category_10(auction: pa.Table) -> pa.Table:
    return auction.filter(pc.equal(auction.column("category"), 10)).drop_columns(["category"])


@query(
    auction="id item_name description initial_bid reserve date_time expires seller category extra",
    bid="auction bidder price channel url date_time extra",
)
def q20(options: Options, auction: hf.Stream, bid: hf.Stream) -> hf.Stream:
    named = auction.map_batches(_told_if_wanted).map_batches(partial(_renamed, prefix="auction_"))
    bids = bid.map_batches(partial(_renamed, prefix="bid_"))
    kinds = [*f.Described.waiting.value_type, *f.Described.auction.value_type]
    schema = pa.schema([pa.field("auction", pa.int64()), *kinds])
    return (
        named.key_by("id").connect(bids.key_by("auction")).process("described", f.Described(), schema=schema)
    )


def _told_if_wanted(auction: pa.Table) -> pa.Table:
    """Of an auction in another category only that is sent on: its texts are of no use to anybody."""
    wanted = pc.equal(auction.column("category"), f.Described.wanted)
    for name in ("item_name", "description", "extra"):
        text = pc.if_else(wanted, auction.column(name), pa.scalar(None, pa.string()))
        auction = auction.set_column(auction.schema.get_field_index(name), name, text)
    return auction


def _renamed(table: pa.Table, prefix: str) -> pa.Table:
    both = ("date_time", "extra")
    return table.rename_columns([prefix + name if name in both else name for name in table.column_names])


# Winners


def _closing(auction: pa.Table) -> pa.Table:
    return auction.append_column("closes", pa.array(c.numbers(auction, "expires")))


def _winning_prices(auction: hf.Stream, bid: hf.Stream) -> hf.Stream:
    both = auction.map_batches(_closing).key_by("id").connect(bid.key_by("auction"))
    return both.process("prices", f.WinningPrice(), schema=f.WINNING_PRICE)


@query(timed=True, auction="id date_time expires seller category", bid="auction price date_time")
def q4(options: Options, auction: hf.Stream, bid: hf.Stream) -> hf.Stream:
    won = _winning_prices(auction, bid).key_by("category")
    totals = won.aggregate("totals", total=hf.sum("price"), n=hf.count())
    averages = totals.map_batches(partial(c.averaged, name="final", total="total", count="n"))
    return averages.map_batches(partial(c.select, columns=("category", "final")))


@query(timed=True, auction="id date_time expires seller category", bid="auction price date_time")
def q6(options: Options, auction: hf.Stream, bid: hf.Stream) -> hf.Stream:
    won = _winning_prices(auction, bid).key_by("seller")
    schema = {"seller": int, "auction": int, "date_time": int, "avg_price": int}
    averages = won.process("averages", f.LastPrices(), schema=schema)
    return averages.map_batches(partial(c.times, columns=("date_time",)))


@query(
    timed=True,
    auction="id item_name description initial_bid reserve date_time expires seller category extra",
    bid="auction bidder price channel url date_time extra",
)
def q9(options: Options, auction: hf.Stream, bid: hf.Stream) -> hf.Stream:
    both = auction.map_batches(_closing).key_by("id").connect(bid.key_by("auction"))
    won = both.process("winners", f.WinningBid(), schema=f.WINNING_BID)
    return won.map_batches(partial(c.times, columns=("bid_date_time",)))


# Windows


@query(timed=True, bid="auction date_time")
def q5(options: Options, bid: hf.Stream) -> hf.Stream:
    windows = bid.key_by("auction").window(hf.sliding(_ms(options.window_ms), _ms(options.slide_ms)))
    counts = windows.aggregate("counts", num=hf.count()).map_batches(c.most)
    schema = {"auction": int, "num": int, "starttime": int, "endtime": int}
    found = counts.key_by("start").process("most", f.Most(options.window_ms), schema=schema)
    return found.map_batches(partial(c.times, columns=("starttime", "endtime")))


@query(timed=True, bid="auction bidder price date_time extra")
def q7(options: Options, bid: hf.Stream) -> hf.Stream:
    bids = bid.map_batches(partial(c.highest, window_ms=options.window_ms)).key_by("start")
    schema = _schema(BID, ("auction", "bidder", "price", "date_time", "extra"))
    return bids.process("highest", f.Highest(options.window_ms), schema=schema)


@query(timed=True, person="id name date_time", auction="seller date_time")
def q8(options: Options, person: hf.Stream, auction: hf.Stream) -> hf.Stream:
    schema = {"id": int, "name": str, "date_time": AUCTION.field("date_time").type, "sold": int}
    both = person.map_batches(_registered, schema=schema).union(auction.map_batches(_sold, schema=schema))
    windows = both.key_by("id").window(hf.tumbling(_ms(options.window_ms)))
    people = windows.aggregate("people", name=hf.max("name"), sold=hf.sum("sold"))
    return people.map_batches(_both_at_once)


def _registered(person: pa.Table) -> pa.Table:
    return person.append_column("sold", pa.array([0] * person.num_rows, pa.int64()))


def _sold(auction: pa.Table) -> pa.Table:
    count = auction.num_rows
    return pa.table(
        {
            "id": auction.column("seller"),
            "name": pa.nulls(count, pa.string()),
            "date_time": auction.column("date_time"),
            "sold": pa.array([1] * count, pa.int64()),
        }
    )


def _both_at_once(people: pa.Table) -> pa.Table:
    sold = pc.greater(people.column("sold"), 0)
    people = people.filter(pc.and_(sold, pc.is_valid(people.column("name"))))
    starts = pa.array(c.numbers(people, "window_start")).cast(pa.timestamp("ms"))
    return pa.table({"id": people.column("id"), "name": people.column("name"), "starttime": starts})


@query(timed=True, bid="bidder date_time")
def q11(options: Options, bid: hf.Stream) -> hf.Stream:
    sessions = bid.key_by("bidder").window(hf.session(_ms(options.gap_ms)))
    return sessions.aggregate("sessions", bid_count=hf.count()).map_batches(_sessions)


def _sessions(found: pa.Table) -> pa.Table:
    names = {"window_start": "starttime", "window_end": "endtime"}
    found = found.rename_columns([names.get(name, name) for name in found.column_names])
    return found.select(["bidder", "bid_count", "starttime", "endtime"])


@query(bid="bidder")
def q12(options: Options, bid: hf.Stream) -> hf.Stream:
    windows = bid.clock_time("processed").key_by("bidder").window(hf.tumbling(_ms(options.window_ms)))
    return windows.aggregate("processed", bid_count=hf.count()).map_batches(_processed)


def _processed(found: pa.Table) -> pa.Table:
    found = _sessions(found)
    return c.times(found, columns=("starttime", "endtime"))


# Counting and ranking


def _distinct(bid: hf.Stream, by: tuple[str, ...]) -> hf.Stream:
    """Counts of bids, bidders and auctions by some columns: a bidder counts where nobody saw it there before."""
    ranked = bid.map_batches(c.ranked)
    bids = ranked.map_batches(partial(c.bid_counts, by=by))
    firsts = (
        ranked.map_batches(partial(c.seen, by=by))
        .key_by(*(name for name in by if name != "day"), "code")
        .deduplicate("firsts")
    )
    new = firsts.map_batches(partial(c.new_counts, by=by))
    sums = {name: hf.sum(name) for name in c.COUNTS}
    counts = bids.union(new).key_by(*by).aggregate("counts", minute=hf.max("minute"), **sums)
    columns = (*by, *(("minute",) if "channel" in by else ()), *c.COUNTS)
    return counts.map_batches(partial(c.dated, columns=columns))


@query(bid="auction bidder price date_time")
def q15(options: Options, bid: hf.Stream) -> hf.Stream:
    return _distinct(bid, ("day",))


@query(bid="auction bidder price channel date_time")
def q16(options: Options, bid: hf.Stream) -> hf.Stream:
    return _distinct(bid, ("channel", "day"))


@query(bid="auction price date_time")
def q17(options: Options, bid: hf.Stream) -> hf.Stream:
    stats = (
        bid.map_batches(c.ranked)
        .key_by("auction", "day")
        .aggregate(
            "days",
            total_bids=hf.count(),
            rank1_bids=hf.sum("rank1"),
            rank2_bids=hf.sum("rank2"),
            rank3_bids=hf.sum("rank3"),
            min_price=hf.min("price"),
            max_price=hf.max("price"),
            sum_price=hf.sum("price"),
        )
    )
    stats = stats.map_batches(partial(c.averaged, name="avg_price", total="sum_price", count="total_bids"))
    counts = tuple(f"{rank}_bids" for rank in c.RANKS)
    columns = ("auction", "day", *counts, "min_price", "max_price", "avg_price", "sum_price")
    return stats.map_batches(partial(c.dated, columns=columns))


@query(bid="auction bidder price channel url date_time extra")
def q18(options: Options, bid: hf.Stream) -> hf.Stream:
    bids = bid.key_by("auction", "bidder")
    last = bids.top("last", 1, by=("date_time", "price", "channel", "url", "extra"))
    return last.map_batches(partial(c.select, columns=BID.names))


@query(bid="auction bidder price channel url date_time extra")
def q19(options: Options, bid: hf.Stream) -> hf.Stream:
    order = ("price", "date_time", "bidder", "channel", "url", "extra")
    upwards = [name != "price" for name in order]
    bids = bid.key_by("auction")
    return bids.top("top", options.top, by=order, ascending=upwards, rank="rank_number")


QUERIES = dict(sorted(QUERIES.items(), key=lambda item: int(item[0][1:])))
