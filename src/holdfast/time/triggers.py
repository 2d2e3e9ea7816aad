"""Triggers: when a window's result is emitted, and when what it holds is dropped. Pure.

A trigger keeps nothing in itself: what it must remember for a key and a window stands in `ctx.state`, and when it
wants to be called again it sets a timer; both are kept by the operator, with the window. It is told of each record,
of each timer that is due, and of windows that merge, and answers with a `Decision`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.errors import PipelineError
from holdfast.time.units import MAX_TIME, Duration, positive_us
from holdfast.time.windows import Window

Record = dict[str, Any]
Small = int | float | str | bool


class Decision(enum.Enum):
    """What a trigger wants done with its window.

    >>> Decision.FIRE_AND_PURGE.fires, Decision.PURGE.fires
    (True, False)
    """

    CONTINUE = "continue"
    """Nothing."""
    FIRE = "fire"
    """Emit the result; what the window holds stays."""
    PURGE = "purge"
    """Drop what the window holds."""
    FIRE_AND_PURGE = "fire_and_purge"
    """Emit the result, then drop what the window holds."""

    @property
    def fires(self) -> bool:
        """Whether the result is emitted."""
        return self in (Decision.FIRE, Decision.FIRE_AND_PURGE)

    @property
    def purges(self) -> bool:
        """Whether what the window holds is dropped."""
        return self in (Decision.PURGE, Decision.FIRE_AND_PURGE)


class TriggerContext(Protocol):
    """What a trigger may know and do, for one key and one window.

    A timer that is set twice is called once; one that is not there may be deleted. A timer is due when the
    watermark, or the clock, is at or past it.
    """

    state: dict[str, Small]
    """Small values that are kept with the window, and go with it."""

    @property
    def watermark_us(self) -> int:
        """No record at or below it is still to come."""

    @property
    def now_ms(self) -> int:
        """The epoch's processing time, in milliseconds since 1970."""

    def set_event_timer(self, at_us: int) -> None:
        """Call `on_event_time` when the watermark gets there."""

    def delete_event_timer(self, at_us: int) -> None:
        """Don't."""

    def set_processing_timer(self, at_ms: int) -> None:
        """Call `on_processing_time` when the clock gets there."""

    def delete_processing_timer(self, at_ms: int) -> None:
        """Don't."""


class Trigger:
    """When a window fires; derive from it for a trigger of your own.

    Attributes:
        can_merge: whether it can be used with windows that merge; `on_merge` says how.

    >>> class OnAlarm(Trigger):
    ...     def on_record(self, record, at_us, window, ctx):
    ...         return Decision.FIRE if record["alarm"] else Decision.CONTINUE
    """

    can_merge: bool = False

    @property
    def kind(self) -> str:
        """What must stay as it is while there is state of it; how it is set may change."""
        return type(self).__name__

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def on_record(self, record: Record, at_us: int, window: Window, ctx: TriggerContext) -> Decision:
        """A record was added to the window."""
        raise NotImplementedError

    def on_event_time(self, at_us: int, window: Window, ctx: TriggerContext) -> Decision:
        """The watermark has reached a timer; `at_us` is what it was set to."""
        return Decision.CONTINUE

    def on_processing_time(self, at_ms: int, window: Window, ctx: TriggerContext) -> Decision:
        """The clock has reached a timer; `at_ms` is what it was set to."""
        return Decision.CONTINUE

    def on_merge(self, window: Window, ctx: TriggerContext, merged: Sequence[TriggerContext]) -> None:
        """`window` has taken in others; bring over what must not be lost.

        It comes before the `on_record` of the record that made them merge. `ctx` is the window's own, empty if it is
        new. `merged` are those of the windows that are no more: `clear` is called for each of them afterwards.
        """
        raise PipelineError(
            f"{type(self).__name__} can't be used with windows that merge, such as sessions.",
            remedy="Set can_merge = True on the trigger and define on_merge.",
        )

    def clear(self, window: Window, ctx: TriggerContext) -> None:
        """The window goes: delete the timers that were set for it. Its state goes by itself."""


