"""What a policy for backups would have cost over a recorded run, and what the least would have been. Pure.

`simulate` walks a run's epochs with a policy: history grows, backups are begun and are through after what an upload
takes, while epochs go on; the bound is `recovery.estimate`'s and decisions are `recovery.decide`'s, as live. What
was learned does not change on the way: every policy is judged by what is known in the end. `clairvoyant` is the
fewest backups that would have held the same bound, for one who knows what comes.

The bound that is judged is that of a fault while the next epoch runs: everything since the newest complete backup
is replayed, and that epoch is run again. A run whose first epoch is not 1 is taken to begin with a backup.
"""

from __future__ import annotations

import bisect
import collections
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from holdfast.checkpoint.policy import Deadline, Known, Policy, due
from holdfast.faults.kinds import Fault
from holdfast.recovery.decide import Bound, Decision, Outlook, decide, least_epoch
from holdfast.recovery.estimate import Bounds, History, Learned, Notice, Situation, covered, estimate
from holdfast.recovery.standing import USUAL
from holdfast.recovery.trace import BackupLine, EpochLine

RECENT = 20
"""From so many epochs the guard takes their pace, and how large the next may be."""
_SMALLEST_GAP_S = 0.01


def taught(epochs: Sequence[EpochLine], backups: Sequence[BackupLine]) -> Learned:
    """What a run's own epochs and backups teach, where nothing that it learned was kept."""
    learned = Learned()
    for epoch in epochs:
        if epoch.records:
            learned.epoch.learn([1.0, float(epoch.records)], epoch.took_s)
    for backup in backups:
        if not backup.failed:
            learned.upload.learn([1.0, float(backup.new_bytes)], backup.took_s)
    return learned


class Run:
    """A recorded run, and what its recovery is judged by."""

    def __init__(
        self,
        epochs: Sequence[EpochLine],
        backups: Sequence[BackupLine],
        learned: Learned,
        notice: Notice,
        *,
        confidence: float,
        max_records: int,
        hosts: int = 1,
        share: float | None = None,
        faults: Sequence[Fault] | None = None,
    ) -> None:
        self.epochs, self.learned, self.notice = list(epochs), learned, notice
        self.confidence, self.max_records = confidence, max_records
        self.faults = list(covered(notice) if faults is None else faults)
        self._hosts, self._packed = hosts, _packed(epochs, backups)
        self._share = 1 / hosts if share is None else share
        """Of all shards, those that a replay runs."""
        took_s = [b.took_s for b in backups if not b.failed]
        self.usual_backup_s = statistics.fmean(took_s) if took_s else 0.0
        """What a backup of the recorded run took on average; 0: it made none."""
        first_s = epochs[0].at_ms / 1000 - epochs[0].took_s if epochs else 0.0
        paused_s = itertools.accumulate(e.paused_s for e in epochs)
        self.times_s = _rising([e.at_ms / 1000 - first_s - p for e, p in zip(epochs, paused_s, strict=True)])
        """When each epoch was committed, from the start of the first, had intake never been paused."""
        self._others: dict[tuple[int, int], Bounds] = {}
        self._host: dict[int, Bounds] = {}

    @property
    def run_s(self) -> float:
        return self.times_s[-1] if self.times_s else 0.0

    def gap_s(self, at: int) -> float:
        """From the commit before to this one."""
        before_s = self.times_s[at - 1] if at else 0.0
        return max(_SMALLEST_GAP_S, self.times_s[at] - before_s)

    def stored_bytes(self, at: int) -> int:
        """What the fullest host's shards have in a backup of this epoch's version; of the one before the first: -1."""
        if at < 0:
            return self.stored_bytes(0) if self.epochs and self.epochs[0].epoch > 1 else 0
        return math.ceil(self.epochs[at].state_bytes * self._packed / self._hosts)

    def bound(self, at: int, stored_bytes: int, history: History, planned: int) -> float:
        """What recovery would not pass after epoch number `at` of the list, with a backup of so many bytes."""
        return max(self.other_bound(at, planned), self.host_bound(stored_bytes, history, planned))

    def other_bound(self, at: int, planned: int) -> float:
        """That of faults after which no backup is needed."""
        return self.of_others(at)(_NONE, planned)

    def of_others(self, at: int) -> Bounds:
        """The same, of which single faults can be told apart."""
        epoch = self.epochs[max(0, at)]
        key = (epoch.shard_bytes, epoch.host_bytes)
        if key not in self._others:
            there = Situation(shard_bytes=key[0], host_bytes=key[1])
            self._others[key] = self._bounds(there, [f for f in self.faults if f is not Fault.HOST])
        return self._others[key]

    def host_bound(self, stored_bytes: int, history: History, planned: int) -> float:
        """That of a lost host, which alone depends on history."""
        return self.of_host(stored_bytes)(history, planned)

    def of_host(self, stored_bytes: int) -> Bounds:
        """The same, with a backup of so many bytes."""
        if stored_bytes not in self._host:
            there = Situation(stored_bytes=stored_bytes, share=self._share)
            self._host[stored_bytes] = self._bounds(there, [f for f in self.faults if f is Fault.HOST])
        return self._host[stored_bytes]

    def _bounds(self, situation: Situation, faults: list[Fault]) -> Bounds:
        return Bounds(situation, self.learned, self.notice, faults, self.confidence)

    def floors(self) -> dict[Fault, float]:
        """For each fault what its bound came to at the most, had every epoch been backed up at once."""
        most = Situation(
            planned=max((e.records for e in self.epochs), default=0),
            stored_bytes=max((self.stored_bytes(at) for at in range(len(self.epochs))), default=0),
            shard_bytes=max((e.shard_bytes for e in self.epochs), default=0),
            host_bytes=max((e.host_bytes for e in self.epochs), default=0),
        )
        return {
            fault: estimate(fault, most, self.learned, self.notice).bound(self.confidence)
            for fault in self.faults
        }

    def upload_s(self, new_bytes: int) -> float:
        """How long a backup takes."""
        return self.learned.upload.predict([1.0, float(new_bytes)]).mean


