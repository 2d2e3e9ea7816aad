"""A pipeline's directory as `status`, `stop` and `state` find it: whose it is, and whether somebody lives there."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path

import psutil

from holdfast.errors import DirectoryError
from holdfast.log.journal import Journal
from holdfast.log.records import Identity
from holdfast.metrics import Status, read_status

ALIVE, DEAD, ELSEWHERE = "alive", "dead", "elsewhere"
LIVING = ("starting", "recovering", "running", "waiting")
"""The states of a run that has not ended, as it told them."""


@dataclasses.dataclass(frozen=True)
class Directory:
    """A directory that holds a pipeline."""

    path: Path
    journal: Journal
    identity: Identity

    def status(self) -> Status | None:
        """What its last run told of itself."""
        return read_status(self.path)


def open_directory(path: Path) -> Directory:
    """The pipeline's directory at a path, or an error that says what is there instead."""
    if not path.is_dir():
        raise DirectoryError(f"There is no directory {path}.", remedy=_others())
    journal = Journal.at(path)
    identity = journal.identity()
    if identity is None:
        raise DirectoryError(
            f"{path} is not the directory of a pipeline: it has no log/identity.json.", remedy=_others()
        )
    return Directory(path, journal, identity)


def _others() -> str:
    found = sorted(str(p.parent.parent) for p in Path(".holdfast").glob("*/log/identity.json"))
    return (
        f"There are: {', '.join(found)}."
        if found
        else "Pass what `holdfast run` had as --dir (.holdfast/<name>)."
    )


def process_of(status: Status) -> str:
    """Whether the process that wrote a status still lives: on this host it can be asked."""
    if status.host != socket.gethostname():
        return ELSEWHERE
    try:
        process = psutil.Process(status.pid)
        reused = process.create_time() * 1000 > status.started_ms + 2000
        return DEAD if reused or process.status() == psutil.STATUS_ZOMBIE else ALIVE
    except psutil.NoSuchProcess:
        return DEAD


def state_of(status: Status) -> str:
    """The state as it is, not as it was told: a run whose process has gone without a word has died."""
    if status.state in LIVING and process_of(status) == DEAD:
        return "died"
    return status.state


def is_running(status: Status | None) -> bool:
    """Whether somebody lives there, as far as can be known from here."""
    return status is not None and state_of(status) in LIVING
