"""Muon on two devices: whole matrices come together on the devices."""

from __future__ import annotations

import pytest
import torch
from engine import muon_cases as cases
from ranks import Ranks

pytestmark = pytest.mark.simulated


@pytest.mark.medium
@pytest.mark.parametrize(("stage", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (3, torch.bfloat16)])
def test_two_devices(stage: int, dtype: torch.dtype, two_devices: Ranks) -> None:
    assert two_devices(cases.run, stage, dtype) == [[[]] * 4] * 2


@pytest.mark.medium
@pytest.mark.parametrize("clipping", [0.0, 0.5])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_stepped_ahead(stage: int, clipping: float, two_devices: Ranks) -> None:
    for differing, counts in two_devices(cases.ahead, stage, torch.bfloat16, clipping):
        assert differing == [[]] * 4
        begun, kept, redone = counts[1]
        assert begun > 0 and (kept, redone) == ((0, begun) if clipping else (begun, 0))
