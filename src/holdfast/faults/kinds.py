"""The faults that are survived, timed and promised about: a closed list, with a sentence each."""

from __future__ import annotations

import enum


class Fault(enum.Enum):
    """What can happen to an application."""

    WORKER_KILL = "worker-kill", "a Python worker is killed: one of a shard, of the sources or of uploads"
    WORKER_FREEZE = "worker-freeze", "a Python worker is stopped and stays so"
    EXECUTOR_KILL = "executor-kill", "an executor's JVM is killed"
    EXECUTOR_FREEZE = "executor-freeze", "an executor's JVM is stopped and stays so"
    HOST = "host", "everything on a host is killed and its disk is emptied; it comes back without its state"
    DRIVER_KILL = "driver-kill", "the driver is killed, Python and JVM"
    DRIVER_FREEZE = "driver-freeze", "the driver is stopped, Python and JVM; its supervisor replaces it"
    APPLICATION = "application", "the driver and all executors are killed at once"

    def __init__(self, label: str, sentence: str) -> None:
        self.label, self.sentence = label, sentence

    @staticmethod
    def named(label: str) -> Fault | None:
        """The fault of that name."""
        return next((f for f in Fault if f.label == label), None)


GROUPS = {
    "worker": (Fault.WORKER_KILL, Fault.WORKER_FREEZE),
    "executor": (Fault.EXECUTOR_KILL, Fault.EXECUTOR_FREEZE),
    "driver": (Fault.DRIVER_KILL, Fault.DRIVER_FREEZE),
}
"""Names for both ways in which a process can fail."""
