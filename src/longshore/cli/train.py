"""``longshore train``: its options. The work is in job.py, which is imported only when there is some."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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
    parse_speculation_memory,
)

_DATA, _MODEL, _TRAINING, _ENGINE, _OUTPUT = "Data", "Model", "Training", "Engine", "Output"


def _option(panel: str, *names: str, help: str) -> typer.models.OptionInfo:
    return typer.Option(*names, help=help, rich_help_panel=panel)


def _shared(panel: str, *names: str, help: str, default: object) -> typer.models.OptionInfo:
    """An option that --config may decide too, so that whether it was given matters."""
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=str(default))


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
    dtype: Annotated[
        str | None,
        _shared(
            _MODEL,
            "--dtype",
            help=f"{', '.join(DTYPES)} (which needs --stage or --config), of the parameters.",
            default=ModelSettings.dtype,
        ),
    ] = None,
    device: Annotated[str, _option(_MODEL, "--device", help=f"{', '.join(DEVICES)}.")] = "auto",
    seq_len: Annotated[int, _option(_TRAINING, "--seq-len", help="Tokens a sequence.")] = 128,
    steps: Annotated[int, _option(_TRAINING, "--steps", help="Optimizer steps.")] = 500,
    batch_size: Annotated[
        int | None,
        _shared(_TRAINING, "--batch-size", help="Sequences a backward, on each rank.", default=LoopSettings.batch_size),
    ] = None,
    accumulation: Annotated[
        int | None, _shared(_TRAINING, "--accumulation", help="Backwards a step.", default=LoopSettings.accumulation)
    ] = None,
    lr: Annotated[
        float | None, _shared(_TRAINING, "--lr", help="Highest learning rate.", default=OptimizerSettings.lr)
    ] = None,
    schedule: Annotated[
        str | None,
        _shared(_TRAINING, "--schedule", help=f"{', '.join(SCHEDULES)}.", default=OptimizerSettings.schedule),
    ] = None,
    warmup: Annotated[
        int | None,
        _shared(
            _TRAINING,
            "--warmup",
            help="Steps until the learning rate is reached.",
            default=OptimizerSettings.warmup,
        ),
    ] = None,
    weight_decay: Annotated[
        float | None,
        _shared(
            _TRAINING,
            "--weight-decay",
            help="Of matrices; norms never decay.",
            default=OptimizerSettings.weight_decay,
        ),
    ] = None,
    clip: Annotated[
        float | None,
        _shared(_TRAINING, "--clip", help="Largest norm of all gradients; 0 for none.", default=OptimizerSettings.clip),
    ] = None,
    offload: Annotated[
        bool | None,
        _shared(
            _TRAINING,
            "--offload/--no-offload",
            help="Optimizer state on the host, by longshore, or on the device, by plain PyTorch (by longshore with "
            "--stage or --config).",
            default="offload",
        ),
    ] = None,
    release_gradients: Annotated[
        bool,
        _option(
            _TRAINING,
            "--release-gradients",
            help="Send gradients to the host during backward; they are added, and their norm taken, there.",
        ),
    ] = False,
    speculation_memory: Annotated[
        str | None,
        _shared(
            _TRAINING,
            "--speculation-memory",
            help="Host memory for stepping while backward runs: 25% (100%: a spare for every tile), 8GiB, a number "
            "of bytes, or auto. Needs --release-gradients, --stage or --config.",
            default=OptimizerSettings.speculation_memory,
        ),
    ] = None,
    seed: Annotated[int, _option(_TRAINING, "--seed", help="Of the weights and the order of the data.")] = 0,
    stage: Annotated[
        int | None,
        _option(
            _ENGINE,
            "--stage",
            help="Train by longshore.initialize, also on several ranks (torchrun -m longshore train ...), which share "
            "nothing (0), optimizer state (1), gradients too (2), or parameters too (3).",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        _option(
            _ENGINE,
            "--config",
            help="The same, as a DeepSpeed JSON file says. Options that are given may not contradict it.",
        ),
    ] = None,
    eval_every: Annotated[int, _option(_OUTPUT, "--eval-every", help="Steps between validations; 0 for none.")] = 100,
    eval_batches: Annotated[int, _option(_OUTPUT, "--eval-batches", help="Batches a validation.")] = 8,
    log_every: Annotated[
        int | None, _shared(_OUTPUT, "--log-every", help="Steps between logged lines.", default=LoopSettings.log_every)
    ] = None,
    out: Annotated[
        Path | None, _option(_OUTPUT, "--out", help="Folder for weights, metrics and the loss curve.")
    ] = None,
    overwrite: Annotated[bool, _option(_OUTPUT, "--overwrite", help="Replace the run in --out.")] = False,
    save_every: Annotated[
        int,
        _option(
            _OUTPUT,
            "--save-every",
            help="Steps between checkpoints in --out, of which two stay, with one at the end; 0 for none.",
        ),
    ] = 0,
    resume: Annotated[
        bool,
        _option(
            _OUTPUT,
            "--resume",
            help="Go on with the run in --out from its newest checkpoint, to the weights of a run that never stopped; "
            "on any number of ranks and stage, with as many backwards a step in all.",
        ),
    ] = False,
    trace: Annotated[
        Path | None,
        _option(
            _OUTPUT,
            "--trace",
            help="Page (HTML) that shows the life of each tile in three steps in the middle of the run; JSON for "
            "Perfetto lies beside it.",
        ),
    ] = None,
) -> None:
    """Train a causal language model on plain text.

    Ctrl-C ends after the current step and writes what there is; with --save-every a checkpoint too.
    """
    parts = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "layers": layers, "heads": heads}
    of_model = _given(dtype=dtype)
    of_optimizer = _given(
        lr=lr,
        schedule=schedule,
        warmup=warmup,
        weight_decay=weight_decay,
        clip=clip,
        offload=offload,
        speculation_memory=None if speculation_memory is None else parse_speculation_memory(speculation_memory),
    )
    of_loop = _given(batch_size=batch_size, accumulation=accumulation, log_every=log_every)
    settings = TrainSettings(
        data=DataSettings(tuple(data or ()), max_bytes, tokenizer),
        model=ModelSettings(choose_shape(size, model, parts), model, device=device, **of_model),
        optimizer=OptimizerSettings(release_gradients=release_gradients, **of_optimizer),
        loop=LoopSettings(
            seq_len=seq_len,
            steps=steps,
            seed=seed,
            eval_every=eval_every,
            eval_batches=eval_batches,
            **of_loop,
        ),
        out=out,
        overwrite=overwrite,
        trace=trace,
        save_every=save_every,
        resume=resume,
    )
    from longshore.cli.job import run

    raise typer.Exit(run(settings, {**of_model, **of_optimizer, **of_loop}, stage, config))


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
