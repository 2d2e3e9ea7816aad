"""Carries checkpoints out beside the epochs: one at a time, on a thread, from decision to outcome.

    1 begin     a number, the versions to keep, the barrier in every channel from the next epoch on
    2 upload    each host copies what the store lacks
    3 complete  the metadata record is created: now it counts
    4 clear up  what no kept checkpoint needs: records, plans and commits, files

The backup ends with step 3. Step 4 has a thread of its own, and the next backup waits for it, but not for ever: a store that
hangs where it is listed may well take what is uploaded. Then the clearing up is disowned, and changes nothing any more.

The driver's thread says what was committed and asks what is due; it never waits here, except when it stops.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from holdfast.checkpoint.calibrate import Reading, calibrate
from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.lifecycle import FailedCheckpoint, PendingCheckpoint, Reason, Tolerance, patience_s
from holdfast.checkpoint.metadata import Checkpoint, StoredVersion
from holdfast.checkpoint.policy import Deadline, Known, Trigger, due, parse_policy
from holdfast.checkpoint.retention import doubtful, lacking, sort_out, upload_folder
from holdfast.checkpoint.storage import Storage, open_storage
from holdfast.checkpoint.upload import ShardUpload, Uploaded
from holdfast.config import Settings
from holdfast.errors import CheckpointError, EngineError, FencedError, JobLostError
from holdfast.faults.points import reach
from holdfast.log.answers import forget
from holdfast.log.journal import Journal
from holdfast.log.records import Commit, Identity, Plan

_log = logging.getLogger("holdfast.checkpoint")

EXPIRY_MARGIN_S = 60.0
"""Source data that expires within this, and a checkpoint's own time, is backed up against."""
FIRST_RETRY_S = 1.0
"""After a failed checkpoint the next is begun so much later at the earliest; then twice as much, and so on."""
_LAST_RETRY_S = 60.0
_CLEAR_UP_S = 5.0
"""So long the next backup waits for the store to be cleared up, or for as long as a backup takes at the most."""
_JOIN_S = 10.0
"""So long somebody who waits for the end, or stops, waits for the store to be cleared up."""

Outcome = Checkpoint | FailedCheckpoint


class Runner(Protocol):
    """What uploads versions from the hosts that have them."""

    def upload(
        self, folder: str, shards: Sequence[ShardUpload], give_up: Callable[[], bool]
    ) -> list[Uploaded]: ...


class Expired(Exception):
    """An upload was given up because its time was over."""


class Disowned(Exception):
    """The store took so long to be cleared up that a backup was begun meanwhile."""


class ClearingUp(threading.Thread):
    """One clearing up of the store, and whether it still has a say."""

    def __init__(self, number: int, began_s: float, clear_up: Callable[[], None]) -> None:
        super().__init__(target=clear_up, name="holdfast-tidy", daemon=True)
        self.number, self.began_s = number, began_s
        self._disowned = False
        self._acts = threading.Lock()

    @property
    def awaited(self) -> bool:
        """Whether it is under way, and somebody cares."""
        return self.is_alive() and not self._disowned

    def disown(self, *, wait: bool = False) -> bool:
        """From here on it changes nothing. False while it is changing something, unless that is waited for."""
        if not self._acts.acquire(blocking=wait):
            return False
        self._disowned = True
        self._acts.release()
        return True

    def check(self) -> None:
        """Raise if it was disowned."""
        if self._disowned:
            raise Disowned

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """It is not disowned inside; raises if it was before. Never around a call to the store: that may hang."""
        with self._acts:
            self.check()
            yield


