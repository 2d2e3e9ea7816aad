"""`python -m bench nexmark`: Nexmark's queries on Spark, ours beside Structured Streaming, each checked by DuckDB.

Both sides read the same prepared Parquet files and write Parquet, each run in a process of its own; rounds go through
all queries and both sides before the next begins. Speed is events a second, of all kinds, from the first commit to
that of the last epoch that read events; the first epoch's don't count, so starting up does not, on either side.
Whatever a run wrote is reduced to the final result and compared with DuckDB's answer (`equal`, `theirs_equal`); a run
that is not equal still shows its speed, but no ratio.

Both sides may choose how many files an epoch or batch takes (`--files`, `--their-files`), theirs where its state is as
well: each choice is run in the first round, those near the best of them in later ones, and the one with the best
median counts.

With `--crash` our driver is killed with SIGKILL halfway, once for each query, and started again: the result must be
equal all the same. `--check-parallelism 1,4` runs ours once with each of those too, all queries in one session, only to
see whether the result is equal; the crashes are then dealt out to all parallelisms in turn. The JSON is one object with
a list `queries`, and a `summary` with the median ratio over the stateful queries that both sides ran.
"""

from __future__ import annotations

import argparse
import json
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

from bench.durability import kill, newest, say, spawn, wait_for
from bench.machine import Kept, ended_by_signals, machine
from bench.nexmark.files import prepare, tables
from bench.nexmark.generator import ROUND, Config
from bench.nexmark.oracle import QUERIES, equal
from bench.nexmark.results import final, processed, truth, written
from bench.nexmark.side import sources
from bench.peers.environments import PeerError, run_peer
from holdfast.log.journal import Journal

ROOT = Path(__file__).resolve().parent.parent.parent
BENCH = ROOT / ".bench"
SCRIPT = "structured_streaming_nexmark.py"
TIMEOUT_S = 1800.0

LEFT_OUT = {
    "q4": "Structured Streaming can't: the average is a running aggregate behind a join and an aggregate, and what "
    "is chained must be in append mode.",
    "q6": "Structured Streaming can't: a stream has no OVER with rows before the current one.",
}
"""Queries that the other side has no form for, and why."""
LIMITS = {
    "q5": "theirs: two windows, one behind the other",
    "q7": "theirs: keeps all bids of a window by price, two windows one behind the other",
    "q8": "both: a union in a window instead of a join",
    "q9": "theirs: auctions are taken to last 10 s at most, as a bounded join needs a constant",
    "q12": "theirs are compared by bidder, whatever the window: when they were processed is not known",
    "q15": "theirs: distinct counts by collect_set",
    "q16": "theirs: distinct counts by collect_set",
    "q19": "theirs: keeps every bid of an auction in a list",
}
"""What must be known to read a figure."""


@dataclass(frozen=True)
class Plan:
    """What is run."""

    events: int
    per_file: int
    files: tuple[int, ...]
    rounds: int
    queries: tuple[str, ...]
    parallelism: tuple[int, ...]
    check_parallelism: tuple[int, ...]
    source: str
    backend: str
    stores: tuple[str, ...]
    their_files: tuple[int, ...]
    crash: bool
    rate: int
    seed: int

    @property
    def config(self) -> Config:
        return Config(seed=self.seed, first_event_rate=self.rate)

    @property
    def data(self) -> Path:
        name = f"nexmark-{self.events}-{self.per_file}-{self.rate}-{self.seed}"
        return BENCH / "data" / name

    def batches(self, files: int) -> int:
        """How many epochs or batches there are if each takes so many files."""
        return batches(self.events, self.per_file, files)

    @property
    def epochs(self) -> int:
        """How many epochs ours takes with the first choice of files."""
        return self.batches(self.files[0])


