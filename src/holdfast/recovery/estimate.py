"""How long recovery would take if something died now: four parts for each fault, each a guess with its spread.

    detection     who notices, and after how long silence at the latest: from settings
    environment   processes that start again, back-off and waiting included: from what every recovery took
    loading       bytes over the speed of their storage: from every real load
    recomputing   epochs since the newest checkpoint, replayed, and what is planned: from every epoch and replay

Recovery time is the design's: from the fault to the commit of the last epoch planned before it. Pure: `Learned`
is what was seen so far, `Situation` where the pipeline stands, `estimate` puts them together. What a bound does
not cover is said in docs/guarantees.md: two faults at once, a damaged checkpoint, a cluster without room.
"""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from holdfast.faults.kinds import Fault
from holdfast.recovery.chance import FLOOR_S, Guess, Linear, Prior, Seen, Sum
from holdfast.recovery.replay import MAX_EPOCHS, MAX_RECORDS

CONFIDENCE = 0.999
_HISTORY = (Fault.HOST,)
"""Faults after which state is loaded from the checkpoint and history replayed; the others find it on the host's disk."""
OF_DRIVER = (Fault.DRIVER_KILL, Fault.DRIVER_FREEZE, Fault.APPLICATION)
_ONE_SHARD = (Fault.WORKER_KILL, Fault.WORKER_FREEZE)


class Notice(msgspec.Struct, frozen=True):
    """By what each fault is noticed, in seconds; None: by nothing."""

    worker_s: float | None
    executor_s: float | None
    executor_check_s: float
    """How often silent executors are looked for."""
    driver_s: float | None
    """None: nobody supervises the driver."""
    fetch_s: float = 0.0
    """How much longer a task may try to fetch from a silent executor after that was given up."""
    host_s: float = 0.0
    """How long shards wait for a lost host before they are rebuilt on another."""
    local: bool = False
    """Driver and executor are one process."""
    restart_s: float = 0.0
    """How long a supervisor waits before it starts a driver again."""


def covered(notice: Notice) -> list[Fault]:
    """The faults that are recovered from without a person. In local mode the driver is the executor and the host."""
    found = []
    for fault in Fault:
        if notice.local and fault in (Fault.EXECUTOR_KILL, Fault.EXECUTOR_FREEZE):
            continue
        if fault is Fault.WORKER_FREEZE and notice.worker_s is None:
            continue
        if fault is Fault.EXECUTOR_FREEZE and notice.executor_s is None:
            continue
        if fault in OF_DRIVER and notice.driver_s is None:
            continue
        found.append(fault)
    return found


def detection(fault: Fault, notice: Notice) -> Guess:
    """From the fault until something acts on it: what is usual, and beyond that what the worst case adds.

    A process that dies closes its connections, which is noticed at once. A frozen one is silent, and so is a
    host that loses its power: a bound counts that, the estimate does not.
    """
    if fault is Fault.WORKER_FREEZE:
        return Guess((notice.worker_s or 0.0) + 0.5, extra=1.0)
    if fault is Fault.EXECUTOR_FREEZE:
        return Guess(notice.executor_s or 0.0, extra=2 * notice.executor_check_s + notice.fetch_s)
    if fault is Fault.HOST and not notice.local:
        silent_s = (notice.executor_s or 0.0) + 2 * notice.executor_check_s + notice.fetch_s
        return Guess(0.1, extra=max(0.4, silent_s))
    if fault is Fault.DRIVER_FREEZE:
        return Guess(notice.driver_s or 0.0, extra=0.5)
    return Guess(0.1, extra=0.4)


class History(msgspec.Struct, frozen=True):
    """What a replay would run again: the epochs since the newest checkpoint."""

    epochs: int = 0
    records: int = 0

    def jobs(self, most_records: int = MAX_RECORDS) -> int:
        """So few Spark jobs it takes, of so many records at the most."""
        if not self.epochs:
            return 0
        return max(1, math.ceil(self.epochs / MAX_EPOCHS), math.ceil(self.records / most_records))

    def and_(self, epochs: int, records: int) -> History:
        """So many more."""
        return History(self.epochs + epochs, self.records + records)