class Coordinator:
    """The checkpoints of one driver."""

    def __init__(
        self,
        identity: Identity,
        runner: Runner,
        journal: Journal,
        catalog: Catalog,
        settings: Settings,
        url: str,
        *,
        fingerprint: str = "",
        clock_ms: Callable[[], int] = lambda: int(time.time() * 1000),
        clock_s: Callable[[], float] = time.monotonic,
        on_outcome: Callable[[Outcome], None] = lambda outcome: None,
        on_read: Callable[[Reading], None] | None = None,
        answers: str | None = None,
    ) -> None:
        self._identity, self._runner, self._journal, self._catalog = identity, runner, journal, catalog
        self._settings, self._url, self._fingerprint = settings, url, fingerprint
        self._clock_ms, self._clock_s, self._on_outcome, self._on_read = (
            clock_ms,
            clock_s,
            on_outcome,
            on_read,
        )
        self._answers_folder = answers
        self._policy = parse_policy(settings.checkpoint)
        self._tolerance = Tolerance(settings.checkpoint_failures)
        self._pending: PendingCheckpoint | None = None
        self._thread: threading.Thread | None = None
        self._clearing_up: ClearingUp | None = None
        """The last one. Set by the thread of a backup, and only while none is alive: each finds itself here."""
        self._ending = threading.Event()
        self._error: BaseException | None = None
        self._keeping: dict[str, list[str]] = {}
        self._expiries: dict[int, int] = {}
        self.newest_epoch = 0
        """The epoch of the newest checkpoint; replay starts behind it."""
        self._not_before_s = 0.0
        """On the monotonic clock: a clock that is set must not hold a backup up."""
        self._last_started_ms = clock_ms()
        self._took_ms = 0
        self._uploads = 0
        self._at_most_s: float | None = None
        self._storage: Storage | None = None
        self.code_changed = False
        self._damaged = self._damage_told = False
        self._lost_in_a_row = 0
        """Checkpoints that were whole when they were completed, and were not when the store was looked at."""

    def start(self, last_epoch: int) -> None:
        """Take over from drivers of the past."""
        self._catalog.seal()
        newest = self._catalog.newest(last_epoch)
        self.newest_epoch = 0 if newest is None else newest.epoch
        self._last_started_ms = min(self._last_started_ms, self._since_ms(newest, last_epoch))
        if newest is not None and self._on_read is not None:
            threading.Thread(
                target=self._calibrate, args=(newest,), name="holdfast-read", daemon=True
            ).start()

    def _since_ms(self, newest: Checkpoint | None, last_epoch: int) -> int:
        """From when an interval is counted: drivers that die sooner than it is over would never make a checkpoint."""
        if newest is not None:
            return newest.started_ms
        first = self._journal.plan(1) if last_epoch else None
        return self._last_started_ms if first is None else first.now_ms

    def look_again(self, last_epoch: int) -> bool:
        """After it was found that a checkpoint can't be used. True: replay starts elsewhere.

        If it is the newest, another is made at once.
        """
        before, newest = self.newest_epoch, self._catalog.newest(last_epoch)
        self.newest_epoch = 0 if newest is None else newest.epoch
        if self.newest_epoch < before:
            self._damaged = self._damage_told = True
        return self.newest_epoch != before

    def found_damage(self) -> bool:
        """Whether since the last call a checkpoint was found that can't be loaded: replay starts elsewhere."""
        found = self._damage_told
        if found:
            self._damage_told = False
        return found

    def _calibrate(self, checkpoint: Checkpoint) -> None:
        """Measure how fast the store can be read, once in a life; whether it can is for recovery to find out."""
        tell, self._on_read = self._on_read, None
        if tell is None:
            return
        with contextlib.suppress(OSError):
            reading = calibrate(self._store(), checkpoint)
            if reading is not None:
                tell(reading)

    # What the driver asks

    @property
    def barrier(self) -> int:
        """The number of the checkpoint under way; 0: none."""
        self._settle()
        return 0 if self._pending is None else self._pending.number

    @property
    def keeping(self) -> dict[str, list[str]]:
        """The versions that hosts must keep for it."""
        return self._keeping if self._pending is not None else {}

    def expires(self, epoch: int, at_ms: int | None) -> None:
        """Note when an epoch's source data can't be read any more."""
        if at_ms is not None:
            self._expiries[epoch] = at_ms

    @property
    def pending_epoch(self) -> int | None:
        """The epoch whose version is being backed up; None: none is."""
        pending = self._pending
        return None if pending is None else pending.epoch

    def newest(self, last_epoch: int) -> Checkpoint | None:
        """The newest completed checkpoint up to an epoch."""
        return self._catalog.newest(last_epoch)

    @property
    def follows_deadline(self) -> bool:
        """Whether backups are made as the deadline asks."""
        return isinstance(self._policy, Deadline)

    @property
    def hopeless(self) -> bool:
        """Whether so many backups have failed that nobody should wait for one."""
        return self._tolerance.spent

    def consider(
        self,
        commit: Commit,
        plan: Plan,
        *,
        stopping: bool = False,
        endangered: bool = False,
        usual_s: float = 1.0,
        at_most_s: float | None = None,
    ) -> None:
        """Begin a checkpoint of what was just committed, if one is due. Raises what ended an earlier one for good.

        `usual_s`: what one is thought to take, as long as none was made; `at_most_s`: and at the most, where that is known.
        """
        self._settle()
        self._at_most_s = at_most_s
        for epoch in [e for e in self._expiries if e <= self.newest_epoch]:
            del self._expiries[epoch]
        now_ms = self._clock_ms()
        if self._pending is not None or self._waits_for_the_store(stopping):
            return
        wishes = self._journal.wishes()
        backup_s = self._took_ms / 1000 if self._took_ms else usual_s
        known = Known(
            epochs_since=commit.epoch - self.newest_epoch,
            last_started_ms=self._last_started_ms,
            now_ms=now_ms,
            endangered=endangered,
            backup_s=backup_s,
            asked=bool(wishes),
            stopping=stopping and self._settings.checkpoint_on_stop,
            code_changed=self.code_changed,
            damaged=self._damaged,
            expires_ms=min((at for e, at in self._expiries.items() if e > self.newest_epoch), default=None),
            margin_ms=int((EXPIRY_MARGIN_S + 2 * backup_s) * 1000),
        )
        if known.epochs_since <= 0:
            self.code_changed = False  # nothing would be replayed
        trigger = due(self._policy, known)
        if trigger is None:
            if wishes and known.epochs_since <= 0:
                self._journal.fulfil(wishes)  # the newest checkpoint is of this very version
            return
        if self._clock_s() < self._not_before_s and not stopping:
            return
        if self._disown(wait=stopping):
            self._begin(commit, plan, trigger, wishes, now_ms)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the checkpoint under way; True if none is any more. For the store to be cleared up too, but not as long."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
        self._join_clearing_up(timeout_s)
        self._settle()
        return True

    def stop(self) -> None:
        """Give up what is under way; nobody waits for it any more."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(30)
        self._join_clearing_up(_JOIN_S)
        if self._clearing_up is not None:
            self._clearing_up.disown()

    # One checkpoint

    def _begin(self, commit: Commit, plan: Plan, trigger: Trigger, wishes: list[str], now_ms: int) -> None:
        pending = PendingCheckpoint(self._catalog.next_number(), commit.epoch, trigger, now_ms)
        self._pending, self._last_started_ms = pending, now_ms
        self._keeping = {u: [s.sealed.stamp for s in shards] for u, shards in commit.shards.items()}
        self._thread = threading.Thread(
            target=self._live, args=(pending, commit, plan, wishes), name="holdfast-checkpoint", daemon=True
        )
        self._thread.start()

    def _live(self, pending: PendingCheckpoint, commit: Commit, plan: Plan, wishes: list[str]) -> None:
        try:
            outcome = self._carry_out(pending, commit, plan, wishes)
            self._ended(outcome)
            if isinstance(outcome, Checkpoint):
                self._begin_to_clear_up(outcome)
        except BaseException as error:
            self._error = error

    def _settle(self) -> None:
        """Take in how the last one ended; raises what the driver must end for."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread, self._pending = None, None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _carry_out(
        self, pending: PendingCheckpoint, commit: Commit, plan: Plan, wishes: list[str]
    ) -> Outcome:
        reach("checkpoint.begun")
        try:
            versions, new_bytes = self._upload(pending, commit)
        except _Failure as failure:
            return pending.failed(failure.reason, failure.detail, self._clock_ms())
        except Exception as error:
            return pending.failed(Reason.UNEXPECTED, f"{type(error).__name__}: {error}", self._clock_ms())
        checkpoint = self._metadata(pending, commit, plan, versions, new_bytes)
        try:
            self._journal.check_fence()
            reach("checkpoint.before_record")
            self._catalog.complete(checkpoint)
        except FencedError as error:
            self._on_outcome(pending.failed(Reason.FENCED, error.message, self._clock_ms()))
            raise
        except EngineError as error:
            return pending.failed(Reason.STORE, error.message, self._clock_ms())
        reach("checkpoint.after_record")
        with contextlib.suppress(OSError):
            self._journal.fulfil(wishes)
        self.newest_epoch = checkpoint.epoch
        return checkpoint

    def _upload(
        self, pending: PendingCheckpoint, commit: Commit
    ) -> tuple[dict[str, list[StoredVersion | None]], int]:
        before = self._catalog.newest(commit.epoch)
        shards = []
        for uid, committed in commit.shards.items():
            for number, shard in enumerate(committed):
                if shard.sealed.stamp:
                    known = None if before is None else before.version(uid, number)
                    files = [] if known is None else known.files
                    shards.append(ShardUpload(uid, number, shard.sealed.stamp, files))
        uploaded = self._answers(pending, shards)
        found = {(u, n): v for answer in uploaded for u, of in answer.versions.items() for n, v in of.items()}
        for one in shards:
            stored = found.get((one.uid, one.shard))
            if stored is None or stored.stamp != one.stamp:
                raise _Failure(
                    Reason.UNEXPECTED, f"{one.uid}, shard {one.shard}: another version was uploaded"
                )
        versions: dict[str, list[StoredVersion | None]] = {
            uid: [found[uid, n] if s.sealed.stamp else None for n, s in enumerate(committed)]
            for uid, committed in commit.shards.items()
        }
        return versions, sum(a.new_bytes for a in uploaded)

    def _answers(self, pending: PendingCheckpoint, shards: list[ShardUpload]) -> list[Uploaded]:
        self._uploads += 1
        folder = upload_folder(pending.number, self._journal.generation, self._uploads)
        may_s = self._settings.checkpoint_timeout_s
        if self.follows_deadline and self._at_most_s is not None:
            may_s = patience_s(may_s, self._at_most_s, self._tolerance.in_a_row)
        over_s = self._clock_s() + may_s

        def give_up() -> bool:
            return self._ending.is_set() or self._clock_s() > over_s

        try:
            uploaded = self._runner.upload(folder, shards, give_up) if shards else []
        except Expired:
            late = Reason.EXPIRED if may_s >= self._settings.checkpoint_timeout_s else Reason.SLOW
            reason = Reason.STOPPED if self._ending.is_set() else late
            raise _Failure(reason, f"after {(self._clock_ms() - pending.started_ms) / 1000:.0f} s") from None
        except JobLostError as error:
            raise _Failure(Reason.EXECUTORS, error.message) from None
        for answer in uploaded:
            if answer.reason:
                raise _Failure(Reason[answer.reason], answer.detail)
        return uploaded

    def _metadata(
        self,
        pending: PendingCheckpoint,
        commit: Commit,
        plan: Plan,
        versions: dict[str, list[StoredVersion | None]],
        new_bytes: int,
    ) -> Checkpoint:
        return Checkpoint(
            number=pending.number,
            epoch=commit.epoch,
            generation=self._journal.generation,
            pipeline=self._identity.name,
            fingerprint=self._fingerprint,
            trigger=pending.trigger.name,
            started_ms=pending.started_ms,
            completed_ms=self._clock_ms(),
            key_groups=self._identity.key_groups,
            parallelism=self._identity.parallelism,
            backend=self._identity.backend,
            operators=self._identity.operators,
            positions=plan.positions,
            now_ms=plan.now_ms,
            watermarks=commit.marks,
            schemas=commit.schemas,
            shards=versions,
            storage=self._store().describe(),
            new_bytes=new_bytes,
        )

    def _store(self) -> Storage:
        if self._storage is None:
            self._storage = open_storage(self._url, self._settings.storage)
        return self._storage

    # Clearing up

    def _begin_to_clear_up(self, made: Checkpoint) -> None:
        """Once everybody knows that it is there: no backup is under way while a store lists and deletes."""
        if self._clearing_up is not None and self._clearing_up.is_alive():
            return  # the store hangs; what is left now goes with what later ones leave
        self._clearing_up = ClearingUp(made.number, self._clock_s(), lambda: self._tidy(made))
        self._clearing_up.start()

    def _tidy(self, made: Checkpoint) -> None:
        try:
            try:
                self._clear_up()
            except OSError as error:
                _log.warning("clearing up after checkpoint %d: %s", made.number, error)
            self._calibrate(made)
        except BaseException as error:
            with contextlib.suppress(Disowned), self._own().acting():
                self._error = error

    def _waits_for_the_store(self, stopping: bool) -> bool:
        """Whether the next backup waits: what it uploads beside a listing would look like leftovers.

        Who stops has waited already, and does not ask again.
        """
        under_way = self._clearing_up
        if stopping or under_way is None or not under_way.awaited:
            return False
        return self._clock_s() - under_way.began_s <= max(_CLEAR_UP_S, self._at_most_s or 0.0)

    def _disown(self, *, wait: bool) -> bool:
        """Let nothing be changed any more by who listed the store before what is uploaded next; whether that is sure."""
        under_way = self._clearing_up
        if under_way is None or not under_way.awaited:
            return True
        if not under_way.disown(wait=wait):
            return False  # it deletes records, which takes a while after many epochs without a backup
        _log.warning(
            "Clearing up after checkpoint %d has taken longer than %.0f s: the next backup does not wait for it. "
            "Look at %s: it may hang where it is listed or deleted from.",
            under_way.number,
            self._clock_s() - under_way.began_s,
            self._store().describe(),
        )
        return True

    def _join_clearing_up(self, timeout_s: float) -> None:
        if self._clearing_up is not None and self._clearing_up.awaited:
            self._clearing_up.join(min(timeout_s, _JOIN_S))

    def _own_store(self) -> Storage:
        """The store, for who clears up and was not disowned."""
        self._own().check()
        return self._store()

    def _own(self) -> ClearingUp:
        """The clearing up whose thread asks."""
        assert self._clearing_up is not None
        return self._clearing_up

    def _clear_up(self) -> None:
        """Delete what no kept checkpoint needs: records first, so that none names a file that has gone."""
        self._journal.check_fence()
        completed = self._catalog.completed()
        stored = dict(self._own_store().list(""))
        # A listing may be out of date, on a shared disk above all: what it lacks is asked for by name.
        sizes = {key: self._own_store().size(key) for key in doubtful(completed, stored)}
        bad = lacking(completed, sizes)
        self._journal.check_fence()  # the store may have taken its time
        with self._own().acting():
            if bad:
                self._condemn(completed, bad)
                return
            self._lost_in_a_row = 0
            keys = self._delete_records(completed, stored)
        # A call that is under way when it is disowned is harmless: the keys were listed before any later upload began,
        # and no two uploads have a folder in common.
        self._own_store().delete(keys)
        reach("checkpoint.after_delete")

    def _delete_records(self, completed: Sequence[Checkpoint], stored: dict[str, int]) -> list[str]:
        """Delete what the log has too much; the keys that may go from the store next."""
        left = sort_out(
            completed,
            self._settings.checkpoint_keep,
            stored,
            self._journal.generation,
            self._catalog.unusable(),
        )
        reach("checkpoint.before_delete")
        for number in left.records:
            self._catalog.delete(number)
        if self._settings.trim_log:
            self._journal.trim(left.replay_from)
            if self._answers_folder is not None:
                forget(self._answers_folder, before=min(self._journal.epochs(), default=0))
        reach("checkpoint.between_deletes")
        return left.keys

    def _condemn(self, completed: Sequence[Checkpoint], bad: dict[int, str]) -> None:
        """Files have gone from the store. Nothing is deleted now, and the next checkpoint is made without these.

        If that is lost as well, it has failed like one that could not be uploaded.
        """
        for number, why in bad.items():
            self._catalog.condemn(number, why)
        newest = completed[-1]
        self.look_again(newest.epoch)
        if newest.number not in bad:
            return
        self._lost_in_a_row += 1
        first = min(self._journal.epochs(), default=0)
        _log.error(
            "The newest checkpoint can't be loaded: %s. The next one is made at once. Look who deletes files from %s.",
            f"recovery would replay everything since epoch {self.newest_epoch}"
            if first <= self.newest_epoch + 1
            else "until there is another, state is only on the hosts that have it",
            self._store().describe(),
        )
        pending = PendingCheckpoint(newest.number, newest.epoch, Trigger[newest.trigger], newest.started_ms)
        self._tolerance = dataclasses.replace(self._tolerance, in_a_row=self._lost_in_a_row - 1)
        self._ended(pending.failed(Reason.LOST, bad[newest.number], self._clock_ms()))

    # How it ended

    def _ended(self, outcome: Outcome) -> None:
        succeeded = isinstance(outcome, Checkpoint)
        self._tolerance = self._tolerance.after(succeeded)
        self._on_outcome(outcome)
        if isinstance(outcome, Checkpoint):
            self._took_ms = outcome.completed_ms - outcome.started_ms
            self._not_before_s, self.code_changed, self._damaged = 0.0, False, False
            if self._lost_in_a_row:  # whether it stays is not known yet
                self._not_before_s = self._clock_s() + _pause_s(self._lost_in_a_row)
            return
        self._not_before_s = self._clock_s() + _pause_s(self._tolerance.in_a_row)
        if outcome.reason is Reason.STOPPED:
            return
        _log.warning("%s", outcome.sentence())
        if self._tolerance.spent:
            self._say_loudly(outcome)

    def _say_loudly(self, outcome: FailedCheckpoint) -> None:
        message = (
            f"{self._tolerance.in_a_row} checkpoints in a row have failed, the last because {outcome.reason.value} "
            f"({outcome.detail}). Recovery replays everything since epoch {self.newest_epoch}."
        )
        if self._settings.on_checkpoint_failure == "stop":
            raise CheckpointError(
                message, remedy="Mend the store, or raise checkpoint_failures, and start again."
            )
        _log.error("%s", message)


def _pause_s(failures: int) -> float:
    """How long nothing is tried again after so many in a row."""
    return float(min(_LAST_RETRY_S, FIRST_RETRY_S * 2 ** (failures - 1)))


class _Failure(Exception):
    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail
