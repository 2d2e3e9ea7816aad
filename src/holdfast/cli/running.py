"""Runs a pipeline under a reporter, as `run` and `demo` do: signals, logs, and the end that is told."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from holdfast.cli.exit_codes import TERMINATED
from holdfast.cli.logs import start_log
from holdfast.cli.noise import SparkNoise
from holdfast.cli.reporting import Reporter
from holdfast.config import Settings
from holdfast.engine.handle import run as run_pipeline
from holdfast.errors import DirectoryError
from holdfast.metrics import EpochFacts, Status
from holdfast.pipeline import Pipeline
from holdfast.supervise.heartbeat import start_heartbeat

Listener = Callable[[Status, EpochFacts | None], None]


def run_reported(
    pipeline: Pipeline, settings: Settings, reporter: Reporter, listener: Listener | None = None
) -> None:
    """Run until stopped, drained or done; the reporter hears it all, and how it ended."""
    start_heartbeat()
    start_log(settings.log_level)
    noise = SparkNoise(Path(settings.dir or f".holdfast/{pipeline.name}"))
    tell = listener or reporter.hear

    def heard(status: Status, facts: EpochFacts | None) -> None:
        if status.state != "starting":
            noise.end(show=False)
        tell(status, facts)

    with _terminated_cleanly():
        try:
            with reporter:
                noise.begin()
                run_pipeline(pipeline, spark=None, settings=settings, listener=heard)
        except Exception as error:
            noise.end(show=not isinstance(error, DirectoryError))
            reporter.end(error)
            raise
        finally:
            noise.end(show=False)
        reporter.end(None)


@contextmanager
def _terminated_cleanly() -> Iterator[None]:
    """Until the engine takes the signals, SIGTERM unwinds, so that a live view gives the terminal back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
