"""Structured Streaming's side of the restart case: sum and count for each key in RocksDB, until it is killed.

A script of its own, free of bench imports: `structured_streaming_restart.py --data FOLDER --scratch FOLDER`. The
settings are those that suited it best in the throughput benchmark: changelog checkpointing, no row count.
"""

import argparse
import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

SETTINGS = {
    "spark.master": "local[2]",
    "spark.driver.memory": "8g",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.files.openCostInBytes": "0",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
    "spark.sql.streaming.stateStore.rocksdb.blockCacheSizeMB": "256",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    chosen = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.appName("holdfast-bench-restart")
    for name, value in {**SETTINGS, "spark.local.dir": str(chosen.scratch / "spark")}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    reader = spark.readStream.schema("k BIGINT, ts TIMESTAMP_NTZ, v DOUBLE").option("maxFilesPerTrigger", 1)
    sums = (
        reader.parquet(str(chosen.data)).groupBy("k").agg(F.sum("v").alias("total"), F.count("v").alias("n"))
    )
    writer = sums.writeStream.option("checkpointLocation", str(chosen.scratch / "checkpoint")).outputMode(
        "update"
    )
    target = str(chosen.scratch / "out")
    writer.foreachBatch(
        lambda batch, _: batch.write.mode("append").parquet(target)
    ).start().awaitTermination()


if __name__ == "__main__":
    main()