def _add_up(name: str, ctx: TriggerContext, merged: Sequence[TriggerContext]) -> None:
    total = sum(int(c.state.get(name, 0)) for c in (ctx, *merged))
    if total:
        ctx.state[name] = total


def _earliest(name: str, ctx: TriggerContext, merged: Sequence[TriggerContext]) -> int | None:
    return min((int(c.state[name]) for c in (ctx, *merged) if name in c.state), default=None)


def _full(name: str, n: int, ctx: TriggerContext) -> bool:
    """Count one more; whether that makes `n`."""
    ctx.state[name] = int(ctx.state.get(name, 0)) + 1
    return int(ctx.state[name]) >= n


@dataclass(frozen=True)
class EventTime(Trigger):
    """Fires when the watermark passes the window's end; made by `event_time`.

    ============  =====================================================================
    in the state
    ============  =====================================================================
    early         records since it last fired, before the end
    early_at      when it fires early, in processing time
    late          records since it last fired, behind the end
    ============  =====================================================================
    """

    early_ms: int | None = None
    early_count: int | None = None
    late_count: int = 1
    can_merge = True

    def on_record(self, record: Record, at_us: int, window: Window, ctx: TriggerContext) -> Decision:
        """Fires for the n-th early or late record; otherwise sees to it that timers are set."""
        if window.last <= ctx.watermark_us:
            return self._fire(ctx) if _full("late", self.late_count, ctx) else Decision.CONTINUE
        ctx.set_event_timer(window.last)
        if self.early_count is not None and _full("early", self.early_count, ctx):
            return self._fire(ctx)
        if self.early_ms is not None and "early_at" not in ctx.state:
            self._fire_early_at(ctx.now_ms + self.early_ms, ctx)
        return Decision.CONTINUE

    def on_event_time(self, at_us: int, window: Window, ctx: TriggerContext) -> Decision:
        """Fires if this is the window's last instant."""
        return self._fire(ctx) if at_us == window.last else Decision.CONTINUE

    def on_processing_time(self, at_ms: int, window: Window, ctx: TriggerContext) -> Decision:
        """Fires early."""
        return self._fire(ctx) if ctx.state.get("early_at") == at_ms else Decision.CONTINUE

    def on_merge(self, window: Window, ctx: TriggerContext, merged: Sequence[TriggerContext]) -> None:
        """Adds up what was counted, and fires early when the first of them would have."""
        _add_up("early", ctx, merged)
        _add_up("late", ctx, merged)
        early_at = _earliest("early_at", ctx, merged)
        if early_at is not None:
            self._fire_early_at(early_at, ctx)
        if window.last > ctx.watermark_us:
            ctx.set_event_timer(window.last)

    def clear(self, window: Window, ctx: TriggerContext) -> None:
        """Deletes the timers for the end and for firing early."""
        ctx.delete_event_timer(window.last)
        self._forget_early(ctx)

    def _fire(self, ctx: TriggerContext) -> Decision:
        self._forget_early(ctx)
        ctx.state.pop("early", None)
        ctx.state.pop("late", None)
        return Decision.FIRE

    def _fire_early_at(self, at_ms: int, ctx: TriggerContext) -> None:
        self._forget_early(ctx)
        ctx.state["early_at"] = at_ms
        ctx.set_processing_timer(at_ms)

    def _forget_early(self, ctx: TriggerContext) -> None:
        early_at = ctx.state.pop("early_at", None)
        if early_at is not None:
            ctx.delete_processing_timer(int(early_at))


