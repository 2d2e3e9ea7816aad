"""The picture of a plan: everything is on it, nothing stands on anything else, and any text survives it."""

import re
from typing import Any
from xml.etree import ElementTree as ET

from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.plan.draw import detail_of, draw, title_of
from holdfast.plan.stages import cut

SVG = "{http://www.w3.org/2000/svg}"
Rect = tuple[float, float, float, float]


class Keep(hf.KeyedProcess):
    side_outputs = ("late",)

    def process(self, key: Any, record: Any, ctx: Any) -> Any:
        return [record]


def double(record: dict[str, Any]) -> dict[str, Any]:
    return record


def picture_of(pipeline: hf.Pipeline) -> ET.Element:
    return ET.fromstring(draw(cut(pipeline.graph())))


def rects(picture: ET.Element, look: str) -> list[Rect]:
    found = [r for r in picture.iter(f"{SVG}rect") if r.get("class") == look]
    sides = ("x", "y", "width", "height")
    return [tuple(float(r.get(s, "0")) for s in sides) for r in found]  # type: ignore[misc]


def texts(picture: ET.Element, look: str) -> list[str]:
    return [t.text or "" for t in picture.iter(f"{SVG}text") if t.get("class") == look]


def apart(one: Rect, other: Rect) -> bool:
    return (
        one[0] + one[2] <= other[0]
        or other[0] + other[2] <= one[0]
        or one[1] + one[3] <= other[1]
        or other[1] + other[3] <= one[1]
    )


def inside(inner: Rect, outer: Rect) -> bool:
    return (
        inner[0] >= outer[0]
        and inner[1] >= outer[1]
        and inner[0] + inner[2] <= outer[0] + outer[2]
        and inner[1] + inner[3] <= outer[1] + outer[3]
    )


def check_layout(picture: ET.Element) -> None:
    """Boxes are apart and on the page; cards are apart, each in one box."""
    page = (0.0, 0.0, float(picture.get("width", "0")), float(picture.get("height", "0")))
    boxes, cards = rects(picture, "box"), rects(picture, "card")
    for number, box in enumerate(boxes):
        assert inside(box, page), f"{box} is not on the page {page}"
        assert all(apart(box, other) for other in boxes[number + 1 :])
    for number, card in enumerate(cards):
        assert sum(inside(card, box) for box in boxes) == 1
        assert all(apart(card, other) for other in cards[number + 1 :])


def two_branches() -> hf.Pipeline:
    pipeline = hf.Pipeline("shop")
    orders = pipeline.read("orders", hf.records([{"id": 1, "region": "n"}]))
    kept = orders.map(double).key_by("id", "region").process("kept", Keep())
    kept.write("out", hf.memory())
    kept.side("late").write("late-ones", hf.memory())
    orders.key_by("region").aggregate("totals", n=hf.count(), most=hf.max("id")).write("figures", hf.memory())
    return pipeline


def test_every_operator_stage_and_exchange_is_on_the_picture() -> None:
    picture = picture_of(two_branches())
    assert texts(picture, "name") == ["shop"]
    assert sorted(texts(picture, "uid")) == sorted(
        ["orders", "double", "kept", "out", "late-ones", "totals", "figures"]
    )
    assert texts(picture, "header") == [
        "stage 0 · reads",
        "stage 1 · shards by id, region",
        "stage 2 · shards by region",
    ]
    assert sorted(texts(picture, "key")) == ["by id, region", "by region"]
    assert texts(picture, "tag") == ["late"]
    assert "n=count(), most=max(id)" in texts(picture, "detail")
    check_layout(picture)


def test_sources_stand_left_and_sinks_right_in_their_stage() -> None:
    picture = picture_of(two_branches())
    kinds = {
        t.get("class", ""): float(t.get("x", "0"))
        for t in picture.iter(f"{SVG}text")
        if "kind" in t.get("class", "")
    }
    assert kinds["kind source"] < kinds["kind keyed"] < kinds["kind sink"]


def test_any_text_is_escaped() -> None:
    pipeline = hf.Pipeline("odd")
    stream = pipeline.read("in", hf.records([{'<a & "b">': 1}]))
    stream.key_by('<a & "b">').process("kept", Keep()).write("out", hf.jsonl("/tmp/<script>&amp;"))
    picture = picture_of(pipeline)
    assert texts(picture, "key") == ['by <a & "b">']
    assert any("<script>&amp;" in t for t in texts(picture, "detail"))


def test_a_long_text_is_cut_and_kept_in_the_title() -> None:
    pipeline = hf.Pipeline("long")
    path = "/a/very/long/path/" + "x" * 100
    pipeline.read("in", hf.records([{"n": 1}])).write("out", hf.parquet(path))
    picture = picture_of(pipeline)
    assert all(len(t) <= 38 for t in texts(picture, "detail"))
    assert any(path in (t.text or "") for t in picture.iter(f"{SVG}title"))


def test_light_and_dark_name_the_same_looks() -> None:
    style = draw(cut(two_branches().graph())).split("<style>")[1].split("</style>")[0]
    light, dark = style.split("@media (prefers-color-scheme:dark)")
    looks = set(re.findall(r"\.(\w+)", dark))
    assert looks == {x for x in looks if f".{x}" in light} and "page" in looks


def test_the_same_plan_gives_the_same_picture() -> None:
    assert draw(cut(two_branches().graph())) == draw(cut(two_branches().graph()))


def test_an_operator_without_a_uid_is_called_by_its_function() -> None:
    node = two_branches().graph().nodes[1]
    assert title_of(node) == "double" and detail_of(node) == ""


@st.composite
def pipelines(draw_: st.DrawFn) -> hf.Pipeline:
    """Pipelines of any shape: branches, unions, side outputs, several keyed stages, waves that are skipped."""
    pipeline = hf.Pipeline("any")
    streams = [pipeline.read(f"source-{n}", hf.records([{"k": 1}])) for n in range(draw_(st.integers(1, 3)))]
    for number in range(draw_(st.integers(0, 9))):
        stream = draw_(st.sampled_from(streams))
        kind = draw_(st.sampled_from(["map", "union", "keyed", "both", "sink"]))
        if kind == "map":
            streams.append(stream.map(double, uid=f"step-{number}" if number % 2 else None))
        elif kind == "union":
            streams.append(stream.union(draw_(st.sampled_from(streams))).filter(bool, uid=f"united-{number}"))
        elif kind == "keyed":
            made = stream.key_by("k").process(f"keyed-{number}", Keep())
            streams += [made, made.side("late")]
        elif kind == "both":
            joined = stream.union(draw_(st.sampled_from(streams)))
            streams.append(joined.key_by("k").aggregate(f"keyed-{number}", n=hf.count()))
        else:
            stream.write(f"sink-{number}", hf.memory())
    for number, stream in enumerate(streams):
        stream.write(f"last-{number}", hf.memory())
    return pipeline


@settings(max_examples=60, deadline=None)
@given(pipelines())
def test_nothing_stands_on_anything_else_whatever_the_pipeline(pipeline: hf.Pipeline) -> None:
    stages = cut(pipeline.graph())
    picture = ET.fromstring(draw(stages))
    assert len(rects(picture, "box")) == len(stages.stages)
    assert len(rects(picture, "card")) == sum(len(s.nodes) for s in stages.stages)
    assert len(texts(picture, "key")) == sum(len(s.exchanges) for s in stages.stages)
    check_layout(picture)
