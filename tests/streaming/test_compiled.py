"""torch.compile of a streamed model, or of its blocks, before or after: compiled once, and the weights are the same."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from on_device import device_type
from support import PlainLoop
from torch import Tensor, nn
from torch._dynamo.convert_frame import ConvertFrame
from torch._dynamo.testing import CompileCounterWithBackend

import longshore

# Dynamo looks at the gradient of what it compiles for, which here is no leaf, and does not let anybody see the warning.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(self.one(x).sin())


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(17, 12), nn.Linear(12, 17)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def compiled(model: Network, what: str, backend: Any) -> Any:
    if what == "model":
        return torch.compile(model, backend=backend)
    for index, block in enumerate(model.blocks):
        if what == "blocks in place":
            block.compile(backend=backend)
        else:
            model.blocks[index] = torch.compile(block, backend=backend)  # type: ignore[assignment]
    return model


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch._dynamo.reset()


@pytest.mark.quick(0)
@pytest.mark.covering(2)
@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
@pytest.mark.parametrize("first", ["compile", "stream"])
@pytest.mark.parametrize("what", ["model", "blocks", "blocks in place"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_weights_are_those_of_the_plain_model(checkpoint: Any, what: str, first: str, backend: str) -> None:
    model = Network()
    plain = copy.deepcopy(model).to(device_type())
    counter = CompileCounterWithBackend(backend)
    if first == "compile":
        called = compiled(model, what, counter)
        handle = longshore.stream(model, device_type(), checkpoint=checkpoint)
    else:
        handle = longshore.stream(model, device_type(), checkpoint=checkpoint)
        called = compiled(model, what, counter)
    optimizer = longshore.AdamW(model.parameters(), lr=1e-2)
    reference = PlainLoop([each.detach().cpu().clone().requires_grad_() for each in plain.parameters()], lr=1e-2)
    frames = []
    for step in range(4):
        tokens = torch.randint(17, (2, 6), generator=torch.Generator().manual_seed(step)).to(device_type())
        for each in (called, plain):
            each(tokens).square().mean().backward()
        reference.step([each.grad.cpu() for each in plain.parameters() if each.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, theirs in zip(plain.parameters(), reference.parameters, strict=True):
                mine.copy_(theirs)
                mine.grad = None
        frames.append(counter.frame_count)
        for ours, theirs in zip(model.parameters(), reference.parameters, strict=True):
            assert torch.equal(ours, theirs)
    # Compiled, and not again; torch's checkpoint turns the compiler off for what it calls.
    assert (checkpoint or frames[0] > 0) and len(set(frames[1:])) == 1
    handle.close()


def test_what_fetches_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: set[tuple[str, str]] = set()
    convert = ConvertFrame.__call__

    def recorded(self: Any, frame: Any, *rest: Any, **options: Any) -> Any:
        traced.add((frame.f_code.co_filename, frame.f_code.co_name))
        return convert(self, frame, *rest, **options)

    monkeypatch.setattr(ConvertFrame, "__call__", recorded)
    model = Network()
    handle = longshore.stream(model, device_type())
    called = torch.compile(model, backend="aot_eager")
    called(torch.zeros(2, 6, dtype=torch.int64, device=handle.device)).sum().backward()
    assert (__file__, "forward") in traced
    package = Path(longshore.__file__).parent
    ours = {name for file, name in traced if package in Path(file).parents}
    # These only call the module.
    assert {name for name in ours if "call" not in name and "_run" not in name} == set()
    handle.close()


def test_a_model_in_one_graph_is_refused() -> None:
    model = Network()
    handle = longshore.stream(model, device_type())
    with pytest.raises(Exception, match="streamed model are fetched between its blocks"):
        torch.compile(model, backend="eager", fullgraph=True)(
            torch.zeros(2, 6, dtype=torch.int64, device=handle.device)
        )
    handle.close()
