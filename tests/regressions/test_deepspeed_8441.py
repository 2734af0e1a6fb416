"""deepspeedai/DeepSpeed issue 8441: at stage 0 with bf16, Muon's parameters were stepped by gradient descent.

Here stage 0 trains as the plain loop on float32 masters does.
"""

from __future__ import annotations

import pytest
import torch
from engine import muon_cases
from ranks import Ranks


@pytest.mark.needs_torch("torch.optim.Muon")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stage_0(dtype: torch.dtype, two_ranks: Ranks) -> None:
    assert two_ranks(muon_cases.run, 0, dtype, steps=3) == [[[]] * 3] * 2
