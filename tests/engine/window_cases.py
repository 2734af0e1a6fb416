"""What an engine counts, on any number of ranks."""

from __future__ import annotations

from typing import Any

from support import loss_of

from engine.files import started


def batch_numbers(config: dict[str, Any]) -> dict[str, Any]:
    """``numbers``: train batch, micro batch, accumulation steps; ``backwards``: how many the first step took."""
    with started(config) as engine:
        numbers = (
            engine.train_batch_size(),
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
        )
        backwards = 0
        while engine.global_steps == 0:
            engine.backward(loss_of(engine, backwards))
            engine.step()
            backwards += 1
        return {"numbers": numbers, "backwards": backwards}


def batch_numbers_or_error(config: dict[str, Any]) -> Any:
    try:
        return batch_numbers(config)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
