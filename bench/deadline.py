"""`python -m bench deadline`: what the deadline costs, how near its backups come to the fewest, and what it holds.

    throughput   records a second at 1,000,000 keys with backups as the deadline asks, beside none, in turns
    cost         what estimating and deciding take of the time in epochs of 500,000 records
    clairvoyant  backups of a recorded run of 1,000 epochs, beside the fewest for one who knows what comes
    history      recovery after a lost host against the length of history, with the deadline and without

Runs are in processes of their own and bounded in time; what was measured is in `.bench/deadline.json` as it comes. The
deadline of the first and the third is chosen from a recorded run, so that backups come as often as they are
wanted; the run that counts begins with what that one has learned. The JSON is one object with a list `cases`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.durability import ROOT, Case, say
from bench.machine import Kept, carried_over, ended_by_signals, machine, source_of
from bench.paper_app import sized
from bench.recoveries import Budget, Point, Setup, curve, first_line, living
from holdfast.checkpoint.policy import Deadline
from holdfast.config import parse_duration_s, resolve
from holdfast.engine.session import notice_of, timeouts
from holdfast.errors import HoldfastError
from holdfast.faults.drill import recorded
from holdfast.faults.kinds import Fault
from holdfast.recovery.estimate import Learned, Notice
from holdfast.recovery.memory import MEMORY, read_memory
from holdfast.recovery.simulate import Run, clairvoyant, simulate
from holdfast.supervise.processes import kill_everything

FILE = ROOT / ".bench" / "deadline.json"
APART_S, WITHIN_S = 15.0, (10.0, 20.0)
"""Between the backups of the throughput case: what is aimed at, and what is asked."""
LEAST_BACKUPS, WANTED_BACKUPS = 20, 23
"""Of the recorded run; it is aimed a little higher than asked."""
MOST_BACKUPS = 1.5
"""Of a run with so many times as many as asked the deadline is too short: the shorter it is, the more backups are made in vain."""
SEARCHED_S = (4.0, 600.0)
ATTEMPTS = 3
TRACED_EPOCH_S = 1.0
"""An epoch of the recorded run takes about so long, on any machine."""
TRIED_EPOCHS = 60
"""Of the run that tells how many records that is; a new JVM is slow in the first."""


@dataclass(frozen=True)
class Size:
    """How much is run."""

    rounds: int = 3
    """Runs of the throughput case."""
    turns: int = 10
    """With backups, and one more without, of each of them: a machine's speed changes within seconds, so they are short."""
    turn_epochs: int = 10_000
    """So many at the most in all turns of a run."""
    cost_rounds: int = 3
    keys: int = 1_000_000
    records: int = 500_000
    epochs: int = 45
    """Of a run that the throughput case's deadline is chosen from."""
    cost_epochs: int = 60
    traced_epochs: int = 1_000
    traced_keys: int = 400_000
    traced_records: int = 0
    """Of an epoch of the recorded run; 0: as many as fill a second, so that few epochs pass while a backup is made."""
    lengths: tuple[int, ...] = (100, 500, 1_000, 2_000)
    reports: int = 4_000
    """Of an epoch of the history case."""
    deadline_s: float = 70.0
    """Of the history case."""
    side_s: float = 3_600.0
    """A process of ours that takes longer is killed."""
    phase_s: float = 3_600.0


LEAST_GROWTH, STEADY = 1.5, 0.9
"""Recovery without a deadline grows with history: so much in all, and none takes much less than the one before it."""
FULL = Size()
QUICK = Size(
    rounds=1,
    turns=2,
    turn_epochs=1_000,
    cost_rounds=1,
    keys=100_000,
    records=100_000,
    epochs=60,
    cost_epochs=15,
    traced_epochs=200,
    traced_keys=50_000,
    traced_records=50_000,
    lengths=(20, 60),
    side_s=300.0,
    phase_s=240.0,
)


class SideFailed(Exception):
    """A process of ours ended badly or took too long."""


