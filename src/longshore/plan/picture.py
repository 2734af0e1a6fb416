"""The picture of a plan: the memory of every choice, and the schedule of a step of the recommended one."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from longshore.plan.planner import Plan
from longshore.plan.simulation import FORWARD, GATHER, GATHER_TO_USE, REDUCE
from longshore.seam import ADD, ARRIVE, MEASURE, SCHEDULE, Track, format_byte_size

_MOST_BARS = 4000
_KINDS = ("parameters", "gradients", "state", "spares", "staging", "accumulators", "activations", "other")
"""Kinds of bytes in the order in which they are drawn and named; what is none of the first is one of the last."""
_COLOURS_OF_KINDS = ("tab10",)
_COLOURS_OF_EVENTS = ("Set3", "Dark2")
"""Other palettes than that of the kinds: a colour means one thing in the whole picture."""
_SHOWN = 3.0
"""A limit is drawn where it is up to so many times what the largest choice takes; else it is only named, because
beside it nothing could be read."""


def picture(plan: Plan, figure: Any) -> bytes:
    """Return a PNG.

    Args:
        plan: the plan to draw.
        figure: matplotlib's ``Figure`` class.
    """
    content = io.BytesIO()
    draw(plan, figure).savefig(content, format="png", dpi=110, metadata={"Software": None})
    return content.getvalue()


def draw(plan: Plan, figure: Any) -> Any:
    """Return a figure with two panels, the memory and the time."""
    rows = len(plan.distinct)
    made = figure(figsize=(11, 4.0 + 0.55 * rows), layout="constrained")
    upper, lower = made.subplots(2, 1, height_ratios=(1.0 + 0.55 * rows, 2.5))
    _draw_memory(plan, upper)
    _draw_tracks(plan, lower)
    for axes in (upper, lower):
        axes.invert_yaxis()
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    made.suptitle(f"{plan.model.name} on {plan.machine.name}")
    return made


def _draw_memory(plan: Plan, axes: Any) -> None:
    totals = [each.bytes.device_total for each in plan.distinct] + [each.bytes.host_total for each in plan.distinct]
    most = max(totals)
    divisor, unit = next((size, name) for size, name in ((2**30, "GiB"), (2**20, "MiB"), (1, "B")) if most >= size)
    colours = _colours(_COLOURS_OF_KINDS, len(_KINDS))
    bars = [
        (row + offset, found)
        for row, each in enumerate(plan.distinct)
        for offset, found in (
            (-0.2, {**each.bytes.device_estimates, **each.bytes.device}),
            (0.2, {**each.bytes.host_estimates, **each.bytes.host}),
        )
    ]
    left = dict.fromkeys((place for place, _ in bars), 0.0)
    for kind, colour in zip(_KINDS, colours, strict=True):
        widths = [_bytes_of(kind, found) / divisor for _, found in bars]
        if any(widths):
            places = [place for place, _ in bars]
            axes.barh(places, widths, 0.36, left=[left[place] for place in places], color=colour, label=kind)
            left = {place: left[place] + width for place, width in zip(places, widths, strict=True)}
    labels = [("> " if each is plan.recommended else "") + each.choice.title for each in plan.distinct]
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlabel(f"{unit} on one rank; upper bar: device, lower bar: host")
    shown = most
    if plan.machine.staged:
        limit = plan.machine.device_bytes
        label = f"memory of a device,\n{format_byte_size(limit)}"
        if limit > _SHOWN * most:
            axes.plot([], [], color="black", linestyle="--", label=f"{label} (beyond the panel)")
        else:
            axes.axvline(limit / divisor, color="black", linestyle="--", label=label)
            # Choices that do not fit are cut: how far beyond the limit they are is in the table.
            shown = min(max(most, limit), 2 * limit)
    axes.set_xlim(0, 1.05 * shown / divisor)


def _bytes_of(kind: str, found: dict[str, int]) -> int:
    if kind != _KINDS[-1]:
        return found.get(kind, 0)
    return sum(count for name, count in found.items() if name not in _KINDS[:-1])


def _draw_tracks(plan: Plan, axes: Any) -> None:
    times = plan.recommended.times
    assert times is not None
    divisor, unit = next(
        (size, name)
        for size, name in ((1.0, "seconds"), (1e-3, "milliseconds"), (1e-6, "microseconds"))
        if times.step_s >= size or size == 1e-6
    )
    used = [track for track in Track if any(span.track is track for span in times.spans)]
    stride = -(-len(times.spans) // _MOST_BARS)
    known = [FORWARD, *SCHEDULE, REDUCE, GATHER_TO_USE, GATHER, ADD, MEASURE]
    names = dict.fromkeys([*known, *(span.name for span in times.spans)])
    for name, colour in zip(names, _colours(_COLOURS_OF_EVENTS, len(names)), strict=True):
        spans = [span for span in times.spans if span.name == name][::stride]
        if not spans:
            continue
        rows = [used.index(span.track) for span in spans]
        lengths = [(span.end_s - span.begin_s) / divisor for span in spans]
        left = [span.begin_s / divisor for span in spans]
        axes.barh(rows, lengths, 0.7, left=left, color=colour, label="backward" if name == ARRIVE else name)
    axes.set_yticks(range(len(used)), [track.value for track in used])
    axes.set_xlabel(f"{unit} of a step: {plan.recommended.choice.title}")


def _colours(palettes: Sequence[str], count: int) -> list[Any]:
    from matplotlib import colormaps

    colours = [colormaps[palette](number) for palette in palettes for number in range(colormaps[palette].N)]
    return [colours[number % len(colours)] for number in range(count)]
