"""`holdfast config`: every setting, its value, where it came from and what it means.

The meaning is the text under each field of `config.Settings`, read from its source: it is written once.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.output import console, print_json, table
from holdfast.config import FIELDS, Resolved, Settings, resolve

_SECRET = re.compile("key|secret|token|password|credential", re.IGNORECASE)


def config(
    file: Annotated[
        Path | None, typer.Option("--config", help="Settings file; holdfast.toml here unless told.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show every setting: its value, where it came from, what it means.

    Defaults < holdfast.toml < environment (HOLDFAST_…) < arguments.
    """
    rows = setting_rows(resolve({}, file=file))
    if json:
        print_json({"settings": rows})
        return
    shown = [[r["name"], r["shown"], r["origin"], r["description"]] for r in rows]
    console().print(table(["setting", "value", "from", "meaning"], shown))


def setting_rows(resolved: Resolved) -> list[dict[str, Any]]:
    """Every setting as plain data, in the order of their declaration."""
    meanings = descriptions()
    return [
        {
            "name": name,
            "value": without_secrets(getattr(resolved.settings, field)),
            "shown": shown(field, without_secrets(getattr(resolved.settings, field))),
            "origin": resolved.origin[name],
            "variable": None if name in ("spark", "storage", "state_root") else f"HOLDFAST_{name.upper()}",
            "description": meanings[field],
        }
        for name, field in FIELDS.items()
    ]


def without_secrets(value: Any) -> Any:
    """Options without what should not be on a screen.

    >>> without_secrets({"region": "eu-west-1", "secret_access_key": "x"})
    {'region': 'eu-west-1', 'secret_access_key': '***'}
    """
    if not isinstance(value, dict):
        return value
    return {k: "***" if _SECRET.search(k) else v for k, v in value.items()}


def descriptions() -> dict[str, str]:
    """The text under each field of `Settings`."""
    body = ast.parse(inspect.getsource(Settings)).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    field = ""
    for statement in body.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            field = statement.target.id
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and field:
            found[field] = " ".join(str(statement.value.value).split())
    return found


def shown(field: str, value: Any) -> str:
    """A value as a user would write it.

    >>> shown("interval_s", 0.5), shown("heap_limit_bytes", 4 << 30), shown("dir", None)
    ('500ms', '4GB', '-')
    """
    if value is None or value == {}:
        return "-"
    if field.endswith("_s"):
        return f"{value * 1000:g}ms" if value < 1 else f"{value:g}s"
    if field.endswith("_bytes"):
        return _bytes(value)
    if isinstance(value, dict):
        return " ".join(f"{k}={v}" for k, v in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)


def _bytes(value: int) -> str:
    for unit, factor in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if value >= factor and value % factor == 0:
            return f"{value // factor}{unit}"
    return str(value)
