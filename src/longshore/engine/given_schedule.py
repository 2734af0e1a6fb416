"""A scheduler that the user built: made to drive our optimizer, or refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer


def adopt_schedule(given: Any, optimizer: Optimizer, client: Optimizer | None) -> Any:
    """The scheduler that the engine steps.

    Args:
        given: a scheduler, or a function from an optimizer to one.
        optimizer: the engine's.
        client: the user's own, in whose place ``optimizer`` is; a scheduler that was built on it changes over.

    Raises:
        TypeError: neither of the two.
        ValueError: a scheduler on any other optimizer, whose groups nobody steps, or one whose ``step()`` needs what
            the engine cannot give.
    """
    is_schedule = not isinstance(given, type) and callable(getattr(given, "step", None))
    schedule = given(optimizer) if not is_schedule and callable(given) else given
    if not callable(getattr(schedule, "step", None)):
        found = f"{type(schedule).__name__}" if schedule is given else f"a function that returns {_name(schedule)}"
        raise TypeError(f"lr_scheduler is a scheduler, or a function from an optimizer to one, not {found}")
    _check_step(schedule)
    change_over(schedule, optimizer, client)
    return schedule


def change_over(schedule: Any, optimizer: Optimizer, client: Optimizer | None) -> None:
    """A scheduler that was built on ``client``, and those inside it, drive ``optimizer`` from now on.

    Raises:
        ValueError: one on any other optimizer.
    """
    holders = list(_holders(schedule, set()))
    for holder, name in holders:
        held = getattr(holder, name)
        if held is not optimizer and held is not client:
            raise ValueError(_foreign(holder, held, client is not None))
    for holder, name in holders:
        if getattr(holder, name) is not optimizer:
            setattr(holder, name, optimizer)
            if getattr(holder, "_step_count", None) == 1:
                # The first step() would look for a mark that torch left on the other optimizer, and warn.
                holder._step_count = 2


def _holders(schedule: Any, seen: set[int]) -> Iterator[tuple[Any, str]]:
    """Where a scheduler, and those inside it (in a chain, behind a warmup), keep their optimizer."""
    if id(schedule) in seen:
        return
    seen.add(id(schedule))
    for name, value in list(getattr(schedule, "__dict__", {}).items()):
        if isinstance(value, Optimizer):
            yield schedule, name
            continue
        for inner in value if isinstance(value, (list, tuple)) else (value,):
            if callable(getattr(inner, "step", None)) and not isinstance(inner, (type, Optimizer)):
                yield from _holders(inner, seen)


def _foreign(holder: Any, held: Optimizer, has_client: bool) -> str:
    name = _name(holder)
    way = "build it on the optimizer that is passed as optimizer=, or " if has_client else ""
    return (
        f"lr_scheduler: the {name} was built on an optimizer ({_name(held)}) that the engine does not step, so it "
        f"would set learning rates that nobody uses; {way}pass a function: "
        f"lr_scheduler=lambda optimizer: {name}(optimizer, ...)"
    )


def _name(value: Any) -> str:
    return type(value).__name__


def _check_step(scheduler: Any) -> None:
    """Raises ValueError where ``step()`` needs what the engine cannot give."""
    try:
        parameters = inspect.signature(scheduler.step).parameters.values()
    except (TypeError, ValueError):  # a builtin, say
        return
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [entry.name for entry in parameters if entry.default is entry.empty and entry.kind not in variadic]
    if needed:
        raise ValueError(
            f"lr_scheduler={type(scheduler).__name__} is not supported: its step() takes "
            f"{', '.join(map(repr, needed))}, and engine.step() calls it with nothing; build it on the optimizer that "
            "initialize() returns, leave lr_scheduler out, and call it after engine.step()"
        )
