"""What `holdfast doctor` looks at: one function a check, each with a finding and what to mend. None raises."""

from __future__ import annotations

import dataclasses
import importlib
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import psutil

from holdfast.cli.noise import SparkNoise
from holdfast.cli.output import size
from holdfast.config import Settings
from holdfast.engine import archive
from holdfast.errors import HoldfastError
from holdfast.log.store import LocalStore

OK, WARN, FAIL = "ok", "warn", "fail"
JAVAS = (17, 21)
WAIT_S = 30.0
_GB = 1 << 30
_MODULES = {
    "pyarrow": "pyarrow", "numpy": "numpy", "obstore": "obstore", "rocksdict": "rocksdict", "msgspec": "msgspec",
    "typer": "typer", "rich": "rich", "psutil": "psutil", "datasketches": "datasketches", "zstandard": "zstandard",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    status: str
    found: str
    mend: str = ""
    needed_by_spark: bool = False


def host_checks(folder: Path) -> Iterator[Check]:
    """What can be looked at without Spark."""
    yield check_java()
    yield check_python(sys.version_info[:3])
    yield check_pyspark()
    yield check_archive()
    yield from check_packages()
    yield check_connect(dict(os.environ))
    yield check_workers(dict(os.environ))
    yield check_memory(psutil.virtual_memory().available)
    for place in dict.fromkeys((str(folder), tempfile.gettempdir())):
        yield check_disk(Path(place))
    yield check_log(folder)


# Java, Python, packages


def check_java() -> Check:
    """Spark's own rule: JAVA_HOME if it is set, whatever it holds, else the java on PATH."""
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java")
    place = f"JAVA_HOME={home}" if home else java or "PATH"
    mend = "Install a Java 17 or 21 runtime (Debian: apt-get install openjdk-17-jre-headless), or set JAVA_HOME to one."
    if java is None:
        return Check(
            "Java", FAIL, "there is none on PATH, and JAVA_HOME is not set", mend, needed_by_spark=True
        )
    try:
        told = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=30, check=False
        ).stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("Java", FAIL, f"{place} does not start: {error}", mend, needed_by_spark=True)
    version = java_version(told)
    if version is None:
        return Check("Java", FAIL, f"{place} does not say its version", mend, needed_by_spark=True)
    status = OK if version in JAVAS else FAIL
    return Check(
        "Java", status, f"{version} ({place})", f"Spark 4 needs Java 17 or 21. {mend}", needed_by_spark=True
    )


def java_version(told: str) -> int | None:
    """The major version in what `java -version` prints.

    >>> java_version('openjdk version "17.0.15" 2025-04-15'), java_version('java version "1.8.0_402"')
    (17, 8)
    """
    match = re.search(r'version "(?:1\.)?(\d+)', told)
    return int(match[1]) if match else None


def check_python(version: tuple[int, ...]) -> Check:
    found = f"{'.'.join(map(str, version))} ({sys.executable})"
    return Check("Python", OK if version >= (3, 10) else FAIL, found, "holdfast needs Python 3.10 or newer.")


def check_pyspark() -> Check:
    mend = 'pip install "pyspark>=4.1"'
    try:
        version = metadata.version("pyspark")
    except metadata.PackageNotFoundError:
        return Check("PySpark", FAIL, "is not installed", mend, needed_by_spark=True)
    return Check("PySpark", OK if _numbers(version) >= (4, 1) else FAIL, version, mend, needed_by_spark=True)


def check_archive() -> Check:
    """Never more than a hint: without it Spark starts as ever, only slower."""
    name = "class archive"
    if not archive.wanted():
        return Check(name, OK, "switched off by class_archive")
    try:
        file = archive.there()
    except (archive.Unfit, OSError, RuntimeError) as error:
        return Check(name, OK, f"there can be none: {_first_line(error)}")
    if file is None:
        return Check(name, OK, f"not there; Spark starts faster with it: {archive.COMMAND}")
    return Check(name, OK, f"{file} ({size(file.stat().st_size)})")


def check_packages() -> Iterator[Check]:
    """One check for all that are well, one for each that is not."""
    least = _least_versions()
    well = []
    for name, module in _MODULES.items():
        try:
            importlib.import_module(module)
            version = metadata.version(name)
        except (ImportError, metadata.PackageNotFoundError) as error:
            yield Check(f"package {name}", FAIL, f"can't be imported: {error}", f"pip install {name}")
            continue
        if _numbers(version) < _numbers(least.get(name, "0")):
            yield Check(f"package {name}", FAIL, version, f'pip install "{name}>={least[name]}"')
        else:
            well.append(f"{name} {version}")
    yield Check("packages", OK, ", ".join(well))


