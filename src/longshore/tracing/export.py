"""Export a trace as JSON for Chrome and Perfetto ("Trace Event Format"), and as an HTML page.

The page draws tracks over time as inline SVG, with a slider to zoom.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from longshore.seam import events as tile_events
from longshore.tracing.events import BACKWARD, STEP, STEP_TRACK, Event, exposed_spans

_TRACK_PX = 32
_EXPOSED = "#fbd3d3"

_KINDS = {
    BACKWARD: ("#b8c4d6", "from the first gradient of a step to the call of step()"),
    STEP: ("#d62728", "from the call of step() to its return"),
    tile_events.NORM: ("#e8a33d", "the norm of all gradients is computed, or waited for"),
    tile_events.ARRIVE: ("#7f8ea3", "backward has computed a parameter's gradient"),
    tile_events.ARRIVE_AGAIN: ("#4b5a70", "another gradient of the same parameter, which is added"),
    tile_events.COPY_TO_HOST: ("#5b8ff9", "a gradient is copied to the host"),
    tile_events.ADD: ("#1f77b4", "the host adds another gradient of the same parameter"),
    tile_events.MEASURE: ("#bcbd22", "the host adds up squares of gradients ahead of the norm"),
    tile_events.STEP_AHEAD: ("#2ca02c", "a tile is stepped before step(), into a spare state buffer"),
    tile_events.STEP_IN_PLACE: ("#9467bd", "a tile is stepped inside step()"),
    tile_events.TRANSFORM: ("#e377c2", "Muon makes a parameter orthogonal, where it computes"),
    tile_events.PUBLISH: ("#17a2b8", "new values are copied to a parameter"),
    tile_events.FETCH: ("#8dd3e0", "parameters that rest on the host are copied to the device"),
    tile_events.WAIT: ("#c2185b", "forward or backward waits for such parameters"),
    tile_events.KEPT: ("#0b6e0b", "step() keeps what was stepped ahead"),
    tile_events.REDONE: (
        "#ff7f0e",
        "stepped ahead, and again inside step(), because gradients were clipped or the learning rate changed",
    ),
    tile_events.DROPPED: (
        "#8c564b",
        "stepped ahead in vain: another gradient arrived, or all gradients were discarded",
    ),
    tile_events.DISCARD: ("#000000", "zero_grad() discarded gradients"),
}
"""The colour and the meaning of each kind of event."""

_TRACKS = {
    "MainThread": "main thread",
    "autograd": "autograd's thread: backward on a device",
    "longshore-host": "host worker: adds, and steps ahead",
    f"stream: {tile_events.COPY_TO_HOST}": "stream: copies to the host",
    f"stream: {tile_events.PUBLISH}": "stream: copies to the device",
    f"stream: {tile_events.FETCH}": "stream: parameters to the device",
}
"""What the page calls threads and streams whose own names say too little."""

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
.names div {{ height: {track_px}px; line-height: {track_px}px; padding: 0 .6em; white-space: nowrap; }}
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
// A tick about every 120 pixels, at 1, 2 or 5 times a power of ten; only ticks in view, since there may be thousands.
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


def tracks_of(events: Sequence[Event]) -> list[str]:
    """Return the names of the tracks: that of the steps first, then threads, then copy streams."""
    return sorted({event.track for event in events}, key=lambda track: (track != STEP_TRACK, ": " in track, track))


def chrome_events(events: Sequence[Event], rank: int, begin_ns: int) -> list[dict[str, Any]]:
    """Return complete ("X") events, in microseconds since ``begin_ns``, after metadata that name rank and tracks."""

    def metadata(kind: str, thread: int, **args: Any) -> dict[str, Any]:
        return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": args}

    thread_of = {track: thread for thread, track in enumerate(tracks_of(events))}
    entries = [metadata("process_name", 0, name=f"rank {rank}")]
    for track, thread in thread_of.items():
        entries.append(metadata("thread_name", thread, name=track))
        entries.append(metadata("thread_sort_index", thread, sort_index=thread))
    for event in events:
        args = {} if event.tile is None else {"tile": event.tile}
        entries.append(
            {
                "name": event.name,
                "ph": "X",
                "pid": rank,
                "tid": thread_of[event.track],
                "ts": (event.begin_ns - begin_ns) / 1e3,
                "dur": (event.end_ns - event.begin_ns) / 1e3,
                "args": {**args, "bytes": event.num_bytes} if event.num_bytes else args,
            }
        )
    return entries


def html_page(events: Sequence[Event], rank: int, begin_ns: int, summary: str) -> str:
    """Return the page as text. It loads nothing from elsewhere; a tooltip describes each shape."""
    tracks = tracks_of(events)
    height_px = _TRACK_PX * len(tracks)
    chart = "<p>Nothing was recorded: no gradient arrived.</p>"
    if events:
        found = {event.name for event in events}
        chart = _CHART.format(
            legend="".join(
                f'<span class="key"><i style="background:{colour}"></i><b>{name}</b>: {meaning}</span>'
                for name, (colour, meaning) in _KINDS.items()
                if name in found
            ),
            exposed=_EXPOSED,
            names="".join(f"<div>{escape(_TRACKS.get(track, track))}</div>" for track in tracks),
            length_us=f"{max(event.end_ns - begin_ns for event in events) / 1e3:.3f}",
            height_px=height_px,
            shapes="\n".join(
                f'<rect class="exposed" x="{(from_ns - begin_ns) / 1e3:.3f}" y="0" '
                f'width="{(to_ns - from_ns) / 1e3:.3f}" height="{height_px}" fill="{_EXPOSED}"/>'
                for from_ns, to_ns in exposed_spans(events)
            )
            + "\n"
            + "\n".join(_shape(event, begin_ns, _TRACK_PX * tracks.index(event.track)) for event in events),
        )
    return _PAGE.format(rank=rank, summary=escape(summary), chart=chart, height_px=height_px, track_px=_TRACK_PX)


def _shape(event: Event, begin_ns: int, top_px: int) -> str:
    begin_us, length_us = (event.begin_ns - begin_ns) / 1e3, (event.end_ns - event.begin_ns) / 1e3
    tile = "" if event.tile is None else f", tile {event.tile}"
    size = f", {event.num_bytes} bytes" if event.num_bytes else ""
    took = f", {length_us:.1f} us" if length_us else ""
    title = f"<title>{escape(event.name)}{tile}{took}{size}, at {begin_us:.1f} us</title>"
    colour, _ = _KINDS[event.name]
    if length_us:
        place = f'x="{begin_us:.3f}" y="{top_px + 4}" width="{length_us:.3f}" height="{_TRACK_PX - 8}"'
        # With non-scaling-stroke, a line keeps its width at every zoom: also what is short beside a step is seen.
        return f'<rect {place} fill="{colour}" stroke="{colour}" vector-effect="non-scaling-stroke">{title}</rect>'
    place = f'x1="{begin_us:.3f}" x2="{begin_us:.3f}" y1="{top_px + 2}" y2="{top_px + _TRACK_PX - 2}"'
    return f'<line {place} stroke="{colour}" vector-effect="non-scaling-stroke">{title}</line>'
