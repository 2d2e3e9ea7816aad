"""`bench sessions` without Spark: its epochs are what they are taken for."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast as hf
from bench import sessions
from bench.sessions import Visits, parted, pipeline


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "BLOCK", 10)
    monkeypatch.setattr(sessions, "RECORDS", 40)
    monkeypatch.setattr(Visits, "FILL", 25)


@pytest.mark.parametrize(("opened", "ending"), [(10, 1), (100, 4), (100, 10)])
def test_sessions_are_open_beside_the_steady_epochs_and_end_block_by_block(opened: int, ending: int) -> None:
    source, out = Visits(opened, 6, ending), hf.memory()
    found = hf.testing.run(pipeline(source, out))
    steady, endings = parted(found.commits[: source.filling + 6 + ending], source)
    assert [c.records_in for c in steady] == [40] * 4 and len(endings) == ending
    assert not any(c.records_out.get("out") for c in found.commits[: source.filling + 6])
    ended = found.rows("out")[: 10 * ending]
    blocks = opened // 10
    assert {row["key"] % blocks for row in ended} == set(range(ending))


def test_epochs_that_are_not_as_planned_are_an_error() -> None:
    source = Visits(100, 6, 4)
    commits: list[Any] = hf.testing.run(pipeline(source, hf.memory())).commits
    with pytest.raises(SystemExit, match="not as planned"):
        parted(commits[1:], source)
