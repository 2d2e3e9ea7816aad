"""Where a pipeline stands: the epochs that a replay would run, and what is loaded if a host is lost. No clock, no I/O."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Callable, Iterable, Mapping

import msgspec

from holdfast.checkpoint.metadata import Checkpoint
from holdfast.log.records import Commit
from holdfast.recovery.estimate import History, Situation

Shard = tuple[str, int]
Sizes = Mapping[Shard, tuple[int, int]]
"""Bytes and files of shards."""
Loads = Callable[[list[Shard]], Iterable[Shard]]
"""The shards that are loaded from a checkpoint if these have lost theirs."""
_RECENT = 20
USUAL = 3
"""So many of the last epochs tell how large the next one is: more of them would count a backlog that is worked off."""


class Standing:
    """What is known from commits and checkpoints.

    Args:
        cores: of all hosts together: that many load state at once.
        max_records: the most that an epoch may have.
        loads: what is loaded besides the shards of a lost host: copies of those that fed them.
    """

    def __init__(self, cores: int, max_records: int, loads: Loads = list) -> None:
        self._cores, self._max_records, self._loads = cores, max_records, loads
        self._epochs: collections.deque[tuple[int, int, int]] = collections.deque()
        """(epoch, records, new bytes) since the newest checkpoint."""
        self._last: Commit | None = None
        self._most_hosts = 1
        """The cores are those of so many hosts, also when all shards have gathered on fewer."""
        self._stored: dict[Shard, tuple[int, int]] = {}
        self._hosts: tuple[list[list[str]], list[list[Shard]]] = ([], [])
        """Where the shards are, and what is loaded if one of those hosts is lost."""
        self._now = (0, 0)
        """Bytes and files that a lost host would have loaded from a backup of the state as it is now."""
        self.records: collections.deque[int] = collections.deque(maxlen=_RECENT)
        """Of the last epochs."""
        self.history = History()
        self.older: History | None = None
        """What lies between the newest checkpoint and the one before it; None: not known."""
        self.new_bytes = 0
        """What the newest checkpoint lacks."""
        self.backed_epoch = 0
        self.state_bytes = 0
        """Of all shards."""
        self.situation = Situation()

    def begin(self, since: Iterable[Commit], newest: Checkpoint | None) -> None:
        """These commits, since this checkpoint, are what a replay would run."""
        self.backed_epoch = 0 if newest is None else newest.epoch
        self._stored = {} if newest is None else _stored(newest)
        self._epochs.clear()
        self.history, self.older, self.new_bytes = History(), None, 0
        for commit in since:
            self._add(commit)
        if not self.records:
            # Of an earlier life, which may have been allowed more; what this one takes is as large as it is.
            self.records.extend(min(records, self._max_records) for _, records, _ in self._epochs)
        if self._last is not None:
            self.stand(self._last)

    def committed(self, commit: Commit) -> None:
        """One epoch more."""
        self._add(commit)
        self.records.append(commit.records_in)
        self.stand(commit)

    def plan(self, records: int) -> bool:
        """An epoch of so many records is under way: whether that is more than was counted with. The next commit tells anew."""
        if records <= self.situation.planned:
            return False
        self.situation = msgspec.structs.replace(self.situation, planned=records, usual=records)
        return True

    def _add(self, commit: Commit) -> None:
        new_bytes = sum(s.sealed.delta_bytes for shards in commit.shards.values() for s in shards)
        self._epochs.append((commit.epoch, commit.records_in, new_bytes))
        self.history = self.history.and_(1, commit.records_in)
        self.new_bytes += new_bytes

    def backed_up(self, made: Checkpoint) -> int:
        """A checkpoint is there: how many bytes it took in."""
        before, self.older = self.new_bytes, History()
        while self._epochs and self._epochs[0][0] <= made.epoch:
            _, records, new_bytes = self._epochs.popleft()
            self.history = History(self.history.epochs - 1, self.history.records - records)
            self.older = self.older.and_(1, records)
            self.new_bytes -= new_bytes
        self._stored, self.backed_epoch = _stored(made), made.epoch
        if self._last is not None:
            self.stand(self._last)
        return before - self.new_bytes

    def since(self, epoch: int) -> int:
        """How many epochs there were after this one."""
        return sum(1 for one, _, _ in self._epochs if one > epoch)

    def moved(self, commit: Commit) -> bool:
        """Whether an epoch ended on other executors than the one before it: they stay where they are while they live."""
        before = {} if self._last is None else self._last.shards
        return any(
            was.executor != now.executor
            for uid, shards in commit.shards.items()
            for was, now in zip(before.get(uid, []), shards, strict=False)
        )

    @property
    def last_new_bytes(self) -> int:
        """What the last epoch changed."""
        return self._epochs[-1][2] if self._epochs else 0

    @property
    def mean_records(self) -> float | None:
        return statistics.fmean(self.records) if self.records else None

    def backed(self) -> Situation:
        """Where it would stand with a backup of the state as it is now, which would have to be loaded."""
        there = self.situation
        return msgspec.structs.replace(
            there,
            stored_bytes=max(there.stored_bytes, self._now[0]),
            stored_files=max(there.stored_files, self._now[1]),
        )

    def stand(self, commit: Commit) -> None:
        """Take over what a commit says of sizes and places."""
        self._last = commit
        sizes: dict[Shard, tuple[int, int]] = {}
        hosts: dict[str, list[int]] = {}
        for uid, shards in commit.shards.items():
            for number, shard in enumerate(shards):
                sizes[uid, number] = (shard.sealed.size_bytes, shard.sealed.files)
                hosts.setdefault(shard.host, []).append(shard.sealed.size_bytes)
        self.state_bytes = sum(size for size, _ in sizes.values())
        self._most_hosts = max(self._most_hosts, len(hosts))
        cores = max(1, self._cores // self._most_hosts)
        lost = self._lost_with_hosts(commit)
        stored = max((_total(shards, self._stored) for shards in lost), default=(0, 0))
        self._now = max((_total(shards, sizes) for shards in lost), default=(0, 0))
        self.situation = Situation(
            history=self.history,
            older=self.older,
            planned=max(self.records, default=0),
            usual=int(statistics.median(list(self.records)[-USUAL:])) if self.records else None,
            stored_bytes=stored[0],
            stored_files=stored[1],
            shard_bytes=max((size for size, _ in sizes.values()), default=0),
            host_bytes=max((sum(of) // min(cores, len(of)) for of in hosts.values()), default=0),
            share=max((len(shards) for shards in lost), default=0) / len(sizes) if sizes else 1.0,
        )

    def _lost_with_hosts(self, commit: Commit) -> list[list[Shard]]:
        """For each host the shards that are loaded if it is lost."""
        places = [[shard.host for shard in shards] for shards in commit.shards.values()]
        if self._hosts[0] != places:
            hosts: dict[str, list[Shard]] = {}
            for uid, shards in commit.shards.items():
                for number, shard in enumerate(shards):
                    hosts.setdefault(shard.host, []).append((uid, number))
            self._hosts = places, [list(self._loads(shards)) for shards in hosts.values()]
        return self._hosts[1]


def _total(shards: Iterable[Shard], of: Sizes) -> tuple[int, int]:
    """Bytes and files of these together."""
    found = [of.get(shard, (0, 0)) for shard in shards]
    return sum(size for size, _ in found), sum(files for _, files in found)


def _stored(checkpoint: Checkpoint) -> dict[Shard, tuple[int, int]]:
    return {
        (uid, number): (version.size_bytes, len(version.files))
        for uid, versions in checkpoint.shards.items()
        for number, version in enumerate(versions)
        if version is not None
    }
