"""Our side beside Structured Streaming: the paper's map in local mode, until it is killed.

`python -m bench.paper_side --folder F --work JSON --deadline 70s`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import holdfast as hf
from bench.paper_app import Reports, Tile, Work
from holdfast.engine.handle import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--work", type=json.loads, required=True)
    parser.add_argument("--deadline", default="70s")
    parser.add_argument("--backend", default="rocksdb")
    chosen = parser.parse_args()
    work = Work(**chosen.work)
    pipeline = hf.Pipeline("paper-map")
    stream = pipeline.read("reports", Reports(work)).key_by("tile")
    tiles = stream.process("tiles", Tile(work.tile_bytes, work.seed))
    tiles.write("tile-updates", hf.parquet(str(chosen.folder / "out")))
    settings = {
        "dir": str(chosen.folder / "dir"),
        "master": "local[2]",
        "parallelism": 2,
        "backend": chosen.backend,
        "deadline": chosen.deadline,
        "interval": "0s",
        "cut": "data",
        "max_records": max(work.reports, work.until(0)),
        "heap_limit": max(4 << 30, 2 * work.state_bytes),
        "take_over": True,
    }
    run(pipeline, spark=None, settings=settings)


if __name__ == "__main__":
    main()
