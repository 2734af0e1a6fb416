"""Learning-rate schedules: names, parameters, bounds, defaults and rates, each in one class.

The rates are pure functions of the number of calls of ``step()``. Step by step they are the same floats as those of
the classes of the same names in DeepSpeed 0.19, including these surprises:

- Warmup stays at its lowest rate for two steps: the first call of ``step()`` does not change it. ``WarmupCosineLR``
  starts at 0, whatever ``warmup_min_ratio`` is, which applies from the second step on.
- ``warmup_num_steps=1`` is 2.
- ``OneCycle`` with ``cycle_momentum`` sets ``betas`` to (momentum, 0.99). The first step is taken with
  ``cycle_min_mom``, the second with nearly ``cycle_max_mom``.

Where ``decay_mom_rate`` drives a beta out of [0, 1), longshore raises an error, unlike DeepSpeed.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from longshore.engine.config.base import NamedModel
from longshore.engine.config.values import (
    AT_LEAST_0,
    AT_LEAST_1,
    BETA,
    Either,
    Items,
    Number,
    OneOf,
)

_ONE_CYCLE_BETA2 = 0.99

PerGroup = float | tuple[float, ...]
"""One for all parameter groups, or one for each."""

_LARGEST = 2.0**127
"""A larger rate would be infinite in float32, and products of two of them in double precision."""
_RATE = Number(0, maximum=_LARGEST)
_RATES = Either((_RATE, Items(_RATE)))
_PerGroup = Annotated[PerGroup, _RATES]
_Momentum = Annotated[PerGroup, Either((BETA, Items(BETA)))]
_Steps = Annotated[int, AT_LEAST_1]
_WarmupType = Annotated[Literal["log", "linear"], OneOf(("log", "linear"))]
_Ratio = Annotated[float, _RATE]


class ScheduleConfig(NamedModel):
    """Parameters of a schedule, and the rates that they give."""

    @abstractmethod
    def lrs(self, steps: int, base_lrs: Sequence[float]) -> list[float]:
        """Learning rates after ``steps`` calls of ``step()``, one for each group; ``base_lrs``: where each started."""

    def betas(self, steps: int, group_count: int) -> list[tuple[float, float]] | None:
        """Betas after ``steps`` calls, one pair for each group; None: the schedule does not change them."""
        return None

    def bounds(self, base_lrs: Sequence[float]) -> tuple[list[float], list[float]] | None:
        """Lowest and highest rate of each group; None: the schedule has no such bounds."""
        return None


def _check_total(schedule: Any) -> Any:
    """Raise ValueError unless a schedule that decays has as many steps as its warmup."""
    total, warmup = schedule.total_num_steps, schedule.warmup_num_steps
    if total < warmup:
        raise ValueError(
            f"total_num_steps {total} is below warmup_num_steps, which is {warmup}, so that nothing would be left to "
            "decay; change one"
        )
    return schedule


class WarmupLRConfig(ScheduleConfig):
    """From ``warmup_min_lr`` to ``warmup_max_lr`` (None: the group's own), then constant."""

    type: Literal["WarmupLR"] = "WarmupLR"
    warmup_min_lr: _PerGroup = 0.0
    warmup_max_lr: Annotated[PerGroup | None, _RATES] = None
    warmup_num_steps: _Steps = 1000
    warmup_type: _WarmupType = "log"

    def lrs(self, steps: int, base_lrs: Sequence[float]) -> list[float]:
        done = _warmup(steps - 1, self.warmup_num_steps, self.warmup_type)
        return _between(self.warmup_min_lr, self.warmup_max_lr, 1.0 if done is None else done, base_lrs)

    def bounds(self, base_lrs: Sequence[float]) -> tuple[list[float], list[float]]:
        return _bounds(self.warmup_min_lr, self.warmup_max_lr, base_lrs)


class WarmupDecayLRConfig(ScheduleConfig):
    """``WarmupLR``, then linear decay to zero at ``total_num_steps``."""

    type: Literal["WarmupDecayLR"] = "WarmupDecayLR"
    total_num_steps: _Steps
    warmup_min_lr: _PerGroup = 0.0
    warmup_max_lr: Annotated[PerGroup | None, _RATES] = 1e-3
    warmup_num_steps: _Steps = 1000
    warmup_type: _WarmupType = "log"

    _has_steps_to_decay = model_validator(mode="after")(_check_total)

    def lrs(self, steps: int, base_lrs: Sequence[float]) -> list[float]:
        fraction = _warmup(steps - 1, self.warmup_num_steps, self.warmup_type)
        if fraction is None:
            warmup = _warmup_steps(self.warmup_num_steps)
            fraction = max(0.0, (self.total_num_steps - (steps - 1)) / max(1, self.total_num_steps - warmup))
        return _between(self.warmup_min_lr, self.warmup_max_lr, fraction, base_lrs)

    def bounds(self, base_lrs: Sequence[float]) -> tuple[list[float], list[float]]:
        return _bounds(self.warmup_min_lr, self.warmup_max_lr, base_lrs)


class WarmupCosineLRConfig(ScheduleConfig):
    """Warmup and cosine decay as ratios of each group's learning rate."""

    type: Literal["WarmupCosineLR"] = "WarmupCosineLR"
    total_num_steps: _Steps
    warmup_min_ratio: _Ratio = 0.0
    warmup_num_steps: _Steps = 1000
    cos_min_ratio: _Ratio = 1e-4
    warmup_type: _WarmupType = "log"

    _has_steps_to_decay = model_validator(mode="after")(_check_total)

    def lrs(self, steps: int, base_lrs: Sequence[float]) -> list[float]:
        ratio = self.ratio(steps)
        return [base * ratio for base in base_lrs]

    def ratio(self, steps: int) -> float:
        """The rates after ``steps`` calls of ``step()``, as a share of those that the groups started from."""
        return 0.0 if steps == 0 else self._ratio(steps - 1)

    def _ratio(self, iteration: int) -> float:
        done = _warmup(iteration, self.warmup_num_steps, self.warmup_type)
        if done is not None:
            return self.warmup_min_ratio + done * (1.0 - self.warmup_min_ratio)
        warmup = _warmup_steps(self.warmup_num_steps)
        progress = min(1.0, (iteration - warmup + 1) / max(1, self.total_num_steps - warmup))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)


