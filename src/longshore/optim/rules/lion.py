"""Lion, which torch does not have.

Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), arXiv:2302.06675, algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

from longshore.kernels import Rule
from longshore.kernels.reference import Scalars, fma, scalar, where
from longshore.optim.family import RuleFamily, betas, flag, not_negative
from longshore.optim.offload import Offload
from longshore.optim.tiled_optimizer import RuleOptimizer


def lion(scalars: Scalars, g: Tensor, p: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    """Return the new master and moment. The sign of zero, of either sign, is 0, and that of NaN is NaN."""
    decay = scalar(scalars, 0)
    beta1 = scalar(scalars, 1)
    one_minus_beta1 = scalar(scalars, 2)
    beta2 = scalar(scalars, 3)
    one_minus_beta2 = scalar(scalars, 4)
    negative_lr = scalar(scalars, 5)
    c = fma(one_minus_beta1, g, m * beta1)
    sign = where(c > 0.0, 1.0, 0.0)
    sign = where(c < 0.0, -1.0, sign)
    sign = where(c != c, c, sign)  # NaN
    p = p * decay + negative_lr * sign
    m = fma(one_minus_beta2, g, m * beta2)
    return p, m


@dataclass(frozen=True)
class LionRule(Rule):
    """The hyper-parameters of one group; weight decay is decoupled."""

    name = "Lion"
    states = ("exp_avg",)
    update = staticmethod(lion)

    lr: float
    beta1: float
    beta2: float
    weight_decay: float

    @cached_property
    def scalars(self) -> tuple[float, ...]:
        decay = 1.0 - self.lr * self.weight_decay
        return decay, self.beta1, 1.0 - self.beta1, self.beta2, 1.0 - self.beta2, -self.lr


class LionFamily(RuleFamily):
    """Lion; its moment has the usual name, ``exp_avg``."""

    options: ClassVar = {"lr": not_negative, "betas": betas, "weight_decay": not_negative, "maximize": flag}
    rule = LionRule
    states = LionRule.states
    needs_step = False


class Lion(RuleOptimizer):
    """Lion with master weights and its moment in host memory; weight decay is decoupled.

    Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), with
    the paper's defaults. The arithmetic is ``longshore.optim.rules.lion.lion``.

    Arguments and errors are those of :class:`~longshore.AdamW`, and:

    Args:
        betas: decay rates of the update and of the moment.
        weight_decay: decoupled weight decay.
    """

    rules = LionFamily
    file_defaults: ClassVar = {"lr": 1e-3, "betas": (0.9, 0.999)}
    suggested: ClassVar = {"lr": 1e-5}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        release_gradients: bool = False,
        offload: Offload | None = None,
    ) -> None:
        super().__init__(locals())
