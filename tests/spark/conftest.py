"""One Spark session for all local tests: it takes seconds to start."""

from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.config import Settings
from holdfast.engine.session import make_session


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """local[2], and tasks may fail four times, as on a cluster."""
    session = make_session(Settings(master="local[2,4]"), "tests")
    yield session
    session.stop()
