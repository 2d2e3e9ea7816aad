"""`holdfast plan`: operators, chains, stages and exchanges of a pipeline, as a tree, as JSON, as a picture.

Nothing is run and no source is asked; the picture is `plan.draw`'s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text
from rich.tree import Tree

from holdfast.cli.loading import load
from holdfast.cli.output import console, print_json
from holdfast.plan import graph as g
from holdfast.plan.draw import detail_of, draw, title_of
from holdfast.plan.stages import Exchange, Stage, Stages, cut, takers
from holdfast.state.descriptors import declared_states

_COLOURS = {g.SOURCE: "green", g.SINK: "dark_orange3", **dict.fromkeys(g.KEYED, "medium_purple")}


def plan(
    app: Annotated[str, typer.Argument(metavar="APP[:pipeline]", help="A Python file or a dotted module.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Draw it into this file.")] = None,
) -> None:
    """Show a pipeline's operators, chains, stages and exchanges, and draw them."""
    stages = cut(load(app).graph())
    if svg is not None:
        svg.parent.mkdir(parents=True, exist_ok=True)
        svg.write_text(draw(stages))
    if json:
        print_json(plan_facts(stages))
        return
    out = console()
    out.print(plan_tree(stages))
    if svg is not None:
        out.print(f"\ndrawn: {svg}", highlight=False)


def plan_tree(stages: Stages) -> Tree:
    """Stages as branches, each with its chain; an exchange is a leaf that names where it leads."""
    counts = f"{_count(stages.stages, 'stage')}, {_count(stages.exchanges, 'exchange')}"
    tree = Tree(
        Text.assemble((stages.graph.name, "bold"), f": {_count(stages.graph.nodes, 'operator')}, {counts}")
    )
    for stage in sorted(stages.stages, key=lambda s: (s.wave, s.id)):
        root = stages.node(stage.root)
        what = "reads" if root.kind == g.SOURCE else f"shards by {_keys(root)}"
        branch = tree.add(Text.assemble((f"stage {stage.id}", "bold"), (f" · {what}", "dim")))
        _grow(branch, stages, stage, root, "", set())
    return tree


def _grow(branch: Tree, stages: Stages, stage: Stage, node: g.Node, tag: str, shown: set[int]) -> None:
    again = node.id in shown
    shown.add(node.id)
    grown = branch.add(_operator(node, tag, again))
    if again:
        return
    for out in node.tags:
        inside, leaving = takers(stages, stage, node.id, out)
        for taker in {n.id: n for n, _ in inside}.values():
            _grow(grown, stages, stage, taker, out, shown)
        for exchange in leaving:
            grown.add(_exchange(stages, exchange, out))


def _operator(node: g.Node, tag: str, again: bool) -> Text:
    side = (f"[{tag}] ", "italic") if tag else ""
    text = Text.assemble(
        side, (title_of(node), f"bold {_COLOURS.get(node.kind, 'default')}"), (f"  {node.kind}", "dim")
    )
    if again:
        return text.append("  (above)", style="dim")
    detail = detail_of(node)
    states = ", ".join(_states(node))
    text.append(f"  {detail}" if detail else "")
    text.append(f"  state: {states}" if states else "")
    return text.append(f"  {_place(node.where)}", style="dim")


def _exchange(stages: Stages, exchange: Exchange, tag: str) -> Text:
    target = stages.of(exchange.target)
    side = (f"[{tag}] ", "italic") if tag else ""
    combined = "  combined before it is sent" if _combines(stages, exchange) else ""
    lead = f"══ by {exchange.key.describe()} ══▶ stage {target.id} ({stages.node(exchange.target).uid})"
    return Text.assemble(side, (lead, "dodger_blue2"), (combined, "dim"))


def _combines(stages: Stages, exchange: Exchange) -> bool:
    target = stages.node(exchange.target)
    return target.kind in (g.AGGREGATE, g.REDUCE) or (target.kind == g.WINDOW and target.body.in_batches)


def _states(node: g.Node) -> list[str]:
    if node.kind not in (g.PROCESS, g.ORDERED):
        return []
    function = node.body.function if node.kind == g.ORDERED else node.body
    return [f"{name} ({state.kind})" for name, state in declared_states(type(function)).items()]


def _keys(node: g.Node) -> str:
    return ", ".join(dict.fromkeys(i.key.describe() for i in node.inputs if i.key))


def _place(where: str) -> str:
    """File and line, without the folders that the reader is in."""
    here = f"{Path.cwd()}/"
    return where.removeprefix(here)


def _count(things: Any, name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def plan_facts(stages: Stages) -> dict[str, Any]:
    """The plan as plain data."""
    uid = {n.id: n.uid for n in stages.graph.nodes}
    return {
        "pipeline": stages.graph.name,
        "operators": [
            {
                "uid": n.uid,
                "kind": n.kind,
                "detail": detail_of(n),
                "states": _states(n),
                "inputs": [{"uid": uid[i.node], "tag": i.tag} for i in n.inputs],
                "where": n.where,
            }
            for n in stages.graph.nodes
        ],
        "stages": [
            {
                "id": s.id,
                "wave": s.wave,
                "root": uid[s.root],
                "keyed": not s.reads,
                "chain": [uid[n] for n in s.nodes],
                "sinks": [uid[n] for n in s.sinks],
                "exchanges": list(s.exchanges),
            }
            for s in stages.stages
        ],
        "exchanges": [
            {
                "id": e.id,
                "from": uid[e.node],
                "tag": e.tag,
                "to": uid[e.target],
                "key": e.key.describe(),
                "combined": _combines(stages, e),
            }
            for e in stages.exchanges
        ],
    }
