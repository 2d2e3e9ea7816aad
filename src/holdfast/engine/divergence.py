"""A replayed epoch held against its first run: whether it led to something else, and who may be at fault.

A commit has three digests of each shard: of what came to it, of its changes to state, of what it sent on. Where the
changes differ and what came does not, it is the keyed operator. Where what came differs, it is something that runs
before the exchange. That digest accuses nobody by itself: it says only where to look.
"""

from __future__ import annotations

import zlib

from holdfast.engine.chain import Chain
from holdfast.engine.exchange import Inbox
from holdfast.engine.program import Program, Replayed, Report
from holdfast.errors import DivergedError
from holdfast.functions import Aggregate
from holdfast.plan import graph as g
from holdfast.plan.stages import Exchange

_REMEDY = (
    "Use ctx.now_ms, ctx.random and ctx.uuid instead of clocks, randomness and ids of your own, and nothing "
    'from outside. If the code was changed, bring it back, or accept the difference with on_divergence="warn".'
)
_REMEDY_BEFORE = (
    "A function without a context must give the same for the same record: no clock, no randomness, nothing from "
    'outside. If the code was changed, bring it back, or accept the difference with on_divergence="warn".'
)
_FUNCTIONS = (g.MAP, g.FILTER, g.FLAT_MAP, g.MAP_BATCHES)


def came_to(program: Program, node: g.Node, inbox: Inbox) -> dict[str, int]:
    """Of what came to a shard, by edge: the same whichever task read which range."""
    found = inbox.digests()
    return {edge_of(e, node): found.get(e.id, 0) for e in program.stages.exchanges if e.target == node.id}


def sent_by(chain: Chain) -> dict[str, int]:
    """Of what goes to later stages, by edge, in an order that the plan defines."""
    found = {}
    for number in sorted(chain.exchanges):
        crc = 0
        for shard, blob in chain.exchanges[number].blobs:
            crc = zlib.crc32(blob, zlib.crc32(shard.to_bytes(4, "little"), crc))
        found[chain.exchanges[number].edge] = crc
    return found


def edge_of(exchange: Exchange, target: g.Node) -> str:
    return f"{target.uid}<{exchange.order}"


def difference(program: Program, again: Replayed, node: g.Node, report: Report) -> DivergedError | None:
    """What a shard's replay of an epoch did other than the first run, and whose fault it may be; None: nothing."""
    assert report.sealed is not None
    first, now = again.digests[node.uid][report.shard], report.sealed.digest
    sent = again.sent[node.uid][report.shard]
    others = sorted(edge for edge, digest in sent.items() if report.sent.get(edge, digest) != digest)
    if first == now and not others:
        return None
    came = again.came[node.uid][report.shard]
    earlier = sorted(edge for edge, digest in came.items() if report.came.get(edge, digest) != digest)
    if earlier:
        return _before(program, node, report, earlier[0])
    what = f"its changes to state have digest {now:08x}, the first run's {first:08x}"
    if first == now:
        what = f"what it sent to {others[0].partition('<')[0]!r} has another digest than the first time"
        behind = [_named(n) for n in _passed(program, _exchange(program, others[0])) if n.kind in _FUNCTIONS]
        what += f"; it, or what its records pass then: {', '.join(behind)}" if behind else ""
    return DivergedError(
        f"Shard {report.shard} gave another result when epoch {report.epoch} was replayed: {what}.",
        uid=node.uid,
        where=node.where,
        remedy=_REMEDY,
    )


def _before(program: Program, node: g.Node, report: Report, edge: str) -> DivergedError:
    """Something that runs before an exchange gave other records: of all that may have, the first function is named."""
    exchange = _exchange(program, edge)
    passed = _passed(program, exchange)
    suspects = [n for n in passed if n.kind in _FUNCTIONS]
    suspects += [node] if _runs_before(node, exchange) else []
    suspects += [n for n in passed if n.kind == g.SOURCE or n.keyed]
    what = f"Other records than the first time came to shard {report.shard} of {node.uid!r} when epoch {report.epoch}"
    return DivergedError(
        f"{what} was replayed. At fault is one of: {', '.join(map(_named, suspects))}.",
        uid=suspects[0].uid,
        where=suspects[0].where,
        remedy=_REMEDY_BEFORE,
    )


def _named(node: g.Node) -> str:
    return f"{node.kind} {node.uid!r}"


def _exchange(program: Program, edge: str) -> Exchange:
    stages = program.stages
    return next(e for e in stages.exchanges if edge_of(e, stages.node(e.target)) == edge)


def _passed(program: Program, exchange: Exchange) -> list[g.Node]:
    """What an exchange's records pass, from their sources or keyed operators on."""
    nodes, found, ahead = program.stages.graph.nodes, set(), [exchange.node]
    while ahead:
        node = nodes[ahead.pop()]
        if node.id not in found:
            found.add(node.id)
            ahead += [] if node.keyed else [i.node for i in node.inputs]
    return [nodes[n] for n in sorted(found)]


def _runs_before(target: g.Node, exchange: Exchange) -> bool:
    """Whether code of the user's, of the operator behind an exchange, runs in front of it: its key, or its combining."""
    columns = target.body.columns if target.kind == g.WINDOW else target.body
    own = target.kind in (g.AGGREGATE, g.WINDOW) and any(isinstance(a, Aggregate) for a in columns.values())
    return exchange.key.function is not None or target.kind == g.REDUCE or own
