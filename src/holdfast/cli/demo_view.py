"""The demo on a terminal: the map on the left; figures, recovery against its deadline, and what happens on the right.

Drawn from what was seen, for a terminal of any size: what there is no room for is left out, the map first.
"""

from __future__ import annotations

import time

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from holdfast.cli.country import TILES, Country, MapPicture, change_lines
from holdfast.cli.demo_story import Event, Hit, Story
from holdfast.cli.output import amount, clock
from holdfast.cli.view import narrow_view, recovery_bar
from holdfast.cli.watching import Seen

_SIDE_WIDTH = 44
_FIGURES_HEIGHT = 12
_EVENTS_HEIGHT, _EVENTS_LEAST = 11, 8
_RECOVERY_HEIGHT = 4
_LEAST_HEIGHT = 4
"""Of a panel: fewer rows tell nothing."""
_LEAST_CELLS = 24
_CATCH_UP_S = 0.4
_BORDERS = {"dead": "red", "recovering": "yellow"}
_QUIET = "bright_black"


class Drawing:
    """The demo's frames; with a story if something happens."""

    def __init__(self, country: Country, terminal: Console, story: Story | None = None) -> None:
        self._country, self._terminal, self._story = country, terminal, story
        self._caught_up = 0.0

    def frame(self, seen: Seen) -> RenderableType:
        """What is to be seen now."""
        if time.monotonic() - self._caught_up > _CATCH_UP_S:
            self._country.catch_up()
            self._caught_up = time.monotonic()
        return demo_view(seen, self._country, self._terminal.width, self._terminal.height, self._story)


def demo_view(
    seen: Seen, country: Country, width: int, height: int, story: Story | None = None
) -> RenderableType:
    """The whole picture, for a terminal of a size; without the map where there is no room for it."""
    room = height - 2
    cells = min(TILES, width - _SIDE_WIDTH - 5, 2 * (room - 2))
    cells -= cells % 2
    if cells < _LEAST_CELLS:
        return Group(*_side(seen, country, story, room, min(width, _SIDE_WIDTH)))
    rows = cells // 2 + 2
    wanted = max(
        rows, _FIGURES_HEIGHT + (_LEAST_HEIGHT if story is None else _EVENTS_HEIGHT + _RECOVERY_HEIGHT)
    )
    grid = Table.grid(padding=(0, 1))
    grid.add_row(_map(country, cells), Group(*_side(seen, country, story, min(room, wanted), _SIDE_WIDTH)))
    return grid


def _side(seen: Seen, country: Country, story: Story | None, rows: int, width: int) -> list[RenderableType]:
    """What stands beside the map, in so many rows: what happens before all else, changes of roads last."""
    if story is None:
        shown: list[RenderableType] = [narrow_view(seen, width)]
        left = rows - _FIGURES_HEIGHT
        return [*shown, _changes(country, left, width)] if left >= _LEAST_HEIGHT else shown
    if rows < _FIGURES_HEIGHT + _EVENTS_LEAST:
        return [_one_line(seen), events_panel(story, seen, rows - 1, width)]
    if seen.status is None:
        return [events_panel(story, seen, rows, width)]
    shown, left = [_figures(seen, width)], rows - _FIGURES_HEIGHT
    if left >= _EVENTS_HEIGHT + _RECOVERY_HEIGHT and seen.status.bound_s:
        shown, left = [*shown, _recovery(seen, width)], left - _RECOVERY_HEIGHT
    changes = left - _EVENTS_HEIGHT
    if changes < _LEAST_HEIGHT:
        return [*shown, events_panel(story, seen, left, width)]
    return [*shown, events_panel(story, seen, _EVENTS_HEIGHT, width), _changes(country, changes, width)]


def _figures(seen: Seen, width: int) -> RenderableType:
    """The figures of a run that is not this process: Ctrl-C ends the demo and all of it."""
    panel = narrow_view(seen, width)
    if isinstance(panel, Panel) and seen.status is not None:
        state = seen.status.state
        panel.border_style = _BORDERS.get(state, panel.border_style)
        if state not in ("stopped", "failed"):
            panel.subtitle = Text("Ctrl-C ends it and clears up", style="dim")
    return panel


def _one_line(seen: Seen) -> Text:
    status = seen.status
    if status is None:
        return Text("starting…", style="dim", no_wrap=True)
    return Text.assemble(
        (f"● {status.state}", "dim"),
        f" epoch {amount(status.epoch)}, {amount(status.records_per_s)}/s",
        (f", recovery ≤ {status.bound_s:.1f} s", "dim"),
        no_wrap=True,
    )


_NAMES = (("detection", "yellow"), ("environment", "blue"), ("loading", "magenta"), ("recomputing", "cyan"))


