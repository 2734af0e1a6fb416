"""deepspeedai/DeepSpeed issue 7819: the CPU optimizer kept its bias correction as state and advanced
it once a call, so that parts of one model stepped in one step with different corrections."""

from __future__ import annotations

from typing import Any

import torch
from engine.scenarios import HEADS, Backward, Scenario, Window
from ranks import Ranks
from support import loss_of, same_weights, small_model

import longshore
from regressions.training import Comparison, compared, zero


def test_many_tiles_step_like_one() -> None:
    models, optimizers = [], []
    for tile_numel in (1 << 22, 25):
        models.append(small_model())
        offload = longshore.Offload(tile_numel=tile_numel)
        optimizers.append(longshore.AdamW(models[-1].parameters(), lr=1e-2, betas=(0.9, 0.95), offload=offload))
    assert len(optimizers[0]._core.members.store.tiles) == 1 and len(optimizers[1]._core.members.store.tiles) > 30
    for step in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            if step == 3:
                optimizer.param_groups[0]["betas"] = (0.5, 0.99)  # the other path of the upstream cache
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert same_weights(*models)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(optimizers[0].state[one]["exp_avg_sq"], optimizers[1].state[other]["exp_avg_sq"])


def change_betas(comparison: Comparison, step: int) -> None:
    if step == 3:
        for optimizer in (comparison.engine.optimizer, comparison.oracle.loop.optimizer):
            optimizer.param_groups[0]["betas"] = (0.5, 0.99)


def case(tile_numel: int) -> dict[str, Any]:
    """Heads take turns, so in one call there are parameters at different steps."""
    plan = Scenario(lambda step: Window((Backward(((HEADS[step % 2],),)),)), steps=6, tile_numel=tile_numel)
    with compared(plan, zero(2)) as comparison:
        comparison.run(before=lambda step: change_betas(comparison, step))
        explanation = comparison.engine.explain(False)
        steps = {row.name: row.step for row in explanation.parameters}
        assert [steps[f"heads.{head}.weight"] for head in HEADS] == [3, 3, 0] and steps["first.weight"] == 6
        return {"tiles": explanation.tiles, "weights": list(comparison.engine.module.parameters())}


def check(few: dict[str, Any], many: dict[str, Any]) -> None:
    assert few["tiles"] == 1 and many["tiles"] > 50
    assert all(torch.equal(one, other) for one, other in zip(few["weights"], many["weights"], strict=True))


def test_the_engine_steps_all_tiles_alike() -> None:
    check(case(1 << 20), case(20))


def test_on_two_ranks(two_ranks: Ranks) -> None:
    for few, many in zip(two_ranks(case, 1 << 20), two_ranks(case, 20), strict=True):
        check(few, many)
