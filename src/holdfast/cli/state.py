"""`holdfast state`: stored state as a table, read from a directory without running the pipeline.

What is shown is the last decided epoch's version. Nobody's code is run: types and names come from the log.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import typer

from holdfast.cli.directory import Directory, open_directory
from holdfast.cli.output import amount, console, print_json, size, table
from holdfast.data.rows import one_array, to_rows
from holdfast.engine.aggregate import Parts
from holdfast.errors import ConfigError, DirectoryError, StateLostError
from holdfast.functions import Column
from holdfast.log.records import Commit
from holdfast.plan import graph as g
from holdfast.plan.bodies import KEPT, OUR_TIMES, WAITING
from holdfast.state.inspect import read_state
from holdfast.state.shard import Sealed
from holdfast.time.units import MAX_TIME, TimeType

_TRIES = 5


def state(
    dir: Annotated[Path, typer.Argument(metavar="DIR", help="The pipeline's directory.")],
    operator: Annotated[str | None, typer.Option(help="The uid of a keyed operator.")] = None,
    name: Annotated[str | None, typer.Option("--state", help="One state of that operator.")] = None,
    key: Annotated[str | None, typer.Option(help="One key; of several columns: a,b or a JSON list.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="The most rows of each state.")] = 20,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    state_root: Annotated[
        Path | None, typer.Option(help="Where this host keeps state; DIR/state unless told.")
    ] = None,
) -> None:
    """Show stored state as a table, without running the pipeline. Without --operator: which state there is."""
    directory = open_directory(dir)
    if operator is None:
        _show_operators(directory, json)
        return
    root = state_root or dir / "state"
    commit, found = _read(directory, root, _known(directory, operator))
    wanted = {name: _named(found, name, operator)} if name is not None else found
    facts = directory.identity.operators[operator]
    shown = {s: friendly(t, s, facts) for s, t in wanted.items()}
    if key is not None:
        shown = {s: only_key(shown[s], key_names(t, facts), key) for s, t in wanted.items()}
    if json:
        print_json({"operator": operator, "epoch": commit.epoch, "states": _facts(shown, limit)})
        return
    _print_tables(shown, limit, operator, commit)


def _show_operators(directory: Directory, json: bool) -> None:
    rows = operator_rows(directory)
    if json:
        print_json(
            {"pipeline": directory.identity.name, "epoch": directory.journal.last_epoch(), "operators": rows}
        )
        return
    out = console()
    first = {r["operator"]: r["state"] for r in reversed(rows)}
    cells = [
        [
            r["operator"],
            r["kind"],
            r["key"],
            r["state"],
            r["type"],
            "not counted" if r["entries"] is None else amount(r["entries"]),
            size(r["bytes"]) if first[r["operator"]] == r["state"] else "",
            r["version"],
        ]
        for r in rows
    ]
    names = ["operator", "kind", "key", "state", "type", "entries", "bytes", "version"]
    out.print(table(names, cells, right=("entries", "bytes")))
    if rows:
        out.print(
            f"\nholdfast state {directory.path} --operator {rows[0]['operator']}  shows what is in it.",
            style="dim",
        )


def operator_rows(directory: Directory) -> list[dict[str, Any]]:
    """Each state of each keyed operator: its type, its entries, its operator's bytes and version."""
    last = directory.journal.last_epoch()
    commit = directory.journal.commit(last) if last else None
    rows = []
    for uid, facts in directory.identity.operators.items():
        if facts["kind"] not in g.KEYED:
            continue
        sealed = [] if commit is None else [s.sealed for s in commit.shards.get(uid, [])]
        for name, kind in _types(facts).items():
            rows.append(
                {
                    "operator": uid,
                    "kind": facts["kind"],
                    "key": facts["key"],
                    "state": name,
                    "type": kind,
                    "entries": _entries(sealed, name),
                    "bytes": sum(s.size_bytes for s in sealed),
                    "shards": len(sealed),
                    "version": f"epoch {last}" if commit else "-",
                }
            )
    return rows


def _entries(sealed: list[Sealed], name: str) -> int | None:
    """How many entries a state has; None where the backend does not count them (RocksDB: maps and lists)."""
    counts = [s.live[name] for s in sealed if name in s.live]
    return sum(counts) if counts or not any(s.stamp for s in sealed) else None


def _types(facts: dict[str, Any]) -> dict[str, str]:
    if facts["kind"] == g.PROCESS:
        return {name: _type(state) for name, state in facts["states"].items()}
    if facts["kind"] == g.AGGREGATE:
        return {"state": ", ".join(f"{name}={kind}" for name, kind in facts["aggregates"].items())}
    if facts["kind"] == g.WINDOW:
        return _window_types(facts)
    if facts["kind"] == g.ORDERED:
        own = {name: _type(state) for name, state in facts["states"].items()}
        return {**own, **dict.fromkeys(WAITING, "records")}
    if facts["kind"] in g.LIBRARY:
        return dict.fromkeys(KEPT[facts["kind"]], "records")
    return {"state": "one record"}


