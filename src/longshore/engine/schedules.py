"""Learning-rate schedules by name, on torch's ``LRScheduler``.

A schedule is a pure rule, ``steps -> learning rates``, where ``steps`` counts
the calls of ``step()``. The five of :data:`SCHEDULES` give, step by step, the
same floats as the classes of the same names in DeepSpeed 0.19. That includes
what may surprise there:

- Warmup holds its lowest rate for two steps: the first call of ``step()``
  leaves it as it was. ``WarmupCosineLR`` starts at 0, whatever
  ``warmup_min_ratio`` says, which holds from the second step on.
- ``warmup_num_steps=1`` is 2.
- ``OneCycle`` with ``cycle_momentum`` sets ``betas`` to (momentum, 0.99). The
  first step is taken with ``cycle_min_mom``, the second near ``cycle_max_mom``.

It differs on purpose here:

- Unknown names, wrong types and an unknown ``warmup_type`` are refused.
- ``OneCycle`` refuses ``cycle_momentum=True`` where a group has no ``betas``;
  left at its default, such groups keep their momentum as it is.
- Where ``decay_mom_rate`` drives a beta out of [0, 1), ``step()`` raises.
- The rate that a group starts from is torch's ``initial_lr``, and a saved
  state keeps it, so that a resumed run goes on as it began.
- A rate that is a tensor is computed in double and rounded once.

Any other scheduler of ``torch.optim.lr_scheduler`` that numbers alone can
describe is known by its name too, and is torch's own.
"""

from __future__ import annotations

import inspect
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from longshore.engine.schedule_settings import (
    REQUIRED,
    SCHEDULES,
    ScheduleParameter,
    parameter_problems,
    with_defaults,
)
from longshore.engine.wording import did_you_mean, is_integer, shown

__all__ = ["REQUIRED", "SCHEDULES", "TORCH_SCHEDULES", "ScheduleParameter", "make_schedule", "schedule_problems"]

_NOT_BY_NAME = {
    "LambdaLR": "it takes a function",
    "MultiplicativeLR": "it takes a function",
    "SequentialLR": "it takes other schedulers",
    "ChainedScheduler": "it takes other schedulers",
    "ReduceLROnPlateau": "its step() takes a metric, which the engine does not have",
}
_SET_HERE = {"optimizer", "last_epoch", "verbose"}

TORCH_SCHEDULES: frozenset[str] = frozenset(
    name
    for name, kind in vars(lr_scheduler).items()
    if inspect.isclass(kind)
    and issubclass(kind, LRScheduler)
    and kind is not LRScheduler
    and not name.startswith("_")
    and name not in _NOT_BY_NAME
)
"""Schedulers of torch that are known by name as well; their parameters are torch's."""


class _Rule(ABC):
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


class _WarmupRule(_Rule):
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


class _CosineRule(_Rule):
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


class _RangeTestRule(_Rule):
    def __init__(self, params: Mapping[str, Any]) -> None:
        self._low = params["lr_range_test_min_lr"]
        self._interval, self._rate = int(params["lr_range_test_step_size"]), params["lr_range_test_step_rate"]
        self._is_staircase = params["lr_range_test_staircase"]

    def lrs(self, steps: int, base_lrs: Sequence[float]) -> list[float]:
        intervals = steps // self._interval if self._is_staircase else steps / self._interval
        growth = 1 + self._rate * intervals
        return [low * growth for low in _each(self._low, len(base_lrs))]


class _OneCycleRule(_Rule):
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


