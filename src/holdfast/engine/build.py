"""From a user's pipeline and settings to a program and the identity its directory is held to."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from holdfast.config import Settings
from holdfast.engine.aggregate import check_aggregates
from holdfast.engine.keys import check_alike
from holdfast.engine.program import Program, output_schema
from holdfast.errors import HoldfastError, IncompatibleError, PipelineError
from holdfast.functions import Aggregate, Column
from holdfast.io.base import Source
from holdfast.log.records import Commit, Identity
from holdfast.plan import graph as g
from holdfast.plan.stages import Stages, cut
from holdfast.plan.times import LATER, assigners, input_stamp, needs_time
from holdfast.state.descriptors import declared_states

if TYPE_CHECKING:
    from holdfast.pipeline import Pipeline


def build_stages(pipeline: Pipeline) -> Stages:
    """The stages of a pipeline, with the schemas of its sources read."""
    graph = pipeline.graph()
    nodes = []
    for node in graph.nodes:
        if node.kind == g.SOURCE:
            node = dataclasses.replace(node, schema=_schema_of(node))
        nodes.append(node)
    stages = cut(g.Graph(graph.name, tuple(nodes)))
    _check_columns(stages)
    _check_sides(stages)
    _check_times(stages)
    return stages


def _check_times(stages: Stages) -> None:
    """Raise for a window over a stream that has no event time, or several, and for what splits alone can be told."""
    for one in assigners(stages):
        if one.body.align is not None and one.roots:
            raise PipelineError(
                f"align can be had where a source is read, and this stands behind {one.roots[0]!r}.",
                uid=one.uid,
                where=stages.graph.by_uid(one.uid).where,
                remedy="Give it to an event_time before key_by: only a source can be held back.",
            )
    for node in stages.graph.of_kind(g.WINDOW):
        if input_stamp(stages.graph, node) is None:
            raise PipelineError(
                "A window needs event time, and its stream has none.",
                uid=node.uid,
                where=node.where,
                remedy='Say where it is before key_by: stream.event_time("ts", out_of_order="5s").',
            )
    for node in stages.graph.of_kind(*g.LIBRARY):
        sides = sorted({i.side for i in node.inputs})
        if needs_time(node) and any(input_stamp(stages.graph, node, side) is None for side in sides):
            raise PipelineError(
                f"A {node.kind} needs event time{' on both sides' if len(sides) > 1 else ''}, and there is none.",
                uid=node.uid,
                where=node.where,
                remedy='Say where it is before key_by: stream.event_time("ts", out_of_order="5s").',
            )


def impatient(stages: Stages, worker_s: float | None) -> list[str]:
    """Sentences on calls for which a worker may wait so long that it is taken for frozen."""
    return [
        f"[{node.uid}] a call may take {node.body.timeout_s:g} s, and a worker that is silent for {worker_s:g} s is "
        "killed: make its timeout shorter, or worker_timeout longer"
        for node in stages.graph.of_kind(g.ASYNC_MAP)
        if worker_s is not None and node.body.timeout_s >= worker_s
    ]


def _check_columns(stages: Stages) -> None:
    """Raise for a key or an aggregate over a column that its stream is known not to have, or not of a fitting type."""
    for exchange in stages.exchanges:
        schema = output_schema(stages.graph, exchange.node, exchange.tag)
        target = stages.node(exchange.target)
        if schema is None:
            continue
        wanted = {name: "key by" for name in exchange.key.columns}
        if target.kind in (g.AGGREGATE, g.WINDOW):
            body = target.body if target.kind == g.AGGREGATE else target.body.columns
            columns = [c for c in body.values() if isinstance(c, Column)]
            check_aggregates(target, columns, schema)
            wanted.update((c.column, "aggregate") for c in columns if c.column)
        if target.kind == g.TOP:
            wanted.update(dict.fromkeys(target.body.by, "rank by"))
        for name, purpose in wanted.items():
            if name not in schema.names:
                raise PipelineError(
                    f"There is no column {name!r} to {purpose}; there are {schema.names}.",
                    uid=target.uid,
                    where=target.where,
                    remedy="Name a column that the stream has.",
                )


def _check_sides(stages: Stages) -> None:
    """Raise for two sides whose keys are known not to fit each other."""
    found: dict[int, dict[int, set[tuple[pa.DataType, ...]]]] = {}
    for exchange in stages.exchanges:
        schema = output_schema(stages.graph, exchange.node, exchange.tag)
        if schema is None or not exchange.key.columns:
            continue
        side = stages.node(exchange.target).inputs[exchange.order].side
        kinds = tuple(schema.field(name).type for name in exchange.key.columns)
        found.setdefault(exchange.target, {}).setdefault(side, set()).add(kinds)
    for target, sides in found.items():
        if len(sides) > 1 and all(len(kinds) == 1 for kinds in sides.values()):
            check_alike(stages.node(target), *(next(iter(sides[side])) for side in sorted(sides)))


def _schema_of(node: g.Node) -> Any:
    source: Source = node.body
    try:
        return source.schema().remove_metadata()
    except HoldfastError as error:
        raise error.at(node.uid, node.where) from None


def checkpoint_url(settings: Settings, directory: str, identity: Identity) -> str:
    """Where checkpoints go: the directory's own folder, or a place of its own in a store that others may share."""
    if settings.checkpoint_dir is None:
        return f"{directory}/checkpoints"
    return f"{settings.checkpoint_dir.rstrip('/')}/{identity.home}"


