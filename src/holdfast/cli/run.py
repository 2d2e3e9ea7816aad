"""`holdfast run`: loads a pipeline, runs it, shows what it does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from holdfast.cli.loading import load
from holdfast.cli.reporting import reporter_for
from holdfast.cli.running import run_reported
from holdfast.cli.view import run_view
from holdfast.config import Settings, resolve
from holdfast.errors import ConfigError
from holdfast.io.console import ConsoleSink
from holdfast.pipeline import Pipeline
from holdfast.plan import graph as g


def run(
    app: Annotated[str, typer.Argument(metavar="APP[:pipeline]", help="A Python file or a dotted module.")],
    master: Annotated[str | None, typer.Option(help="Spark master; local[*] unless told.")] = None,
    parallelism: Annotated[int | None, typer.Option(help="Shards of each keyed stage.")] = None,
    backend: Annotated[str | None, typer.Option(help="Where keyed state lives: heap or rocksdb.")] = None,
    dir: Annotated[
        str | None, typer.Option(help="The pipeline's directory; .holdfast/<name> unless told.")
    ] = None,
    drain: Annotated[bool, typer.Option("--drain", help="Stop when no source has anything left.")] = False,
    epochs: Annotated[int | None, typer.Option(help="Stop after so many epochs.")] = None,
    interval: Annotated[str | None, typer.Option(help="How often an epoch is cut: 500ms, 2s.")] = None,
    cut: Annotated[str | None, typer.Option(help="When an epoch is cut: interval, data or full.")] = None,
    max_records: Annotated[int | None, typer.Option(help="The most records an epoch takes.")] = None,
    conf: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A Spark setting; again for more.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Settings file; holdfast.toml here unless told.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line: each epoch, then the end.")
    ] = False,
) -> None:
    """Run a pipeline until it is stopped, drained or done.

    Started again on the same directory it goes on where it stopped.
    Ctrl-C and SIGTERM finish the epoch and stop with exit code 0; a second
    Ctrl-C gives up waiting.
    """
    given = {
        "master": master,
        "parallelism": parallelism,
        "backend": backend,
        "dir": dir,
        "drain": drain or None,
        "epochs": epochs,
        "interval": interval,
        "cut": cut,
        "max_records": max_records,
    }
    settings = settings_of(given, conf or [], config)
    pipeline = load(app)
    tables = _console_sinks(pipeline)
    reporter = reporter_for(json=json, draw=lambda seen: run_view(seen, _drawn(tables)))
    for sink in tables.values():
        sink.embedded = reporter.owns_output
    run_reported(pipeline, settings, reporter)


def settings_of(given: dict[str, Any], conf: Sequence[str], file: Path | None) -> Settings:
    """All settings; Spark's from the command line are added to those of the file."""
    if conf:
        given = {**given, "spark": {**resolve({}, file=file).settings.spark, **dict(map(_pair, conf))}}
    return resolve(given, file=file).settings


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"--conf {text!r} is no KEY=VALUE.", remedy="Write --conf spark.executor.memory=2g."
        )
    return key.strip(), value


def _console_sinks(pipeline: Pipeline) -> dict[str, ConsoleSink]:
    return {n.uid: n.body for n in pipeline.graph().of_kind(g.SINK) if isinstance(n.body, ConsoleSink)}


def _drawn(sinks: dict[str, ConsoleSink]) -> list[RenderableType]:
    """Two views can't share a screen: the tables of console sinks stand below ours."""
    return [sink.renderable(uid) for uid, sink in sinks.items()]
