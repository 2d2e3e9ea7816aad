"""The pictures of the guide to event time, drawn from what the in-process runner makes of a few records.

    python tools/draw_time.py           # writes docs/img/time-*.svg again

Nothing in them is drawn by hand: clocks, marks and idle splits come from plans and commits, windows from what a pipeline
emitted. So a picture shows what the code does, and a test sees to it that the files are up to date. They are plain
SVG, the same on every machine, and follow the reader's light or dark theme.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import pyarrow as pa

import holdfast as hf
from holdfast.time.merging import merge
from holdfast.time.windows import Window

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "img"
WIDTH = 760.0
S = 1_000_000
SIZE = {"title": 15.0, "label": 13.0, "small": 12.0}

_LIGHT = {
    "page": "#ffffff", "text": "#1f2328", "muted": "#656d76", "grid": "#d8dee4", "shade": "#f3f5f8",
    "blue": "#0969da", "green": "#1a7f37", "violet": "#8250df", "orange": "#bc4c00", "red": "#cf222e",
}  # fmt: skip
_DARK = {
    "page": "#0d1117", "text": "#e6edf3", "muted": "#8d96a0", "grid": "#30363d", "shade": "#161b22",
    "blue": "#4493f8", "green": "#3fb950", "violet": "#ab7df8", "orange": "#f0883e", "red": "#ff7b72",
}  # fmt: skip
_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"


# What is drawn with


class Picture:
    """An SVG in the making: what is added later lies on top."""

    def __init__(self, height: float, title: str) -> None:
        self._height, self._title = height, title
        self._parts = [f'<rect class="page" width="{WIDTH:g}" height="{height:g}"/>']
        self.text(24, 34, title, size="title")

    def box(self, x: float, y: float, width: float, height: float, colour: str, fill: float) -> None:
        """A box with a thin edge, filled with its own colour as far as `fill` says."""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4"'
        self._parts.append(f'<rect class="f-{colour} s-{colour}" fill-opacity="{fill:g}" {place}/>')

    def area(self, corners: Sequence[tuple[float, float]], colour: str) -> None:
        """A filled shape."""
        self._parts.append(f'<path class="f-{colour}" d="{_path(corners)} Z"/>')

    def line(
        self, points: Sequence[tuple[float, float]], colour: str, width: float = 1, dashes: str = ""
    ) -> None:
        """A line through points."""
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self._parts.append(
            f'<path class="line s-{colour}" stroke-width="{width:g}"{dashed} d="{_path(points)}"/>'
        )

    def dot(self, x: float, y: float, colour: str, *, hollow: bool = False) -> None:
        """A record."""
        inside = "page" if hollow else colour
        self._parts.append(f'<circle class="f-{inside} s-{colour}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        colour: str = "text",
        *,
        size: str = "label",
        anchor: str = "start",
    ) -> None:
        """Words on a baseline."""
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self._parts.append(f'<text class="{size} f-{colour}" {place}>{escape(words)}</text>')

    def svg(self) -> str:
        """The text of the file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {self._height:g}" '
            f'width="{WIDTH:g}" height="{self._height:g}" role="img" aria-label="{escape(self._title)}">'
        )
        return "\n".join([head, f"<style>{_style()}</style>", *self._parts, "</svg>", ""])


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + " L".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _style() -> str:
    sizes = "".join(f".{name}{{font-size:{size:g}px}}" for name, size in SIZE.items())
    return (
        f"text{{font-family:{_FONT}}}.title{{font-weight:600}}.line{{fill:none;stroke-linejoin:round}}"
        f"{sizes}{_colours(_LIGHT)}@media (prefers-color-scheme:dark){{{_colours(_DARK)}}}"
    )


def _colours(palette: dict[str, str]) -> str:
    page = f".page{{fill:{palette['page']}}}"
    return page + "".join(f".f-{n}{{fill:{c}}}.s-{n}{{stroke:{c}}}" for n, c in palette.items())


