"""``longshore.SGD``: the signature of torch's."""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT

from longshore.optim.families import SGDFamily
from longshore.optim.host_optimizer import HostOptimizer
from longshore.optim.hyperparameters import group_options
from longshore.optim.offload import Placement


class SGD(HostOptimizer):
    """SGD with master weights and momentum buffers in host memory.

    The weights are those of ``torch.optim.SGD(fused=True)`` on the CPU with
    float32 masters, bit for bit. Where no group has momentum, the host holds the
    masters alone.

    Args:
        params: parameters, named parameters, or groups; see :class:`~longshore.AdamW`.
        lr: learning rate; a number or a one-element tensor, read at each step.
        momentum: decay rate of the momentum buffer; 0: no buffer.
        dampening: takes this part of the gradient out of the buffer.
        weight_decay: an L2 term in the gradient.
        nesterov: Nesterov's momentum; needs ``momentum`` and no ``dampening``.
        maximize: ascend instead.
        foreach: refused when true, as is ``differentiable``, by name.
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
        offload: Placement | None = None,
    ) -> None:
        defaults = group_options(locals())
        super().__init__(params, defaults, SGDFamily(), release_gradients, offload)
