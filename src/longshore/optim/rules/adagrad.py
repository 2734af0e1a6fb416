"""Adagrad, as ``torch.optim.Adagrad(fused=True)`` on the CPU.

Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and
Stochastic Optimization" (2011), with torch's decay of the learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from longshore.kernels import Rule
from longshore.kernels.reference import Scalars, divide, fma, root, scalar
from longshore.optim.family import History, RuleFamily, flag, not_negative, number
from longshore.optim.offload import Placement
from longshore.optim.rule_optimizer import RuleOptimizer


def adagrad(scalars: Scalars, g: Tensor, p: Tensor, total: Tensor) -> tuple[Tensor, ...]:
    """The new master and sum of squares."""
    l2 = scalar(scalars, 0)
    eps = scalar(scalars, 1)
    negative_step_size = scalar(scalars, 2)
    if l2 != 0.0:
        g = fma(p, l2, g)
    total = fma(g, g, total)
    denominator = root(total) + eps
    p = p + divide(negative_step_size * g, denominator)
    return p, total


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
    step: int

    @cached_property
    def scalars(self) -> tuple[float, ...]:
        return self.weight_decay, self.eps, -(self.lr / (1.0 + (self.step - 1.0) * self.lr_decay))


class AdagradFamily(RuleFamily):
    """Adagrad.

    Args:
        initial_accumulator_value: what sums begin with. torch reads it from the
            constructor alone, and ignores a group's own; here that is refused.
    """

    options: ClassVar = {
        "lr": not_negative,
        "lr_decay": not_negative,
        "eps": not_negative,
        "weight_decay": not_negative,
        "initial_accumulator_value": not_negative,
        "maximize": flag,
    }
    states = AdagradRule.states
    fixed_options = frozenset({"initial_accumulator_value"})

    def __init__(self, initial_accumulator_value: float) -> None:
        self._initial = number(initial_accumulator_value, "initial_accumulator_value")

    def check_group(self, group: Mapping[str, Any]) -> None:
        super().check_group(group)
        found = group["initial_accumulator_value"]
        if found != self._initial:
            raise ValueError(
                f"initial_accumulator_value is {found} in a parameter group and {self._initial} in the optimizer: it "
                "is one value for all groups; pass it to the optimizer"
            )

    def initial(self, history: History) -> Mapping[str, float]:
        return {} if "sum" in history.states or not self._initial else {"sum": self._initial}

    def rule_of(self, group: Mapping[str, Any], history: History, arrays: Sequence[str]) -> AdagradRule:
        values = self.values_of(group)
        del values["initial_accumulator_value"]
        return AdagradRule(step=history.step + 1, **values)


class Adagrad(RuleOptimizer):
    """``torch.optim.Adagrad`` with master weights and sums of squares in host memory.

    The weights are those of ``torch.optim.Adagrad(fused=True)`` on the CPU with
    float32 masters, bit for bit.

    Arguments and errors are those of :class:`~longshore.AdamW`, and:

    Args:
        lr_decay: divides the learning rate by ``1 + (step - 1) * lr_decay``.
        weight_decay: an L2 term in the gradient.
        initial_accumulator_value: what the sums begin with; one value for all groups.
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
        offload: Placement | None = None,
    ) -> None:
        super().__init__(locals())