@dataclasses.dataclass(frozen=True)
class Scale:
    """From numbers to places on the page."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


# What is drawn


class Told(hf.Source):
    """A source that has, epoch by epoch, the records it is told: the seconds of each split's."""

    def __init__(self, epochs: Sequence[dict[str, Sequence[int]]], *, ends: bool = False) -> None:
        self._epochs, self._ends = epochs, ends
        self._splits = sorted({split for epoch in epochs for split in epoch})

    def schema(self) -> pa.Schema:
        return pa.schema({"key": pa.string(), "at": pa.int64()})

    def plan(self, position: Any, limit: hf.Limit) -> hf.Offer:
        here = position or 0
        if here == len(self._epochs):
            return hf.Offer([], here, exhausted=self._ends, splits=self._splits)
        ranges = [
            hf.Range(split, here, here + 1, records=len(at)) for split, at in self._epochs[here].items()
        ]
        last = here + 1 == len(self._epochs)
        return hf.Offer(ranges, here + 1, exhausted=self._ends and last, splits=self._splits)

    def read(self, piece: hf.Range, reading: hf.Reading) -> Iterator[pa.Table]:
        seconds = list(self._epochs[piece.start][piece.split])
        yield pa.table({"key": ["a"] * len(seconds), "at": seconds}, schema=self.schema())


@dataclasses.dataclass(frozen=True)
class Ran:
    """What came of records in windows: the run, each result by its epoch (window, count), and the late ones' seconds."""

    run: hf.testing.Result
    emitted: list[tuple[int, Window, int]]
    late: list[int]

    def clock_s(self, epoch: int) -> float:
        """The event clock after an epoch, in seconds; watermarks are a microsecond below what they wait for."""
        return (self.run.commits[epoch - 1].clocks["counts"] + 1) / S


def counted(source: hf.Source, window: Any, **time: Any) -> Ran:
    """Records counted in windows."""
    pipeline, out, late = hf.Pipeline("picture"), hf.memory(), hf.memory()
    timed = pipeline.read("in", source).event_time("at", unit="s", **time)
    counts = timed.key_by("key").window(window).aggregate("counts", n=hf.count())
    counts.write("out", out)
    counts.side("late").write("late", late)
    run = hf.testing.run(pipeline, capture=False, now_ms=0, step_ms=1000)
    emitted = []
    for epoch in out.epochs:
        table = out.table(epoch)
        assert table is not None
        bounds = (table[name].cast(pa.int64()).to_pylist() for name in ("window_start", "window_end"))
        found = zip(*bounds, table["n"].to_pylist(), strict=True)
        emitted += [(epoch, Window(start, end), n) for start, end, n in found]
    return Ran(run, emitted, [row["at"] for row in late.rows()])


def _axis_y(picture: Picture, across: Scale, up: Scale, seconds: Sequence[int]) -> None:
    for second in seconds:
        picture.line([(across.start, up(second)), (across.end, up(second))], "grid")
        picture.text(across.start - 8, up(second) + 4, f"{second} s", "muted", size="small", anchor="end")


def _steps(values: Sequence[tuple[float, float]], across: Scale, up: Scale) -> list[tuple[float, float]]:
    """A line that stays where it is until the next value."""
    points = [(across(values[0][0]), up(values[0][1]))]
    for at, value in values[1:]:
        points += [(across(at), points[-1][1]), (across(at), up(value))]
    return points


