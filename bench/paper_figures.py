"""The figures of `bench paper` as SVG, and its numbers as the tables of docs/paper.md."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import MissingExtraError

HISTORY, TRIALS = "paper-history.svg", "paper-trials.svg"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
"""Between these `--docs` writes; the rest of the page is a person's."""
_COLOURS = ("#0969da", "#bc4c00", "#8250df")
_DEADLINE, _BEFORE, _AFTER = "#cf222e", "#afb8c1", "#24292f"
NAMES = {"manual": "without the deadline", "deadline": "with the deadline"}


def check() -> None:
    """Say before the first measurement that nothing can be drawn, and not after the last."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            "The figures need matplotlib, which is not installed.",
            remedy="Install it with: pip install matplotlib; or give --no-plots.",
        ) from error


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """Both figures, where there is anything to draw."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, kind, how in ((HISTORY, "history", _history), (TRIALS, "trials", _trials)):
        if any(s["points"] for s in results[kind]):
            made.append(how(results, folder / name))
    return made


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color="#d0d7de", linewidth=0.6)
    return figure, axes


def _saved(figure: Any, file: Path) -> Path:
    import matplotlib

    # The same results give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "holdfast", "svg.fonttype": "none"}):
        figure.savefig(file, metadata={"Date": None, "Creator": None})
    return file


def _history(results: dict[str, Any], file: Path) -> Path:
    """Recovery against history: a colour a size, dashed without the deadline."""
    figure, axes = _figure(8, 4.4)
    sizes = list(dict.fromkeys(s["size"] for s in results["history"]))
    for series in results["history"]:
        if not series["points"]:
            continue
        axes.plot(
            [p["epochs"] for p in series["points"]],
            [p["recovery_s"] for p in series["points"]],
            color=_COLOURS[sizes.index(series["size"]) % len(_COLOURS)],
            linestyle="-" if series["policy"] == "deadline" else ":",
            marker="o",
            markersize=4,
            label=f"{series['size']}, {NAMES.get(series['policy'], series['policy'])}",
        )
    axes.axhline(results["deadline_s"], color=_DEADLINE, linestyle="--", linewidth=1.2, label="the deadline")
    axes.set_xlabel("epochs since the map was drawn and first backed up")
    axes.set_ylabel("recovery after a lost host, s")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    return _saved(figure, file)


def _trials(results: dict[str, Any], file: Path) -> Path:
    """A pair of bars a trial, before in grey and after in black, as in the paper."""
    figure, axes = _figure(9, 4)
    for place, (series, colour) in enumerate(zip(results["trials"], (_BEFORE, _AFTER), strict=False)):
        named = "before" if place == 0 else "after"
        policy = f"a backup every {series['policy']}" if place == 0 else "as the deadline asks"
        axes.bar(
            [p["trial"] + 0.4 * (place - 0.5) for p in series["points"]],
            [p["recovery_s"] for p in series["points"]],
            width=0.4,
            color=colour,
            label=f"{named}: {policy}",
        )
    axes.axhline(results["deadline_s"], color=_DEADLINE, linestyle="--", linewidth=1.2, label="the deadline")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("trial")
    axes.set_ylabel("recovery after a lost host, s")
    axes.legend(frameon=False, fontsize=8)
    return _saved(figure, file)


# The page


def into_docs(results: dict[str, Any], plots: Path, docs: Path) -> None:
    """Copy the figures to docs/img, and write what was measured between the page's marks."""
    (docs / "img").mkdir(exist_ok=True)
    for name in (HISTORY, TRIALS):
        if (plots / name).exists():
            shutil.copyfile(plots / name, docs / "img" / name)
    page = docs / "paper.md"
    page.write_text(filled(page.read_text(), measured(results)))


def filled(page: str, text: str) -> str:
    """A page with a text between its marks."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page must have {BEGIN} and {END} once each")
    before, after = page.split(BEGIN, maxsplit=1)[0], page.split(END)[1]
    return f"{before}{BEGIN}\n{text.strip()}\n{END}{after}"


def measured(results: dict[str, Any]) -> str:
    """What was measured, as Markdown."""
    parts = [_machine(results)]
    if any(s["points"] for s in results["history"]):
        parts += [
            f"![Recovery against the length of history](img/{HISTORY})",
            _history_table(results["history"]),
        ]
    if any(s["points"] for s in results["trials"]):
        parts += [f"![Each trial's recovery](img/{TRIALS})", _trials_table(results["trials"])]
    if any(s["points"] for s in results["peer"]):
        parts.append(_peer_table(results["peer"]))
    if left := [*results["skipped"], *results["failed"]]:
        parts.append("Not measured:\n\n" + "\n".join(f"- {one['what']}: {one['why']}" for one in left))
    return "\n\n".join(parts)


def _machine(results: dict[str, Any]) -> str:
    on = results["machine"]
    return (
        f"Measured on {on['cores']} cores and {on['memory_gb']} GB of memory, Python {on['python']}, "
        f"Java {on['java']}, PySpark {on['pyspark']}; the deadline is {results['deadline_s']:g} s."
    )


def _history_table(all_series: Sequence[dict[str, Any]]) -> str:
    rows = []
    for series in all_series:
        for p in series["points"]:
            rows.append(
                [
                    series["size"],
                    NAMES.get(series["policy"], series["policy"]),
                    f"{p['epochs']:,}",
                    f"{p['history']:,}",
                    f"{p['recovery_s']:.1f}",
                    f"{p['bound_s']:.1f}" if "bound_s" in p else "",
                    "can" if p.get("feasible", True) else "can't",
                ]
            )
    heads = [
        "state",
        "backups",
        "epochs",
        "of them since the last backup",
        "recovery, s",
        "bound before it, s",
        "said of the deadline: for all faults it … be held",
    ]
    return markdown(heads, rows, right=heads[2:-1])


def _trials_table(all_series: Sequence[dict[str, Any]]) -> str:
    rows = []
    for series in all_series:
        took = [p["recovery_s"] for p in series["points"]]
        if not took:
            continue
        policy = "as the deadline asks" if series["policy"] == "deadline" else f"every {series['policy']}"
        backups = str(series["run"]["backups"]) if "run" in series else ""
        figures = [f"{f:.1f}" for f in (min(took), statistics.median(took), max(took))]
        late = str(sum(t > series["deadline_s"] for t in took))
        rows.append([policy, series["size"], str(len(took)), *figures, late, backups])
    heads = ["backups", "state", "trials", "shortest, s", "median, s", "longest, s", "late", "backups made"]
    return markdown(heads, rows, right=heads[2:])


def _peer_table(all_series: Sequence[dict[str, Any]]) -> str:
    named = {
        "ours": "holdfast, driver killed",
        "ours, disk lost": "holdfast, driver killed and the state on its disk lost",
        "structured-streaming": "Structured Streaming, driver killed",
    }
    rows = []
    for series in all_series:
        took = sorted(p["restart_s"] for p in series["points"])
        figures = [f"{statistics.median(took):.1f}", f"{took[0]:.1f} to {took[-1]:.1f}"] if took else ["", ""]
        rows.append([named[series["who"]], series["size"], str(len(took)), *figures])
    heads = ["from the start of the process to the next commit", "state", "times", "median, s", "spread, s"]
    return markdown(heads, rows, right=heads[2:])


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> str:
    """A table.

    >>> print(markdown(["a", "b"], [["x", "1"]], right=["b"]))
    | a | b |
    | --- | ---: |
    | x | 1 |
    """
    rule = ["---:" if h in right else "---" for h in heads]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, rule, *rows))
