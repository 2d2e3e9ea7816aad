"""holdfast: stateful streaming on Spark that is back within the deadline you set.

The public names, and nothing else. Each is imported when it is first used: Spark starts a process for every shard,
one after the other, and each imports this package before it knows what it is for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast import errors, testing
    from holdfast.errors import HoldfastError
    from holdfast.functions import (
        Aggregate,
        Context,
        KeyedProcess,
        Timer,
        TwoInputProcess,
        WindowFunction,
        approx_distinct,
        count,
        first,
        last,
        max,
        mean,
        min,
        sum,
    )
    from holdfast.io.base import (
        Decided,
        Limit,
        Offer,
        Range,
        Reading,
        Sink,
        SinkWriter,
        Source,
        StagedFile,
        Target,
    )
    from holdfast.io.console import console
    from holdfast.io.files import files
    from holdfast.io.folder import jsonl, parquet
    from holdfast.io.foreach import foreach_epoch
    from holdfast.io.memory import memory, records
    from holdfast.io.rate import rate
    from holdfast.library.joins import AsOfJoin, IntervalJoin, JoinedStreams, WindowJoin
    from holdfast.library.patterns import Pattern, pattern
    from holdfast.library.windows import WindowedStream
    from holdfast.pipeline import ConnectedStreams, KeyedStream, Pipeline, Stream
    from holdfast.state.descriptors import ListState, MapState, ValueState
    from holdfast.time import triggers
    from holdfast.time.triggers import Decision, Trigger
    from holdfast.time.watermarks import Watermarks, ascending, bounded, from_source, periodic, punctuated
    from holdfast.time.windows import Assigner, Window, global_window, session, sliding, tumbling

__version__ = "0.1.0"

_HOME = {
    "Aggregate": "holdfast.functions",
    "AsOfJoin": "holdfast.library.joins",
    "Assigner": "holdfast.time.windows",
    "Context": "holdfast.functions",
    "Decided": "holdfast.io.base",
    "Decision": "holdfast.time.triggers",
    "HoldfastError": "holdfast.errors",
    "IntervalJoin": "holdfast.library.joins",
    "JoinedStreams": "holdfast.library.joins",
    "KeyedProcess": "holdfast.functions",
    "ConnectedStreams": "holdfast.pipeline",
    "KeyedStream": "holdfast.pipeline",
    "Limit": "holdfast.io.base",
    "ListState": "holdfast.state.descriptors",
    "MapState": "holdfast.state.descriptors",
    "Offer": "holdfast.io.base",
    "Pattern": "holdfast.library.patterns",
    "Pipeline": "holdfast.pipeline",
    "Range": "holdfast.io.base",
    "Reading": "holdfast.io.base",
    "Sink": "holdfast.io.base",
    "SinkWriter": "holdfast.io.base",
    "Source": "holdfast.io.base",
    "StagedFile": "holdfast.io.base",
    "Stream": "holdfast.pipeline",
    "Target": "holdfast.io.base",
    "Timer": "holdfast.functions",
    "Trigger": "holdfast.time.triggers",
    "TwoInputProcess": "holdfast.functions",
    "ValueState": "holdfast.state.descriptors",
    "Watermarks": "holdfast.time.watermarks",
    "Window": "holdfast.time.windows",
    "WindowJoin": "holdfast.library.joins",
    "WindowFunction": "holdfast.functions",
    "WindowedStream": "holdfast.library.windows",
    "approx_distinct": "holdfast.functions",
    "ascending": "holdfast.time.watermarks",
    "bounded": "holdfast.time.watermarks",
    "console": "holdfast.io.console",
    "count": "holdfast.functions",
    "errors": "holdfast.errors",
    "files": "holdfast.io.files",
    "first": "holdfast.functions",
    "foreach_epoch": "holdfast.io.foreach",
    "from_source": "holdfast.time.watermarks",
    "global_window": "holdfast.time.windows",
    "jsonl": "holdfast.io.folder",
    "last": "holdfast.functions",
    "max": "holdfast.functions",
    "mean": "holdfast.functions",
    "memory": "holdfast.io.memory",
    "min": "holdfast.functions",
    "parquet": "holdfast.io.folder",
    "pattern": "holdfast.library.patterns",
    "periodic": "holdfast.time.watermarks",
    "punctuated": "holdfast.time.watermarks",
    "rate": "holdfast.io.rate",
    "records": "holdfast.io.memory",
    "session": "holdfast.time.windows",
    "sliding": "holdfast.time.windows",
    "sum": "holdfast.functions",
    "testing": "holdfast.testing",
    "triggers": "holdfast.time.triggers",
    "tumbling": "holdfast.time.windows",
}
"""Where each public name is defined."""
_MODULES = ("errors", "testing", "triggers")
"""Those that are modules themselves."""


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(home)
    found = module if name in _MODULES else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


__all__ = [
    "Aggregate",
    "AsOfJoin",
    "Assigner",
    "ConnectedStreams",
    "Context",
    "Decided",
    "Decision",
    "HoldfastError",
    "IntervalJoin",
    "JoinedStreams",
    "KeyedProcess",
    "KeyedStream",
    "Limit",
    "ListState",
    "MapState",
    "Offer",
    "Pattern",
    "Pipeline",
    "Range",
    "Reading",
    "Sink",
    "SinkWriter",
    "Source",
    "StagedFile",
    "Stream",
    "Target",
    "Timer",
    "Trigger",
    "TwoInputProcess",
    "ValueState",
    "Watermarks",
    "Window",
    "WindowFunction",
    "WindowJoin",
    "WindowedStream",
    "approx_distinct",
    "ascending",
    "bounded",
    "console",
    "count",
    "errors",
    "files",
    "first",
    "foreach_epoch",
    "from_source",
    "global_window",
    "jsonl",
    "last",
    "max",
    "mean",
    "memory",
    "min",
    "parquet",
    "pattern",
    "periodic",
    "punctuated",
    "rate",
    "records",
    "session",
    "sliding",
    "sum",
    "testing",
    "triggers",
    "tumbling",
]
