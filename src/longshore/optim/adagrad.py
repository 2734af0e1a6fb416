"""``longshore.Adagrad``: the signature of torch's."""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT

from longshore.optim.families import AdagradFamily
from longshore.optim.host_optimizer import HostOptimizer
from longshore.optim.hyperparameters import group_options, scalar
from longshore.optim.offload import Placement


class Adagrad(HostOptimizer):
    """Adagrad with master weights and sums of squares in host memory.

    The weights are those of ``torch.optim.Adagrad(fused=True)`` on the CPU with
    float32 masters, bit for bit.

    Args:
        params: parameters, named parameters, or groups; see :class:`~longshore.AdamW`.
        lr: learning rate; a number or a one-element tensor, read at each step.
        lr_decay: divides the learning rate by ``1 + (step - 1) * lr_decay``.
        weight_decay: an L2 term in the gradient.
        initial_accumulator_value: what the sums begin with; one value for all groups.
        eps: added to the denominator.
        foreach: refused when true, as is ``differentiable``, by name.
        maximize: ascend instead.
        fused: None or True; there is no other way here.
        release_gradients: see :class:`~longshore.AdamW`.
        offload: see :class:`~longshore.AdamW`.

    Raises:
        ValueError: an option, a value or a parameter that cannot be honoured,
            by name.
    """

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
        defaults = group_options(locals())
        family = AdagradFamily(scalar(initial_accumulator_value, "initial_accumulator_value"))
        super().__init__(params, defaults, family, release_gradients, offload)
