"""What a rank does with buckets, in the order in which it does it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import longshore
from longshore.plan.simulation import GATHER, REDUCE
from longshore.tiles.events import ARRIVE, COPY_TO_HOST, STEP_IN_PLACE

Log = list[tuple[str, Any]]


def logged(stage: int, accumulation: int) -> tuple[Log, dict[int, tuple[int, ...]]]:
    """The events of the third window by bucket, and the parameters of each bucket.

    A gradient's arrival is logged as it begins, and all else as it ends, but for reductions and gathers: those are
    logged as they begin.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(12, 12, bias=False) for _ in range(6)))
    config = longshore.Config(
        stage=stage,
        offload_device="cpu",
        reduce_bucket_numel=300 * (2 if stage >= 2 else 1),
        gradient_accumulation_steps=accumulation,
        tile_numel=40,
        optimizer={"type": "AdamW", "lr": 1e-3},  # pyright: ignore[reportArgumentType]
    )
    transfer = longshore.SimulatedTransfer(seed=1, max_delay_s=0.002)
    engine = longshore.initialize(
        model=model, config=config, offload=longshore.Offload(40, 1, transfer=transfer)
    ).engine
    store: Any = engine.optimizer._core.members.store
    log: Log = []

    def before(target: Any, name: str, event: Any) -> None:
        call = getattr(target, name)
        setattr(target, name, lambda *args, **kwargs: (log.append(event(*args)), call(*args, **kwargs))[1])

    before(store._gradients, "arrive", lambda parameter, *_: (ARRIVE, parameter))
    before(store._gradients, "reduce", lambda bucket, *_: (REDUCE, bucket.index))
    bucket_of = {
        owned.key: bucket.index for bucket in store.ownership.layout.buckets for own in bucket.ranges for owned in own
    }
    before(store.tiles, "arrive", lambda owned, *_: (COPY_TO_HOST, bucket_of[owned]))
    before(store.ownership, "publish", lambda bucket, *_: (GATHER, bucket.index))
    commit = store.tiles.commit

    def committed(*args: Any, **kwargs: Any) -> None:
        commit(*args, **kwargs)
        log.append((STEP_IN_PLACE, None))

    store.tiles.commit = committed
    for window in range(3):
        if window == 2:
            log.clear()
        for _ in range(accumulation):
            engine.backward(engine(torch.ones(2, 12)).square().mean())
            engine.step()
    members = {
        bucket.index: tuple(member.parameter for member in bucket.members) for bucket in store.ownership.layout.buckets
    }
    engine.destroy()
    return log, members