class Situation(msgspec.Struct, frozen=True):
    """Where a pipeline stands, as far as recovery goes."""

    history: History = History()
    planned: int = 0
    """Records of the largest epoch that may be under way when something dies."""
    stored_bytes: int = 0
    """What the shards of one host, the fullest, have in the newest checkpoint."""
    stored_files: int = 0
    shard_bytes: int = 0
    """The state of the largest shard."""
    host_bytes: int = 0
    """The state on the fullest host, for each of its cores that load it."""
    usual: int | None = None
    """Records of an epoch as it usually is, which an estimate counts; None: as many as the largest."""
    older: History | None = None
    """What is replayed besides if the newest checkpoint can't be used; None: not known."""
    share: float = 1.0
    """The share of all shards that take part in a replay if a host is lost, the one with the most of them."""


class Parts(msgspec.Struct, frozen=True):
    """The four parts, in seconds."""

    detection: float = 0.0
    environment: float = 0.0
    loading: float = 0.0
    recomputing: float = 0.0

    @property
    def total(self) -> float:
        return self.detection + self.environment + self.loading + self.recomputing

    @property
    def rounded(self) -> tuple[float, float, float, float]:
        """To milliseconds."""
        return (
            round(self.detection, 3),
            round(self.environment, 3),
            round(self.loading, 3),
            round(self.recomputing, 3),
        )


class Estimate(msgspec.Struct, frozen=True):
    """What recovery from one fault would take."""

    fault: Fault
    detection: Guess
    environment: Guess
    loading: Guess
    recomputing: Sum

    @property
    def sum(self) -> Sum:
        """All four together."""
        return Sum((self.detection, self.environment, self.loading, *self.recomputing.parts))

    @property
    def parts(self) -> Parts:
        """What is likely."""
        return Parts(self.detection.mean, self.environment.mean, self.loading.mean, self.recomputing.mean)

    def bounds(self, confidence: float) -> Parts:
        """The bound of each part alone; their sum is more than the bound of the sum."""
        return Parts(
            *(g.bound(confidence) for g in (self.detection, self.environment, self.loading, self.recomputing))
        )

    def bound(self, confidence: float = CONFIDENCE) -> float:
        """The seconds that recovery does not pass with this confidence."""
        return self.sum.bound(confidence)


EPOCH = Prior([0.15, 4e-6], [1.0, 1.0], noise=0.25, df=4, keep=0.98)
"""A run of an epoch: (1, records)."""
REPLAY = Prior([0.85, 0.15, 0.004], [0.5, 0.7, 1.0], noise=0.2, df=6, keep=0.95)
"""A replay: (what its jobs, and the records of those shards that take part, would take at the epochs' own rate; what all
records would, since the sources are read for all; epochs)."""
FETCH = Prior([0.3, 1 / 150e6, 0.005], [1.0, 1.0, 1.0], noise=0.25, df=6, keep=0.95)
"""Loading from the checkpoint's storage: (1, bytes, files)."""
RELOAD = Prior([0.05, 1 / 250e6], [1.0, 1.0], noise=0.25, df=6, keep=0.95)
"""Loading from the host's disk: (1, bytes)."""
UPLOAD = Prior([0.5, 1 / 100e6], [1.0, 1.0], noise=0.3, df=6, keep=0.95)
"""A backup: (1, new bytes)."""
START = Prior([11.0], [0.3], noise=0.12, df=6, keep=0.9)
"""A driver's start, from its first step until it stands: (1)."""
FAMILIES: dict[str, dict[Fault, float]] = {
    "worker": {Fault.WORKER_KILL: 0.15, Fault.WORKER_FREEZE: 0.9},
    "executor": {Fault.EXECUTOR_KILL: 5.0},
    "frozen executor": {Fault.EXECUTOR_FREEZE: 2.5},
    "host": {Fault.HOST: 9.0},
    "driver": {Fault.DRIVER_KILL: 12.0, Fault.DRIVER_FREEZE: 0.5, Fault.APPLICATION: 1.0},
}
"""Faults after which the same things start again: what the first of each takes, and what the others take on top.

Seconds until what died stands again, before any was measured here. One that was seen teaches of all its family.
"""


