"""deepspeedai/DeepSpeed pull request 8135: one forward with two losses, differentiated one after the other
(``retain_graph=True`` for the first), with ``zero_grad()`` between them or not. What prepares a backward ran for the
first of the two only, and under ZeRO-3 the second failed.

Here the second backward through the same graph is one like the first: both count towards the step, and what
``zero_grad()`` discards between them does not. A step between them makes the old graph useless, and torch says so.
"""

from __future__ import annotations

import pytest
from engine.scenarios import Backward, Scenario, Window, inputs
from ranks import Ranks
from torch import Tensor

from regressions.training import Comparison, compared, zero

FIRST, SECOND = ("a", "b"), ("b", "c")


def two_losses(comparison: Comparison, step: int) -> tuple[Tensor, Tensor]:
    """Of one forward through the trunk; each the same number as the model's own loss with these heads."""
    seen: dict[str, Tensor] = {}
    module = comparison.engine.module
    handles = [
        head.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out.pow(2).sum()}))
        for name, head in module.heads.items()
    ]
    comparison.engine(inputs(step, 0, comparison.rank, comparison.dtype), ("a", "b", "c"))
    for handle in handles:
        handle.remove()
    return sum((seen[name] for name in FIRST[1:]), seen["a"]), sum((seen[name] for name in SECOND[1:]), seen["b"])


def of(heads: tuple[str, ...]) -> Window:
    return Window((Backward((heads,)),))


def added(first: list[Tensor | None], second: list[Tensor | None]) -> list[Tensor | None]:
    return [
        one if other is None else other if one is None else one + other
        for one, other in zip(first, second, strict=True)
    ]


def case(stage: int, discard: bool, raw: bool) -> None:
    with compared(Scenario(), zero(stage)) as comparison:
        engine = comparison.engine
        for step in range(4):
            first, second = two_losses(comparison, step)
            if raw:
                first.backward(retain_graph=True)
            else:
                engine.backward(first, retain_graph=True)
            if discard:
                engine.zero_grad()
            engine.backward(second)
            engine.step()
            gradients = comparison.gradients(step, of(SECOND))
            if not discard:
                gradients = added(comparison.gradients(step, of(FIRST)), gradients)
            comparison.step(step, gradients)


@pytest.mark.quick(0)
@pytest.mark.covering(2)
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("discard", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_second_backward_is_like_the_first(stage: int, discard: bool, raw: bool) -> None:
    case(stage, discard, raw)


# With both counted, stages 0 and 1 round the mean once, after the sum, and the sum of means is not theirs.
@pytest.mark.quick(0)
@pytest.mark.parametrize(
    "stage, discard, raw", [(1, True, False), (2, True, True), (2, False, False), (2, False, True)]
)
def test_on_two_ranks(two_ranks: Ranks, stage: int, discard: bool, raw: bool) -> None:
    two_ranks(case, stage, discard, raw)


def test_an_old_graph_does_not_see_new_weights() -> None:
    with compared(Scenario(), zero(2)) as comparison:
        first, second = two_losses(comparison, 0)
        comparison.engine.backward(first, retain_graph=True)
        comparison.engine.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            comparison.engine.backward(second)
        comparison.engine.zero_grad()
