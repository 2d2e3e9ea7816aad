"""The truth about Nexmark's queries: what each must have said once all events were read, asked of DuckDB.

Each query is a function that gives SQL over the tables `person`, `auction` and `bid`; its docstring names the
columns and what identifies a row. The meaning is that of nexmark/nexmark's Flink SQL; `answer` runs one over
Arrow tables, and `equal` compares somebody's result with it. How a query is run as a stream is left to others.

What is alike in all of them:

- The input is finite and the last watermark is past everything, so every window counts, the last ones too.
- Where Flink's result is a stream of changes (`updating` in `QUERIES`), the truth is what remains of each key.
- A window holds its start and not its end. Times are those of the events, to the millisecond, in UTC.
- Flink's average of whole numbers is a whole number: what is behind the point is cut off.
- Where Flink's SQL leaves a tie to the order of arrival, here the records' own values decide, as each docstring
  says: of records that are alike in what it names, the smaller bidder, channel, url and extra come first.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

SIDE_INPUT_ROWS = 10_000
RELATIVE = 1e-9
_SHOWN = 5


@dataclass(frozen=True)
class Options:
    """What of a query can be changed; the defaults are the published ones."""

    window_ms: int = 10_000
    """The length of windows in q5, q7, q8 and q12."""
    slide_ms: int = 2_000
    """How far apart q5's windows begin."""
    gap_ms: int = 10_000
    """How long a bidder is silent before another session begins (q11)."""
    top: int = 10
    """How many bids of an auction q19 keeps."""


@dataclass(frozen=True)
class QueryInfo:
    """What a query needs and gives. `key` identifies a row of the final result; empty: rows may be alike.

    `updating` says that Flink's result is a stream of changes, of which the truth is the last state.
    """

    reads: tuple[str, ...]
    stateful: bool
    updating: bool
    about: str
    columns: tuple[str, ...]
    key: tuple[str, ...]
    sql: Callable[[Options], str]


QUERIES: dict[str, QueryInfo] = {}
"""All queries by name, in order."""


def answer(query: str, tables: dict[str, pa.Table], **options: int) -> pa.Table:
    """The true result of a query over these tables, its rows sorted by all columns from left to right.

    Args:
        query: a name in `QUERIES`.
        tables: `person`, `auction` and `bid`, as far as the query reads them. For q12 `bid` has one more column,
            `processed_ms`. For q13 `side_input` may be given, else it is `side_input()`.
        options: fields of `Options`.
    """
    info = QUERIES[query]
    sql = info.sql(Options(**options))
    known = {"side_input": side_input(), **tables} if "side_input" in info.reads else tables
    with duckdb.connect() as connection:
        for name in info.reads:
            connection.register(name, known[name])
        found = connection.sql(f"SELECT * FROM ({sql}) ORDER BY ALL").to_arrow_table()
    assert tuple(found.column_names) == info.columns, f"{query} gave {found.column_names}"
    return found.cast(pa.schema([field.with_type(_plain(field.type)) for field in found.schema]))


def _plain(kind: pa.DataType) -> pa.DataType:
    """Times in milliseconds and sums as int64, whatever DuckDB made of them."""
    if pa.types.is_timestamp(kind):
        return pa.timestamp("ms")
    whole = pa.types.is_integer(kind) or (pa.types.is_decimal(kind) and kind.scale == 0)
    return pa.int64() if whole else kind


def side_input(rows: int = SIDE_INPUT_ROWS) -> pa.Table:
    """The table that q13 looks bids up in: each number below `rows`, and the same as text."""
    return pa.table({"key": pa.array(range(rows), pa.int64()), "value": [str(n) for n in range(rows)]})


# The queries

Sql = Callable[[Options], str]


def query(
    *reads: str, columns: str, key: str = "", stateful: bool = False, updating: bool = False
) -> Callable[[Sql], Sql]:
    """Put a query into `QUERIES`; the first line of its docstring says what it is about."""

    def put(sql: Sql) -> Sql:
        about = (inspect.getdoc(sql) or "").split("\n", 1)[0]
        QUERIES[sql.__name__] = QueryInfo(
            reads, stateful, updating, about, tuple(columns.split()), tuple(key.split()), sql
        )
        return sql

    return put


def _window(ms: str, length_ms: int) -> str:
    """SQL for the start of the tumbling window that a time in milliseconds falls into, in milliseconds."""
    return f"({ms} - {ms} % {length_ms})"


