"""`python -m bench paper`: the paper's experiment, repeated: how long a lost host takes to be recovered from.

A map of a country in tiles is redrawn on a cluster of processes (two hosts), with a deadline and without:

    history   recovery against the length of history, for each size of state (the paper's figure 1)
    trials    hosts lost at random moments, each recovery against the deadline (figure 3)
    peer      the driver killed, restart to the next commit, beside Structured Streaming on the same reports

Without arguments it is a small form that ends in about ten minutes; `--full` is the paper's. Each phase is bounded
in time, and what was measured is in `.bench/paper.json` as it comes; phases that are not run again stay there. The JSON
is one object with `history`, `trials`, `peer`, `skipped`, `failed` and the machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from bench import paper_figures
from bench.durability import ROOT, kill, newest, say, spawn
from bench.machine import Kept, backend_for, carried_over, carries, ended_by_signals, here, machine, source_of
from bench.paper_app import Work, reports, sized
from bench.peers.environments import PeerError, make_environment
from bench.recoveries import Budget, Setup, curve, first_line, living, trials
from holdfast.config import parse_bytes, parse_duration_s
from holdfast.errors import HoldfastError

PHASES = ("history", "trials", "peer")
FILE = ROOT / ".bench" / "paper.json"
PLOTS = ROOT / ".bench" / "paper"
SIDES = ("ours", "ours, disk lost", "structured-streaming")
WITHOUT, WITH = "manual", "deadline"
"""Without the deadline there is the one backup of the map as it was first drawn, and history from then on."""


@dataclass(frozen=True)
class Form:
    """How much is run."""

    sizes: tuple[str, ...]
    """Of state, for figure 1; the first is that of the trials too."""
    lengths: tuple[int, ...]
    """Epochs since the map was drawn, at each of which a host is lost."""
    trials: int
    pause_s: tuple[float, float]
    """Between a recovery and the next fault."""
    reports: int
    """Of an epoch."""
    rounds: int
    """Restarts of each side beside Structured Streaming."""
    history_epochs: int
    """Epochs between the state being there and that kill."""
    draw_s: float
    """The map is drawn and backed up within this."""
    phase_s: float
    """Then a phase takes no more points after this."""


FULL = Form(
    sizes=("0.75GB", "2.88GB", "10.6GB"),
    lengths=(10, 50, 100, 200, 400),
    trials=40,
    pause_s=(2.0, 20.0),
    reports=10_000,
    rounds=3,
    history_epochs=20,
    draw_s=1200.0,
    phase_s=5400.0,
)
SMALL = Form(
    sizes=("50MB",),
    lengths=(10, 40, 80),
    trials=3,
    pause_s=(2.0, 8.0),
    reports=20_000,
    rounds=1,
    history_epochs=10,
    draw_s=90.0,
    phase_s=60.0,
)
QUICK = replace(SMALL, sizes=("8MB",), lengths=(5, 20), trials=2, pause_s=(1.0, 4.0), history_epochs=5)


class Paper:
    """One run of the benchmark: its phases, and what they found."""

    def __init__(self, form: Form, deadline_s: float, seed: int, more: dict[str, str], kept: Kept) -> None:
        self.form, self.deadline_s, self.seed, self.more, self.kept = form, deadline_s, seed, more, kept
        self.results = kept.results

    def history(self) -> None:
        """Figure 1: every size, without the deadline and with it."""
        for size in self.form.sizes:
            work = self.work(size)
            for policy in (WITHOUT, WITH):
                made = self._series("history", size=size, policy=policy, **_facts(work))
                self._on_cluster(
                    made,
                    work,
                    policy,
                    lambda there, budget, tell: curve(there, self.form.lengths, budget, tell),
                )

    def trials(self) -> None:
        """Figure 3: before, with a backup after as many epochs as figure 1 goes; after, as the deadline asks."""
        size = self.form.sizes[0]
        work = self.work(size)
        before = f"{max(self.form.lengths)} epochs"
        for policy in (before, WITH):
            made = self._series("trials", size=size, policy=policy, **_facts(work))
            self._on_cluster(
                made,
                work,
                policy,
                lambda there, budget, tell: trials(
                    there, self.form.trials, self.form.pause_s, self.seed, budget, tell
                ),
            )

    def peer(self) -> None:
        """The driver killed, with the host's disk lost too and without, beside Structured Streaming, in turns."""
        for size in self.form.sizes:
            work = self.work(size)
            sides = {who: self._series("peer", size=size, who=who, **_facts(work)) for who in SIDES}
            budget = Budget(self.form.draw_s + self.form.phase_s * len(SIDES))
            for number in range(self.form.rounds):
                turn = number % len(SIDES)
                for who in (*SIDES[turn:], *SIDES[:turn]):
                    if not {"skipped", "failed"} & set(sides[who]):
                        self._restart(sides[who], work, budget)

    def work(self, size: str) -> Work:
        return sized(parse_bytes(size), reports=self.form.reports, seed=self.seed)

    def _series(self, kind: str, **facts: Any) -> dict[str, Any]:
        made: dict[str, Any] = {"phase": kind, **facts, "deadline_s": self.deadline_s, "points": []}
        self.results[kind].append(made)
        return made

    def _on_cluster(self, made: dict[str, Any], work: Work, policy: str, measure: Callable[..., str]) -> None:
        """One application on a cluster of its own; what goes wrong there ends it, and nothing else."""
        what = f"{made['size']}, {policy}"
        with tempfile.TemporaryDirectory(prefix="holdfast-paper-", ignore_cleanup_errors=True) as name:
            backend, why = backend_for(work.state_bytes, Path(name))
            made["backend"] = backend
            if why:
                self._skip(made, what, why)
                return
            say(f"{what}, {backend}: {work.tiles} tiles of {work.tile_bytes} bytes, {work.touched} an epoch")
            setup = Setup(work, policy, self.deadline_s, backend, more=self.more)

            def tell(point: dict[str, Any]) -> None:
                made["points"].append(point)
                self.kept.write()

            try:
                with living(setup, Path(name), self.form.draw_s) as there:
                    try:
                        made["note"] = measure(there, Budget(self.form.phase_s), tell)
                    finally:
                        made["run"] = there.facts()
            except (HoldfastError, OSError, subprocess.SubprocessError) as error:
                self._fail(made, what, error, Path(name))
        if made.get("note"):
            say(f"  {made['note']}")
        self.kept.write()

    def _skip(self, made: dict[str, Any], what: str, why: str) -> None:
        say(f"{what} is skipped: {why}")
        made["skipped"] = why
        self.results["skipped"].append({"phase": made["phase"], "what": what, "why": why})
        self.kept.write()

    def _fail(self, made: dict[str, Any], what: str, error: BaseException, home: Path | None = None) -> None:
        say(f"{what} failed: {str(error)[-3000:]}")
        made["failed"] = first_line(error) if home is None else first_line(error).replace(str(home), "…")
        self.results["failed"].append({"phase": made["phase"], "what": what, "why": made["failed"]})
        self.kept.write()

    # Beside Structured Streaming

    def _restart(self, made: dict[str, Any], work: Work, budget: Budget) -> None:
        """One restart of one side, unless the machine does not carry it."""
        who, what = made["who"], f"restart of {made['who']}, {made['size']}"
        with tempfile.TemporaryDirectory(prefix="holdfast-paper-", ignore_cleanup_errors=True) as name:
            why = carries(work.state_bytes, "rocksdb", *here(Path(name)))
            if why:
                self._skip(made, what, why)
                return
            try:
                epochs, deadline = self.form.history_epochs, f"{self.deadline_s}s"
                took_s = killed(who, work, epochs, Path(name), deadline, budget.left_s())
            except (PeerError, OSError, StuckRestart) as error:
                self._fail(made, what, error, Path(name))
                return
        say(f"{what}: {took_s:.1f} s to the next commit")
        made["points"].append({"restart_s": round(took_s, 3)})
        self.kept.write()


