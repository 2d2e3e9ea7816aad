"""Processes without the wait for their imports: `python -m tests.mother` has made them, and forks for each that is asked for.

Each is a process of its own, in a session of its own, to be killed or frozen like any other. A mother has no threads, so
that to fork is safe. She is asked in JSON, a line each, and answers in kind.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LOOK_EVERY_S = 0.005


class Mother:
    """The process that forks, started when it is first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, **question: Any) -> Any:
        """One question, and its answer."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.mother"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        return json.loads(self._process.stdout.readline())


class Child:
    """A process, as far as `subprocess.Popen` is asked for here."""

    def __init__(
        self, mother: Mother, arguments: list[str], environment: Mapping[str, str], errors: Path
    ) -> None:
        self._mother, self._errors = mother, errors
        self.pid: int = mother.ask(fork=arguments, environment=dict(environment), errors=str(errors))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it lives."""
        self._look()
        return self.returncode

    def _look(self) -> bool:
        """Whether it stands still."""
        if self.returncode is not None:
            return False
        status = self._mother.ask(look=self.pid)
        if status is None:
            return False
        if os.WIFSTOPPED(status):
            return True
        self.returncode = os.waitstatus_to_exitcode(status)
        return False

    def await_stop(self, timeout_s: float) -> bool:
        """Wait until it stands still, or has ended: whether it stands still."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if self._look():
                return True
            if self.returncode is not None:
                return False
            time.sleep(_LOOK_EVERY_S)
        raise subprocess.TimeoutExpired("a child", timeout_s)

    def wait(self, timeout: float = 120.0) -> int:
        """Wait until it has ended."""
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() >= until:
                raise subprocess.TimeoutExpired("a child", timeout)
            time.sleep(_LOOK_EVERY_S)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float = 120.0) -> tuple[bytes, bytes]:
        """Wait until it has ended: what it printed, which nobody kept, and its errors."""
        self.wait(timeout)
        return b"", self._errors.read_bytes()


def main() -> None:
    from tests import victim

    for line in sys.stdin:
        asked = json.loads(line)
        if "look" in asked:
            pid, status = os.waitpid(asked["look"], os.WNOHANG | os.WUNTRACED)
            print(json.dumps(status if pid else None), flush=True)
            continue
        pid = os.fork()
        if not pid:
            _live(victim.main, asked)
        print(json.dumps(pid), flush=True)


def _live(run: Any, asked: dict[str, Any]) -> None:
    """The child: as if it had been started with these arguments. Never returns."""
    code = 1
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        errors = os.open(asked["errors"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for here, there in ((nothing, 0), (nothing, 1), (errors, 2)):
            os.dup2(here, there)
        os.environ.update(asked["environment"])
        sys.argv[1:] = asked["fork"]
        run()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
