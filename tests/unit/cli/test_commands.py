"""Commands that need no Spark: plan, status, stop, state over a directory that the in-process runner made."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import holdfast as hf
from holdfast import errors
from holdfast.cli import exit_codes
from holdfast.cli.app import app, main
from holdfast.cli.country import Country, change_lines, colours
from holdfast.cli.demo import find_example, make_home
from holdfast.config import Settings
from holdfast.engine.build import build_stages, identity_of
from holdfast.log.journal import Journal
from holdfast.metrics import Status, write_status


class Visits(hf.KeyedProcess):
    pages = hf.MapState(str, int)
    last = hf.ListState(str)
    seen = hf.ValueState({"n": int, "ok": bool}, ttl="1h")

    def process(self, user: Any, record: Any, ctx: Any) -> Any:
        self.pages[record["page"]] = self.pages.get(record["page"], 0) + 1
        self.last.add(record["page"])
        self.seen.value = {"n": len(self.last), "ok": True}
        yield {"user": user[0], "n": len(self.last)}


class Longest(hf.Aggregate):
    accumulator = str

    def create(self) -> str:
        return ""

    def add(self, accumulator: str, record: Any) -> str:
        return max(accumulator, record["page"], key=len)

    def merge(self, left: str, right: str) -> str:
        return max(left, right, key=len)


def build() -> hf.Pipeline:
    pipeline = hf.Pipeline("visits")
    rows = [{"user": f"u{n % 3}", "country": n % 2, "page": f"/p{n % 4}", "ms": n} for n in range(60)]
    stream = pipeline.read("log", hf.records(rows))
    stream.key_by("user", "country").process("users", Visits()).write("out", hf.memory())
    stream.key_by("page").aggregate(
        "pages", n=hf.count(), mean=hf.mean("ms"), users=hf.approx_distinct("user"), longest=Longest()
    ).write("figures", hf.memory())
    stream.key_by(lambda r: r["ms"] // 10).reduce("tens", lambda a, b: {**b, "ms": a["ms"] + b["ms"]}).write(
        "sums", hf.memory()
    )
    return pipeline


@pytest.fixture(scope="module", params=["heap", "rocksdb"])
def directory(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as a run leaves it, with either backend."""
    folder = tmp_path_factory.mktemp("visits")
    result = hf.testing.run(build(), directory=folder, max_records=25, backend=request.param)
    journal = Journal.at(folder)
    journal.create_identity(identity_of(build_stages(build()), Settings(backend=request.param), 2))
    journal.take()
    for commit in result.commits:
        journal.put_commit(commit)
    write_status(folder, told(folder, epoch=result.epochs))
    return folder


def told(folder: Path, **changes: Any) -> Status:
    values: dict[str, Any] = {
        "generation": 1,
        "pid": 1,
        "host": "elsewhere",
        "state": "stopped",
        "records": 60,
    }
    return Status(pipeline="visits", directory=str(folder), **{**values, **changes})


def run(*arguments: Any) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def states(directory: Path, *arguments: Any) -> Any:
    return json.loads(run("state", directory, "--json", *arguments))


# state


def test_without_an_operator_every_state_is_listed(directory: Path) -> None:
    found = states(directory)
    rows = {(r["operator"], r["state"]): r for r in found["operators"]}
    assert found["pipeline"] == "visits" and found["epoch"] == 3
    assert set(rows) == {
        ("users", "pages"),
        ("users", "last"),
        ("users", "seen"),
        ("pages", "state"),
        ("tens", "state"),
    }
    assert rows["users", "pages"]["type"] == "map of string to int64"
    assert rows["users", "seen"]["type"] == "struct<n: int64, ok: bool>, for 3600 s"
    assert rows["users", "pages"]["key"] == "user, country"
    assert rows["users", "pages"]["entries"] in (12, None)  # RocksDB does not count a map's entries
    assert rows["users", "seen"]["entries"] == 6
    assert rows["pages", "state"]["entries"] == 4 and rows["pages", "state"]["version"] == "epoch 3"
    text = run("state", directory)
    assert "map of string to int64" in text and "--operator users" in text


