"""The settings on which the bits of the weights depend: those that a resumed run is compared by."""

from __future__ import annotations

import json

from pydantic_core import to_jsonable_python

from longshore.engine.config.model import Config

OF_EACH_RANK = ("autocast", "cast_inputs", "loss_scaling", "gradient_clipping", "scheduler")
"""Fields of ``Config`` that change bits on one rank too. Those of the optimizer are restored with its state, which also
says which ``states`` and ``states_seed`` it has."""

BETWEEN_RANKS = ("communication_dtype", "accumulation_dtype", "prescale_gradients", "gradient_predivide_factor")
"""Fields that change bits on several ranks. So does ``stage``, see :func:`order_of_sums`."""


def decisive(config: Config, world_size: int) -> dict[str, str]:
    """Return the settings that change bits on ``world_size`` ranks, as texts by their names."""
    values = {name: getattr(config, name) for name in OF_EACH_RANK}
    values["cast_inputs"] = config.dtype if config.cast_inputs else None
    found = {name: json.dumps(to_jsonable_python(value)) for name, value in values.items()}
    if world_size > 1:
        found |= {name: json.dumps(getattr(config, name)) for name in BETWEEN_RANKS}
        found["stage"] = "2 or 3" if config.stage >= 2 else "0 or 1"  # they add in another order
    return found


def order_of_sums(stage: int, ranks: int, backwards: int, exact: bool) -> str:
    """Describe the additions of a step's gradients; runs with equal descriptions add the same gradients alike.

    Args:
        stage, ranks, backwards: the ZeRO stage, the number of ranks, and the backwards of a step on each rank. Rank
            ``r`` has gradient ``ranks * k + r`` of a step in its backward ``k``.
        exact: gradients are sent between ranks without rounding.
    """
    numel = ranks * backwards
    if ranks == 1 or backwards == 1:
        # One rank divides each loss by the number, and ranks divide their sum: the same for a power of two.
        if ranks == 1 or (exact and numel & (numel - 1) == 0):
            return f"{numel}, one by one"
        return f"{numel}, rank by rank"
    first = "of each rank, then these" if stage < 2 else "of each backward, then these"
    return f"{ranks} ranks times {backwards} backwards, those {first}"
