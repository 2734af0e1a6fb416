"""deepspeedai/DeepSpeed pull request 7981: with the optimizer offloaded, several backwards before a
step kept the last gradient only, because accumulation was gated by a configured number of steps."""

from __future__ import annotations

import pytest
from engine.scenarios import HEADS, Backward, Scenario, Window
from ranks import Ranks
from support import PlainLoop, loss_of, same_weights, simulated, twins

import longshore
from regressions.training import compared, zero


@pytest.mark.quick(0)
@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("backwards", [1, 2, 4])
def test_every_backward_of_a_window_counts(backwards: int, release: bool) -> None:
    plain_model, model = twins()
    plain = PlainLoop(plain_model.parameters(), lr=1e-3)
    optimizer = longshore.AdamW(model.parameters(), lr=1e-3, release_gradients=release, offload=simulated())
    for step in range(4):
        for part in range(backwards):
            for each in (plain_model, model):
                loss_of(each, 10 * step + part).backward()
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(plain_model, model)


def case(stage: int, offload: str, backwards: int, announced: bool) -> None:
    """One accumulation step is configured; there are more backwards than that."""

    def plan(step: int) -> Window:
        parts = [
            Backward((HEADS,) if number == 0 else ((HEADS[number % 3],),), boundary=number == backwards - 1)
            for number in range(backwards)
        ]
        if not announced:
            parts = [Backward(part.forwards) for part in parts]
        return Window(tuple(parts), step_each=announced)

    with compared(Scenario(plan, steps=3, tile_numel=500), zero(stage, offload), simulated=stage >= 2) as comparison:
        assert comparison.engine.gradient_accumulation_steps() == 1
        comparison.run()
        arrived, reduced, applied = comparison.account()["first.weight"]
        expected = 1 if comparison.world_size > 1 and stage < 2 else backwards
        assert (arrived, applied) == (backwards, 1) and reduced in (expected, None)


@pytest.mark.covering(2)
@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("backwards", [1, 2, 4])
@pytest.mark.parametrize("stage, offload", [(1, "cpu"), (2, "cpu"), (2, "none")])
def test_the_engine_counts_every_backward(stage: int, offload: str, backwards: int, announced: bool) -> None:
    case(stage, offload, backwards, announced)


@pytest.mark.quick(0)
@pytest.mark.parametrize("stage, announced", [(1, True), (2, False), (2, True)])
def test_on_two_ranks(two_ranks: Ranks, stage: int, announced: bool) -> None:
    two_ranks(case, stage, "cpu", 4, announced)
