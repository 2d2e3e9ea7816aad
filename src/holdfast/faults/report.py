"""A drill as one HTML file: tables, and plots as SVG inside it. Nothing is loaded from anywhere.

Pure: what a drill found in, text out. The plots need matplotlib, the extra `plots`. They are drawn without a ground
and with lines and letters in the page's own colour, so that they read in light and dark.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from holdfast.errors import MissingExtraError
from holdfast.faults.drill import NEAR, SURE, Drill, Trial, by_fault, summary
from holdfast.recovery.explain import NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = "#010203"
"""Stands for the page's colour of letters while a plot is drawn."""
_PARTS = {"detection": "#8c959f", "environment": "#3b82f6", "loading": "#22a06b", "recomputing": "#d97706"}
_FAULTS = {
    "worker": "#9333ea",
    "executor": "#3b82f6",
    "host": "#d97706",
    "driver": "#22a06b",
    "application": "#db2777",
}
_LATE, _QUIET = "#dc2626", "#8c959f"
_MOST_POINTS = 4000
_RC: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _INK,
    "grid.alpha": 0.12,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --page: #ffffff; --quiet: #656d76; --line: #d0d7de; --late: #cf222e }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --page: #0d1117; --quiet: #8d96a0; --line: #30363d; --late: #ff7b72 }
}
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin: 2.2rem 0 .3rem }
p { color: var(--quiet); margin: .2rem 0 .8rem }
svg { width: 100%; height: auto; color: var(--ink) } svg text { font-family: system-ui, sans-serif !important }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line); white-space: nowrap }
th:first-child, td:first-child, .text { text-align: left } .late { color: var(--late); font-weight: 600 }
"""


def check_plots() -> None:
    """Raise if there is nothing to draw with."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            "The report's plots are drawn with matplotlib, which is not installed.",
            remedy="Install it with: pip install matplotlib",
        ) from None


def render(drill: Drill) -> str:
    """The whole file."""
    check_plots()
    sections = [
        (
            "Recovery times",
            "From each fault to the commit of the last epoch planned before it. The short lines are the 99% bounds "
            "that were forecast.",
            _drawn("times", 9, 3.6, lambda axes: _times(axes, drill)),
        ),
        (
            "Estimate against outcome",
            "On the diagonal an estimate was right; above it, recovery took longer.",
            _drawn("scatter", 6.4, 5, lambda axes: _scatter(axes, drill.trials)),
        ),
        (
            "What the time went into",
            "Each trial twice: pale as estimated before the fault, full as measured after it.",
            _drawn("parts", 9, 3.8, lambda axes: _parts(axes, drill.trials)),
        ),
        (
            "Checkpoints",
            "The bound for the worst fault after every epoch, against the deadline. Marks at the foot are backups, "
            "upright lines are faults.",
            _drawn("bound", 9, 3.8, lambda axes: _bound(axes, drill)),
        ),
    ]
    body = "".join(
        f"<h2>{title}</h2>\n<p>{text}</p>\n<div class='wide'>{svg}</div>\n" for title, text, svg in sections
    )
    title = f"Drill of {escape(drill.app)}"
    return (
        f"<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        f"<meta name='viewport' content='width=device-width'>\n<title>{title}</title>\n<style>{_STYLE}</style>\n"
        f"</head>\n<body>\n<h1>{title}</h1>\n{_figures(drill)}{_of_faults(drill)}{body}{_of_trials(drill)}"
        "</body>\n</html>\n"
    )


# Tables


