"""A rule that longshore does not have, as its own file would state it: SGD by the sign of the momentum.

Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems" (2018). Lion with two equal betas is the
same rule, so Lion's entry in ``native/rules.inl`` stands for the one that this rule would bring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

from longshore.kernels import Rule
from longshore.kernels.reference import Scalars, fma, scalar, where
from longshore.optim.family import History, RuleFamily, beta, flag, not_negative
from longshore.optim.offload import Offload
from longshore.optim.tiled_optimizer import RuleOptimizer


def signum(scalars: Scalars, g: Tensor, p: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    decay = scalar(scalars, 0)
    momentum = scalar(scalars, 1)
    one_minus_momentum = scalar(scalars, 2)
    negative_lr = scalar(scalars, 5)
    m = fma(one_minus_momentum, g, m * momentum)
    sign = where(m > 0.0, 1.0, where(m < 0.0, -1.0, where(m != m, m, 0.0)))
    return p * decay + negative_lr * sign, m


@dataclass(frozen=True)
class SignumRule(Rule):
    name = "Lion"
    states = ("momentum_buffer",)
    update = staticmethod(signum)

    lr: float
    momentum: float
    weight_decay: float

    @cached_property
    def scalars(self) -> tuple[float, ...]:
        pair = (self.momentum, 1.0 - self.momentum)
        return (1.0 - self.lr * self.weight_decay, *pair, *pair, -self.lr)


class SignumFamily(RuleFamily):
    options: ClassVar = {"lr": not_negative, "rate": beta, "weight_decay": not_negative, "maximize": flag}
    rule = SignumRule
    states = SignumRule.states
    needs_step = False

    def rule_of(self, group: Mapping[str, Any], history: History, arrays: Sequence[str]) -> SignumRule:
        values = self.values_of(group)
        return SignumRule(momentum=values.pop("rate"), **values)


class Signum(RuleOptimizer):
    """SGD by the sign of the momentum; weight decay is decoupled."""

    rules = SignumFamily
    file_defaults: ClassVar = {"rate": 0.5}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        rate: float = 0.9,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        release_gradients: bool = False,
        offload: Offload | None = None,
    ) -> None:
        super().__init__(locals())
