"""What a process ends with: one number for each kind of end. `holdfast --help` prints them."""

from __future__ import annotations

OK = 0
UNEXPECTED = 1
UNUSABLE = 3
INTERRUPTED = 130
TERMINATED = 143

MEANING = {
    OK: "done: drained, n epochs run, or stopped by Ctrl-C, SIGTERM or `holdfast stop` after the epoch",
    UNEXPECTED: "an error that nobody foresaw (with its traceback), or `stop --wait` ran out",
    2: "the command, the settings or the pipeline as written can't run; an extra is not installed",
    UNUSABLE: "this Spark session can't carry the engine; `doctor` found something to mend",
    4: "the directory belongs to another pipeline, to other uids or types, or is none of ours",
    5: "a newer driver has taken the pipeline over",
    6: "the data is not what the pipeline says: bad record, schema, changed input",
    7: "a function of the user's raised",
    8: "state can't be read, written or held",
    9: "output can't be staged or published",
    10: "a task of ours failed: a disk, a worker, a bug",
    INTERRUPTED: "a second Ctrl-C, or one before the first epoch: nothing is lost, the epoch runs again",
    TERMINATED: "SIGTERM before the first epoch",
}


def epilog() -> str:
    """The codes as the end of a help text: a paragraph each, which is how typer keeps lines apart."""
    return "\n\n".join(
        ["[bold]Exit codes[/bold]", *(f"[cyan]{code:>3}[/cyan]  {text}" for code, text in MEANING.items())]
    )
