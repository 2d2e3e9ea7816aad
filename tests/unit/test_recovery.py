"""Checkpoints, restore and replay without Spark: the real loop over the in-process runner."""

import shutil
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.dataset as ds
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.checkpoint import coordinator
from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.lifecycle import FailedCheckpoint, Reason
from holdfast.checkpoint.metadata import Checkpoint, pack
from holdfast.checkpoint.upload import Uploaded
from holdfast.engine.local import LocalRunner
from holdfast.engine.upkeep import sweep
from holdfast.errors import (
    CheckpointError,
    DivergedError,
    EngineError,
    FencedError,
    IncompatibleError,
    JobLostError,
    UserCodeError,
)
from holdfast.log.journal import Journal
from holdfast.log.records import Commit, Plan
from holdfast.recovery import recover, restore
from holdfast.state.rocksdb import RocksState
from tests.drivers import Life, Waiting, live, make
from tests.pipelines import Everything, Recipe, recipes
from tests.spark.test_equals_runner import bytes_in, sinks_in
from tests.unit.forgetful import ForgetfulDisk

ROWS = [{"id": i, "k": 1 if i % 2 else i % 7, "name": "ann", "v": i * 0.5, "n": i % 11} for i in range(240)]
ONE = Recipe([ROWS], 20, 2, ["map"], "process", "k", [], None, 3, 20)
TWO = Recipe([ROWS], 20, 2, ["map", "branch"], "process", "k", ["filter"], "process", 3, 20)
MIXED = Recipe([ROWS], 20, 2, ["map"], "aggregate", "k", ["branch"], "reduce", 2, 20)


def oracle(recipe: Recipe, life: Life, folder: Path) -> hf.testing.Result:
    plans = [life.journal.plan(e) for e in range(1, life.driver.last_epoch + 1)]
    return hf.testing.run(
        recipe.build(sinks_in(folder / "runner")),
        parallelism=recipe.parallelism,
        plans=[p for p in plans if p],
        capture=False,
        directory=folder / "oracle",
    )


def check(recipe: Recipe, life: Life, folder: Path) -> None:
    """Output and every commit's digests are those of a run without faults over the same plans."""
    expected = oracle(recipe, life, folder)
    assert bytes_in(folder / "ours") == bytes_in(folder / "runner")
    for epoch, commit in enumerate(expected.commits, start=1):
        ours = life.journal.commit(epoch)
        assert ours is not None
        for uid, shards in commit.shards.items():
            assert [s.sealed.digest for s in ours.shards[uid]] == [s.sealed.digest for s in shards]


