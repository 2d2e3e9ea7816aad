"""holdfast: stateful streaming on Spark that is back within the deadline you set.

The public names, and nothing else.
"""

from holdfast import errors, testing
from holdfast.errors import HoldfastError
from holdfast.functions import (
    Aggregate,
    Context,
    KeyedProcess,
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
from holdfast.pipeline import KeyedStream, Pipeline, Stream
from holdfast.state.descriptors import ListState, MapState, ValueState

__version__ = "0.1.0"

__all__ = [
    "Aggregate",
    "Context",
    "Decided",
    "HoldfastError",
    "KeyedProcess",
    "KeyedStream",
    "Limit",
    "ListState",
    "MapState",
    "Offer",
    "Pipeline",
    "Range",
    "Reading",
    "Sink",
    "SinkWriter",
    "Source",
    "StagedFile",
    "Stream",
    "Target",
    "ValueState",
    "approx_distinct",
    "console",
    "count",
    "errors",
    "files",
    "first",
    "foreach_epoch",
    "jsonl",
    "last",
    "max",
    "mean",
    "memory",
    "min",
    "parquet",
    "rate",
    "records",
    "sum",
    "testing",
]
