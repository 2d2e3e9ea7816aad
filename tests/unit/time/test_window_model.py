"""Windows under every trigger beside a model that keeps everything in plain lists and is never stored."""

from __future__ import annotations

import bisect
import collections
import dataclasses
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.time.units import MAX_TIME, MIN_TIME
from tests.unit.time.test_window_functions import Row, Same, Touching, Values, seconds, timed

SCHEMA = {"k": str, "at": int, "v": int}


@dataclasses.dataclass(eq=False)
class Held:
    """A window of a key: the context of its trigger as well."""

    model: Model
    window: hf.Window
    records: list[int] = dataclasses.field(default_factory=list)
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    event: set[int] = dataclasses.field(default_factory=set)
    clock: set[int] = dataclasses.field(default_factory=set)

    @property
    def watermark_us(self) -> int:
        return self.model.watermark_us

    @property
    def now_ms(self) -> int:
        return self.model.now_ms

    def set_event_timer(self, at_us: int) -> None:
        self.event.add(at_us)

    def delete_event_timer(self, at_us: int) -> None:
        self.event.discard(at_us)

    def set_processing_timer(self, at_ms: int) -> None:
        self.clock.add(at_ms)

    def delete_processing_timer(self, at_ms: int) -> None:
        self.clock.discard(at_ms)


class Model:
    """The windows of one key."""

    def __init__(self, assigner: hf.Assigner, trigger: hf.Trigger, lateness_us: int) -> None:
        self.assigner, self.trigger, self.lateness_us = assigner, trigger, lateness_us
        self.open: list[Held] = []
        self.watermark_us, self.now_ms = MIN_TIME, 0
        self.fired: list[tuple[int, int, list[int]]] = []
        self.late: list[int] = []

    def forgotten_at(self, window: hf.Window) -> int:
        return min(window.last + self.lateness_us, MAX_TIME)

    def epoch(self, rows: list[Row], before: int, after: int, now_ms: int) -> None:
        self.watermark_us, self.now_ms = before, now_ms
        pairs = [(r, w) for r in rows for w in self.assigner.assign(r["at"] * 1_000_000, r)]
        behind = [(r, w) for r, w in pairs if self.forgotten_at(w) <= before]
        inside = set()
        for row, window in pairs:
            if self.forgotten_at(window) > before:
                self.add(row, window)
                inside.add(row["v"])
        if self.assigner.merging:
            inside |= self.add_behind(behind)
        self.late += dict.fromkeys(r["v"] for r, _ in behind if r["v"] not in inside)
        self.watermark_us = after
        self.event_time(after)
        self.processing_time()
        self.open = [o for o in self.open if self.forgotten_at(o.window) > after]

    def touching(self, window: hf.Window) -> list[Held]:
        found = [o for o in self.open if o.window.start <= window.end and window.start <= o.window.end]
        return sorted(found, key=lambda o: o.window)

    def add(self, row: Row, window: hf.Window) -> None:
        into = self.merged(window) if self.assigner.merging else None
        into = into or next((o for o in self.open if o.window == window), None) or self.made(window)
        bisect.insort(into.records, row["v"])  # by arrival, whichever came to it first
        self.follow(into, self.trigger.on_record(row, row["at"] * 1_000_000, into.window, into))

    def made(self, window: hf.Window) -> Held:
        self.open.append(Held(self, window))
        return self.open[-1]

    def merged(self, window: hf.Window) -> Held:
        parts = self.touching(window)
        bounds = [window, *(p.window for p in parts)]
        whole = hf.Window(min(b.start for b in bounds), max(b.end for b in bounds))
        into = next((p for p in parts if p.window == whole), None) or self.made(whole)
        gone = [p for p in parts if p is not into]
        if gone:
            self.trigger.on_merge(whole, into, gone)
            into.records = sorted({v for p in parts for v in p.records} | set(into.records))
            self.open = [o for o in self.open if o not in gone]
        return into

    def add_behind(self, behind: list[tuple[Row, hf.Window]]) -> set[int]:
        """A window that is past belongs to one that is open if it touches it, or another that does, and so on."""
        left, reached = [w for _, w in behind], [o.window for o in self.open]
        grown = True
        while grown:
            near = [w for w in left if any(w.start <= r.end and r.start <= w.end for r in reached)]
            left, reached, grown = [w for w in left if w not in near], reached + near, bool(near)
        wholes: list[hf.Window] = []
        for window in sorted(reached):
            if wholes and window.start <= wholes[-1].end:
                wholes[-1] = hf.Window(wholes[-1].start, max(wholes[-1].end, window.end))
            else:
                wholes.append(window)
        inside = set()
        for row, window in behind:
            if window in reached:
                self.add(row, next(w for w in wholes if w.start <= window.start and window.end <= w.end))
                inside.add(row["v"])
        return inside

    def event_time(self, upto: int) -> None:
        def due() -> list[tuple[int, hf.Window, Held]]:
            return [
                (at, o.window, o)
                for o in self.open
                for at in o.event
                if at <= min(upto, self.forgotten_at(o.window))
            ]

        while found := due():
            at, window, one = min(found, key=lambda f: f[:2])
            one.event.discard(at)
            self.follow(one, self.trigger.on_event_time(at, window, one))

    def processing_time(self) -> None:
        while found := [(at, o.window, o) for o in self.open for at in o.clock if at <= self.now_ms]:
            at, window, one = min(found, key=lambda f: f[:2])
            one.clock.discard(at)
            self.follow(one, self.trigger.on_processing_time(at, window, one))

    def follow(self, one: Held, decision: hf.Decision) -> None:
        if decision.fires and one.records:
            self.fired.append((one.window.start, one.window.end, list(one.records)))
        if decision.purges:
            one.records = []


