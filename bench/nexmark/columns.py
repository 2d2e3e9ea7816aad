"""What Nexmark's queries do with whole tables: prices, days, channels, and what a table can say before an exchange.

Pure functions of Arrow tables, by numpy and Arrow. Several shrink a table to what may still count (`highest`,
`most`, `seen`, …): how records were divided into tables then shows in how many pass, not in the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

SIDE_INPUT_ROWS = 10_000
RANKS = ("total", "rank1", "rank2", "rank3")
COUNTS = tuple(f"{rank}_{of}" for of in ("bids", "bidders", "auctions") for rank in RANKS)
"""The columns of q15 and q16: bids, and different bidders and auctions, in all and by three ranges of prices."""
COUNTED = ("bidder", "auction")
"""Of which q15 and q16 count the different ones."""
_CODES = len(COUNTED) * len(RANKS)
_DAY = 1 << 40
"""By how much codes of one day are apart from those of the next: ids are smaller than this by far."""

DAY_MS = 86_400_000
_RATE = pa.scalar(Decimal("0.908"), pa.decimal128(3, 3))
_MINUTES = pa.array([f"{minute // 60:02d}:{minute % 60:02d}" for minute in range(24 * 60)])
_SIDE_INPUT = pa.array([str(number) for number in range(SIDE_INPUT_ROWS)])
_HOURS = pa.array(
    ["nightTime" if h <= 6 or h >= 20 else "dayTime" if 8 <= h <= 18 else "otherTime" for h in range(24)]
)
_CHANNELS = pa.array(["apple", "google", "facebook", "baidu"])
_CHANNEL_IDS = pa.array(["0", "1", "2", "3"])

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def select(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Only these columns, in this order."""
    return table.select(list(columns))


def numbers(table: pa.Table, column: str) -> Numbers:
    """A column of whole numbers, or of times in milliseconds."""
    found = table.column(column)
    if pa.types.is_timestamp(found.type):
        found = found.cast(pa.timestamp("ms")).cast(pa.int64())
    return np.asarray(found.to_numpy(), np.int64)


