"""The workload every side of the benchmark reads: seeded events in Parquet files, one file an epoch.

The records are those of DESIGN section 4: `k` uniform over `keys`, `ts` rising within each file, `v` uniform
in [0, 1). The same arguments give the same records for ever. A manifest, written last, says what is there, so
that a second run of the benchmark generates nothing. How the files are read is left to each side.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

# A leading underscore, so that Spark's file source takes it for no data.
MANIFEST = "_manifest.json"
START_MS = 1_700_000_000_000
FILE_SPAN_MS = 10_000
# A reader that splits a file does it between row groups, and with one group it couldn't use both cores.
ROW_GROUPS_A_FILE = 8
_FORMAT_VERSION = 2


def make_events(folder: Path, files: int, rows: int, keys: int, seed: int) -> None:
    """Write `files` Parquet files of `rows` events each, unless the folder's manifest says they are there."""
    wanted = {"version": _FORMAT_VERSION, "files": files, "rows": rows, "keys": keys, "seed": seed}
    if _holds(folder, wanted):
        return
    _clear(folder)
    for index, table in enumerate(events(files, rows, keys, seed)):
        group_rows = -(-rows // ROW_GROUPS_A_FILE)
        pq.write_table(table, folder / f"part-{index:03d}.parquet", row_group_size=group_rows)
    _declare(folder, wanted)


def event_files(folder: Path, files: int | None = None) -> list[Path]:
    """The Parquet files of a folder in order: all of them, or the first `files`, which must exist."""
    found = sorted(folder.glob("part-*.parquet"))
    if files is not None and files > len(found):
        raise ValueError(f"{folder} holds {len(found)} files of events, {files} are wanted")
    return found[:files]


def events(files: int, rows: int, keys: int, seed: int) -> Iterator[pa.Table]:
    """The tables that `make_events` writes, one a file, from one generator in one order of draws."""
    rng = np.random.default_rng(seed)
    for index in range(files):
        offset_ms = np.sort(rng.integers(0, FILE_SPAN_MS, rows))
        ts_ms = START_MS + index * FILE_SPAN_MS + offset_ms
        yield pa.table(
            {
                "k": rng.integers(0, keys, rows),
                "ts": pa.array(ts_ms, pa.timestamp("ms")),
                "v": rng.random(rows),
            }
        )


def _holds(folder: Path, wanted: Mapping[str, object]) -> bool:
    manifest = folder / MANIFEST
    return manifest.exists() and json.loads(manifest.read_text()) == wanted


def _clear(folder: Path) -> None:
    """Forget the manifest before any file changes, so that a run cut short is seen as one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    for path in event_files(folder):
        path.unlink()


def _declare(folder: Path, what: Mapping[str, object]) -> None:
    (folder / MANIFEST).write_text(json.dumps(dict(what)) + "\n")
