"""Patterns: records of a key that follow each other."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

from holdfast.errors import PipelineError
from holdfast.plan import graph as g
from holdfast.plan.bodies import ENDED, TIMEOUT, PatternBody, Step, Test
from holdfast.plan.times import LATE
from holdfast.time.units import Duration, positive_us

if TYPE_CHECKING:
    from holdfast.pipeline import Pipeline, Stream


@dataclasses.dataclass(frozen=True)
class Pattern:
    """What must follow what, made by `pattern`; each call gives a new one.

    >>> import holdfast as hf
    >>> small = hf.pattern("small", lambda r: r["sum"] < 10)
    >>> fraud = small.then("large", lambda r: r["sum"] > 900).within("10m")
    """

    steps: tuple[Step, ...]
    within_us: int | None = None

    def then(self, name: str, test: Test) -> Pattern:
        """Some time later comes a record for which the test is true; others may come between."""
        self._check(name, test)
        return dataclasses.replace(self, steps=(*self.steps, Step(name, test)))

    def without(self, name: str, test: Test) -> Pattern:
        """Before the last step, and after the one before it, no record comes for which the test is true."""
        self._check(name, test)
        if len(self.steps) < 2:
            raise PipelineError(
                "without says what must not come between two steps, and there is one.",
                where=g.caller(),
                remedy='Name the second step first: hf.pattern("a", …).then("b", …).without("c", …).',
            )
        last = self.steps[-1]
        last = dataclasses.replace(last, without=(*last.without, (name, test)))
        return dataclasses.replace(self, steps=(*self.steps[:-1], last))

    def within(self, duration: Duration) -> Pattern:
        """From the first step to the last no more event time passes than this."""
        return dataclasses.replace(self, within_us=positive_us("within", duration))

    def _check(self, name: str, test: Any) -> None:
        _check(name, test)
        taken = [s.name for s in self.steps] + [n for s in self.steps for n, _ in s.without]
        if name in taken:
            raise PipelineError(f"The pattern has a {name!r} already.", where=g.caller())


def pattern(name: str, test: Test) -> Pattern:
    """Start a pattern: its first step is a record for which the test is true.

    Say what follows with `then` and `without`, and within which time with `within`; find it with
    `KeyedStream.pattern`.

    Args:
        name: under which a match holds the record.
        test: a function of the record.
    """
    _check(name, test)
    return Pattern((Step(name, test),))


def _check(name: Any, test: Any) -> None:
    if not isinstance(name, str) or not name or name == ENDED or not callable(test):
        raise PipelineError(
            f"A step of a pattern has a name and a function of the record, not {name!r} and {test!r}.",
            where=g.caller(),
            remedy=f'hf.pattern("small", lambda r: r["sum"] < 10); the name {ENDED!r} is taken.',
        )


def _is_key(name: str, key: g.Key) -> bool:
    """Whether a match has a column of the key under a name. How many a function gives is not known before it is called."""
    return name in key.columns if key.columns else re.fullmatch(r"key\d*", name) is not None


def find(pipeline: Pipeline, inputs: tuple[g.Input, ...], key: g.Key, uid: str, wanted: Pattern) -> Stream:
    """The operator that `KeyedStream.pattern` makes."""

    def refuse(message: str, remedy: str) -> PipelineError:
        return PipelineError(message, uid=str(uid), where=g.caller(), remedy=remedy)

    if not isinstance(wanted, Pattern):
        raise refuse(f"{wanted!r} is no pattern.", 'Make one: hf.pattern("a", …).then("b", …).within("10m").')
    if len(wanted.steps) < 2:
        raise refuse("A pattern needs two steps at least.", "Add one with .then(name, test), or use filter.")
    if wanted.within_us is None:
        raise refuse("The pattern would wait for ever.", 'Say for how long: .within("10m").')
    clash = next((s.name for s in wanted.steps if _is_key(s.name, key)), None)
    if clash is not None:
        raise refuse(f"{clash!r} is both a key and a step.", "Give the step another name.")
    if ENDED in key.columns:
        raise refuse(
            f"{ENDED!r} is both a key and what says how a pattern ended.",
            'Give the column another name before key_by, or key by a function: .key_by(lambda r: r["ended"]).',
        )
    body = PatternBody(wanted.steps, wanted.within_us)
    return pipeline._add(g.PATTERN, uid, body, inputs, tags=(g.MAIN, TIMEOUT, LATE))
