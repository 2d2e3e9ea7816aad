"""`holdfast stop`: asks a running pipeline to finish its epoch, through its directory, and waits for it."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console

from holdfast.cli.directory import Directory, is_running, open_directory, state_of
from holdfast.cli.output import console
from holdfast.config import parse_duration_s
from holdfast.errors import HoldfastError
from holdfast.metrics import Status
from holdfast.supervise.supervisor import read_supervision

_LOOK_EVERY_S = 0.1


def stop(
    dir: Annotated[Path, typer.Argument(metavar="DIR", help="The pipeline's directory.")],
    wait: Annotated[str, typer.Option(help="How long to wait for its end.")] = "60s",
) -> None:
    """Ask a pipeline to finish its epoch and stop, wherever its driver runs, and wait until it has."""
    wait_s = parse_duration_s(wait)
    directory = open_directory(dir)
    told = directory.status()
    out = console()
    if told is None or not is_running(told):
        if _stop_supervisor(directory):
            out.print(
                f"The supervisor of {dir} was between two starts, and was told not to start again.",
                soft_wrap=True,
            )
            return
        out.print(f"Nothing is running in {dir}: {_how(told)}.", soft_wrap=True)
        return
    directory.journal.ask_to_stop()
    ended = _wait(directory, told, wait_s, out)
    if ended is None:
        raise HoldfastError(
            f"{told.pipeline} has not stopped within {wait}; it was asked to, and will after the epoch it is in.",
            remedy=f"Wait longer (--wait), or look at it: holdfast status {dir}.",
        )
    out.print(f"{ended.pipeline} {state_of(ended)} after epoch {ended.epoch}.", soft_wrap=True)


def _stop_supervisor(directory: Directory) -> bool:
    """Between two lives of a driver there is only its supervisor to be asked, on its own host."""
    found = read_supervision(directory.path)
    if found is None or found.host != socket.gethostname() or found.child_pid is not None:
        return False
    try:
        process = psutil.Process(found.pid)
        if process.create_time() * 1000 > found.started_ms + 2000:
            return False  # another process has its number by now
        process.terminate()
    except psutil.NoSuchProcess:
        return False
    return True


def _how(told: Status | None) -> str:
    if told is None:
        return "nothing has run there yet"
    return (
        f"the last run {'' if state_of(told) == 'died' else 'has '}{state_of(told)} after epoch {told.epoch}"
    )


def _wait(directory: Directory, told: Status, wait_s: float, out: Console) -> Status | None:
    """The status of the run that has ended; None where it did not in time."""
    until = time.monotonic() + wait_s
    with out.status(f"{told.pipeline} is finishing its epoch…") if sys.stdout.isatty() else _quiet(out, told):
        while time.monotonic() < until:
            now = directory.status()
            if now is not None and now.generation >= told.generation and not is_running(now):
                return now
            time.sleep(_LOOK_EVERY_S)
    return None


class _quiet:
    """Where there is no terminal: one line instead of a spinner."""

    def __init__(self, out: Console, told: Status) -> None:
        out.print(
            f"{told.pipeline} (process {told.pid} on {told.host}) was asked to stop after epoch {told.epoch}."
        )

    def __enter__(self) -> None:
        return

    def __exit__(self, *error: object) -> None:
        return
