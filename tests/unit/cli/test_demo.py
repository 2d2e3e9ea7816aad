"""What the demo tells: its story in lines, as JSON and on a terminal of any size, and what it sums up."""

import dataclasses
import io
import json
import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console, RenderableType

from holdfast.cli import demo_faults
from holdfast.cli.country import Country
from holdfast.cli.demo import print_faults
from holdfast.cli.demo_story import DemoJson, DemoLines, Hit, Story
from holdfast.cli.demo_view import demo_view, events_panel
from holdfast.cli.demo_watch import Watch
from holdfast.cli.watching import Seen
from holdfast.faults.compare import Verdict
from holdfast.faults.kinds import Fault
from holdfast.metrics import EpochFacts, Forecast, Status, write_status

SIZES = [(200, 60), (120, 40), (100, 30), (80, 24), (60, 20), (60, 12), (38, 14)]
EXECUTOR = Hit(Fault.EXECUTOR_KILL, "executor 1 on 127.0.0.2", 12.0, 6.8, 11.9, 60.0)
DRIVER = Hit(Fault.DRIVER_KILL, "driver 4242", 30.0, 17.2, 25.0, 60.0)
FORECAST = Forecast(0.1, 5.0, 1.0, 0.7, 30.0, 20.0)


def drawn(view: RenderableType, width: int = 100) -> str:
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(view)
    return console.export_text().rstrip("\n")


def status(**changes: Any) -> Status:
    known: dict[str, Any] = {
        "state": "running",
        "deadline_s": 60.0,
        "bound_s": 30.0,
        "worst_fault": "host",
        "forecasts": {"host": FORECAST},
    }
    return Status("vehicle-map", "/demo/dir", 1, 42, "here", **{**known, **changes})


def facts(epoch: int, records: int = 10_000) -> EpochFacts:
    return EpochFacts(epoch, 1_000_000 + epoch * 500, records, {}, {}, 0, 0.0, 300.0, 0.0, 0.0, 7, 2048, 1, 0)


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def story(clock: list[float]) -> Story:
    return Story(lambda: clock[0])


@pytest.fixture
def seen(clock: list[float]) -> Seen:
    made = Seen(lambda: clock[0])
    for number in range(1, 21):
        made.hear(status(epoch=number, records=number * 10_000, records_per_s=20_000.0), facts(number))
    return made


def strike(story: Story, clock: list[float], hit: Hit, after_s: float = 0.0) -> None:
    clock[0] = hit.at_s
    story.struck(hit)
    clock[0] += after_s


# The story


def test_a_fault_is_open_until_the_application_is_back(story: Story, clock: list[float]) -> None:
    strike(story, clock, EXECUTOR, 6.1)
    assert story.open == EXECUTOR
    story.back(6.1)
    assert story.open is None
    assert story.hits == [dataclasses.replace(EXECUTOR, took_s=6.1)] and story.hits[0].held
    assert not dataclasses.replace(EXECUTOR, took_s=60.5).held


def test_everything_is_told_once(story: Story, clock: list[float]) -> None:
    story.say("one")
    assert [e.text for e in story.news()] == ["one"]
    strike(story, clock, DRIVER)
    assert [e.hit for e in story.news()] == [DRIVER] and not story.news()


