"""Plain PyTorch's side of Muon: torch's own on matrices, one at a time, and torch's AdamW on the rest."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from plain_muon import parts_of
from torch import Tensor

from fuzz.plain import Twin

_MUON = {
    name: each.default for name, each in inspect.signature(torch.optim.Muon).parameters.items() if name != "params"
}
_ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "maximize": False}


class MixedMuon(torch.optim.Optimizer):
    """Groups of matrices with the options of ``torch.optim.Muon``, and groups with ``use_muon=False`` with AdamW's."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {**_MUON, **options})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        matrices = param_group.get("use_muon", True)
        if not matrices:
            for name, value in _ADAMW.items():
                param_group.setdefault(name, value)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if not matrices:
            for name in (_MUON.keys() | {"split", "split_dim"}) - _ADAMW.keys():
                group.pop(name, None)
        elif any(each.ndim != 2 for each in group["params"]):
            self.param_groups.pop()
            raise ValueError("Muon only supports 2D parameters")


class MuonTwin(Twin):
    """A :class:`Twin` of ``longshore.Muon``."""

    def _kind_of(self, group: dict[str, Any]) -> type[torch.optim.Optimizer]:
        return torch.optim.AdamW

    def _step_one(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        if not group.get("use_muon", True):
            super()._step_one(group, parameter, gradient)
            return
        state, master = self.state[parameter], self._master(parameter).clone()
        momentum = state.get("momentum_buffer", torch.zeros_like(master)).clone()
        options = {name: group[name] for name in _MUON if name in group}
        for part, buffer, slope in zip(
            *(parts_of(each, group) for each in (master, momentum, gradient.view(master.shape))), strict=True
        ):
            flat = part.clone().contiguous()
            inner = torch.optim.Muon([flat], **options)
            flat.grad = slope.contiguous()
            inner.state[flat]["momentum_buffer"] = buffer.clone().contiguous()
            inner.step()
            part.copy_(flat)
            buffer.copy_(inner.state[flat]["momentum_buffer"])
        written = {"momentum_buffer": momentum, **({"master": master} if parameter.dtype != torch.float32 else {})}
        for name, value in written.items():
            if name in state:
                state[name].copy_(value)
            else:
                state[name] = value
        parameter.copy_(master)
