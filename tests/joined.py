"""A pipeline with every operator of the library, for tests that lose and rebuild it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import holdfast as hf

Row = dict[str, Any]


def events(count: int, seed: int) -> list[Row]:
    """Records whose times rise, a little out of order; now and then one is far too late."""
    return [
        {
            "k": f"k{(i * 31 + seed) % 7}",
            "at": i * 2 + (i * 7919 + seed) % 9 - (80 if i % 23 == 22 else 0),
            "v": i * seed % 101,
            "note": None if i % 3 else f"n{i}",
        }
        for i in range(count)
    ]


def build(sinks: Callable[[str], Any], *, count: int = 160, per_epoch: int = 16) -> hf.Pipeline:
    """The pipeline, with a sink for each of its outputs."""
    made = hf.Pipeline("joined")
    schema = {"k": str, "at": int, "v": int, "note": str}
    left, right = (
        made.read(uid, hf.records(events(count, seed), splits=2, per_epoch=per_epoch, schema=schema))
        .event_time("at", unit="s", out_of_order=lag, idle_after="1h")
        .key_by("k")
        for uid, seed, lag in (("left", 3, "6s"), ("right", 5, "12s"))
    )
    close = left.join(right).between("-8s", "5s").select("close", how="outer")
    close.write("pairs", sinks("pairs"))
    close.side("late").write("late", sinks("late"))
    close.side("late_right").write("late-right", sinks("late-right"))
    left.as_of(right, keep_for="40s").select("priced").write("prices", sinks("prices"))
    together = left.join(right).window(hf.sliding("20s", "10s"))
    together.select("together", lambda a, b: {"k": a["k"], "v": a["v"] * 1000 + b["v"]}).write(
        "windows", sinks("windows")
    )
    left.deduplicate("once", within="30s").write("firsts", sinks("firsts"))
    right.window(hf.sliding("20s", "10s")).top("best", 2, by="v").write("tops", sinks("tops"))
    right.top("ever", 3, by="note", ascending=True).write("ranks", sinks("ranks"))
    rises = hf.pattern("low", lambda r: r["v"] < 20).then("high", lambda r: r["v"] > 60)
    found = left.pattern("rises", rises.without("even", lambda r: r["v"] == 50).within("25s"))
    found.write("matches", sinks("matches"))
    found.side("timeout").write("lost", sinks("lost"))
    return made


SINKS = ("pairs", "late", "late-right", "prices", "windows", "firsts", "tops", "ranks", "matches", "lost")
OPERATORS = ("close", "priced", "together", "once", "best", "ever", "rises")
