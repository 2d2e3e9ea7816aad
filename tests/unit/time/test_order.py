"""Results are those of the plan: not of what arrives first, who counted, which timer fires first, or what else is kept."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.engine import windowed
from holdfast.engine.build import build_stages
from holdfast.engine.local import LocalRunner
from holdfast.engine.timing import ahead, must_wait
from holdfast.errors import PipelineError
from holdfast.plan.times import assigners
from tests.drivers import live
from tests.unit.time.test_event_time import Row, Script, at, counted, results


class Pass(hf.KeyedProcess):
    def process(self, key: Any, record: Row, ctx: hf.Context) -> Iterator[Row]:
        yield record


def united(sink: hf.Sink, count: int = 40, per_epoch: int = 10) -> hf.Pipeline:
    """Two keyed stages that send through one operator behind a union."""
    made = hf.Pipeline("p")
    rows = [{"k": i % 7, "n": i} for i in range(count)]
    read = made.read("in", hf.records(rows, per_epoch=per_epoch))
    one = read.key_by("k").process("one", Pass()).map(lambda r: {**r, "from": "one"})
    other = read.key_by("n").process("other", Pass()).map(lambda r: {**r, "from": "other"})
    both = one.union(other).map(lambda r: {**r, "all": r["n"] % 5})
    both.key_by("all").aggregate("ends", first=hf.first("from"), last=hf.last("n")).write("out", sink)
    return made


def test_what_comes_through_a_union_has_an_order_of_its_own_whatever_arrives_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = hf.testing.run(united(hf.memory()), parallelism=2)
    expected = sorted(map(str, first.rows("out")))
    for parallelism in (1, 4):
        again = hf.testing.run(united(hf.memory()), parallelism=parallelism, plans=first.plans)
        assert sorted(map(str, again.rows("out"))) == expected
    blobs = LocalRunner._blobs
    monkeypatch.setattr(LocalRunner, "_blobs", lambda *given: blobs(*given)[::-1])
    turned = hf.testing.run(united(hf.memory()), parallelism=2, plans=first.plans)
    assert sorted(map(str, turned.rows("out"))) == expected
    digests = [[s.sealed.digest for s in c.shards["ends"]] for c in first.commits]
    assert [[s.sealed.digest for s in c.shards["ends"]] for c in turned.commits] == digests


def test_a_replay_behind_a_union_may_get_everything_in_another_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"checkpoint": "never", "parallelism": 2, "trim_log": False}
    sink = hf.jsonl(tmp_path / "out")
    before = live(united(sink, 120, 20), tmp_path / "dir", epochs=4, **options)
    shutil.rmtree(Path(before.program.state_root) / before.program.home / "ends" / "00001")
    blobs = LocalRunner._blobs
    monkeypatch.setattr(LocalRunner, "_blobs", lambda *given: blobs(*given)[::-1])
    after = live(united(sink, 120, 20), tmp_path / "dir", **options)
    assert after.recovery.last is not None and after.recovery.last.replayed == 4


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
@pytest.mark.parametrize(("act", "fired"), [("delete", ["a"]), ("set", ["a", "b"])])
def test_what_a_timer_does_to_another_of_the_same_time_counts(
    backend: str, act: str, fired: list[str]
) -> None:
    class Two(hf.KeyedProcess):
        def process(self, key: Any, record: Row, ctx: hf.Context) -> None:
            ctx.set_timer(1000, "a")
            ctx.set_timer(1000, "b")

        def on_timer(self, key: Any, timer: hf.Timer, ctx: hf.Context) -> Iterator[Row]:
            if timer.name == "a":
                (ctx.delete_timer if act == "delete" else ctx.set_timer)(1000, "b")
            yield {"fired": timer.name}

    harness = hf.testing.Harness(Two(), backend=backend)
    harness.process("k", {}, at_ms=0)
    assert [r["fired"] for r in harness.advance_watermark(2000)] == fired


def test_sessions_have_no_first_and_no_last() -> None:
    """Fragments merge by their times: what came first would depend on how epochs were cut."""
    keyed = hf.Pipeline("p").read("in", hf.records(at(1))).event_time("at", unit="s").key_by("k")
    with pytest.raises(PipelineError, match=r"\[x\] a, b: first and last are by arrival"):
        keyed.window(hf.session("5s")).aggregate("x", a=hf.first("v"), n=hf.count(), b=hf.last("v"))


def test_about_how_many_does_not_depend_on_who_counted() -> None:
    found, plans = set(), None
    for parallelism in (1, 2, 4):
        made = hf.Pipeline("p")
        read = made.read("in", hf.records([{"k": "a", "v": v} for v in range(5000)]))
        passed = read.key_by("v").process("pass", Pass())
        passed.key_by("k").aggregate("x", about=hf.approx_distinct("v")).write("out", hf.memory())
        result = hf.testing.run(made, parallelism=parallelism, plans=plans)
        plans = result.plans
        found.add(result.rows("out")[-1]["about"])
    assert len(found) == 1 and abs(found.pop() - 5000) < 250


def test_a_source_that_is_ahead_on_one_way_and_behind_on_another_is_read_on() -> None:
    made = hf.Pipeline("p")
    rows = [{"kind": "ab"[i % 2], "at": i * 100 if i % 2 else i} for i in range(60)]
    read = made.read("in", hf.records(rows, per_epoch=4))
    for kind in "ab":
        mine = read.filter(lambda r, kind=kind: r["kind"] == kind)
        timed = mine.event_time("at", unit="s", align="group", drift="5m", uid=f"time-{kind}")
        keyed = timed.map(lambda r: {**r, "k": 1}).key_by("k")
        keyed.window(hf.tumbling("1s")).aggregate(f"x-{kind}", n=hf.count()).write(f"out-{kind}", hf.memory())
    result = hf.testing.run(made, epochs=4)
    known = assigners(build_stages(made))
    before = (result.plans[-1], result.commits[-1])
    assert ahead(known, *before) == {"time-b"}
    assert must_wait(known, before) == set()


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_sliding_windows_are_the_same_however_few_panes_are_added_up_at_once(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"k": "abc"[i % 3], "at": (i * 7) % 50} for i in range(60)]
    source = Script([{"0": rows[:30]}, {"0": rows[30:]}, {"0": at(100)}], bounded=False)
    slid = hf.sliding("10s", "2s")
    given: dict[str, Any] = {"window": slid, "lateness": "20s", "out_of_order": "20s"}
    expected = hf.testing.run(counted(source, **given), backend=backend).rows("out")
    monkeypatch.setattr(windowed, "_ADDED_UP", 1)
    assert hf.testing.run(counted(source, **given), backend=backend).rows("out") == expected
    assert len(expected) > 60


def panes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many panes each look into the state asks for, as it happens."""
    read: list[int] = []
    find = windowed._PaneWindows._find

    def counting(self: Any, work: Any, keys: list[Any]) -> Any:
        read.append(len(keys))
        return find(self, work, keys)

    monkeypatch.setattr(windowed._PaneWindows, "_find", counting)
    return read


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_sliding_windows_read_their_own_panes_and_not_all_that_are_kept_for_late_records(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = panes_read(monkeypatch)
    epochs = [{"0": at(2 * e, k="a") + at(2 * e, k="b")} for e in range(60)]
    found = {}
    for lateness in ("0s", "1h"):
        read.clear()
        pipeline = counted(Script(epochs, bounded=False), window=hf.sliding("10s", "2s"), lateness=lateness)
        result = hf.testing.run(pipeline, parallelism=1, backend=backend)
        found[lateness] = sorted(map(str, result.rows("out")))
        assert max(read[-20:]) <= 16, "ten of the windows that end, two that came, those that go"
    assert found["0s"] == found["1h"]


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_a_late_record_reads_the_panes_that_are_in_a_window_with_it_and_no_others(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = panes_read(monkeypatch)
    on_time = [{"0": at(2 * e, 2 * e, 2 * e)} for e in range(60)]
    others = {"0": [row for k in "bcdefgh" for row in at(*range(0, 100, 2), k=k)]}
    late = {"0": at(50, k="a")}
    pipeline = counted(
        Script([others, *on_time, late], bounded=False),
        window=hf.sliding("10s", "2s"),
        lateness="1h",
        out_of_order="0s",
    )
    result = hf.testing.run(pipeline, parallelism=1, backend=backend)
    assert sum(read[-2:]) <= 9 + 9 + 1, "nine panes are in one of its five windows, looked for and read"
    again = [r for r in results(result) if r[0] == result.epochs]
    assert [n for _, n in again] == [16] * 5, "five windows once more, each with the late one"
    assert sum(c.late.get("w", 0) for c in result.commits) == 0


def test_what_a_session_costs_does_not_grow_with_those_that_are_kept() -> None:
    """Those that had their result stay for their lateness, each in its slot, and are not written again."""
    epochs = [{"0": at(10 * e, k="a") + at(10 * e, k="b")} for e in range(40)]
    source = Script(epochs, bounded=False)
    result = hf.testing.run(
        counted(source, window=hf.session("1s"), lateness="1d"), parallelism=1, backend="heap"
    )
    sizes = [c.shards["w"][0].sealed.delta_bytes for c in result.commits if c.records_in]
    assert max(sizes[-10:]) <= 1.1 * max(sizes[3:10])


def test_a_timer_beyond_all_times_is_an_error_of_the_function() -> None:
    class Never(hf.KeyedProcess):
        def process(self, key: Any, record: Row, ctx: hf.Context) -> None:
            ctx.set_timer(sys.maxsize)

        def on_timer(self, key: Any, timer: hf.Timer, ctx: hf.Context) -> None:
            raise AssertionError

    made = hf.Pipeline("p")
    timed = made.read("in", hf.records(at(1))).event_time("at", unit="s")
    timed.key_by("k").process("never", Never()).write("out", hf.memory())
    with pytest.raises(hf.errors.HoldfastError, match="is no time for a timer") as caught:
        hf.testing.run(made)
    assert caught.value.uid == "never"
