"""A pipeline in a process of its own, to be killed or frozen: `python -m tests.victim FOLDER BACKEND [EPOCHS] [WORD…]`.

Two keyed stages with every kind of state; output in FOLDER/ours, the pipeline's directory in FOLDER/dir. With
`spark` it runs on Spark in local mode, otherwise over the in-process runner. With `trim` the log goes as far as checkpoints
allow, as it does by default. With `long` there is more to read, for many lives one after the other. With `at_least_once`
output is published before the decision, and one sink is a function that leaves a line in FOLDER/called at each call. Ends
like `holdfast run`: with the exit code of its error.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

import holdfast as hf
from holdfast.engine.local import LocalRunner
from holdfast.errors import HoldfastError
from tests.drivers import Waiting, live
from tests.pipelines import Recipe
from tests.spark.test_equals_runner import sinks_in

EPOCHS = 16
LONG = 90
"""Fewer than it takes until small files of output are merged."""


def recipe(epochs: int) -> Recipe:
    """Two keyed stages, and as many records as make so many epochs."""
    rows = [
        {"id": i, "k": 1 if i % 2 else i % 7, "name": "ann", "v": i * 0.5, "n": i % 11}
        for i in range(20 * epochs)
    ]
    return Recipe([rows], 20, 2, ["map", "branch"], "process", "k", ["filter"], "process", 2, 20)


RECIPE = recipe(EPOCHS)


class Called:
    """A target that can't tell what it was given before: a line for every call, with the epoch and its rows."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, table: pa.Table, epoch: int) -> None:
        with open(self._path, "a") as file:
            file.write(f"{epoch} {table.to_pylist()}\n")


def sinks(output: Path, called: Path) -> dict[str, hf.Sink]:
    """Folders, and for one sink a function."""
    return {**sinks_in(output), "second.side": hf.foreach_epoch(Called(called))}


def options(backend: str, limit: int = 0) -> dict[str, Any]:
    """Checkpoints often, so that their points are reached often; the whole log, for the comparison, unless told.

    One is kept, so that whoever clears up has something to delete.
    Where the run is cut short, one before its end, so that there is something to replay after it.
    """
    return {
        "backend": backend,
        "parallelism": 2,
        "max_records": 20,
        "checkpoint": "4 epochs" if limit else "2 epochs",
        "checkpoint_keep": 1,
        "checkpoint_on_stop": False,
        "trim_log": "trim" in sys.argv,
        "interval": "0s",
        "take_over": True,
    }


def main() -> None:
    folder, backend = Path(sys.argv[1]), sys.argv[2]
    limit = int(sys.argv[3]) if len(sys.argv) > 3 and sys.argv[3].isdigit() else 0
    made = recipe(LONG) if "long" in sys.argv else RECIPE
    pipeline = made.build(sinks_in(folder / "ours"))
    given = {**options(backend, limit), **({"epochs": limit} if limit else {})}
    if "at_least_once" in sys.argv:
        pipeline = made.build(sinks(folder / "ours", folder / "called"))
        given["guarantee"] = "at_least_once"
    try:
        if "spark" in sys.argv:
            pipeline.run(dir=str(folder / "dir"), master="local[2]", drain=True, **given)
        else:
            live(pipeline, folder / "dir", runner=Waiting if limit else LocalRunner, **given)
    except HoldfastError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
