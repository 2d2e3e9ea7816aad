"""The checkpoints' storage: one contract, over a folder and over an object store.

The object store is moto's server, a real HTTP server on this host that stands in for S3. What S3 itself does
under load, or when it is slow, is not tested here.
"""

from __future__ import annotations

import errno
import os
import pickle
import secrets
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import storage as storage_module
from holdfast.checkpoint.storage import (
    CHUNK_BYTES,
    LocalStorage,
    Missing,
    ObjectStorage,
    Storage,
    StorageError,
    open_storage,
)
from holdfast.errors import ConfigError
from holdfast.log.store import ObjectStore

SECRET = "not-a-real-secret-4711"
KEY = "NOTAREALKEY0815"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@pytest.fixture
def bucket(endpoint: str) -> str:
    name = f"bucket-{secrets.token_hex(6)}"
    with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{name}", method="PUT")):
        return name


@pytest.fixture
def options(endpoint: str) -> dict[str, str]:
    return {
        "endpoint": endpoint,
        "region": "us-east-1",
        "access_key_id": KEY,
        "secret_access_key": SECRET,
        "allow_http": "true",
    }


@pytest.fixture(params=["local", "object"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return open_storage(str(tmp_path / "store"), {})
    bucket, options = request.getfixturevalue("bucket"), request.getfixturevalue("options")
    return open_storage(f"s3://{bucket}/some/prefix", options)


def file_of(tmp_path: Path, size: int) -> tuple[Path, bytes]:
    data = os.urandom(size)
    path = tmp_path / f"file-{size}"
    path.write_bytes(data)
    return path, data


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, (17 << 20) + 3])
def test_a_file_comes_back_as_it_was_with_its_size_and_checksum(
    store: Storage, tmp_path: Path, size: int
) -> None:
    path, data = file_of(tmp_path, size)
    facts = (size, zlib.crc32(data))
    assert store.put_file("a/b/file", path) == facts
    assert store.get_file("a/b/file", tmp_path / "back") == facts
    assert (tmp_path / "back").read_bytes() == data
    assert store.list("") == [("a/b/file", size)]


def test_bytes_come_back_and_the_last_ones_put_are_those_there(store: Storage) -> None:
    store.put("a/x", b"first")
    store.put("a/x", b"second")
    assert store.get("a/x") == b"second"


def test_what_is_not_there_is_none_or_missing_and_leaves_no_file(store: Storage, tmp_path: Path) -> None:
    assert store.get("a/none") is None
    with pytest.raises(Missing, match="no file a/none") as caught:
        store.get_file("a/none", tmp_path / "back")
    assert caught.value.name == "a/none"
    assert not (tmp_path / "back").exists()
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.name, str(again)) == ("a/none", str(caught.value))


def test_a_local_file_that_stands_in_the_way_is_not_overwritten(store: Storage, tmp_path: Path) -> None:
    store.put("x", b"stored")
    (tmp_path / "back").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        store.get_file("x", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"mine"


def test_a_listing_is_sorted_goes_deep_and_takes_a_prefix_for_a_folder(store: Storage) -> None:
    for name in ("b/2", "b/1/deep/er", "bb/3", "a"):
        store.put(name, name.encode())
    assert store.list("b") == store.list("b/") == [("b/1/deep/er", 11), ("b/2", 3)]
    assert [name for name, _ in store.list("")] == ["a", "b/1/deep/er", "b/2", "bb/3"]
    assert store.list("nothing/here") == []
    assert store.list("a") == []


def test_a_file_tells_its_size_by_its_name(store: Storage) -> None:
    store.put("a/b", b"four")
    assert store.size("a/b") == 4
    assert store.size("a/c") is None and store.size("a/b/c") is None


def test_deleting_what_is_absent_is_no_error(store: Storage) -> None:
    for name in ("a/1", "a/2", "b"):
        store.put(name, b"x")
    store.delete(["a/1", "a/none", "none/at/all", "b"])
    store.delete(["a/1"])
    store.delete([])
    assert store.list("") == [("a/2", 1)]


def test_a_store_that_was_sent_elsewhere_still_reads_and_writes(store: Storage) -> None:
    store.put("x", b"1")
    sent: Storage = pickle.loads(pickle.dumps(store))
    assert sent.get("x") == b"1"
    sent.put("y", b"2")
    assert store.get("y") == b"2"


@pytest.mark.parametrize("name", ["", "/a", "a//b", "../a", "a/../b", ".a", "a/.b", "a/"])
def test_a_name_that_leads_out_or_would_not_be_listed_is_refused(store: Storage, name: str) -> None:
    with pytest.raises(ValueError, match="no name of a stored file"):
        store.put(name, b"")


def test_a_source_file_that_is_not_there_is_the_systems_own_error(store: Storage, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        store.put_file("x", tmp_path / "none")
    assert caught.value.errno == errno.ENOENT
    assert not isinstance(caught.value, StorageError)
    assert store.list("") == []


@pytest.mark.parametrize("size", [CHUNK_BYTES, 17 << 20])
def test_a_read_error_half_way_passes_through_and_nothing_is_stored(
    store: Storage, tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = file_of(tmp_path, size)
    whole = storage_module._chunks

    def broken(file: Any) -> Iterator[bytes]:
        for number, chunk in enumerate(whole(file)):
            if number * CHUNK_BYTES >= size // 2:
                raise OSError(errno.EIO, "Input/output error")
            yield chunk
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(storage_module, "_chunks", broken)
    with pytest.raises(OSError, match="Input/output error") as caught:
        store.put_file("x", path)
    assert caught.value.errno == errno.EIO
    assert store.list("") == []


def test_a_full_disk_passes_through_and_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> tuple[int, int]:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage_module, "_copy", full)
    with pytest.raises(OSError, match="No space left") as caught:
        LocalStorage(tmp_path / "store").put("a/x", b"1")
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path / "store" / "a") == []


def test_files_that_are_being_written_are_not_listed(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path)
    store.put("a/x", b"1")
    (tmp_path / "a" / ".y.abc").write_bytes(b"half")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "z").write_bytes(b"")
    assert store.list("") == [("a/x", 1)]