WITH_EXECUTORS = {"executor": 0.0, "frozen executor": -2.0, "host": 4.0}
"""What these families take at least, beyond the start of executors: it counts where those are slow to start."""
_BUSY_KEEP = 0.95
"""What the computing of an epoch still weighs after the next one as large."""
_PACE_KEEP, _PACE_PRIOR, _PACE_MOST = 0.8, 4.0, 0.7
"""What a recovery still tells of the pace after the next; as how many the belief counts that nothing has changed; and how far a
single one may be off, as a logarithm: some take twice as long for reasons of their own."""
_PACE_FROM_S = 1.0
"""What takes less than this to stand again tells nothing of the pace, and does not follow it."""
_LATELY = 5
"""So many epochs tell how long they take just now."""
_STARTS = 5
"""So many starts of executors are remembered; the slowest counts."""


class Memory(msgspec.Struct, frozen=True):
    """What was learned, as it is kept in a file."""

    seen: dict[str, Seen] = {}
    outcomes: list[str] = []
    """The recoveries that were learned from."""
    counts: dict[str, int] = {}
    """How many there were of each fault."""
    notice: Notice | None = None
    situation: Situation | None = None
    """How faults are noticed, and where the pipeline stood when this was kept."""
    floor: Situation | None = None
    """Where it would have stood with everything backed up: no backup makes recovery shorter than that."""
    deadline_s: float = 0.0
    confidence: float = CONFIDENCE
    largest: int = 0
    """The records of the largest epoch there was."""
    executors_s: list[float] = []
    """From a context's start until its executors were there, the last few times."""
    backlog: int = 0
    """How much waited when all was well."""
    lately: float = 1.0
    """What the last epochs took, as a share of what they take in the mean."""
    busy: tuple[float, float] = (0.0, 0.0)
    """Seconds that tasks computed, and records, of recent epochs."""
    job_records: int = MAX_RECORDS
    """The most records that a job of a replay reads."""
    pace: tuple[float, float] = (0.0, 0.0)
    """By how much late recoveries took longer than was likely, as a sum of logarithms, and of how many."""
    format: int = 1


