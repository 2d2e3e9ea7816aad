"""The supervisor: what it decides, what it kills, and real children that die in every way it must survive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as some

from holdfast import errors
from holdfast.errors import ConfigError, EngineError
from holdfast.supervise import processes
from holdfast.supervise.heartbeat import EVERY_VARIABLE, FD_VARIABLE, beat_every_s, start_heartbeat
from holdfast.supervise.strategies import (
    FINAL,
    RATE_DELAY_S,
    USERS,
    End,
    Exponential,
    FailureRate,
    FixedDelay,
    GiveUp,
    NoRestart,
    Restart,
    Strategy,
    decide,
    parse_restart,
)
from holdfast.supervise.supervisor import (
    Event,
    GivingUp,
    Restarting,
    Supervisor,
    child_command,
    read_supervision,
)

# Decisions

FAILED = 10
seconds = some.floats(0, 1e6)
ends = some.builds(
    End,
    at_s=seconds,
    exit_code=some.sampled_from([-9, -15, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
    epoch=some.integers(0, 3),
    silent_s=some.sampled_from([0.0, 30.0]),
    healthy_s=some.sampled_from([0.0, 61.0]),
)
histories = some.lists(ends, min_size=1, max_size=20)
strategies: some.SearchStrategy[Strategy] = some.one_of(
    some.just(NoRestart()),
    some.builds(FixedDelay, seconds),
    some.just(Exponential()),
    some.builds(FailureRate, some.integers(1, 10), some.floats(1, 1e6)),
)


def failures(count: int, **facts: Any) -> list[End]:
    return [End(at_s=float(n), exit_code=FAILED, epoch=n, **facts) for n in range(count)]


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("none", NoRestart()),
        ("fixed 5s", FixedDelay(5.0)),
        ("exponential", Exponential(1.0, 60.0)),
        ("Exponential  500ms 2m", Exponential(0.5, 120.0)),
        ("rate 5 10m", FailureRate(5, 600.0)),
    ],
)
def test_a_setting_names_a_strategy(text: str, strategy: Strategy) -> None:
    assert parse_restart(text) == strategy


@pytest.mark.parametrize(
    "text",
    [
        "",
        "always",
        "fixed",
        "fixed 5",
        "fixed soon",
        "none 5s",
        "exponential 1s",
        "exponential 60s 1s",
        "exponential 0s 1s",
        "rate 5",
        "rate 0 10m",
        "rate 1001 10m",
        "rate five 10m",
        "rate 5 0s",
    ],
)
def test_a_setting_that_names_none_is_an_error_with_a_remedy(text: str) -> None:
    with pytest.raises(ConfigError, match="is no way to restart") as caught:
        parse_restart(text)
    assert 'fixed 5s"' in (caught.value.remedy or "")


@given(histories, strategies, seconds, some.sampled_from([0, *FINAL]))
def test_a_driver_that_is_done_or_unfit_is_never_restarted(
    history: list[End], strategy: Strategy, now: float, code: int
) -> None:
    assert isinstance(decide([*history, End(now, code)], strategy, now), GiveUp)


@given(histories, strategies, seconds, some.sampled_from(USERS), some.lists(ends, max_size=5))
def test_an_error_of_the_user_that_comes_back_at_its_epoch_ends_it_whatever_came_between(
    history: list[End], strategy: Strategy, now: float, code: int, between: list[End]
) -> None:
    error = End(now, code, epoch=2)
    assert isinstance(decide([*history, error, *between, error], strategy, now), GiveUp)


@given(some.sampled_from(USERS), some.integers(0, 9))
def test_an_error_of_the_user_is_restarted_the_first_time_at_each_epoch(code: int, epoch: int) -> None:
    history = [End(float(n), code, epoch=n) for n in range(epoch + 1)]
    assert decide(history, FixedDelay(1.0), now=99.0) == Restart(1.0)


@given(histories, strategies, seconds)
def test_a_delay_is_never_negative_nor_above_the_cap(
    history: list[End], strategy: Strategy, now: float
) -> None:
    decision = decide(history, strategy, now)
    if isinstance(decision, Restart):
        caps = {FixedDelay: getattr(strategy, "delay_s", 0), Exponential: 60.0, FailureRate: RATE_DELAY_S}
        assert 0 <= decision.after_s <= caps[type(strategy)]


@given(some.integers(1, 1000))
def test_the_back_off_doubles_up_to_its_cap(count: int) -> None:
    assert decide(failures(count), Exponential(1.0, 60.0), 0.0) == Restart(min(60.0, 2.0 ** (count - 1)))


@given(some.integers(0, 20), some.integers(0, 4))
def test_the_back_off_starts_anew_after_a_life_healthy_for_longer_than_its_cap(
    before: int, after: int
) -> None:
    history = [*failures(before), End(99.0, -9, epoch=99, healthy_s=60.5), *failures(after)]
    assert decide(history, Exponential(1.0, 60.0), 100.0) == Restart(2.0**after)


def test_a_life_that_was_healthy_for_less_does_not_start_the_back_off_anew() -> None:
    assert decide(failures(4, healthy_s=60.0), Exponential(1.0, 60.0), 4.0) == Restart(8.0)


@given(some.integers(1, 10), some.lists(some.floats(0, 100), min_size=1, max_size=20))
def test_the_failure_rate_gives_up_exactly_when_the_window_holds_more(most: int, ago: list[float]) -> None:
    history = [End(1000.0 - s, FAILED, epoch=n) for n, s in enumerate(sorted(ago, reverse=True))]
    recent = sum(1000.0 - end.at_s < 50.0 for end in history)
    decision = decide(history, FailureRate(most, 50.0), 1000.0)
    assert isinstance(decision, GiveUp) == (recent > most)


def test_without_a_strategy_one_failure_ends_it() -> None:
    assert decide(failures(1), NoRestart(), 0.0) == GiveUp('restart is "none"')


# Real children

# What every child of these tests can do, without importing holdfast: a child starts in a moment.
PRELUDE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

HERE = Path(sys.argv[1])
LIVES = HERE / "lives"
LIVES.open("a").write("x")
LIFE = len(LIVES.read_text())
PIPE = int(os.environ["HOLDFAST_HEARTBEAT_FD"])

def beat():
    os.write(PIPE, b".")

def tell(epoch, state="running", error=""):
    status = dict(pipeline="p", directory=str(HERE), generation=1, pid=os.getpid(), host="h", state=state,
                  epoch=epoch, error=error)
    (HERE / ".s").write_text(json.dumps(status))
    os.replace(HERE / ".s", HERE / "status.json")

def for_ever():
    while True:
        beat()
        time.sleep(0.05)
"""


