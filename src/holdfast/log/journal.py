"""One driver's hand on a pipeline's log: takes the pipeline, writes plans and commits, reads them back.

Whoever loses a race to create a record has been replaced and must end: `FencedError`.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from holdfast.errors import DirectoryError, EngineError, FencedError
from holdfast.formats import refuse_the_future
from holdfast.log.records import FORMAT, Commit, Generation, Identity, Plan
from holdfast.log.store import LocalStore, LogStore

_IDENTITY = "identity.json"
_Record = TypeVar("_Record", Identity, Generation, Plan, Commit)


def _numbered(folder: str, number: int) -> str:
    return f"{folder}/{number:012d}.json"


class Journal:
    """The log of one pipeline's directory."""

    def __init__(self, store: LogStore) -> None:
        self._store = store
        self.generation = 0

    @staticmethod
    def at(directory: str | Path) -> Journal:
        """The log in a local directory."""
        return Journal(LocalStore(Path(directory) / "log"))

    def _create(self, name: str, data: bytes) -> bool:
        try:
            return self._store.put_if_absent(name, data)
        except OSError as error:
            raise EngineError(
                f"The record {name} can't be written: {error.strerror or error}.",
                remedy="Make room on the disk of the pipeline's directory, or mend it, and start again: nothing is lost.",
            ) from error

    def _read(self, name: str, kind: type[_Record]) -> _Record | None:
        """A record; None where there is none. Raises for one of the future, and for what is no record at all."""
        data = self._store.get(name)
        if data is None:
            return None
        try:
            refuse_the_future(data, FORMAT, f"The record log/{name}")
            return msgspec.json.decode(data, type=kind)
        except msgspec.DecodeError as error:
            raise DirectoryError(f"log/{name} is not a record of holdfast: {error}.") from None

    def _create_trimmable(self, name: str, data: bytes) -> bool:
        """Create a record that may be trimmed: its name may be free again when a driver of the past wakes up.

        So whoever was replaced goes no further, even with a record that it has created. If it was in time, the
        newer driver finds it and goes on from it; if not, nobody reads it and the next trim takes it away.
        """
        self.check_fence()
        created = self._create(name, data)
        if created:
            self.check_fence()
        return created

    # Who may write

    def take(
        self,
        application: str = "",
        fingerprint: str = "",
        operators: Mapping[str, dict[str, Any]] | None = None,
    ) -> Generation:
        """Become the newest generation. From here on every older driver loses its races."""
        number = self.newest_generation() + 1
        before = self.identity()
        record = Generation(
            number=number,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_ms=int(time.time() * 1000),
            token=secrets.token_hex(8),
            application=application,
            fingerprint=fingerprint,
            operators={**(before.operators if before else {}), **(operators or {})},
        )
        if not self._create(_numbered("generations", number), msgspec.json.encode(record)):
            raise FencedError(
                f"Another driver became generation {number} at the same moment.",
                remedy="Start again if you meant to.",
            )
        self.generation = number
        return record

    def newest_generation(self) -> int:
        names = self._store.list("generations")
        return int(names[-1].split(".")[0]) if names else 0

    def read_generation(self, number: int) -> Generation | None:
        return self._read(_numbered("generations", number), Generation)

    def check_fence(self) -> None:
        """Raise if a newer generation exists."""
        newest = self.newest_generation()
        if newest > self.generation:
            raise FencedError(
                f"Generation {newest} has taken this pipeline over; this one was {self.generation}.",
                remedy="Nothing to do: the newer driver goes on.",
            )

    # What it belongs to

    def identity(self) -> Identity | None:
        """What the directory belongs to, with the operators that it was given since it was made."""
        made = self._read(_IDENTITY, Identity)
        if made is None:
            return None
        self.read_generation(self.newest_generation())  # it may be of the future, and have no epoch yet
        return msgspec.structs.replace(made, operators={**made.operators, **self._operators()})

    def _operators(self) -> dict[str, dict[str, Any]]:
        """As the newest generation with an epoch has them. What one has added that never planned or decided anything
        binds nobody. None of an older holdfast has any."""
        last = self.last_epoch()
        told = [r.generation for r in (self.commit(last), self.plan(last + 1)) if r is not None]
        for number in range(max(told, default=0), 0, -1):
            found = self.read_generation(number)
            if found is not None and found.operators:
                return found.operators
        return {}

    def create_identity(self, identity: Identity) -> None:
        if not self._create(_IDENTITY, msgspec.json.encode(identity)):
            raise FencedError("Another driver made this directory its own at the same moment.")

    # What an epoch reads

    def put_plan(self, plan: Plan) -> Plan:
        """Create a plan. If a driver of the past was faster, its plan is the fact, unless we are of the past."""
        name = _plan_name(plan.epoch, plan.replan)
        if self._create_trimmable(name, msgspec.json.encode(plan)):
            return plan
        self._refuse_if_replaced(f"Epoch {plan.epoch} was planned by another driver.")
        found = self.plan(plan.epoch)
        assert found is not None
        return found

    def plan(self, epoch: int) -> Plan | None:
        """The plan of an epoch that holds: its newest re-plan."""
        found = None
        for replan in range(1000):
            newer = self._read(_plan_name(epoch, replan), Plan)
            if newer is None:
                return found
            found = newer
        return found

    # What was decided

    def put_commit(self, commit: Commit) -> Commit:
        """Decide an epoch. If a driver of the past was faster, its decision holds, unless we are of the past."""
        if self._create_trimmable(_numbered("commits", commit.epoch), msgspec.json.encode(commit)):
            return commit
        self._refuse_if_replaced(f"Epoch {commit.epoch} was decided by another driver.")
        found = self.commit(commit.epoch)
        if found is None:
            raise FencedError(
                f"Epoch {commit.epoch} was decided and is past.", remedy="This driver must end."
            )
        return found

    def _refuse_if_replaced(self, message: str) -> None:
        if self.newest_generation() > self.generation:
            raise FencedError(message, remedy="This one must end.")

    def commit(self, epoch: int) -> Commit | None:
        return self._read(_numbered("commits", epoch), Commit)

    def last_epoch(self) -> int:
        """The newest decided epoch; 0 where there is none."""
        names = self._store.list("commits")
        return int(names[-1].split(".")[0]) if names else 0

    def epochs(self) -> list[int]:
        """The decided epochs whose records are still there."""
        return [int(n.split(".")[0]) for n in self._store.list("commits")]

    def trim(self, upto: int) -> int:
        """Delete plans and commits up to an epoch, but never the newest: how many epochs went."""
        gone = {e for e in self.epochs()[:-1] if e <= upto}
        for name in self._store.list("plans"):
            if int(name.split("-")[0]) in gone:
                self._store.delete(f"plans/{name}")
        for epoch in gone:
            self._store.delete(_numbered("commits", epoch))
        return len(gone)

    # Checkpoints' metadata, as bytes: what is in them is the checkpoint's room

    def checkpoints(self) -> list[int]:
        """The numbers that are taken."""
        return [int(n.split(".")[0]) for n in self._store.list("checkpoints")]

    def read_checkpoint(self, number: int) -> bytes | None:
        return self._store.get(_numbered("checkpoints", number))

    def put_checkpoint(self, number: int, data: bytes) -> bool:
        """Create a metadata record; False where its number is taken."""
        return self._create(_numbered("checkpoints", number), data)

    def delete_checkpoint(self, number: int) -> None:
        self._store.delete(_numbered("checkpoints", number))
        self._store.delete(_numbered("condemned", number))

    def condemn_checkpoint(self, number: int, why: str) -> None:
        """Note, for later lives too, that a checkpoint could not be used."""
        self._create(_numbered("condemned", number), msgspec.json.encode({"why": why}))

    def condemned(self) -> dict[int, str]:
        """The checkpoints that could not be used when they were needed, and why."""
        found = {}
        for name in self._store.list("condemned"):
            told = self._store.get(f"condemned/{name}")
            if told is not None:
                found[int(name.split(".")[0])] = str(msgspec.json.decode(told)["why"])
        return found

    # A person's wish

    def ask_for_checkpoint(self) -> str:
        """Ask the newest generation for a checkpoint; the wish is taken away once it is fulfilled."""
        name = f"wishes/{time.time_ns():020d}.json"
        self._create(name, b"{}")
        return name

    def wishes(self) -> list[str]:
        """Checkpoints that were asked for and are not fulfilled."""
        return [f"wishes/{n}" for n in self._store.list("wishes")]

    def fulfil(self, names: Iterable[str]) -> None:
        """Take wishes away."""
        for name in names:
            self._store.delete(name)

    def ask_to_stop(self) -> None:
        """Ask the newest generation to finish its epoch and stop."""
        self._create(_numbered("stops", self.newest_generation()), b"{}")

    def asked_to_stop(self) -> bool:
        return self._store.get(_numbered("stops", self.generation)) is not None


def _plan_name(epoch: int, replan: int) -> str:
    return f"plans/{epoch:012d}-{replan:03d}.json"
