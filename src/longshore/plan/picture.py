"""A plan as one picture: memory of every choice, and the lanes of the recommended one over time."""

from __future__ import annotations

import io
from typing import Any

from longshore.host.events import ARRIVE, Lane
from longshore.plan.planner import Plan

_MOST_BARS = 4000
_KINDS = (
    "parameters",
    "gradients",
    "pages",
    "spares",
    "staging",
    "accumulators",
    "activations",
)
"""In colours of their own; what else there is has one together."""


def picture(plan: Plan, figure: Any) -> bytes:
    """A PNG; ``figure`` is matplotlib's ``Figure`` class."""
    made = figure(figsize=(11, 9), layout="constrained")
    upper, lower = made.subplots(2, 1, height_ratios=(3, 2))
    _memory(plan, upper)
    _lanes(plan, lower)
    made.suptitle(f"{plan.model.name} on {plan.machine.name}")
    content = io.BytesIO()
    made.savefig(content, format="png", dpi=110, metadata={"Software": None})
    return content.getvalue()


def _memory(plan: Plan, axes: Any) -> None:
    labels, seen = [], set()
    gib = 2.0**30
    for row, each in enumerate(plan.distinct):
        labels.append(("> " if each is plan.recommended else "") + each.choice.title)
        kinds = (each.bytes.host, {**each.bytes.device_estimates, **each.bytes.device})
        for offset, found in zip((0.2, -0.2), kinds, strict=True):
            left = 0.0
            for kind, count in sorted(found.items(), key=lambda item: _order(item[0])):
                name = kind if kind in _KINDS else "other"
                colour = f"C{_order(kind)}"
                axes.barh(
                    row + offset, count / gib, 0.36, left=left, color=colour, label=None if name in seen else name
                )
                seen.add(name)
                left += count / gib
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("GiB a rank; upper bar device, lower bar host")
    if plan.machine.staged:
        axes.axvline(plan.machine.device_bytes / gib, color="black", linestyle="--", label="a device has")
        fitting = [max(c.bytes.device_total, c.bytes.host_total) / gib for c in plan.distinct if c.shortage.fits]
        axes.set_xlim(0, 1.3 * max([*fitting, plan.machine.device_bytes / gib]))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")


def _order(kind: str) -> int:
    return _KINDS.index(kind) if kind in _KINDS else len(_KINDS)


def _lanes(plan: Plan, axes: Any) -> None:
    times = plan.recommended.times
    assert times is not None
    used = [lane for lane in Lane if any(span.lane is lane for span in times.spans)]
    names = list(dict.fromkeys(span.name for span in times.spans))
    stride = -(-len(times.spans) // _MOST_BARS)
    for number, name in enumerate(names):
        spans = [span for span in times.spans if span.name == name][::stride]
        axes.barh(
            [used.index(span.lane) for span in spans],
            [span.end_s - span.begin_s for span in spans],
            0.7,
            left=[span.begin_s for span in spans],
            color=f"C{number % 10}",
            label="backward" if name == ARRIVE else name,
        )
    axes.set_yticks(range(len(used)), [lane.value for lane in used])
    axes.invert_yaxis()
    axes.set_xlabel(f"seconds of a step: {plan.recommended.choice.title}")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
