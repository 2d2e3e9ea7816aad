"""The archive of Spark's classes: its name, its place, when it is used, and the user's own options. Without a JVM."""

import os
import time
from pathlib import Path

import pytest

from holdfast.config import resolve
from holdfast.engine import archive
from holdfast.engine.archive import Facts, appended, folder, name_of
from holdfast.engine.session import QUICK_COMPILER, java_options

FACTS = Facts("/java/bin/java", 'JAVA_VERSION="17.0.15"', "4.3.0", "/spark/jars")
OURS = ["-XX:SharedArchiveFile=/a.jsa"]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the archive would be, of a Spark with two jars and a Java that is only named."""
    jars = tmp_path / "spark" / "jars"
    jars.mkdir(parents=True)
    (jars / "a.jar").write_bytes(b"a")
    (jars / "b.jar").write_bytes(b"b")
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "spark"))
    monkeypatch.delenv("SPARK_CONF_DIR", raising=False)
    monkeypatch.setattr(archive, "facts", lambda: FACTS)
    return archive.path()


def finished(file: Path, contents: bytes = b"classes" * 100) -> None:
    file.write_bytes(contents)
    archive._finish(file, archive.stamp())


def test_another_java_or_another_spark_has_another_archive() -> None:
    others = [FACTS._replace(**{name: "other"}) for name in Facts._fields]
    names = {name_of(f) for f in (FACTS, *others)}
    assert len(names) == 5 and name_of(FACTS) == name_of(Facts(*FACTS))
    assert all(name.startswith("spark-") and name.endswith(".jsa") for name in names)


def test_the_cache_is_where_the_environment_says() -> None:
    assert folder({"HOLDFAST_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}) == Path("/own")
    assert folder({"XDG_CACHE_HOME": "/xdg"}) == Path("/xdg/holdfast")
    assert folder({}) == Path.home() / ".cache" / "holdfast"
    assert folder({"HOLDFAST_CACHE": "here"}).is_absolute()


def test_the_java_is_the_one_that_spark_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("home", "path"):
        (tmp_path / place / "bin").mkdir(parents=True)
        (tmp_path / place / "bin" / "java").touch(mode=0o755)
        (tmp_path / place / "release").write_text(place)
    monkeypatch.setenv("PATH", str(tmp_path / "path" / "bin"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert archive.facts()[:2] == (str(tmp_path / "path" / "bin" / "java"), "path")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    assert archive.facts().release == "home"
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    assert archive.options() == [] and archive.make() == "there is no Java"


def test_an_archive_that_is_whole_is_used_and_a_missing_one_is_not(file: Path) -> None:
    assert archive.options() == []
    finished(file)
    assert archive.options()[0] == f"-XX:SharedArchiveFile={file}"


@pytest.mark.parametrize("length", [0, 1, 47, 48, 700, 747])
def test_a_torn_archive_is_not_used(file: Path, length: int) -> None:
    finished(file)
    assert file.stat().st_size == 748
    os.truncate(file, length)
    assert archive.options() == []


def test_an_archive_of_other_jars_is_not_used(file: Path, tmp_path: Path) -> None:
    finished(file)
    os.utime(tmp_path / "spark" / "jars" / "a.jar", (1, 1))
    assert archive.options() == []
    finished(file)
    assert archive.options()
    (tmp_path / "spark" / "conf").mkdir()
    assert archive.options() == []


def test_there_is_none_where_sparks_conf_folder_holds_files(file: Path, tmp_path: Path) -> None:
    finished(file)
    (tmp_path / "spark" / "conf").mkdir()
    (tmp_path / "spark" / "conf" / "spark-defaults.conf").touch()
    assert archive.options() == []
    assert "a folder that holds files" in (archive.make() or "")


def test_no_reason_for_failing_stops_a_caller(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert "Spark did not leave one" in (archive.make() or "")
    monkeypatch.setattr("sys.executable", str(tmp_path / "no-python"))
    assert "no-python" in (archive.make() or "")
    waiting = tmp_path / "waiting"
    waiting.write_text("#!/bin/sh\nsleep 60\n")
    waiting.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(waiting))
    assert "within 0 s" in (archive.make(timeout_s=0.2) or "")
    assert list(file.parent.iterdir()) == []
    monkeypatch.setenv("HOLDFAST_CACHE", str(waiting))
    assert archive.make() and archive.options() == []


def test_a_few_archives_are_kept_and_what_was_left_half_made_goes(file: Path) -> None:
    now = time.time()
    for age, name in enumerate(["spark-a.jsa", "spark-b.jsa", "spark-c.jsa", "mine.txt"]):
        (file.parent / name).touch()
        os.utime(file.parent / name, (now - age, now - age))
    half, under_way = file.parent / ".spark-a.jsa.1", file.parent / ".spark-a.jsa.2"
    half.touch()
    under_way.touch()
    os.utime(half, (1, 1))
    finished(file)
    archive._clear_up(file)
    left = {p.name for p in file.parent.iterdir()}
    assert left == {file.name, "spark-a.jsa", "spark-b.jsa", "mine.txt", under_way.name}


def test_the_users_own_options_come_first() -> None:
    assert appended("", OURS) == OURS[0]
    assert appended("-Xss4m -Da=b", OURS) == f"-Xss4m -Da=b {OURS[0]}"
    assert appended("-Xss4m", []) == "-Xss4m"


@pytest.mark.parametrize("own", ["-XX:SharedArchiveFile=/b", "-Xshare:off", "-XX:ArchiveClassesAtExit=/c"])
def test_ours_stay_away_where_the_users_speak_of_archives(own: str) -> None:
    assert appended(own, OURS) == own


def test_an_option_with_a_space_stays_one() -> None:
    assert appended("", ["-XX:SharedArchiveFile=/my home/a"]) == '"-XX:SharedArchiveFile=/my home/a"'


def test_driver_and_executors_get_it_and_a_submitted_driver_does_not() -> None:
    own = {"spark.executor.extraJavaOptions": "-Xss4m"}
    both = {
        "spark.executor.extraJavaOptions": f"-Xss4m {QUICK_COMPILER} {OURS[0]}",
        "spark.driver.extraJavaOptions": f"{QUICK_COMPILER} {OURS[0]}",
    }
    assert java_options(own, OURS, submitted=False) == both
    assert set(java_options(own, OURS, submitted=True)) == {"spark.executor.extraJavaOptions"}


@pytest.mark.parametrize(
    "own",
    ["-XX:TieredStopAtLevel=4", "-Xss4m -XX:-TieredCompilation", "-Xint", "-XX:ProfiledCodeHeapSize=100m"],
)
def test_who_says_how_to_compile_is_left_alone_and_others_get_the_quick_compiler(own: str) -> None:
    said = java_options({"spark.driver.extraJavaOptions": own}, [], submitted=False)
    assert said == {
        "spark.driver.extraJavaOptions": own,
        "spark.executor.extraJavaOptions": QUICK_COMPILER,
    }


def test_who_says_how_to_compile_somewhere_else_is_left_alone_too() -> None:
    environment = java_options({}, [], submitted=False, everywhere="-XX:CompilationMode=high-only")
    assert environment == {}
    default = java_options({"spark.driver.defaultJavaOptions": "-Xcomp"}, OURS, submitted=False)
    assert default["spark.driver.extraJavaOptions"] == OURS[0]
    assert QUICK_COMPILER in default["spark.executor.extraJavaOptions"]


def test_it_can_be_switched_off() -> None:
    assert resolve(environment={}).settings.class_archive
    assert not resolve(environment={"HOLDFAST_CLASS_ARCHIVE": "off"}).settings.class_archive