class Supervised:
    """A child's script under a supervisor in this process, and all that was told of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.events: list[Event] = []

    def run(self, script: str, **settings: Any) -> int:
        settings = {"strategy": FixedDelay(0.0), "timeout_s": 20.0, **settings}
        command = [sys.executable, "-c", PRELUDE + textwrap.dedent(script), str(self.directory)]
        return Supervisor(command, self.directory, tell=self.events.append, **settings).run()

    @property
    def lives(self) -> int:
        return len((self.directory / "lives").read_text())

    @property
    def said(self) -> list[str]:
        return [str(event) for event in self.events]

    def read(self, name: str) -> str:
        return (self.directory / name).read_text()


@pytest.fixture
def supervised(tmp_path: Path) -> Supervised:
    return Supervised(tmp_path)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_child_that_is_done_has_one_life_and_nothing_is_said(supervised: Supervised) -> None:
    assert supervised.run("sys.exit(0)") == 0
    assert (supervised.lives, supervised.events) == (1, [])


@pytest.mark.parametrize("code", FINAL)
def test_a_code_that_no_restart_mends_is_passed_through(supervised: Supervised, code: int) -> None:
    assert supervised.run(f"sys.exit({code})") == code
    assert supervised.lives == 1
    assert f"exit code {code} before the first epoch; not restarted" in supervised.said[0]


def test_an_error_of_the_user_at_the_same_epoch_is_tried_twice_and_told(supervised: Supervised) -> None:
    code = supervised.run("tell(5, 'failed', '[count] it broke\\n  remedy: mend it'); sys.exit(7)")
    assert (code, supervised.lives) == (7, 2)
    assert supervised.said == [
        "supervisor: exit code 7 after epoch 5: [count] it broke; restart 1 in 0 s.",
        "supervisor: exit code 7 after epoch 5: [count] it broke; not restarted: "
        "the same error came back after epoch 5 (1 restart before).",
    ]


def test_a_replay_that_differs_and_a_full_heap_are_the_users_and_other_trouble_with_state_is_not() -> None:
    assert errors.DivergedError.exit_code in USERS
    assert errors.StateTypeError.exit_code in USERS, "a function has stored it, and will again"
    assert errors.MemoryLimitError.exit_code in USERS, "the same records fill the same heap"
    for other in (errors.StateError, errors.StateLostError, errors.CheckpointError):
        assert other.exit_code not in {*USERS, *FINAL}


def test_a_replay_that_differs_again_at_the_same_epoch_is_not_replayed_for_ever(
    supervised: Supervised,
) -> None:
    code = supervised.run(f"""
        if LIFE == 1:
            tell(5, 'running')
            os.kill(os.getpid(), signal.SIGKILL)
        tell(5, 'recovering', '[count] Shard 0 gave another result')
        sys.exit({errors.DivergedError.exit_code} if LIFE < 9 else 0)
    """)
    assert (code, supervised.lives) == (errors.DivergedError.exit_code, 3)
    assert supervised.said[-1].endswith("the same error came back after epoch 5 (2 restarts before).")


def test_an_error_that_an_earlier_life_left_in_the_status_is_not_told_again(supervised: Supervised) -> None:
    supervised.run(
        "if LIFE == 1: tell(5, 'failed', 'it broke'); sys.exit(10)\nsys.exit(0 if LIFE == 3 else 10)"
    )
    assert [event.end.error for event in supervised.events] == ["it broke", ""]


def test_a_child_that_was_killed_is_restarted_and_the_restarts_are_counted(supervised: Supervised) -> None:
    code = supervised.run(
        """
        if LIFE < 4:
            tell(LIFE)
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert (code, supervised.lives) == (0, 4)
    assert supervised.said == [
        f"supervisor: killed by SIGKILL after epoch {n}; restart {n} in 0 s." for n in (1, 2, 3)
    ]
    told = read_supervision(supervised.directory)
    assert told is not None
    assert (told.pid, told.restarts, told.child_pid) == (os.getpid(), 3, None)


