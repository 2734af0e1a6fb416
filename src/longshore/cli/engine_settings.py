"""``--stage`` and ``--config``: the command line and a DeepSpeed file as one configuration.

A value that only one of the two gives is used; values that both give have to be equal. A value that neither gives has
the file's default if there is a file (1.0 if it has no clipping, none if no offload), and otherwise ``train``'s.
The optimizer and the schedule have ``train``'s defaults in both cases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longshore import Config, ConfigError
from longshore.cli.settings import MUON_RATES, EngineSettings, TrainSettings
from longshore.cli.terminal import SettingsError
from longshore.compat.config.agreement import ArgumentValue, contradictions, put, settle
from longshore.compat.config.load import DEEPSPEED
from longshore.compat.config.reading import Reading, read_file
from longshore.engine.config import LoadedConfig, LossScaling, Problem, load_config
from longshore.seam import BatchNumbers, Names, expected_world_size, resolve

MUON_PARAMS = {"ns_method": "standard", "betas": [0.9, 0.999], "eps": 1e-8, **MUON_RATES}
"""Parameters in a file for what ``train`` does without an engine."""
_TYPES = {"adamw": "AdamW", "muon": "Muon"}
"""Types in a file, by values of --optimizer."""
_SUPER_OFFLOAD = "zero_optimization.offload_optimizer.super_offload"
"""The key that says whether tiles are stepped ahead; another key gives the memory for it."""
_BF16_STATES, _FP32_STATES = "bf16.bf16_optimizer_states", "optimizer.params.fp32_optimizer_states"
"""DeepSpeed's keys for the format of the states, beside our own."""