def _facts(work: Work) -> dict[str, Any]:
    facts = {"state_bytes": work.state_bytes, "tiles": work.tiles, "tile_bytes": work.tile_bytes}
    return {**facts, "epoch_reports": work.reports, "epoch_tiles": work.touched}


class StuckRestart(Exception):
    """A side did not get where it was to be killed, or did not come back."""


def killed(who: str, work: Work, epochs: int, folder: Path, deadline: str, timeout_s: float) -> float:
    """Start, kill some epochs after the state is there, start again: seconds to a new commit."""
    if who == "structured-streaming":
        data = folder / "data"
        make_files(work, data, epochs)
        command = [
            str(make_environment(who)),
            str(ROOT / "bench" / "peers" / "structured_streaming_map.py"),
            *("--data", str(data), "--scratch", str(folder)),
            *("--tile-bytes", str(work.tile_bytes), "--seed", str(work.seed)),
        ]
        commits = folder / "checkpoint" / "commits"
    else:
        command = [sys.executable, "-m", "bench.paper_side", "--folder", str(folder)]
        command += ["--work", json.dumps(asdict(work)), "--deadline", deadline]
        commits = folder / "dir" / "log" / "commits"
    until_s = time.monotonic() + timeout_s
    first = spawn(command, folder)
    try:
        before = _wait_for(commits, work.fill_epochs + epochs, first, folder, until_s)
    finally:
        kill(first)
    if who == "ours, disk lost":
        shutil.rmtree(folder / "dir" / "state")
    started = time.monotonic()
    second = spawn(command, folder)
    try:
        _wait_for(commits, max(before, newest(commits)) + 1, second, folder, until_s)
        return time.monotonic() - started
    finally:
        kill(second)


