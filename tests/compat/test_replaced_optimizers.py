"""Optimizers that Accelerate replaces by DeepSpeed's: only those with the same step, with all that they hold."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import longshore.compat.deepspeed as deepspeed
from compat.test_routes import SCRIPTS, run_deepspeed
from longshore.engine.optimizers import from_client

CONFIG = {"train_batch_size": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": 2}}


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def map_pytorch_optim_to_deepspeed(optimizer: Any) -> Any:
    """As Accelerate's, which needs an installed package of that name."""
    if isinstance(optimizer, torch.optim.Adagrad):
        return deepspeed.ops.adagrad.DeepSpeedCPUAdagrad(optimizer.param_groups)
    decoupled = isinstance(optimizer, torch.optim.AdamW) or optimizer.defaults.get("optim_bits") == 32
    return deepspeed.ops.adam.DeepSpeedCPUAdam(optimizer.param_groups, adamw_mode=decoupled)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4))]


class Inherits(torch.optim.Adam):
    """Subclass that adds what is no part of a step."""

    def __init__(self, params: Any, name: str = "mine", **options: Any) -> None:
        super().__init__(params, **options)
        self.name = name


class Decoupled(torch.optim.AdamW):
    pass


class OwnStep(torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class OwnStepDecoupled(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return None


class Wrapped(torch.optim.Adam):
    step: Any = functools.wraps(torch.optim.Adam.step)(lambda *_: None)


class OwnGradients(torch.optim.AdamW):
    """Subclass whose step is torch's on other gradients."""

    def _init_group(self, *lists: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = super()._init_group(*lists)
        lists[2][:] = [each.sign() for each in lists[2]]
        return found


class OwnStepAdagrad(torch.optim.Adagrad):
    def step(self, closure: Any = None) -> Any:
        return None


class OfBitsAndBytes(torch.optim.Optimizer):
    """As bitsandbytes' 32-bit AdamW, for which Accelerate knows DeepSpeed's."""

    __module__ = "bitsandbytes.optim.adamw"

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"optim_bits": 32})


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.Adagrad, Inherits, Decoupled, OfBitsAndBytes]
)
def test_those_with_the_same_step_are_replaced(kind: Any) -> None:
    for _ in range(2):  # torch wraps the step of a class when its first optimizer is made
        map_pytorch_optim_to_deepspeed(kind(parameters()))


@pytest.mark.parametrize("kind", [OwnStep, OwnStepDecoupled, Wrapped, OwnGradients, OwnStepAdagrad])
def test_a_subclass_with_another_step_is_refused(kind: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"replaces {kind.__name__}, which has .* by DeepSpeed's Ada.*train with torch\.optim\.Ada"
    ):
        map_pytorch_optim_to_deepspeed(kind(parameters()))


def test_another_optimizer_of_torch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"replaces SGD by DeepSpeed's Adam.*zero_force_ds_cpu_optimizer"):
        map_pytorch_optim_to_deepspeed(torch.optim.SGD(parameters(), lr=0.1))


def step_of_mine(self: Any, closure: Any = None) -> Any:
    return None


@pytest.mark.parametrize("door", [map_pytorch_optim_to_deepspeed, from_client])
def test_a_step_that_was_put_into_the_optimizer_is_refused(door: Any) -> None:
    optimizer = torch.optim.AdamW(parameters())
    optimizer.step = types.MethodType(step_of_mine, optimizer)
    with pytest.raises(ValueError, match=r"this AdamW has a step\(\) of its own"):
        door(optimizer)
    LambdaLR(optimizer, lambda _: 0.5)  # which wraps it
    with pytest.raises(ValueError, match=r"this AdamW has a step\(\) of its own"):
        door(optimizer)


@pytest.mark.parametrize("door", [map_pytorch_optim_to_deepspeed, from_client])
def test_what_schedules_and_wrappers_put_there_is_not(door: Any) -> None:
    optimizer: Any = torch.optim.AdamW(parameters())
    LambdaLR(optimizer, lambda _: 0.5)
    door(optimizer)
    optimizer = torch.optim.AdamW(parameters())
    step = optimizer.step
    optimizer.step = functools.wraps(step)(lambda closure=None: step(closure))  # as torch.compile() does
    door(optimizer)


def test_what_the_script_holds_is_the_engines() -> None:
    """State that was there, hooks, and what is done to the replaced optimizer later."""
    torch.manual_seed(0)
    model, frozen = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
    whole = nn.Sequential(model, frozen)
    plain_whole = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16, bias=False))
    plain_whole.load_state_dict(whole.state_dict())
    for each in (*frozen.parameters(), *plain_whole[1].parameters()):
        each.requires_grad_(False)
    plain = torch.optim.AdamW(plain_whole[0].parameters(), lr=0.1, fused=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    inputs = torch.randn(3, 16)
    calls: list[Any] = []

    def backward(of: nn.Module) -> Tensor:
        return of(inputs).square().sum()

    for mine, of in ((optimizer, whole), (plain, plain_whole)):
        backward(of).backward()
        mine.step()
        of.zero_grad()
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    engine = deepspeed.initialize(model=whole, optimizer=map_pytorch_optim_to_deepspeed(optimizer), config=CONFIG)[0]
    for step in range(3):
        if step == 1:
            for mine, of in ((optimizer, frozen), (plain, plain_whole[1])):
                mine.add_param_group({"params": list(of.requires_grad_(True).parameters()), "lr": 0.01})
        if step == 2:
            optimizer.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 0.05
        engine.backward(backward(whole))
        engine.step()
        backward(plain_whole).backward()
        plain.step()
        plain_whole.zero_grad()
        for found, expected in zip(whole.parameters(), plain_whole.parameters(), strict=True):
            assert torch.equal(found, expected), step
    assert len(calls) == 3
    for found, expected in zip(whole.parameters(), plain_whole.parameters(), strict=True):
        assert torch.equal(optimizer.state[found]["exp_avg"], plain.state[expected]["exp_avg"])
    engine.destroy()


@pytest.mark.slow
def test_accelerate_itself() -> None:
    script = str(SCRIPTS / "replaced.py")
    assert "stepped by Adam, as ['0']" in run_deepspeed(script, "Inherits")
    said = run_deepspeed(script, "Backwards")
    assert "refused: Accelerate replaces Backwards, which has a step of its own, by DeepSpeed's Adam" in said
