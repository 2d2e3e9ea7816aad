"""What happens in the demo, as plain data, and the three ways to tell it: a live view, plain lines, JSON lines.

The story is written by whoever strikes (`demo_faults`) and read by whoever tells or draws (`demo_view`).
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from rich.console import RenderableType

from holdfast.cli.output import Unbroken, clock, console, print_json
from holdfast.cli.reporting import JsonLines, LiveView, Reporter, epoch_line
from holdfast.cli.watching import Seen
from holdfast.faults.kinds import Fault
from holdfast.metrics import EpochFacts, Forecast, Status

EPOCHS_EVERY_S = 2.5
"""How often plain lines tell of epochs."""


@dataclasses.dataclass(frozen=True)
class Hit:
    """A fault of the demo: what was forecast right before it, and how long the recovery took once it is over."""

    fault: Fault
    victim: str
    at_s: float
    """Since the story began."""
    estimate_s: float
    bound_s: float
    deadline_s: float
    took_s: float | None = None

    @staticmethod
    def of(fault: Fault, victim: str, at_s: float, forecast: Forecast, deadline_s: float) -> Hit:
        """One that has just been done."""
        return Hit(fault, victim, at_s, forecast.estimate_s, forecast.bound_s, deadline_s)

    @property
    def held(self) -> bool:
        """Whether it was back within the deadline."""
        return self.took_s is not None and self.took_s <= self.deadline_s

    @property
    def deed(self) -> str:
        """What was done, to whom."""
        return f"{self.victim} killed{', Python and JVM' if self.fault is Fault.DRIVER_KILL else ''}"

    @property
    def outcome(self) -> str:
        """How it ended."""
        if self.took_s is None:
            return "not back"
        return f"back after {self.took_s:.1f} s of {self.deadline_s:g} s {'✓' if self.held else '✗'}"

    def facts(self) -> dict[str, Any]:
        """As a JSON line has it."""
        return {
            "fault": self.fault.label,
            "victim": self.victim,
            "since_start_s": round(self.at_s, 3),
            "estimate_s": round(self.estimate_s, 3),
            "bound_s": round(self.bound_s, 3),
            "recovery_s": None if self.took_s is None else round(self.took_s, 3),
            "deadline_s": self.deadline_s,
            "held": self.held if self.took_s is not None else None,
        }


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happened: in words, or a fault, or the recovery from one."""

    at_s: float
    text: str = ""
    hit: Hit | None = None


