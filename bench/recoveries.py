"""A map on a cluster of processes that loses a host now and then: how long it takes to be back, each time.

What `bench paper` and `bench deadline` have in common: one application with a policy for backups, struck at some
lengths of its history (`curve`) or at random moments (`trials`). Everything is bounded in time: who has no time left
takes no more points, and says so. What was measured is told at once, so that it is kept if the rest fails.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from bench.durability import say
from bench.paper_app import Work
from holdfast.checkpoint.catalog import Catalog
from holdfast.errors import HoldfastError
from holdfast.faults.cluster import Cluster
from holdfast.faults.drill import FROM_DEADLINE, recorded
from holdfast.faults.experiment import Experiment, StuckError
from holdfast.faults.kinds import Fault
from holdfast.metrics import Forecast, read_status
from holdfast.recovery.memory import read_outcomes

APP = Path(__file__).with_name("paper_app.py")
HOSTS, CORES = 2, 2
RECOVERY_TIMEOUT_S = 900.0
"""Who is not back by then does not come back; without a deadline that is a result too."""
_SETTLED = 30
"""So many epochs pass on the full map before its first backup: by then what drawing it has taught of costs is forgotten."""
_LOOK_EVERY_S, _LOOKS = 0.1, 30

Point = dict[str, Any]
Tell = Callable[[Point], None]


@dataclass(frozen=True)
class Setup:
    """An application: its map, its policy, and by what it is judged."""

    work: Work
    policy: str
    deadline_s: float = 70.0
    backend: str = "heap"
    interval: str = "250ms"
    more: Mapping[str, Any] = field(default_factory=dict)
    """Other settings, which win."""

    def settings(self) -> dict[str, Any]:
        """As the experiment takes them: what follows from the deadline is left to it."""
        return {
            **FROM_DEADLINE,
            "trim_log": None,
            "restart": None,
            "checkpoint": self.policy,
            "deadline": f"{self.deadline_s}s",
            "backend": self.backend,
            "interval": self.interval,
            "parallelism": HOSTS,
            "max_records": max(self.work.reports, self.work.until(0)),
            "heap_limit": max(4 << 30, 2 * self.work.state_bytes),
            **self.more,
        }


class Budget:
    """Seconds that are left of a phase."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._until = time.monotonic() + seconds

    def left_s(self) -> float:
        return max(0.0, self._until - time.monotonic())


