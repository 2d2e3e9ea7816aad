"""Structured Streaming's side of Nexmark; a script for its own virtual environment, free of bench imports.

`structured_streaming_nexmark.py --case q5 --mode hdfs|rocksdb --data FOLDER --out FOLDER`: runs one query over the
prepared files of `bench.nexmark.files`, `--files` of each kind a micro-batch, and writes each batch to a folder of its
own below `--out`. Stateless queries, joins and windows are in append mode; running aggregates in update mode, so that
the last row of a key counts.

Each query is written in the form that suits it best: two windows one behind the other for q5 and q7, a union instead of
a join for q8, `collect_set` where a distinct count is wanted, which streams don't have (q15, q16), `max` of a struct for
the last bid (q18), a sorted list of all bids for the highest ten (q19).

A file source never ends, and append mode tells a window only when a later event has moved the watermark: where there
are windows, an event of each kind from the year 2100 is read last, in a batch that is not counted.
Speed is events over seconds from the end of the batch by which a quarter of the rows was read to that of the last one
that read events: neither starting up nor warming up counts.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

STORE = "org.apache.spark.sql.execution.streaming.state."
PROVIDERS = {"hdfs": STORE + "HDFSBackedStateStoreProvider", "rocksdb": STORE + "RocksDBStateStoreProvider"}
SCHEMAS = {
    "person": "id BIGINT, name STRING, email_address STRING, credit_card STRING, city STRING, state STRING, "
    "date_time TIMESTAMP_NTZ, extra STRING",
    "auction": "id BIGINT, item_name STRING, description STRING, initial_bid BIGINT, reserve BIGINT, "
    "date_time TIMESTAMP_NTZ, expires TIMESTAMP_NTZ, seller BIGINT, category BIGINT, extra STRING",
    "bid": "auction BIGINT, bidder BIGINT, price BIGINT, channel STRING, url STRING, date_time TIMESTAMP_NTZ, "
    "extra STRING",
}
SETTINGS = {
    "spark.driver.memory": "8g",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # A batch is a few files; without this small ones are read by one core only.
    "spark.sql.files.openCostInBytes": "0",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.streaming.numRecentProgressUpdates": "10000",
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
    "spark.sql.streaming.stateStore.rocksdb.blockCacheSizeMB": "256",
    # As the other side has it.
    "spark.shuffle.compress": "false",
    "spark.shuffle.spill.compress": "false",
    "spark.buffer.size": str(1 << 20),
    # Lists and sets for more keys than 128 are kept in a hash table too.
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "1000000",
}
SIDE_INPUT_ROWS = 10_000
WARM = 0.25
"""By when so much was read, a side is warm."""


class Events:
    """The streams that a query reads."""

    def __init__(self, spark: SparkSession, data: Path, files: int, closed: bool, rate: int = 10_000) -> None:
        self._spark, self._data, self._files, self._closed = spark, data, files, closed
        self.rate = rate
        """Events a second of event time."""

    @property
    def spark(self) -> SparkSession:
        return self._spark

    def read(self, kind: str) -> DataFrame:
        """A kind's events, their times as timestamps that watermarks take."""
        reader = self._spark.readStream.schema(SCHEMAS[kind]).option("maxFilesPerTrigger", self._files)
        names = "{part-*,closing}.parquet" if self._closed else "part-*.parquet"
        found = reader.option("pathGlobFilter", names).parquet(str(self._data / kind))
        for name in ("date_time", "expires"):
            if name in found.columns:
                found = found.withColumn(name, F.col(name).cast("timestamp"))
        return found

    def timed(self, kind: str) -> DataFrame:
        return self.read(kind).withWatermark("date_time", "0 seconds")


Build = Callable[[Events], DataFrame]
QUERIES: dict[str, tuple[str, bool, Build]] = {}
"""Each with its output mode, and whether its end must be told."""


