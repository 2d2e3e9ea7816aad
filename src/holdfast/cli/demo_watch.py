"""Watches the demo's application from outside: its status, and the JSON lines and messages in its log.

The application is not this process, and one life of it knows nothing of those before; here they are one run.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import msgspec

from holdfast.cli.demo_story import Story, Teller
from holdfast.cli.directory import DEAD, LIVING, process_of
from holdfast.metrics import EpochFacts, Status, read_status

_LOOK_EVERY_S = 0.1
_EPOCH = b'{"event":"epoch"'


class Watch:
    """Looks at the application from outside, several times a second, and lets the teller hear of it and of the story.

    All that is told is told by one thread.

    Args:
        home: the experiment's folder.
    """

    def __init__(self, home: Path, story: Story, teller: Teller) -> None:
        self._directory, self._log = home / "dir", home / "application.log"
        self._story, self._teller = story, teller
        self._read_bytes = 0
        self._earlier = 0
        """The records of drivers before this one."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="demo-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look_on(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S):
            self.look()
        self.look()

    def look(self) -> None:
        """Tell what is new: what was run, what happened to it, and what it says to that."""
        lines = self._new_lines()
        for line in lines:
            self._take_epoch(line)
        status = read_status(self._directory)
        if status is not None and self._is_new(status := as_it_is(status)):
            self._hear(status, None)
        for event in self._story.news():
            self._teller.tell(event)
        for line in lines:
            if line.startswith(_EPOCH):
                self._story.progress = ""
            elif not line.startswith(b"{"):
                self._story.progress = line.decode(errors="replace")
                self._teller.progress(self._story.progress)

    def _take_epoch(self, line: bytes) -> None:
        """An epoch, if a line of the log tells of one and was not cut off by a fault."""
        if not line.startswith(_EPOCH):
            return
        with contextlib.suppress(msgspec.DecodeError):
            facts = msgspec.json.decode(line, type=EpochFacts)
            self._hear(msgspec.json.decode(line, type=_WithStatus).status, facts)

    def _new_lines(self) -> list[bytes]:
        try:
            with open(self._log, "rb") as file:
                file.seek(self._read_bytes)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        return whole.splitlines()

    def _is_new(self, status: Status) -> bool:
        """Whether a status says something that lines did not: it is written less often than they are."""
        known = self._teller.seen.status
        if known is None:
            return True
        if status.state != DEAD and status.updated_ms < known.updated_ms:
            return False
        if status.generation < known.generation:
            return False
        return (status.pid, status.state, status.message) != (known.pid, known.state, known.message)

    def _hear(self, status: Status, facts: EpochFacts | None) -> None:
        self._teller.hear(self._continued(status), facts)

    def _continued(self, status: Status) -> Status:
        """A driver counts from its own start; the demo goes on counting where the one before stopped."""
        last = self._teller.seen.status
        if last is None:
            return status
        if status.generation != last.generation:
            self._earlier = last.records
        if not status.epoch:
            now = {
                f: getattr(status, f)
                for f in ("generation", "pid", "state", "message", "started_ms", "updated_ms")
            }
            return msgspec.structs.replace(last, **now)
        return msgspec.structs.replace(status, records=self._earlier + status.records)


class _WithStatus(msgspec.Struct):
    status: Status


def as_it_is(status: Status) -> Status:
    """A driver that was killed could not say so."""
    if status.state in LIVING and process_of(status) == DEAD:
        return msgspec.structs.replace(status, state=DEAD, message="")
    return status
