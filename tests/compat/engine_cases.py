"""Calls that scripts make on an engine besides the loop, run on every rank."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from support import whole
from torch import nn
from torch.distributed.tensor import DTensor

import longshore


class Tied(nn.Module):
    """With tied weights, frozen ones, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(8), requires_grad=False)
        self.register_buffer("seen", torch.arange(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def generate(self, tokens: torch.Tensor) -> torch.Tensor:
        return self(tokens).argmax(-1)


def started(stage: int, dtype: str = "bf16") -> longshore.Engine:
    torch.manual_seed(0)
    config = longshore.Config(
        stage=stage, dtype=dtype, micro_batch_size=2, optimizer={"type": "AdamW", "lr": 1e-2, "weight_decay": 0.0}
    )
    return longshore.initialize(model=Tied(), config=config).engine


def train(engine: longshore.Engine) -> None:
    tokens = torch.arange(4).view(2, 2)
    engine.backward(engine(tokens).float().logsumexp(-1).mean())
    engine.step()


def whole_weights(stage: int, folder: str) -> None:
    """Saved whole, loaded whole, with and without frozen ones."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    engine = started(stage)
    try:
        train(engine)
        # A forward without backward leaves things gathered at stage 3.
        with torch.no_grad():
            engine(torch.arange(4).view(2, 2))
        expected = {name: whole(each).detach().clone() for name, each in engine.module.named_parameters()}
        assert engine.save_16bit_model(folder)
        assert engine.save_16bit_model(folder, "model.safetensors", exclude_frozen_parameters=True)
        if dist.is_initialized():
            dist.barrier()
        state = torch.load(Path(folder) / "pytorch_model.bin")
        names = {*expected, "head.weight", "seen"}
        assert state.keys() == names and torch.equal(state["seen"], torch.arange(3))
        assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
        for name, values in expected.items():
            assert state[name].dtype == torch.bfloat16 and torch.equal(state[name], values), name
        from safetensors.torch import load_file

        trained = load_file(Path(folder) / "model.safetensors")
        assert trained.keys() == names - {"scale", "head.weight"}
        consolidated = engine._zero3_consolidated_16bit_state_dict()
        assert (consolidated is None) == (rank > 0)
        assert engine.module_state_dict(exclude_frozen_parameters=True).keys() == names - {"scale"}
        # And back, after the run went on elsewhere.
        train(engine)
        engine.load_module_state_dict({"module": state})
        for name, each in engine.module.named_parameters():
            assert torch.equal(whole(each).detach(), expected[name]), name
        train(engine)
        master = longshore.utils.safe_get_full_fp32_param(engine.module.blocks[0][0].weight)  # pyright: ignore
        step = (master - expected["blocks.0.0.weight"].float()).abs().max()
        assert 0 < step < 0.05  # it went on from what was loaded, not from its master of before
    finally:
        engine.destroy()


def emptied_cache() -> None:
    """Between forward and backward, and after a forward without one: shards only, and the same weights."""
    weights = []
    for empties in (False, True):
        engine = started(3)
        try:
            for _ in range(2):
                tokens = torch.arange(4).view(2, 2) + dist.get_rank()
                engine(tokens)  # without a backward: the model's own parameters stay gathered
                gathered = [each for each in engine.module.parameters() if not isinstance(each, DTensor)]
                assert gathered
                if empties:
                    engine.empty_partition_cache()
                    assert all(isinstance(each, DTensor) for each in engine.module.parameters())
                loss = engine(tokens).float().logsumexp(-1).mean()
                if empties:
                    engine.empty_partition_cache()
                engine.backward(loss)
                engine.step()
            weights.append([whole(each).detach().clone() for each in engine.module.parameters()])
        finally:
            engine.destroy()
    for one, other in zip(*weights, strict=True):
        assert torch.equal(one, other)
