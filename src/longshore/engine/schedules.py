"""Schedules that the engine steps: those of a configuration as torch's ``LRScheduler``, and those that users build."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from longshore.engine.config.base import ConfigError, Problem
from longshore.engine.config.schedulers import SCHEDULER_CONFIGS, OneCycleConfig, ScheduleConfig, WarmupCosineLRConfig
from longshore.engine.wording import is_integer, shown
from longshore.optim.other_optimizers import stands_for

_START = "last_batch_iteration"


class Schedule(LRScheduler):
    """A schedule with torch's interface; each of ``SCHEDULER_CONFIGS`` has a subclass.

    A new schedule sets the first learning rates at once. ``last_epoch`` counts the calls of ``step()``, and
    ``last_batch_iteration`` is one less, as in DeepSpeed. ``OneCycle`` leaves the momentum of groups without ``betas``
    as it is, unless ``cycle_momentum`` is given. A rate that is a tensor is computed in double precision and rounded
    once. A saved state keeps the rate that each group started from, so that a resumed run follows the same schedule.

    Args:
        optimizer: the optimizer whose groups are scheduled; call ``step()`` after each of its steps.
        values, params: the schedule's parameters, in order or by name. A list has one value for each group.

    Raises:
        ConfigError: a ValueError that lists all problems of the parameters.
        TypeError: there are more values than parameters, one is given twice, or ``optimizer`` has another type.
    """

    def __init__(self, optimizer: Optimizer, *values: Any, **params: Any) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"a schedule needs a torch.optim.Optimizer, not {type(optimizer).__name__}")
        self._has_betas = all("betas" in group for group in optimizer.param_groups)
        # This precedes torch's __init__, which sets the first rates.
        self._config = self._configured(optimizer, values, params)
        super().__init__(optimizer)

    def _configured(self, optimizer: Optimizer, values: tuple[Any, ...], params: dict[str, Any]) -> ScheduleConfig:
        """Check the parameters against the optimizer's groups, and return the configuration or raise ConfigError."""
        name, count = type(self).__name__, len(optimizer.param_groups)
        kind = SCHEDULER_CONFIGS[name]
        names = [*(field for field in kind.model_fields if field != "type"), _START]
        if len(values) > len(names):
            raise TypeError(f"{name} has {len(names)} parameters besides the optimizer, and got {len(values)}")
        by_place = dict(zip(names, values, strict=False))
        if twice := sorted(by_place.keys() & params.keys()):
            raise TypeError(f"{name} got {twice[0]} twice, by place and by name")
        given = {**by_place, **params}
        if "type" in given:
            raise TypeError(f"{name} has no parameter 'type'; leave it out")
        start = given.pop(_START, -1)
        problems: list[Problem] = []
        if start != -1 or not is_integer(start):
            problems.append(
                Problem(_START, "must be -1: to go on in the middle, give load_state_dict a saved state", start)
            )
        try:
            config = kind(**given)
        except ConfigError as error:
            raise ConfigError(name, [*error.problems, *problems]) from None
        problems += [
            Problem(each, f"lists {len(value)} values, and the optimizer has {count} groups: give one for each", value)
            for each, value in config.arguments().items()
            if isinstance(value, tuple) and len(value) != count
        ]
        asked = "cycle_momentum" in config.model_fields_set and config.arguments()["cycle_momentum"]
        if asked and not self._has_betas:
            what = f"{type(optimizer).__name__} has groups without betas: set it to false"
            problems.append(Problem("cycle_momentum", what, True))
        if problems:
            raise ConfigError(name, problems)
        own = {float(group["lr"]) for group in optimizer.param_groups}
        highest = config.arguments().get("warmup_max_lr")
        if len(own) > 1 and isinstance(highest, (int, float)):
            warnings.warn(
                f"{name} gives all groups the learning rate warmup_max_lr = {highest:g}, and they have "
                f"{', '.join(f'{rate:g}' for rate in sorted(own))} of their own: give a list of {count}, one for each",
                stacklevel=4,
            )
        return config

    @property
    def last_batch_iteration(self) -> int:
        """Number of calls of ``step()`` minus one, so -1 before the first call."""
        return self.last_epoch - 1

    def __getattr__(self, name: str) -> Any:
        """Return a parameter of the schedule, such as ``warmup_num_steps``, or one of this kind alone."""
        config = vars(self).get("_config")
        if config is not None:
            if name in type(config).model_fields and name != "type":
                return getattr(config, name)
            if name in ("min_lrs", "max_lrs") and (bounds := config.bounds([*map(float, self.base_lrs)])) is not None:
                return bounds[name == "max_lrs"]
            if name == "get_lr_ratio" and isinstance(config, WarmupCosineLRConfig):
                return lambda: config.ratio(self.last_epoch)
            if name == "get_mom" and isinstance(config, OneCycleConfig):
                return lambda: config.cycled_betas(self.last_epoch, len(self.base_lrs)) if self._has_betas else None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def get_lr(self) -> list[float | Tensor]:
        return [*self._config.lrs(self.last_epoch, [float(base) for base in self.base_lrs])]

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, last_batch_iteration: int | None = None, *, batch_iteration: int | None = None
    ) -> None:
        """Set the next rates, or those of a given iteration.

        Args:
            last_batch_iteration: counted from 0, as :attr:`last_batch_iteration` is afterwards, and as in DeepSpeed:
                the first ``step()`` is ``step(0)``. None: the next one.
            batch_iteration: the same, by the name that it has in DeepSpeed's ``OneCycle`` and ``LRRangeTest``.

        Raises:
            ValueError: the iteration is not an integer of at least 0.
        """
        iteration = batch_iteration if last_batch_iteration is None else last_batch_iteration
        if iteration is not None:
            if not is_integer(iteration) or iteration < 0:
                raise ValueError(f"step() takes an iteration, counted from 0, and got {shown(iteration)}")
            self.last_epoch = iteration
        super().step()
        betas = self._config.betas(self.last_epoch, len(self.base_lrs)) if self._has_betas else None
        if betas is not None:
            for group, pair in zip(self.optimizer.param_groups, betas, strict=True):
                group["betas"] = pair

    def state_dict(self) -> dict[str, Any]:
        """Return the count of steps and the rates, as numbers."""
        return {
            "last_epoch": self.last_epoch,
            "_step_count": self._step_count,
            "base_lrs": [float(base) for base in self.base_lrs],
            "_last_lr": [float(lr) for lr in self.get_last_lr()],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state: that of :meth:`state_dict`, or DeepSpeed's ``{"last_batch_iteration": n}``.

        As in torch, the optimizer's state restores the optimizer's own rates and betas, and this method does not.

        Raises:
            ValueError: the state has other keys, another number of groups, or a count that is not a number of steps.
        """
        base_lrs = self.base_lrs
        if set(state_dict) == {_START}:
            count = state_dict[_START]
            count = count + 1 if is_integer(count) else count
        elif {"last_epoch", "base_lrs"} <= set(state_dict):
            count, base_lrs = state_dict["last_epoch"], state_dict["base_lrs"]
        else:
            raise ValueError(
                f"a schedule's state has 'last_epoch' and 'base_lrs', or only 'last_batch_iteration', "
                f"and this has {sorted(map(str, state_dict))}: give what state_dict() returned"
            )
        if len(base_lrs) != len(self.base_lrs):
            raise ValueError(
                f"the saved schedule has {len(base_lrs)} groups, and the optimizer has {len(self.base_lrs)}: "
                f"make the groups as they were when it was saved"
            )
        if not is_integer(count) or count < 0:
            raise ValueError(f"a schedule's state counts its steps, and this count is {shown(count)}")
        self.base_lrs = [*base_lrs]
        self.last_epoch = count
        self._step_count = count + 1
        self._last_lr = self.get_lr()


_CLASSES: dict[str, type[Schedule]] = {
    name: type(name, (Schedule,), {"__doc__": kind.__doc__, "__module__": __name__})
    for name, kind in SCHEDULER_CONFIGS.items()
}


def __getattr__(name: str) -> Any:
    """Return a class such as ``WarmupLR``, which is made from a schedule of the configuration."""
    if name in _CLASSES:
        return _CLASSES[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def make_schedule(config: ScheduleConfig, optimizer: Optimizer) -> Schedule:
    """Build the schedule of a configuration; it sets the optimizer's first learning rates at once.

    Raises:
        ConfigError: the configuration does not fit the optimizer's groups.
        TypeError: ``optimizer`` is not a torch optimizer.
    """
    given = {name: getattr(config, name) for name in config.model_fields_set if name != "type"}
    name = next(name for name, kind in SCHEDULER_CONFIGS.items() if isinstance(config, kind))
    return _CLASSES[name](optimizer, **given)


def adopt_schedule(given: Any, optimizer: Optimizer, client: Optimizer | None) -> Any:
    """Return the scheduler that the engine steps.

    ``given`` is a scheduler, or a function that makes one from ``optimizer``, the engine's. A scheduler that was built
    on ``client``, the user's optimizer, is moved to the engine's.

    Raises:
        TypeError: ``given`` is neither.
        ValueError: the scheduler was built on an optimizer that the engine does not step, or its ``step()`` needs
            arguments, which the engine cannot give.
    """
    is_schedule = not isinstance(given, type) and callable(getattr(given, "step", None))
    schedule = given(optimizer) if not is_schedule and callable(given) else given
    if not callable(getattr(schedule, "step", None)):
        found = f"{'' if schedule is given else 'a function that returns '}{type(schedule).__name__}"
        raise TypeError(f"lr_scheduler is a scheduler, or a function from an optimizer to one, not {found}")
    needed = _needed_by_step(schedule)
    if needed:
        raise ValueError(
            f"lr_scheduler={type(schedule).__name__} is not supported: its step() takes "
            f"{', '.join(map(repr, needed))}, and engine.step() calls it with nothing; build it on the optimizer that "
            "initialize() returns, leave lr_scheduler out, and call it after engine.step()"
        )
    change_over(schedule, optimizer, client)
    return schedule


def change_over(schedule: Any, optimizer: Optimizer, client: Optimizer | None) -> None:
    """Move a scheduler that was built on ``client``, and the schedulers inside it, to ``optimizer``.

    Raises:
        ValueError: one of them was built on any other optimizer.
    """
    holders = list(_holders(schedule, set()))
    for holder, name in holders:
        held = getattr(holder, name)
        if stands_for(held) is not optimizer and stands_for(held) is not stands_for(client):
            kind = type(holder).__name__
            way = "build it on the optimizer that is passed as optimizer=, or " if client is not None else ""
            raise ValueError(
                f"lr_scheduler: the {kind} was built on an optimizer ({type(held).__name__}) that the engine does not "
                f"step, so it would set learning rates that nobody uses; {way}pass a function: "
                f"lr_scheduler=lambda optimizer: {kind}(optimizer, ...)"
            )
    for holder, name in holders:
        if getattr(holder, name) is not optimizer:
            setattr(holder, name, optimizer)
            if getattr(holder, "_step_count", None) == 1:
                # The first step() would look for a mark that torch left on the other optimizer, and warn.
                holder._step_count = 2


def _holders(schedule: Any, seen: set[int]) -> Iterator[tuple[Any, str]]:
    """Yield the attributes in which a scheduler, and those inside it (a chain, a warmup), keep their optimizer."""
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


def _needed_by_step(scheduler: Any) -> list[str]:
    """Return the names of the arguments that ``step()`` requires."""
    try:
        parameters = inspect.signature(scheduler.step).parameters.values()
    except (TypeError, ValueError):  # such as a builtin
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [entry.name for entry in parameters if entry.default is entry.empty and entry.kind not in variadic]