def query(mode: str = "append", *, closed: bool = False) -> Callable[[Build], Build]:
    def put(build: Build) -> Build:
        QUERIES[build.__name__] = (mode, closed, build)
        return build

    return put


BID = ("auction", "bidder", "price", "date_time", "extra")


def euros() -> Any:
    return F.expr("CAST(0.908BD * price AS DECIMAL(23, 3))")


def day() -> Any:
    return F.date_format("date_time", "yyyy-MM-dd")


def minute() -> Any:
    return F.date_format("date_time", "HH:mm")


def by_day(bids: DataFrame, *keys: str) -> Any:
    """Bids by key and day; the day is a date until it is told, which is cheaper than a text for each bid."""
    return bids.groupBy(*keys, F.to_date("date_time").alias("date"))


def told(counted: DataFrame, *first: Any) -> DataFrame:
    """With the day as text, behind these columns."""
    rest = [c for c in counted.columns if c not in ("channel", "auction", "date", "latest")]
    return counted.select(*first, *rest)


def told_day() -> Any:
    return F.date_format("date", "yyyy-MM-dd").alias("day")


# Records one by one


@query()
def q0(events: Events) -> DataFrame:
    return events.read("bid").select(*BID)


@query()
def q1(events: Events) -> DataFrame:
    return events.read("bid").select("auction", "bidder", euros().alias("price"), "date_time", "extra")


@query()
def q2(events: Events) -> DataFrame:
    return events.read("bid").where("auction % 123 = 0").select("auction", "price")


@query()
def q10(events: Events) -> DataFrame:
    return events.read("bid").select(*BID, day().alias("dt"), minute().alias("hm"))


@query()
def q13(events: Events) -> DataFrame:
    side = events.spark.range(SIDE_INPUT_ROWS).select(
        F.col("id").alias("key"), F.col("id").cast("string").alias("value")
    )
    joined = events.read("bid").join(F.broadcast(side), F.expr(f"auction % {SIDE_INPUT_ROWS} = key"))
    return joined.select("auction", "bidder", "price", "date_time", "value")


@query()
def q14(events: Events) -> DataFrame:
    hour = F.hour("date_time")
    kind = F.when(hour.between(8, 18), "dayTime").when((hour <= 6) | (hour >= 20), "nightTime")
    return (
        events.read("bid")
        .where("0.908BD * price > 1000000 AND 0.908BD * price < 50000000")
        .select(
            "auction",
            "bidder",
            euros().alias("price"),
            kind.otherwise("otherTime").alias("bid_time_type"),
            "date_time",
            "extra",
            F.expr("CAST(length(extra) - length(replace(extra, 'c', '')) AS BIGINT)").alias("c_counts"),
        )
    )


@query()
def q21(events: Events) -> DataFrame:
    told, name = r"(&|^)channel_id=([^&]*)", F.lower("channel")
    number = F.when(name == "apple", "0").when(name == "google", "1").when(name == "facebook", "2")
    number = number.when(name == "baidu", "3").otherwise(F.regexp_extract("url", told, 2))
    known = name.isin("apple", "google", "facebook", "baidu")
    found = events.read("bid").where(known | F.col("url").rlike(told))
    return found.select("auction", "bidder", "price", "channel", number.alias("channel_id"))


@query()
def q22(events: Events) -> DataFrame:
    folders = [F.get(F.split("url", "/"), place + 2).alias(f"dir{place}") for place in (1, 2, 3)]
    return events.read("bid").select("auction", "bidder", "price", "channel", *folders)


# Joins


@query()
def q3(events: Events) -> DataFrame:
    person = events.read("person").where("state IN ('OR', 'ID', 'CA')").alias("p")
    auction = events.read("auction").where("category = 10").alias("a")
    joined = auction.join(person, F.expr("a.seller = p.id"))
    return joined.select("p.name", "p.city", "p.state", "a.id")


