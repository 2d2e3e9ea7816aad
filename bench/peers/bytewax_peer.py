"""Bytewax's side of the benchmark; a script for its own virtual environment, free of bench imports.

Case `keyed-python`: each key's running total in Bytewax's state, one output a record. Mode `no-recovery` keeps
state in memory only; mode `recovery` also writes what changed to Bytewax's recovery store as each of its
epochs closes. `--layout` is `processes` (two processes of one worker, joined by Bytewax's exchange), `threads`
(two workers in one process) or `single` (one worker). `--operator` is `stateful_map`, what its guide teaches, or
`stateful_batch`, the operator below it, with fewer Python calls a record.

Every worker reads its part of each Parquet file and hands on records that carry their key already, which
spares Bytewax a step. The sink drops its input, and notes when each batch came and how many records it held.
Records a second leave out start-up and warm-up: they count from the end of the first epoch (one file's worth
of records over all workers) to the end of the last whole one.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import bytewax.operators as op
import pyarrow.parquet as pq
from bytewax.dataflow import Dataflow
from bytewax.inputs import DynamicSource, StatelessSourcePartition
from bytewax.operators import StatefulBatchLogic
from bytewax.outputs import DynamicSink, StatelessSinkPartition
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.testing import cluster_main

LAYOUTS = {"processes": (2, 1), "threads": (1, 2), "single": (1, 1)}
DURABLE = {
    "no-recovery": "nothing: state is in the workers' memory, output dropped",
    "recovery": "changed state, in a SQLite store on local disk as each Bytewax epoch closes; output dropped",
}


class EventsPart(StatelessSourcePartition):
    """One worker's share of every file, as batches of (key, record); Bytewax's keys must be strings."""

    def __init__(self, files: list[Path], batch: int, worker: int, workers: int) -> None:
        self.batches = self.read(files, batch, worker, workers)

    def read(self, files: list[Path], batch: int, worker: int, workers: int) -> Iterator[list[Any]]:
        for file in files:
            table = pq.read_table(file, use_threads=False)
            share = table.num_rows // workers
            table = table.slice(worker * share, share)
            for start in range(0, share, batch):
                part = table.slice(start, batch)
                columns = zip(*(part[name].to_pylist() for name in ("k", "ts", "v")), strict=True)
                yield [(str(k), {"k": k, "ts": ts, "v": v}) for k, ts, v in columns]

    def next_batch(self) -> list[Any]:
        batch = next(self.batches, None)
        if batch is None:
            raise StopIteration
        return batch


class Events(DynamicSource):
    def __init__(self, files: list[Path], batch: int) -> None:
        self.files = files
        self.batch = batch

    def build(self, step_id: str, worker_index: int, worker_count: int) -> EventsPart:
        return EventsPart(self.files, self.batch, worker_index, worker_count)


class CountingPart(StatelessSinkPartition):
    def __init__(self, file: Path) -> None:
        self.file = file
        self.marks: list[tuple[float, int]] = []

    def write_batch(self, items: list[Any]) -> None:
        self.marks.append((time.time(), len(items)))

    def close(self) -> None:
        self.file.write_text(json.dumps(self.marks))


class Counting(DynamicSink):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def build(self, step_id: str, worker_index: int, worker_count: int) -> CountingPart:
        return CountingPart(self.folder / f"{worker_index}.json")


def balance(total: float | None, transfer: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    total = (total or 0.0) + transfer["v"]
    return total, {"account": transfer["k"], "balance": total}


class BalanceLogic(StatefulBatchLogic):
    def __init__(self, total: float | None) -> None:
        self.total = total or 0.0

    def on_batch(self, transfers: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
        out = []
        for transfer in transfers:
            self.total += transfer["v"]
            out.append({"account": transfer["k"], "balance": self.total})
        return out, False

    def snapshot(self) -> float:
        return self.total


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", required=True, choices=("keyed-python",))
    parser.add_argument("--mode", required=True, choices=tuple(DURABLE))
    parser.add_argument("--data", required=True, type=Path, help="folder of part-*.parquet")
    parser.add_argument("--files", type=int, help="use only the first so many files")
    parser.add_argument("--layout", choices=tuple(LAYOUTS), default="processes")
    parser.add_argument("--operator", choices=("stateful_map", "stateful_batch"), default="stateful_batch")
    parser.add_argument("--batch", type=int, default=2_000, help="records the source hands on at once")
    parser.add_argument("--epoch-interval-s", type=float, default=10.0)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--addresses", help=argparse.SUPPRESS)
    return parser.parse_args()


def event_files(chosen: argparse.Namespace) -> list[Path]:
    return sorted(chosen.data.glob("part-*.parquet"))[: chosen.files]


def dataflow(chosen: argparse.Namespace) -> Dataflow:
    flow = Dataflow("holdfast_bench")
    events = op.input("events", flow, Events(event_files(chosen), chosen.batch))
    if chosen.operator == "stateful_map":
        balances = op.stateful_map("balance", events, balance)
    else:
        balances = op.stateful_batch("balance", events, BalanceLogic)
    op.output("drop", balances, Counting(chosen.scratch / "marks"))
    return flow


def run_process(chosen: argparse.Namespace) -> None:
    """One process of the layout; it returns when the whole cluster has read everything."""
    recovery = RecoveryConfig(str(chosen.scratch / "recovery")) if chosen.mode == "recovery" else None
    cluster_main(
        dataflow(chosen),
        chosen.addresses.split(",") if chosen.addresses else [],
        chosen.process,
        epoch_interval=timedelta(seconds=chosen.epoch_interval_s),
        recovery_config=recovery,
        worker_count_per_proc=LAYOUTS[chosen.layout][1],
    )


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


def run_layout(chosen: argparse.Namespace, scratch: Path) -> float:
    """Start the processes and wait for them; returns when they were started."""
    processes, workers = LAYOUTS[chosen.layout]
    (scratch / "marks").mkdir()
    if chosen.mode == "recovery":
        (scratch / "recovery").mkdir()
        init_db_dir(scratch / "recovery", processes * workers)
    addresses = ",".join(free_address() for _ in range(processes)) if processes > 1 else ""
    started = time.time()
    command = [sys.executable, *sys.argv, "--scratch", str(scratch), "--addresses", addresses, "--process"]
    # Bytewax prints its attempts to connect; this script's own output is one line of JSON.
    running = [subprocess.Popen([*command, str(index)], stdout=sys.stderr) for index in range(processes)]
    if any(process.wait() for process in running):
        raise SystemExit("a Bytewax process failed; its error is above")
    return started


def epochs_of(marks: Path, records: int, started: float) -> list[float]:
    """Seconds of each whole epoch of `records` over all workers; the first holds start-up and warm-up."""
    times = sorted(tuple(mark) for file in marks.iterdir() for mark in json.loads(file.read_text()))
    ends, seen = [started], 0
    for at, count in times:
        seen += count
        ends += [at] * (seen // records - len(ends) + 1)
    return [round(end - start, 3) for start, end in pairwise(ends)]


def report(chosen: argparse.Namespace, records: int, epochs: list[float]) -> dict[str, Any]:
    if len(epochs) < 2:
        raise SystemExit("at least two files are needed: the first is warm-up")
    return {
        "peer": "bytewax",
        "case": chosen.case,
        "mode": chosen.mode,
        "records_per_s": round((len(epochs) - 1) * records / sum(epochs[1:])),
        "records": len(epochs) * records,
        "epochs": epochs,
        "durable": DURABLE[chosen.mode],
        "settings": {
            "layout": chosen.layout,
            "operator": chosen.operator,
            "source_batch": chosen.batch,
            "epoch_interval_s": chosen.epoch_interval_s,
            "records_an_epoch": records,
        },
        "version": version("bytewax"),
    }


def main() -> None:
    chosen = arguments()
    if chosen.process is not None:
        run_process(chosen)
        return
    records = pq.read_metadata(event_files(chosen)[0]).num_rows
    with tempfile.TemporaryDirectory(prefix="bytewax-") as folder:
        scratch = Path(folder)
        started = run_layout(chosen, scratch)
        epochs = epochs_of(scratch / "marks", records, started)
    print(json.dumps(report(chosen, records, epochs)))


if __name__ == "__main__":
    main()
