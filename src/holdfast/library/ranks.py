"""The first of each key: deduplicate and top."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from holdfast.errors import PipelineError
from holdfast.library.joins import time_column
from holdfast.plan import graph as g
from holdfast.plan.bodies import DeduplicateBody, TopBody
from holdfast.plan.times import LATE
from holdfast.time.units import Duration, positive_us
from holdfast.time.windows import Assigner, Sliding, Tumbling

if TYPE_CHECKING:
    from holdfast.pipeline import Pipeline, Stream

TIES = ("first", "last")


def deduplicate(pipeline: Pipeline, inputs: tuple[g.Input, ...], uid: str, within: Duration | None) -> Stream:
    """The operator that `KeyedStream.deduplicate` makes."""
    within_us = None if within is None else positive_us("within", within)
    tags = (g.MAIN,) if within_us is None else (g.MAIN, LATE)
    return pipeline._add(g.DEDUPLICATE, uid, DeduplicateBody(within_us), inputs, tags=tags)


def top(
    pipeline: Pipeline,
    inputs: tuple[g.Input, ...],
    uid: str,
    n: int,
    by: str | Sequence[str],
    ascending: bool | Sequence[bool],
    ties: str,
    rank: str,
    assigner: Assigner | None = None,
) -> Stream:
    """The operator that `KeyedStream.top` and `WindowedStream.top` make."""

    def refuse(message: str, remedy: str | None = None) -> PipelineError:
        return PipelineError(message, uid=str(uid), where=g.caller(), remedy=remedy)

    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise refuse(f"top needs a number of records, at least 1, not {n!r}.")
    columns = (by,) if isinstance(by, str) else by
    if not isinstance(columns, (list, tuple)) or not columns or not all(isinstance(c, str) for c in columns):
        raise refuse(f"top needs the name of a column, or several, not {by!r}.", 'top("best", 3, by="price")')
    upwards = ascending if isinstance(ascending, (list, tuple)) else [ascending] * len(columns)
    if len(upwards) != len(columns):
        raise refuse(f"top ranks by {len(columns)} columns, and ascending= speaks of {len(upwards)}.")
    if ties not in TIES:
        raise refuse(f"ties={ties!r} is not known.", f"One of: {', '.join(TIES)}.")
    if not (assigner is None or isinstance(assigner, (Tumbling, Sliding))):
        raise refuse(
            f"{assigner!r} has no top.",
            "Use hf.tumbling or hf.sliding, or sort the records of a window in .process(uid, WindowFunction).",
        )
    column = None if assigner is None else time_column(pipeline, inputs)
    body = TopBody(n, tuple(columns), tuple(map(bool, upwards)), ties, rank, assigner, column)
    tags: tuple[Any, ...] = (g.MAIN,) if assigner is None else (g.MAIN, LATE)
    return pipeline._add(g.TOP, uid, body, inputs, tags=tags)