def times(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Columns of milliseconds as timestamps."""
    for name in columns:
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, table.column(name).cast(pa.timestamp("ms")))
    return table


def start_of(ms: Numbers, length_ms: int) -> Numbers:
    """The start of the tumbling window that each time falls into."""
    return ms - ms % length_ms


# Records one by one


def euros(table: pa.Table) -> pa.Table:
    """The price in another currency, to the last digit: decimal(23, 3)."""
    price = pc.multiply(table.column("price").cast(pa.decimal128(19, 0)), _RATE)
    return table.set_column(table.schema.get_field_index("price"), "price", price)


def every_123rd(table: pa.Table) -> pa.Table:
    """Bids on every 123rd auction."""
    return table.filter(pa.array(numbers(table, "auction") % 123 == 0))


def filed(table: pa.Table) -> pa.Table:
    """Bids with the day and the minute of their time."""
    ms = numbers(table, "date_time")
    minutes = _MINUTES.take(pa.array(ms % DAY_MS // 60_000))
    return table.append_column("dt", days(ms // DAY_MS)).append_column("hm", minutes)


def days(since_1970: Numbers) -> pa.Array:
    """Days as text."""
    return pa.array(since_1970.astype(np.int32)).cast(pa.date32()).cast(pa.string())


def looked_up(table: pa.Table) -> pa.Table:
    """Bids with what the fixed table says of their auction's number."""
    places = pa.array(numbers(table, "auction") % SIDE_INPUT_ROWS)
    return table.append_column("value", _SIDE_INPUT.take(places))


def between_prices(table: pa.Table) -> pa.Table:
    """Bids between two prices, with the time of day and the number of c's in `extra`."""
    table = euros(table)
    low, high = (pa.scalar(Decimal(n), pa.decimal128(23, 3)) for n in (1_000_000, 50_000_000))
    price = table.column("price")
    table = table.filter(pc.and_(pc.greater(price, low), pc.less(price, high)))
    hours = pa.array(numbers(table, "date_time") % DAY_MS // 3_600_000)
    counts = pc.count_substring(table.column("extra"), "c").cast(pa.int64())
    table = table.append_column("bid_time_type", _HOURS.take(hours)).append_column("c_counts", counts)
    return select(table, ("auction", "bidder", "price", "bid_time_type", "date_time", "extra", "c_counts"))


def with_channel_ids(table: pa.Table) -> pa.Table:
    """Bids with the number of their channel, without those that have none."""
    known = _CHANNEL_IDS.take(_flat(pc.index_in(pc.utf8_lower(table.column("channel")), value_set=_CHANNELS)))
    told = pc.struct_field(pc.extract_regex(table.column("url"), r"(?:&|^)channel_id=(?P<id>[^&]*)"), 0)
    table = table.append_column("channel_id", pc.coalesce(known, told))
    table = table.filter(pc.is_valid(table.column("channel_id")))
    return select(table, ("auction", "bidder", "price", "channel", "channel_id"))


def with_folders(table: pa.Table) -> pa.Table:
    """Bids with the three folders of their url; null where there are fewer."""
    parts = _flat(pc.split_pattern(table.column("url"), "/"))
    starts, ends = (np.asarray(parts.offsets)[s] for s in (slice(None, -1), slice(1, None)))
    for place in (1, 2, 3):
        at = starts + place + 2
        table = table.append_column(f"dir{place}", parts.values.take(pa.array(at, mask=at >= ends)))
    return table.drop_columns(["url"])


def _flat(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        return (
            column.chunk(0)
            if column.num_chunks == 1
            else pa.concat_arrays(column.chunks or [pa.array([], column.type)])
        )
    return column


# What may still count


def tops(groups: Numbers, values: Numbers) -> Mask:
    """Which rows have the greatest value of their group; all of them where several have."""
    found, places = np.unique(groups, return_inverse=True)
    best = np.full(len(found), np.iinfo(np.int64).min)
    np.maximum.at(best, places, values)
    return np.asarray(values == best[places])


def highest(table: pa.Table, window_ms: int) -> pa.Table:
    """A table's highest bids of each window, with the window's start."""
    starts = start_of(numbers(table, "date_time"), window_ms)
    table = table.append_column("start", pa.array(starts))
    return table.filter(pa.array(tops(starts, numbers(table, "price"))))


def most(table: pa.Table) -> pa.Table:
    """Of a table of counts by window those that are the greatest of their window, with the window's start."""
    starts = numbers(table, "window_start")
    table = table.append_column("start", pa.array(starts))
    return table.filter(pa.array(tops(starts, numbers(table, "num"))))


# Counts by range of prices


def ranked(table: pa.Table) -> pa.Table:
    """Bids with their day (since 1970) and minute, and a one in the range of prices they are in."""
    ms, price = numbers(table, "date_time"), numbers(table, "price")
    table = table.append_column("day", pa.array(ms // DAY_MS))
    table = table.append_column("minute", pa.array(ms % DAY_MS // 60_000))
    ranges = (price < 10_000, (price >= 10_000) & (price < 1_000_000), price >= 1_000_000)
    for rank, mine in zip(RANKS[1:], ranges, strict=True):
        table = table.append_column(rank, pa.array(mine.astype(np.int64)))
    return table


def bid_counts(table: pa.Table, by: Sequence[str]) -> pa.Table:
    """A table's counts of bids by some columns, and the last minute: a row for each, with all columns of `COUNTS`."""
    sums = [(rank, "sum") for rank in RANKS[1:]]
    found = table.group_by(list(by), use_threads=False).aggregate(
        [([], "count_all"), *sums, ("minute", "max")]
    )
    made = {
        "total_bids": found.column("count_all"),
        **{f"{r}_bids": found.column(f"{r}_sum") for r in RANKS[1:]},
    }
    return _counts(found, by, made, found.column("minute_max"))


def seen(table: pa.Table, by: Sequence[str]) -> pa.Table:
    """Who was seen by some columns, and in which range of prices: once each, a number for these and the day (`code`)."""
    parts = []
    for group, what in enumerate(COUNTED):
        keys = [*by, what]
        found = table.group_by(keys, use_threads=False).aggregate([(rank, "max") for rank in RANKS[1:]])
        for place, rank in enumerate(RANKS):
            mine = found if place == 0 else found.filter(pc.equal(found.column(f"{rank}_max"), 1))
            code = numbers(mine, "day") * _DAY + numbers(mine, what) * _CODES + group * len(RANKS) + place
            rest = {key: mine.column(key) for key in by if key != "day"}
            parts.append(pa.table({**rest, "code": pa.array(code)}))
    return pa.concat_tables(parts)


def new_counts(table: pa.Table, by: Sequence[str]) -> pa.Table:
    """Who was seen for the first time, as counts by some columns, with all columns of `COUNTS`."""
    code = numbers(table, "code")
    place, names = code % _DAY % _CODES, COUNTS[-_CODES:]
    table = table.append_column("day", pa.array(code // _DAY))
    for number, name in enumerate(names):
        table = table.append_column(name, pa.array((place == number).astype(np.int64)))
    found = table.group_by(list(by), use_threads=False).aggregate([(name, "sum") for name in names])
    made = {name: found.column(f"{name}_sum") for name in names}
    return _counts(found, by, made, pa.nulls(found.num_rows, pa.int64()))


def _counts(
    found: pa.Table, by: Sequence[str], made: dict[str, pa.ChunkedArray], minute: pa.Array
) -> pa.Table:
    mine = {name: column.cast(pa.int64()) for name, column in made.items()}
    none = pa.array(np.zeros(found.num_rows, np.int64))
    return pa.table(
        {
            **{key: found.column(key) for key in by},
            "minute": minute,
            **{name: mine.get(name, none) for name in COUNTS},
        }
    )


def dated(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Days and minutes as text, and only these columns."""
    table = table.set_column(table.schema.get_field_index("day"), "day", days(numbers(table, "day")))
    if "minute" in columns:
        minutes = _MINUTES.take(pa.array(numbers(table, "minute")))
        table = table.set_column(table.schema.get_field_index("minute"), "minute", minutes)
    return select(table, columns)


def averaged(table: pa.Table, name: str, total: str, count: str) -> pa.Table:
    """Another column: the average, cut to a whole number."""
    return table.append_column(name, pa.array(numbers(table, total) // numbers(table, count)))
