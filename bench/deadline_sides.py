"""Our side of `bench deadline`, in a process of its own: `python -m bench.deadline_sides --folder F …`.

A Python function with state for each key, on local Spark, with backups as asked. Prints one JSON line. The
directory stays in the folder: its trace and what was learned are what the rest is computed from. With `--turns 9`
it ends after nine turns with backups as asked and ten without.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

import holdfast as hf
from bench import pipelines
from bench.ours import PARALLELISM
from holdfast.checkpoint.coordinator import Coordinator
from holdfast.checkpoint.policy import EveryEpochs, Never, Policy, parse_policy
from holdfast.engine.handle import Handle, start
from holdfast.faults.drill import recorded
from holdfast.faults.kinds import Fault
from holdfast.metrics import EpochFacts
from holdfast.recovery.memory import MEMORY

WARM_EPOCHS = 4
"""Two fill the state, two more settle."""
FIRST_EPOCHS = 8
"""Of the first turn without backups; later ones are as long as the turn with backups before them."""


class Turns:
    """Switches backups on and off in turns within a run, and counts how fast each turn was.

    A turn with backups begins right behind one that is complete, and lasts until the next, made as the deadline asks, is:
    it pays for what backups cost, as often as they come. The turn without any that follows has as many epochs. Between
    that and the next stands a backup that belongs to nobody, so that history which grew without backups makes none due
    sooner; its epochs count for neither.
    """

    def __init__(self, wanted: int, first_epochs: int, policy: Policy) -> None:
        self._left, self._policy = 2 * wanted + 1, policy
        self._epochs = first_epochs
        """Of a turn without backups."""
        self._phase, self._count, self._newest = WARM, 0, 0
        self._last_s = 0.0
        self.found: list[tuple[bool, int, float]] = []
        """For each: whether there were backups, records, seconds."""
        self.paused_s = 0.0
        """How long intake was paused in turns with backups: in no turn's seconds, and charged to all of them."""
        self.epochs: list[dict[str, Any]] = []
        """Each epoch of a turn: whether backups were on and one under way, and what everybody took of the processors."""
        self._beside = False
        self._spent = Spent()

    @property
    def over(self) -> bool:
        """Whether all turns have been."""
        return self._left == 0

    def paused(self, seconds: float) -> None:
        """Intake was paused."""
        self._last_s += seconds
        if self._phase == ON:
            self.paused_s += seconds

    def ended(self, coordinator: Coordinator, records: int) -> None:
        """An epoch has ended."""
        now_s = time.perf_counter()
        pending = coordinator.pending_epoch is not None
        spent = self._spent.since_last()
        self._count += 1
        if self._phase in (ON, OFF) and not self.over:
            on, read, seconds = self.found[-1]
            took_s = now_s - self._last_s
            self.found[-1] = on, read + records, seconds + took_s
            beside = self._beside or pending
            self.epochs.append({"on": on, "beside": beside, "records": records, "s": took_s} | spent)
        self._turn(coordinator, pending, coordinator.newest_epoch > self._newest)
        self._beside, self._last_s = pending, now_s

    def _turn(self, coordinator: Coordinator, pending: bool, made: bool) -> None:
        """Go on to the next turn if this one is through; `made`: a backup has been completed since it began."""
        through = made and not pending
        if self._phase == WARM and self._count >= WARM_EPOCHS:
            self._begin(OFF, Never(), coordinator)
        elif self._phase == OFF and self._count >= self._epochs and not self.over:
            self._left -= 1
            self._begin(ANEW, EveryEpochs(1), coordinator)
        elif self._phase == ANEW and through:
            self._begin(ON, self._policy, coordinator)
        elif self._phase == ANEW and (pending or made):
            coordinator._policy = Never()
        elif self._phase == ON and through:
            self._left, self._epochs = self._left - 1, self._count
            self._begin(OFF, Never(), coordinator)
        elif self._phase == ON and made:
            coordinator._policy = Never()

    def _begin(self, phase: str, policy: Policy, coordinator: Coordinator) -> None:
        self._phase, self._count, self._newest = phase, 0, coordinator.newest_epoch
        coordinator._policy = policy
        if phase in (ON, OFF) and not self.over:
            self.found.append((phase == ON, 0, 0.0))


WARM, OFF, ANEW, ON = "warm", "off", "anew", "on"


class Spent:
    """Seconds of the processors, by who took them, and those in which none could be had or a disk was waited for."""

    def __init__(self) -> None:
        self._before: dict[Any, float] = {}

    def since_last(self) -> dict[str, float]:
        """Since the last call."""
        before, self._before = self._before, self._now()
        spent: dict[str, float] = {}
        for key, seconds in self._before.items():
            who = key[0]
            spent[who] = spent.get(who, 0.0) + seconds - before.get(key, 0.0)
        return {who: round(seconds, 3) for who, seconds in spent.items()}

    def _now(self) -> dict[Any, float]:
        found: dict[Any, float] = {}
        for process in (own := psutil.Process(), *own.children(recursive=True)):
            with contextlib.suppress(psutil.Error), process.oneshot():
                who = "driver" if process == own else _role(process)
                times = process.cpu_times()
                found[who, process.pid] = times.user + times.system
        machine = psutil.cpu_times()
        found["stolen", 0], found["disk", 0] = machine.steal, machine.iowait
        return found


