"""`holdfast drill`: does it come back in time? Faults on a cluster of processes, forecasts against outcomes."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.directory import is_running, open_directory
from holdfast.cli.loading import load
from holdfast.cli.output import amount, clock, console, print_json, table
from holdfast.cli.trials import Told, experiment_on, home_of, refuse_unless_exact
from holdfast.config import resolve
from holdfast.errors import ConfigError, DirectoryError, HoldfastError
from holdfast.faults import drill as d
from holdfast.faults.chaos import parse_faults
from holdfast.faults.compare import Verdict, compare
from holdfast.faults.report import check_plots, render
from holdfast.recovery.guard import DRILL
from holdfast.recovery.memory import teach as taught


def drill(
    app: Annotated[str, typer.Argument(metavar="APP[:pipeline]", help="A Python file or a dotted module.")],
    deadline: Annotated[
        str | None, typer.Option(help="Within this recovery must end; your settings' unless told.")
    ] = None,
    faults: Annotated[
        str,
        typer.Option(
            help="all, or some of: worker, executor, host, driver, application; or one kind: driver-freeze."
        ),
    ] = "executor,host,driver",
    trials: Annotated[int, typer.Option(min=1, help="How many faults.")] = 20,
    policy: Annotated[
        str, typer.Option(help="When state is backed up: deadline, 3s, '10 epochs', 'young-daly 24h', never.")
    ] = "deadline",
    seed: Annotated[
        int | None, typer.Option(help="Draws faults and moments; another one each time unless told.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Where keyed state lives: heap or rocksdb.")] = None,
    parallelism: Annotated[int, typer.Option(min=1, help="Shards of each keyed stage.")] = 2,
    hosts: Annotated[int, typer.Option(min=1, help="Hosts of the cluster; each is processes here.")] = 2,
    interval: Annotated[str | None, typer.Option(help="How often an epoch is cut.")] = None,
    max_records: Annotated[int, typer.Option(min=1, help="The most records an epoch takes.")] = 50_000,
    pause: Annotated[str, typer.Option(help="Between a recovery and the next fault, at random.")] = d.PAUSE,
    report: Annotated[Path | None, typer.Option(help="Write the plots into this HTML file.")] = None,
    teach: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The pipeline's own directory: it learns from this drill too."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where everything goes; a new folder that is deleted if all is well.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line: each trial, then the end.")
    ] = False,
) -> None:
    """Kill and freeze parts of a pipeline again and again, and hold what each recovery took against its forecast.

    A standalone Spark cluster is started on this machine and the pipeline runs there under a supervisor, with
    time-outs that follow from the deadline. Its sinks are not written to: each is replaced by a folder of the drill's
    own. Sources are really read, and must outlast the trials.

    In the end, output and state are compared as by `holdfast chaos`. Exit code 0 if nothing was lost, doubled or
    different; a recovery that took longer than the deadline is counted, and no error.
    """
    started_s = time.monotonic()
    wanted, pause_s = parse_faults(faults), d.parse_pause(pause)
    seed = int(time.time()) if seed is None else seed
    asked: dict[str, Any] = {
        "deadline": deadline,
        "checkpoint": policy,
        "backend": backend,
        "parallelism": parallelism,
        "interval": interval,
        "max_records": max_records,
        "on_infeasible": "warn",
    }
    settings = resolve(asked).settings
    check_report(report)
    pipeline = load(app)  # what is wrong with it is said before a cluster is started
    if teach is not None:
        check_pupil(teach, pipeline.name)
    home = home_of(folder, "drill")
    told = Told(trials)
    done: list[d.Trial] = []

    def found(verdict: Verdict | None) -> d.Drill:
        epochs, backups = d.recorded(home / "dir")
        return d.Drill(
            app=Path(app).name,
            trials=[_with_parts(trial, home / "dir") for trial in done],
            verdict=verdict,
            policy=policy,
            deadline_s=settings.deadline_s,
            confidence=settings.confidence,
            seed=seed,
            backend=settings.backend,
            seconds=time.monotonic() - started_s,
            epochs=epochs,
            backups=backups,
        )

    told.say(f"seed {seed}, {trials} faults, deadline {settings.deadline_s:g} s, everything is in {home}")
    try:
        with experiment_on(hosts, app, home, {**asked, **d.as_drilled(settings)}, {DRILL: "1"}) as experiment:
            d.inflict(
                experiment,
                d.draw(wanted, trials, seed, pause_s),
                deadline_s=settings.deadline_s,
                confidence=settings.confidence,
                tell=_told_of(told, done, json=json),
            )
            experiment.stop(done[-1].struck)
        told.say("comparing with the in-process runner")
        verdict = compare(lambda: load(app), home / "dir", home / "out", home / "runner")
    except HoldfastError as error:
        if done:
            _tell(found(None), report, told, json=json, error=error)
        raise told.added_to(error) from error
    _tell(found(verdict), report, told, json=json)
    refuse_unless_exact(verdict, home, seed)
    if teach is not None:
        check_pupil(teach, pipeline.name)  # somebody may have started it meanwhile
        told.say(f"{teach} has learned from {taught(teach, home / 'dir')} recoveries")
    if folder is None:
        shutil.rmtree(home, ignore_errors=True)


def _tell(
    drill: d.Drill, report: Path | None, told: Told, *, json: bool, error: HoldfastError | None = None
) -> None:
    """What was found, also by a drill that was not over when something went wrong."""
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(render(drill))
        told.say(f"report: {report}")
    if json:
        print_json({**d.summary(drill), **({} if error is None else {"error": error.facts()})})
    else:
        _print(drill)


def check_pupil(directory: Path, pipeline: str) -> None:
    """A directory that is to learn is this pipeline's, and nobody lives there: a run writes down what it knows itself."""
    found = open_directory(directory)
    if found.identity.name != pipeline:
        raise ConfigError(
            f"{directory} is of the pipeline {found.identity.name!r}, and the drill of {pipeline!r}.",
            remedy=f"Name the directory of {pipeline!r}.",
        )
    if is_running(found.status()):
        raise DirectoryError(
            f"{directory} is in use, and what its run has learned would be written over this.",
            remedy=f"Stop it first: holdfast stop {directory}.",
        )