def side(folder: Path, timeout_s: float, memory: Path | None, settings: dict[str, Any], **sizes: int) -> Any:
    """One run of ours in a process of its own; nothing of it is left."""
    folder.mkdir()
    command = [sys.executable, "-m", "bench.deadline_sides", "--folder", str(folder)]
    command += [x for name, value in sizes.items() for x in (f"--{name}", str(value))]
    command += ["--settings", json.dumps(settings), *(["--memory", str(memory)] if memory else [])]
    say(f"{' '.join(f'{k}={v}' for k, v in {**settings, **sizes}.items())}")
    with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=log, start_new_session=True)
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise SideFailed(f"it did not end within {timeout_s:.0f} s") from None
    finally:
        kill_everything(process)
    if code:
        raise SideFailed(f"it ended with {code}:\n{(folder / 'stderr').read_text()[-3000:]}")
    found = json.loads((folder / "stdout").read_text().splitlines()[-1])
    say(f"  {found}")
    return found


# A deadline from a recorded run


def notice_for(deadline_s: float) -> Notice:
    """By what faults are noticed in local mode, with time-outs that follow from a deadline."""
    settings = resolve({"deadline": deadline_s}, environment={}).settings
    return notice_of(
        timeouts(settings), local=True, supervised_s=None, wait_for_home_s=settings.wait_for_home_s
    )


def as_recorded(directory: Path, deadline_s: float) -> Run:
    """A run as it was, judged by what it had learned in the end."""
    epochs, backups = recorded(directory)
    memory = read_memory(directory)
    if memory is None or not epochs:
        raise SideFailed("the run has left no trace")
    return Run(
        epochs,
        backups,
        Learned(memory),
        notice_for(deadline_s),
        confidence=memory.confidence,
        max_records=max(e.records for e in epochs),
    )


def deadline_for(run_at: Callable[[float], Run], most_backups: float) -> float:
    """About the shortest deadline that can be held with so many backups over a recorded run at the most.

    Args:
        run_at: the run, judged with the time-outs of a deadline.
    """
    low, high = SEARCHED_S

    def few(deadline_s: float) -> bool:
        run = run_at(deadline_s)
        if max(run.floors().values()) > deadline_s:
            return False
        return len(simulate(run, Deadline(), deadline_s).backups) <= most_backups

    if not few(high):
        raise SideFailed(f"no deadline up to {high:.0f} s is held with {most_backups:.1f} backups")
    while high - low > 0.02 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if few(middle) else (middle, high)
    return round(high, 2)


def corrected(ratio: float) -> float:
    """By how much to aim higher or lower after a run that made more backups than simulated, or fewer."""
    return min(3.0, max(0.3, ratio))


def calibrated(folder: Path, size: Size, every: str, **sizes: int) -> Path:
    """A run with backups at a fixed interval, which teaches what epochs and backups take: its directory."""
    say("a run to learn from")
    side(folder, size.side_s, None, {"checkpoint": every}, **sizes)
    return folder / "dir"


# The cases


def throughput(size: Size, home: Path) -> list[Case]:
    """With backups as the deadline asks beside none, in turns of some seconds within a run."""
    sizes = {"keys": size.keys, "records": size.records}
    learned, deadline_s, tried = settled(size, home, **sizes, epochs=size.epochs)
    settings = {"checkpoint": "deadline", "deadline": f"{deadline_s}s"}
    runs = []
    for number in range(size.rounds):
        folder = home / f"run{number}"
        sizes |= {"epochs": size.turn_epochs, "turns": size.turns}
        runs.append(side(folder, size.side_s, learned / MEMORY, settings, **sizes))
        shutil.rmtree(folder)
    ratios = [ratio for run in runs for ratio in beside(run["turns"])]
    apart = [seconds for run in runs for seconds in run["on_s"]]  # each lasts from one backup to the next
    epochs = [epoch for run in runs for epoch in run.pop("turn_epochs")]
    more = {"deadline_s": deadline_s, "tried": tried, "profile": profile(epochs), "runs": runs}
    return [throughput_case(ratios, apart, paused_share(runs), more)]


def paused_share(runs: Sequence[dict[str, Any]]) -> float:
    """The share of all turns with backups in which intake was paused."""
    paused_s = sum(run["turns_paused_s"] for run in runs)
    return float(paused_s / (paused_s + sum(sum(run["on_s"]) for run in runs)))