def _time(ms: str) -> str:
    return f"make_timestamp_ms({ms})"


_BID_ORDER = "bidder, channel, url, extra"
"""What decides between bids that a query leaves tied."""

_WON = f"""
    SELECT A.*, B.auction, B.bidder, B.price, B.date_time AS bid_date_time, B.extra AS bid_extra
    FROM auction A JOIN bid B ON A.id = B.auction AND B.date_time BETWEEN A.date_time AND A.expires
    QUALIFY row_number() OVER (
        PARTITION BY A.id
        ORDER BY B.price DESC, B.date_time, {", ".join("B." + name for name in _BID_ORDER.split(", "))}
    ) = 1"""
"""Each auction that got a bid in its time, with the winner: the highest price, of those the first."""

_RANKS = (
    ("total", ""),
    ("rank1", "FILTER (WHERE price < 10000)"),
    ("rank2", "FILTER (WHERE price >= 10000 AND price < 1000000)"),
    ("rank3", "FILTER (WHERE price >= 1000000)"),
)
_RANK_COLUMNS = " ".join(f"{rank}_{of}" for of in ("bids", "bidders", "auctions") for rank, _ in _RANKS)


def _counts(counted: str, what: str) -> str:
    """SQL for a count over all bids and over each of three ranges of prices."""
    return ", ".join(f"count({what}) {those} AS {rank}_{counted}" for rank, those in _RANKS)


_ALL_COUNTS = ", ".join(
    [_counts("bids", "*"), _counts("bidders", "DISTINCT bidder"), _counts("auctions", "DISTINCT auction")]
)
_DAY = "strftime(date_time, '%Y-%m-%d')"


@query("bid", columns="auction bidder price date_time extra")
def q0(options: Options) -> str:
    """Bids pass through.

    Columns: auction, bidder, price, date_time, extra. A row is a bid; nothing identifies it.
    """
    return "SELECT auction, bidder, price, date_time, extra FROM bid"


@query("bid", columns="auction bidder price date_time extra")
def q1(options: Options) -> str:
    """Prices of bids in another currency.

    Columns: auction, bidder, price (0.908 times as much, decimal(23, 3)), date_time, extra. A row is a bid;
    nothing identifies it.
    """
    return "SELECT auction, bidder, (0.908 * price)::DECIMAL(23, 3) AS price, date_time, extra FROM bid"


@query("bid", columns="auction price")
def q2(options: Options) -> str:
    """Bids on every 123rd auction.

    Columns: auction, price. A row is a bid; nothing identifies it.
    """
    return "SELECT auction, price FROM bid WHERE auction % 123 = 0"


@query("person", "auction", columns="name city state id", key="id", stateful=True)
def q3(options: Options) -> str:
    """Who sells in category 10 and lives in Oregon, Idaho or California: a join of persons and auctions.

    Columns: name, city, state (the seller's), id (the auction's). `id` identifies a row. Either side may come
    first; time plays no part.
    """
    return """
    SELECT P.name, P.city, P.state, A.id
    FROM auction A JOIN person P ON A.seller = P.id
    WHERE A.category = 10 AND P.state IN ('OR', 'ID', 'CA')"""


@query("auction", "bid", columns="category final", key="category", stateful=True, updating=True)
def q4(options: Options) -> str:
    """The average winning price of each category's auctions.

    Columns: category, final (average of the highest bids made from an auction's date_time to its expires, both
    included; cut to a whole number). `category` identifies a row. Updating: the last average of each category, in
    which every auction that got a bid in its time counts once. An auction without one doesn't count.
    """
    return f"SELECT category, sum(price) // count(*) AS final FROM ({_WON}) GROUP BY category"


@query("bid", columns="auction num starttime endtime", key="auction starttime", stateful=True)
def q5(options: Options) -> str:
    """The auctions with the most bids in the last 10 seconds, every 2 seconds.

    Columns: auction, num (its bids in the window), starttime, endtime; Flink's query leaves the last two out.
    `auction` and `starttime` identify a row. Several auctions share a window if they are tied. A window begins at
    each multiple of `slide_ms` since 1970 and lasts `window_ms`; one without bids has no row.
    """
    last = _window("epoch_ms(date_time)", options.slide_ms)
    return f"""
    WITH hops AS (
        SELECT auction, {last} - back AS start
        FROM bid, range(0, {options.window_ms}, {options.slide_ms}) AS hop(back)
        WHERE {last} - back + {options.window_ms} > epoch_ms(date_time)
    )
    SELECT auction, count(*) AS num, {_time("start")} AS starttime,
        {_time(f"start + {options.window_ms}")} AS endtime
    FROM hops GROUP BY auction, start
    QUALIFY count(*) = max(count(*)) OVER (PARTITION BY start)"""


