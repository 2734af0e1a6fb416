"""deepspeedai/DeepSpeed pull request 6550: under ZeRO-2 with the optimizer on the CPU a counter of micro steps decided
whether a gradient replaced the host's or was added to it. It began at 0 in the constructor and at -1 after each
backward, so the first window counted 1 to 4 and every later one 0 to 3; gradients were copied and added at the wrong
ones.

Here arrivals are counted for each parameter, so that the first window, the later ones and one that begins after a
discarded half are all alike.
"""

from __future__ import annotations

import pytest
from engine.scenarios import HEADS, Backward, Scenario, Window, inputs
from ranks import Ranks

from regressions.training import Comparison, compared, zero

ACCUMULATION = 4


def plan(step: int) -> Window:
    return Window((Backward(), Backward((("a",),)), Backward((("b",),)), Backward((("b",),))), step_each=True)


def begin_and_discard(comparison: Comparison, step: int) -> None:
    """Some backwards that come to nothing: none, one, two and three in turn."""
    engine = comparison.engine
    for number in range(step % ACCUMULATION):
        engine.backward(engine(inputs(step, 50 + number, comparison.rank, comparison.dtype), HEADS))
        engine.step()
        assert not engine.was_step_applied()
    engine.zero_grad()


def case(stage: int, discard: bool) -> None:
    config = {**zero(stage), "gradient_accumulation_steps": ACCUMULATION}
    with compared(Scenario(plan, steps=4, tile_numel=500), config, simulated=stage >= 2) as comparison:
        comparison.run(before=lambda step: begin_and_discard(comparison, step) if discard else None)
        engine = comparison.engine
        assert engine.global_steps == 4
        assert engine.micro_steps == 16 + (6 if discard else 0)


@pytest.mark.quick(0)
@pytest.mark.covering(1)
@pytest.mark.parametrize("discard", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_window_counts_alike(stage: int, discard: bool) -> None:
    case(stage, discard)


@pytest.mark.quick(0)
@pytest.mark.parametrize("discard", [False, True])
def test_on_two_ranks(two_ranks: Ranks, discard: bool) -> None:
    two_ranks(case, 2, discard)
