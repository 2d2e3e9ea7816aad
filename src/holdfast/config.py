"""Settings: defaults < `holdfast.toml` < environment (`HOLDFAST_…`) < arguments.

Every setting has one name everywhere: `interval` here is `interval = "500ms"` in the file,
`HOLDFAST_INTERVAL` in the environment, `interval=` in `pipeline.run` and, for those that `holdfast run` has an
option for, `--interval`. `holdfast config` shows each with where it came from.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_UNITS_BYTES = {
    "": 1,
    "b": 1,
    "k": 1 << 10,
    "kb": 1 << 10,
    "m": 1 << 20,
    "mb": 1 << 20,
    "g": 1 << 30,
    "gb": 1 << 30,
}


def parse_duration_s(value: str | float | int) -> float:
    """Seconds from "500ms", "70s", "5m", "2h", or a number of seconds.

    >>> parse_duration_s("500ms"), parse_duration_s(3)
    (0.5, 3.0)
    """
    if isinstance(value, (int, float)):
        return float(value)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", value.lower())
    if not match or match[2] not in _UNITS_S:
        raise ConfigError(f"{value!r} is not a duration.", remedy='Write it as "500ms", "70s", "5m" or "2h".')
    return float(match[1]) * _UNITS_S[match[2]]


def parse_bytes(value: str | int) -> int:
    """Bytes from "64MB", "2g", or a number.

    >>> parse_bytes("64MB")
    67108864
    """
    if isinstance(value, int):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?b?)\s*", value.lower())
    if not match:
        raise ConfigError(f"{value!r} is not a size.", remedy='Write it as "64MB" or "2GB".')
    return int(float(match[1]) * _UNITS_BYTES[match[2]])


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a run. Durations are seconds and sizes bytes here, whatever they were written as."""

    dir: str | None = None
    """The pipeline's directory: log, staged output, and by default state. `.holdfast/<name>` if unset."""
    master: str | None = None
    """Spark master; `local[*]` if unset and no session is given."""
    parallelism: int | None = None
    """Shards of each keyed stage. The directory's own if it has one, otherwise Spark's parallelism."""
    backend: str = "heap"
    """Where keyed state lives: `heap` or `rocksdb`."""
    interval_s: float = 0.5
    """With cut="interval": how often an epoch is cut."""
    cut: str = "interval"
    """When an epoch is cut: every `interval`, as soon as there is `data`, or only when `full`."""
    max_records: int = 500_000
    """The most records an epoch takes, as near as its sources can tell."""
    empty_epochs: bool = False
    """With cut="interval": whether epochs without data are cut too, so that time goes on for state with a TTL."""
    key_groups: int = 128
    """Slices of the key space; fixed for life."""
    epochs: int | None = None
    """Stop after so many epochs."""
    drain: bool = False
    """Stop when no source has anything left."""
    state_root: str | None = None
    """Where each host keeps state; `<dir>/state` if unset. Executors may have their own HOLDFAST_STATE_ROOT."""
    heap_limit_bytes: int = 4 << 30
    """The most memory one worker of the heap backend may take before the epoch fails with an error."""
    rocksdb_cache_bytes: int = 64 << 20
    """Block cache and write buffers of one shard's RocksDB."""
    wait_for_executors_s: float = 120.0
    """How long to wait for a cluster to give executors before giving up."""
    guarantee: str = "exactly_once"
    """`exactly_once`, or `at_least_once`: output is published before the decision, sooner, and may appear twice."""
    deadline_s: float = 70.0
    """Within this recovery must end, whatever dies."""
    confidence: float = 0.999
    """How sure the bound on recovery time must be that is held under the deadline."""
    on_infeasible: str = "warn"
    """If no backup can hold recovery under the deadline: `refuse` to run, `warn`, or `go_on` in silence."""
    checkpoint: str = "deadline"
    """When state is backed up: as the `deadline` asks, every interval ("30s"), every so many epochs ("10 epochs"),
    by Young and Daly's formula for a mean time between failures ("young-daly 24h"), "manual" or "never"."""
    checkpoint_dir: str | None = None
    """Where checkpoints go: a folder, or a URL such as s3://bucket/prefix; `<dir>/checkpoints` if unset."""
    checkpoint_keep: int = 2
    """So many completed checkpoints are kept; a damaged one falls back to the one before."""
    checkpoint_timeout_s: float = 600.0
    """A checkpoint that takes longer has failed."""
    checkpoint_failures: int = 3
    """After so many failed checkpoints in a row, `on_checkpoint_failure` applies."""
    on_checkpoint_failure: str = "go_on"
    """Then: `go_on`, saying so loudly, or `stop`."""
    checkpoint_on_stop: bool = True
    """Whether a clean stop leaves a checkpoint, unless the policy is "manual" or "never"."""
    storage: dict[str, str] = {}
    """Options of the checkpoints' store (endpoint, region, …). Credentials are better left to the environment."""
    on_divergence: str = "stop"
    """If a replay gives another result than the first run: `stop` or `warn`."""
    trim_log: bool = True
    """Whether plans and commits that no kept checkpoint needs are deleted."""
    take_over: bool = False
    """Take the pipeline from a driver that still lives: it is fenced off and can change nothing."""
    restart: str = "exponential"
    """How a supervisor restarts: "none", "fixed 5s", "exponential 1s 60s" (the first delay, its cap), "rate 5 10m"."""
    driver_timeout_s: float = 0.0
    """A supervised driver that is silent for so long is killed and replaced. Follows from the deadline if unset."""
    executor_timeout_s: float = 0.0
    """An executor that is silent for so long is taken for dead. Follows from the deadline if unset."""
    worker_timeout_s: float = 0.0
    """A Python worker that neither takes nor gives anything for so long is killed; longer than any task computes.
    Follows from the deadline if unset."""
    wait_for_home_s: float = 0.0
    """How long shards wait for an executor on the host that has their state before they are rebuilt elsewhere.
    Follows from the deadline if unset."""
    class_archive: bool = True
    """Whether JVMs that Spark starts use the archive of its classes, if there is one."""
    redact: bool = False
    """Leave records out of error messages."""
    log_level: str = "WARNING"
    """Level of the structured log on stderr."""
    spark: dict[str, str] = {}
    """Settings for a Spark session that we make."""

    def __post_init__(self) -> None:
        for field, seconds in following(self.deadline_s).items():
            if not getattr(self, field):
                msgspec.structs.force_setattr(self, field, seconds)


