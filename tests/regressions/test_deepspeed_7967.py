"""deepspeedai/DeepSpeed pull request 7967: with ZeRO-1 and 2 and the optimizer on the CPU, only the first backward of
an accumulation window was copied to the host, so the norm of the gradients came out too small by far, and clipping
and the step went by that.

Here the norm is that of the sum of all backwards, to the last bit the same with the optimizer on the host and
without, and the weights are those of the plain loop clipped by it.
"""

from __future__ import annotations

import pytest
from engine.scenarios import Backward, Scenario, Window
from ranks import Ranks

from regressions.training import compared, zero

ACCUMULATION = 4


def case(stage: int) -> None:
    scenario = Scenario(lambda step: Window((Backward(),) * ACCUMULATION, step_each=True), steps=3, clip=0.01)
    norms = []
    for offload in ("cpu", "none"):
        config = {**zero(stage, offload), "gradient_accumulation_steps": ACCUMULATION}
        with compared(scenario, config) as comparison:
            comparison.run()
            assert all(norm > 1.0 for norm in comparison.norms)  # it is far above what it is clipped to
            norms.append(comparison.norms)
    assert norms[0] == norms[1]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_norm_is_that_of_all_backwards(stage: int) -> None:
    case(stage)


@pytest.mark.medium
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_on_two_ranks(two_ranks: Ranks, stage: int) -> None:
    two_ranks(case, stage)
