"""The user's graph: operators as nodes, each knowing the file and line that defined it.

`pipeline` builds it; `stages` cuts it. Nothing here runs anything.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from types import FrameType
from typing import Any

import pyarrow as pa

from holdfast.errors import PipelineError, UidError

MAIN = ""
"""The tag of an operator's main output; side outputs have the user's tags."""

SOURCE, MAP, FILTER, FLAT_MAP, MAP_BATCHES, UNION, EVENT_TIME, PROCESS, AGGREGATE, REDUCE, WINDOW, SINK = (
    "source",
    "map",
    "filter",
    "flat_map",
    "map_batches",
    "union",
    "event_time",
    "process",
    "aggregate",
    "reduce",
    "window",
    "sink",
)
ASYNC_MAP = "async_map"
JOIN, DEDUPLICATE, TOP, PATTERN, ORDERED = "join", "deduplicate", "top", "pattern", "process in order"
LIBRARY = (JOIN, DEDUPLICATE, TOP, PATTERN, ORDERED)
"""Operators of the library: they take records as they are, and keep them as they are."""
KEYED = (PROCESS, AGGREGATE, REDUCE, WINDOW, *LIBRARY)
NEEDS_UID = (SOURCE, SINK, *KEYED)
_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclasses.dataclass(frozen=True)
class Key:
    """What a stream is keyed by: columns, or a function of the record."""

    columns: tuple[str, ...] = ()
    function: Any = None

    def describe(self) -> str:
        return ", ".join(self.columns) if self.columns else getattr(self.function, "__name__", "function")


@dataclasses.dataclass(frozen=True)
class Input:
    """One incoming edge: a node's output, and the key where an exchange stands between."""

    node: int
    tag: str = MAIN
    key: Key | None = None
    side: int = 0
    """On which side of an operator with two inputs it comes in."""


@dataclasses.dataclass(frozen=True)
class Node:
    """One operator as the user wrote it."""

    id: int
    kind: str
    uid: str
    body: Any
    inputs: tuple[Input, ...] = ()
    tags: tuple[str, ...] = (MAIN,)
    schema: pa.Schema | None = None
    where: str = ""

    @property
    def keyed(self) -> bool:
        return self.kind in KEYED


@dataclasses.dataclass(frozen=True)
class Graph:
    """All operators of a pipeline, each after its inputs."""

    name: str
    nodes: tuple[Node, ...]

    def consumers(self, node: int, tag: str) -> list[tuple[Node, Input]]:
        """Who takes an output, in the order in which the user connected them."""
        return [(n, i) for n in self.nodes for i in n.inputs if i.node == node and i.tag == tag]

    def of_kind(self, *kinds: str) -> list[Node]:
        return [n for n in self.nodes if n.kind in kinds]

    def by_uid(self, uid: str) -> Node:
        return next(n for n in self.nodes if n.uid == uid)


def check_uid(uid: Any, kind: str, where: str, taken: dict[str, str]) -> str:
    """A uid that can name files and metrics and is used once, or an error that says why not."""
    if not isinstance(uid, str) or not uid:
        raise UidError(
            f"A {kind} needs a uid as its first argument, not {uid!r}.",
            where=where,
            remedy="Name it with a word that stays the same when the code changes: its state is stored under it.",
        )
    if not _UID.fullmatch(uid):
        raise UidError(
            f"{uid!r} can't be a uid.",
            where=where,
            remedy="Use letters, digits, '-', '_' and '.', at most 100, starting with a letter or digit.",
        )
    if uid in taken:
        raise UidError(
            f"The uid {uid!r} is used twice: here and at {taken[uid]}.",
            uid=uid,
            where=where,
            remedy="Give each operator a uid of its own.",
        )
    taken[uid] = where
    return uid


def check(graph: Graph) -> None:
    """Raise for a graph that can't run: no source, nothing written, an output nobody declared."""
    if not graph.of_kind(SOURCE):
        raise PipelineError(
            f"The pipeline {graph.name!r} reads nothing.", remedy="Start with pipeline.read(uid, source)."
        )
    if not graph.of_kind(SINK):
        raise PipelineError(
            f"The pipeline {graph.name!r} writes nothing.", remedy="End a stream with .write(uid, sink)."
        )
    for node in graph.of_kind(SOURCE, ASYNC_MAP):
        if "dead_letter" in node.tags and not graph.consumers(node.id, "dead_letter"):
            raise PipelineError(
                f"{'Bad records' if node.kind == SOURCE else 'Records without an answer'} "
                "are to go to the dead letters, but nobody takes them.",
                uid=node.uid,
                where=node.where,
                remedy='Connect them: stream.side("dead_letter").write(uid, sink).',
            )


def caller() -> str:
    """File and line of the user's call: the nearest frame outside this package."""
    frame = _user_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def caller_module() -> str:
    """The module of the user's call."""
    return str(_user_frame().f_globals.get("__name__", "__main__"))


def _user_frame() -> FrameType:
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").split(".")[0] == "holdfast" and frame.f_back is not None:
        frame = frame.f_back
    return frame
