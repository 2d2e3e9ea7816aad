"""Runs a pipeline under a reporter, as `run` and `demo` do: signals, the log, and the end that is told."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from holdfast.cli.exit_codes import TERMINATED
from holdfast.cli.logs import start_log
from holdfast.cli.reporting import Reporter
from holdfast.config import Settings
from holdfast.engine.handle import run as run_pipeline
from holdfast.metrics import EpochFacts, Status
from holdfast.pipeline import Pipeline

Listener = Callable[[Status, EpochFacts | None], None]


def run_reported(
    pipeline: Pipeline, settings: Settings, reporter: Reporter, listener: Listener | None = None
) -> None:
    """Run until stopped, drained or done; the reporter hears it all, and how it ended."""
    start_log(settings.log_level)
    failed: BaseException | None = None
    with _terminated_cleanly():
        try:
            with reporter:
                run_pipeline(pipeline, spark=None, settings=settings, listener=listener or reporter.hear)
        except Exception as error:
            failed = error
            raise
        finally:
            if failed is not None or sys.exc_info()[1] is None:
                reporter.end(failed)


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
