"""What a newer holdfast wrote is refused with what it is, before anything is changed."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.metadata import pack
from holdfast.errors import DirectoryError, IncompatibleError
from holdfast.log.journal import Journal
from holdfast.state.versions import Folder
from tests.drivers import live, make

ROWS = [{"k": n % 3, "v": n} for n in range(40)]


class Count(hf.KeyedProcess):
    n = hf.ValueState(int, default=0)

    def process(self, key: Any, record: Any, ctx: Any) -> Any:
        self.n.value += 1
        yield {"k": key, "n": self.n.value}


def build() -> hf.Pipeline:
    p = hf.Pipeline("counted")
    p.read("in", hf.records(ROWS, per_epoch=4)).key_by("k").process("count", Count()).write(
        "out", hf.memory()
    )
    return p


def of_the_future(path: Path) -> None:
    """The record as a newer version may write it: not even the fields that it shares need have their types."""
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**{key: {"new": [1]} for key in record}, "format": 99}))


def contents(directory: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def a_plan_without_its_commit(directory: Path) -> Path:
    last = Journal.at(directory).last_epoch()
    path = directory / "log" / "plans" / f"{last + 1:012d}-000.json"
    path.write_text(json.dumps({"format": 99}))
    return path


RECORDS: dict[str, Callable[[Path], Path]] = {
    "log/identity.json": lambda d: d / "log" / "identity.json",
    "log/plans/000000000004-000.json": a_plan_without_its_commit,
    "log/commits/000000000003.json": lambda d: d / "log" / "commits" / "000000000003.json",
    "log/generations/000000000002.json": lambda d: d / "log" / "generations" / "000000000002.json",
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_start_over_a_record_of_the_future_is_refused_and_changes_nothing(
    tmp_path: Path, name: str
) -> None:
    live(build(), tmp_path, epochs=3, checkpoint="never")
    make(build(), tmp_path)  # generation 2 has written nothing yet
    of_the_future(RECORDS[name](tmp_path))
    before = contents(tmp_path)
    with pytest.raises(IncompatibleError, match="has format 99; this version of holdfast knows") as caught:
        build().start(dir=str(tmp_path), parallelism=2)
    assert f"The record {name} has" in caught.value.message
    assert "Run the pipeline with the holdfast that wrote it" in str(caught.value.remedy)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("what", ["the checkpoint", "a checkpoint of another shape", "a manifest in it"])
def test_a_start_over_a_checkpoint_of_the_future_is_refused_and_changes_nothing(
    tmp_path: Path, what: str
) -> None:
    life = live(build(), tmp_path, epochs=3, checkpoint="1h")
    newest = life.catalog.completed()[-1]
    made = msgspec.structs.replace(newest, format=99)
    if what == "a manifest in it":
        stored = newest.shards["count"][0]
        assert stored is not None
        manifest = msgspec.structs.replace(stored.manifest, format=99)
        made = msgspec.structs.replace(
            newest, shards={"count": [msgspec.structs.replace(stored, manifest=manifest), None]}
        )
    record = pack(made)
    if what == "a checkpoint of another shape":
        body = b'{"format":99,"shards":[["count",7]]}'
        record = b'{"crc32":%d,"checkpoint":%s}' % (zlib.crc32(body), body)
    (tmp_path / "log" / "checkpoints" / f"{newest.number:012d}.json").write_bytes(record)
    before = contents(tmp_path)
    says = f"Checkpoint {newest.number} has format 99; this version of holdfast knows formats up to 1"
    with pytest.raises(IncompatibleError, match=says):
        build().start(dir=str(tmp_path), parallelism=2)
    assert contents(tmp_path) == before
    with pytest.raises(IncompatibleError):
        Catalog(Journal.at(tmp_path)).completed()


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_state_of_the_future_is_refused_and_neither_rebuilt_nor_changed(tmp_path: Path, backend: str) -> None:
    life = live(build(), tmp_path, epochs=3, checkpoint="1h", backend=backend)
    commit = life.journal.commit(3)
    assert commit is not None
    stamp = commit.shards["count"][0].sealed.stamp
    folder = tmp_path / "state" / life.program.home / "count" / "00000"
    of_the_future(folder / f"v-{stamp}.json")
    before = contents(folder)
    with pytest.raises(IncompatibleError, match=f"v-{stamp}.json has format 99; this version") as caught:
        live(build(), tmp_path, epochs=1, checkpoint="1h", backend=backend)
    assert caught.value.uid == "count" and "The manifest" in caught.value.message
    assert contents(folder) == before
    assert life.journal.last_epoch() == 3 and life.journal.plan(4) is None


def test_a_manifest_that_was_torn_is_none_and_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "v-1-0.json").write_bytes(b'{"stamp": "1-0", "fo')
    assert Folder(tmp_path).manifest("1-0") is None
    assert Folder(tmp_path).manifest("2-0") is None


def test_what_is_no_record_is_named(tmp_path: Path) -> None:
    live(build(), tmp_path, epochs=1)
    (tmp_path / "log" / "commits" / "000000000001.json").write_text("{}")
    with pytest.raises(DirectoryError, match=r"log/commits/000000000001\.json is not a record of holdfast"):
        Journal.at(tmp_path).commit(1)
