"""The pictures of ``docs/how_it_works.md``, as SVG: written here, and drawn from the code where it has the facts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

from longshore.tiles.tile import TRANSITIONS, TileEvent, TileState

INK, PAPER, LINE = "#222", "#fff", "#555"
DEVICE, COPY, HOST, PUBLISH, DECIDE, PLAIN = "#4472a8", "#8a8a8a", "#c77d2e", "#3d8c5c", "#7a4fa3", "#e8e8e8"


class Box(NamedTuple):
    """A rectangle with lines of text: its middle, its size, its colour."""

    x: float
    y: float
    width: float
    height: float
    color: str
    lines: Sequence[str]

    def draw(self) -> str:
        ink = INK if self.color == PLAIN else "#fff"
        left, top = self.x - self.width / 2, self.y - self.height / 2
        first = self.y + 4 - 7.5 * (len(self.lines) - 1)
        rectangle = f'<rect x="{left:g}" y="{top:g}" width="{self.width:g}" height="{self.height:g}" rx="4"'
        words = (text(self.x, first + 15 * row, line, ink) for row, line in enumerate(self.lines))
        return "\n".join([f'{rectangle} fill="{self.color}"/>', *words])


def text(x: float, y: float, words: str, ink: str = INK, anchor: str = "middle", weight: str = "normal") -> str:
    """One line of text; ``y`` is its base line."""
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{ink}" font-weight="{weight}">{escape(words)}</text>'
    )


def arrow(points: Sequence[tuple[float, float]], color: str = LINE, dashed: bool = False) -> str:
    """A line through these points, with a head at the last."""
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5" marker-end="url(#head)"{dashes}/>'
    )


def picture(width: int, height: int, label: str, parts: Iterable[str]) -> str:
    """A whole file."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12" role="img" aria-label="{escape(label)}">'
    )
    marker = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{LINE}"/></marker></defs>'
    )
    background = f'<rect width="100%" height="100%" fill="{PAPER}"/>'
    return "\n".join([head, marker, background, *parts, "</svg>", ""])


def life_of_a_gradient() -> str:
    """From backward to the new parameters: the device above, the host below."""
    device, way, host = 75, 150, 225
    boxes = [
        Box(130, device, 130, 44, DEVICE, ["backward", "makes gradients"]),
        Box(295, device, 130, 44, DEVICE, ["bucket: reduce", "over the ranks"]),
        Box(460, way, 140, 44, COPY, ["copy to the host,", "segment by segment"]),
        Box(460, host, 150, 44, HOST, ["tile: first one copied,", "later ones added"]),
        Box(640, host, 140, 44, HOST, ["step: unscale, clip,", "update, cast"]),
        Box(640, way, 120, 44, DECIDE, ["verdict: scale,", "clip, or skip"]),
        Box(800, way, 100, 44, PUBLISH, ["publish"]),
        Box(800, device, 130, 44, DEVICE, ["new parameters", "on the device"]),
    ]
    arrows = [
        arrow([(195, device), (230, device)]),
        arrow([(360, device), (460, device), (460, way - 22)]),
        arrow([(460, way + 22), (460, host - 22)]),
        arrow([(535, host), (570, host)]),
        arrow([(640, way + 22), (640, host - 22)]),
        arrow([(710, host), (800, host), (800, way + 22)]),
        arrow([(800, way - 22), (800, device + 22)]),
        arrow([(800, device - 22), (800, 28), (130, 28), (130, device - 22)], dashed=True),
    ]
    words = [
        text(10, device + 4, "device", anchor="start", weight="bold"),
        text(10, host + 4, "host", anchor="start", weight="bold"),
        text(465, 22, "the next forward"),
    ]
    return picture(880, 265, "Life of a gradient", [*words, *arrows, *(box.draw() for box in boxes)])


_PLACES = {
    TileState.EMPTY: (70, 120),
    TileState.FILLING: (240, 120),
    TileState.READY: (420, 120),
    TileState.STEPPING: (600, 55),
    TileState.STEPPED: (790, 55),
    TileState.COMMITTING: (600, 200),
    TileState.COMMITTED: (790, 200),
    TileState.BROKEN: (420, 260),
}
_COLORS = {
    TileState.STEPPING: HOST,
    TileState.STEPPED: HOST,
    TileState.COMMITTING: HOST,
    TileState.COMMITTED: PUBLISH,
    TileState.BROKEN: "#a33",
}
_WIDTH, _HEIGHT = 100, 30
_NOT_DRAWN = (TileEvent.DISCARD, TileEvent.FORGET, TileEvent.LOAD)
"""The table below the picture has them: they would be a line from everywhere to one place."""
_BENDS = {
    (TileState.COMMITTED, TileState.EMPTY): [(790, 300), (70, 300)],
    (TileState.STEPPED, TileState.FILLING): [(790, 18), (225, 18)],
    (TileState.STEPPED, TileState.READY): [(735, 120)],
    (TileState.STEPPING, TileState.FILLING): [(300, 55)],
    (TileState.FILLING, TileState.COMMITTING): [(240, 200)],
}


