"""A pipeline's stages as a picture: SVG text from the plan. Pure, and without any drawing library.

A stage is a box with its chain of operators inside, from left to right; an exchange is a thick arrow from
box to box with its key on it; a thin line is a call inside a chain. The picture follows the viewer's light
or dark theme where the viewer knows one.

Two layouts, one inside the other: operators stand in the columns of their box, boxes in the columns of the
picture, one for each wave. A line that skips a column gets an empty place in it, so that it runs beside
what stands there and not through it.
"""

from __future__ import annotations

import dataclasses
import itertools
from html import escape
from typing import Any

from holdfast.functions import Aggregate, Column
from holdfast.plan import graph as g
from holdfast.plan.stages import Exchange, Stage, Stages, takers
from holdfast.plan.times import WindowBody
from holdfast.time.triggers import event_time

_CARD_H, _ROW_GAP, _COLUMN_GAP, _TURN = 58.0, 20.0, 40.0, 30.0
_PAD, _HEADER_H, _BOX_GAP, _LANE_H = 18.0, 38.0, 34.0, 24.0
_MARGIN, _TITLE_H, _LEGEND_H = 28.0, 52.0, 40.0
_LONGEST = 38

_LIGHT = {
    "page": "#ffffff", "text": "#1f2328", "muted": "#656d76", "box": "#f6f8fa", "edge": "#d0d7de",
    "card": "#ffffff", "line": "#8c959f", "exchange": "#0969da", "pill": "#ddf4ff",
    "source": "#1a7f37", "step": "#57606a", "keyed": "#8250df", "sink": "#bc4c00",
}  # fmt: skip
_DARK = {
    "page": "#0d1117", "text": "#e6edf3", "muted": "#8d96a0", "box": "#151b23", "edge": "#3d444d",
    "card": "#212830", "line": "#7d8590", "exchange": "#4493f8", "pill": "#132d4f",
    "source": "#3fb950", "step": "#9198a1", "keyed": "#ab7df8", "sink": "#f0883e",
}  # fmt: skip


def draw(stages: Stages) -> str:
    """The picture of a pipeline's stages, as the text of an SVG file."""
    return _Picture(stages).svg()


def title_of(node: g.Node) -> str:
    """What an operator is called: its uid, or its function's name where the user gave no uid."""
    given = node.kind in g.NEEDS_UID or node.uid != f"{node.kind}-{node.id}"
    return node.uid if given else _name_of(node.body)


def detail_of(node: g.Node) -> str:
    """What an operator is, in a few words: what is read or written, the class, the aggregates."""
    if node.kind in (g.SOURCE, g.SINK):
        return str(node.body.describe())
    if node.kind == g.AGGREGATE:
        return ", ".join(f"{name}={_name_of(a)}" for name, a in node.body.items())
    if node.kind == g.EVENT_TIME:
        return f"{node.body.column}, {node.body.watermarks.describe()}"
    if node.kind == g.WINDOW:
        return _window_detail(node.body)
    if node.kind in (*g.LIBRARY, g.ASYNC_MAP):
        return str(node.body.describe())
    name = _name_of(node.body)
    return "" if name == title_of(node) else name


def _window_detail(body: WindowBody) -> str:
    made = ", ".join(f"{name}={_name_of(a)}" for name, a in body.columns.items())
    if body.function is not None:
        made = f"{body.kind} {_name_of(body.function)}"
    trigger = "" if body.trigger == event_time() else f", {body.trigger!r}"
    return f"{body.assigner.describe()}{trigger}: {made}"


def _name_of(body: Any) -> str:
    if isinstance(body, (Column, Aggregate)):
        return repr(body) if isinstance(body, Column) else type(body).__name__
    return str(getattr(body, "__name__", type(body).__name__)).replace("<lambda>", "lambda")


def _short(text: str, longest: int = _LONGEST) -> str:
    """A text that fits: without its end, or where it ends in a path, without the path's beginning.

    >>> _short("Parquet files in /a/long/way/down/to/tiles", 32)
    'Parquet files in …/down/to/tiles'
    """
    if len(text) <= longest:
        return text
    words, _, path = text.rpartition(" ")
    room = longest - len(words) - 2
    if "/" not in path or room < 8:
        return f"{text[: longest - 1]}…" if "/" not in path else f"…{text[1 - longest :]}"
    return f"{words} …{path[-room:]}"


