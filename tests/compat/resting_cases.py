"""DeepSpeed files with ``offload_param``, on every rank: engines without an optimizer, and ones that step."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from support import whole
from torch import Tensor, nn

import longshore.compat.deepspeed as deepspeed

BATCH = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0}
PARAMETERS = {"device": "cpu", "pin_memory": True}


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(3))
        self.head = nn.Linear(16, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def seeded(dtype: torch.dtype = torch.float32) -> Blocks:
    torch.manual_seed(3)
    return Blocks().to(dtype)


def on_device() -> torch.device:
    """Where an engine of this rank computes."""
    found = torch.accelerator.current_accelerator()
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.device("cpu") if found is None else torch.device(found.type, rank)


def evaluated(dtype: str, frozen: bool, file: dict[str, Any]) -> None:
    """A reference model's outputs are the plain model's, and its parameters stay where the file says."""
    model = seeded()
    if frozen:
        model.requires_grad_(False)
    plain = copy.deepcopy(model).to(getattr(torch, dtype)).to(on_device())
    config = {**BATCH, "bf16": {"enabled": dtype == "bfloat16"}, **file}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "bf16.check_grad_overflow is not given")
        engine, optimizer, *_ = deepspeed.initialize(model=model, config=config)
    assert optimizer is None and engine.device == on_device()
    engine.eval()
    try:
        for batch in range(3):
            ids = (torch.arange(6) * (1 + batch) % 11).to(engine.device)
            with torch.inference_mode() if batch == 1 else torch.no_grad():
                assert torch.equal(engine(ids), plain(ids))
            assert {each.device.type for each in model.parameters()} == {"cpu"}
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(mine.detach().cpu(), its.cpu())
    finally:
        engine.destroy()


def trained(zero: dict[str, Any]) -> tuple[list[str], list[Tensor], str]:
    """Return what an engine warned of, its weights after three steps, and where ``explain()`` says they rest."""
    model, rank = seeded(), dist.get_rank() if dist.is_initialized() else 0
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        engine, *_ = deepspeed.initialize(
            model=model, config={**BATCH, "optimizer": optimizer, "zero_optimization": {"stage": 3, **zero}}
        )
    try:
        for step in range(3):
            ids = ((torch.arange(6) + rank) * (1 + step) % 11).to(engine.device)
            engine.backward(engine(ids).float().logsumexp(-1).sum())
            engine.step()
        said = str(engine.explain(print_it=False))
        return [str(each.message) for each in told], [whole(each).detach().cpu() for each in model.parameters()], said
    finally:
        engine.destroy()
