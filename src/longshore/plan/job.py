"""The training job that a user describes, the choices that a plan compares, and the configuration file of a choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import longshore.optim.rules  # noqa: F401  every rule is then known
from longshore.byte_sizes import format_byte_size
from longshore.optim.host_optimizer import OPTIMIZERS

STATES = {name: optimizer.rules.states for name, optimizer in OPTIMIZERS.items()}
"""State arrays of each optimizer beside the master weights; SGD is planned with momentum."""


@dataclass(frozen=True)
class Job:
    """What stays the same for all choices of a plan."""

    batch_size: int = 1  # sequences in one backward on one rank
    seq_len: int = 2048  # tokens in a sequence
    accumulation: int = 1  # backwards in a step
    dtype: torch.dtype | None = torch.bfloat16  # the engine casts parameters to it; None: it does not
    optimizer: str = "AdamW"  # a key of STATES
    clipping: float | None = 1.0  # the largest norm of gradients; None: no norm is measured
    checkpointing: bool = False  # backward recomputes activations, block by block
    bucket_numel: int = 500_000_000  # ``reduce_bucket_size``, in elements
    tile_numel: int | None = None  # elements in a tile; None: the engine's default

    @property
    def tokens(self) -> int:
        """Tokens in one backward on one rank."""
        return self.batch_size * self.seq_len

    @property
    def state_arrays(self) -> int:
        """Float32 arrays of optimizer state: the master weights, and the optimizer's own."""
        return 1 + len(STATES[self.optimizer])


@dataclass(frozen=True)
class PlanChoice:
    """One way to train."""

    stage: int
    offload: str  # where the optimizer's state is: "cpu" or "none"
    ratio: float = 1.0  # the share of the state that is on the host
    speculation: int | str = 0  # ``speculation_memory``, as in :class:`longshore.Offload`

    @property
    def title(self) -> str:
        words = [f"stage {self.stage}", *(["offload"] if self.offload == "cpu" else [])]
        if self.ratio != 1.0:
            words.append(f"ratio {self.ratio:g}")
        if self.speculation:
            size = self.speculation
            words.append(f"spares {size if isinstance(size, str) else format_byte_size(size)}")
        return ", ".join(words)


def configuration(job: Job, choice: PlanChoice) -> dict[str, Any]:
    """A DeepSpeed-style configuration that ``longshore.initialize`` loads. Its learning rate is only a first guess."""
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