def check_report(report: Path | None) -> None:
    """Say what a report lacks before the drill, and not after it."""
    if report is None:
        return
    if report.suffix not in (".html", ".htm"):
        raise ConfigError(f"{report.name} is no HTML file.", remedy="Name one that ends in .html.")
    check_plots()


def _with_parts(trial: d.Trial, directory: Path) -> d.Trial:
    return dataclasses.replace(trial, outcome=d.seen_inside(directory, trial.outcome))


def _told_of(told: Told, done: list[d.Trial], *, json: bool) -> Callable[[d.Trial], None]:
    def hear(trial: d.Trial) -> None:
        done.append(trial)
        if json:
            print_json(d.facts_of(trial))
        outcome = trial.outcome
        missed = ", and is not back" if trial.stuck else ", too late" if trial.missed else ""
        told.hear(
            trial.struck,
            outcome.took_s,
            f"{outcome.estimated.total:.1f} s estimated, back in {outcome.took_s:.1f} s{missed}",
        )

    return hear


def _print(drill: d.Drill) -> None:
    out = console()
    columns = ["trial", "at", "fault", "victim", "epoch", "estimate s", "bound s", "back after s", "off by"]
    columns.append("caught up s")
    right = [c for c in columns if c not in ("fault", "victim")]
    out.print(table(columns, [_row(t) for t in drill.trials], right=right))
    out.print()
    kinds = ["fault", "times", "median s", "longest s", "estimate s", "off by", "under bound", "missed"]
    rows = [
        [
            one.fault,
            str(one.times),
            f"{one.median_s:.1f}",
            f"{one.longest_s:.1f}",
            f"{one.estimate_s:.1f}",
            f"{one.error:.0%}",
            str(one.under_bound),
            str(one.missed),
        ]
        for one in d.by_fault(drill.trials)
    ]
    out.print(table(kinds, rows, right=kinds[1:]))
    for line in told_in_words(drill):
        out.print(f"\n{line}", soft_wrap=True)


def _row(trial: d.Trial) -> list[str]:
    struck, outcome = trial.struck, trial.outcome
    return [
        str(trial.number),
        clock(struck.since_start_s),
        struck.fault.label,
        struck.victim,
        str(struck.planned),
        f"{outcome.estimated.total:.1f}",
        f"{outcome.bounds[d.SURE]:.1f}",
        f"{outcome.took_s:.1f}{' !' if trial.missed else ''}",
        f"{outcome.error:.0%}",
        "" if outcome.caught_up_s is None else f"{outcome.caught_up_s:.1f}",
    ]


def told_in_words(drill: d.Drill) -> list[str]:
    """The drill in sentences."""
    found = d.summary(drill)
    exact = (
        "nothing was compared."
        if drill.verdict is None
        else f"{found['lost']} lost, {found['doubled']} doubled, {found['different_states']} states different."
    )
    late = {0: "none was late", 1: "1 was late"}.get(found["misses"], f"{found['misses']} were late")
    return [
        f"{found['trials']} trials in {clock(drill.seconds)}, deadline {drill.deadline_s:g} s, policy {drill.policy!r}: "
        f"{late}; the longest took {found['longest_recovery_s']:.1f} s, the median {found['median_recovery_s']:.1f} s. "
        f"Estimates were off by {found['mean_abs_error']:.0%} on average, and {found['under_bound']} of "
        f"{found['trials']} outcomes were under their 99% bound.",
        f"{found['backups']} backups; {found['near_deadline']:.0%} of the faults came while the bound was above "
        f"{d.NEAR:.0%} of the deadline, {found['host_near_deadline']:.0%} while that of a lost host was. "
        f"{amount(found['epochs'])} epochs, {amount(found['records'])} records: {exact}",
    ]
