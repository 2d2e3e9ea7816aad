"""`holdfast simulate`: what each policy for backups would have cost over a recorded run, for some deadlines."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from holdfast.checkpoint.policy import Policy, parse_policy
from holdfast.cli.output import amount, clock, console, print_json, size, table
from holdfast.config import Settings, parse_duration_s, resolve
from holdfast.errors import ConfigError, DirectoryError, MissingExtraError
from holdfast.faults.chaos import parse_faults
from holdfast.recovery.estimate import CONFIDENCE, Learned, Memory, Notice, covered
from holdfast.recovery.memory import MEMORY, read_memory
from holdfast.recovery.simulate import Result, Run, clairvoyant, taught
from holdfast.recovery.simulate import simulate as walk
from holdfast.recovery.trace import FILE, BackupLine, EpochLine, read_trace

POLICIES = "deadline,every-epoch,30s,young-daly 24h,never"
MOST_EPOCHS = 20_000
"""Of a longer run its end is taken: the least number of backups takes a while to find."""


def simulate(
    dir: Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a pipeline that has run.")],
    deadlines: Annotated[str, typer.Option(help="Deadlines with commas between: 10s,30s,70s.")],
    policies: Annotated[
        str, typer.Option(help="When to back up, as for --checkpoint, with commas between.")
    ] = POLICIES,
    confidence: Annotated[
        float, typer.Option(help="How sure the bound on recovery time must be.")
    ] = CONFIDENCE,
    master: Annotated[
        str | None, typer.Option(help="The Spark master it would run on; local if unset, as for run.")
    ] = None,
    faults: Annotated[
        str, typer.Option(help="Which faults must be recovered from in time: all, or some, as for chaos.")
    ] = "all",
    hosts: Annotated[int, typer.Option(min=1, help="Over how many hosts the state is spread.")] = 1,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the bound over time into this file: .svg, .png or .pdf.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What would it cost? Walks a recorded run with each policy and deadline, and tells what came of it.

    Beside them stands the clairvoyant minimum: the fewest backups that would have held the deadline, for one who
    knows what comes and neither pauses nor cuts epochs. Time-outs follow from each deadline, unless they are set.
    """
    wanted_s = _deadlines(deadlines)
    named = {text.strip(): parse_policy(text) for text in policies.split(",") if text.strip()}
    if not 0.5 <= confidence < 1:
        raise ConfigError(f"--confidence {confidence:g} is no confidence.", remedy="Write 0.99 or 0.999.")
    if plot is not None and plot.suffix not in _SUFFIXES:
        raise ConfigError(
            f"{plot.name} is no picture.", remedy=f"Name a file that ends in {', '.join(_SUFFIXES)}."
        )
    judged = parse_faults(faults)
    epochs, backups = _read(dir)
    learned = _learned(dir, epochs, backups)
    trials = []
    for deadline_s in wanted_s:
        settings = resolve({"deadline": f"{deadline_s}s", "master": master}).settings
        notice = _notice(settings)
        run = Run(
            epochs,
            backups,
            learned,
            notice,
            confidence=confidence,
            max_records=max(settings.max_records, *(e.records for e in epochs)),
            hosts=hosts,
            share=_share(dir) if hosts > 1 else None,
            faults=[fault for fault in covered(notice) if fault in judged],
        )
        trials.append(_try(run, named, deadline_s))
    if plot is not None:
        draw(trials, plot)
    if json:
        print_json(_facts(trials, epochs, backups, confidence))
        return
    _print(trials, epochs, backups, confidence)
    if plot is not None:
        console().print(f"\ndrawn: {plot}", soft_wrap=True)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One deadline: what became of each policy."""

    deadline_s: float
    results: dict[str, Result]
    least: int | None
    floors: dict[str, float]
    """What recovery from each fault may take whatever is backed up."""

    @property
    def beyond(self) -> dict[str, float]:
        """Where nothing keeps the deadline: the faults that no backup helps against."""
        kept = self.least is not None or any(result.kept for result in self.results.values())
        return {} if kept else {f: s for f, s in self.floors.items() if s > self.deadline_s}


def _try(run: Run, policies: dict[str, Policy], deadline_s: float) -> Trial:
    return Trial(
        deadline_s,
        {name: walk(run, policy, deadline_s) for name, policy in policies.items()},
        clairvoyant(run, deadline_s),
        {fault.label: round(seconds, 2) for fault, seconds in run.floors().items()},
    )


def _share(directory: Path) -> float | None:
    """Of all shards, those that a replay ran in the recorded run."""
    memory = read_memory(directory)
    return None if memory is None or memory.situation is None else memory.situation.share


def _notice(settings: Settings) -> Notice:
    """By what faults would be noticed with these settings, under a supervisor."""
    from holdfast.engine.session import notice_of, timeouts
    from holdfast.supervise.strategies import delays_s, parse_restart

    restart_s, _, _ = delays_s([], parse_restart(settings.restart), 0.0)
    again = math.isfinite(restart_s)
    return notice_of(
        {**timeouts(settings), **settings.spark},
        local=settings.master is None or settings.master.startswith("local"),
        supervised_s=settings.driver_timeout_s if again else None,
        wait_for_home_s=settings.wait_for_home_s,
        restart_s=restart_s if again else 0.0,
    )


def _deadlines(text: str) -> list[float]:
    remedy = "Write them with commas between: --deadlines 10s,30s,70s."
    found = []
    for word in (w.strip() for w in text.split(",") if w.strip()):
        try:
            found.append(parse_duration_s(word))
        except ConfigError as error:
            raise ConfigError(f"{word!r} is no deadline.", remedy=remedy) from error
        if found[-1] <= 0:
            raise ConfigError(f"{word!r} is no deadline: it must be more than nothing.", remedy=remedy)
    if not found:
        raise ConfigError("--deadlines names no deadline.", remedy=remedy)
    return found


def _read(directory: Path) -> tuple[list[EpochLine], list[BackupLine]]:
    lines = list(read_trace(directory))
    epochs = [line for line in lines if isinstance(line, EpochLine)][-MOST_EPOCHS:]
    if not epochs:
        raise DirectoryError(
            f"{directory} has no recorded epoch: there is none in {FILE}.",
            remedy="Pass the directory of a pipeline that has run (.holdfast/<name>), or run it for a while.",
        )
    first = epochs[0].epoch
    return epochs, [line for line in lines if isinstance(line, BackupLine) and line.epoch >= first]


def _learned(directory: Path, epochs: Sequence[EpochLine], backups: Sequence[BackupLine]) -> Learned:
    """What the pipeline has learned, or what its trace teaches."""
    try:
        return Learned(msgspec.json.decode((directory / MEMORY).read_bytes(), type=Memory))
    except (OSError, msgspec.DecodeError):
        return taught(epochs, backups)


def _facts(
    trials: Sequence[Trial], epochs: Sequence[EpochLine], backups: Sequence[BackupLine], confidence: float
) -> dict[str, Any]:
    made = [b for b in backups if not b.failed]
    return {
        "epochs": len(epochs),
        "records": sum(e.records for e in epochs),
        "seconds": round(_span_s(epochs), 3),
        "confidence": confidence,
        "recorded": {
            "backups": len(made),
            "new_bytes": sum(b.new_bytes for b in made),
            "upload_s": round(sum(b.took_s for b in made), 3),
            "paused_s": round(sum(e.paused_s for e in epochs), 3),
            "worst_s": max(e.bound_s for e in epochs),
        },
        "deadlines": [
            {
                "deadline_s": trial.deadline_s,
                "clairvoyant": trial.least,
                "beyond_backups": trial.beyond,
                "policies": [{"policy": name, **facts_of(result)} for name, result in trial.results.items()],
            }
            for trial in trials
        ],
    }


def facts_of(result: Result) -> dict[str, Any]:
    """What came of a policy, as JSON has it."""
    return {
        "backups": len(result.backups),
        "new_bytes": result.new_bytes,
        "upload_s": round(result.upload_s, 3),
        "overhead": round(result.overhead, 5),
        "paused_s": round(result.paused_s, 3),
        "cut": result.cut,
        "seconds": round(result.run_s, 3),
        "worst_s": round(result.worst_s, 3),
        "kept": result.kept,
        "over": result.over,
    }


def _span_s(epochs: Sequence[EpochLine]) -> float:
    return (epochs[-1].at_ms - epochs[0].at_ms) / 1000 + epochs[0].took_s


def _print(
    trials: Sequence[Trial], epochs: Sequence[EpochLine], backups: Sequence[BackupLine], confidence: float
) -> None:
    out = console()
    made = [b for b in backups if not b.failed]
    out.print(
        f"{amount(len(epochs))} epochs, {amount(sum(e.records for e in epochs))} records, "
        f"{clock(_span_s(epochs))}; the run itself made {len(made)} backups, "
        f"{size(sum(b.new_bytes for b in made))}. Bounds hold with {confidence:g}.",
        soft_wrap=True,
    )
    columns = ["policy", "backups", "uploaded", "overhead", "paused", "cut", "worst bound", "kept"]
    for trial in trials:
        out.print(f"\n[bold]deadline {trial.deadline_s:g} s[/bold]")
        rows = [_row(name, result) for name, result in trial.results.items()]
        least = "no, without pauses and cuts" if trial.least is None else "yes"
        rows.append(
            ["clairvoyant", "" if trial.least is None else amount(trial.least), "", "", "", "", "", least]
        )
        out.print(table(columns, rows, right=columns[1:-1]))
        if note := _note(trial):
            out.print(note, soft_wrap=True)


def _row(name: str, result: Result) -> list[str]:
    kept = "yes" if result.kept else f"no: {amount(result.over)} epochs over" if result.over else "no"
    return [
        name,
        amount(len(result.backups)),
        size(result.new_bytes),
        f"{result.overhead:.2%}",
        f"{result.paused:.2%}" if result.paused_s else "",
        amount(result.cut) if result.cut else "",
        f"{result.worst_s:.1f} s",
        kept,
    ]


def _note(trial: Trial) -> str:
    if not trial.beyond:
        return ""
    listed = ", ".join(f"{label} ({seconds:.1f} s)" for label, seconds in trial.beyond.items())
    rest = [label for label in trial.floors if label not in trial.beyond]
    note = f"No backup helps against: {listed}."
    return f"{note} The others: --faults {','.join(rest)}." if rest else note


# The picture

_COLOURS = ("#0969da", "#bc4c00", "#8250df", "#1a7f37", "#9a6700", "#bf3989", "#57606a")
_SUFFIXES = (".svg", ".png", ".pdf")


def draw(trials: Sequence[Trial], file: Path) -> None:
    """The bound over time: a panel a deadline, a line a policy, and below them a row of ticks for its backups."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            "--plot needs matplotlib, which is not installed.",
            remedy="Install it with: pip install matplotlib",
        ) from error
    names = list(trials[0].results)
    rows_high = 0.16 * len(names)
    figure = Figure(figsize=(10, (2.9 + rows_high) * len(trials) + 0.5), layout="constrained")
    heights = [part for _ in trials for part in (2.6, rows_high)]
    axes = figure.subplots(2 * len(trials), 1, squeeze=False, height_ratios=heights)
    for number, trial in enumerate(trials):
        _panel(axes[2 * number][0], axes[2 * number + 1][0], trial)
    lines, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=9)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


