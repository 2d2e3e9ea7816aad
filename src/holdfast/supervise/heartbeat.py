"""The child's side of the heartbeat: a thread that writes a byte into the supervisor's pipe while all is well.

Well means: this interpreter runs, and if it has a Spark context, its JVM answers. A driver whose JVM is frozen is
as dead as one that is frozen itself, so the question is asked before each beat and a beat waits for the answer.

If the supervisor is gone, nobody reads the pipe. Then the thread ends and the driver goes on: a supervisor that
was killed must not take the pipeline with it. Stop such a driver with `holdfast stop`, or let a new one
`--take-over`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

FD_VARIABLE = "HOLDFAST_HEARTBEAT_FD"
EVERY_VARIABLE = "HOLDFAST_HEARTBEAT_EVERY"
"""Seconds between beats: the supervisor says it, since it is the one who waits."""
SUPERVISED = "HOLDFAST_SUPERVISED"
"""After how many seconds of silence the supervisor of this driver acts; not set where there is none."""
FELL = "HOLDFAST_FELL"
"""When the driver before this one fell: milliseconds, then `killed` or `silent`."""
RESTARTS = "HOLDFAST_RESTARTS"
"""When this driver will be started again if it falls: seconds, for how long it must be well until that changes, and to
what; and how long it was waited with itself."""
EVERY_S = 1.0


def beat_every_s(timeout_s: float) -> float:
    """How often to beat if silence is noticed after `timeout_s`: so that one late beat is no silence."""
    return min(EVERY_S, timeout_s / 10)


def start_heartbeat() -> threading.Thread | None:
    """Beat from now on, if a supervisor waits for it; the second call does nothing.

    The variables are taken out of the environment and the pipe is closed to programs that we start: only this
    process speaks for itself.
    """
    fd = os.environ.pop(FD_VARIABLE, "")
    every_s = float(os.environ.pop(EVERY_VARIABLE, EVERY_S))
    if not fd:
        return None
    os.set_inheritable(int(fd), False)
    thread = threading.Thread(target=_beat, args=(int(fd), every_s), name="holdfast-heartbeat", daemon=True)
    thread.start()
    return thread


def _beat(fd: int, every_s: float) -> None:
    while True:
        _hear_from_the_jvm()
        try:
            os.write(fd, b".")
        except OSError:
            with contextlib.suppress(OSError):
                os.close(fd)
            return
        time.sleep(every_s)


def _hear_from_the_jvm() -> None:
    """Returns when the JVM has answered, or there is none to ask; a frozen one does not let it return.

    A context that is starting or stopping raises whatever it likes. That is an answer: it is not frozen.
    """
    spark_context = getattr(sys.modules.get("pyspark"), "SparkContext", None)
    active = getattr(spark_context, "_active_spark_context", None)
    if active is not None:
        with contextlib.suppress(Exception):
            active._jvm.java.lang.System.currentTimeMillis()
