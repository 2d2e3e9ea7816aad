"""Where the peers run: a virtual environment for each, made once, and their scripts run inside it.

`run_peer` is the door: it makes the peer's environment under `.bench/venvs` if that is not there yet, runs the
peer's script in it and returns the JSON object the script printed last. What a peer measures and how is the
script's own business; this module knows only names, requirements and processes.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

FOLDER = Path(__file__).resolve().parent
BENCH_ROOT = FOLDER.parent.parent / ".bench"
DEFAULT_TIMEOUT_S = 1800.0
_INSTALL_TIMEOUT_S = 1800.0
_END_TIMEOUT_S = 15.0
_TAIL_LINES = 40
_STAMP = "made-from"


class PeerError(Exception):
    """A peer could not be installed or run; the message says which, why and what to do."""


@dataclass(frozen=True)
class Peer:
    """One peer: its script and requirements in this folder, and the Python versions its pins install on."""

    name: str
    script: str
    pythons: tuple[str, ...]

    @property
    def requirements(self) -> Path:
        return FOLDER / f"requirements-{self.name}.txt"


# Best first. Each was found by installing: Bytewax has no wheel for 3.13, PyFlink's Beam does not build there,
# and neither pyspark 4.3 nor the pinned pyarrow supports 3.10.
_PEERS = (
    Peer("structured-streaming", "structured_streaming_peer.py", ("3.11", "3.12", "3.13")),
    Peer("pyflink", "pyflink_peer.py", ("3.11", "3.12")),
    Peer("bytewax", "bytewax_peer.py", ("3.11", "3.12")),
)
PEERS = {peer.name: peer for peer in _PEERS}


def run_peer(
    peer: str,
    case: str,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    script: str | None = None,
    **options: object,
) -> dict[str, Any]:
    """Run one case of a peer in its own environment and return what it reports.

    `script` is another one in this folder than the peer's usual. Options become the script's arguments: `data=folder, epoch_interval_s=1` is `--data folder
    --epoch-interval-s 1`, a list repeats its argument, True is a bare flag, False and None are left out.
    """
    known = _known(peer)
    python = make_environment(peer)
    command = [str(python), str(FOLDER / (script or known.script)), "--case", case, *_arguments(options)]
    _say(peer, f"{case} {' '.join(_arguments(options))}")
    started = time.monotonic()
    scratch_root = _bench_folder("scratch")
    with tempfile.TemporaryDirectory(
        dir=scratch_root, prefix=f"{peer}-", ignore_cleanup_errors=True
    ) as scratch:
        report = _run_script(peer, command, Path(scratch), timeout_s)
    _say(peer, f"{case} took {time.monotonic() - started:.0f} s: {report['records_per_s']:,} records/s")
    return report


def make_environment(peer: str) -> Path:
    """Make the peer's virtual environment unless it is there as its requirements want it; returns its Python."""
    known = _known(peer)
    folder = _bench_folder("venvs") / peer
    python = folder / "bin" / "python"
    wanted = hashlib.sha256(known.requirements.read_bytes()).hexdigest()
    stamp = folder / _STAMP
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    base = _find_python(known)
    _say(peer, f"making {folder} with {base}")
    shutil.rmtree(folder, ignore_errors=True)
    _install_step(known, [base, "-m", "venv", str(folder)])
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--quiet"]
    _install_step(known, [*pip, "-r", str(known.requirements)])
    stamp.write_text(wanted)
    return python


def _known(peer: str) -> Peer:
    if peer not in PEERS:
        raise PeerError(f"there is no peer {peer!r}; the peers are {', '.join(PEERS)}")
    return PEERS[peer]


def _bench_folder(name: str) -> Path:
    """A folder of `.bench`, which keeps itself out of git."""
    folder = BENCH_ROOT / name
    folder.mkdir(parents=True, exist_ok=True)
    ignore = BENCH_ROOT / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n")
    return folder


