"""What DeepSpeed computes otherwise than longshore, each undone on the side where that is simple."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient


def _passed_through(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Same.apply(value) if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        return type(value)(map(_passed_through, value))
    if isinstance(value, dict):
        for key in list(value):  # transformers' outputs have no update()
            value[key] = _passed_through(value[key])
    return value


def pass_through(model: nn.Module) -> None:
    """Pass inputs and outputs of each module through a function without arithmetic, to which DeepSpeed's stage 3
    attaches its hooks.

    It changes an order: a norm uses its input twice, and the residual connection beside it once. autograd then adds the
    norm's two gradients first, and otherwise all three as they arrive.
    """
    for each in model.modules():
        each.register_forward_pre_hook(lambda _, inputs: _passed_through(inputs))
        each.register_forward_hook(lambda _, inputs, output: _passed_through(output))


def compute_as_torch() -> None:
    """Have DeepSpeed multiply by torch's clipping coefficient, and step by torch's fused AdamW on the CPU."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    _clip_in(DeepSpeedZeroOptimizer, "single_partition_of_fp32_groups")
    _clip_in(DeepSpeedZeroOptimizer_Stage3, "fp32_partitioned_groups_flat")
    DeepSpeedCPUAdam.step = _step
    made = torch.optim.AdamW.__init__

    def make(self: Any, params: Any, **options: Any) -> None:
        made(self, params, **{**options, "foreach": None, "fused": True})

    torch.optim.AdamW.__init__ = make


def _clip_in(optimizer: Any, masters: str) -> None:
    """Replace DeepSpeed's clipping, which is called for each group in turn."""
    left: list[Tensor] = []

    def unscale_and_clip_grads(self: Any, *_: Any) -> None:
        if self.clip_grad == 0.0:
            return
        if not left:
            left.extend(each.grad for each in getattr(self, masters))
            squares = torch.stack([each.double().square().sum() for each in left]).sum()
            dist.all_reduce(squares)
            self.coefficient = torch.clamp(self.clip_grad / (squares.sqrt().float() + 1e-6), max=1.0)
            assert self.coefficient < 1, "nothing was clipped"
        left.pop(0).mul_(self.coefficient)

    optimizer.unscale_and_clip_grads = unscale_and_clip_grads


@torch.no_grad()
def _step(self: Any, closure: Any = None) -> None:
    """``DeepSpeedCPUAdam.step`` by torch."""
    for group in self.param_groups:
        options = {name: group[name] for name in ("lr", "weight_decay", "eps")}
        options |= {"beta1": group["betas"][0], "beta2": group["betas"][1]}
        for each in group["params"]:
            if each.grad is None:
                continue
            state = self.state[each]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(each), torch.zeros_like(each)
            moments = [state["exp_avg"]], [state["exp_avg_sq"]]
            adamw(
                [each], [each.grad], *moments, [], [state["step"]], fused=True, amsgrad=False, maximize=False, **options
            )