def _window_types(facts: dict[str, Any]) -> dict[str, str]:
    """What windows keep: aggregates, one record, or how many there are and, in a table of its own, all of them."""
    if facts.get("makes") == g.PROCESS:
        return {"windows": "how many records", "records": "records"}
    if facts.get("makes") == g.REDUCE:
        return {"windows": "one record"}
    return {"windows": ", ".join(f"{name}={kind}" for name, kind in facts["aggregates"].items())}


def _type(state: dict[str, Any]) -> str:
    inner = {"map": f"map of {state['sub']} to {state['value']}", "list": f"list of {state['value']}"}
    ttl = f", for {state['ttl_s']:g} s" if state["ttl_s"] else ""
    return inner.get(state["kind"], str(state["value"])) + ttl


def _known(directory: Directory, uid: str) -> str:
    """A uid that has state, or an error that lists those that have."""
    keyed = [u for u, f in directory.identity.operators.items() if f["kind"] in g.KEYED]
    if uid not in keyed:
        raise ConfigError(
            f"There is no operator {uid!r} with state in {directory.path}.",
            remedy=f"There are: {', '.join(keyed) or 'none'}.",
        )
    return uid


def _named(found: dict[str, pa.Table], name: str, uid: str) -> pa.Table:
    if name not in found:
        raise ConfigError(
            f"{uid!r} has nothing stored as {name!r}.",
            remedy=f"There is: {', '.join(found) or 'nothing yet'}.",
        )
    return found[name]


def _read(directory: Directory, root: Path, uid: str) -> tuple[Commit, dict[str, pa.Table]]:
    """The states at the last decided epoch. A run may tidy up behind us: then the next epoch's are read."""
    for attempt in range(_TRIES):
        commit = directory.journal.commit(directory.journal.last_epoch())
        if commit is None:
            raise DirectoryError(f"No epoch was decided in {directory.path} yet, so there is no state.")
        try:
            return commit, read_state(root, directory.identity.home, commit, uid)
        except StateLostError:
            if attempt == _TRIES - 1 or directory.journal.last_epoch() == commit.epoch:
                raise
    raise AssertionError("unreachable")


def key_names(stored: pa.Table, facts: dict[str, Any]) -> list[str]:
    """The names of the key's columns: the user's own, or `key` where it is a function of the record."""
    width = sum(1 for n in stored.schema.names if n[0] == "k" and n[1:].isdigit())
    named = [k.strip() for k in facts["key"].split(",")]
    if facts["key"] != "function" and len(named) == width:
        return named
    return ["key"] if width == 1 else [f"key{i}" for i in range(width)]


def friendly(stored: pa.Table, state: str, facts: dict[str, Any]) -> pa.Table:
    """A stored table with the names people know: the key's own columns, entry or place, the value's fields."""
    columns = {name: stored.column(i) for i, name in enumerate(key_names(stored, facts))}
    extra = [n for n in stored.schema.names if n[0] == "x" and n[1:].isdigit()]
    for name, column in zip(_extra_names(facts, state), extra, strict=False):
        columns[name] = _time(stored[column]) if name in _TIMES else stored[column]
    if "sub" in stored.schema.names:
        columns["place" if facts["states"][state]["kind"] == "list" else "entry"] = stored["sub"]
    for name, column in _values(stored["value"], facts, state).items():
        columns[name if name not in columns else f"{name} (value)"] = column
    return pa.table(columns)


_TIMES = ("window", "window_start", "window_end", "at")
_CALENDAR_US = (-62_135_596_800_000_000, 253_402_300_799_999_999)
"""The first and the last time that a datetime can hold."""
_WINDOW_TIMES = ("window.start", "window.end", "window.due")


def _extra_names(facts: dict[str, Any], state: str) -> list[str]:
    """What stands behind the key: the start of a window or pane, the place of a session, or a timer."""
    if _records(facts, state):
        return ["window", "number"] if facts.get("window") else ["number"]
    if facts["kind"] != g.WINDOW:
        return ["at", "name"]
    if "makes" in facts:
        behind = {"windows": [], "records": ["place"]}.get(state, ["at", "name"])
        return ["window_start", "window_end", *behind]
    return ["session"] if facts["window"]["kind"] == "session" else ["window"]


def _records(facts: dict[str, Any], state: str) -> bool:
    """Whether a state keeps records as they are, and not what a user's function declares."""
    return facts["kind"] in g.LIBRARY and (facts["kind"] != g.ORDERED or state in WAITING)


