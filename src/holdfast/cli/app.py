"""The application: all commands together, and the one place where errors become texts and exit codes."""

from __future__ import annotations

import sys
import traceback

import typer

from holdfast.cli.chaos import chaos
from holdfast.cli.checkpoints import checkpoint, checkpoints
from holdfast.cli.config import config
from holdfast.cli.demo import demo
from holdfast.cli.doctor import doctor
from holdfast.cli.drill import drill
from holdfast.cli.estimate import estimate, explain
from holdfast.cli.exit_codes import UNEXPECTED, epilog
from holdfast.cli.plan import plan
from holdfast.cli.run import run
from holdfast.cli.simulate import simulate
from holdfast.cli.state import state
from holdfast.cli.status import status
from holdfast.cli.stop import stop
from holdfast.errors import HoldfastError

app = typer.Typer(
    name="holdfast",
    help="Stateful streaming on Spark that is back within the deadline you set.",
    epilog=epilog(),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for command in (
    run,
    plan,
    status,
    stop,
    state,
    checkpoint,
    checkpoints,
    estimate,
    explain,
    config,
    doctor,
    chaos,
    drill,
    simulate,
    demo,
):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        from holdfast import __version__

        print(f"holdfast {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    return


def main() -> None:
    """Run the command line and end the process with its exit code."""
    try:
        app()
    except HoldfastError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception:
        traceback.print_exc()
        sys.exit(UNEXPECTED)
