"""Loss scaling for fp16: policies for the factor by which the loss is multiplied before backward.

Each window ends with one ``update(overflow)``. ``overflow`` is true on all ranks if the reduced gradients of any rank
had an infinity or a NaN, so that every rank computes the same next scale.

The dynamic policy gives the same values as DeepSpeed 0.19's. It also raises an error when the scale would have to go
below its minimum. Unlike DeepSpeed's, it stops growing where the scale would no longer be a finite float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from longshore.engine.config.model import LossScaling
from longshore.engine.config.values import LARGEST_SCALE
from longshore.engine.wording import is_integer, is_number, shown
from longshore.errors import LongshoreError


class LossScaleError(LongshoreError):
    """Gradients overflow although the loss scale is at its minimum. Nothing was changed by the last window."""


class LossScale(ABC):
    """Factor by which the loss is multiplied and gradients are divided."""

    skips_overflow: bool
    """Whether a step with infinite or NaN gradients is skipped. Without a scaler they are applied, as torch does."""

    @property
    @abstractmethod
    def value(self) -> float:
        """The scale of the current window."""

    @abstractmethod
    def update(self, overflow: bool) -> None:
        """End a window.

        Args:
            overflow: whether its gradients were infinite or NaN on any rank.

        Raises:
            LossScaleError: the scale cannot go lower. The policy is as it was before the call.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Numbers to save; empty where nothing ever changes."""

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` of the same policy returned.

        Raises:
            ValueError: the state of another policy, or numbers that no run leads to.
        """


class FixedLossScale(LossScale):
    """The same scale in every window.

    Args:
        scale: the scale, with which a step that overflows is skipped; None: 1, and any gradients are applied.
    """

    def __init__(self, scale: float | None) -> None:
        self._scale = 1.0 if scale is None else scale
        self.skips_overflow = scale is not None

    @property
    def value(self) -> float:
        return self._scale

    def update(self, overflow: bool) -> None:
        """Do nothing: the scale is the user's."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        _check_keys(state_dict, set(), "a static loss scale" if self.skips_overflow else "no loss scale")


class DynamicLossScale(LossScale):
    """Double after ``window`` windows without overflow, halve after overflows.

    Once the hysteresis is used up, every further overflow halves the scale, until the hysteresis is refilled.

    Args:
        scaling: the settings, with ``scale`` None.
    """

    skips_overflow = True

    def __init__(self, scaling: LossScaling) -> None:
        self._window = scaling.window
        self._hysteresis = scaling.hysteresis
        self._consecutive_hysteresis = scaling.consecutive_hysteresis
        self._min_scale = scaling.min_scale
        # Changes with every window.
        self._scale = 2.0**scaling.initial_scale_power
        self._hysteresis_left = scaling.hysteresis
        self._windows = 0
        self._last_overflow = -1

    @property
    def value(self) -> float:
        return self._scale

    def update(self, overflow: bool) -> None:
        if overflow:
            self._shrink()
            self._last_overflow = self._windows
        else:
            self._grow()
        self._windows += 1

    def _shrink(self) -> None:
        if self._hysteresis_left > 1:
            self._hysteresis_left -= 1
            return
        if self._scale == self._min_scale:
            raise LossScaleError(
                f"the gradients of window {self._windows} overflow at a loss scale of {self._scale:g}, which is "
                f"min_loss_scale, so it cannot be halved again. The step was skipped and no weight changed. Look for "
                f"NaN or infinity in the data and the loss (torch.autograd.set_detect_anomaly), lower the learning "
                f"rate, train in bf16, or lower min_loss_scale"
            )
        self._scale = max(self._scale / 2.0, self._min_scale)

    def _grow(self) -> None:
        if self._consecutive_hysteresis:
            self._hysteresis_left = self._hysteresis
        clean = self._windows - self._last_overflow - 1
        if clean > 0 and clean % self._window == 0:
            self._hysteresis_left = self._hysteresis
            self._scale = min(self._scale * 2.0, LARGEST_SCALE)

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self._scale,
            "hysteresis_left": self._hysteresis_left,
            "windows": self._windows,
            "last_overflow": self._last_overflow,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved state. Where it is outside what this policy was configured
        with, it is brought to the bound: a scale below the minimum, more hysteresis than there is."""
        _check_keys(state_dict, set(self.state_dict()), "a dynamic loss scale")
        scale = state_dict["scale"]
        if not (is_number(scale) and 0.0 < scale <= LARGEST_SCALE):
            raise ValueError(f"scale must be a finite number above 0, and is {shown(scale)}")
        windows, last, left = (state_dict[key] for key in ("windows", "last_overflow", "hysteresis_left"))
        if not (is_integer(windows) and is_integer(last) and -1 <= last < max(windows, 1) and windows >= 0):
            raise ValueError(f"no run leads to windows={shown(windows)} with last_overflow={shown(last)}")
        if not (is_integer(left) and left >= 1):
            raise ValueError(f"hysteresis_left must be an integer of at least 1, and is {shown(left)}")
        self._scale = max(float(scale), self._min_scale)
        self._hysteresis_left = min(left, self._hysteresis)
        self._windows, self._last_overflow = windows, last


def _check_keys(state: Mapping[str, Any], expected: set[str], policy: str) -> None:
    if set(state) != expected:
        raise ValueError(
            f"the state of {policy} has the keys {sorted(expected)}, and this one has {sorted(map(str, state))}: "
            f"it was saved with another loss scale; configure the same one"
        )


def make_loss_scale(scaling: LossScaling | None) -> LossScale:
    """Build the policy of a configuration; None: the loss is not scaled."""
    if scaling is None or scaling.scale is not None:
        return FixedLossScale(None if scaling is None else scaling.scale)
    return DynamicLossScale(scaling)