class Learned:
    """What a pipeline's own epochs, loads, replays, backups and recoveries have taught."""

    def __init__(self, memory: Memory | None = None) -> None:
        memory = memory or Memory()
        seen = memory.seen
        self.epoch = Linear(EPOCH, seen.get("epoch"))
        self.replay = Linear(REPLAY, seen.get("replay"))
        self._read = Linear(FETCH, seen.get("read"))
        self.fetch = self._fetch(seen.get("fetch"))
        self.reload = Linear(RELOAD, seen.get("reload"))
        self.upload = Linear(UPLOAD, seen.get("upload"))
        self._start = Linear(START, seen.get("start"))
        self._executors_s = list(memory.executors_s)
        self.largest = memory.largest
        self._busy = memory.busy
        self._pace = memory.pace
        self.lately = memory.lately
        """What epochs take just now, as a share of their mean, in which the slow first ones of a driver count for long; at most 1."""
        self._lately: collections.deque[float] = collections.deque(maxlen=_LATELY)
        self.job_records = memory.job_records
        """The most records that a job of a replay reads: it takes so many jobs more."""
        self._families = {name: self._family(name, seen.get(ENVIRONMENT + name)) for name in FAMILIES}
        self._likely = {name: self._family(name, seen.get(LIKELY + name), likely=True) for name in FAMILIES}
        self.known: dict[Fault, tuple[Linear, list[float], float, Notice, Guess, Guess]] = {}
        """Detection and environment of faults, and from what they are known: that changes with recoveries and starts only."""
        self.counts = dict(memory.counts)
        self.outcomes = set(memory.outcomes)

    def _fetch(self, seen: Seen | None) -> Linear:
        """Loading is thought to be as slow as the store was when it was tried, and never faster than before it was:
        what was tried may come from a cache, and a real load also brings it into memory."""
        weights = FETCH.weights
        if self._read.seen.count:
            weights = [max(pair) for pair in zip(weights, self._read.weights, strict=True)]
        return Linear(msgspec.structs.replace(FETCH, weights=weights), seen)

    def store_read(self, size: int, files: int, seconds: float) -> None:
        """Learn how fast the store is from trying it."""
        self._read.learn([1.0, float(size), float(files)], seconds)
        self.fetch = self._fetch(self.fetch.seen)

    def _family(self, name: str, seen: Seen | None, *, likely: bool = False) -> Linear:
        """What faults of a family take: a driver's is thought to be like its starts, and executors as slow as theirs."""
        weights = list(FAMILIES[name].values())
        if name == "driver" and self._start.seen.count:
            weights[0] = self._start.weights[0]
        if name in WITH_EXECUTORS:
            weights[0] = max(weights[0], max(self._executors_s, default=0.0) + WITH_EXECUTORS[name])
        # What takes a part of a second is known less well, as a share.
        first = 0.25 if weights[0] > 1.0 else 1.0
        spreads = [first, *[1.0] * (len(weights) - 1)]
        return Linear(Prior(weights, spreads, noise=0.15, df=6, keep=0.95, likely=likely), seen)

    def _renew(self, name: str) -> None:
        """Take over what is thought of a family by now."""
        self._families[name] = self._family(name, self._families[name].seen)
        self._likely[name] = self._family(name, self._likely[name].seen, likely=True)

    def memory(self) -> Memory:
        """As it is kept in a file."""
        seen = {
            "epoch": self.epoch.seen,
            "replay": self.replay.seen,
            "fetch": self.fetch.seen,
            "read": self._read.seen,
            "reload": self.reload.seen,
            "upload": self.upload.seen,
            "start": self._start.seen,
            **{ENVIRONMENT + name: model.seen for name, model in self._families.items()},
            **{LIKELY + name: model.seen for name, model in self._likely.items()},
        }
        return Memory(
            seen,
            sorted(self.outcomes)[-1000:],
            dict(self.counts),
            largest=self.largest,
            executors_s=self._executors_s,
            lately=self.lately,
            busy=self._busy,
            job_records=self.job_records,
            pace=self._pace,
        )

    def ran(self, records: int, seconds: float) -> None:
        """Learn what an epoch took, and how that compares with others."""
        features = [1.0, float(records)]
        self._lately.append(seconds / max(FLOOR_S, self.epoch.predict(features).mean))
        self.lately = min(1.0, statistics.median(self._lately))
        self.epoch.learn(features, seconds)

    def computed(self, seconds: float, records: int) -> None:
        """Learn for how long the tasks of an epoch computed, the slowest of each stage.

        An epoch counts, and makes others be forgotten, by its share of the records of a usual one: one that only moved
        timers on, or had three records, tells nothing of what a record takes.
        """
        usual = (1 - _BUSY_KEEP) * self._busy[1]
        share = min(1.0, records / usual) if usual > 0 else float(records > 0)
        kept = _BUSY_KEEP**share
        self._busy = (kept * self._busy[0] + share * seconds, kept * self._busy[1] + share * records)

    @property
    def computing_s(self) -> float | None:
        """How long tasks compute for each record of their epoch, without a sign of life; None: not known.

        What epochs take does not tell: if all are as large, nobody knows what of it is the records'.
        """
        seconds, records = self._busy
        return seconds / records if seconds > 0 and records > 0 else None

    @property
    def pace(self) -> float:
        """How long it takes of late until what died stands again, as a share of what was likely: 1 if nothing has changed.

        A machine that has become slow is slow for all that starts on it, and each fault is seen rarely: what the last few
        recoveries took, from whatever fault, tells of the next one from any other.
        """
        total, count = self._pace
        return math.exp(total / (count + _PACE_PRIOR))

    def environment(self, fault: Fault) -> Guess:
        """How long what died takes to stand again. That all was quicker of late makes it no shorter."""
        name, features = _PLACES[fault]
        guess = self._families[name].predict(features)
        return guess.times(max(1.0, self.pace)) if guess.mean >= _PACE_FROM_S else guess

    def likely_s(self, fault: Fault) -> float:
        """How long it takes most times; where it sometimes takes far longer, that is less than the mean."""
        usual_s = self._usual_s(fault)
        return usual_s * self.pace if usual_s >= _PACE_FROM_S else usual_s

    def _usual_s(self, fault: Fault) -> float:
        """The same at the pace of all recoveries that were learned from."""
        name, features = _PLACES[fault]
        models = self._likely if self._likely[name].seen.count else self._families
        return models[name].predict(features).mean

    def family(self, fault: Fault) -> Linear:
        """By what its environment is known."""
        return self._families[_PLACES[fault][0]]

    def times_seen(self, fault: Fault) -> int:
        """How many recoveries from a fault were learned from."""
        return self.counts.get(fault.label, 0)

    def recovered(self, fault: Fault, environment_s: float) -> None:
        """Learn how long what died took to stand again."""
        name, features = _PLACES[fault]
        usual_s, environment_s = self._usual_s(fault), max(0.01, environment_s)
        if usual_s >= _PACE_FROM_S:
            off = min(_PACE_MOST, max(-_PACE_MOST, math.log(environment_s / usual_s)))
            self._pace = (_PACE_KEEP * self._pace[0] + off, _PACE_KEEP * self._pace[1] + 1.0)
        for models in (self._families, self._likely):
            models[name].learn(features, environment_s)
        self.counts[fault.label] = self.times_seen(fault) + 1

    def started(self, seconds: float) -> None:
        """Learn how long a driver takes to start. That is no recovery yet: it tells about how long one takes, not how surely."""
        self._start.learn([1.0], seconds)
        self._renew("driver")

    def executors_started(self, seconds: float) -> None:
        """Learn how long executors take to be there."""
        self._executors_s = [*self._executors_s, seconds][-_STARTS:]
        for name in WITH_EXECUTORS:
            self._renew(name)

    def replay_features(self, history: History, share: float = 1.0) -> list[float]:
        """What a replay's time is linear in: what its jobs and records would take as epochs, and its epochs.

        `share`: of all shards, those that take part.
        """
        fixed, each = self.epoch.weights
        all_s = history.records * max(each, self.computing_s or 0.0)
        return [history.jobs(self.job_records) * fixed + all_s * share, all_s, float(history.epochs)]


