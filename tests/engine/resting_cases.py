"""Engines whose parameters rest on the host, beside ones whose parameters are on the device; run on every rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from support import whole
from torch import Tensor

import longshore
import longshore.checkpointing
from engine import cases
from engine.scenarios import SCENARIOS, Oracle, drive, inputs

PLACES = ("device", "device streamed")
SCENARIO = SCENARIOS["alternating heads"]


class Run:
    """A run of the scenario on an engine, and its plain twin."""

    def __init__(self, place: str, dtype: str) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.dtype = cases.DTYPES[dtype]
        device = cases._device(place, self.rank)
        self.oracle = Oracle(SCENARIO, self.dtype, self.world_size, 3, device, **cases.OPTIONS)
        self.begin(place)

    def begin(self, place: str) -> None:
        self.engine = cases.engine_of(SCENARIO, 3, place, "small", self.dtype, "off")

    def parameters(self) -> list[Any]:
        return list(self.engine.module.parameters())

    def step(self, number: int) -> None:
        window = SCENARIO.plan(number)
        drive(self.engine, window, number, self.rank, self.dtype)
        self.oracle.loop.step(self.oracle.gradients(window, number, window.accumulation or 1))
        self.check(f"step {number}")

    def check(self, when: str) -> None:
        twins = self.oracle.model.parameters()
        for (name, ours), theirs in zip(self.engine.module.named_parameters(), twins, strict=True):
            assert torch.equal(whole(ours), theirs.to(ours.device)), f"{when}: {name} differs"


def resumed(folder: str, dtype: str, first: str, second: str) -> None:
    """Two steps on an engine with its parameters at one place, and two on another with them at a second one."""
    run = Run(first, dtype)
    for number in range(2):
        run.step(number)
    run.engine.save_checkpoint(folder)
    run.engine.destroy()
    run.begin(second)
    run.engine.load_checkpoint(folder)
    run.check("loaded")
    for number in range(2, 4):
        run.step(number)
    run.engine.destroy()


def handled(place: str, dtype: str) -> None:
    """What scripts do with parameters and their states between steps."""
    run = Run(place, dtype)
    run.step(0)
    run.step(1)
    named = dict(run.engine.module.named_parameters())
    parameter, twin = named["second.weight"], run.oracle.model.second.weight
    index = next(place for place, each in enumerate(run.oracle.loop.parameters) if each is twin)
    master = run.oracle.loop.masters[index].detach()[: twin.numel()].view(twin.shape)
    full = longshore.utils.safe_get_full_fp32_param(parameter)
    assert full is not None and torch.equal(full.cpu(), master)
    first = longshore.utils.safe_get_full_optimizer_state(parameter, "exp_avg")
    assert first is not None and first.shape == twin.shape and bool(first.any())

    longshore.utils.safe_set_full_fp32_param(parameter, full * 0.5)
    with torch.no_grad():
        twin.copy_(master.mul_(0.5))
    run.check("set")
    with longshore.gather([parameter], modifier_rank=0):
        assert parameter.shape == twin.shape
        if run.rank == 0:
            with torch.no_grad():
                parameter.fill_(0.125)
    with torch.no_grad():
        twin.fill_(0.125)
    run.oracle.loop.refresh(index)
    run.check("written in gather()")
    run.step(2)

    run.engine.eval()
    with torch.no_grad():
        run.engine(inputs(0, 0, run.rank, run.dtype).to(run.engine.device), ("a",))
    run.engine.train()
    state = {name: whole(value) for name, value in run.engine.module.state_dict().items()}
    run.engine.module.load_state_dict(state)
    run.check("loaded what state_dict() gave")
    run.step(3)
    run.engine.destroy()


def resting(model: torch.nn.Module, blocks: str) -> Any:
    """An engine whose parameters rest on the host, and are copied to the device with each module of a class."""
    config = longshore.Config(
        stage=3,
        offload_device="cpu",
        param_device="cpu",
        optimizer={"type": "SGD", "lr": 0.5},
        wrap_policy=[blocks],
    )
    return longshore.initialize(model=model, config=config).engine


def written_after_forward(seed: int, kernel_us: int, copy_us: int, frozen: bool) -> None:
    """A parameter is written right after a forward without gradients, or after a backward, whose copies of it to the
    device are late; ``frozen``: nothing comes to the host after the last of them."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    for parameter in model[:3].parameters() if frozen else ():
        parameter.requires_grad_(False)
    twin = copy.deepcopy(model)
    engine = resting(model, "Linear")
    twin.to(engine.device)
    x = torch.linspace(-1, 1, 24).view(3, 8)
    found = []
    for each in (engine, twin):
        if each is engine:
            delays(seed, kernel_us, copy_us)
        given = x.to(engine.device).requires_grad_()
        with torch.no_grad():
            out = each(given)
        _halve(each)
        loss = each(given).square().sum()
        engine.backward(loss) if each is engine else loss.backward()
        _halve(each)
        assert given.grad is not None
        with longshore.gather([next(engine.module.parameters())] if each is engine else []):
            first = next(each.parameters()) * 2.0
        _halve(each)
        found.append([out.detach().cpu(), given.grad.cpu(), first.detach().cpu()])
    delays(0, 0, 0)
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    engine.zero_grad()
    engine.destroy()


class SameTwice(torch.nn.Module):
    """Asks whether its inputs are one tensor, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return q + (self.inner(q) if q is k else self.inner(q * 2.0) + k).sin()


class Habits(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(8, 8)
        self.blocks = torch.nn.ModuleList(SameTwice() for _ in range(3))
        self.how = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.how == "ours":
                x = longshore.checkpointing.checkpoint(block, x, x)
            elif self.how == "torch's":
                x = torch.utils.checkpoint.checkpoint(block, x, x, use_reentrant=False)  # pyright: ignore
            else:
                x = block(x, x)
        return x


def habits(how: str) -> None:
    """What scripts do with a model whose parameters rest on the host, beside the same model in plain PyTorch."""
    model = Habits()
    twin = copy.deepcopy(model)
    engine = resting(model, "SameTwice")
    twin.to(engine.device)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5, foreach=False)
    former = SameTwice.forward
    allocated = []
    for number in range(3):
        x = torch.linspace(-1, 1, 24).view(3, 8).to(engine.device) + number
        for each in (engine.module, twin):
            each.how = how if how in ("ours", "torch's") else ""
        if how == "dropped":
            engine(x)
            torch.accelerator.synchronize()  # copies under way hold memory: it is the measurement that waits
            allocated.append(torch.get_device_module(engine.device).memory_allocated())
        if how == "another forward" and number == 1:
            SameTwice.forward = lambda block, q, k: block.inner(q) * k  # type: ignore[method-assign]
        try:
            engine.backward(engine(x).square().mean())
            twin(x).square().mean().backward()
        finally:
            SameTwice.forward = former  # type: ignore[method-assign]
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
        for (name, ours), theirs in zip(engine.module.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(whole(ours), theirs.cpu()), f"{how}, {number}: {name}"
    assert not allocated or allocated[2] <= max(allocated[:2]), allocated
    engine.destroy()


def _halve(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def delays(seed: int, kernel_us: int, copy_us: int) -> None:
    if torch.accelerator.current_accelerator().type == "sim":  # pyright: ignore
        import simulated_device

        simulated_device.native().set_delays(seed, kernel_us, copy_us)