class Map:
    """The application while it lives, with its map drawn and backed up once."""

    def __init__(self, experiment: Experiment, setup: Setup) -> None:
        self.experiment, self.setup = experiment, setup
        experiment.victims.shards_only = True  # a host without state costs nothing
        self.drawn = 0
        """The last epoch of drawing the map and backing it up: history begins behind it."""

    def draw(self, timeout_s: float) -> None:
        """Wait until every tile is there, and for a backup of it: the initial state of the paper."""
        self._until(self._full, timeout_s, "The map was not drawn")
        self.experiment.await_commit(self.experiment.last_epoch() + _SETTLED, timeout_s)
        asked_at = self.experiment.last_epoch()
        if self.setup.policy != "never":
            self.experiment.journal.ask_for_checkpoint()
            self._until(lambda: self._backed_up() >= asked_at, timeout_s, "The map was not backed up")
        self.drawn = self._backed_up()

    def _full(self) -> bool:
        plan = self.experiment.journal.plan(self.experiment.last_epoch())
        return plan is not None and int(plan.positions["reports"]) > self.setup.work.tiles

    def _until(self, happened: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
        """Look after every epoch: who waits for the next one is told if the application has ended."""
        until = time.monotonic() + timeout_s
        while not happened():
            if time.monotonic() >= until:
                raise StuckError(f"{otherwise} within {timeout_s:.0f} s.", detail=self.experiment.tails())
            self.experiment.await_commit(self.experiment.last_epoch() + 1, until - time.monotonic())

    def _backed_up(self) -> int:
        """The epoch of the newest backup; 0: there is none."""
        newest = Catalog(self.experiment.journal).newest(self.experiment.last_epoch())
        return 0 if newest is None else newest.epoch

    @property
    def epochs(self) -> int:
        """So many have passed since the map was drawn and backed up."""
        return self.experiment.last_epoch() - self.drawn

    def lose_host(self, share: float) -> Point:
        """Lose a host now: how long recovery takes, after which history, and what was foretold."""
        status, saved = read_status(self.experiment.directory), self._backed_up()
        forecast = None if status is None else status.forecasts.get(Fault.HOST.label)
        struck = self.experiment.strike(Fault.HOST, share)
        struck, took_s = self.experiment.await_felt_recovery(struck, RECOVERY_TIMEOUT_S)
        return {
            "epochs": struck.epoch - self.drawn,
            "history": struck.epoch - saved,
            "recovery_s": round(took_s, 3),
            "missed": took_s > self.setup.deadline_s,
            "feasible": status is None or status.feasible,
            **_foretold(forecast),
            "parts": self._parts(struck.awaited),
        }

    def _parts(self, epoch: int) -> dict[str, float]:
        """How the recovery was spent, as the run itself saw it: it writes that down a moment after the commit."""
        for _ in range(_LOOKS):
            for outcome in read_outcomes(self.experiment.directory):
                if outcome.epoch == epoch and outcome.by != "drill":
                    return {k: round(v, 3) for k, v in msgspec.structs.asdict(outcome.measured).items()}
            time.sleep(_LOOK_EVERY_S)
        return {}

    def facts(self) -> dict[str, Any]:
        """What the run came to in the end."""
        status = read_status(self.experiment.directory)
        epochs, backups = recorded(self.experiment.directory)
        later = [e for e in epochs if e.epoch > self.drawn]
        made = [b for b in backups if not b.failed]
        return {
            "epochs": self.epochs,
            "backups": len(made),
            "failed_backups": len(backups) - len(made),
            "backup_s": [round(b.took_s, 3) for b in made],
            "backup_mb": [round(b.new_bytes / 1e6, 1) for b in made],
            "worst_bound_s": max((e.bound_s for e in later), default=0.0),
            "paused_s": round(sum(e.paused_s for e in later), 3),
            "state_on_disk_bytes": 0 if status is None else status.state_bytes,
        }


def _foretold(forecast: Forecast | None) -> dict[str, float]:
    if forecast is None:
        return {}
    return {"estimate_s": round(forecast.estimate_s, 3), "bound_s": round(forecast.bound_s, 3)}


@contextlib.contextmanager
def living(setup: Setup, folder: Path, timeout_s: float) -> Iterator[Map]:
    """The application on a cluster of its own; nothing of either is left at the end."""
    began_s = time.monotonic()
    with (
        Cluster(folder / "cluster", workers=HOSTS, cores=CORES) as cluster,
        Experiment(
            cluster,
            str(APP),
            folder,
            settings=setup.settings(),
            environment=setup.work.environment(),
        ) as experiment,
    ):
        made = Map(experiment, setup)
        made.draw(timeout_s)
        say(f"  the map is drawn and backed up after {time.monotonic() - began_s:.0f} s, epoch {made.drawn}")
        yield made


def curve(there: Map, lengths: Sequence[int], budget: Budget, tell: Tell) -> str:
    """Lose a host at each length of history, counted in epochs since the map was drawn; says why it ended early."""
    for number, length in enumerate(sorted(lengths)):
        try:
            there.experiment.await_commit(there.drawn + length, budget.left_s())
        except StuckError:
            if budget.left_s() > 0:
                raise
            return f"epoch {length} was not reached within the phase's {budget.seconds:.0f} s"
        tell(_told(there, there.lose_host(number % HOSTS / HOSTS)))
    return ""


def trials(
    there: Map, count: int, pause_s: tuple[float, float], seed: int, budget: Budget, tell: Tell
) -> str:
    """Lose a host at random moments; says why it ended early."""
    chance = random.Random(seed)
    for number in range(count):
        pause, share = chance.uniform(*pause_s), chance.random()
        if budget.left_s() < pause:
            return f"{number} of {count} trials fit into the phase's {budget.seconds:.0f} s"
        time.sleep(pause)
        tell({"trial": number + 1, **_told(there, there.lose_host(share))})
    return ""


def _told(there: Map, point: Point) -> Point:
    foretold = f", {point['estimate_s']:.1f} s estimated" if "estimate_s" in point else ""
    late = " (too late)" if point["missed"] else ""
    say(
        f"  {there.setup.policy}: a host lost at epoch {point['epochs']}, history {point['history']}: "
        f"back in {point['recovery_s']:.1f} s{late}{foretold}"
    )
    return point


def first_line(error: BaseException) -> str:
    """What went wrong, in one line."""
    text = error.message if isinstance(error, HoldfastError) else str(error)
    return (text.splitlines() or [type(error).__name__])[0]
