"""Dtypes by their names in a configuration, the cast of a model's inputs, and loss scaling for fp16: the factor by
which the loss is multiplied before backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from longshore.engine.config.model import LossScaling
from longshore.engine.config.values import LARGEST_SCALE
from longshore.engine.wording import is_integer, is_number, shown
from longshore.errors import LongshoreError
from longshore.optim.tiled_optimizer import TiledOptimizer

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Convert floating tensors inside lists, tuples and dictionaries to ``dtype``."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast(entry, dtype) for entry in value))
    if isinstance(value, (list, tuple)):
        return type(value)(cast(entry, dtype) for entry in value)
    if type(value) is dict:
        return {key: cast(entry, dtype) for key, entry in value.items()}
    return value


class LossScaleError(LongshoreError):
    """Gradients overflow although the loss scale is at its minimum. Nothing was changed by the last window."""


class _Scale:
    """Base class of both kinds of scale."""

    is_dynamic: bool
    _value: float

    @property
    def value(self) -> float:
        return self._value

    def hand_to(self, optimizer: TiledOptimizer, overflowed: bool = False) -> None:
        """Set the optimizer's loss scale; ``overflowed``: the step of the last window was skipped."""
        optimizer.set_loss_scale(self.value, is_dynamic=self.is_dynamic, overflowed=overflowed)


class FixedLossScale(_Scale):
    """A loss scale that is the same in every window.

    Args:
        scale: the scale; a step that overflows is skipped. None: the scale is 1, and NaN and infinity are applied, as
            in torch.
    """

    is_dynamic = False

    def __init__(self, scale: float | None) -> None:
        self._value = 1.0 if scale is None else scale
        self.skips_overflow = scale is not None

    def update(self, overflow: bool) -> None:
        """Do nothing, since the user chose the scale."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dictionary: the scale comes from the configuration."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ValueError for the state of a dynamic scale."""
        _check_keys(state_dict, set(), "a static loss scale" if self.skips_overflow else "no loss scale")


class DynamicLossScale(_Scale):
    """A loss scale that doubles after ``window`` windows without overflow, and is halved after overflows.

    Once the hysteresis is used up, every further overflow halves the scale, until the hysteresis is refilled.
    """

    skips_overflow = is_dynamic = True

    def __init__(self, scaling: LossScaling) -> None:
        self._scaling = scaling
        # Change with every window.
        self._value = 2.0**scaling.initial_scale_power
        self._hysteresis_left = scaling.hysteresis
        self._windows = 0
        self._last_overflow = -1

    def update(self, overflow: bool) -> None:
        """End a window; ``overflow``: its gradients had an infinity or a NaN on some rank.

        Raises:
            LossScaleError: the scale is at its minimum and cannot be halved. It is unchanged.
        """
        scaling, clean = self._scaling, self._windows - self._last_overflow - 1
        if overflow and self._hysteresis_left > 1:
            self._hysteresis_left -= 1
        elif overflow and self.value == scaling.min_scale:
            raise LossScaleError(
                f"the gradients of window {self._windows} overflow at a loss scale of {self.value:g}, which is "
                f"min_loss_scale, so it cannot be halved again. The step was skipped and no weight changed. Look for "
                f"NaN or infinity in the data and the loss (torch.autograd.set_detect_anomaly), lower the learning "
                f"rate, train in bf16, or lower min_loss_scale"
            )
        elif overflow:
            self._value = max(self.value / 2.0, scaling.min_scale)
        elif clean > 0 and clean % scaling.window == 0:
            self._value = min(self.value * 2.0, LARGEST_SCALE)
            self._hysteresis_left = scaling.hysteresis
        elif scaling.consecutive_hysteresis:
            self._hysteresis_left = scaling.hysteresis
        if overflow:
            self._last_overflow = self._windows
        self._windows += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers to save."""
        return {
            "scale": self.value,
            "hysteresis_left": self._hysteresis_left,
            "windows": self._windows,
            "last_overflow": self._last_overflow,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state; a scale below the configured minimum, or more hysteresis than is configured, is
        brought to that bound.

        Raises:
            ValueError: the state is that of a fixed scale, or has numbers that no run leads to. Nothing was changed.
        """
        _check_keys(state_dict, set(self.state_dict()), "a dynamic loss scale")
        scale, left, windows, last = (state_dict[key] for key in self.state_dict())
        if not (is_number(scale) and 0.0 < scale <= LARGEST_SCALE):
            raise ValueError(f"scale must be a finite number above 0, and is {shown(scale)}")
        if not (is_integer(windows) and is_integer(last) and -1 <= last < max(windows, 1) and windows >= 0):
            raise ValueError(f"no run leads to windows={shown(windows)} with last_overflow={shown(last)}")
        if not (is_integer(left) and left >= 1):
            raise ValueError(f"hysteresis_left must be an integer of at least 1, and is {shown(left)}")
        self._value = max(float(scale), self._scaling.min_scale)
        self._hysteresis_left = min(left, self._scaling.hysteresis)
        self._windows, self._last_overflow = windows, last


LossScale = FixedLossScale | DynamicLossScale


def _check_keys(state: Mapping[str, Any], expected: set[str], of: str) -> None:
    if set(state) != expected:
        raise ValueError(
            f"the state of {of} has the keys {sorted(expected)}, and this one has {sorted(map(str, state))}: it was "
            "saved with another loss scale; configure the same one"
        )


def make_loss_scale(scaling: LossScaling | None) -> LossScale:
    """Make the loss scale of a configuration. None means that the loss is not scaled."""
    if scaling is None or scaling.scale is not None:
        return FixedLossScale(None if scaling is None else scaling.scale)
    return DynamicLossScale(scaling)
