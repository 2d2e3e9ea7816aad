"""PyFlink's side of the benchmark; a script for its own virtual environment, free of bench imports.

Case `keyed-python`: a `KeyedProcessFunction` with a ValueState of each key's running total, one output a record,
at parallelism 2, in both of PyFlink's execution modes, `thread` (Python inside the task manager) and `process`
(a Python process beside it). `--cluster` says where the job runs: `mini` is PyFlink's default, all in one JVM;
`standalone` is one job manager and two task managers of one slot each, so that in thread mode the two
subtasks don't share one interpreter lock.

The source is Flink's own CSV reader, wholly in Java, over a copy of the benchmark's records made before the
clock starts: Parquet needs jars that PyFlink's package lacks. The reader takes in many times what the Python behind
it does, so it is not what is measured; `--source-only` shows that. The sink drops its input in Java. PyFlink's
`key_by` is a Python call of its own before the exchange; its API has no other way.

Records a second leave out start-up and warm-up: they count from the end of the first epoch (one file's worth of
records over both subtasks) to the end of the last whole one. Each subtask notes the time now and then; that
costs an addition and a comparison a record, where a record takes some fifty microseconds.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pyflink
from pyflink.common import Configuration, Row, Types
from pyflink.datastream import KeyedProcessFunction, RuntimeContext, StreamExecutionEnvironment
from pyflink.datastream.connectors.base import Sink
from pyflink.datastream.state import ValueStateDescriptor
from pyflink.java_gateway import get_gateway
from pyflink.table import StreamTableEnvironment
from pyflink.version import __version__

HOME = Path(pyflink.__file__).parent
PARALLELISM = 2
MARKS_AN_EPOCH = 20


class Balance(KeyedProcessFunction):
    """The benchmark's user function; it also notes how far it is, in a file of its own."""

    def __init__(self, marks: str, mark: int) -> None:
        self.marks = marks
        self.mark = mark

    def open(self, runtime_context: RuntimeContext) -> None:
        self.total = runtime_context.get_state(ValueStateDescriptor("total", Types.DOUBLE()))
        self.seen = 0
        # Not the subtask's index: in thread mode asking for it fails in PyFlink 2.3.
        self.file = os.path.join(self.marks, uuid.uuid4().hex)

    def process_element(self, value: Row, ctx: KeyedProcessFunction.Context) -> Iterator[Row]:
        total = (self.total.value() or 0.0) + value[2]
        self.total.update(total)
        yield Row(value[0], total)
        self.seen += 1
        if self.seen % self.mark == 0:
            with open(self.file, "a") as file:
                print(time.time(), file=file)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", required=True, choices=("keyed-python",))
    parser.add_argument("--mode", required=True, choices=("thread", "process"))
    parser.add_argument("--data", required=True, type=Path, help="folder of part-*.parquet")
    parser.add_argument("--files", type=int, help="use only the first so many files")
    parser.add_argument("--cluster", choices=("mini", "standalone"), default="standalone")
    parser.add_argument("--bundle", type=int, default=100_000, help="records sent to Python at once")
    parser.add_argument(
        "--cache", type=int, default=1_000_000, help="keys of state kept in Python, process mode"
    )
    parser.add_argument("--source-only", action="store_true", help="from source to sink, without Python")
    parser.add_argument("--conf", action="append", default=[], help="a further Flink setting, name=value")
    return parser.parse_args()


def settings_for(chosen: argparse.Namespace) -> dict[str, str]:
    return {
        "python.execution-mode": chosen.mode,
        "python.executable": sys.executable,
        "python.client.executable": sys.executable,
        "python.fn-execution.bundle.size": str(chosen.bundle),
        "python.fn-execution.bundle.time": "1000",
        "python.state.cache.size": str(chosen.cache),
        "python.metric.enabled": "false",
        "pipeline.object-reuse": "true",
        "parallelism.default": str(PARALLELISM),
        "execution.runtime-mode": "STREAMING",
        "state.backend.type": "hashmap",
        **dict(setting.split("=", 1) for setting in chosen.conf),
    }


@contextmanager
def standalone_cluster(scratch: Path) -> Iterator[int]:
    """One job manager and two task managers of one slot, ended with the job; yields the port to send it to."""
    shutil.copytree(HOME / "conf", scratch / "conf")
    port = free_port()
    settings = {
        "jobmanager.rpc.port": free_port(),
        "rest.port": port,
        "rest.bind-port": port,
        "taskmanager.memory.process.size": "4g",
        "taskmanager.numberOfTaskSlots": 1,
        "io.tmp.dirs": scratch,
    }
    dynamic = [f"-D{name}={value}" for name, value in settings.items()]
    env = {**os.environ, "FLINK_CONF_DIR": str(scratch / "conf"), "FLINK_LOG_DIR": str(scratch)}
    job_manager = [
        "bash",
        str(HOME / "bin/jobmanager.sh"),
        "start-foreground",
        "localhost",
        str(port),
        *dynamic,
    ]
    task_manager = ["bash", str(HOME / "bin/taskmanager.sh"), "start-foreground", *dynamic]
    commands = [job_manager] + [task_manager] * PARALLELISM
    with open(scratch / "cluster.log", "w") as log:
        services = [subprocess.Popen(command, env=env, stdout=log, stderr=log) for command in commands]
    try:
        wait_for_task_managers(port)
        yield port
    finally:
        for service in services:
            service.terminate()
        for service in services:
            service.wait(30)


