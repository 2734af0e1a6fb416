"""deepspeedai/DeepSpeed issue 8279: under ZeRO-1 and 2 a trainable parameter without elements at the end of a group
(``nn.Linear(4, 0, bias=False)``) that takes part in the loss ended backward in a KeyError: it belonged to no rank's
part of the group. ZeRO-0 trained the same model.

Here such parameters have no part anywhere and change nothing, wherever they stand: at the end of a group, alone in
one, or used in one backward only.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine.scenarios import Backward, MultiTask, Scenario, Window
from ranks import Ranks
from torch import Tensor, nn

from regressions.training import compared, zero


class Nothing(nn.Module):
    """What ``nn.Linear(in_features, 0, bias=False)`` is, without the warning of its initialiser."""

    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, in_features))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


def end_with_nothing(model: MultiTask) -> None:
    model.heads["z"] = Nothing(33)


def alone(model: MultiTask) -> list[dict[str, Any]]:
    last = model.heads["z"].weight
    return [
        {"params": [parameter for parameter in model.parameters() if parameter is not last]},
        {"params": [last], "lr": 0.5},
    ]


def plan(step: int) -> Window:
    return Window((Backward((("a", "z"),)), Backward((("b", "c"),)), Backward((("z",),))))


def case(stage: int, own_group: bool) -> None:
    scenario = Scenario(plan, prepare=end_with_nothing, groups=alone if own_group else None, clip=60.0)
    with compared(scenario, zero(stage)) as comparison:
        used = [name for name, _ in comparison.engine.module.named_parameters()]
        assert used[-1] == "heads.z.weight"
        comparison.run()
        assert comparison.engine.module.heads["z"].weight.shape == (0, 33)


@pytest.mark.parametrize("own_group", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parameter_without_elements(stage: int, own_group: bool) -> None:
    case(stage, own_group)


@pytest.mark.parametrize("stage, own_group", [(1, False), (2, False), (2, True)])
def test_on_two_ranks(two_ranks: Ranks, stage: int, own_group: bool) -> None:
    two_ranks(case, stage, own_group)
