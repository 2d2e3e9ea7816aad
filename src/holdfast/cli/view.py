"""The live view of a run, for a terminal: drawn from what was seen, many times a second, changing nothing."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from holdfast.checkpoint.policy import Trigger
from holdfast.cli.output import amount, clock, millis, moment, size
from holdfast.cli.watching import Seen, set_aside
from holdfast.metrics import Recovered, Status, Watermark

_TIMES = 4
"""So many operators are shown with their event time."""
_SOURCES = 3
"""And so many sources of one of them, those furthest behind."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_COLOURS = {"starting": "yellow", "waiting": "yellow", "running": "green", "stopped": "cyan", "failed": "red"}


def sparkline(values: Sequence[float], width: int) -> str:
    """The last values as bars, from nothing to the greatest of them.

    >>> sparkline([0, 1, 2, 4], 10)
    '▁▂▄█'
    """
    last = list(values)[-width:]
    top = max(last, default=0.0)
    if top <= 0:
        return _BLOCKS[0] * len(last)
    return "".join(_BLOCKS[min(7, int(v / top * 7.999))] for v in last)


def run_view(seen: Seen, below: Sequence[RenderableType] = (), spark: int = 32) -> RenderableType:
    """The whole view: the figures, what was said last, and what else is to be seen."""
    status = seen.status
    if status is None:
        return Panel(Text("starting…", style="dim"), expand=False)
    panel = Panel(
        _figures(seen, status, spark),
        title=_title(status),
        title_align="left",
        subtitle=_hint(seen, status),
        subtitle_align="right",
        border_style=_COLOURS.get(status.state, "white"),
        padding=(0, 1),
        expand=False,
    )
    return Group(panel, *_messages(seen, status), *below)


def narrow_view(seen: Seen, width: int) -> RenderableType:
    """The figures in a column, for a view that has more to show."""
    status = seen.status
    if status is None:
        return Panel(Text("starting…", style="dim"), width=width)
    grid = Table.grid(padding=(0, 2))
    for label, value in _column(seen, status):
        grid.add_row(Text(label, style="dim"), value)
    line = Text(sparkline(seen.rates.copy(), width - 4) or " ", style="green", no_wrap=True)
    said = _messages(seen, status)
    return Panel(
        Group(grid, said[-1] if said else line),
        title=_title(status),
        title_align="left",
        subtitle=_hint(seen, status),
        subtitle_align="right",
        border_style=_COLOURS.get(status.state, "white"),
        width=width,
        padding=(0, 1),
    )


def _column(seen: Seen, status: Status) -> list[tuple[str, Text]]:
    return [
        ("epoch", Text.assemble((amount(status.epoch), "bold"), ("  uptime ", "dim"), clock(seen.uptime_s))),
        ("records", Text(amount(status.records))),
        ("latency", Text.assemble((millis(status.latency_ms), "bold"))),
        ("", _percentiles(seen)),
        ("backlog", _backlog(status)),
        ("state", Text(f"{amount(status.state_keys)} keys, {size(status.state_bytes)}")),
        ("bad records", Text(amount(seen.bad_records), style="bold red" if seen.bad_records else "dim")),
        *_times(status),
        *_recovery(status),
        ("records/s", _strong(amount(status.records_per_s))),
    ]


def _recovery(status: Status) -> list[tuple[str, Text]]:
    if not status.bound_s:
        return []
    return [("recovery", _bound(status) + Text(f" of {status.deadline_s:g} s", style="dim"))]


def _open(status: Status) -> list[tuple[str, Watermark]]:
    """The operators whose event time goes on, the one furthest behind first."""
    going = [(u, w) for u, w in status.watermarks.items() if not w.ended]
    return sorted(going, key=lambda found: (found[1].lag_ms is not None, -(found[1].lag_ms or 0)))


def _times(status: Status) -> list[tuple[str, Text]]:
    """How far event time is behind where it is furthest; nothing where there is none."""
    if not status.watermarks:
        return []
    return [("event time", next((_lag(one) for _, one in _open(status)), Text("ended", style="dim")))]


def _lag(one: Watermark) -> Text:
    if one.lag_ms is None:
        return Text("not known yet", style="yellow")
    at = "" if one.ms is None else moment(one.ms) + ", "
    at = at.split(" ", 1)[1] if at.endswith("Z, ") else at  # what day it is, the lag tells
    return Text(f"{at}{clock(max(0, one.lag_ms) / 1000)} behind", style="bold")