def _panel(curves: Any, ticks: Any, trial: Trial) -> None:
    minutes = 60.0
    run_s = max((r.run_s for r in trial.results.values()), default=0.0) or 1.0
    worst_s = max([trial.deadline_s, *(r.worst_s for r in trial.results.values())])
    for place, (name, result) in enumerate(trial.results.items()):
        colour = _COLOURS[place % len(_COLOURS)]
        at = [seconds / minutes for seconds, _ in result.curve]
        curves.plot(at, [bound for _, bound in result.curve], color=colour, linewidth=1.1, label=name)
        begun = [b.begun_s / minutes for b in result.backups]
        ticks.vlines(begun, place + 0.15, place + 0.85, color=colour, linewidth=0.8)
    curves.axhline(trial.deadline_s, color="#cf222e", linestyle="--", linewidth=1.2, label="the deadline")
    # What is far over the deadline would press everything else to the ground.
    curves.set_ylim(0, 1.08 * min(worst_s, 2 * trial.deadline_s))
    curves.set_title(f"deadline {trial.deadline_s:g} s", loc="left", fontsize=10, fontweight="bold")
    curves.set_ylabel("bound on recovery, s", fontsize=9)
    curves.grid(axis="y", color="#d0d7de", linewidth=0.6)
    ticks.set_yticks(
        [place + 0.5 for place in range(len(trial.results))],
        [f"{name}: {len(result.backups):,}" for name, result in trial.results.items()],
        fontsize=7,
    )
    ticks.set_ylim(len(trial.results), 0)
    ticks.tick_params(axis="y", length=0)
    ticks.set_xlabel("minutes; ticks are backups", fontsize=9)
    for axes in (curves, ticks):
        axes.set_xlim(0, run_s / minutes)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", labelsize=8)
    curves.tick_params(axis="x", labelbottom=False)
    curves.tick_params(axis="y", labelsize=8)
