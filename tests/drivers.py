"""A driver in this process, without Spark: the real loop, log, checkpoints and recovery over the in-process runner."""

from __future__ import annotations

import dataclasses
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

import holdfast as hf
from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.coordinator import Coordinator, Outcome
from holdfast.config import resolve
from holdfast.engine.build import build_program, build_stages, checkpoint_url, identity_of
from holdfast.engine.driver import Driver
from holdfast.engine.local import LocalRunner
from holdfast.engine.program import Program
from holdfast.log.journal import Journal
from holdfast.metrics import EpochFacts
from holdfast.recovery.estimate import Notice
from holdfast.recovery.guard import Guard
from holdfast.recovery.recover import Recovery


@dataclasses.dataclass
class Life:
    """One life of a driver, and what it left behind."""

    journal: Journal
    catalog: Catalog
    program: Program
    runner: LocalRunner
    driver: Driver
    recovery: Recovery
    coordinator: Coordinator
    guard: Guard | None
    facts: list[EpochFacts]
    outcomes: list[Outcome]


def make(
    pipeline: hf.Pipeline,
    directory: Path,
    *,
    runner: Callable[[Program], LocalRunner] = LocalRunner,
    clock_ms: Callable[[], int] | None = None,
    notice: Notice | None = None,
    environment: dict[str, str] | None = None,
    **given: Any,
) -> Life:
    """A driver that has taken the directory and not begun; held to its deadline if it is said how faults are noticed."""
    parallelism = given.pop("parallelism", 2)
    settings = resolve({"drain": True, "interval": "0s", **given}, environment={}).settings
    stages = build_stages(pipeline)
    journal = Journal.at(directory)
    identity = identity_of(stages, settings, parallelism)
    if journal.identity() is None:
        journal.create_identity(msgspec.structs.replace(identity, id=secrets.token_hex(4)))
    journal.take(operators=identity.operators)
    made_as = journal.identity() or identity
    url = checkpoint_url(settings, str(directory), made_as)
    program = build_program(stages, settings, parallelism, str(directory), url, made_as)
    facts: list[EpochFacts] = []
    outcomes: list[Outcome] = []
    made = runner(program)
    catalog = Catalog(journal)
    clock = {} if clock_ms is None else {"clock_ms": clock_ms}
    coordinator = Coordinator(
        identity,
        made,
        journal,
        catalog,
        settings,
        program.checkpoint_url,
        on_outcome=lambda outcome: (outcomes.append(outcome), guard and guard.backup_ended(outcome)),
        on_read=lambda reading: guard and guard.store_read(reading),
        answers=program.answers,
        **clock,
    )
    guard = None
    if notice is not None:
        guard = Guard(settings, notice, directory, environment=environment or {})
    recovery = Recovery(program, made, journal, catalog, tasks=2, strict=settings.on_divergence == "stop")
    driver = Driver(
        program,
        made,
        journal,
        settings,
        coordinator,
        recovery,
        tasks=2,
        guard=guard,
        on_epoch=facts.append,
        **clock,
    )
    return Life(journal, catalog, program, made, driver, recovery, coordinator, guard, facts, outcomes)


class Waiting(LocalRunner):
    """Gives a checkpoint time before the next epoch."""

    def run(self, plan: Any, header: Any) -> Any:
        self.wait()
        return super().run(plan, header)

    def wait(self) -> None:
        """Until no checkpoint is under way, and what the last one left is cleared up."""
        for name in ("holdfast-checkpoint", "holdfast-tidy"):  # the first begins the second
            for thread in threading.enumerate():
                if thread.name == name:
                    thread.join()


def live(pipeline: hf.Pipeline, directory: Path, **given: Any) -> Life:
    """Run a pipeline until it is drained, or has done so many epochs."""
    life = make(pipeline, directory, **given)
    life.driver.start()
    life.driver.run()
    life.runner.settle()  # tests take folders away, and a merge under way would be in between
    return life


def state_in(directory: Path) -> Path:
    """Where a directory's own state is."""
    identity = Journal.at(directory).identity()
    assert identity is not None
    return directory / "state" / identity.home