class OneCycleConfig(ScheduleConfig):
    """The one-cycle policy (Smith 2018, arXiv:1803.09820), then decay.

    The rate goes up over the first half and down over the second; momentum goes the other way.
    ``cycle_second_step_size`` and ``cycle_second_stair_count``: None means as the first.
    """

    type: Literal["OneCycle"] = "OneCycle"
    cycle_min_lr: _PerGroup
    cycle_max_lr: _PerGroup
    decay_lr_rate: _Ratio = 0.0
    cycle_first_step_size: _Steps = 2000
    cycle_second_step_size: Annotated[int | None, AT_LEAST_0] = None
    cycle_first_stair_count: Annotated[int, AT_LEAST_0] = 0
    cycle_second_stair_count: Annotated[int | None, AT_LEAST_0] = None
    decay_step_size: Annotated[int, AT_LEAST_0] = 0
    cycle_momentum: bool = True
    cycle_min_mom: _Momentum = 0.8
    cycle_max_mom: _Momentum = 0.9
    decay_mom_rate: Annotated[float, Number(-_LARGEST, maximum=_LARGEST)] = 0.0

    @model_validator(mode="after")
    def _decay_has_steps(self) -> OneCycleConfig:
        given = [name for name in ("decay_lr_rate", "decay_mom_rate") if getattr(self, name) != 0]
        if given and self.decay_step_size == 0:
            raise ValueError(
                f"{' and '.join(given)} without decay_step_size would never decay; "
                "set decay_step_size to a number of steps, or leave the rate out"
            )
        return self

    def lrs(self, steps: int, base_lrs: Sequence[float]) -> list[float]:
        if self._in_cycle(steps):
            return _between(self.cycle_min_lr, self.cycle_max_lr, self._height(steps), base_lrs)
        return [low / self._decay(steps, self.decay_lr_rate) for low in _each(self.cycle_min_lr, len(base_lrs))]

    def bounds(self, base_lrs: Sequence[float]) -> tuple[list[float], list[float]]:
        return _bounds(self.cycle_min_lr, self.cycle_max_lr, base_lrs)

    def betas(self, steps: int, group_count: int) -> list[tuple[float, float]] | None:
        if self.cycle_momentum and steps == 0:
            return [(low, _ONE_CYCLE_BETA2) for low in _each(self.cycle_min_mom, group_count)]
        return self.cycled_betas(steps, group_count)

    def cycled_betas(self, steps: int, group_count: int) -> list[tuple[float, float]] | None:
        """As :meth:`betas`, but before the first step as the cycle has them, whose momentum begins at its highest.

        DeepSpeed's ``get_mom()`` returns these, while the groups begin with the lowest.
        """
        if not self.cycle_momentum:
            return None
        lows, highs = _each(self.cycle_min_mom, group_count), _each(self.cycle_max_mom, group_count)
        if self._in_cycle(steps):
            height = self._height(steps)
            momenta = [high - (high - low) * height for low, high in zip(lows, highs, strict=True)]
        else:
            momenta = [high * self._decay(steps, self.decay_mom_rate) for high in highs]
        for index, momentum in enumerate(momenta):
            if not 0.0 <= momentum < 1.0:
                raise ValueError(
                    f"OneCycle: after {steps} steps, decay_mom_rate={self.decay_mom_rate} makes betas[0] of group "
                    f"{index} {momentum:g}, which must be at least 0 and below 1: lower decay_mom_rate or cycle_max_mom"
                )
        return [(momentum, _ONE_CYCLE_BETA2) for momentum in momenta]

    def _halves(self) -> tuple[float, float]:
        """Steps upwards and downwards."""
        first, second = self.cycle_first_step_size, self.cycle_second_step_size
        return float(first), float(first if second is None else second)

    def _in_cycle(self, steps: int) -> bool:
        return steps - 1 < sum(self._halves())

    def _height(self, steps: int) -> float:
        """0 at the ends of the cycle, 1 between its halves."""
        first, second = self._halves()
        total = first + second
        turn = first / total
        position = 1.0 + steps / total - math.floor(1 + steps / total)
        rising = position <= turn
        stairs = self.cycle_first_stair_count
        if not rising and self.cycle_second_stair_count is not None:
            stairs = self.cycle_second_stair_count
        if stairs == 0:
            return position / turn if rising else (position - 1) / (turn - 1)
        # From whole steps: a position that is 1e-16 below a stair's edge would be a stair too low.
        offset = steps % total
        if offset <= first:
            return math.floor(offset * stairs / first) / stairs
        return math.floor((total - offset) * stairs / second) / stairs

    def _decay(self, steps: int, rate: float) -> float:
        return 1 if rate == 0 else 1 + rate * ((steps - sum(self._halves())) / self.decay_step_size)