def _least_versions() -> dict[str, str]:
    """The least version of each dependency, as the package itself says it."""
    try:
        lines = metadata.requires("holdfast") or []
    except metadata.PackageNotFoundError:
        return {}
    return {m[1].lower(): m[2] for m in (re.match(r"([\w.-]+)>=([\d.]+)", line) for line in lines) if m}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])


# The environment and the machine


def check_connect(environment: dict[str, str]) -> Check:
    set_ones = [v for v in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED") if environment.get(v)]
    if not set_ones:
        return Check("Spark Connect", OK, "the environment does not ask for it")
    return Check(
        "Spark Connect",
        FAIL,
        f"the environment asks for it: {', '.join(set_ones)}",
        f"The engine needs a driver in its own process: unset {' '.join(set_ones)}.",
        needed_by_spark=True,
    )


def check_workers(environment: dict[str, str]) -> Check:
    """PYSPARK_PYTHON and SPARK_HOME may name another Python or another Spark than this one."""
    python, home = environment.get("PYSPARK_PYTHON"), environment.get("SPARK_HOME")
    if home and not (Path(home) / "bin" / "spark-submit").exists():
        return Check(
            "SPARK_HOME",
            FAIL,
            f"{home} holds no Spark",
            "Unset SPARK_HOME, or mend it.",
            needed_by_spark=True,
        )
    if home:
        return Check(
            "SPARK_HOME", WARN, home, "PySpark will use that Spark: it must be the same version, or unset it."
        )
    if python and shutil.which(python) is None:
        return Check(
            "PYSPARK_PYTHON", FAIL, f"{python} is not there", "Unset PYSPARK_PYTHON, or mend it.", True
        )
    return Check("Python of workers", OK, python or "this one")


def check_memory(available: int) -> Check:
    status = OK if available >= 2 * _GB else WARN if available >= _GB // 2 else FAIL
    mend = "Spark's JVM takes about 1 GB, each Python worker 100 MB and its state. Free some, or lower heap_limit."
    return Check("memory", status, f"{size(available)} available, {os.cpu_count()} cores", mend)


def check_disk(folder: Path) -> Check:
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    status = OK if free >= 2 * _GB else WARN if free >= _GB // 4 else FAIL
    return Check(f"disk {folder}", status, f"{size(free)} free", "Make room, or choose another --dir.")


def check_log(folder: Path, records: int = 20) -> Check:
    """Every epoch creates two records: written, synced, linked under their name, and the folder synced."""
    name = f"log in {folder}"
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as scratch:
            store = LocalStore(Path(scratch))
            started = time.perf_counter()
            created = [store.put_if_absent(f"r/{n}", b"{}") for n in range(records)]
            each_ms = (time.perf_counter() - started) * 1000 / records
            again = store.put_if_absent("r/0", b"{}")
    except OSError as error:
        return Check(
            name,
            FAIL,
            f"records can't be created: {error}",
            "Choose a --dir on a local disk that can link(2).",
        )
    finally:
        if made and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    if not all(created) or again:
        return Check(name, FAIL, "a record could be created twice", "Choose a --dir on a local disk.")
    mend = "Each epoch waits for two of them: a faster disk makes shorter epochs."
    return Check(name, OK if each_ms < 20 else WARN, f"{each_ms:.1f} ms to create a record durably", mend)


# Spark


def spark_checks(master: str | None) -> Iterator[Check]:
    """What only a session can tell: it starts, executors come, shards can be pinned, versions are equal."""
    if master is not None:
        reachable = check_reachable(master)
        yield reachable
        if reachable.status == FAIL:
            return
    started = time.perf_counter()
    try:
        spark = _session(master)
    except Exception as error:
        yield Check("Spark", FAIL, f"does not start: {_first_line(error)}", _remedy(error))
        return
    try:
        took = time.perf_counter() - started
        yield Check("Spark", OK, f"{spark.version} started in {took:.1f} s on {spark.sparkContext.master}")
        yield from _inside(spark)
    finally:
        spark.stop()


def _session(master: str | None) -> Any:
    from holdfast.engine.session import check_session, make_session

    noise = SparkNoise(None)
    noise.begin()
    try:
        spark = make_session(Settings(master=master or "local[2]", class_archive=archive.wanted()), "doctor")
        check_session(spark)
    except BaseException:
        noise.end(show=True)
        raise
    noise.end(show=False)
    return spark


def check_reachable(master: str) -> Check:
    """Whether somebody answers at a standalone master's address; other masters are asked by Spark itself."""
    if not master.startswith("spark://"):
        return Check("cluster", OK, f"{master}: Spark will tell")
    mend = "Check the address, the firewall, and that the master runs (sbin/start-master.sh)."
    problems = []
    for address in master.removeprefix("spark://").split(","):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection(
                (host or address, int(port) if port.isdigit() else 7077), timeout=5
            ).close()
        except OSError as error:
            problems.append(f"{address}: {error.strerror or error}")
        else:
            return Check("cluster", OK, f"{address} answers")
    return Check("cluster", FAIL, f"nobody answers at {'; '.join(problems)}", mend)


def _inside(spark: Any) -> Iterator[Check]:
    from holdfast.engine.session import wait_for_executors

    sc = spark.sparkContext
    try:
        live = wait_for_executors(sc, WAIT_S, lambda message: None)
    except HoldfastError as error:
        yield Check("executors", FAIL, error.message, error.remedy or "")
        return
    if not sc.master.startswith("local"):
        yield Check("executors", OK, ", ".join(f"{host} ({number})" for number, host in live))
    yield check_pinning(sc)
    yield check_versions(sc, live)


def check_pinning(sc: Any) -> Check:
    """Whether shards can stay in their workers, by a real job through the doors."""
    from holdfast.engine.doors import PinnedDoors

    try:
        PinnedDoors(sc).check()
    except Exception as error:
        mend = "Pipelines run, but read their state from disk each epoch; use a PySpark that is supported (4.1+)."
        status = WARN if sc.master.startswith("local") else FAIL
        return Check("shards", status, f"can't be pinned: {_first_line(error)}", mend)
    return Check("shards", OK, "pinned")


def check_versions(sc: Any, live: list[tuple[str, str]]) -> Check:
    """Whether driver and executors have the same Python, pyarrow and holdfast."""
    from holdfast.engine.doors import open_doors
    from holdfast.engine.worker import HostBody

    mend = (
        "Install the same Python, pyarrow and holdfast on every host, or set PYSPARK_PYTHON to such a Python."
    )
    try:
        answers = open_doors(sc).ask([f"executor_{host}_{number}" for number, host in live], HostBody())
    except Exception as error:
        return Check("versions", FAIL, f"executors can't run holdfast: {_first_line(error)}", mend)
    here = own_versions()
    wrong = differences(here, [msgspec.msgpack.decode(a) for a in answers])
    if wrong:
        return Check("versions", FAIL, "; ".join(wrong), mend)
    found = ", ".join(f"{name} {version}" for name, version in here.items())
    return Check(
        "versions", OK, f"{found} on the driver and {len(answers)} executor{'s' if len(answers) > 1 else ''}"
    )


def own_versions() -> dict[str, str]:
    """What must be the same everywhere."""
    return {
        "python": platform.python_version(),
        "pyarrow": metadata.version("pyarrow"),
        "holdfast": metadata.version("holdfast"),
    }


def differences(here: dict[str, str], there: list[dict[str, Any]]) -> list[str]:
    """A sentence for each executor's version that is not the driver's; Python may differ in its patch alone.

    >>> differences(
    ...     {"python": "3.11.7"}, [{"host": "a", "python": "3.11.2"}, {"host": "b", "python": "3.12.1"}]
    ... )
    ['b has python 3.12.1, the driver 3.11.7']
    """
    wrong = []
    for facts in there:
        for name, version in here.items():
            digits = 2 if name == "python" else 3
            if _numbers(str(facts[name]))[:digits] != _numbers(version)[:digits]:
                wrong.append(f"{facts['host']} has {name} {facts[name]}, the driver {version}")
    return wrong


def _first_line(error: BaseException) -> str:
    text = error.message if isinstance(error, HoldfastError) else str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0][:200]


def _remedy(error: BaseException) -> str:
    return (error.remedy or "") if isinstance(error, HoldfastError) else "See what Spark printed above."