def watermark() -> str:
    """Records by arrival and event time, the watermark that they lead to, and when windows are emitted."""
    seconds = [
        (1, 4, 3), (6, 5, 8), (9, 12, 7), (14, 11, 16), (13, 18, 2), (21, 17, 22), (26, 23, 19), (28, 30, 24),
        (33, 31, 34),
    ]  # fmt: skip
    ran = counted(Told([{"0": at} for at in seconds]), hf.tumbling("10s"), out_of_order="5s")
    epochs = range(1, len(seconds) + 1)
    picture = Picture(430, 'hf.tumbling("10s") on event_time("at", out_of_order="5s")')
    across, up = Scale(0, len(seconds), 70, 736), Scale(0, 40, 380, 60)
    clock = _steps([(0, 0), *((e, max(0, ran.clock_s(e))) for e in epochs)], across, up)
    greatest = _steps([(0, 0), *((e, max(s for at in seconds[:e] for s in at)) for e in epochs)], across, up)
    picture.area([*clock, (across.end, up(0))], "shade")
    _axis_y(picture, across, up, range(0, 41, 10))
    for epoch in epochs:
        picture.line([(across(epoch), up(0)), (across(epoch), up(40))], "grid", dashes="2 4")
        picture.text(across(epoch - 0.5), 398, str(epoch), "muted", size="small", anchor="middle")
    picture.text(across.start + 8, up(40) + 17, "event time", "muted", size="small")
    picture.text((across.start + across.end) / 2, 418, "arrival, epoch by epoch", "muted", anchor="middle")
    picture.line(greatest, "muted", dashes="5 4")
    picture.text(across(4) - 6, up(16) - 6, "greatest timestamp", "muted", anchor="end")
    picture.line(clock, "blue", 2.5)
    picture.text(across.end, up(ran.clock_s(8)) + 18, "watermark", "blue", anchor="end")
    for number, at in enumerate(seconds):
        for place, second in enumerate(at):
            x, y, is_late = across(number + (place + 1) / 4), up(second), second in ran.late
            picture.dot(x, y, "red" if is_late else "green")
            if is_late:
                picture.text(x + 10, y + 4, "late: its window is past", "red")
    for epoch, window, n in ran.emitted:
        x, y = across(epoch), up(window.end / S)
        words = f"{window.start // S}–{window.end // S} s emitted: {n} records"
        picture.line([(x, y), (x, y + 32)], "orange", 1.5)
        picture.dot(x, y, "orange", hollow=True)
        picture.text(min(x - 4, across.end - 208), y + 46, words, "orange")
    return picture.svg()


def windows() -> str:
    """The same records in three kinds of windows."""
    seconds = (1, 3, 8, 12, 13, 16, 28, 31, 33, 39)
    kinds = [
        ('hf.tumbling("10s")', hf.tumbling("10s"), "blue"),
        ('hf.sliding("20s", "10s")', hf.sliding("20s", "10s"), "violet"),
        ('hf.session("5s")', hf.session("5s"), "orange"),
    ]
    picture = Picture(376, "The same records of one key in three kinds of windows")
    across, top = Scale(-10, 50, 40, 720), 66.0
    for second in range(-10, 51, 10):
        picture.line([(across(second), top), (across(second), 344)], "grid", dashes="2 4")
        picture.text(across(second), 362, f"{second} s", "muted", size="small", anchor="middle")
    picture.text(across(-10) + 4, top + 14, "records", "green")
    for second in seconds:
        picture.dot(across(second), top + 10, "green")
    y = top + 52
    for name, window, colour in kinds:
        picture.text(across(-10) + 4, y, name, colour)
        ran = counted(Told([{"0": seconds}], ends=True), window)
        lanes = _lanes(sorted((w, n) for _, w, n in ran.emitted))
        for number, lane in enumerate(lanes):
            for bounds, n in lane:
                left, right = across(bounds.start / S), across(bounds.end / S)
                picture.box(left + 1, y + 8 + 28 * number, right - left - 2, 24, colour, 0.12)
                picture.text((left + right) / 2, y + 24.5 + 28 * number, str(n), colour, anchor="middle")
        y += 40 + 28 * len(lanes)
    return picture.svg()


def _lanes(found: Sequence[tuple[Window, int]]) -> list[list[tuple[Window, int]]]:
    """Windows one below the other where they overlap."""
    lanes: list[list[tuple[Window, int]]] = []
    for window, n in found:
        free = next((lane for lane in lanes if lane[-1][0].end <= window.start), None)
        if free is None:
            lanes.append([(window, n)])
        else:
            free.append((window, n))
    return lanes


