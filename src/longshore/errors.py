"""The exceptions that users catch. Bad arguments are ``ValueError`` or ``TypeError``."""

from __future__ import annotations

import os


class LongshoreError(RuntimeError):
    """Base of everything that longshore raises about its own state."""


class GradientError(LongshoreError):
    """A gradient that cannot be counted: sparse, of another dtype or shape, from another device.

    Raised by ``step()`` before any parameter changes. ``zero_grad()`` discards the window, and training can go on.
    """


class ParameterError(LongshoreError):
    """A parameter that cannot be stepped: moved to another device, changed in shape or dtype, or written where torch
    could not see it."""


class HostMemoryError(LongshoreError, MemoryError):
    """Host memory for the optimizer's state that the system does not give.

    Raised by the first ``step()`` before any parameter changes. The gradients are kept: once there is memory,
    ``step()`` can be called again.
    """


class BrokenStateError(LongshoreError):
    """A step failed half way: some tiles were stepped and some were not.

    Every later call raises this until ``load_state_dict`` brings a whole state.
    """


class RankError(LongshoreError):
    """The ranks do different things, or one of them is gone."""


class CheckpointError(LongshoreError):
    """A checkpoint that cannot be written, is not whole, or is another model's or optimizer's.

    Raised before anything was loaded, unless it says otherwise.
    """


class NoCheckpointError(CheckpointError):
    """A folder without any checkpoint: nothing was saved there yet, or the path is wrong."""

    def __init__(self, folder: object) -> None:
        super().__init__(
            f"{folder} has no checkpoint, and nothing was loaded: check the path; a script that begins or continues "
            "catches longshore.NoCheckpointError at its first start"
        )


def debugging() -> bool:
    """Return whether ``LONGSHORE_DEBUG`` asks for checks that cost time."""
    return os.environ.get("LONGSHORE_DEBUG", "0") not in ("", "0")
