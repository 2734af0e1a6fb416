"""A trace as one HTML page: lanes over time as inline SVG, which a slider widens."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from longshore.host.events import (
    ARRIVE,
    ARRIVE_AGAIN,
    COPY_TO_HOST,
    DISCARD,
    DROPPED,
    KEPT,
    NORM,
    PUBLISH,
    REDONE,
    STEP_AHEAD,
    STEP_IN_PLACE,
)
from longshore.tracing.chrome import lanes_of
from longshore.tracing.events import BACKWARD, STEP, Event, exposed_spans
from longshore.tracing.summary import Summary

_LANE_PX = 32
_EXPOSED = "#fbd3d3"

_COLOURS = {
    BACKWARD: "#b8c4d6",
    STEP: "#d62728",
    NORM: "#e8a33d",
    ARRIVE: "#7f8ea3",
    ARRIVE_AGAIN: "#4b5a70",
    COPY_TO_HOST: "#5b8ff9",
    STEP_AHEAD: "#2ca02c",
    STEP_IN_PLACE: "#9467bd",
    PUBLISH: "#17a2b8",
    KEPT: "#0b6e0b",
    REDONE: "#ff7f0e",
    DROPPED: "#8c564b",
    DISCARD: "#000000",
}

_MEANINGS = {
    BACKWARD: "from the first gradient of a step to the call of step()",
    STEP: "the call of step()",
    NORM: "the norm of all gradients is measured, or waited for",
    ARRIVE: "a parameter's gradient is there",
    ARRIVE_AGAIN: "one more gradient of a parameter, which is added",
    COPY_TO_HOST: "a gradient on its way",
    STEP_AHEAD: "a tile stepped before step(), into a spare page",
    STEP_IN_PLACE: "a tile stepped inside step()",
    PUBLISH: "new values on their way to a parameter",
    KEPT: "what was stepped ahead counts",
    REDONE: "stepped ahead, and again inside step(), because of a clip or another learning rate",
    DROPPED: "stepped ahead for nothing: one more gradient came, or all were discarded",
    DISCARD: "zero_grad() threw gradients away",
}

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>longshore trace, rank {rank}</title>
<style>
body {{ font: 14px system-ui, sans-serif; margin: 1.5em; color: #222; background: #fff; }}
pre {{ background: #f4f5f7; padding: .8em; display: inline-block; }}
.key {{ display: block; line-height: 1.5; }}
.key i {{ display: inline-block; width: .9em; height: .9em; margin-right: .3em; }}
.chart {{ display: flex; border: 1px solid #ccc; margin-top: 1em; }}
.names div {{ height: {lane_px}px; line-height: {lane_px}px; padding: 0 .6em; white-space: nowrap; }}
.scroll {{ overflow-x: auto; flex: 1; border-left: 1px solid #ccc; }}
#time {{ position: relative; width: 100%; padding-bottom: 1.6em; }}
#ticks {{ position: absolute; inset: 0; overflow: hidden; }}
#ticks span {{ position: absolute; inset: 0 auto 0 auto; border-left: 1px solid #e3e6ea; padding-left: .3em; }}
#ticks b {{ position: absolute; bottom: .2em; font: 11px system-ui, sans-serif; color: #666; white-space: nowrap; }}
svg {{ display: block; position: relative; width: 100%; height: {height_px}px; }}
</style>
</head>
<body>
<h1>longshore trace, rank {rank}</h1>
<pre>{summary}</pre>
{chart}
</body>
</html>
"""

