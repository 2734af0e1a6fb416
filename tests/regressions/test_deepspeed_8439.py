"""deepspeedai/DeepSpeed issue 8439: clipping measured the norm of what Newton-Schulz had made, which grows with the
width, and divided the update by it.

Here the norm is that of the gradients, they are clipped before momentum, and the update has the size that it has in
torch.
"""

from __future__ import annotations

import pytest
from ranks import Ranks

from regressions import muon


@pytest.mark.medium
@pytest.mark.needs_torch("torch.optim.Muon")
@pytest.mark.parametrize("stage", [1, 3])
def test_clipping(stage: int, two_ranks: Ranks) -> None:
    assert two_ranks(muon.train, stage, clipping=0.5, backwards=2) == [[], []]