_NONE = History()


def _packed(epochs: Sequence[EpochLine], backups: Sequence[BackupLine]) -> float:
    """How large a backup's files are for each byte of state."""
    sizes = {e.epoch: e.state_bytes for e in epochs}
    shares = [b.size_bytes / sizes[b.epoch] for b in backups if b.size_bytes and sizes.get(b.epoch)]
    return statistics.fmean(shares) if shares else 1.0


def _rising(times_s: Sequence[float]) -> list[float]:
    """A wall clock may be set back; time is not."""
    found: list[float] = []
    for at_s in times_s:
        found.append(max(at_s, found[-1] if found else 0.0))
    return found


class Backup(msgspec.Struct, frozen=True):
    """A backup that a policy would have made."""

    epoch: int
    begun_s: float
    took_s: float
    new_bytes: int


class Result(msgspec.Struct):
    """What a policy would have cost, and what it would have held."""

    deadline_s: float
    run_s: float
    """What the run would have taken, with pauses."""
    backups: list[Backup] = []
    paused_s: float = 0.0
    cut: int = 0
    """Epochs more than were recorded, since larger ones were cut."""
    worst_s: float = 0.0
    """The largest bound."""
    over: int = 0
    """Epochs during which the bound was over the deadline."""
    curve: list[tuple[float, float]] = []
    """The bound over time."""

    @property
    def new_bytes(self) -> int:
        return sum(b.new_bytes for b in self.backups)

    @property
    def upload_s(self) -> float:
        return sum(b.took_s for b in self.backups)

    @property
    def overhead(self) -> float:
        """The share of the time in which something was uploaded."""
        return self.upload_s / self.run_s if self.run_s else 0.0

    @property
    def paused(self) -> float:
        """The share of the time in which intake was paused."""
        return self.paused_s / self.run_s if self.run_s else 0.0

    @property
    def kept(self) -> bool:
        return self.worst_s <= self.deadline_s


