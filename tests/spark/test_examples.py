"""Every example runs on Spark and writes what it says it writes."""

import collections
import json
import sqlite3
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest

import holdfast as hf
from holdfast.cli.loading import load_file

EXAMPLES = Path(__file__).parents[2] / "examples"
COVERED = {
    "accounts",
    "custom_source",
    "fraud",
    "monitoring",
    "speeds",
    "two_stages",
    "vehicle_map",
    "wordcount",
}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import sys

    path, modules = list(sys.path), set(sys.modules)
    monkeypatch.chdir(tmp_path)
    yield
    sys.path[:] = path
    for name in (set(sys.modules) - modules) & COVERED:
        del sys.modules[name]


def example(name: str) -> ModuleType:
    return load_file(EXAMPLES / f"{name}.py")


def parquet_rows(folder: str) -> list[dict[str, Any]]:
    return pq.read_table(folder).to_pylist()


def json_rows(folder: str) -> list[dict[str, Any]]:
    files = sorted(Path(folder).glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_no_example_is_left_out() -> None:
    assert {p.stem for p in EXAMPLES.glob("*.py") if p.stem != "__init__"} == COVERED


@pytest.mark.parametrize("name", sorted(COVERED))
def test_every_example_says_how_it_is_run(name: str) -> None:
    assert f"examples/{name}.py" in (EXAMPLES / f"{name}.py").read_text().split('"""')[1]


def test_accounts_end_with_the_sum_of_their_transfers(spark: Any) -> None:
    example("accounts").pipeline.run(spark=spark, drain=True, parallelism=2)
    rows = parquet_rows("out/balances")
    totals: dict[str, float] = collections.defaultdict(float)
    for transfer in pq.read_table("data/transfers").to_pylist():
        totals[transfer["account"]] += transfer["amount"]
    last = {r["account"]: r["balance"] for r in rows}
    assert len(rows) == 10_000
    assert last == {account: pytest.approx(total, abs=0.01) for account, total in totals.items()}


def test_wordcount_counts_and_goes_on_counting(spark: Any) -> None:
    module = example("wordcount")
    module.pipeline.run(spark=spark, drain=True, parallelism=2)
    counts = {r["word"]: r["count"] for r in json_rows("out/counts")}
    assert counts["the"] == 17 and counts["sadness"] == 1
    Path("data/lines/more.jsonl").write_text('{"text": "the end"}\n')
    example("wordcount").pipeline.run(spark=spark, drain=True)
    counts = {r["word"]: r["count"] for r in json_rows("out/counts")}
    assert counts["the"] == 18 and counts["end"] == 1 and counts["sadness"] == 1


def test_two_stages_tell_each_regions_temperature(spark: Any) -> None:
    example("two_stages").build(rate=None, total=10_000).run(
        spark=spark, drain=True, parallelism=2, max_records=4_000
    )
    last = {r["region"]: r for r in parquet_rows("out/regions")}
    assert set(last) == {"north", "east", "south", "west"}
    assert last["north"]["mean"] == pytest.approx(12, abs=1) and last["west"]["mean"] == pytest.approx(
        24, abs=1
    )
    assert all(450 < r["devices"] < 550 for r in last.values())


def test_fraud_raises_alerts_and_keeps_what_is_broken(spark: Any) -> None:
    example("fraud").pipeline.run(spark=spark, drain=True, parallelism=2)
    alerts, dead, passed = (
        json_rows("out/fraud/alerts"),
        json_rows("out/fraud/dead_letters"),
        parquet_rows("out/fraud/passed"),
    )
    assert {a["reason"] for a in alerts} == {"far above what is usual", "a fourth merchant within the hour"}
    assert [d["line"] for d in dead] == [19, 1020, 4021]
    assert len(passed) + len(alerts) < 5_000
    blocked = {a["card"]: a for a in alerts}
    assert "card-013" in blocked and sum(p["card"] == "card-013" for p in passed) < 10


def test_the_custom_source_keeps_its_promises_and_is_read(spark: Any) -> None:
    module = example("custom_source")
    hf.testing.check_source(
        lambda: module.SqliteRows(module.DATABASE, "entries", module.SCHEMA),
        grow=lambda: module.add_rows(module.DATABASE, 300),
    )
    module.pipeline.run(spark=spark, drain=True, parallelism=2)
    counts = {r["level"]: r["entries"] for r in json_rows("out/levels")}
    with sqlite3.connect(module.DATABASE) as connection:
        assert counts == dict(connection.execute("SELECT level, count(*) FROM entries GROUP BY level"))


def test_the_vehicle_map_keeps_tiles_and_flags_changes(spark: Any) -> None:
    pipeline = example("vehicle_map").build(rate=None, total=30_000)
    pipeline.run(spark=spark, drain=True, parallelism=2, max_records=15_000, dir="map")
    tiles, changes = parquet_rows("out/vehicle_map/tiles"), json_rows("out/vehicle_map/changes")
    assert all(0 <= t["tile_x"] < 66 and 0 <= t["tile_y"] < 66 for t in tiles)
    last = {(t["tile_x"], t["tile_y"]): t for t in tiles}
    assert len(last) > 1_000 and max(t["reports"] for t in last.values()) > 50
    assert {c["change"] for c in changes} >= {"new"} and {c["feature"].split()[0] for c in changes} == {
        "sign",
        "pothole",
        "closure",
    }
    vehicles = {v["vehicle"]: v["reports"] for v in parquet_rows("out/vehicle_map/vehicles")}
    assert sum(vehicles.values()) == 30_000


def test_monitoring_tells_each_incident_once_and_its_end_after_it(spark: Any) -> None:
    example("monitoring").build(rate=None, total=150_000).run(spark=spark, drain=True, parallelism=2)
    rows = json_rows("out/incidents")
    by_incident: dict[str, list[str]] = collections.defaultdict(list)
    for row in rows:
        by_incident[row["incident"]].append(row["what"])
    assert len(by_incident) > 50
    assert {tuple(told) for told in by_incident.values()} <= {("opened",), ("opened", "closed")}
    assert ("opened", "closed") in {tuple(told) for told in by_incident.values()}
    assert all(row["load"] > 1 for row in json_rows("out/doubtful"))
    assert json_rows("out/doubtful")


def test_speeds_are_in_the_window_they_were_measured_in_and_what_is_late_is_written_apart(spark: Any) -> None:
    module = example("speeds")
    module.build(rate=None, total=30_000).run(spark=spark, drain=True, parallelism=2, max_records=1_000)
    source = hf.rate(None, keys=20_000, total=30_000, make=module.reports)
    every = [
        (row["road"], row["measured_at"])
        for piece in source.plan(None, hf.Limit(30_000, 1, 0)).ranges
        for table in source.read(piece, hf.Reading("reports"))
        for row in table.to_pylist()
    ]
    late = [(row["road"], datetime.fromisoformat(row["measured_at"])) for row in json_rows("out/speeds/late")]
    window = timedelta(seconds=5)
    expected = collections.Counter(
        (road, at - (at - datetime(1970, 1, 1)) % window)
        for road, at in (collections.Counter(every) - collections.Counter(late)).elements()
    )
    windows = parquet_rows("out/speeds/roads")
    assert {(w["road"], w["window_start"]): w["reports"] for w in windows} == expected
    assert len(windows) > len(expected), "a report within the allowed lateness makes its window come again"
    assert 0 < len(late) < 300
    assert max(at for _, at in late) < max(at for _, at in every) - timedelta(seconds=5)
