"""What a process ends with: one number for each kind of end. `holdfast --help` prints them."""

from __future__ import annotations

OK = 0
UNEXPECTED = 1
UNUSABLE = 3
INTERRUPTED = 130
TERMINATED = 143

MEANING = {
    OK: "done: drained, epochs run, or stopped by Ctrl-C, SIGTERM, `holdfast stop`",
    UNEXPECTED: "an error nobody foresaw, with its traceback; what a command was to do or to show did not come about",
    2: "command, settings or pipeline can't run as written; an extra is missing",
    UNUSABLE: "Spark can't carry the engine; `doctor` found something to mend",
    4: "the directory is another pipeline's, has other uids or types, or is in use",
    5: "a newer driver has taken the pipeline over",
    6: "the data is not what the pipeline says: schema, bad record, changed file",
    7: "a function of the user's raised, or stored what its state is not declared for",
    8: "state can't be read or written",
    9: "output can't be staged or published",
    10: "a task of ours failed: a disk, a worker, a bug",
    11: "a call of the outside world failed, or was not answered in time",
    12: "a replay gave another result than the first run",
    13: "state on the heap would pass heap_limit",
    INTERRUPTED: "a second Ctrl-C, or one before the first epoch; nothing is lost",
    TERMINATED: "SIGTERM before the first epoch",
}
"""What each code means. Ctrl-C and SIGTERM finish the epoch under way and end with 0."""


def epilog() -> str:
    """The codes as the end of a help text, one a line."""
    lines = [f"[cyan]{code:>3}[/cyan] {text}" for code, text in MEANING.items()]
    return "\n".join(["[bold]Exit codes[/bold]", *lines])
