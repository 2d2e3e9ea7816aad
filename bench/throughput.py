"""`python -m bench throughput`: us and the peers side by side, in turns, in one run.

Every side runs in a process of its own, rounds go through all sides before the next begins, and medians with
their spread are given. Peers get the epoch size and the settings that suit them best; what each side makes
durable stands beside its figure. The JSON is one object with a list `cases`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.limit import measure_limit
from bench.peers.environments import PeerError, run_peer
from bench.workload import event_files, make_events

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / ".bench" / "data"
KEYS = 1_000_000
SEED = 1
PEER_NAMES = ("structured-streaming", "pyflink", "bytewax")


@dataclass(frozen=True)
class Size:
    """How much is run."""

    rounds: int
    files: int
    peer_files: int
    grown_keys: int
    growth_epochs: int
    empty_epochs: int


FULL = Size(rounds=3, files=16, peer_files=5, grown_keys=10_000_000, growth_epochs=14, empty_epochs=40)
QUICK = Size(rounds=1, files=8, peer_files=3, grown_keys=1_000_000, growth_epochs=8, empty_epochs=20)
FILE_ROWS = 500_000
OUR_EPOCH = {"keyed-python": 1_000_000, "aggregate": 2_000_000}
"""Epochs are as large as suits each side best: ours these, the peers' as `peer_sides` says."""


