"""verl-project/verl pull request 6193: each time that weights were taken to the host, the pinned copy was made anew
while the former one was still referenced, so that host memory had the model twice for a moment, and jobs were killed.

Here the host's memory is made once: steps, loading a state and taking over loaded weights write to it where it is.
"""

from __future__ import annotations

import copy

import pytest
import torch
from support import loss_of, simulated, small_model
from torch.utils._python_dispatch import TorchDispatchMode

import longshore


class LargestTensor(TorchDispatchMode):
    """Keeps the largest number of bytes of a new tensor."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        known = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in known:
            self.largest = max(self.largest, made.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_host_memory_is_made_once(dtype: torch.dtype, release: bool) -> None:
    model = small_model(dtype)
    optimizer = longshore.AdamW(model.parameters(), release_gradients=release, offload=simulated(tile_numel=100_000))
    loss_of(model, 0, dtype).backward()
    optimizer.step()
    optimizer.zero_grad()
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    tiles = optimizer._core.members.store.tiles
    memory, held = [tile.buffer.data_ptr() for tile in tiles], optimizer.host_bytes()
    whole = held["state"]
    assert len(memory) == 1, "one buffer has the whole state"
    with LargestTensor() as made:
        for step in range(1, 4):
            loss_of(model, step, dtype).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.load_state_dict(saved)
            model.load_state_dict(weights)
            optimizer.refresh_master()
    assert [tile.buffer.data_ptr() for tile in tiles] == memory
    assert optimizer.host_bytes() == held
    assert 0 < made.largest < whole / 2
