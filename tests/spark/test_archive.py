"""The archive of Spark's classes, made for real: JVMs map it, and one that does not fit harms none."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.engine import archive

pytestmark = pytest.mark.spark

SESSION = """
from pathlib import Path
from holdfast.config import Settings
from holdfast.engine.session import make_context

own = {"spark.driver.extraJavaOptions": "-Downs=kept"}
sc = make_context(Settings(master="local[1]", spark=own), "archive")
total = sc.parallelize(range(10), 2).map(lambda n: (n % 2, n)).reduceByKey(lambda a, b: a + b).values().sum()
maps = Path(f"/proc/{sc._gateway.proc.pid}/maps").read_text()
print("total", total, "kept", sc._jvm.System.getProperty("owns"))
files = {line.split(maxsplit=5)[-1] for line in maps.splitlines()}
print("mapped", sorted(f for f in files if "/spark-" in f and f.endswith(".jsa")))
sc.stop()
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An archive in a cache of its own, whose name has a space: the one that set-up made, or a new one."""
    cache, ready = tmp_path_factory.mktemp("class cache"), archive.there()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_CACHE", str(cache))
        if ready is not None:
            shutil.copy(ready, cache)
        else:
            assert archive.make() is None
        file = archive.there()
        assert file is not None and list(file.parent.iterdir()) == [file]
        yield file


def test_a_session_maps_the_archive_and_keeps_the_users_options(made: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SESSION], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines() == ["total 45 kept kept", f"mapped ['{made}']"]


def test_what_is_there_is_not_made_again(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = made.stat()
    archive.main()
    assert "there already" in capsys.readouterr().out and made.stat() == before


def test_a_java_for_which_it_does_not_fit_starts_and_says_nothing(made: Path, tmp_path: Path) -> None:
    whole = made.read_bytes()
    at = whole.index(b"Server VM (")
    (tmp_path / "other-java.jsa").write_bytes(whole[: at + 11] + b"11" + whole[at + 13 :])
    (tmp_path / "empty.jsa").touch()
    (tmp_path / "nonsense.jsa").write_bytes(b"nonsense" * 10_000)
    java = archive.facts().java
    # Of its own Java too, but with another class path; one that is missing; and those above.
    for file in [made, tmp_path / "missing.jsa", *tmp_path.iterdir()]:
        options = [o.replace(str(made), str(file)) for o in archive.options()]
        assert f"-XX:SharedArchiveFile={file}" in options
        done = subprocess.run(
            [java, *options, "-version"], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0 and done.stdout == "" and "version" in done.stderr, file


def test_a_torn_archive_is_never_given_to_a_java(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A JVM would die of it: it maps pages behind the end of the file."""
    shutil.copy(made, tmp_path)
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path))
    assert archive.options()
    os.truncate(tmp_path / made.name, made.stat().st_size // 4)
    assert archive.there() is None and archive.options() == []
    done = subprocess.run(
        [sys.executable, "-c", SESSION], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines() == ["total 45 kept kept", "mapped []"]
