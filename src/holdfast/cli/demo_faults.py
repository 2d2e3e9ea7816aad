"""The demo's run with faults: a cluster of processes, the vehicle map on it, an executor and then the driver killed.

    start -> run -> executor killed, back -> run -> driver killed, back -> run -> stop -> compare

The application is a process of its own under a supervisor; `demo_watch` looks at it. Whatever happens here, no process is
left at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from holdfast.cli.demo_story import Hit, Story, Teller
from holdfast.cli.demo_watch import Watch
from holdfast.cli.exit_codes import INTERRUPTED, TERMINATED
from holdfast.cli.loading import load
from holdfast.cli.noise import SparkNoise
from holdfast.config import resolve
from holdfast.faults.cluster import Cluster
from holdfast.faults.compare import Verdict, compare
from holdfast.faults.drill import FROM_DEADLINE, await_forecast, outcome_of, timeout_s
from holdfast.faults.experiment import Experiment, Struck
from holdfast.faults.kinds import Fault
from holdfast.log.journal import Journal
from holdfast.recovery.guard import DRILL
from holdfast.recovery.memory import write_outcome

CONFIDENCE = 0.999
MAX_RECORDS = 50_000
"""Of an epoch: what waits after a fault is worked off in several."""
HOSTS, CORES = 2, 2
"""Of the cluster, all together."""
BEFORE_EXECUTOR, BEFORE_DRIVER, AFTER = 0.4, 0.35, 0.25
"""How the running time is shared out around the two faults."""
_PLAN_TIMEOUT_S = 5.0
_LOOK_EVERY_S = 0.005
_LAST = 1.0
"""Among those whom a fault can strike, the last one: an executor that is not on the driver's address."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is going to be shown."""

    example: Path
    home: Path
    seconds: float
    """How long it runs, besides recoveries."""
    deadline: str

    @property
    def directory(self) -> Path:
        return self.home / "dir"

    def settings(self) -> dict[str, Any]:
        """Of the application; what faults are noticed by follows from the deadline, as for anybody."""
        return {
            "deadline": self.deadline,
            "confidence": CONFIDENCE,
            "checkpoint": "deadline",
            "on_infeasible": "warn",
            "parallelism": 2,
            "max_records": MAX_RECORDS,
            **FROM_DEADLINE,
        }


def check(plan: Plan) -> None:
    """Say what is wrong with settings or pipeline before a cluster is started."""
    resolve(plan.settings())
    load(str(plan.example))


def show(plan: Plan, story: Story, teller: Teller) -> Verdict:
    """Do it all; gives what a comparison with a run without faults found."""
    with _Signals() as signals, Watch(plan.home, story, teller):
        with contextlib.ExitStack() as running:
            experiment = _started(plan, story, running)
            # Entered last, so it comes first at the end: clearing up is not interrupted.
            running.callback(signals.ignore)
            last = _strike_twice(plan, story, experiment)
            story.say("stopping cleanly")
            experiment.stop(last)
        signals.heed()
        story.say("comparing with a run without faults")
        verdict = _compared(plan)
        story.say(f"{verdict.lost} lost, {verdict.doubled} doubled, {verdict.different_states} states differ")
    if verdict.exact:
        shutil.rmtree(plan.home / "runner", ignore_errors=True)
    _gather_state(plan.directory)
    return verdict


def _compared(plan: Plan) -> Verdict:
    """Arrow's complaints about buffers are kept from the view, as Spark's are."""
    noise = SparkNoise(plan.directory)
    noise.begin()
    try:
        return compare(
            lambda: load(str(plan.example)), plan.directory, plan.home / "out", plan.home / "runner"
        )
    finally:
        noise.end(show=False)


