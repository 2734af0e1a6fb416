"""NovaSky-AI/SkyRL issue 2215: an FSDP2 model was taken off its device and brought back between steps, and its logits
were wrong at random afterwards, without an error.

Here moving is replacing the memory of every shard, which is what ``Module.to`` does: the model computes with what the
last step published, and the next step goes on from it. The former memory is overwritten, as by whoever gets it next.
"""

from __future__ import annotations

import pytest
import torch
from optim.fsdp_cases import OPTIONS, Net, inputs, make_sharded
from ranks import Ranks
from support import PlainLoop, whole

import longshore


def case(dtype: torch.dtype, release: bool) -> int:
    model, twin = make_sharded(dtype, (2,)), Net(dtype)
    offload = longshore.Offload(16, threads=1)
    optimizer = longshore.AdamW(model.parameters(), release_gradients=release, offload=offload, **OPTIONS)
    loop = PlainLoop(twin.parameters(), **OPTIONS)
    moved = 0
    try:
        for step in range(4):
            former = [parameter.to_local() for parameter in model.parameters()]  # pyright: ignore
            model._apply(torch.clone)
            for memory, parameter in zip(former, model.parameters(), strict=True):
                moved += memory.data_ptr() != parameter.to_local().data_ptr()  # pyright: ignore
                with torch.no_grad():
                    memory.fill_(float("nan"))
            x = inputs(step, 0, 0, dtype)  # the mean over ranks of equal gradients is the gradient
            losses = [each(x) for each in (model, twin)]
            assert torch.equal(*losses), step
            for loss in losses:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loop.step_on_grads()
            for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
                assert torch.equal(whole(ours.detach()), theirs), f"step {step}: {name}"
    finally:
        optimizer.close()
    return moved


@pytest.mark.needs_torch("FSDP2 over gloo")
@pytest.mark.parametrize(("dtype", "release"), [(torch.float32, False), (torch.bfloat16, True)], ids=["fp32", "bf16"])
def test_a_model_that_was_away_computes_with_the_published_weights(
    dtype: torch.dtype, release: bool, two_ranks: Ranks
) -> None:
    assert all(moved > 4 * 4 for moved in two_ranks(case, dtype, release))
