"""`holdfast doctor`: looks at everything a run needs, and says what to mend. The checks are in `checks`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from holdfast.cli.checks import FAIL, OK, WARN, Check, host_checks, spark_checks
from holdfast.cli.exit_codes import UNUSABLE
from holdfast.cli.output import console, print_json

_MARKS = {OK: ("ok  ", "green"), WARN: ("warn", "yellow"), FAIL: ("FAIL", "bold red")}


def doctor(
    master: Annotated[str | None, typer.Option(help="Look at this Spark cluster too.")] = None,
    dir: Annotated[Path, typer.Option(help="Where pipelines keep their directories.")] = Path(".holdfast"),
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check Java, Python, packages, memory, disk, Spark and the cluster, and say what to mend.

    Exit code 0 if nothing failed, 3 otherwise.
    """
    found = []
    for check in _all(master, dir):
        found.append(check)
        if not json:
            _print(check)
    failed = any(c.status == FAIL for c in found)
    if json:
        print_json({"ok": not failed, "checks": [dataclasses.asdict(c) for c in found]})
    elif not failed:
        console().print(
            "\nAll is well." if all(c.status == OK for c in found) else "\nThis will work; see the warnings."
        )
    raise typer.Exit(UNUSABLE if failed else 0)


def _all(master: str | None, dir: Path) -> Iterator[Check]:
    fit = True
    for check in host_checks(dir):
        fit = fit and (check.status != FAIL or not check.needed_by_spark)
        yield check
    if fit:
        yield from spark_checks(master)
    else:
        yield Check("Spark", WARN, "not started", "Mend what failed above first.")


def _print(check: Check) -> None:
    mark, style = _MARKS[check.status]
    out = console()
    out.print(Text.assemble((mark, style), f"  {check.name:<22} ", check.found), soft_wrap=True)
    if check.mend and check.status != OK:
        out.print(Text(f"      {'':<22} {check.mend}", style="dim"), soft_wrap=True)