_SCHEDULES = {"constant": "WarmupLR", "linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}
"""The names in a file for the values of ``--schedule``."""

_RATES = tuple(f"scheduler.params.{name}" for name in ("warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr"))
"""The keys of a schedule's own learning rate."""


def with_engine(settings: TrainSettings, given: Mapping[str, Any]) -> TrainSettings:
    """Return the settings with the engine's configuration, if ``--stage`` or ``--config`` is given.

    ``--stream`` means ``--release-gradients`` otherwise.

    Args:
        settings: with ``train``'s defaults where an option was not given.
        given: options that were given, by name.

    Raises:
        SettingsError: one line with everything that is wrong.
    """
    try:
        ranks = expected_world_size()
    except ValueError as error:
        raise SettingsError(str(error)) from error
    if settings.config is None and settings.optimizer.states_seed and settings.optimizer.states == "fp32":
        raise SettingsError(
            f"--states-seed {settings.optimizer.states_seed} is the seed of the rounding that --states bf16 and 8bit "
            "do, and --states is fp32: add --states, or leave --states-seed out"
        )
    if settings.stage is None and settings.config is None:
        _check_without_engine(settings, ranks)
        if settings.model.stream:  # their norm is the same number wherever they are; torch's depends on the device
            return replace(settings, optimizer=replace(settings.optimizer, release_gradients=True))
        return settings
    if settings.optimizer.plain:
        raise SettingsError("--plain trains without longshore, and --stage and --config with its engine: leave one out")
    if settings.optimizer.release_gradients:
        raise SettingsError("--release-gradients is what --stage and --config do in any case: leave it out")
    source = "the command line" if settings.config is None else str(settings.config)
    try:
        loaded = _CommandLine(settings, given).load(settings.config, source)
    except ConfigError as error:
        raise SettingsError(_one_line(error)) from error
    config = _resolved(loaded.config, given, ranks, source)
    in_step = config.stage < 2 and not config.overlap_comm
    if "speculation_memory" in given and config.speculation_memory and in_step and ranks > 1:
        raise SettingsError(
            f"--speculation-memory is for stepping during backward, and with {ranks} ranks, stage {config.stage} and "
            "overlap_comm false gradients are reduced in the step: leave overlap_comm or --speculation-memory out"
        )
    return _agreeing(settings, config, loaded)


def _check_without_engine(settings: TrainSettings, ranks: int) -> None:
    if ranks > 1:
        raise SettingsError(
            f"{ranks} ranks were started, and nothing says how they share the work: "
            "add --stage 0, 1, 2 or 3, or --config FILE"
        )
    if settings.model.dtype == "fp16":
        raise SettingsError(
            "--dtype fp16 is not supported: fp16 gradients need loss scaling, which train leaves to the engine; "
            f"use bf16, or add --stage {3 if settings.model.stream else 0}"
        )
    released = settings.optimizer.release_gradients or settings.model.stream
    for option, given in (
        ("--speculation-memory is for stepping", settings.optimizer.speculation_memory),
        ("--accumulate is for adding", settings.optimizer.accumulate != "auto"),
    ):
        if given and not released:
            raise SettingsError(
                f"{option} while backward copies gradients to the host, and here they stay on the device until the "
                "step: add --release-gradients, --stream, --stage or --config"
            )


@dataclass(frozen=True)
class _CommandLine:
    """The command line, expressed in the keys of a DeepSpeed file."""

    settings: TrainSettings
    given: Mapping[str, Any]

    def values(self) -> dict[str, tuple[str, Any]]:
        """Return an option and its value for each setting, by its path in a file; train's defaults are included."""
        loop, optimizer, dtype = self.settings.loop, self.settings.optimizer, self.settings.model.dtype
        return {
            "zero_optimization.stage": ("stage", self.settings.stage or 0),
            DEEPSPEED.micro: ("batch_size", loop.batch_size),
            DEEPSPEED.steps: ("accumulation", loop.accumulation),
            "optimizer.type": ("rule", _TYPES[optimizer.rule]),
            "optimizer.params.lr": ("lr", optimizer.lr),
            "optimizer.params.weight_decay": ("weight_decay", optimizer.weight_decay),
            "gradient_clipping": ("clip", optimizer.clip),
            "zero_optimization.offload_optimizer.device": ("offload", "cpu" if optimizer.offload else "none"),
            "zero_optimization.offload_param.device": ("stream", "cpu" if self.settings.model.stream else "none"),
            "longshore.speculation_memory": ("speculation_memory", optimizer.speculation_memory),
            "longshore.accumulate": ("accumulate", optimizer.accumulate),
            "zero_optimization.offload_optimizer.states": ("states", optimizer.states),
            "zero_optimization.offload_optimizer.states_seed": ("states_seed", optimizer.states_seed),
            "bf16.enabled": ("dtype", dtype == "bf16"),
            "fp16.enabled": ("dtype", dtype == "fp16"),
            "steps_per_print": ("log_every", loop.log_every),
        }

    def _says(self, name: str, path: str, value: Any, fills: bool = False) -> ArgumentValue:
        """Return an option's value for ``path``, with the option as the user wrote it."""
        if name == "offload":
            option = "--offload" if self.settings.optimizer.offload else "--no-offload"
        elif name == "stream":
            option = "--stream"
        elif name == "rule":
            option = f"--optimizer {self.settings.optimizer.rule}"
        else:
            shown = self.settings.model.dtype if name == "dtype" else self.given.get(name, value)
            option = f"--{name.replace('_', '-')} {shown}"
        return ArgumentValue(path, value, option, "change one, or leave the option out", fills)

    def statements(self, data: Mapping[str, Any], defaults: bool) -> Iterator[ArgumentValue]:
        """Yield the statement of each option that was given or, with ``defaults``, of every option."""
        autocast = Reading(data, {}).values.get("torch_autocast.enabled")
        for path, (name, value) in self.values().items():
            if defaults or name in self.given:
                # Batch numbers do not fill gaps: _resolved checks their product, by the names that the user wrote.
                fills = name not in ("batch_size", "accumulation") and not (name == "dtype" and autocast)
                yield self._says(name, path, value, fills)
        if "dtype" in self.given and self.settings.model.dtype != "fp32":
            yield self._says("dtype", "torch_autocast.enabled", False)
        if "lr" in self.given:  # where a file gives these, they count, for Muon's two kinds of groups
            for name in ("muon_lr", "adam_lr"):
                yield self._says("lr", f"optimizer.params.{name}", self.settings.optimizer.lr)
        if "speculation_memory" in self.given:
            ahead = bool(self.settings.optimizer.speculation_memory)
            yield self._says("speculation_memory", _SUPER_OFFLOAD, ahead)
        states = self.given.get("states")
        if states not in (None, "bf16"):  # where the file says false, it says nothing about bf16
            yield self._says("states", _BF16_STATES, False)
        if states is not None:
            yield self._says("states", _FP32_STATES, states == "fp32")

    def load(self, file: Path | None, source: str) -> LoadedConfig:
        """Return the file's configuration, with the command line's values where it has none.

        Raises:
            ConfigError: everything that is wrong with the file, or everything that the command line contradicts.
        """
        optimizer, loop = self.settings.optimizer, self.settings.loop
        data = {} if file is None else read_file(file)
        if data.get("optimizer") is None:
            params = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
            own = MUON_PARAMS if optimizer.rule == "muon" else {}
            data["optimizer"] = {"type": _TYPES[optimizer.rule], "params": {**params, **own}}
        # Without a file, train's own defaults are used; with one, the file's.
        problems = settle(data, self.statements(data, defaults=file is None))
        if all(data.get(name) in (None, "auto") for name in (DEEPSPEED.train, DEEPSPEED.micro)):
            data[DEEPSPEED.micro] = loop.batch_size
        if isinstance(data.get("bf16"), dict):
            # Otherwise a note would explain what the engine does if a norm is not finite. Training ends in any case.
            put(data, "bf16.check_grad_overflow", False)
        auto = {
            **{path: value for path, (_, value) in self.values().items()},
            "scheduler.params.warmup_min_lr": 0.0,
            "scheduler.params.warmup_max_lr": optimizer.lr,
            "scheduler.params.warmup_num_steps": max(1, optimizer.warmup),
            "scheduler.params.total_num_steps": loop.steps,
        }
        try:
            loaded = load_config(data, auto=auto)
        except ConfigError as error:
            raise ConfigError(source, problems or error.problems) from None
        problems += self._schedule_problems(loaded.config.scheduler)
        if problems:
            raise ConfigError(source, problems)
        return loaded

    def _schedule_problems(self, scheduler: Any) -> list[Problem]:
        """Return contradictions with the file's schedule, which replaces ``--schedule``, ``--warmup`` and, if it has a
        learning rate, ``--lr``."""
        if scheduler is None:
            return []
        params = {f"scheduler.params.{name}": value for name, value in scheduler.arguments().items()}
        warmup = "scheduler.params.warmup_num_steps"
        paths = {
            "schedule": ["scheduler.type"],
            "warmup": [warmup if params.get(warmup) is not None else "scheduler.type"],
            "lr": [path for path in _RATES if params.get(path) is not None],
        }
        statements = [
            self._says(name, path, _SCHEDULES.get(value) if name == "schedule" else value)
            for name, value in self.given.items()
            for path in paths.get(name, ())
        ]
        return contradictions({**params, "scheduler.type": scheduler.type}, statements)


def _one_line(error: ConfigError) -> str:
    if len(error.problems) == 1:
        return f"{error.source}: {error.problems[0]}"
    listed = "; ".join(f"({number}) {problem}" for number, problem in enumerate(error.problems, start=1))
    return f"{error.source} has {len(error.problems)} problems: {listed}"


def _resolved(config: Config, options: Mapping[str, Any], ranks: int, source: str) -> Config:
    """Return the configuration with all three batch numbers, and with the values that a training run adds."""
    micro, steps = config.micro_batch_size, config.gradient_accumulation_steps
    names = Names(
        DEEPSPEED.train,
        "--batch-size" if "batch_size" in options else DEEPSPEED.micro,
        "--accumulation" if "accumulation" in options else DEEPSPEED.steps,
    )
    given = BatchNumbers(
        config.train_batch_size,
        options.get("batch_size") if micro is None else micro,
        options.get("accumulation") if steps is None else steps,
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
        # train prints lines of its own. The engine's line is needed only for its times.
        update["steps_per_print"] = None
    if config.loss_scaling is None and config.gradient_clipping is not None:
        # A scale of 1 changes no number; with it a step whose norm is not finite is skipped, and train reports it.
        update["loss_scaling"] = LossScaling(scale=1.0)
    return config.model_copy(update=update)


def _agreeing(settings: TrainSettings, config: Config, loaded: LoadedConfig) -> TrainSettings:
    """Return the settings with the configuration's values, for the loop and for run.json."""
    micro, steps, train = config.micro_batch_size, config.gradient_accumulation_steps, config.train_batch_size
    assert micro is not None and steps is not None and train is not None and config.optimizer is not None
    log_every = loaded.config.steps_per_print
    notes = () if settings.config is None else loaded.notes  # they are about the file
    return replace(
        settings,
        model=replace(settings.model, dtype=config.dtype or "fp32", stream=config.param_device == "cpu"),
        optimizer=replace(
            settings.optimizer,
            rule="muon" if config.optimizer.type == "Muon" else settings.optimizer.rule,
            lr=config.optimizer.lr,
            weight_decay=config.optimizer.weight_decay,
            clip=config.gradient_clipping or 0.0,
            offload=config.offload_device == "cpu",
            speculation_memory=config.speculation_memory,
            accumulate=config.accumulate,
            states=config.states,
            states_seed=config.states_seed,
            schedule=None if config.scheduler is not None else settings.optimizer.schedule,
        ),
        loop=replace(
            settings.loop,
            batch_size=micro,
            accumulation=steps,
            ranks=train // (micro * steps),
            log_every=settings.loop.log_every if log_every is None else log_every,
        ),
        engine=EngineSettings(config, notes, loaded.config.loss_scaling is None),
    )
