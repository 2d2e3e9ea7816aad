"""Our side of `bench nexmark`, in a process of its own: `python -m bench.nexmark.side q5 --folder F --data D …`.

Runs one query to its end and writes its result as Parquet below `--folder`; run again over the same folder, it goes
on where it was killed. Prints one JSON line. Several queries, with commas between, are run one after the other in one
session, each in a folder of its name, with a line each; one that fails is told of and does not end the others. Speed is
events over seconds from the commit by which a quarter of the records was read to that of the last epoch that read
something: neither starting up nor warming up counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import holdfast as hf
from bench.nexmark.files import MANIFEST, Prepared
from bench.nexmark.generator import Config
from bench.nexmark.queries import QUERIES, build
from bench.nexmark.source import NexmarkSource

ON_THE_CLOCK = ("q12",)
"""Queries that wait for the clock: a source that ends at once would cut their last window off."""
CLOCK_MS = 11_000
"""How long they are given for it: a window, and a little."""


def sources(query: str, data: Path, kind_of: str, files: int, splits: int) -> dict[str, hf.Source]:
    """What a query reads: the prepared files, or the generator with the same events and epochs as large.

    What waits for the clock reads the files in any case: the generator ends at once.
    """
    facts = json.loads((data / MANIFEST).read_text())
    found: dict[str, hf.Source] = {}
    for kind, columns in QUERIES[query].reads.items():
        if kind_of == "generator" and query not in ON_THE_CLOCK:
            found[kind] = NexmarkSource(
                kind,
                facts["events"],
                splits=splits,
                config=Config(**facts["config"]),
                per_epoch=files * facts["per_file"],
            )
        else:
            linger_ms = CLOCK_MS if query in ON_THE_CLOCK else 0
            found[kind] = Prepared(
                data, kind, columns, files=files, beside=QUERIES[query].reads, linger_ms=linger_ms
            )
    return found


WARM = 0.25
"""By when so much was read, a side is warm."""


def speed(events: int, commits: list[tuple[float, int]]) -> dict[str, Any]:
    """Events a second from when it was warm to the last of commits, each with its time and the records it read.

    A query may read some kinds of events only; its records stand for all events among which they were.

    >>> speed(1000, [(10.0, 46), (11.0, 46), (13.0, 92), (25.0, 0)])
    {'events_per_s': 250, 'seconds': 3.0, 'epochs': [46, 46, 92]}
    """
    reading = [(at, records) for at, records in commits if records > 0]
    epochs = [records for _, records in reading]
    if len(reading) < 2:
        return {"events_per_s": None, "seconds": None, "epochs": epochs}
    read = list(itertools.accumulate(epochs))
    warm = min(len(reading) - 2, next(n for n, so_far in enumerate(read) if so_far >= WARM * read[-1]))
    seconds = reading[-1][0] - reading[warm][0]
    share = 1 - read[warm] / read[-1]
    return {"events_per_s": round(events * share / seconds), "seconds": round(seconds, 3), "epochs": epochs}


def measure(
    query: str,
    folder: Path,
    data: Path,
    *,
    source: str = "files",
    files: int = 4,
    parallelism: int = 2,
    backend: str = "heap",
    spark: Any = None,
) -> dict[str, Any]:
    """Run a query to its end."""
    from holdfast.engine.handle import run

    read = sources(query, data, source, files, parallelism)
    pipeline = build(query, read, hf.parquet(str(folder / "out"), merge=False))
    commits: list[tuple[float, int]] = []
    late: dict[str, int] = {}

    def note(status: Any, facts: Any) -> None:
        if facts is not None:
            commits.append((time.perf_counter(), facts.records_in))
            for uid, count in facts.late_records.items():
                late[uid] = late.get(uid, 0) + count

    settings = {
        "dir": str(folder / "dir"),
        "parallelism": parallelism,
        "master": f"local[{parallelism}]",
        "backend": backend,
        "max_records": 10_000_000,
        "interval": "0s",
        "cut": "data",
        "drain": query not in ON_THE_CLOCK,
        "trim_log": False,
        "take_over": True,
        "checkpoint_on_stop": False,
    }
    run(pipeline, spark=spark, settings=settings, listener=note)
    events = json.loads((data / MANIFEST).read_text())["events"]
    return {
        **speed(events, commits),
        "late": late,
        "settings": {**settings, "source": source, "files": files},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.nexmark.side", description=__doc__)
    parser.add_argument("query", help=f"one or more of {', '.join(QUERIES)}")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--source", choices=("files", "generator"), default="files")
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--parallelism", type=int, default=2)
    parser.add_argument("--backend", default="heap")
    chosen = parser.parse_args()
    options = {
        "source": chosen.source,
        "files": chosen.files,
        "parallelism": chosen.parallelism,
        "backend": chosen.backend,
    }
    queries = chosen.query.split(",")
    if unknown := [q for q in queries if q not in QUERIES]:
        parser.error(f"there is no query {', '.join(unknown)}")
    if len(queries) == 1:
        print(json.dumps(measure(chosen.query, chosen.folder, chosen.data, **options)), flush=True)
    else:
        in_one_session(queries, chosen.folder, chosen.data, options)
    os._exit(0)


def in_one_session(queries: list[str], folder: Path, data: Path, options: dict[str, Any]) -> None:
    """One query after the other; a line for each."""
    from holdfast.config import Settings
    from holdfast.engine.session import make_session

    spark = make_session(Settings(master=f"local[{options['parallelism']}]"), "nexmark")
    for query in queries:
        try:
            found = measure(query, folder / query, data, spark=spark, **options)
        except Exception as error:  # whatever it is, the next query may be fine
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"query": query, **found}), flush=True)


if __name__ == "__main__":
    main()
