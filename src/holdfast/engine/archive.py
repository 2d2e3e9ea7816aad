"""An archive of the classes that Spark's JVM loads, so that it starts in three fifths of the time.

Most of what a JVM of Spark does at its start is to read and check classes out of jars. Java can keep the result in a
file and map it (application class-data sharing). Driver, executors, masters and workers have the same class path, so one
file serves them all. `make` makes it once; `options` are the JVM options that use it, none where it is not there.

Its name is made of what is the same on all hosts of a cluster: executors are told the driver's path, and use a file of
that name on their own host if there is one. A JVM for which it does not fit starts without it, and says nothing. A file
that was cut short is another matter: the JVM maps what is not there and dies. So the file is synced before it gets its
name, and `options` looks for our mark at its end: how long it is, and of which jars it was made.

Run as `python -m holdfast.engine.archive`, it makes the archive if need be, says so in a line, and never fails.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.errors import HoldfastError

COMMAND = "python -m holdfast.engine.archive"
TIMEOUT_S = 120.0
KEPT = 3
"""So many archives stay: one for each Java and Spark in use here, as long as those are few."""
_LEFT_BEHIND_S = 3600.0
_MAGIC = b"holdfast"
_MARK_BYTES = len(_MAGIC) + 8 + 32
_QUIET = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off")
_LOUD_IF_WRONG = ("-Xlog:cds=error", "-Xlog:cds+dynamic=error")
_SPOKEN_FOR = ("SharedArchiveFile", "ArchiveClassesAtExit", "-Xshare")
_ANOTHER_SPARK = (
    "PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET", "PYSPARK_SUBMIT_ARGS", "SPARK_SUBMIT_MODE",
    "SPARK_SUBMIT_OPTS", "SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED",
)  # fmt: skip


class Unfit(Exception):
    """Why there can be no archive here, as half a sentence."""


class Facts(NamedTuple):
    """What an archive depends on and all hosts of a cluster have in common."""

    java: str
    release: str
    pyspark: str
    jars: str


def name_of(facts: Facts) -> str:
    """The file's name. Pure."""
    return f"spark-{hashlib.sha256(repr(tuple(facts)).encode()).hexdigest()[:16]}.jsa"


def folder(environment: Mapping[str, str]) -> Path:
    """Where archives are kept. An absolute path: a JVM may start anywhere."""
    if own := environment.get("HOLDFAST_CACHE"):
        return Path(own).absolute()
    cache = environment.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache").absolute() / "holdfast"


def appended(own: str, ours: Sequence[str]) -> str:
    """The user's JVM options, and ours behind them unless theirs speak of archives too. Pure.

    >>> (
    ...     appended("-Xss4m", ["-XX:SharedArchiveFile=/a"]),
    ...     appended("-Xshare:off", ["-XX:SharedArchiveFile=/a"]),
    ... )
    ('-Xss4m -XX:SharedArchiveFile=/a', '-Xshare:off')
    """
    if any(word in own for word in _SPOKEN_FOR):
        return own
    return " ".join([*([own] if own.strip() else []), *map(_quoted, ours)])


def _quoted(option: str) -> str:
    """An option as Spark's parser of option strings takes it for one."""
    if not re.search(r"[\s\"'\\]", option):
        return option
    return '"' + re.sub(r"([\"\\])", r"\\\1", option) + '"'


# Where it is, and whether it can be used


def facts() -> Facts:
    """What is so here; raises `Unfit` where there is no Java or no Spark."""
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java")
    if java is None or not os.access(java, os.X_OK):
        raise Unfit("there is no Java")
    real = Path(java).resolve()
    release = real.parent.parent / "release"
    try:
        version = metadata.version("pyspark")
    except metadata.PackageNotFoundError:
        raise Unfit("there is no PySpark") from None
    text = release.read_text(errors="replace") if release.is_file() else ""
    return Facts(str(real), text, version, str(_spark_home() / "jars"))


def _spark_home() -> Path:
    if home := os.environ.get("SPARK_HOME"):
        return Path(home)
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        raise Unfit("there is no PySpark")
    return Path(found.origin).parent


def path() -> Path:
    """Where the archive of this Java and this Spark is, or would be."""
    file = folder(os.environ) / name_of(facts())
    if os.pathsep in str(file):
        raise Unfit(f"its path would hold a {os.pathsep!r}, at which Java would cut it in two: {file}")
    return file


def stamp() -> bytes:
    """A digest of the class path as it is on this host: a Spark that was installed again has other jars.

    A folder with files in the class path, which Spark's conf folder is, rules an archive out: so says Java.
    """
    home = _spark_home()
    conf = Path(os.environ.get("SPARK_CONF_DIR") or home / "conf")
    if conf.is_dir() and any(conf.iterdir()):
        raise Unfit(f"Java makes none for a class path with a folder that holds files, as {conf} does")
    jars = sorted((e.name, e.stat().st_size, e.stat().st_mtime_ns) for e in os.scandir(home / "jars"))
    return hashlib.sha256(repr((str(conf), conf.is_dir(), jars)).encode()).digest()