_CHART = """<p>{legend}<span class="key"><i style="background:{exposed}"></i><b>exposed</b>: training waits for
the norm and for step()</span></p>
<label>zoom <input id="zoom" type="range" min="0" max="8" step="0.1" value="0"></label>
<div class="chart"><div class="names">{names}</div><div class="scroll"><div id="time"><div id="ticks"></div>
<svg viewBox="0 0 {length_us} {height_px}" preserveAspectRatio="none">
{shapes}
</svg></div></div></div>
<script>
const time = document.getElementById("time"), scroll = time.parentElement, lengthUs = {length_us};
// About every 120 pixels, at 1, 2 or 5 times a power of ten; only those in view, since a wide picture has thousands.
function drawTicks() {{
  const least = lengthUs * 120 / time.clientWidth, power = Math.pow(10, Math.floor(Math.log10(least)));
  const every = power * [1, 2, 5, 10].find(function (factor) {{ return factor * power >= least; }});
  const digits = Math.max(0, 3 - Math.floor(Math.log10(every) + 1e-9));
  const view = lengthUs / time.clientWidth, first = Math.floor(scroll.scrollLeft * view / every);
  const last = Math.ceil((scroll.scrollLeft + scroll.clientWidth) * view / every), drawn = [];
  for (let tick = first; tick <= last && tick * every < lengthUs; tick++) {{
    drawn.push('<span style="left:' + 100 * tick * every / lengthUs + '%"><b>' +
      (tick * every / 1000).toFixed(digits) + " ms</b></span>");
  }}
  document.getElementById("ticks").innerHTML = drawn.join("");
}}
document.getElementById("zoom").addEventListener("input", function () {{
  const middle = (scroll.scrollLeft + scroll.clientWidth / 2) / time.clientWidth;
  time.style.width = 100 * Math.pow(2, Number(this.value)) + "%";
  scroll.scrollLeft = middle * time.clientWidth - scroll.clientWidth / 2;
  drawTicks();
}});
scroll.addEventListener("scroll", drawTicks);
window.addEventListener("resize", drawTicks);
drawTicks();
</script>"""


def html_page(events: Sequence[Event], rank: int, begin_ns: int, summary: Summary) -> str:
    """The page; it names no address, and a pointer over a shape tells what it is."""
    height_px = _LANE_PX * len(lanes_of(events))
    return _PAGE.format(
        rank=rank,
        summary=escape(str(summary)),
        chart=_chart(events, begin_ns, height_px) if events else "<p>Nothing was recorded: no gradient arrived.</p>",
        height_px=height_px,
        lane_px=_LANE_PX,
    )


def _chart(events: Sequence[Event], begin_ns: int, height_px: int) -> str:
    lanes = lanes_of(events)
    row_of = {lane: row for row, lane in enumerate(lanes)}
    exposed = [_exposed(*span, begin_ns, height_px) for span in exposed_spans(events)]
    shapes = [_shape(event, begin_ns, _LANE_PX * row_of[event.lane]) for event in events]
    found = {event.name for event in events}
    return _CHART.format(
        legend="".join(
            f'<span class="key"><i style="background:{colour}"></i><b>{name}</b>: {_MEANINGS[name]}</span>'
            for name, colour in _COLOURS.items()
            if name in found
        ),
        exposed=_EXPOSED,
        names="".join(f"<div>{escape(lane)}</div>" for lane in lanes),
        length_us=f"{max(event.end_ns - begin_ns for event in events) / 1e3:.3f}",
        height_px=height_px,
        shapes="\n".join(exposed + shapes),
    )


def _exposed(from_ns: int, to_ns: int, begin_ns: int, height_px: int) -> str:
    return (
        f'<rect class="exposed" x="{(from_ns - begin_ns) / 1e3:.3f}" y="0" '
        f'width="{(to_ns - from_ns) / 1e3:.3f}" height="{height_px}" fill="{_EXPOSED}"/>'
    )


def _shape(event: Event, begin_ns: int, top_px: int) -> str:
    begin_us, length_us = (event.begin_ns - begin_ns) / 1e3, (event.end_ns - event.begin_ns) / 1e3
    tile = "" if event.tile is None else f", tile {event.tile}"
    size = f", {event.num_bytes} bytes" if event.num_bytes else ""
    took = f", {length_us:.1f} us" if length_us else ""
    title = f"<title>{escape(event.name)}{tile}{took}{size}, at {begin_us:.1f} us</title>"
    colour = _COLOURS[event.name]
    if length_us:
        place = f'x="{begin_us:.3f}" y="{top_px + 4}" width="{length_us:.3f}" height="{_LANE_PX - 8}"'
        return f'<rect {place} fill="{colour}">{title}</rect>'
    # A line keeps its width however far the picture is stretched.
    place = f'x1="{begin_us:.3f}" x2="{begin_us:.3f}" y1="{top_px + 2}" y2="{top_px + _LANE_PX - 2}"'
    return f'<line {place} stroke="{colour}" vector-effect="non-scaling-stroke">{title}</line>'
