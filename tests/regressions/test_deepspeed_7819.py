"""deepspeedai/DeepSpeed issue 7819: the CPU optimizer kept its bias correction as state and advanced
it once a call, so that parts of one model stepped in one step with different corrections."""

from __future__ import annotations

import torch
from support import loss_of, same_weights, small_model

import longshore


def test_many_tiles_step_like_one() -> None:
    models, optimizers = [], []
    for tile_numel in (1 << 22, 25):
        models.append(small_model())
        offload = longshore.Offload(tile_numel=tile_numel)
        optimizers.append(longshore.AdamW(models[-1].parameters(), lr=1e-2, betas=(0.9, 0.95), offload=offload))
    assert len(optimizers[0]._store.tiles) == 1 and len(optimizers[1]._store.tiles) > 30
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
