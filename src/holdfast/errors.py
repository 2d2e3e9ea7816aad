"""The tree of what can go wrong, each with its cause and what to do about it.

::

    HoldfastError
    ├── PipelineError          the pipeline as written can't run; found before anything runs
    │   └── UidError           a uid is missing, doubled or malformed
    ├── ConfigError            a setting has no sense, or two contradict each other
    ├── MissingExtraError      an optional dependency is not installed
    ├── SessionError           this Spark session can't carry the engine
    ├── DirectoryError         the pipeline's directory does not belong to this run
    │   ├── IncompatibleError  it holds another pipeline, other uids or other types
    │   ├── InUseError         another driver lives there
    │   └── FencedError        a newer driver has taken it over
    ├── DataError              the data is not what the pipeline says it is
    │   ├── SchemaError        a record or file does not fit its schema
    │   ├── BadRecordError     a record can't be read and on_bad_record="fail"
    │   └── SourceChangedError planned input changed, shrank or vanished
    ├── UserCodeError          a function of the user's raised
    ├── CallError              a call of the outside world failed, or was not answered in time
    ├── StateError             state can't be read, written or held
    │   ├── StateTypeError     a function stored what its state is not declared for
    │   ├── MemoryLimitError   the heap backend would pass its limit
    │   ├── StateLostError     a committed version is on no host and in no checkpoint
    │   ├── CheckpointError    too many checkpoints in a row have failed
    │   └── DivergedError      a replay gave another result than the first run
    ├── SinkError              output can't be staged or published
    └── EngineError            a task of ours failed: a disk, a worker, a bug
        └── JobLostError       Spark gave a job up: executors died again and again

Nothing is lost when one of them is raised: the epoch it struck was not committed, and a restart
runs the same plan again.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "BadRecordError",
    "CallError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DirectoryError",
    "DivergedError",
    "EngineError",
    "FencedError",
    "HoldfastError",
    "InUseError",
    "IncompatibleError",
    "JobLostError",
    "MemoryLimitError",
    "MissingExtraError",
    "PipelineError",
    "SchemaError",
    "SessionError",
    "SinkError",
    "SourceChangedError",
    "StateError",
    "StateLostError",
    "StateTypeError",
    "UidError",
    "UserCodeError",
]


class HoldfastError(Exception):
    """What every error of holdfast is: a cause in one sentence, and a remedy.

    Args:
        message: what happened, in one sentence.
        uid: the operator it happened in, where there is one.
        where: file and line at which the user defined that operator.
        remedy: what the reader can do about it.
        detail: more lines for those who look closer (a user's traceback, both sides of a difference).

    >>> print(HoldfastError("The folder is empty.", uid="orders", remedy="Put a file into it."))
    [orders] The folder is empty.
      remedy: Put a file into it.
    """

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        uid: str | None = None,
        where: str | None = None,
        remedy: str | None = None,
        detail: str | None = None,
    ) -> None:
        self.message = message
        self.uid = uid
        self.where = where
        self.remedy = remedy
        self.detail = detail
        super().__init__(message)

    def __str__(self) -> str:
        lines = [f"[{self.uid}] {self.message}" if self.uid else self.message]
        if self.where:
            lines.append(f"  defined at: {self.where}")
        if self.remedy:
            lines.append(f"  remedy: {self.remedy}")
        if self.detail:
            lines.append(self.detail.rstrip())
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return (from_facts, (self.facts(),))

    def facts(self) -> dict[str, str | None]:
        """The error as plain data, so that a task can hand it to the driver as a value."""
        return {
            "type": type(self).__name__,
            "message": self.message,
            "uid": self.uid,
            "where": self.where,
            "remedy": self.remedy,
            "detail": self.detail,
        }

    def at(self, uid: str | None, where: str | None) -> HoldfastError:
        """The same error, naming the operator it happened in (kept if it names one already)."""
        self.uid = self.uid or uid
        self.where = self.where or where
        return self


class PipelineError(HoldfastError):
    """The pipeline as written can't run."""

    exit_code = 2


class UidError(PipelineError):
    """A uid is missing, doubled or malformed."""


class ConfigError(HoldfastError):
    """A setting has no sense."""

    exit_code = 2


class InfeasibleError(ConfigError):
    """No backup can hold recovery under the deadline."""


class MissingExtraError(HoldfastError):
    """An optional dependency is not installed."""

    exit_code = 2


class SessionError(HoldfastError):
    """This Spark session can't carry the engine."""

    exit_code = 3


class DirectoryError(HoldfastError):
    """The directory does not belong to this run."""

    exit_code = 4


class IncompatibleError(DirectoryError):
    """The directory holds another pipeline, other uids or other types."""


class InUseError(DirectoryError):
    """Another driver lives in the directory."""


class FencedError(DirectoryError):
    """A newer driver has taken the pipeline over; this one must end."""

    exit_code = 5


class DataError(HoldfastError):
    """The data is not what the pipeline says it is."""

    exit_code = 6


class SchemaError(DataError):
    """A record or file does not fit its schema."""


class BadRecordError(DataError):
    """A record can't be read, and the user asked to fail then."""


class SourceChangedError(DataError):
    """Input that a plan has fixed was changed afterwards."""


class UserCodeError(HoldfastError):
    """A function of the user's raised; `detail` holds the user's traceback."""

    exit_code = 7


class CallError(HoldfastError):
    """A call of the outside world failed, or was not answered in time; `detail` holds the user's traceback."""

    exit_code = 11


class StateError(HoldfastError):
    """State can't be read, written or held."""

    exit_code = 8


class StateTypeError(StateError):
    """A function stored a value that does not fit the type its state is declared with."""

    exit_code = UserCodeError.exit_code


class MemoryLimitError(StateError):
    """The heap backend would pass its limit."""

    exit_code = 13


class StateLostError(StateError):
    """A committed version is on no host and in no checkpoint."""


class CheckpointError(StateError):
    """Too many checkpoints in a row have failed, and the user chose to stop then."""


class DivergedError(StateError):
    """A replay gave another result than the first run."""

    exit_code = 12


class SinkError(HoldfastError):
    """Output can't be staged or published."""

    exit_code = 9


class EngineError(HoldfastError):
    """A task of ours failed: a disk, a worker, a bug of ours."""

    exit_code = 10


class JobLostError(EngineError):
    """Spark gave a job up, because its executors died again and again."""


_BY_NAME = {name: kind for name, kind in list(globals().items()) if name in __all__}


def from_facts(facts: dict[str, str | None]) -> HoldfastError:
    """The error that `facts()` described; an unknown type becomes an EngineError."""
    kind: type[HoldfastError] = _BY_NAME.get(facts.get("type") or "", EngineError)
    return kind(
        facts.get("message") or "unknown error",
        uid=facts.get("uid"),
        where=facts.get("where"),
        remedy=facts.get("remedy"),
        detail=facts.get("detail"),
    )