def profile(epochs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """What an epoch took at the median, and of the processors on average, by whether backups were on and one under way."""
    kinds: dict[str, list[dict[str, Any]]] = {"off": [], "on": [], "beside a backup": []}
    for epoch in epochs:
        kinds["off" if not epoch["on"] else "beside a backup" if epoch["beside"] else "on"].append(epoch)
    whose = [name for name in WHO if any(name in epoch for epoch in epochs)]
    return {
        kind: {
            "epochs": len(of),
            "s": round(statistics.median(e["s"] for e in of), 4),
            **{name: round(statistics.mean(e.get(name, 0.0) for e in of), 4) for name in whose},
        }
        for kind, of in kinds.items()
        if of
    }


WHO = ("workers", "java", "driver", "uploader", "stolen", "disk")
"""By whom processors are taken: Python workers, Spark, the driver's Python, uploads; another machine; waits for a disk."""


def beside(turns: Sequence[tuple[bool, float]]) -> list[float]:
    """Each turn with backups over the mean of those without around it, so that a drift counts for neither.

    >>> beside(
    ...     [
    ...         (True, 9.0),
    ...         (False, 10.0),
    ...         (True, 10.0),
    ...         (False, 10.0),
    ...         (True, 9.0),
    ...         (False, 8.0),
    ...         (True, 3.0),
    ...     ]
    ... )
    [1.0, 1.0]
    """
    inner = range(1, len(turns) - 1)
    return [2 * turns[i][1] / (turns[i - 1][1] + turns[i + 1][1]) for i in inner if turns[i][0]]


def throughput_case(
    ratios: Sequence[float], apart_s: Sequence[float], paused: float, more: dict[str, Any]
) -> Case:
    """The figure; it counts only if backups came as often as asked, for without any it would be met by doing nothing.

    Pauses are in few turns, so a median would not see them; all their time is charged to it instead.
    """
    unpaused, gap_s = statistics.median(ratios), statistics.median(apart_s) if apart_s else None
    value = unpaused * (1 - paused)
    often = gap_s is not None and gap_s <= WITHIN_S[1]  # more often than wanted is the harder test
    every = "x; too few backups" if gap_s is None else f"x, backups {gap_s:.0f} s apart"
    quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [unpaused] * 3
    found = {"backups_apart_s": gap_s, "paused": paused, "without_pauses": unpaused}
    detail = {**found, "ratios": sorted(ratios), **more}
    return Case("throughput", value, every, "0.97", value >= 0.97 and often, quarters, detail)


def settled(size: Size, home: Path, **sizes: int) -> tuple[Path, float, list[dict[str, Any]]]:
    """A deadline with which backups come as far apart as wanted, and the directory of a run that has learned that.

    What backups take is learned from backups, so each run with a deadline tells better how often they come.
    """
    learned = calibrated(home / "learned", size, f"{APART_S:g}s", **sizes)
    tried: list[dict[str, Any]] = []
    aim = 1.0
    for attempt in range(ATTEMPTS):
        run_s = as_recorded(learned, size.deadline_s).run_s
        most = max(1.0, aim * run_s / APART_S)
        deadline_s = deadline_for(functools.partial(as_recorded, learned), most)
        folder = home / f"tried{attempt}"
        settings = {"checkpoint": "deadline", "deadline": f"{deadline_s}s"}
        found = side(folder, size.side_s, learned / MEMORY, settings, **sizes)
        learned, apart = folder / "dir", found["backups_apart_s"]
        tried.append({"deadline_s": deadline_s, "backups": found["backups"], "backups_apart_s": apart})
        say(f"  a deadline of {deadline_s:g} s: backups {apart} s apart")
        seen_s = statistics.median(apart) if apart else run_s
        if apart and WITHIN_S[0] <= seen_s <= WITHIN_S[1]:
            break
        aim *= corrected(seen_s / APART_S)
    return learned, deadline_s, tried


def cost(size: Size, home: Path) -> list[Case]:
    """What the guard's own clock says, the forecasts for the status included, over the time in epochs.

    Every fault is forecast, as under a supervisor on a cluster: local mode has fewer.
    """
    shares, runs = [], []
    for number in range(size.cost_rounds):
        folder = home / str(number)
        sizes = {"keys": size.keys, "records": size.records, "epochs": size.cost_epochs, "faults": len(Fault)}
        found = side(folder, size.side_s, None, {"checkpoint": "deadline"}, **sizes)
        shares.append((found["guard_s"] + found["forecasts_s"]) / found["epochs_s"])
        runs.append(found)
        shutil.rmtree(folder)
    value = statistics.median(shares)
    without_status = [r["guard_s"] / r["epochs_s"] for r in runs]
    detail = {"without_the_status": sorted(without_status), "runs": runs}
    return [Case("cost", value, "of the time in epochs", "0.001", value <= 0.001, sorted(shares), detail)]


def in_a_second(size: Size, folder: Path) -> int:
    """So many records take `TRACED_EPOCH_S` on this machine, to two digits."""
    sizes = {"keys": size.traced_keys, "records": size.traced_keys}
    found = side(folder, size.side_s, None, {"checkpoint": "never"}, epochs=TRIED_EPOCHS, **sizes)
    return rounded(found["records_per_s"] * TRACED_EPOCH_S)


def rounded(count: float) -> int:
    """A number to two digits.

    >>> rounded(784_123.4), rounded(96.2)
    (780000, 96)
    """
    return int(float(f"{count:.1e}"))


def fewest(size: Size, home: Path) -> list[Case]:
    """Backups made over the fewest, in a recorded run with enough of them."""
    records = size.traced_records or in_a_second(size, home / "sized")
    sizes = {"keys": size.traced_keys, "records": records}
    some = max(100, size.traced_epochs // 4)
    learned = calibrated(home / "learned", size, "10s", epochs=some, **sizes)
    wanted, aim = WANTED_BACKUPS * some / FULL.traced_epochs, 1.0
    tried: list[dict[str, Any]] = []
    least = LEAST_BACKUPS * size.traced_epochs / FULL.traced_epochs
    for attempt in range(ATTEMPTS):
        deadline_s = deadline_for(functools.partial(as_recorded, learned), max(1.0, aim * wanted))
        folder = home / f"run{attempt}"
        settings = {"checkpoint": "deadline", "deadline": f"{deadline_s}s"}
        found = side(folder, size.side_s, learned / MEMORY, settings, epochs=size.traced_epochs - 1, **sizes)
        run = as_recorded(folder / "dir", deadline_s)
        walked = simulate(run, Deadline(), deadline_s)
        tried.append(
            {
                "deadline_s": deadline_s,
                "fewest": clairvoyant(run, deadline_s),
                "simulated": len(walked.backups),
                **found,
            }
        )
        say(f"  {found['backups']} backups, the fewest are {tried[-1]['fewest']}")
        if least <= found["backups"] <= MOST_BACKUPS * least:
            break
        # Now it is known better what backups do to this run.
        learned, wanted = folder / "dir", WANTED_BACKUPS * size.traced_epochs / FULL.traced_epochs
        aim *= corrected(wanted / max(1, found["backups"]))
    return [fewest_case(tried[-1], least, {"records": records, "tried": tried})]


def fewest_case(last: dict[str, Any], least: float, more: dict[str, Any]) -> Case:
    """The figure of a run; it counts only with enough backups.

    The fewest are under the bound as it was known in the end, by which the run could not go yet: the policy is held
    against them under that bound too, and what is more counts.
    """
    if not last["fewest"]:
        why = "nobody holds it without pausing" if last["fewest"] is None else "it needs no backup"
        raise SideFailed(f"a deadline of {last['deadline_s']:g} s over this run, by what was learned: {why}")
    value = max(last["backups"], last["simulated"]) / last["fewest"]
    met = value <= 1.2 and last["backups"] >= least
    return Case("clairvoyant", value, "x the fewest backups", "1.2", met, detail=more)


def history(size: Size, home: Path) -> list[Case]:
    """A host lost at each length: with the deadline never over it; without, growing."""
    work = sized(8 << 20, reports=size.reports)
    cases = []
    for policy in ("manual", "deadline"):
        points: list[Point] = []
        setup = Setup(work, policy, size.deadline_s, interval="50ms")
        say(f"history, {policy}: up to {max(size.lengths)} epochs")
        with living(setup, home / policy, 240.0) as there:
            note = curve(there, size.lengths, Budget(size.phase_s), points.append)
            facts = there.facts()
        cases.append(history_case(policy, points, size, {"note": note, "run": facts}))
    return cases


def history_case(policy: str, points: Sequence[Point], size: Size, more: dict[str, Any]) -> Case:
    """One curve in a figure: the longest recovery with the deadline, the growth without."""
    took = [p["recovery_s"] for p in points]
    whole = len(took) == len(size.lengths)
    detail = {"deadline_s": size.deadline_s, "points": list(points), **more}
    if policy == "deadline":
        longest = max(took, default=0.0)
        met = whole and longest <= size.deadline_s
        return Case(
            "history-with", longest, "s at the most", f"{size.deadline_s:g}", met, sorted(took), detail
        )
    growth = took[-1] / took[0] if took else 0.0
    met = whole and growth >= LEAST_GROWTH and all(b >= STEADY * a for a, b in itertools.pairwise(took))
    return Case("history-without", growth, "x from first to last", f"{LEAST_GROWTH:g}", met, took, detail)


CASES: dict[str, Callable[[Size, Path], list[Case]]] = {
    "throughput": throughput,
    "cost": cost,
    "clairvoyant": fewest,
    "history": history,
}


def size_of(chosen: argparse.Namespace) -> Size:
    """As much as arguments ask for."""
    size = QUICK if chosen.quick else FULL
    if chosen.rounds is not None:
        size = replace(size, rounds=chosen.rounds, cost_rounds=chosen.rounds)
    if chosen.traced_records is not None:
        size = replace(size, traced_records=chosen.traced_records)
    if chosen.lengths is not None:
        size = replace(size, lengths=tuple(sorted(int(n) for n in chosen.lengths.split(","))))
    if chosen.deadline is not None:
        size = replace(size, deadline_s=parse_duration_s(chosen.deadline))
    return size


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench deadline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--quick", action="store_true", help="so little that it only shows that it runs")
    made.add_argument("--rounds", type=int, help="runs of throughput, and of cost")
    made.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    made.add_argument(
        "--traced-records",
        type=int,
        help="records of an epoch of the clairvoyant case; as many as take a second unless told",
    )
    made.add_argument("--lengths", help="epochs of history with commas between: 100,500,1000,2000")
    made.add_argument("--deadline", help="of the history case; 70s unless told")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def run(argv: list[str]) -> None:
    chosen = parser().parse_args(argv)
    names = [name.strip() for name in chosen.cases.split(",") if name.strip()]
    if unknown := set(names) - set(CASES):
        raise SystemExit(f"there is no case {unknown.pop()!r}; the cases are: {', '.join(CASES)}")
    size = size_of(chosen)
    results: dict[str, Any] = {"machine": machine(), "source": source_of(), "size": asdict(size)}
    results |= {name: [] for name in CASES}
    results |= {"skipped": [], "failed": []}
    carried_over(FILE, results, list(CASES), names)
    kept = Kept(FILE, results)
    with ended_by_signals():
        for name in names:
            results[name] = [asdict(case) for case in _tried(name, size, results)]
            kept.write()
    cases = [case for name in CASES for case in results[name]]
    if chosen.json:
        print(json.dumps({"machine": results["machine"], "cases": cases, "failed": results["failed"]}))
        return
    for line in lines([Case(**case) for case in cases]):
        print(line)
    for case in results["throughput"]:
        for kind, found in case["detail"]["profile"].items():
            print(f"  epochs {kind:16} " + "  ".join(f"{name} {value:g}" for name, value in found.items()))
    for failed in results["failed"]:
        print(f"{failed['phase']:18} failed: {failed['why']}")


def _tried(name: str, size: Size, results: dict[str, Any]) -> list[Case]:
    """A case's figures; one that fails is told of, and the rest goes on."""
    say(f"case {name}")
    with tempfile.TemporaryDirectory(prefix="holdfast-deadline-", ignore_cleanup_errors=True) as home:
        try:
            return CASES[name](size, Path(home))
        except (HoldfastError, SideFailed, OSError, subprocess.SubprocessError) as error:
            say(f"{name} failed: {str(error)[-3000:]}")
            results["failed"].append({"phase": name, "why": first_line(error).replace(home, "…")})
            return []


def lines(cases: Sequence[Case]) -> list[str]:
    """A line a figure, beside what was asked."""
    found = []
    for c in cases:
        spread = f"  ({min(c.spread):.4g} to {max(c.spread):.4g})" if c.spread else ""
        met = "met" if c.met else "MISSED"
        found.append(f"{c.case:18} {c.value:10.4g} {c.unit:24} asked {c.asked:6} {met}{spread}")
    return found
