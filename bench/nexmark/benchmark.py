"""`python -m bench nexmark`: Nexmark's queries on Spark, ours beside Structured Streaming, each checked by DuckDB.

Both sides read the same prepared Parquet files and write Parquet, each run in a process of its own; rounds go through
all queries and both sides before the next begins; stateless queries, which are in no figure, are run in the first
round only. Speed is events a second, of all kinds, from the commit by which a quarter of the records was read to that of
the last epoch that read some: starting up and warming up don't count, on either side. Whatever a run wrote is reduced to
the final result and compared with DuckDB's answer (`equal`, `theirs_equal`); a query that is not equal, in any of its
runs, still shows its speed, but no ratio.

Both sides may choose how many files an epoch or batch takes (`--files`, `--their-files`), theirs where its state is and
how Java compiles as well: each choice is run in the first round (the compiler with the best of the others), those near the best of them in later ones, and the one with the best
median counts.

Our driver is killed with SIGKILL somewhere in an epoch after the first half, once for each query, and
started again: the result must be equal all the same. Ours is run once with 1 and 4 shards too, all queries in one session, only to
see whether the result is equal; the crashes are then dealt out to all parallelisms in turn. The JSON is one object with
a list `queries`, and a `summary` with the median ratio over the stateful queries that both sides ran. It is in
`.bench/nexmark.json` as it comes, and queries that are not run again stay there, so that it can be run in parts
(`--queries q3,q4`) as long as nothing else was changed.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench.durability import kill, newest, say, spawn, wait_for
from bench.machine import ROOT, Kept, ended_by_signals, machine, source_of
from bench.nexmark.asked import BENCH, Plan, arguments, halfway
from bench.nexmark.files import prepare, records_a_round, tables
from bench.nexmark.oracle import QUERIES, Sorted, equal
from bench.nexmark.queries import QUERIES as PIPELINES
from bench.nexmark.results import final, processed, truth, written
from bench.nexmark.side import sources
from bench.peers.environments import make_environment, run_peer
from bench.recoveries import first_line
from holdfast.log.journal import Journal

SCRIPT = "structured_streaming_nexmark.py"
TIMEOUT_S = 600.0
"""Of one run of one query, which takes a minute here."""
SESSION_S = 2400.0
"""Of all queries one after the other."""
ASKED_RATIO = 3.0
ASKED_PARALLELISM = {1, 2, 4}

LEFT_OUT = {
    "q4": "Structured Streaming's relational operators have no form for it: the average is a running aggregate behind a "
    "join and an aggregate, and what is chained must be in append mode.",
    "q6": "Structured Streaming's relational operators have no form for it: a stream has no OVER with rows before the "
    "current one.",
}
"""Queries that the other side has no form for, and why."""
LIMITS = {
    "q5": "theirs: two windows, one behind the other",
    "q7": "theirs: keeps all bids of a window by price, two windows one behind the other",
    "q8": "both: a union in a window instead of a join",
    "q9": "theirs: auctions are taken to last a constant at most, as a bounded join needs one",
    "q12": "theirs are compared by bidder, whatever the window: when they were processed is not known",
    "q15": "theirs: distinct counts by collect_set",
    "q16": "theirs: distinct counts by collect_set",
    "q19": "theirs: keeps every bid of an auction in a list",
}
"""What must be known to read a figure."""


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
    runs: list[dict[str, Any]] = field(default_factory=list)
    """What each run said of itself."""
    note: str = ""

    def found(self, same: bool) -> None:
        """One more run of ours was compared: it is equal if all of them are."""
        self.equal = same if self.equal is None else self.equal and same

    def say(self, text: str) -> None:
        """Add to the note, once."""
        if text not in self.note:
            self.note = f"{self.note}; {text}" if self.note else text


class Truth:
    """DuckDB's answers, asked for once each."""

    def __init__(self, folder: Path) -> None:
        self._tables = tables(folder)
        self._answers: dict[str, pa.Table] = {}
        self._sorted: dict[str, Sorted] = {}

    def answer(self, query: str) -> pa.Table:
        if query not in self._answers:
            self._answers[query] = truth(query, self._tables)
        return self._answers[query]

    def equal(self, query: str, found: pa.Table) -> tuple[bool, str]:
        """Whether it is the answer; if not, what differs."""
        return equal(found, self.answer(query), self._sorted.setdefault(query, {}))

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