def _held(uid: str, one: Watermark, width: int) -> Text:
    """Who holds event time back, and for how long it has not moved."""
    still = f", still for {clock(one.still_ms / 1000)}" if one.still_ms >= 10_000 else ""
    text = f"{one.split} holds {uid}{still}" if one.split else uid
    if one.waits:
        text = f"{uid} waits for {one.waits_for or 'its group'}"
    return Text(_fitting(text, width), style="yellow" if still or one.waits else "dim")


def _behind(uid: str, one: Watermark, width: int) -> list[tuple[Text, Text]]:
    """How far an operator's event time is and who holds it; where it is made of several sources, how far each of the last is."""
    rows = [(_lag(one), _held(uid, one, width))]
    if len(one.sources) > 1:
        furthest = sorted(one.sources.items(), key=lambda found: (-found[1], found[0]))[:_SOURCES]
        rows += [
            (
                Text(f"{clock(max(0, lag) / 1000)} behind", style="dim"),
                Text(_fitting(source, width), style="dim"),
            )
            for source, lag in furthest
        ]
    return rows


def _time_rows(status: Status, width: int) -> list[tuple[str, Text, Text, str, Text]]:
    """A row for each operator that says how far event time is, at most a few; beside them, what came late or was left out."""
    if not status.watermarks:
        return []
    none = Text("")
    times = [row for uid, one in _open(status)[:_TIMES] for row in _behind(uid, one, width)]
    counts = [(name, _counted(n)) for name, n in set_aside(status) if n or name == "late"]
    rows = itertools.zip_longest(times or [(Text("ended", style="dim"), none)], counts)
    return [
        ("" if place else "event time", *(found or (none, none)), *(counted or ("", none)))
        for place, (found, counted) in enumerate(rows)
    ]


def _counted(n: int) -> Text:
    return Text(amount(n), style="yellow" if n else "dim")


def _title(status: Status) -> Text:
    colour = _COLOURS.get(status.state, "white")
    generation = f" · generation {status.generation}" if status.generation else ""
    return Text.assemble(
        (status.pipeline, "bold"), (generation, "default"), " · ", (f"● {status.state}", colour)
    )


def _hint(seen: Seen, status: Status) -> Text:
    if status.state in ("stopped", "failed"):
        return Text(f"ran for {clock(seen.uptime_s)}", style="dim")
    if seen.stopping:
        return Text("stopping after this epoch; Ctrl-C again gives up waiting", style="yellow")
    return Text("Ctrl-C finishes the epoch and stops", style="dim")


def _figures(seen: Seen, status: Status, spark: int) -> Table:
    grid = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "left", "left", "right"):
        grid.add_column(justify=justify, no_wrap=True)
    line = Text(f"{sparkline(seen.rates.copy(), spark):<{spark}}", style="green")
    slow = Text(f"{sparkline(seen.latencies_ms.copy(), spark):<{spark}}", style="magenta")
    bad = Text(amount(seen.bad_records), style="bold red" if seen.bad_records else "dim")
    rows: list[tuple[str, Text, Text, str, Text]] = [
        ("records/s", _strong(amount(status.records_per_s)), line, "epoch", _strong(amount(status.epoch))),
        ("records", Text(amount(status.records)), Text(""), "uptime", Text(clock(seen.uptime_s))),
        ("latency", _strong(millis(status.latency_ms)), slow, "backlog", _backlog(status)),
        (
            "state keys",
            Text(amount(status.state_keys)),
            _percentiles(seen),
            "state",
            Text(size(status.state_bytes)),
        ),
        (
            "bad records",
            bad,
            Text(_fitting(status.directory, spark), style="dim"),
            "checkpoint",
            _checkpoint(status),
        ),
    ]
    rows += _time_rows(status, spark)
    if status.bound_s:
        rows.append(("recovery", _bound(status), recovery_bar(status, spark), "deadline", _deadline(status)))
        rows.append(("", Text(""), _parts(status), "backup", _backup(status)))
    if status.recovered is not None:
        rows.append(("last fault", *_recovered(status.recovered)))
    for label, value, middle, other, last in rows:
        grid.add_row(Text(label, style="dim"), value, middle, Text(other, style="dim"), last)
    return grid


