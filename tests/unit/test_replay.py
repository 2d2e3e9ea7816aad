"""The plan of a replay: who takes part, and in which jobs. Pure."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from holdfast.config import Settings
from holdfast.engine.build import build_program, build_stages
from holdfast.engine.program import Program
from holdfast.recovery.replay import Load, Progress, jobs, needs
from tests.pipelines import Recipe, recipes


def program(recipe: Recipe) -> Program:
    return build_program(build_stages(recipe.build()), Settings(), recipe.parallelism, str(Path("nowhere")))


@given(recipes(5), st.data())
def test_everybody_who_is_needed_takes_part_and_nobody_else(recipe: Recipe, data: st.DataObject) -> None:
    made = program(recipe)
    every = [(made.uid(s), n) for s in made.stages.keyed for n in range(made.parallelism)]
    lacking = data.draw(st.lists(st.sampled_from(every), min_size=1, unique=True))
    need = needs(made, lacking)
    assert {(u, n) for u, ns in need.real.items() for n in ns} == set(lacking)
    for uid, shards in need.scratch.items():
        assert not set(shards) & set(need.real.get(uid, []))
    for stage in made.stages.keyed:
        uid = made.uid(stage)
        for feeder in made.stages.feeding(stage):
            if uid not in need.only:
                continue
            if feeder.reads:
                assert made.stages.node(feeder.root).uid in need.sources
            else:
                assert need.only[made.uid(feeder)] == list(range(made.parallelism))
    fed = {
        made.uid(f)
        for s in made.stages.keyed
        if made.uid(s) in need.only
        for f in made.stages.feeding(s)
        if not f.reads
    }
    assert set(need.only) == {u for u, _ in lacking} | fed


LOADS = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 2)), max_size=40)


@given(LOADS, st.integers(1, 200), st.integers(1, 10))
def test_jobs_hold_every_epoch_once_in_order_within_their_bounds(
    drawn: list[tuple[int, int]], records: int, epochs: int
) -> None:
    loads = [Load(i, n, {"edge": str(s)}) for i, (n, s) in enumerate(drawn, start=1)]
    by_epoch = {load.epoch: load for load in loads}
    made = jobs(loads, records, epochs)
    assert [e for job in made for e in job] == [load.epoch for load in loads]
    for job in made:
        assert len(job) <= epochs
        assert len(job) == 1 or sum(by_epoch[e].records for e in job) <= records
        assert len({by_epoch[e].schemas["edge"] for e in job}) == 1


def test_progress_says_what_is_left() -> None:
    progress = Progress(2, loaded=2, to_load=2, replayed=10, to_replay=40, replaying_s=5.0)
    assert progress.left_s() == 15.0
    assert (
        progress.sentence() == "recovering 2 shards: 2 of 2 loaded, 10 of 40 epochs replayed, about 15 s left"
    )
    assert Progress(1, to_replay=3).left_s() is None
