"""What the operators of the library are, and calls of the outside world, as plain data: the engine runs them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from holdfast.errors import PipelineError
from holdfast.time.windows import Sliding, Tumbling

INNER, LEFT, RIGHT, OUTER = "inner", "left", "right", "outer"
"""What becomes of records without a partner: of neither side, of one, or of both they come out alone."""
KEPT = {
    "join": ("left", "right"),
    "deduplicate": ("seen", "earlier"),
    "top": ("best",),
    "pattern": ("waiting", "begun"),
}
"""The states of each kind of operator."""
WAITING = ("waiting.left", "waiting.right")
"""What waits for event time before an ordered process; beside it are the states of its function."""
OUR_TIMES = ("kept.due", "kept.at", "begun.due", "until")
"""The fields of these states that hold times; all others are numbers, or the records' own."""
Select = Callable[[Any, Any], Any]
"""Makes a result of two records; None stands for the one that is missing."""


@dataclasses.dataclass(frozen=True)
class IntervalBody:
    """Pairs whose times are close: the right's minus the left's is from `lower_us` to `upper_us`."""

    lower_us: int
    upper_us: int
    how: str = INNER
    function: Select | None = None
    time: str | None = None
    """The column in which results have a time of their own; None: they have none."""
    time_column: str | None = None
    """Where the left has its time."""

    def facts(self) -> dict[str, Any]:
        """What must not change under stored state."""
        return {"join": "interval", "lower_us": self.lower_us, "upper_us": self.upper_us, "how": self.how}

    def describe(self) -> str:
        return f"{self.how}, {self.lower_us / 1e6:g} s to {self.upper_us / 1e6:g} s"


@dataclasses.dataclass(frozen=True)
class AsOfBody:
    """Each record of the left with the newest of the right that is not newer, nor older by more than `keep_us`."""

    how: str = LEFT
    function: Select | None = None
    keep_us: int | None = None

    def facts(self) -> dict[str, Any]:
        """What must not change under stored state."""
        return {"join": "as of", "how": self.how, "keep_us": self.keep_us}

    def describe(self) -> str:
        return f"as of, {self.how}"


@dataclasses.dataclass(frozen=True)
class WindowJoinBody:
    """Pairs of one window."""

    assigner: Tumbling | Sliding
    function: Select | None = None
    time_column: str | None = None

    def facts(self) -> dict[str, Any]:
        """What must not change under stored state."""
        return {"join": "window", "window": self.assigner.facts()}

    def describe(self) -> str:
        return self.assigner.describe()


@dataclasses.dataclass(frozen=True)
class DeduplicateBody:
    """Lets the first record of a key pass, and no other that is within `within_us` of one that passed, or none ever."""

    within_us: int | None = None

    def facts(self) -> dict[str, Any]:
        """What must not change under stored state."""
        return {"within_us": self.within_us}

    def describe(self) -> str:
        return "for ever" if self.within_us is None else f"within {self.within_us / 1e6:g} s"


@dataclasses.dataclass(frozen=True)
class TopBody:
    """The first `n` records of a key by some columns, each up- or downwards, in each window or of all."""

    n: int
    by: tuple[str, ...]
    ascending: tuple[bool, ...] = (False,)
    ties: str = "first"
    rank: str = "rank"
    assigner: Tumbling | Sliding | None = None
    time_column: str | None = None

    def facts(self) -> dict[str, Any]:
        """What must not change under stored state."""
        window = None if self.assigner is None else self.assigner.facts()
        by, ascending = (list(x) if len(x) > 1 else x[0] for x in (self.by, self.ascending))
        return {"n": self.n, "by": by, "ascending": ascending, "window": window}

    def describe(self) -> str:
        window = "" if self.assigner is None else f", {self.assigner.describe()}"
        by = (f"{name}{' upwards' if up else ''}" for name, up in zip(self.by, self.ascending, strict=True))
        return f"{self.n} by {', '.join(by)}{window}"


@dataclasses.dataclass(frozen=True)
class AsyncBody:
    """Calls a function of each record, so many at once, and waits for each so long, all its tries included."""

    function: Callable[[dict[str, Any]], Any]
    capacity: int
    timeout_s: float
    retries: int
    on_error: str

    def __post_init__(self) -> None:
        function: Any = self.function
        if not any(inspect.iscoroutinefunction(f) for f in (function, type(function).__call__)):
            raise PipelineError(
                f"async_map needs an `async def`, not {self.function!r}.",
                remedy="Make the function async, or use map for one that waits for nobody.",
            )
        if self.on_error not in ("fail", "skip", "dead_letter"):
            raise PipelineError(
                f"on_error={self.on_error!r} is not known.", remedy='"fail", "skip" or "dead_letter".'
            )
        for name, value, least in (("capacity", self.capacity, 1), ("retries", self.retries, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise PipelineError(
                    f"{name}={value!r} is no number of calls.", remedy=f"A whole number, {least} or more."
                )
        if self.timeout_s <= 0:
            raise PipelineError("timeout=0 leaves no time for a call.", remedy='Give it some: timeout="10s".')

    def describe(self) -> str:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return f"{name}, {self.capacity} at once, {self.timeout_s:g} s each"


TIMEOUT = "timeout"
"""The side output of a pattern with what had begun and came to nothing."""
ENDED = "ended"
"""The column there that says why: "timeout", or the name of what came and must not."""

Test = Callable[[dict[str, Any]], Any]


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a pattern: what its record must be like, and what must not come before it."""

    name: str
    test: Test
    without: tuple[tuple[str, Test], ...] = ()


@dataclasses.dataclass(frozen=True)
class PatternBody:
    """Steps that follow each other within a time."""

    steps: tuple[Step, ...]
    within_us: int

    def facts(self) -> dict[str, Any]:
        """What must not change under stored state."""
        return {"steps": [s.name for s in self.steps], "within_us": self.within_us}

    def describe(self) -> str:
        return f"{' then '.join(s.name for s in self.steps)}, within {self.within_us / 1e6:g} s"


@dataclasses.dataclass(frozen=True)
class OrderedBody:
    """A `KeyedProcess` that takes records and timers in the order of event time."""

    function: Any

    def describe(self) -> str:
        return f"{type(self.function).__name__}, in order"
