"""SGD with momentum, as ``torch.optim.SGD(fused=True)`` on the CPU.

Momentum and Nesterov's are those of Sutskever et al., "On the importance of
initialization and momentum in deep learning" (2013), in torch's form, in which
the learning rate is no part of the buffer.
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
from longshore.kernels.reference import Scalars, fma, scalar
from longshore.optim.family import History, RuleFamily, flag, not_negative, number
from longshore.optim.offload import Offload
from longshore.optim.tiled_optimizer import RuleOptimizer


def sgd(scalars: Scalars, g: Tensor, p: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
    """Return the new master and momentum buffer; without momentum the buffer stays as it is."""
    l2 = scalar(scalars, 0)
    momentum = scalar(scalars, 1)
    one_minus_dampening = scalar(scalars, 2)
    negative_lr = scalar(scalars, 3)
    has_momentum = scalar(scalars, 4)
    first = scalar(scalars, 5)
    nesterov = scalar(scalars, 6)
    if l2 != 0.0:
        g = fma(p, l2, g)
    if has_momentum != 0.0:
        if first != 0.0:
            buffer = g
        else:
            buffer = fma(one_minus_dampening, g, buffer * momentum)
        if nesterov != 0.0:
            g = fma(buffer, momentum, g)
        else:
            g = buffer
    p = fma(g, negative_lr, p)
    return p, buffer


@dataclass(frozen=True)
class SGDRule(Rule):
    """The hyper-parameters of one group, for parameters with or without a momentum buffer.

    Without momentum a state buffer may lack the momentum array; if it has one, the array is not changed.
    """

    name = "SGD"
    states = ("momentum_buffer",)
    update = staticmethod(sgd)

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    first: bool
    """Whether there is no momentum buffer yet; the gradient then becomes the buffer."""

    @cached_property
    def scalars(self) -> tuple[float, ...]:
        flags = float(self.momentum != 0), float(self.first), float(self.nesterov)
        return self.weight_decay, self.momentum, 1.0 - self.dampening, -self.lr, *flags

    @property
    def optional_states(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return int(self.momentum == 0)  # groups with and without momentum may share a buffer


class SGDFamily(RuleFamily):
    """SGD. Only groups with momentum have a state, and torch keeps no step count."""

    options: ClassVar = {
        "lr": not_negative,
        "momentum": not_negative,
        "dampening": number,
        "weight_decay": not_negative,
        "nesterov": flag,
        "maximize": flag,
    }
    rule = SGDRule
    states = SGDRule.states
    optional_states = frozenset(states)
    keeps_step = needs_step = False

    @staticmethod
    def check_together(values: Mapping[str, Any]) -> None:
        if values["nesterov"] and not (values["momentum"] > 0 and values["dampening"] == 0):
            raise ValueError(
                f"nesterov=True needs a momentum above 0 and no dampening, and they are {values['momentum']:g} and "
                f"{values['dampening']:g}; set momentum, and leave dampening out"
            )

    def states_of(self, group: Mapping[str, Any]) -> Sequence[str]:
        return self.states if number(group["momentum"], "momentum") != 0 else ()

    def more_fields(self, group: Mapping[str, Any], history: History) -> Mapping[str, Any]:
        return {"first": "momentum_buffer" not in history.states}


class SGD(RuleOptimizer):
    """``torch.optim.SGD`` with master weights and momentum buffers in host memory.

    The weights are those of ``torch.optim.SGD(fused=True)`` on the CPU with
    float32 masters, bit for bit. If no group has momentum, the host keeps only the masters.

    Arguments and errors are those of :class:`~longshore.AdamW`, and:

    Args:
        momentum: decay rate of the momentum buffer; 0: no buffer.
        dampening: the share of the gradient that is left out of the buffer.
        weight_decay: an L2 term in the gradient.
        nesterov: Nesterov's momentum; needs ``momentum`` and no ``dampening``.
    """

    rules = SGDFamily
    twin = torch.optim.SGD
    suggested: ClassVar = {"lr": 1e-2, "momentum": 0.9}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        release_gradients: bool = False,
        offload: Offload | None = None,
    ) -> None:
        super().__init__(locals())
