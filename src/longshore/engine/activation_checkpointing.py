"""Activation checkpointing on ``torch.utils.checkpoint``.

Everything that a checkpointed function computes is dropped after forward and computed again in backward; only its
inputs are kept, on their device or, with ``cpu_checkpointing``, in host memory. Gradients have the same bits either
way, since the recomputation uses the random state of the first run. An input comes back from the host with its values,
strides and alignment, so that the recomputation runs the same kernels on it and gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from longshore.activations import compute_again, held_host_bytes
from longshore.engine.wording import shown

__all__ = ["checkpoint", "held_host_bytes", "install", "is_configured", "reset"]

# -- settings ----------------------------------------------------------------------

_on_host: bool | None = None
"""Whether inputs of checkpointed functions are kept in host memory; None: never configured."""


def install(cpu_checkpointing: bool | None) -> None:
    """Set whether later calls of :func:`checkpoint` keep inputs in host memory; None: as if never configured."""
    global _on_host
    _on_host = cpu_checkpointing


def is_configured() -> bool:
    """Return whether ``configure``, or the engine's configuration, set where inputs are kept."""
    return _on_host is not None


def reset() -> None:
    """Do nothing, and keep the settings. Saved inputs live exactly as long as the graph that they belong to, so a
    forward without a backward frees them with its outputs."""


# -- the call ----------------------------------------------------------------------


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function(*args, **kwargs)``, and compute it again in backward instead of keeping its activations.

    With ``cpu_checkpointing`` the tensors among the arguments (not those inside containers) are copied to host memory,
    once for each call, and brought back for backward, those of each call while the one after it is computed again. Both
    copies run on streams of their own. A nested checkpoint keeps nothing, since the outer one computes it again.

    Args:
        function: a function that returns the same outputs for the same inputs and random state.
        *args: passed to ``function``; tensors among them may require gradients.
        **kwargs: passed to ``function`` likewise.

    Returns:
        The result of ``function``.

    Raises:
        TypeError: ``function`` cannot be called.
    """
    if not callable(function):
        raise TypeError(f"checkpoint takes a function and its arguments, and {shown(function)} cannot be called")
    return compute_again(function, args, kwargs, inputs_on_host=bool(_on_host))
