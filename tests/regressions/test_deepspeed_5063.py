"""deepspeedai/DeepSpeed issue 5063: under ZeRO-2 somebody split the optimizer's parameters into two groups with the
same options, halves of one list, and got other gradients from the same weights, input and loss.

Here groups have no say in gradients: one group or two halves of it, all bits are the same, with clipping too, where
every gradient goes into the norm.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine.scenarios import SCENARIOS, MultiTask, Scenario
from ranks import Ranks

from regressions.training import compared, zero


def by_kind(model: MultiTask) -> list[Any]:
    """The thread's order: module by module, biases left out."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if not name.endswith("bias")]
    return [parameter for _, parameter in named]


def one_group(model: MultiTask) -> list[dict[str, Any]]:
    return [{"params": by_kind(model)}]


def two_halves(model: MultiTask) -> list[dict[str, Any]]:
    parameters = by_kind(model)
    return [{"params": parameters[: len(parameters) // 2]}, {"params": parameters[len(parameters) // 2 :]}]


def case(stage: int, clip: float | None) -> None:
    plan = SCENARIOS["two backwards with none"].plan
    results = []
    for groups in (one_group, two_halves):
        with compared(Scenario(plan, groups=groups, clip=clip), zero(stage)) as comparison:
            assert len(comparison.engine.optimizer.param_groups) == len(groups(comparison.engine.module))
            comparison.run()
            results.append((comparison.norms, list(comparison.engine.module.parameters())))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(one, other) for one, other in zip(results[0][1], results[1][1], strict=True))


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_one_group_or_two_halves(stage: int, clip: float | None) -> None:
    case(stage, clip)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_on_two_ranks(two_ranks: Ranks, clip: float | None) -> None:
    two_ranks(case, 2, clip)