SPARE_FILES = 60
"""More than anybody reads while it is killed and comes back."""


def make_files(work: Work, folder: Path, epochs: int) -> None:
    """The reports that our source makes up, a file an epoch."""
    folder.mkdir()
    first = 0
    for number in range(work.fill_epochs + epochs + SPARE_FILES):
        last = work.until(first)
        pq.write_table(
            reports(work, first, last),
            folder / f"part-{number:05d}.parquet",
            row_group_size=-(-(last - first) // 2),
        )
        first = last


def _wait_for(
    commits: Path, number: int, process: subprocess.Popen[bytes], folder: Path, until_s: float
) -> int:
    while newest(commits) < number:
        if process.poll() is not None or time.monotonic() > until_s:
            ended = "it ended" if process.poll() is not None else "its time was over"
            raise StuckRestart(f"no commit {number}: {ended}\n{(folder / 'log.txt').read_text()[-2000:]}")
        time.sleep(0.01)
    return newest(commits)


# What came of it


def table(results: dict[str, Any]) -> list[list[str]]:
    """A row a series: what was run, and what recovery took."""
    rows = []
    for kind in ("history", "trials"):
        for made in results[kind]:
            rows.append([kind, made["size"], made["policy"], *_cells(made, "recovery_s")])
    for made in results["peer"]:
        rows.append(["restart", made["size"], made["who"], *_cells(made, "restart_s")])
    return rows


LISTS = (*PHASES, "skipped", "failed")
COLUMNS = ["phase", "state", "policy", "times", "shortest s", "median s", "longest s", "late", "backups"]


def _cells(made: dict[str, Any], field: str) -> list[str]:
    took = [p[field] for p in made["points"]]
    if not took:
        return ["0", "", "", "", "", ""]
    late = str(sum(t > made["deadline_s"] for t in took)) if field == "recovery_s" else ""
    backups = str(made["run"]["backups"]) if "run" in made else ""
    found = [f"{f:.1f}" for f in (min(took), statistics.median(took), max(took))]
    return [str(len(took)), *found, late, backups]


def form_of(chosen: argparse.Namespace) -> Form:
    """The form that arguments ask for: a given size, number or length wins over the form's own."""
    form = FULL if chosen.full else QUICK if chosen.quick else SMALL
    if chosen.state_size is not None:
        sizes = tuple(s.strip() for s in chosen.state_size.split(",") if s.strip())
        large = max(map(parse_bytes, sizes)) > 256 << 20
        # What a large map takes to be drawn and loaded is not the small form's time.
        form = replace(FULL if large and not chosen.quick else form, sizes=sizes)
    if chosen.trials is not None:
        form = replace(form, trials=chosen.trials)
    if chosen.lengths is not None:
        form = replace(form, lengths=tuple(int(n) for n in chosen.lengths.split(",")))
    if chosen.phase_time is not None:
        form = replace(form, phase_s=parse_duration_s(chosen.phase_time))
    if chosen.rounds is not None:
        form = replace(form, rounds=chosen.rounds)
    if chosen.reports is not None:
        form = replace(form, reports=chosen.reports)
    return form


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench paper",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--state-size", help="bytes of state, several with commas between: 0.75GB,2.88GB")
    made.add_argument("--trials", type=int, help="hosts lost at random moments, before and after")
    made.add_argument("--full", action="store_true", help="the paper's sizes and its 40 trials; takes hours")
    made.add_argument("--quick", action="store_true", help="so little that it only shows that it runs")
    made.add_argument("--lengths", help="epochs of history with commas between: 10,50,100")
    made.add_argument("--reports", type=int, help="reports of an epoch: its work, and so that of a replay")
    made.add_argument("--rounds", type=int, help="restarts of each side beside Structured Streaming")
    made.add_argument("--phases", default=",".join(PHASES), help=f"of {', '.join(PHASES)}")
    made.add_argument("--deadline", default="70s", help="within which recovery must end")
    made.add_argument("--phase-time", help="a phase takes no more points after this: 30m")
    made.add_argument("--seed", type=int, default=1, help="draws reports, moments and hosts")
    made.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of ours")
    made.add_argument(
        "--plots", type=Path, default=PLOTS, help="where the figures go, as SVG; needs matplotlib"
    )
    made.add_argument("--no-plots", action="store_true", help="draw nothing")
    made.add_argument("--docs", action="store_true", help="write figures and numbers into docs/paper.md")
    made.add_argument(
        "--from",
        dest="files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measure nothing: take the results of these files, as of sizes that were run one by one",
    )
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def run(argv: list[str]) -> None:
    chosen = parser().parse_args(argv)
    if not chosen.no_plots or chosen.docs:
        paper_figures.check()
    results = together(chosen.files) if chosen.files else measure(chosen)
    if not chosen.no_plots or chosen.docs:
        for drawn in paper_figures.draw(results, chosen.plots):
            say(f"drawn: {drawn.name}")
    if chosen.docs:
        paper_figures.into_docs(results, chosen.plots, ROOT / "docs")
    if chosen.json:
        print(json.dumps(results))
        return
    _print(COLUMNS, table(results))
    for said in (*results["skipped"], *results["failed"]):
        print(f"{said['what']}: {said['why']}")


