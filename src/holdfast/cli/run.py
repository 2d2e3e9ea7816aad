"""`holdfast run`: loads a pipeline, runs it, shows what it does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from holdfast.cli.loading import load
from holdfast.cli.output import Unbroken, print_json
from holdfast.cli.reporting import reporter_for
from holdfast.cli.running import run_reported
from holdfast.cli.view import run_view
from holdfast.config import Settings, resolve
from holdfast.errors import ConfigError
from holdfast.io.console import ConsoleSink
from holdfast.pipeline import Pipeline
from holdfast.plan import graph as g
from holdfast.supervise.heartbeat import start_heartbeat
from holdfast.supervise.strategies import parse_restart
from holdfast.supervise.supervisor import Event, Supervisor, child_command


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
    guarantee: Annotated[
        str | None, typer.Option(help="What output keeps to: exactly_once or at_least_once.")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(help="Within this recovery must end, whatever dies: 70s.")
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="When state is backed up: deadline, 30s, '10 epochs', 'young-daly 24h', manual or never."
        ),
    ] = None,
    checkpoint_dir: Annotated[
        str | None,
        typer.Option(help="Where checkpoints go: a folder or a URL; <dir>/checkpoints unless told."),
    ] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take the pipeline from a driver that still lives.")
    ] = False,
    supervise: Annotated[
        bool, typer.Option("--supervise", help="Start the driver again when it dies or falls silent.")
    ] = False,
    restart: Annotated[
        str | None,
        typer.Option(
            help="With --supervise: none, 'fixed 5s', 'exponential 1s 60s' or 'rate 5 10m'.",
        ),
    ] = None,
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

    With --supervise the driver is a child of this process, which starts it
    again when it dies or falls silent. The settings restart and
    driver_timeout say how. If this process itself is killed, the driver goes on.
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
        "guarantee": guarantee,
        "deadline": deadline,
        "checkpoint": checkpoint,
        "checkpoint_dir": checkpoint_dir,
        "take_over": take_over or None,
        "restart": restart,
    }
    settings = settings_of(given, conf or [], config)
    if supervise:
        raise typer.Exit(_supervised(app, settings, json=json))
    # Before the user's file is loaded, which may take longer than a supervisor waits.
    start_heartbeat()
    pipeline = load(app)
    tables = _console_sinks(pipeline)
    reporter = reporter_for(json=json, draw=lambda seen: run_view(seen, _drawn(tables)))
    for sink in tables.values():
        sink.embedded = reporter.owns_output
    run_reported(pipeline, settings, reporter)


def _supervised(app: str, settings: Settings, *, json: bool) -> int:
    """Run this very command line as a child, again and again if need be; gives the exit code.

    The directory is all that a supervisor needs to know, so the user's file is loaded only where it names it.
    """
    directory = Path(settings.dir or f".holdfast/{load(app).name}")
    supervisor = Supervisor(
        child_command(sys.argv[1:], without=["--supervise"]),
        directory.absolute(),
        # Only the first life takes over. A later one that finds another driver there has been replaced itself.
        later=child_command(sys.argv[1:], without=["--supervise", "--take-over"]),
        later_environment={"HOLDFAST_TAKE_OVER": "false"},
        strategy=parse_restart(settings.restart),
        timeout_s=settings.driver_timeout_s,
        tell=lambda event: _tell(event, json=json),
    )
    return supervisor.run()


def _tell(event: Event, *, json: bool) -> None:
    if json:
        print_json(event.facts())
    out = Unbroken(sys.stderr)
    out.write(f"{event}\n")
    out.flush()


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