def by_window(fired: list[tuple[int, int, list[int]]]) -> dict[tuple[int, int], list[list[int]]]:
    found = collections.defaultdict(list)
    for start, end, came in fired:
        found[start, end].append(came)
    return dict(found)


ASSIGNERS = {
    "tumbling": lambda: hf.tumbling("10s"),
    "sliding": lambda: hf.sliding("15s", "5s"),
    "session": lambda: hf.session("4s"),
    "touching": Touching,
    "dynamic": lambda: hf.session(lambda r: "9s" if r["v"] % 3 == 0 else "2s"),
    "global": hf.global_window,
}
TRIGGERS = [
    hf.triggers.event_time(),
    hf.triggers.event_time(early="2s", late_count=2),
    hf.triggers.event_time(early_count=2),
    hf.triggers.count(3),
    hf.triggers.continuous_event_time("3s"),
    hf.triggers.processing_time(),
    hf.triggers.never(),
]
ROWS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 60)), max_size=40)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    drawn=ROWS,
    rising=st.booleans(),
    kind=st.sampled_from(sorted(ASSIGNERS)),
    trigger=st.sampled_from(TRIGGERS),
    purging=st.booleans(),
    lateness=st.sampled_from([0, 7, 40]),
    lag=st.sampled_from([0, 5, 20]),
    per_epoch=st.sampled_from([1, 3, 8]),
    parallelism=st.sampled_from([1, 2]),
    backend=st.sampled_from(["heap", "heap", "rocksdb"]),
    epochs=st.sampled_from([2, 5, 100]),
)
def test_windows_fire_as_if_everything_were_kept_in_lists(
    drawn: list[tuple[str, int]],
    rising: bool,
    kind: str,
    trigger: hf.Trigger,
    purging: bool,
    lateness: int,
    lag: int,
    per_epoch: int,
    parallelism: int,
    backend: str,
    epochs: int,
) -> None:
    drawn = sorted(drawn, key=lambda r: r[1]) if rising else drawn
    rows: list[Row] = [{"k": k, "at": at, "v": v} for v, (k, at) in enumerate(drawn)]
    trigger = hf.triggers.purging(trigger) if purging else trigger
    made = hf.Pipeline("p")
    stream = timed(made, hf.records(rows, per_epoch=per_epoch, schema=SCHEMA), out_of_order=f"{lag}s")
    windowed = stream.window(Same(ASSIGNERS[kind]())).allowed_lateness(f"{lateness}s").trigger(trigger)
    out = windowed.process("w", Values())
    out.write("out", hf.memory())
    out.side("late").write("late", hf.memory())
    result = hf.testing.run(made, parallelism=parallelism, backend=backend, epochs=epochs)
    models = {k: Model(ASSIGNERS[kind](), trigger, lateness * 1_000_000) for k in "ab"}
    tables = result._captured["out"].tables
    for plan, commit in zip(result.plans, result.commits, strict=True):
        pieces = [planned.piece for planned in plan.ranges]
        came = [row for piece in pieces for row in rows[piece.start : piece.end]]
        told = tables[commit.epoch].to_pylist() if commit.epoch in tables else []
        for key, model in models.items():
            model.fired = []
            mine = [r for r in came if r["k"] == key]
            after = commit.clocks.get("w", MIN_TIME)
            model.epoch(mine, plan.clocks.get("w", MIN_TIME), after, plan.now_ms)
            found = [
                (_us(r["window_start"], MIN_TIME), _us(r["window_end"], MAX_TIME), r["came"])
                for r in told
                if r["k"] == key
            ]
            assert by_window(found) == by_window(model.fired)
    late = sorted(r["v"] for r in result.rows("late"))
    assert late == sorted(v for model in models.values() for v in model.late)
    assert len(late) == sum(c.late.get("w", 0) for c in result.commits)
    kept = [o for m in models.values() for o in m.open if m.assigner.merging or o.records or o.state]
    assert len(_table(result, "windows")) == len(kept)
    assert len(_table(result, "records")) == sum(len(o.records) for o in kept)
    assert len(_table(result, "timers.event")) == sum(len(o.event) for o in kept)
    assert len(_table(result, "timers.clock")) == sum(len(o.clock) for o in kept)


def _us(moment: Any, unbounded: int) -> int:
    at = seconds(moment)
    return unbounded if at is None else at * 1_000_000


def _table(result: hf.testing.Result, name: str) -> list[Row]:
    table = result.state("w").get(name)
    return [] if table is None else table.to_pylist()
