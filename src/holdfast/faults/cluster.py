"""A real standalone Spark cluster of processes on loopback addresses, to run on and to hurt.

Each worker is a host of its own: an address (127.0.0.1, 127.0.0.2, …), a work folder and a state root that
no other has. Used by tests, and by whoever wants a cluster on one machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from holdfast.engine import archive
from holdfast.errors import SessionError
from holdfast.supervise.processes import belonging, kill_everything

START_TIMEOUT_S = 60.0


class Cluster:
    """A master and workers, started on entry and killed on exit.

    >>> with Cluster(folder, workers=2) as cluster:  # doctest: +SKIP
    ...     pipeline.run(master=cluster.url)
    """

    def __init__(self, folder: Path, *, workers: int = 2, cores: int = 1, memory: str = "1g") -> None:
        self.folder = folder.absolute()
        self.url = ""
        self._cores, self._memory, self._count = cores, memory, workers
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        port, ui = _free_port(), _free_port()
        self.url = f"spark://127.0.0.1:{port}"
        self._spawn(
            "master",
            "org.apache.spark.deploy.master.Master",
            ["--host", "127.0.0.1", "--port", str(port), "--webui-port", str(ui)],
            {
                "SPARK_LOCAL_IP": "127.0.0.1",
                # An application whose executors are killed again and again is not to be given up.
                "SPARK_MASTER_OPTS": "-Dspark.deploy.maxExecutorRetries=-1 -Dspark.worker.timeout=15",
            },
        )
        try:
            _wait_for_port(port, self._processes["master"])
            for number in range(self._count):
                self.start_worker(number)
            self._wait_for_workers()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(list(self._processes.values())):
            kill_everything(process)
        self._processes = {}

    @property
    def hosts(self) -> range:
        """The numbers of the workers."""
        return range(self._count)

    def host(self, number: int) -> str:
        """The address of a worker."""
        return f"127.0.0.{number + 1}"

    def state_root(self, number: int) -> Path:
        """Where executors on a worker keep state."""
        return self.folder / f"host{number}" / "state"

    def processes(self, number: int) -> list[psutil.Process]:
        """Everything that lives on a host: its worker, executors, Python daemons and workers."""
        process = self._processes.get(f"worker{number}")
        return [] if process is None else belonging(process.pid)

    def lose_host(self, number: int) -> None:
        """Kill everything on a host, and delete what it had: shuffle files, logs, state."""
        process = self._processes.pop(f"worker{number}", None)
        if process is not None:
            kill_everything(process)
        shutil.rmtree(self.folder / f"host{number}", ignore_errors=True)

    def start_worker(self, number: int) -> None:
        """Start a worker, or start it again."""
        home = self.folder / f"host{number}"
        self.state_root(number).mkdir(parents=True, exist_ok=True)
        arguments = ["--host", self.host(number), "--cores", str(self._cores), "--memory", self._memory]
        arguments += ["--work-dir", str(home / "work"), "--webui-port", str(_free_port()), self.url]
        environment = {
            "SPARK_LOCAL_IP": self.host(number),
            "SPARK_LOCAL_DIRS": str(home / "local"),
            "HOLDFAST_STATE_ROOT": str(self.state_root(number)),
        }
        self._spawn(f"worker{number}", "org.apache.spark.deploy.worker.Worker", arguments, environment)

    def log(self, name: str) -> str:
        """What a process has written so far."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def executor_logs(self) -> list[Path]:
        """What executors have written, of every application that ran here and every host that is left."""
        homes = (self.folder / f"host{number}" / "work" for number in self.hosts)
        return [log for home in homes for log in home.glob("app-*/*/stderr")]

    def _spawn(self, name: str, main: str, arguments: list[str], environment: dict[str, str]) -> None:
        import pyspark

        home = os.environ.get("SPARK_HOME") or os.path.dirname(pyspark.__file__)
        ours = archive.options() if archive.wanted() else []
        java = {
            "SPARK_DAEMON_JAVA_OPTS": archive.appended(os.environ.get("SPARK_DAEMON_JAVA_OPTS", ""), ours)
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f"{name}.log", "ab") as log:
            self._processes[name] = subprocess.Popen(
                [os.path.join(home, "bin", "spark-class"), main, *arguments],
                env={
                    **os.environ,
                    "SPARK_HOME": home,
                    "PYSPARK_PYTHON": sys.executable,
                    **java,
                    **environment,
                },
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _wait_for_workers(self) -> None:
        until = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until:
            if self.log("master").count("Registering worker") >= self._count:
                return
            time.sleep(0.1)
        raise SessionError(f"The cluster's workers did not come up; see {self.folder}/*.log.")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise SessionError(f"The cluster's master ended with {process.returncode}.")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise SessionError(f"The cluster's master does not listen on port {port}.")
