"""The command line as people meet it: processes, signals, exit codes, started again."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.log.journal import Journal

WAIT_S = 120

BESIDE = "def doubled(record):\n    return {**record, 'twice': 2 * record['n']}\n"
APP = """
import holdfast as hf
from beside import doubled


class Count(hf.KeyedProcess):
    seen = hf.ValueState(int, default=0)

    def process(self, key, record, ctx):
        self.seen.value += 1
        if record["n"] == 13 and record["word"] == "bad luck":
            raise ValueError("thirteen")
        yield {"word": key, "seen": self.seen.value, "twice": record["twice"]}


def made(name, source):
    pipeline = hf.Pipeline(name)
    stream = pipeline.read("numbers", source).map(doubled)
    stream.key_by("word").process("count", Count()).write("out", hf.jsonl(f"out/{name}"))
    return pipeline


WORDS = ["a", "b", "c"]
rows = [{"n": n, "word": WORDS[n % 3]} for n in range(100)]
drained = made("drained", hf.records(rows, per_epoch=30))
other = made("other", hf.records(rows))
unlucky = made("unlucky", hf.records([{"n": n, "word": "bad luck"} for n in range(20)]))


def with_words(table):
    words = [WORDS[k % 3] for k in table["key"].to_pylist()]
    return table.select(["id"]).rename_columns(["n"]).append_column("word", [words])


endless = made("endless", hf.rate(200, make=with_words))
twice = made("twice", hf.rate(200, make=with_words))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cli")
    (made / "jobs").mkdir()
    (made / "jobs" / "app.py").write_text(APP)
    (made / "jobs" / "beside.py").write_text(BESIDE)
    return made


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "holdfast.cli", *arguments]


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HOLDFAST_", "PYSPARK_", "SPARK_"))}
    return {**kept, "PYTHONUNBUFFERED": "1"}