class _Mark(msgspec.Struct, frozen=True):
    """A version: what had been committed when it was made."""

    epochs: int = 0
    records: int = 0
    new_bytes: int = 0
    stored_bytes: int = 0


def _greatest(bounds: Sequence[Bound]) -> Bound:
    """What none of these passes."""
    return lambda history, planned: max(bound(history, planned) for bound in bounds)


class _Walk:
    """One policy on its way through a run."""

    def __init__(self, run: Run, policy: Policy, deadline_s: float) -> None:
        self._run, self._policy = run, policy
        self.result = Result(deadline_s, run.run_s)
        self._now_s = self._delay_s = self._last_begun_s = 0.0
        self._newest = self._here = _Mark(stored_bytes=run.stored_bytes(-1))
        self._uploading: tuple[_Mark, float] | None = None
        self._records: collections.deque[int] = collections.deque(maxlen=RECENT)
        self._gaps: collections.deque[float] = collections.deque(maxlen=RECENT)
        self._limit: int | None = None

    def go(self) -> Result:
        """All epochs, one after the other."""
        if self._run.epochs:
            self._decide(-1)
        for at in range(len(self._run.epochs)):
            for records, new_bytes, until_s in self._pieces(at):
                self.result.over += self._judge(at - 1, records) > self.result.deadline_s
                self._commit(at, records, new_bytes, until_s)
        if self._run.epochs:
            self._judge(len(self._run.epochs) - 1, 0)
        self.result.run_s = self._now_s
        return self.result

    def _pieces(self, at: int) -> Iterator[tuple[int, int, float]]:
        """An epoch as it was, or cut: the records and bytes of each piece, and when it is committed.

        Pieces share the time of the whole. What each costs beyond its records comes on top, unless the run had
        been idle for that long.
        """
        epoch, gap_s = self._run.epochs[at], self._run.gap_s(at)
        left, bytes_left, done = epoch.records, epoch.new_bytes, 0
        while True:
            room = left if self._limit is None else min(left, max(1, self._limit))
            whole = room >= left
            new_bytes = bytes_left if whole else bytes_left * room // left
            if done:
                self.result.cut += 1
                idle_s = max(0.0, gap_s - epoch.took_s) if done == 1 else 0.0
                self._delay_s += max(0.0, self._run.learned.epoch.weights[0] - idle_s)
            ends_s = self._run.times_s[at]
            if not whole:
                ends_s -= gap_s * (left - room) / max(1, epoch.records)
            left, bytes_left, done = left - room, bytes_left - new_bytes, done + 1
            yield room, new_bytes, ends_s
            if whole:
                return

    def _history(self) -> History:
        return History(self._here.epochs - self._newest.epochs, self._here.records - self._newest.records)

    def _judge(self, at: int, planned: int) -> float:
        """The bound while an epoch of so many records runs, or none."""
        bound = self._run.bound(at, self._newest.stored_bytes, self._history(), planned)
        result = self.result
        result.worst_s = max(result.worst_s, bound)
        result.curve.append((self._now_s, bound))
        return bound

    def _commit(self, at: int, records: int, new_bytes: int, until_s: float) -> None:
        self._now_s = max(self._now_s, until_s + self._delay_s)
        here = self._here
        self._here = _Mark(
            here.epochs + 1, here.records + records, here.new_bytes + new_bytes, self._run.stored_bytes(at)
        )
        self._records.append(records)
        self._gaps.append(self._run.gap_s(at))
        self._take_in()
        decision = self._decide(at)
        while decision.pause and self._uploading is not None:
            self._judge(at, 0)
            waited_s = self._uploading[1] - self._now_s
            self._now_s, self._delay_s = self._uploading[1], self._delay_s + waited_s
            self.result.paused_s += waited_s
            self._take_in()
            decision = self._decide(at)

    def _take_in(self) -> None:
        if self._uploading is not None and self._uploading[1] <= self._now_s:
            self._newest, self._uploading = self._uploading[0], None

    def _decide(self, at: int) -> Decision:
        decision = Decision()
        if isinstance(self._policy, Deadline):
            decision = decide(self._outlook(), *self._bounds(at))
            self._limit = decision.limit
        wanted = self._uploading is None and due(self._policy, self._known(decision)) is not None
        if wanted:
            self._begin(at)
        return decision

    def _bounds(self, at: int) -> tuple[Bound, Bound | None]:
        """As the guard has them: of faults that fit the deadline, and of the others. A backup would be as large as state is now."""
        run, least = self._run, self._least_epoch()
        stored_bytes = max(self._newest.stored_bytes, run.stored_bytes(at))
        both = [run.of_others(at), run.of_host(stored_bytes)]
        parted = [bounds.parted(self.result.deadline_s, least) for bounds in both]
        within, beyond = ([side for side in sides if side is not None] for sides in zip(*parted, strict=True))
        if not within or not beyond:
            return _greatest(both), None
        return _greatest(within), _greatest(beyond)

    def _pace_s(self) -> float:
        return (
            statistics.median(self._gaps) if self._gaps else self._run.learned.epoch.predict([1.0, 1.0]).mean
        )

    def _least_epoch(self) -> int:
        fixed_s, each_s = self._run.learned.epoch.weights
        mean = statistics.fmean(self._records) if self._records else 0.0
        return least_epoch(fixed_s, each_s, mean, self._pace_s())

    def _outlook(self) -> Outlook:
        """What the guard would know."""
        uploading = None if self._uploading is None else self._here.epochs - self._uploading[0].epochs
        learned = self._run.learned
        upload = learned.upload.predict([1.0, float(self._new_bytes)])
        return Outlook(
            deadline_s=self.result.deadline_s,
            history=self._history(),
            epoch_s=max(_SMALLEST_GAP_S, self._pace_s()),
            epoch_records=min(max(self._records, default=0), self._run.max_records),
            max_records=self._run.max_records,
            backup_s=upload.bound(self._run.confidence),
            failed_s=upload.mean,
            uploading=uploading,
            mean_records=statistics.fmean(self._records) if self._records else None,
            usual_records=int(statistics.median(list(self._records)[-USUAL:])) if self._records else None,
        )

    @property
    def _new_bytes(self) -> int:
        return self._here.new_bytes - self._newest.new_bytes

    def _known(self, decision: Decision) -> Known:
        made = self.result.backups
        return Known(
            epochs_since=self._here.epochs - self._newest.epochs,
            last_started_ms=round(self._last_begun_s * 1000),
            now_ms=round(self._now_s * 1000),
            endangered=decision.back_up,
            backup_s=self._run.usual_backup_s or (made[-1].took_s if made else Known.backup_s),
        )

    def _begin(self, at: int) -> None:
        new_bytes = self._new_bytes
        took_s = self._run.upload_s(new_bytes)
        self.result.backups.append(Backup(self._run.epochs[at].epoch, self._now_s, took_s, new_bytes))
        self._uploading = (self._here, self._now_s + took_s)
        self._last_begun_s = self._now_s


