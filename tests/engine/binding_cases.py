"""Run on every rank."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any
from unittest import mock

from support import loss_of

from engine.files import file, started, train
from longshore.engine import binding
from longshore.machine import read_topology


def bound(asked: tuple[str, str]) -> dict[str, Any]:
    """As torchrun would have started these ranks; each with its own LONGSHORE_BIND."""
    import torch.distributed as dist

    rank = dist.get_rank()
    names = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    os.environ.update(names, LONGSHORE_BIND=asked[rank])
    former = os.sched_getaffinity(0)
    # Whatever else runs, or was narrowed, on the machine of this test.
    alone = mock.patch.object(binding, "cpus_of_other_ranks", return_value={})
    whole = mock.patch.object(binding, "read_topology", lambda root: replace(read_topology(root), narrowed=False))
    try:
        zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
        with alone, whole, started(file(zero_optimization=zero)) as engine:
            during = sorted(os.sched_getaffinity(0))
            train(engine, (loss_of(engine, step) for step in range(2)))
            weights = [parameter.detach().clone() for parameter in engine.module.parameters()]
            text = engine.explain(print_it=False).cpus
    finally:
        for name in (*names, "LONGSHORE_BIND"):
            del os.environ[name]
    return {
        "before": sorted(former),
        "during": during,
        "after": sorted(os.sched_getaffinity(0)),
        "text": text,
        "weights": weights,
    }
