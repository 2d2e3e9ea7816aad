"""The operators of the library: which class runs which."""

from __future__ import annotations

from holdfast.engine.joined import join_operator
from holdfast.engine.keyed import Operator
from holdfast.engine.ordered import Ordered
from holdfast.engine.patterns import Patterns
from holdfast.engine.ranked import Deduplicate, Top
from holdfast.plan import graph as g


def library_operator(node: g.Node, redact: bool) -> Operator:
    """The operator for a node of the library."""
    if node.kind == g.JOIN:
        return join_operator(node, redact)
    kinds: dict[str, type[Operator]] = {
        g.DEDUPLICATE: Deduplicate,
        g.TOP: Top,
        g.PATTERN: Patterns,
        g.ORDERED: Ordered,
    }
    return kinds[node.kind](node, redact)
