"""Real faults on a real cluster: each is recovered from, and nothing is lost, doubled or different in the end."""

import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from holdfast.cli.loading import load
from holdfast.errors import EngineError
from holdfast.faults.cluster import Cluster
from holdfast.faults.compare import compare
from holdfast.faults.experiment import SETTINGS, Experiment
from holdfast.faults.kinds import Fault
from holdfast.faults.victims import Executor, freeze, holding, wake

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

APP = str(Path(__file__).with_name("counted.py"))
QUICK = {"parallelism": 2, "interval": "200ms", "checkpoint": "2s"}
FENCED = 5


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), workers=2, cores=2) as made:
        yield made


def exact(experiment: Experiment) -> None:
    verdict = compare(lambda: load(APP), experiment.directory, experiment.out, experiment.folder / "runner")
    assert verdict.exact, "\n".join(verdict.findings)
    assert verdict.records > 0


def survive(cluster: Cluster, folder: Path, faults: list[Fault], backend: str = "heap") -> None:
    """One life of an application that takes these faults, one after the recovery from the other."""
    with Experiment(cluster, APP, folder, settings={**QUICK, "backend": backend}) as experiment:
        for fault in faults:
            struck = experiment.strike(fault, share=0.6)
            experiment.await_recovery(struck)
        experiment.stop(struck)
    exact(experiment)


@pytest.mark.parametrize("backend", [pytest.param("heap", marks=pytest.mark.slow), "rocksdb"])
def test_a_killed_worker_a_killed_executor_and_a_host_lost_with_its_disk_change_nothing(
    cluster: Cluster, tmp_path: Path, backend: str
) -> None:
    survive(cluster, tmp_path, [Fault.WORKER_KILL, Fault.EXECUTOR_KILL, Fault.HOST], backend)


@pytest.mark.slow
def test_a_fault_in_the_middle_of_the_recovery_from_another_changes_nothing(
    cluster: Cluster, tmp_path: Path
) -> None:
    # The first pair loses a host with its disk, the second the driver.
    with Experiment(cluster, APP, tmp_path, settings=QUICK) as experiment:
        experiment.strike(Fault.HOST, share=0.6)
        second = experiment.strike(Fault.WORKER_KILL)
        experiment.await_recovery(second)
        experiment.strike(Fault.EXECUTOR_KILL)
        third = experiment.strike(Fault.DRIVER_KILL)
        experiment.await_recovery(third)
        experiment.stop(third)
    exact(experiment)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_what_is_frozen_or_dies_as_a_whole_changes_nothing(
    cluster: Cluster, tmp_path: Path, backend: str
) -> None:
    survive(
        cluster,
        tmp_path,
        [f for f in Fault if f not in (Fault.WORKER_KILL, Fault.EXECUTOR_KILL, Fault.HOST)],
        backend,
    )


@pytest.mark.slow
def test_a_frozen_driver_that_wakes_up_after_another_took_over_changes_nothing(
    cluster: Cluster, tmp_path: Path
) -> None:
    # Both live at once, so each takes half of the cluster's cores.
    spark = {**SETTINGS["spark"], "spark.cores.max": "2"}
    with Experiment(
        cluster, APP, tmp_path, settings={**QUICK, "spark": spark}, supervise=False
    ) as experiment:
        old = experiment.victims.driver()
        freeze(old)
        new = experiment.launch({**experiment.settings, "take_over": True}, supervise=False)
        try:
            experiment.await_commit(experiment.last_planned() + 2, 120)
            wake(old)
            assert experiment.ended(60) == FENCED
            after, until = experiment.last_planned() + 2, time.monotonic() + 60
            while experiment.last_epoch() < after:
                assert new.poll() is None and time.monotonic() < until
                time.sleep(0.05)
            new.terminate()
            assert new.wait(120) == 0
        finally:
            _end(new)
    exact(experiment)


def freeze_in_an_epoch(experiment: Experiment, processes: Sequence[psutil.Process]) -> None:
    """As soon as an epoch is planned and not decided."""
    await_planned(experiment)
    freeze(processes)


def await_more(experiment: Experiment) -> None:
    """Until epochs are decided that were planned from now on."""
    experiment.await_commit(experiment.last_planned() + 3, 120)