def _width(text: str, size: float) -> float:
    """Room enough for a text in the widest of the usual fonts."""
    return len(text) * size * 0.61


@dataclasses.dataclass(frozen=True)
class _Line:
    """A call inside a chain: from an operator, by empty places (column, row), to an operator or a port."""

    start: int
    tag: str
    bends: tuple[tuple[int, int], ...]
    node: int | None = None
    exchange: int | None = None


class _Chain:
    """One stage's box: where its operators stand in it, and where its exchanges leave it."""

    def __init__(self, stages: Stages, stage: Stage) -> None:
        self.stages, self.stage = stages, stage
        self.columns = _columns(stages, stage)
        self.last = max(self.columns.values())
        self.rows: dict[int, int] = {}
        self.ports: dict[int, int] = {}
        self.lines: list[_Line] = []
        self._used = 1
        self._place(stage.root, 0)
        self.widths = [self._widest(column) for column in range(self.last + 1)]
        self.x = self._xs()
        content = self.x[self.last] + self.widths[self.last] + self._port_gap()
        self.width = max(content, _width(self.header, 12) + 2 * _PAD)
        self.tops = self._tops()
        self.height = self.tops[-1] - _ROW_GAP + _PAD

    @property
    def header(self) -> str:
        root = self.stages.node(self.stage.root)
        if root.kind == g.SOURCE:
            return f"stage {self.stage.id} · reads"
        keys = dict.fromkeys(i.key.describe() for i in root.inputs if i.key)
        return f"stage {self.stage.id} · shards by {_short(', '.join(keys))}"

    def _place(self, node: int, row: int) -> None:
        """Give a node its row: the first that takes its output stands beside it, the others below."""
        self.rows[node] = row
        beside = True
        for tag in self.stages.node(node).tags:
            inside, leaving = takers(self.stages, self.stage, node, tag)
            for target in dict.fromkeys(n.id for n, _ in inside):
                beside = self._line_to(node, tag, target, row, beside)
            for exchange in leaving:
                at = row if beside else self._new_row()
                bends = self._bends(node, self.last + 1, at)
                self.lines.append(_Line(node, tag, bends, exchange=exchange.id))
                self.ports[exchange.id] = at
                beside = False

    def _line_to(self, node: int, tag: str, target: int, row: int, beside: bool) -> bool:
        """A line to an operator, which is placed with it if it has no place yet; whether beside is still free."""
        adjacent = self.columns[target] == self.columns[node] + 1
        if target in self.rows:
            bends = () if adjacent else self._bends(node, self.columns[target], self._new_row())
            self.lines.append(_Line(node, tag, bends, node=target))
            return beside
        at = row if beside else self._new_row()
        self.lines.append(_Line(node, tag, self._bends(node, self.columns[target], at), node=target))
        self._place(target, at)
        return False

    def _bends(self, node: int, until: int, row: int) -> tuple[tuple[int, int], ...]:
        return tuple((column, row) for column in range(self.columns[node] + 1, until))

    def _new_row(self) -> int:
        self._used += 1
        return self._used - 1

    def _xs(self) -> list[float]:
        xs = [_PAD]
        for column in range(self.last):
            xs.append(xs[-1] + self.widths[column] + self._gap(column))
        return xs

    def _tops(self) -> list[float]:
        """Where each row starts, and where the last one ends; a row of lines alone is low."""
        tops = [_HEADER_H]
        for row in range(self._used):
            tops.append(tops[-1] + (_CARD_H if row in self.rows.values() else _LANE_H) + _ROW_GAP)
        return tops

    def _widest(self, column: int) -> float:
        nodes = [n for n, c in self.columns.items() if c == column]
        return max((_card_width(self.stages.node(n)) for n in nodes), default=0.0)

    def _gap(self, column: int) -> float:
        tags = [
            _width(line.tag, 11) for line in self.lines if line.tag and self.columns[line.start] == column
        ]
        return max([_COLUMN_GAP, *(t + _TURN + 14 for t in tags)])

    def _port_gap(self) -> float:
        """The space between the last column and the edge of the box."""
        starts_there = any(self.columns[line.start] == self.last for line in self.lines)
        return self._gap(self.last) if starts_there else _PAD

    def row_y(self, row: int) -> float:
        """The middle of a row, from the top of the box."""
        return (self.tops[row] + self.tops[row + 1] - _ROW_GAP) / 2


