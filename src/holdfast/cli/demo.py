"""`holdfast demo`: the vehicle map on a cluster of processes, an executor and the driver killed, drawn in the terminal."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import psutil
import typer
from rich.console import Console
from rich.text import Text

import holdfast
from holdfast.cli.country import Country
from holdfast.cli.demo_faults import CONFIDENCE, Plan, check, show
from holdfast.cli.demo_story import Hit, Story, teller_for
from holdfast.cli.demo_view import Drawing
from holdfast.cli.directory import is_running
from holdfast.cli.loading import load_file
from holdfast.cli.output import amount, clock, console, millis, print_json, size, table
from holdfast.cli.reporting import Reporter, reporter_for
from holdfast.cli.running import run_reported
from holdfast.cli.trials import NotExactError
from holdfast.cli.watching import Seen
from holdfast.config import Settings, parse_duration_s
from holdfast.errors import PipelineError
from holdfast.faults.compare import Verdict
from holdfast.log.journal import Journal
from holdfast.metrics import EpochFacts, Status, read_status

MASTER, RATE = "local[2]", 20_000
_MARK = "made-by-holdfast-demo"
_WIDE = 96
"""From this width on there is room for who was struck in the table at the end."""


def demo(
    seconds: Annotated[
        float, typer.Option(min=1, help="How long to run, besides starting and recovering.")
    ] = 30.0,
    deadline: Annotated[str, typer.Option(help="Within this recovery must end.")] = "60s",
    faults: Annotated[
        bool,
        typer.Option("--faults/--no-faults", help="Without: only the map, on local[2], with no cluster."),
    ] = True,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line: epochs, faults, the end, a summary.")
    ] = False,
) -> None:
    """Run the vehicle map (examples/vehicle_map.py) on this machine, kill an executor and then the driver, and draw it.

    Vehicles report positions and what they saw; the pipeline keeps map tiles
    up to date and flags changes. It runs on a Spark cluster of processes that is
    started for it. Each recovery is timed against the estimate before it and the
    deadline, and in the end output and state are compared with a run without faults.
    """
    example = find_example()
    settings = Settings(deadline_s=parse_duration_s(deadline), master=MASTER, parallelism=2)
    if faults:
        check(Plan(example, Path(), seconds, deadline))
    home = make_home(Path(".holdfast/demo"))
    if faults:
        _with_faults(Plan(example, home, seconds, deadline), json=json)
    else:
        _calm(example, home, seconds, settings, json=json)


def _with_faults(plan: Plan, *, json: bool) -> None:
    story = Story()
    country = Country(plan.home / "out", tiles="tile-updates", changes="road-changes")
    teller = teller_for(story, Drawing(country, console(), story).frame, json=json)
    try:
        with teller:
            verdict = show(plan, story, teller)
    except SystemExit:
        print("ended early; no process is left", file=sys.stderr)
        raise
    except Exception as error:
        teller.end(error)
        raise
    teller.end(None)
    country.catch_up()
    facts = {
        **summary(teller.seen, country, plan.home),
        **_of_faults(story.hits, verdict),
        "seconds": round(story.at_s, 1),
        "records_per_s": round(_records_per_s(plan.directory, verdict), 1),
    }
    if json:
        print_json({"event": "summary", **facts})
    else:
        print_faults(story.hits, verdict, console())
        _print_summary(facts, console(), _next_steps(facts, plan))
    if not verdict.exact:
        raise NotExactError(
            f"{verdict.lost} rows lost, {verdict.doubled} doubled, {verdict.different_states} shards different.",
            remedy=f"That is a bug in holdfast. Keep {plan.home}, and report it.",
            detail="\n".join(f"  - {f}" for f in verdict.findings),
        )


def _calm(example: Path, home: Path, seconds: float, settings: Settings, *, json: bool) -> None:
    """Only the map: this process is the driver, and nothing is done to it."""
    country = Country(home / "out")
    pipeline = load_file(example).build(rate=RATE, out=str(home / "out"))
    settings = msgspec.structs.replace(settings, dir=str(home / "dir"))
    reporter = reporter_for(json=json, draw=Drawing(country, console()).frame)
    run_reported(pipeline, settings, reporter, _Timer(reporter, home / "dir", seconds).hear)
    country.catch_up()
    facts = summary(reporter.seen, country, home)
    if json:
        print_json({"event": "summary", **facts})
    else:
        steps = [facts["look"], f"tail -n 3 {facts['output']}/changes/*.jsonl"]
        _print_summary(facts, console(), steps)


def find_example() -> Path:
    """The example, in the checkout that this package runs from, or below the current folder."""
    checkout = Path(holdfast.__file__).resolve().parents[2]
    for folder in (checkout, Path.cwd()):
        example = folder / "examples" / "vehicle_map.py"
        if example.is_file():
            return example
    raise PipelineError(
        "The demo runs examples/vehicle_map.py, which is in a checkout of holdfast and not in the installed package.",
        remedy="Clone the repository and run `make demo`, or run `holdfast demo` in the clone.",
    )


def make_home(wanted: Path) -> Path:
    """An empty folder: the one that an earlier demo made, emptied, or a temporary one if it is somebody else's."""
    ours = (wanted / _MARK).is_file() and not _in_use(wanted)
    if wanted.exists() and not ours:
        wanted = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    elif ours:
        shutil.rmtree(wanted)
    wanted.mkdir(parents=True, exist_ok=True)
    (wanted / _MARK).write_text(str(os.getpid()))
    return wanted


