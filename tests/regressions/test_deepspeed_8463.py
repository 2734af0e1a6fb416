"""deepspeedai/DeepSpeed issue 8463: with the optimizer offloaded to the CPU, stages 1 and 2 left out Newton-Schulz, and
the weights were those of momentum alone.

Here they are those of torch's Muon in a plain loop, with and without offload.
"""

from __future__ import annotations

import pytest
from ranks import Ranks

from regressions import muon


@pytest.mark.quick(0)
@pytest.mark.needs_torch("torch.optim.Muon")
@pytest.mark.parametrize("offload", ["cpu", "none"])
@pytest.mark.parametrize("stage", [1, 2])
def test_weights_with_and_without_offload(stage: int, offload: str, two_ranks: Ranks) -> None:
    assert two_ranks(muon.train, stage, offload=offload) == [[], []]
