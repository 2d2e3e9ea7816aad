"""Checkpoints, restore and replay without Spark: the real loop over the in-process runner."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.checkpoint.metadata import Checkpoint
from tests.drivers import Life, live, make
from tests.pipelines import Recipe, recipes
from tests.spark.test_equals_runner import bytes_in, sinks_in

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
    shutil.rmtree(Path(life.program.state_root) / life.program.name / uid / f"{shard:05d}")


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
    }
    sinks = sinks_in(tmp_path / "ours")
    first = live(recipe.build(sinks), tmp_path / "dir", epochs=7, **options)
    last = [k for k in ("first", "second") if k in first.program.stages.graph.nodes[-1].uid or True]
    lost = "second" if recipe.second else "first"
    assert last
    lose(first, lost, 1)
    second = live(recipe.build(sinks_in(tmp_path / "ours")), tmp_path / "dir", **options)
    assert second.recovery.last is not None
    assert second.recovery.last.lacking == 1
    assert second.recovery.last.replayed == (7 if checkpoint == "never" else 3)
    assert second.driver.last_epoch == 12
    assert all(f.runs == 1 for f in second.facts[1:])
    check(recipe, second, tmp_path)
    root = Path(second.program.state_root)
    assert not list((root / f"{second.program.name}.scratch").rglob("*.delta"))


@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(
    recipes(60),
    st.sampled_from(["heap", "rocksdb"]),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sets(st.tuples(st.sampled_from(["first", "second"]), st.integers(0, 3)), min_size=1),
)
def test_any_pipeline_comes_back_from_any_loss(
    tmp_path_factory: pytest.TempPathFactory,
    recipe: Recipe,
    backend: str,
    every: int,
    stop: int,
    lost: set[tuple[str, int]],
) -> None:
    folder = tmp_path_factory.mktemp("any")
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
            path = Path(first.program.state_root) / first.program.name / uid / f"{shard:05d}"
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
