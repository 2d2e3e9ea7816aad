"""What is said in the log of a deadline that can't be held, or is not held now: each reason once, and that it is over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from holdfast.errors import InfeasibleError
from holdfast.recovery.explain import Explanation, failing, infeasible, unheld

_log = logging.getLogger("holdfast.deadline")

FAILING = "backups"
"""The reason why a deadline is not held if it is not a fault."""
TELL_EVERY_S = 60.0
"""That it can be held again is said so long after anything else at the earliest: where it comes and goes, nobody reads more."""


class Said:
    """What was said so far.

    >>> said = Said()
    >>> said.news(["host"], 0.0), said.news(["host"], 1.0), said.news(["driver-kill", "host"], 2.0)
    (['host'], None, ['driver-kill'])
    >>> said.news([], 3.0), said.news(["host"], 4.0), said.news([], 62.0), said.news([], 200.0)
    (None, None, [], None)
    """

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        self._at_s = 0.0

    def news(self, reasons: Collection[str], now_s: float) -> list[str] | None:
        """Reasons that are to be said now; none of them: it can be held again. None: there is nothing to say.

        A new one is said at once: its fault may strike within the next minute. One that was said and is gone is not said
        again before all are: what comes and goes would be told for ever.
        """
        new = [reason for reason in reasons if reason not in self._reasons]
        if new:
            self._at_s, self._reasons = now_s, {*self._reasons, *new}
            return new
        # A clock that was set back must not make it silent.
        if reasons or not self._reasons or 0 <= now_s - self._at_s < TELL_EVERY_S:
            return None
        self._at_s, self._reasons = now_s, set()
        return new


class Teller:
    """Says what is not held, as the user has chosen: refuse it, warn of it, or go on in silence."""

    def __init__(self, deadline_s: float, on_infeasible: str) -> None:
        self._deadline_s, self._refuses = deadline_s, on_infeasible == "refuse"
        self._silent = on_infeasible == "go_on"
        self._beyond, self._over = Said(), Said()

    def say(self, sentence: str) -> None:
        """Something that no bound covers."""
        if not self._silent:
            _log.warning("%s", sentence)

    def beyond(
        self,
        reasons: Collection[str],
        now_s: float,
        explained: Callable[[], Explanation | None],
        *,
        may_refuse: bool,
    ) -> None:
        """The faults for which it can't be held, or that backups fail; explained if there is news."""
        news = None if self._silent else self._beyond.news(reasons, now_s)
        if news is None:
            return
        if not news:
            _log.warning("the deadline of %.0f s can be held again", self._deadline_s)
            return
        told = explained()
        if told is None:
            return
        message = (failing if FAILING in news else infeasible)(told, self._deadline_s)
        if self._refuses and may_refuse:
            raise InfeasibleError(
                message,
                remedy="Choose a longer deadline, or change what is at fault:",
                detail="\n".join(f"  - {line}" for line in told.lines()),
            )
        _log.warning("%s %s", message, " ".join(told.lines()))

    def over(
        self,
        faults: Collection[str],
        now_s: float,
        explained: Callable[[Sequence[str]], tuple[Explanation | None, Explanation | None]],
    ) -> None:
        """The faults for which it is not held now, though it can be; explained as it stands, and once all is backed up.

        Nothing is refused for it: only who runs can back up.
        """
        news = None if self._silent else self._over.news(faults, now_s)
        if news is None:
            return
        if not news:
            _log.warning("the deadline of %.0f s is held again", self._deadline_s)
            return
        now, floor = explained(news)
        if now is not None and floor is not None:
            _log.warning("%s %s", unheld(now, self._deadline_s, floor.bound_s), " ".join(now.lines()))