def holdfast(folder: Path, *arguments: str, timeout_s: float = WAIT_S) -> subprocess.CompletedProcess[str]:
    """A command, run to its end."""
    return subprocess.run(
        command(*arguments),
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def run(folder: Path, pipeline: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return holdfast(folder, "run", f"jobs/app.py:{pipeline}", *MASTER, *arguments)


MASTER = ("--master", "local[2]", "--parallelism", "2")


@contextmanager
def running(folder: Path, pipeline: str, *arguments: str) -> Iterator[Any]:
    """A run in the background; ended whatever the test does."""
    full = command("run", f"jobs/app.py:{pipeline}", *MASTER, "--json", *arguments)
    with subprocess.Popen(
        full, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_drained_run_tells_each_epoch_and_its_end(folder: Path) -> None:
    done = run(folder, "drained", "--drain", "--json")
    assert done.returncode == 0, done.stderr
    *epochs, end = lines_of(done.stdout)
    assert [e["epoch"] for e in epochs] == [1, 2, 3, 4]
    assert [e["records_in"] for e in epochs] == [30, 30, 30, 10]
    assert epochs[-1]["records_out"] == {"out": 10} and epochs[-1]["state_keys"] == 3
    assert end["event"] == "end" and end["exit_code"] == 0 and end["status"]["records"] == 100
    rows = [r for f in sorted((folder / "out/drained").glob("*.jsonl")) for r in lines_of(f.read_text())]
    assert (
        len(rows) == 100
        and max(r["seen"] for r in rows) == 34
        and {r["twice"] for r in rows} == set(range(0, 200, 2))
    )

    status = json.loads(holdfast(folder, "status", ".holdfast/drained", "--json").stdout)
    assert status["state"] == "stopped" and status["epoch"] == 4 and status["generation"] == 1
    shown = holdfast(folder, "state", ".holdfast/drained", "--operator", "count", "--key", "a")
    assert shown.returncode == 0 and shown.stdout.splitlines()[1:3] == ["word  value", "a        34"]
    plan = holdfast(folder, "plan", "jobs/app.py:drained", "--svg", "plan.svg")
    assert plan.returncode == 0 and "══ by word ══▶ stage 1 (count)" in plan.stdout
    assert (folder / "plan.svg").read_text().startswith("<svg")

    refused = run(folder, "other", "--drain", "--json", "--dir", ".holdfast/drained")
    assert refused.returncode == 4
    assert "it belongs to the pipeline 'drained', this is 'other'" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert lines_of(refused.stdout)[-1]["error"]["type"] == "IncompatibleError"


def test_an_error_in_user_code_names_uid_record_and_line_and_ends_with_7(folder: Path) -> None:
    done = run(folder, "unlucky", "--drain")
    assert done.returncode == 7
    assert "[count]" in done.stderr and "ValueError: thirteen" in done.stderr
    assert 'raise ValueError("thirteen")' in done.stderr and "jobs/app.py" in done.stderr
    assert "java" not in done.stderr and "pyspark" not in done.stderr
    assert "failed before the first epoch" in done.stdout


def test_sigterm_finishes_the_epoch_and_the_next_run_goes_on(folder: Path) -> None:
    with running(folder, "endless", "--interval", "200ms") as process:
        seen = [json.loads(process.stdout.readline()) for _ in range(2)]
        status = json.loads(holdfast(folder, "status", ".holdfast/endless", "--json").stdout)
        assert status["state"] == "running" and status["process"] == "alive" and status["pid"] == process.pid
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, err
    *epochs, end = seen + lines_of(out)
    assert end["event"] == "end" and end["state"] == "stopped"
    last = epochs[-1]["epoch"]
    assert [e["epoch"] for e in epochs] == list(range(1, last + 1)) and end["status"]["epoch"] == last

    with running(folder, "endless", "--interval", "200ms") as process:
        again = json.loads(process.stdout.readline())
        assert again["epoch"] == last + 1 and again["status"]["generation"] == 2
        process.stdout.close()
        stopped = holdfast(folder, "stop", ".holdfast/endless")
        assert stopped.returncode == 0 and "endless stopped after epoch" in stopped.stdout
        assert process.wait(WAIT_S) == 0, process.stderr.read()
    assert "Nothing is running" in holdfast(folder, "stop", ".holdfast/endless").stdout
    second = json.loads(holdfast(folder, "status", ".holdfast/endless", "--json").stdout)
    records = end["status"]["records"] + second["records"]
    rows = [r for f in (folder / "out/endless").glob("*.jsonl") for r in lines_of(f.read_text())]
    assert sorted(r["twice"] for r in rows) == list(range(0, 2 * records, 2))


@pytest.mark.slow
def test_a_second_run_is_refused_with_the_first_ones_process_and_take_over_ends_the_first(
    folder: Path,
) -> None:
    with running(folder, "twice", "--interval", "500ms") as first:
        seen = [json.loads(first.stdout.readline())]
        refused = run(folder, "twice", "--json")
        assert refused.returncode == 4
        assert (
            f"run already: by process {first.pid} on " in refused.stderr and "--take-over" in refused.stderr
        )
        assert lines_of(refused.stdout)[-1]["error"]["type"] == "InUseError"
        assert first.poll() is None, "the first goes on"

        second = run(folder, "twice", "--interval", "200ms", "--json", "--take-over", "--epochs", "3")
        assert second.returncode == 0, second.stderr
        out, err = first.communicate(timeout=WAIT_S)
        assert first.returncode == 5, err
        assert "has taken this pipeline over" in err or "by another driver" in err
    *epochs, end = seen + lines_of(out)
    assert end["error"]["type"] == "FencedError"
    *more, _ = lines_of(second.stdout)
    assert [e["epoch"] for e in more] == list(range(more[0]["epoch"], more[0]["epoch"] + 3))
    assert more[0]["epoch"] > epochs[-1]["epoch"] and more[0]["status"]["generation"] == 2
    journal = Journal.at(folder / ".holdfast/twice")
    last = journal.plan(journal.last_epoch())
    assert last is not None
    rows = [r for f in (folder / "out/twice").glob("*.jsonl") for r in lines_of(f.read_text())]
    assert sorted(r["twice"] for r in rows) == list(range(0, 2 * last.positions["numbers"]["next"], 2))


def test_doctor_starts_spark_and_finds_it_well(folder: Path) -> None:
    done = holdfast(folder, "doctor", "--json")
    assert done.returncode == 0, done.stdout
    checks = {c["name"]: c for c in json.loads(done.stdout)["checks"]}
    assert checks["shards"]["found"] == "pinned"
    assert checks["versions"]["status"] == "ok" and checks["Java"]["status"] == "ok"
    assert not (folder / ".holdfast/.doctor").exists()


def test_doctor_fails_at_once_where_nobody_answers(folder: Path) -> None:
    done = holdfast(folder, "doctor", "--master", "spark://127.0.0.1:1")
    assert done.returncode == 3
    assert "nobody answers at 127.0.0.1:1" in done.stdout and "Traceback" not in done.stderr


def test_the_demo_comes_back_from_both_faults_and_loses_nothing(folder: Path) -> None:
    done = holdfast(folder, "demo", "--seconds", "4", "--json", timeout_s=3 * WAIT_S)
    assert done.returncode == 0, done.stderr
    *lines, end, summary = lines_of(done.stdout)
    assert end["event"] == "end" and summary["event"] == "summary"
    assert [f["fault"] for f in summary["faults"]] == ["executor-kill", "driver-kill"]
    assert all(f["held"] and 0 < f["recovery_s"] < f["deadline_s"] for f in summary["faults"])
    assert (summary["lost"], summary["doubled"], summary["different_states"]) == (0, 0, 0)
    assert summary["records"] > 0 and summary["tiles"] > 0, "how many is up to the machine"
    told = [x["event"] for x in lines if x["event"] not in ("epoch", "said")]
    assert told == ["fault", "recovered", "fault", "recovered"]
    look = holdfast(folder, *summary["look"].split()[1:])
    assert look.returncode == 0 and "tiles.reports after epoch" in look.stdout
    assert not [p for p in psutil.process_iter() if str(folder) in " ".join(_words(p))]


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


@pytest.mark.slow
def test_the_calm_demo_runs_and_sums_up(folder: Path) -> None:
    done = holdfast(folder, "demo", "--no-faults", "--seconds", "3", "--json")
    assert done.returncode == 0, done.stderr
    *_, end, summary = lines_of(done.stdout)
    assert end["event"] == "end" and summary["event"] == "summary"
    assert summary["records"] > 0 and summary["tiles"] > 0, "how many is up to the machine"
    look = holdfast(folder, *summary["look"].split()[1:])
    assert look.returncode == 0 and "tiles.reports after epoch" in look.stdout
