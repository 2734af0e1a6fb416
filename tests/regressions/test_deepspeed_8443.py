"""deepspeedai/DeepSpeed issue 8443: at stage 3, momentum and Newton-Schulz ran once in each backward of a window, not
once in its step.

Here a step of several backwards, on the sum of their gradients, is the plain loop's.
"""

from __future__ import annotations

import pytest
from ranks import Ranks

from regressions import muon


@pytest.mark.quick(0)
@pytest.mark.needs_torch("torch.optim.Muon")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_several_backwards_a_step(stage: int, two_ranks: Ranks) -> None:
    assert two_ranks(muon.train, stage, backwards=3) == [[], []]