def test_key_columns_have_their_names_and_inner_keys_theirs(directory: Path) -> None:
    found = states(directory, "--operator", "users", "--limit", 1000)["states"]
    assert set(found["pages"]["rows"][0]) == {"user", "country", "entry", "value"}
    assert set(found["last"]["rows"][0]) == {"user", "country", "place", "value"}
    assert set(found["seen"]["rows"][0]) == {"user", "country", "n", "ok"}
    assert found["last"]["total"] == 60 and found["seen"]["total"] == 6
    assert sum(r["value"] for r in found["pages"]["rows"]) == 60


@pytest.mark.parametrize("key", ["u1,0", '["u1", 0]'])
def test_one_key_is_found_as_people_write_it(directory: Path, key: str) -> None:
    found = states(directory, "--operator", "users", "--key", key)["states"]
    assert found["seen"] == {"total": 1, "rows": [{"user": "u1", "country": 0, "n": 10, "ok": True}]}
    assert {(r["user"], r["country"]) for r in found["pages"]["rows"]} == {("u1", 0)}


def test_an_aggregate_shows_what_it_would_emit_and_a_users_own_its_accumulator(directory: Path) -> None:
    found = states(directory, "--operator", "pages", "--key", "/p1")["states"]["state"]["rows"]
    assert found == [{"page": "/p1", "n": 15, "mean": 29.0, "users": 3, "longest": "/p1"}]


def test_a_reduced_record_shows_its_fields_beside_the_key(directory: Path) -> None:
    found = states(directory, "--operator", "tens", "--key", "2")["states"]["state"]["rows"]
    assert found == [{"key": 2, "user": "u2", "country": 1, "page": "/p1", "ms": sum(range(20, 30))}]


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_records_that_are_kept_show_their_fields_and_when_they_are_due(tmp_path: Path, backend: str) -> None:
    pipeline = hf.Pipeline("visits")
    rows = [{"k": "a", "at": i, "v": i % 2} for i in range(30)]
    left, right = (
        pipeline.read(u, hf.records(rows, per_epoch=10)).event_time("at", unit="s").key_by("k") for u in "lr"
    )
    left.join(right).between("0s", "5s").select("pairs").write("a", hf.memory())
    left.as_of(right).select("priced").write("b", hf.memory())
    left.join(right).window(hf.tumbling("7s")).select("windows").write("c", hf.memory())
    left.deduplicate("once", within="5s").write("d", hf.memory())
    left.top("best", 2, by="v").write("e", hf.memory())
    found = hf.pattern("even", lambda r: r["v"] == 0).then("never", lambda r: r["v"] == 9).within("5s")
    left.pattern("steps", found).write("f", hf.memory())
    result = hf.testing.run(pipeline, epochs=2, directory=tmp_path, backend=backend)
    journal = Journal.at(tmp_path)
    journal.create_identity(identity_of(build_stages(pipeline), Settings(backend=backend), 2))
    journal.take()
    for commit in result.commits:
        journal.put_commit(commit)
    listed = {(r["operator"], r["state"]): r["entries"] for r in states(tmp_path)["operators"]}
    assert listed == {
        ("pairs", "left"): 6,
        ("pairs", "right"): 1,
        ("priced", "left"): 1,
        ("priced", "right"): 2,
        ("windows", "left"): 6,
        ("windows", "right"): 6,
        ("once", "seen"): 1,
        ("once", "earlier"): 0,
        ("best", "best"): 2,
        ("steps", "waiting"): 1,
        ("steps", "begun"): 3,
    }
    for uid in ("pairs", "priced", "windows", "once", "best", "steps"):
        run("state", tmp_path, "--operator", uid)
        assert states(tmp_path, "--operator", uid, "--key", "a")["states"]
    one = states(tmp_path, "--operator", "best")["states"]["best"]["rows"][0]
    assert one["v"] == 1 and one["kept.due"] is None
    begun = states(tmp_path, "--operator", "steps", "--state", "begun")["states"]["begun"]["rows"][0]
    assert begun["even"]["v"] == 0 and begun["begun.due"].startswith("1970-01-01")


def test_a_limit_says_how_many_more_there_are(directory: Path) -> None:
    text = run("state", directory, "--operator", "users", "--state", "last", "--limit", 2)
    assert "users.last after epoch 3: 60 rows" in text and "… and 58 more" in text
    assert "users.pages" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--operator", "nobody"], "There is no operator 'nobody' with state"),
        (["--operator", "users", "--state", "nothing"], "'users' has nothing stored as 'nothing'"),
        (["--operator", "users", "--key", "u1"], "has 1 parts; the key has 2"),
        (["--operator", "users", "--key", "u1,x"], "'x' is no int64, which 'country' is"),
        (["--operator", "users", "--key", "[1"], "is no JSON list"),
    ],
)
def test_what_is_not_there_is_named(directory: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message) as caught:
        run("state", directory, *arguments)
    assert caught.value.exit_code == 2