def _find_python(peer: Peer) -> str:
    """A Python that can make environments, of a version the peer's pins install on."""
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    candidates = [sys.executable] if own in peer.pythons else []
    for version in peer.pythons:
        candidates += filter(None, [shutil.which(f"python{version}")])
        candidates += map(str, sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python")))
    for candidate in candidates:
        # A pyenv shim exists for versions it will not start, and Debian's Python may lack venv.
        if (
            subprocess.run(
                [candidate, "-c", "import ensurepip, venv"], capture_output=True, check=False
            ).returncode
            == 0
        ):
            return candidate
    raise PeerError(
        f"{peer.name} needs Python {' or '.join(peer.pythons)} with the venv module, and none was found on the PATH "
        f"or in ~/.pyenv. Install one, or leave this peer out with --peers."
    )


def _install_step(peer: Peer, command: list[str]) -> None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_INSTALL_TIMEOUT_S,
            env=_clean_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PeerError(
            f"installing {peer.name} took more than {_INSTALL_TIMEOUT_S:.0f} s: {' '.join(command)}. "
            f"Run that by hand to see where it hangs, or leave this peer out with --peers."
        ) from None
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-_TAIL_LINES:])
        raise PeerError(
            f"{peer.name} could not be installed: {' '.join(command)} ended with {done.returncode}. "
            f"See that PyPI can be reached, or leave this peer out with --peers. The end of its output:\n{tail}"
        )


def _arguments(options: dict[str, object]) -> list[str]:
    arguments: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            arguments.append(flag)
        elif isinstance(value, list | tuple):
            arguments += [f"{flag}={each}" for each in value]
        elif value is not None and value is not False:
            arguments += [flag, str(value)]
    return arguments


def _run_script(peer: str, command: list[str], scratch: Path, timeout_s: float) -> dict[str, Any]:
    """Run the script in a process group of its own, so that its JVMs and workers end with it."""
    output = scratch / "stdout"
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    with output.open("w") as stdout:
        process = subprocess.Popen(
            command,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**_clean_environment(), "TMPDIR": str(scratch)},
            start_new_session=True,
        )
    assert process.stderr is not None
    follower = threading.Thread(target=_follow, args=(peer, process.stderr, tail), daemon=True)
    follower.start()
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        _end_group(process)
        follower.join(_END_TIMEOUT_S)
    reason = f"did not end within {timeout_s:.0f} s" if code is None else f"ended with {code}"
    report = _last_json(output.read_text()) if code == 0 else None
    if report is None:
        reason = "printed no JSON object at its end" if code == 0 else reason
        raise PeerError(
            f"{peer} {reason}: {' '.join(command)}. The end of what it wrote to stderr:\n" + "".join(tail)
        )
    return report


def _follow(peer: str, stderr: IO[str], tail: deque[str]) -> None:
    """Keep the end of what the script says; pass on the lines it marks as progress."""
    for line in stderr:
        tail.append(line)
        if line.startswith("# "):
            _say(peer, line[2:].rstrip())


def _end_group(process: subprocess.Popen[str]) -> None:
    """End whatever the script left running. The group is the script's own: it was started as its leader."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, kind)
        except ProcessLookupError:
            break
        if _group_ended(process):
            break
    process.wait()


def _group_ended(process: subprocess.Popen[str]) -> bool:
    deadline = time.monotonic() + _END_TIMEOUT_S
    while time.monotonic() < deadline:
        process.poll()
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def _last_json(text: str) -> dict[str, Any] | None:
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    return None


def _clean_environment() -> dict[str, str]:
    """This process's environment without what would lead a peer to our packages or our Spark."""
    ours = (
        "PYTHONPATH",
        "PYTHONHOME",
        "VIRTUAL_ENV",
        "SPARK_HOME",
        "PYSPARK_PYTHON",
        "PYSPARK_DRIVER_PYTHON",
    )
    return {name: value for name, value in os.environ.items() if name not in ours}


def _say(peer: str, text: str) -> None:
    print(f"[{peer}] {text}", file=sys.stderr, flush=True)
