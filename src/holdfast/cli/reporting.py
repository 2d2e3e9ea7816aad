"""Three ways to tell of a run: a live view, plain lines, JSON lines. `reporter_for` picks one.

All hear the same (`engine.handle` calls `hear` from the driver's thread) and none can disturb the run: a
reader that has gone makes them silent.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live

from holdfast.cli.output import Unbroken, amount, clock, console, millis, moment, print_json, size
from holdfast.cli.view import run_view
from holdfast.cli.watching import Seen, set_aside
from holdfast.errors import HoldfastError
from holdfast.metrics import EpochFacts, Status, Watermark

LINE_EVERY_S = 0.5
FRAMES_PER_S = 5


class Reporter:
    """Hears of a run and tells of it. Used as a context, so that a terminal is given back whatever happens."""

    owns_output = True
    """Whether nobody else may write to standard output beside it."""

    def __init__(self) -> None:
        self.seen = Seen()
        self._said = ""

    def _news(self, status: Status) -> str:
        """What the engine says, where it was not said before."""
        known, self._said = self._said, status.message
        return "" if status.message == known else status.message

    def hear(self, status: Status, facts: EpochFacts | None) -> None:
        """Called by the engine: a status, and the facts where an epoch was done."""
        self.seen.hear(status, facts)

    def end(self, error: BaseException | None) -> None:
        """Called once, after the run."""

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return


class JsonLines(Reporter):
    """One object a line: an epoch each, and the end. Messages go to standard error.

    `{"event": "epoch", …EpochFacts, "latency_ms": …, "status": {…Status}}`
    `{"event": "end", "state": …, "exit_code": …, "error": {…} or null, "epochs": …, "status": {…}}`
    """

    def hear(self, status: Status, facts: EpochFacts | None) -> None:
        super().hear(status, facts)
        if facts is not None:
            print_json(
                {
                    "event": "epoch",
                    **msgspec.to_builtins(facts),
                    "latency_ms": facts.latency_ms,
                    "status": status,
                }
            )
        elif message := self._news(status):
            print(message, file=sys.stderr)

    def end(self, error: BaseException | None) -> None:
        status = self.seen.status
        print_json(
            {
                "event": "end",
                "state": "failed" if error else "stopped",
                "exit_code": getattr(error, "exit_code", 1) if error else 0,
                "error": _facts_of(error),
                "epochs": self.seen.epochs,
                "seconds": round(self.seen.uptime_s, 3),
                "status": status,
            }
        )


def _facts_of(error: BaseException | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return (
        error.facts()
        if isinstance(error, HoldfastError)
        else {"type": type(error).__name__, "message": str(error)}
    )


class PlainLines(Reporter):
    """A line an epoch, at most about two a second: epochs in between are summed up in the next line."""

    owns_output = False

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now_s = now_s
        self._out = Unbroken(sys.stdout)
        self._told_s = float("-inf")
        self._waiting: list[EpochFacts] = []
        self._lock = threading.Lock()

    def hear(self, status: Status, facts: EpochFacts | None) -> None:
        super().hear(status, facts)
        with self._lock:
            if facts is None:
                if message := self._news(status):
                    self._print(message)
                return
            self._waiting.append(facts)
            if self._now_s() - self._told_s >= LINE_EVERY_S:
                self._tell(status)

    def _tell(self, status: Status) -> None:
        self._told_s = self._now_s()
        self._print(epoch_line(self._waiting, status))
        self._waiting = []

    def end(self, error: BaseException | None) -> None:
        status = self.seen.status
        with self._lock:
            if self._waiting and status is not None:
                self._tell(status)
            if status is not None:
                self._print(closing_line(self.seen, status, error))

    def _print(self, text: str) -> None:
        self._out.write(f"{time.strftime('%H:%M:%S')}  {text}\n")
        self._out.flush()


def epoch_line(epochs: Sequence[EpochFacts], status: Status) -> str:
    """Some epochs that followed each other, as one line."""
    first, last = epochs[0], epochs[-1]
    name = f"epoch {last.epoch}" if first is last else f"epochs {first.epoch}-{last.epoch}"
    records = sum(e.records_in for e in epochs)
    slowest = max(e.latency_ms for e in epochs)
    bad = sum(sum(e.bad_records.values()) for e in epochs)
    parts = [
        f"{name:<16}",
        f"{amount(records):>10} records",
        f"{amount(status.records_per_s):>9}/s",
        f"{millis(slowest):>7}",
        f"backlog {amount(last.backlog)}",
        f"state {amount(last.state_keys)} keys {size(last.state_bytes)}",
    ]
    aside = [sum(counts) for counts in zip(*(_aside(e) for e in epochs), strict=True)]
    return "  ".join([*parts, *_behind(last), *_named(bad, *aside)])


def _behind(facts: EpochFacts) -> list[str]:
    """How far event time is behind where it is furthest, and who holds it; nothing where there is none, or it has ended."""
    going = {uid: one for uid, one in facts.watermarks.items() if not one.ended}
    unknown = next(((uid, one) for uid, one in going.items() if one.lag_ms is None), None)
    if unknown is not None:
        return [f"event time not known yet{_holder(*unknown)}"]
    if not going:
        return []
    uid, last = max(going.items(), key=lambda found: found[1].lag_ms or 0)
    if last.ms is None:
        return []
    behind = clock(max(0, last.lag_ms or 0) / 1000)
    return [f"event time {moment(last.ms)}, {behind} behind{_holder(uid, last)}"]


def _holder(uid: str, one: Watermark) -> str:
    return f" ({uid}: {one.split})" if one.split else ""


def _aside(told: EpochFacts | Status) -> list[int]:
    return [count for _, count in set_aside(told)]


def _named(*counts: int) -> list[str]:
    """Bad, late, untimed and unseen records, where there are any."""
    names = ("bad", "late", "untimed", "unseen")
    return [f"{amount(n)} {name} records" for name, n in zip(names, counts, strict=True) if n]


def closing_line(seen: Seen, status: Status, error: BaseException | None) -> str:
    """How it ended."""
    how = "failed" if error is not None else "stopped"
    where = f"after epoch {status.epoch}" if status.epoch else "before the first epoch"
    if status.state == "starting":
        where = "while starting"
    epochs = f"{amount(seen.epochs)} epoch{'' if seen.epochs == 1 else 's'}"
    done = f"{how} {where}: {amount(status.records)} records in {epochs}, {clock(seen.uptime_s)}"
    counted = _named(seen.bad_records, *_aside(status))
    return f"{', '.join([done, *counted])}. Directory: {status.directory}"


class LiveView(Reporter):
    """The view for a terminal, drawn again several times a second."""

    def __init__(self, terminal: Console, draw: Callable[[Seen], RenderableType] = run_view) -> None:
        super().__init__()
        self._terminal, self._draw = terminal, draw
        self._live = Live(
            console=terminal,
            refresh_per_second=FRAMES_PER_S,
            get_renderable=self.frame,
            vertical_overflow="crop",
        )

    def frame(self) -> RenderableType:
        """What is to be seen now."""
        return self._draw(self.seen)

    def __enter__(self) -> Reporter:
        self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def end(self, error: BaseException | None) -> None:
        status = self.seen.status
        if status is not None:
            self._terminal.print(closing_line(self.seen, status, error), soft_wrap=True)


def reporter_for(*, json: bool, draw: Callable[[Seen], RenderableType] = run_view) -> Reporter:
    """JSON lines if asked for, a view on a terminal, plain lines elsewhere."""
    if json:
        return JsonLines()
    return LiveView(console(), draw) if sys.stdout.isatty() else PlainLines()
