"""Calls of the outside world on a real cluster: what they answered outlives hosts, and nobody is asked twice for it."""

from pathlib import Path

import pytest

from holdfast.cli.loading import load
from holdfast.faults.cluster import Cluster
from holdfast.faults.compare import compare
from holdfast.faults.experiment import Experiment
from holdfast.faults.kinds import Fault

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

APP = str(Path(__file__).with_name("asked.py"))
QUICK = {"parallelism": 2, "interval": "200ms", "checkpoint": "2s"}


def test_a_host_lost_with_its_disk_changes_no_answer(tmp_path: Path) -> None:
    with (
        Cluster(tmp_path / "cluster", workers=2, cores=2) as cluster,
        Experiment(cluster, APP, tmp_path / "run", settings=QUICK) as experiment,
    ):
        for fault in (Fault.HOST, Fault.EXECUTOR_KILL):
            struck = experiment.strike(fault, share=0.6)
            experiment.await_recovery(struck)
        experiment.stop(struck)
    verdict = compare(lambda: load(APP), experiment.directory, experiment.out, experiment.folder / "runner")
    assert verdict.exact, "\n".join(verdict.findings)
    assert verdict.records > 0
