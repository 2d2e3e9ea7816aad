"""`holdfast chaos`: real faults on a cluster of processes, and what they did to the output, against the runner."""

from __future__ import annotations

import collections
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.loading import load
from holdfast.cli.output import amount, clock, console, print_json, table
from holdfast.cli.trials import Told, experiment_on, home_of, refuse_unless_exact
from holdfast.config import resolve
from holdfast.errors import HoldfastError
from holdfast.faults.chaos import Trial, draw, inflict, parse_faults
from holdfast.faults.compare import Verdict, compare


def chaos(
    app: Annotated[str, typer.Argument(metavar="APP[:pipeline]", help="A Python file or a dotted module.")],
    faults: Annotated[
        str,
        typer.Option(
            help="all, or some of: worker-kill, worker-freeze, executor-kill, executor-freeze, host, "
            "driver-kill, driver-freeze, application."
        ),
    ] = "all",
    trials: Annotated[int, typer.Option(min=1, help="How many faults.")] = 20,
    seed: Annotated[
        int | None, typer.Option(help="Draws faults and moments; another one each time unless told.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Where keyed state lives: heap or rocksdb.")] = None,
    parallelism: Annotated[int, typer.Option(min=1, help="Shards of each keyed stage.")] = 2,
    hosts: Annotated[int, typer.Option(min=1, help="Hosts of the cluster; each is processes here.")] = 2,
    interval: Annotated[str, typer.Option(help="How often an epoch is cut.")] = "200ms",
    max_records: Annotated[int, typer.Option(min=1, help="The most records an epoch takes.")] = 20_000,
    checkpoint: Annotated[str, typer.Option(help="When state is backed up: 3s, '10 epochs'.")] = "3s",
    timeout: Annotated[float, typer.Option(help="Seconds; who is not back by then is stuck.")] = 120.0,
    folder: Annotated[
        Path | None, typer.Option(help="Where everything goes; a new folder that is deleted if all is well.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line: each fault, then the end.")
    ] = False,
) -> None:
    """Hurt a pipeline on a cluster of processes again and again, and count what was lost or doubled.

    A standalone Spark cluster is started on this machine and the pipeline runs there under a supervisor. Its
    sinks are not written to: each is replaced by a folder of the trial's own. Sources are really read, and must
    outlast the trials.

    In the end, output and state are compared with those of an in-process run over the same plans, row by row, and
    the plans with the sources. Exit code 0 if nothing was lost, doubled or different.
    """
    started_s = time.monotonic()
    wanted = parse_faults(faults)
    seed = int(time.time()) if seed is None else seed
    settings: dict[str, Any] = {
        "parallelism": parallelism,
        "interval": interval,
        "max_records": max_records,
        "checkpoint": checkpoint,
        "backend": resolve({"backend": backend}).settings.backend,
    }
    load(app)  # what is wrong with it is said before a cluster is started
    home = home_of(folder, "chaos")
    told = Told(trials)
    told.say(f"seed {seed}, {trials} faults, everything is in {home}")
    try:
        with experiment_on(hosts, app, home, settings) as experiment:
            blows = draw(wanted, trials, seed)
            done = inflict(experiment, blows, timeout_s=timeout, tell=_told_of(told, json=json))
            experiment.stop(done[-1].struck)
        told.say("comparing with the in-process runner")
        verdict = compare(lambda: load(app), home / "dir", home / "out", home / "runner")
    except HoldfastError as error:
        told.added_to(error)
        if json:
            print_json(_end(told.count, None, seed, settings["backend"], started_s, error))
        raise
    if json:
        print_json(_end(len(done), verdict, seed, settings["backend"], started_s))
    else:
        _print(done, verdict, time.monotonic() - started_s)
    refuse_unless_exact(verdict, home, seed)
    if folder is None:
        shutil.rmtree(home, ignore_errors=True)


def _told_of(told: Told, *, json: bool) -> Callable[[Trial], None]:
    def hear(trial: Trial) -> None:
        if json:
            print_json(facts_of(trial))
        back = "next fault at once" if trial.recovery_s is None else f"back in {trial.recovery_s:.1f} s"
        back = "not back" if trial.stuck else back
        told.hear(trial.struck, trial.recovery_s or 0.0, back)

    return hear


def facts_of(trial: Trial) -> dict[str, Any]:
    """A trial as a JSON line has it."""
    struck = trial.struck
    return {
        "trial": trial.number,
        "fault": struck.fault.label,
        "victim": struck.victim,
        "at_ms": struck.at_ms,
        "since_start_s": round(struck.since_start_s, 3),
        "epoch": struck.epoch,
        "planned": struck.planned,
        "overlaps": trial.overlaps,
        "recovery_s": None if trial.recovery_s is None else round(trial.recovery_s, 3),
        "stuck": trial.stuck,
    }


def _end(
    faults: int,
    verdict: Verdict | None,
    seed: int,
    backend: str,
    started_s: float,
    error: HoldfastError | None = None,
) -> dict[str, Any]:
    """The last line: what was found, or null for what nobody compared because of an error."""
    found: dict[str, Any] = {
        "faults": faults,
        "lost": None if verdict is None else verdict.lost,
        "doubled": None if verdict is None else verdict.doubled,
        "different_states": None if verdict is None else verdict.different_states,
        "seed": seed,
        "seconds": round(time.monotonic() - started_s, 1),
        "backend": backend,
    }
    return found if error is None else {**found, "error": error.facts()}


def _print(trials: Sequence[Trial], verdict: Verdict, seconds: float) -> None:
    out = console()
    columns = ["trial", "at", "fault", "victim", "epoch", "back after s"]
    out.print(table(columns, [_row(t) for t in trials], right=["trial", "at", "epoch", "back after s"]))
    out.print()
    out.print(
        table(
            ["fault", "times", "median s", "longest s"],
            by_fault(trials),
            right=["times", "median s", "longest s"],
        )
    )
    out.print(
        f"\n{len(trials)} faults in {clock(seconds)}, {amount(verdict.epochs)} epochs, {amount(verdict.records)} records: "
        f"{verdict.lost} lost, {verdict.doubled} doubled, {verdict.different_states} states different"
    )


def _row(trial: Trial) -> list[str]:
    struck = trial.struck
    back = "next fault" if trial.recovery_s is None else f"{trial.recovery_s:.1f}"
    name = f"+ {struck.fault.label}" if trial.overlaps else struck.fault.label
    return [str(trial.number), clock(struck.since_start_s), name, struck.victim, str(struck.planned), back]


def by_fault(trials: Sequence[Trial]) -> list[list[str]]:
    """For each kind of fault how often it was done, and the recovery's median and longest, where it was timed."""
    times: dict[str, list[float]] = collections.defaultdict(list)
    counts: collections.Counter[str] = collections.Counter()
    for trial in trials:
        counts[trial.struck.fault.label] += 1
        if trial.recovery_s is not None and not trial.overlaps:
            times[trial.struck.fault.label].append(trial.recovery_s)
    return [
        [
            label,
            str(count),
            *([f"{statistics.median(s):.1f}", f"{max(s):.1f}"] if (s := times[label]) else ["", ""]),
        ]
        for label, count in sorted(counts.items())
    ]