def test_state_of_another_host_says_where_to_look(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.StateLostError, match="is not in") as caught:
        run("state", directory, "--operator", "users", "--state-root", tmp_path)
    assert "--state-root" in str(caught.value.remedy)


# status and stop


def test_status_tells_what_log_and_last_run_know(directory: Path) -> None:
    found = json.loads(run("status", directory, "--json"))
    assert found["pipeline"] == "visits" and found["state"] == "stopped" and found["epoch"] == 3
    assert found["generation"] == 1 and found["records"] == 60 and found["process"] == "elsewhere"
    assert found["state_keys"] > 0 and found["state_bytes"] > 0
    text = run("status", directory)
    assert "visits" in text and "stopped" in text and "can't be asked from this host" in text


def test_a_run_whose_process_has_gone_has_died(directory: Path, tmp_path: Path) -> None:
    folder = copy_of(
        directory,
        tmp_path,
        told(tmp_path, state="running", pid=2**22 + 1, host=socket.gethostname(), epoch=3),
    )
    found = json.loads(run("status", folder, "--json"))
    assert found["state"] == "died" and found["process"] == "dead"
    assert "Nothing is running" in run("stop", folder) and "died after epoch 3" in run("stop", folder)


def test_a_process_that_took_over_the_number_is_not_the_one(directory: Path, tmp_path: Path) -> None:
    long_ago = told(tmp_path, state="running", pid=os.getpid(), host=socket.gethostname(), started_ms=1000)
    folder = copy_of(directory, tmp_path, long_ago)
    assert json.loads(run("status", folder, "--json"))["state"] == "died"


def test_stop_of_what_does_not_run_says_so(directory: Path) -> None:
    assert "Nothing is running" in run("stop", directory)
    assert "the last run has stopped after epoch 3" in run("stop", directory)


def test_stop_asks_the_newest_generation_and_gives_up_in_time(directory: Path, tmp_path: Path) -> None:
    now_ms = 10**15
    folder = copy_of(
        directory,
        tmp_path,
        told(tmp_path, state="running", pid=os.getpid(), host=socket.gethostname(), started_ms=now_ms),
    )
    with pytest.raises(errors.HoldfastError, match="has not stopped within 200ms"):
        run("stop", folder, "--wait", "200ms")
    journal = Journal.at(folder)
    journal.generation = 1
    assert journal.asked_to_stop()


@pytest.mark.parametrize("command", ["status", "stop", "state"])
def test_a_directory_that_is_no_pipelines_is_refused(command: str, tmp_path: Path) -> None:
    with pytest.raises(errors.DirectoryError, match="not the directory of a pipeline") as caught:
        run(command, tmp_path)
    assert caught.value.exit_code == 4
    with pytest.raises(errors.DirectoryError, match="There is no directory"):
        run(command, tmp_path / "nowhere")


def copy_of(directory: Path, folder: Path, status: Status) -> Path:
    log = folder / "log"
    for file in (directory / "log").rglob("*.json"):
        target = log / file.relative_to(directory / "log")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    write_status(folder, status)
    return folder


# plan


@pytest.fixture
def app_file(tmp_path: Path) -> Path:
    file = tmp_path / "visits_app.py"
    file.write_text("from tests.unit.cli.test_commands import build\npipeline = build()\n")
    return file


def test_plan_prints_stages_chains_and_exchanges(app_file: Path) -> None:
    text = run("plan", app_file)
    assert "visits: 7 operators, 4 stages, 3 exchanges" in text
    assert "stage 1 · shards by user, country" in text
    assert "══ by page ══▶ stage 2 (pages)  combined before it is sent" in text
    assert "state: " in text and "pages (map)" in text
    assert "test_commands.py:" in text


def test_plan_draws_and_prints_json(app_file: Path, tmp_path: Path) -> None:
    svg = tmp_path / "new" / "plan.svg"
    found = json.loads(run("plan", app_file, "--json", "--svg", svg))
    assert svg.read_text().startswith("<svg")
    assert [s["root"] for s in found["stages"]] == ["log", "users", "pages", "tens"]
    assert found["stages"][1]["chain"] == ["users", "out"]
    assert {e["to"]: e["combined"] for e in found["exchanges"]} == {
        "users": False,
        "pages": True,
        "tens": True,
    }


