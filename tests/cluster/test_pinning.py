"""The same pipelines on a standalone cluster of two hosts, every shard staying where it is."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.config import Settings
from holdfast.engine.session import make_session
from holdfast.faults.cluster import Cluster
from holdfast.log.journal import Journal
from tests.drivers import state_in
from tests.pipelines import Recipe
from tests.spark.test_equals_runner import bytes_in, sinks_in

pytestmark = pytest.mark.cluster

EPOCHS = 50
ROWS = [{"id": i, "k": i % 23, "name": "ann", "v": i * 0.5, "n": i % 11} for i in range(EPOCHS * 10)]
RECIPE = Recipe([ROWS], 10, 2, ["map", "branch"], "process", "k", ["filter"], "aggregate", 4, 10)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), workers=2, cores=2) as made:
        yield made


@pytest.fixture(scope="module")
def spark(cluster: Cluster) -> Iterator[Any]:
    session = make_session(
        Settings(
            master=cluster.url, spark={"spark.driver.host": "127.0.0.1", "spark.executor.memory": "512m"}
        ),
        "cluster",
    )
    yield session
    session.stop()


def test_every_shard_stays_on_its_executor_and_in_its_worker_for_fifty_epochs(
    cluster: Cluster, spark: Any, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "parallelism": 4,
        "max_records": 10,
        "trim_log": False,
        "spark": spark,
        "dir": str(tmp_path / "dir"),
    }
    RECIPE.build(sinks_in(tmp_path / "spark")).run(epochs=30, **options)
    handle = RECIPE.build(sinks_in(tmp_path / "spark")).run(drain=True, **options)
    journal = Journal.at(tmp_path / "dir")
    assert handle.last_epoch == EPOCHS
    assert handle.status().generation == 2
    commits = [journal.commit(e) for e in range(1, EPOCHS + 1)]
    for uid in ("first", "second"):
        for shard in range(4):
            seen = {(c.shards[uid][shard].host, c.shards[uid][shard].executor) for c in commits if c}
            assert len(seen) == 1, f"{uid} {shard} moved: {seen}"
            for part in (commits[:30], commits[30:]):
                workers = {c.shards[uid][shard].worker for c in part if c}
                assert len(workers) == 1, f"{uid} {shard} changed its worker: {workers}"
        hosts = {s.host.partition(":")[2] for c in commits if c for s in c.shards[uid]}
        assert hosts == {str(cluster.state_root(0)), str(cluster.state_root(1))}
    home = state_in(tmp_path / "dir")
    for host in (0, 1):
        assert os.listdir(cluster.state_root(host) / home.name / "first")
    assert not home.exists()

    plans = [journal.plan(e) for e in range(1, EPOCHS + 1)]
    hf.testing.run(
        RECIPE.build(sinks_in(tmp_path / "runner")),
        parallelism=4,
        plans=[p for p in plans if p],
        capture=False,
        directory=tmp_path / "oracle",
    )
    assert bytes_in(tmp_path / "spark") == bytes_in(tmp_path / "runner")
