"""The steppers of the training loop, which treats them alike: longshore, its engine, and plain PyTorch.

A step accumulates some backwards and then calls ``step`` and ``zero_grad``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import longshore
from longshore.cli.settings import EngineSettings, OptimizerSettings
from longshore.optim.shards import held_part


class MemoryUse(NamedTuple):
    """Bytes of one rank. On CUDA ``device`` is the largest amount that was ever allocated. On the CPU, whose memory is
    both host and device, the tensors are counted that exist between ``step`` and ``zero_grad``."""

    device: int
    host: int


class StepOutcome(NamedTuple):
    """What ``step`` did.

    Attributes:
        grad_norm: over all gradients, before clipping; None if none was measured.
        applied: whether the weights have changed.
        overflow: the step was skipped, and a dynamic loss scale was lowered.
    """

    grad_norm: float | None
    applied: bool = True
    overflow: bool = False


def decay_groups(named: Iterable[tuple[str, Any]], weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups: matrices decay, vectors (norms, biases) do not. Empty groups are left out."""
    named = list(named)
    matrices = [item for item in named if item[1].ndim >= 2]
    vectors = [item for item in named if item[1].ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def device_memory(model: nn.Module, state_bytes: int) -> int:
    """Return the bytes on the model's device; on the CPU ``state_bytes`` are added for the optimizer."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    parameters = list(model.parameters())
    gradients = (parameter.grad for parameter in parameters)
    return state_bytes + nbytes(map(held_part, parameters)) + nbytes(gradients)


def nbytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class TrainStepper(ABC):
    """Computes gradients and steps the weights of one model. Gradients are in ``.grad``, and torch clips them."""

    optimizer: Any

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @property
    def lr(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients of ``loss``: the mean over a batch, divided by the number of backwards in the step."""
        loss.backward()

    def step(self, max_norm: float) -> StepOutcome:
        """Clip the gradients to ``max_norm`` (0: do not clip), and step unless their norm is NaN or infinite."""
        grad_norm = self.clip(max_norm).item() if max_norm else None
        if grad_norm is not None and not math.isfinite(grad_norm):
            return StepOutcome(grad_norm, applied=False)
        self.apply()
        return StepOutcome(grad_norm)

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients, and return their norm before: a tensor of zero dimensions."""
        return nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)

    def apply(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    @abstractmethod
    def memory(self) -> MemoryUse: ...


class LongshoreStepper(TrainStepper):
    """``longshore.AdamW``. With ``release_gradients`` it has the gradients, and clips them."""

    def __init__(self, model: nn.Module, settings: OptimizerSettings) -> None:
        super().__init__(model)
        self._settings = settings
        self.optimizer = longshore.AdamW(
            decay_groups(model.named_parameters(), settings.weight_decay),
            lr=settings.lr,
            release_gradients=settings.release_gradients,
            offload=longshore.Offload(
                device="cpu" if settings.offload else "none", speculation_memory=settings.speculation_memory
            ),
        )

    def clip(self, max_norm: float) -> Tensor:
        if self._settings.release_gradients:
            return self.optimizer.clip_grad_norm_(max_norm)
        return super().clip(max_norm)

    def memory(self) -> MemoryUse:
        return _memory(self._model, self.optimizer, self._settings.offload)


class PlainStepper(TrainStepper):
    """``torch.optim.AdamW(fused=True)``. Dtypes other than fp32 have the usual loop written by hand: it steps fp32
    masters with fp32 gradients, and casts them back."""

    def __init__(self, model: nn.Module, settings: OptimizerSettings) -> None:
        super().__init__(model)
        named, self._pairs = list(model.named_parameters()), []
        if any(parameter.dtype != torch.float32 for _, parameter in named):
            masters = [nn.Parameter(parameter.detach().to(torch.float32, copy=True)) for _, parameter in named]
            self._pairs = [(parameter, master) for (_, parameter), master in zip(named, masters, strict=True)]
            self._gradients = [torch.empty_like(master) for master in masters]
            named = [(name, master) for (name, _), master in zip(named, masters, strict=True)]
        self.optimizer = torch.optim.AdamW(decay_groups(named, settings.weight_decay), lr=settings.lr, fused=True)

    @torch.no_grad()
    def apply(self) -> None:
        for index, (parameter, master) in enumerate(self._pairs):
            master.grad = None if parameter.grad is None else self._gradients[index].copy_(parameter.grad)
        self.optimizer.step()
        for parameter, master in self._pairs:
            parameter.copy_(master)

    def zero_grad(self) -> None:
        self._model.zero_grad()

    def memory(self) -> MemoryUse:
        state = [value for each in self.optimizer.state.values() for value in each.values()]
        state = [value for value in state if isinstance(value, Tensor)]
        if self._pairs:
            state += [*(master for _, master in self._pairs), *self._gradients]
        return MemoryUse(device_memory(self._model, nbytes(state)), 0)


class ExactNormStepper(PlainStepper):
    """:class:`PlainStepper` with the norm summed in float64 and rounded once, as longshore does; torch sums in
    float32."""

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        squares = torch.stack([gradient.double().square().sum() for gradient in gradients])
        norm = squares.sum().sqrt().float()
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(coefficient)
        return norm


class EngineStepper(TrainStepper):
    """``longshore.initialize``. Every rank makes one, and they broadcast the weights of rank 0.

    Args:
        model: stays the same object.
        settings: resolved for the ranks.
    """

    def __init__(self, model: nn.Module, settings: EngineSettings) -> None:
        super().__init__(model)
        config = settings.config
        assert config.optimizer is not None
        groups = decay_groups(model.named_parameters(), config.optimizer.weight_decay)
        self.engine: longshore.Engine = longshore.initialize(model=model, model_parameters=groups, config=config).engine
        self.optimizer = self.engine.optimizer
        self._stops_at_overflow = settings.stops_at_overflow

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)

    def step(self, max_norm: float) -> StepOutcome:
        """Clip as the configuration says, from which ``max_norm`` comes, and step."""
        assert max_norm == (self.engine.config.gradient_clipping or 0.0)
        self.engine.step()
        applied = self.engine.was_step_applied()
        return StepOutcome(self.engine.get_global_grad_norm(), applied, not applied and not self._stops_at_overflow)

    def zero_grad(self) -> None:
        """Do nothing: gradients leave ``.grad`` during backward."""

    def memory(self) -> MemoryUse:
        return _memory(self._model, self.optimizer, self.engine.config.offload_device == "cpu")


def make_stepper(model: nn.Module, settings: OptimizerSettings) -> TrainStepper:
    """Return the stepper without the engine that ``settings`` ask for."""
    return PlainStepper(model, settings) if settings.plain else LongshoreStepper(model, settings)


def _memory(model: nn.Module, optimizer: Any, offload: bool) -> MemoryUse:
    state = sum(optimizer.host_bytes().values())
    return MemoryUse(device_memory(model, 0), state) if offload else MemoryUse(device_memory(model, state), 0)
