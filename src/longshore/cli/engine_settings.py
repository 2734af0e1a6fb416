"""``--stage`` and ``--config``: the command line and a DeepSpeed file as one configuration.

What only one of the two says holds. What both say has to be the same. What
neither says is the file's default (no clipping given means 1.0, no offload
means none) where there is a file, and ``train``'s own otherwise; the optimizer
and the schedule are the script's to choose, and so ``train``'s in both cases.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longshore.cli.failure import SettingsError
from longshore.cli.settings import STAGES, EngineSettings, TrainSettings
from longshore.engine.config import Config, ConfigError, LoadedConfig, LossScaling, load_config
from longshore.engine.config.base import shown
from longshore.engine.config.batch import DEEPSPEED, BatchNumbers, Names, resolve
from longshore.engine.config.load import read_file
from longshore.engine.config.reading import Reading
from longshore.engine.ranks import expected_world_size

_TWIN = {
    "stage": "zero_optimization.stage",
    "batch_size": DEEPSPEED.micro,
    "accumulation": DEEPSPEED.steps,
    "lr": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
    "clip": "gradient_clipping",
    "offload": "zero_optimization.offload_optimizer.device",
    "speculation_memory": "longshore.speculation_memory",
    "bf16": "bf16.enabled",
    "fp16": "fp16.enabled",
    "log_every": "steps_per_print",
}
"""What the command line and the file call the same thing. ``bf16`` and ``fp16`` are ``--dtype``."""

_SUPER_OFFLOAD = "zero_optimization.offload_optimizer.super_offload"
"""Whether tiles are stepped ahead at all; how much memory there is for it may be said beside it."""

_BATCH = ("batch_size", "accumulation")

_KIND = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""What ``--schedule`` would call a schedule of the file."""

_RATES = ("warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr")
"""Where a schedule brings a learning rate of its own."""


def number_of_ranks() -> int:
    """Of this run, whether they have met or not."""
    try:
        return expected_world_size()
    except ValueError as error:
        raise SettingsError(str(error)) from error


def with_engine(
    settings: TrainSettings, given: Mapping[str, Any], stage: int | None, file: Path | None
) -> TrainSettings:
    """``settings`` as the engine will honour them, or unchanged where nobody asks for the engine.

    Args:
        settings: with ``train``'s defaults where an option was not given.
        given: options that were given, by name.
        stage, file: of ``--stage`` and ``--config``.

    Raises:
        SettingsError: one line with everything that is wrong.
    """
    ranks = number_of_ranks()
    if stage is None and file is None:
        if ranks > 1:
            raise SettingsError(
                f"{ranks} ranks were started, and nothing says how they share the work: "
                "add --stage 0, 1, 2 or 3, or --config FILE"
            )
        _check_without_engine(settings)
        return settings
    if stage is not None and stage not in STAGES:
        raise SettingsError(f"--stage must be 0, 1, 2 or 3, not {stage}")
    if settings.optimizer.release_gradients:
        raise SettingsError("--release-gradients is what --stage and --config do in any case: leave it out")
    asked = _Asked(settings, given, stage)
    source = "the command line" if file is None else str(file)
    try:
        data = {} if file is None else read_file(file)
        # Without a file, train's own defaults are all that there is.
        loaded = asked.load(data, asked.values() if file is None else asked.given_values())
    except ConfigError as error:
        raise SettingsError(_one_line(source, error)) from error
    contradictions = asked.contradictions(data, loaded.config)
    if contradictions:
        raise SettingsError(
            f"the command line contradicts {source}: {'; '.join(contradictions)}: change one, or leave the option out"
        )
    config = _resolved(loaded.config, asked, ranks, source)
    in_step = config.stage < 2 and not config.overlap_comm
    if "speculation_memory" in given and config.speculation_memory and in_step and ranks > 1:
        raise SettingsError(
            f"--speculation-memory is for stepping during backward, and with {ranks} ranks, stage {config.stage} and "
            "overlap_comm false gradients are reduced in the step: leave overlap_comm or --speculation-memory out"
        )
    if loaded.config.steps_per_print is not None:
        settings = replace(settings, loop=replace(settings.loop, log_every=loaded.config.steps_per_print))
    notes = () if file is None else loaded.notes  # they are about what a file says
    return _agreeing(settings, EngineSettings(config, file, notes, loaded.config.loss_scaling is None))