@query()
def q20(events: Events) -> DataFrame:
    auction = events.read("auction").where("category = 10").alias("a")
    joined = events.read("bid").alias("b").join(auction, F.expr("b.auction = a.id"))
    bid = [f"b.{name}" for name in ("auction", "bidder", "price", "channel", "url")]
    own = [f"a.{name}" for name in ("item_name", "description", "initial_bid", "reserve")]
    return joined.select(
        *bid,
        F.col("b.date_time").alias("bid_date_time"),
        F.col("b.extra").alias("bid_extra"),
        *own,
        F.col("a.date_time").alias("auction_date_time"),
        "a.expires",
        "a.seller",
        "a.category",
        F.col("a.extra").alias("auction_extra"),
    )


@query(closed=True)
def q9(events: Events) -> DataFrame:
    # A join keeps state for a bounded time only if the bound is a constant: at 10,000 events a second auctions last 0.34 s.
    longest = f"INTERVAL {max(1, -(-5_000 // events.rate))} SECONDS"
    auction = events.timed("auction").alias("a")
    bid = events.timed("bid").withColumnRenamed("date_time", "bid_time").alias("b")
    within = (
        "b.auction = a.id AND b.bid_time >= a.date_time AND b.bid_time <= a.expires "
        f"AND b.bid_time <= a.date_time + {longest}"
    )
    own = ("item_name", "description", "initial_bid", "reserve", "expires", "seller", "category", "extra")
    # The bid's time as a number: an aggregation takes one column with a watermark.
    order = "struct(-b.price AS negative, unix_millis(b.bid_time) AS ms, b.bidder, b.channel, b.url, b.extra)"
    joined = auction.join(bid, F.expr(within)).select(
        F.col("a.id"),
        F.col("a.date_time"),
        F.struct(*(f"a.{name}" for name in own)).alias("own"),
        F.expr(order).alias("bid"),
    )
    won = joined.groupBy("id", "date_time").agg(F.first("own").alias("own"), F.min("bid").alias("bid"))
    return won.select(
        "id",
        *(f"own.{name}" for name in own[:4]),
        "date_time",
        *(f"own.{name}" for name in own[4:]),
        F.col("id").alias("auction"),
        "bid.bidder",
        (-F.col("bid.negative")).alias("price"),
        F.timestamp_millis("bid.ms").alias("bid_date_time"),
        F.col("bid.extra").alias("bid_extra"),
    )


# Windows


@query(closed=True)
def q5(events: Events) -> DataFrame:
    windows = F.window("date_time", "10 seconds", "2 seconds")
    counts = events.timed("bid").groupBy(windows, "auction").agg(F.count("*").alias("num"))
    counts = counts.withColumns({"start": F.col("window.start"), "end": F.col("window.end")})
    row = F.struct("num", "auction", "start", "end")
    # Every two seconds one window ends.
    by_end = counts.groupBy(F.window(F.window_time("window"), "2 seconds"))
    found = by_end.agg(F.max("num").alias("best"), F.collect_list(row).alias("rows"))
    most = F.filter("rows", lambda one: one["num"] == F.col("best"))
    return found.select(F.explode(most).alias("r")).select(
        "r.auction", "r.num", F.col("r.start").alias("starttime"), F.col("r.end").alias("endtime")
    )


@query(closed=True)
def q7(events: Events) -> DataFrame:
    bid = F.struct("auction", "bidder", "date_time", "extra")
    prices = events.timed("bid").groupBy(F.window("date_time", "10 seconds"), "price")
    prices = prices.agg(F.collect_list(bid).alias("bids"))
    by_window = prices.groupBy(F.window(F.window_time("window"), "10 seconds"))
    best = by_window.agg(F.max("price").alias("price"), F.max_by("bids", "price").alias("bids"))
    return best.select("price", F.explode("bids").alias("b")).select(
        "b.auction", "b.bidder", "price", "b.date_time", "b.extra"
    )


