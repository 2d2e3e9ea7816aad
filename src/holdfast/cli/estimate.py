"""`holdfast estimate`: how long recovery would take now, and how well that was foretold; `holdfast explain`: why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from holdfast.cli.directory import open_directory
from holdfast.cli.output import console, print_json, table
from holdfast.errors import ConfigError, HoldfastError
from holdfast.recovery import estimate as forecast
from holdfast.recovery.estimate import Learned, Memory, Notice, Outcome, Situation, calibration, covered
from holdfast.recovery.explain import explain as explained
from holdfast.recovery.explain import infeasible, unheld
from holdfast.recovery.memory import read_memory, read_outcomes

_LAST = 20


def estimate(
    dir: Annotated[Path, typer.Argument(metavar="DIR", help="The pipeline's directory.")],
    confidence: Annotated[float | None, typer.Option(help="Of the bound; the run's own unless told.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON: one object.")] = False,
) -> None:
    """Show how long recovery from each fault would take, in its four parts, and how well earlier ones were foretold."""
    if confidence is not None and not 0.5 <= confidence < 1:
        raise ConfigError(f"--confidence {confidence:g} is no confidence.", remedy="Write 0.99 or 0.999.")
    memory, notice, situation = _known(dir)
    sure = confidence or memory.confidence
    outcomes = read_outcomes(dir)
    rows = facts(Learned(memory), notice, situation, sure)
    if json:
        print_json(
            {
                "deadline_s": memory.deadline_s,
                "confidence": sure,
                "faults": rows,
                "calibration": dict(calibration(outcomes)),
                "recoveries": msgspec.to_builtins(outcomes),
            }
        )
        return
    out = console()
    columns = ["fault", "detection", "environment", "loading", "recomputing", "estimate", "bound", "seen"]
    shown = [
        [
            r["fault"],
            *(f"{r[part]:.1f} ≤ {r['bounds'][part]:.1f}" for part in columns[1:5]),
            f"{r['estimate']:.1f}",
            f"{r['bound']:.1f}",
            str(r["seen"]),
        ]
        for r in rows
    ]
    out.print(table(columns, shown, right=columns[1:]))
    out.print(
        f"\nSeconds, if it happened now; bounds, of each part alone and of all together, hold with {sure:.1%} confidence. "
        f"The deadline is {memory.deadline_s:g} s."
    )
    if outcomes:
        out.print()
        _print_outcomes(outcomes)


def facts(learned: Learned, notice: Notice, situation: Situation, confidence: float) -> list[dict[str, Any]]:
    """One row for each fault that is recovered from."""
    rows = []
    for fault in covered(notice):
        guess = forecast.estimate(fault, situation, learned, notice)
        rows.append(
            {
                "fault": fault.label,
                **msgspec.to_builtins(guess.parts),
                "estimate": guess.sum.mean,
                "bound": guess.bound(confidence),
                "bounds": msgspec.to_builtins(guess.bounds(confidence)),
                "seen": learned.times_seen(fault),
            }
        )
    return rows


def _print_outcomes(outcomes: list[Outcome]) -> None:
    out = console()
    columns = ["epoch", "fault", "estimate", "took", "bound 99%", "caught up", "by"]
    shown = [
        [
            str(o.epoch),
            o.fault,
            f"{o.estimated.total:.1f}",
            f"{o.took_s:.1f}",
            f"{o.bounds['0.99']:.1f}" if "0.99" in o.bounds else "",
            "" if o.caught_up_s is None else f"{o.caught_up_s:.1f}",
            o.by,
        ]
        for o in outcomes[-_LAST:]
    ]
    out.print(table(columns, shown, right=["epoch", "estimate", "took", "bound 99%", "caught up"]))
    known = calibration(outcomes)
    under = ", ".join(
        f"{share:.0%} under the {float(name.removeprefix('under_')):.1%} bound"
        for name, share in known.items()
        if name.startswith("under_")
    )
    out.print(
        f"\n{len(outcomes)} recoveries: the estimate was off by {known['mean_abs_error']:.0%} in the mean; {under}."
    )


def explain(
    dir: Annotated[Path, typer.Argument(metavar="DIR", help="The pipeline's directory.")],
    deadline: Annotated[
        str | None, typer.Option(help="Another deadline than the run's, with the time-outs of the run.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON: one object.")] = False,
) -> None:
    """Say why recovery would take as long as it would, which part is at fault, and what buys how many seconds."""
    from holdfast.config import parse_duration_s

    memory, notice, situation = _known(dir)
    deadline_s = parse_duration_s(deadline) if deadline else memory.deadline_s
    learned, sure = Learned(memory), memory.confidence
    now = explained(situation, learned, notice, sure, memory.floor)
    if now is None:
        raise HoldfastError("No fault is recovered from here: nothing notices any.")
    floor = now if memory.floor is None else explained(memory.floor, learned, notice, sure) or now
    held, feasible = now.bound_s <= deadline_s, floor.bound_s <= deadline_s
    told = now if feasible else floor
    if json:
        facts = {"deadline_s": deadline_s, "held": held, "feasible": feasible, "floor_s": floor.bound_s}
        print_json({**msgspec.to_builtins(told), **facts})
        return
    out = console()
    if not feasible:
        said = infeasible(floor, deadline_s)
    elif held:
        said = f"The deadline of {deadline_s:g} s holds now: recovery takes at most {now.bound_s:.1f} s."
    else:
        said = unheld(now, deadline_s, floor.bound_s)
    out.print(said, soft_wrap=True)
    for line in told.lines():
        out.print(f"  - {line}", soft_wrap=True)


def _known(dir: Path) -> tuple[Memory, Notice, Situation]:
    open_directory(dir)
    memory = read_memory(dir)
    if memory is None or memory.notice is None or memory.situation is None:
        raise HoldfastError(
            f"Nothing was learned about recovery in {dir} yet.",
            remedy="Run the pipeline for a few seconds: it estimates after every epoch.",
        )
    return memory, memory.notice, memory.situation
