"""The command line: `holdfast run`, `plan`, `status`, `stop`, `state`, `config`, `doctor`, `demo`.

One file a command. This room reads what people type and shows what others did; it decides nothing. Every
command that prints a table takes `--json`; every error of ours is printed without a traceback and ends
with its own exit code (`exit_codes`).
"""

from holdfast.cli.app import main

__all__ = ["main"]
