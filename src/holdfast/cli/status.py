"""`holdfast status`: where a pipeline stands, read from its directory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import psutil
import typer
from rich.table import Table
from rich.text import Text

from holdfast.cli.checkpoints import list_facts
from holdfast.cli.directory import Directory, open_directory, process_of, state_of
from holdfast.cli.output import amount, clock, console, millis, moment, print_json, size
from holdfast.supervise.supervisor import read_supervision

_COLOURS = {
    "running": "green",
    "starting": "yellow",
    "recovering": "yellow",
    "waiting": "yellow",
    "failed": "red",
    "died": "red",
}


def status(
    dir: Annotated[Path, typer.Argument(metavar="DIR", help="The pipeline's directory.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show where a pipeline stands: its state, its process, its last epoch, its counts."""
    facts = status_facts(open_directory(dir))
    if json:
        print_json(facts)
        return
    console().print(_shown(facts))


def status_facts(directory: Directory) -> dict[str, Any]:
    """Everything the directory tells: the log knows the epochs, the status how the last run felt."""
    told = directory.status()
    last = directory.journal.last_epoch()
    commit = directory.journal.commit(last) if last else None
    sealed = [] if commit is None else [s.sealed for shards in commit.shards.values() for s in shards]
    return {
        "pipeline": directory.identity.name,
        "directory": str(directory.path.absolute()),
        "state": "unknown" if told is None else state_of(told),
        "process": None if told is None else process_of(told),
        "pid": None if told is None else told.pid,
        "host": None if told is None else told.host,
        "generation": directory.journal.newest_generation(),
        "epoch": last,
        "backend": directory.identity.backend,
        "parallelism": directory.identity.parallelism,
        "records": 0 if told is None else told.records,
        "records_per_s": 0.0 if told is None else told.records_per_s,
        "latency_ms": 0.0 if told is None else told.latency_ms,
        "backlog": 0 if told is None else told.backlog,
        "state_keys": sum(max(s.live.values(), default=0) for s in sealed),
        "state_bytes": sum(s.size_bytes for s in sealed),
        "bad_records": {} if told is None else told.bad_records,
        "late_records": {} if told is None else told.late_records,
        "untimed_records": {} if told is None else told.untimed_records,
        "unseen_records": {} if told is None else told.unseen_records,
        "watermarks": {} if told is None else msgspec.to_builtins(told.watermarks),
        "checkpoint": list_facts(directory)[-1:],
        "checkpoint_failures": 0 if told is None else told.checkpoint_failures,
        "policy": "" if told is None else told.policy,
        "backup_reason": "" if told is None else told.backup_reason,
        "deadline_s": 0.0 if told is None else told.deadline_s,
        "bound_s": 0.0 if told is None else told.bound_s,
        "worst_fault": "" if told is None else told.worst_fault,
        "forecasts": {} if told is None else msgspec.to_builtins(told.forecasts),
        "recovered": None if told is None else msgspec.to_builtins(told.recovered),
        "feasible": True if told is None else told.feasible,
        "paused": False if told is None else told.paused,
        "epoch_limit": None if told is None else told.epoch_limit,
        "supervisor": _supervisor(directory),
        "started_ms": 0 if told is None else told.started_ms,
        "updated_ms": 0 if told is None else told.updated_ms,
        "message": "" if told is None else told.message,
        "error": "" if told is None else told.error,
    }


def _supervisor(directory: Directory) -> dict[str, Any] | None:
    found = read_supervision(directory.path)
    if found is None or not psutil.pid_exists(found.pid):
        return None
    return {"pid": found.pid, "host": found.host, "restarts": found.restarts}


def _checkpoint(facts: dict[str, Any]) -> Text:
    if not facts["checkpoint"]:
        return Text("none yet", style="yellow")
    newest = facts["checkpoint"][0]
    if not newest["usable"]:
        return Text(f"{newest['number']}, which can't be used: {newest['why']}", style="red")
    ago = clock(max(0.0, time.time() - newest["completed_ms"] / 1000))
    text = f"{newest['number']} of epoch {newest['epoch']}, {size(newest['size_bytes'])}, {ago} ago"
    if facts["backup_reason"]:
        text += f": {facts['backup_reason']}"
    failed = facts["checkpoint_failures"]
    return Text(f"{text}; {failed} failed since", style="red") if failed else Text(text)


def _recovery(facts: dict[str, Any]) -> Text:
    if not facts["bound_s"]:
        return Text("not known yet", style="dim")
    text = f"at most {facts['bound_s']:.1f} s ({facts['worst_fault']}), deadline {facts['deadline_s']:g} s"
    over = facts["bound_s"] > facts["deadline_s"]
    return Text(f"{text}: see holdfast explain" if over else text, style="red" if over else "default")