def _check_without_engine(settings: TrainSettings) -> None:
    if settings.model.dtype == "fp16":
        raise SettingsError(
            "--dtype fp16 is not supported: fp16 gradients need loss scaling, which train leaves to the engine; "
            "use bf16, or add --stage 0"
        )
    if settings.trace is not None and not settings.optimizer.offload:
        raise SettingsError("--trace shows what longshore steps, and --no-offload is plain PyTorch: leave one out")
    if settings.optimizer.speculation_memory and not settings.optimizer.release_gradients:
        raise SettingsError(
            "--speculation-memory is for stepping while backward brings gradients to the host, and they stay on the "
            "device until the step: add --release-gradients, --stage or --config"
        )


@dataclass(frozen=True)
class _Asked:
    """The command line, as a file would say it."""

    settings: TrainSettings
    given: Mapping[str, Any]
    stage: int | None

    def values(self) -> dict[str, Any]:
        """By the names of ``_TWIN``, train's defaults included."""
        loop, optimizer, dtype = self.settings.loop, self.settings.optimizer, self.settings.model.dtype
        return {
            "stage": 0 if self.stage is None else self.stage,
            "batch_size": loop.batch_size,
            "accumulation": loop.accumulation,
            "lr": optimizer.lr,
            "weight_decay": optimizer.weight_decay,
            "clip": optimizer.clip,
            "offload": "cpu" if optimizer.offload else "none",
            "speculation_memory": optimizer.speculation_memory,
            "bf16": dtype == "bf16",
            "fp16": dtype == "fp16",
            "log_every": loop.log_every,
        }

    def given_values(self) -> dict[str, Any]:
        """Only what the user gave."""
        names = set(self.given) | ({"stage"} if self.stage is not None else set())
        names |= {"bf16", "fp16"} if "dtype" in names else set()
        return {name: value for name, value in self.values().items() if name in names}

    def spelled(self, name: str) -> str:
        """As the user wrote it."""
        if name in ("bf16", "fp16"):
            return f"--dtype {self.settings.model.dtype}"
        if name == "offload":
            return "--offload" if self.settings.optimizer.offload else "--no-offload"
        value = self.given.get(name, self.values().get(name))
        return f"--{name.replace('_', '-')} {value}"

    def load(self, data: Mapping[str, Any], values: Mapping[str, Any]) -> LoadedConfig:
        """The file's content, and ``values`` where it says nothing.

        Raises:
            ConfigError: everything that is wrong with the file.
        """
        said = Reading(data, {}).values
        merged = copy.deepcopy(dict(data))
        if merged.get("optimizer") is None:
            defaults = self.values()
            params = {name: defaults[name] for name in ("lr", "weight_decay")}
            merged["optimizer"] = {"type": "AdamW", "params": params}
            said = {**said, **{_TWIN[name]: value for name, value in params.items()}}
        for name, value in values.items():
            if name in _BATCH:
                continue  # they have to multiply out, which _resolved looks at by the names that the user wrote
            if _TWIN[name] not in said and not (name in ("bf16", "fp16") and said.get("torch_autocast.enabled")):
                _put(merged, _TWIN[name], value)
        if all(merged.get(name) in (None, "auto") for name in (DEEPSPEED.train, DEEPSPEED.micro)):
            merged[DEEPSPEED.micro] = self.settings.loop.batch_size
        if isinstance(merged.get("bf16"), dict):
            # Else a note would say what happens to a norm that is no number. Training ends there, whatever it says.
            _put(merged, "bf16.check_grad_overflow", False)
        return load_config(merged, auto=self._auto())

    def _auto(self) -> dict[str, Any]:
        """What a file left to others, by path."""
        return {
            **{_TWIN[name]: value for name, value in self.values().items()},
            "scheduler.params.warmup_min_lr": 0.0,
            "scheduler.params.warmup_max_lr": self.settings.optimizer.lr,
            "scheduler.params.warmup_num_steps": max(1, self.settings.optimizer.warmup),
            "scheduler.params.total_num_steps": self.settings.loop.steps,
        }

    def contradictions(self, data: Mapping[str, Any], config: Config) -> list[str]:
        """Options that say something else than the file, with both values."""
        said = Reading(data, {}).values
        found = [
            self._both(name, _TWIN[name], said[_TWIN[name]])
            for name, value in self.given_values().items()
            if said.get(_TWIN[name], value) != value
        ]
        if "dtype" in self.given and self.settings.model.dtype != "fp32" and said.get("torch_autocast.enabled"):
            found.append(self._both("bf16", "torch_autocast.enabled", True))
        ahead = bool(self.settings.optimizer.speculation_memory)
        if "speculation_memory" in self.given and said.get(_SUPER_OFFLOAD, ahead) != ahead:
            found.append(self._both("speculation_memory", _SUPER_OFFLOAD, said[_SUPER_OFFLOAD]))
        return found + self._of_schedule(config.scheduler)

    def _of_schedule(self, scheduler: Any) -> list[str]:
        """A schedule of the file stands for ``--schedule``, ``--warmup`` and, where it has a rate, ``--lr``."""
        if scheduler is None:
            return []
        found = []
        kind = _KIND.get(scheduler.type)
        if self.given.get("schedule", kind) != kind:
            found.append(self._both("schedule", "scheduler.type", scheduler.type))
        warmup = getattr(scheduler, "warmup_num_steps", None)
        if self.given.get("warmup", warmup) != warmup:
            where = ("type", scheduler.type) if warmup is None else ("params.warmup_num_steps", warmup)
            found.append(self._both("warmup", f"scheduler.{where[0]}", where[1]))
        for name in _RATES:
            rate = getattr(scheduler, name, None)
            if rate is not None and self.given.get("lr", rate) != rate:
                found.append(self._both("lr", f"scheduler.params.{name}", rate))
        return found

    def _both(self, name: str, path: str, value: Any) -> str:
        return f"{self.spelled(name)}, but {path} = {shown(value)}"