def test_while_a_child_lives_the_directory_tells_its_pid(supervised: Supervised) -> None:
    supervised.run(
        """
        while True:
            told = json.loads((HERE / "supervisor.json").read_text()) if (HERE / "supervisor.json").exists() else {}
            if told.get("child_pid") == os.getpid():
                sys.exit(0)
            beat()
        """
    )
    assert supervised.events == []


def test_a_killed_child_that_is_not_restarted_gives_the_code_that_a_shell_would(
    supervised: Supervised,
) -> None:
    assert (
        supervised.run("os.kill(os.getpid(), signal.SIGKILL)", strategy=NoRestart()) == 128 + signal.SIGKILL
    )


def test_a_restart_as_a_json_line(supervised: Supervised) -> None:
    supervised.run("if LIFE == 1: tell(3); os.kill(os.getpid(), signal.SIGKILL)")
    assert supervised.events[0].facts() == {
        "event": "restart",
        "restart": 1,
        "after_s": 0.0,
        "exit_code": 137,
        "signal": "SIGKILL",
        "silent_s": None,
        "epoch": 3,
        "error": None,
    }


GRANDCHILD = """
        def grandchild(setup):
            code = f"import os, time; {setup}; print(os.getpid(), flush=True); time.sleep(600)"
            started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
            (HERE / "grandchild").write_text(started.stdout.readline().decode())
"""


@pytest.mark.parametrize("setup", ["os.setpgid(0, 0)", "os.setsid()"])
def test_a_child_that_stops_beating_is_killed_with_all_its_processes(
    supervised: Supervised, setup: str
) -> None:
    code = supervised.run(
        f"""
        {GRANDCHILD}
        if LIFE == 1:
            grandchild("{setup}")
            beat()
            os.kill(os.getpid(), signal.SIGSTOP)
        """,
        timeout_s=0.3,
    )
    assert (code, supervised.lives) == (0, 2)
    assert is_gone(int(supervised.read("grandchild")))
    event = supervised.events[0]
    assert isinstance(event, Restarting)
    assert event.end.silent and event.end.silent_s >= 0.3
    assert str(event).startswith("supervisor: silent for 0.")


def test_what_a_killed_child_leaves_behind_is_gone_before_the_next_life(supervised: Supervised) -> None:
    supervised.run(
        f"""
        {GRANDCHILD}
        if LIFE == 1:
            grandchild("os.setpgid(0, 0)")
            os.kill(os.getpid(), signal.SIGKILL)
        left = int((HERE / "grandchild").read_text())
        import psutil
        alive = psutil.pid_exists(left) and psutil.Process(left).status() != psutil.STATUS_ZOMBIE
        sys.exit(4 if alive else 0)
        """
    )
    assert supervised.lives == 2
    assert [type(event) for event in supervised.events] == [Restarting]


def test_a_child_that_never_beats_is_killed_after_the_time_it_has_to_start(supervised: Supervised) -> None:
    code = supervised.run("time.sleep(600)", timeout_s=0.1, start_timeout_s=0.5, strategy=NoRestart())
    assert code == 128 + signal.SIGKILL
    assert supervised.events[0].end.silent_s >= 0.5


