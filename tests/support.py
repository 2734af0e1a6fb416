"""What many tests share: the plain loop that everything is compared with, and small models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import longshore
from longshore.kernels import UNSCALED, Kernels, Scale, total_of_blocks
from longshore.kernels.reference import rule_step
from longshore.layout.tiles import Spec, TileLayout, tile_runs
from longshore.optim.rules.lion import LionRule


class PlainLion(torch.optim.Optimizer):
    """Lion, which torch does not have: the oracle's step on each parameter."""

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-4,
        betas: Any = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
            rule = LionRule(lr, beta1, beta2, group["weight_decay"], maximize=group["maximize"])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    before = state.get("exp_avg", torch.zeros_like(parameter))
                    master, state["exp_avg"] = rule_step((parameter, before), parameter.grad, rule)
                    state["step"] = state.get("step", 0) + 1
                    parameter.copy_(master)


class Kind(NamedTuple):
    """An optimizer of ours, and its plain twin."""

    name: str
    """In ``longshore``, and in ``torch.optim``."""
    states: tuple[str, ...]
    options: dict[str, Any]
    """With which it does not take its easy paths."""

    def plain(self) -> type[torch.optim.Optimizer]:
        return PlainLion if self.name == "Lion" else getattr(torch.optim, self.name)

    def make(self, parameters: Any, **options: Any) -> Any:
        return getattr(longshore, self.name)(parameters, **{**self.options, **options})

    def loop(self, parameters: Any, **options: Any) -> PlainLoop:
        return PlainLoop(parameters, self.plain(), **{**self.options, **options})


_BETAS = {"betas": (0.8, 0.95), "weight_decay": 0.1}
KINDS = (
    Kind("AdamW", ("exp_avg", "exp_avg_sq"), {"lr": 3e-2, "eps": 1e-6, **_BETAS}),
    Kind("Adam", ("exp_avg", "exp_avg_sq"), {"lr": 3e-2, "eps": 1e-6, **_BETAS}),
    Kind("Lion", ("exp_avg",), {"lr": 1e-2, **_BETAS}),
    Kind("Adagrad", ("sum",), {"lr": 3e-2, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1}),
    Kind("SGD", ("momentum_buffer",), {"lr": 1e-3, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    Kind("SGD", (), {"lr": 1e-3, "weight_decay": 0.1}),
)
KIND_NAMES = [kind.name if kind.states or kind.name != "SGD" else "SGD_without_momentum" for kind in KINDS]


_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD)


def whole(parameter: Tensor) -> Tensor:
    """All of a parameter, of which this rank may have a shard only; every rank has to ask."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # pyright: ignore


class PlainLoop:
    """Plain PyTorch: one of torch's CPU optimizers on float32 masters; the fused one where there is one.

    torch rounds some states differently in the last ``numel % 16`` elements of
    a tensor (its scalar tail; 64 are enough for optimizers that are not fused),
    so each master is padded.

    Args:
        groups: parameters, or torch's groups. The parameters are updated.
        kind: of ``torch.optim``, or :class:`PlainLion`.
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
        how = {"fused": True} if kind in _FUSED else {} if kind is PlainLion else {"foreach": False}
        self.optimizer = kind(self._groups, **how, **defaults)

    @staticmethod
    def _padded(values: Tensor) -> Tensor:
        flat = torch.zeros(max(64, -(-values.numel() // 64) * 64), dtype=torch.float32)
        flat[: values.numel()] = values.reshape(-1)
        return flat

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def refresh_all(self) -> None:
        for index in range(len(self.parameters)):
            self.refresh(index)

    def refresh(self, index: int) -> None:
        """Take the parameter as the master, where it is not the rounded master."""
        parameter, master = self.parameters[index], self.masters[index]
        with torch.no_grad():
            flat = parameter.detach().reshape(-1).cpu()
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
        self._step()
        for parameter, master, gradient in zip(self.parameters, self.masters, gradients, strict=True):
            if gradient is not None:
                parameter.copy_(master[: parameter.numel()].view(parameter.shape))

    def _step(self) -> None:
        if self._kind is not torch.optim.SGD:
            self.optimizer.step()
            return
        # torch's fused SGD takes a group's parameters to be all at their first
        # step, or none: those without a buffer take their step apart.
        gradients = [master.grad for master in self.masters]
        first = ["momentum_buffer" not in self.optimizer.state[master] for master in self.masters]
        for turn in (True, False):
            for master, gradient, is_first in zip(self.masters, gradients, first, strict=True):
                master.grad = gradient if is_first is turn else None
            self.optimizer.step()

    def step_on_grads(self, scale: float = 1.0) -> None:
        """One step on the parameters' ``.grad``, which is then cleared."""
        self.step([parameter.grad for parameter in self.parameters], scale)
        for parameter in self.parameters:
            parameter.grad = None

    def state(self, index: int, name: str) -> Tensor:
        """One of the parameter's states, in its shape."""
        state, parameter = self.optimizer.state[self.masters[index]], self.parameters[index]
        return state[name][: parameter.numel()].view(parameter.shape)

    def moments(self, index: int) -> tuple[Tensor, Tensor]:
        """The parameter's first and second moment, in its shape."""
        return self.state(index, "exp_avg"), self.state(index, "exp_avg_sq")


def small_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Matrices, biases and a norm, of odd sizes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(19, 33), nn.GELU(), nn.LayerNorm(33), nn.Linear(33, 7)).to(dtype)


def model_of_sixteens(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Every parameter a multiple of 16 elements, so that torch itself has no scalar tail."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(19, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16)).to(dtype)


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


def sum_of_squares(kernels: Kernels, parameters: Sequence[Sequence[Tensor]], scale: Scale = UNSCALED) -> float:
    """Of all elements of all parameters, by the kernels' blocks."""
    return total_of_blocks(kernels.block_sums(parameters, scale))


def plan_tiles(parameters: Iterable[tuple[int, int]], tile_numel: int, first_index: int = 0) -> tuple[TileLayout, ...]:
    """Each tile of ``(index, numel)``, as the store makes them."""
    tiles: list[TileLayout] = []
    for run in tile_runs((Spec(index, numel, torch.float32) for index, numel in parameters), tile_numel):
        tiles += run.layouts(first_index + len(tiles))
    return tuple(tiles)
