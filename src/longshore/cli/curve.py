"""Loss curves as PNG."""

from __future__ import annotations

import io
import logging
import warnings
from dataclasses import dataclass, field
from typing import Any

from longshore.cli.failure import CommandError, one_line


@dataclass
class Series:
    """A line of the picture: losses by step."""

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
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from matplotlib.figure import Figure
    except ImportError as error:
        raise CommandError(
            f"matplotlib cannot be imported ({one_line(error)}): pip install 'longshore[train]'"
        ) from error
    return Figure


def loss_curves(series: list[Series], title: str) -> bytes:
    """Return a PNG with one pair of axes; series without points are left out."""
    figure = load_figure()(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for line in series:
        if line.steps:
            marker = line.marker or ("o" if len(line.steps) == 1 else "")  # a line of one point is invisible
            axes.plot(
                line.steps,
                line.losses,
                marker=marker,
                markersize=5,
                linewidth=line.width,
                alpha=line.alpha,
                label=line.label,
            )
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()
