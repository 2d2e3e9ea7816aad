"""Structured Streaming's side of the benchmark; a script for its own virtual environment, free of bench imports.

Case `keyed-python`: `transformWithState` from Python, a ValueState with each key's running total, one output a
record. Mode `row` is the row-based API, mode `pandas` is `transformWithStateInPandas`. Both need RocksDB.
Case `aggregate`: sum and count per key in update mode. Mode `hdfs` is the default state store, mode `rocksdb`
the other one.

One Parquet file is one micro-batch. Records a second are the query's own: input rows over batch durations
as its progress reports them, leaving out the first batch, in which the JVM and the Python workers warm up.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyspark
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

STORE = "org.apache.spark.sql.execution.streaming.state."
PROVIDERS = {"hdfs": STORE + "HDFSBackedStateStoreProvider", "rocksdb": STORE + "RocksDBStateStoreProvider"}
EVENT_SCHEMA = "k BIGINT, ts TIMESTAMP_NTZ, v DOUBLE"
OUTPUT_SCHEMA = "account BIGINT, balance DOUBLE"
MODES = {"keyed-python": ("row", "pandas"), "aggregate": ("hdfs", "rocksdb")}
SETTINGS = {
    "spark.master": "local[2]",
    "spark.driver.memory": "8g",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    # A batch is one file; without this a small one is read by one core only.
    "spark.sql.files.openCostInBytes": "0",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100000",
    "spark.sql.execution.arrow.transformWithStateInPySpark.maxStateRecordsPerBatch": "100000",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    "spark.sql.streaming.numRecentProgressUpdates": "1000",
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
    "spark.sql.streaming.stateStore.rocksdb.blockCacheSizeMB": "256",
}


class BalanceRows(StatefulProcessor):
    """The benchmark's user function on the row-based API; state is read and written once a key and batch."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.total = handle.getValueState("total", "value DOUBLE")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        stored = self.total.get()
        total = stored[0] if stored is not None else 0.0
        for row in rows:
            total += row["v"]
            yield Row(account=key[0], balance=total)
        self.total.update((total,))

    def close(self) -> None:
        pass


class BalancePandas(BalanceRows):
    """The same on `transformWithStateInPandas`: a running sum over each batch's rows of one key."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[pd.DataFrame]:
        stored = self.total.get()
        total = stored[0] if stored is not None else 0.0
        for frame in rows:
            balances = []
            for value in frame["v"].tolist():
                total += value
                balances.append(total)
            yield pd.DataFrame({"account": [key[0]] * len(balances), "balance": balances})
        self.total.update((total,))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", required=True, choices=sorted(MODES))
    parser.add_argument("--mode", required=True, help="row|pandas (keyed-python), hdfs|rocksdb (aggregate)")
    parser.add_argument("--data", required=True, type=Path, help="folder of part-*.parquet, one a batch")
    parser.add_argument("--files", type=int, help="use only the first so many files")
    parser.add_argument("--sink", choices=("noop", "parquet"), default="noop")
    parser.add_argument("--conf", action="append", default=[], help="a further Spark setting, name=value")
    chosen = parser.parse_args()
    if chosen.mode not in MODES[chosen.case]:
        parser.error(f"case {chosen.case} has the modes {', '.join(MODES[chosen.case])}, not {chosen.mode}")
    return chosen


def settings_for(chosen: argparse.Namespace, scratch: Path) -> dict[str, str]:
    store = chosen.mode if chosen.case == "aggregate" else "rocksdb"
    return {
        **SETTINGS,
        "spark.local.dir": str(scratch / "spark"),
        "spark.sql.streaming.stateStore.providerClass": PROVIDERS[store],
        **dict(setting.split("=", 1) for setting in chosen.conf),
    }


def session(settings: dict[str, str]) -> SparkSession:
    # Without this the query's initialising worker is the first python3 of the path, which lacks protobuf.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.appName("holdfast-bench-structured-streaming")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def read_events(spark: SparkSession, folder: Path, files: int | None) -> DataFrame:
    names = sorted(path.name for path in folder.glob("part-*.parquet"))[:files]
    reader = spark.readStream.schema(EVENT_SCHEMA).option("maxFilesPerTrigger", 1)
    return reader.option("pathGlobFilter", "{" + ",".join(names) + "}").parquet(str(folder))


def transform(events: DataFrame, case: str, mode: str) -> DataFrame:
    if case == "aggregate":
        return events.groupBy("k").agg(F.sum("v").alias("total"), F.count("v").alias("n"))
    if mode == "row":
        return events.groupBy("k").transformWithState(BalanceRows(), OUTPUT_SCHEMA, "Update", "None")
    return events.groupBy("k").transformWithStateInPandas(BalancePandas(), OUTPUT_SCHEMA, "Update", "None")


def run(result: DataFrame, sink: str, scratch: Path) -> list[dict[str, Any]]:
    """Run the query over all the files; each batch's progress, with the rows it read and its duration."""
    writer = result.writeStream.option("checkpointLocation", str(scratch / "checkpoint"))
    writer = writer.trigger(availableNow=True)
    if sink == "noop":
        writer = writer.format("noop").outputMode("update")
    else:
        # The file sink takes no updates, so Parquet is written a batch at a time.
        target = str(scratch / "out")
        writer = writer.outputMode("update").foreachBatch(
            lambda batch, _: batch.write.mode("append").parquet(target)
        )
    query = writer.start()
    query.awaitTermination()
    batches = [json.loads(progress.json) for progress in query.recentProgress]
    return [batch for batch in batches if batch["numInputRows"] > 0]


def report(
    chosen: argparse.Namespace, settings: dict[str, str], batches: list[dict[str, Any]]
) -> dict[str, Any]:
    if len(batches) < 2:
        raise SystemExit("at least two files are needed: the first batch is warm-up")
    seconds = [batch["batchDuration"] / 1000 for batch in batches]
    rows = [batch["numInputRows"] for batch in batches]
    durable = (
        "each batch's offsets and commit and the state it changed, in the checkpoint folder on local disk"
        if chosen.mode != "hdfs"
        else "each batch's offsets and commit and its delta file of state, in the checkpoint folder on local disk"
    )
    output = "output dropped" if chosen.sink == "noop" else "output written as Parquet"
    return {
        "peer": "structured-streaming",
        "case": chosen.case,
        "mode": chosen.mode,
        "records_per_s": round(sum(rows[1:]) / sum(seconds[1:])),
        "records": sum(rows),
        "epochs": seconds,
        "durable": f"{durable}; {output}",
        "settings": {**settings, "sink": chosen.sink, "records_an_epoch": rows[1]},
        "version": pyspark.__version__,
    }


def main() -> None:
    chosen = arguments()
    with tempfile.TemporaryDirectory(prefix="structured-streaming-") as folder:
        scratch = Path(folder)
        settings = settings_for(chosen, scratch)
        spark = session(settings)
        events = read_events(spark, chosen.data, chosen.files)
        print("# session up, query starts", file=sys.stderr, flush=True)
        batches = run(transform(events, chosen.case, chosen.mode), chosen.sink, scratch)
        spark.stop()
    print(json.dumps(report(chosen, settings, batches)))


if __name__ == "__main__":
    main()
