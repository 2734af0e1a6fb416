"""The same training in plain PyTorch, all state on the device: ``--no-offload``, and what the demo compares with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from longshore.cli.optimizers import LocalStepper, Memory, Stepper, decay_groups, device_memory, nbytes
from longshore.cli.settings import OptimizerSettings


def make_plain_stepper(model: nn.Module, settings: OptimizerSettings) -> Stepper:
    if all(parameter.dtype == torch.float32 for parameter in model.parameters()):
        return PlainStepper(model, settings)
    return MasterStepper(model, settings)


class PlainStepper(LocalStepper):
    """``torch.optim.AdamW(fused=True)`` on fp32 parameters."""

    def __init__(self, model: nn.Module, settings: OptimizerSettings) -> None:
        super().__init__(model)
        self.optimizer = torch.optim.AdamW(
            decay_groups(model.named_parameters(), settings.weight_decay), lr=settings.lr, fused=True
        )

    def memory(self) -> Memory:
        return Memory(device_memory(self._model, nbytes(_state_tensors(self.optimizer))), 0)


class ExactNormStepper(PlainStepper):
    """The same with the norm summed in float64 and rounded once, as longshore does; torch adds in float32."""

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        squares = torch.stack([gradient.double().square().sum() for gradient in gradients])
        norm = squares.sum().sqrt().float()
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(coefficient)
        return norm


class MasterStepper(LocalStepper):
    """The loop that people write by hand for bf16: fp32 masters and fp32 gradients for them, AdamW, cast back."""

    def __init__(self, model: nn.Module, settings: OptimizerSettings) -> None:
        super().__init__(model)
        self._pairs = [
            (parameter, nn.Parameter(parameter.detach().to(torch.float32, copy=True)))
            for parameter in model.parameters()
        ]
        self._gradients = [torch.empty_like(master) for _, master in self._pairs]
        named = [("", master) for _, master in self._pairs]
        self.optimizer = torch.optim.AdamW(
            [
                {**group, "params": [master for _, master in group["params"]]}
                for group in decay_groups(named, settings.weight_decay)
            ],
            lr=settings.lr,
            fused=True,
        )

    @torch.no_grad()
    def apply(self) -> None:
        for (parameter, master), gradient in zip(self._pairs, self._gradients, strict=True):
            master.grad = None if parameter.grad is None else gradient.copy_(parameter.grad)
        self.optimizer.step()
        for parameter, master in self._pairs:
            parameter.copy_(master)

    def zero_grad(self) -> None:
        for parameter, _ in self._pairs:
            parameter.grad = None

    def memory(self) -> Memory:
        state = nbytes(master for _, master in self._pairs) + nbytes(self._gradients)
        return Memory(device_memory(self._model, state + nbytes(_state_tensors(self.optimizer))), 0)


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
