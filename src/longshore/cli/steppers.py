"""The steppers of the training loop, which treats them alike: longshore, its engine, and plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import longshore
from longshore import NoCheckpointError
from longshore.cli.settings import MUON_RATES, EngineSettings, OptimizerSettings
from longshore.seam import held_part, random_states, require, restore_random_states

_KEPT = 2  # checkpoints of a run


class MemoryUse(NamedTuple):
    """Bytes of one rank. On CUDA ``device`` is the largest amount that was ever allocated. On the CPU, whose memory is
    both host and device, the tensors that exist between ``step`` and ``zero_grad`` are counted."""

    device: int
    host: int


class StepOutcome(NamedTuple):
    """Result of ``step``.

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
    groups = [
        {"params": [item for item in named if item[1].ndim >= 2], "weight_decay": weight_decay},
        {"params": [item for item in named if item[1].ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def optimizer_groups(model: nn.Module, settings: OptimizerSettings) -> list[dict[str, Any]]:
    """Return parameter groups with names, of the optimizer of ``settings``. Vectors do not decay.

    Muon's learning rates are adjusted to those of AdamW (Liu et al., "Muon is scalable for LLM training", 2025), so
    that one rate is for all groups.
    """
    if settings.rule == "adamw":
        return decay_groups(model.named_parameters(), settings.weight_decay)
    decay = {"weight_decay": settings.weight_decay}
    return longshore.muon_groups(model, muon={**decay, **MUON_RATES}, adamw=decay, show=False)


def nbytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class TrainStepper:
    """Computes gradients and steps the weights of one model. Gradients are in ``.grad``, and torch clips them.

    A step accumulates some backwards and then calls ``step`` and ``zero_grad``.

    Attributes:
        optimizer: the optimizer, whose groups have the learning rate.
        forward: the callable for the forward pass: the model, or the engine around it.
        device: where forward and backward are computed.
    """

    def __init__(self, model: nn.Module, optimizer: Any, offload: bool) -> None:
        self.optimizer = optimizer
        self.forward: Any = model
        self._model = model
        self._offload = offload
        self._peaks = [group["lr"] for group in optimizer.param_groups]
        self.device = next(model.parameters()).device

    @property
    def lrs(self) -> list[float]:
        """The learning rates of the groups, each once."""
        return [*dict.fromkeys(group["lr"] for group in self.optimizer.param_groups)]

    def set_lr(self, rate_of: Callable[[float], float]) -> None:
        """Give each group the rate that follows from the one that it was made with."""
        for peak, group in zip(self._peaks, self.optimizer.param_groups, strict=True):
            group["lr"] = rate_of(peak)

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
        """Clip the gradients, and return their norm before clipping: a tensor of zero dimensions."""
        return nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)

    def apply(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def memory(self) -> MemoryUse:
        state = self.state_bytes()
        host = state if self._offload else 0
        parameters = [parameter for parameter in self._model.parameters() if parameter.device.type == "cpu"]
        values = nbytes(map(held_part, parameters)) + nbytes(parameter.grad for parameter in parameters)
        if self.device.type != "cpu":
            return MemoryUse(torch.get_device_module(self.device).max_memory_allocated(self.device), host + values)
        return MemoryUse(state - host + values, host)

    def state_bytes(self) -> int:
        """Return the bytes that the optimizer takes."""
        return sum(self.optimizer.host_bytes().values())

    def save(self, folder: Path, tag: str, values: Mapping[str, Any]) -> None:
        """Save a checkpoint asynchronously, with ``values``."""
        values = {**values, "random": random_states(self.device)}
        longshore.save(folder, self._model, self.optimizer, tag, values, keep_last=_KEPT, async_save=True)

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint that was saved last is on the disk."""
        longshore.wait_for_checkpoint()

    def load(self, folder: Path) -> Mapping[str, Any] | None:
        """Load the newest whole checkpoint, and return the values saved with it; None if there is no checkpoint."""
        try:
            values = longshore.load(folder, self._model, self.optimizer)
        except NoCheckpointError:
            return None
        restore_random_states(values["random"], self.device)
        return values

    def close(self) -> None:
        """End training, on all ranks."""


class LongshoreStepper(TrainStepper):
    """``longshore.AdamW`` or ``longshore.Muon``, which with ``release_gradients`` keeps the gradients and clips them.

    Args:
        stream: of the model, if its parameters rest on the host.
    """

    def __init__(self, model: nn.Module, settings: OptimizerSettings, stream: longshore.Stream | None = None) -> None:
        offload = longshore.Offload(
            device="cpu" if settings.offload else "none",
            speculation_memory=settings.speculation_memory,
            accumulate=settings.accumulate,  # pyright: ignore[reportArgumentType]
            states=settings.states,
            states_seed=settings.states_seed,
        )
        kind: Any = longshore.Muon if settings.rule == "muon" else longshore.AdamW  # the signatures differ
        optimizer = kind(
            optimizer_groups(model, settings),
            lr=settings.lr,
            release_gradients=settings.release_gradients,
            offload=offload,
        )
        super().__init__(model, optimizer, settings.offload)
        if stream is not None:
            self.device = stream.device
        self._released = settings.release_gradients

    def clip(self, max_norm: float) -> Tensor:
        return self.optimizer.clip_grad_norm_(max_norm) if self._released else super().clip(max_norm)


class _PlainOptimizers:
    """Torch's optimizers, one for the groups of each kind, in place of one optimizer."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float) -> None:
        kinds: dict[bool, list[dict[str, Any]]] = {}
        for group in groups:
            kinds.setdefault(group.pop("use_muon", False), []).append(group)
        if True in kinds:
            require("torch.optim.Muon")
        self._optimizers: list[Any] = [
            torch.optim.Muon(own, lr=lr) if is_muons else torch.optim.AdamW(own, lr=lr, fused=True)
            for is_muons, own in kinds.items()
        ]
        self.param_groups = [group for each in self._optimizers for group in each.param_groups]

    def step(self) -> None:
        for each in self._optimizers:
            each.step()

    def state_values(self) -> list[Any]:
        states = [state for each in self._optimizers for state in each.state.values()]
        return [value for state in states for value in state.values()]


class PlainStepper(TrainStepper):
    """``torch.optim.AdamW(fused=True)``, and ``torch.optim.Muon`` beside it if that is asked for. For dtypes other than
    fp32 it works as such loops usually do by hand: step fp32 masters with fp32 gradients, and cast them back.

    Args:
        exact_norm: sum the norm in float64 and round it once, as longshore does; torch sums in float32.
    """

    def __init__(self, model: nn.Module, settings: OptimizerSettings, exact_norm: bool = False) -> None:
        self._masters: list[tuple[nn.Parameter, nn.Parameter, Tensor]] = []
        groups = optimizer_groups(model, settings)
        if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
            for group in groups:
                group["params"] = [(name, self._master_of(parameter)) for name, parameter in group["params"]]
        super().__init__(model, _PlainOptimizers(groups, settings.lr), offload=False)
        self._exact_norm = exact_norm

    def _master_of(self, parameter: nn.Parameter) -> nn.Parameter:
        master = nn.Parameter(parameter.detach().to(torch.float32, copy=True))
        self._masters.append((parameter, master, torch.empty_like(master)))
        return master

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        if not self._exact_norm:
            return super().clip(max_norm)
        gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        squares = torch.stack([gradient.double().square().sum() for gradient in gradients])
        norm = squares.sum().sqrt().float()
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(coefficient)
        return norm

    @torch.no_grad()
    def apply(self) -> None:
        for parameter, master, gradient in self._masters:
            master.grad = None if parameter.grad is None else gradient.copy_(parameter.grad)
        self.optimizer.step()
        for parameter, master, _ in self._masters:
            parameter.copy_(master)

    def zero_grad(self) -> None:
        self._model.zero_grad()

    def state_bytes(self) -> int:
        values = self.optimizer.state_values()
        own = [tensor for _, *tensors in self._masters for tensor in tensors]
        return nbytes([*(value for value in values if isinstance(value, Tensor)), *own])


class EngineStepper(TrainStepper):
    """``longshore.initialize``. Every rank makes one, and they broadcast the weights of rank 0.

    Args:
        model: the model, which stays the same object.
        settings: the engine's settings, resolved for the ranks.
    """

    def __init__(self, model: nn.Module, settings: EngineSettings) -> None:
        config = settings.config
        assert config.optimizer is not None
        groups = decay_groups(model.named_parameters(), config.optimizer.weight_decay)
        self._engine = longshore.initialize(model=model, model_parameters=groups, config=config).engine
        super().__init__(model, self._engine.optimizer, config.offload_device == "cpu")
        self.forward = self._engine
        self.device = self._engine.device
        self._stops_at_overflow = settings.stops_at_overflow

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss, scale_wrt_gas=False)

    def step(self, max_norm: float) -> StepOutcome:
        """Clip as the configuration says, from which ``max_norm`` comes, and step."""
        assert max_norm == (self._engine.config.gradient_clipping or 0.0)
        self._engine.step()
        applied = self._engine.was_step_applied()
        return StepOutcome(self._engine.get_global_grad_norm(), applied, not applied and not self._stops_at_overflow)

    def zero_grad(self) -> None:
        """Do nothing: gradients leave ``.grad`` during backward."""

    def save(self, folder: Path, tag: str, values: Mapping[str, Any]) -> None:
        self._engine.save_checkpoint(folder, tag, values, keep_last=_KEPT, async_save=True)

    def wait_for_checkpoint(self) -> None:
        self._engine.wait_for_checkpoint()

    def load(self, folder: Path) -> Mapping[str, Any] | None:
        try:
            return self._engine.load_checkpoint(folder)[1]
        except NoCheckpointError:
            return None

    def close(self) -> None:
        self._engine.destroy()


def make_stepper(model: nn.Module, settings: OptimizerSettings, stream: longshore.Stream | None = None) -> TrainStepper:
    """Return the stepper without the engine that ``settings`` ask for; ``stream``: as in :class:`LongshoreStepper`."""
    return PlainStepper(model, settings) if settings.plain else LongshoreStepper(model, settings, stream)