class LRRangeTestConfig(ScheduleConfig):
    """A learning rate that grows by ``lr_range_test_step_rate`` every ``lr_range_test_step_size`` steps."""

    type: Literal["LRRangeTest"] = "LRRangeTest"
    lr_range_test_min_lr: _PerGroup = 1e-3
    lr_range_test_step_size: _Steps = 2000
    lr_range_test_step_rate: Annotated[float, Number(above=0, maximum=_LARGEST)] = 1.0
    lr_range_test_staircase: bool = False

    def lrs(self, steps: int, base_lrs: Sequence[float]) -> list[float]:
        size = self.lr_range_test_step_size
        growth = 1 + self.lr_range_test_step_rate * (steps // size if self.lr_range_test_staircase else steps / size)
        return [low * growth for low in _each(self.lr_range_test_min_lr, len(base_lrs))]


def _each(value: float | Sequence[float], count: int) -> list[float]:
    return list(value) if isinstance(value, Sequence) else [value] * count


def _between(low: PerGroup, high: PerGroup | None, fraction: float, base_lrs: Sequence[float]) -> list[float]:
    """The rate of each group at a fraction of the way from ``low`` to ``high``; None: to its rate in ``base_lrs``."""
    return [low + (high - low) * fraction for low, high in zip(*_bounds(low, high, base_lrs), strict=True)]


def _bounds(low: PerGroup, high: PerGroup | None, base_lrs: Sequence[float]) -> tuple[list[float], list[float]]:
    count = len(base_lrs)
    return _each(low, count), [*base_lrs] if high is None else _each(high, count)


def _warmup_steps(steps: int) -> int:
    return max(2, steps)  # log(1) would divide by zero


def _warmup(iteration: int, steps: int, kind: str) -> float | None:
    """The part of a warmup that is done, from 0 to 1; None: all of it. Iteration -1 is before the first ``step()``."""
    steps = _warmup_steps(steps)
    if iteration < 0:
        return 0.0
    if iteration >= steps:
        return None
    return 1.0 / math.log(steps) * math.log(iteration + 1) if kind == "log" else iteration / steps


SchedulerConfig = Annotated[
    WarmupLRConfig | WarmupDecayLRConfig | WarmupCosineLRConfig | OneCycleConfig | LRRangeTestConfig,
    Field(discriminator="type"),
]

SCHEDULER_CONFIGS: dict[str, type[ScheduleConfig]] = {
    kind.__name__.removesuffix("Config"): kind
    for kind in (WarmupLRConfig, WarmupDecayLRConfig, WarmupCosineLRConfig, OneCycleConfig, LRRangeTestConfig)
}

SCHEDULER_TYPE = OneOf(
    tuple(SCHEDULER_CONFIGS),
    {
        "reducelronplateau": "its step() takes a metric, which engine.step() does not have; leave scheduler out, build "
        "it on the optimizer that initialize() returns, and call it after engine.step()"
    },
    "for any other schedule, torch's included, construct it and pass it as initialize(lr_scheduler=...)",
)
