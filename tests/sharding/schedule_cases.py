"""What a rank does with buckets, in the order in which it does it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import longshore
from longshore.host.recorder import ARRIVE, COPY_TO_HOST, STEP_IN_PLACE
from longshore.sharding.schedule import GATHER, REDUCE

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
    store: Any = engine.optimizer.store
    log: Log = []

    def before(target: Any, name: str, event: Any) -> None:
        call = getattr(target, name)
        setattr(target, name, lambda *args, **kwargs: (log.append(event(*args)), call(*args, **kwargs))[1])

    before(store._window, "arrive", lambda parameter, *_: (ARRIVE, parameter))
    before(store._reducer, "reduce", lambda bucket, *_: (REDUCE, bucket.index))
    bucket_of = {piece.index: bucket.index for bucket in store.shards.buckets for own in bucket.pieces for piece in own}
    before(store.inner, "arrive", lambda piece, *_: (COPY_TO_HOST, bucket_of[piece]))
    before(store.shards.ownership, "publish", lambda bucket, *_: (GATHER, bucket.index))
    commit = store.inner.commit

    def committed(*args: Any, **kwargs: Any) -> None:
        commit(*args, **kwargs)
        log.append((STEP_IN_PLACE, None))

    store.inner.commit = committed
    for window in range(3):
        if window == 2:
            log.clear()
        for _ in range(accumulation):
            engine.backward(engine(torch.ones(2, 12)).square().mean())
            engine.step()
    members = {bucket.index: tuple(member.parameter for member in bucket.members) for bucket in store.shards.buckets}
    engine.destroy()
    return log, members