def batches(events: int, per_file: int, files: int) -> int:
    return -(-events // (per_file * files))


@dataclass
class Result:
    """A query at one parallelism: events a second of both sides, and whether what they wrote is right."""

    query: str
    parallelism: int
    stateful: bool
    about: str
    equal: bool | None = None
    ours: float | None = None
    theirs: float | None = None
    ratio: float | None = None
    theirs_equal: bool | None = None
    crash: dict[str, Any] | None = None
    checks: list[dict[str, Any]] = field(default_factory=list)
    """Ours with other parallelisms: whether it was equal."""
    our_mode: str = ""
    """Ours that was the fastest: how many files an epoch takes."""
    our_modes: dict[str, float] = field(default_factory=dict)
    mode: str = ""
    """Theirs that was the fastest: where its state is, and how many files a batch takes."""
    modes: dict[str, float] = field(default_factory=dict)
    spread: dict[str, list[float]] = field(default_factory=lambda: {"ours": [], "theirs": []})
    note: str = ""

    def say(self, text: str) -> None:
        """Add to the note, once."""
        if text not in self.note:
            self.note = f"{self.note}; {text}" if self.note else text


class Truth:
    """DuckDB's answers, asked for once each."""

    def __init__(self, folder: Path) -> None:
        self._tables = tables(folder)
        self._answers: dict[str, pa.Table] = {}

    def answer(self, query: str) -> pa.Table:
        if query not in self._answers:
            self._answers[query] = truth(query, self._tables)
        return self._answers[query]

    def bids_of_each(self) -> pa.Table:
        """How many bids each bidder made."""
        found = self._tables["bid"].group_by("bidder").aggregate([([], "count_all")])
        return found.rename_columns({"bidder": "bidder", "count_all": "bid_count"})


# Ours


def our_command(query: str, folder: Path, plan: Plan, parallelism: int, files: int) -> list[str]:
    options = {
        "folder": folder,
        "data": plan.data,
        "source": plan.source,
        "files": files,
        "parallelism": parallelism,
        "backend": plan.backend,
    }
    arguments = [x for name, value in options.items() for x in (f"--{name}", str(value))]
    return [sys.executable, "-m", "bench.nexmark.side", query, *arguments]


def our_run(query: str, folder: Path, plan: Plan, parallelism: int, files: int) -> dict[str, Any]:
    """A run of ours to its end, in a process of its own; raises `RuntimeError` with the end of what it said."""
    command = our_command(query, folder, plan, parallelism, files)
    say(f"holdfast {query}, parallelism {parallelism}, {files} files an epoch")
    lines, why = said_by(command, folder)
    if why or not lines:
        raise RuntimeError(why or "it said nothing")
    return lines[-1]


def said_by(command: list[str], folder: Path) -> tuple[list[dict[str, Any]], str]:
    """The JSON lines of a process that was run to its end, and why it did not get there, with the end of what it said."""
    process = spawn(command, folder)
    log, why = folder / "log.txt", ""
    try:
        if process.wait(TIMEOUT_S):
            why = f"it ended with {process.returncode}:\n{log.read_text()[-2000:]}"
    except subprocess.TimeoutExpired:
        why = f"it took more than {TIMEOUT_S:.0f} s:\n{log.read_text()[-2000:]}"
    finally:
        if process.poll() is None:
            kill(process)
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")], why


def our_check(query: str, folder: Path, plan: Plan, known: Truth, files: int) -> tuple[bool, str]:
    """Whether what our run wrote is DuckDB's answer; for q12, to when its epochs were."""
    found = final(query, written(folder / "out"))
    if query != "q12":
        return equal(found, known.answer(query))
    journal = Journal.at(folder / "dir")
    plans = [p for p in map(journal.plan, range(1, journal.last_epoch() + 1)) if p is not None]
    bids = sources(query, plan.data, plan.source, files, 2)["bid"]
    return equal(found, truth(query, {"bid": processed(plans, bids)}))


def ours(result: Result, plan: Plan, known: Truth) -> None:
    """A run of ours with each choice of files that may still be the best, measured and checked."""
    for files in plan.files:
        if may_be_best(result.our_modes, str(files)):
            our_one(result, plan, known, files)


def our_one(result: Result, plan: Plan, known: Truth, files: int) -> None:
    with tempfile.TemporaryDirectory(prefix="holdfast-nexmark-") as name:
        folder = Path(name)
        try:
            found = our_run(result.query, folder, plan, result.parallelism, files)
        except RuntimeError as error:
            result.equal = False
            result.say(f"ours failed: {str(error).splitlines()[0]}")
            say(f"  {error}")
            return
        same, why = our_check(result.query, folder, plan, known, files)
    result.equal = same if result.equal is None else result.equal and same
    if not same:
        result.say(f"ours is not equal: {why.splitlines()[0]}")
        say(f"  not equal: {why}")
    if found["events_per_s"] is not None:
        result.spread.setdefault(f"ours {files}", []).append(found["events_per_s"])
    else:
        result.say("ours took fewer than two epochs: no speed")
    if any(found["late"].values()):
        result.say(f"ours: late records {found['late']}")
    say(f"  {found['events_per_s'] or 0:,} events/s, {'equal' if same else 'NOT equal'}")


def crashed(result: Result, plan: Plan, known: Truth, parallelism: int) -> None:
    """Kill our driver halfway, start it again, and check what came of it."""
    result.crash = {"parallelism": parallelism, **crash_of(result.query, plan, known, parallelism)}


def crash_of(query: str, plan: Plan, known: Truth, parallelism: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="holdfast-nexmark-") as name:
        folder, files = Path(name), plan.files[0]
        commits = folder / "dir" / "log" / "commits"
        say(f"holdfast {query}, parallelism {parallelism}, to be killed")
        process = spawn(our_command(query, folder, plan, parallelism, files), folder)
        try:
            wait_for(commits, max(1, plan.epochs // 2), process, folder)
        except SystemExit as error:
            return {"equal": False, "why": str(error).splitlines()[0]}
        finally:
            kill(process)
        killed_at = newest(commits)
        began = time.monotonic()
        try:
            our_run(query, folder, plan, parallelism, files)
        except RuntimeError as error:
            return {"equal": False, "killed_at": killed_at, "why": str(error).splitlines()[0]}
        took_s = time.monotonic() - began
        same, why = our_check(query, folder, plan, known, files)
        say(f"  killed at epoch {killed_at} of {plan.epochs}, {'equal' if same else 'NOT equal: ' + why}")
        return {
            "equal": same,
            "killed_at": killed_at,
            "epochs": newest(commits),
            "second_run_s": round(took_s, 1),
            "why": why.splitlines()[0] if why else "",
        }


def our_runs(queries: list[str], folder: Path, plan: Plan, parallelism: int) -> dict[str, str]:
    """Runs of ours to their ends, one after the other in one process: why each failed, if it did."""
    command = our_command(",".join(queries), folder, plan, parallelism, plan.files[0])
    lines, why = said_by(command, folder)
    told = {line["query"]: line.get("error", "") for line in lines}
    return {query: told.get(query, why or "it said nothing") for query in queries}


def checked(results: list[Result], plan: Plan, known: Truth) -> None:
    """Every query of ours once with each of the other parallelisms."""
    for parallelism in plan.check_parallelism:
        say(f"holdfast, all queries, parallelism {parallelism}")
        with tempfile.TemporaryDirectory(prefix="holdfast-nexmark-") as name:
            failed = our_runs([r.query for r in results], Path(name), plan, parallelism)
            for result in results:
                same, why = False, failed[result.query]
                if not why:
                    same, why = our_check(result.query, Path(name) / result.query, plan, known, plan.files[0])
                note = "" if same else why.splitlines()[0]
                result.checks.append({"parallelism": parallelism, "equal": same, "note": note})
                if not same:
                    say(f"  {result.query} is NOT equal: {why}")


# Theirs


def theirs(result: Result, plan: Plan, known: Truth) -> None:
    """A run of Structured Streaming in each of its modes that may still be the best, measured and checked."""
    stores = plan.stores if result.stateful else plan.stores[:1]
    for store, files in [(s, f) for s in stores for f in plan.their_files]:
        if not may_be_best(result.modes, f"{store} {files}"):
            continue
        with tempfile.TemporaryDirectory(prefix="nexmark-theirs-") as name:
            out = Path(name) / "out"
            try:
                found = run_peer(
                    "structured-streaming",
                    result.query,
                    script=SCRIPT,
                    timeout_s=TIMEOUT_S,
                    mode=store,
                    data=plan.data,
                    out=out,
                    files=files,
                    parallelism=result.parallelism,
                )
            except PeerError as error:
                result.say(f"theirs failed ({store}): {str(error).splitlines()[0]}")
                say(f"  {error}")
                continue
            same, why = their_check(result.query, out, known)
        if not same:
            result.say(f"theirs is not equal: {why.splitlines()[0]}")
            say(f"  not equal: {why}")
        result.theirs_equal = same if result.theirs_equal is None else result.theirs_equal and same
        result.spread.setdefault(f"theirs {store} {files}", []).append(found["records_per_s"])


def their_check(query: str, out: Path, known: Truth) -> tuple[bool, str]:
    rows = written(out)
    if query != "q12":
        return equal(final(query, rows), known.answer(query))
    assert rows is not None
    last = rows.group_by(["bidder", "starttime"], use_threads=False).aggregate([("bid_count", "max")])
    sums = last.group_by("bidder").aggregate([("bid_count_max", "sum")])
    counted = pa.table({"bidder": sums["bidder"], "bid_count": sums["bid_count_max_sum"]})
    return equal(counted, known.bids_of_each())


# Together


def settle(result: Result) -> None:
    """Medians of what was measured so far, and the ratio; none where a side is not right."""
    result.our_modes, result.our_mode = _best(result, "ours")
    result.modes, result.mode = _best(result, "theirs")
    result.ours = result.our_modes.get(result.our_mode)
    result.theirs = result.modes.get(result.mode)
    right = result.equal and result.theirs_equal
    result.ratio = round(result.ours / result.theirs, 2) if right and result.ours and result.theirs else None


def _best(result: Result, side: str) -> tuple[dict[str, float], str]:
    """The median of each choice of a side, and the choice with the greatest, whose spread becomes the side's."""
    chosen = {
        name.removeprefix(f"{side} "): values
        for name, values in result.spread.items()
        if name.startswith(f"{side} ") and values
    }
    medians = {name: statistics.median(values) for name, values in chosen.items()}
    best = max(medians, key=lambda name: medians[name], default="")
    result.spread[side] = chosen.get(best, [])
    return medians, best


NEAR = 0.8
"""What is slower than this share of the best is not run again: another round would not make it the best."""


def may_be_best(medians: dict[str, float], choice: str) -> bool:
    """Whether a choice is worth another round, by what was measured so far.

    >>> [may_be_best({"4": 100.0, "10": 85.0, "20": 70.0}, choice) for choice in ("4", "10", "20")]
    [True, True, False]
    >>> may_be_best({}, "4")
    True
    """
    return not medians or medians.get(choice, 0.0) >= NEAR * max(medians.values())


def summary(results: list[Result]) -> dict[str, Any]:
    """All of it in a few figures."""
    both = [r for r in results if r.stateful and r.ratio is not None]
    checks = [check for r in results for check in r.checks]
    crashes = [r.crash for r in results if r.crash is not None]
    return {
        "median_ratio_stateful": round(statistics.median(r.ratio for r in both if r.ratio), 2)
        if both
        else None,
        "stateful_on_both": len(both),
        "least_ratio_stateful": min((r.ratio for r in both if r.ratio), default=None),
        "equal": sum(r.equal is True for r in results),
        "of": len(results),
        "theirs_equal": sum(r.theirs_equal is True for r in results),
        "checks_equal": sum(c["equal"] is True for c in checks),
        "checks": len(checks),
        "crashes_equal": sum(bool(c["equal"]) for c in crashes),
        "crashes": len(crashes),
    }


Side = Callable[[Result, Plan, Truth], None]


def measured(plan: Plan, kept: Kept, peers: bool) -> list[Result]:
    """Every query on both sides, in rounds that change who is first; what is there so far is kept after each."""
    say(f"{plan.events:,} events in {plan.data.relative_to(ROOT)}")
    prepare(plan.data, plan.events, plan.per_file, plan.config)
    known = Truth(plan.data)
    results = [
        Result(query, parallelism, QUERIES[query].stateful, QUERIES[query].about)
        for query in plan.queries
        for parallelism in plan.parallelism
    ]
    dealt = (*plan.parallelism[:1], *plan.check_parallelism)
    for number in range(plan.rounds):
        for place, result in enumerate(results):
            say(f"{result.query}, round {number + 1} of {plan.rounds}")
            sides: list[Side] = [ours, theirs] if peers and result.query not in LEFT_OUT else [ours]
            for side in sides if number % 2 == 0 else reversed(sides):
                side(result, plan, known)
            if plan.crash and number == 0:
                several = len(plan.parallelism) > 1
                crashed(result, plan, known, result.parallelism if several else dealt[place % len(dealt)])
            for why in (LEFT_OUT.get(result.query), LIMITS.get(result.query)) if peers else ():
                if why:
                    result.say(why)
            settle(result)
            _keep(kept, results)
        if number == 0:
            checked([r for r in results if r.parallelism == plan.parallelism[0]], plan, known)
            _keep(kept, results)
    return results


def _keep(kept: Kept, results: list[Result]) -> None:
    kept.results["queries"] = [asdict(r) for r in results]
    kept.results["summary"] = summary(results)
    kept.write()


def table(results: list[Result]) -> str:
    """The figures as a Markdown table."""
    lines = [
        "| query | parallelism | equal | ours, events/s | theirs | ratio | note |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in results:
        right = "yes" if r.equal else "NO"
        if r.crash is not None:
            right += f", crashed with {r.crash['parallelism']}: " + ("yes" if r.crash["equal"] else "NO")
        for check in r.checks:
            right += f", with {check['parallelism']}: " + ("yes" if check["equal"] else "NO")
        speeds = [f"{v:,.0f}" if v is not None else "" for v in (r.ours, r.theirs)]
        ratio = f"{r.ratio:g}x" if r.ratio is not None else ""
        mine, mode = (f" ({m})" if m else "" for m in (r.our_mode, r.mode))
        lines.append(
            f"| {r.query} | {r.parallelism} | {right} | {speeds[0]}{mine} | {speeds[1]}{mode} | {ratio} | {r.note} |"
        )
    return "\n".join(lines)


def per_file_of(events: int) -> int:
    """So many events a file that there are about 40.

    >>> per_file_of(1_000_000), per_file_of(100_000), per_file_of(1_000)
    (25000, 2500, 50)
    """
    return max(ROUND, events // 40 // ROUND * ROUND)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def arguments(argv: list[str]) -> tuple[Plan, bool, bool]:
    """What is asked for: the plan, whether peers are run, and whether JSON is printed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench nexmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--events", type=int, default=1_000_000, help="how many, of all kinds together")
    parser.add_argument(
        "--per-file",
        type=int,
        help="events of all kinds a file of each kind holds; without it, so many that there are about 40 files",
    )
    parser.add_argument(
        "--files",
        default="4,10",
        help="files of each kind that an epoch of ours takes, with commas; the best counts, a crash is with the first",
    )
    parser.add_argument(
        "--their-files", default="4,10", help="the same for a batch of theirs; the best counts"
    )
    parser.add_argument("--stores", default="hdfs,rocksdb", help="their state stores; the best counts")
    parser.add_argument("--queries", default=",".join(QUERIES), help="which queries, with commas")
    parser.add_argument("--rounds", type=int, default=3, help="how often each side is run")
    parser.add_argument("--parallelism", default="2", help="cores and shards, with commas")
    parser.add_argument(
        "--check-parallelism", default="", help="run ours once with each of these too, to see if it is equal"
    )
    parser.add_argument("--source", choices=("files", "generator"), default="files", help="what ours reads")
    parser.add_argument("--backend", choices=("heap", "rocksdb"), default="heap", help="where our state is")
    parser.add_argument("--rate", type=int, default=10_000, help="events a second of event time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--crash", action="store_true", help="kill our driver halfway, once for each query")
    parser.add_argument("--no-peers", action="store_true", help="leave Structured Streaming out")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    chosen = parser.parse_args(argv)
    queries = tuple(q for q in chosen.queries.split(",") if q)
    unknown = [q for q in queries if q not in QUERIES]
    if unknown or not queries:
        parser.error(f"unknown queries: {', '.join(unknown)}; they are {', '.join(QUERIES)}")
    unknown = [s for s in chosen.stores.split(",") if s not in ("hdfs", "rocksdb")]
    if unknown:
        parser.error(f"unknown stores: {', '.join(unknown)}; they are hdfs, rocksdb")
    per_file = per_file_of(chosen.events) if chosen.per_file is None else chosen.per_file
    if per_file < ROUND or per_file % ROUND:
        parser.error(f"--per-file must be a multiple of {ROUND}, not {per_file}")
    choices = [_numbers(chosen.files), _numbers(chosen.their_files)]
    parallelism, others = _numbers(chosen.parallelism), _numbers(chosen.check_parallelism)
    if chosen.rounds < 1 or min((1, *choices[0], *choices[1], *parallelism, *others)) < 1 or not parallelism:
        parser.error("--rounds, files and parallelism must be at least 1")
    # A speed needs two batches: what is too large a choice for so few events is none.
    files, their_files = (
        tuple(n for n in choice if batches(chosen.events, per_file, n) >= 2) for choice in choices
    )
    if not files or not (their_files or chosen.no_peers):
        parser.error(
            f"{chosen.events:,} events in files of {per_file:,} are fewer than two epochs, and at least two are needed; "
            f"choose a smaller --per-file, or fewer files an epoch"
        )
    plan = Plan(
        chosen.events,
        per_file,
        files,
        chosen.rounds,
        queries,
        parallelism,
        others,
        chosen.source,
        chosen.backend,
        tuple(chosen.stores.split(",")),
        their_files,
        chosen.crash,
        chosen.rate,
        chosen.seed,
    )
    return plan, not chosen.no_peers, chosen.json


def run(argv: list[str]) -> None:
    plan, peers, as_json = arguments(argv)
    report: dict[str, Any] = {"machine": machine(), "plan": asdict(plan), "queries": [], "summary": {}}
    kept = Kept(BENCH / "nexmark.json", report)
    with ended_by_signals():
        results = measured(plan, kept, peers)
    print(json.dumps(kept.results) if as_json else f"{table(results)}\n\n{json.dumps(summary(results))}")
