"""For all unit tests: the same surroundings, whoever runs them."""

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")  # how long an example takes says nothing on a machine that others use too


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands print as into a file; pytest's own workers have a width of their own."""
    monkeypatch.delenv("COLUMNS", raising=False)
