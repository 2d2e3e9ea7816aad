"""Starts the driver as a child and, when it has ended, makes sure that nothing of it is left.

A driver is more than one process: a JVM, PySpark's daemon and its workers. The daemon calls `setpgid`, so a process
group does not hold them all; their session does, since nobody in there calls `setsid`. What belongs to a child is
therefore its session, and whatever descends from a member of it. A process that makes a session of its own
*and* outlives its parent is out of reach.

A new driver may only start when the old one can't write any more: `kill_everything` returns when that is so, and
raises if it can't be reached.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence

import psutil

from holdfast.errors import EngineError

_LOOK_EVERY_S = 0.02
KILL_TIMEOUT_S = 10.0


def start(
    command: Sequence[str], environment: Mapping[str, str], keep_open: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """A child in a session of its own. It shares our output, but Ctrl-C and the like reach only us."""
    return subprocess.Popen(
        list(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        pass_fds=tuple(keep_open),
        start_new_session=True,
    )


def belonging(root: int) -> list[psutil.Process]:
    """All living processes of the session that `root` leads, and their descendants in any session."""
    living = {p.pid: p for p in psutil.process_iter() if _lives(p)}
    ours = {pid for pid in living if pid == root or _session(pid) == root}
    parents = {pid: _parent(process) for pid, process in living.items()}
    # A chain of descendants is no longer than there are processes: each round finds one generation.
    for _ in living:
        found = {pid for pid, parent in parents.items() if parent in ours} - ours
        if not found:
            break
        ours |= found
    return [living[pid] for pid in sorted(ours)]


def kill_everything(child: subprocess.Popen[bytes], timeout_s: float = KILL_TIMEOUT_S) -> None:
    """Kill all that belongs to a child, stopped or not, and return when none of it lives.

    Looks again after each kill, because what was killed may have started something in the meantime.
    """
    until = time.monotonic() + timeout_s
    while left := belonging(child.pid):
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if not _gone(child, left, until):
            raise _survived([p for p in left if _lives(p)], timeout_s)
    child.wait()


def let_everything_end(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """Give what a child left behind time to end by itself, as a JVM does that cleans up its folders; then kill it."""
    _gone(child, belonging(child.pid), time.monotonic() + grace_s)
    kill_everything(child)


def _gone(child: subprocess.Popen[bytes], processes: Sequence[psutil.Process], until: float) -> bool:
    """Whether all of them are gone in time. `psutil.wait_procs` would take the child's exit code from `Popen`."""
    while any(map(_lives, processes)):
        if time.monotonic() >= until:
            return False
        time.sleep(_LOOK_EVERY_S)
        child.poll()
    return True


def _lives(process: psutil.Process) -> bool:
    """A zombie does not: it holds nothing but its exit code, and is its parent's to reap."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _parent(process: psutil.Process) -> int | None:
    try:
        return int(process.ppid())
    except psutil.Error:
        return None


def _survived(processes: Sequence[psutil.Process], timeout_s: float) -> EngineError:
    named = ", ".join(f"{_name(p)} ({p.pid})" for p in processes)
    return EngineError(
        f"Processes of the driver have survived SIGKILL for {timeout_s:g} s: {named}.",
        remedy="They hang in the kernel (a disk or network mount that does not answer?). No new driver is started "
        "beside them; start again when they are gone.",
    )


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return "?"
