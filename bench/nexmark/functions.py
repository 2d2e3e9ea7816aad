"""The functions with state behind Nexmark's queries: joins, winners, and what is kept until time has passed.

They are written as a user would write them, with the public classes alone. Which stream they stand in is
`queries`'s affair. An auction's id and a person's are taken to be theirs alone, as the generator makes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

import holdfast as hf
from bench.nexmark.generator import AUCTION, BID

Row = dict[str, Any]


def fields(schema: pa.Schema, names: Iterable[str]) -> list[pa.Field]:
    """Some fields of a schema."""
    return [schema.field(name) for name in names]


# Joins


class SellerOf(hf.TwoInputProcess):
    """Persons on the left, their auctions on the right: a row for each auction, once both are there."""

    name = hf.ValueState(str, default="")
    city = hf.ValueState(str, default="")
    state = hf.ValueState(str, default="")
    waiting = hf.ListState(int)

    def process_left(self, seller: int, person: Row, ctx: hf.Context) -> Iterator[Row]:
        self.name.value, self.city.value, self.state.value = person["name"], person["city"], person["state"]
        for auction in self.waiting:
            yield self._row(auction)
        self.waiting.clear()

    def process_right(self, seller: int, auction: Row, ctx: hf.Context) -> list[Row] | None:
        if self.state.value:
            return [self._row(auction["id"])]
        self.waiting.add(auction["id"])
        return None

    def _row(self, auction: int) -> Row:
        return {
            "name": self.name.value,
            "city": self.city.value,
            "state": self.state.value,
            "id": auction,
        }


AUCTION_TOLD = (
    "item_name",
    "description",
    "initial_bid",
    "reserve",
    "auction_date_time",
    "expires",
    "seller",
    "category",
    "auction_extra",
)
BID_TOLD = ("bidder", "price", "channel", "url", "bid_date_time", "bid_extra")


def _named(schema: pa.Schema, names: Iterable[str], prefix: str) -> pa.DataType:
    """A struct of a schema's fields, some of them under a name with a prefix."""
    return pa.struct([pa.field(n, schema.field(n.removeprefix(prefix)).type) for n in names])


class Described(hf.TwoInputProcess):
    """Auctions on the left, bids on the right: the bids on auctions of one category, with all about the auction.

    Of other auctions only the category is kept, so that their bids need not wait.
    """

    wanted = 10
    category = hf.ValueState(int, default=0)
    auction = hf.ValueState(_named(AUCTION, AUCTION_TOLD, "auction_"))
    waiting = hf.ListState(_named(BID, BID_TOLD, "bid_"))

    def process_left(self, id: int, auction: Row, ctx: hf.Context) -> Iterator[Row]:
        self.category.value = auction["category"]
        if auction["category"] == self.wanted:
            del auction["id"]
            self.auction.value = auction
            for bid in self.waiting:
                yield {"auction": id, **bid, **auction}
        self.waiting.clear()

    def process_right(self, id: int, bid: Row, ctx: hf.Context) -> list[Row] | None:
        category = self.category.value
        if category == self.wanted:
            return [{**bid, **self.auction.value}]
        if not category:
            del bid["auction"]
            self.waiting.add(bid)
        return None


# Winners


_WAITS = -1