def said_by(
    command: list[str], folder: Path, timeout_s: float = TIMEOUT_S
) -> tuple[list[dict[str, Any]], str]:
    """The JSON lines of a process that was run to its end, and why it did not get there, with the end of what it said."""
    process = spawn(command, folder)
    log, why = folder / "log.txt", ""
    try:
        if process.wait(timeout_s):
            why = f"it ended with {process.returncode}:\n{log.read_text()[-2000:]}"
    except subprocess.TimeoutExpired:
        why = f"it took more than {timeout_s:.0f} s:\n{log.read_text()[-2000:]}"
    finally:
        if process.poll() is None:
            kill(process)
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")], why


def our_check(query: str, folder: Path, plan: Plan, known: Truth, files: int) -> tuple[bool, str]:
    """Whether what our run wrote is DuckDB's answer; for q12, to when its epochs were, and every bid was in one.

    And whether it wrote as many rows as its commits say: the answer is made of each key's last row, where rows have
    keys, and one that was published twice would not show.
    """
    rows, journal = written(folder / "out"), Journal.at(folder / "dir")
    epochs = range(1, journal.last_epoch() + 1)
    commits = [c for c in map(journal.commit, epochs) if c is not None]
    there, decided = 0 if rows is None else rows.num_rows, sum(c.records_out.get("out", 0) for c in commits)
    if len(commits) == len(epochs) > 0 and there != decided:
        return False, f"{there:,} rows are there, and {decided:,} were decided on."
    found = final(query, rows)
    if query != "q12":
        return known.equal(query, found)
    same, why = equal(by_bidder(found), known.bids_of_each())
    if not same:
        return False, why
    plans = [p for p in map(journal.plan, epochs) if p is not None]
    bids = sources(query, plan.data, plan.source, files, 2)["bid"]
    return equal(found, truth(query, {"bid": processed(plans, bids)}))


def by_bidder(counted: pa.Table) -> pa.Table:
    """The counts of q12, whatever the window."""
    sums = counted.group_by("bidder").aggregate([("bid_count", "sum")])
    return pa.table({"bidder": sums["bidder"], "bid_count": sums["bid_count_sum"]})


def ours(result: Result, plan: Plan, known: Truth) -> None:
    """A run of ours with each choice of files that may still be the best, measured and checked."""
    for files in plan.files:
        if may_be_best(result.our_modes, str(files)):
            our_one(result, plan, known, files)