def test_a_life_is_healthy_from_its_first_new_epoch_on(supervised: Supervised) -> None:
    supervised.run(
        """
        tell(7)
        if LIFE == 1:
            for epoch in (7, 8, 9):
                tell(epoch)
                for _ in range(4):
                    beat()
                    time.sleep(0.05)
        else:
            beat()
        sys.exit(10 if LIFE < 3 else 0)
        """
    )
    healthy = [event.end.healthy_s for event in supervised.events]
    assert healthy[0] > 0.0
    assert healthy[1] == 0.0


# A child asks its supervisor to stop when it is ready for it, so nobody has to guess when that is.
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_the_clean_end_awaited(supervised: Supervised, number: int) -> None:
    code = supervised.run(
        f"""
        def finish(number, frame):
            (HERE / "finished").write_text(signal.Signals(number).name)
            sys.exit(0)
        signal.signal(signal.SIGTERM, finish)
        os.kill(os.getppid(), {int(number)})
        for_ever()
        """
    )
    assert (code, supervised.lives, supervised.events) == (0, 1, [])
    assert supervised.read("finished") == "SIGTERM"


def test_a_second_signal_kills_everything(supervised: Supervised) -> None:
    code = supervised.run(
        f"""
        {GRANDCHILD}
        grandchild("os.setpgid(0, 0)")
        signal.signal(signal.SIGTERM, lambda number, frame: os.kill(os.getppid(), signal.SIGTERM))
        os.kill(os.getppid(), signal.SIGTERM)
        for_ever()
        """
    )
    assert (code, supervised.lives) == (128 + signal.SIGKILL, 1)
    assert is_gone(int(supervised.read("grandchild")))
    assert "it was asked to stop" in supervised.said[0]


def test_a_child_that_fails_while_it_stops_is_not_restarted(supervised: Supervised) -> None:
    code = supervised.run(
        """
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(9))
        os.kill(os.getppid(), signal.SIGTERM)
        for_ever()
        """
    )
    assert (code, supervised.lives) == (9, 1)


def test_a_signal_between_two_lives_ends_the_wait(tmp_path: Path) -> None:
    told: list[Event] = []

    def ask(event: Event) -> None:
        told.append(event)
        os.kill(os.getpid(), signal.SIGTERM)

    command = [sys.executable, "-c", "raise SystemExit(10)"]
    assert Supervisor(command, tmp_path, strategy=FixedDelay(600.0), tell=ask).run() == 10
    assert len(told) == 1


def test_signals_are_given_back(supervised: Supervised) -> None:
    before = signal.getsignal(signal.SIGTERM)
    supervised.run("sys.exit(0)")
    assert signal.getsignal(signal.SIGTERM) is before


def test_only_the_first_life_has_the_faults_and_the_command_of_the_first(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_CRASH_AT", "commit:7")
    monkeypatch.setenv("HOLDFAST_FREEZE_AT", "plan:7")
    script = PRELUDE + textwrap.dedent(
        """
        names = ("HOLDFAST_CRASH_AT", "HOLDFAST_FREEZE_AT", "HOLDFAST_TAKE_OVER")
        seen = [sys.argv[2], *(os.environ.get(name, "-") for name in names)]
        (HERE / "seen").open("a").write(" ".join(seen) + "\\n")
        sys.exit(10 if LIFE < 3 else 0)
        """
    )
    base = [sys.executable, "-c", script, str(supervised.directory)]
    Supervisor(
        [*base, "first"],
        supervised.directory,
        later=[*base, "later"],
        later_environment={"HOLDFAST_TAKE_OVER": "false"},
        strategy=FixedDelay(0.0),
    ).run()
    assert supervised.read("seen").splitlines() == [
        "first commit:7 plan:7 -",
        "later - - false",
        "later - - false",
    ]


def test_a_time_out_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="driver_timeout"):
        Supervisor(["true"], tmp_path, timeout_s=0.0)


def test_a_child_runs_the_same_command_line_without_the_supervisors_flags() -> None:
    arguments = ["run", "app.py", "--supervise", "--take-over", "--dir", "d"]
    assert child_command(arguments, without=["--supervise", "--take-over"]) == (
        sys.executable,
        *("-m", "holdfast.cli", "run", "app.py", "--dir", "d"),
    )


def test_giving_up_as_a_json_line() -> None:
    facts = GivingUp(End(0.0, 5, epoch=4), "a newer driver has taken the pipeline over", 2).facts()
    assert (facts["event"], facts["exit_code"], facts["restarts"]) == ("give_up", 5, 2)


# Processes


