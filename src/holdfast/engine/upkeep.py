"""What a driver tidies up beside its epochs, on a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from pathlib import Path

from holdfast.io.base import Sink

_log = logging.getLogger("holdfast.driver")

MAINTAIN_EVERY_S = 5.0


class Upkeep:
    """A thread that lets sinks tidy up behind the epochs, and removes staged files that nobody needs again."""

    def __init__(self, sinks: list[Sink], staging: Path) -> None:
        self._sinks, self._staging = sinks, staging
        self._epoch = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="holdfast-upkeep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def decided(self, epoch: int) -> None:
        self._epoch = epoch

    def stop(self) -> None:
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def _loop(self) -> None:
        while not self._ending.wait(MAINTAIN_EVERY_S):
            sweep(self._staging, self._epoch - 1)
            for sink in self._sinks:
                try:
                    sink.maintain(self._epoch)
                except Exception as error:  # upkeep is never worth a pipeline
                    _log.warning("upkeep of %s: %s", sink.describe(), error)


_STAGED = re.compile(r"-(\d{8})-[^-]+-[^-]+-[^-]+-\d+\.arrow\.staged$")
"""The attempt at the end of a staged file's name. Its uid stands before that, and may look like one."""


def sweep(staging: Path, published: int) -> None:
    """Remove what was staged for epochs that are published, and will not be again: one before the newest."""
    with contextlib.suppress(OSError):
        for name in os.listdir(staging):
            epoch = _STAGED.search(name)
            if epoch is not None and int(epoch[1]) <= published:
                (staging / name).unlink()