def following(deadline_s: float) -> dict[str, float]:
    """The settings by which faults are noticed, from the deadline: a share of it each, within what works.

    Spark's own defaults would break most deadlines: two minutes for a silent executor, and never for a worker.

    >>> following(70.0)["executor_timeout_s"], following(5.0)["executor_timeout_s"]
    (10.0, 5.0)
    """
    return {
        "driver_timeout_s": min(30.0, max(5.0, deadline_s / 7)),
        "executor_timeout_s": min(30.0, max(5.0, deadline_s / 7)),
        "worker_timeout_s": min(120.0, max(8.0, deadline_s / 5)),
        "wait_for_home_s": min(8.0, max(3.0, deadline_s / 7)),
    }


_PARSERS = {
    "interval_s": parse_duration_s,
    "wait_for_executors_s": parse_duration_s,
    "checkpoint_timeout_s": parse_duration_s,
    "deadline_s": parse_duration_s,
    "driver_timeout_s": parse_duration_s,
    "executor_timeout_s": parse_duration_s,
    "worker_timeout_s": parse_duration_s,
    "wait_for_home_s": parse_duration_s,
    "heap_limit_bytes": parse_bytes,
    "rocksdb_cache_bytes": parse_bytes,
}
_CHOICES = {
    "backend": ("heap", "rocksdb"),
    "cut": ("interval", "data", "full"),
    "guarantee": ("exactly_once", "at_least_once"),
    "on_checkpoint_failure": ("go_on", "stop"),
    "on_divergence": ("stop", "warn"),
    "on_infeasible": ("refuse", "warn", "go_on"),
    "log_level": ("DEBUG", "INFO", "WARNING", "ERROR"),
}