def sessions() -> str:
    """Two sessions of a key that a record makes one."""
    assigner = hf.session("5s")
    told = [
        ((2, 4), "2 s and 4 s have come: one session"),
        ((2, 4, 12), "12 s comes: another"),
        ((2, 4, 12, 8), "8 s comes, out of order: its own session touches both, and they become one"),
    ]
    picture = Picture(330, 'hf.session("5s"): a record that joins two sessions')
    across, y = Scale(0, 20, 40, 720), 76.0
    for second in range(0, 21, 5):
        picture.line([(across(second), 50), (across(second), 296)], "grid", dashes="2 4")
        picture.text(across(second), 314, f"{second} s", "muted", size="small", anchor="middle")
    for seconds, words in told:
        picture.text(across(0) + 4, y, words)
        own = [window for second in seconds for window in assigner.assign(second * S, {})]
        for session, _ in merge(own):
            left, right = across(session.start / S), across(session.end / S)
            picture.box(left, y + 12, right - left, 34, "orange", 0.12)
            shown = f"{session.start // S} s to {session.end // S} s"
            picture.text(right - 8, y + 33, shown, "orange", size="small", anchor="end")
        if len(merge(own)) < len(merge(own[:-1])):
            ends = [across(own[-1].start / S), across(own[-1].end / S)]
            picture.line([(ends[0], y + 42), (ends[1], y + 42)], "green", 1.5, dashes="4 3")
        for second in seconds:
            picture.dot(across(second), y + 29, "green", hollow=second == seconds[-1])
        y += 80
    return picture.svg()


def idle() -> str:
    """Two splits, one of which falls silent: it holds the clock, steps out, and comes back."""
    ahead = [6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50]
    behind = {0: 1, 1: 5, 2: 9, 8: 24, 9: 36, 10: 43, 11: 47}
    epochs = [
        {"0": [at]} | ({"1": [behind[number]]} if number in behind else {}) for number, at in enumerate(ahead)
    ]
    ran = counted(Told(epochs), hf.tumbling("10s"), idle_after="3s")
    picture = Picture(430, 'The watermarks of two splits, idle_after="3s", and the clock of a window')
    across, up = Scale(1, len(epochs), 70, 690), Scale(0, 55, 380, 60)
    away = [plan.epoch for plan in ran.run.plans if plan.idle]
    left, right = across(away[0] - 0.5), across(away[-1] + 0.5)
    picture.area([(left, up(0)), (left, up(55)), (right, up(55)), (right, up(0))], "shade")
    _axis_y(picture, across, up, range(0, 51, 10))
    for epoch in range(1, len(epochs) + 1):
        picture.text(across(epoch), 398, str(epoch), "muted", size="small", anchor="middle")
    picture.text((across.start + across.end) / 2, 418, "epochs, a second each", "muted", anchor="middle")
    for name, colour in (("in/0", "green"), ("in/1", "violet")):
        marks = [(c.epoch, (c.marks["in.time"][name] + 1) / S) for c in ran.run.commits]
        picture.line(_steps(marks, across, up), colour, 1.5, dashes="5 4")
    clock = [(c.epoch, ran.clock_s(c.epoch)) for c in ran.run.commits]
    picture.line(_steps(clock, across, up), "blue", 3)
    for number, epoch in enumerate(epochs, start=1):
        for name, at in epoch.items():
            colour = "red" if at[0] in ran.late else "green" if name == "0" else "violet"
            picture.dot(across(number), up(at[0]), colour)
            if at[0] in ran.late:
                picture.text(across(number) + 10, up(at[0]) + 14, "back, and late", "red")
    picture.text((left + right) / 2, up(51.5), "split 1 is idle", "muted", anchor="middle")
    picture.text(across(4) - 8, up(15.9), "split 0", "green", anchor="end")
    picture.text(across(4), up(4.5), "split 1 is silent", "violet")
    picture.text(across(6) + 10, up(22.6), "clock", "blue")
    return picture.svg()


PICTURES: dict[str, Callable[[], str]] = {
    "time-watermark.svg": watermark,
    "time-windows.svg": windows,
    "time-sessions.svg": sessions,
    "time-idle.svg": idle,
}
"""What is drawn, by the name of the file in docs/img."""


def main() -> None:
    """Draw them all again."""
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())


if __name__ == "__main__":
    main()
