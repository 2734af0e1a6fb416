"""The picture of a plan: what it shows can be read, whatever the sizes."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from longshore.byte_sizes import format_byte_size
from longshore.plan.job import Job, PlannedModel
from longshore.plan.picture import draw
from longshore.plan.planner import plan
from plan.models import EIGHT, SMALL, llama, machine

TINY = llama(1, 16, 64, 512)
SEVENTY = llama(80, 8192, 28672, 128256)


def colours(axes: Any) -> dict[str, str]:
    handles, labels = axes.get_legend_handles_labels()
    patches = [(label, handle) for label, handle in zip(labels, handles, strict=True) if hasattr(handle, "patches")]
    return {label: to_hex(handle.patches[0].get_facecolor()) for label, handle in patches}


def widest(axes: Any) -> float:
    return max(patch.get_x() + patch.get_width() for patch in axes.patches)


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    "model, gpus, unit, time",
    [
        (TINY, 1, "MiB", ("microseconds", 1e-6)),
        (SMALL, 1, "MiB", ("microseconds", 1e-6)),
        (EIGHT, 8, "GiB", ("milliseconds", 1e-3)),
        pytest.param(SEVENTY, 8, "GiB", ("seconds", 1.0), marks=pytest.mark.slow),
    ],
)
def test_bars_are_as_large_as_the_panel(model: PlannedModel, gpus: int, unit: str, time: tuple[str, float]) -> None:
    found = plan(model, machine(gpus=gpus), Job())
    upper, lower = draw(found, Figure).axes
    assert upper.get_xlabel().startswith(unit)
    assert widest(upper) > 0.3 * upper.get_xlim()[1]
    assert lower.get_xlabel().startswith(time[0])
    times = found.recommended.times
    assert times is not None
    assert widest(lower) * time[1] == pytest.approx(times.step_s, rel=0.01)


@pytest.mark.medium
def test_a_colour_means_one_thing() -> None:
    plans = [plan(model, machine(gpus=gpus), Job()) for model, gpus in ((TINY, 1), (EIGHT, 8))]
    plans.append(plan(EIGHT, machine(gpus=8), Job(optimizer="Muon"), lambda choice: choice.stage == 3))
    pictures = [draw(each, Figure) for each in plans]
    meanings: dict[str, str] = {}
    for picture in pictures:
        for axes in picture.axes:
            for label, colour in colours(axes).items():
                assert meanings.setdefault(colour, label) == label
    assert {"parameters", "state", "forward", "backward", "transform", "exchange of matrices"} <= set(meanings.values())


@pytest.mark.medium
def test_a_limit_far_beyond_what_is_taken_is_only_named() -> None:
    for model, gpus in ((TINY, 1), (EIGHT, 8)):
        found = plan(model, machine(gpus=gpus), Job())
        upper = draw(found, Figure).axes[0]
        label = next(each for each in upper.get_legend_handles_labels()[1] if "memory of a device" in each)
        assert format_byte_size(found.machine.device_bytes) in label
        assert ("beyond" in label) == (model is TINY)