def together(files: Sequence[Path]) -> dict[str, Any]:
    """The results of some files as one; they must be of one machine and one deadline."""
    results: dict[str, Any] = {}
    for found in (json.loads(file.read_text()) for file in files):
        results = results or {**found, **{name: [] for name in LISTS}}
        if other := [name for name in ("machine", "deadline_s") if found[name] != results[name]]:
            raise SystemExit(f"the results are not of one {other[0]}: {found[other[0]]}, {results[other[0]]}")
        for name in LISTS:
            results[name] += found[name]
    return results


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """All phases that are asked for; what fails is told, and the rest goes on."""
    form = form_of(chosen)
    phases = [p.strip() for p in chosen.phases.split(",") if p.strip()]
    if unknown := set(phases) - set(PHASES):
        raise SystemExit(f"there is no phase {unknown.pop()!r}; the phases are: {', '.join(PHASES)}")
    results: dict[str, Any] = {
        "machine": machine(),
        "source": source_of(),
        "form": asdict(form),
        "deadline_s": parse_duration_s(chosen.deadline),
        "seed": chosen.seed,
        "settings": dict(one.split("=", 1) for one in chosen.set),
        "history": [],
        "trials": [],
        "peer": [],
        "skipped": [],
        "failed": [],
    }
    carried_over(FILE, results, PHASES, phases)
    kept = Kept(FILE, results)
    paper = Paper(form, results["deadline_s"], chosen.seed, results["settings"], kept)
    began_s = time.monotonic()
    with ended_by_signals():
        for phase in phases:
            say(f"phase {phase}")
            getattr(paper, phase)()
    say(f"all of it took {time.monotonic() - began_s:.0f} s")
    kept.write()
    return results


def _print(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(r[n]) for r in (columns, *rows)) for n in range(len(columns))]
    for row in (columns, *rows):
        print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
