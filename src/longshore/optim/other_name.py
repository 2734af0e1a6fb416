"""Optimizers of users that stand for one of ours, which took over from them (see ``engine/client.py``)."""

from __future__ import annotations

from typing import Any

TAKEN_BY = "_longshore_optimizer"
"""Name of the attribute of a user's optimizer in which the one is that took over from it."""

IN_PLACE_OF = "_longshore_in_place_of"
"""Name of the attribute of an optimizer in which the user's own is if a library made it in that one's place."""


def stands_for(optimizer: Any) -> Any:
    """Return the optimizer that took over from this one; this one if none did."""
    return getattr(optimizer, "__dict__", {}).get(TAKEN_BY, optimizer)