def build_program(
    stages: Stages,
    settings: Settings,
    parallelism: int,
    directory: str,
    checkpoints: str | None = None,
    identity: Identity | None = None,
) -> Program:
    """What is sent to the executors. Without an identity nobody else may use its places."""
    return Program(
        name=stages.graph.name,
        home=stages.graph.name if identity is None else identity.home,
        stages=stages,
        parallelism=parallelism,
        key_groups=settings.key_groups,
        backend=settings.backend,
        staging=f"{directory}/staging",
        state_root=settings.state_root or f"{directory}/state",
        heap_limit_bytes=settings.heap_limit_bytes,
        rocksdb_cache_bytes=settings.rocksdb_cache_bytes,
        redact=settings.redact,
        checkpoint_url=checkpoints or f"{directory}/checkpoints",
        storage=settings.storage,
        answers=f"{directory}/answers",
    )


def identity_of(stages: Stages, settings: Settings, parallelism: int) -> Identity:
    """What a directory will belong to."""
    operators: dict[str, dict[str, Any]] = {}
    for node in stages.graph.nodes:
        if node.kind in g.NEEDS_UID:
            operators[node.uid] = {"kind": node.kind, **_facts(node)}
    return Identity(stages.graph.name, settings.key_groups, parallelism, settings.backend, operators)


def _facts(node: g.Node) -> dict[str, Any]:
    if node.kind in (g.PROCESS, g.ORDERED):
        function = node.body.function if node.kind == g.ORDERED else node.body
        states = declared_states(type(function))
        return {"states": {n: s.facts() for n, s in states.items()}, "key": _key(node)}
    if node.kind == g.AGGREGATE:
        shown = {n: _describe(a) for n, a in node.body.items()}
        return {"aggregates": shown, "key": _key(node)}
    if node.kind == g.REDUCE:
        return {"key": _key(node)}
    if node.kind == g.WINDOW:
        shown = {n: _describe(a) for n, a in node.body.columns.items()}
        return {**node.body.facts(), "aggregates": shown, "key": _key(node)}
    if node.kind in g.LIBRARY:
        return {**node.body.facts(), "key": _key(node)}
    return {"type": type(node.body).__name__}


def _key(node: g.Node) -> str:
    key = node.inputs[0].key
    return "" if key is None else (", ".join(key.columns) if key.columns else "function")


def _describe(aggregate: Any) -> str:
    if isinstance(aggregate, Aggregate):
        return f"{type(aggregate).__name__}: {aggregate.arrow_accumulator()}"
    return repr(aggregate)


def check_identity(there: Identity, here: Identity, directory: str, last: Commit | None = None) -> None:
    """Refuse a directory that belongs to another pipeline, or to this one with other uids or types.

    Changed code is compatible, and so is a new operator, source or sink: it starts with nothing. What the
    directory holds something for must still be there, and be of the same kind and types. Of an operator that a
    holdfast added which did not record it, only the state in the last commit tells.
    """
    unknown = set() if last is None else set(last.shards) - set(there.operators)
    stored = {**there.operators, **{uid: {"kind": "operator"} for uid in unknown - set(here.operators)}}
    there = msgspec.structs.replace(there, operators=stored)
    differences = list(_differences(there, here))
    if differences:
        raise IncompatibleError(
            f"The directory {directory} does not fit this pipeline: {differences[0]}.",
            remedy="Choose another directory (--dir), or bring the pipeline back to what the directory holds.",
            detail="\n".join([f"  - {d}" for d in differences] + [""] + _both_sides(there, here)),
        )


def _both_sides(there: Identity, here: Identity) -> list[str]:
    lines = []
    for title, one in (("in the directory", there), ("in this pipeline", here)):
        lines.append(
            f"  {title}: {one.name}, parallelism {one.parallelism}, {one.backend}, {one.key_groups} key groups"
        )
        for uid, facts in sorted(one.operators.items()):
            shown = ", ".join(f"{k} {v}" for k, v in facts.items() if k != "kind")
            lines.append(f"    {facts['kind']} {uid!r}: {shown}")
    return lines


def _differences(there: Identity, here: Identity) -> Any:
    if there.name != here.name:
        yield f"it belongs to the pipeline {there.name!r}, this is {here.name!r}"
        return
    for field in ("key_groups", "parallelism", "backend"):
        if getattr(there, field) != getattr(here, field):
            yield f"{field} was {getattr(there, field)!r} and is {getattr(here, field)!r} now"
    for uid in sorted(set(there.operators) - set(here.operators)):
        yield f"the {there.operators[uid]['kind']} {uid!r} is stored there and missing here"
    for uid in sorted(set(here.operators) & set(there.operators)):
        was, is_now = there.operators[uid], here.operators[uid]
        if was != is_now:
            changed = [k for k in {**was, **is_now} if was.get(k) != is_now.get(k)]
            for key in (k for k in changed if k != LATER or LATER in was):
                yield f"{uid!r}: {key} was {was.get(key)} and is {is_now.get(key)} now"
