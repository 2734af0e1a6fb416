"""Loss scaling for fp16: by how much the loss is multiplied before backward, as policies.

The policy is chosen at construction. Each window ends with one
``update(overflow)``, where ``overflow`` says whether any rank's reduced
gradients held an infinity or a NaN, so that every rank computes the same next
value (DESIGN.md, law 6).

The dynamic policy gives the same values as DeepSpeed 0.19's. Like it, it
raises when the scale would have to go below its minimum. Unlike it, it stops
growing where the scale would no longer be a finite float32.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from longshore.engine.wording import is_integer, is_number, shown
from longshore.errors import LongshoreError

_LARGEST_POWER = 127
_LARGEST = 2.0**_LARGEST_POWER
"""The next power is infinite as float32, the dtype in which losses are scaled."""


class LossScaleError(LongshoreError):
    """Gradients overflow although the loss scale is at its minimum. Nothing was changed by the last window."""


class LossScale(ABC):
    """What the loss is multiplied with, and gradients are divided by."""

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


class NoLossScale(LossScale):
    """fp32 and bf16: 1, and whatever the gradients are is applied."""

    skips_overflow = False

    @property
    def value(self) -> float:
        return 1.0

    def update(self, overflow: bool) -> None:
        """Nothing to do: there is no scale that could be at fault."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        _check_keys(state_dict, set(), "no loss scale")


class StaticLossScale(LossScale):
    """The same scale for every window; one that overflows is skipped.

    Args:
        scale: above 0, finite.

    Raises:
        ValueError: any other.
    """

    skips_overflow = True

    def __init__(self, scale: float) -> None:
        self._scale = _scale("loss_scale", scale)

    @property
    def value(self) -> float:
        return self._scale

    def update(self, overflow: bool) -> None:
        """Nothing to do: the scale is the user's."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        _check_keys(state_dict, set(), "a static loss scale")


class DynamicLossScale(LossScale):
    """Doubles after a while without overflow, halves after overflows.

    Args:
        initial_scale_power: the first scale is 2 to this power.
        scale_window: windows without overflow after which the scale doubles.
        hysteresis: how many overflows it takes to halve the scale. Once they
            are used up, every further one halves it, until they are refilled.
        consecutive_hysteresis: refill them at every window without overflow,
            rather than when the scale doubles.
        min_loss_scale: halving stops here.

    Raises:
        ValueError: all that is out of range, at once.
    """

    skips_overflow = True

    def __init__(
        self,
        initial_scale_power: int = 16,
        scale_window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_loss_scale: float = 1.0,
    ) -> None:
        _check_dynamic(initial_scale_power, scale_window, hysteresis, consecutive_hysteresis, min_loss_scale)
        self._scale_window = scale_window
        self._hysteresis = hysteresis
        self._consecutive_hysteresis = consecutive_hysteresis
        self._min_loss_scale = float(min_loss_scale)
        # Changes with every window.
        self._scale = 2.0**initial_scale_power
        self._hysteresis_left = hysteresis
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
        if self._scale == self._min_loss_scale:
            raise LossScaleError(
                f"the gradients of window {self._windows} overflow at a loss scale of {self._scale:g}, which is "
                f"min_loss_scale, so it cannot be halved again. The step was skipped and no weight changed. Look for "
                f"NaN or infinity in the data and the loss (torch.autograd.set_detect_anomaly), lower the learning "
                f"rate, train in bf16, or lower min_loss_scale"
            )
        self._scale = max(self._scale / 2.0, self._min_loss_scale)

    def _grow(self) -> None:
        if self._consecutive_hysteresis:
            self._hysteresis_left = self._hysteresis
        clean = self._windows - self._last_overflow - 1
        if clean > 0 and clean % self._scale_window == 0:
            self._hysteresis_left = self._hysteresis
            self._scale = min(self._scale * 2.0, _LARGEST)

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
        scale = _scale("scale", state_dict["scale"])
        windows, last, left = (state_dict[key] for key in ("windows", "last_overflow", "hysteresis_left"))
        if not (is_integer(windows) and is_integer(last) and -1 <= last < max(windows, 1) and windows >= 0):
            raise ValueError(f"no run leads to windows={shown(windows)} with last_overflow={shown(last)}")
        if not (is_integer(left) and left >= 1):
            raise ValueError(f"hysteresis_left must be an integer of at least 1, and is {shown(left)}")
        self._scale = max(scale, self._min_loss_scale)
        self._hysteresis_left = min(left, self._hysteresis)
        self._windows, self._last_overflow = windows, last


def _scale(name: str, value: Any) -> float:
    if is_number(value) and 0.0 < value <= _LARGEST:
        return float(value)
    raise ValueError(f"{name} must be a finite number above 0, and is {shown(value)}")


def _check_dynamic(power: Any, window: Any, hysteresis: Any, consecutive: Any, least: Any) -> None:
    problems = []
    if not (is_integer(power) and 0 <= power <= _LARGEST_POWER):
        problems.append(f"initial_scale_power must be an integer from 0 to {_LARGEST_POWER}, and is {shown(power)}")
    for name, value in (("scale_window", window), ("hysteresis", hysteresis)):
        if not (is_integer(value) and value >= 1):
            problems.append(f"{name} must be an integer of at least 1, and is {shown(value)}")
    if not isinstance(consecutive, bool):
        problems.append(f"consecutive_hysteresis must be true or false, and is {shown(consecutive)}")
    if not (is_number(least) and math.isfinite(least) and least > 0):
        problems.append(f"min_loss_scale must be a finite number above 0, and is {shown(least)}")
    if not problems and least > 2.0**power:
        problems.append(f"min_loss_scale={least:g} is above the first scale, 2**{power}: raise initial_scale_power")
    if problems:
        raise ValueError("; ".join(problems))


def _check_keys(state: Mapping[str, Any], expected: set[str], policy: str) -> None:
    if set(state) != expected:
        raise ValueError(
            f"the state of {policy} has the keys {sorted(expected)}, and this one has {sorted(map(str, state))}: "
            f"it was saved with another loss scale; configure the same one"
        )