def _columns(stages: Stages, stage: Stage) -> dict[int, int]:
    """The column of each operator: one behind what feeds it; sinks in the last."""
    columns: dict[int, int] = {}
    for node in stage.nodes:
        inputs = stages.node(node).inputs
        columns[node] = 1 + max((columns[i.node] for i in inputs if i.node in columns), default=-1)
    columns[stage.root] = 0
    last = max(columns.values())
    return {n: last if n in stage.sinks else c for n, c in columns.items()}


def _card_width(node: g.Node) -> float:
    """How wide an operator's card must be for its words."""
    texts = (_width(_short(title_of(node)), 13), _width(_short(detail_of(node)), 11), _width(node.kind, 11))
    return max(96.0, max(texts) + 30)


@dataclasses.dataclass
class _Place:
    """A box, or the empty place of an exchange that passes, in a column of the picture."""

    height: float
    entry: float
    """Where lines come in, from the top."""
    chain: _Chain | None = None
    exchange: int | None = None
    y: float = 0.0


class _Picture:
    """Boxes in columns, and the exchanges between them."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self.chains = {s.id: _Chain(stages, s) for s in stages.stages}
        self.waves = 1 + max(s.wave for s in stages.stages)
        self.at: dict[int, _Place] = {}
        """The place of each stage's box."""
        self.passing: dict[tuple[int, int, int], _Place] = {}
        """By stage, exchange and wave: where an exchange that skips a wave passes it."""
        self.x = self._xs()
        self._stack()
        self.parts: list[str] = []

    def _leaving(self) -> list[tuple[Stage, Exchange]]:
        """An exchange behind a union leaves every stage whose chain holds its operator."""
        return [(s, self.stages.exchanges[e]) for s in self.stages.stages for e in s.exchanges]

    def _xs(self) -> list[float]:
        xs = [_MARGIN]
        for wave in range(self.waves - 1):
            widest = max(self.chains[s.id].width for s in self.stages.stages if s.wave == wave)
            labels = [_pill_width(e) for s, e in self._leaving() if s.wave == wave]
            xs.append(xs[-1] + widest + max(labels, default=0.0) + 104)
        return xs

    def _stack(self) -> None:
        """Give every place its height, column by column, as near to what feeds it as it can be."""
        for wave in range(self.waves):
            column: list[tuple[float, _Place]] = []
            for stage in self.stages.stages:
                if stage.wave == wave:
                    chain = self.chains[stage.id]
                    place = _Place(chain.height, chain.row_y(0), chain=chain)
                    self.at[stage.id] = place
                    column.append((self._wanted(stage), place))
            for stage, exchange in self._leaving():
                if stage.wave < wave < self.stages.of(exchange.target).wave:
                    place = _Place(_LANE_H, _LANE_H / 2, exchange=exchange.id)
                    self.passing[stage.id, exchange.id, wave] = place
                    column.append((self._leaves_at(stage, exchange), place))
            _pack(column)
        top = min(p.y for p in self._places())
        for place in self._places():
            place.y += _MARGIN + _TITLE_H - top

    def _places(self) -> list[_Place]:
        return [*self.at.values(), *self.passing.values()]

    def _wanted(self, stage: Stage) -> float:
        feeding = [
            self._leaves_at(s, e) for s, e in self._leaving() if e.target == stage.root and s.id in self.at
        ]
        return sum(feeding) / len(feeding) if feeding else 0.0

    def _leaves_at(self, stage: Stage, exchange: Exchange) -> float:
        chain = self.chains[stage.id]
        return self.at[stage.id].y + chain.row_y(chain.ports[exchange.id])

    def svg(self) -> str:
        for stage in self.stages.stages:
            self._draw_box(self.x[stage.wave], self.at[stage.id].y, self.chains[stage.id])
        for stage, exchange in self._leaving():
            self._draw_exchange(stage, exchange)
        boxes = [
            (self.x[s.wave] + self.chains[s.id].width, self.at[s.id].y + self.chains[s.id].height)
            for s in self.stages.stages
        ]
        graph = self.stages.graph
        width = max([x for x, _ in boxes] + [_MARGIN + _width(graph.name, 18), 620.0]) + _MARGIN
        height = (
            max([y for _, y in boxes] + [p.y + p.height for p in self.passing.values()]) + _LEGEND_H + _MARGIN
        )
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'width="{width:.0f}" height="{height:.0f}" role="img" aria-label="{escape(graph.name)}: its stages">',
            f"<style>{_style()}</style>",
            f'<rect class="page" width="{width:.0f}" height="{height:.0f}"/>',
            _text(_MARGIN, _MARGIN + 20, graph.name, "name"),
        ]
        return "\n".join([*head, *self.parts, *_legend(_MARGIN, height - _MARGIN), "</svg>\n"])

    def _draw_box(self, left: float, top: float, chain: _Chain) -> None:
        self.parts += [
            f'<rect class="box" x="{left:.1f}" y="{top:.1f}" width="{chain.width:.1f}" height="{chain.height:.1f}" rx="10"/>',
            _text(left + _PAD, top + 24, chain.header, "header"),
        ]
        for line in chain.lines:
            self._draw_line(left, top, chain, line)
        for node, column in chain.columns.items():
            middle = top + chain.row_y(chain.rows[node])
            self._draw_card(left + chain.x[column], middle, chain.widths[column], chain.stages.node(node))

    def _draw_line(self, left: float, top: float, chain: _Chain, line: _Line) -> None:
        column = chain.columns[line.start]
        x = left + chain.x[column] + chain.widths[column]
        points = [(x, x, top + chain.row_y(chain.rows[line.start]))]
        for column, row in line.bends:
            at = left + chain.x[column]
            points.append((at, at + chain.widths[column], top + chain.row_y(row)))
        if line.node is not None:
            end, row = left + chain.x[chain.columns[line.node]], chain.rows[line.node]
        else:
            assert line.exchange is not None
            end, row = left + chain.width, chain.ports[line.exchange]
        points.append((end, end, top + chain.row_y(row)))
        if line.tag:
            at, right, y = points[1]
            points[1] = (x + _TURN, max(at, right), y)
            self.parts.append(_text(x + _TURN + 4, y - 6, line.tag, "tag"))
        self.parts.append(f'<path class="line" d="{_curve(points)}"/>')

    def _draw_card(self, x: float, middle: float, width: float, node: g.Node) -> None:
        top = middle - _CARD_H / 2
        look = node.kind if node.kind in (g.SOURCE, g.SINK) else "keyed" if node.keyed else "step"
        detail = detail_of(node)
        ys = (top + 17, top + 34, top + 49) if detail else (top + 24, top + 42, 0.0)
        self.parts += [
            f"<g><title>{escape(f'{node.uid} ({node.kind}) {detail} {node.where}')}</title>",
            f'<rect class="card" x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{_CARD_H:.1f}" rx="6"/>',
            f'<rect class="bar {look}" x="{x:.1f}" y="{top + 8:.1f}" width="4" height="{_CARD_H - 16:.1f}" rx="2"/>',
            _text(x + 15, ys[0], node.kind, f"kind {look}"),
            _text(x + 15, ys[1], _short(title_of(node)), "uid"),
        ]
        if detail:
            self.parts.append(_text(x + 15, ys[2], _short(detail), "detail"))
        self.parts.append("</g>")

    def _draw_exchange(self, stage: Stage, exchange: Exchange) -> None:
        target = self.stages.of(exchange.target)
        x = self.x[stage.wave] + self.chains[stage.id].width
        y = self._leaves_at(stage, exchange)
        straight = x + _pill_width(exchange) + 22
        points = [(x, straight, y)]
        for wave in range(stage.wave + 1, target.wave):
            place = self.passing[stage.id, exchange.id, wave]
            widest = max(self.chains[s.id].width for s in self.stages.stages if s.wave == wave)
            points.append((self.x[wave], self.x[wave] + widest, place.y + place.entry))
        place, end = self.at[target.id], self.x[target.wave]
        tip = place.y + place.entry + self._spread(stage, exchange)
        points.append((end - 9, end - 9, tip))
        self.parts += [
            f'<path class="exchange" d="{_curve(points)}"/>',
            f'<path class="head" d="M{end - 12:.1f},{tip - 7:.1f} L{end:.1f},{tip:.1f} L{end - 12:.1f},{tip + 7:.1f} Z"/>',
            f'<rect class="pill" x="{x + 11:.1f}" y="{y - 11:.1f}" width="{_pill_width(exchange):.1f}" height="22" rx="11"/>',
            _text(x + 11 + _pill_width(exchange) / 2, y + 4, _label(exchange), "key"),
        ]

    def _spread(self, stage: Stage, exchange: Exchange) -> float:
        """Arrows that meet at one box come in side by side, in the order of their starts."""
        meeting = [
            (self._leaves_at(s, e), s.id, e.id) for s, e in self._leaving() if e.target == exchange.target
        ]
        place = sorted(meeting).index((self._leaves_at(stage, exchange), stage.id, exchange.id))
        step = min(18.0, (_CARD_H - 14) / max(1, len(meeting) - 1))
        return (place - (len(meeting) - 1) / 2) * step


