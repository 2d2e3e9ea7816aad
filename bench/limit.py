"""The limit: what two bare processes reach with the same user function over the same records.

There is no engine here, no exchange and nothing durable. Each process has its half of the keys in files of
its own, split before the clock starts. The clock covers reading Parquet, making records, calling the user's
function for each, keeping its output for an epoch and dropping it. An epoch is a file; the first one is left out,
as it is for every other side of the benchmark. Nobody can be faster than this without changing the function.

The user's function is named, not imported, so that what runs here is the very function the pipeline runs:
`measure_limit("keyed-python", files, function="bench.pipelines:Balance.process")`.
"""

import argparse
import gc
import importlib
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Barrier
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from bench.workload import event_files

Record = dict[str, Any]
Process = Callable[[Any, Any, Record, Any], Iterable[Record]]
CASES = ("keyed-python", "aggregate")
_WORKER_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Limit:
    """What the bare processes reached; an epoch takes as long as the slower process's half of it."""

    case: str
    records_per_s: int
    records: int
    epochs: list[float]
    durable: str
    settings: dict[str, object]


@dataclass(frozen=True)
class Share:
    """One process's part of the work: its own files and, for `keyed-python`, the function to call."""

    case: str
    files: list[Path]
    function: str
    state: str
    collect_garbage: bool


@dataclass
class Value:
    """All that is left of a ValueState when there is no engine: a place for the current key's value."""

    __slots__ = ("value",)
    value: float


class Balance:
    """The benchmark's user function, for runs without one of the caller's."""

    total: Value

    def process(self, account: int, transfer: Record, ctx: Any) -> Iterator[Record]:
        self.total.value += transfer["v"]
        yield {"account": account, "balance": self.total.value}


def measure_limit(
    case: str,
    files: Sequence[Path],
    *,
    function: str = "bench.limit:Balance.process",
    state: str = "total",
    processes: int = 2,
    collect_garbage: bool = False,
) -> Limit:
    """Run `case` over `files` in bare processes and say how many records a second they took in together.

    `function` is `module:Class.method`, called as `method(self, key, record, None)` on an object with nothing
    but the attribute `state`, whose `value` is a float that starts at 0.0 for every key. Python's garbage
    collector is off unless asked for: with it the limit would be lower, and our share of it flattered.
    """
    if case not in CASES:
        raise ValueError(f"there is no limit for case {case!r}; there is one for {', '.join(CASES)}")
    if len(files) < 2:
        raise ValueError("at least two files are needed: the first epoch is left out")
    with tempfile.TemporaryDirectory(prefix="limit-") as folder:
        halves = split(files, Path(folder), processes)
        shares = [Share(case, half, function, state, collect_garbage) for half in halves]
        timed = _run_shares(shares)
    return _figure(case, timed, {"function": function, "processes": processes, "gc": collect_garbage})


def split(files: Sequence[Path], folder: Path, processes: int) -> list[list[Path]]:
    """Write each process's records of each file to a file of its own, by a hash of the key."""
    halves: list[list[Path]] = [[] for _ in range(processes)]
    for file in files:
        table = pq.read_table(file)
        owner = owner_of(table["k"].to_numpy(), processes)
        for process, half in enumerate(halves):
            half.append(folder / f"{file.stem}-{process}.parquet")
            pq.write_table(table.filter(pa.array(owner == process)), half[-1])
    return halves


