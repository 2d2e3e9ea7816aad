"""The pictures of the guide to event time: up to date, on a page of the guide, and with room for every word."""

import itertools
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tools.draw_time import FOLDER, PICTURES, SIZE

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide"
SVG = "{http://www.w3.org/2000/svg}"
Rect = tuple[float, float, float, float]


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_that_is_checked_in_is_what_the_code_draws_now(name: str) -> None:
    assert (FOLDER / name).read_text() == PICTURES[name](), "run python tools/draw_time.py, and look at it"


def test_every_picture_of_time_is_drawn_and_shown_in_the_guide() -> None:
    shown = {
        n for page in GUIDE.glob("*.md") for n in re.findall(r"\(\.\./img/(time-[^)]+)\)", page.read_text())
    }
    assert shown == set(PICTURES) == {path.name for path in FOLDER.glob("time-*.svg")}


def room(text: ET.Element) -> Rect:
    """What a text takes in the widest of the usual fonts: left, top, right, bottom."""
    size = SIZE[text.get("class", "").split()[0]]
    width = len(text.text or "") * size * 0.61
    x, y = float(text.get("x", "0")), float(text.get("y", "0"))
    left = x - {"start": 0.0, "middle": width / 2, "end": width}[text.get("text-anchor", "start")]
    return left, y - 0.8 * size, left + width, y + 0.25 * size


@pytest.mark.parametrize("name", PICTURES)
def test_words_are_on_the_page_and_not_on_each_other(name: str) -> None:
    picture = ET.fromstring((FOLDER / name).read_text())
    width, height = float(picture.get("width", "0")), float(picture.get("height", "0"))
    texts = [(t.text, room(t)) for t in picture.iter(f"{SVG}text")]
    assert len(texts) > 5
    for words, (left, top, right, bottom) in texts:
        assert left >= 0 and top >= 0 and right <= width and bottom <= height, words
    for (one, a), (other, b) in itertools.combinations(texts, 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart, f"{one!r} and {other!r}"
