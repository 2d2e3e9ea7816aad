"""Settings come from four places, the nearest wins, and nonsense is named."""

from pathlib import Path

import pytest

from holdfast.config import parse_bytes, parse_duration_s, resolve
from holdfast.errors import ConfigError


def test_arguments_beat_the_environment_which_beats_the_file_which_beats_defaults(tmp_path: Path) -> None:
    file = tmp_path / "holdfast.toml"
    file.write_text('interval = "1s"\nbackend = "rocksdb"\nmax_records = 7\n[spark]\n"spark.x" = "1"\n')
    environment = {"HOLDFAST_INTERVAL": "2s", "HOLDFAST_BACKEND": "heap"}
    found = resolve({"interval": "3s", "parallelism": None}, environment=environment, file=file)
    assert found.settings.interval_s == 3.0
    assert found.settings.backend == "heap"
    assert found.settings.max_records == 7
    assert found.settings.spark == {"spark.x": "1"}
    assert found.origin["interval"] == "argument"
    assert found.origin["backend"] == "HOLDFAST_BACKEND"
    assert found.origin["max_records"] == str(file)
    assert found.origin["cut"] == "default"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"interval": "soon"}, "setting 'interval': 'soon' is not a duration"),
        ({"backend": "disk"}, "backend='disk' is no choice"),
        ({"nonsense": 1}, "there is no setting 'nonsense'"),
        ({"parallelism": 0}, "parallelism=0 must be between 1 and key_groups"),
        ({"parallelism": "two"}, "'two' is not a whole number"),
        ({"heap_limit": "big"}, "'big' is not a size"),
        ({"epochs": 0}, "epochs must be at least 1"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(arguments, environment={})


def test_durations_and_sizes() -> None:
    assert [parse_duration_s(t) for t in ("250ms", "70s", "1.5m", "2h", 3)] == [0.25, 70.0, 90.0, 7200.0, 3.0]
    assert [parse_bytes(t) for t in ("1kb", "64MB", "2g", 10)] == [1024, 64 << 20, 2 << 30, 10]


def test_a_file_that_was_named_must_exist_and_be_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        resolve(file=tmp_path / "none.toml")
    broken = tmp_path / "b.toml"
    broken.write_text("interval =")
    with pytest.raises(ConfigError, match="can't be read"):
        resolve(file=broken)