@dataclass(frozen=True)
class ProcessingTime(Trigger):
    """Fires when the clock passes the window's end; made by `processing_time`."""

    can_merge = True

    def on_record(self, record: Record, at_us: int, window: Window, ctx: TriggerContext) -> Decision:
        """Sees to it that the timer is set; one that is past is due at once."""
        self._set(window, ctx)
        return Decision.CONTINUE

    def on_processing_time(self, at_ms: int, window: Window, ctx: TriggerContext) -> Decision:
        """Fires if this is the window's end."""
        return Decision.FIRE if at_ms == _end_ms(window) else Decision.CONTINUE

    def on_merge(self, window: Window, ctx: TriggerContext, merged: Sequence[TriggerContext]) -> None:
        """Sets the timer for the new end."""
        self._set(window, ctx)

    def clear(self, window: Window, ctx: TriggerContext) -> None:
        """Deletes the timer."""
        ctx.delete_processing_timer(_end_ms(window))

    def _set(self, window: Window, ctx: TriggerContext) -> None:
        if window.end < MAX_TIME:
            ctx.set_processing_timer(_end_ms(window))


def _end_ms(window: Window) -> int:
    """The first millisecond at which the clock is at the window's end or past it."""
    return -(-window.end // 1000)


@dataclass(frozen=True)
class Count(Trigger):
    """Fires with every n-th record of a window; made by `count`. In the state: how many since, as `n`."""

    n: int
    can_merge = True

    def on_record(self, record: Record, at_us: int, window: Window, ctx: TriggerContext) -> Decision:
        """Counts, and fires when there are enough."""
        if not _full("n", self.n, ctx):
            return Decision.CONTINUE
        del ctx.state["n"]
        return Decision.FIRE

    def on_merge(self, window: Window, ctx: TriggerContext, merged: Sequence[TriggerContext]) -> None:
        """Adds up; if that is enough, the record that made the windows merge fires."""
        _add_up("n", ctx, merged)


@dataclass(frozen=True)
class ContinuousEventTime(Trigger):
    """Fires as the watermark passes each multiple of a period; made by `continuous_event_time`.

    In the state: the timer that is set, as `at`.
    """

    every_us: int
    can_merge = True

    def on_record(self, record: Record, at_us: int, window: Window, ctx: TriggerContext) -> Decision:
        """Fires for a late record; otherwise sees to it that timers are set."""
        if window.last <= ctx.watermark_us:
            return Decision.FIRE
        ctx.set_event_timer(window.last)
        # From the watermark on, so that a jump of years is one firing and not one for each period in it.
        after = max(at_us, ctx.watermark_us + 1)
        at = after - after % self.every_us + self.every_us - 1
        if at < int(ctx.state.get("at", window.last)):
            self._fire_at(at, ctx)
        return Decision.CONTINUE

    def on_event_time(self, at_us: int, window: Window, ctx: TriggerContext) -> Decision:
        """Fires if this is the window's last instant, or the end of a period with records."""
        if at_us == window.last:
            self._forget(ctx)
            return Decision.FIRE
        if at_us == ctx.state.get("at"):
            del ctx.state["at"]
            return Decision.FIRE
        return Decision.CONTINUE

    def on_merge(self, window: Window, ctx: TriggerContext, merged: Sequence[TriggerContext]) -> None:
        """Fires when the first of them would have, and at the new end."""
        at = _earliest("at", ctx, merged)
        if at is not None:
            self._fire_at(at, ctx)
        if window.last > ctx.watermark_us:
            ctx.set_event_timer(window.last)

    def clear(self, window: Window, ctx: TriggerContext) -> None:
        """Deletes both timers."""
        ctx.delete_event_timer(window.last)
        self._forget(ctx)

    def _fire_at(self, at: int, ctx: TriggerContext) -> None:
        self._forget(ctx)
        ctx.state["at"] = at
        ctx.set_event_timer(at)

    def _forget(self, ctx: TriggerContext) -> None:
        at = ctx.state.pop("at", None)
        if at is not None:
            ctx.delete_event_timer(int(at))


@dataclass(frozen=True)
class Never(Trigger):
    """Never fires; made by `never`."""

    can_merge = True

    def on_record(self, record: Record, at_us: int, window: Window, ctx: TriggerContext) -> Decision:
        """Nothing."""
        return Decision.CONTINUE

    def on_merge(self, window: Window, ctx: TriggerContext, merged: Sequence[TriggerContext]) -> None:
        """Nothing."""


class Purging(Trigger):
    """Another trigger, after each firing of which the window is empty; made by `purging`."""

    def __init__(self, trigger: Trigger) -> None:
        self.trigger = trigger
        self.can_merge = trigger.can_merge

    @property
    def kind(self) -> str:
        """The other one's, too."""
        return f"Purging({self.trigger.kind})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Purging) and self.trigger == other.trigger

    def __hash__(self) -> int:
        return hash((Purging, self.trigger))

    def __repr__(self) -> str:
        return f"Purging({self.trigger!r})"

    def on_record(self, record: Record, at_us: int, window: Window, ctx: TriggerContext) -> Decision:
        """As the other one, and purges if it fires."""
        return _purged(self.trigger.on_record(record, at_us, window, ctx))

    def on_event_time(self, at_us: int, window: Window, ctx: TriggerContext) -> Decision:
        """As the other one, and purges if it fires."""
        return _purged(self.trigger.on_event_time(at_us, window, ctx))

    def on_processing_time(self, at_ms: int, window: Window, ctx: TriggerContext) -> Decision:
        """As the other one, and purges if it fires."""
        return _purged(self.trigger.on_processing_time(at_ms, window, ctx))

    def on_merge(self, window: Window, ctx: TriggerContext, merged: Sequence[TriggerContext]) -> None:
        """As the other one."""
        self.trigger.on_merge(window, ctx, merged)

    def clear(self, window: Window, ctx: TriggerContext) -> None:
        """As the other one."""
        self.trigger.clear(window, ctx)


def _purged(decision: Decision) -> Decision:
    return Decision.FIRE_AND_PURGE if decision is Decision.FIRE else decision


def event_time(
    *, early: Duration | None = None, early_count: int | None = None, late_count: int = 1
) -> Trigger:
    """Fire once when the watermark passes the window's end, and again for what comes late.

    Args:
        early: before the end, fire so long (in processing time) after the first record that no result has seen.
        early_count: before the end, fire for every so many records.
        late_count: behind the end, fire for every so many records. If it is more than 1, the last few that don't
            make that many are in no result.

    >>> event_time(early="10s")
    EventTime(early_ms=10000, early_count=None, late_count=1)
    """
    return EventTime(
        None if early is None else _whole_ms("early", early),
        None if early_count is None else _at_least_one("early_count", early_count),
        _at_least_one("late_count", late_count),
    )


def processing_time() -> Trigger:
    """Fire once when the epoch's clock passes the window's end."""
    return ProcessingTime()


def count(n: int) -> Trigger:
    """Fire for every n-th record of a window; the window's end does not matter."""
    return Count(_at_least_one("n", n))


def continuous_event_time(every: Duration) -> Trigger:
    """Fire as the watermark passes each multiple of `every`, if there was a record since, and at the window's end."""
    return ContinuousEventTime(positive_us("every", every))


def purging(trigger: Trigger) -> Trigger:
    """Drop what a window holds each time that another trigger fires: each result has only what is new.

    >>> purging(count(100))
    Purging(Count(n=100))
    """
    return Purging(trigger)


def never() -> Trigger:
    """Never fire: for windows of which only the end of something else makes results."""
    return Never()


def _at_least_one(what: str, n: int) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise PipelineError(
            f"{what} is {n!r}, but must be a whole number from 1.", remedy=f"Write {what}=100."
        )
    return n


def _whole_ms(what: str, value: Duration) -> int:
    us = positive_us(what, value)
    if us % 1000:
        raise PipelineError(
            f"{what} is {value!r}, but processing time is counted in milliseconds.", remedy='Write "500ms".'
        )
    return us // 1000
