"""The victim: `python -m holdfast.faults.app APP --out FOLDER --settings JSON [--supervise]`.

It is `holdfast run` but for two things: its sinks are folders below `--out` (see `standins`), and its settings come
as one JSON object, which wins over the environment and `holdfast.toml`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.config import Settings, resolve
from holdfast.errors import HoldfastError
from holdfast.faults.standins import into_folders
from holdfast.supervise.heartbeat import start_heartbeat
from holdfast.supervise.strategies import parse_restart
from holdfast.supervise.supervisor import Supervisor


def command(app: str, out: Path, settings: Mapping[str, Any], *, supervise: bool) -> list[str]:
    """The command line that starts a victim."""
    given = [app, "--out", str(out), "--settings", json.dumps(dict(settings))]
    return [sys.executable, "-m", "holdfast.faults.app", *given, *(["--supervise"] if supervise else [])]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the victim, or its supervisor; gives the exit code."""
    # Here, because the command line imports the experiments, and they import `command`.
    from holdfast.cli.loading import load
    from holdfast.cli.reporting import JsonLines
    from holdfast.cli.running import run_reported

    parser = argparse.ArgumentParser(prog="python -m holdfast.faults.app")
    parser.add_argument("app")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--settings", type=json.loads, required=True)
    parser.add_argument("--supervise", action="store_true")
    asked = parser.parse_args(arguments)
    try:
        settings = resolve(asked.settings).settings
        if asked.supervise:
            return _supervise(settings, command(asked.app, asked.out, asked.settings, supervise=False))
        start_heartbeat()
        run_reported(into_folders(load(asked.app), asked.out), settings, JsonLines())
    except HoldfastError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _supervise(settings: Settings, child: Sequence[str]) -> int:
    assert settings.dir is not None
    supervisor = Supervisor(
        child,
        Path(settings.dir),
        strategy=parse_restart(settings.restart),
        timeout_s=settings.driver_timeout_s,
        tell=lambda event: print(event, file=sys.stderr, flush=True),
    )
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main())
