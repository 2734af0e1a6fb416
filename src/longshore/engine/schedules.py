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
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from longshore.engine.schedule_rules import CosineRule, OneCycleRule, RangeTestRule, Rule, WarmupRule
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


class Schedule(LRScheduler):
    """A rule behind torch's interface, one class for each of :data:`SCHEDULES`; sets the first learning rates at once.

    ``last_epoch`` counts the calls of ``step()``, and ``last_batch_iteration`` is one less, as DeepSpeed counts.

    Args:
        optimizer: whose groups are scheduled; call ``step()`` after each of its steps.
        values, params: the schedule's parameters (:data:`SCHEDULES`), in order or by name. Where one allows a list, it
            has one value a group.

    Raises:
        ValueError: all that is wrong with the parameters, at once.
        TypeError: more values than parameters, one that is given twice, or something that is no optimizer.
    """

    def __init__(self, optimizer: Optimizer, *values: Any, **params: Any) -> None:
        name = type(self).__name__
        params = _bound(name, values, params)
        _check(name, params, optimizer)
        self._rule = _rule_for(name, params, optimizer)  # before torch's __init__, which sets the first rates
        super().__init__(optimizer)

    @property
    def last_batch_iteration(self) -> int:
        """-1 before the first ``step()``."""
        return self.last_epoch - 1

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


class LRRangeTest(Schedule):
    """Rates that grow, to see which are too high."""


class OneCycle(Schedule):
    """Up, down, and then decay."""


class WarmupLR(Schedule):
    """Warmup to a rate that stays."""


class WarmupDecayLR(Schedule):
    """Warmup, then a straight line to 0."""


class WarmupCosineLR(Schedule):
    """Warmup, then half a cosine."""


_CLASSES = {kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}


def _bound(name: str, values: tuple[Any, ...], params: dict[str, Any]) -> dict[str, Any]:
    names = list(SCHEDULES[name])
    if len(values) > len(names):
        raise TypeError(f"{name} has {len(names)} parameters besides the optimizer, and got {len(values)}")
    by_place = dict(zip(names, values, strict=False))
    twice = sorted(by_place.keys() & params.keys())
    if twice:
        raise TypeError(f"{name} got {twice[0]} twice, by place and by name")
    return {**by_place, **params}


def _check(name: str, params: Mapping[str, Any], optimizer: Optimizer) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"a schedule needs a torch.optim.Optimizer, not {type(optimizer).__name__}")
    problems = schedule_problems(name, params)
    if not problems or problems[0][0] not in ("type", "params"):
        problems += _group_problems(name, params, optimizer)
    if problems:
        raise ValueError(
            "the scheduler cannot be made:" + "".join(f"\n  scheduler.{path}: {problem}" for path, problem in problems)
        )


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


def _rule_for(name: str, params: Mapping[str, Any], optimizer: Optimizer) -> Rule:
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
        return OneCycleRule(settings, len(optimizer.param_groups))
    if name == "LRRangeTest":
        return RangeTestRule(settings)
    return CosineRule(settings) if name == "WarmupCosineLR" else WarmupRule(settings)


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
    _check(name, params, optimizer)
    if name in SCHEDULES:
        return _CLASSES[name](optimizer, **params)
    try:
        return getattr(lr_scheduler, name)(optimizer, **params)
    except (TypeError, ValueError) as error:
        raise ValueError(f"torch's {name} refused scheduler.params {dict(params)}: {error}") from error