@dataclass
class Case:
    """One figure: ours, theirs, and how many times better we are (for growth: the factor of cost)."""

    case: str
    peer: str
    ours: float
    theirs: float
    ratio: float
    unit: str
    asked: str
    met: bool
    ours_spread: list[float] = field(default_factory=list)
    theirs_spread: list[float] = field(default_factory=list)
    limit_fraction: float | None = None
    ours_durable: str = ""
    theirs_durable: str = ""
    detail: dict[str, Any] = field(default_factory=dict)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def ours(case: str, **options: Any) -> dict[str, Any]:
    """Our side in a process of its own."""
    arguments = [x for name, value in options.items() for x in (f"--{name}", str(value))]
    say(f"holdfast {case} {' '.join(arguments)}")
    command = [sys.executable, "-m", "bench.ours", "--case", case, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"our side failed in {case}:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def events(files: int, rows: int = FILE_ROWS) -> Path:
    """A folder of the workload, made if it is not there."""
    folder = DATA / f"{files}x{rows}"
    say(f"events in {folder.relative_to(ROOT)}")
    make_events(folder, files, rows, KEYS, SEED)
    return folder


Side = Callable[[], dict[str, Any]]


def peer_sides(case: str, size: Size, peers: tuple[str, ...]) -> dict[str, list[Side]]:
    """What each peer runs for a case: all its modes, of which the best counts, at the epoch that suits each."""
    n = size.peer_files
    wanted: dict[tuple[str, str], list[tuple[str, int, int]]] = {
        ("keyed-python", "structured-streaming"): [("row", 500_000, 3), ("pandas", 20_000, n)],
        ("keyed-python", "pyflink"): [("thread", 100_000, 5), ("process", 20_000, n)],
        ("keyed-python", "bytewax"): [("no-recovery", 500_000, 5)],
        ("aggregate", "structured-streaming"): [("hdfs", 2_000_000, n), ("rocksdb", 2_000_000, n)],
    }
    sides: dict[str, list[Side]] = {}
    for (of, peer), modes in wanted.items():
        if of == case and peer in peers:
            sides[peer] = [_side(peer, case, mode, events(files, rows)) for mode, rows, files in modes]
    return sides


def _side(peer: str, case: str, mode: str, data: Path) -> Side:
    return lambda: run_peer(peer, case, mode=mode, data=data)


ASKED = {
    ("keyed-python", "structured-streaming"): 40.0,
    ("keyed-python", "pyflink"): 15.0,
    ("keyed-python", "bytewax"): 4.0,
    ("aggregate", "structured-streaming"): 4.0,
}
LIMIT_ASKED = {"keyed-python": 0.5, "aggregate": 0.2}


def throughput_cases(case: str, size: Size, peers: tuple[str, ...]) -> list[Case]:
    """Records a second: us, the limit and the peers, in turns."""
    data = events(size.files) if case == "keyed-python" else events(size.files // 2, 2_000_000)
    sides = peer_sides(case, size, peers)
    mine: list[dict[str, Any]] = []
    limits: list[int] = []
    theirs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    failed: dict[str, str] = {}
    for number in range(size.rounds):
        say(f"{case}, round {number + 1} of {size.rounds}")
        mine.append(ours(case, data=data, rows=OUR_EPOCH[case]))
        limits.append(
            measure_limit(case, event_files(data), function="bench.pipelines:Balance.process").records_per_s
        )
        for name, modes in sides.items():
            for side in modes if name not in failed else []:
                try:
                    theirs[name].append(side())
                except PeerError as error:
                    failed[name] = str(error).splitlines()[0]
                    say(f"{name} left out: {error}")
    made = []
    speeds = [m["records_per_s"] for m in mine]
    fraction = statistics.median(speeds) / statistics.median(limits)
    for name, found in theirs.items():
        made.append(_against_peer(case, name, mine, found, fraction, failed.get(name)))
    made.append(
        Case(
            case,
            "limit",
            statistics.median(speeds),
            statistics.median(limits),
            round(fraction, 3),
            "records/s",
            f">= {LIMIT_ASKED[case]:.0%} of the limit",
            fraction >= LIMIT_ASKED[case],
            speeds,
            [float(x) for x in limits],
            round(fraction, 3),
            mine[0]["durable"],
            "nothing",
        )
    )
    return made


def _against_peer(
    case: str,
    name: str,
    mine: list[dict[str, Any]],
    found: list[dict[str, Any]],
    fraction: float,
    why: str | None,
) -> Case:
    by_mode: dict[str, list[float]] = {}
    for one in found:
        by_mode.setdefault(one["mode"], []).append(one["records_per_s"])
    if not by_mode:
        return Case(case, name, 0, 0, 0, "records/s", "", False, detail={"left_out": why})
    best = max(by_mode, key=lambda m: statistics.median(by_mode[m]))
    our_speed = statistics.median(m["records_per_s"] for m in mine)
    ratio = our_speed / statistics.median(by_mode[best])
    durable = next(o["durable"] for o in found if o["mode"] == best)
    return Case(
        case,
        name,
        our_speed,
        statistics.median(by_mode[best]),
        round(ratio, 2),
        "records/s",
        f">= {ASKED[case, name]:g}x",
        ratio >= ASKED[case, name],
        [m["records_per_s"] for m in mine],
        by_mode[best],
        round(fraction, 3),
        mine[0]["durable"],
        durable,
        {
            "mode": best,
            "modes": {m: statistics.median(v) for m, v in by_mode.items()},
            "settings": found[-1].get("settings"),
        },
    )


def empty_case(size: Size) -> Case:
    """An epoch with nothing in it beside a bare two-stage job with the same settings."""
    found = ours("empty-epoch", epochs=size.empty_epochs, rounds=max(2, size.rounds))
    mine, bare = found["ours_ms"], found["bare_ms"]
    ratio = statistics.median(mine) / statistics.median(bare)
    return Case(
        "empty-epoch",
        "bare-pyspark-job",
        round(statistics.median(mine), 1),
        round(statistics.median(bare), 1),
        round(ratio, 3),
        "ms",
        "<= 1.5x",
        ratio <= 1.5,
        _spread(mine),
        _spread(bare),
        None,
        found["durable"],
        "nothing",
    )


def growth_case(backend: str, size: Size) -> Case:
    """What an epoch of 100,000 records costs over a large state, against the same over a small one."""
    asked = 1.3 if backend == "heap" else 2.5
    small: list[dict[str, Any]] = []
    large: list[dict[str, Any]] = []
    for _ in range(max(1, size.rounds - 1)):
        for keys, into in ((100_000, small), (size.grown_keys, large)):
            into.append(ours("growth", backend=backend, keys=keys, rows=100_000, epochs=size.growth_epochs))
    few = statistics.median(e for s in small for e in s["epoch_ms"])
    many = statistics.median(e for s in large for e in s["epoch_ms"])
    memory = {"small_rss_mb": small[-1]["worker_rss_mb"], "large_rss_mb": large[-1]["worker_rss_mb"]}
    return Case(
        f"growth-{backend}",
        f"{size.grown_keys:,} keys against 100,000",
        round(many, 1),
        round(few, 1),
        round(many / few, 3),
        "ms",
        f"<= {asked}x",
        many / few <= asked,
        _spread([e for s in large for e in s["epoch_ms"]]),
        _spread([e for s in small for e in s["epoch_ms"]]),
        None,
        small[0]["durable"],
        small[0]["durable"],
        memory,
    )


def _spread(values: list[float]) -> list[float]:
    ordered = sorted(values)
    return [round(ordered[0], 1), round(statistics.median(ordered), 1), round(ordered[-1], 1)]


CASES = ("keyed-python", "aggregate", "empty-epoch", "growth-heap", "growth-rocksdb")


def run(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench throughput", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, smaller growth")
    parser.add_argument("--peers", default=",".join(PEER_NAMES), help="which peers, with commas; '' for none")
    parser.add_argument("--cases", default=",".join(CASES), help="which cases, with commas")
    parser.add_argument("--rounds", type=int, help="how often each side is run")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    chosen = parser.parse_args(argv)
    size = QUICK if chosen.quick else FULL
    if chosen.rounds:
        size = replace(size, rounds=chosen.rounds)
    peers = tuple(p for p in chosen.peers.split(",") if p)
    unknown = [p for p in peers if p not in PEER_NAMES] + [
        c for c in chosen.cases.split(",") if c not in CASES
    ]
    if unknown:
        parser.error(
            f"unknown: {', '.join(unknown)}; peers are {', '.join(PEER_NAMES)}, cases {', '.join(CASES)}"
        )
    found: list[Case] = []
    for case in chosen.cases.split(","):
        if case in ("keyed-python", "aggregate"):
            found += throughput_cases(case, size, peers)
        elif case == "empty-epoch":
            found.append(empty_case(size))
        else:
            found.append(growth_case(case.split("-")[1], size))
    report = {"machine": machine(), "size": asdict(size), "cases": [asdict(c) for c in found]}
    (ROOT / ".bench").mkdir(exist_ok=True)
    (ROOT / ".bench" / "throughput.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report) if chosen.json else table(found) + "\n\n" + durable(found))


def machine() -> dict[str, Any]:
    """Where this was measured, without saying whose it is."""
    import psutil
    import pyspark

    return {
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        "pyspark": pyspark.__version__,
    }


def table(cases: list[Case]) -> str:
    """The figures as a Markdown table: what the README shows."""
    lines = ["| case | beside | ours | theirs | ratio | asked |", "| --- | --- | --- | --- | --- | --- |"]
    for c in cases:
        if c.detail.get("left_out"):
            lines.append(f"| {c.case} | {c.peer} | | left out: {c.detail['left_out']} | | |")
            continue
        mode = f" ({c.detail['mode']})" if "mode" in c.detail else ""
        show = f"{c.ratio:.0%}" if c.peer == "limit" else f"{c.ratio:g}x"
        lines.append(
            f"| {c.case} | {c.peer}{mode} | {c.ours:,.0f} {c.unit} | {c.theirs:,.0f} {c.unit} | {show} | "
            f"{c.asked}{'' if c.met else ' — missed'} |"
        )
    return "\n".join(lines)


def durable(cases: list[Case]) -> str:
    """What each side makes durable: to be read beside the figures."""
    said = {"holdfast": next((c.ours_durable for c in cases if c.ours_durable), "")}
    for c in cases:
        if c.theirs_durable and not c.case.startswith("growth"):
            mode = f" ({c.detail['mode']})" if "mode" in c.detail else ""
            said[f"{c.peer}{mode}, {c.case}"] = c.theirs_durable
    return "Durable: " + "; ".join(f"**{who}**: {what}" for who, what in said.items()) + "."
