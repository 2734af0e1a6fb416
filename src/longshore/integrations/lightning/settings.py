"""One configuration from two sources, the strategy's own and Lightning's, which must not contradict each other."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from longshore.engine.config import Config, ConfigError, LoadedConfig, LossScaling, Problem, load_config
from longshore.engine.config.agreement import ArgumentValue, put, settle, settle_config
from longshore.engine.config.load import read_config

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
_BATCH, _MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
_STEPS, _CLIPPING = "gradient_accumulation_steps", "gradient_clipping"


@dataclass(frozen=True)
class LightningArguments:
    """What Lightning was told.

    Attributes:
        by: ``Trainer`` or ``Fabric``, for messages.
        precision: Lightning's.
        world_size: number of ranks.
        accumulation: ``accumulate_grad_batches``; None: the user's own loop decides.
        clipping: ``gradient_clip_val``; None: none.
        micro_batch_size: the loader's, if it is known.
        has_optimizer, has_scheduler: whether ``configure_optimizers`` returned one.
        loss_scaling: settings of a ``GradScaler`` that the user made; None: none was made.
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

    def statements(self) -> Iterator[ArgumentValue]:
        """Values that the configuration may give too."""
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
        config: a DeepSpeed JSON file's path, its content, or a :class:`longshore.Config`. None: ``fields``.
        fields: of :class:`longshore.Config`; by default stage 2 with the optimizer on the host.

    Attributes:
        stage: of ZeRO.

    Raises:
        ConfigError: unknown fields, with the nearest name; everything that is wrong in a file, except what depends on
            Lightning's arguments.
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
        """The engine's configuration, for a model that Lightning has put into its dtype.

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
        """Load with Lightning's values where the configuration has none; also returns what contradicts them.

        ``world_size``: None: as far as that can be done without it.
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
    """Problems with what Lightning decides, whatever the configuration says: precision, optimizer, schedule, loader."""
    dtype, autocast = PRECISIONS[given.precision]
    pair = (config.dtype or "fp32", config.autocast)
    other = next((name for name, each in PRECISIONS.items() if each == pair), "32-true")
    default = " (the default)" if given.precision == "32-true" else ""
    argument = f"{given.by}(precision={given.precision!r}){default}, which decides"
    advice = f"leave it out, or pass precision={other!r}"
    paths = (f"{config.dtype}.enabled", "torch_autocast.dtype") if from_file else ("dtype", "autocast")
    problems = [
        ArgumentValue(path, wanted, argument, advice).problem(found)
        for path, wanted, found in zip(paths, (dtype, autocast), (config.dtype, config.autocast), strict=True)
        if found not in (None, wanted)  # a dtype that the configuration does not give is Lightning's
    ]
    for name, passed in (("optimizer", given.has_optimizer), ("scheduler", given.has_scheduler)):
        chosen = getattr(config, name)
        if chosen is not None and passed:
            where = "configure_optimizers()" if given.by == "Trainer" else "fabric.setup()"
            problems.append(Problem(name, f"is given twice: here and to {where}; keep one", chosen.type))
    if config.drop_last:
        what = "applies to a loader made by the engine, and with Lightning you make it: use DataLoader(drop_last=True)"
        problems.append(Problem("dataloader_drop_last" if from_file else "drop_last", what, True))
    return problems
