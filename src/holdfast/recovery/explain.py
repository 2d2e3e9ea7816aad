"""Why recovery would take as long as it would, and what buys how many seconds. Pure: what is known in, sentences out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from holdfast.faults.kinds import Fault
from holdfast.recovery.estimate import Estimate, History, Learned, Notice, Parts, Situation, covered, estimate

NAMES = ("detection", "environment", "loading", "recomputing")
UNSEEN_WORKER = (
    "A Python worker that freezes is noticed by nobody: this Spark session does not end silent ones. Make it with "
    "spark.python.worker.idleTimeoutSeconds and spark.python.worker.killOnIdleTimeout=true."
)


class Bargain(msgspec.Struct, frozen=True):
    """A change, and how many seconds of the bound it buys."""

    change: str
    buys_s: float

    def __str__(self) -> str:
        return f"{self.change} buys {self.buys_s:.1f} s."


class Explanation(msgspec.Struct, frozen=True):
    """Why recovery from the worst fault may take as long as it may."""

    fault: str
    what: str
    bound_s: float
    parts: Parts
    """The bound of each part alone."""
    largest: str
    """The part that is most of it."""
    others: dict[str, float]
    """The bounds of all other faults, the largest first."""
    bargains: list[Bargain]
    """What would make it shorter, the most first."""
    notes: list[str]
    """What no bound covers."""

    def lines(self) -> list[str]:
        """All of it, a sentence each."""
        listed = ", ".join(f"{name} {getattr(self.parts, name):.1f} s" for name in NAMES)
        return [
            f"The worst fault is {self.fault} ({self.what}): at most {listed}; together at most {self.bound_s:.1f} s.",
            f"Most of it is {self.largest}.",
            *map(str, self.bargains),
            *self.notes,
        ]


def infeasible(told: Explanation, deadline_s: float) -> str:
    """That the deadline can't be held, in one sentence: for which faults, the worst first."""
    also = "".join(f", after {fault} {s:.1f} s" for fault, s in told.others.items() if s > deadline_s)
    return (
        f"The deadline of {deadline_s:g} s can't be held: after {told.fault} ({told.what}) "
        f"recovery may take {told.bound_s:.1f} s{also}."
    )


def unheld(told: Explanation, deadline_s: float, floor_s: float) -> str:
    """That the deadline could be held and is not now, in one sentence."""
    return (
        f"The deadline of {deadline_s:g} s is not held now: after {told.fault} ({told.what}) recovery may take "
        f"{told.bound_s:.1f} s. Once state is backed up it is {floor_s:.1f} s at the most."
    )


def failing(told: Explanation, deadline_s: float) -> str:
    """That the deadline will be passed because backups fail, in one sentence."""
    return (
        f"The deadline of {deadline_s:g} s is not held: a backup is due, and backups keep failing. After {told.fault} "
        f"({told.what}) recovery may take {told.bound_s:.1f} s now, and longer with every epoch."
    )


def explain(
    situation: Situation,
    learned: Learned,
    notice: Notice,
    confidence: float,
    floor: Situation | None = None,
    *,
    faults: Sequence[Fault] | None = None,
) -> Explanation | None:
    """What the parts are, which is at fault, and which setting buys how many seconds; None if nothing is covered.

    Args:
        floor: the situation once everything is backed up, if it is not that one already.
        faults: which; all that are covered unless told.
    """
    asked = covered(notice) if faults is None else faults
    estimates = [estimate(fault, situation, learned, notice) for fault in asked]
    if not estimates:
        return None
    first, *others = sorted(((e.bound(confidence), e) for e in estimates), key=lambda pair: -pair[0])
    bound_s, worst = first
    parts = worst.bounds(confidence)
    found = [
        *_bargains(worst.fault, situation, learned, notice, confidence),
        *_with_a_backup(worst, situation, floor, learned, notice, confidence),
    ]
    bargains = [b for b in found if b.buys_s >= 0.05]
    return Explanation(
        fault=worst.fault.label,
        what=worst.fault.sentence,
        bound_s=bound_s,
        parts=parts,
        others={e.fault.label: s for s, e in others},
        largest=max(NAMES, key=lambda name: float(getattr(parts, name))),
        bargains=sorted(bargains, key=lambda b: -b.buys_s),
        notes=[*_unbounded(notice), *_uncovered(estimates, situation, learned, notice, confidence)],
    )


