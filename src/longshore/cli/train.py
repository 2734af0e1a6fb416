"""The commands ``longshore train`` and ``longshore demo``."""

from __future__ import annotations

import os

import typer

from longshore.cli.options import CommandLine, takes
from longshore.cli.settings import (
    DataSettings,
    DemoSettings,
    LoopSettings,
    ModelSettings,
    OptimizerSettings,
    ShapeSettings,
    TrainSettings,
    check_data,
)
from longshore.cli.terminal import SettingsError


@takes(DataSettings, ShapeSettings, ModelSettings, LoopSettings, OptimizerSettings, TrainSettings)
def train(line: CommandLine) -> None:
    """Train a causal language model on plain text.

    Ctrl-C ends training after the current step and writes the results; with --save-every a checkpoint too.
    """
    model, sizes = line.given.get("path"), line.flags_given(ShapeSettings)
    if model is not None and sizes:
        raise SettingsError(f"{sizes[0]} and --model exclude each other: the model in {model} has its own shape")
    settings = line.settings(
        TrainSettings,
        data=line.settings(DataSettings),
        model=line.settings(ModelSettings, shape=line.settings(ShapeSettings).shape()),
        optimizer=line.settings(OptimizerSettings),
        loop=line.settings(LoopSettings),
    )
    if settings.optimizer.plain and line.given.get("offload"):
        raise SettingsError("--plain keeps the optimizer state on the device, and --offload on the host: leave one out")
    settings.data.check_paths()
    settings.model.check_path()
    from longshore.cli.job import run

    raise typer.Exit(run(settings, line.given))


@takes(DemoSettings)
def demo(line: CommandLine) -> None:
    """Train with longshore and with plain PyTorch, in fp32, in bf16 and on two ranks, and compare.

    One run on two ranks is killed half way and continued from its checkpoint.

    The exit code is 1 if any weight differs in any bit.
    """
    settings = line.settings(DemoSettings)
    check_data(settings.data)
    # On a busy machine threads that spin while they wait take the cores from those that they wait for. OpenMP reads
    # this once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from longshore.cli.comparison import run

    raise typer.Exit(run(settings))
