"""pytorch/pytorch issue 148532: with FSDP2 and CPU offload, ``torch.nn.utils.clip_grad_norm_`` raised: the norm of
sharded gradients on the CPU was to be added up over ranks whose group had no backend for the CPU.

Here the engine clips, at stage 3 with the optimizer on the host as with it on the device: by the norm of all ranks'
shards together, which each rank adds up where it has them and exchanges over the stream's own group.
"""

from __future__ import annotations

import pytest
import torch
from engine.scenarios import Scenario
from ranks import Ranks

from regressions.training import compared, zero


def case(offload: str, dtype: torch.dtype) -> list[float]:
    clip = 0.5
    with compared(Scenario(clip=clip, steps=3), zero(3, offload), dtype=dtype, simulated=True) as comparison:
        comparison.run()
        assert all(norm > clip for norm in comparison.norms), "it clips"
        return comparison.norms


@pytest.mark.quick(0)
@pytest.mark.needs_torch("stage 3")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("offload", ["cpu", "none"])
def test_the_norm_is_of_all_shards(offload: str, dtype: torch.dtype, two_ranks: Ranks) -> None:
    first, second = two_ranks(case, offload, dtype)
    assert first == second and len(first) == 3
