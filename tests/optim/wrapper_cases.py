"""Models in wrappers that reduce gradients themselves, run on every rank."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support import small_model
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import longshore

_REFUSED = "release_gradients=True takes gradients before {} has reduced them"


def ddp(view: bool, after: bool) -> None:
    """Refused by name, whether the optimizer was made first or not; and right without release_gradients."""
    model = small_model()
    said = pytest.raises(ValueError, match=_REFUSED.format("DistributedDataParallel"))
    if after:
        optimizer = longshore.AdamW(model.parameters(), release_gradients=True)
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=view)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for _ in range(2):
            wrapped(torch.ones(2, 19)).sum().backward()  # hooks never raise (law 8), and took nothing
            assert all(type(parameter.grad) is torch.Tensor for parameter in model.parameters())
            with pytest.raises(longshore.GradientError, match=_REFUSED.format("DistributedDataParallel")):
                optimizer.step()
            optimizer.zero_grad()
        assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
        optimizer.close()
    else:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=view)
        with said:
            longshore.AdamW(wrapped.parameters(), release_gradients=True)
    del wrapped
    models: list[Any] = [DistributedDataParallel(small_model(), gradient_as_bucket_view=view) for _ in range(2)]
    optimizers = longshore.AdamW(models[0].parameters()), torch.optim.AdamW(models[1].parameters(), fused=True)
    for each, optimizer in zip(models, optimizers, strict=True):
        for step in range(3):
            each(torch.full((2, 19), float(step + torch.distributed.get_rank()))).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(*(each.parameters() for each in models), strict=True):
        numel = one.numel() // 16 * 16
        assert torch.equal(one.flatten()[:numel], other.flatten()[:numel])


def fsdp1() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(small_model(), use_orig_params=False, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match=_REFUSED.format("FullyShardedDataParallel")):
        longshore.AdamW(model.parameters(), release_gradients=True)


def engine(fsdp: bool, inside: bool) -> None:
    model: Any = small_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cpu = torch.device("cpu")
        wrapped = FullyShardedDataParallel(model, device_id=cpu) if fsdp else DistributedDataParallel(model)
    given = nn.Sequential(nn.Identity(), wrapped) if inside else wrapped
    name = "FullyShardedDataParallel" if fsdp else "DistributedDataParallel"
    with pytest.raises(ValueError, match=f"{'module 1 of the' if inside else 'the'} model is a {name}, which reduces"):
        longshore.initialize(model=given, config={"optimizer": {"type": "AdamW"}, "train_micro_batch_size_per_gpu": 1})
