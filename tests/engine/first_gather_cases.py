"""``gather()`` of parameters that ``Init`` made, before ``initialize()``; run on every rank."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from support import whole
from torch import nn

import longshore
from longshore.errors import ParameterError, RankError


def make_net() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3, bias=False))


def made(place: str = "cpu") -> tuple[nn.Sequential, nn.Sequential]:
    """A model under Init, and what it would be without."""
    with torch.device(place):
        with longshore.Init():
            model = make_net()
        return model, make_net()


def check_unplaced(model: nn.Module) -> None:
    """Outside of blocks the other ranks have no memory for the parameters."""
    assert {each.is_meta for each in model.parameters()} == {dist.get_rank() > 0}


def check_started(model: nn.Module, plain: nn.Module, stage: int) -> None:
    config = longshore.Config(stage=stage, offload_device="cpu", optimizer={"type": "SGD", "lr": 0.1})
    engine = longshore.initialize(model=model, config=config).engine
    try:
        for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(whole(mine).cpu(), its.cpu())
        with longshore.gather(model.parameters()) as values:  # which all ranks have now
            assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(values, plain.parameters(), strict=True))
    finally:
        engine.destroy()


def read(stage: int, place: str = "cpu") -> None:
    """All ranks read, in blocks of their own and in nested ones, with a writer and without."""
    model, plain = made(place)
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    held = [each for each, _ in pairs]
    for writer in (None, 0, 1):
        with longshore.gather(model, modifier_rank=writer) as values:
            assert [id(each) for each in values] == [id(each) for each in held]
            for mine, its in pairs:
                assert isinstance(mine, nn.Parameter) and mine.requires_grad
                assert mine.device.type == its.device.type
                assert torch.equal(mine, its) and torch.equal(mine.data.sum(), its.data.sum())
            kept = model[0].weight.detach()
        check_unplaced(model)
        assert torch.equal(kept, plain[0].weight)
    with longshore.gather([model[0].weight]):
        with longshore.gather(model, modifier_rank=writer), longshore.gather([model[0].weight, model[2].weight]):
            assert all(torch.equal(*each) for each in pairs)
        assert torch.equal(*pairs[0]) and model[2].weight.is_meta == (dist.get_rank() > 0)
    check_unplaced(model)
    assert [id(each) for each in model.parameters()] == [id(each) for each in held]
    check_started(model, plain, stage)


def written(stage: int, writer: int, nested: bool) -> None:
    """Any rank may write; what others wrote is not there."""
    model, plain = made()
    around = longshore.gather(model) if nested else contextlib.nullcontext()
    with around:
        with longshore.gather([model[0].weight, model[2].weight, model[2].weight], modifier_rank=writer):
            for change in (model, plain):
                with torch.no_grad():
                    value = 2.0 if change is plain or dist.get_rank() == writer else 7.0
                    change[0].weight.mul_(value)
                change[2].weight.data = change[2].weight.data.T.contiguous().T + value
        if nested:
            assert torch.equal(model[0].weight, plain[0].weight) and torch.equal(model[2].weight, plain[2].weight)
    check_unplaced(model)
    model[0].bias.requires_grad_(False)
    with longshore.gather([model[1].weight]):
        model[1].weight.requires_grad_(False)
    assert not model[1].weight.requires_grad
    check_started(model, plain, stage)


def like_others() -> None:
    """A script makes another parameter on the device of one that Init made, as resizing an embedding does."""
    model, _ = made()
    old = model[2].weight
    torch.manual_seed(9)
    new = nn.Parameter(torch.randn(4, 5)) if dist.get_rank() == 0 else nn.Parameter(torch.empty(4, 5, device="meta"))
    with longshore.gather([old, new], modifier_rank=0):
        new.data[:3] = old.data
        expected = new.detach().clone()
    assert new.is_meta == (dist.get_rank() > 0)
    model[2].weight = new
    with longshore.gather(model[2].weight):  # known from now on
        assert torch.equal(new, expected)
    engine = longshore.initialize(
        model=model, config=longshore.Config(stage=3, optimizer={"type": "SGD", "lr": 0.1})
    ).engine
    assert torch.equal(whole(model[2].weight), expected)
    engine.destroy()


def _raised(block: Any) -> str:
    try:
        block()
    except (ParameterError, RankError, ArithmeticError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused() -> list[str]:
    """What each rank raises for a write without a writer, another shape, an exception, and other parameters."""
    model, plain = made()
    weight, rank = model[0].weight, dist.get_rank()
    memory = weight.data_ptr() if rank == 0 else 0

    def write_on_1() -> None:
        with longshore.gather(model):
            if rank == 1:
                weight.data.zero_()

    def shape_on_1() -> None:
        with longshore.gather(model, modifier_rank=0):
            if rank == 1:
                weight.data = torch.zeros(2)

    def fail_on_1() -> None:
        with longshore.gather(model, modifier_rank=1):
            weight.data.zero_()
            if rank == 1:
                raise ArithmeticError("on purpose")
            weight.data.copy_(plain[0].weight)

    def others_on_1() -> None:
        with longshore.gather([weight if rank == 0 else model[0].bias]):
            raise AssertionError

    said = [_raised(each) for each in (write_on_1, shape_on_1, fail_on_1, others_on_1)]
    check_unplaced(model)
    assert rank > 0 or weight.data_ptr() == memory
    check_started(model, plain, 3)
    return said