def _role(process: psutil.Process) -> str:
    if process.name() == "java":
        return "java"
    return "uploader" if process.nice() >= 5 else "workers"  # uploads are nice to shards


def measure(
    folder: Path, keys: int, records: int, epochs: int, faults: int, settings: dict[str, Any], turns: int = 0
) -> dict[str, Any]:
    """Run to the end: records a second by the wall clock, what the guard cost, and the backups.

    `faults`: so many are forecast; 0: those of local mode. `turns`: so many with backups, and one more without; at most as
    many epochs as there are.
    """
    source = pipelines.Growing(keys, fill_epoch=min(keys, 500_000), epoch=records, epochs=epochs)
    # Small files are not merged: that takes a core for seconds every hundred epochs, in whichever turn it comes.
    pipeline = pipelines.keyed_python(source, hf.parquet(str(folder / "out"), merge=False))
    ended: list[tuple[float, EpochFacts]] = []
    taking = Turns(turns, FIRST_EPOCHS, parse_policy(settings["checkpoint"])) if turns else None

    def note(status: Any, facts: EpochFacts | None) -> None:
        if facts is not None:
            ended.append((time.perf_counter(), facts))
            if taking is not None:
                assert handle._driver is not None
                taking.ended(handle._driver._coordinator, facts.records_in)
                if taking.over:
                    handle.ask_to_stop()

    chosen = {
        "dir": str(folder / "dir"),
        "parallelism": PARALLELISM,
        "master": "local[2]",
        "checkpoint_on_stop": False,
        "drain": True,
        "heap_limit": "16GB",
        "max_records": max(records, min(keys, 500_000)),
        **settings,
    }
    handle = start(pipeline, spark=None, settings=chosen, listener=note)
    assert handle.guard is not None
    if taking is not None:
        handle.guard.paused = telling_of(handle.guard.paused, taking)  # type: ignore[method-assign]
    if faults:
        handle.guard.faults = list(Fault)[:faults]
    telling = timed_forecasts(handle)
    while not handle.wait(0.2):
        pass
    seconds = ended[-1][0] - ended[WARM_EPOCHS - 1][0]
    epochs_s = sum(f.latency_ms for _, f in ended) / 1e3
    recorded_epochs, backups = recorded(folder / "dir")
    made = [b for b in backups if not b.failed]
    return {
        "records_per_s": round(sum(f.records_in for _, f in ended[WARM_EPOCHS:]) / seconds),
        "seconds": round(seconds, 2),
        "epochs": len(ended),
        "epochs_s": round(epochs_s, 3),
        "guard_s": round(handle.guard.cost_s, 5),
        "forecasts_s": round(telling[0], 5),
        "paused_s": round(sum(e.paused_s for e in recorded_epochs), 3),
        "worst_bound_s": max(e.bound_s for e in recorded_epochs),
        "backups": len(made),
        "failed_backups": len(backups) - len(made),
        "backups_apart_s": [round((b.at_ms - a.at_ms) / 1e3, 1) for a, b in itertools.pairwise(made)],
        "backup_s": [round(b.took_s, 3) for b in made],
        "backup_mb": [round(b.new_bytes / 1e6, 1) for b in made],
        "turns": [] if taking is None else [(on, round(n / s)) for on, n, s in taking.found if s],
        "on_s": [] if taking is None else [round(s, 2) for on, _, s in taking.found if on],
        "turns_paused_s": 0.0 if taking is None else round(taking.paused_s, 3),
        "turn_epochs": [] if taking is None else taking.epochs,
    }


def telling_of(paused: Callable[[float], None], turns: Turns) -> Callable[[float], None]:
    """Tell the turns of a pause as well."""

    def both(seconds: float) -> None:
        paused(seconds)
        turns.paused(seconds)

    return both


def timed_forecasts(handle: Handle) -> list[float]:
    """What the forecasts for the status cost, beside what the guard counts itself."""
    spent, forecast = [0.0], handle._forecast

    def timed() -> None:
        started = time.perf_counter()
        forecast()
        spent[0] += time.perf_counter() - started

    handle._forecast = timed  # type: ignore[method-assign]
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--records", type=int, default=500_000)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--turns", type=int, default=0)
    parser.add_argument("--memory", type=Path, help="what an earlier run has learned")
    parser.add_argument("--settings", type=json.loads, default={})
    chosen = parser.parse_args()
    if chosen.memory is not None:
        (chosen.folder / "dir").mkdir(parents=True)
        shutil.copyfile(chosen.memory, chosen.folder / "dir" / MEMORY)
    sizes = (chosen.keys, chosen.records, chosen.epochs, chosen.faults)
    found = measure(chosen.folder, *sizes, chosen.settings, chosen.turns)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