@query(closed=True)
def q8(events: Events) -> DataFrame:
    registered = events.read("person").select("id", "name", "date_time", F.lit(0).alias("sold"))
    sold = events.read("auction").select(
        F.col("seller").alias("id"),
        F.lit(None).cast("string").alias("name"),
        "date_time",
        F.lit(1).alias("sold"),
    )
    both = registered.unionByName(sold).withWatermark("date_time", "0 seconds")
    people = both.groupBy(F.window("date_time", "10 seconds"), "id").agg(
        F.max("name").alias("name"), F.sum("sold").alias("sold")
    )
    found = people.where("name IS NOT NULL AND sold > 0")
    return found.select("id", "name", F.col("window.start").alias("starttime"))


@query(closed=True)
def q11(events: Events) -> DataFrame:
    sessions = events.timed("bid").groupBy(F.session_window("date_time", "10 seconds").alias("s"), "bidder")
    found = sessions.agg(F.count("*").alias("bid_count"))
    return found.select(
        "bidder", "bid_count", F.col("s.start").alias("starttime"), F.col("s.end").alias("endtime")
    )


@query("update")
def q12(events: Events) -> DataFrame:
    windows = F.window(F.current_timestamp(), "10 seconds")
    found = events.read("bid").groupBy(windows, "bidder").agg(F.count("*").alias("bid_count"))
    return found.select(
        "bidder", "bid_count", F.col("window.start").alias("starttime"), F.col("window.end").alias("endtime")
    )


# Counting and ranking

RANGES = {
    "total": "true",
    "rank1": "price < 10000",
    "rank2": "price >= 10000 AND price < 1000000",
    "rank3": "price >= 1000000",
}


def bid_counts() -> list[Any]:
    return [
        F.count(F.expr(f"CASE WHEN {those} THEN 1 END")).alias(f"{r}_bids") for r, those in RANGES.items()
    ]


def distinct_counts() -> list[Any]:
    return [
        F.size(F.collect_set(F.expr(f"CASE WHEN {those} THEN {what} END"))).alias(f"{rank}_{what}s")
        for what in ("bidder", "auction")
        for rank, those in RANGES.items()
    ]


@query("update")
def q15(events: Events) -> DataFrame:
    found = by_day(events.read("bid")).agg(*bid_counts(), *distinct_counts())
    return told(found, told_day())


@query("update")
def q16(events: Events) -> DataFrame:
    latest = F.max(F.hour("date_time") * 60 + F.minute("date_time")).alias("latest")
    found = by_day(events.read("bid"), "channel").agg(latest, *bid_counts(), *distinct_counts())
    minute = F.format_string("%02d:%02d", F.expr("latest div 60"), F.expr("latest % 60")).alias("minute")
    return told(found, "channel", told_day(), minute)


@query("update")
def q17(events: Events) -> DataFrame:
    found = by_day(events.read("bid"), "auction").agg(
        *bid_counts(),
        F.min("price").alias("min_price"),
        F.max("price").alias("max_price"),
        F.expr("sum(price) div count(1)").alias("avg_price"),
        F.sum("price").alias("sum_price"),
    )
    return told(found, "auction", told_day())


@query("update")
def q18(events: Events) -> DataFrame:
    names = ("date_time", "price", "channel", "url", "extra")
    last = events.read("bid").groupBy("auction", "bidder").agg(F.max(F.struct(*names)).alias("b"))
    return last.select("auction", "bidder", "b.price", "b.channel", "b.url", "b.date_time", "b.extra")


@query("update")
def q19(events: Events) -> DataFrame:
    bid = F.expr("struct(-price AS negative, date_time, bidder, channel, url, extra)")
    top = F.slice(F.sort_array(F.collect_list(bid)), 1, 10)
    ranked = events.read("bid").groupBy("auction").agg(top.alias("bids"))
    rows = ranked.select("auction", F.posexplode("bids").alias("place", "b"))
    return rows.select(
        "auction",
        "b.bidder",
        (-F.col("b.negative")).alias("price"),
        "b.channel",
        "b.url",
        "b.date_time",
        "b.extra",
        (F.col("place") + 1).cast("bigint").alias("rank_number"),
    )