def tile_states() -> str:
    """The states of a tile and the moves between them, from the table in the code."""
    moves: dict[tuple[TileState, TileState], list[str]] = {}
    for (before, event), after in TRANSITIONS.items():
        if event not in _NOT_DRAWN and before is not after:
            moves.setdefault((before, after), []).append(event.name.lower().replace("_", " "))
    parts = []
    for (before, after), events in moves.items():
        points = [_PLACES[before], *_BENDS.get((before, after), []), _PLACES[after]]
        start, end = _edge(points[0], points[1]), _edge(points[-1], points[-2])
        back = (after, before) in moves
        shift = (6 if _PLACES[after][0] > _PLACES[before][0] else -6) if back and len(points) == 2 else 0
        points = [(x, y - shift) for x, y in [start, *points[1:-1], end]]
        parts.append(arrow(points))
        (x1, y1), (x2, y2) = max(pairwise(points), key=_length)
        parts.append(text((x1 + x2) / 2, (y1 + y2) / 2 + (-5 if shift >= 0 else 14), ", ".join(events)))
    boxes = [Box(x, y, _WIDTH, _HEIGHT, _COLORS.get(state, DEVICE), [state.name]) for state, (x, y) in _PLACES.items()]
    return picture(860, 315, "The states of a tile", [*parts, *(box.draw() for box in boxes)])


def _length(pair: tuple[tuple[float, float], tuple[float, float]]) -> float:
    (x1, y1), (x2, y2) = pair
    return abs(x1 - x2) + abs(y1 - y2)


def _edge(middle: tuple[float, float], towards: tuple[float, float]) -> tuple[float, float]:
    """Where a line from the middle of a state's box leaves the box."""
    dx, dy = towards[0] - middle[0], towards[1] - middle[1]
    share = min(_WIDTH / 2 / abs(dx) if dx else 9e9, _HEIGHT / 2 / abs(dy) if dy else 9e9)
    return middle[0] + dx * share, middle[1] + dy * share


_HELD = {
    "parameters": (0, 1, 2),
    "gradients": (0, 1),
    "master, moments": (0,),
}
"""The stages at which every rank has all of it."""


def stages() -> str:
    """Picture of the tensors that each of two ranks keeps at each stage."""
    parts = []
    for stage in range(4):
        left = 175 + 150 * stage
        parts.append(text(left + 60, 24, f"stage {stage}", weight="bold"))
        for row, (what, whole) in enumerate(_HELD.items()):
            for rank in range(2):
                top = 40 + 76 * rank + 22 * row
                if stage == 0:
                    parts.append(text(12, top + 13, f"rank {rank}: {what}", anchor="start"))
                # At stages 0 and 1 several ranks add up on the device, and reduce once a step.
                on_host = what.startswith("master") or (what == "gradients" and stage >= 2)
                color = HOST if on_host else DEVICE
                parts.append(f'<rect x="{left}" y="{top}" width="120" height="17" fill="{PLAIN}"/>')
                start, width = (0, 120) if stage in whole else (60 * rank, 60)
                parts.append(f'<rect x="{left + start}" y="{top}" width="{width}" height="17" fill="{color}"/>')
    key = "blue: on the device; orange: in host memory, with offload; grey: the other rank has it"
    parts.append(text(12, 205, key, anchor="start"))
    return picture(775, 220, "What each of two ranks holds at each stage", parts)


def rooms(levels: Sequence[Iterable[str]]) -> str:
    """The rooms of the source, each level with what it may import to its left."""
    parts, left, width = [], 10, 104
    for number, level in enumerate(levels):
        names = sorted(level)
        x = left + width * number + width / 2
        parts += [Box(x, 45 + 34 * row, width - 12, 26, PLAIN, [name]).draw() for row, name in enumerate(names)]
    right = left + width * len(levels)
    parts.append(arrow([(right - 10, 15), (left + 10, 15)]))
    parts.append(text(right / 2, 11, "may import"))
    height = 70 + 34 * max(len(list(level)) for level in levels)
    return picture(int(right) + 10, height, "The rooms of the source, and who may import whom", parts)
