"""Any cut of a text file into byte ranges gives each line exactly once."""

from __future__ import annotations

import itertools
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.io import lines
from holdfast.io.base import Reading
from holdfast.io.jsontext import JsonParser
from holdfast.io.lines import Trouble, blocks, split_records, tables

texts = st.lists(st.text(alphabet="ab\r\u00e4", max_size=6).map(str.encode), max_size=12)


def joined(found: object) -> bytes:
    return b"".join(block.lines for block in found)  # type: ignore[attr-defined]


@settings(deadline=None)
@given(texts, st.booleans(), st.lists(st.integers(0, 100), max_size=6))
def test_any_cut_gives_each_line_exactly_once(rows: list[bytes], ends: bool, cuts: list[int]) -> None:
    text = b"\n".join(rows) + (b"\n" if ends and rows else b"")
    edges = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    found = []
    for start, end in itertools.pairwise(edges):
        piece = joined(blocks(pa.BufferReader(text), start, end))
        found.append(piece)
    assert b"".join(found) == text


@settings(deadline=None)
@given(texts, st.integers(1, 9), st.lists(st.integers(0, 100), max_size=4))
def test_blocks_are_cut_between_lines_whatever_their_size(
    rows: list[bytes], size: int, cuts: list[int]
) -> None:
    text = b"\n".join(rows)
    edges = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "BLOCK_BYTES", size)
        patch.setattr(lines, "_READ_BYTES", 1)
        found = [b for s, e in itertools.pairwise(edges) for b in blocks(pa.BufferReader(text), s, e)]
    assert joined(found) == text
    assert all(text[b.offset :].startswith(b.lines) for b in found)
    assert all(b.offset == 0 or text[b.offset - 1 : b.offset] == b"\n" for b in found)


@settings(deadline=None)
@given(texts)
def test_records_of_a_block_make_up_the_block(rows: list[bytes]) -> None:
    text = b"\n".join(rows)
    assert b"".join(split_records(text, multiline=False)) == text
    assert b"".join(split_records(text, multiline=True)) == text


def read(tmp_path: Path, text: bytes, start: int, end: int) -> tuple[list[int], list[tuple[str, int | None]]]:
    path = tmp_path / "a.jsonl"
    path.write_bytes(text)
    reading = Reading("s", "dead_letter")
    trouble = Trouble(reading, str(path), lambda: lines.open_text(str(path)))
    parser = JsonParser(pa.schema({"n": pa.int64()}))
    with lines.open_text(str(path)) as file:
        found = [
            n for t in tables(blocks(file, start, end), parser, trouble) for n in t.column("n").to_pylist()
        ]
    return found, [(dead["record"], dead["line"]) for dead in reading.dead]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lines")


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(st.integers(0, 9), st.sampled_from(["{", "[1]", '{"n": "x"}', "", '{"n": 1}{"n": 2}'])),
        max_size=30,
    ),
    st.integers(0, 200),
)
def test_bad_lines_are_found_with_their_number_and_all_others_are_read(
    folder: Path, content: list[int | str], cut: int
) -> None:
    made = [f'{{"n": {c}}}' if isinstance(c, int) else c for c in content]
    text = "".join(line + "\n" for line in made).encode()
    cut = min(cut, len(text))
    (one, bad_one), (two, bad_two) = (
        read(folder, text, start, end) if end > start else ([], [])
        for start, end in ((0, cut), (cut, len(text)))
    )
    assert one + two == [c for c in content if isinstance(c, int)]
    assert bad_one + bad_two == [(c, n) for n, c in enumerate(content, 1) if isinstance(c, str) and c]


def test_an_object_over_two_lines_is_two_bad_records(tmp_path: Path) -> None:
    text = b'{"n":\n1}\n{"n": 2}\n'
    assert read(tmp_path, text, 0, len(text)) == ([2], [('{"n":', 1), ("1}", 2)])


def test_a_mark_of_byte_order_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    text = b'\xef\xbb\xbf{"n": 1}\nbad\n'
    assert read(tmp_path, text, 0, len(text)) == ([1], [("bad", 2)])


def test_a_line_longer_than_any_record_is_one_bad_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "LONGEST_LINE_BYTES", 1 << 20)
    text = b'{"n": 1}\n' + b"x" * (3 << 20) + b'\n{"n": 2}\n'
    found, bad = read(tmp_path, text, 0, len(text))
    assert found == [1, 2]
    assert [line for _, line in bad] == [2]


def test_bytes_that_are_no_text_are_a_bad_record(tmp_path: Path) -> None:
    text = b'{"n": 1}\n{"n": 2, "\xff": 1}\n{"n": 3}\n'
    found, bad = read(tmp_path, text, 0, len(text))
    assert found == [1, 3]
    assert [line for _, line in bad] == [2]
