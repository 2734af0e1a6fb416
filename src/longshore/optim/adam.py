"""``longshore.Adam`` and ``longshore.AdamW``: the signatures of torch's."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from longshore.optim.families import AdamFamily
from longshore.optim.host_optimizer import HostOptimizer
from longshore.optim.hyperparameters import group_options
from longshore.optim.offload import Placement


class AdamW(HostOptimizer):
    """AdamW with master weights and moments in host memory.

    The weights are those of ``torch.optim.AdamW(fused=True)`` on the CPU with
    float32 masters, bit for bit.

    Args:
        params: parameters, named parameters, or groups, on one CPU or CUDA
            device; float32, bfloat16 and float16 in any mix.
        lr: learning rate; a number or a one-element tensor, read at each step.
        betas: decay rates of the first and second moment.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        amsgrad: refused when true, as are ``capturable``, ``differentiable``
            and ``foreach``, by name.
        maximize: ascend instead.
        fused: None or True; there is no other way here.
        bias_correction: False takes the moments as they are, without the
            correction for their start at zero. torch has no such option.
        release_gradients: take each gradient to the host during backward and
            free it on the device. ``.grad`` is then a placeholder; use
            :meth:`clip_grad_norm_` and :meth:`grad_norm`.
        offload: settings of the host side.

    Raises:
        ValueError: an option, a value or a parameter that cannot be honoured,
            by name.
    """

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
        offload: Placement | None = None,
    ) -> None:
        defaults = {**group_options(locals()), "decoupled_weight_decay": True}
        super().__init__(params, defaults, AdamFamily(), release_gradients, offload)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True


class Adam(HostOptimizer):
    """Adam with master weights and moments in host memory; see :class:`AdamW`.

    Args:
        params: parameters, named parameters, or groups; see :class:`AdamW`.
        lr: learning rate; a number or a one-element tensor, read at each step.
        betas: decay rates of the first and second moment.
        eps: added to the denominator.
        weight_decay: an L2 term in the gradient, as in ``torch.optim.Adam``.
        amsgrad: refused when true, as are ``capturable``, ``differentiable``
            and ``foreach``, by name.
        maximize: ascend instead.
        fused: None or True; there is no other way here.
        decoupled_weight_decay: AdamW's decay instead.
        bias_correction: False takes the moments as they are.
        release_gradients: see :class:`AdamW`.
        offload: see :class:`AdamW`.

    Raises:
        ValueError: an option, a value or a parameter that cannot be honoured,
            by name.
    """

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
        offload: Placement | None = None,
    ) -> None:
        defaults = group_options(locals())
        super().__init__(params, defaults, AdamFamily(), release_gradients, offload)
