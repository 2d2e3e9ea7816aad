"""Nexmark's events: who registers, what is put up for auction, and who bids how much.

The rules are those of nexmark/nexmark's generator: of every 50 events the first is a person, the next three
are auctions and 46 are bids; ids follow from the event's number; most sales and bids go to a few hot ones.
Where the original draws from one generator in turn, here each value is a hash of the seed and the event's
number, so that any range can be made again, in any order and any split, alike on every machine.

Two things differ from the original on purpose: it adds FIRST_PERSON_ID to a bidder twice, so that its bidders
are nobody's ids (Beam's, from which it descends, adds it once, as we do); and `channel_id` is never negative.
What a source makes of these tables is left to `source`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.io.rate import START_MS, Words, _hash

FIRST_PERSON_ID = 1000
FIRST_AUCTION_ID = 1000
FIRST_CATEGORY_ID = 10
NUM_CATEGORIES = 5
PERSON_ID_LEAD = 10
AUCTION_ID_LEAD = 10
HOT_SELLER_RATIO = 100
HOT_AUCTION_RATIO = 100
HOT_BIDDER_RATIO = 100
HOT_CHANNELS_RATIO = 2
CHANNELS_NUMBER = 10_000
HOT_CHANNELS = ("Google", "Facebook", "Baidu", "Apple")
US_STATES = ("AZ", "CA", "ID", "OR", "WA", "WY")
US_CITIES = (
    "Phoenix",
    "Los Angeles",
    "San Francisco",
    "Boise",
    "Portland",
    "Bend",
    "Redmond",
    "Seattle",
    "Kent",
    "Cheyenne",
)
FIRST_NAMES = (
    "Peter",
    "Paul",
    "Luke",
    "John",
    "Saul",
    "Vicky",
    "Kate",
    "Julie",
    "Sarah",
    "Deiter",
    "Walter",
)
LAST_NAMES = ("Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris")

ROUND = 50
"""Events come in rounds of so many: a person, three auctions, 46 bids."""

_MS = pa.timestamp("ms")
PERSON = pa.schema(
    {
        "id": pa.int64(),
        "name": pa.string(),
        "email_address": pa.string(),
        "credit_card": pa.string(),
        "city": pa.string(),
        "state": pa.string(),
        "date_time": _MS,
        "extra": pa.string(),
    }
)
AUCTION = pa.schema(
    {
        "id": pa.int64(),
        "item_name": pa.string(),
        "description": pa.string(),
        "initial_bid": pa.int64(),
        "reserve": pa.int64(),
        "date_time": _MS,
        "expires": _MS,
        "seller": pa.int64(),
        "category": pa.int64(),
        "extra": pa.string(),
    }
)
BID = pa.schema(
    {
        "auction": pa.int64(),
        "bidder": pa.int64(),
        "price": pa.int64(),
        "channel": pa.string(),
        "url": pa.string(),
        "date_time": _MS,
        "extra": pa.string(),
    }
)
EVENT = pa.schema(
    {
        "event_type": pa.int32(),
        "person": pa.struct(list(PERSON)),
        "auction": pa.struct(list(AUCTION)),
        "bid": pa.struct(list(BID)),
        "date_time": _MS,
    }
)
SCHEMAS = {"person": PERSON, "auction": AUCTION, "bid": BID, "event": EVENT}

Numbers = npt.NDArray[np.int64]
Letters = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Kind:
    """Where a kind's events stand in each round of 50: `count` of them from `first` on."""

    first: int
    count: int

    def before(self, number: int) -> int:
        """How many events of this kind have a smaller number."""
        return number // ROUND * self.count + min(max(number % ROUND - self.first, 0), self.count)

    def numbers(self, indices: Numbers) -> Numbers:
        """The event numbers of the kind's events, counted from 0."""
        return indices // self.count * ROUND + self.first + indices % self.count

    def number(self, index: int) -> int:
        return index // self.count * ROUND + self.first + index % self.count


KINDS = {"person": Kind(0, 1), "auction": Kind(1, 3), "bid": Kind(4, 46), "event": Kind(0, ROUND)}


