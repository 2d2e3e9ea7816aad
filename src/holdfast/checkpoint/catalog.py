"""The checkpoints of a pipeline, as its log has them: which are complete, which are damaged, what comes next."""

from __future__ import annotations

import contextlib
import logging

from holdfast.checkpoint.metadata import Checkpoint, DamagedRecord, pack, unpack
from holdfast.errors import EngineError, FencedError
from holdfast.log.journal import Journal

_log = logging.getLogger("holdfast.checkpoint")


class Catalog:
    """Reads and creates metadata records."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._read: dict[int, Checkpoint | None] = {}
        self._bad: dict[int, str] = {}
        self._suspect: dict[int, str] | None = None
        """Those that an earlier life could not use: they come after all others, in case what was wrong was mended."""

    def seal(self) -> None:
        """Take the next number away from drivers of the past: what they complete from now on does not count.

        The record stays for ever, like that of the generation: nobody knows when such a driver wakes up.
        """
        while not self._journal.put_checkpoint(self._next(), pack(None)):
            continue

    def _next(self) -> int:
        return max(self._journal.checkpoints(), default=0) + 1

    def next_number(self) -> int:
        """The number of the next checkpoint."""
        return self._next()

    def complete(self, checkpoint: Checkpoint) -> None:
        """Create the record: from here on the checkpoint counts."""
        if not self._journal.put_checkpoint(checkpoint.number, pack(checkpoint)):
            raise FencedError(f"Checkpoint {checkpoint.number} was made by another driver.")

    def completed(self) -> list[Checkpoint]:
        """All that can be used, the oldest first. A damaged one is left out, and said once."""
        suspect = self._suspects()
        return [c for c in self._readable() if c.number not in suspect]

    def _readable(self) -> list[Checkpoint]:
        numbers = self._journal.checkpoints()
        for number in numbers:
            if number not in self._read and number not in self._bad:
                self._take(number)
        # Another thread may delete records meanwhile.
        found = [self._read.get(n) for n in numbers if n not in self._bad]
        return [c for c in found if c is not None]

    def _suspects(self) -> dict[int, str]:
        if self._suspect is None:
            self._suspect = self._journal.condemned()
        return self._suspect

    def _take(self, number: int) -> None:
        data = self._journal.read_checkpoint(number)
        if data is None:
            self._read[number] = None  # deleted since it was listed
            return
        try:
            self._read[number] = unpack(data, f"Checkpoint {number}")
        except DamagedRecord as error:
            self._leave_out(number, str(error))

    def condemn(self, number: int, why: str) -> None:
        """Never use a checkpoint again in this life, and in later ones only if there is no other."""
        self._leave_out(number, why)
        with contextlib.suppress(EngineError):  # a full disk is no reason not to recover
            self._journal.condemn_checkpoint(number, why)

    def _leave_out(self, number: int, why: str) -> None:
        self._bad[number] = why
        _log.warning("checkpoint %d can't be used: %s", number, why)

    def unusable(self) -> dict[int, str]:
        """The checkpoints that can't be used, and why."""
        return {**self._suspects(), **self._bad}

    def delete(self, number: int) -> None:
        """Remove a record."""
        self._journal.delete_checkpoint(number)
        self._read.pop(number, None)
        self._bad.pop(number, None)
        self._suspects().pop(number, None)

    def newest(self, upto: int, *, last_resort: bool = False) -> Checkpoint | None:
        """The newest usable checkpoint of an epoch up to this one.

        `last_resort`: where there is none, one that an earlier life could not use. Nobody builds upon it.
        """
        suspect = self._suspects()
        found = [c for c in self._readable() if c.epoch <= upto]
        sound = [c for c in found if c.number not in suspect]
        return max(sound or (found if last_resort else []), key=lambda c: (c.epoch, c.number), default=None)
