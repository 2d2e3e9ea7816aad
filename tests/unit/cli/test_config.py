"""`holdfast config` shows every setting with value, origin and meaning, each written once."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.cli.config import descriptions, setting_rows, shown
from holdfast.config import FIELDS, resolve


def test_every_setting_has_a_meaning() -> None:
    assert set(descriptions()) == set(FIELDS.values())
    assert all(text.endswith(".") for text in descriptions().values())


def test_origin_and_value_are_the_resolved_ones(tmp_path: Path) -> None:
    file = tmp_path / "holdfast.toml"
    file.write_text('interval = "2s"\n[spark]\n"spark.executor.memory" = "2g"\n')
    rows = {
        r["name"]: r
        for r in setting_rows(resolve({}, environment={"HOLDFAST_BACKEND": "rocksdb"}, file=file))
    }
    assert rows["interval"]["shown"] == "2s" and rows["interval"]["origin"] == str(file)
    assert rows["backend"]["shown"] == "rocksdb" and rows["backend"]["origin"] == "HOLDFAST_BACKEND"
    assert rows["spark"]["shown"] == "spark.executor.memory=2g"
    assert rows["key_groups"] == {
        "name": "key_groups",
        "value": 128,
        "shown": "128",
        "origin": "default",
        "variable": "HOLDFAST_KEY_GROUPS",
        "description": "Slices of the key space; fixed for life.",
    }


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("interval_s", 0.25, "250ms"),
        ("wait_for_executors_s", 120.0, "120s"),
        ("rocksdb_cache_bytes", 64 << 20, "64MB"),
        ("heap_limit_bytes", 1000, "1000"),
        ("drain", False, "false"),
        ("spark", {}, "-"),
    ],
)
def test_values_are_shown_as_users_write_them(field: str, value: object, text: str) -> None:
    assert shown(field, value) == text


def test_the_command_prints_a_table_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_CUT", "data")
    text = CliRunner().invoke(app, ["config"]).output
    assert "HOLDFAST_CUT" in text and "The most records an epoch takes" in text
    rows = json.loads(CliRunner().invoke(app, ["config", "--json"]).output)["settings"]
    assert [r["name"] for r in rows] == list(FIELDS)
