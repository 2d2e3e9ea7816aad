"""`holdfast demo`: half a minute of the vehicle map, run for real on this machine and drawn in the terminal."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import holdfast
from holdfast.cli.country import TILES, Country, MapPicture, change_lines
from holdfast.cli.directory import is_running
from holdfast.cli.loading import load_file
from holdfast.cli.output import amount, clock, console, millis, print_json, size
from holdfast.cli.reporting import Reporter, reporter_for
from holdfast.cli.running import run_reported
from holdfast.cli.view import narrow_view
from holdfast.cli.watching import Seen
from holdfast.config import Settings
from holdfast.errors import PipelineError
from holdfast.log.journal import Journal
from holdfast.metrics import EpochFacts, Status, read_status

MASTER, RATE = "local[2]", 20_000
_MARK = "made-by-holdfast-demo"
_SIDE_WIDTH, _PANEL_HEIGHT = 44, 11


def demo(
    seconds: Annotated[float, typer.Option(min=1, help="How long to run.")] = 30.0,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line: each epoch, the end, a summary.")
    ] = False,
) -> None:
    """Run the vehicle map (examples/vehicle_map.py) on this machine for half a minute, and draw it.

    Vehicles report positions and what they saw; the pipeline keeps map tiles
    up to date and flags changes.
    """
    example = find_example()
    home = make_home(Path(".holdfast/demo"))
    country = Country(home / "out")
    pipeline = load_file(example).build(rate=RATE, out=str(home / "out"))
    settings = Settings(dir=str(home / "pipeline"), master=MASTER, parallelism=2)
    reporter = reporter_for(json=json, draw=_Drawing(country, console()).frame)
    run_reported(pipeline, settings, reporter, _Timer(reporter, home / "pipeline", seconds).hear)
    country.catch_up()
    facts = summary(reporter.seen, country, home)
    if json:
        print_json({"event": "summary", **facts})
    else:
        _print_summary(facts, console())


def find_example() -> Path:
    """The example, in the checkout that this package runs from, or below the current folder."""
    checkout = Path(holdfast.__file__).resolve().parents[2]
    for folder in (checkout, Path.cwd()):
        example = folder / "examples" / "vehicle_map.py"
        if example.is_file():
            return example
    raise PipelineError(
        "The demo runs examples/vehicle_map.py, which is in a checkout of holdfast and not in the installed package.",
        remedy="Clone the repository and run `make demo`, or run `holdfast demo` in the clone.",
    )


def make_home(wanted: Path) -> Path:
    """An empty folder: the one that an earlier demo made, emptied, or a temporary one if it is somebody else's."""
    ours = (wanted / _MARK).is_file() and not is_running(read_status(wanted / "pipeline"))
    if wanted.exists() and not ours:
        wanted = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    elif ours:
        shutil.rmtree(wanted)
    wanted.mkdir(parents=True, exist_ok=True)
    (wanted / _MARK).touch()
    return wanted


class _Timer:
    """Asks the run to stop, as `holdfast stop` would, so many seconds after its first epoch."""

    def __init__(self, reporter: Reporter, directory: Path, seconds: float) -> None:
        self._reporter, self._directory, self._seconds = reporter, directory, seconds
        self._started = False

    def hear(self, status: Status, facts: EpochFacts | None) -> None:
        self._reporter.hear(status, facts)
        if facts is not None and not self._started:
            self._started = True
            timer = threading.Timer(self._seconds, Journal.at(self._directory).ask_to_stop)
            timer.daemon = True
            timer.start()


class _Drawing:
    """The demo's frame: the map on the left, figures and changes on the right."""

    def __init__(self, country: Country, terminal: Console) -> None:
        self._country, self._terminal = country, terminal
        self._caught_up = 0.0

    def frame(self, seen: Seen) -> RenderableType:
        if time.monotonic() - self._caught_up > 0.4:
            self._country.catch_up()
            self._caught_up = time.monotonic()
        return demo_view(seen, self._country, self._terminal.width, self._terminal.height)


def demo_view(seen: Seen, country: Country, width: int, height: int) -> RenderableType:
    """The whole picture, for a terminal of a size; without the map where there is no room for it."""
    cells = min(TILES, width - _SIDE_WIDTH - 5, 2 * (height - 4))
    cells -= cells % 2
    if cells < 24:
        return narrow_view(seen, _SIDE_WIDTH)
    rows = max(cells // 2 + 2, _PANEL_HEIGHT + 4)
    side = Group(narrow_view(seen, _SIDE_WIDTH), _changes(country, rows - _PANEL_HEIGHT))
    grid = Table.grid(padding=(0, 1))
    grid.add_row(_map(country, cells), side)
    return grid


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
        border_style="bright_black",
    )


def _changes(country: Country, height: int) -> RenderableType:
    lines = change_lines(country, height - 2)
    return Panel(
        Group(*lines) if lines else Text("none flagged yet", style="dim"),
        title=f"road changes: {amount(country.flagged)} flagged",
        title_align="left",
        width=_SIDE_WIDTH,
        height=max(3, height),
        border_style="bright_black",
        padding=(0, 1),
    )


def summary(seen: Seen, country: Country, home: Path) -> dict[str, Any]:
    """What the demo did, as plain data."""
    status = seen.status
    rate = sum(seen.rates) / max(1, len(seen.rates))
    x, y = country.busiest()
    return {
        "records": 0 if status is None else status.records,
        "epochs": seen.epochs,
        "seconds": round(seen.uptime_s, 1),
        "records_per_s": round(rate, 1),
        "first_epoch_ms": round(seen.first_ms, 1),
        "latency_p50_ms": round(seen.latency_ms(0.5), 1),
        "latency_p99_ms": round(seen.latency_ms(0.99), 1),
        "state_keys": 0 if status is None else status.state_keys,
        "state_bytes": 0 if status is None else status.state_bytes,
        "changes": country.flagged,
        "tiles": int((country.reports > 0).sum()),
        "output": str(home / "out"),
        "look": f"holdfast state {home / 'pipeline'} --operator tiles --key {x},{y}",
    }


def _print_summary(facts: dict[str, Any], out: Console) -> None:
    lines = [
        ("done", f"{amount(facts['records'])} records in {amount(facts['epochs'])} epochs, {clock(facts['seconds'])} with start-up"),
        ("speed", f"{amount(facts['records_per_s'])} records/s; latency p50 {millis(facts['latency_p50_ms'])}, "
                  f"p99 {millis(facts['latency_p99_ms'])}, first epoch {millis(facts['first_epoch_ms'])}"),
        ("state", f"{amount(facts['state_keys'])} keys, {size(facts['state_bytes'])}"),
        ("map", f"{amount(facts['tiles'])} tiles, {amount(facts['changes'])} road changes flagged"),
        ("output", f"{facts['output']}: tiles and vehicles (Parquet), changes (JSON lines)"),
        ("look at it", facts["look"]),
        ("", f"tail -n 3 {facts['output']}/changes/*.jsonl"),
    ]  # fmt: skip
    out.print()
    for name, text in lines:
        out.print(Text.assemble((f"{name:<11}", "dim"), text), soft_wrap=True)
