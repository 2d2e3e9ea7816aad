"""`python -m bench sessions`: what an epoch costs with few and with many open session windows.

    records   an epoch of 100,000 records over 10,000 keys whose sessions are open, beside 10,000 or 1,000,000 open ones
    expiry    an epoch in which 10,000 sessions end and are emitted, of 10,000 or 1,000,000

Both sizes run in turns, which change who is first, each in a process of its own, on local Spark, without backups. The keys
that are touched, and those whose sessions end together, are spread over all. Times are those of the run of an epoch, from
its commit record, without commit and publishing, which cost the same for both; medians over the epochs of a round, the
first third of them left out, and then over rounds, with their spread. The JSON is one object with a list `cases`; what
was measured is in `.bench/sessions.json` as it comes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import holdfast as hf
from bench.durability import ROOT
from bench.machine import Kept, ended_by_signals, machine
from bench.throughput import say
from holdfast.log.records import Commit
from holdfast.supervise.processes import kill_everything

BLOCK = 10_000
"""So many keys are touched in an epoch, and so many sessions end together."""
RECORDS = 100_000
GAP_S = 3_600
ASKED = 1.3
"""Of an epoch whose records go to open sessions; expiry is to cost what expires, and is held to the same."""
TIMEOUT_S = 600.0
FILE = ROOT / ".bench" / "sessions.json"


class Visits(hf.Source):
    """Opens sessions, goes on with some of them, and lets them end block by block; each epoch is known beforehand.

    Block b of keys, every so many-th of all, is first seen at second b. Epochs: `opened / FILL` that open all sessions, `steady` of 100,000 records
    over one block, `ending` that take event time past the end of one block each.
    """

    FILL = 25 * BLOCK

    def __init__(self, opened: int, steady: int, ending: int) -> None:
        self.opened, self.steady, self.ending = opened, steady, ending
        self.filling = -(-opened // self.FILL)

    def schema(self) -> pa.Schema:
        return pa.schema([("key", pa.int64()), ("at", pa.int64())])

    def plan(self, position: Any, limit: hf.Limit) -> hf.Offer:
        epoch = 0 if position is None else int(position)
        last = self.filling + self.steady + self.ending
        if epoch >= last:
            return hf.Offer([], epoch, exhausted=True, splits=["0"])
        count = self.count(epoch)
        cuts = [count * i // limit.tasks for i in range(limit.tasks + 1)]
        ranges = [
            hf.Range("0", a, b, {"epoch": epoch}, records=b - a) for a, b in itertools.pairwise(cuts) if b > a
        ]
        return hf.Offer(ranges, epoch + 1, backlog=last - epoch - 1, splits=["0"])

    def count(self, epoch: int) -> int:
        if epoch < self.filling:
            return min(self.FILL, self.opened - epoch * self.FILL)
        return RECORDS if epoch < self.filling + self.steady else 1

    def read(self, piece: hf.Range, reading: hf.Reading) -> Iterator[pa.Table]:
        epoch = int(piece.info["epoch"])
        numbers = np.arange(piece.start, piece.end, dtype=np.int64)
        blocks = self.opened // BLOCK
        if epoch < self.filling:
            keys = epoch * self.FILL + numbers
            times = keys % blocks
        elif epoch < self.filling + self.steady:
            keys = numbers % BLOCK * blocks + blocks - 1
            times = np.full(len(keys), blocks + epoch - self.filling, np.int64)
        else:
            keys = np.full(1, -1, np.int64)
            times = np.full(1, GAP_S + 1 + self._ends(epoch - self.filling - self.steady), np.int64)
        yield pa.table({"key": keys, "at": times})

    def _ends(self, number: int) -> int:
        """When block `number` was last touched: in the next second, and a gap later, it has ended. The last one was touched
        until the steady epochs were over."""
        blocks = self.opened // BLOCK
        return number if number < blocks - 1 else blocks + self.steady - 1


def side(opened: int, steady: int, ending: int, backend: str) -> dict[str, Any]:
    """One run: milliseconds of each steady and each ending epoch, and how many sessions were emitted in the latter."""
    from holdfast.log.journal import Journal

    folder = Path(tempfile.mkdtemp(prefix="holdfast-sessions-"))
    source = Visits(opened, steady, min(ending, opened // BLOCK))
    try:
        pipeline(source, hf.parquet(str(folder / "out"))).run(
            dir=str(folder / "dir"),
            backend=backend,
            parallelism=2,
            interval="0s",
            drain=True,
            checkpoint="never",
            max_records=10 * Visits.FILL,
        )
        journal = Journal.at(folder / "dir")
        commits = [journal.commit(e + 1) for e in range(journal.last_epoch())]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    steadies, endings = parted([c for c in commits if c is not None], source)
    return {
        "steady_ms": [c.took_ms for c in steadies],
        "ending_ms": [c.took_ms for c in endings],
        "emitted": [c.records_out.get("out", 0) for c in endings],
    }


def pipeline(source: Visits, out: hf.Sink) -> hf.Pipeline:
    """Sessions of visits, counted."""
    made = hf.Pipeline("sessions")
    stream = made.read("visits", source).event_time("at", unit="s")
    sessions = stream.key_by("key").window(hf.session(f"{GAP_S}s")).aggregate("sessions", n=hf.count())
    sessions.write("out", out)
    return made


def parted(commits: Sequence[Commit], source: Visits) -> tuple[list[Commit], list[Commit]]:
    """The steady epochs that are warm, and the ending ones; an error if they were not what they are taken for."""
    first = source.filling
    steadies = list(commits[first + source.steady // 3 : first + source.steady])
    endings = list(commits[first + source.steady : first + source.steady + source.ending])
    read, told = {c.records_in for c in steadies}, {c.records_out.get("out", 0) for c in endings}
    if read != {RECORDS} or told != {BLOCK} or len(endings) != source.ending:
        raise SystemExit(
            f"epochs of {sorted(read)} records, and {sorted(told)} sessions that ended: not as planned"
        )
    return steadies, endings


def run(arguments: Sequence[str]) -> None:
    made = argparse.ArgumentParser(prog="python -m bench sessions", description=__doc__)
    made.add_argument("--json", action="store_true")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--few", type=int, default=BLOCK)
    made.add_argument("--many", type=int, default=1_000_000)
    made.add_argument("--steady", type=int, default=30)
    made.add_argument("--backend", default="heap")
    made.add_argument("--side", type=int, help=argparse.SUPPRESS)
    given = made.parse_args(list(arguments))
    if given.side is not None:
        print(json.dumps(side(given.side, given.steady, 1 if given.side <= BLOCK else 8, given.backend)))
        return
    sizes = {"few": given.few, "many": given.many}
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in sizes}
    result: dict[str, Any] = {"machine": machine(), "backend": given.backend, "checkpoint": "never"}
    kept = Kept(FILE, {**result, "rounds": seen})
    with ended_by_signals():
        for number in range(given.rounds):
            for name in sizes if number % 2 == 0 else reversed(sizes):
                say(f"round {number + 1}: {sizes[name]:,} open sessions")
                seen[name].append(_in_process(sizes[name], given.steady, given.backend))
                kept.write()
    result["cases"] = [_case(kind, seen, sizes) for kind in ("steady", "ending")]
    kept.results |= result
    kept.write()
    if given.json:
        print(json.dumps(result))
        return
    for case in result["cases"]:
        print(
            f"{case['case']}: {case['ratio']:.2f}x ({case['many_ms']:.0f} ms beside {case['few_ms']:.0f} ms)"
        )


def _in_process(opened: int, steady: int, backend: str) -> dict[str, Any]:
    told = ["--side", str(opened), "--steady", str(steady), "--backend", backend]
    process = subprocess.Popen(
        [sys.executable, "-m", "bench", "sessions", *told],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        kill_everything(process)
    if process.returncode:
        sys.exit(errors[-3000:])
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def _case(kind: str, seen: dict[str, list[dict[str, Any]]], sizes: dict[str, int]) -> dict[str, Any]:
    medians = {name: [statistics.median(r[f"{kind}_ms"]) for r in rounds] for name, rounds in seen.items()}
    few, many = (statistics.median(medians[name]) for name in ("few", "many"))
    ratio = many / few
    return {
        "case": "records" if kind == "steady" else "expiry",
        "open": sizes,
        "few_ms": round(few, 1),
        "many_ms": round(many, 1),
        "ratio": round(ratio, 3),
        "spread": {name: [round(min(m), 1), round(max(m), 1)] for name, m in medians.items()},
        "emitted": {name: rounds[-1]["emitted"] for name, rounds in seen.items()},
        # Of few sessions there is one epoch a round in which some end.
        "asked": f"at most {ASKED}x",
        "met": ratio <= ASKED,
    }
