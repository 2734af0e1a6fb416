"""What many tests share: the plain loop that everything is compared with, and small models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import longshore


class PlainLoop:
    """Plain PyTorch: torch's CPU fused Adam or AdamW on float32 masters.

    torch rounds the second moment differently in the last ``numel % 16``
    elements of a tensor (its scalar tail), so each master is padded to 16.

    Args:
        groups: parameters, or torch's groups. The parameters are updated.
        kind: ``torch.optim.AdamW`` or ``torch.optim.Adam``.
    """

    def __init__(
        self, groups: Iterable[Any], kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **defaults: Any
    ) -> None:
        entries = list(groups)
        if not isinstance(entries[0], dict):
            entries = [{"params": entries}]
        self._kind, self._defaults = kind, defaults
        self.parameters: list[nn.Parameter] = []
        self.masters: list[Tensor] = []
        self._groups = []
        for entry in entries:
            params = list(entry["params"])
            masters = [self._padded(parameter.detach().float()).requires_grad_() for parameter in params]
            self.parameters += params
            self.masters += masters
            self._groups.append({**entry, "params": masters})
        self.optimizer = kind(self._groups, fused=True, **defaults)

    @staticmethod
    def _padded(values: Tensor) -> Tensor:
        flat = torch.zeros(max(16, -(-values.numel() // 16) * 16), dtype=torch.float32)
        flat[: values.numel()] = values.reshape(-1)
        return flat

    def refresh(self, index: int) -> None:
        """Take the parameter as the master, where it is not the rounded master."""
        parameter, master = self.parameters[index], self.masters[index]
        with torch.no_grad():
            flat = parameter.detach().reshape(-1)
            mine = master[: flat.numel()]
            mine.copy_(torch.where(mine.to(flat.dtype) == flat, mine, flat.float()))

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None], scale: float = 1.0) -> None:
        """One step on these gradients, multiplied in float32 by ``scale``; None: idle."""
        for master, gradient in zip(self.masters, gradients, strict=True):
            if gradient is None:
                master.grad = None
            else:
                factor = torch.tensor(scale, dtype=torch.float32)
                master.grad = self._padded(gradient.detach().float() * factor)
        self.optimizer.step()
        for parameter, master, gradient in zip(self.parameters, self.masters, gradients, strict=True):
            if gradient is not None:
                parameter.copy_(master[: parameter.numel()].view(parameter.shape))

    def step_on_grads(self, scale: float = 1.0) -> None:
        """One step on the parameters' ``.grad``, which is then cleared."""
        self.step([parameter.grad for parameter in self.parameters], scale)
        for parameter in self.parameters:
            parameter.grad = None

    def moments(self, index: int) -> tuple[Tensor, Tensor]:
        """The parameter's first and second moment, in its shape."""
        state, parameter = self.optimizer.state[self.masters[index]], self.parameters[index]
        numel = parameter.numel()
        return state["exp_avg"][:numel].view(parameter.shape), state["exp_avg_sq"][:numel].view(parameter.shape)


def small_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Matrices, biases and a norm, of odd sizes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(19, 33), nn.GELU(), nn.LayerNorm(33), nn.Linear(33, 7)).to(dtype)


def twins(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[nn.Sequential, nn.Sequential]:
    """Two models with the same weights."""
    return small_model(dtype, seed), small_model(dtype, seed)


def batch(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(5, 19, generator=generator).to(dtype)


def loss_of(model: nn.Module, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return model(batch(step, dtype)).float().pow(2).sum()


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def simulated(seed: int = 0, tile_numel: int = 100, **options: Any) -> longshore.Offload:
    """Offload to the simulated device, in tiles small enough that every model has several."""
    return longshore.Offload(tile_numel=tile_numel, transfer=longshore.SimulatedTransfer(seed=seed, **options))