def _pack(column: list[tuple[float, _Place]]) -> None:
    """Stack places in the order of where they want to be, each as near to that as the others let it."""
    column.sort(key=lambda item: item[0])
    bottom, shifts = float("-inf"), []
    for wanted, place in column:
        ideal = wanted - place.entry
        place.y = max(ideal, bottom)
        shifts.append(place.y - ideal)
        bottom = place.y + place.height + _BOX_GAP
    for _, place in column:
        place.y -= sum(shifts) / len(shifts)


def _curve(points: list[tuple[float, float, float]]) -> str:
    """A path through places (left, right, y): level across each, and smooth between them."""
    made = [f"M{points[0][0]:.1f},{points[0][2]:.1f} H{points[0][1]:.1f}"]
    for (_, x, y), (left, right, to) in itertools.pairwise(points):
        middle = (x + left) / 2
        made.append(
            f"H{left:.1f}" if y == to else f"C{middle:.1f},{y:.1f} {middle:.1f},{to:.1f} {left:.1f},{to:.1f}"
        )
        if right > left:
            made.append(f"H{right:.1f}")
    return " ".join(made)


def _label(exchange: Exchange) -> str:
    return f"by {_short(exchange.key.describe())}"


def _pill_width(exchange: Exchange) -> float:
    return _width(_label(exchange), 11.5) + 22


