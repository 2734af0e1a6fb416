"""Files that other tools write of a streamed model hold what they hold of a plain one."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from on_device import device_type
from torch import Tensor, nn

import longshore
from longshore.streaming import Stream

pytestmark = pytest.mark.gpu

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).sin()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 7, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def streamed() -> tuple[Network, Network, Stream]:
    plain = Network()
    model = copy.deepcopy(plain)
    handle = longshore.stream(model, device_type())
    return plain, model, handle


@pytest.mark.parametrize("closed", [False, True])
def test_safetensors(closed: bool, tmp_path: Path) -> None:
    plain, model, handle = streamed()
    if closed:
        handle.close()
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    safetensors.torch.save_file(model.state_dict(), tmp_path / "state.safetensors")
    for name in ("model", "state"):
        loaded = safetensors.torch.load_file(tmp_path / f"{name}.safetensors")
        assert loaded.keys() == plain.state_dict().keys()
        assert all(torch.equal(value, loaded[each]) for each, value in plain.state_dict().items())


def test_a_file_with_some_of_the_parameters_has_the_bytes_of_these(tmp_path: Path) -> None:
    plain, model, _ = streamed()
    sizes = []
    for each in (plain, model):
        torch.save({"weight": each.blocks[1].inner.weight}, tmp_path / "some.pt")  # pyright: ignore
        sizes.append((tmp_path / "some.pt").stat().st_size)
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("safe", [True, False])
def test_accelerate_saves_what_it_loads(safe: bool, tmp_path: Path) -> None:
    _, model, _ = streamed()
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, longshore.AdamW(model.parameters()))
    tokens = torch.arange(7, device=device_type())
    model(tokens).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator.save_state(str(tmp_path / "state"), safe_serialization=safe)
    accelerator.save_model(model, str(tmp_path / "model"), safe_serialization=safe)
    model(tokens).sum().backward()
    optimizer.step()
    accelerator.load_state(str(tmp_path / "state"))
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    if safe:
        loaded = safetensors.torch.load_file(tmp_path / "model" / "model.safetensors")
        assert all(torch.equal(value, wanted[name]) for name, value in loaded.items())
