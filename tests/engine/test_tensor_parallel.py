"""Stage 3 on a model that its user put on tensor parallelism first, and on FSDP2 then."""

from __future__ import annotations

import pytest
import torch
from ranks import Ranks

from engine import tensor_parallel_cases as cases


@pytest.mark.parametrize("clip", [None, 0.05], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_weights_are_those_of_tensor_parallelism_alone(
    dtype: torch.dtype, clip: float | None, four_ranks: Ranks
) -> None:
    four_ranks(cases.trained, dtype, clip, (2, 2))
