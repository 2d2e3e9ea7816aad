"""A fingerprint of a pipeline's code: the same for the same code, in any process. Pure.

It covers what operators do (the byte code of functions, with constants and names, and of classes' methods)
and how they are wired; not what their closures and globals hold, nor the modules they call. A change that it sees
makes a checkpoint before the new code runs, so that no replay crosses it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import types
from typing import Any

from holdfast.plan.graph import Graph

ENGINE = 4
"""One more whenever the engine itself makes other bytes of the same records: another order, other deltas."""


def fingerprint(graph: Graph) -> str:
    """Of all operators and how they are wired."""
    digest = hashlib.sha256(f"engine {ENGINE}".encode())
    for node in graph.nodes:
        wired = [(i.node, i.tag, i.key and i.key.columns) for i in node.inputs]
        digest.update(f"{node.kind}:{node.uid}:{wired}".encode())
        _feed(digest, node.body, depth=0)
        for edge in node.inputs:
            if edge.key is not None and edge.key.function is not None:
                _feed(digest, edge.key.function, depth=0)
    return digest.hexdigest()[:16]


def _feed(digest: Any, thing: Any, depth: int) -> None:
    if depth > 6:
        return
    if isinstance(thing, types.CodeType):
        digest.update(thing.co_code)
        digest.update(repr(thing.co_names).encode())
        for constant in thing.co_consts:
            _feed(digest, constant, depth + 1)
    elif isinstance(thing, (types.FunctionType, types.MethodType)):
        _feed(digest, thing.__code__, depth + 1)
    elif isinstance(thing, type):
        if not thing.__module__.startswith("holdfast."):
            for name in sorted(vars(thing)):
                digest.update(name.encode())
                _feed(digest, vars(thing)[name], depth + 1)
    elif isinstance(thing, (frozenset, set)):
        digest.update(repr(sorted(map(repr, thing))).encode())
    elif isinstance(thing, (str, bytes, int, float, bool, type(None), complex)):
        digest.update(repr(thing).encode())
    elif isinstance(thing, (tuple, list)):
        for one in thing:
            _feed(digest, one, depth + 1)
    elif isinstance(thing, dict):
        for key in sorted(thing, key=repr):
            digest.update(repr(key).encode())
            _feed(digest, thing[key], depth + 1)
    elif dataclasses.is_dataclass(thing):
        _feed(digest, type(thing), depth + 1)
        for field in dataclasses.fields(thing):
            _feed(digest, getattr(thing, field.name, None), depth + 1)  # one may be set later
    elif isinstance(thing, (staticmethod, classmethod)):
        _feed(digest, thing.__func__, depth + 1)
    else:
        _feed(digest, type(thing), depth + 1)