def public_name(field: str) -> str:
    """A field's name as users write it: without its unit.

    >>> public_name("interval_s"), public_name("heap_limit_bytes")
    ('interval', 'heap_limit')
    """
    return re.sub(r"_(s|bytes)$", "", field)


FIELDS = {public_name(f): f for f in Settings.__struct_fields__}


class Resolved(msgspec.Struct, frozen=True):
    """Settings, and where each of them came from."""

    settings: Settings
    origin: dict[str, str]


def resolve(
    arguments: Mapping[str, Any] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Resolved:
    """Settings from all four places; an unknown or senseless one is an error that names its place.

    >>> resolve({"interval": "2s"}, environment={"HOLDFAST_INTERVAL": "9s"}).settings.interval_s
    2.0
    """
    environment = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    origin = dict.fromkeys(FIELDS, "default")
    path = file or Path("holdfast.toml")
    if file is not None and not file.exists():
        raise ConfigError(f"The settings file {file} does not exist.")
    if path.exists():
        for name, value in _read_toml(path).items():
            _take(values, origin, name, value, str(path))
    for name in FIELDS:
        variable = f"HOLDFAST_{name.upper()}"
        if name not in ("spark", "storage", "state_root") and variable in environment:
            _take(values, origin, name, environment[variable], variable)
    for name, value in (arguments or {}).items():
        if value is not None:
            _take(values, origin, name, value, "argument")
    return Resolved(_checked(Settings(**values)), origin)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} can't be read: {error}", remedy="Mend its TOML.") from None


def _take(values: dict[str, Any], origin: dict[str, str], name: str, value: Any, place: str) -> None:
    if name not in FIELDS:
        raise ConfigError(
            f"{place}: there is no setting {name!r}.",
            remedy=f"The settings are: {', '.join(sorted(FIELDS))}.",
        )
    field = FIELDS[name]
    try:
        values[field] = _parsed(field, value)
    except ConfigError as error:
        error.message = f"{place}, setting {name!r}: {error.message}"
        raise
    origin[name] = place


def _parsed(field: str, value: Any) -> Any:
    if field in _PARSERS:
        return _PARSERS[field](value)
    kind = str(Settings.__annotations__[field])
    if kind == "float":
        return _number(value)
    if kind.startswith("int"):
        return _whole(value)
    if kind == "bool":
        return value if isinstance(value, bool) else str(value).lower() in ("1", "true", "yes", "on")
    if field in ("spark", "storage"):
        return dict(_flat(dict(value)))
    return str(value)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Spark's settings by their dotted names, whether or not the file's keys were quoted."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value).lower() if isinstance(value, bool) else str(value)


def _whole(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{value!r} is not a whole number.") from None


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{value!r} is not a number.") from None


def _checked(settings: Settings) -> Settings:
    for field, allowed in _CHOICES.items():
        if getattr(settings, field) not in allowed:
            raise ConfigError(
                f"{field}={getattr(settings, field)!r} is no choice.", remedy=f"One of: {', '.join(allowed)}."
            )
    for field in ("max_records", "key_groups", "checkpoint_keep", "checkpoint_failures"):
        if getattr(settings, field) < 1:
            raise ConfigError(f"{field} must be at least 1.")
    if settings.deadline_s <= 0:
        raise ConfigError("deadline must be longer than nothing.", remedy='Write deadline = "70s".')
    if not 0.5 <= settings.confidence < 1:
        raise ConfigError("confidence must be from 0.5 to below 1.", remedy="0.999 is the default.")
    if settings.key_groups > 32768:
        raise ConfigError("key_groups must be at most 32768.")
    if settings.parallelism is not None and not 1 <= settings.parallelism <= settings.key_groups:
        raise ConfigError(
            f"parallelism={settings.parallelism} must be between 1 and key_groups={settings.key_groups}.",
            remedy="A shard owns at least one key group.",
        )
    from holdfast.checkpoint.policy import parse_policy
    from holdfast.supervise.strategies import parse_restart

    parse_policy(settings.checkpoint)
    parse_restart(settings.restart)
    if settings.epochs is not None and settings.epochs < 1:
        raise ConfigError("epochs must be at least 1.")
    return settings