ENVIRONMENT = "environment."
"""What was seen of a family is kept under its name behind this."""
LIKELY = "likely."
"""And what is likely of it behind this."""
_PLACES = {
    fault: (name, [1.0 if n == 0 or one is fault else 0.0 for n, one in enumerate(members)])
    for name, members in FAMILIES.items()
    for fault in members
}
"""A fault's family, and what tells it from the others there."""


def replaying(learned: Learned, history: History, share: float = 1.0) -> Guess:
    """How long the replay of a history takes, for so many of all shards."""
    if not history.epochs:
        return Guess(0.0)
    return learned.replay.predict(learned.replay_features(history, share))


def loading(learned: Learned, fault: Fault, situation: Situation) -> Guess:
    """How long state takes to be in memory again."""
    if fault in _HISTORY:
        features = [1.0, float(situation.stored_bytes), float(situation.stored_files)]
        return learned.fetch.predict(features) if situation.stored_bytes else Guess(0.0)
    at_stake = situation.shard_bytes if fault in _ONE_SHARD else situation.host_bytes
    return learned.reload.predict([1.0, float(at_stake)])


def planning(learned: Learned, situation: Situation) -> Guess:
    """How long the epoch takes that was planned: an estimate counts a usual one as of late, a bound the largest."""
    largest = learned.epoch.predict([1.0, float(situation.planned)])
    usual_s = largest.mean
    if situation.usual is not None and situation.usual < situation.planned:
        usual_s = learned.epoch.predict([1.0, float(situation.usual)]).mean
    usual_s *= learned.lately
    return msgspec.structs.replace(largest, mean=usual_s, extra=largest.mean - usual_s)


def _like(fault: Fault, notice: Notice) -> Fault:
    """The fault after which the same starts again: in local mode the driver is the host."""
    return Fault.DRIVER_KILL if fault is Fault.HOST and notice.local else fault


def environment(learned: Learned, fault: Fault, notice: Notice) -> Guess:
    """How long what died takes to stand again; a host that never comes back is waited for once, a driver's restart always."""
    fault = _like(fault, notice)
    guess = learned.environment(fault)
    if fault is Fault.HOST:
        guess = msgspec.structs.replace(guess, extra=guess.extra + max(0.0, notice.host_s - guess.mean))
    # The estimate is what it takes most times; the bound stands on the mean and its spread, as ever.
    likely_s = min(guess.mean, learned.likely_s(fault))
    guess = msgspec.structs.replace(guess, mean=likely_s, extra=guess.extra + guess.mean - likely_s)
    if fault in OF_DRIVER:
        return msgspec.structs.replace(guess, mean=guess.mean + notice.restart_s)
    return guess


def estimate(fault: Fault, situation: Situation, learned: Learned, notice: Notice) -> Estimate:
    """What recovery from a fault would take now."""
    return estimates(situation, learned, notice, [fault])[0]


