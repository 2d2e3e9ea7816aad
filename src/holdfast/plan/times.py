"""Which event time a stream has, and whose watermarks move the clock of an operator. Pure.

Event time is a column: an `event_time` operator names it, and it stays the time of the stream until another one does,
or a window gives its results times of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from holdfast.errors import PipelineError
from holdfast.functions import Aggregate, Column
from holdfast.plan import graph as g
from holdfast.plan.stages import Stages
from holdfast.time import windows
from holdfast.time.watermarks import EventTime

WINDOW_START, WINDOW_END = "window_start", "window_end"
"""The columns in which a window's results carry its bounds."""
UNTIMED = "untimed"
"""The side output of an `event_time` operator with the records that have no time."""
LATE = "late"
"""The side output of a window with the records that came too late."""


@dataclasses.dataclass(frozen=True)
class Stamp:
    """Where the records of a stream have their time: a column, its unit if it is a number, and what is added to it."""

    column: str
    unit: str | None = None
    shift_us: int = 0


@dataclasses.dataclass(frozen=True)
class WindowBody:
    """What a window over aggregates is: which windows, which aggregates, and how long they are kept for late records."""

    assigner: windows.Assigner
    columns: dict[str, Column | Aggregate]
    lateness_us: int = 0


@dataclasses.dataclass(frozen=True)
class Assigner:
    """An `event_time` operator, and where its records come from."""

    uid: str
    body: EventTime
    sources: tuple[str, ...]
    """Sources in whose chain it stands: their splits have marks of their own."""
    roots: tuple[str, ...]
    """Keyed operators in whose chain it stands: each counts as one split."""
    above: frozenset[str]
    """All sources that its records can come from."""


def assigners(stages: Stages) -> list[Assigner]:
    """All assigners of a pipeline."""
    found = []
    for node in stages.graph.of_kind(g.EVENT_TIME):
        roots = [stages.node(s.root) for s in stages.stages if node.id in s.nodes]
        found.append(
            Assigner(
                node.uid,
                node.body,
                tuple(r.uid for r in roots if r.kind == g.SOURCE),
                tuple(r.uid for r in roots if r.kind != g.SOURCE),
                frozenset(n.uid for n in _above(stages.graph, node) if n.kind == g.SOURCE),
            )
        )
    return found


def _above(graph: g.Graph, node: g.Node) -> Iterator[g.Node]:
    seen = {node.id}
    left = [node]
    while left:
        one = left.pop()
        yield one
        for edge in one.inputs:
            if edge.node not in seen:
                seen.add(edge.node)
                left.append(graph.nodes[edge.node])


def clocked_by(graph: g.Graph, node: g.Node) -> list[str]:
    """The assigners whose watermarks move an operator's event clock; none: it has no event time."""
    found: set[str] = set()
    for edge in node.inputs:
        found |= _assigners_of(graph, graph.nodes[edge.node])
    return sorted(found)


def _assigners_of(graph: g.Graph, node: g.Node) -> set[str]:
    if node.kind == g.EVENT_TIME:
        return {node.uid}
    found: set[str] = set()
    for edge in node.inputs:
        found |= _assigners_of(graph, graph.nodes[edge.node])
    return found


def stamp_of(graph: g.Graph, node: g.Node, tag: str = g.MAIN) -> Stamp | None:
    """Where the records of an output have their time; None: they have none."""
    if node.kind == g.EVENT_TIME:
        return Stamp(node.body.column, node.body.unit)
    if node.kind == g.WINDOW and tag == g.MAIN:
        return Stamp(WINDOW_END, shift_us=-1)
    if node.kind in (g.SOURCE, g.AGGREGATE) or not node.inputs:
        return None
    return input_stamp(graph, node)


def input_stamp(graph: g.Graph, node: g.Node, side: int = 0) -> Stamp | None:
    """Where the records that an operator takes on a side have their time; all its inputs there must agree."""
    edges = [e for e in node.inputs if e.side == side]
    found = [stamp_of(graph, graph.nodes[e.node], e.tag) for e in edges]
    first = found[0]
    for other in found[1:]:
        if other != first:
            raise PipelineError(
                f"Streams with different event times come together: {_shown(first)} and {_shown(other)}.",
                uid=node.uid,
                where=node.where,
                remedy="Give the united stream one: .union(…).event_time(column, …).",
            )
    return first


def _shown(stamp: Stamp | None) -> str:
    return "none" if stamp is None else repr(stamp.column)
