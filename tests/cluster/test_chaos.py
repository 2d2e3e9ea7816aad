"""`holdfast chaos` as a user types it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_stages.py"
FAULTS = 12


def test_twelve_faults_of_all_kinds_lose_double_and_change_nothing(tmp_path: Path) -> None:
    words = ["chaos", str(EXAMPLE), "--faults", "all", "--trials", str(FAULTS), "--seed", "7", "--json"]
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    *trials, outcome = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [t["trial"] for t in trials] == list(range(1, FAULTS + 1))
    assert len({t["fault"] for t in trials}) == 8
    counts = {name: outcome[name] for name in ("faults", "lost", "doubled", "different_states")}
    assert counts == {"faults": FAULTS, "lost": 0, "doubled": 0, "different_states": 0}
    assert not (tmp_path / "out").exists(), "chaos must not write to the pipeline's own sinks"