class _Schedule(LRScheduler):
    """A rule behind torch's interface. ``last_epoch`` counts the calls of ``step()``."""

    def __init__(self, optimizer: Optimizer, rule: _Rule) -> None:
        self._rule = rule  # before torch's __init__, which sets the first rates
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        return [*self._rule.lrs(self.last_epoch, [float(base) for base in self.base_lrs])]

    def step(self, epoch: int | None = None) -> None:
        """Set the next rates. ``epoch`` is torch's deprecated argument, with its meaning and its warning."""
        super().step(epoch)
        betas = self._rule.betas(self.last_epoch)
        if betas is not None:
            for group, pair in zip(self.optimizer.param_groups, betas, strict=True):
                group["betas"] = pair

    def state_dict(self) -> dict[str, Any]:
        """The count of steps and the rates, as numbers."""
        return {
            "last_epoch": self.last_epoch,
            "_step_count": self._step_count,
            "base_lrs": [float(base) for base in self.base_lrs],
            "_last_lr": [float(lr) for lr in self.get_last_lr()],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state: :meth:`state_dict`'s, or DeepSpeed's ``{"last_batch_iteration": n}``.

        As in torch, the optimizer's own rates and betas come with the optimizer's state, not from here.

        Raises:
            ValueError: other keys, another number of groups, or a count that is no count.
        """
        count, base_lrs = _checked_state(state_dict, len(self.base_lrs))
        if base_lrs is not None:
            self.base_lrs = [*base_lrs]
        self.last_epoch = count
        self._step_count = count + 1
        self._last_lr = self.get_lr()


def _checked_state(state: Mapping[str, Any], group_count: int) -> tuple[int, list[float] | None]:
    if set(state) == {"last_batch_iteration"}:
        count, base_lrs = state["last_batch_iteration"], None
        count = count + 1 if is_integer(count) else count
    elif {"last_epoch", "base_lrs"} <= set(state):
        count, base_lrs = state["last_epoch"], state["base_lrs"]
        if len(base_lrs) != group_count:
            raise ValueError(
                f"the saved schedule has {len(base_lrs)} groups, and the optimizer has {group_count}: "
                f"make the groups as they were when it was saved"
            )
    else:
        raise ValueError(
            f"a schedule's state has 'last_epoch' and 'base_lrs', or only 'last_batch_iteration', "
            f"and this has {sorted(map(str, state))}: give what state_dict() returned"
        )
    if not is_integer(count) or count < 0:
        raise ValueError(f"a schedule's state counts its steps, and this count is {shown(count)}")
    return count, base_lrs


def _torch_problems(name: str, params: Mapping[str, Any]) -> list[tuple[str, str]]:
    signature = inspect.signature(getattr(lr_scheduler, name)).parameters
    known = {key: value for key, value in signature.items() if key not in _SET_HERE}
    problems = [
        (str(given), f"is no parameter of torch's {name}; {did_you_mean(given, known)}")
        for given in params
        if given not in known
    ]
    for key, value in known.items():
        if key not in params:
            if value.default is inspect.Parameter.empty:
                problems.append((key, f"is missing, and torch's {name} needs it"))
        # torch would take "10" or "auto" here, and fail or compute nonsense many steps later.
        elif isinstance(params[key], str) and not any(word in str(value.annotation) for word in ("str", "Literal")):
            problems.append((key, f"must be a {value.annotation}, and is {shown(params[key])}"))
    return problems


def schedule_problems(name: Any, params: Any) -> list[tuple[str, str]]:
    """Everything that is wrong with a schedule's name and parameters, found without an optimizer.

    Returns:
        (path, problem) pairs; the path is ``"type"`` or ``"params.<name>"``. Empty when all is well.
    """
    if not isinstance(name, str) or name not in {*SCHEDULES, *TORCH_SCHEDULES}:
        why = _NOT_BY_NAME.get(name) if isinstance(name, str) else None
        if why is not None:
            return [("type", f"{name} cannot be made from a name, since {why}: pass the scheduler itself")]
        known = SCHEDULES if not isinstance(name, str) else {*SCHEDULES, *TORCH_SCHEDULES}
        return [("type", f"{name!r} is no schedule; {did_you_mean(name, known)}")]
    if not isinstance(params, Mapping):
        return [("params", f"must be a table of parameters, and is {shown(params)}")]
    found = parameter_problems(name, params) if name in SCHEDULES else _torch_problems(name, params)
    return [(f"params.{parameter}", problem) for parameter, problem in found]


def _group_problems(name: str, params: Mapping[str, Any], optimizer: Optimizer) -> list[tuple[str, str]]:
    """What only shows beside the optimizer: lists of another length than its groups, momentum that is not there."""
    count = len(optimizer.param_groups)
    problems = [
        (f"params.{key}", f"lists {len(value)} values, and the optimizer has {count} groups: give one for each")
        for key, value in params.items()
        if isinstance(value, (list, tuple)) and len(value) != count and key in SCHEDULES.get(name, ())
    ]
    if name == "OneCycle" and params.get("cycle_momentum") is True and not _has_betas(optimizer):
        problems.append(
            (
                "params.cycle_momentum",
                f"is true, and {type(optimizer).__name__} has groups without betas: set it to false",
            )
        )
    return problems


def _has_betas(optimizer: Optimizer) -> bool:
    return all("betas" in group for group in optimizer.param_groups)


def _rule_for(name: str, params: Mapping[str, Any], optimizer: Optimizer) -> _Rule:
    settings = with_defaults(name, params)
    total = settings.get("total_num_steps")
    if total is not None and total < settings["warmup_num_steps"]:
        warnings.warn(
            f"{name}: total_num_steps={total} is less than warmup_num_steps={settings['warmup_num_steps']}, "
            f"so the run ends before its warmup does",
            stacklevel=3,
        )
    if name == "OneCycle":
        settings["cycle_momentum"] = settings["cycle_momentum"] and _has_betas(optimizer)
        return _OneCycleRule(settings, len(optimizer.param_groups))
    if name == "LRRangeTest":
        return _RangeTestRule(settings)
    return _CosineRule(settings) if name == "WarmupCosineLR" else _WarmupRule(settings)


def make_schedule(name: str, params: Mapping[str, Any], optimizer: Optimizer) -> LRScheduler:
    """A schedule by its name; it sets the optimizer's first learning rates at once.

    Args:
        name: one of :data:`SCHEDULES` or :data:`TORCH_SCHEDULES`.
        params: its parameters by name. Where one allows a list, it has one value a group.
        optimizer: whose groups are scheduled; call the scheduler's ``step()`` after each of its steps.

    Raises:
        ValueError: all that is wrong with the name and the parameters, at once.
        TypeError: something that is no optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"a schedule needs a torch.optim.Optimizer, not {type(optimizer).__name__}")
    problems = schedule_problems(name, params)
    if not problems or problems[0][0] not in ("type", "params"):
        problems += _group_problems(name, params, optimizer)
    if problems:
        raise ValueError(
            "the scheduler cannot be made:" + "".join(f"\n  scheduler.{path}: {problem}" for path, problem in problems)
        )
    if name in SCHEDULES:
        return _Schedule(optimizer, _rule_for(name, params, optimizer))
    try:
        return getattr(lr_scheduler, name)(optimizer, **params)
    except (TypeError, ValueError) as error:
        raise ValueError(f"torch's {name} refused scheduler.params {dict(params)}: {error}") from error
