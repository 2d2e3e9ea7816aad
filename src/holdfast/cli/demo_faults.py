"""The demo's run with faults: a cluster of processes, the vehicle map on it, an executor and then the driver killed.

    start -> run -> executor killed, back -> run -> driver killed, back -> run -> stop -> compare

The application is a process of its own under a supervisor, so what is told of it is what it leaves for anybody: its
status, and the JSON lines in its log. Whatever happens here, no process is left at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from holdfast.cli.demo_story import Hit, Story, Teller
from holdfast.cli.directory import DEAD, LIVING, process_of
from holdfast.cli.exit_codes import INTERRUPTED, TERMINATED
from holdfast.cli.loading import load
from holdfast.cli.noise import SparkNoise
from holdfast.config import resolve
from holdfast.faults.cluster import Cluster
from holdfast.faults.compare import Verdict, compare
from holdfast.faults.drill import FROM_DEADLINE, await_forecast, timeout_s
from holdfast.faults.experiment import Experiment, Struck
from holdfast.faults.kinds import Fault
from holdfast.log.journal import Journal
from holdfast.metrics import EpochFacts, Status, read_status
from holdfast.recovery.guard import DRILL

CONFIDENCE = 0.999
MAX_RECORDS = 50_000
"""Of an epoch: what waits after a fault is worked off in several."""
HOSTS, CORES = 2, 2
"""Of the cluster, all together."""
BEFORE_EXECUTOR, BEFORE_DRIVER, AFTER = 0.4, 0.35, 0.25
"""How the running time is shared out around the two faults."""
_LAST = 1.0
"""Among those whom a fault can strike, the last one: an executor that is not on the driver's address."""
_LOOK_EVERY_S = 0.1
_EPOCH = b'{"event":"epoch"'


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
    with _Signals() as signals, Watch(plan, story, teller):
        with contextlib.ExitStack() as running:
            experiment = _started(plan, story, running)
            # Entered last, so it comes first at the end: clearing up is not interrupted.
            running.callback(signals.ignore)
            last = _strike_twice(plan, story, experiment)
            story.say("stopping: the epoch under way is finished, and state is backed up")
            experiment.stop(last)
        signals.heed()
        story.say("comparing output and state with a run without faults, over the same plans")
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
        story.say(
            "this machine has no address 127.0.0.2, so the cluster has one host (sudo ifconfig lo0 alias 127.0.0.2)"
        )
    story.say(
        f"starting a Spark cluster: {hosts} host{'s' if hosts > 1 else ''}, each processes of this machine"
    )
    cluster = running.enter_context(Cluster(plan.home / "cluster", workers=hosts, cores=CORES // hosts))
    story.say(f"starting {plan.example.name} on it, under a supervisor, deadline {plan.deadline}")
    # A drill would tell the application of its faults; here it learns by itself, as in earnest.
    experiment = Experiment(
        cluster, str(plan.example), plan.home, settings=plan.settings(), environment={DRILL: ""}
    )
    running.enter_context(experiment)
    story.say("running")
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
    struck = experiment.strike(fault, _LAST)
    at_s = struck.at_s - story.began_s
    story.struck(Hit.of(fault, struck.victim, at_s, before.forecasts[fault.label], before.deadline_s))
    story.back(experiment.await_recovery(struck, timeout_s(before.deadline_s)))
    return struck


def _gather_state(directory: Path) -> None:
    """Link the hosts' state below the directory: all of them are this machine, and `holdfast state` looks there."""
    journal = Journal.at(directory)
    identity, commit = journal.identity(), journal.commit(journal.last_epoch())
    if identity is None or commit is None:
        return
    for uid, shards in commit.shards.items():
        for number, shard in enumerate(shards):
            root = shard.host.partition(":")[2]
            where = Path(identity.name) / uid / f"{number:05d}"
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

    def __exit__(self, *_: object) -> None:
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


class Watch:
    """Looks at the application from outside, several times a second, and lets the teller hear of it and of the story.

    All that is told is told by this thread.
    """

    def __init__(self, plan: Plan, story: Story, teller: Teller) -> None:
        self._directory, self._log = plan.directory, plan.home / "application.log"
        self._story, self._teller = story, teller
        self._read_bytes = 0
        self._epoch, self._earlier = 0, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="demo-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look_on(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S):
            self.look()
        self.look()

    def look(self) -> None:
        """Tell what is new."""
        for status, facts in self._epochs():
            self._hear(status, facts)
        status_now = read_status(self._directory)
        known = self._teller.seen.status
        if status_now is not None and (known is None or _differs(status_now := as_it_is(status_now), known)):
            self._hear(status_now, None)
        for event in self._story.news():
            self._teller.tell(event)

    def _epochs(self) -> Iterator[tuple[Status, EpochFacts]]:
        """The epochs that the log tells of since the last look. A line may have been cut off by a fault."""
        for line in self._new_lines():
            if not line.startswith(_EPOCH):
                continue
            with contextlib.suppress(msgspec.DecodeError):
                facts = msgspec.json.decode(line, type=EpochFacts)
                yield msgspec.json.decode(line, type=_WithStatus).status, facts

    def _new_lines(self) -> list[bytes]:
        try:
            with open(self._log, "rb") as file:
                file.seek(self._read_bytes)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        return whole.splitlines()

    def _hear(self, status: Status, facts: EpochFacts | None) -> None:
        self._teller.hear(self._continued(status), facts)

    def _continued(self, status: Status) -> Status:
        """A driver counts from its own start; the demo goes on counting where the one before stopped."""
        last = self._teller.seen.status
        if last is None:
            return status
        if status.generation != last.generation:
            self._earlier = last.records
        if not status.epoch:
            now = {
                f: getattr(status, f)
                for f in ("generation", "pid", "state", "message", "started_ms", "updated_ms")
            }
            return msgspec.structs.replace(last, **now)
        return msgspec.structs.replace(status, records=self._earlier + status.records)


class _WithStatus(msgspec.Struct):
    status: Status


def as_it_is(status: Status) -> Status:
    """A driver that was killed could not say so."""
    if status.state in LIVING and process_of(status) == DEAD:
        return msgspec.structs.replace(status, state="dead", message="")
    return status


def _differs(status: Status, known: Status) -> bool:
    """Whether a status says something new: it is written less often than epochs are told of."""
    if status.updated_ms < known.updated_ms:
        return False
    return (status.pid, status.state, status.message) != (known.pid, known.state, known.message)
