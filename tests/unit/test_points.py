"""Faults that are asked for at named points of tasks: whom they strike, and that one which can't be done is not passed over."""

from pathlib import Path

import pytest

from holdfast.errors import ConfigError, EngineError
from holdfast.faults.points import InjectedFault, check_asked, reach


@pytest.mark.parametrize("aim", ["", "@second", "@second-1"])
def test_a_fault_strikes_the_task_it_is_aimed_at_once_and_leaves_its_marker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aim: str
) -> None:
    marker = tmp_path / "marker"
    monkeypatch.setenv("HOLDFAST_FAULT", f"shard.start{aim}:raise:{marker}")
    check_asked()
    reach("shard.applied", task="second-1")
    if aim:
        reach("shard.start", task="first-1")
        reach("shard.start", task="second-10" if aim == "@second-1" else "the-second-1")
    assert not marker.exists()
    with pytest.raises(InjectedFault):
        reach("shard.start", task="second-1")
    assert marker.exists()
    reach("shard.start", task="second-1")


def test_several_faults_may_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [f"shard.start@{uid}:raise:{tmp_path / uid}" for uid in ("first", "second")]
    monkeypatch.setenv("HOLDFAST_FAULT", ";".join(asked))
    for uid in ("second", "first"):
        with pytest.raises(InjectedFault):
            reach("shard.start", task=f"{uid}-0")


@pytest.mark.parametrize("variable", ["SPARK_EXECUTOR_DIRS", "SPARK_LOCAL_DIRS"])
def test_a_loss_of_shuffle_files_is_a_loss_or_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    marker, home = tmp_path / "marker", tmp_path / "blockmgr"
    (home / "0a").mkdir(parents=True)
    monkeypatch.delenv("SPARK_EXECUTOR_DIRS", raising=False)
    monkeypatch.setenv(variable, str(home))
    monkeypatch.setenv("HOLDFAST_FAULT", f"shard.start@second:lose-shuffle:{marker}")
    with pytest.raises(EngineError, match=r"were to be lost at shard.start, and there are none"):
        reach("shard.start", task="second-0")
    assert not marker.exists(), "nothing was done"
    for name in ("shuffle_3_0_0.data", "shuffle_3_0_0.index", "rdd_1_0"):
        (home / "0a" / name).touch()
    with pytest.raises(InjectedFault):
        reach("shard.start", task="second-0")
    assert marker.exists()
    assert [p.name for p in (home / "0a").iterdir()] == ["rdd_1_0"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("shard.begin:raise:/tmp/m", "there is no such point"),
        ("commit.after_record:raise:/tmp/m", "there is no such point"),
        ("shard.start:lose-shufle:/tmp/m", "it must be point:action:marker"),
        ("shard.start@second:raise", "it must be point:action:marker"),
    ],
)
def test_a_fault_that_would_never_come_is_refused(
    monkeypatch: pytest.MonkeyPatch, asked: str, message: str
) -> None:
    monkeypatch.setenv("HOLDFAST_FAULT", asked)
    with pytest.raises(ConfigError, match=message):
        check_asked()
