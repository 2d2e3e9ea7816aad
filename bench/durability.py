"""`python -m bench durability`: what checkpoints, replay and restarts cost, and chaos over three examples.

Sides are run in processes of their own and in turns; medians with their spread are given. The JSON is one
object with a list `cases` (each with `case`, `value`, `asked`, `met`, `spread`, `detail`). What was measured is in
`.bench/durability.json` as it comes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bench.machine import ROOT, Kept, ended_by_signals, machine

KEYS = 1_000_000
EXAMPLES = ["examples/two_stages.py", "examples/vehicle_map.py", "examples/monitoring.py"]
"""Chaos runs over these; the first has two keyed stages."""


@dataclass(frozen=True)
class Size:
    """How much is run."""

    rounds: int
    epochs: int
    checkpoints: int
    faults: int
    replay: tuple[tuple[int, int, float], ...] = ((200, 2_000, 5.0), (20, 500_000, 1.2))


FULL = Size(rounds=3, epochs=56, checkpoints=125, faults=300)
QUICK = Size(rounds=1, epochs=24, checkpoints=5, faults=9, replay=((60, 2_000, 5.0), (6, 500_000, 1.2)))


@dataclass
class Case:
    """One figure beside what was asked."""

    case: str
    value: float
    unit: str
    asked: str
    met: bool
    spread: list[float] = field(default_factory=list)
    detail: dict[str, Any] = field(default_factory=dict)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def side(case: str, folder: Path, **options: Any) -> dict[str, Any]:
    """One measurement of ours, in a process of its own."""
    arguments = [x for name, value in options.items() for x in (f"--{name}", str(value))]
    say(f"{case} {' '.join(arguments)}")
    done = subprocess.run(
        [sys.executable, "-m", "bench.sides", case, "--folder", str(folder), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{case} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    say(f"  {found}")
    return found


def fresh(measure: Callable[[Path], Any]) -> Any:
    with tempfile.TemporaryDirectory(prefix="holdfast-durability-") as name:
        return measure(Path(name))


def throughput(size: Size) -> list[Case]:
    """With a checkpoint every 10 s beside none, in pairs that change who is first."""
    cases = []
    for backend in ("heap", "rocksdb"):
        ratios, detail = [], []
        for number in range(size.rounds):
            found: dict[str, Any] = {}
            for policy in ("10s", "never") if number % 2 else ("never", "10s"):
                options = {"backend": backend, "checkpoint": policy, "epochs": size.epochs}
                found[policy] = fresh(lambda folder, o=options: side("throughput", folder, **o))
            ratios.append(found["10s"]["records_per_s"] / found["never"]["records_per_s"])
            detail.append(found)
        value = statistics.median(ratios)
        cases.append(
            Case(
                f"throughput-{backend}",
                value,
                "x without",
                "0.9",
                value >= 0.9,
                sorted(ratios),
                {"runs": detail},
            )
        )
    return cases


def incremental(size: Size) -> list[Case]:
    """Bytes of a checkpoint after 1% of the keys were touched, beside those of a full one: the worst mean over 20.

    There are enough of them that every kind of compaction is among them: merges of deltas, and a new base of RocksDB.
    """
    cases = []
    for backend, asked in (("heap", 0.05), ("rocksdb", 0.15)):
        options = {"backend": backend, "epochs": size.checkpoints}
        found = fresh(lambda folder, o=options: side("incremental", folder, **o))
        parts = [n / found["full_bytes"] for n in found["new_bytes"]]
        value = worst_mean(parts, 20)
        cases.append(
            Case(
                f"incremental-{backend}",
                value,
                "of a full one",
                f"{asked}",
                value <= asked,
                sorted(parts),
                found,
            )
        )
    return cases


def worst_mean(parts: list[float], window: int) -> float:
    """The largest mean over so many in a row."""
    starts = range(max(1, len(parts) - window + 1))
    return max(statistics.mean(parts[s : s + window]) for s in starts)


def replay(size: Size) -> list[Case]:
    """The first run of some epochs beside their replay."""
    cases = []
    for epochs, records, asked in size.replay:
        ratios, runs = [], []
        for _ in range(size.rounds):
            options = {"epochs": epochs, "records": records}
            found = fresh(lambda folder, o=options: side("replay", folder, **o))
            ratios.append(found["first_s"] / found["replay_s"])
            runs.append(found)
        value = statistics.median(ratios)
        name = f"replay-{epochs}x{records}"
        cases.append(
            Case(name, value, "x the first run", f"{asked}", value >= asked, sorted(ratios), {"runs": runs})
        )
    return cases


def restart(size: Size) -> list[Case]:
    """The driver killed with a million keys in RocksDB: seconds from the restart to the next commit, theirs too."""
    ours, theirs = [], []
    with tempfile.TemporaryDirectory(prefix="holdfast-durability-") as name:
        data = Path(name) / "data"
        make_files(data)
        for number in range(size.rounds):
            for who in ("ours", "theirs") if number % 2 else ("theirs", "ours"):
                folder = Path(name) / f"{who}{number}"
                folder.mkdir()
                (ours if who == "ours" else theirs).append(killed(who, folder, data))
                say(f"restart {who}: {(ours if who == 'ours' else theirs)[-1]:.1f} s")
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    value = statistics.median(ratios)
    detail = {"ours_s": ours, "structured_streaming_s": theirs}
    return [Case("restart", value, "x Structured Streaming", "0.6", value <= 0.6, sorted(ratios), detail)]


FILES, ROWS = 400, 100_000


def make_files(folder: Path) -> None:
    """Ten files bring every key once; those behind them draw from all keys, more than anyone reads."""
    import numpy as np

    folder.mkdir()
    random = np.random.default_rng(1)
    every = random.permutation(KEYS)
    drawn = random.integers(0, KEYS, ROWS)
    for number in range(FILES):
        keys = every[number * ROWS : (number + 1) * ROWS] if number * ROWS < KEYS else drawn
        times = pa.array(np.full(len(keys), 1_700_000_000_000 + number), pa.timestamp("ms"))
        table = pa.table({"k": keys, "ts": times, "v": random.random(len(keys))})
        pq.write_table(table, folder / f"part-{number:04d}.parquet", row_group_size=ROWS // 2)


def killed(who: str, folder: Path, data: Path) -> float:
    """Start, kill when the state is there and some more epochs are through, start again: seconds to a new commit."""
    if who == "ours":
        command = [
            sys.executable,
            "-m",
            "bench.sides",
            "restart",
            "--folder",
            str(folder),
            "--data",
            str(data),
        ]
        commits = folder / "dir" / "log" / "commits"
    else:
        script = ROOT / "bench" / "peers" / "structured_streaming_restart.py"
        command = [sys.executable, str(script), "--data", str(data), "--scratch", str(folder)]
        commits = folder / "checkpoint" / "commits"
    first = spawn(command, folder)
    try:
        before = wait_for(commits, KEYS // ROWS + 5, first, folder)
    finally:
        kill(first)
    started = time.monotonic()
    second = spawn(command, folder)
    try:
        wait_for(commits, max(before, newest(commits)) + 1, second, folder)
        return time.monotonic() - started
    finally:
        kill(second)


def spawn(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    # What Spark leaves behind when it is killed goes with the folder.
    environment = {**os.environ, "SPARK_LOCAL_DIRS": str(folder / "spark")}
    with open(folder / "log.txt", "ab") as log:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )


def kill(process: subprocess.Popen[bytes]) -> None:
    """The driver with its JVM and workers."""
    with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    subprocess.run(["pkill", "-9", "-s", str(process.pid)], check=False)


def newest(commits: Path) -> int:
    names = [n.split(".")[0] for n in os.listdir(commits)] if commits.is_dir() else []
    return max((int(n) for n in names if n.isdigit()), default=-1)


def wait_for(commits: Path, number: int, process: subprocess.Popen[bytes], folder: Path) -> int:
    until = time.monotonic() + 600
    while newest(commits) < number:
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"no commit {number} of {commits}:\n{(folder / 'log.txt').read_text()[-3000:]}")
        time.sleep(0.01)
    return newest(commits)


def chaos(size: Size) -> list[Case]:
    """Real faults on a real cluster; see `holdfast chaos --help`."""
    totals = {"faults": 0, "lost": 0, "doubled": 0, "different_states": 0}
    runs = []
    for number, example in enumerate(EXAMPLES):
        trials = size.faults // len(EXAMPLES)
        backend = ("heap", "rocksdb")[number % 2]
        say(f"chaos {example}, {trials} faults, {backend}")
        holdfast = Path(sys.executable).parent / "holdfast"
        arguments = [
            "--faults",
            "all",
            "--trials",
            str(trials),
            "--seed",
            str(number + 1),
            "--backend",
            backend,
        ]
        done = subprocess.run(
            [str(holdfast), "chaos", example, *arguments, "--json"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        last = json.loads(done.stdout.splitlines()[-1])
        runs.append({"example": example, "exit_code": done.returncode, **last})
        say(f"  {runs[-1]}")
        for key in totals:
            totals[key] += last[key]
    wrong = totals["lost"] + totals["doubled"] + totals["different_states"]
    met = wrong == 0 and totals["faults"] >= size.faults and all(r["exit_code"] == 0 for r in runs)
    detail = {**totals, "runs": runs}
    return [Case("chaos", wrong, f"wrong in {totals['faults']} faults", "0", met, detail=detail)]


CASES: dict[str, Callable[[Size], list[Case]]] = {
    "throughput": throughput,
    "incremental": incremental,
    "replay": replay,
    "restart": restart,
    "chaos": chaos,
}


def run(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench durability", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round and few faults")
    parser.add_argument("--rounds", type=int, help="pairs of each comparison")
    parser.add_argument("--faults", type=int, help="faults of chaos, over all examples")
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args(argv)
    size = QUICK if chosen.quick else FULL
    more = {"rounds": chosen.rounds, "faults": chosen.faults}
    size = Size(
        **{**{f: getattr(size, f) for f in size.__dataclass_fields__}, **{k: v for k, v in more.items() if v}}
    )
    names = chosen.cases.split(",")
    unknown = [name for name in names if name not in CASES]
    if unknown:
        parser.error(f"unknown cases: {', '.join(unknown)}; they are {', '.join(CASES)}")
    made: list[Case] = []
    kept = Kept(
        ROOT / ".bench" / "durability.json", {"machine": machine(), "size": asdict(size), "cases": []}
    )
    with ended_by_signals():
        for name in names:
            made += CASES[name](size)
            kept.results["cases"] = [asdict(c) for c in made]
            kept.write()
    if chosen.json:
        print(json.dumps({"cases": kept.results["cases"]}))
        return
    for c in made:
        spread = f"  ({c.spread[0]:.3f} to {c.spread[-1]:.3f})" if c.spread else ""
        print(
            f"{c.case:24} {c.value:8.3f} {c.unit:26} asked {c.asked:6} {'met' if c.met else 'MISSED'}{spread}"
        )
