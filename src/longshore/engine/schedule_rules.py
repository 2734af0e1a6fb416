"""The five schedules that DeepSpeed has, as pure rules: ``steps -> learning rates``."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any


class Rule(ABC):
    """Learning rates and momenta as functions of how often ``step()`` was called."""

    @abstractmethod
    def lrs(self, steps: int, base_lrs: Sequence[float]) -> list[float]:
        """One learning rate a group. ``base_lrs``: where each group started."""

    def betas(self, steps: int) -> list[tuple[float, float]] | None:
        """One pair a group, or ``None`` to leave them as they are."""
        return None


def _each(value: float | Sequence[float], count: int) -> list[float]:
    return list(value) if isinstance(value, (list, tuple)) else [value] * count  # type: ignore[list-item]


class _Warmup:
    """0 to 1 over ``steps`` iterations, the shape that the three warmups share."""

    def __init__(self, steps: int, kind: str) -> None:
        self.steps = max(2, int(steps))  # log(1) would divide by zero
        self._is_log = kind == "log"
        self._per_log = 1.0 / math.log(self.steps)

    def fraction(self, iteration: int) -> float:
        return self._per_log * math.log(iteration + 1) if self._is_log else iteration / self.steps


class WarmupRule(Rule):
    """``WarmupLR``, and with ``total_num_steps`` also ``WarmupDecayLR``."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self._low, self._high = params["warmup_min_lr"], params["warmup_max_lr"]
        self._warmup = _Warmup(params["warmup_num_steps"], params["warmup_type"])
        self._total: int | None = params.get("total_num_steps")

    def _fraction(self, iteration: int) -> float:
        if iteration < self._warmup.steps:
            return self._warmup.fraction(iteration)
        if self._total is None:
            return 1.0
        return max(0.0, (self._total - iteration) / max(1, self._total - self._warmup.steps))

    def lrs(self, steps: int, base_lrs: Sequence[float]) -> list[float]:
        low = _each(self._low, len(base_lrs))
        high = list(base_lrs) if self._high is None else _each(self._high, len(base_lrs))
        if steps == 0:
            return low
        fraction = self._fraction(steps - 1)
        return [bottom + (top - bottom) * fraction for bottom, top in zip(low, high, strict=True)]


class CosineRule(Rule):
    def __init__(self, params: Mapping[str, Any]) -> None:
        self._start, self._floor = params["warmup_min_ratio"], params["cos_min_ratio"]
        self._warmup = _Warmup(params["warmup_num_steps"], params["warmup_type"])
        self._total: int = params["total_num_steps"]

    def _ratio(self, steps: int) -> float:
        if steps == 0:
            return 0.0
        iteration = steps - 1
        if iteration < self._warmup.steps:
            return self._start + self._warmup.fraction(iteration) * (1.0 - self._start)
        decayed = iteration - self._warmup.steps + 1
        progress = min(1.0, decayed / max(1, self._total - self._warmup.steps))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self._floor + (1.0 - self._floor) * cosine)

    def lrs(self, steps: int, base_lrs: Sequence[float]) -> list[float]:
        ratio = self._ratio(steps)
        return [base * ratio for base in base_lrs]


class RangeTestRule(Rule):
    def __init__(self, params: Mapping[str, Any]) -> None:
        self._low = params["lr_range_test_min_lr"]
        self._interval, self._rate = int(params["lr_range_test_step_size"]), params["lr_range_test_step_rate"]
        self._is_staircase = params["lr_range_test_staircase"]

    def lrs(self, steps: int, base_lrs: Sequence[float]) -> list[float]:
        intervals = steps // self._interval if self._is_staircase else steps / self._interval
        growth = 1 + self._rate * intervals
        return [low * growth for low in _each(self._low, len(base_lrs))]


class OneCycleRule(Rule):
    """Up over the first half, down over the second, then decay; momentum the other way round.

    Source: L. Smith, "A disciplined approach to neural network hyper-parameters", arXiv:1803.09820.
    """

    _BETA2 = 0.99

    def __init__(self, params: Mapping[str, Any], group_count: int) -> None:
        self._groups = group_count
        self._low_lrs, self._high_lrs = (_each(params[key], group_count) for key in ("cycle_min_lr", "cycle_max_lr"))
        self._low_momenta, self._high_momenta = (
            _each(params[key], group_count) for key in ("cycle_min_mom", "cycle_max_mom")
        )
        self._first = float(params["cycle_first_step_size"])
        second = params["cycle_second_step_size"]
        self._second = self._first if second is None else float(second)
        self._total = self._first + self._second
        self._turn = self._first / self._total
        stairs = params["cycle_second_stair_count"]
        self._first_stairs: int = params["cycle_first_stair_count"]
        self._second_stairs: int = self._first_stairs if stairs is None else stairs
        self._decay_interval = params["decay_step_size"]
        self._lr_rate, self._momentum_rate = params["decay_lr_rate"], params["decay_mom_rate"]
        self._cycles_momentum: bool = params["cycle_momentum"]

    def _in_cycle(self, steps: int) -> bool:
        return steps - 1 < self._total

    def _height(self, steps: int) -> float:
        """0 at the ends of the cycle, 1 where it turns."""
        position = 1.0 + steps / self._total - math.floor(1 + steps / self._total)
        rising = position <= self._turn
        stairs = self._first_stairs if rising else self._second_stairs
        if stairs <= 0:
            return position / self._turn if rising else (position - 1) / (self._turn - 1)
        # From whole steps: a position that is 1e-16 below a stair's edge would be a stair too low.
        offset = steps % self._total
        if offset <= self._first:
            return math.floor(offset * stairs / self._first) / stairs
        return math.floor((self._total - offset) * stairs / self._second) / stairs

    def _decay(self, steps: int, rate: float) -> float:
        if self._decay_interval == 0 or rate == 0:
            return 1
        return 1 + rate * ((steps - self._total) / self._decay_interval)

    def lrs(self, steps: int, base_lrs: Sequence[float]) -> list[float]:
        if self._in_cycle(steps):
            height = self._height(steps)
            return [low + (high - low) * height for low, high in zip(self._low_lrs, self._high_lrs, strict=True)]
        return [low / self._decay(steps, self._lr_rate) for low in self._low_lrs]

    def betas(self, steps: int) -> list[tuple[float, float]] | None:
        if not self._cycles_momentum:
            return None
        if steps == 0:
            momenta = self._low_momenta
        elif self._in_cycle(steps):
            height = self._height(steps)
            pairs = zip(self._low_momenta, self._high_momenta, strict=True)
            momenta = [high - (high - low) * height for low, high in pairs]
        else:
            momenta = [high * self._decay(steps, self._momentum_rate) for high in self._high_momenta]
        for index, momentum in enumerate(momenta):
            if not 0.0 <= momentum < 1.0:
                raise ValueError(
                    f"OneCycle: after {steps} steps, decay_mom_rate={self._momentum_rate} makes betas[0] of group "
                    f"{index} {momentum:g}, which must be at least 0 and below 1: lower decay_mom_rate or cycle_max_mom"
                )
        return [(momentum, self._BETA2) for momentum in momenta]