def _started(plan: Plan, story: Story, running: contextlib.ExitStack) -> Experiment:
    hosts = HOSTS if _is_ours("127.0.0.2") else 1
    if hosts < HOSTS:
        story.say("one host only: there is no 127.0.0.2")
    story.say(f"starting a Spark cluster of {hosts} host{'s' if hosts > 1 else ''}")
    # Absolute: executors have working folders of their own, and would keep state in there.
    folder = plan.home.absolute() / "cluster"
    cluster = running.enter_context(Cluster(folder, workers=hosts, cores=CORES // hosts))
    story.say(f"starting {plan.example.name}, supervised")
    # We know which fault it was and when it came, and tell the application so that it learns from it.
    experiment = Experiment(
        cluster, str(plan.example), plan.home, settings=plan.settings(), environment={DRILL: "1"}
    )
    running.enter_context(experiment)
    story.say(f"running; the deadline is {plan.deadline}")
    return experiment


def _is_ours(address: str) -> bool:
    """Whether processes of this machine can listen there: on macOS only 127.0.0.1 is set up."""
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _strike_twice(plan: Plan, story: Story, experiment: Experiment) -> Struck:
    time.sleep(BEFORE_EXECUTOR * plan.seconds)
    _strike(Fault.EXECUTOR_KILL, story, experiment)
    time.sleep(BEFORE_DRIVER * plan.seconds)
    last = _strike(Fault.DRIVER_KILL, story, experiment)
    time.sleep(AFTER * plan.seconds)
    return last


def _strike(fault: Fault, story: Story, experiment: Experiment) -> Struck:
    before = await_forecast(experiment, fault)
    _await_plan(experiment)
    struck = experiment.strike(fault, _LAST)
    forecast, deadline_s = before.forecasts[fault.label], before.deadline_s
    story.struck(Hit.of(fault, struck.victim, struck.at_s - story.began_s, forecast, deadline_s))
    struck, took_s = experiment.await_felt_recovery(struck, timeout_s(deadline_s))
    story.back(took_s)
    write_outcome(experiment.directory, outcome_of(struck, took_s, forecast, deadline_s, CONFIDENCE))
    return struck


def _await_plan(experiment: Experiment) -> None:
    """Wait until an epoch has just begun: a fault in its midst is the dear one, since it takes the epoch with it.

    Recovery ends with the commit of the last epoch planned before the fault. An epoch that was all but done would be
    committed a moment later, and the time until the next one would not be shown.
    """
    planned, until = experiment.last_planned(), time.monotonic() + _PLAN_TIMEOUT_S
    while experiment.last_planned() == planned and time.monotonic() < until:
        time.sleep(_LOOK_EVERY_S)


def _gather_state(directory: Path) -> None:
    """Link the hosts' state below the directory: all of them are this machine, and `holdfast state` looks there."""
    journal = Journal.at(directory)
    identity, commit = journal.identity(), journal.commit(journal.last_epoch())
    if identity is None or commit is None:
        return
    for uid, shards in commit.shards.items():
        for number, shard in enumerate(shards):
            root = shard.host.partition(":")[2]
            where = Path(identity.home) / uid / f"{number:05d}"
            link = directory / "state" / where
            if root and not link.exists():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(Path(root) / where)


class _Signals:
    """Ctrl-C, SIGTERM and a terminal that closes unwind once; what follows is clearing up, and is not interrupted."""

    _NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __enter__(self) -> _Signals:
        self._before = {number: signal.getsignal(number) for number in self._NUMBERS}
        self.heed()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is SystemExit:
            # Who presses Ctrl-C again is not to disturb the rest of the way out.
            return
        for number, before in self._before.items():
            signal.signal(number, before)

    def heed(self) -> None:
        for number in self._NUMBERS:
            signal.signal(number, self._unwind)

    def ignore(self) -> None:
        for number in self._NUMBERS:
            signal.signal(number, signal.SIG_IGN)

    def _unwind(self, number: int, frame: FrameType | None) -> None:
        self.ignore()
        sys.exit(INTERRUPTED if number == signal.SIGINT else TERMINATED)
