"""The recommended configuration, as a file that ``longshore.initialize`` loads."""

from __future__ import annotations

from typing import Any

import torch

from longshore.optim.rule_optimizer import OPTIMIZERS
from longshore.plan.choice import Choice, Job


def configuration(job: Job, choice: Choice) -> dict[str, Any]:
    """A DeepSpeed-style file. Its learning rate is a beginning, and yours to choose."""
    params = dict(OPTIMIZERS[job.optimizer].suggested)
    content: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.batch_size,
        "gradient_accumulation_steps": job.accumulation,
        "gradient_clipping": job.clipping or 0.0,
        "optimizer": {"type": job.optimizer, "params": params},
    }
    if job.dtype is torch.bfloat16:
        content["bf16"] = {"enabled": True, "check_grad_overflow": False}
    elif job.dtype is torch.float16:
        content["fp16"] = {"enabled": True}
    zero: dict[str, Any] = {"stage": choice.stage, "reduce_bucket_size": job.bucket_numel}
    own: dict[str, Any] = {}
    if choice.offload == "cpu":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if choice.ratio != 1.0:
            zero["offload_optimizer"]["ratio"] = choice.ratio
        if choice.speculation:
            own["speculation_memory"] = choice.speculation
    if job.tile_numel is not None:
        own["tile_numel"] = job.tile_numel
    content["zero_optimization"] = zero
    return {**content, "longshore": own} if own else content