# Running


def session(settings: dict[str, str]) -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.appName("holdfast-bench-nexmark")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def run(result: DataFrame, mode: str, out: Path, scratch: Path) -> list[dict[str, Any]]:
    """Run the query over all files; each batch's progress."""

    def write(batch: DataFrame, number: int) -> None:
        batch.write.mode("overwrite").parquet(str(out / f"batch-{number:08d}"))

    writer = result.writeStream.option("checkpointLocation", str(scratch / "checkpoint")).outputMode(mode)
    started = writer.trigger(availableNow=True).foreachBatch(write).start()
    started.awaitTermination()
    return [json.loads(progress.json) for progress in started.recentProgress]


def ends(batch: dict[str, Any]) -> float:
    """When a batch was through, in seconds."""
    started = datetime.fromisoformat(batch["timestamp"].replace("Z", "+00:00")).timestamp()
    return float(started + batch["batchDuration"] / 1000)


def speed(events: int, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Events a second from the end of the batch by which it was warm to that of the last batch that read events."""
    kinds = 3  # a batch of so many rows at most is the one from the future
    reading = [batch for batch in batches if batch["numInputRows"] > kinds]
    if len(reading) < 2:
        raise SystemExit("at least two batches are needed: the first is warm-up")
    read = list(itertools.accumulate(batch["numInputRows"] for batch in reading))
    warm = min(len(reading) - 2, next(n for n, so_far in enumerate(read) if so_far >= WARM * read[-1]))
    seconds = ends(reading[-1]) - ends(reading[warm])
    share = 1 - read[warm] / read[-1]
    return {"records_per_s": round(events * share / seconds), "seconds": round(seconds, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", required=True, choices=sorted(QUERIES))
    parser.add_argument("--mode", default="hdfs", choices=sorted(PROVIDERS), help="where state is kept")
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--files", type=int, default=4, help="files of each kind a batch")
    parser.add_argument("--parallelism", type=int, default=2)
    parser.add_argument("--quick-compiler", action="store_true", help="Java's first compiler alone")
    chosen = parser.parse_args()
    mode, closed, build = QUERIES[chosen.case]
    manifest = json.loads((chosen.data / "_manifest.json").read_text())
    events, rate = manifest["events"], manifest["config"]["first_event_rate"]
    with tempfile.TemporaryDirectory(prefix="structured-streaming-") as folder:
        settings = {
            **SETTINGS,
            "spark.master": f"local[{chosen.parallelism}]",
            "spark.sql.shuffle.partitions": str(chosen.parallelism),
            "spark.local.dir": folder + "/spark",
            "spark.sql.streaming.stateStore.providerClass": PROVIDERS[chosen.mode],
        }
        if chosen.quick_compiler:
            settings["spark.driver.extraJavaOptions"] = "-XX:TieredStopAtLevel=1"
        spark = session(settings)
        result = build(Events(spark, chosen.data, chosen.files, closed, rate))
        print("# session up, query starts", file=sys.stderr, flush=True)
        batches = run(result, mode, chosen.out, Path(folder))
        spark.stop()
    report = {
        "peer": "structured-streaming",
        "case": chosen.case,
        "mode": chosen.mode,
        "output_mode": mode,
        **speed(events, batches),
        "epochs": [round(batch["batchDuration"] / 1000, 3) for batch in batches],
        "records": sum(batch["numInputRows"] for batch in batches),
        "durable": "each batch's offsets, commit and changes of state, in the checkpoint folder on local disk; "
        "output written as Parquet",
        "settings": {**settings, "files": chosen.files},
        "version": pyspark.__version__,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
