"""`holdfast checkpoint` asks a running pipeline to back its state up; `holdfast checkpoints` lists what there is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.metadata import Checkpoint
from holdfast.checkpoint.policy import Trigger
from holdfast.cli.directory import Directory, is_running, open_directory
from holdfast.cli.output import amount, console, millis, print_json, size, table
from holdfast.config import parse_duration_s
from holdfast.errors import HoldfastError

_LOOK_EVERY_S = 0.1


def checkpoint(
    dir: Annotated[Path, typer.Argument(metavar="DIR", help="The pipeline's directory.")],
    wait: Annotated[str, typer.Option(help="How long to wait for it.")] = "600s",
    json: Annotated[bool, typer.Option("--json", help="Print the checkpoint as JSON.")] = False,
) -> None:
    """Ask a running pipeline for a checkpoint of its newest version, and wait until it is complete."""
    directory = open_directory(dir)
    if not is_running(directory.status()):
        raise HoldfastError(
            f"Nothing is running in {dir}.",
            remedy="Start the pipeline: a clean stop leaves a checkpoint too.",
        )
    told = directory.status()
    if told is not None and told.policy == "never":
        raise HoldfastError(
            "This pipeline runs with checkpoint=never: it makes none, not even when asked.",
            remedy='Run it with checkpoint="manual", or an interval.',
        )
    wish = directory.journal.ask_for_checkpoint()
    until = time.monotonic() + parse_duration_s(wait)
    while wish in directory.journal.wishes():
        if time.monotonic() >= until:
            raise HoldfastError(
                f"No checkpoint was completed within {wait}; the wish stands.",
                remedy=f"Look at its log, or at: holdfast checkpoints {dir}.",
            )
        if not is_running(directory.status()):
            raise HoldfastError(f"The pipeline in {dir} ended before the checkpoint was complete.")
        time.sleep(_LOOK_EVERY_S)
    made = Catalog(directory.journal).completed()[-1]
    if json:
        print_json(facts_of(made))
        return
    console().print(
        f"Checkpoint {made.number} of epoch {made.epoch}: {size(made.size_bytes)}, {size(made.new_bytes)} of it new, "
        f"in {millis(made.completed_ms - made.started_ms)}.",
        soft_wrap=True,
    )


def checkpoints(
    dir: Annotated[Path, typer.Argument(metavar="DIR", help="The pipeline's directory.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON: a list.")] = False,
) -> None:
    """List a pipeline's checkpoints: what each holds, why it was made, and which can't be used."""
    rows = list_facts(open_directory(dir))
    if json:
        print_json(rows)
        return
    out = console()
    if not rows:
        out.print("There is no checkpoint yet.")
        return
    columns = ["number", "epoch", "completed", "why", "size", "new", "files", "took", "usable"]
    shown = [
        [
            r["number"],
            amount(r["epoch"]) if r["usable"] else "",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(r["completed_ms"] / 1000))
            if r["usable"]
            else "",
            r["why"],
            size(r["size_bytes"]) if r["usable"] else "",
            size(r["new_bytes"]) if r["usable"] else "",
            r["files"],
            millis(r["took_ms"]) if r["usable"] else "",
            "yes" if r["usable"] else "no",
        ]
        for r in rows
    ]
    out.print(table(columns, shown, right=["number", "epoch", "size", "new", "files", "took"]))


def list_facts(directory: Directory) -> list[dict[str, Any]]:
    """Every checkpoint that the log has, the damaged ones with what is wrong with them."""
    catalog = Catalog(directory.journal)
    found = [facts_of(c) for c in catalog.completed()]
    found += [
        {"number": n, "epoch": 0, "usable": False, "why": why, "size_bytes": 0, "new_bytes": 0, "files": 0}
        | {"completed_ms": 0, "took_ms": 0, "generation": 0, "fingerprint": "", "storage": ""}
        for n, why in catalog.unusable().items()
    ]
    return sorted(found, key=lambda f: int(f["number"]))


def facts_of(made: Checkpoint) -> dict[str, Any]:
    """A checkpoint as a row."""
    return {
        "number": made.number,
        "epoch": made.epoch,
        "usable": True,
        "why": Trigger[made.trigger].value,
        "size_bytes": made.size_bytes,
        "new_bytes": made.new_bytes,
        "files": len(made.files),
        "completed_ms": made.completed_ms,
        "took_ms": made.completed_ms - made.started_ms,
        "generation": made.generation,
        "fingerprint": made.fingerprint,
        "storage": made.storage,
    }
