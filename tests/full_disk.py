"""A run whose disk fills up, in a mount namespace of its own: `python -m tests.full_disk FOLDER WHAT BACKEND`.

WHAT is what the full disk holds: plan, state, output or checkpoint. The disk is a tmpfs of a few megabytes, filled
with a file until nothing goes any more. Prints one JSON object: the error, and whether everything was as it should
be after room was made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError
from tests import victim
from tests.crashes import check
from tests.drivers import Life, live
from tests.spark.test_equals_runner import sinks_in

PLACES = {"plan": "dir/log", "state": "dir/state", "output": "out", "checkpoint": "dir/checkpoints"}


def life(folder: Path, backend: str, **more: Any) -> Life:
    given = {**victim.options(backend), "on_checkpoint_failure": "stop", "checkpoint_failures": 1, **more}
    return live(victim.RECIPE.build(sinks_in(folder / "ours")), folder / "dir", **given)


def fill(disk: Path) -> Path:
    """A file that takes what room there is."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1 << 9, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return filler


def main() -> None:
    folder, what, backend = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    disk = folder / PLACES[what]
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], check=True)
    if what == "output":
        os.symlink(disk, folder / "ours")
    life(folder, backend, epochs=3)
    filler = fill(disk)
    error: dict[str, Any] = {}
    try:
        life(folder, backend)
    except HoldfastError as failed:
        error = {**failed.facts()}
    filler.unlink()
    life(folder, backend)
    check(folder)
    print(json.dumps(error))


if __name__ == "__main__":
    main()
