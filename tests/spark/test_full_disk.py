"""The disk fills up while something is written: a clear error, nothing lost, and on it goes after room is made.

A real file system that is really full: a small tmpfs in a mount namespace of the test's own.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

IN_A_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    probe = subprocess.run(
        [*IN_A_NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False
    )
    if probe.returncode:
        pytest.skip(f"this machine gives no mount namespaces: {probe.stderr.decode().strip()}")


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
@pytest.mark.parametrize(
    ("what", "kind", "says"),
    [
        ("plan", "EngineError", "can't be written: No space left on device"),
        ("state", "EngineError", "The host's disk fails"),
        ("output", "SinkError", "Output can't be staged"),
        ("checkpoint", "CheckpointError", "the store has no room left"),
    ],
)
def test_a_full_disk_stops_with_a_clear_error_and_loses_nothing(
    tmp_path: Path, what: str, kind: str, says: str, backend: str
) -> None:
    done = subprocess.run(
        [*IN_A_NAMESPACE, sys.executable, "-m", "tests.full_disk", str(tmp_path), what, backend],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    error = json.loads(done.stdout.splitlines()[-1])
    assert error["type"] == kind
    assert says in error["message"]
    assert error["remedy"]
    if what in ("state", "output"):
        assert error["uid"]
