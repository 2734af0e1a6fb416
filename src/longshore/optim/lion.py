"""``longshore.Lion``: what torch does not have."""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT

from longshore.optim.families import LionFamily
from longshore.optim.host_optimizer import HostOptimizer
from longshore.optim.hyperparameters import group_options
from longshore.optim.offload import Placement


class Lion(HostOptimizer):
    """Lion with master weights and its moment in host memory.

    Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023). The
    arithmetic is ``longshore.kernels.reference.lion_step``.

    Args:
        params: parameters, named parameters, or groups; see :class:`~longshore.AdamW`.
        lr: learning rate; a number or a one-element tensor, read at each step.
        betas: of the update, and of the moment.
        weight_decay: decoupled weight decay.
        maximize: ascend instead.
        release_gradients: see :class:`~longshore.AdamW`.
        offload: see :class:`~longshore.AdamW`.

    Raises:
        ValueError: an option, a value or a parameter that cannot be honoured,
            by name.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        release_gradients: bool = False,
        offload: Placement | None = None,
    ) -> None:
        defaults = group_options(locals())
        super().__init__(params, defaults, LionFamily(), release_gradients, offload)
