"""What is said of a deadline that can't be held, and when: each reason once, and that it can be held again."""

from __future__ import annotations

from collections.abc import Collection

TELL_EVERY_S = 60.0
"""Where it comes and goes, nobody reads more than that."""


class Said:
    """What was said so far.

    >>> said = Said()
    >>> said.news(["host"], 0.0), said.news(["host"], 100.0), said.news(["driver-kill", "host"], 200.0)
    (['host'], None, ['driver-kill'])
    >>> said.news(["host"], 300.0), said.news([], 400.0), said.news([], 500.0)
    (None, [], None)
    """

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        self._at_s = -TELL_EVERY_S

    def news(self, reasons: Collection[str], now_s: float) -> list[str] | None:
        """Reasons that are to be said now; none of them: it can be held again. None: there is nothing to say.

        One that was said and is gone is not said again before all are: what comes and goes would be told for ever.
        """
        if now_s - self._at_s < TELL_EVERY_S:
            return None
        new = [reason for reason in reasons if reason not in self._reasons]
        if not new and (reasons or not self._reasons):
            return None
        self._at_s, self._reasons = now_s, {*self._reasons, *new} if reasons else set()
        return new