def test_what_a_killed_upload_left_behind_is_swept_after_hours_and_not_before(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path)
    store.put("kept/a", b"a")
    for name in ("kept/.a.old", "left/.b.old", "left2/.c.new"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"half")
        if name.endswith("old"):
            os.utime(tmp_path / name, (1.0, 1.0))
    store.delete([])
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")) == [
        "kept",
        "kept/a",
        "left2",
        "left2/.c.new",
    ]


def test_folders_left_empty_go_and_the_root_stays(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path / "store")
    for name in ("a/b/c/1", "a/b/2", "d/e/3"):
        store.put(name, b"x")
    store.delete(["a/b/c/1", "d/e/3"])
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == [
        "store",
        "store/a",
        "store/a/b",
        "store/a/b/2",
    ]
    store.delete(["a/b/2"])
    assert list(tmp_path.rglob("*")) == [tmp_path / "store"]


def test_a_folder_taken_away_while_a_file_is_put_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Path.mkdir
    taken: list[Path] = []

    def and_take_away(path: Path, *args: Any, **named: Any) -> None:
        make(path, *args, **named)
        if len(taken) < 3 and path.name == "a":
            taken.append(path)
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", and_take_away)
    store = LocalStorage(tmp_path)
    store.put("a/x", b"1")
    assert len(taken) == 3
    assert store.get("a/x") == b"1"


@pytest.mark.parametrize("form", ["{}", "file://{}", "file://localhost{}"])
def test_paths_and_file_urls_are_folders(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "a b"
    store = open_storage(form.format(str(folder).replace(" ", "%20") if "://" in form else folder), {})
    store.put("x", b"1")
    assert (folder / "x").read_bytes() == b"1"
    assert store.describe() == f"the folder {folder}"


@pytest.mark.parametrize("url", ["hdfs://host/x", "memory:///", "https://user:pass@host/x", "file://host/x"])
def test_a_store_of_no_known_kind_is_refused_with_the_setting_and_a_remedy(url: str) -> None:
    with pytest.raises(ConfigError, match="checkpoint_dir") as caught:
        open_storage(url, {})
    assert caught.value.remedy
    assert "pass" not in str(caught.value)


def test_an_option_that_the_store_does_not_know_is_a_config_error(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="no_such_option") as caught:
        open_storage("s3://bucket/x", {**options, "no_such_option": "1"})
    assert SECRET not in str(caught.value)


def test_errors_of_the_store_are_oserrors_with_one_sentence_and_no_credential(
    options: dict[str, str], tmp_path: Path
) -> None:
    store = open_storage("s3://no-such-bucket/x", options)
    path, _ = file_of(tmp_path, 10)
    calls = (lambda: store.put("a", b""), lambda: store.put_file("a", path), lambda: store.list(""))
    for call in calls:
        with pytest.raises(StorageError) as caught:
            call()
        text = str(caught.value)
        assert isinstance(caught.value, OSError)
        assert "no-such-bucket" in text
        assert "\n" not in text
        assert SECRET not in text and KEY not in text
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__


def test_a_panic_inside_the_library_is_a_storage_error_too(options: dict[str, str]) -> None:
    store = ObjectStorage("s3://bucket/x", {**options, "endpoint": "::::"})
    with pytest.raises(StorageError, match="can't be written to"):
        store.put("a", b"")


def test_no_credential_shows_in_descriptions(options: dict[str, str]) -> None:
    store = ObjectStorage(f"s3://user:{SECRET}@bucket/x?sig={SECRET}", {**options, "sas_token": "hush"})
    for text in (store.describe(), repr(store), str(store)):
        assert "bucket/x" in text
        assert options["endpoint"] in text
        assert not any(secret in text for secret in (SECRET, KEY, "user", "hush"))


def test_the_logs_object_store_refuses_the_second_writer_on_s3_as_well(
    bucket: str, options: dict[str, str]
) -> None:
    config = {k: v for k, v in options.items() if k != "allow_http"}
    log = ObjectStore(f"s3://{bucket}/log", config=config, client_options={"allow_http": True})
    assert log.put_if_absent("plans/1", b"first")
    assert not log.put_if_absent("plans/1", b"second")
    assert log.get("plans/1") == b"first"
    assert log.list("plans") == ["1"]
    log.delete("plans/1")
    log.delete("plans/1")
    assert log.get("plans/1") is None