def wait_for_task_managers(port: int) -> None:
    deadline = time.time() + 60
    while time.time() < deadline:
        try:
            with urllib.request.urlopen(f"http://localhost:{port}/taskmanagers", timeout=5) as answer:
                if len(json.load(answer)["taskmanagers"]) == PARALLELISM:
                    return
        except OSError:
            pass
        time.sleep(0.2)
    raise SystemExit("Flink's job manager and two task managers were not up after 60 s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def copy_as_csv(chosen: argparse.Namespace, folder: Path) -> int:
    """Copy the files as CSV, `ts` as epoch milliseconds, which cost the reader least; returns a file's records."""
    folder.mkdir()
    files = sorted(chosen.data.glob("part-*.parquet"))[: chosen.files]
    for file in files:
        table = pq.read_table(file)
        table = table.set_column(1, "ts", table["ts"].cast(pa.int64()))
        pa_csv.write_csv(table, folder / f"{file.stem}.csv", pa_csv.WriteOptions(include_header=False))
    return int(pq.read_metadata(files[0]).num_rows)


def build(env: StreamExecutionEnvironment, source_only: bool, events_folder: Path, function: Balance) -> None:
    # The DataStream API's own CSV reader makes rows that PyFlink can't hand to Python; the Table API's does.
    tables = StreamTableEnvironment.create(env)
    tables.execute_sql(
        "CREATE TABLE events (k BIGINT, ts BIGINT, v DOUBLE) WITH "
        f"('connector' = 'filesystem', 'path' = '{events_folder}', 'format' = 'csv')"
    )
    events = tables.to_data_stream(tables.from_path("events"))
    drop = Sink(get_gateway().jvm.org.apache.flink.streaming.api.functions.sink.v2.DiscardingSink())
    if not source_only:
        result_type = Types.ROW_NAMED(["account", "balance"], [Types.LONG(), Types.DOUBLE()])
        keyed = events.key_by(lambda event: event[0], key_type=Types.LONG())
        events = keyed.process(function, output_type=result_type)
    events.sink_to(drop)


def epochs_of(marks: Path, started: float) -> list[float]:
    """Seconds of each whole epoch over both subtasks; the first one holds start-up and warm-up."""
    times = sorted(float(line) for file in marks.iterdir() for line in file.read_text().split())
    ends = [started, *times[MARKS_AN_EPOCH - 1 :: MARKS_AN_EPOCH]]
    return [round(end - start, 3) for start, end in pairwise(ends)]


def report(
    chosen: argparse.Namespace, settings: dict[str, str], records: int, epochs: list[float]
) -> dict[str, Any]:
    if len(epochs) < 2:
        raise SystemExit(
            "at least three files are needed: the first is warm-up, the last may not be counted whole"
        )
    return {
        "peer": "pyflink",
        "case": chosen.case,
        "mode": chosen.mode,
        "records_per_s": round((len(epochs) - 1) * records / sum(epochs[1:])),
        "records": len(epochs) * records,
        "epochs": epochs,
        "durable": "nothing: checkpointing is off, state is in the task managers' heap, output dropped",
        "settings": {**settings, "cluster": chosen.cluster, "records_an_epoch": records},
        "version": __version__,
    }


def environment(settings: dict[str, str], port: int | None) -> StreamExecutionEnvironment:
    """The environment that runs a job here, or, given a port, on the cluster behind it."""
    configuration = Configuration()
    for name, value in settings.items():
        configuration.set_string(name, value)
    if port is None:
        return StreamExecutionEnvironment.get_execution_environment(configuration)
    gateway = get_gateway()
    jars = gateway.new_array(gateway.jvm.String, 1)
    jars[0] = str(next((HOME / "opt").glob("flink-python-*.jar")))
    java = gateway.jvm.org.apache.flink.streaming.api.environment.StreamExecutionEnvironment
    return StreamExecutionEnvironment(
        java.createRemoteEnvironment("localhost", port, configuration._j_configuration, jars)
    )


def main() -> None:
    chosen = arguments()
    settings = settings_for(chosen)
    # The interpreter embedded in a JVM knows nothing of the virtual environment this script runs in.
    os.environ["PYTHONPATH"] = str(HOME.parent)
    with tempfile.TemporaryDirectory(prefix="pyflink-") as folder:
        scratch, marks = Path(folder), Path(folder, "marks")
        marks.mkdir()
        mark = max(1, copy_as_csv(chosen, scratch / "events") // MARKS_AN_EPOCH)
        cluster = standalone_cluster(scratch) if chosen.cluster == "standalone" else nullcontext()
        with cluster as port:
            env = environment(settings, port)
            build(env, chosen.source_only, scratch / "events", Balance(str(marks), mark))
            started = time.time()
            print("# job starts", file=sys.stderr, flush=True)
            env.execute("holdfast-bench-pyflink")
            print(f"# job took {time.time() - started:.1f} s", file=sys.stderr, flush=True)
        if chosen.source_only:
            return
        epochs = epochs_of(marks, started)
    print(json.dumps(report(chosen, settings, mark * MARKS_AN_EPOCH, epochs)))


if __name__ == "__main__":
    main()
