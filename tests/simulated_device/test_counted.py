"""What a step costs on a device is what docs/costs.md says, and does not grow with the number of parameters unseen."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import Ranks

from longshore.kernels import DeviceKernels, reference
from simulated_device import counted

pytestmark = pytest.mark.simulated

_PAGE = (Path(__file__).parents[2] / "docs/costs.md").read_text()
NUMBERS = (8, 32)
"""How many parameters there are."""


def said(row: str, parameters: int) -> list[int]:
    """A row of the table: waits and copies of a backward, then waits and copies of a step."""
    found = re.search(rf"^\| {re.escape(row)} \| (.+) \|$", _PAGE, re.MULTILINE)
    assert found is not None, row
    return [int(eval(cell, {"P": parameters})) for cell in found[1].split(" | ")]


def check(found: list[dict[str, int]], row: str, parameters: int) -> None:
    backward, step = found
    waits, to_host, step_waits, step_to_host, step_to_device = said(row, parameters)
    assert backward["host_waits"] <= waits, (backward, step)
    assert (backward["copies_to_host"], backward["copies_to_device"]) == (to_host, 0)
    assert 0 < step["host_waits"] <= step_waits, (backward, step)
    assert (step["copies_to_host"], step["copies_to_device"]) == (step_to_host, step_to_device)
    assert step_waits <= 10


@pytest.mark.parametrize("parameters", NUMBERS)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("released", [False, True])
def test_a_step_of_an_optimizer(released: bool, clip: bool, parameters: int) -> None:
    row = "`release_gradients=True`" if released else "`.grad` on the device"
    check(counted.of_optimizer(parameters, released, clip), f"{row}, clipped" if clip else row, parameters)


@pytest.mark.medium
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_of_an_engine(stage: int, two_devices: Ranks) -> None:
    row = f"{'engine on two ranks, ' if stage == 0 else ''}stage {stage}, clipped"
    for parameters in NUMBERS:
        for found in two_devices(counted.of_engine, parameters, stage, True):
            check(found, row, parameters)


def test_clipping_takes_no_memory_in_proportion_to_the_largest_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_SUM_NUMEL", 1 << 12)
    counted.memory_of_clipping(1 << 12)
    small, large = (counted.memory_of_clipping(numel) for numel in (1 << 14, 1 << 20))
    # A number remains of each part that is squared at a time; the allocator gives it 512 bytes.
    assert large - small <= 2 * 512 * (1 << 20) // (1 << 12)
    assert 0 < small <= 12 * (1 << 12) + 512 * 8


def test_an_upload_is_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller drops what it uploads at once."""
    to, pinned = torch.Tensor.to, []

    def recording(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        pinned.append(self.is_pinned())
        return to(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", recording)
    kernels: Any = SimpleNamespace(device=torch.device("sim"))  # Triton compiles nothing for this device
    found = DeviceKernels._upload(kernels, torch.arange(4))
    monkeypatch.undo()
    assert pinned == [True]
    assert found.tolist() == [0, 1, 2, 3]