def _bargains(
    fault: Fault, situation: Situation, learned: Learned, notice: Notice, confidence: float
) -> Iterator[Bargain]:
    """Changes of one setting each, and what they buy of the bound for this fault."""

    def bound(situation: Situation = situation, notice: Notice = notice) -> float:
        return estimate(fault, situation, learned, notice).bound(confidence)

    now = bound()
    for field, text in (
        ("worker_s", "worker_timeout"),
        ("executor_s", "executor_timeout"),
        ("driver_s", "driver_timeout"),
        ("host_s", "wait_for_home"),
    ):
        value = getattr(notice, field)
        if value and value > 2.0:
            less = msgspec.structs.replace(notice, **{field: value / 2})
            if field == "executor_s":  # what is tried while an executor is silent is tied to it
                less = msgspec.structs.replace(
                    less, executor_check_s=notice.executor_check_s / 2, fetch_s=notice.fetch_s / 2
                )
            yield Bargain(f"{text} = {value / 2:.1f}s instead of {value:.1f}s", now - bound(notice=less))
    if notice.driver_s is not None and notice.restart_s > 1.0:
        sooner = msgspec.structs.replace(notice, restart_s=1.0)
        waits = f"instead of waiting {notice.restart_s:.1f} s, as after so many falls,"
        yield Bargain(f'restart = "fixed 1s" {waits}', now - bound(notice=sooner))
    if situation.planned > 1:
        half = situation.planned // 2
        smaller = msgspec.structs.replace(situation, planned=half)
        yield Bargain(f"max_records = {half}, half of the largest epoch,", now - bound(smaller))
    if situation.stored_bytes:
        halved = msgspec.structs.replace(situation, stored_bytes=situation.stored_bytes // 2)
        yield Bargain("Twice as many hosts, with half the state each,", now - bound(halved))
    if situation.host_bytes:
        faster = msgspec.structs.replace(situation, host_bytes=situation.host_bytes // 2)
        yield Bargain("Twice as many cores to load state with", now - bound(faster))
    times = learned.times_seen(fault)
    if times < 5:
        guess = estimate(fault, situation, learned, notice).environment
        known = f"{fault.label} was seen {times} time{'' if times == 1 else 's'}"
        yield Bargain(
            f"A drill with --teach, as {known} and is not well known, at most",
            guess.bound(confidence) - guess.mean,
        )
    if confidence > 0.99:
        less_sure = estimate(fault, situation, learned, notice).bound(0.99)
        yield Bargain(f"confidence = 0.99 instead of {confidence:g}", now - less_sure)


def _with_a_backup(
    worst: Estimate,
    situation: Situation,
    floor: Situation | None,
    learned: Learned,
    notice: Notice,
    confidence: float,
) -> Iterator[Bargain]:
    """What a backup buys: the history goes, and state is loaded as large as it is now."""
    if floor is None:
        return
    stored = {"stored_bytes": floor.stored_bytes, "stored_files": floor.stored_files}
    backed_up = msgspec.structs.replace(situation, history=History(), **stored)
    then = estimate(worst.fault, backed_up, learned, notice)
    yield Bargain("A backup now", worst.bound(confidence) - then.bound(confidence))


def _uncovered(
    estimates: Sequence[Estimate], situation: Situation, learned: Learned, notice: Notice, confidence: float
) -> Iterator[str]:
    """What the bound is not for, with its figure where there is one."""
    bounds = sorted((e.bound(confidence) for e in estimates), reverse=True)
    if len(bounds) > 1:
        yield (
            "The bound is for one fault at a time: a second one before the first is over may make it as long as both, "
            f"{bounds[0] + bounds[1]:.1f} s for the worst two."
        )
    if situation.older is not None and any(e.fault is Fault.HOST for e in estimates):
        history, older = situation.history, situation.older
        farther = msgspec.structs.replace(situation, history=history.and_(older.epochs, older.records))
        damaged_s = estimate(Fault.HOST, farther, learned, notice).bound(confidence)
        yield (
            f"It is for a checkpoint that can be read: if the newest is damaged, {older.epochs} epochs more are replayed "
            f"after a lost host, and that may take {damaged_s:.1f} s."
        )


def _unbounded(notice: Notice) -> Iterator[str]:
    """What no setting of ours bounds."""
    if notice.driver_s is None:
        yield (
            "Nobody starts the driver again if it falls now: run with --supervise and a restart that allows it, and faults "
            "of the driver are covered too."
        )
        if notice.local:
            yield "In local mode a lost host is the driver's as well: its figure counts from when somebody starts it again."
    if notice.worker_s is None:
        yield UNSEEN_WORKER
    if not notice.local:
        yield (
            "A cluster that has no room for a new executor makes it wait: its queue has no bound that is known here, "
            "so keep cores free for one host."
        )
        yield (
            "A driver that is started again is taken to find executors on the hosts that have its state. Where the cluster "
            "has more hosts than executors of ours, it may not: then all state is loaded, and all of the history replayed."
        )
