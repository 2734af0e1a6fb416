"""``deepspeed.initialize``, on longshore's engine."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from longshore import Config, ConfigError
from longshore.compat.config.load import read_config
from longshore.compat.configuration import for_evaluation
from longshore.compat.distributed import init_distributed
from longshore.compat.engine import Initialized, make_by_file
from longshore.compat.engine_calls import DeepSpeedEngine, EvaluationEngine, refuse_leaves_without_gradients
from longshore.compat.zero import note_leaves, policy_for


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> Initialized:
    """Call :func:`longshore.initialize`, with DeepSpeed's choice if a script says something twice.

    An optimizer or a scheduler that is passed replaces the one that the configuration names, with a warning;
    ``model_parameters`` are ignored if an optimizer is passed. Afterwards there is a process group, for one rank too,
    since scripts use ``torch.distributed`` without checking.

    The second result is the optimizer that was passed, if one was (or that the passed function made), as it is in
    DeepSpeed at stage 0: it stands for ``engine.optimizer``, which took over its groups, state, hooks and methods.

    Without any optimizer, the engine is for evaluation and generation, sharded at stage 3: the second result is None,
    and ``backward()`` and ``step()`` raise LongshoreError.

    Raises:
        ConfigError, ValueError, TypeError: as :func:`longshore.initialize`.
    """
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    configs = [config_params if config is None else config, getattr(args, "deepspeed_config", None)]
    source, whole = "config", configs[0]
    if len(given := [each for each in configs if each is not None]) == 1:
        source, whole = read_config(given[0])
        configs = [whole]
    config = _without(whole, "optimizer", "optimizer=", optimizer)
    config = _without(config, "scheduler", "lr_scheduler=", lr_scheduler)
    if isinstance(optimizer, Optimizer):
        model_parameters = None
    passed = _Given(optimizer)
    evaluates = optimizer is None and isinstance(config, Mapping) and not config.get("optimizer")
    if evaluates:
        config, lr_scheduler, model_parameters = for_evaluation(config), None, None
        optimizer = _never_stepped(model)
    with _errors_of(source):
        engine = make_by_file(
            EvaluationEngine if evaluates else DeepSpeedEngine,
            [_measuring(config), *configs[1:]],
            model,
            None,
            None,
            {"mpu": mpu, "mesh_param": mesh_param},
            given=whole,
            optimizer=optimizer if evaluates else passed.optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            collate_fn=collate_fn,
            wrap_policy=policy_for(model, config),
        )
    engine._answer_by(config, optimizer)
    if evaluates:
        kept: Any = None
    else:
        kept = engine.optimizer if passed.kept is None else passed.kept
        if engine.config.stage == 3:
            refuse_leaves_without_gradients(engine, note_leaves(engine.module, engine.config))
    return Initialized(engine, kept, engine.training_dataloader, engine.lr_scheduler)


class _Given:
    """The optimizer that a script passed.

    Attributes:
        optimizer: the argument of ``longshore.initialize``.
        kept: the script's optimizer; None if it passed none, or a function that was not called yet.
    """

    def __init__(self, given: Any) -> None:
        self._given = self.optimizer = given
        self.kept = given if isinstance(given, Optimizer) else None
        if self.kept is None and callable(given):
            self.optimizer = self._made

    def _made(self, parameters: Any) -> Any:
        self.kept = self._given(parameters)
        return self.kept


@contextlib.contextmanager
def _errors_of(source: str) -> Iterator[None]:
    """Name the file in errors about its content, which the engine is given as a changed dict.

    transformers and Accelerate read the file that a user names, and pass on a dict that does not know it.
    """
    try:
        yield
    except ConfigError as error:
        of_a_tool = " (a dict; a tool may have read it from your file)" if source == "config" else ""
        raise ConfigError(f"{source}{of_a_tool}", error.problems) from None


def _never_stepped(model: nn.Module | None) -> Optimizer:
    """Return the optimizer that an engine needs, for one that never steps, with as little state as there can be."""
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    trainable = [each for each in parameters if each.requires_grad]
    least = min(trainable or parameters, key=torch.numel, default=nn.Parameter(torch.zeros(1)))
    return torch.optim.SGD([least], lr=0.0)


def _measuring(config: Any) -> Any:
    """Return the configuration with DeepSpeed's default of ``compute_grad_norm``."""
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    if not isinstance(zero, Mapping) or not zero.get("stage") or "compute_grad_norm" in zero:
        return config
    return {**config, "zero_optimization": {**zero, "compute_grad_norm": True}}


def _without(config: Any, section: str, argument: str, given: Any) -> Any:
    """Return the configuration without a section that the argument replaces."""
    if given is None or isinstance(config, Config) or not isinstance(config, Mapping) or not config.get(section):
        return config
    warnings.warn(
        f"the configuration names {'an' if section == 'optimizer' else 'a'} {section}, and {argument} is passed, which "
        "is used, as in DeepSpeed; remove one of them",
        stacklevel=3,
    )
    return {key: value for key, value in config.items() if key != section}