def estimates(
    situation: Situation, learned: Learned, notice: Notice, faults: Sequence[Fault]
) -> list[Estimate]:
    """Of all these faults. What must be run again is the history, where state is lost with its host, and what is planned."""
    planned = planning(learned, situation)
    alone = behind = Sum((planned,))
    if any(fault in _HISTORY for fault in faults):
        behind = Sum((replaying(learned, situation.history, situation.share), planned))
    return [
        Estimate(fault, *before, behind if fault in _HISTORY else alone)
        for fault, before in _before(situation, learned, notice, faults)
    ]


def _before(
    situation: Situation, learned: Learned, notice: Notice, faults: Sequence[Fault]
) -> Iterator[tuple[Fault, tuple[Guess, Guess, Guess]]]:
    """Detection, environment and loading of each fault: what depends neither on the history nor on a plan."""
    loaded: dict[str, Guess] = {}
    for fault in faults:
        what = "stored" if fault in _HISTORY else "shard" if fault in _ONE_SHARD else "host"
        if what not in loaded:
            loaded[what] = loading(learned, fault, situation)
        yield fault, (*_until_it_stands(learned, fault, notice), loaded[what])


def _until_it_stands(learned: Learned, fault: Fault, notice: Notice) -> tuple[Guess, Guess]:
    """Detection and environment of a fault, computed when what is known of them has changed: they are asked for twice an epoch."""
    model = learned.family(_like(fault, notice))
    known, pace = learned.known.get(fault), learned.pace
    if (
        known is None
        or known[0] is not model
        or known[1] is not model.weights
        or known[2] != pace
        or known[3] is not notice
    ):
        found = detection(fault, notice), environment(learned, fault, notice)
        known = learned.known[fault] = (model, model.weights, pace, notice, *found)
    return known[4], known[5]


def worst(of: Sequence[Estimate], confidence: float) -> Estimate:
    """The one whose bound is the largest."""
    return max(of, key=lambda e: e.bound(confidence))


class Bounds:
    """The bound of the worst fault in one situation, for any history and any plan: the same as `estimates` give.

    A decision asks for a dozen of them, so what depends on neither is added up once.

    >>> notice, host = Notice(14.0, 10.0, 2.0, 10.0), [Fault.HOST]
    >>> there = Situation(History(3, 5000), 1000, 10**6)
    >>> of = estimates(there, Learned(), notice, host)
    >>> same = Bounds(there, Learned(), notice, host, 0.999)(there.history, there.planned)
    >>> abs(same - worst(of, 0.999).bound(0.999)) < 1e-9
    True
    """

    def __init__(
        self,
        situation: Situation,
        learned: Learned,
        notice: Notice,
        faults: Sequence[Fault],
        confidence: float,
    ) -> None:
        parts: list[_Fixed] = []
        for fault, before in _before(situation, learned, notice, faults):
            worst_s = squared = 0.0
            for guess in before:
                fixed_s, spread = guess.worst(confidence)
                worst_s, squared = worst_s + fixed_s, squared + spread
            parts.append((fault, worst_s, squared))
        self._take(learned, confidence, situation.share, parts)

    def _take(self, learned: Learned, confidence: float, share: float, parts: list[_Fixed]) -> None:
        self._learned, self._confidence, self._share, self._parts = learned, confidence, share, parts
        self._kept = _largest([(s, squared) for fault, s, squared in parts if fault not in _HISTORY])
        self._lost = [(s, squared) for fault, s, squared in parts if fault in _HISTORY]

    @property
    def faults(self) -> list[Fault]:
        """Those that it is the bound of."""
        return [fault for fault, _, _ in self._parts]

    def parted(self, deadline_s: float, least: int = 1) -> tuple[Bounds | None, Bounds | None]:
        """The faults that fit a deadline with one small epoch to run again, and those that don't; None: there are none.

        Args:
            least: the records of that epoch. Where smaller ones could not keep up with what comes, to hold the
                deadline for a fault would only stop the pipeline.
        """
        alone, behind = self._later(History(1, least), least)
        sides: tuple[list[_Fixed], list[_Fixed]] = ([], [])
        for part in self._parts:
            fault, fixed_s, squared = part
            then_s, more = behind if fault in _HISTORY else alone
            sides[fixed_s + then_s + math.sqrt(squared + more) > deadline_s].append(part)
        if not sides[1]:
            return self if sides[0] else None, None
        return self._only(sides[0]) if sides[0] else None, self._only(sides[1])

    def _only(self, parts: list[_Fixed]) -> Bounds:
        made = Bounds.__new__(Bounds)
        made._take(self._learned, self._confidence, self._share, parts)
        return made

    def __call__(self, history: History, planned: int) -> float:
        """The seconds that recovery does not pass, with this history and so many records planned."""
        (then_s, squared), (again_s, more) = self._later(history, planned)
        found = 0.0
        for fixed_s, spread in self._kept:
            found = max(found, fixed_s + then_s + math.sqrt(spread + squared))
        for fixed_s, spread in self._lost:
            found = max(found, fixed_s + again_s + math.sqrt(spread + more))
        return found

    def _later(self, history: History, planned: int) -> tuple[tuple[float, float], tuple[float, float]]:
        """What the planned epoch takes in the worst case, and the square of its spread; and the same behind a replay."""
        alone = self._learned.epoch.predict([1.0, float(planned)]).worst(self._confidence)
        if not self._lost:
            return alone, alone
        again_s, more = replaying(self._learned, history, self._share).worst(self._confidence)
        return alone, (alone[0] + again_s, alone[1] + more)