@query(
    "auction",
    "bid",
    columns="seller auction date_time avg_price",
    key="auction",
    stateful=True,
    updating=True,
)
def q6(options: Options) -> str:
    """For each seller's auction, the average winning price of it and the 10 before it.

    Columns: seller, auction, date_time (of the winning bid), avg_price (cut to a whole number); Flink's query
    gives seller and avg_price alone, and Flink can't run it. `auction` identifies a row. Updating: winners are
    the final ones, as in q9, put in order by date_time and then by the auction's id; the average is over at most
    11 rows, as the SQL has it. An auction without a bid in its time has no row.
    """
    last = "OVER (PARTITION BY seller ORDER BY bid_date_time, id ROWS BETWEEN 10 PRECEDING AND CURRENT ROW)"
    return f"""
    SELECT seller, id AS auction, bid_date_time AS date_time,
        sum(price) {last} // count(*) {last} AS avg_price
    FROM ({_WON})"""


@query("bid", columns="auction bidder price date_time extra", stateful=True)
def q7(options: Options) -> str:
    """The highest bids of every 10 seconds.

    Columns: auction, bidder, price, date_time, extra. A row is a bid; all that are tied for the highest price of
    their window are there, so nothing identifies it. Flink's query also takes in a bid made in the very
    millisecond in which a window ended, if its price is that window's highest; here a bid counts for its own
    window only.
    """
    return f"""
    SELECT auction, bidder, price, date_time, extra FROM bid
    QUALIFY price = max(price) OVER (PARTITION BY {_window("epoch_ms(date_time)", options.window_ms)})"""


@query("person", "auction", columns="id name starttime", key="id starttime", stateful=True)
def q8(options: Options) -> str:
    """Who registered and put something up for auction in the same 10 seconds.

    Columns: id, name (the person's), starttime (the window's). `id` and `starttime` identify a row: a person with
    several auctions in the window is there once.
    """
    start = f"{_time(_window('epoch_ms(date_time)', options.window_ms))} AS starttime"
    return f"""
    SELECT P.id, P.name, P.starttime
    FROM (SELECT DISTINCT id, name, {start} FROM person) P
    JOIN (SELECT DISTINCT seller, {start} FROM auction) A
        ON P.id = A.seller AND P.starttime = A.starttime"""


@query(
    "auction",
    "bid",
    columns="id item_name description initial_bid reserve date_time expires seller category extra "
    "auction bidder price bid_date_time bid_extra",
    key="id",
    stateful=True,
    updating=True,
)
def q9(options: Options) -> str:
    """The winning bid of each auction.

    Columns: those of the auction (id, item_name, description, initial_bid, reserve, date_time, expires, seller,
    category, extra), then the bid's auction, bidder, price, bid_date_time, bid_extra. `id` identifies a row.
    Updating: the winner in the end, of the bids made from date_time to expires, both included: the highest price,
    of those the earliest; then as said above. An auction without such a bid has no row.
    """
    return _WON


@query("bid", columns="auction bidder price date_time extra dt hm")
def q10(options: Options) -> str:
    """Bids with the day and the minute that their files are put under.

    Columns: auction, bidder, price, date_time, extra, dt ("2024-01-31"), hm ("23:59"). A row is a bid; nothing
    identifies it.
    """
    return f"""
    SELECT auction, bidder, price, date_time, extra, {_DAY} AS dt, strftime(date_time, '%H:%M') AS hm
    FROM bid"""