def there() -> Path | None:
    """The archive, if it is whole and made of the jars that are here. Raises `Unfit` and what reading raises."""
    file, wanted = path(), stamp()
    try:
        with open(file, "rb") as archive:
            length = max(0, archive.seek(0, os.SEEK_END) - _MARK_BYTES)
            archive.seek(length)
            return file if archive.read() == _mark(length, wanted) else None
    except FileNotFoundError:
        return None


def _mark(length: int, stamp: bytes) -> bytes:
    return _MAGIC + length.to_bytes(8, "big") + stamp


def options() -> list[str]:
    """The JVM options that use the archive; none where it is not there or can't be."""
    try:
        file = there()
    except (Unfit, OSError, RuntimeError):
        return []
    return [] if file is None else [f"-XX:SharedArchiveFile={file}", *_QUIET]


def wanted() -> bool:
    """Whether the settings that hold here want it, for those who have none of their own."""
    from holdfast.config import resolve

    try:
        return resolve().settings.class_archive
    except HoldfastError:
        return True


# Making it


def make(timeout_s: float = TIMEOUT_S) -> str | None:
    """Make the archive, in a process of its own. Nothing if it is there now, else why not; never raises.

    It gets its name when it is whole, so those who make it at once only do so in vain.
    """
    scratch = None
    try:
        file, mark_stamp = path(), stamp()
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
        _start_and_end_spark(scratch, timeout_s)
        _finish(scratch, mark_stamp)
        scratch.replace(file)
        _clear_up(file)
    except (Unfit, HoldfastError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    finally:
        if scratch is not None:
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)
    return None


def _start_and_end_spark(into: Path, timeout_s: float) -> None:
    from holdfast.supervise.processes import kill_everything

    environment = {k: v for k, v in os.environ.items() if k not in _ANOTHER_SPARK}
    with tempfile.TemporaryFile() as told:
        child = subprocess.Popen(
            [sys.executable, "-m", "holdfast.engine.archive", str(into)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=told,
            stderr=told,
            start_new_session=True,
        )
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise Unfit(f"Spark did not start and end within {timeout_s:.0f} s") from None
        finally:
            kill_everything(child)
        if code != 0 or not into.exists():
            told.seek(0)
            lines = told.read().decode(errors="replace").strip().splitlines()
            raise Unfit(f"Spark did not leave one: {(lines or ['it said nothing'])[-1][:200]}")


def _finish(file: Path, stamp: bytes) -> None:
    """Put our mark behind what Java wrote, where it does not look, and have all of it on the disk."""
    file.chmod(0o644)
    with open(file, "ab") as archive:
        archive.write(_mark(archive.tell(), stamp))
        archive.flush()
        os.fsync(archive.fileno())


def _clear_up(newest: Path) -> None:
    """Delete what was left half made, and archives beyond those that are kept, the oldest first."""
    for left in newest.parent.glob(".spark-*.jsa.*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _LEFT_BEHIND_S:
                left.unlink()
    others = [p for p in newest.parent.glob("spark-*.jsa") if p != newest]
    with contextlib.suppress(OSError):
        others.sort(key=lambda p: p.stat().st_mtime, reverse=True)
        for old in others[KEPT - 1 :]:
            old.unlink()


def _run_spark(into: str) -> int:
    """A small session whose JVM notes what it loads, and writes it when it ends by itself."""
    from holdfast.config import Settings
    from holdfast.engine.doors import PinnedDoors
    from holdfast.engine.session import make_context

    java = appended("", [f"-XX:ArchiveClassesAtExit={into}", *_LOUD_IF_WRONG])
    sc = make_context(
        Settings(master="local[1]", class_archive=False, spark={"spark.driver.extraJavaOptions": java}),
        "class archive",
    )
    sc.parallelize(range(100), 2).map(lambda n: (n % 3, n)).reduceByKey(lambda a, b: a + b, 2).collect()
    with contextlib.suppress(Exception):
        PinnedDoors(sc).check()
    gateway: Any = sc._gateway
    sc.stop()
    jvm = gateway.proc
    gateway.shutdown()
    jvm.stdin.close()
    return int(jvm.wait())


def main() -> None:
    """Make it if need be, and say in a line what came of it."""
    if not wanted():
        print("The archive of Spark's classes is switched off by class_archive.")
        return
    try:
        file = there()
    except (Unfit, OSError, RuntimeError):
        file = None
    if file is not None:
        print(f"The archive of Spark's classes is there already: {file}")
        return
    started = time.monotonic()
    reason = make()
    if reason is not None:
        print(f"There is no archive of Spark's classes, and Spark starts as ever: {reason}.")
        return
    made = path()
    size_mb, took_s = made.stat().st_size / 1e6, time.monotonic() - started
    print(f"Made the archive of Spark's classes: {made} ({size_mb:.0f} MB, {took_s:.0f} s)")


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(_run_spark(sys.argv[1]))
    main()
