"""Plain PyTorch's Muon and AdamW on float32 masters, which longshore's Muon is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from support import PlainLoop
from torch import Tensor, nn

_muon = getattr(torch.optim, "_muon", None)  # torch 2.8 has none
_newton_schulz = getattr(_muon, "_zeropower_via_newtonschulz", None)


class PlainMuon:
    """``torch.optim.Muon`` on the matrices and ``torch.optim.AdamW`` on the rest, stepped on float32 masters.

    Args:
        groups: as for ``longshore.Muon``; a group with ``split`` has a master for each matrix.
        on: device on which matrices are made orthogonal, by torch's own function; everything else is on the CPU.
        defaults: options of ``torch.optim.Muon``.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]], on: torch.device | None = None, **defaults: Any) -> None:
        self._on = on
        self._matrices: list[tuple[nn.Parameter, list[Tensor], Mapping[str, Any]]] = []
        muon_groups, others = [], []
        for group in groups:
            options = {name: value for name, value in group.items() if name not in ("params", "use_muon")}
            if not group.get("use_muon", True):
                others.append({**options, "params": list(group["params"])})
                continue
            masters: list[Tensor] = []
            for parameter in group["params"]:
                parts = [part.clone().requires_grad_() for part in parts_of(parameter.detach().float().cpu(), group)]
                self._matrices.append((parameter, parts, group))
                masters += parts
            torchs = {name: value for name, value in options.items() if not name.startswith("split")}
            muon_groups.append({**torchs, "params": masters})
        self.muon = torch.optim.Muon(muon_groups, **defaults)
        self.others = PlainLoop(others) if others else None

    @torch.no_grad()
    def step(self, gradients: Mapping[nn.Parameter, Tensor | None], scale: float = 1.0) -> None:
        """One step on these gradients, multiplied in float32 by ``scale``; None: idle."""
        factor = torch.tensor(scale, dtype=torch.float32)
        for parameter, masters, group in self._matrices:
            gradient = gradients[parameter]
            parts = (
                [None] * len(masters) if gradient is None else parts_of(gradient.detach().float().cpu() * factor, group)
            )
            for master, part in zip(masters, parts, strict=True):
                master.grad = None if part is None else part.contiguous()
        with mock.patch.object(_muon, "_zeropower_via_newtonschulz", self._newton_schulz):
            self.muon.step()
        for parameter, masters, group in self._matrices:
            if gradients[parameter] is not None:
                for target, master in zip(parts_of(parameter, group), masters, strict=True):
                    target.copy_(master)
        if self.others is not None:
            self.others.step([gradients[each] for each in self.others.parameters], scale)

    def _newton_schulz(self, gradient: Tensor, *arguments: Any) -> Tensor:
        if self._on is None:
            return _newton_schulz(gradient, *arguments)  # pyright: ignore
        return _newton_schulz(gradient.bfloat16().to(self._on), *arguments).cpu()

    def step_on_grads(self, scale: float = 1.0) -> None:
        """One step on what is in ``.grad``, which is then set to None."""
        parameters = [each for each, _, _ in self._matrices] + (self.others.parameters if self.others else [])
        self.step({each: each.grad for each in parameters}, scale)
        for each in parameters:
            each.grad = None

    def momentum(self, parameter: nn.Parameter) -> Tensor:
        """The momentum of a parameter that is one matrix."""
        master = next(masters[0] for each, masters, _ in self._matrices if each is parameter)
        return self.muon.state[master]["momentum_buffer"]

    def refresh_all(self) -> None:
        """Take each element of a parameter that is not its rounded master as the master."""
        with torch.no_grad():
            for parameter, masters, group in self._matrices:
                for part, master in zip(parts_of(parameter.detach().cpu(), group), masters, strict=True):
                    master.copy_(torch.where(master.to(part.dtype) == part, master, part.float()))
        if self.others is not None:
            self.others.refresh_all()


class MuonLoop:
    """A :class:`PlainMuon` that is used as a :class:`PlainLoop`: its parameters are in the order of the groups."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], on: torch.device | None = None, **defaults: Any) -> None:
        self._plain = PlainMuon(groups, on, **defaults)
        self.parameters: list[nn.Parameter] = [each for group in groups for each in group["params"]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [*self._plain.muon.param_groups, *(self._plain.others.param_groups if self._plain.others else ())]

    def refresh_all(self) -> None:
        self._plain.refresh_all()

    def step(self, gradients: Sequence[Tensor | None], scale: float = 1.0) -> None:
        self._plain.step(dict(zip(self.parameters, gradients, strict=True)), scale)


def parts_of(values: Tensor, group: Mapping[str, Any]) -> list[Tensor]:
    """The matrices of a tensor, as views."""
    split, dim = group.get("split"), group.get("split_dim", 0)
    if split == "stack":
        return list(values.unbind(0))
    if split is None:
        return [values]
    return list(values.split(values.shape[dim] // split if isinstance(split, int) else list(split), dim))


ROOT = 24


class Model(nn.Module):
    """Matrices that are tall, wide and square, fused projections, a stack of experts, and what is no matrix."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, ROOT)
        self.qkv = nn.Linear(ROOT, 3 * ROOT)
        self.grouped = nn.Linear(ROOT, ROOT + 2 * 6)
        self.columns = nn.Parameter(torch.randn(ROOT, 2 * ROOT) * 0.2)
        self.tall = nn.Linear(ROOT, 50)
        self.wide = nn.Linear(50, ROOT, bias=False)
        self.experts = nn.Parameter(torch.randn(3, ROOT, ROOT) * 0.2)
        self.norm = nn.LayerNorm(ROOT)
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens))
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + torch.sigmoid(q) * k + v
        x = x + self.grouped(x)[..., :ROOT] * self.grouped(x)[..., ROOT:].mean()
        x = x + (x @ self.columns)[..., ROOT:].tanh()
        x = x + self.wide(torch.relu(self.tall(x)))
        return x + torch.einsum("...i,eij->...j", x, self.experts)


def build(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(3)
    return Model(dtype)


def groups_of(model: Model) -> list[dict[str, Any]]:
    vectors = [each for each in model.parameters() if each.ndim == 1]
    return [
        {"params": [model.tall.weight, model.wide.weight], "lr": 0.03, "weight_decay": 0.2},
        {"params": [model.qkv.weight], "split": 3, "adjust_lr_fn": "match_rms_adamw"},
        {"params": [model.grouped.weight], "split": [30, 3, 3]},
        {"params": [model.columns], "split": 2, "split_dim": 1, "nesterov": False},
        {"params": [model.experts], "split": "stack", "momentum": 0.4},
        {"params": [model.embedding.weight, *vectors], "use_muon": False, "lr": 3e-3, "weight_decay": 0.1},
    ]


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 11, (5, 7), generator=generator)
    model(tokens.to(next(model.parameters()).device)).float().square().sum().backward()