def _recovery(seen: Seen, width: int) -> RenderableType:
    """Recovery from the worst fault, if it came now, in its parts and against the deadline."""
    status = seen.status
    assert status is not None
    worst = status.forecasts.get(status.worst_fault)
    parts = Text(no_wrap=True)
    for name, colour in _NAMES if worst is not None else ():
        parts.append(f"{' + ' if parts else ''}", style="dim")
        parts.append(f"{getattr(worst, f'{name}_s'):.1f}", style=colour)
    parts.append(f" s, {status.worst_fault}", style="dim")
    return Panel(
        Group(recovery_bar(status, width - 4), parts),
        title=f"worst fault now: ≤ {status.bound_s:.0f} s of {status.deadline_s:g} s",
        title_align="left",
        width=width,
        border_style=_QUIET if status.bound_s <= status.deadline_s else "red",
        padding=(0, 1),
    )


def events_panel(story: Story, seen: Seen, height: int, width: int = _SIDE_WIDTH) -> Panel:
    """The last things that happened, and a stopwatch while something is being recovered from."""
    lines: list[Text] = []
    hit = story.open
    for event in story.events.copy():
        lines += _lines(event)
    if hit is not None:
        lines += _stopwatch(hit, story.at_s - hit.at_s, width - 4)
    if said := _said(story, seen):
        lines.append(Text(f"     {said}", style="dim", no_wrap=True, overflow="ellipsis"))
    room = max(1, height - 2)
    return Panel(
        Group(*lines[-room:]),
        title=f"what happens · {clock(story.at_s)}",
        title_align="left",
        width=width,
        height=max(3, height),
        border_style=_QUIET if hit is None else "yellow",
        padding=(0, 1),
    )


def _lines(event: Event) -> list[Text]:
    at, hit = f"{clock(event.at_s)} ", event.hit
    if hit is None:
        return [Text.assemble((at, "dim"), event.text, no_wrap=True, overflow="ellipsis")]
    if hit.took_s is not None:
        colour = "bold green" if hit.held else "bold red"
        return [
            Text.assemble((at, "dim"), (hit.outcome, colour), no_wrap=True),
        ]
    return [
        Text.assemble((at, "dim"), (hit.deed, "bold red"), no_wrap=True, overflow="ellipsis"),
        Text(f"     estimate {hit.estimate_s:.1f} s · bound {hit.bound_s:.1f} s", style="dim", no_wrap=True),
    ]


def _stopwatch(hit: Hit, passed_s: float, width: int) -> list[Text]:
    return [
        Text(f"     recovering {passed_s:.1f} s …", style="bold yellow", no_wrap=True),
        stopwatch_bar(hit, passed_s, width),
    ]


def _said(story: Story, seen: Seen) -> str:
    """How far the application is, while no epochs pass."""
    if story.open is None and seen.epochs:
        return ""
    dead = seen.status is not None and seen.status.state == "dead"
    return story.progress or ("the driver is gone" if dead else "")


def stopwatch_bar(hit: Hit, passed_s: float, width: int) -> Text:
    """How far the deadline is away, and where the estimate and its bound stand on the way.

    >>> from holdfast.faults.kinds import Fault
    >>> hit = Hit(Fault.HOST, "host 127.0.0.2", 0.0, 20.0, 40.0, 60.0)
    >>> str(stopwatch_bar(hit, 10.0, 12)), str(stopwatch_bar(hit, 30.0, 12))
    ('██··┊··┊···|', '██████·┊···|')
    """
    scale = (width - 1) / hit.deadline_s
    late = passed_s > hit.deadline_s
    filled = min(width - 1, round(passed_s * scale))
    bar = Text("█" * filled, style="red" if late else "yellow", no_wrap=True)
    marks = {round(hit.estimate_s * scale), round(hit.bound_s * scale)}
    bar.append("".join("┊" if place in marks else "·" for place in range(filled, width - 1)), style="dim")
    return bar.append("|", style="bold red")


def _map(country: Country, cells: int) -> RenderableType:
    return Panel(
        MapPicture(country, cells),
        title="330 × 330 km, tiles of 5 km" if cells > 40 else "330 × 330 km",
        subtitle=Text.assemble(
            ("■", "#401c6e"),
            ("■", "#c44076"),
            ("■", "#fcf6c4"),
            (" reports ", "dim"),
            ("■", "#40e0ff"),
            (" change", "dim"),
        ),
        width=cells + 2,
        padding=0,
        border_style=_QUIET,
    )


def _changes(country: Country, height: int, width: int) -> RenderableType:
    lines = change_lines(country, height - 2)
    return Panel(
        Group(*lines) if lines else Text("none flagged yet", style="dim"),
        title=f"road changes: {amount(country.flagged)} flagged",
        title_align="left",
        width=width,
        height=max(3, height),
        border_style=_QUIET,
        padding=(0, 1),
    )
