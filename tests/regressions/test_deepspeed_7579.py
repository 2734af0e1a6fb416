"""deepspeedai/DeepSpeed issue 7579: ZeRO-2 with the optimizer on the CPU and ``overlap_comm``, started by torchrun,
training tasks that take turns. Looked at after backward, the buckets that gradients are reduced from were always
empty, whether each task had a backward of its own (with the number of accumulation steps set to the number of tasks
of the iteration) or their losses were added and differentiated once; the loss fell, and nobody could tell which
gradients had been applied.

Here both loops end with the weights of the plain one, and ``engine.explain()`` accounts for each gradient: how many
arrived, were reduced and were applied.
"""

from __future__ import annotations

import pytest
from engine.scenarios import HEADS, Backward, Scenario, Window
from ranks import Ranks

from regressions.training import compared, zero

TASKS = [("a",), ("a", "b"), ("c",), ("b", "c"), ("a", "b", "c")]
"""Of each iteration."""


def backward_per_task(step: int) -> Window:
    tasks = TASKS[step % len(TASKS)]
    return Window(tuple(Backward(((task,),)) for task in tasks), accumulation=len(tasks))


def backward_of_the_sum(step: int) -> Window:
    return Window((Backward(tuple((task,) for task in TASKS[step % len(TASKS)])),))


def case(plan_name: str, contiguous: bool) -> None:
    plan = {"each": backward_per_task, "sum": backward_of_the_sum}[plan_name]
    config = zero(2, contiguous_gradients=contiguous)
    with compared(Scenario(plan, steps=len(TASKS), tile_numel=500), config, simulated=True) as comparison:
        for step, tasks in enumerate(TASKS):
            comparison.engine.zero_grad()  # once an iteration, as in the thread
            comparison.drive(step)
            comparison.step(step, comparison.gradients(step))
            explanation = comparison.engine.explain(False)
            if comparison.world_size > 1:
                assert len(explanation.buckets) > 2
                listed = {name for bucket in explanation.buckets for name in bucket.parameters}
                assert listed == {row.name for row in explanation.parameters if row.numel > 0}
            for name, account in comparison.account().items():
                head = next((head for head in HEADS if name.startswith(f"heads.{head}.")), None)
                uses = len(tasks) if head is None else tasks.count(head)
                if plan_name == "sum":
                    uses = min(uses, 1)
                applied = 0 if name == "empty" else min(uses, 1)
                reduced = None if account[1] is None else uses * applied
                assert account == (uses * applied, reduced, applied), name


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("plan_name", ["each", "sum"])
def test_each_gradient_is_applied_and_accounted_for(plan_name: str, contiguous: bool) -> None:
    case(plan_name, contiguous)


@pytest.mark.parametrize("plan_name", ["each", "sum"])
def test_on_two_ranks(two_ranks: Ranks, plan_name: str) -> None:
    two_ranks(case, plan_name, contiguous=False)
