"""What `holdfast doctor` finds, without Spark."""

import socket
from pathlib import Path

import pytest

from holdfast.cli.checks import (
    FAIL,
    OK,
    WARN,
    check_archive,
    check_connect,
    check_disk,
    check_java,
    check_log,
    check_memory,
    check_packages,
    check_pyspark,
    check_python,
    check_reachable,
    check_workers,
    differences,
    own_versions,
)
from holdfast.engine import archive


def java(folder: Path, prints: str) -> str:
    """A Java that prints its version."""
    (folder / "bin").mkdir(exist_ok=True)
    file = folder / "bin" / "java"
    file.write_text(f"#!/bin/sh\necho '{prints}' >&2\n")
    file.chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("prints", "status"),
    [
        ('openjdk version "17.0.15" 2025-04-15', OK),
        ('openjdk version "21" 2023-09-19', OK),
        ('java version "1.8.0_402"', FAIL),
        ('openjdk version "24.0.1"', FAIL),
        ("no idea", FAIL),
    ],
)
def test_java_must_be_17_or_21(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prints: str, status: str
) -> None:
    monkeypatch.setenv("JAVA_HOME", java(tmp_path, prints))
    found = check_java()
    assert found.status == status and found.needed_by_spark
    assert "JAVA_HOME" in found.found


def test_no_java_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = check_java()
    assert found.status == FAIL and "apt-get install openjdk-17-jre-headless" in found.mend
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    assert "does not start" in check_java().found


def test_what_is_installed_here_is_well() -> None:
    assert check_python((3, 11, 2)).status == OK and check_python((3, 9, 1)).status == FAIL
    assert check_pyspark().status == OK
    assert [c.status for c in check_packages()] == [OK]


def test_a_class_archive_that_is_missing_is_no_failure_and_the_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path))
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(archive, "facts", lambda: archive.Facts("java", "17", "4.3.0", "jars"))
    found = check_archive()
    assert found.status == OK and "python -m holdfast.engine.archive" in found.found
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "spark-defaults.conf").touch()
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path / "conf"))
    found = check_archive()
    assert found.status == OK and "there can be none" in found.found
    monkeypatch.setenv("HOLDFAST_CLASS_ARCHIVE", "off")
    assert "switched off" in check_archive().found


def test_spark_connect_in_the_environment_fails() -> None:
    found = check_connect({"SPARK_REMOTE": "sc://h"})
    assert found.status == FAIL and "unset SPARK_REMOTE" in found.mend
    assert check_connect({}).status == OK


def test_another_spark_or_python_is_named(tmp_path: Path) -> None:
    assert check_workers({"SPARK_HOME": str(tmp_path)}).status == FAIL
    assert check_workers({"PYSPARK_PYTHON": str(tmp_path / "python")}).status == FAIL
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "spark-submit").touch()
    assert check_workers({"SPARK_HOME": str(tmp_path)}).status == WARN
    assert check_workers({}).status == OK


def test_little_memory_warns_and_less_fails() -> None:
    assert [check_memory(n << 20).status for n in (8192, 1024, 128)] == [OK, WARN, FAIL]


def test_disk_and_log_leave_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    assert check_disk(folder).status in (OK, WARN)
    found = check_log(folder, records=3)
    assert found.status in (OK, WARN) and "ms to create a record durably" in found.found
    assert not folder.exists()
    assert check_log(tmp_path, records=3).status in (OK, WARN)
    assert not (tmp_path / "r").exists()


def test_a_file_where_the_directory_should_be_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = check_log(tmp_path / "file")
    assert found.status == FAIL and "records can't be created" in found.found


def test_a_master_that_nobody_runs_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert check_reachable(f"spark://127.0.0.1:{port}").status == OK
        assert check_reachable(f"spark://127.0.0.1:1,127.0.0.1:{port}").status == OK
    found = check_reachable(f"spark://127.0.0.1:{port}")
    assert (
        found.status == FAIL and "nobody answers at 127.0.0.1" in found.found and "master runs" in found.mend
    )
    assert check_reachable("k8s://x").status == OK


def test_versions_must_be_equal_but_for_pythons_patch() -> None:
    here = {"python": "3.11.7", "pyarrow": "20.0.0", "holdfast": "0.1.0"}
    assert differences(here, [{**here, "host": "a", "python": "3.11.2"}]) == []
    assert differences(here, [{**here, "host": "a", "pyarrow": "19.0.0"}]) == [
        "a has pyarrow 19.0.0, the driver 20.0.0"
    ]
    assert set(own_versions()) == set(here)
