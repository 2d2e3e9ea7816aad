"""The supervisor's loop: start the driver, listen to its beats, and when it has ended decide about another life.

::

    start ──> watch ──ended, or silent and killed──> nothing of it left ──> decide ──give up──> its exit code
      ^                                                                        |
      └───────────────────────────── wait ──────────────restart────────────────┘

What can happen to the supervisor itself:

- SIGINT and SIGTERM are passed on to the child as SIGTERM: it finishes its epoch, and its exit code is ours. A second one
  kills everything. Between two lives there is nobody to wait for: we end with the last child's code.
- SIGKILL can't be passed on. The child then goes on without a supervisor (see `heartbeat`), and a new one
  can't start beside it unless it is told to `--take-over`.

A child that a signal killed, ours for its silence included, gives the exit code 128 + signal, as in a shell.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import msgspec

from holdfast.errors import ConfigError
from holdfast.metrics import Status, read_status
from holdfast.supervise.heartbeat import EVERY_VARIABLE, FD_VARIABLE, FELL, RESTARTS, SUPERVISED, beat_every_s
from holdfast.supervise.processes import kill_everything, let_everything_end, start
from holdfast.supervise.strategies import (
    DONE,
    MOST_FAILURES,
    End,
    Exponential,
    GiveUp,
    Restart,
    Strategy,
    decide,
    delays_s,
)

FILE = "supervisor.json"
START_TIMEOUT_S = 30.0
"""How long a child may take to its first beat, if that is longer than its time-out: imports come before it."""
GRACE_S = 5.0
"""How long processes of a child that ended by itself may take to follow it."""
FIRST_LIFE_ONLY = ("HOLDFAST_CRASH_AT", "HOLDFAST_FREEZE_AT")
"""Faults that tests ask for: a later life that had them too would never get past them."""
_LOOK_EVERY_S = 0.1
_BEATS_AT_ONCE = 4096


class Supervision(msgspec.Struct, frozen=True):
    """What a directory tells of its supervisor. It stays there after its end: ask whether `pid` lives."""

    pid: int
    host: str
    started_ms: int
    restarts: int
    child_pid: int | None


def read_supervision(directory: Path) -> Supervision | None:
    """The supervisor that a directory has or had last."""
    try:
        return msgspec.json.decode((directory / FILE).read_bytes(), type=Supervision)
    except FileNotFoundError:
        return None


@dataclass(frozen=True)
class Restarting:
    """There will be another life."""

    end: End
    number: int
    after_s: float

    def __str__(self) -> str:
        return f"{_what_happened(self.end)}; restart {self.number} in {self.after_s:g} s."

    def facts(self) -> dict[str, Any]:
        """The event as a JSON line has it."""
        return {"event": "restart", "restart": self.number, "after_s": self.after_s, **_facts(self.end)}


@dataclass(frozen=True)
class GivingUp:
    """There will be no other life, though the last one failed."""

    end: End
    reason: str
    restarts: int

    def __str__(self) -> str:
        counted = f"{self.restarts} restart{'' if self.restarts == 1 else 's'}"
        return f"{_what_happened(self.end)}; not restarted: {self.reason} ({counted} before)."

    def facts(self) -> dict[str, Any]:
        """The event as a JSON line has it."""
        return {"event": "give_up", "reason": self.reason, "restarts": self.restarts, **_facts(self.end)}


Event: TypeAlias = Restarting | GivingUp


def _what_happened(end: End) -> str:
    how = f"exit code {end.exit_code}"
    if end.exit_code < 0:
        how = f"killed by {_signal_name(-end.exit_code)}"
    if end.silent:
        how = f"silent for {end.silent_s:.1f} s and killed"
    where = f"after epoch {end.epoch}" if end.epoch else "before the first epoch"
    told = end.error.strip().splitlines()
    return f"supervisor: {how} {where}{f': {told[0]}' if told else ''}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _facts(end: End) -> dict[str, Any]:
    return {
        "exit_code": exit_code_of(end),
        "signal": _signal_name(-end.exit_code) if end.exit_code < 0 else None,
        "silent_s": round(end.silent_s, 3) if end.silent else None,
        "epoch": end.epoch,
        "error": end.error or None,
    }


def exit_code_of(end: End) -> int:
    """What a supervisor ends with whose last child ended so."""
    return end.exit_code if end.exit_code >= 0 else 128 - end.exit_code


def child_command(arguments: Sequence[str], without: Sequence[str]) -> tuple[str, ...]:
    """The command line of a child: ours, without some of its flags.

    >>> child_command(["run", "app.py", "--supervise"], without=["--supervise"])[1:]
    ('-m', 'holdfast.cli', 'run', 'app.py')
    """
    kept = (argument for argument in arguments if argument not in without)
    return (sys.executable, "-m", "holdfast.cli", *kept)


def _say_nothing(event: Event) -> None:
    return


class Supervisor:
    """Keeps a command alive that leaves its status in a directory and beats (`heartbeat.start_heartbeat`).

    Args:
        command: of the first life.
        later: of all lives after it, where it is another one.
        directory: where the child leaves its status, and we leave `supervisor.json`.
        strategy: whether and when there is another life.
        timeout_s: a child that is silent for so long is killed and replaced.
        start_timeout_s: how long it may take to its first beat, if that is longer.
        later_environment: variables that lives after the first have besides ours.
        tell: hears of every restart, and of giving up.
    """

    def __init__(
        self,
        command: Sequence[str],
        directory: Path,
        *,
        later: Sequence[str] | None = None,
        strategy: Strategy | None = None,
        timeout_s: float = 30.0,
        start_timeout_s: float = START_TIMEOUT_S,
        later_environment: Mapping[str, str] | None = None,
        tell: Callable[[Event], None] = _say_nothing,
    ) -> None:
        if timeout_s <= 0:
            raise ConfigError(
                "driver_timeout must be longer than nothing.", remedy='Write driver_timeout = "30s".'
            )
        self._first, self._later = tuple(command), tuple(command if later is None else later)
        self._directory, self._tell = directory, tell
        self._strategy = strategy or Exponential()
        self._timeout_s, self._start_timeout_s = timeout_s, max(timeout_s, start_timeout_s)
        self._later_environment = dict(later_environment or {})
        # One more than a strategy may count: the end that passes its limit.
        self._history: deque[End] = deque(maxlen=MOST_FAILURES + 1)
        self._started_ms = int(time.time() * 1000)
        self._asked = _Asked()
        self._waited_s = 0.0
        self.restarts = 0

    def run(self) -> int:
        """Supervise until the child is done, or there is no other life for it; gives the exit code."""
        with self._asked.by_signals():
            while True:
                end = self._live()
                self._history.append(end)
                after_s = self._another_life(end)
                if after_s is None or self._asked.within(after_s):
                    return exit_code_of(end)

    def _another_life(self, end: End) -> float | None:
        """The delay before the next life; None if there is none."""
        if end.exit_code == DONE:
            return None
        decision: Restart | GiveUp = GiveUp("it was asked to stop")
        if not self._asked.times:
            decision = decide(list(self._history), self._strategy, time.monotonic())
        if isinstance(decision, GiveUp):
            self._tell(GivingUp(end, decision.reason, self.restarts))
            return None
        self.restarts += 1
        self._tell(Restarting(end, self.restarts, decision.after_s))
        self._waited_s = decision.after_s
        return decision.after_s

    def _live(self) -> End:
        """One life, from its start until nothing of it is left."""
        life = self._start()
        self._write(life.process.pid)
        silent_s = self._watch(life)
        if life.process.wait() >= 0:
            let_everything_end(life.process, GRACE_S)
        else:
            kill_everything(life.process)
        life.close()
        self._write(None)
        return life.end(_status(self._directory), silent_s)

    def _start(self) -> _Life:
        beats, beat = os.pipe()
        delays = delays_s(self._history, self._strategy, time.monotonic())
        timing = {
            FD_VARIABLE: str(beat),
            EVERY_VARIABLE: str(beat_every_s(self._timeout_s)),
            SUPERVISED: str(self._timeout_s),
            RESTARTS: " ".join(f"{s:g}" for s in (*delays, self._waited_s)),
        }
        try:
            command = self._later if self.restarts else self._first
            return _Life(start(command, self._environment() | timing, [beat]), beats)
        except BaseException:
            os.close(beats)
            raise
        finally:
            # The child must hold the only one, so that the pipe ends with it.
            os.close(beat)

    def _environment(self) -> dict[str, str]:
        if not self.restarts:
            return dict(os.environ)
        kept = {name: value for name, value in os.environ.items() if name not in FIRST_LIFE_ONLY}
        return kept | self._later_environment | {FELL: _fell(self._history[-1])}

    def _watch(self, life: _Life) -> float:
        """Returns when the child has ended; if we killed it for its silence, how long that was."""
        passed_on = 0
        while life.process.poll() is None:
            if life.beats_again(self._asked.fd):
                life.look(_status(self._directory))
            if self._asked.times > passed_on:
                passed_on = self._asked.times
                self._pass_on(life, again=passed_on > 1)
            silent_s = life.silent_s()
            if silent_s > (self._timeout_s if life.beaten else self._start_timeout_s):
                kill_everything(life.process)
                return silent_s
        return 0.0

    def _pass_on(self, life: _Life, *, again: bool) -> None:
        self._asked.heard()
        if again:
            kill_everything(life.process)
        else:
            life.process.send_signal(signal.SIGTERM)

    def _write(self, child_pid: int | None) -> None:
        """Tell of ourselves. It is for people, so a disk that does not take it is no reason to end."""
        told = Supervision(os.getpid(), socket.gethostname(), self._started_ms, self.restarts, child_pid)
        with contextlib.suppress(OSError):
            self._directory.mkdir(parents=True, exist_ok=True)
            temporary = self._directory / f".supervisor.{os.getpid()}"
            temporary.write_bytes(msgspec.json.encode(told))
            os.replace(temporary, self._directory / FILE)


class _Life:
    """A child that lives: its process, its beats, and how well it does."""

    def __init__(self, process: subprocess.Popen[bytes], beats: int) -> None:
        self.process = process
        self.beaten = False
        self._beats: int | None = beats
        self._heard_s = time.monotonic()
        self._first_epoch: int | None = None
        self._healthy_since_s: float | None = None

    def beats_again(self, wake: int) -> bool:
        """Wait a moment for a beat, for the end of the pipe, or to be woken; True if it was a beat."""
        waiting = [wake] if self._beats is None else [wake, self._beats]
        ready, _, _ = select.select(waiting, [], [], _LOOK_EVERY_S)
        if self._beats is None or self._beats not in ready:
            return False
        if not os.read(self._beats, _BEATS_AT_ONCE):
            # Most likely it is about to end; if it only closed the pipe, its silence will tell.
            self.close()
            return False
        self.beaten, self._heard_s = True, time.monotonic()
        return True

    def look(self, status: Status | None) -> None:
        """Healthy is from the first epoch on that is newer than the one this life was first seen at."""
        if status is None or status.pid != self.process.pid:
            return
        if self._first_epoch is None:
            self._first_epoch = status.epoch
        if status.epoch > self._first_epoch and self._healthy_since_s is None:
            self._healthy_since_s = self._heard_s

    def silent_s(self) -> float:
        """How long ago the last beat was, or the start."""
        return time.monotonic() - self._heard_s

    def end(self, status: Status | None, silent_s: float) -> End:
        """How this life ended. An error in the status counts only if this life wrote it."""
        healthy_s = 0.0 if self._healthy_since_s is None else self._heard_s - self._healthy_since_s
        return End(
            at_s=time.monotonic(),
            exit_code=self.process.wait(),
            epoch=status.epoch if status is not None else 0,
            error=status.error if status is not None and status.pid == self.process.pid else "",
            silent_s=silent_s,
            healthy_s=healthy_s,
        )

    def close(self) -> None:
        """Close the pipe. The second call does nothing."""
        if self._beats is not None:
            os.close(self._beats)
            self._beats = None


def _fell(end: End) -> str:
    """When a life ended, for the next one: a silent one at its last beat."""
    ago_s = time.monotonic() - end.at_s + end.silent_s
    return f"{int((time.time() - ago_s) * 1000)} {'silent' if end.silent else 'killed'}"


def _status(directory: Path) -> Status | None:
    """The status, if there is one that can be read: a supervisor does not fall over a damaged file."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return read_status(directory)
    return None


class _Asked:
    """How often we were asked to stop, and a file descriptor that can be read when we were just now.

    Handlers only count and wake: an `Event` set in a handler can deadlock with the wait that it interrupts.
    """

    def __init__(self) -> None:
        self.times = 0
        self.fd, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self.fd, False)

    def heard(self) -> None:
        """Make the descriptor wait for the next time."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, _BEATS_AT_ONCE)

    def within(self, seconds: float) -> bool:
        """Wait so long; True at once if we are asked in the meantime."""
        ready, _, _ = select.select([self.fd], [], [], seconds)
        return bool(ready)

    @contextlib.contextmanager
    def by_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM ask, until the end of the context; only the main thread can hear them."""
        main = threading.current_thread() is threading.main_thread()
        heard = (signal.SIGINT, signal.SIGTERM) if main else ()
        before = {number: signal.signal(number, self._ask) for number in heard}
        try:
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, old)
            os.close(self.fd)
            os.close(self._wake)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.times += 1
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"!")