@query("bid", columns="bidder bid_count starttime endtime", key="bidder starttime", stateful=True)
def q11(options: Options) -> str:
    """How many bids each bidder made in each session.

    Columns: bidder, bid_count, starttime (the first bid's), endtime (the last one's and the gap). `bidder` and
    `starttime` identify a row. Two bids exactly one gap apart are of the same session.
    """
    return f"""
    WITH marked AS (
        SELECT bidder, epoch_ms(date_time) AS ms,
            ms - lag(ms) OVER (PARTITION BY bidder ORDER BY ms) > {options.gap_ms} AS begins
        FROM bid
    ), numbered AS (
        SELECT bidder, ms,
            count(*) FILTER (WHERE begins) OVER (PARTITION BY bidder ORDER BY ms) AS session
        FROM marked
    )
    SELECT bidder, count(*) AS bid_count, {_time("min(ms)")} AS starttime,
        {_time(f"max(ms) + {options.gap_ms}")} AS endtime
    FROM numbered GROUP BY bidder, session"""


@query("bid", columns="bidder bid_count starttime endtime", key="bidder starttime", stateful=True)
def q12(options: Options) -> str:
    """How many bids of each bidder were processed in each 10 seconds of the clock.

    Columns: bidder, bid_count, starttime, endtime. `bidder` and `starttime` identify a row. When a bid was
    processed is not in the data: the caller adds it to `bid` as a column `processed_ms` (int64, since 1970).
    """
    start = _window("processed_ms", options.window_ms)
    return f"""
    SELECT bidder, count(*) AS bid_count, {_time(start)} AS starttime,
        {_time(f"{start} + {options.window_ms}")} AS endtime
    FROM bid GROUP BY bidder, {start}"""


@query("bid", "side_input", columns="auction bidder price date_time value")
def q13(options: Options) -> str:
    """Bids with what a fixed table says about their auction's number modulo 10,000.

    Columns: auction, bidder, price, date_time, value. A row is a bid; nothing identifies it.
    """
    return f"""
    SELECT B.auction, B.bidder, B.price, B.date_time, S.value
    FROM bid B JOIN side_input S ON B.auction % {SIDE_INPUT_ROWS} = S.key"""


@query("bid", columns="auction bidder price bid_time_type date_time extra c_counts")
def q14(options: Options) -> str:
    """Bids between two prices, with the time of day in words and the number of c's in `extra`.

    Columns: auction, bidder, price (0.908 times as much, decimal(23, 3)), bid_time_type, date_time, extra,
    c_counts. A row is a bid; nothing identifies it. From 8:00 to 18:59 it is "dayTime", to 6:59 and from 20:00
    "nightTime", else "otherTime".
    """
    return """
    SELECT auction, bidder, (0.908 * price)::DECIMAL(23, 3) AS price,
        CASE
            WHEN hour(date_time) BETWEEN 8 AND 18 THEN 'dayTime'
            WHEN hour(date_time) <= 6 OR hour(date_time) >= 20 THEN 'nightTime'
            ELSE 'otherTime'
        END AS bid_time_type,
        date_time, extra, length(extra) - length(replace(extra, 'c', '')) AS c_counts
    FROM bid WHERE 0.908 * price > 1000000 AND 0.908 * price < 50000000"""


@query("bid", columns=f"day {_RANK_COLUMNS}", key="day", stateful=True, updating=True)
def q15(options: Options) -> str:
    """How many bids, bidders and auctions there were each day, in all and by three ranges of prices.

    Columns: day ("2024-01-31"), then bids, bidders and auctions (each counted once), each as total_, rank1_
    (below 10,000), rank2_ (below 1,000,000) and rank3_ (the rest). `day` identifies a row. Updating: the counts at
    the end of each day.
    """
    return f"SELECT {_DAY} AS day, {_ALL_COUNTS} FROM bid GROUP BY day"


@query("bid", columns=f"channel day minute {_RANK_COLUMNS}", key="channel day", stateful=True, updating=True)
def q16(options: Options) -> str:
    """The counts of q15 for each channel, with the last minute that had a bid.

    Columns: channel, day, minute ("23:59"), then as in q15. `channel` and `day` identify a row. Updating: the
    counts at the end of each day.
    """
    return f"""
    SELECT channel, {_DAY} AS day, max(strftime(date_time, '%H:%M')) AS minute, {_ALL_COUNTS}
    FROM bid GROUP BY channel, day"""


