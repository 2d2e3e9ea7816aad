"""Plain lines and JSON lines, and readers that go away."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.cli.logs import line
from holdfast.cli.noise import SparkNoise
from holdfast.cli.reporting import JsonLines, PlainLines, Reporter, reporter_for
from holdfast.errors import IncompatibleError
from holdfast.metrics import EpochFacts, Status, Watermark


def status(epoch: int, state: str = "running", message: str = "") -> Status:
    made = Status(
        "orders", "/data/orders", 3, 42, "here", state, epoch=epoch, records=epoch * 100, message=message
    )
    made.records_per_s = 200.0
    return made


def facts(epoch: int, bad: int = 0) -> EpochFacts:
    bad_records = {"in": bad} if bad else {}
    return EpochFacts(
        epoch, epoch * 500, 100, {"out": 100}, bad_records, 5, 1.0, 80.0, 2.0, 3.0, 7, 2048, 1, 0
    )


def test_json_lines_are_an_epoch_each_and_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = JsonLines()
    reporter.hear(status(0, "starting", "starting Spark"), None)
    reporter.hear(status(1), facts(1))
    reporter.hear(status(1, "stopped"), None)
    reporter.end(None)
    epoch, end = map(json.loads, capsys.readouterr().out.splitlines())
    assert epoch["event"] == "epoch" and epoch["epoch"] == 1 and epoch["records_out"] == {"out": 100}
    assert epoch["latency_ms"] == 86.0 and epoch["status"]["generation"] == 3
    assert end["event"] == "end" and end["state"] == "stopped" and end["exit_code"] == 0
    assert end["error"] is None and end["epochs"] == 1 and end["status"]["epoch"] == 1


def test_the_end_carries_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = JsonLines()
    reporter.end(IncompatibleError("It is another's.", remedy="Take another."))
    end = json.loads(capsys.readouterr().out)
    assert end["exit_code"] == 4 and end["state"] == "failed" and end["status"] is None
    assert end["error"]["type"] == "IncompatibleError" and end["error"]["remedy"] == "Take another."


def test_an_error_nobody_foresaw_has_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    JsonLines().end(ValueError("odd"))
    end = json.loads(capsys.readouterr().out)
    assert end["exit_code"] == 1 and end["error"] == {"type": "ValueError", "message": "odd"}


def test_plain_lines_come_at_most_twice_a_second_and_lose_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    reporter = PlainLines(lambda: now[0])
    reporter.hear(status(0, "starting", "starting Spark"), None)
    reporter.hear(status(0, "starting", "starting Spark"), None)
    for epoch in range(1, 8):
        reporter.hear(status(epoch), facts(epoch, bad=epoch == 6))
        now[0] += 0.125
    reporter.hear(status(7, "stopped"), None)
    reporter.end(None)
    lines = [text.split("  ", 1)[1] for text in capsys.readouterr().out.splitlines()]
    assert lines[0] == "starting Spark"
    assert [text.split("  ")[0] for text in lines[1:-1]] == ["epoch 1", "epochs 2-5", "epochs 6-7"]
    assert "400 records" in lines[2] and "86 ms" in lines[2] and "state 7 keys 2.0 KB" in lines[2]
    assert lines[3].endswith("1 bad records")
    assert lines[-1] == "stopped after epoch 7: 700 records in 7 epochs, 0:00. Directory: /data/orders"


def test_plain_lines_tell_of_event_time_and_of_records_that_are_in_no_result_because_of_theirs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def mark(lag_ms: int | None, *, ended: bool = False) -> Watermark:
        return Watermark(
            ms=None if lag_ms is None else 1_714_564_870_000 - lag_ms,
            lag_ms=lag_ms,
            split="" if ended else "orders/3",
            still_ms=0,
            ended=ended,
        )

    counts = {"late_records": {"w": 2, "x": 1}, "untimed_records": {"t": 4}, "unseen_records": {"w": 5}}
    reporter = PlainLines(iter(range(100)).__next__)
    told = [{"a": mark(7_000), "b": mark(65_000), "c": mark(None, ended=True)}, {"a": mark(None)}, {}]
    for epoch, watermarks in enumerate(told, start=1):
        one = msgspec.structs.replace(facts(epoch), watermarks=watermarks, **(counts if epoch == 1 else {}))
        reporter.hear(msgspec.structs.replace(status(epoch), **counts), one)
    reporter.end(None)
    lines = capsys.readouterr().out.splitlines()
    told = "  event time 2024-05-01 12:00:05Z, 1:05 behind (b: orders/3)  3 late records  4 untimed records  5 unseen records"
    assert lines[0].endswith(told)
    assert lines[1].endswith("  event time not known yet (a: orders/3)")
    assert lines[2].endswith("2.0 KB")
    assert ", 3 late records, 4 untimed records, 5 unseen records. Directory" in lines[3]


def test_a_failed_run_says_so_in_its_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = PlainLines()
    reporter.hear(status(0, "failed"), None)
    reporter.end(ValueError("x"))
    assert "failed before the first epoch" in capsys.readouterr().out


def test_without_a_terminal_lines_are_plain() -> None:
    assert type(reporter_for(json=False)) is PlainLines
    assert type(reporter_for(json=True)) is JsonLines
    assert JsonLines.owns_output and not PlainLines.owns_output and Reporter.owns_output


CHATTER = """
import sys
from holdfast.cli.reporting import {kind}
from tests.unit.cli.test_reporting import facts, status
reporter = {kind}()
for epoch in range(1, 20_000):
    reporter.hear(status(epoch), facts(epoch))
reporter.end(None)
print("alive", file=sys.stderr)
"""


@pytest.mark.parametrize("kind", ["JsonLines", "PlainLines"])
def test_a_reader_that_has_gone_does_not_end_the_run(kind: str) -> None:
    code = CHATTER.format(kind=kind).replace(
        "reporter = PlainLines()", "reporter = PlainLines(iter(range(10**9)).__next__)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process: Any = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == "alive\n"
    assert process.wait(60) == 0


def test_a_log_record_is_one_line_of_keys_and_values() -> None:
    record = logging.LogRecord("holdfast.doors", logging.WARNING, "", 0, 'no "pinning":\n%s', ("why",), None)
    record.created, record.msecs = 0.0, 7.0
    text = line(record)
    assert text == (
        "at=1970-01-01T00:00:00.007Z level=warning logger=holdfast.doors "
        r'message="no \"pinning\":\nwhy"'
    )


def test_what_children_print_goes_to_the_directorys_log_and_what_we_print_does_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    noise = SparkNoise(tmp_path / "new")
    noise.begin()
    subprocess.run(["sh", "-c", "echo a child >&2"], check=True)
    print("ourselves", file=sys.stderr)
    noise.end(show=False)
    noise.end(show=True)
    subprocess.run(["sh", "-c", "echo a later child >&2"], check=True)
    assert capfd.readouterr().err == "ourselves\na later child\n"
    assert (tmp_path / "new" / "spark.log").read_text() == "a child\n"


def test_what_explains_a_failed_start_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "spark.log").write_text("an earlier run\n")
    noise = SparkNoise(tmp_path)
    noise.begin()
    subprocess.run(["sh", "-c", "echo no java here >&2"], check=True)
    noise.end(show=True)
    assert capfd.readouterr().err == "no java here\n"