def _recovered(last: dict[str, Any] | None) -> str:
    """What the last recovery took beside what it was thought to take."""
    if last is None:
        return "none yet"
    ago = clock(max(0.0, time.time() - last["at_ms"] / 1000))
    text = f"{last['fault']}, {ago} ago: {last['took_s']:.1f} s, {last['estimate_s']:.1f} s estimated"
    caught_up_s = last["caught_up_s"]
    return text if caught_up_s is None else f"{text}; caught up after {caught_up_s:.1f} s"


def _shown(facts: dict[str, Any]) -> Table:
    grid = Table.grid(padding=(0, 2))
    rows: list[tuple[str, Any]] = [
        ("pipeline", facts["pipeline"]),
        ("state", Text(facts["state"], style=f"bold {_COLOURS.get(facts['state'], 'default')}")),
        ("process", _process(facts)),
        ("generation", facts["generation"]),
        ("last epoch", amount(facts["epoch"])),
        ("this run", f"{amount(facts['records'])} records, {clock(_ran_s(facts))}"),
        ("records/s", amount(facts["records_per_s"])),
        ("latency", millis(facts["latency_ms"])),
        ("backlog", amount(facts["backlog"])),
        (
            "stored state",
            f"{amount(facts['state_keys'])} keys, {size(facts['state_bytes'])}, {facts['backend']}",
        ),
        ("checkpoint", _checkpoint(facts)),
        ("recovery", _recovery(facts)),
        ("last fault", _recovered(facts["recovered"])),
        ("parallelism", facts["parallelism"]),
        ("bad records", _by_uid(facts["bad_records"])),
        ("directory", facts["directory"]),
    ]
    for uid, one in facts["watermarks"].items():
        rows.append(("event time", _event_time(uid, one)))
    rows += _set_aside(facts) if facts["watermarks"] else []
    if facts["supervisor"]:
        watched = f"process {facts['supervisor']['pid']}, {facts['supervisor']['restarts']} restarts"
        rows.append(("supervisor", watched))
    if facts["error"]:
        rows.append(("error", Text(facts["error"], style="red")))
    for name, value in rows:
        grid.add_row(Text(name, style="dim"), value if isinstance(value, Text) else Text(str(value)))
    return grid


def _by_uid(counts: dict[str, int]) -> str:
    return ", ".join(f"{uid} {amount(n)}" for uid, n in counts.items()) or "0"


def _set_aside(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Records that were in no result because of their time, by operator: late ones, and what else there is."""
    names = [n for n in ("late", "untimed", "unseen") if n == "late" or facts[f"{n}_records"]]
    return [(f"{name} records", _by_uid(facts[f"{name}_records"])) for name in names]


def _event_time(uid: str, one: dict[str, Any]) -> Text:
    """How far event time is at one operator, who holds it, and who is not waited for."""
    if one["ended"]:
        return Text(f"{uid}: ended")
    if one["lag_ms"] is None:
        return Text(f"{uid}: not known yet; {one['split'] or 'nobody'} holds it back", style="yellow")
    lag = clock(max(0, one["lag_ms"]) / 1000)
    text = f"{uid}: {moment(one['ms'])}, {lag} behind; {one['split'] or 'nobody'} holds it back"
    if len(one["sources"]) > 1:
        each = (f"{source} {clock(max(0, ms) / 1000)}" for source, ms in one["sources"].items())
        text += f"; by source: {', '.join(each)}"
    if one["waits"]:
        text += f"; waits for {one['waits_for'] or 'others of its group'}"
    if one["idle"]:
        text += f"; idle: {', '.join(one['idle'])}"
    still = one["still_ms"] >= 30_000
    return Text(
        f"{text}; not moved for {clock(one['still_ms'] / 1000)}" if still else text,
        style="yellow" if still else "default",
    )


def _ran_s(facts: dict[str, Any]) -> float:
    return float(max(0, facts["updated_ms"] - facts["started_ms"])) / 1000


def _process(facts: dict[str, Any]) -> str:
    if facts["pid"] is None:
        return "none has run here yet"
    told = clock(max(0.0, time.time() - facts["updated_ms"] / 1000))
    how = {"alive": "is there", "dead": "has gone", "elsewhere": "can't be asked from this host"}[
        facts["process"]
    ]
    return f"{facts['pid']} on {facts['host']} {how}; last heard of {told} ago"
