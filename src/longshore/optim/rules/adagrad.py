"""Adagrad, as ``torch.optim.Adagrad(fused=True)`` on the CPU.

Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and
Stochastic Optimization" (2011), with torch's decay of the learning rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from longshore.kernels import Rule
from longshore.kernels.reference import Scalars, divide, fma, root, scalar
from longshore.optim.family import RuleFamily, flag, not_negative
from longshore.optim.offload import Offload
from longshore.optim.tiled_optimizer import RuleOptimizer


def adagrad(scalars: Scalars, g: Tensor, p: Tensor, total: Tensor) -> tuple[Tensor, ...]:
    """Return the new master and sum of squares."""
    l2 = scalar(scalars, 0)
    eps = scalar(scalars, 1)
    negative_step_size = scalar(scalars, 2)
    if l2 != 0.0:
        g = fma(p, l2, g)
    total = fma(g, g, total)
    denominator = root(total) + eps
    p = p + divide(negative_step_size * g, denominator)
    return p, total


def _initial_sum(value: Any, name: str) -> float:
    """Read a number of at least 0 that float32 sums can begin with."""
    found = not_negative(value, name)
    if torch.finfo(torch.float32).max < found < math.inf:
        raise ValueError(f"{name} must be at most {torch.finfo(torch.float32).max}, and is {found}")
    return found


@dataclass(frozen=True)
class AdagradRule(Rule):
    """The hyper-parameters of one group for parameters at one step count."""

    name = "Adagrad"
    states = ("sum",)
    update = staticmethod(adagrad)

    lr: float
    lr_decay: float
    eps: float
    weight_decay: float
    step: int = field(kw_only=True)

    @cached_property
    def scalars(self) -> tuple[float, ...]:
        return self.weight_decay, self.eps, -(self.lr / (1.0 + (self.step - 1.0) * self.lr_decay))


class AdagradFamily(RuleFamily):
    """Adagrad. torch reads ``initial_accumulator_value`` from the constructor alone and ignores a group's own value;
    here another value in a group is refused."""

    options: ClassVar = {
        "lr": not_negative,
        "lr_decay": not_negative,
        "eps": not_negative,
        "weight_decay": not_negative,
        "initial_accumulator_value": _initial_sum,
        "maximize": flag,
    }
    rule = AdagradRule
    states = AdagradRule.states
    initial_states: ClassVar = {"sum": "initial_accumulator_value"}


class Adagrad(RuleOptimizer):
    """``torch.optim.Adagrad`` with master weights and sums of squares in host memory.

    The weights are those of ``torch.optim.Adagrad(fused=True)`` on the CPU with
    float32 masters, bit for bit.

    Arguments and errors are those of :class:`~longshore.AdamW`, and:

    Args:
        lr_decay: divides the learning rate by ``1 + (step - 1) * lr_decay``.
        weight_decay: an L2 term in the gradient.
        initial_accumulator_value: initial value of the sums; one value for all groups.
        eps: added to the denominator.
    """

    rules = AdagradFamily
    twin = torch.optim.Adagrad
    suggested: ClassVar = {"lr": 1e-2}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        release_gradients: bool = False,
        offload: Offload | None = None,
    ) -> None:
        super().__init__(locals())