@query(
    "bid",
    columns="auction day total_bids rank1_bids rank2_bids rank3_bids min_price max_price avg_price sum_price",
    key="auction day",
    stateful=True,
    updating=True,
)
def q17(options: Options) -> str:
    """How many bids each auction had each day, and the least, greatest, average and total price.

    Columns: auction, day, total_bids, rank1_bids, rank2_bids, rank3_bids (ranges of q15), min_price, max_price,
    avg_price (cut to a whole number), sum_price. `auction` and `day` identify a row. Updating: the figures at the
    end of each day.
    """
    return f"""
    SELECT auction, {_DAY} AS day, {_counts("bids", "*")}, min(price) AS min_price, max(price) AS max_price,
        sum(price) // count(*) AS avg_price, sum(price) AS sum_price
    FROM bid GROUP BY auction, day"""


@query(
    "bid",
    columns="auction bidder price channel url date_time extra",
    key="auction bidder",
    stateful=True,
    updating=True,
)
def q18(options: Options) -> str:
    """Each bidder's last bid on each auction.

    Columns: those of the bid. `auction` and `bidder` identify a row. Updating: the last bid of all. Many are made
    in one millisecond: of these it is the one with the highest price, then the one with the greatest channel, url
    and extra, so that the answer is the greatest (date_time, price, channel, url, extra) of the key.
    """
    return """
    SELECT auction, bidder, price, channel, url, date_time, extra FROM bid
    QUALIFY row_number() OVER (
        PARTITION BY bidder, auction ORDER BY date_time DESC, price DESC, channel DESC, url DESC, extra DESC
    ) = 1"""


@query(
    "bid",
    columns="auction bidder price channel url date_time extra rank_number",
    key="auction rank_number",
    stateful=True,
    updating=True,
)
def q19(options: Options) -> str:
    """The 10 highest bids of each auction.

    Columns: those of the bid, and rank_number (from 1 on). `auction` and `rank_number` identify a row. Updating:
    the ranks in the end. Bids of one price stand in order of date_time, the first first; then as said above.
    """
    return f"""
    SELECT auction, bidder, price, channel, url, date_time, extra,
        row_number() OVER (PARTITION BY auction ORDER BY price DESC, date_time, {_BID_ORDER}) AS rank_number
    FROM bid QUALIFY rank_number <= {options.top}"""


@query(
    "auction",
    "bid",
    columns="auction bidder price channel url bid_date_time bid_extra item_name description initial_bid reserve "
    "auction_date_time expires seller category auction_extra",
    stateful=True,
)
def q20(options: Options) -> str:
    """Bids on auctions of category 10, with all that is known of the auction: a join of the two.

    Columns: the bid's auction, bidder, price, channel, url, bid_date_time, bid_extra, then the auction's item_name,
    description, initial_bid, reserve, auction_date_time, expires, seller, category, auction_extra. A row is a
    bid; nothing identifies it. Either side may come first; time plays no part.
    """
    return """
    SELECT B.auction, B.bidder, B.price, B.channel, B.url, B.date_time AS bid_date_time, B.extra AS bid_extra,
        A.item_name, A.description, A.initial_bid, A.reserve, A.date_time AS auction_date_time, A.expires,
        A.seller, A.category, A.extra AS auction_extra
    FROM bid B JOIN auction A ON B.auction = A.id
    WHERE A.category = 10"""


@query("bid", columns="auction bidder price channel channel_id")
def q21(options: Options) -> str:
    """Bids with the number of their channel, known by its name or told in the url.

    Columns: auction, bidder, price, channel, channel_id (text: 0 for Apple, 1 for Google, 2 for Facebook, 3 for
    Baidu, else what follows `channel_id=` in the url). A row is a bid; nothing identifies it. A bid without either
    has no row.
    """
    told = "'(&|^)channel_id=([^&]*)'"
    return f"""
    SELECT auction, bidder, price, channel,
        CASE lower(channel)
            WHEN 'apple' THEN '0' WHEN 'google' THEN '1' WHEN 'facebook' THEN '2' WHEN 'baidu' THEN '3'
            ELSE regexp_extract(url, {told}, 2)
        END AS channel_id
    FROM bid
    WHERE regexp_matches(url, {told}) OR lower(channel) IN ('apple', 'google', 'facebook', 'baidu')"""


@query("bid", columns="auction bidder price channel dir1 dir2 dir3")
def q22(options: Options) -> str:
    """Bids with the three folders of their url.

    Columns: auction, bidder, price, channel, dir1, dir2, dir3 (null where the url has no such part). A row is a
    bid; nothing identifies it.
    """
    folders = ", ".join(f"string_split(url, '/')[{place + 3}] AS dir{place}" for place in (1, 2, 3))
    return f"SELECT auction, bidder, price, channel, {folders} FROM bid"