# the end


def test_every_exit_code_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = [getattr(errors, name) for name in errors.__all__]
    assert {kind.exit_code for kind in kinds} <= set(exit_codes.MEANING)
    text = CliRunner().invoke(app, ["--help"]).output
    for code, meaning in exit_codes.MEANING.items():
        assert f"{code} {meaning[:40]}" in text


def test_an_error_of_ours_is_its_text_and_its_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["holdfast", "status", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 4
    shown = capsys.readouterr().err
    assert "not the directory of a pipeline" in shown and "remedy:" in shown and "Traceback" not in shown


def test_an_error_nobody_foresaw_is_a_traceback_and_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "status.json").write_bytes(msgspec.json.encode({"pipeline": 3}))
    Journal.at(tmp_path).create_identity(identity_of(build_stages(build()), Settings(), 2))
    monkeypatch.setattr("sys.argv", ["holdfast", "status", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1 and "Traceback" in capsys.readouterr().err


def test_settings_that_make_no_sense_end_before_the_app_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="backend='disk' is no choice"):
        run("run", tmp_path / "app.py", "--backend", "disk")
    with pytest.raises(errors.ConfigError, match="is no KEY=VALUE"):
        run("run", tmp_path / "app.py", "--conf", "spark.x")


# demo


def test_the_demo_empties_only_what_it_made_itself(tmp_path: Path) -> None:
    home = make_home(tmp_path / "demo")
    (home / "old").touch()
    assert make_home(tmp_path / "demo") == home and not (home / "old").exists()
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "precious").touch()
    assert make_home(theirs) != theirs and (theirs / "precious").exists()


def test_the_demo_leaves_a_demo_that_runs_alone(tmp_path: Path) -> None:
    home = make_home(tmp_path / "demo")
    (home / "dir").mkdir()
    write_status(
        home / "dir",
        told(home, state="running", pid=os.getpid(), host=socket.gethostname(), started_ms=10**15),
    )
    assert make_home(tmp_path / "demo") != home and (home / "dir").exists()


def test_the_demo_leaves_alone_what_another_demo_is_just_starting(tmp_path: Path) -> None:
    home = make_home(tmp_path / "demo")
    (home / "made-by-holdfast-demo").write_text(str(os.getppid()))
    assert make_home(tmp_path / "demo") != home


def test_without_the_examples_the_demo_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert find_example().name == "vehicle_map.py"
    monkeypatch.setattr(hf, "__file__", str(tmp_path / "lib" / "holdfast" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        errors.PipelineError, match="in a checkout of holdfast and not in the installed package"
    ):
        find_example()


def test_the_map_takes_in_what_is_published_once(tmp_path: Path) -> None:
    def publish(name: str, reports: list[int], changes: list[str]) -> None:
        for folder in ("tiles", "changes"):
            (tmp_path / folder).mkdir(exist_ok=True)
        tile = {
            "tile_x": [3] * len(reports),
            "tile_y": [5] * len(reports),
            "at_ms": reports,
            "reports": reports,
        }
        pq.write_table(pa.table(tile), tmp_path / "tiles" / f"{name}.parquet")
        rows = [
            {"at_ms": 9, "tile_x": 3, "tile_y": 5, "feature": f, "change": "new", "value": 1.0}
            for f in changes
        ]
        (tmp_path / "changes" / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))

    country = Country(tmp_path)
    publish("part-1", [7, 9], ["sign at 1,1 km"])
    country.catch_up()
    publish("part-2", [8], ["pothole at 2,2 km"])
    country.catch_up()
    publish("merged", [7, 9, 8], ["sign at 1,1 km", "pothole at 2,2 km"])
    country.catch_up()
    assert country.flagged == 2 and country.busiest() == (3, 5) and country.now_ms == 9
    assert int(country.reports.sum()) == 9
    assert [str(t) for t in change_lines(country, 1)] == ["+ pothole at 2,2 km  1 cm deep"]
    picture = colours(country, 66)
    assert tuple(picture[5, 3]) == (64, 224, 255) and len({tuple(c) for row in picture for c in row}) == 2
