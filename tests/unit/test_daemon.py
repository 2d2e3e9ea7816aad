"""The daemon's eye on workers that don't die when they are told to."""

import os
import signal
import subprocess
import sys

from holdfast.engine.daemon import Undertaker, children, has_sigterm_waiting


def test_a_frozen_child_that_was_told_to_end_is_killed_at_the_second_look_and_others_are_left_alone() -> None:
    frozen, other = (
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) for _ in range(2)
    )
    try:
        assert {frozen.pid, other.pid} <= set(children(os.getpid()))
        os.kill(frozen.pid, signal.SIGSTOP)
        os.waitpid(frozen.pid, os.WUNTRACED)
        undertaker = Undertaker()
        undertaker.look()
        assert not has_sigterm_waiting(frozen.pid)
        frozen.terminate()
        assert has_sigterm_waiting(frozen.pid)
        undertaker.look()
        assert frozen.poll() is None
        undertaker.look()
        assert frozen.wait(10) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (frozen, other):
            process.kill()
            process.wait()
