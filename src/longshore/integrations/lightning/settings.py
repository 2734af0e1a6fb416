"""Combine Lightning's arguments and the engine's configuration; plugins that leave precision to the engine."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from longshore import Config, ConfigError, Engine, LongshoreError
from longshore.compat.config.agreement import ArgumentValue, contradictions, put, settle, settle_config
from longshore.compat.config.load import read_config
from longshore.engine.config import LoadedConfig, LossScaling, Problem, load_config
from longshore.integrations.lightning.names import ClipAlgorithm, LightningModule, is_overridden

PRECISIONS: Mapping[str, tuple[str | None, str | None]] = {
    "32-true": ("fp32", None),
    "bf16-true": ("bf16", None),
    "16-true": ("fp16", None),
    "bf16-mixed": ("fp32", "bf16"),
    "16-mixed": ("fp32", "fp16"),
}
"""The dtype of parameters and the dtype of autocast, by Lightning's ``precision``."""

_SCALED = ("16-true", "16-mixed")
_SCALER = LossScaling(window=2000, hysteresis=1)
"""The first scale, window and patience of torch's ``GradScaler``, which Lightning uses."""
_BATCH, _MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
_STEPS, _CLIPPING = "gradient_accumulation_steps", "gradient_clipping"


@dataclass(frozen=True)
class LightningArguments:
    """The arguments that Lightning was given."""

    by: str  # ``Trainer`` or ``Fabric``, for messages
    precision: str  # Lightning's name of it
    world_size: int
    accumulation: int | None = None  # ``accumulate_grad_batches``; None: the user's own loop decides
    clipping: float | None = None  # ``gradient_clip_val``
    micro_batch_size: int | None = None  # the loader's, if it is known
    has_optimizer: bool = True  # whether ``configure_optimizers`` returned one
    has_scheduler: bool = False
    loss_scaling: LossScaling | None = None  # settings of a ``GradScaler`` that the user made

    def statements(self) -> Iterator[ArgumentValue]:
        """Yield the values that the configuration may give too."""
        agree = "leave it out, or make them agree"
        if self.accumulation is None:
            loop = f"your loop with {self.by}, in which every optimizer.step() is applied"
            yield ArgumentValue(_STEPS, 1, loop, "leave it out, or set it to 1")
        else:
            argument = f"{self.by}(accumulate_grad_batches={self.accumulation})"
            yield ArgumentValue(_STEPS, self.accumulation, argument, agree)
        if self.clipping is not None:
            argument = f"{self.by}(gradient_clip_val={self.clipping:g})"
            yield ArgumentValue(_CLIPPING, self.clipping, argument, "give it in one place")
        if self.micro_batch_size is not None:
            argument = f"the DataLoader, whose batch_size is {self.micro_batch_size}"
            yield ArgumentValue(_MICRO, self.micro_batch_size, argument, agree, False)