def test_plain_lines_tell_each_thing_with_its_time(
    story: Story, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = DemoLines(story)
    for number in range(1, 11):
        clock[0] += 1
        lines.hear(status(epoch=number, records_per_s=9_000.0), facts(number))
    lines.progress("supervisor: killed by SIGKILL after epoch 10; restart 1 in 0.2 s.")
    strike(story, clock, DRIVER, 18.0)
    story.back(17.9)
    for event in story.news():
        lines.tell(event)
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 7
    assert told[0].startswith(" 0:03    epochs 1-3 ") and told[0].endswith("recovery ≤ 30.0 s of 60 s")
    assert told[3].startswith(" 0:10    epoch 10 ")
    assert "supervisor: killed by SIGKILL" in told[4]
    assert (
        told[5]
        == " 0:30  ✗ driver 4242 killed, Python and JVM · estimate 17.2 s, bound 25.0 s, deadline 60 s"
    )
    assert told[6] == " 0:48  ● back after 17.9 s of 60 s ✓"


def test_json_lines_have_a_fault_before_and_after(
    story: Story, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = DemoJson()
    strike(story, clock, EXECUTOR, 61.0)
    story.back(61.0)
    for event in story.news():
        lines.tell(event)
    lines.hear(status(epoch=1), facts(1))
    before, after, epoch = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert before["event"] == "fault" and before["estimate_s"] == 6.8 and before["held"] is None
    assert after["event"] == "recovered" and after["recovery_s"] == 61.0 and after["held"] is False
    assert epoch["event"] == "epoch" and epoch["status"]["bound_s"] == 30.0


# The view


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("faults", [True, False])
def test_the_demo_fits_its_terminal(
    seen: Seen, story: Story, clock: list[float], tmp_path: Path, width: int, height: int, faults: bool
) -> None:
    story.say("starting a Spark cluster of 2 hosts")
    strike(story, clock, EXECUTOR, 6.1)
    story.back(6.1)
    strike(story, clock, DRIVER, 3.2)
    view = demo_view(seen, Country(tmp_path), width, height, story if faults else None)
    lines = drawn(view, width).split("\n")
    assert len(lines) <= max(height - 1, 0 if faults else 12) and max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert ("▀" in text) == (width >= 80)
    if faults:
        assert "recovering 3.2 s" in text and "epoch" in text
    else:
        assert "vehicle-map" in text and "recovering" not in text


def test_before_the_application_is_there_the_view_says_what_is_waited_for(
    story: Story, clock: list[float], tmp_path: Path
) -> None:
    story.say("starting a Spark cluster of 2 hosts")
    story.progress = "starting Spark"
    text = drawn(demo_view(Seen(lambda: clock[0]), Country(tmp_path), 100, 30, story))
    assert "0:00 starting a Spark cluster of 2 hosts" in text and "     starting Spark" in text


def test_a_stopwatch_runs_until_it_is_back(seen: Seen, story: Story, clock: list[float]) -> None:
    strike(story, clock, EXECUTOR, 3.25)
    text = drawn(events_panel(story, seen, 9))
    assert "0:12 executor 1 on 127.0.0.2 killed" in text and "estimate 6.8 s · bound 11.9 s" in text
    assert "recovering 3.2 s …" in text and "██··┊···┊····" in text
    clock[0] += 3
    story.back(6.1)
    text = drawn(events_panel(story, seen, 9))
    assert "recovering" not in text and "0:18 back after 6.1 s of 60 s ✓" in text


def test_the_newest_events_stay_where_there_is_little_room(
    seen: Seen, story: Story, clock: list[float]
) -> None:
    for number in range(9):
        story.say(f"thing {number}")
    text = drawn(events_panel(story, seen, 4))
    assert "thing 8" in text and "thing 7" in text and "thing 6" not in text
    assert len(text.split("\n")) == 4


def test_the_map_is_drawn_from_stand_in_folders_too(tmp_path: Path) -> None:
    tile = {"tile_x": [3], "tile_y": [5], "at_ms": [9], "reports": [4]}
    change = {"tile_x": [3], "tile_y": [5], "at_ms": [9], "feature": ["sign at 1,1 km"], "change": ["new"]}
    for folder, rows in (("tile-updates", tile), ("road-changes", {**change, "value": [60.0]})):
        (tmp_path / folder).mkdir()
        pq.write_table(pa.table(rows), tmp_path / folder / "part-1.parquet")
        (tmp_path / folder / ".part-2.parquet").write_bytes(b"being written")
    country = Country(tmp_path, tiles="tile-updates", changes="road-changes")
    country.catch_up()
    assert country.flagged == 1 and country.busiest() == (3, 5)


# Watching from outside


class Heard:
    """A teller that keeps what it is told."""

    def __init__(self) -> None:
        self.seen = Seen()
        self.said: list[str] = []
        self.hits: list[Hit | None] = []

    def hear(self, status: Status, facts: EpochFacts | None) -> None:
        self.seen.hear(status, facts)

    def tell(self, event: Any) -> None:
        self.hits.append(event.hit)

    def progress(self, text: str) -> None:
        self.said.append(text)


def line(status: Status, facts: EpochFacts) -> bytes:
    return msgspec.json.encode({"event": "epoch", **msgspec.to_builtins(facts), "status": status}) + b"\n"


def test_two_drivers_are_one_run_to_who_watches(tmp_path: Path, story: Story) -> None:
    (tmp_path / "dir").mkdir()
    log, heard = tmp_path / "application.log", Heard()
    watch = Watch(tmp_path, story, heard)
    watch.look()
    assert heard.seen.status is None

    here = {"host": socket.gethostname(), "started_ms": 10**15}
    first = status(epoch=1, records=10_000, updated_ms=5)
    first = msgspec.structs.replace(first, pid=2**22 + 1, **here)
    log.write_bytes(b"starting Spark\n" + line(first, facts(1)) + line(first, facts(2))[:50])
    watch.look()
    assert heard.seen.epochs == 1 and heard.said == ["starting Spark"] and story.progress == ""

    write_status(tmp_path / "dir", first)
    watch.look()
    assert heard.seen.status is not None and heard.seen.status.state == "dead"

    second = msgspec.structs.replace(first, generation=2, pid=os.getpid(), epoch=0, records=0, updated_ms=9)
    write_status(tmp_path / "dir", msgspec.structs.replace(second, state="recovering"))
    with log.open("ab") as more:
        more.write(b"\nsupervisor: killed by SIGKILL\n")
    watch.look()
    now = heard.seen.status
    assert (now.generation, now.state, now.epoch, now.records) == (2, "recovering", 1, 10_000)
    assert story.progress == "supervisor: killed by SIGKILL"

    third = msgspec.structs.replace(second, epoch=3, records=500, updated_ms=12)
    with log.open("ab") as more:
        more.write(line(third, facts(3)))
    watch.look()
    assert heard.seen.status.records == 10_500 and heard.seen.epochs == 2


def test_without_a_second_address_the_cluster_has_one_host(
    monkeypatch: pytest.MonkeyPatch, story: Story, tmp_path: Path
) -> None:
    made: list[dict[str, Any]] = []

    class NoCluster:
        def __init__(self, folder: Path, **wanted: Any) -> None:
            assert folder.is_absolute()
            made.append(wanted)

        def __enter__(self) -> Any:
            raise RuntimeError("enough")

        def __exit__(self, *_: object) -> None:
            return

    monkeypatch.setattr(demo_faults, "Cluster", NoCluster)
    monkeypatch.setattr(demo_faults, "_is_ours", lambda address: False)
    with pytest.raises(RuntimeError, match="enough"):
        demo_faults.show(demo_faults.Plan(Path("app.py"), tmp_path, 1.0, "60s"), story, Heard())
    assert made == [{"workers": 1, "cores": 2}]
    assert story.events[0].text == "one host only: there is no 127.0.0.2"


# The end


@pytest.mark.parametrize("width", [120, 64])
def test_the_summary_has_the_estimate_beside_the_outcome(width: int) -> None:
    console = Console(record=True, width=width, file=io.StringIO())
    hits = [dataclasses.replace(EXECUTOR, took_s=6.14), dataclasses.replace(DRIVER, took_s=61.0)]
    print_faults(hits, Verdict(lost=0, doubled=2), console)
    text = console.export_text()
    executor, driver = (row.split() for row in text.split("\n") if "-kill" in row)
    assert executor[-10:] == ["6.8", "s", "11.9", "s", "6.1", "s", "60", "s", "✓", "held"]
    assert driver[-10:] == ["17.2", "s", "25.0", "s", "61.0", "s", "60", "s", "✗", "missed"]
    assert ("127.0.0.2" in text) == (width > 100) and "99.9%" in text
    assert "0 lost, 2 doubled, 0 states different" in text