_PARTS = (
    ("detection_s", "yellow"),
    ("environment_s", "blue"),
    ("loading_s", "magenta"),
    ("recomputing_s", "cyan"),
)


def recovery_bar(status: Status, width: int) -> Text:
    """The four parts of the worst recovery and its bound, against the deadline."""
    worst = status.forecasts.get(status.worst_fault)
    if worst is None or not status.deadline_s:
        return Text("")
    scale = width / max(status.deadline_s, status.bound_s)
    bar, drawn, at = Text(no_wrap=True), 0, 0.0
    for name, colour in _PARTS:
        at += float(getattr(worst, name)) * scale
        bar.append("█" * (round(at) - drawn), style=colour)
        drawn = round(at)
    bound = max(drawn, round(status.bound_s * scale))
    bar.append("▒" * (bound - drawn), style="dim")
    bar.append("·" * (width - bound), style="dim")
    return bar


def _parts(status: Status) -> Text:
    """The parts' seconds, each in the colour of its bar."""
    worst = status.forecasts.get(status.worst_fault)
    if worst is None:
        return Text("")
    text = Text(no_wrap=True)
    for name, colour in _PARTS:
        if text:
            text.append(" + ", style="dim")
        text.append(f"{getattr(worst, name):.1f}", style=colour)
    return text.append(f" s, {status.worst_fault}", style="dim")


def _bound(status: Status) -> Text:
    style = "bold red" if status.bound_s > status.deadline_s else "bold green"
    return Text(f"≤ {status.bound_s:.1f} s", style=style)


def _deadline(status: Status) -> Text:
    if not status.feasible:
        return Text(f"{status.deadline_s:g} s can't be held", style="bold red")
    return Text(f"{status.deadline_s:g} s")


def _backup(status: Status) -> Text:
    """When the newest backup was made, and in a word why; the sentence is in `holdfast status`. Or that one is waited for."""
    if status.paused:
        return Text("intake paused", style="yellow")
    if not status.checkpoint_ms:
        return Text("not needed yet" if status.policy == "deadline" else "none yet", style="dim")
    ago_s = max(0.0, time.time() - status.checkpoint_ms / 1000)
    why = next((t.name.lower().replace("_", " ") for t in Trigger if t.value == status.backup_reason), "")
    return Text(f"{clock(ago_s)} ago" + (f", {why}" if why else ""), style="dim")


def _recovered(last: Recovered) -> tuple[Text, Text, str, Text]:
    """What the last fault was, what recovery from it took and was thought to take, and when that was."""
    took = Text(f"{last.took_s:.1f} s", style="bold red" if last.took_s > last.deadline_s else "bold green")
    text = f"{last.fault}, {last.estimate_s:.1f} s estimated"
    ago_s = max(0.0, time.time() - last.at_ms / 1000)
    return took, Text(text, style="dim"), "", Text(f"{clock(ago_s)} ago", style="dim")


def _checkpoint(status: Status) -> Text:
    if status.checkpoint_failures:
        return Text(f"{status.checkpoint_failures} failed", style="bold red")
    return Text(f"epoch {amount(status.checkpoint_epoch)}" if status.checkpoint else "none yet", style="dim")


def _percentiles(seen: Seen) -> Text:
    if not seen.latencies_ms:
        return Text("")
    return Text(f"p50 {millis(seen.latency_ms(0.5))} · p99 {millis(seen.latency_ms(0.99))}", style="dim")


def _strong(text: str) -> Text:
    return Text(text, style="bold")


def _backlog(status: Status) -> Text:
    return Text(amount(status.backlog), style="yellow" if status.backlog else "default")


def _fitting(path: str, width: int) -> str:
    return path if len(path) <= width else f"…{path[1 - width :]}"


def _messages(seen: Seen, status: Status) -> list[Text]:
    """What the engine said while it was starting, gone once epochs run; and how far a recovery is."""
    if status.state == "recovering":
        return [Text(status.message, style="yellow", no_wrap=True)]
    if seen.epochs or status.state not in ("starting", "waiting"):
        return []
    return [Text(f"{message}…", style="yellow", no_wrap=True) for message in seen.messages.copy()]