# Comparing


Sorted = dict[tuple[pa.DataType, ...], pa.Table]
"""A truth that was sorted before, by the types in which it was compared."""


def equal(ours: pa.Table, truth: pa.Table, known: Sorted | None = None) -> tuple[bool, str]:
    """Whether two tables hold the same rows, as often and in any order; if not, a sentence that says what differs.

    Columns are found by name; how wide a number, what unit a time or what kind of text it is doesn't matter.
    Floating-point numbers, and decimals compared with them, may differ by a part in 1e9. `known`: what sorting this
    truth has given, kept for the next comparison with it.
    """
    if sorted(ours.column_names) != sorted(truth.column_names):
        return False, f"The columns are {ours.column_names}, but should be {truth.column_names}."
    names = truth.column_names
    pairs = {name: _comparable(ours.column(name), truth.column(name)) for name in names}
    unlike = [name for name, (mine, true) in pairs.items() if mine.type != true.type]
    if unlike:
        name = unlike[0]
        return (
            False,
            f"{name} is of type {ours.schema.field(name).type}, but should be {truth.schema.field(name).type}.",
        )
    # Floats last: rows that differ only by rounding then stand at the same place on both sides.
    order = sorted(names, key=lambda name: pa.types.is_floating(pairs[name][0].type))
    mine = _sorted(pa.table({name: pairs[name][0] for name in order}))
    known = {} if known is None else known
    types = tuple(pairs[name][1].type for name in order)
    if types not in known:
        known[types] = _sorted(pa.table({name: pairs[name][1] for name in order}))
    true = known[types]
    if len(mine) == len(true) and all(_alike(mine[name], true[name]) for name in order):
        return True, ""
    return False, _difference(mine.select(names), true.select(names))


def _comparable(mine: pa.ChunkedArray, true: pa.ChunkedArray) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """Both columns in one type, if there is one."""
    kinds = (mine.type, true.type)
    if all(map(pa.types.is_timestamp, kinds)):
        return mine.cast(pa.timestamp("ns")), true.cast(pa.timestamp("ns"))
    if all(map(_is_text, kinds)):
        return mine.cast(pa.string()), true.cast(pa.string())
    if all(map(pa.types.is_integer, kinds)):
        return mine.cast(pa.int64()), true.cast(pa.int64())
    if all(map(_is_number, kinds)) and mine.type != true.type:
        return mine.cast(pa.float64()), true.cast(pa.float64())
    return mine, true


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _sorted(table: pa.Table) -> pa.Table:
    return table.sort_by([(name, "ascending") for name in table.column_names]).combine_chunks()


def _alike(mine: pa.ChunkedArray, true: pa.ChunkedArray) -> bool:
    if not pa.types.is_floating(mine.type):
        return bool(mine.equals(true))
    if not pc.is_null(mine).equals(pc.is_null(true)):
        return False
    a, b = mine.drop_null().to_numpy(), true.drop_null().to_numpy()
    return bool(np.isclose(a, b, rtol=RELATIVE, atol=0.0, equal_nan=True).all())


def _difference(mine: pa.Table, true: pa.Table) -> str:
    ours, theirs = Counter(_rows(mine)), Counter(_rows(true))
    said = [f"{mine.num_rows:,} rows, and there should be {true.num_rows:,}."]
    for what, rows in (("missing", theirs - ours), ("too many", ours - theirs)):
        if rows:
            said.append(f"{rows.total():,} are {what}:")
            said += [
                f"  {dict(zip(true.column_names, row, strict=True))}"
                for row in sorted(rows, key=repr)[:_SHOWN]
            ]
    return "\n".join(said)


def _rows(table: pa.Table) -> Iterable[tuple[Any, ...]]:
    """Rows as people read them: times to the millisecond, floats to nine digits."""
    return zip(*(_readable(column) for column in table.columns), strict=True)


def _readable(column: pa.ChunkedArray) -> list[Any]:
    if pa.types.is_timestamp(column.type):
        return [str(v) for v in column.cast(pa.timestamp("us"), safe=False).to_pylist()]
    values = column.to_pylist()
    return [float(f"{v:.9g}") if isinstance(v, float) else v for v in values]