def simulate(run: Run, policy: Policy, deadline_s: float) -> Result:
    """A run with a policy, against a deadline.

    Only the policy `deadline` pauses and cuts. A pause makes the run longer by itself: what came meanwhile is not
    made up for.
    """
    return _Walk(run, policy, deadline_s).go()


def clairvoyant(run: Run, deadline_s: float) -> int | None:
    """The fewest backups with which the bound never crosses the deadline; None: not with any.

    For one who knows all epochs and how long each upload takes, never makes two at once, and neither pauses nor
    cuts. Dynamic programming: a place is a version and the commit from which on its backup counts; from there the
    next backup may be of any later version up to the last that is through before the bound would cross. Places
    are met in the order of how many backups lead to them, each once, so that the first from which the bound
    holds to the end is reached with the fewest. That takes a step for each place and each version within its window.
    """
    return _Foresight(run, deadline_s).fewest() if run.epochs else 0


class _Foresight:
    def __init__(self, run: Run, deadline_s: float) -> None:
        self._run, self._deadline_s = run, deadline_s
        self._size = len(run.epochs)
        records = [e.records for e in run.epochs]
        self._planned = _Most([*records, 0])  # number e: what is planned after commit e-1
        self._records = [0, *np.cumsum(records, dtype=np.int64).tolist()]
        self._new_bytes = np.concatenate([[0], np.cumsum([e.new_bytes for e in run.epochs], dtype=np.int64)])
        self._times_s = np.asarray(run.times_s, dtype=np.float64)
        self._upload = run.learned.upload.weights
        self._last_stretch = 0  # versions one after the other are good for about as long

    def fewest(self) -> int | None:
        if any(
            self._run.other_bound(at, self._planned.most(at + 1, at + 1)) > self._deadline_s
            for at in range(-1, self._size)
        ):
            return None
        places: set[tuple[int, int]] = {(-1, -1)}
        held: dict[int, list[tuple[int, int]]] = {}
        for backups in range(self._size + 1):
            following: set[tuple[int, int]] = set()
            for version, since in sorted(places, key=lambda place: (-place[0], place[1])):
                # The same version in place sooner, and good until the same commit, leaves every choice and more.
                if any(first <= since <= last for first, last in held.get(version, [])):
                    continue
                until = self._crossing(version, since)
                if until == self._size:
                    return backups
                held.setdefault(version, []).append((since, until))
                following.update(self._next(version, since, until))
            if not following:
                return None
            places = following
        return None

    def _crossing(self, version: int, since: int) -> int:
        """The first commit, from `since` on, after which the bound crosses with a backup of `version`; the size if none.

        A whole stretch holds if the bound holds at its end with the most that is planned anywhere in it.
        """
        stored_bytes = self._run.stored_bytes(version)
        at, stretch, grows = since, max(1, self._last_stretch - 2), 1
        while at < self._size:
            end = min(at + stretch, self._size) - 1
            history = History(end - version, self._records[end + 1] - self._records[version + 1])
            planned = self._planned.most(at + 1, end + 1)
            if self._run.host_bound(stored_bytes, history, planned) <= self._deadline_s:
                at, stretch, grows = end + 1, grows, grows * 2
            elif stretch == 1:
                self._last_stretch = at - since
                return at
            else:
                stretch = 1 if end == at else (end - at + 1) // 2
        return self._size

    def _next(self, version: int, since: int, until: int) -> Iterator[tuple[int, int]]:
        """The versions that can be backed up next, and from which commit on each backup counts."""
        first = max(since, version + 1)
        if until < 0 or first > until:
            return
        begun_s = self._times_s[first : until + 1]
        fixed_s, each_s = self._upload
        took_s = fixed_s + each_s * (self._new_bytes[first + 1 : until + 2] - self._new_bytes[version + 1])
        through_s = begun_s + took_s
        in_time = bisect.bisect_right(through_s, self._times_s[until])
        counts = np.searchsorted(self._times_s, through_s[:in_time], side="left")
        yield from zip(range(first, first + in_time), counts.tolist(), strict=True)


class _Most:
    """The largest of any stretch of numbers, at once: those of stretches of 1, 2, 4 … are kept."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._levels = [np.asarray(numbers, dtype=np.int64)]
        while (half := 1 << (len(self._levels) - 1)) * 2 <= len(numbers):
            last = self._levels[-1]
            self._levels.append(np.maximum(last[:-half], last[half:]))

    def most(self, first: int, last: int) -> int:
        level = (last - first + 1).bit_length() - 1
        row = self._levels[level]
        return int(max(row[first], row[last + 1 - (1 << level)]))
