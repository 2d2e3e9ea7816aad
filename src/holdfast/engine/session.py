"""The Spark session: made with what the engine needs, or checked where the user brings one."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.config import Settings, parse_duration_s
from holdfast.engine import archive
from holdfast.engine.doors import executors, is_local
from holdfast.errors import SessionError
from holdfast.recovery.estimate import Notice

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

_log = logging.getLogger("holdfast.session")

WANTED = {
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.shuffle.reduceLocality.enabled": "false",
    "spark.shuffle.compress": "false",
    "spark.shuffle.spill.compress": "false",
    "spark.buffer.size": str(1 << 20),
    "spark.locality.wait": "10s",
    # A task whose executor has died goes to the next one on its host at once, not after ten seconds.
    "spark.locality.wait.process": "1s",
    "spark.python.daemon.module": "holdfast.engine.daemon",
    "spark.speculation": "false",
    "spark.dynamicAllocation.enabled": "false",
    "spark.python.worker.reuse": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.scheduler.mode": "FIFO",
    "spark.cleaner.referenceTracking.blocking": "false",
}
"""What a session that we make has, unless the user says otherwise."""
LOCAL = {"spark.executor.heartbeat.maxFailures": str((1 << 31) - 1)}
"""And in local mode: there the only executor is in the driver, and after 60 heartbeats that failed in a row it ends the
JVM. Seen in runs with lost shuffle files; what makes them fail was not looked into."""


def timeouts(settings: Settings) -> dict[str, str]:
    """Spark's own settings by which it notices what is dead or frozen, from ours. Pure.

    Spark's defaults are two minutes for an executor, looked at once a minute, and never for a Python worker.
    """
    often_s = max(1, round(settings.executor_timeout_s / 6))
    return {
        "spark.network.timeout": f"{max(2, round(settings.executor_timeout_s))}s",
        "spark.network.timeoutInterval": f"{often_s}s",
        "spark.executor.heartbeatInterval": f"{often_s}s",
        # What can't be fetched is made again. A frozen executor takes connections as ever, and even after it was given
        # up Spark has tasks fetch from it: each try then lasts for the whole of the connection's time-out.
        "spark.shuffle.io.maxRetries": "0",
        "spark.shuffle.io.connectionTimeout": f"{max(2, round(settings.executor_timeout_s / 2))}s",
        "spark.python.worker.idleTimeoutSeconds": str(max(1, round(settings.worker_timeout_s))),
        "spark.python.worker.killOnIdleTimeout": "true",
    }


def notice_of(
    conf: Mapping[str, str],
    *,
    local: bool,
    supervised_s: float | None,
    wait_for_home_s: float,
    restart_s: float = 0.0,
) -> Notice:
    """By what faults are noticed with a session's settings, Spark's defaults where it has none. Pure."""

    def seconds(key: str, default: float, unit_s: float = 1.0) -> float:
        text = conf.get(key, "")
        return parse_duration_s(text if not text.isdigit() else float(text) * unit_s) if text else default

    silent_s = seconds("spark.network.timeout", 120.0)
    idle_s = seconds("spark.python.worker.idleTimeoutSeconds", 0.0)
    kills = conf.get("spark.python.worker.killOnIdleTimeout", "false").lower() == "true"
    retries = int(conf.get("spark.shuffle.io.maxRetries", "3"))
    try_s = seconds("spark.shuffle.io.connectionTimeout", silent_s)
    return Notice(
        worker_s=idle_s if idle_s and kills else None,
        executor_s=silent_s,
        executor_check_s=seconds("spark.network.timeoutInterval", 60.0, unit_s=1e-3),
        fetch_s=try_s + retries * (try_s + seconds("spark.shuffle.io.retryWait", 5.0)),
        driver_s=supervised_s,
        host_s=wait_for_home_s,
        local=local,
        restart_s=restart_s if supervised_s is not None else 0.0,
    )


QUICK_COMPILER = "-XX:TieredStopAtLevel=1"
"""Java's first compiler alone. Of Spark we need what schedules tasks and passes bytes on: the second compiler makes it
no faster, not after hundreds of epochs either, and takes the tasks' cores for half a minute after each start. `bench throughput` and
`bench nexmark` measure it: with JAVA_TOOL_OPTIONS=-XX:TieredStopAtLevel=4 in their environment both compilers are there."""
_SAYS_COMPILER = ("Tiered", "CompilationMode", "CodeHeapSize", "JVMCI", "-Xint", "-Xcomp")
"""What options hold that say how to compile, or how much room there is for what the second compiler makes."""


def java_options(
    own: Mapping[str, str], ours: Sequence[str], *, submitted: bool, everywhere: str = ""
) -> dict[str, str]:
    """The options of JVMs that Spark starts: how they compile and the class archive, behind the user's own. Pure.

    spark-submit has started the driver's already. `everywhere`: options that each JVM takes from its environment.
    """
    keys = ["spark.executor.extraJavaOptions", *([] if submitted else ["spark.driver.extraJavaOptions"])]
    made = {}
    for key in keys:
        text = own.get(key, "")
        said = (text, own.get(key.replace("extra", "default"), ""), everywhere)
        if not any(word in one for word in _SAYS_COMPILER for one in said):
            text = f"{text} {QUICK_COMPILER}".strip()
        made[key] = archive.appended(text, ours)
    return {key: text for key, text in made.items() if text}


_BREAKING = {
    "spark.python.worker.reuse": (
        "true",
        "false",
        "Python workers would end after each task, and state with them.",
    ),
    "spark.speculation": ("false", "true", "Spark would run shards twice at once."),
    "spark.dynamicAllocation.enabled": (
        "false",
        "true",
        "Spark would take executors away, and state with them.",
    ),
}
"""Settings that break the engine: default, breaking value, why."""


def problems(conf: Mapping[str, str], *, cluster: bool) -> list[str]:
    """What in a session's settings breaks the engine, a sentence each. Pure."""
    found = []
    for key, (default, breaking, why) in _BREAKING.items():
        if conf.get(key, default).lower() == breaking:
            found.append(f"{key}={breaking}: {why}")
    if cluster and conf.get("spark.shuffle.reduceLocality.enabled", "true").lower() == "true":
        found.append(
            "spark.shuffle.reduceLocality.enabled=true: Spark would move shards to where their input happens to be."
        )
    return found