def with_state(experiment: Experiment) -> Executor:
    """An executor that holds shards."""
    roots = [str(experiment.cluster.state_root(number)) for number in experiment.cluster.hosts]
    homes = holding(experiment.journal.commit(experiment.last_epoch()), roots)
    hosts = {experiment.cluster.host(number) for number, _ in homes}
    return next(e for e in experiment.victims.executors() if e.host in hosts)


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_a_run_without_executors_stops_when_asked_and_gives_up_by_itself(
    cluster: Cluster, tmp_path: Path
) -> None:
    """In the middle of a job, which Spark would let wait for ever, as well as between two."""
    patient, impatient = ({**QUICK, "wait_for_executors": s} for s in ("10m", "15s"))
    try:
        with Experiment(cluster, APP, tmp_path, settings=patient, supervise=False) as asked:
            await_planned(asked)
            lose_all(cluster)
            asked.journal.ask_to_stop()
            assert asked.ended(60) == 0
        start_all(cluster)
        with Experiment(cluster, APP, tmp_path, settings=impatient, supervise=False) as left:
            await_more(left)
            await_planned(left)
            lose_all(cluster)
            assert left.ended(120) == EngineError.exit_code
            assert "has given no executor for 15 s" in left.tails()
    finally:
        start_all(cluster)
    with Experiment(cluster, APP, tmp_path, settings=QUICK) as back:
        await_more(back)
        back.stop()
    exact(back)


def await_planned(experiment: Experiment) -> None:
    """Until an epoch is planned and not decided: its job runs, or is about to."""
    until = time.monotonic() + 60
    while experiment.last_planned() == experiment.last_epoch():
        assert time.monotonic() < until


def lose_all(cluster: Cluster) -> None:
    for number in cluster.hosts:
        cluster.lose_host(number)


def start_all(cluster: Cluster) -> None:
    for number in cluster.hosts:
        if not cluster.processes(number):
            cluster.start_worker(number)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_a_frozen_executor_that_wakes_up_after_another_took_its_place_changes_nothing(
    cluster: Cluster, tmp_path: Path, backend: str
) -> None:
    # With its Python workers: in the middle of a task, and at its end they would seal a version and report it.
    with Experiment(cluster, APP, tmp_path, settings={**QUICK, "backend": backend}) as experiment:
        executor = with_state(experiment)
        family = [*executor.process.children(recursive=True), executor.process]
        freeze_in_an_epoch(experiment, family)
        await_more(experiment)
        wake(alive(family))
        await_more(experiment)
        assert not alive([executor.process]), "whoever was replaced ends as soon as it can"
        experiment.stop()
    exact(experiment)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_a_frozen_host_that_wakes_up_after_its_shards_were_rebuilt_elsewhere_changes_nothing(
    cluster: Cluster, tmp_path: Path, backend: str
) -> None:
    # Nobody can end what is on it, so all of it wakes up: Spark's worker, the executor and its Python workers.
    settings = {**QUICK, "backend": backend, "wait_for_home": "1s"}
    with Experiment(cluster, APP, tmp_path, settings=settings) as experiment:
        executor = with_state(experiment)
        number = next(n for n in cluster.hosts if cluster.host(n) == executor.host)
        everything = cluster.processes(number)
        try:
            freeze_in_an_epoch(experiment, everything)
            await_more(experiment)
            assert all(p.status() == psutil.STATUS_STOPPED for p in everything), "somebody ended it first"
            last = experiment.journal.commit(experiment.last_epoch())
            assert not holding(last, [str(cluster.state_root(number))]), "its shards are elsewhere by now"
        finally:
            wake(everything)
        await_more(experiment)
        experiment.stop()
    exact(experiment)


@pytest.mark.slow
def test_a_frozen_worker_is_ended_before_another_takes_its_place(cluster: Cluster, tmp_path: Path) -> None:
    with Experiment(cluster, APP, tmp_path, settings=QUICK) as experiment:
        frozen = next(w.process for w in experiment.victims.workers() if w.slot.startswith("counts-"))
        freeze_in_an_epoch(experiment, [frozen])
        await_more(experiment)
        left = alive([frozen])
        wake(left)
        await_more(experiment)
        experiment.stop()
    exact(experiment)
    assert not left, "two workers had one shard"


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
