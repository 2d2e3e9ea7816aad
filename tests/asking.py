"""A pipeline that asks the outside world, in a process of its own on Spark: `python -m tests.asking FOLDER`.

The world is a file, FOLDER/asked: each call adds a line, with the record's number, to it, and the answer is how many
bytes the file had, so no two calls are answered alike. Output is in FOLDER/ours, the pipeline's directory in FOLDER/dir.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import holdfast as hf
from holdfast.errors import HoldfastError

ROWS = [{"n": i, "k": i % 7} for i in range(120)]
EPOCHS = 12
SCHEMA = {"n": int, "k": int, "said": int}


class Sum(hf.KeyedProcess):
    total = hf.ValueState(int, default=0)

    def process(self, key: Any, record: dict[str, Any], ctx: hf.Context) -> Any:
        self.total.value += record["said"]
        yield {"n": record["n"], "k": key % 3, "said": self.total.value}


class World:
    """Whoever asks leaves a line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(handle, f"{record['n']}\n".encode())
            said = os.lseek(handle, 0, os.SEEK_CUR)
        finally:
            os.close(handle)
        await asyncio.sleep(0)
        return {**record, "said": said}

    def asked(self) -> list[int]:
        """The numbers that were asked for, sorted."""
        return sorted(map(int, self.path.read_text().split())) if self.path.exists() else []


def build(world: World, out: Path) -> hf.Pipeline:
    """Calls behind a source, and behind a keyed stage; a keyed stage behind each."""
    pipeline = hf.Pipeline("asking")
    stream = pipeline.read("numbers", hf.records(ROWS, splits=2, per_epoch=10))
    first = stream.async_map(world, uid="lookup", schema=SCHEMA)
    first.write("answers", hf.parquet(str(out / "answers")))
    second = first.key_by("k").process("first", Sum(), schema=SCHEMA)
    again = second.async_map(world, uid="again", schema=SCHEMA)
    again.key_by("k").process("second", Sum()).write("end", hf.parquet(str(out / "end")))
    return pipeline


OPTIONS: dict[str, Any] = {
    "parallelism": 2,
    "max_records": 10,
    "checkpoint": "3 epochs",
    "checkpoint_on_stop": False,
    "trim_log": False,
    "interval": "0s",
    "take_over": True,
    "drain": True,
}


def main() -> None:
    folder = Path(sys.argv[1])
    pipeline = build(World(folder / "asked"), folder / "ours")
    try:
        pipeline.run(dir=str(folder / "dir"), master="local[2]", **OPTIONS)
    except HoldfastError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