def check_session(spark: Any) -> None:
    """Raise for a session that can't carry the engine, saying all that is wrong at once."""
    if "connect" in type(spark).__module__:
        raise SessionError(
            "This is a Spark Connect session; the engine needs a driver in this process.",
            remedy="Start with SparkSession.builder.master(...) or spark-submit, without remote().",
        )
    check_context(spark.sparkContext)


def check_context(sc: SparkContext) -> None:
    """Raise for a context whose settings break the engine."""
    conf = dict(sc.getConf().getAll())
    found = problems(conf, cluster=not is_local(sc))
    if found:
        remedy = ", ".join(f"{k}={WANTED[k]}" for k in WANTED if any(f.startswith(k) for f in found))
        raise SessionError(
            f"This Spark session's settings break the engine: {found[0]}",
            remedy=f"Make the session with {remedy}, or let holdfast make it.",
            detail="\n".join(f"  - {f}" for f in found),
        )


def make_session(settings: Settings, name: str) -> SparkSession:
    """A session over a context with what the engine needs."""
    from pyspark.sql import SparkSession

    make_context(settings, name)
    return SparkSession.builder.getOrCreate()


def make_context(settings: Settings, name: str) -> SparkContext:
    """A context with what the engine needs; the user's own settings win.

    No session is made around it: the engine has no use for one, and it would take a second or two of every start.
    """
    from pyspark import SparkConf, SparkContext

    if os.environ.get("SPARK_REMOTE") or os.environ.get("SPARK_CONNECT_MODE_ENABLED"):
        raise SessionError(
            "The environment asks for Spark Connect; the engine needs a driver in this process.",
            remedy="Unset SPARK_REMOTE and SPARK_CONNECT_MODE_ENABLED.",
        )
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    conf = SparkConf(loadDefaults=False).setAppName(f"holdfast: {name}")
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ or "SPARK_SUBMIT_MODE" in os.environ
    if submitted:
        conf = SparkConf().setAppName(f"holdfast: {name}")
    if settings.master is not None or not submitted:
        conf.setMaster(settings.master or "local[*]")
    given = _submitted_conf() if submitted else {}
    local = LOCAL if (conf.get("spark.master") or "").startswith("local") else {}
    wanted = {**WANTED, **local, **timeouts(settings)}
    for key, value in {**{k: v for k, v in wanted.items() if k not in given}, **settings.spark}.items():
        conf.set(key, value)
    archived = archive.options() if settings.class_archive else []
    everywhere = " ".join(os.environ.get(name, "") for name in ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS"))
    own = {**given, **settings.spark}
    for key, value in java_options(own, archived, submitted=submitted, everywhere=everywhere).items():
        conf.set(key, value)
    if not submitted:
        _quiet()
    try:
        sc = SparkContext.getOrCreate(conf)
    except Exception as error:
        raise SessionError(
            f"Spark does not start: {(str(error).splitlines() or [type(error).__name__])[0]}",
            remedy="`holdfast doctor` looks for the cause: Java, memory, the address of the master.",
        ) from error
    sc.setLogLevel("ERROR")
    return sc


def _submitted_conf() -> dict[str, str]:
    from pyspark import SparkConf

    return dict(SparkConf().getAll())


def _quiet() -> None:
    """Keep Spark's start-up lines off the user's screen."""
    import pyspark

    folder = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "engine")
    quiet = os.path.join(folder, "log4j2-quiet.properties")
    if os.path.exists(quiet) and "SPARK_SUBMIT_OPTS" not in os.environ and pyspark.__version__:
        os.environ["SPARK_SUBMIT_OPTS"] = f"-Dlog4j2.configurationFile=file:{quiet}"


_LOOK_EVERY_S, _SETTLED_LOOKS = 0.1, 4


def wait_for_executors(
    sc: SparkContext, timeout_s: float, say: Callable[[str], None]
) -> list[tuple[str, str]]:
    """The executors, once there is one; says what it waits for, and gives up with a sentence."""
    if is_local(sc):
        return executors(sc)
    wanted = int(sc.getConf().get("spark.executor.instances") or "1")
    until, told, settled = time.monotonic() + timeout_s, 0.0, 0
    while True:
        live = executors(sc)
        settled = settled + 1 if live and len(live) >= wanted else 0
        if settled >= _SETTLED_LOOKS:
            return live
        if time.monotonic() >= until:
            if live:
                return live
            raise SessionError(
                f"No executor of {sc.master} came within {timeout_s:.0f} s.",
                remedy="Look at the cluster: are workers up, do they have free cores and memory? "
                "Then start again, or raise wait_for_executors.",
            )
        if time.monotonic() - told > 5:
            told = time.monotonic()
            say(f"waiting for executors of {sc.master}: {len(live)} of at least {wanted} are here")
        time.sleep(_LOOK_EVERY_S)


def cores(sc: SparkContext) -> int:
    """How many tasks run at once."""
    return max(1, int(sc.defaultParallelism))
