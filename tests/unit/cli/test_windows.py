"""Windows record by record, as `holdfast plan` and `holdfast state` show them, and what a directory is held to."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.cli.plan import plan_facts
from holdfast.config import Settings
from holdfast.engine.build import build_stages, check_identity, identity_of
from holdfast.errors import IncompatibleError
from holdfast.log.journal import Journal
from holdfast.log.records import Identity
from tests.unit.cli.test_commands import run, states

Row = dict[str, Any]


class Values(hf.WindowFunction):
    def process(self, key: Any, window: hf.Window, records: list[Row], ctx: hf.Context) -> Iterator[Row]:
        yield {"k": key, "n": len(records)}


def build(trigger: hf.Trigger | None = None) -> hf.Pipeline:
    pipeline = hf.Pipeline("windows")
    rows = [{"k": "a", "at": i, "v": i} for i in range(30)]
    stream = pipeline.read("in", hf.records(rows, per_epoch=10)).event_time("at", unit="s").key_by("k")
    stream.window(hf.session("5s")).process("visits", Values()).write("a", hf.memory())
    stream.window(hf.tumbling("7s")).reduce("newest", lambda a, b: b).write("b", hf.memory())
    everything = stream.window(hf.global_window()).trigger(trigger or hf.triggers.count(100))
    everything.aggregate("all", n=hf.count(), v=hf.sum("v")).write("c", hf.memory())
    return pipeline


def identity(pipeline: hf.Pipeline, backend: str = "heap") -> Identity:
    return identity_of(build_stages(pipeline), Settings(backend=backend), 2)


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_open_windows_show_what_they_hold(tmp_path: Path, backend: str) -> None:
    result = hf.testing.run(build(), epochs=2, directory=tmp_path, backend=backend)
    journal = Journal.at(tmp_path)
    journal.create_identity(identity(build(), backend))
    journal.take()
    for commit in result.commits:
        journal.put_commit(commit)
    listed = {(r["operator"], r["state"]): r["entries"] for r in states(tmp_path)["operators"]}
    assert listed == {
        ("visits", "windows"): 1,
        ("visits", "records"): 20,
        ("newest", "windows"): 1,
        ("all", "windows"): 1,
    }
    shown = {
        u: states(tmp_path, "--operator", u, "--key", "a")["states"] for u in ("visits", "newest", "all")
    }
    (visit,) = shown["visits"]["windows"]["rows"]
    assert visit["window.holds"] == 20 and "00:00:24" in visit["window_end"]
    kept = shown["visits"]["records"]["rows"]
    assert sorted((r["place"], r["v"]) for r in kept) == [(i, i) for i in range(20)]
    assert shown["visits"]["timers.event"]["total"] == shown["visits"]["open"]["total"] == 1
    (newest,) = shown["newest"]["windows"]["rows"]
    assert (newest["v"], newest["window.holds"]) == (19, 6)
    (everything,) = shown["all"]["windows"]["rows"]
    assert (everything["n"], everything["v"], everything["window.trigger"]) == (20, 190, '{"n":20}')
    assert everything["window_start"] is None and everything["window_end"] is None
    assert everything["window.due"] is None
    for uid in shown:
        run("state", tmp_path, "--operator", uid)


def test_a_plan_tells_windows_and_triggers_and_that_nothing_is_combined() -> None:
    facts = plan_facts(build_stages(build()))
    details = {o["uid"]: o["detail"] for o in facts["operators"] if o["kind"] == "window"}
    assert details == {
        "visits": "session gap 5 s: process Values",
        "newest": "tumbling size 7 s: reduce lambda",
        "all": "global, Count(n=100): n=count(), v=sum(v)",
    }
    assert [e["combined"] for e in facts["exchanges"]] == [False] * 3


def test_another_kind_of_trigger_does_not_fit_the_directory_but_another_number_does() -> None:
    check_identity(identity(build()), identity(build(hf.triggers.count(5))), "dir")
    with pytest.raises(IncompatibleError, match="trigger was Count and is Purging"):
        check_identity(identity(build()), identity(build(hf.triggers.purging(hf.triggers.count(5)))), "dir")
