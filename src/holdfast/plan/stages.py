"""Cuts a graph into stages at its exchanges, and says what each task runs. Pure.

A stage starts at a source or at a keyed operator and holds everything that can be reached from there
without an exchange: its chain. A stateless operator behind a union is part of the chain of every stage
that feeds the union; each record still passes it once. All sources run in the first wave of tasks; a
keyed stage runs in the wave after the last one that feeds it.
"""

from __future__ import annotations

import dataclasses

from holdfast.errors import PipelineError
from holdfast.plan.graph import SINK, SOURCE, Graph, Input, Key, Node


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Records on their way to a keyed operator: from one output of one node, by a key."""

    id: int
    node: int
    tag: str
    target: int
    key: Key
    order: int
    """The place among the target's inputs: records of the first come before those of the second."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """A chain between exchanges."""

    id: int
    root: int
    nodes: tuple[int, ...]
    exchanges: tuple[int, ...]
    sinks: tuple[int, ...]
    wave: int

    @property
    def reads(self) -> bool:
        return self.wave == 0


@dataclasses.dataclass(frozen=True)
class Stages:
    """What the engine runs: stages and exchanges of a graph."""

    graph: Graph
    stages: tuple[Stage, ...]
    exchanges: tuple[Exchange, ...]

    def of(self, root: int) -> Stage:
        """The stage that starts at a node."""
        return next(s for s in self.stages if s.root == root)

    @property
    def sources(self) -> list[Stage]:
        return [s for s in self.stages if s.reads]

    @property
    def keyed(self) -> list[Stage]:
        """Keyed stages, each after every stage that feeds it."""
        return sorted((s for s in self.stages if not s.reads), key=lambda s: (s.wave, s.id))

    def feeding(self, stage: Stage) -> list[Stage]:
        """The stages whose exchanges lead to this one."""
        leading = {e.id for e in self.exchanges if e.target == stage.root}
        return [s for s in self.stages if leading & set(s.exchanges)]

    def fed_by(self, stage: Stage) -> list[Stage]:
        """The keyed stages that this one's exchanges lead to."""
        targets = {self.exchanges[e].target for e in stage.exchanges}
        return [s for s in self.keyed if s.root in targets]

    def node(self, node: int) -> Node:
        return self.graph.nodes[node]


def cut(graph: Graph) -> Stages:
    """The stages of a checked graph."""
    exchanges = _exchanges(graph)
    roots = [n for n in graph.nodes if n.kind == SOURCE or n.keyed]
    reach = {root.id: _reach(graph, root) for root in roots}
    waves: dict[int, int] = {}
    stages = []
    for number, root in enumerate(roots):
        nodes = reach[root.id]
        waves[root.id] = _wave(root, exchanges, reach, waves)
        stages.append(
            Stage(
                id=number,
                root=root.id,
                nodes=tuple(sorted(nodes)),
                exchanges=tuple(e.id for e in exchanges if e.node in nodes),
                sinks=tuple(sorted(n for n in nodes if graph.nodes[n].kind == SINK)),
                wave=waves[root.id],
            )
        )
    return Stages(graph, tuple(stages), tuple(exchanges))


def _exchanges(graph: Graph) -> list[Exchange]:
    found: list[Exchange] = []
    for node in graph.nodes:
        for order, edge in enumerate(node.inputs):
            if edge.key is not None:
                found.append(Exchange(len(found), edge.node, edge.tag, node.id, edge.key, order))
            elif node.keyed:
                raise PipelineError("A keyed operator needs a keyed stream.", uid=node.uid, where=node.where)
    return found


def _reach(graph: Graph, root: Node) -> set[int]:
    nodes = {root.id}
    for node in graph.nodes[root.id + 1 :]:
        if not node.keyed and any(i.node in nodes for i in node.inputs):
            nodes.add(node.id)
    return nodes


def _wave(root: Node, exchanges: list[Exchange], reach: dict[int, set[int]], waves: dict[int, int]) -> int:
    if root.kind == SOURCE:
        return 0
    feeders = [e.node for e in exchanges if e.target == root.id]
    return 1 + max(waves[r] for r in waves for f in feeders if f in reach[r])


def takers(
    stages: Stages, stage: Stage, node: int, tag: str
) -> tuple[list[tuple[Node, Input]], list[Exchange]]:
    """Who takes an output inside a stage's chain: its next operators, and the exchanges that leave."""
    inside = [(n, i) for n, i in stages.graph.consumers(node, tag) if not n.keyed and n.id in stage.nodes]
    leaving = [e for e in stages.exchanges if e.node == node and e.tag == tag]
    return inside, leaving
