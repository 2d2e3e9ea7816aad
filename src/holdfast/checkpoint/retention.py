"""What is kept and what may go, by reference. Pure.

A file stays while a kept checkpoint names it. Plans and commits stay while the oldest kept checkpoint
would need them for a replay. Only the newest generation deletes, and never what a newer one may be writing.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from holdfast.checkpoint.metadata import Checkpoint


@dataclasses.dataclass(frozen=True)
class Leftovers:
    """What may be deleted: metadata records by number, and files of the store by key."""

    records: list[int]
    keys: list[str]
    replay_from: int
    """Plans and commits of this epoch and earlier ones are needed by nobody."""


def sort_out(
    completed: Sequence[Checkpoint],
    keep: int,
    stored: Iterable[str],
    generation: int,
    unusable: Iterable[int] = (),
) -> Leftovers:
    """What goes when the newest `keep` checkpoints stay.

    Args:
        completed: every checkpoint whose record exists and can be read, in order of numbers.
        stored: the keys in the store.
        generation: the deleting driver's; files of a newer one are left alone.
        unusable: numbers of checkpoints that can't be read. Those that were only taken stay taken.
    """
    kept = list(completed)[-keep:]
    needed = {f.key for c in kept for f in c.files}
    oldest = kept[0].number if kept else 0
    return Leftovers(
        records=sorted(
            [c.number for c in completed if c.number < oldest] + [n for n in unusable if n < oldest]
        ),
        keys=sorted(
            k for k in stored if k not in needed and (g := generation_of(k)) is not None and g <= generation
        ),
        # A store that loses files loses those of a lone checkpoint too: then everything is replayed, as long as it can be.
        replay_from=kept[0].epoch if kept and len(kept) >= keep else 0,
    )


def doubtful(completed: Sequence[Checkpoint], stored: Mapping[str, int]) -> set[str]:
    """The files that checkpoints name and that a listing, with sizes, does not have as they were written."""
    files = (file for checkpoint in completed for file in checkpoint.files)
    return {file.key for file in files if stored.get(file.key) != file.size_bytes}


def lacking(completed: Sequence[Checkpoint], sizes: Mapping[str, int | None]) -> dict[int, str]:
    """The checkpoints that can't be loaded any more, and why: a file is gone from the store, or cut short.

    Args:
        sizes: of the files that were looked at, by key; None: it is gone.
    """
    found = {}
    for checkpoint in completed:
        for file in checkpoint.files:
            size = sizes.get(file.key, file.size_bytes)
            if size != file.size_bytes:
                what = "is gone from the store" if size is None else f"has {size} bytes in the store"
                found[checkpoint.number] = f"{file.key}, of {file.size_bytes} bytes, {what}"
                break
    return found


def upload_folder(number: int, generation: int, upload: int = 1) -> str:
    """The part of a key that says which upload made it; no two uploads share one, failed ones included."""
    return f"c{number:08d}-g{generation}-{upload}"


def generation_of(key: str) -> int | None:
    """The generation that uploaded a file; None for what is not ours."""
    found = re.match(r"c\d{8}-g(\d+)-\d+/", key)
    return None if found is None else int(found[1])
