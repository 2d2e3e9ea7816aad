"""For all unit tests: the same surroundings, whoever runs them."""

import pytest


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands print as into a file; pytest's own workers have a width of their own."""
    monkeypatch.delenv("COLUMNS", raising=False)
