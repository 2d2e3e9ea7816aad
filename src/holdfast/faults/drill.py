"""A drill: faults at random moments, and the forecast before each beside what the recovery took.

The pipeline that is drilled learns from it: each outcome is left where its guard looks, so the forecasts of a long
drill, and of the pipeline's later runs in the same directory, are better than those of its beginning.

    pause -> forecast -> fault -> recovery -> outcome told -> backlog worked off -> pause

Faults don't overlap here: what a bound promises is one fault at a time. `chaos` is for the others.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.checkpoint.policy import Trigger
from holdfast.config import Settings, parse_duration_s
from holdfast.errors import ConfigError
from holdfast.faults.chaos import Blow, in_turn
from holdfast.faults.compare import Verdict
from holdfast.faults.experiment import SETTINGS, Experiment, Struck, StuckError
from holdfast.faults.kinds import Fault
from holdfast.metrics import Forecast, Status, read_status
from holdfast.recovery.estimate import Outcome, Parts, split
from holdfast.recovery.memory import OUTCOMES, read_outcome, write_outcome
from holdfast.recovery.trace import BackupLine, EpochLine, read_trace
from holdfast.supervise.strategies import NoRestart, delay_s, parse_restart

PAUSE = "1s..8s"
"""Between a recovery and the next fault, unless told: epochs and backups pass in between."""
SURE = "0.99"
"""The confidence of the bound that outcomes are counted against."""
NEAR = 0.8
"""From this share of the deadline on, a bound is near it."""
LEAST_TIMEOUT_S = 120.0
_FORECAST_TIMEOUT_S = 60.0
_CATCH_UP_S = 10.0
"""For so long the last trial is waited for; the others are until the next one, which is not held up."""
_LOOK_EVERY_S = 0.05
_ALIVE = ("running", "waiting")
FROM_DEADLINE = dict.fromkeys(("driver_timeout", "executor_timeout", "worker_timeout"))
"""Settings that an experiment would choose, and that follow from the deadline in a drill."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """A fault that was done, what was forecast before it and what came of it."""

    number: int
    struck: Struck
    outcome: Outcome
    worst_s: float
    """The bound over all faults, of the status before this one: what the policy holds under the deadline."""
    host_s: float = 0.0
    """The one for a lost host alone, which grows with history."""
    stuck: bool = False
    """Whether it was not back when nobody waited any longer: then it took at least as long as it says."""

    @property
    def missed(self) -> bool:
        """Whether recovery took longer than the deadline."""
        return self.outcome.took_s > self.outcome.deadline_s

    @property
    def under_bound(self) -> bool:
        """Whether it took no longer than the bound for this fault."""
        return self.outcome.took_s <= self.outcome.bounds[SURE]

    @property
    def near_deadline(self) -> bool:
        """Whether it came when the policy had used up most of the deadline."""
        return self.worst_s > NEAR * self.outcome.deadline_s

    @property
    def host_near_deadline(self) -> bool:
        """Whether it came when history had used up most of the deadline."""
        return self.host_s > NEAR * self.outcome.deadline_s


@dataclasses.dataclass(frozen=True)
class Drill:
    """All that a drill found: what the table and the report are made of."""

    app: str
    trials: Sequence[Trial]
    verdict: Verdict | None
    """None: it was not back after a fault, and there was nothing to compare."""
    policy: str
    deadline_s: float
    confidence: float
    seed: int
    backend: str
    seconds: float
    epochs: Sequence[EpochLine] = ()
    backups: Sequence[BackupLine] = ()

    @property
    def made(self) -> list[BackupLine]:
        """The backups that did not fail, without the one of the end."""
        return [b for b in self.backups if not b.failed and b.trigger != Trigger.STOPPING.name]


def as_drilled(settings: Settings) -> dict[str, Any]:
    """What a pipeline that is drilled runs with: its user's settings, where an experiment would choose others.

    A driver is started again after the delay that one has which was well before. Faults come faster here than a
    back-off is made for: it would double from each to the next.
    """
    made: dict[str, Any] = {**FROM_DEADLINE, "spark": {**SETTINGS["spark"], **settings.spark}}
    strategy = parse_restart(settings.restart)
    if not isinstance(strategy, NoRestart):
        made["restart"] = f"fixed {delay_s(strategy):g}s"
    return made


def parse_pause(text: str) -> tuple[float, float]:
    """Between which seconds a pause is drawn.

    >>> parse_pause("2s..12s"), parse_pause("500ms")
    ((2.0, 12.0), (0.5, 0.5))
    """
    least, dots, most = text.partition("..")
    shortest_s = parse_duration_s(least)
    longest_s = parse_duration_s(most) if dots else shortest_s
    if longest_s < shortest_s:
        raise ConfigError(f"{text!r} is no pause: it ends before it begins.", remedy='Write "2s..12s".')
    return shortest_s, longest_s


def draw(faults: Sequence[Fault], trials: int, seed: int, pause_s: tuple[float, float]) -> list[Blow]:
    """What will be done: every kind about equally often, none before the recovery from the one before."""
    chance = random.Random(seed)
    return [
        Blow(fault, chance.uniform(*pause_s), False, chance.random())
        for fault in in_turn(faults, trials, chance)
    ]


def timeout_s(deadline_s: float) -> float:
    """Who is not back by then is stuck. Long after the deadline, since to miss it is an outcome too."""
    return max(LEAST_TIMEOUT_S, 4 * deadline_s)


# Doing it


def inflict(
    experiment: Experiment,
    blows: Sequence[Blow],
    *,
    deadline_s: float,
    confidence: float,
    tell: Callable[[Trial], None] = lambda trial: None,
) -> list[Trial]:
    """Do it all and be told of each; raises where there is no recovery at all, after that was told as well."""
    experiment.victims.shards_only = True  # what a forecast for a worker is about
    trials: list[Trial] = []
    next_s = time.monotonic() + (blows[0].pause_s if blows else 0.0)
    for number, blow in enumerate(blows, start=1):
        time.sleep(max(0.0, next_s - time.monotonic()))
        aim = experiment.aim(blow.fault, blow.share, timeout_s(deadline_s))
        before = await_forecast(experiment, blow.fault)
        struck = experiment.strike(blow.fault, aim=aim)
        host_s = before.forecasts[Fault.HOST.label].bound_s if Fault.HOST.label in before.forecasts else 0.0
        forecast = before.forecasts[blow.fault.label]
        try:
            struck, took_s = experiment.await_felt_recovery(struck, timeout_s(deadline_s))
        except StuckError:
            outcome = outcome_of(struck, timeout_s(deadline_s), forecast, deadline_s, confidence)
            tell(Trial(number, struck, outcome, before.bound_s, host_s, stuck=True))
            raise
        outcome = outcome_of(struck, took_s, forecast, deadline_s, confidence)
        write_outcome(experiment.directory, outcome)
        next_s = time.monotonic() + (blows[number].pause_s if number < len(blows) else _CATCH_UP_S)
        caught_up_s = _await_caught_up(experiment, struck, before, next_s)
        outcome = msgspec.structs.replace(outcome, caught_up_s=caught_up_s)
        write_outcome(experiment.directory, outcome)
        inside = seen_inside(experiment.directory, outcome)
        trials.append(Trial(number, struck, inside, before.bound_s, host_s))
        tell(trials[-1])
    return trials


def await_forecast(experiment: Experiment, fault: Fault, patience_s: float = _FORECAST_TIMEOUT_S) -> Status:
    """The status before a fault, with a forecast for it: a driver that has just started has none yet."""
    until = time.monotonic() + patience_s
    while True:
        status = read_status(experiment.directory)
        if status is not None and status.state in _ALIVE and fault.label in status.forecasts:
            return status
        if time.monotonic() >= until:
            raise StuckError(
                f"There was no forecast for {fault.label} within {patience_s:.0f} s.",
                remedy=f"Faults that nothing notices have none; see `holdfast status {experiment.directory}`.",
                detail=experiment.tails(),
            )
        time.sleep(_LOOK_EVERY_S)


def outcome_of(
    struck: Struck, took_s: float, forecast: Forecast, deadline_s: float, confidence: float
) -> Outcome:
    """A recovery as the drill saw it: which fault it was and when it came, which the run itself does not know."""
    return Outcome(
        fault=struck.fault.label,
        epoch=struck.awaited,
        at_ms=struck.at_ms,
        took_s=took_s,
        measured=Parts(),
        estimated=Parts(
            forecast.detection_s, forecast.environment_s, forecast.loading_s, forecast.recomputing_s
        ),
        bounds={f"{confidence:g}": forecast.bound_s, SURE: forecast.bound_99_s},
        deadline_s=deadline_s,
        by="drill",
    )


def _await_caught_up(experiment: Experiment, struck: Struck, before: Status, until_s: float) -> float | None:
    """From the fault until no more waits than before it; None if that takes too long to wait for.

    The epoch that ended the recovery was planned long ago, so the ones after it tell.
    """
    while time.monotonic() < until_s:
        status = read_status(experiment.directory)
        if status is not None and status.epoch > struck.awaited and status.backlog <= before.backlog:
            return time.monotonic() - struck.at_s
        time.sleep(_LOOK_EVERY_S)
    return None


def seen_inside(directory: Path, outcome: Outcome) -> Outcome:
    """The outcome with its parts: what the run saw of loading and recomputing, and the rest.

    And with the time until the backlog was worked off, where the next fault came before that: the run sees it later.
    """
    own = read_outcome(directory / OUTCOMES / f"{outcome.epoch:08d}.json")
    if own is None:
        return msgspec.structs.replace(outcome, measured=Parts(environment=outcome.took_s))
    seen = own.measured
    parts = split(outcome.took_s, outcome.estimated.detection, seen.loading, seen.recomputing)
    caught_up_s = own.caught_up_s if outcome.caught_up_s is None else outcome.caught_up_s
    return msgspec.structs.replace(outcome, measured=parts, caught_up_s=caught_up_s)


def recorded(directory: Path) -> tuple[list[EpochLine], list[BackupLine]]:
    """The epochs and backups of a run."""
    lines = list(read_trace(directory))
    epochs = [line for line in lines if isinstance(line, EpochLine)]
    return epochs, [line for line in lines if isinstance(line, BackupLine)]


# What came of it


def facts_of(trial: Trial) -> dict[str, Any]:
    """A trial as a JSON line has it."""
    struck, outcome = trial.struck, trial.outcome
    return {
        "trial": trial.number,
        "fault": struck.fault.label,
        "victim": struck.victim,
        "at_ms": struck.at_ms,
        "since_start_s": round(struck.since_start_s, 3),
        "epoch": struck.epoch,
        "planned": struck.planned,
        "recovery_s": round(outcome.took_s, 3),
        "estimate_s": round(outcome.estimated.total, 3),
        "error": round(outcome.error, 4),
        "bounds_s": {level: round(bound_s, 3) for level, bound_s in outcome.bounds.items()},
        "worst_bound_s": round(trial.worst_s, 3),
        "host_bound_s": round(trial.host_s, 3),
        "missed": trial.missed,
        "stuck": trial.stuck,
        "caught_up_s": None if outcome.caught_up_s is None else round(outcome.caught_up_s, 3),
        "estimated": _rounded(outcome.estimated),
        "measured": _rounded(outcome.measured),
    }


def _rounded(parts: Parts) -> dict[str, float]:
    return {name: round(seconds, 3) for name, seconds in msgspec.structs.asdict(parts).items()}


def summary(drill: Drill) -> dict[str, Any]:
    """The drill in one object: the last line of `--json`."""
    took, verdict = [t.outcome.took_s for t in drill.trials], drill.verdict
    caught_up = [t.outcome.caught_up_s for t in drill.trials if t.outcome.caught_up_s is not None]
    return {
        "trials": len(drill.trials),
        "misses": sum(t.missed for t in drill.trials),
        "mean_abs_error": round(statistics.mean(t.outcome.error for t in drill.trials), 4),
        "under_bound": sum(t.under_bound for t in drill.trials),
        "backups": len(drill.made),
        "near_deadline": round(statistics.mean(t.near_deadline for t in drill.trials), 4),
        "host_near_deadline": round(statistics.mean(t.host_near_deadline for t in drill.trials), 4),
        "lost": None if verdict is None else verdict.lost,
        "doubled": None if verdict is None else verdict.doubled,
        "different_states": None if verdict is None else verdict.different_states,
        "median_recovery_s": round(statistics.median(took), 3),
        "longest_recovery_s": round(max(took), 3),
        "median_caught_up_s": round(statistics.median(caught_up), 3) if caught_up else None,
        "deadline_s": drill.deadline_s,
        "confidence": drill.confidence,
        "policy": drill.policy,
        "seed": drill.seed,
        "backend": drill.backend,
        "epochs": len(drill.epochs) if verdict is None else verdict.epochs,
        "records": sum(e.records for e in drill.epochs) if verdict is None else verdict.records,
        "seconds": round(drill.seconds, 1),
    }


@dataclasses.dataclass(frozen=True)
class OfFault:
    """All trials with one kind of fault, together."""

    fault: str
    times: int
    median_s: float
    longest_s: float
    estimate_s: float
    """The mean."""
    error: float
    """The mean."""
    under_bound: int
    missed: int


def by_fault(trials: Sequence[Trial]) -> list[OfFault]:
    """How it went for each kind of fault, in the order of their names."""
    found = []
    for label in sorted({t.outcome.fault for t in trials}):
        of = [t for t in trials if t.outcome.fault == label]
        took = [t.outcome.took_s for t in of]
        found.append(
            OfFault(
                label,
                len(of),
                statistics.median(took),
                max(took),
                statistics.mean(t.outcome.estimated.total for t in of),
                statistics.mean(t.outcome.error for t in of),
                sum(t.under_bound for t in of),
                sum(t.missed for t in of),
            )
        )
    return found