@dataclass(frozen=True)
class Config:
    """How the events are made; without arguments as Nexmark's own defaults are.

    `first_event_rate` is events a second of event time: the n-th is n / first_event_rate seconds after
    `start_ms`. A hot ratio of r sends all but one in r to the hot ones. Records have `avg_*_bytes` on average, by
    Nexmark's count, which leaves a bid's channel and url out; with `extra=False` that filling is left empty.
    """

    seed: int = 0
    first_event_rate: int = 10_000
    start_ms: int = START_MS
    hot_auction_ratio: int = 2
    hot_sellers_ratio: int = 4
    hot_bidders_ratio: int = 4
    num_active_people: int = 1000
    num_in_flight_auctions: int = 100
    avg_person_bytes: int = 200
    avg_auction_bytes: int = 500
    avg_bid_bytes: int = 100
    extra: bool = True

    def __post_init__(self) -> None:
        for name in ("first_event_rate", "hot_auction_ratio", "hot_sellers_ratio", "hot_bidders_ratio"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        for name in ("avg_person_bytes", "avg_auction_bytes", "avg_bid_bytes"):
            if not 0 <= getattr(self, name) <= 100_000:
                raise ValueError(f"{name} must be between 0 and 100,000, not {getattr(self, name)}.")


DEFAULT = Config()


def events(start: int, end: int, config: Config = DEFAULT) -> dict[str, pa.Table]:
    """The events numbered `start` to `end` (exclusive) as three tables, each in order of event number.

    >>> {kind: table.num_rows for kind, table in events(0, 100).items()}
    {'person': 2, 'auction': 6, 'bid': 92}
    """
    return {kind: made(kind, _numbers(kind, start, end), config) for kind in ("person", "auction", "bid")}


def mixed(start: int, end: int, config: Config = DEFAULT) -> pa.Table:
    """The same events as one table in order of event number.

    `event_type` is 0 for a person, 1 for an auction, 2 for a bid; that one's struct is filled, the others are
    null.
    """
    return made("event", _numbers("event", start, end), config)


def made(kind: str, numbers: Numbers, config: Config) -> pa.Table:
    """The table of a kind's events that have these numbers, in their order; the numbers must be the kind's own."""
    return _MAKERS[kind](numbers, config)


def event_ms(numbers: Numbers, config: Config) -> Numbers:
    """Event time in milliseconds since 1970."""
    return config.start_ms + numbers * 1000 // config.first_event_rate


def _numbers(kind: str, start: int, end: int) -> Numbers:
    if not 0 <= start <= end:
        raise ValueError(f"Events {start} to {end} are no range.")
    of = KINDS[kind]
    return of.numbers(np.arange(of.before(start), of.before(end), dtype=np.int64))


# Records


def _persons(numbers: Numbers, config: Config) -> pa.Table:
    draw = _Draws(numbers, config.seed, 0)
    names = draw.pick(_names())
    domains = _words(draw, 5)
    emails = pc.binary_join_element_wise(
        _words(draw, 7), pc.binary_join_element_wise(domains, "com", "."), "@"
    )
    cards = pc.binary_join_element_wise(*(draw.pick(_four_digits()) for _ in range(4)), " ")
    cities, states = draw.pick(pa.array(US_CITIES)), draw.pick(pa.array(US_STATES))
    sizes = sum(map(_lengths, (names, emails, cards, cities, states)), np.full(len(numbers), 8))
    columns = [
        pa.array(_last_person(numbers) + FIRST_PERSON_ID),
        names,
        emails,
        cards,
        cities,
        states,
        _times(event_ms(numbers, config)),
        _extra(draw, sizes, config.avg_person_bytes, config),
    ]
    return pa.Table.from_arrays(columns, schema=PERSON)


def _auctions(numbers: Numbers, config: Config) -> pa.Table:
    draw = _Draws(numbers, config.seed, 1)
    last = _last_person(numbers)
    hot = draw.below(config.hot_sellers_ratio) > 0
    seller = np.where(hot, last // HOT_SELLER_RATIO * HOT_SELLER_RATIO, _any_person(draw, last, config))
    category = FIRST_CATEGORY_ID + draw.below(NUM_CATEGORIES)
    initial_bid = draw.price()
    now = event_ms(numbers, config)
    # An auction lasts as long, on average, as it takes until so many more have been put up.
    ahead = config.num_in_flight_auctions * ROUND // KINDS["auction"].count
    horizon = event_ms(numbers + ahead, config) - now
    expires = now + 1 + draw.below(np.maximum(2 * horizon, 1))
    names, descriptions = _words(draw, 20), _words(draw, 100)
    sizes = 8 + _lengths(names) + _lengths(descriptions) + 8 + 8 + 8 + 8 + 8
    columns = [
        pa.array(_last_auction(numbers) + FIRST_AUCTION_ID),
        names,
        descriptions,
        pa.array(initial_bid),
        pa.array(initial_bid + draw.price()),
        _times(now),
        _times(expires),
        pa.array(seller + FIRST_PERSON_ID),
        pa.array(category),
        _extra(draw, sizes, config.avg_auction_bytes, config),
    ]
    return pa.Table.from_arrays(columns, schema=AUCTION)


def _bids(numbers: Numbers, config: Config) -> pa.Table:
    draw = _Draws(numbers, config.seed, 2)
    last = _last_auction(numbers)
    hot = draw.below(config.hot_auction_ratio) > 0
    auction = np.where(hot, last // HOT_AUCTION_RATIO * HOT_AUCTION_RATIO, _any_auction(draw, last, config))
    person = _last_person(numbers)
    hot = draw.below(config.hot_bidders_ratio) > 0
    # The second of a hundred, so that hot bidders are no hot sellers.
    bidder = np.where(
        hot, person // HOT_BIDDER_RATIO * HOT_BIDDER_RATIO + 1, _any_person(draw, person, config)
    )
    price = draw.price()
    cold = len(HOT_CHANNELS) + draw.below(CHANNELS_NUMBER)
    place = pa.array(np.where(draw.below(HOT_CHANNELS_RATIO) > 0, draw.below(len(HOT_CHANNELS)), cold))
    channels, urls = _channels(config.seed)
    columns = [
        pa.array(auction + FIRST_AUCTION_ID),
        pa.array(bidder + FIRST_PERSON_ID),
        pa.array(price),
        channels.take(place),
        urls.take(place),
        _times(event_ms(numbers, config)),
        _extra(draw, np.full(len(numbers), 8 + 8 + 8 + 8), config.avg_bid_bytes, config),
    ]
    return pa.Table.from_arrays(columns, schema=BID)


def _mixed(numbers: Numbers, config: Config) -> pa.Table:
    place = numbers % ROUND
    types = np.digitize(place, [KINDS["auction"].first, KINDS["bid"].first])
    columns: list[Any] = [pa.array(types.astype(np.int32))]
    for type_number, kind in enumerate(("person", "auction", "bid")):
        mine = types == type_number
        table = made(kind, numbers[mine], config).combine_chunks()
        structs = pa.StructArray.from_arrays(
            [column.combine_chunks() for column in table.columns], fields=list(SCHEMAS[kind])
        )
        columns.append(structs.take(pa.array(np.cumsum(mine) - 1, mask=~mine)))
    columns.append(_times(event_ms(numbers, config)))
    return pa.Table.from_arrays(columns, schema=EVENT)


_MAKERS = {"person": _persons, "auction": _auctions, "bid": _bids, "event": _mixed}


# Ids, from 0 on


def _last_person(numbers: Numbers) -> Numbers:
    """The last person so far, this event included."""
    return numbers // ROUND


def _last_auction(numbers: Numbers) -> Numbers:
    """The last auction so far, this event included; asked for auctions and bids only."""
    of = KINDS["auction"]
    return numbers // ROUND * of.count + np.minimum(numbers % ROUND - of.first, of.count - 1)


def _any_person(draw: _Draws, last: Numbers, config: Config) -> Numbers:
    """One of the active people, or of those who will register next."""
    active = np.minimum(last + 1, config.num_active_people)
    return last + 1 - active + draw.below(active + PERSON_ID_LEAD)


def _any_auction(draw: _Draws, last: Numbers, config: Config) -> Numbers:
    """One of the auctions in flight, or of those that will be put up next."""
    least = np.maximum(last - config.num_in_flight_auctions, 0)
    return least + draw.below(last - least + 1 + AUCTION_ID_LEAD)


# Randomness


class _Draws:
    """Random values for the events of a kind; each call is a stream of its own, so the order of calls counts."""

    def __init__(self, numbers: Numbers, seed: int, kind: int) -> None:
        self._numbers = numbers.astype(np.uint64)
        self._stream = (seed * 4 + kind) << 8

    def words(self) -> Words:
        """64 random bits each."""
        self._stream += 1
        return _hash(self._numbers, self._stream)

    def below(self, bound: int | Numbers) -> Numbers:
        """Whole numbers from 0 to `bound` (exclusive, less than 2**31)."""
        high = self.words() >> np.uint64(32)
        return ((high * np.asarray(bound).astype(np.uint64)) >> np.uint64(32)).astype(np.int64)

    def price(self) -> Numbers:
        """100 * 10 ** (6 * U), rounded: as many between 10 and 100 as between 100 and 1000."""
        words = self.words()
        value = np.full(len(words), 100.0)
        for table, shift in zip(_powers(), (53, 42, 31), strict=True):
            value *= table[(words >> np.uint64(shift)) & np.uint64(2047)]
        return np.floor(value + 0.5).astype(np.int64)

    def pick(self, choices: pa.Array) -> pa.Array:
        return choices.take(pa.array(self.below(len(choices))))


@lru_cache(maxsize=1)
def _powers() -> list[npt.NDArray[np.float64]]:
    """10 ** (6 * u) for a u of 33 bits is a product of three of these, one for each 11 bits.

    By square roots and products alone, which every processor rounds alike; `pow` is not.
    """
    tables, root = [], 1e6
    for _ in range(3):
        table = np.ones(1)
        for _ in range(11):
            root = float(np.sqrt(root))
            table = np.stack([table, table * root], axis=1).ravel()
        tables.append(table)
    return tables


# Texts


def _words(draw: _Draws, longest: int, special: str = " ") -> pa.Array:
    """Texts of 3 to `longest` - 1 letters, one in 13 `special`, which is trimmed at both ends if it is a space."""
    lengths = 3 + draw.below(longest - 3)
    parts = [draw.words().view(np.uint16) for _ in range(-(-(longest - 1) // 4))]
    letters = _letters(special)[np.concatenate([part.reshape(-1, 4) for part in parts], axis=1)]
    texts = _cut(letters, lengths)
    return pc.utf8_trim(texts, " ") if special == " " else texts


@lru_cache(maxsize=2)
def _letters(special: str) -> Letters:
    """A letter for every 16 bits: every 13th is special."""
    bits = np.arange(1 << 16)
    return np.where(bits % 13 == 0, ord(special), ord("a") + bits // 13 % 26).astype(np.uint8)


def _cut(letters: Letters, lengths: Numbers) -> pa.Array:
    """One text a row, of the row's first letters."""
    kept = letters[np.arange(letters.shape[1]) < lengths[:, None]]
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.StringArray.from_buffers(len(lengths), pa.py_buffer(offsets), pa.py_buffer(kept))


def _extra(draw: _Draws, sizes: Numbers, average: int, config: Config) -> pa.Array:
    """A filling that makes records `average` bytes long on average, a fifth of it more or less."""
    if not config.extra:
        return pa.array([""], pa.string()).take(pa.array(np.zeros(len(sizes), dtype=np.int64)))
    lacking = np.maximum(average - sizes, 0)
    spread = (2 * lacking + 5) // 10
    lengths = lacking - spread + draw.below(2 * spread)
    longest = int(lengths.max(initial=0))
    text = _text(config.seed)
    windows = np.lib.stride_tricks.sliding_window_view(text, longest) if longest else text[:, None][:, :0]
    return _cut(windows[draw.below(len(text) - 2 * average)], lengths)


@lru_cache(maxsize=4)
def _text(seed: int) -> Letters:
    """The letters that fillings are cut from."""
    words = _hash(np.arange(1 << 18, dtype=np.uint64), (seed * 4 + 3) << 8)
    return (ord("a") + words.view(np.uint16) % 26).astype(np.uint8)


@lru_cache(maxsize=4)
def _channels(seed: int) -> tuple[pa.Array, pa.Array]:
    """The channels and the address of each: the hot ones first, then `channel-0` and on; most have a channel_id."""
    hot = len(HOT_CHANNELS)
    draw = _Draws(np.arange(hot + CHANNELS_NUMBER), seed, 3)
    folders = pc.binary_join_element_wise(*(_words(draw, 5, "_") for _ in range(3)), "/")
    urls = pc.binary_join_element_wise(
        "https://www.nexmark.com/", folders, "/item.htm?query=1", ""
    ).to_pylist()
    tagged = draw.below(10) > 0
    for number in range(CHANNELS_NUMBER):
        if tagged[hot + number]:
            urls[hot + number] += f"&channel_id={abs(_reversed_bits(number))}"
    names = [*HOT_CHANNELS, *(f"channel-{number}" for number in range(CHANNELS_NUMBER))]
    return pa.array(names), pa.array(urls)


def _reversed_bits(number: int) -> int:
    """The 32 bits of a number in reverse, read as a signed number.

    >>> _reversed_bits(2), _reversed_bits(3)
    (1073741824, -1073741824)
    """
    value = int(f"{number:032b}"[::-1], 2)
    return value - (1 << 32) if value >> 31 else value


@lru_cache(maxsize=1)
def _names() -> pa.Array:
    return pa.array([f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES])


@lru_cache(maxsize=1)
def _four_digits() -> pa.Array:
    return pa.array([f"{number:04d}" for number in range(10_000)])


def _lengths(texts: pa.Array) -> Numbers:
    return pc.binary_length(texts).to_numpy(zero_copy_only=False).astype(np.int64)  # type: ignore[no-any-return]


def _times(ms: Numbers) -> pa.Array:
    return pa.array(ms).view(_MS)
