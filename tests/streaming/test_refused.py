"""A model for which there is no memory is refused before it trains, with the bytes that are missing, and stays as it
was."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_device import device_type
from torch import Tensor, nn

import longshore
from longshore.byte_sizes import format_byte_size
from longshore.errors import LongshoreError
from longshore.plan.job import Job, PlanChoice
from longshore.plan.layout import lay_out
from longshore.plan.memory import count_bytes
from longshore.plan.reading import plan_of_module
from longshore.transfer import allocate_pinned

pytestmark = pytest.mark.gpu

MODULE = importlib.import_module("longshore.streaming.stream")  # whose name in the room is the function's

BLOCK, REST = 4 * 24 * 24, 4 * (24 * 7 + 7)
"""Bytes of one block, and of what is in none."""


def make() -> nn.Sequential:
    blocks = nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(4)))
    return nn.Sequential(blocks, nn.Linear(24, 7))


class Before:
    """What a model was, and that it still is."""

    def __init__(self, model: nn.Sequential) -> None:
        self.model = model
        self.parameters = dict(model.named_parameters())
        self.values = {name: each.detach().clone() for name, each in self.parameters.items()}

    def check(self) -> None:
        found = dict(self.model.named_parameters())
        assert found.keys() == self.parameters.keys()
        for name, each in found.items():
            assert each is self.parameters[name] and each.device.type == "cpu"
            assert torch.equal(each, self.values[name])
        self.model(torch.ones(2, 24)).sum().backward()  # a plain model on the CPU
        assert all(each.grad is not None for each in found.values())
        self.model.zero_grad()

    def check_streams(self) -> None:
        handle = longshore.stream(self.model, device_type())
        self.model(torch.ones(2, 24, device=device_type())).sum().backward()
        assert all(each.grad is not None for each in self.model.parameters())
        handle.close()


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the bytes that the device says are free."""
    device = torch.get_device_module(torch.device(device_type()))
    return lambda count: monkeypatch.setattr(device, "mem_get_info", lambda *_: (count, count))


def test_a_device_without_room_for_two_blocks(free: Callable[[int], None]) -> None:
    needed = REST + 3 * BLOCK  # two blocks, and the gradients of one
    model = make()
    before = Before(model)
    free(needed - 1)
    missing = r"and 1 B are missing: .* for two blocks, and .* choose smaller blocks"
    with pytest.raises(ValueError, match=missing) as said:
        longshore.stream(model, device_type())
    for size in (needed, REST, 2 * BLOCK, BLOCK):
        assert format_byte_size(size) in str(said.value)
    before.check()
    free(needed)
    before.check_streams()


@pytest.mark.parametrize("engine", [False, True])
def test_a_host_without_room_for_a_block(engine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    before = Before(model)
    with monkeypatch.context() as patched:
        patched.setattr("longshore.streaming.checks.available_bytes", lambda: BLOCK - 1)
        with pytest.raises(ValueError, match=r"the largest block has 2\.2 KiB, and .* of host memory are available"):
            begin(model, engine)
    before.check()
    before.check_streams()


@pytest.mark.parametrize("after", [0, 2, 4])
@pytest.mark.parametrize("engine", [False, True])
def test_pinned_memory_that_runs_out(engine: bool, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []

    def limited(num_bytes: int) -> Tensor:
        if len(given) == after:
            raise RuntimeError("out of memory\nand a trace of the driver's")
        given.append(num_bytes)
        return allocate_pinned(num_bytes)

    model = make()
    before = Before(model)
    with monkeypatch.context() as patched:
        patched.setattr(MODULE, "allocate_pinned", limited)
        with pytest.raises(LongshoreError, match=r"cannot be pinned, after .* \(out of memory\): free") as said:
            begin(model, engine)
    found = re.search(r" after (.*) of the (.*) that the parameters take", str(said.value))
    assert found is not None
    assert found.groups() == (format_byte_size(after * BLOCK), format_byte_size(4 * BLOCK + REST))
    before.check()
    before.check_streams()


def begin(model: nn.Module, engine: bool) -> None:
    if not engine:
        longshore.stream(model, device_type())
        return
    config = longshore.Config(
        stage=3, offload_device="cpu", param_device="cpu", optimizer={"type": "AdamW", "lr": 1e-3}
    )
    longshore.initialize(model=model, config=config)


def _uneven() -> nn.Sequential:
    sizes = (48, 1, 48, 1, 48)  # two large blocks may follow one another where the order changes
    return nn.Sequential(nn.Sequential(*(Narrow(size) for size in sizes)), nn.Linear(24, 2))


def _with_adapters() -> nn.Sequential:
    model = nn.Sequential(nn.Sequential(*(Narrow(40) for _ in range(4))), nn.Linear(24, 2))
    for block in model[0]:
        block.up.requires_grad_(False)
    return model


class Narrow(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.up = nn.Linear(24, size)
        self.down = nn.Linear(size, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x))


@pytest.mark.parametrize("make_model", [_uneven, _with_adapters])
def test_what_is_planned_is_not_refused(make_model: Callable[[], nn.Sequential], free: Callable[[int], None]) -> None:
    model = make_model().bfloat16()
    layout = lay_out(plan_of_module(model, "it"), Job(), PlanChoice(3, "cpu", param_device="cpu"), 1, staged=True)
    planned = count_bytes(layout)
    needed = planned.device_total - planned.device_estimates["activations"]
    free(needed)
    longshore.stream(model, device_type()).close()
    free(needed - 1)
    with pytest.raises(ValueError, match="1 B are missing"):
        longshore.stream(model, device_type())


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (["Blok"], r"blocks names Blok, and the model has no module of that class"),
        (-1, "blocks counts elements from 1 on"),
        (Narrow, "blocks is .*; it takes"),
        (10**9, "has no module that blocks=1000000000 makes a block"),
    ],
)
def test_blocks_that_are_refused(blocks: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        longshore.stream(_uneven(), device_type(), blocks=blocks)


def test_a_streamed_model_is_not_an_engines() -> None:
    model = _uneven()
    handle = longshore.stream(model, device_type())
    with pytest.raises(ValueError, match=r"is streamed to .* let the engine stream it \(stage 3 with offload_param\)"):
        longshore.initialize(model=model, config={"train_batch_size": 1, "optimizer": {"type": "AdamW"}})
    handle.close()
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, not generator"):
        longshore.stream(model.parameters(), device_type())  # pyright: ignore[reportArgumentType]