def _time(column: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """Times for people; those that no calendar has, as the end of time, are none."""
    us = column.to_numpy()
    known = (us >= _CALENDAR_US[0]) & (us <= _CALENDAR_US[1])
    return TimeType.of(pa.timestamp("us", "UTC")).from_us(np.where(known, us, MAX_TIME))


def _values(value: pa.ChunkedArray, facts: dict[str, Any], state: str) -> dict[str, Any]:
    """The value as columns: an aggregate's results, a record's fields, or just the value."""
    if facts["kind"] == g.WINDOW:
        return _window_values(one_array(value), facts, state)
    if facts["kind"] == g.AGGREGATE:
        return _results(one_array(value), facts["aggregates"])
    if _records(facts, state):
        flat = one_array(value)
        names = [value.type.field(i).name for i in range(value.type.num_fields)]
        return {n: _time(flat.field(n)) if n in OUR_TIMES else flat.field(n) for n in names}
    if pa.types.is_struct(value.type):
        flat = one_array(value)
        return {value.type.field(i).name: pc.struct_field(flat, i) for i in range(value.type.num_fields)}
    return {"value": value}


def _window_values(value: pa.StructArray, facts: dict[str, Any], state: str) -> dict[str, Any]:
    """What is kept of a window: its bounds, what it holds and what its trigger keeps, and a record as its fields."""
    if state.startswith("timers."):
        return {}
    if state == "open":
        return {"windows": value.field("windows")}
    names = [value.type.field(i).name for i in range(value.type.num_fields)]
    shown: dict[str, Any] = {n: _time(value.field(n)) for n in names if n in _WINDOW_TIMES}
    shown |= {n: value.field(n) for n in names if n in ("window.holds", "window.trigger")}
    if facts.get("makes") in (g.REDUCE, g.PROCESS) and "record" in names:
        record = value.field("record")
        shown |= {f.name: pc.struct_field(record, i) for i, f in enumerate(record.type)}
    return {**shown, **_results(value, facts["aggregates"])}


def _results(value: pa.StructArray, aggregates: dict[str, str]) -> dict[str, Any]:
    """What the aggregates would emit; of the user's own, the accumulator: its code is not run here."""
    body = {name: _column(text) for name, text in aggregates.items() if text.endswith(")")}
    parts = Parts(g.Node(0, g.AGGREGATE, "", body))
    made = dict(parts.results([value.field(name) for name in parts.names], redact=False))
    return {name: made[name] if name in made else value.field(name) for name in aggregates}


def _column(text: str) -> Column:
    kind, _, rest = text.partition("(")
    return Column(kind, rest.removesuffix(")") or None)


def only_key(shown: pa.Table, keys: list[str], wanted: str) -> pa.Table:
    """The rows of one key, written as people write it."""
    for name, part in zip(keys, _parts(wanted, len(keys)), strict=True):
        column = shown[name]
        mask = pc.is_null(column) if part is None else pc.equal(column, _cast(part, column.type, name))
        shown = shown.filter(mask)
    return shown


def _parts(wanted: str, width: int) -> list[Any]:
    if wanted.startswith("["):
        try:
            parts = msgspec.json.decode(wanted, type=list[Any])
        except msgspec.DecodeError as error:
            raise ConfigError(f"--key {wanted!r} is no JSON list: {error}.") from None
    else:
        parts = wanted.split(",") if width > 1 else [wanted]
        parts = [None if p == "null" else p for p in parts]
    if len(parts) != width:
        raise ConfigError(
            f"--key {wanted!r} has {len(parts)} parts; the key has {width}.", remedy="Write them as a,b."
        )
    return parts


def _cast(part: Any, kind: pa.DataType, name: str) -> pa.Scalar:
    try:
        return pa.scalar(str(part) if isinstance(part, (int, float)) else part).cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise ConfigError(f"--key: {part!r} is no {kind}, which {name!r} is.") from None


def _facts(shown: dict[str, pa.Table], limit: int) -> dict[str, Any]:
    return {s: {"total": t.num_rows, "rows": to_rows(t.slice(0, limit))} for s, t in shown.items()}


def _print_tables(shown: dict[str, pa.Table], limit: int, uid: str, commit: Commit) -> None:
    out = console()
    if not shown:
        out.print(f"{uid} has no state after epoch {commit.epoch}.")
    for name, found in shown.items():
        title = f"[bold]{uid}.{name}[/bold] after epoch {commit.epoch}: {amount(found.num_rows)} rows"
        out.print(title, soft_wrap=True)
        rows = to_rows(found.slice(0, limit))
        numbers = [
            f.name for f in found.schema if pa.types.is_integer(f.type) or pa.types.is_floating(f.type)
        ]
        out.print(table(found.schema.names, [[_cell(v) for v in r.values()] for r in rows], right=numbers))
        if found.num_rows > limit:
            out.print(f"… and {amount(found.num_rows - limit)} more; --limit shows more.", style="dim")
        out.print()


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.10g}" if isinstance(value, float) else str(value)