def test_what_can_not_be_killed_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    child = processes.start([sys.executable, "-c", "import time; time.sleep(600)"], os.environ)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(psutil.Process, "kill", lambda self: None)
            with pytest.raises(EngineError, match=rf"survived SIGKILL for 0.1 s: .*\({child.pid}\)"):
                processes.kill_everything(child, timeout_s=0.1)
    finally:
        processes.kill_everything(child)
    assert child.returncode == -signal.SIGKILL


def test_the_supervisor_itself_never_belongs_to_its_child() -> None:
    child = processes.start([sys.executable, "-c", "import time; time.sleep(600)"], os.environ)
    try:
        assert [process.pid for process in processes.belonging(child.pid)] == [child.pid]
    finally:
        processes.kill_everything(child)
    assert processes.belonging(child.pid) == []


def test_what_ends_by_itself_in_time_is_not_killed(tmp_path: Path) -> None:
    cleaning = f"import time; time.sleep(0.3); open({str(tmp_path / 'cleaned')!r}, 'w').close()"
    script = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {cleaning!r}])"
    child = processes.start([sys.executable, "-c", script], os.environ)
    child.wait()
    processes.let_everything_end(child, grace_s=20.0)
    assert (tmp_path / "cleaned").exists()


# The heartbeat


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[int, threading.Thread]]:
    """Starts a heartbeat in this process; gives the end to read from, and the thread."""

    def begin() -> tuple[int, threading.Thread]:
        reader, writer = os.pipe()
        monkeypatch.setenv(FD_VARIABLE, str(writer))
        monkeypatch.setenv(EVERY_VARIABLE, "0.001")
        thread = start_heartbeat()
        assert thread is not None
        return reader, thread

    return begin


def beats(reader: int, count: int) -> Sequence[bytes]:
    return [os.read(reader, 1) for _ in range(count)]


def end_of(reader: int, thread: threading.Thread) -> bool:
    os.close(reader)
    thread.join(10)
    return not thread.is_alive()


def test_without_a_supervisor_nobody_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FD_VARIABLE, raising=False)
    assert start_heartbeat() is None


def test_beats_come_until_the_reader_is_gone_and_then_end_quietly(
    pipe: Callable[[], tuple[int, threading.Thread]],
) -> None:
    reader, thread = pipe()
    assert beats(reader, 3) == [b"."] * 3
    assert start_heartbeat() is None
    assert end_of(reader, thread)


def test_a_beat_waits_for_the_jvms_answer(
    pipe: Callable[[], tuple[int, threading.Thread]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, thawed = threading.Event(), threading.Event()

    def answer() -> int:
        asked.set()
        thawed.wait(20)
        return 0

    monkeypatch.setitem(sys.modules, "pyspark", spark_with(answer))
    reader, thread = pipe()
    assert asked.wait(10)
    os.set_blocking(reader, False)
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)
    os.set_blocking(reader, True)
    thawed.set()
    assert beats(reader, 2) == [b"."] * 2
    assert end_of(reader, thread)


def test_a_context_that_raises_does_not_stop_the_beats(
    pipe: Callable[[], tuple[int, threading.Thread]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> int:
        raise ConnectionError("the JVM is starting")

    monkeypatch.setitem(sys.modules, "pyspark", spark_with(fail))
    reader, thread = pipe()
    assert beats(reader, 3) == [b"."] * 3
    assert end_of(reader, thread)


def spark_with(answer: Callable[[], int]) -> Any:
    system = SimpleNamespace(currentTimeMillis=answer)
    jvm = SimpleNamespace(java=SimpleNamespace(lang=SimpleNamespace(System=system)))
    return SimpleNamespace(SparkContext=SimpleNamespace(_active_spark_context=SimpleNamespace(_jvm=jvm)))


def test_beats_are_so_close_that_one_late_beat_is_no_silence() -> None:
    assert (beat_every_s(30.0), beat_every_s(2.0)) == (1.0, 0.2)


def test_a_driver_outlives_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    child = textwrap.dedent(
        """
        import os, sys
        from holdfast.supervise.heartbeat import start_heartbeat
        thread = start_heartbeat()
        print(os.getpid(), flush=True)
        thread.join()
        print("alone", flush=True)
        """
    )
    script = textwrap.dedent(
        f"""
        import sys
        from pathlib import Path
        from holdfast.supervise.supervisor import Supervisor
        Supervisor([sys.executable, "-c", {child!r}], Path({str(tmp_path)!r}), timeout_s=10.0).run()
        """
    )
    supervisor = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    assert int(supervisor.stdout.readline()) > 0
    supervisor.kill()
    supervisor.wait()
    assert supervisor.stdout.readline() == "alone\n"
    assert supervisor.stdout.read() == ""