_Fixed = tuple[Fault, float, float]
"""A fault, what it takes before anything is run again at least in the worst case, and the square of the rest."""


def _largest(of: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that may be the worst: no other takes as long and is as unsure."""
    found: list[tuple[float, float]] = []
    for one in sorted(set(of), reverse=True):
        if not found or one[1] > found[-1][1]:
            found.append(one)
    return found


class Outcome(msgspec.Struct, frozen=True):
    """A recovery that was: what was estimated before, and what it took."""

    fault: str
    epoch: int
    """Whose commit ended it."""
    at_ms: int
    took_s: float
    measured: Parts
    """As far as it was seen from inside; what was not is the environment's."""
    estimated: Parts = Parts()
    bounds: dict[str, float] = {}
    """The bound before, by its confidence."""
    deadline_s: float = 0.0
    by: str = "run"
    """Who measured: the run itself, which does not know when exactly the fault came, or a drill, which does."""
    caught_up_s: float | None = None
    """Until what had built up meanwhile was worked off too."""

    @property
    def error(self) -> float:
        """How far off the estimate was, as a share of the outcome; less than a second counts as one."""
        return abs(self.estimated.total - self.took_s) / max(1.0, self.took_s)


def attribute(took_s: float, fault: Fault, notice: Notice, loading_s: float, recomputing_s: float) -> Parts:
    """A measured recovery in its parts: what was seen of loading and recomputing, the usual detection, the rest."""
    return split(took_s, detection(fault, notice).mean, loading_s, recomputing_s)


def split(took_s: float, noticed_s: float, loading_s: float, recomputing_s: float) -> Parts:
    """A time in its parts, which never come to more than it: what is left over is the environment's.

    >>> split(10.0, 1.0, 2.0, 3.0), split(4.0, 1.0, 1.0, 8.0)
    (Parts(detection=1.0, environment=4.0, loading=2.0, recomputing=3.0), Parts(detection=1.0, environment=0.0, loading=1.0, recomputing=2.0))
    """
    noticed_s = min(noticed_s, took_s)
    loading_s = min(loading_s, took_s - noticed_s)
    recomputing_s = min(recomputing_s, took_s - noticed_s - loading_s)
    return Parts(noticed_s, took_s - noticed_s - loading_s - recomputing_s, loading_s, recomputing_s)


def calibration(outcomes: Sequence[Outcome]) -> Mapping[str, float]:
    """How well estimates and bounds did: the mean absolute error, and the share under each bound.

    >>> calibration([Outcome("host", 1, 0, 10.0, Parts(), Parts(environment=9.0), {"0.99": 12.0})])
    {'recoveries': 1, 'mean_abs_error': 0.1, 'under_0.99': 1.0}
    """
    if not outcomes:
        return {"recoveries": 0}
    found: dict[str, float] = {
        "recoveries": len(outcomes),
        "mean_abs_error": sum(o.error for o in outcomes) / len(outcomes),
    }
    for level in sorted({level for o in outcomes for level in o.bounds}):
        under = [o.took_s <= o.bounds[level] for o in outcomes if level in o.bounds]
        found[f"under_{level}"] = sum(under) / len(under)
    return found
