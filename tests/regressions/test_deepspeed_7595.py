"""deepspeedai/DeepSpeed issue 7595: ZeRO-2 with the optimizer on the CPU. The loss was differentiable and its graph
reached 63 of the model's 1083 parameters, which were the very ones that the optimizer held; yet ``engine.backward``
found its buckets empty and the step failed, on one process and on several.

Here such a loss, wherever it was computed (by the engine or by the module inside it), brings each parameter that its
graph reaches one gradient, which is applied; no other is touched.
"""

from __future__ import annotations

from typing import Any

import pytest
from engine.scenarios import Backward, Scenario, Window
from ranks import Ranks
from torch import Tensor

from regressions.training import compared, zero


class ThroughTheModule:
    """The engine, but its forward is that of the module inside."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __call__(self, *inputs: Any) -> Tensor:
        return self._engine.module(*inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def case(through_module: bool) -> None:
    scenario = Scenario(lambda step: Window((Backward((("b",),)),)), steps=3)
    config = {**zero(2, contiguous_gradients=True), "train_batch_size": 8}
    del config["train_micro_batch_size_per_gpu"]
    with compared(scenario, config) as comparison:
        engine = comparison.engine
        assert {id(p) for p in engine.module.parameters()} == {
            id(p) for group in engine.optimizer.param_groups for p in group["params"]
        }
        comparison.run(calls=ThroughTheModule(engine) if through_module else None)
        account = comparison.account()
        idle = {"empty", "heads.a.weight", "heads.a.bias", "heads.c.weight", "heads.c.bias"}
        assert {name for name, (_, _, applied) in account.items() if applied} == account.keys() - idle
        assert all(account[name] in ((0, 0, 0), (0, None, 0)) for name in idle)
        assert all(account[name] in ((1, 1, 1), (1, None, 1)) for name in account.keys() - idle)


@pytest.mark.parametrize("through_module", [False, True])
def test_what_the_loss_reaches_is_stepped(through_module: bool) -> None:
    case(through_module)


@pytest.mark.parametrize("through_module", [False, True])
def test_on_two_ranks(two_ranks: Ranks, through_module: bool) -> None:
    two_ranks(case, through_module)
