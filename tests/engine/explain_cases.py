"""The ledger of two ranks that use different heads."""

from __future__ import annotations

from typing import Any

import torch

from engine.files import file, started
from engine.scenarios import inputs, make_model


def ledger(stage: int) -> dict[str, Any]:
    """Two backwards; head a everywhere, head b once and on rank 1 only, head c never."""
    import torch.distributed as dist

    rank = dist.get_rank()
    zero = {"stage": stage, "reduce_bucket_size": 600}
    with started(file(zero_optimization=zero), make_model(torch.float32)) as engine:
        for number in range(2):
            heads = ("a", "b") if rank == 1 and number == 1 else ("a",)
            engine.backward(engine(inputs(0, number, rank, torch.float32), heads))
        engine.step()
        return {row.name: row for row in engine.explain(print_it=False).parameters}