def _figures(drill: Drill) -> str:
    found = summary(drill)
    rows = [
        ["deadline", f"{drill.deadline_s:g} s, policy {drill.policy}, confidence {drill.confidence:g}"],
        ["trials", f"{found['trials']}, seed {drill.seed}, state in {drill.backend}"],
        ["later than the deadline", _marked(found["misses"])],
        [
            "recovery",
            f"median {found['median_recovery_s']:.1f} s, longest {found['longest_recovery_s']:.1f} s",
        ],
        ["estimate off by", f"{found['mean_abs_error']:.0%} on average"],
        ["under the 99% bound", f"{found['under_bound']} of {found['trials']}"],
        ["backups", str(found["backups"])],
        [f"faults with the bound above {NEAR:.0%} of the deadline", f"{found['near_deadline']:.0%}"],
        [
            "lost, doubled, different",
            _marked(found["lost"], found["doubled"], found["different_states"])
            if drill.verdict is not None
            else "it was not back at the end: nothing was compared",
        ],
    ]
    lines = "".join(f"<tr><td>{escape(a)}</td><td class='text'>{b}</td></tr>\n" for a, b in rows)
    return f"<table>\n{lines}</table>\n"


def _marked(*counts: int) -> str:
    return ", ".join(f"<span class='late'>{n}</span>" if n else "0" for n in counts)


def _of_faults(drill: Drill) -> str:
    rows = [
        [
            one.fault,
            str(one.times),
            f"{one.median_s:.1f}",
            f"{one.longest_s:.1f}",
            f"{one.estimate_s:.1f}",
            f"{one.error:.0%}",
            str(one.under_bound),
            _marked(one.missed),
        ]
        for one in by_fault(drill.trials)
    ]
    columns = ["fault", "times", "median s", "longest s", "estimate s", "off by", "under bound", "missed"]
    return f"<h2>By fault</h2>\n{_table(columns, rows)}"


def _of_trials(drill: Drill) -> str:
    columns = [
        "trial",
        "fault",
        "victim",
        "estimate s",
        "99% bound s",
        "back after s",
        "off by",
        "caught up s",
    ]
    rows = []
    for trial in drill.trials:
        outcome = trial.outcome
        took = f"{outcome.took_s:.1f}"
        rows.append(
            [
                str(trial.number),
                outcome.fault,
                escape(trial.struck.victim),
                f"{outcome.estimated.total:.1f}",
                f"{outcome.bounds[SURE]:.1f}",
                f"<span class='late'>{took}</span>" if trial.missed else took,
                f"{outcome.error:.0%}",
                "" if outcome.caught_up_s is None else f"{outcome.caught_up_s:.1f}",
            ]
        )
    return f"<h2>Every trial</h2>\n{_table(columns, rows, text=('fault', 'victim'))}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], text: Sequence[str] = ()) -> str:
    def cells(kind: str, row: Sequence[str]) -> str:
        marks = [" class='text'" if name in text else "" for name in columns]
        return "".join(f"<{kind}{m}>{cell}</{kind}>" for m, cell in zip(marks, row, strict=True))

    lines = "".join(f"<tr>{cells('td', row)}</tr>\n" for row in rows)
    return f"<div class='wide'><table>\n<tr>{cells('th', columns)}</tr>\n{lines}</table></div>\n"


# Plots


def _drawn(name: str, width: float, height: float, draw: Any) -> str:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings: Any = {**_RC, "svg.hashsalt": name}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure.add_subplot())
        return _inline(figure)


