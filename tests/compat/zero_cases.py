"""``deepspeed.zero`` on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from longshore.compat.deepspeed.runtime.zero import partition_parameters
from support import whole
from torch import Tensor, nn

import longshore.compat.deepspeed as deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3},
}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return sum((expert(x) for expert in self.experts), start=x)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(1))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made_inside_init() -> None:
    """Weights are made and changed on rank 0 alone, by a script's own optimizer stepped, and read on all."""
    rank = dist.get_rank()
    torch.manual_seed(rank)  # rank 0's count
    with deepspeed.zero.Init(config_dict_or_path=CONFIG, dtype=torch.float32):
        with deepspeed.zero.Init(enabled=True), deepspeed.zero.Init(enabled=False, mpu=object()):
            inner = nn.Linear(8, 8)
        model = nn.Sequential(inner, nn.Linear(8, 4))
    assert model[1].weight.is_meta == (rank > 0)
    with deepspeed.zero.GatheredParameters(model[0].weight, modifier_rank=0):
        if rank == 0:
            nn.init.constant_(model[0].weight, 0.25)
    without_bias = nn.Linear(2, 2, bias=False)
    with deepspeed.zero.GatheredParameters([*model.parameters(), without_bias.bias, None]):
        assert torch.equal(model[0].weight, torch.full((8, 8), 0.25))  # on every rank
    with deepspeed.zero.GatheredParameters([model[0].bias, without_bias.bias], modifier_rank=1):
        if rank == 1:
            nn.init.constant_(model[0].bias, 0.75)
    with deepspeed.zero.GatheredParameters(without_bias.bias):
        assert model[0].bias.is_meta == (rank > 0)
    before = list(model.parameters())
    optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=1e-2)
    config = {key: value for key, value in CONFIG.items() if key != "optimizer"}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=iter(()), config=config)
    try:
        assert torch.equal(whole(model[0].weight), torch.full((8, 8), 0.25))
        assert torch.equal(whole(model[0].bias), torch.full((8,), 0.75))
        # After it parameters are sharded, anybody may write, and masters follow.
        with deepspeed.zero.GatheredParameters(model[1].weight, modifier_rank=1):
            if rank == 1:
                model[1].weight.data.fill_(0.5)
        for handles in (before, list(engine.parameters())):
            with deepspeed.zero.GatheredParameters(handles):
                assert torch.equal(handles[2].data, torch.full((4, 8), 0.5)) and float(handles[2].data.sum()) == 16.0
                assert [each.shape for each in handles] == [(8, 8), (8,), (4, 8), (4,)]
        with deepspeed.zero.GatheredParameters(model[1].weight, enabled=False):
            assert torch.equal(whole(model[1].weight), torch.full((4, 8), 0.5))
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
        assert torch.allclose(whole(model[1].weight), torch.full((4, 8), 0.49))
    finally:
        engine.destroy()


def leaves() -> None:
    """What is gathered as a whole: as set by a function, or as the file says."""
    from torch.distributed.fsdp import FSDPModule

    in_file = {"classes": [f"{Experts.__module__}.Experts"], "names": ["blocks.0"], "name_suffixes": ["s.0"]}
    units = {}
    for marked in ("not", "by function", *in_file):
        torch.manual_seed(0)
        model = Mixture()
        if marked == "by function":
            assert deepspeed.utils.set_z3_leaf_modules(model, [Experts]) == [model.blocks[0]]
            assert deepspeed.utils.z3_leaf_module(model.blocks[0]) and not deepspeed.utils.z3_leaf_module(model.head)
        zero = {"stage": 3, **({"leaf_module": {marked: in_file[marked]}} if marked in in_file else {})}
        engine, *_ = deepspeed.initialize(model=model, config={**CONFIG, "zero_optimization": zero})
        units[marked] = [name for name, each in model.named_modules() if isinstance(each, FSDPModule) and name]
        engine.destroy()
    assert units.pop("not") == [f"blocks.0.experts.{index}" for index in range(3)]
    assert [*units.values()] == [["blocks.0"]] * 4


def names_of_parameters() -> None:
    """What projects read of a parameter, before ``initialize()``, after it, and inside GatheredParameters."""
    status = partition_parameters.ZeroParamStatus
    with deepspeed.zero.Init():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    plain = nn.Parameter(torch.ones(3))
    held = list(model.parameters())

    def check(parameters: list[Any], expected: Any) -> list[int]:
        assert [each.ds_shape for each in parameters] == [(8, 8), (8,), (4, 8), (4,)]
        assert [each.ds_numel for each in parameters] == [64, 8, 32, 4]
        assert all(type(each.ds_shape) is torch.Size for each in parameters)
        assert {each.ds_status for each in parameters} == {expected}
        assert not any(hasattr(each, "ds_tensor") or hasattr(each, "ds_persist") for each in parameters)
        assert not hasattr(plain, "ds_id") and plain.ds_status is status.AVAILABLE and plain.ds_numel == 3
        numbers = [each.ds_id for each in parameters]
        told: list[Any] = [None, None]
        dist.all_gather_object(told, numbers)
        assert told[0] == told[1] and len({*numbers}) == 4
        return numbers

    def both(parameters: list[Any]) -> list[int]:
        check(parameters, status.NOT_AVAILABLE)
        with deepspeed.zero.GatheredParameters(parameters):
            return check(parameters, status.AVAILABLE)

    both(held)
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
    try:
        numbers = both(list(model.parameters()))
        assert both(held) == numbers
        loss = engine(torch.ones(1, 8)).sum()
        assert [each.ds_id for each in model.parameters()] == numbers  # the root's are still gathered
        engine.backward(loss)
        engine.step()
        assert both(list(model.parameters())) == numbers
        with pytest.raises(AttributeError, match=r"no parameter\.ds_tensor; use deepspeed\.zero\.GatheredParameters"):
            model[0].weight.ds_tensor  # noqa: B018
        whole_state = engine._consolidated_16bit_state_dict()
        assert (whole_state is None) == (dist.get_rank() > 0)
        for name, each in model.named_parameters():
            values = whole(each)
            assert whole_state is None or torch.equal(whole_state[name], values)
    finally:
        engine.destroy()