def our_one(result: Result, plan: Plan, known: Truth, files: int) -> None:
    with tempfile.TemporaryDirectory(prefix="holdfast-nexmark-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        try:
            found = our_run(result.query, folder, plan, result.parallelism, files)
            same, why = our_check(result.query, folder, plan, known, files)
        except Exception as error:  # whatever it is, the next query may be fine
            result.found(False)
            result.say(f"ours failed: {first_line(error)}")
            say(f"  {error}")
            return
    result.found(same)
    result.runs.append({"side": "ours", "files": files, **found})
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
    try:
        found = crash_of(result.query, plan, known, parallelism)
    except Exception as error:
        found = {"equal": False, "why": first_line(error)}
    result.crash = {"parallelism": parallelism, **found}
    result.found(bool(found["equal"]))
    if not found["equal"]:
        result.say(f"after a crash it is not equal: {found.get('why', '')}")


def last_gap_s(commits: Path) -> float:
    """How long after the one before it the newest commit came."""
    times = sorted(path.stat().st_mtime for path in commits.iterdir() if path.stem.isdigit())
    return times[-1] - times[-2] if len(times) > 1 else 0.0


def crash_of(query: str, plan: Plan, known: Truth, parallelism: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="holdfast-nexmark-", ignore_cleanup_errors=True) as name:
        folder, files = Path(name), plan.files[0]
        commits = folder / "dir" / "log" / "commits"
        say(f"holdfast {query}, parallelism {parallelism}, to be killed")
        process = spawn(our_command(query, folder, plan, parallelism, files), folder)
        try:
            wait_for(
                commits,
                halfway(plan.events, plan.per_file * files, records_a_round(PIPELINES[query].reads)),
                process,
                folder,
            )
            # Not always right after a commit, and not when the last epochs of a fast query are through.
            time.sleep(random.Random(query).uniform(0.0, min(0.5, last_gap_s(commits))))
            ended = process.poll() is not None
        except SystemExit as error:
            return {"equal": False, "why": str(error).splitlines()[0]}
        finally:
            kill(process)
        killed_at = newest(commits)
        if ended:
            return {"equal": False, "killed_at": killed_at, "why": "it was through before it was killed"}
        began = time.monotonic()
        try:
            our_run(query, folder, plan, parallelism, files)
        except RuntimeError as error:
            return {"equal": False, "killed_at": killed_at, "why": str(error).splitlines()[0]}
        took_s = time.monotonic() - began
        same, why = our_check(query, folder, plan, known, files)
        say(f"  killed at epoch {killed_at} of {newest(commits)}, {'equal' if same else 'NOT equal: ' + why}")
        if same and killed_at >= newest(commits):
            same, why = False, "nothing was left to do after it was killed"
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
    lines, why = said_by(command, folder, SESSION_S)
    told = {line["query"]: line.get("error", "") for line in lines}
    return {query: told.get(query, why or "it said nothing") for query in queries}


def checked(results: list[Result], plan: Plan, known: Truth) -> None:
    """Every query of ours once with each of the other parallelisms."""
    for parallelism in plan.check_parallelism:
        say(f"holdfast, all queries, parallelism {parallelism}")
        with tempfile.TemporaryDirectory(prefix="holdfast-nexmark-", ignore_cleanup_errors=True) as name:
            failed = our_runs([r.query for r in results], Path(name), plan, parallelism)
            for result in results:
                same, why = False, failed[result.query]
                if not why:
                    try:
                        there = Path(name) / result.query
                        same, why = our_check(result.query, there, plan, known, plan.files[0])
                    except Exception as error:
                        same, why = False, f"it can't be compared: {first_line(error)}"
                result.found(same)
                note = "" if same else why.splitlines()[0]
                result.checks.append({"parallelism": parallelism, "equal": same, "note": note})
                if not same:
                    say(f"  {result.query} is NOT equal: {why}")


# Theirs


def theirs(result: Result, plan: Plan, known: Truth) -> None:
    """A run of Structured Streaming in each of its modes that may still be the best, measured and checked.

    The best of the first round is run with Java's first compiler alone too, which ours has in any case.
    """
    stores = plan.stores if result.stateful else plan.stores[:1]
    for choice in [f"{store} {files}" for store in stores for files in plan.their_files]:
        if may_be_best(result.modes, choice):
            their_one(result, plan, known, choice)
    quick = next((name for name in result.modes if name.endswith(QUICK)), None)
    if quick is None:
        _, best = _best(result, "theirs")
        quick = best and best + QUICK
    if quick and may_be_best(result.modes, quick):
        their_one(result, plan, known, quick)


def their_one(result: Result, plan: Plan, known: Truth, choice: str) -> None:
    store, files = choice.split()[:2]
    with tempfile.TemporaryDirectory(prefix="nexmark-theirs-", ignore_cleanup_errors=True) as name:
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
                files=int(files),
                parallelism=result.parallelism,
                quick_compiler=choice.endswith(QUICK),
            )
            same, why = their_check(result.query, out, known)
        except Exception as error:
            result.say(f"theirs failed ({choice}): {first_line(error)}")
            say(f"  {error}")
            return
    if not same:
        result.say(f"theirs is not equal: {why.splitlines()[0]}")
        say(f"  not equal: {why}")
    result.theirs_equal = same if result.theirs_equal is None else result.theirs_equal and same
    result.runs.append({"side": "theirs", "choice": choice, "store": store, "files": int(files), **found})
    result.spread.setdefault(f"theirs {choice}", []).append(found["records_per_s"])