class StrategySettings:
    """The configuration that the user gave to the strategy.

    Args:
        config: a DeepSpeed JSON file's path, its content, or a :class:`longshore.Config`. None: ``fields`` are used.
        fields: fields of :class:`longshore.Config`; by default stage 2 with the optimizer on the host.

    Raises:
        ConfigError: unknown fields, with the nearest name; everything that is wrong in a file, except keys that depend
            on Lightning's arguments.
        TypeError, ValueError: a configuration of another type; ``config`` together with ``fields``.
    """

    def __init__(
        self, config: str | os.PathLike[str] | Mapping[str, Any] | Config | None, fields: Mapping[str, Any]
    ) -> None:
        given = {name: value for name, value in fields.items() if value is not None}
        if config is not None and given:
            raise ValueError(
                f"the configuration is given twice: as config= and as {', '.join(given)}; put it all into one of them"
            )
        if config is None:
            config = Config(**{"stage": 2, "offload_device": "cpu", **given})
        self._source, self._config = read_config(config)
        self.stage = self._load(LightningArguments("Trainer", "32-true", 1), None)[0].config.stage

    def resolved(self, given: LightningArguments) -> LoadedConfig:
        """Return the engine's configuration, for a model that Lightning has put into its dtype.

        Raises:
            ConfigError: everything that contradicts Lightning's arguments, with both values.
        """
        loaded, problems = self._load(given, given.world_size)
        problems += _decided_by_lightning(loaded.config, given, not isinstance(self._config, Config))
        if problems:
            raise ConfigError(self._source, problems)
        # Lightning converts the model and its batches, and enters autocast.
        update: dict[str, Any] = {"dtype": None, "autocast": None, "cast_inputs": False}
        if given.precision in _SCALED:
            explicit = not isinstance(self._config, Config) or "loss_scaling" in self._config.model_fields_set
            update["loss_scaling"] = (loaded.config.loss_scaling if explicit else None) or given.loss_scaling or _SCALER
        return LoadedConfig(loaded.config.model_copy(update=update), loaded.notes)

    def _load(self, given: LightningArguments, world_size: int | None) -> tuple[LoadedConfig, list[Problem]]:
        """Load with Lightning's values where the configuration has none; also return contradictions.

        ``world_size``: if None, only the checks that do not need it are made.
        """
        micro = given.micro_batch_size or 1
        if isinstance(self._config, Config):
            fields, problems = settle_config(self._config, given.statements())
            if self._config.train_batch_size is None and self._config.micro_batch_size is None:
                fields["micro_batch_size"] = micro
            return load_config(self._config.model_copy(update=fields), world_size=world_size), problems
        data = copy.deepcopy(dict(self._config))
        problems = settle(data, given.statements())
        put(data, _CLIPPING, 0)
        if all(data.get(name) in (None, "auto") for name in (_BATCH, _MICRO)):
            data[_MICRO] = micro
        dtype, autocast = PRECISIONS[given.precision]
        auto = {
            "fp16.enabled": dtype == "fp16",
            "bf16.enabled": dtype == "bf16",
            "torch_autocast.enabled": autocast is not None,
            "torch_autocast.dtype": autocast or "bf16",
        }
        try:
            return load_config(data, auto=auto, world_size=world_size), problems
        except ConfigError as error:
            raise ConfigError(self._source, (world_size and problems) or error.problems) from None


def _decided_by_lightning(config: Config, given: LightningArguments, from_file: bool) -> list[Problem]:
    """Return problems with settings that Lightning decides in any case: precision, optimizer, schedule, loader."""
    dtype, autocast = PRECISIONS[given.precision]
    pair = (config.dtype or "fp32", config.autocast)
    other = next((name for name, each in PRECISIONS.items() if each == pair), "32-true")
    default = " (the default)" if given.precision == "32-true" else ""
    argument = f"{given.by}(precision={given.precision!r}){default}, which decides"
    advice = f"leave it out, or pass precision={other!r}"
    paths = (f"{config.dtype}.enabled", "torch_autocast.dtype") if from_file else ("dtype", "autocast")
    found = zip(paths, (config.dtype, config.autocast), strict=True)
    problems = contradictions(
        {path: value for path, value in found if value is not None},  # a dtype that is not given is Lightning's
        [ArgumentValue(path, wanted, argument, advice) for path, wanted in zip(paths, (dtype, autocast), strict=True)],
    )
    for name, passed in (("optimizer", given.has_optimizer), ("scheduler", given.has_scheduler)):
        chosen = getattr(config, name)
        if chosen is not None and passed:
            where = "configure_optimizers()" if given.by == "Trainer" else "fabric.setup()"
            problems.append(Problem(name, f"is given twice: here and to {where}; keep one", chosen.type))
    if config.drop_last:
        what = "applies to a loader made by the engine, and with Lightning you make it: use DataLoader(drop_last=True)"
        problems.append(Problem("dataloader_drop_last" if from_file else "drop_last", what, True))
    return problems


# -- precision plugins ----------------------------------------------------------

