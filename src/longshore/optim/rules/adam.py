"""Adam and AdamW, as ``torch.optim.AdamW(fused=True)`` on the CPU.

Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015), algorithm 1,
with the decay of Loshchilov and Hutter, "Decoupled Weight Decay Regularization"
(2019), algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from longshore.kernels import Rule
from longshore.kernels.reference import Scalars, divide, fma, root, scalar, where
from longshore.optim.family import History, RuleFamily, betas, flag, not_negative
from longshore.optim.offload import Offload
from longshore.optim.tiled_optimizer import RuleOptimizer


def adam(scalars: Scalars, g: Tensor, p: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Return the new master, first moment and second moment."""
    decay = scalar(scalars, 0)
    l2 = scalar(scalars, 1)
    one_minus_beta1 = scalar(scalars, 2)
    beta2 = scalar(scalars, 3)
    one_minus_beta2 = scalar(scalars, 4)
    root_correction = scalar(scalars, 5)
    eps = scalar(scalars, 6)
    negative_step_size = scalar(scalars, 7)
    if l2 != 0.0:
        g = fma(p, l2, g)
    else:
        p = p * decay
    # torch's lerp starts from the nearer end, so that a weight of 1 gives the gradient exactly. The difference is exact
    # in float32.
    from_moment = one_minus_beta1 < 0.5
    m = fma(where(from_moment, one_minus_beta1, one_minus_beta1 - 1.0), g - m, where(from_moment, m, g))
    v = fma(one_minus_beta2 * g, g, v * beta2)
    denominator = divide(root(v), root_correction) + eps
    p = p + divide(negative_step_size * m, denominator)
    return p, m, v


@dataclass(frozen=True)
class AdamRule(Rule):
    """The hyper-parameters of one group for parameters at one step count."""

    name = "Adam"
    states = ("exp_avg", "exp_avg_sq")
    update = staticmethod(adam)

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int = field(kw_only=True)
    decoupled: bool
    """Whether weight decay is AdamW's; otherwise it is Adam's, a term in the gradient."""
    bias_correction: bool = True
    """Whether the moments are corrected for their start at zero; otherwise ``step`` has no effect."""

    @cached_property
    def scalars(self) -> tuple[float, ...]:
        bias_correction1 = 1.0 - self.beta1**self.step if self.bias_correction else 1.0
        bias_correction2 = 1.0 - self.beta2**self.step if self.bias_correction else 1.0
        return (
            1.0 - self.lr * self.weight_decay if self.decoupled else 1.0,
            0.0 if self.decoupled else self.weight_decay,
            1.0 - self.beta1,
            self.beta2,
            1.0 - self.beta2,
            math.sqrt(bias_correction2),
            self.eps,
            -(self.lr / bias_correction1),
        )


class AdamFamily(RuleFamily):
    """Adam and AdamW, which differ in a group's ``decoupled_weight_decay``."""

    options: ClassVar = {
        "lr": not_negative,
        "betas": betas,
        "eps": not_negative,
        "weight_decay": not_negative,
        "bias_correction": flag,
        "maximize": flag,
    }
    absent: ClassVar = {"bias_correction": True}
    rule = AdamRule
    states = AdamRule.states
    refused_states: ClassVar = {"max_exp_avg_sq": "the state is that of amsgrad=True, which is not supported"}

    def more_fields(self, group: Mapping[str, Any], history: History) -> Mapping[str, Any]:
        return {"decoupled": bool(group["decoupled_weight_decay"])}


class AdamW(RuleOptimizer):
    """``torch.optim.AdamW`` with master weights and moments in host memory; weight decay is decoupled.

    The weights are those of ``torch.optim.AdamW(fused=True)`` on the CPU with float32 masters, bit for bit.

    Args:
        params: parameters, named parameters, or groups, on one CPU or CUDA device; float32, bfloat16 and float16 in any
            mix.
        lr: learning rate; a number or a one-element tensor, read at each step.
        betas: decay rates of the first and second moment.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        amsgrad: not supported; True raises an error, as with ``capturable`` and ``differentiable``.
        maximize: ascend instead.
        fused: of no effect, as ``foreach``: steps are always fused.
        bias_correction: False takes the moments as they are, without the correction for their start at zero. torch has
            no such option.
        release_gradients: take each gradient to the host during backward and free it on the device. ``.grad`` is then a
            placeholder; use :meth:`clip_grad_norm_` and :meth:`grad_norm`.
        offload: settings of the host side.

    Raises:
        ValueError: an option, a value or a parameter, which the message names, is not supported.
    """

    rules = AdamFamily
    twin = torch.optim.AdamW
    file_defaults: ClassVar = {"weight_decay": 0.0}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        bias_correction: bool = True,
        release_gradients: bool = False,
        offload: Offload | None = None,
    ) -> None:
        super().__init__({**locals(), "decoupled_weight_decay": True})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True


class Adam(RuleOptimizer):
    """``torch.optim.Adam`` with master weights and moments in host memory; weight decay is a term in the gradient.

    Arguments and errors are those of :class:`AdamW`, and:

    Args:
        weight_decay: an L2 term in the gradient, as in ``torch.optim.Adam``.
        decoupled_weight_decay: AdamW's decay instead.
    """

    rules = AdamFamily
    twin = torch.optim.Adam
    file_defaults: ClassVar = {"weight_decay": 0.0}  # also for AdamW, which the name Adam means in such a file
    suggested: ClassVar = {"lr": 1e-4, "adam_w_mode": False}  # without it, the name means AdamW

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        bias_correction: bool = True,
        release_gradients: bool = False,
        offload: Offload | None = None,
    ) -> None:
        super().__init__(locals())