def _one_line(source: str, error: ConfigError) -> str:
    if len(error.problems) == 1:
        return f"{source}: {error.problems[0]}"
    listed = "; ".join(f"({number}) {problem}" for number, problem in enumerate(error.problems, start=1))
    return f"{source} has {len(error.problems)} problems: {listed}"


def _put(data: dict[str, Any], path: str, value: Any) -> None:
    """Set a value that is missing or "auto"; what is wrong on the way there has an error of its own."""
    *sections, name = path.split(".")
    for section in sections:
        data = data[section] if data.get(section) is not None else data.setdefault(section, {})
        if not isinstance(data, dict):
            return
    if data.get(name) in (None, "auto"):
        data[name] = value


def _resolved(config: Config, asked: _Asked, ranks: int, source: str) -> Config:
    """With all three batch numbers, and with what a training run adds."""
    micro, steps = config.micro_batch_size, config.gradient_accumulation_steps
    options = {name: f"--{name.replace('_', '-')}" for name in _BATCH if name in asked.given}
    names = Names(
        DEEPSPEED.train, options.get("batch_size", DEEPSPEED.micro), options.get("accumulation", DEEPSPEED.steps)
    )
    given = BatchNumbers(
        config.train_batch_size,
        asked.given.get("batch_size") if micro is None else micro,
        asked.given.get("accumulation") if steps is None else steps,
    )
    try:
        train, micro, steps = resolve(given, ranks, names)
    except ValueError as error:
        raise SettingsError(f"{source}: {names.train} {error}") from error
    update: dict[str, Any] = {
        "train_batch_size": train,
        "micro_batch_size": micro,
        "gradient_accumulation_steps": steps,
    }
    if not config.wall_clock_breakdown:
        # Training prints a line of its own every so many steps; only the engine's has times.
        update["steps_per_print"] = None
    if config.loss_scaling is None and config.gradient_clipping is not None:
        # A scale of 1 changes no number; with it a step whose norm is none is skipped, and training can say so.
        update["loss_scaling"] = LossScaling(scale=1.0)
    return config.model_copy(update=update)


def _agreeing(settings: TrainSettings, engine: EngineSettings) -> TrainSettings:
    """The settings as the configuration has them, for the loop and for run.json."""
    config = engine.config
    micro, steps, train = config.micro_batch_size, config.gradient_accumulation_steps, config.train_batch_size
    assert micro is not None and steps is not None and train is not None and config.optimizer is not None
    return replace(
        settings,
        model=replace(settings.model, dtype=config.dtype or "fp32"),
        optimizer=replace(
            settings.optimizer,
            lr=config.optimizer.lr,
            weight_decay=config.optimizer.weight_decay,
            clip=config.gradient_clipping or 0.0,
            offload=config.offload_device == "cpu",
            speculation_memory=config.speculation_memory,
            schedule=None if config.scheduler is not None else settings.optimizer.schedule,
        ),
        loop=replace(settings.loop, batch_size=micro, accumulation=steps, ranks=train // (micro * steps)),
        engine=engine,
    )