def lose(life: Life, uid: str, shard: int) -> None:
    shutil.rmtree(Path(life.program.state_root) / life.program.home / uid / f"{shard:05d}")


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
@pytest.mark.parametrize("recipe", [ONE, TWO, MIXED], ids=["one", "two", "mixed"])
@pytest.mark.parametrize("checkpoint", ["4 epochs", "never"])
def test_shards_that_lost_everything_are_rebuilt_and_the_rest_goes_on(
    tmp_path: Path, recipe: Recipe, backend: str, checkpoint: str
) -> None:
    options: dict[str, Any] = {
        "backend": backend,
        "checkpoint": checkpoint,
        "trim_log": False,
        "parallelism": recipe.parallelism,
        "max_records": 20,
        "checkpoint_on_stop": False,
        "runner": Waiting,
    }
    sinks = sinks_in(tmp_path / "ours")
    first = live(recipe.build(sinks), tmp_path / "dir", epochs=7, **options)
    lost = "second" if recipe.second else "first"
    lose(first, lost, 1)
    second = live(recipe.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", **options)
    assert second.recovery.last is not None
    assert second.recovery.last.lacking == 1
    assert second.recovery.last.replayed == (7 if checkpoint == "never" else 3)
    assert second.driver.last_epoch == 12
    assert all(f.runs == 1 for f in second.facts[1:])
    check(recipe, second, tmp_path)
    root = Path(second.program.state_root)
    assert not list((root / f"{second.program.home}.scratch").rglob("*.delta"))


any_loss = given(
    recipes(60),
    st.sampled_from(["heap", "rocksdb"]),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sets(st.tuples(st.sampled_from(["first", "second"]), st.integers(0, 3)), min_size=1),
)


@settings(deadline=None, max_examples=12, suppress_health_check=list(HealthCheck))
@any_loss
def test_any_pipeline_comes_back_from_any_loss(
    recipe: Recipe, backend: str, every: int, stop: int, lost: set[tuple[str, int]]
) -> None:
    comes_back(recipe, backend, every, stop, lost)


@pytest.mark.slow
@settings(deadline=None, max_examples=80, suppress_health_check=list(HealthCheck))
@any_loss
def test_many_pipelines_come_back_from_any_loss(
    recipe: Recipe, backend: str, every: int, stop: int, lost: set[tuple[str, int]]
) -> None:
    comes_back(recipe, backend, every, stop, lost)


def comes_back(recipe: Recipe, backend: str, every: int, stop: int, lost: set[tuple[str, int]]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="holdfast-any-"))
    options: dict[str, Any] = {
        "backend": backend,
        "checkpoint": f"{every} epochs",
        "trim_log": False,
        "parallelism": recipe.parallelism,
        "max_records": recipe.max_records,
        "checkpoint_on_stop": False,
    }
    try:
        first = live(recipe.build(sinks_in(folder / "ours")), folder / "dir", epochs=stop, **options)
        for uid, shard in lost:
            path = Path(first.program.state_root) / first.program.home / uid / f"{shard:05d}"
            shutil.rmtree(path, ignore_errors=True)
        second = live(recipe.build(sinks_in(folder / "ours")), folder / "dir", **options)
        check(recipe, second, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_checkpoints_hold_all_that_is_needed_and_old_ones_go(tmp_path: Path) -> None:
    life = live(
        ONE.build(sinks_in(tmp_path / "ours")),
        tmp_path / "dir",
        checkpoint="1 epochs",
        parallelism=3,
        max_records=20,
    )
    kept = life.catalog.completed()
    assert len(kept) == 2
    newest = kept[-1]
    assert newest.epoch == life.driver.last_epoch
    assert newest.positions and newest.operators and newest.key_groups == 128
    assert {c.epoch for c in life.outcomes if isinstance(c, Checkpoint)} >= {1, newest.epoch}
    assert life.journal.epochs()[0] > kept[0].epoch or life.journal.epochs() == [newest.epoch]
    stored = {
        str(p.relative_to(tmp_path / "dir" / "checkpoints"))
        for p in (tmp_path / "dir" / "checkpoints").rglob("*")
        if p.is_file()
    }
    assert stored == {f.key for c in kept for f in c.files}


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
@pytest.mark.parametrize("damage", [tear, flip, Path.unlink], ids=["torn", "flipped", "gone"])
@pytest.mark.parametrize("what", ["a file", "the metadata"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, backend: str, damage: Any, what: str
) -> None:
    options: dict[str, Any] = {
        "backend": backend,
        "checkpoint": "2 epochs",
        "trim_log": False,
        "max_records": 20,
    }
    options |= {"parallelism": 3, "checkpoint_on_stop": False, "runner": Waiting}
    first = live(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", epochs=7, **options)
    kept = first.catalog.completed()
    assert [c.epoch for c in kept] == [4, 6]
    shutil.rmtree(first.program.state_root)
    if what == "a file":
        # What only the newest one has: an older checkpoint that shared the file would be as bad.
        shared = {f.key for f in kept[0].files}
        own = [f.key for f in kept[1].files if f.key not in shared]
        damage(Path(first.program.checkpoint_url) / own[0])
    else:
        damage(tmp_path / "dir" / "log" / "checkpoints" / f"{kept[1].number:012d}.json")
    second = live(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", **options)
    assert second.recovery.last is not None
    assert second.recovery.last.replayed == 3
    if damage is not Path.unlink or what == "a file":
        assert f"checkpoint {kept[1].number} can't be used" in caplog.text
    check(ONE, second, tmp_path)


def test_a_checkpoint_from_the_future_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint": "2 epochs", "max_records": 20, "parallelism": 3}
    first = live(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", epochs=4, **options)
    newest = first.catalog.completed()[-1]
    path = tmp_path / "dir" / "log" / "checkpoints" / f"{newest.number:012d}.json"
    path.write_bytes(pack(msgspec.structs.replace(newest, format=99)))
    with pytest.raises(
        IncompatibleError, match="has format 99; this version of holdfast knows formats up to 1"
    ):
        live(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", **options)


class Unsteady(hf.KeyedProcess):
    """Not deterministic: it counts how often it was called at all."""

    n = hf.ValueState(int, default=0)
    calls = 0

    def process(self, key: Any, record: dict[str, Any], ctx: hf.Context) -> Any:
        type(self).calls += 1
        self.n.value = type(self).calls
        yield {"n": self.n.value}


def unsteady(sink: hf.Sink) -> hf.Pipeline:
    p = hf.Pipeline("unsteady")
    p.read("in", hf.records(ROWS, per_epoch=20)).key_by("k").process("count", Unsteady()).write("out", sink)
    return p


def test_a_replay_that_differs_stops_with_the_operator_and_the_epoch(tmp_path: Path) -> None:
    first = live(unsteady(hf.memory()), tmp_path, epochs=4, checkpoint="never", max_records=20)
    shutil.rmtree(first.program.state_root)
    with pytest.raises(
        DivergedError, match=r"\[count\] Shard \d gave another result when epoch 1 was replayed"
    ) as e:
        live(unsteady(hf.memory()), tmp_path, checkpoint="never", max_records=20)
    assert "ctx.random" in str(e.value)
    assert "test_recovery.py" in str(e.value)
    # Nothing was taken for the committed version meanwhile, and the choice to bear it is the user's.
    with pytest.raises(DivergedError):
        live(unsteady(hf.memory()), tmp_path, checkpoint="never", max_records=20)
    life = live(unsteady(hf.memory()), tmp_path, checkpoint="never", max_records=20, on_divergence="warn")
    assert life.driver.last_epoch == 12


class Watched(hf.Sink):
    """Notes whether an epoch was decided when it was published."""

    def __init__(self, directory: Path) -> None:
        self._inner = hf.memory()
        self._directory = directory
        self.decided: list[bool] = []

    def writer(self, target: Any) -> Any:
        return self._inner.writer(target)

    def publish(self, decided: Any) -> None:
        self.decided.append(Journal.at(self._directory).commit(decided.epoch) is not None)
        self._inner.publish(decided)


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_at_least_once_publishes_before_the_decision(tmp_path: Path, guarantee: str) -> None:
    sink = Watched(tmp_path)
    live(unsteady(sink), tmp_path, guarantee=guarantee, max_records=20)
    assert set(sink.decided) == {guarantee == "exactly_once"}
    assert len(sink.decided) == 12


def test_what_was_not_synced_may_be_lost_and_nothing_that_counts_is(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "checkpoint": "2 epochs",
        "max_records": 20,
        "parallelism": 3,
        "trim_log": False,
    }
    options["checkpoint_on_stop"] = False
    disk = tmp_path / "disk"
    disk.mkdir()
    with ForgetfulDisk(disk) as forgetful:
        first = live(TWO.build(sinks_in(disk / "ours")), disk / "dir", epochs=7, **options)
        epochs = first.journal.epochs()
        forgetful.power_failure()
        assert not list((disk / "dir" / "state").rglob("*.delta"))
        second = live(TWO.build(sinks_in(disk / "ours")), disk / "dir", epochs=2, **options)
        assert second.recovery.last is not None and second.recovery.last.lacking == 6
        assert second.journal.epochs()[: len(epochs)] == epochs
        forgetful.power_failure()
        third = live(TWO.build(sinks_in(disk / "ours")), disk / "dir", **options)
    check(TWO, third, disk)


class Expiring(hf.Source):
    """Records that can be read for about an hour after they were planned."""

    def __init__(self, clock: list[int]) -> None:
        self._inner, self._clock = hf.records(ROWS, per_epoch=20), clock

    def schema(self) -> Any:
        return self._inner.schema()

    def plan(self, position: Any, limit: hf.Limit) -> hf.Offer:
        self._clock[0] += 600_000
        return self._inner.plan(position, limit)

    def read(self, piece: hf.Range, reading: hf.Reading) -> Any:
        return self._inner.read(piece, reading)

    def expires_ms(self, piece: hf.Range) -> int | None:
        return 3_630_000 + 600_000 * (piece.start // 20)


def test_source_data_that_is_about_to_expire_forces_a_checkpoint(tmp_path: Path) -> None:
    clock = [0]
    p = hf.Pipeline("expiring")
    p.read("in", Expiring(clock)).key_by("k").process("run", Everything()).write("out", hf.memory())
    life = live(p, tmp_path, checkpoint="manual", max_records=20, clock_ms=lambda: clock[0], runner=Waiting)
    made = [c for c in life.outcomes if isinstance(c, Checkpoint)]
    assert [c.trigger for c in made] == ["SOURCE_EXPIRES"] * len(made)
    assert len(made) >= 1
    assert made[0].epoch == 6  # 60 minutes after epoch 1, less the margin


class Full(Waiting):
    """A store that is full until room is made."""

    room = False

    def upload(self, folder: str, shards: Any, give_up: Any) -> Any:
        if not type(self).room:
            return [Uploaded("local", True, reason=Reason.STORE_FULL.name, detail="No space left on device")]
        return super().upload(folder, shards, give_up)


def test_failed_checkpoints_in_a_row_are_said_loudly_and_the_user_chooses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "FIRST_RETRY_S", 0.0)
    options: dict[str, Any] = {"checkpoint": "1 epochs", "max_records": 20, "runner": Full}
    options |= {"checkpoint_failures": 3}
    life = live(unsteady(hf.memory()), tmp_path / "a", epochs=4, **options)
    assert {o.reason for o in life.outcomes if isinstance(o, FailedCheckpoint)} == {Reason.STORE_FULL}
    assert "3 checkpoints in a row have failed, the last because the store has no room left" in caplog.text
    with pytest.raises(CheckpointError, match="3 checkpoints in a row"):
        live(unsteady(hf.memory()), tmp_path / "b", on_checkpoint_failure="stop", **options)
    Full.room = True
    try:
        life = live(unsteady(hf.memory()), tmp_path / "b", on_checkpoint_failure="stop", **options)
    finally:
        Full.room = False
    assert life.driver.last_epoch == 12


def test_before_the_first_backup_young_and_daly_go_by_what_one_is_thought_to_take(tmp_path: Path) -> None:
    """It was taken for a millisecond, and the first came as if faults were a hundred times as many."""
    now = [1_000_000]
    life = make(unsteady(hf.memory()), tmp_path, checkpoint="young-daly 50s", clock_ms=lambda: now[0])
    life.driver.start()
    commit, plan = (one for one in _first(life))
    now[0] += 9_000
    life.coordinator.consider(commit, plan, usual_s=1.0)
    assert life.coordinator.pending_epoch is None, "ten seconds are the best for one second and fifty"
    now[0] += 2_000
    life.coordinator.consider(commit, plan, usual_s=1.0)
    assert life.coordinator.pending_epoch == 1
    life.coordinator.stop()


def _first(life: Life) -> tuple[Commit, Plan]:
    """The first epoch, decided."""
    plan = life.driver._new_plan()
    assert plan is not None
    life.driver._run_epoch(plan)
    commit = life.journal.commit(1)
    assert commit is not None
    return commit, plan


def test_a_checkpoint_that_a_replaced_driver_completes_late_is_refused_however_late(tmp_path: Path) -> None:
    """Its number was taken from it, and free again once that record was cleared up: the files were gone by then."""
    options: dict[str, Any] = {"checkpoint": "1 epochs", "max_records": 20, "runner": Waiting}
    pipeline = ONE.build(sinks_in(tmp_path / "ours"))
    first = live(pipeline, tmp_path / "dir", epochs=3, **options)
    late = msgspec.structs.replace(first.catalog.completed()[-1], number=first.catalog.next_number())
    second = live(pipeline, tmp_path / "dir", **options)
    assert min(c.number for c in second.catalog.completed()) > late.number
    with pytest.raises(FencedError):
        first.catalog.complete(late)


def test_a_checkpoint_that_was_asked_for_is_made_and_the_wish_is_gone(tmp_path: Path) -> None:
    life = make(unsteady(hf.memory()), tmp_path, checkpoint="manual", max_records=20, epochs=3)
    life.journal.ask_for_checkpoint()
    life.driver.start()
    life.driver.run()
    assert [c.trigger for c in life.outcomes if isinstance(c, Checkpoint)] == ["ASKED"]
    assert life.journal.wishes() == []


def test_a_shard_whose_files_vanish_under_it_is_noticed_by_the_upload_and_rebuilt(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint": "manual", "max_records": 20, "parallelism": 3, "trim_log": False}
    life = make(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", runner=Waiting, **options)
    life.driver.start()
    folder = Path(life.program.state_root) / life.program.home / "first" / "00000"

    def spoil(facts: Any) -> None:
        if facts.epoch == 5:
            for path in folder.glob("*.delta"):
                path.unlink()
            life.journal.ask_for_checkpoint()

    life.driver._on_epoch = spoil
    life.driver.run()
    reasons = [o.reason for o in life.outcomes if isinstance(o, FailedCheckpoint)]
    assert reasons[0] is Reason.MISSING
    assert life.recovery.last is not None and life.recovery.last.lacking == 1
    assert isinstance(life.outcomes[-1], Checkpoint)
    check(ONE, life, tmp_path)


def test_two_pipelines_may_share_a_store_for_their_checkpoints(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint": "1 epochs", "max_records": 20, "parallelism": 3}
    options["checkpoint_dir"] = str(tmp_path / "shared")
    for name in ("a", "b"):
        live(ONE.build(sinks_in(tmp_path / f"ours-{name}")), tmp_path / name, epochs=5, **options)
    life = make(ONE.build(sinks_in(tmp_path / "ours-a")), tmp_path / "a", **options)
    shutil.rmtree(life.program.state_root)
    life.driver.start()
    life.driver.run()
    assert life.driver.last_epoch == 12


def test_checkpoints_in_an_object_store_bring_state_back(tmp_path: Path) -> None:
    """moto's server stands in for S3."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT")).close()
        secret = "not-a-real-secret"
        store = {"endpoint": endpoint, "region": "us-east-1", "allow_http": "true"}
        store |= {"access_key_id": "NOTAREALKEY", "secret_access_key": secret}
        options: dict[str, Any] = {
            "checkpoint": "2 epochs",
            "max_records": 20,
            "parallelism": 3,
            "trim_log": False,
        }
        options |= {"checkpoint_dir": "s3://bucket/pipelines", "storage": store, "checkpoint_on_stop": False}
        options["runner"] = Waiting
        first = live(TWO.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", epochs=7, **options)
        shutil.rmtree(first.program.state_root)
        second = live(TWO.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", **options)
        assert second.recovery.last is not None
        assert second.recovery.last.replayed == 1
        assert second.recovery.last.loaded_bytes > 0
        check(TWO, second, tmp_path)
        for path in (tmp_path / "dir" / "log").rglob("*.json"):
            assert secret not in path.read_text()
    finally:
        server.stop()


def test_a_replay_takes_the_way_that_only_a_side_output_leads(tmp_path: Path) -> None:
    """The step before it was left out, since its main output led nowhere in a replay."""
    rows = [{"k": n % 2, "at": None if n % 3 else n} for n in range(12)]

    def build() -> hf.Pipeline:
        made = hf.Pipeline("p")
        timed = made.read("in", hf.records(rows, per_epoch=2)).event_time("at", unit="s", missing="side")
        timed.write("timed", hf.parquet(str(tmp_path / "timed")))
        counted = timed.side("untimed").key_by("k").aggregate("counted", n=hf.count())
        counted.write("out", hf.parquet(str(tmp_path / "out")))
        return made

    live(build(), tmp_path / "dir", epochs=3, checkpoint="never")
    shutil.rmtree(tmp_path / "dir" / "state")
    life = live(build(), tmp_path / "dir", checkpoint="never")
    assert life.journal.last_epoch() == 6
    found = ds.dataset(tmp_path / "out").to_table().to_pylist()
    counts = {k: max(row["n"] for row in found if row["k"] == k) for k in (0, 1)}
    assert counts == {k: sum(r["at"] is None for r in rows if r["k"] == k) for k in (0, 1)}


# Lives and directories beside each other


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_two_directories_of_one_pipeline_may_keep_state_in_the_same_place(
    tmp_path: Path, backend: str
) -> None:
    """Folders were named by the pipeline: one directory's shards swept the other's versions away, or took them for theirs."""
    folders = [tmp_path / "staging", tmp_path / "production"]
    options: dict[str, Any] = {
        "state_root": str(tmp_path / "root"),
        "backend": backend,
        "checkpoint": "never",
    }
    options |= {"parallelism": ONE.parallelism, "max_records": 20}
    for epochs in ((3, 3), (1, 4), (None, None)):  # they stand at the same epoch, and at different ones
        lives = [
            live(ONE.build(sinks_in(folder / "ours")), folder / "dir", epochs=limit, **options)
            for folder, limit in zip(folders, epochs, strict=True)
        ]
        assert [life.recovery.last for life in lives] == [None, None], "nothing had to be rebuilt"
    for folder, life in zip(folders, lives, strict=True):
        check(ONE, life, folder)


class HearingOfAFailure(Waiting):
    """In one epoch a shard heard that a task of the stage before it failed, and whose report that is was lost."""

    done = False

    def run(self, plan: Any, header: Any) -> Any:
        reports = super().run(plan, header)
        if plan.epoch == 3 and not HearingOfAFailure.done:
            HearingOfAFailure.done = True
            last = next(r for r in reports if r.stage == "second")
            last.skipped, last.sealed, last.sinks = True, None, {}
        return reports


def test_a_failure_whose_report_was_lost_runs_the_epoch_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    HearingOfAFailure.done = False
    options: dict[str, Any] = {"parallelism": TWO.parallelism, "max_records": 20, "trim_log": False}
    life = live(TWO.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", runner=HearingOfAFailure, **options)
    assert HearingOfAFailure.done and [f.epoch for f in life.facts if f.runs == 2] == [3]
    assert "heard of a failure whose report was lost" in caplog.text
    check(TWO, life, tmp_path)


def test_a_checkpoint_that_one_life_could_not_use_is_the_last_resort_of_later_ones(tmp_path: Path) -> None:
    """It was forgotten with the life that had found it, and the next checkpoint was built upon its damaged files."""
    options: dict[str, Any] = {"checkpoint": "2 epochs", "trim_log": False, "max_records": 20}
    options |= {"parallelism": 3, "checkpoint_on_stop": False, "runner": Waiting}
    first = live(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", epochs=7, **options)
    before, newest = first.catalog.completed()
    shutil.rmtree(first.program.state_root)
    own = sorted({f.key for f in newest.files} - {f.key for f in before.files})
    flip(Path(first.program.checkpoint_url) / own[0])
    options["checkpoint"] = "never"
    second = live(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", epochs=1, **options)
    assert second.recovery.last is not None and second.recovery.last.replayed == 3
    later = Catalog(Journal.at(tmp_path / "dir"))
    assert [c.number for c in later.completed()] == [before.number]
    assert newest.number in later.unusable() and later.newest(99) == before
    third = live(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", epochs=1, **options)
    assert third.coordinator.newest_epoch == before.epoch
    later.condemn(before.number, "somebody has unplugged the disk")
    later = Catalog(Journal.at(tmp_path / "dir"))
    assert later.newest(99) is None, "nothing is built upon it"
    assert later.newest(99, last_resort=True) == newest, "better than none: it may be mended"
    later.delete(newest.number)
    assert list(Journal.at(tmp_path / "dir").condemned()) == [before.number]


def test_damage_that_is_found_where_an_epoch_begins_is_a_reason_to_rebuild(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocksDB finds it when it looks for what has expired; that was an error, at every start."""
    struck: list[int] = []
    expire = RocksState._expire

    def damaged(self: Any, now_ms: int) -> None:
        if self._at is not None and self._at.epoch == 4 and not struck:
            struck.append(self._at.epoch)
            raise Exception("Corruption: block checksum mismatch")
        expire(self, now_ms)

    monkeypatch.setattr(RocksState, "_expire", damaged)
    options: dict[str, Any] = {"parallelism": ONE.parallelism, "max_records": 20, "trim_log": False}
    life = live(
        ONE.build(sinks_in(tmp_path / "ours")),
        tmp_path / "dir",
        backend="rocksdb",
        checkpoint="2 epochs",
        **options,
    )
    assert struck and life.recovery.last is not None
    check(ONE, life, tmp_path)


def test_a_checkpoint_whose_files_were_damaged_before_they_were_uploaded_is_found_out_by_its_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """RocksDB finds it when it reads the damaged block, epochs after the load; sizes and checksums are right."""
    options: dict[str, Any] = {
        "backend": "rocksdb",
        "checkpoint": "3 epochs",
        "trim_log": False,
        "parallelism": ONE.parallelism,
        "max_records": 20,
        "checkpoint_on_stop": False,
        "runner": Waiting,
    }
    first = live(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", epochs=8, **options)
    good, bad = first.catalog.completed()[-2:]
    assert (good.epoch, bad.epoch) == (3, 6)
    lose(first, "first", 0)
    fetched: list[int] = []
    fetch, load, expire = restore.fetch, RocksState._load, RocksState._expire

    def fetching(storage: Any, stored: Any, folder: Any) -> int:
        fetched.append(stored.manifest.epoch)
        return fetch(storage, stored, folder)

    def loading(self: Any, manifest: Any) -> None:
        if manifest.stamp == bad.stamp("first", 0):
            self.unsound = True
        elif manifest.stamp == good.stamp("first", 0):
            self.unsound = False
        load(self, manifest)

    def reading(self: Any, now_ms: int) -> None:
        if getattr(self, "unsound", False) and self._at is not None and self._at.epoch == 7:
            raise Exception("Corruption: block checksum mismatch")
        expire(self, now_ms)

    monkeypatch.setattr(restore, "fetch", fetching)
    monkeypatch.setattr(RocksState, "_load", loading)
    monkeypatch.setattr(RocksState, "_expire", reading)
    second = live(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", **options)
    assert fetched == [6, 6, 6, 3], "once may be the host's fault"
    assert second.recovery.last is not None and second.recovery.last.replayed == 5
    told = f"checkpoint {bad.number} can't be used: its files are those that were uploaded, but hold damage"
    assert [r.message for r in caplog.records if r.message.startswith(told)]
    check(ONE, second, tmp_path)


def test_a_log_that_is_trimmed_under_a_recovery_makes_it_look_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that was all but done at the fault completes, and takes away what the recovery began with."""
    options: dict[str, Any] = {"parallelism": ONE.parallelism, "max_records": 20, "trim_log": False}
    options |= {"checkpoint": "never"}
    first = live(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", epochs=5, **options)
    lose(first, "first", 0)
    asked, plan = [], Journal.plan

    def gone_once(self: Journal, epoch: int) -> Any:
        if epoch == 2 and not asked:
            asked.append(epoch)
            return None
        return plan(self, epoch)

    monkeypatch.setattr(Journal, "plan", gone_once)
    second = live(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", **options)
    assert asked and second.recovery.last is not None and second.recovery.last.replayed == 5
    check(ONE, second, tmp_path)


@pytest.mark.parametrize(
    ("name", "swept"),
    [
        ("saved-00000003-1-src0-7-1.arrow.staged", True),
        ("store-00000001-out-00000003-1r2-1-7-4.arrow.staged", True),
        ("store-00000001-out-00000009-1-1-7-4.arrow.staged", False),
        ("owner-00000001-x.json", False),
    ],
)
def test_staged_files_go_by_the_epoch_of_their_attempt_and_not_by_what_their_uid_looks_like(
    tmp_path: Path, name: str, swept: bool
) -> None:
    """A sink called store-00000001-out lost what it had staged for the epoch under way."""
    (tmp_path / name).touch()
    sweep(tmp_path, 5)
    assert (tmp_path / name).exists() != swept


# Errors of the user's own, which come back with the same plan


class Broken(hf.Source):
    """Somebody's source, with a fault in one of its methods."""

    def __init__(self, method: str, error: Exception) -> None:
        self._inner, self._method, self._error = hf.records(ROWS, per_epoch=20), method, error

    def schema(self) -> Any:
        return self._inner.schema()

    def plan(self, position: Any, limit: hf.Limit) -> hf.Offer:
        if self._method == "plan" and position is not None:
            raise self._error
        return self._inner.plan(position, limit)

    def read(self, piece: hf.Range, reading: hf.Reading) -> Any:
        if self._method == "read":
            raise self._error
        return self._inner.read(piece, reading)


class Unwilling(Watched):
    """Somebody's sink that shows nothing."""

    def publish(self, decided: Any) -> None:
        raise KeyError("no such table")


@pytest.mark.parametrize("method", ["plan", "read", "publish"])
def test_what_somebodys_source_or_sink_raises_is_an_error_of_theirs(tmp_path: Path, method: str) -> None:
    """It ended with a code after which a supervisor starts again, and again."""
    p = hf.Pipeline("theirs")
    sink = Unwilling(tmp_path) if method == "publish" else hf.memory()
    source = Broken(method, ValueError("no such column"))
    p.read("in", source).key_by("k").process("run", Everything()).write("out", sink)
    with pytest.raises(UserCodeError) as caught:
        live(p, tmp_path, max_records=20)
    assert caught.value.uid == ("out" if method == "publish" else "in")
    assert "test_recovery.py" in str(caught.value) and caught.value.remedy


@pytest.mark.parametrize("method", ["plan", "read"])
def test_a_connection_that_fails_somebodys_source_is_not_their_error(tmp_path: Path, method: str) -> None:
    p = hf.Pipeline("theirs")
    source = Broken(method, ConnectionError("the service is away"))
    p.read("in", source).key_by("k").process("run", Everything()).write("out", hf.memory())
    with pytest.raises(EngineError, match="the service is away"):
        live(p, tmp_path, max_records=20)


class Leaving(hf.KeyedProcess):
    def process(self, key: Any, record: dict[str, Any], ctx: hf.Context) -> Any:
        sys.exit("enough")


@pytest.mark.parametrize("where", ["map", "process"])
def test_a_function_that_ends_its_process_is_an_error_of_the_users(tmp_path: Path, where: str) -> None:
    """It ended the Python worker; Spark ran the task again until it gave the job up."""
    p = hf.Pipeline("leaving")
    stream = p.read("in", hf.records(ROWS, per_epoch=20))
    if where == "map":
        stream = stream.map(lambda record: sys.exit("enough"), uid="mapped")
    stream.key_by("k").process("run", Leaving()).write("out", hf.memory())
    with pytest.raises(UserCodeError, match=r"ended its process: SystemExit\(enough\)") as caught:
        live(p, tmp_path, max_records=20)
    assert "test_recovery.py" in str(caught.value)


@pytest.mark.parametrize("made_before", [True, False])
def test_an_interval_goes_on_where_the_life_before_was(tmp_path: Path, made_before: bool) -> None:
    """It began anew with every driver: where those died sooner than it was over, no checkpoint was ever made."""
    now = [1_000_000]
    options: dict[str, Any] = {"checkpoint": "60s", "max_records": 20, "checkpoint_on_stop": False}
    options |= {"clock_ms": lambda: now[0], "runner": Waiting}
    if made_before:
        first = make(unsteady(hf.memory()), tmp_path, epochs=1, **options)
        first.journal.ask_for_checkpoint()
        first.driver.start()
        first.driver.run()
        assert len(first.catalog.completed()) == 1
    made: list[int] = []
    for _ in range(4):
        now[0] += 25_000
        life = live(unsteady(hf.memory()), tmp_path, epochs=1, **options)
        life.coordinator.wait(10.0)
        made.append(sum(isinstance(o, Checkpoint) for o in life.outcomes))
    assert sum(made) == 1 and made[0] == 0, "one interval is over, and not four"


def test_what_expires_is_known_again_after_a_fall_back_to_an_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a replay would read then was forgotten, and went without a checkpoint."""
    clock = [0]
    p = hf.Pipeline("expiring")
    p.read("in", Expiring(clock)).key_by("k").process("run", Everything()).write("out", hf.memory())
    options: dict[str, Any] = {"checkpoint": "2 epochs", "max_records": 20, "epochs": 5, "trim_log": False}
    life = live(p, tmp_path, clock_ms=lambda: clock[0], runner=Waiting, checkpoint_on_stop=False, **options)
    before, newest = life.catalog.completed()
    assert (before.epoch, newest.epoch) == (2, 4) and set(life.coordinator._expiries) == {5}
    life.catalog.condemn(newest.number, "torn")
    monkeypatch.setattr(life.recovery, "recover", lambda last, damaged: 1)
    life.driver._recover()
    assert set(life.coordinator._expiries) == {3, 4, 5}


def test_a_replay_that_is_lost_is_tried_in_smaller_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may compute for so long that its workers are taken for frozen, each time anew."""
    options: dict[str, Any] = {"parallelism": ONE.parallelism, "max_records": 20, "trim_log": False}
    options |= {"checkpoint": "never"}
    first = live(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", epochs=8, **options)
    lose(first, "first", 0)
    sizes: list[int] = []
    replay = LocalRunner.replay

    def too_long(self: Any, tasks: Any, only: Any) -> Any:
        sizes.append(len(tasks[0]))
        if sizes[-1] > 2:
            raise JobLostError("Spark gave a job up: a worker was silent.")
        return replay(self, tasks, only)

    monkeypatch.setattr(LocalRunner, "replay", too_long)
    monkeypatch.setattr(recover, "MAX_RECORDS", 640)
    second = live(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", **options)
    assert sizes[:2] == [8, 8] and sizes[2:6] == [2, 2, 2, 2]
    check(ONE, second, tmp_path)


def test_a_checkpoint_is_known_before_its_store_is_cleared_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store may take long to list what it has, or hang; who waits for the backup waits no longer."""
    told: list[int] = []
    clear_up = coordinator.Coordinator._clear_up

    def look(self: Any) -> None:
        told.append(sum(isinstance(o, Checkpoint) for o in life.outcomes))
        clear_up(self)

    monkeypatch.setattr(coordinator.Coordinator, "_clear_up", look)
    options: dict[str, Any] = {"parallelism": 2, "max_records": 20, "checkpoint_on_stop": False}
    life = make(ONE.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", checkpoint="4 epochs", **options)
    life.driver.start()
    life.driver.run()
    assert told and told == list(range(1, len(told) + 1))
