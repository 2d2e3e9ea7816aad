"""Which event time a stream has, and whose watermarks move the clock of an operator. Pure.

Event time is a column: an `event_time` operator names it, and it stays the time of the stream until another one does,
or a window gives its results times of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

from holdfast.errors import PipelineError
from holdfast.functions import Aggregate, Column
from holdfast.plan import graph as g
from holdfast.plan.bodies import AsOfBody, IntervalBody
from holdfast.plan.stages import Stages
from holdfast.time import windows
from holdfast.time.triggers import Trigger, event_time
from holdfast.time.watermarks import ByClock, EventTime

WINDOW_START, WINDOW_END = "window_start", "window_end"
"""The columns in which a window's results carry its bounds."""
UNTIMED = "untimed"
"""The side output of an `event_time` operator with the records that have no time."""
LATE = "late"
"""The side output of a window with the records that came too late."""
LATER = "allows_lateness"
"""A fact of tumbling windows that directories of before don't have."""
LATE_RIGHT = "late_right"
"""That of a join with those of its right side."""


@dataclasses.dataclass(frozen=True)
class Stamp:
    """Where the records of a stream have their time: a column, its unit if it is a number, and what is added to it."""

    column: str
    unit: str | None = None
    shift_us: int = 0


@dataclasses.dataclass(frozen=True)
class WindowBody:
    """What a window is: which windows, what is made of their records, how long they are kept for late ones, when they fire."""

    assigner: windows.Assigner
    columns: dict[str, Column | Aggregate]
    """The aggregates; none where a function makes the results."""
    lateness_us: int = 0
    trigger: Trigger = dataclasses.field(default_factory=event_time)
    kind: str = g.AGGREGATE
    """`aggregate`, `reduce` or `process`."""
    function: Any = None
    """What `reduce` folds with, or a `WindowFunction`."""

    @property
    def in_batches(self) -> bool:
        """Whether it is computed in batches, all keys at once; otherwise records are taken one by one."""
        assigner = self.assigner
        known = type(assigner) in (windows.Tumbling, windows.Sliding) or (
            type(assigner) is windows.Session and not assigner.dynamic
        )
        return known and self.kind == g.AGGREGATE and self.trigger == event_time()

    def facts(self) -> dict[str, Any]:
        """What must not change under stored state, beside aggregates and key."""
        facts: dict[str, Any] = {"window": self.assigner.facts()}
        if isinstance(self.assigner, windows.Sliding):
            facts["allowed_lateness_us"] = self.lateness_us  # panes are kept by when they are due
        elif isinstance(self.assigner, windows.Tumbling) and self.in_batches:
            # Which windows had their result is told by when they are due: then, or when they are forgotten.
            facts[LATER] = bool(self.lateness_us)
        elif isinstance(self.assigner, windows.Session) and self.in_batches:
            facts["sessions"] = "in any order"  # how they are laid out
        if not self.in_batches:
            facts |= {"makes": self.kind, "trigger": self.trigger.kind, "merging": self.assigner.merging}
        return facts


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
    seen: set[int] = set()
    left = [edge.node for edge in node.inputs]
    while left:
        above = graph.nodes[left.pop()]
        if above.id in seen:
            continue
        seen.add(above.id)
        if above.kind == g.EVENT_TIME:
            found.add(above.uid)
        else:
            left += [edge.node for edge in above.inputs]
    return sorted(found)


def follows_clock(graph: g.Graph, node: g.Node, resting: Collection[str] = ()) -> bool:
    """Whether an operator's event clock is that on the wall: then it goes on without records.

    `resting` are assigners that nobody waits for, since they have ended or all their splits are idle.
    """
    found = [graph.by_uid(uid).body.watermarks for uid in clocked_by(graph, node) if uid not in resting]
    return bool(found) and all(isinstance(rule, ByClock) for rule in found)


def delay_us(graph: g.Graph, node: g.Node) -> int:
    """By how much an operator's event clock is behind the watermarks that move it.

    By an instant if its windows merge: one is complete when no record can touch it, and that is not right before its end
    but at it. Its results have the window's last instant as their time, as those of other windows, so who stands behind
    it waits as long.
    """
    found: dict[int, int] = {}

    def of(one: g.Node) -> int:
        if one.id not in found:
            above = [graph.nodes[edge.node] for edge in one.inputs]
            merging = one.kind == g.WINDOW and one.body.assigner.merging
            found[one.id] = merging + max((of(a) for a in above if a.kind != g.EVENT_TIME), default=0)
        return found[one.id]

    return of(node)


def stamp_of(graph: g.Graph, node: g.Node, tag: str = g.MAIN) -> Stamp | None:
    """Where the records of an output have their time; None: they have none."""
    if node.kind == g.EVENT_TIME:
        return Stamp(node.body.column, node.body.unit)
    if node.kind == g.WINDOW and tag == g.MAIN:
        return None if isinstance(node.body.assigner, windows.Global) else Stamp(WINDOW_END, shift_us=-1)
    if node.kind in g.LIBRARY:
        return _library_stamp(graph, node, tag)
    if node.kind in (g.SOURCE, g.AGGREGATE) or not node.inputs:
        return None
    return input_stamp(graph, node)


def _library_stamp(graph: g.Graph, node: g.Node, tag: str) -> Stamp | None:
    """Results have a time where none of them can be late behind it: that of a window, or of what the clock has just passed."""
    if tag in (LATE, LATE_RIGHT) or node.kind == g.DEDUPLICATE or isinstance(node.body, AsOfBody):
        return input_stamp(graph, node, 1 if tag == LATE_RIGHT else 0)
    if (
        node.kind == g.ORDERED
    ):  # what it makes of a record, or of a timer, is of a time that the clock has just passed
        return input_stamp(graph, node)
    if tag != g.MAIN:
        return None
    if isinstance(node.body, IntervalBody):
        return None if node.body.time is None else Stamp(node.body.time)
    return Stamp(WINDOW_END, shift_us=-1) if getattr(node.body, "assigner", None) is not None else None


def needs_time(node: g.Node) -> bool:
    """Whether an operator of the library can do nothing without event time."""
    if node.kind == g.DEDUPLICATE:
        return node.body.within_us is not None
    return node.kind != g.TOP or node.body.assigner is not None


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