class Story:
    """The events so far. Written by one thread, read by others, which see each list as it was at some moment."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self.began_s = now_s()
        self.events: list[Event] = []
        self.progress = ""
        """What the application or its supervisor said last, if no epoch was run since."""
        self._told = 0

    @property
    def at_s(self) -> float:
        """How long it has been going on."""
        return self._now_s() - self.began_s

    @property
    def hits(self) -> list[Hit]:
        """The faults, each as it stands."""
        last = {e.hit.at_s: e.hit for e in self.events.copy() if e.hit is not None}
        return list(last.values())

    @property
    def open(self) -> Hit | None:
        """The fault that is being recovered from."""
        return next((h for h in self.hits if h.took_s is None), None)

    def say(self, text: str) -> None:
        """Tell something in words."""
        self.events.append(Event(self.at_s, text=text))

    def struck(self, hit: Hit) -> None:
        """A fault was done."""
        self.events.append(Event(hit.at_s, hit=hit))

    def back(self, took_s: float) -> None:
        """The application is back from it."""
        hit = self.open
        assert hit is not None
        self.events.append(Event(self.at_s, hit=dataclasses.replace(hit, took_s=took_s)))

    def news(self) -> list[Event]:
        """What was not told yet; for the one who tells."""
        found = self.events[self._told :]
        self._told += len(found)
        return found


class Teller(Protocol):
    """A reporter that hears of events too."""

    seen: Seen

    def hear(self, status: Status, facts: EpochFacts | None) -> None: ...

    def tell(self, event: Event) -> None: ...

    def progress(self, text: str) -> None: ...


class DemoLines(Reporter):
    """A line for everything that happens, with the minute and second; epochs are summed up in one now and then."""

    def __init__(self, story: Story) -> None:
        super().__init__()
        self._story = story
        self._out = Unbroken(sys.stdout)
        self._told_s = self._printed_s = 0.0
        self._waiting: list[EpochFacts] = []

    def hear(self, status: Status, facts: EpochFacts | None) -> None:
        super().hear(status, facts)
        if facts is not None:
            self._waiting.append(facts)
            if self._story.at_s - self._told_s >= EPOCHS_EVERY_S:
                self._tell_epochs(self._story.at_s)

    def progress(self, text: str) -> None:
        """A line, as the application said it."""
        self._tell_epochs(self._story.at_s)
        self._print(self._story.at_s, f"  {text}")

    def tell(self, event: Event) -> None:
        """A line; the epochs before it first."""
        self._tell_epochs(event.at_s)
        self._print(event.at_s, line_of(event))

    def _tell_epochs(self, at_s: float) -> None:
        status = self.seen.status
        if not self._waiting or status is None:
            return
        self._told_s = at_s
        bound = f"  recovery ≤ {status.bound_s:.1f} s of {status.deadline_s:g} s" if status.bound_s else ""
        self._print(self._told_s, f"  {epoch_line(self._waiting, status)}{bound}")
        self._waiting = []

    def _print(self, at_s: float, text: str) -> None:
        # What was heard of late is not told as if it had been sooner.
        self._printed_s = max(self._printed_s, at_s)
        self._out.write(f"{clock(self._printed_s):>5}  {text}\n")
        self._out.flush()


def line_of(event: Event) -> str:
    """An event as a plain line.

    >>> hit = Hit(Fault.EXECUTOR_KILL, "executor 1 on 127.0.0.2", 12.0, 6.8, 11.9, 60.0)
    >>> line_of(Event(12.0, hit=hit))
    '✗ executor 1 on 127.0.0.2 killed · estimate 6.8 s, bound 11.9 s, deadline 60 s'
    >>> line_of(Event(18.2, hit=dataclasses.replace(hit, took_s=6.1)))
    '● back after 6.1 s of 60 s ✓'
    """
    hit = event.hit
    if hit is None:
        return event.text
    if hit.took_s is not None:
        return f"● {hit.outcome}"
    return (
        f"✗ {hit.deed} · estimate {hit.estimate_s:.1f} s, "
        f"bound {hit.bound_s:.1f} s, deadline {hit.deadline_s:g} s"
    )


class DemoJson(JsonLines):
    """One object a line: what `JsonLines` prints, and each event. What the application says goes to standard error.

    `{"event": "said", "since_start_s": …, "text": …}`
    `{"event": "fault", …Hit}`, and the same as `"event": "recovered"` when it is over
    """

    def hear(self, status: Status, facts: EpochFacts | None) -> None:
        if facts is None:
            self.seen.hear(status, None)
        else:
            super().hear(status, facts)

    def progress(self, text: str) -> None:
        print(text, file=sys.stderr)

    def tell(self, event: Event) -> None:
        if event.hit is None:
            print_json({"event": "said", "since_start_s": round(event.at_s, 3), "text": event.text})
        else:
            name = "fault" if event.hit.took_s is None else "recovered"
            print_json({"event": name, **event.hit.facts()})


class DemoLive(LiveView):
    """The live view; events are drawn from the story, frame by frame."""

    def tell(self, event: Event) -> None:
        return

    def progress(self, text: str) -> None:
        return

    def end(self, error: BaseException | None) -> None:
        return


def teller_for(
    story: Story, draw: Callable[[Seen], RenderableType], *, json: bool
) -> DemoJson | DemoLive | DemoLines:
    """JSON lines if asked for, a view on a terminal, plain lines elsewhere."""
    if json:
        return DemoJson()
    return DemoLive(console(), draw) if sys.stdout.isatty() else DemoLines(story)
