"""``longshore train``: its options. The work is in job.py, which is imported only when there is some."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longshore.cli.settings import (
    DEVICES,
    DTYPES,
    SCHEDULES,
    SIZES,
    DataSettings,
    LoopSettings,
    ModelSettings,
    OptimizerSettings,
    TrainSettings,
    choose_shape,
)

_DATA, _MODEL, _TRAINING, _OUTPUT = "Data", "Model", "Training", "Output"


def _option(panel: str, *names: str, help: str) -> typer.models.OptionInfo:
    return typer.Option(*names, help=help, rich_help_panel=panel)


def train(
    data: Annotated[
        list[Path] | None,
        _option(_DATA, "--data", help="File or folder of plain text; repeatable. Default: Python's standard library."),
    ] = None,
    max_bytes: Annotated[int | None, _option(_DATA, "--max-bytes", help="Read no more text than this.")] = None,
    tokenizer: Annotated[
        Path | None,
        _option(_DATA, "--tokenizer", help="Local tokenizer. Default: the one of --model, or else bytes."),
    ] = None,
    size: Annotated[
        str | None, _option(_MODEL, "--size", help=f"{', '.join(SIZES)}: a Llama with random weights. Default: small.")
    ] = None,
    hidden_size: Annotated[int | None, _option(_MODEL, "--hidden-size", help="In place of the size's own.")] = None,
    intermediate_size: Annotated[
        int | None, _option(_MODEL, "--intermediate-size", help="In place of the size's own.")
    ] = None,
    layers: Annotated[int | None, _option(_MODEL, "--layers", help="In place of the size's own.")] = None,
    heads: Annotated[int | None, _option(_MODEL, "--heads", help="In place of the size's own.")] = None,
    model: Annotated[
        Path | None, _option(_MODEL, "--model", help="Folder with a causal language model to start from.")
    ] = None,
    dtype: Annotated[str, _option(_MODEL, "--dtype", help=f"{' or '.join(DTYPES)}, of the parameters.")] = "fp32",
    device: Annotated[str, _option(_MODEL, "--device", help=f"{', '.join(DEVICES)}.")] = "auto",
    seq_len: Annotated[int, _option(_TRAINING, "--seq-len", help="Tokens a sequence.")] = 128,
    steps: Annotated[int, _option(_TRAINING, "--steps", help="Optimizer steps.")] = 500,
    batch_size: Annotated[int, _option(_TRAINING, "--batch-size", help="Sequences a backward.")] = 8,
    accumulation: Annotated[int, _option(_TRAINING, "--accumulation", help="Backwards a step.")] = 1,
    lr: Annotated[float, _option(_TRAINING, "--lr", help="Highest learning rate.")] = 1e-3,
    schedule: Annotated[str, _option(_TRAINING, "--schedule", help=f"{', '.join(SCHEDULES)}.")] = "cosine",
    warmup: Annotated[int, _option(_TRAINING, "--warmup", help="Steps until the learning rate is reached.")] = 20,
    weight_decay: Annotated[float, _option(_TRAINING, "--weight-decay", help="Of matrices; norms never decay.")] = 0.1,
    clip: Annotated[float, _option(_TRAINING, "--clip", help="Largest norm of all gradients; 0 for none.")] = 1.0,
    offload: Annotated[
        bool,
        _option(
            _TRAINING,
            "--offload/--no-offload",
            help="Optimizer state on the host, by longshore, or on the device, by plain PyTorch.",
        ),
    ] = True,
    release_gradients: Annotated[
        bool,
        _option(
            _TRAINING,
            "--release-gradients",
            help="Send gradients to the host during backward; they are added, and their norm taken, there.",
        ),
    ] = False,
    seed: Annotated[int, _option(_TRAINING, "--seed", help="Of the weights and the order of the data.")] = 0,
    eval_every: Annotated[int, _option(_OUTPUT, "--eval-every", help="Steps between validations; 0 for none.")] = 100,
    eval_batches: Annotated[int, _option(_OUTPUT, "--eval-batches", help="Batches a validation.")] = 8,
    log_every: Annotated[int, _option(_OUTPUT, "--log-every", help="Steps between logged lines.")] = 10,
    out: Annotated[
        Path | None, _option(_OUTPUT, "--out", help="Folder for weights, metrics and the loss curve.")
    ] = None,
    overwrite: Annotated[bool, _option(_OUTPUT, "--overwrite", help="Replace the run in --out.")] = False,
) -> None:
    """Train a causal language model on plain text.

    Ctrl-C ends after the current step and writes what there is.
    """
    parts = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "layers": layers, "heads": heads}
    settings = TrainSettings(
        data=DataSettings(tuple(data or ()), max_bytes, tokenizer),
        model=ModelSettings(choose_shape(size, model, parts), model, dtype, device),
        optimizer=OptimizerSettings(lr, schedule, warmup, weight_decay, clip, offload, release_gradients),
        loop=LoopSettings(seq_len, steps, batch_size, accumulation, seed, eval_every, eval_batches, log_every),
        out=out,
        overwrite=overwrite,
    )
    from longshore.cli.job import run

    raise typer.Exit(run(settings))
