"""One configuration from two places: what the user gave to the strategy, and what Lightning was told."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longshore.engine.config import Config, ConfigError, LoadedConfig, LossScaling, Problem, load_config
from longshore.engine.config.load import read_file

PRECISIONS: Mapping[str, tuple[str | None, str | None]] = {
    "32-true": ("fp32", None),
    "bf16-true": ("bf16", None),
    "16-true": ("fp16", None),
    "bf16-mixed": ("fp32", "bf16"),
    "16-mixed": ("fp32", "fp16"),
}
"""Lightning's ``precision``: the dtype of parameters, and that of autocast."""

_SCALED = ("16-true", "16-mixed")
_SCALER = LossScaling(window=2000, hysteresis=1)
"""The first scale, window and patience of torch's ``GradScaler``, which Lightning uses."""
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu")


@dataclass(frozen=True)
class Asked:
    """What Lightning was told.

    Attributes:
        by: ``Trainer`` or ``Fabric``, for messages.
        precision: of Lightning.
        world_size: number of ranks.
        accumulation: ``accumulate_grad_batches``; None: the user's own loop decides.
        clipping: ``gradient_clip_val``; None: none.
        micro_batch_size: of the loader, where it is known.
        has_optimizer, has_scheduler: ``configure_optimizers`` returned one.
        loss_scaling: of a ``GradScaler`` that the user made; None: none was made.
    """

    by: str
    precision: str
    world_size: int
    accumulation: int | None = None
    clipping: float | None = None
    micro_batch_size: int | None = None
    has_optimizer: bool = True
    has_scheduler: bool = False
    loss_scaling: LossScaling | None = None


class Settings:
    """What the user gave to the strategy.

    Args:
        config: a DeepSpeed JSON file's path, its content, or a :class:`longshore.Config`. None: ``fields``.
        fields: of :class:`longshore.Config`. Where they do not say otherwise, stage 2 with the optimizer on the host.

    Raises:
        ConfigError: fields that there are not, with the nearest; all that is wrong in a file, but what Lightning
            decides.
        TypeError, ValueError: a configuration of another type; one and fields too.
    """

    def __init__(
        self, config: str | os.PathLike[str] | Mapping[str, Any] | Config | None, fields: Mapping[str, Any]
    ) -> None:
        given = {name: value for name, value in fields.items() if value is not None}
        if config is not None and given:
            raise ValueError(
                f"the configuration is given twice: as config= and as {', '.join(given)}; put it all into one of them"
            )
        self._source = "Config"
        self._data: Mapping[str, Any] | None = None
        self._config: Config | None = None
        if config is None:
            self._config = Config(**{"stage": 2, "offload_device": "cpu", **given})
        elif isinstance(config, Config):
            self._config = config
        elif isinstance(config, Mapping):
            self._source, self._data = "config", config
        elif isinstance(config, (str, os.PathLike)):
            self._source, self._data = str(config), read_file(Path(config))
        else:
            raise TypeError(f"config is a path, a dict or a longshore.Config, not {type(config).__name__}")
        self.stage = self._load(None).config.stage

    def resolved(self, asked: Asked) -> LoadedConfig:
        """The engine's configuration, for a model that Lightning has put into its dtype.

        Raises:
            ConfigError: everything that contradicts what Lightning was told, with both values.
        """
        loaded = self._load(asked)
        problems = [*self._batch_problems(asked), *_problems(loaded.config, asked, self._data is not None)]
        steps = self._given("gradient_accumulation_steps")
        wanted = asked.accumulation or 1
        if steps is not None and steps != wanted:
            problems.append(_steps_problem(steps, asked))
        clip = self._given("gradient_clipping")
        if clip is not None and asked.clipping is not None and float(clip) != float(asked.clipping):
            what = f"contradicts {asked.by}(gradient_clip_val={asked.clipping:g}); give it in one place"
            problems.append(Problem("gradient_clipping", what, clip))
        if problems:
            raise ConfigError(self._source, problems)
        update: dict[str, Any] = {
            # Lightning converts the model and its batches, and enters autocast.
            "dtype": None,
            "autocast": None,
            "cast_inputs": False,
            "gradient_clipping": loaded.config.gradient_clipping if asked.clipping is None else asked.clipping,
            "loss_scaling": self._loss_scaling(loaded.config, asked),
        }
        return LoadedConfig(loaded.config.model_copy(update=update), loaded.notes)

    def _given(self, name: str) -> Any:
        """A value that the user wrote, or None."""
        if self._config is not None:
            return getattr(self._config, name)
        assert self._data is not None
        value = self._data.get(name)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def _load(self, asked: Asked | None) -> LoadedConfig:
        """With the numbers that Lightning has; None: as far as it can be read without them."""
        world_size = None if asked is None else asked.world_size
        steps = self._given("gradient_accumulation_steps") or (asked and (asked.accumulation or 1))
        micro = (asked and asked.micro_batch_size) or 1
        if self._config is not None:
            filled = {"gradient_accumulation_steps": steps}
            if self._config.train_batch_size is None and self._config.micro_batch_size is None:
                filled["micro_batch_size"] = micro
            return load_config(self._config.model_copy(update=filled), world_size=world_size)
        assert self._data is not None
        data = dict(self._data)
        if data.get("gradient_accumulation_steps") in (None, "auto"):
            data["gradient_accumulation_steps"] = steps
        if data.get("gradient_clipping") in (None, "auto"):
            data["gradient_clipping"] = 0
        if all(data.get(name) in (None, "auto") for name in _BATCH_KEYS):
            data[_BATCH_KEYS[1]] = micro
        try:
            return load_config(data, auto=_filled_in(asked), world_size=world_size)
        except ConfigError as error:
            raise ConfigError(self._source, error.problems) from None

    def _batch_problems(self, asked: Asked) -> list[Problem]:
        name = "micro_batch_size" if self._config is not None else _BATCH_KEYS[1]
        given = self._given(name)
        if given is None or asked.micro_batch_size in (None, given):
            return []
        return [Problem(name, f"contradicts the DataLoader, whose batch_size is {asked.micro_batch_size}", given)]

    def _loss_scaling(self, config: Config, asked: Asked) -> LossScaling | None:
        if asked.precision not in _SCALED:
            return config.loss_scaling
        explicit = self._config is None or "loss_scaling" in self._config.model_fields_set
        configured = config.loss_scaling if explicit else None
        return configured or asked.loss_scaling or _SCALER


