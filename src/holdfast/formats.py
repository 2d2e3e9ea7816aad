"""What is stored says its format: a version of holdfast reads those it knows, and refuses what a newer one wrote.

A field of the future may mean something else, so the format is read before anything else is.
"""

from __future__ import annotations

import msgspec

from holdfast.errors import IncompatibleError


class Told(msgspec.Struct):
    """Of a record, only its format."""

    format: int


def check_format(found: int, known: int, what: str) -> None:
    """Raise for a format of the future."""
    if found > known:
        raise IncompatibleError(
            f"{what} has format {found}; this version of holdfast knows formats up to {known}.",
            remedy="Run the pipeline with the holdfast that wrote it, or a newer one.",
        )


def refuse_the_future(data: bytes, known: int, what: str) -> None:
    """Raise if a record, as JSON, has a format of the future; a `msgspec.DecodeError` if it has none."""
    check_format(msgspec.json.decode(data, type=Told).format, known, what)
