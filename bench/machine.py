"""On what was measured, and what it carries: no names of hosts, no paths."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
BASE_BYTES = 4 << 30
"""What a cluster of processes takes without any state: six JVMs and their Python workers."""
HEAP_COPIES = 2.5
"""How often state is there in memory, with what changes it."""
DISK_COPIES = {"heap": 5.0, "rocksdb": 5.0}
"""And on disk, as versions, checkpoints and replays. With RocksDB three and a half were seen, at 10.6 GB."""


def machine() -> dict[str, Any]:
    """The machine in a few words."""
    import pyspark

    return {
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        "java": _java(),
        "pyspark": pyspark.__version__,
    }


def source_of(root: Path = ROOT) -> str:
    """A name for the source that figures are of: another one if a file of the engine or of the benchmarks is another."""
    digest = hashlib.sha256()
    found = [p for folder in ("src", "bench") for p in (root / folder).rglob("*") if p.is_file()]
    for path in sorted(p for p in found if "__pycache__" not in p.parts):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:16]


def _java() -> str:
    try:
        told = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False).stderr
    except OSError:
        return "?"
    found = re.search(r'version "([^"]+)"', told)
    return found[1] if found else "?"


def carries(state_bytes: int, backend: str, memory_bytes: int, disk_bytes: int) -> str:
    """Why a machine does not carry a state; nothing if it does.

    >>> carries(10 << 30, "heap", 24 << 30, 200 << 30)
    '10.0 GB of state on the heap take about 29 GB of memory; 24 GB are here.'
    >>> carries(10 << 30, "rocksdb", 24 << 30, 40 << 30)
    '10.0 GB of state take about 50 GB of disk; 40 GB are free.'
    >>> carries(10 << 30, "rocksdb", 24 << 30, 200 << 30)
    ''
    """
    gb = 2**30
    memory = BASE_BYTES + (HEAP_COPIES * state_bytes if backend == "heap" else 0.2 * state_bytes)
    disk = DISK_COPIES[backend] * state_bytes
    if memory > memory_bytes:
        where = "on the heap" if backend == "heap" else "in RocksDB"
        return (
            f"{state_bytes / gb:.1f} GB of state {where} take about {memory / gb:.0f} GB of memory; "
            f"{memory_bytes / gb:.0f} GB are here."
        )
    if disk > disk_bytes:
        return (
            f"{state_bytes / gb:.1f} GB of state take about {disk / gb:.0f} GB of disk; "
            f"{disk_bytes / gb:.0f} GB are free."
        )
    return ""


def here(folder: Path) -> tuple[int, int]:
    """The memory of this machine, and what is free on a folder's disk."""
    return psutil.virtual_memory().total, shutil.disk_usage(folder).free


def backend_for(state_bytes: int, folder: Path) -> tuple[str, str]:
    """The heap if it carries the state, or else RocksDB; and why neither does, if so."""
    for backend in ("heap", "rocksdb"):
        why = carries(state_bytes, backend, *here(folder))
        if not why:
            return backend, ""
    return "rocksdb", why


class Kept:
    """Results that are written as they come, so that what was measured stays if the rest fails."""

    def __init__(self, file: Path, results: dict[str, Any]) -> None:
        self.file, self.results = file, results

    def write(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.results, indent=1) + "\n")
        os.replace(temporary, self.file)


def carried_over(file: Path, new: dict[str, Any], kinds: Sequence[str], again: Sequence[str]) -> None:
    """Take over from an earlier run what is not measured again, if it was measured under the same conditions.

    Otherwise the earlier results are put aside, as `….previous.json`, before anything is written in their place.

    Args:
        new: results with lists under `kinds`, empty so far, and conditions under other names.
        again: the kinds that are measured now.
    """
    if not file.exists():
        return
    old = json.loads(file.read_text())
    lists = (*kinds, "skipped", "failed")
    # What was written has passed through JSON: there are no tuples in it.
    conditions = json.loads(json.dumps({k: v for k, v in new.items() if k not in lists}))
    if any(old.get(k) != v for k, v in conditions.items()):
        os.replace(file, file.with_suffix(".previous.json"))
        return
    for kind in kinds:
        new[kind] = [] if kind in again else old.get(kind, [])
    for kind in ("skipped", "failed"):
        new[kind] = [one for one in old.get(kind, []) if one["phase"] not in again]


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM ends us as Ctrl-C does, so that what was started is ended too."""

    def end(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        print("stopped; what was measured so far is kept below .bench", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)
