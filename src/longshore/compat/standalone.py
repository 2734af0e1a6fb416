"""Optimizers of a script that steps them without an engine."""

from __future__ import annotations

import torch


def check_alone(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError where torch's own step would not be the one that was asked for; have it be the fused one."""
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if not group.get("bias_correction", True):
            raise ValueError(
                f"{name} without an engine is torch's, which always corrects; use longshore.Adam, or initialize()"
            )
        for parameter in group["params"]:
            if parameter.dtype != torch.float32:
                raise ValueError(
                    f"{name} without an engine would keep its moments in {parameter.dtype}, as torch does; use "
                    "longshore.Adam or Adagrad, which keep float32 masters, or initialize()"
                )
        if group.get("fused") is None and all(each.device.type in ("cpu", "cuda") for each in group["params"]):
            group["fused"] = True
