"""Pictures of losses, drawn with matplotlib."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from longshore.cli.terminal import import_extra


@dataclass
class Series:
    """A line of a picture: losses by step."""

    label: str
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    width: float = 1.5
    alpha: float = 1.0
    marker: str = ""

    def add(self, step: int, loss: float) -> None:
        self.steps.append(step)
        self.losses.append(loss)


def load_figure() -> Any:
    """Return matplotlib's Figure, which draws without a display and without pyplot's global state."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    return import_extra("matplotlib.figure").Figure


def loss_curves(series: list[Series], title: str, what: str = "loss (nats per token)") -> bytes:
    """Return a PNG with one pair of axes, the vertical one of ``what``; series without points are left out."""
    figure = load_figure()(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for line in series:
        if line.steps:
            marker = line.marker or ("o" if len(line.steps) == 1 else "")  # a line of one point is invisible
            look = {"marker": marker, "markersize": 5, "linewidth": line.width, "alpha": line.alpha}
            axes.plot(line.steps, line.losses, label=line.label, **look)
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(what)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


class Compared(NamedTuple):
    """The losses of two runs that should be equal, by step."""

    ours: str
    our_losses: dict[int, float]
    plain: str
    plain_losses: dict[int, float]


def comparison_picture(compared: Sequence[Compared], title: str) -> bytes:
    """Return a PNG: above the loss of each plain run, below, in a row for each other run, the difference of its loss
    from that of the plain run beside which it was trained."""
    figure = load_figure()(figsize=(9, 4.5 + 0.35 * len(compared)), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[3, 0.5 + 0.35 * len(compared)], sharex=True)
    plain = {each.plain: each.plain_losses for each in compared}
    for (name, losses), style in zip(plain.items(), ("-", "--", ":", "-."), strict=False):
        above.plot([*losses], [*losses.values()], style, marker="o" if len(losses) == 1 else "", label=name)
    above.set_ylabel("loss (nats per token)")
    above.set_title(title)
    above.legend()
    for row, each in enumerate(compared):
        differences = {step: loss - each.plain_losses[step] for step, loss in each.our_losses.items()}
        largest = max(map(abs, differences.values()), default=0.0)
        height = 0.4 / largest if largest else 0.0
        color = "tab:red" if largest else "tab:green"
        below.axhline(row, color="0.85", linewidth=1)
        heights = [row + height * each for each in differences.values()]
        below.plot([*differences], heights, ".-", color=color, markersize=4, linewidth=1)
        found = f"up to {largest:.1e}" if largest else "0 at every step"
        below.annotate(found, (1.01, row), xycoords=("axes fraction", "data"), color=color, va="center", fontsize=9)
    below.set_yticks(range(len(compared)), [f"{each.ours} - {each.plain.removeprefix('fp32, ')}" for each in compared])
    below.set_ylim(len(compared) - 0.4, -0.6)
    below.set_xlabel("step")
    below.xaxis.get_major_locator().set_params(integer=True)
    below.set_title("difference of the loss from plain PyTorch", fontsize=10)
    for axes in (above, below):
        axes.grid(alpha=0.3)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()