class Closing(hf.TwoInputProcess):
    """Auctions on the left, bids on the right: what an auction comes to, told when event time has passed its end.

    Then it is forgotten. A bid that is there before its auction waits until event time has passed the bid: an
    auction that comes later is put up later, and the bid is none of it.
    """

    closes = hf.ValueState(int, default=0)
    """When the auction ends; 0: nothing is known of it, `_WAITS`: only bids, which wait."""
    opens = hf.ValueState(int, default=0)
    price: Any
    """The highest so far; -1: none."""
    waiting: Any

    def process_left(self, id: int, auction: Row, ctx: hf.Context) -> None:
        assert ctx.time_ms is not None
        waited = self.closes.value == _WAITS
        self.opens.value, self.closes.value = ctx.time_ms, auction["closes"]
        self.put_up(auction)
        ctx.set_timer(auction["closes"], "closes")
        if waited:
            for bid in self.waiting:
                self._offer(bid, bid["at"])
            self.waiting.clear()

    def process_right(self, id: int, bid: Row, ctx: hf.Context) -> None:
        closes = self.closes.value
        if closes > 0 and bid["price"] < self.price.value:
            return  # it can't win, whenever it was made
        at_ms = ctx.time_ms
        assert at_ms is not None
        if closes > 0:
            self._offer(bid, at_ms)
            return
        if closes != _WAITS:
            self.closes.value = _WAITS
            ctx.set_timer(at_ms, "waits")
        self.waiting.add(self.kept(bid, at_ms))

    def on_timer(self, id: int, timer: hf.Timer, ctx: hf.Context) -> Iterator[Row]:
        if timer.name == "closes":
            yield from self.told(id)
            self.forget()
            self.opens.clear()
            self.closes.clear()
        elif self.closes.value == _WAITS:
            self._let_go(ctx)

    def _offer(self, bid: Row, at_ms: int) -> None:
        if self.opens.value <= at_ms <= self.closes.value:
            self.offer(bid, at_ms)

    def _let_go(self, ctx: hf.Context) -> None:
        """Forget bids that no auction can claim any more."""
        left = [bid for bid in self.waiting if bid["at"] > ctx.watermark_ms]
        self.waiting.update(left)
        if left:
            ctx.set_timer(min(bid["at"] for bid in left), "waits")
        else:
            self.closes.clear()

    def kept(self, bid: Row, at_ms: int) -> Row:
        """What is kept of a bid that waits; `at` is when it was made."""
        raise NotImplementedError

    def put_up(self, auction: Row) -> None:
        """Keep what will be told of an auction."""
        raise NotImplementedError

    def offer(self, bid: Row, at_ms: int) -> None:
        """Take a bid that was made in the auction's time."""
        raise NotImplementedError

    def told(self, id: int) -> Iterable[Row]:
        """What the auction came to."""
        raise NotImplementedError

    def forget(self) -> None:
        """Forget all of it."""
        raise NotImplementedError


class WinningPrice(Closing):
    """The highest price of each auction that got a bid in its time, and when it was first bid."""

    about = hf.ValueState(pa.struct(dict.fromkeys(("seller", "category"), pa.int64())))
    price = hf.ValueState(int, default=-1)
    at = hf.ValueState(int, default=0)
    waiting = hf.ListState(pa.struct({"price": pa.int64(), "at": pa.int64()}))

    def kept(self, bid: Row, at_ms: int) -> Row:
        return {"price": bid["price"], "at": at_ms}

    def put_up(self, auction: Row) -> None:
        self.about.value = {"seller": auction["seller"], "category": auction["category"]}

    def offer(self, bid: Row, at_ms: int) -> None:
        price, best = bid["price"], self.price.value
        if price > best or (price == best and at_ms < self.at.value):
            self.price.value, self.at.value = price, at_ms

    def told(self, id: int) -> Iterable[Row]:
        if self.price.value >= 0:
            yield {"auction": id, **self.about.value, "price": self.price.value, "at": self.at.value}

    def forget(self) -> None:
        for state in (self.about, self.price, self.at):
            state.clear()


WINNING_PRICE = pa.schema(dict.fromkeys(("auction", "seller", "category", "price", "at"), pa.int64()))

_OWN = (
    "item_name",
    "description",
    "initial_bid",
    "reserve",
    "date_time",
    "expires",
    "seller",
    "category",
    "extra",
)
_BID = {
    "price": pa.int64(),
    "at": pa.int64(),
    "bidder": pa.int64(),
    "channel": pa.string(),
    "url": pa.string(),
    "extra": pa.string(),
}


