"""Structured Streaming's side of the paper's scenario: tiles of a map redrawn by reports, until it is killed.

A script of its own, free of bench imports: `structured_streaming_map.py --data FOLDER --scratch FOLDER
--tile-bytes N`. A tile's pixels are the state of `applyInPandasWithState`, the faster of its Python functions where
groups are few and states large, in the RocksDB store with changelog checkpoints.
"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from pyspark.sql import SparkSession
from pyspark.sql.streaming.state import GroupStateTimeout

PATCH_BYTES = 1024
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
    parser.add_argument("--tile-bytes", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.appName("holdfast-bench-map")
    for name, value in {**SETTINGS, "spark.local.dir": str(chosen.scratch / "spark")}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    tile_bytes, seed = chosen.tile_bytes, chosen.seed

    def redraw(key, frames, state):
        pixels = state.get[0] if state.exists else None
        count = 0
        for frame in frames:
            for at, tone in zip(frame["at"], frame["tone"], strict=True):
                if pixels is None:
                    pixels = np.random.Generator(np.random.SFC64([seed, int(key[0])])).bytes(tile_bytes)
                else:
                    picture = np.frombuffer(pixels, np.uint8).copy()
                    patch = picture[at : at + PATCH_BYTES]
                    np.right_shift(patch, 1, out=patch)
                    np.add(patch, tone, out=patch, casting="unsafe")
                    pixels = picture.tobytes()
                count += 1
        state.update((pixels,))
        yield pd.DataFrame({"tile": [key[0]], "reports": [count]})

    reader = spark.readStream.schema("id BIGINT, tile BIGINT, at BIGINT, tone BIGINT")
    reports = reader.option("maxFilesPerTrigger", 1).parquet(str(chosen.data))
    tiles = reports.groupBy("tile").applyInPandasWithState(
        redraw, "tile BIGINT, reports BIGINT", "pixels BINARY", "update", GroupStateTimeout.NoTimeout
    )
    target = str(chosen.scratch / "out")
    writer = tiles.writeStream.option("checkpointLocation", str(chosen.scratch / "checkpoint"))
    started = writer.outputMode("update").foreachBatch(
        lambda batch, _: batch.write.mode("append").parquet(target)
    )
    started.start().awaitTermination()


if __name__ == "__main__":
    main()
