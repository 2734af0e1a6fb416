"""deepspeedai/DeepSpeed issue 6873: somebody gave groups of parameters learning rates of their own, which had worked
until ZeRO-3 was switched on; from then on all parameters had one learning rate.

Here the learning rate of the configuration is what a group has that names none, and each group keeps its own through
schedules and changes by hand. (Tested for stages 0 to 2.)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine.scenarios import MultiTask, Scenario
from ranks import Ranks

from regressions.training import OPTIONS, Comparison, compared, zero

RATES = [4e-3, None, 1e-4]
"""Of the trunk, the norm and the heads; None: the configuration's."""


def groups(model: MultiTask) -> list[dict[str, Any]]:
    norm = list(model.norm.parameters())
    heads = list(model.heads.parameters())
    known = {id(parameter) for parameter in (*norm, *heads)}
    trunk = [parameter for parameter in model.parameters() if id(parameter) not in known]
    return [
        {"params": params, **({} if lr is None else {"lr": lr})}
        for params, lr in zip((trunk, norm, heads), RATES, strict=True)
    ]


def same_rate(model: MultiTask) -> list[dict[str, Any]]:
    return [{"params": group["params"]} for group in groups(model)]


def rate_of(step: int) -> float:
    return 1.0 / (1 + step)


def case(stage: int, offload: str, scheduled: bool) -> None:
    expected = [OPTIONS["lr"] if lr is None else lr for lr in RATES]
    scenario = Scenario(groups=groups, schedule=rate_of if scheduled else None, steps=4)
    with compared(scenario, zero(stage, offload)) as comparison:
        engine = comparison.engine

        def check(step: int) -> None:
            factor = rate_of(step) if scheduled else 1.0
            assert engine.get_lr() == [lr * factor for lr in expected]

        comparison.run(before=check)
        apart = list(engine.module.parameters())
    with compared(Scenario(groups=same_rate, steps=4), zero(stage, offload)) as comparison:
        comparison.run()
        together = list(comparison.engine.module.parameters())
    assert not all(torch.equal(one, other) for one, other in zip(apart, together, strict=True))


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("stage, offload", [(0, "cpu"), (1, "none"), (2, "cpu")])
def test_each_group_has_its_own_rate(stage: int, offload: str, scheduled: bool) -> None:
    case(stage, offload, scheduled)


def change_by_hand(comparison: Comparison, step: int) -> None:
    for optimizer in (comparison.engine.optimizer, comparison.oracle.loop.optimizer):
        for place, group in enumerate(optimizer.param_groups):
            group["lr"] = 1e-3 * (1 + place) * (1 + step)


def test_rates_changed_by_hand() -> None:
    with compared(Scenario(groups=groups, steps=3), zero(2)) as comparison:
        comparison.run(before=lambda step: change_by_hand(comparison, step))


@pytest.mark.quick(0)
@pytest.mark.parametrize("scheduled", [False, True])
def test_on_two_ranks(two_ranks: Ranks, scheduled: bool) -> None:
    two_ranks(case, 2, "cpu", scheduled)