def _filled_in(asked: Asked | None) -> dict[str, Any]:
    """What ``"auto"`` means where a file leaves the precision to Lightning."""
    dtype, autocast = PRECISIONS["32-true" if asked is None else asked.precision]
    names = {"fp16": "float16", "bf16": "bfloat16"}
    enabled = {f"{name}.enabled": dtype == name for name in names}
    return {
        **enabled,
        "torch_autocast.enabled": autocast is not None,
        "torch_autocast.dtype": names[autocast or "bf16"],
    }


def _steps_problem(steps: int, asked: Asked) -> Problem:
    if asked.accumulation is None:
        what = f"is decided by your loop with {asked.by}: every optimizer.step() applies; leave it out, or set it to 1"
    else:
        what = (
            f"contradicts {asked.by}(accumulate_grad_batches={asked.accumulation}), which decides; leave it out, or "
            "make them agree"
        )
    return Problem("gradient_accumulation_steps", what, steps)


def _problems(config: Config, asked: Asked, from_file: bool) -> list[Problem]:
    """What of the configuration is Lightning's to say, and says something else."""
    problems = []
    dtype, autocast = PRECISIONS[asked.precision]
    for name, found, wanted in (("dtype", config.dtype, dtype), ("autocast", config.autocast, autocast)):
        # Absent is whatever Lightning says.
        if found is not None and found != wanted:
            what = (
                f"contradicts {asked.by}(precision={asked.precision!r}), which decides"
                f"{' (it is the default)' if asked.precision == '32-true' else ''}: leave it out, "
                f"or pass precision={_precision_of(config)!r}"
            )
            path = {"dtype": f"{found}.enabled", "autocast": "torch_autocast.dtype"}[name] if from_file else name
            problems.append(Problem(path, what, found))
    for name, there in (("optimizer", asked.has_optimizer), ("scheduler", asked.has_scheduler)):
        chosen = getattr(config, name)
        if chosen is not None and there:
            where = "configure_optimizers()" if asked.by == "Trainer" else "fabric.setup()"
            problems.append(Problem(name, f"is given twice: here and to {where}; keep one", chosen.type))
    if config.drop_last:
        what = "is for a loader that the engine makes, and with Lightning you do: DataLoader(drop_last=True)"
        problems.append(Problem("dataloader_drop_last" if from_file else "drop_last", what, True))
    return problems


def _precision_of(config: Config) -> str:
    wanted = (config.dtype or "fp32", config.autocast)
    return next((name for name, pair in PRECISIONS.items() if pair == wanted), "32-true")
