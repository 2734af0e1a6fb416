"""Optimizers of users that one of ours took over from (see ``engine/client.py``): which one stands for them now, and
whether their step is that of their class."""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim import Optimizer

TAKEN_BY = "_longshore_optimizer"
"""Name of the attribute of a user's optimizer in which the one is that took over from it."""

IN_PLACE_OF = "_longshore_in_place_of"
"""Name of the attribute of an optimizer in which the user's own is if a library made it in that one's place."""


def stands_for(optimizer: Any) -> Any:
    """Return the optimizer that took over from this one; this one if none did."""
    return getattr(optimizer, "__dict__", {}).get(TAKEN_BY, optimizer)


def check_no_own_step(optimizer: Optimizer) -> None:
    """Check that the optimizer itself was given no ``step``, which would not be called any more.

    A wrapper that names its function passes: torch's schedulers count steps with one, ``torch.compile`` returns one.

    Raises:
        ValueError: it was given one.
    """
    found = vars(optimizer).get("step")
    if found is not None and inspect.unwrap(_function(found)) is not inspect.unwrap(_function(type(optimizer).step)):
        name = type(optimizer).__name__
        raise ValueError(
            f"this {name} has a step() of its own (optimizer.step = ...), which longshore would not call; pass the "
            f"optimizer as {name} made it, and register a step_pre_hook or step_post_hook for what is to happen there"
        )


def steps_as(kind: type, base: type) -> bool:
    """Return whether optimizers of class ``kind`` step as those of ``base``, a class of torch, do."""
    return issubclass(kind, base) and all(
        _without_hooks(getattr(kind, name)) is _without_hooks(getattr(base, name)) for name in _STEP
    )


_STEP = ("step", "_init_group")
"""The methods of a class of torch that make a step; ``_init_group`` collects what is stepped."""


def _function(method: Any) -> Any:
    return getattr(method, "__func__", method)


def _without_hooks(step: Any) -> Any:
    """Return what torch's wrapper calls that runs a step's hooks; it wraps the step of each class when its first
    optimizer is made, unless a base's is wrapped already."""
    wrappers = Optimizer.profile_hook_step.__code__.co_consts
    while getattr(step, "__code__", None) in wrappers:
        step = step.__wrapped__
    return step
