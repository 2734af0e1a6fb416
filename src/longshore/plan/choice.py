"""What is trained how: the job, which is the user's, and the choices, of which a plan recommends one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import longshore.optim.rules  # noqa: F401  every rule is then known
from longshore.optim.rule_optimizer import OPTIMIZERS

STATES = {name: optimizer.rules.states for name, optimizer in OPTIMIZERS.items()}
"""State arrays beside the master, by optimizer; SGD with momentum."""


@dataclass(frozen=True)
class Job:
    """What does not change from one choice to the next.

    Attributes:
        batch_size: sequences of one backward on one rank.
        seq_len: tokens of a sequence.
        accumulation: backwards a step.
        dtype: that the engine casts parameters to; None: as they are.
        optimizer: a key of :data:`STATES`.
        clipping: the largest norm of gradients; None: no clipping, and no norm is measured.
        checkpointing: activations are computed again in backward, block by block.
        bucket_numel: elements of ``reduce_bucket_size``.
        tile_numel: elements a tile; None: the engine's own number.
    """

    batch_size: int = 1
    seq_len: int = 2048
    accumulation: int = 1
    dtype: torch.dtype | None = torch.bfloat16
    optimizer: str = "AdamW"
    clipping: float | None = 1.0
    checkpointing: bool = False
    bucket_numel: int = 500_000_000
    tile_numel: int | None = None

    @property
    def tokens(self) -> int:
        """Of one backward on one rank."""
        return self.batch_size * self.seq_len

    @property
    def page_arrays(self) -> int:
        return 1 + len(STATES[self.optimizer])


@dataclass(frozen=True)
class Choice:
    """One way to train.

    Attributes:
        stage: 0 to 3.
        offload: ``"cpu"`` or ``"none"``: where the optimizer's state is.
        ratio: the share of it that is on the host.
        speculation: ``speculation_memory``: bytes, or a share from 0.0 to 1.0.
    """

    stage: int
    offload: str
    ratio: float = 1.0
    speculation: int | float = 0.0

    @property
    def title(self) -> str:
        """A few words."""
        words = [f"stage {self.stage}", *(["offload"] if self.offload == "cpu" else [])]
        if self.ratio != 1.0:
            words.append(f"ratio {self.ratio:g}")
        if self.speculation:
            share = isinstance(self.speculation, float)
            words.append(f"spares {self.speculation:.0%}" if share else f"spares {self.speculation} bytes")
        return ", ".join(words)
