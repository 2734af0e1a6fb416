"""``deepspeed.zero`` on several ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
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
    with deepspeed.zero.GatheredParameters(model.parameters()):
        pass  # nothing to read on the others yet
    with pytest.raises(ValueError, match=r"modifier_rank=1\): before initialize\(\) only rank 0 has the weights"):
        deepspeed.zero.GatheredParameters([model[0].bias], modifier_rank=1).__enter__()
    before = list(model.parameters())
    optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=1e-2)
    config = {key: value for key, value in CONFIG.items() if key != "optimizer"}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=iter(()), config=config)
    try:
        assert torch.equal(whole(model[0].weight), torch.full((8, 8), 0.25))
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