def owner_of(keys: npt.NDArray[np.int64], processes: int) -> npt.NDArray[np.int64]:
    mixed = (keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(57)
    return mixed.astype(np.int64) % processes


def _run_shares(shares: Sequence[Share]) -> list[list[tuple[int, float]]]:
    """For each share, the records and seconds of its epochs; all shares start together."""
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(len(shares))
    with spawn.Pool(len(shares), initializer=_keep_barrier, initargs=(barrier,)) as pool:
        return pool.map_async(_run_share, shares, chunksize=1).get(_WORKER_TIMEOUT_S)


_barrier: Barrier | None = None


def _keep_barrier(barrier: Barrier) -> None:
    """A barrier can only be inherited, not sent with a task."""
    global _barrier  # noqa: PLW0603 - the one way from a pool's initializer to its tasks
    _barrier = barrier


def _run_share(share: Share) -> list[tuple[int, float]]:
    pa.set_cpu_count(1)
    epoch = keyed_epochs(share) if share.case == "keyed-python" else AggregateState().add
    if not share.collect_garbage:
        gc.disable()
    assert _barrier is not None
    _barrier.wait(timeout=60)
    timed = []
    for file in share.files:
        started = time.perf_counter()
        records = epoch(file)
        timed.append((records, time.perf_counter() - started))
    return timed


def keyed_epochs(share: Share) -> Callable[[Path], int]:
    """A function that runs one file through the user's function, with the state of all files before it."""
    process = _load(share.function)
    value = Value(0.0)
    bare = SimpleNamespace(**{share.state: value})
    state: dict[int, float] = {}

    def run(file: Path) -> int:
        output: list[Record] = []
        for record in read_records(file):
            key = record["k"]
            value.value = state.get(key, 0.0)
            output += process(bare, key, record, None)
            state[key] = value.value
        return len(output)

    return run


def read_records(file: Path) -> list[Record]:
    """A file's records as dicts, column by column through numpy, the fastest way there is from Arrow."""
    table = pq.read_table(file, use_threads=False)
    k, ts, v = (table[name].to_numpy().tolist() for name in ("k", "ts", "v"))
    return [{"k": k, "ts": ts, "v": v} for k, ts, v in zip(k, ts, v, strict=True)]


class AggregateState:
    """Running sum and count per key, in arrays sorted by key, merged once an epoch."""

    def __init__(self) -> None:
        self.keys: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self.sums: npt.NDArray[np.float64] = np.empty(0, np.float64)
        self.counts: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def add(self, file: Path) -> int:
        table = pq.read_table(file, columns=["k", "v"], use_threads=False)
        grouped = (
            table.group_by("k", use_threads=False).aggregate([("v", "sum"), ("v", "count")]).sort_by("k")
        )
        self._merge(*(grouped[name].to_numpy() for name in ("k", "v_sum", "v_count")))
        return int(table.num_rows)

    def _merge(self, keys: Any, sums: Any, counts: Any) -> None:
        at = np.searchsorted(self.keys, keys)
        known = np.zeros(len(keys), bool)
        inside = at < len(self.keys)
        known[inside] = self.keys[at[inside]] == keys[inside]
        self.sums[at[known]] += sums[known]
        self.counts[at[known]] += counts[known]
        new = ~known
        self.sums = np.insert(self.sums, at[new], sums[new])
        self.counts = np.insert(self.counts, at[new], counts[new])
        self.keys = np.insert(self.keys, at[new], keys[new])


def _load(function: str) -> Process:
    module, _, name = function.partition(":")
    loaded: Process = attrgetter(name)(importlib.import_module(module))
    return loaded


def _figure(case: str, timed: list[list[tuple[int, float]]], settings: dict[str, object]) -> Limit:
    counted = [share[1:] for share in timed]
    records = sum(count for share in counted for count, _ in share)
    wall_s = max(sum(seconds for _, seconds in share) for share in counted)
    epochs = [max(seconds for _, seconds in epoch) for epoch in zip(*timed, strict=True)]
    return Limit(
        case=case,
        records_per_s=round(records / wall_s),
        records=sum(count for share in timed for count, _ in share),
        epochs=[round(seconds, 4) for seconds in epochs],
        durable="nothing",
        settings=settings,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.limit", description="Two bare processes, no engine."
    )
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder made by bench.workload")
    parser.add_argument("--files", type=int, help="use only the first so many files")
    parser.add_argument("--function", default="bench.limit:Balance.process")
    parser.add_argument("--collect-garbage", action="store_true")
    chosen = parser.parse_args()
    limit = measure_limit(
        chosen.case,
        event_files(chosen.data, chosen.files),
        function=chosen.function,
        collect_garbage=chosen.collect_garbage,
    )
    print(json.dumps(asdict(limit)))


if __name__ == "__main__":
    main()