BY_VALUE = (
    "gradients were to be clipped by value ({}), and longshore clips only their global norm; "
    'use gradient_clip_algorithm="norm" (Trainer) or max_norm= (Fabric)'
)


def _scaling_of(scaler: Any) -> LossScaling | None:
    if scaler is None or not scaler.is_enabled():  # GradScaler turns itself off without CUDA
        return None
    first, growth, backoff = scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor()
    if (growth, backoff) != (2.0, 0.5) or math.frexp(first)[0] != 0.5 or first < 1:
        raise ValueError(
            f"GradScaler(init_scale={first:g}, growth_factor={growth:g}, backoff_factor={backoff:g}): longshore's loss "
            "scale is a power of two that doubles and halves; use growth_factor=2, backoff_factor=0.5 and such a scale"
        )
    return LossScaling(initial_scale_power=round(math.log2(first)), window=scaler.get_growth_interval(), hysteresis=1)


class EnginePrecision:
    """A mixin of precision plugins, which leave scaling, clipping and stepping to the engine."""

    loss_scaling: LossScaling | None = None  # of the ``GradScaler`` that the user made

    @classmethod
    def of(cls, plugin: Any, **attributes: Any) -> Any:
        """Return a copy of the plugin that Lightning chose, with this class as its first base, and without its scaler.

        ``attributes`` are set on the copy.

        Raises:
            ValueError: a precision that the engine does not have, or a scaler that its loss scale cannot match.
        """
        if isinstance(plugin, cls):
            return plugin
        if plugin.precision not in PRECISIONS:
            raise ValueError(
                f"precision={plugin.precision!r} is not supported by longshore, which has float32 masters and fp32, "
                f"bf16 or fp16 parameters; use one of {', '.join(PRECISIONS)}"
            )
        made = copy.copy(plugin)
        made.__class__ = type(cls.__name__, (cls, type(plugin)), {})
        scaling = _scaling_of(getattr(plugin, "scaler", None))
        vars(made).update(attributes, loss_scaling=scaling, scaler=None)
        return made


class TrainerEnginePrecision(EnginePrecision):
    """An :class:`EnginePrecision` for a Trainer, whose plugins also run backward, step and clip."""

    strategy: Any

    def backward(self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        engine = self.strategy.engine
        if is_overridden("backward", model):
            model.backward(engine.scale(tensor), *args, **kwargs)
        else:
            backward(engine, tensor, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any) -> Any:
        if kwargs:
            raise TypeError(f"optimizer.step() takes a closure only with longshore, not {', '.join(kwargs)}")
        result = closure()
        self._after_closure(model, optimizer)  # pyright: ignore[reportAttributeAccessIssue]
        self.strategy.step_engine()
        return result

    def clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: ClipAlgorithm = ClipAlgorithm.NORM
    ) -> None:
        if clip_val <= 0:
            return
        if gradient_clip_algorithm == ClipAlgorithm.VALUE:
            raise ValueError(BY_VALUE.format(f"{clip_val:g}"))
        clip(self.strategy.engine, float(clip_val))


def backward(engine: Engine, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
    """Run one backward of the engine's window; arguments that only ``Tensor.backward`` has are passed to it."""
    if not args and set(kwargs) <= {"retain_graph"} and tensor.numel() == 1:
        engine.backward(tensor, retain_graph=bool(kwargs.get("retain_graph")), scale_wrt_gas=False)
    else:
        engine.scale(tensor).backward(*args, **kwargs)


def clip(engine: Engine, max_norm: float) -> None:
    """Clip the next step, unless the configuration clips to the same norm already.

    Raises:
        LongshoreError: the configuration clips to another norm.
    """
    configured = engine.config.gradient_clipping
    if configured is None:
        engine.optimizer.clip_grad_norm_(max_norm)
    elif configured != max_norm:
        raise LongshoreError(
            f"gradients were to be clipped to {max_norm:g}, and the configuration of this run clips every step to "
            f"{configured:g}; leave one of them out"
        )
