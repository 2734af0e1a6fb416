"""The learning-rate schedules that a configuration can name, with the names that people's files have."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from longshore.engine.config.base import NamedModel
from longshore.engine.config.values import (
    AT_LEAST_0,
    AT_LEAST_1,
    BETA,
    NOT_NEGATIVE,
    PER_GROUP,
    POSITIVE,
    Choice,
    Either,
    Items,
    checked,
)

WARMUP_TYPE = Choice(("log", "linear"))
MOMENTUM = Either((BETA, Items(BETA)))

PerGroup = float | tuple[float, ...]
"""One for all parameter groups, or one for each."""

_PerGroup = Annotated[PerGroup, checked(PER_GROUP)]
_Momentum = Annotated[PerGroup, checked(MOMENTUM)]
_Steps = Annotated[int, checked(AT_LEAST_1)]
_WarmupType = Annotated[Literal["log", "linear"], checked(WARMUP_TYPE)]
_Ratio = Annotated[float, checked(NOT_NEGATIVE)]


class WarmupLRConfig(NamedModel):
    """From ``warmup_min_lr`` to ``warmup_max_lr`` (None: the group's own), then constant."""

    type: Literal["WarmupLR"] = "WarmupLR"
    warmup_min_lr: _PerGroup = 0.0
    warmup_max_lr: Annotated[PerGroup | None, checked(PER_GROUP)] = None
    warmup_num_steps: _Steps = 1000
    warmup_type: _WarmupType = "log"


class WarmupDecayLRConfig(NamedModel):
    """``WarmupLR``, then linear decay to zero at ``total_num_steps``."""

    type: Literal["WarmupDecayLR"] = "WarmupDecayLR"
    total_num_steps: _Steps
    warmup_min_lr: _PerGroup = 0.0
    warmup_max_lr: Annotated[PerGroup | None, checked(PER_GROUP)] = 1e-3
    warmup_num_steps: _Steps = 1000
    warmup_type: _WarmupType = "log"


class WarmupCosineLRConfig(NamedModel):
    """Warmup and cosine decay as ratios of each group's learning rate."""

    type: Literal["WarmupCosineLR"] = "WarmupCosineLR"
    total_num_steps: _Steps
    warmup_min_ratio: _Ratio = 0.0
    warmup_num_steps: _Steps = 1000
    cos_min_ratio: _Ratio = 1e-4
    warmup_type: _WarmupType = "log"


class OneCycleConfig(NamedModel):
    """The one-cycle policy (Smith 2018, arXiv:1803.09820), then decay.

    ``cycle_second_step_size`` and ``cycle_second_stair_count``: None means as
    the first.
    """

    type: Literal["OneCycle"] = "OneCycle"
    cycle_min_lr: _PerGroup
    cycle_max_lr: _PerGroup
    decay_lr_rate: _Ratio = 0.0
    cycle_first_step_size: _Steps = 2000
    cycle_second_step_size: Annotated[int | None, checked(AT_LEAST_0)] = None
    cycle_first_stair_count: Annotated[int, checked(AT_LEAST_0)] = 0
    cycle_second_stair_count: Annotated[int | None, checked(AT_LEAST_0)] = None
    decay_step_size: Annotated[int, checked(AT_LEAST_0)] = 0
    cycle_momentum: bool = True
    cycle_min_mom: _Momentum = 0.8
    cycle_max_mom: _Momentum = 0.9
    decay_mom_rate: _Ratio = 0.0

    @model_validator(mode="after")
    def _decay_has_steps(self) -> OneCycleConfig:
        rates = {"decay_lr_rate": self.decay_lr_rate, "decay_mom_rate": self.decay_mom_rate}
        given = [name for name, rate in rates.items() if rate > 0]
        if given and self.decay_step_size == 0:
            raise ValueError(
                f"{' and '.join(given)} without decay_step_size would never decay; "
                "set decay_step_size to a number of steps, or leave the rate out"
            )
        return self


class LRRangeTestConfig(NamedModel):
    """A learning rate that grows by ``lr_range_test_step_rate`` every ``lr_range_test_step_size`` steps."""

    type: Literal["LRRangeTest"] = "LRRangeTest"
    lr_range_test_min_lr: _PerGroup = 1e-3
    lr_range_test_step_size: _Steps = 2000
    lr_range_test_step_rate: Annotated[float, checked(POSITIVE)] = 1.0
    lr_range_test_staircase: bool = False


SchedulerConfig = Annotated[
    WarmupLRConfig | WarmupDecayLRConfig | WarmupCosineLRConfig | OneCycleConfig | LRRangeTestConfig,
    Field(discriminator="type"),
]

SCHEDULERS: dict[str, type[NamedModel]] = {
    "WarmupLR": WarmupLRConfig,
    "WarmupDecayLR": WarmupDecayLRConfig,
    "WarmupCosineLR": WarmupCosineLRConfig,
    "OneCycle": OneCycleConfig,
    "LRRangeTest": LRRangeTestConfig,
}

SCHEDULER_TYPE = Choice(
    tuple(SCHEDULERS),
    otherwise="for any other schedule, torch's included, construct it and pass it as initialize(lr_scheduler=...)",
)
