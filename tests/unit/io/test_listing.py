"""Which files are new: each is taken once, whatever its time, and the position stays small."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.io.listing import REMEMBERED, Folder, Found, Open, Taken, after, hidden, news

WINDOW_NS = 100


def found(path: str, mtime_ns: int, size: int = 1, ctime_ns: int | None = None) -> Found:
    return Found(path, mtime_ns, size, mtime_ns if ctime_ns is None else ctime_ns)


def take_all(taken: Taken, files: list[Found], now_ns: int = 1 << 60) -> tuple[list[Found], Taken]:
    seen = news(files, taken)
    newest = max([taken.newest_ctime_ns, *(f.ctime_ns for f in files)])
    taken = msgspec.structs.replace(taken, newest_ctime_ns=newest)
    return seen.waiting, after(taken, seen.waiting, None, part=None, window_ns=WINDOW_NS, now_ns=now_ns)


def test_files_are_taken_by_time_and_then_by_name() -> None:
    waiting = news([found("b", 5), found("c", 1), found("a", 5)], Taken()).waiting
    assert [f.path for f in waiting] == ["c", "a", "b"]


def test_a_file_that_comes_late_with_an_older_time_is_taken_once() -> None:
    _, taken = take_all(Taken(), [found("new", 1_000)])
    late = found("late", 950, ctime_ns=1_001)
    waiting, taken = take_all(taken, [found("new", 1_000), late])
    assert waiting == [late]
    assert news([found("new", 1_000), late], taken).waiting == []


def test_a_file_older_than_the_window_is_told_of_and_not_taken() -> None:
    _, taken = take_all(Taken(), [found("new", 1_000)])
    too_late = found("old", 500, ctime_ns=2_000)
    seen = news([found("new", 1_000), too_late], taken)
    assert (seen.waiting, seen.too_late) == ([], [too_late])


def test_a_file_taken_long_ago_is_neither_taken_again_nor_told_of() -> None:
    old, new = found("old", 500), found("new", 1_000)
    _, taken = take_all(Taken(), [old, new])
    assert "old" not in taken.files
    seen = news([old, new], taken)
    assert (seen.waiting, seen.too_late, seen.changed) == ([], [], [])


def test_a_taken_file_that_changed_is_told_of() -> None:
    _, taken = take_all(Taken(), [found("a", 1_000)])
    changed = found("a", 1_001, size=2)
    assert news([changed], taken).changed == [changed]


def test_a_file_dated_in_the_future_does_not_push_others_out_of_the_window() -> None:
    _, taken = take_all(Taken(), [found("future", 10_000)], now_ns=1_000)
    assert [f.path for f in news([found("now", 1_001)], taken).waiting] == ["now"]
    assert "future" in taken.files


def test_the_floor_never_passes_a_file_that_waits_or_is_half_read() -> None:
    waits = found("waits", 10)
    taken = after(Taken(), [found("new", 1_000)], waits, part=None, window_ns=WINDOW_NS, now_ns=1 << 60)
    assert news([waits], taken).waiting == [waits]
    half = Open("half", 20, 1, next=1)
    taken = after(taken, [waits], None, part=half, window_ns=WINDOW_NS, now_ns=1 << 60)
    done = after(taken, [half], None, part=None, window_ns=WINDOW_NS, now_ns=1 << 60)
    assert taken.floor <= (20, "half")
    assert news([found("half", 20)], done).waiting == []


def test_a_position_names_a_bounded_number_of_files() -> None:
    files = [found(f"{n:06d}", 1_000) for n in range(REMEMBERED + 500)]
    _, taken = take_all(Taken(), files)
    assert len(taken.files) == REMEMBERED
    assert news(files, taken).waiting == []


@settings(deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 3)), max_size=5), max_size=12),
    st.integers(1, 4),
)
def test_whatever_comes_in_whatever_order_nothing_is_taken_twice_or_lost_in_silence(
    arrivals: list[list[tuple[int, int]]], most: int
) -> None:
    present: list[Found] = []
    taken, clock = Taken(), 1_000
    took: list[str] = []
    told: set[str] = set()
    for step, batch in enumerate([*arrivals, *([] for _ in range(60))]):
        for place, (mtime_ns, size) in enumerate(batch):
            clock += 1
            present.append(Found(f"{step}-{place}", mtime_ns, size, clock))
        seen = news(present, taken)
        told |= {f.path for f in seen.too_late}
        taken = msgspec.structs.replace(taken, newest_ctime_ns=clock)
        done, rest = seen.waiting[:most], seen.waiting[most:]
        took += [f.path for f in done]
        taken = after(taken, done, rest[0] if rest else None, part=None, window_ns=WINDOW_NS, now_ns=1 << 60)
        assert all((mtime_ns, path) >= taken.floor for path, (mtime_ns, _) in taken.files.items())
    assert len(took) == len(set(took))
    assert set(took) | told == {f.path for f in present}
    assert not set(took) & told


def test_hidden_and_unfinished_names_are_left_alone(tmp_path: Path) -> None:
    for name in ("a.csv", ".hidden", "_SUCCESS", "b.csv.tmp", "c.staged", "d.csv.crc", "e.part"):
        (tmp_path / name).write_text("x")
    (tmp_path / "_private").mkdir()
    (tmp_path / "_private" / "f.csv").write_text("x")
    assert [f.path for f in Folder(str(tmp_path)).look()] == ["a.csv"]
    assert hidden("x~")


def test_files_below_are_found_and_patterns_match_names_or_paths(tmp_path: Path) -> None:
    (tmp_path / "2024" / "01").mkdir(parents=True)
    for name in ("a.csv", "2024/b.csv", "2024/01/c.csv", "2024/d.txt"):
        (tmp_path / name).write_text("x")
    assert {f.path for f in Folder(str(tmp_path), "*.csv").look()} == {"a.csv", "2024/b.csv", "2024/01/c.csv"}
    assert {f.path for f in Folder(str(tmp_path), "2024/*.csv").look()} == {"2024/b.csv", "2024/01/c.csv"}


def test_a_folder_at_rest_is_not_listed_again_and_one_that_moved_is(
    tmp_path: Path, monkeypatch: object
) -> None:
    (tmp_path / "a").write_text("x")
    os.utime(tmp_path, (1, 1))
    folder = Folder(str(tmp_path))
    folder.look()
    listed = []
    folder._scan = lambda *args: listed.append(args) or Folder._scan(folder, *args)  # type: ignore[assignment]
    assert [f.path for f in folder.look()] == ["a"]
    assert listed == []
    (tmp_path / "b").write_text("x")
    assert {f.path for f in folder.look()} == {"a", "b"}
    assert len(listed) == 1


def test_a_file_that_grows_while_it_waits_is_seen_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    os.utime(tmp_path, (1, 1))
    folder = Folder(str(tmp_path))
    before = folder.look()
    (tmp_path / "a").write_text("xyz")
    assert [f.size for f in folder.fresh(before)] == [3]
    assert [f.size for f in folder.look()] == [3]
