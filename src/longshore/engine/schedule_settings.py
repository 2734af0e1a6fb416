"""What each learning-rate schedule may be told: names, defaults and ranges. Pure; see ``schedules``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from longshore.engine.wording import did_you_mean, is_integer, is_number, shown


class _Required:
    """The default of a parameter that has none."""

    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Final = _Required()

Check = Callable[[Any], "str | None"]
"""What is wrong with a value, in words that follow its name; ``None`` when nothing is."""


@dataclass(frozen=True)
class ScheduleParameter:
    """One parameter of a schedule: its default (or :data:`REQUIRED`) and what a value must be."""

    default: Any
    check: Check


def _number(least: float = -math.inf, below: float = math.inf, above: float = -math.inf) -> Check:
    bounds = [f"at least {least:g}"] * (least > -math.inf) + [f"above {above:g}"] * (above > -math.inf)
    bounds += [f"below {below:g}"] * (below < math.inf)
    rule = "must be a finite number" + (" " + " and ".join(bounds) if bounds else "")

    def check(value: Any) -> str | None:
        if is_number(value) and value >= least and above < value < below:
            return None
        return f"{rule}, and is {shown(value)}"

    return check


def _integer(least: int) -> Check:
    def check(value: Any) -> str | None:
        # JSON writers turn 1e6 into a float; one without a fraction means the same.
        whole = is_integer(value) or (isinstance(value, float) and value.is_integer())
        if whole and value >= least:
            return None
        return f"must be an integer of at least {least}, and is {shown(value)}"

    return check


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else f"must be true or false, and is {shown(value)}"


def _optional(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _per_group(check: Check) -> Check:
    """One value for all groups, or a list with one for each."""

    def checked(value: Any) -> str | None:
        if not isinstance(value, (list, tuple)):
            return check(value)
        wrong = [f"[{index}] {problem}" for index, each in enumerate(value) if (problem := check(each)) is not None]
        return "; ".join(wrong) or None

    return checked


def _warmup_type(value: Any) -> str | None:
    return None if value in ("log", "linear") else f"must be 'log' or 'linear', and is {shown(value)}"


def _from_the_start(value: Any) -> str | None:
    if value == -1 and is_integer(value):
        return None
    return f"must be -1, and is {shown(value)}: to go on in the middle, give load_state_dict a saved state"


_LRS = _per_group(_number(least=0))
_MOMENTA = _per_group(_number(least=0, below=1))
_START = ScheduleParameter(-1, _from_the_start)
_WARMUP_STEPS = ScheduleParameter(1000, _integer(1))
_WARMUP_TYPE = ScheduleParameter("log", _warmup_type)
_TOTAL_STEPS = ScheduleParameter(REQUIRED, _integer(1))

SCHEDULES: Final[Mapping[str, Mapping[str, ScheduleParameter]]] = MappingProxyType(
    {
        "LRRangeTest": {
            "lr_range_test_min_lr": ScheduleParameter(1e-3, _LRS),
            "lr_range_test_step_size": ScheduleParameter(2000, _integer(1)),
            "lr_range_test_step_rate": ScheduleParameter(1.0, _number(least=0)),
            "lr_range_test_staircase": ScheduleParameter(False, _flag),
            "last_batch_iteration": _START,
        },
        "OneCycle": {
            "cycle_min_lr": ScheduleParameter(REQUIRED, _LRS),
            "cycle_max_lr": ScheduleParameter(REQUIRED, _LRS),
            "decay_lr_rate": ScheduleParameter(0.0, _number(least=0)),
            "cycle_first_step_size": ScheduleParameter(2000, _number(above=0)),
            "cycle_second_step_size": ScheduleParameter(None, _optional(_number(least=0))),
            "cycle_first_stair_count": ScheduleParameter(0, _integer(-1)),
            "cycle_second_stair_count": ScheduleParameter(None, _optional(_integer(-1))),
            "decay_step_size": ScheduleParameter(0, _number(least=0)),
            "cycle_momentum": ScheduleParameter(True, _flag),
            "cycle_min_mom": ScheduleParameter(0.8, _MOMENTA),
            "cycle_max_mom": ScheduleParameter(0.9, _MOMENTA),
            "decay_mom_rate": ScheduleParameter(0.0, _number()),
            "last_batch_iteration": _START,
        },
        "WarmupLR": {
            "warmup_min_lr": ScheduleParameter(0.0, _LRS),
            "warmup_max_lr": ScheduleParameter(None, _optional(_LRS)),
            "warmup_num_steps": _WARMUP_STEPS,
            "warmup_type": _WARMUP_TYPE,
            "last_batch_iteration": _START,
        },
        "WarmupDecayLR": {
            "total_num_steps": _TOTAL_STEPS,
            "warmup_min_lr": ScheduleParameter(0.0, _LRS),
            "warmup_max_lr": ScheduleParameter(1e-3, _LRS),
            "warmup_num_steps": _WARMUP_STEPS,
            "warmup_type": _WARMUP_TYPE,
            "last_batch_iteration": _START,
        },
        "WarmupCosineLR": {
            "total_num_steps": _TOTAL_STEPS,
            "warmup_min_ratio": ScheduleParameter(0.0, _number(least=0)),
            "warmup_num_steps": _WARMUP_STEPS,
            "cos_min_ratio": ScheduleParameter(1e-4, _number(least=0)),
            "warmup_type": _WARMUP_TYPE,
            "last_batch_iteration": _START,
        },
    }
)
"""Schedule -> parameter -> default and check. The names and defaults are those of DeepSpeed 0.19."""


def parameter_problems(name: str, params: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Everything that is wrong with the parameters of one of :data:`SCHEDULES`, as (parameter, problem)."""
    known = SCHEDULES[name]
    problems = [
        (str(given), f"is no parameter of {name}; {did_you_mean(given, known)}")
        for given in params
        if given not in known
    ]
    for parameter, setting in known.items():
        if parameter in params:
            problem = setting.check(params[parameter])
            if problem is not None:
                problems.append((parameter, problem))
        elif setting.default is REQUIRED:
            problems.append((parameter, f"is missing, and {name} needs it"))
    return problems


def with_defaults(name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """All parameters of one of :data:`SCHEDULES`: what was given, else the defaults."""
    return {parameter: params.get(parameter, setting.default) for parameter, setting in SCHEDULES[name].items()}
