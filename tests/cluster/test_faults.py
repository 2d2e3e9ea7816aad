"""Real faults on a real cluster: each is recovered from, and nothing is lost, doubled or different in the end."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli.loading import load
from holdfast.faults.cluster import Cluster
from holdfast.faults.compare import compare
from holdfast.faults.experiment import SETTINGS, Experiment
from holdfast.faults.kinds import Fault
from holdfast.faults.victims import freeze, wake

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


def test_a_killed_worker_and_a_killed_executor_change_nothing(cluster: Cluster, tmp_path: Path) -> None:
    survive(cluster, tmp_path, [Fault.WORKER_KILL, Fault.EXECUTOR_KILL])


@pytest.mark.parametrize("backend", [pytest.param("heap", marks=pytest.mark.slow), "rocksdb"])
def test_a_host_lost_with_its_disk_changes_nothing(cluster: Cluster, tmp_path: Path, backend: str) -> None:
    survive(cluster, tmp_path, [Fault.HOST], backend)


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
@pytest.mark.parametrize(
    "fault",
    [Fault.WORKER_FREEZE, Fault.EXECUTOR_FREEZE, Fault.DRIVER_KILL, Fault.DRIVER_FREEZE, Fault.APPLICATION],
    ids=lambda fault: fault.label,
)
def test_what_is_frozen_or_dies_as_a_whole_changes_nothing(
    cluster: Cluster, tmp_path: Path, fault: Fault, backend: str
) -> None:
    survive(cluster, tmp_path, [fault], backend)


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


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