def _text(x: float, y: float, text: str, look: str) -> str:
    return f'<text class="{look}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _legend(x: float, y: float) -> list[str]:
    parts = []
    for name, look in (
        ("source", "source"),
        ("stateless", "step"),
        ("keyed state", "keyed"),
        ("sink", "sink"),
    ):
        parts.append(f'<rect class="bar {look}" x="{x:.1f}" y="{y - 10:.1f}" width="4" height="12" rx="2"/>')
        parts.append(_text(x + 10, y, name, "detail"))
        x += _width(name, 11) + 34
    parts.append(f'<path class="line" d="M{x:.1f},{y - 4:.1f} h24"/>')
    parts.append(_text(x + 32, y, "call in a chain", "detail"))
    x += _width("call in a chain", 11) + 50
    parts.append(f'<path class="exchange" d="M{x:.1f},{y - 4:.1f} h24"/>')
    parts.append(_text(x + 32, y, "exchange", "detail"))
    return parts


def _style() -> str:
    fonts = "font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
    shapes = (
        f"text{{{fonts}}}.name{{font-size:18px;font-weight:600}}.header{{font-size:12px}}"
        ".kind{font-size:11px}.uid{font-size:13px;font-weight:600}.detail{font-size:11px}"
        ".tag{font-size:11px;font-style:italic}.key{font-size:11.5px;font-weight:600;text-anchor:middle}"
        ".line{fill:none;stroke-width:1.5}.exchange{fill:none;stroke-width:4;stroke-linecap:round}"
    )
    return shapes + _colours(_LIGHT) + "@media (prefers-color-scheme:dark){" + _colours(_DARK) + "}"


def _colours(c: dict[str, str]) -> str:
    kinds = "".join(f".{k}{{fill:{c[k]}}}" for k in ("source", "step", "keyed", "sink"))
    return (
        f".page{{fill:{c['page']}}}.name,.uid{{fill:{c['text']}}}.header,.detail,.tag{{fill:{c['muted']}}}"
        f".box{{fill:{c['box']};stroke:{c['edge']}}}.card{{fill:{c['card']};stroke:{c['edge']}}}"
        f".line{{stroke:{c['line']}}}.exchange{{stroke:{c['exchange']}}}.head{{fill:{c['exchange']}}}"
        f".pill{{fill:{c['pill']};stroke:{c['exchange']}}}.key{{fill:{c['exchange']}}}{kinds}"
    )
