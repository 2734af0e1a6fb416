"""One infinity or NaN in the gradient of one parameter, in one backward, on one rank; run on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from support import PlainLoop, whole
from torch import Tensor, nn

import longshore
from engine.files import OPTIONS, assert_same, file, started
from engine.scenarios import HEADS, _mean, _sum, inputs, make_model

DTYPE = torch.float16
PARAMETERS = [name for name, parameter in make_model(DTYPE).named_parameters() if parameter.numel()]
SCALINGS: dict[str, dict[str, Any]] = {
    "static": {"loss_scale": 8},
    "dynamic": {"loss_scale": 0, "initial_scale_power": 3, "loss_scale_window": 1, "hysteresis": 1},
}
VALUES = [torch.inf, -torch.inf, torch.nan]


class Setup(NamedTuple):
    """``rank``: of ``world_size``, the one whose gradient overflows."""

    stage: int
    place: str
    world_size: int
    rank: int
    scaling: str
    clip: float | None = None


class Overflow(NamedTuple):
    """``micro``: the backward of a window of ``accumulation`` backwards; ``last``: element, or the first."""

    parameter: str
    accumulation: int
    micro: int
    value: float
    last: bool = False


@contextlib.contextmanager
def overflowing(parameter: nn.Parameter, overflow: Overflow) -> Iterator[None]:
    def spoil(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[-1 if overflow.last else 0] = overflow.value
        return gradient

    handle = parameter.register_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


def bits_of(engine: Any) -> dict[str, Tensor]:
    """Everything that a step changes: parameters, masters, moments and step counts."""
    held = {name: whole(parameter.detach()).clone() for name, parameter in engine.module.named_parameters()}
    for key, entries in engine.optimizer.state_dict()["state"].items():
        held.update({f"{key}.{name}": torch.as_tensor(value).clone() for name, value in entries.items()})
    held.update(
        {f"steps of {record.name}": torch.tensor(record.step) for record in engine.optimizer._core.members.records}
    )
    return held


def mean_gradients(twin: nn.Module, setup: Setup, step: int, accumulation: int, scale: float) -> list[Tensor | None]:
    """What the window comes to over all ranks, with the losses scaled."""
    parameters = list(twin.parameters())

    def one(micro: int, rank: int) -> list[Tensor | None]:
        loss = twin(inputs(step, micro, rank, DTYPE), HEADS)
        loss = loss / accumulation if accumulation > 1 else loss
        found = torch.autograd.grad(loss.float() * scale, parameters, allow_unused=True)
        return [None if gradient is None else gradient.float() for gradient in found]

    brought = [[one(micro, rank) for rank in range(setup.world_size)] for micro in range(accumulation)]
    ranks, micros = range(setup.world_size), range(accumulation)
    if setup.stage >= 2:
        return [
            _sum([_mean([brought[micro][rank][index] for rank in ranks]) for micro in micros])
            for index in range(len(parameters))
        ]
    return [
        _mean([_sum([brought[micro][rank][index] for micro in micros]) for rank in ranks])
        for index in range(len(parameters))
    ]


class Run:
    """An engine and its plain twin, window by window."""

    def __init__(self, engine: Any, setup: Setup, rank: int) -> None:
        self.engine, self.setup, self.rank = engine, setup, rank
        self.twin = make_model(DTYPE)
        self.loop = PlainLoop(self.twin.parameters(), **OPTIONS)
        self.step = 0

    def _train(self, accumulation: int, overflow: Overflow | None) -> None:
        self.engine.set_gradient_accumulation_steps(accumulation)
        for micro in range(accumulation):
            loss = self.engine(inputs(self.step, micro, self.rank, DTYPE), HEADS)
            bad = overflow is not None and micro == overflow.micro and self.rank == self.setup.rank
            parameter = dict(self.engine.module.named_parameters())[overflow.parameter] if overflow else None
            with overflowing(parameter, overflow) if bad and parameter is not None else contextlib.nullcontext():
                self.engine.backward(loss)
            self.engine.step()
        self.step += 1

    def good(self, accumulation: int) -> None:
        scale, step = self.engine.loss_scale, self.step
        self._train(accumulation, None)
        assert self.engine.was_step_applied()
        coefficient = 1.0
        if self.setup.clip is not None:
            norm = torch.tensor(self.engine.get_global_grad_norm())
            coefficient = float(torch.clamp(self.setup.clip / (norm + 1e-6), max=1.0))
            assert coefficient < 1.0
        gradients = mean_gradients(self.twin, self.setup, step, accumulation, scale)
        self.loop.step(gradients, coefficient / scale)
        assert_same(self.engine.module, self.twin, f"window {step}")

    def bad(self, overflow: Overflow) -> None:
        before, scale, skipped = bits_of(self.engine), self.engine.loss_scale, self.engine.skipped_steps
        self._train(overflow.accumulation, overflow)
        assert not self.engine.was_step_applied(), overflow
        assert self.engine.skipped_steps == skipped + 1
        assert self.engine.loss_scale == (scale / 2 if self.setup.scaling == "dynamic" else scale)
        after = bits_of(self.engine)
        assert before.keys() == after.keys()
        for name, values in before.items():
            assert torch.equal(values, after[name]), (overflow, name)


def skips(setup: Setup, overflows: list[Overflow], begin_with_good: bool) -> None:
    """Each overflow is skipped on this rank, leaves every bit, and the windows after it are the plain loop's."""
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_initialized() else 0
    config = file(
        fp16={"enabled": True, **SCALINGS[setup.scaling]},
        gradient_clipping=setup.clip or 0.0,
        zero_optimization={
            "stage": setup.stage,
            "reduce_bucket_size": 1100,
            "offload_optimizer": {"device": "none" if setup.place == "none" else "cpu"},
        },
    )
    transfer = longshore.SimulatedTransfer(seed=rank) if setup.place == "simulated" else None
    offload = longshore.Offload(100, 1, transfer=transfer, device="none" if setup.place == "none" else "cpu")
    with started(config, make_model(torch.float32), offload=offload) as engine:
        run = Run(engine, setup, rank)
        if begin_with_good:
            run.good(1)
        for overflow in overflows:
            run.bad(overflow)
            run.good(overflow.accumulation)
            run.good(1)  # two in a row double a dynamic scale again
        assert engine.skipped_steps == len(overflows)
