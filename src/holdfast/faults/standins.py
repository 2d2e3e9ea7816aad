"""Stand-ins for a pipeline's sinks: folders of our own, so that an experiment never writes where the user does."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

from holdfast.io.folder import parquet
from holdfast.pipeline import Pipeline
from holdfast.plan import graph as g


def into_folders(pipeline: Pipeline, out: Path) -> Pipeline:
    """The same pipeline, every sink of which is a Parquet folder `out/<uid>`; the given one stays as it was."""
    made = copy.copy(pipeline)
    made._nodes = [
        dataclasses.replace(node, body=parquet(out / node.uid)) if node.kind == g.SINK else node
        for node in pipeline._nodes
    ]
    return made