def their_check(query: str, out: Path, known: Truth) -> tuple[bool, str]:
    rows = written(out)
    if query != "q12":
        return known.equal(query, final(query, rows))
    assert rows is not None
    last = rows.group_by(["bidder", "starttime"], use_threads=False).aggregate([("bid_count", "max")])
    counted = last.rename_columns({"bid_count_max": "bid_count"})
    return equal(by_bidder(counted), known.bids_of_each())


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
    # One that was given up after a round has been lucky, or not, once.
    most = max(map(len, chosen.values()), default=0)
    best = max((n for n in medians if len(chosen[n]) == most), key=lambda name: medians[name], default="")
    result.spread[side] = chosen.get(best, [])
    return medians, best


QUICK = " quick"
"""What a choice of theirs ends with that has Java's first compiler alone."""
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
        "asked": f"all equal, with 1, 2 and 4 shards and after a crash, and at least {ASKED_RATIO:g}x in the median",
        "met": met(results),
    }


def tried(results: list[Result]) -> bool:
    """Whether every query was run at every parallelism that is asked for, and killed once."""
    by: dict[str, set[int]] = {}
    for r in results:
        by.setdefault(r.query, set()).update([r.parallelism, *(int(c["parallelism"]) for c in r.checks)])
    crashed = {r.query for r in results if r.crash is not None}
    return all(shards >= ASKED_PARALLELISM and query in crashed for query, shards in by.items())


def met(results: list[Result]) -> bool:
    """Whether all is equal, at every parallelism that is asked for and after a crash each, and the ratio as asked.

    That is over every stateful query that both sides have a form for.
    """
    wanted = [r.ratio for r in results if r.stateful and r.query not in LEFT_OUT]
    ratios = [ratio for ratio in wanted if ratio is not None]
    whole = bool(wanted) and len(ratios) == len(wanted)
    return (
        whole
        and tried(results)
        and all(r.equal for r in results)
        and statistics.median(ratios) >= ASKED_RATIO
    )


Side = Callable[[Result, Plan, Truth], None]


def measured(plan: Plan, kept: Kept, peers: bool) -> list[Result]:
    """Every query on both sides, in rounds that change who is first; what is there so far is kept after each."""
    say(f"{plan.events:,} events in {plan.data.relative_to(ROOT)}")
    if peers:
        make_environment("structured-streaming")  # not within a round
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
            if number and not result.stateful:
                continue
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
    """With what earlier parts have found, in the order of the queries."""
    names, again = list(QUERIES), {r.query for r in results}
    others = [r for r in kept.results.get("queries", []) if r["query"] not in again]
    both = sorted([*others, *map(asdict, results)], key=lambda r: names.index(r["query"]))
    kept.results["queries"] = both
    kept.results["summary"] = summary([Result(**r) for r in both])
    kept.write()


def earlier(file: Path, report: dict[str, Any]) -> list[dict[str, Any]]:
    """What an earlier part has found, if it was run under the same conditions; otherwise it is put aside."""
    if not file.exists():
        return []
    old, new = json.loads(file.read_text()), json.loads(json.dumps(report))
    alike = all(old.get(name) == new[name] for name in ("machine", "source"))
    plans = [{k: v for k, v in one.get("plan", {}).items() if k != "queries"} for one in (old, new)]
    if alike and plans[0] == plans[1]:
        return list(old["queries"])
    os.replace(file, file.with_suffix(".previous.json"))
    return []


def only(results: dict[str, Any], queries: Sequence[str]) -> dict[str, Any]:
    """Of what is kept that of some queries: what earlier parts have found stays in the file."""
    mine = [r for r in results["queries"] if r["query"] in queries]
    return {**results, "queries": mine, "summary": summary([Result(**r) for r in mine])}


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


def run(argv: list[str]) -> None:
    plan, peers, as_json = arguments(argv, __doc__)
    report: dict[str, Any] = {"machine": machine(), "source": source_of(), "plan": asdict(plan)}
    report |= {"queries": [], "summary": {}}
    kept = Kept(BENCH / "nexmark.json", report)
    report["queries"] = earlier(kept.file, report)
    try:
        with ended_by_signals():
            measured(plan, kept, peers)
    finally:
        asked = only(kept.results, plan.queries)
        found = [Result(**r) for r in asked["queries"]]
        print(json.dumps(asked) if as_json else f"{table(found)}\n\n{json.dumps(asked['summary'])}")