def _inline(figure: Figure) -> str:
    """A figure as a piece of HTML: in the page's colour, without names of other places, which SVG files begin with."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    return text.replace(_INK, "currentColor")


def _colour(fault: str) -> str:
    return _FAULTS.get(fault.partition("-")[0], _QUIET)


def _marker(fault: str) -> str:
    return "s" if fault.endswith("freeze") else "o"


def _by_label(trials: Sequence[Trial]) -> list[tuple[str, list[Trial]]]:
    labels = sorted({t.outcome.fault for t in trials})
    return [(label, [t for t in trials if t.outcome.fault == label]) for label in labels]


def _deadline(axes: Axes, deadline_s: float) -> None:
    axes.axhline(deadline_s, color=_LATE, linestyle="--", linewidth=1.4, label="deadline")


def _legend(axes: Axes) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _by_trial(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.set(xlabel="trial", ylabel="seconds")


def _times(axes: Axes, drill: Drill) -> None:
    for label, of in _by_label(drill.trials):
        axes.scatter(
            [t.number for t in of],
            [t.outcome.took_s for t in of],
            color=_colour(label),
            marker=_marker(label),
            s=34,
            label=label,
            zorder=3,
        )
    numbers = [t.number for t in drill.trials]
    bounds = [t.outcome.bounds[SURE] for t in drill.trials]
    axes.scatter(numbers, bounds, color=_QUIET, marker="_", s=80, label="99% bound", zorder=2)
    _deadline(axes, drill.deadline_s)
    axes.set_ylim(bottom=0)
    _by_trial(axes)
    _legend(axes)


def _scatter(axes: Axes, trials: Sequence[Trial]) -> None:
    most = 1.08 * max(max(t.outcome.took_s, t.outcome.estimated.total) for t in trials)
    axes.plot([0, most], [0, most], color=_INK, linewidth=1, alpha=0.5, label="exact")
    for label, of in _by_label(trials):
        axes.scatter(
            [t.outcome.estimated.total for t in of],
            [t.outcome.took_s for t in of],
            color=_colour(label),
            marker=_marker(label),
            s=34,
            alpha=0.85,
            label=label,
            zorder=3,
        )
    axes.set(xlabel="estimated, seconds", ylabel="measured, seconds", xlim=(0, most), ylim=(0, most))
    _legend(axes)


def _parts(axes: Axes, trials: Sequence[Trial]) -> None:
    for shift, pale in ((-0.2, True), (0.2, False)):
        numbers = [t.number + shift for t in trials]
        feet = [0.0] * len(trials)
        for name in NAMES:
            of = [t.outcome.estimated if pale else t.outcome.measured for t in trials]
            heights = [float(getattr(parts, name)) for parts in of]
            axes.bar(
                numbers,
                heights,
                bottom=feet,
                width=0.38,
                color=_PARTS[name],
                alpha=0.4 if pale else 1.0,
                label=None if pale else name,
            )
            feet = [a + b for a, b in zip(feet, heights, strict=True)]
    axes.grid(False, axis="x")
    _by_trial(axes)
    _legend(axes)


def _bound(axes: Axes, drill: Drill) -> None:
    if not drill.epochs:
        axes.text(0.5, 0.5, "no epoch was recorded", ha="center", transform=axes.transAxes)
        return
    began_ms = drill.epochs[0].at_ms
    # Of so many epochs that no picture shows them all, the highest bound of each few.
    few = math.ceil(len(drill.epochs) / _MOST_POINTS)
    shown = [
        max(drill.epochs[first : first + few], key=lambda e: e.bound_s)
        for first in range(0, len(drill.epochs), few)
    ]
    at = [(e.at_ms - began_ms) / 1000 for e in shown]
    bounds, estimates = [e.bound_s for e in shown], [e.estimate_s for e in shown]
    label = f"bound, {drill.confidence:g}"
    axes.step(at, bounds, where="post", color="#3b82f6", linewidth=1.3, label=label)
    axes.step(at, estimates, where="post", color=_QUIET, linewidth=1, label="estimate")
    _deadline(axes, drill.deadline_s)
    if drill.made:
        begun = [(b.at_ms - began_ms) / 1000 for b in drill.made]
        axes.plot(
            begun, [0.0] * len(begun), "^", color="#22a06b", markersize=7, label="backup", clip_on=False
        )
    for place, trial in enumerate(drill.trials):
        axes.axvline(
            (trial.struck.at_ms - began_ms) / 1000,
            color=_colour(trial.outcome.fault),
            linewidth=0.9,
            alpha=0.6,
            label="fault" if place == 0 else None,
        )
    axes.set_ylim(bottom=0)
    axes.set(xlabel="seconds since the first epoch", ylabel="seconds")
    _legend(axes)