def _in_use(home: Path) -> bool:
    """Whether the demo that made it still runs, or what it started does."""
    mark = home / _MARK
    with contextlib.suppress(psutil.Error, ValueError):
        maker = psutil.Process(int(mark.read_text()))
        if maker.pid != os.getpid() and maker.create_time() <= mark.stat().st_mtime:
            return True
    return is_running(read_status(home / "dir"))


class _Timer:
    """Asks the run to stop, as `holdfast stop` would, so many seconds after its first epoch."""

    def __init__(self, reporter: Reporter, directory: Path, seconds: float) -> None:
        self._reporter, self._directory, self._seconds = reporter, directory, seconds
        self._started = False

    def hear(self, status: Status, facts: EpochFacts | None) -> None:
        self._reporter.hear(status, facts)
        if facts is not None and not self._started:
            self._started = True
            timer = threading.Timer(self._seconds, Journal.at(self._directory).ask_to_stop)
            timer.daemon = True
            timer.start()


def summary(seen: Seen, country: Country, home: Path) -> dict[str, Any]:
    """What the demo did, as plain data."""
    status = seen.status
    rate = sum(seen.rates) / max(1, len(seen.rates))
    x, y = country.busiest()
    return {
        "records": 0 if status is None else status.records,
        "epochs": seen.epochs,
        "seconds": round(seen.uptime_s, 1),
        "records_per_s": round(rate, 1),
        "first_epoch_ms": round(seen.first_ms, 1),
        "latency_p50_ms": round(seen.latency_ms(0.5), 1),
        "latency_p99_ms": round(seen.latency_ms(0.99), 1),
        "state_keys": 0 if status is None else status.state_keys,
        "state_bytes": 0 if status is None else status.state_bytes,
        "changes": country.flagged,
        "tiles": int((country.reports > 0).sum()),
        "output": str(home / "out"),
        "look": f"holdfast state {home / 'dir'} --operator tiles --key {x},{y}",
    }


def _of_faults(hits: Sequence[Hit], verdict: Verdict) -> dict[str, Any]:
    return {
        "faults": [hit.facts() for hit in hits],
        "held": all(hit.held for hit in hits),
        "lost": verdict.lost,
        "doubled": verdict.doubled,
        "different_states": verdict.different_states,
        "records": verdict.records,
        "epochs": verdict.epochs,
    }


def _records_per_s(directory: Path, verdict: Verdict) -> float:
    """Over all the time from the first plan to the last, recoveries included."""
    journal = Journal.at(directory)
    first, last = journal.plan(1), journal.plan(verdict.epochs)
    if first is None or last is None or last.now_ms <= first.now_ms:
        return 0.0
    return verdict.records * 1000 / (last.now_ms - first.now_ms)


def print_faults(hits: Sequence[Hit], verdict: Verdict, out: Console) -> None:
    """The faults, estimates beside outcomes, and what was lost or doubled."""
    columns = ["fault", "victim", "estimate", f"{CONFIDENCE:.1%} bound", "back after", "deadline", "held"]
    rows = [
        [
            hit.fault.label,
            hit.victim,
            f"{hit.estimate_s:.1f} s",
            f"{hit.bound_s:.1f} s",
            Text("" if hit.took_s is None else f"{hit.took_s:.1f} s", style="bold"),
            f"{hit.deadline_s:g} s",
            Text("✓ held", style="bold green") if hit.held else Text("✗ missed", style="bold red"),
        ]
        for hit in hits
    ]
    if out.width < _WIDE:
        columns, rows = _without_second(columns), [_without_second(row) for row in rows]
    out.print()
    shown = table(columns, rows, right=columns[-5:-1])
    shown.columns[0].no_wrap = True
    out.print(shown)
    found = f"{verdict.lost} lost, {verdict.doubled} doubled, {verdict.different_states} states different"
    out.print()
    out.print(
        Text.assemble(
            (f"{'after both':<11}", "dim"),
            (found, "bold green" if verdict.exact else "bold red"),
            ": output and state against a run without faults over the same plans",
        ),
        soft_wrap=True,
    )


def _without_second(row: list[Any]) -> list[Any]:
    return [row[0], *row[2:]]


def _next_steps(facts: dict[str, Any], plan: Plan) -> list[str]:
    example = plan.example
    with contextlib.suppress(ValueError):
        example = example.relative_to(Path.cwd())
    return [
        f"holdfast estimate {plan.directory}",
        facts["look"],
        f"holdfast drill {example} --trials 10",
    ]


def _print_summary(facts: dict[str, Any], out: Console, steps: Sequence[str]) -> None:
    lines = [
        ("done", f"{amount(facts['records'])} records in {amount(facts['epochs'])} epochs, {clock(facts['seconds'])} with start-up"),
        ("speed", f"{amount(facts['records_per_s'])} records/s; latency p50 {millis(facts['latency_p50_ms'])}, "
                  f"p99 {millis(facts['latency_p99_ms'])}, first epoch {millis(facts['first_epoch_ms'])}"),
        ("state", f"{amount(facts['state_keys'])} keys, {size(facts['state_bytes'])}"),
        ("map", f"{amount(facts['tiles'])} tiles, {amount(facts['changes'])} road changes flagged"),
        ("output", _contents(Path(facts["output"]))),
        *(("look at it" if n == 0 else "", step) for n, step in enumerate(steps)),
    ]  # fmt: skip
    out.print()
    for name, text in lines:
        out.print(Text.assemble((f"{name:<11}", "dim"), text), soft_wrap=True)


def _contents(out: Path) -> str:
    """The output and what is in it."""
    folders = sorted(f.name for f in out.glob("[!.]*"))
    return f"{out}: {', '.join(folders)}"