class WinningBid(Closing):
    """Each auction with its winning bid: the highest price, of those the first, then by the bid's other columns."""

    auction = hf.ValueState(pa.struct(fields(AUCTION, _OWN)))
    price = hf.ValueState(int, default=-1)
    best = hf.ValueState(pa.struct(_BID))
    waiting = hf.ListState(pa.struct(_BID))

    def kept(self, bid: Row, at_ms: int) -> Row:
        return {
            "price": bid["price"],
            "at": at_ms,
            "bidder": bid["bidder"],
            "channel": bid["channel"],
            "url": bid["url"],
            "extra": bid["extra"],
        }

    def put_up(self, auction: Row) -> None:
        self.auction.value = {name: auction[name] for name in _OWN}

    def offer(self, bid: Row, at_ms: int) -> None:
        price, best = bid["price"], self.price.value
        if price < best:
            return
        made = self.kept(bid, at_ms)
        if price > best or place(made) < place(self.best.value):
            self.price.value, self.best.value = price, made

    def told(self, id: int) -> Iterable[Row]:
        if self.price.value >= 0:
            best = self.best.value
            yield {
                "id": id,
                **self.auction.value,
                "auction": id,
                "bidder": best["bidder"],
                "price": best["price"],
                "bid_date_time": best["at"],
                "bid_extra": best["extra"],
            }

    def forget(self) -> None:
        for state in (self.auction, self.price, self.best):
            state.clear()


WINNING_BID = pa.schema(
    [
        *fields(AUCTION, ("id", *_OWN)),
        pa.field("auction", pa.int64()),
        *fields(BID, ("bidder", "price")),
        pa.field("bid_date_time", pa.int64()),
        pa.field("bid_extra", pa.string()),
    ]
)


def place(bid: Row) -> tuple[Any, ...]:
    """What orders an auction's bids: the highest price first, then the earliest, then by the other columns."""
    return (-bid["price"], bid["at"], bid["bidder"], bid["channel"], bid["url"], bid["extra"])


class LastPrices(hf.KeyedProcess):
    """The average of a seller's winning prices up to each auction, over the last 11, in the order they were won.

    A winner may come before others that were won earlier: then the averages behind it come again.
    """

    last = 11
    won = hf.MapState(str, int)

    def process(self, seller: int, won: Row, ctx: hf.Context) -> Iterator[Row]:
        key = f"{won['at']:016d} {won['auction']:016d}"
        self.won[key] = won["price"]
        rows = list(self.won.items())
        first = next(n for n in range(len(rows) - 1, -1, -1) if rows[n][0] == key)
        for number in range(first, min(first + self.last, len(rows))):
            prices = [price for _, price in rows[max(0, number + 1 - self.last) : number + 1]]
            at, auction = rows[number][0].split()
            yield {
                "seller": seller,
                "auction": int(auction),
                "date_time": int(at),
                "avg_price": sum(prices) // len(prices),
            }


# Windows


class Most(hf.KeyedProcess):
    """The auctions with the most bids of a window, told when event time has passed its end."""

    num = hf.ValueState(int, default=0)
    auctions = hf.ListState(int)

    def __init__(self, window_ms: int) -> None:
        self.window_ms = window_ms

    def process(self, start: int, count: Row, ctx: hf.Context) -> None:
        if count["num"] > self.num.value:
            self.num.value = count["num"]
            self.auctions.update([count["auction"]])
            ctx.set_timer(start + self.window_ms - 1)
        elif count["num"] == self.num.value:
            self.auctions.add(count["auction"])

    def on_timer(self, start: int, timer: hf.Timer, ctx: hf.Context) -> Iterator[Row]:
        for auction in self.auctions:
            end = start + self.window_ms
            yield {"auction": auction, "num": self.num.value, "starttime": start, "endtime": end}
        self.num.clear()
        self.auctions.clear()


_BID_SHOWN = ("auction", "bidder", "price", "date_time", "extra")


class Highest(hf.KeyedProcess):
    """The highest bids of a window, told when event time has passed its end."""

    price = hf.ValueState(int, default=-1)
    bids = hf.ListState(pa.struct(fields(BID, _BID_SHOWN)))

    def __init__(self, window_ms: int) -> None:
        self.window_ms = window_ms

    def process(self, start: int, bid: Row, ctx: hf.Context) -> None:
        if bid["price"] < self.price.value:
            return
        del bid["start"]
        if bid["price"] > self.price.value:
            self.price.value = bid["price"]
            self.bids.update([bid])
            ctx.set_timer(start + self.window_ms - 1)
        else:
            self.bids.add(bid)

    def on_timer(self, start: int, timer: hf.Timer, ctx: hf.Context) -> Iterator[Row]:
        yield from self.bids
        self.price.clear()
        self.bids.clear()


# Counting
