"""Who steps the weights: longshore, its engine (engine_stepper.py), or plain PyTorch (plain.py).

The loop does not ask which.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from longshore.cli.settings import OptimizerSettings
from longshore.optim.shards import held_part


class Memory(NamedTuple):
    """Bytes. On CUDA ``device`` is the most that was ever allocated; on the CPU, where the host's memory also
    plays the device, both are counted from the tensors that exist between ``step`` and ``zero_grad``."""

    device: int
    host: int


class Stepped(NamedTuple):
    """``grad_norm``: over all gradients, before clipping; None where none was measured. ``applied``: the weights
    have changed. ``overflow``: they have not, and a dynamic loss scale was lowered for it."""

    grad_norm: float | None
    applied: bool = True
    overflow: bool = False


class Stepper(Protocol):
    """One window: backwards, then ``step``, ``zero_grad``."""

    @property
    def lr(self) -> float: ...

    def set_lr(self, lr: float) -> None: ...

    def backward(self, loss: Tensor) -> None:
        """``loss``: the mean over a batch, divided by the number of backwards in this window."""
        ...

    def step(self, max_norm: float) -> Stepped:
        """Clip (0: do not), and step unless the norm is no finite number."""
        ...

    def zero_grad(self) -> None: ...

    def memory(self) -> Memory: ...


def decay_groups(named: Iterable[tuple[str, Any]], weight_decay: float) -> list[dict[str, Any]]:
    """Groups for an optimizer: matrices decay, vectors (norms, biases) do not. Empty groups are left out."""
    named = list(named)
    matrices = [item for item in named if item[1].ndim >= 2]
    vectors = [item for item in named if item[1].ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def device_memory(model: nn.Module, state_bytes: int) -> int:
    """Bytes on the model's device; ``state_bytes`` are those of the optimizer there, in use only on the CPU."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    parameters = list(model.parameters())
    gradients = (parameter.grad for parameter in parameters)
    return state_bytes + nbytes(map(held_part, parameters)) + nbytes(gradients)


def nbytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class LocalStepper(ABC):
    """One process without the engine: gradients in ``.grad``, torch's clipping."""

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
        loss.backward()

    def step(self, max_norm: float) -> Stepped:
        grad_norm = self.clip(max_norm).item() if max_norm else None
        if grad_norm is not None and not math.isfinite(grad_norm):
            return Stepped(grad_norm, applied=False)
        self.apply()
        return Stepped(grad_norm)

    def clip(self, max_norm: float) -> Tensor:
        """The norm before. Zero dimensions."""
        return nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)

    def apply(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    @abstractmethod
    def memory(self) -> Memory: ...


class LongshoreStepper(LocalStepper):
    """``longshore.AdamW``; gradients in ``.grad`` until ``step``, and clipped there as in plain PyTorch."""

    def __init__(self, model: nn.Module, settings: OptimizerSettings) -> None:
        import longshore

        super().__init__(model)
        self.optimizer = longshore.AdamW(
            decay_groups(model.named_parameters(), settings.weight_decay),
            lr=settings.lr,
            release_gradients=settings.release_gradients,
            offload=longshore.Offload(speculation_memory=settings.speculation_memory),
        )

    def memory(self) -> Memory:
        return Memory(device_memory(self._model, 0), sum(self.optimizer.host_bytes().values()))


class ReleasedGradientsStepper(LongshoreStepper):
    """``longshore.AdamW`` with gradients on the host already, so the norm and the clipping are its own."""

    def clip(self, max_norm: float) -> Tensor:
        return self.optimizer.clip_grad_norm_(max_norm)


def make_stepper(model: nn.Module, settings: OptimizerSettings) -> Stepper:
    """What ``settings.offload`` and ``settings.release_gradients`` ask for."""
    from longshore.cli.plain import make_plain_stepper

    if not settings.offload:
        return make_plain_stepper(model, settings)
    if settings.release_gradients:
        return ReleasedGradientsStepper(model, settings)
    return LongshoreStepper(model, settings)
