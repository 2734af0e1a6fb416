"""Run on every rank."""

from __future__ import annotations

from support import small_model

import longshore
from longshore.engine import setup


def granted(free: int) -> int:
    """What "auto" grants this rank where ``free`` bytes are there for all."""
    whole = setup.memory_for_speculation
    setup.memory_for_speculation = lambda: free
    try:
        config = longshore.Config(
            stage=2, offload_device="cpu", speculation_memory="auto", optimizer={"type": "AdamW", "lr": 1e-3}
        )
        engine = longshore.initialize(model=small_model(), config=config).engine
        granted = engine.optimizer._core.members.store.tiles.tier.speculator._memory
        engine.destroy()
        return granted
    finally:
        setup.memory_for_speculation = whole
