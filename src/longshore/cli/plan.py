"""``longshore plan``: what a model takes on a machine, and how to train it there."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from longshore.cli.curve import load_figure
from longshore.cli.failure import CommandError, SettingsError
from longshore.cli.terminal import make_console

if TYPE_CHECKING:
    from longshore.plan.job import Job
    from longshore.plan.machine import PlanMachine
    from longshore.plan.planner import Plan

T = TypeVar("T")

_QUICK_NUMEL = 1 << 22
_HERE = "of a machine that is described; it needs --gpu"


class DtypeChoice(str, Enum):
    """Of parameters."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"
    own = "own"


class OptimizerChoice(str, Enum):
    """That have kernels."""

    AdamW = "AdamW"
    Adam = "Adam"
    Lion = "Lion"
    Adagrad = "Adagrad"
    SGD = "SGD"


def plan(
    model: Annotated[
        str,
        typer.Argument(help="A transformers config, safetensors (file, index, folder), or module:function."),
    ],
    gpu: Annotated[str | None, typer.Option(help="Plan for this GPU: h200, ..., custom.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs, and so ranks, of one host.")] = None,
    hosts: Annotated[int | None, typer.Option(min=1, help=f"Hosts {_HERE}.")] = None,
    host_memory: Annotated[str | None, typer.Option(help="Memory of one host: 2TB.")] = None,
    host_bandwidth: Annotated[str | None, typer.Option(help=f"Of one host's memory: 400GB/s; {_HERE}.")] = None,
    link: Annotated[str | None, typer.Option(help=f"Host to GPU, one way: 50GB/s; {_HERE}.")] = None,
    peers: Annotated[str | None, typer.Option(help=f"GPU to GPU in one host, one way; {_HERE}.")] = None,
    network: Annotated[str | None, typer.Option(help=f"Between hosts, for each GPU: 400Gbit/s; {_HERE}.")] = None,
    device_memory: Annotated[str | None, typer.Option(help="Memory of one GPU, in place of the data sheet's.")] = None,
    device_bandwidth: Annotated[str | None, typer.Option(help=f"Of its memory; {_HERE}.")] = None,
    flops: Annotated[str | None, typer.Option(help=f"Peak, dense, in the dtype: 989TFLOP/s; {_HERE}.")] = None,
    efficiency: Annotated[float | None, typer.Option(help=f"Share of the peak reached (0.45); {_HERE}.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences of one backward on one rank.")] = 1,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 2048,
    accumulation: Annotated[int, typer.Option(min=1, help="Backwards a step.")] = 1,
    dtype: Annotated[DtypeChoice, typer.Option(help="Of parameters; own: as the model has them.")] = DtypeChoice.bf16,
    optimizer: Annotated[OptimizerChoice, typer.Option(help="Whose state is counted.")] = OptimizerChoice.AdamW,
    clip: Annotated[float, typer.Option(min=0.0, help="Largest norm of gradients; 0: none is measured.")] = 1.0,
    activation_checkpointing: Annotated[
        bool, typer.Option("--activation-checkpointing", help="Blocks are computed again in backward.")
    ] = False,
    tile_numel: Annotated[int | None, typer.Option(min=1, help="Elements a tile; default: the engine's.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure this machine with small arrays.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for plan.json, plan.png and ds_config.json.")] = None,
) -> None:
    """What a model takes on a machine: bytes by kind, times, and the configuration to use.

    Nothing is downloaded, and no weights are made. Without --gpu this machine is measured.
    """
    figure = load_figure() if out is not None else None  # before anything takes time
    sizes = (batch_size, seq_len, accumulation)
    job = _job(sizes, dtype.value, optimizer.value, clip, activation_checkpointing, tile_numel)
    described = {
        "hosts": hosts,
        "host_bandwidth": host_bandwidth,
        "link": link,
        "peers": peers,
        "network": network,
        "device_bandwidth": device_bandwidth,
        "flops": flops,
        "efficiency": efficiency,
    }
    memory = {"host_memory": host_memory, "device_memory": device_memory}
    said = None if gpu is None else _description(gpu, gpus, {**described, **memory})
    if gpu is None:
        _check_here(described)
    from longshore.cli.planned_model import read_model
    from longshore.plan.planner import DoesNotFit
    from longshore.plan.planner import plan as planned

    read = read_model(model)
    measured = replace(job, dtype=job.dtype or read.main_dtype)
    machine = said or _this_machine(measured, gpus, quick, memory)
    try:
        result = planned(read, machine, job)
    except DoesNotFit as refusal:
        raise CommandError(str(refusal)) from refusal
    except ValueError as error:
        raise SettingsError(str(error)) from error
    if out is not None:
        _write(result, out, figure)
    _show(result, as_json, out)


def _job(
    sizes: tuple[int, int, int], dtype: str, optimizer: str, clip: float, checkpointing: bool, tile_numel: int | None
) -> Job:
    from longshore.engine.precision import DTYPES
    from longshore.plan.job import Job

    if not math.isfinite(clip):
        raise SettingsError(f"--clip is a finite number, not {clip}; 0 for no clipping")
    return Job(*sizes, DTYPES.get(dtype), optimizer, clip or None, checkpointing, tile_numel=tile_numel)


def _parsed(option: str, text: str | None, parse: Callable[[str], T]) -> T | None:
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise SettingsError(f"--{option.replace('_', '-')} {error}") from error


def _description(gpu: str, gpus: int | None, said: dict[str, Any]) -> PlanMachine:
    from longshore.byte_sizes import parse_byte_size
    from longshore.plan import quantities
    from longshore.plan.machine import ACHIEVED_FLOPS, Description, described

    rates = ("host_bandwidth", "link", "peers", "network", "device_bandwidth")
    rate = {name: _parsed(name, said[name], quantities.parse_rate) for name in rates}
    try:
        return described(
            Description(
                gpu,
                gpus or 1,
                said["hosts"] or 1,
                _parsed("host_memory", said["host_memory"], parse_byte_size),
                rate["host_bandwidth"],
                rate["link"],
                rate["peers"],
                rate["network"],
                _parsed("device_memory", said["device_memory"], parse_byte_size),
                rate["device_bandwidth"],
                _parsed("flops", said["flops"], quantities.parse_flops),
                ACHIEVED_FLOPS if said["efficiency"] is None else said["efficiency"],
            )
        )
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _check_here(described: dict[str, Any]) -> None:
    given = [name for name, value in described.items() if value is not None]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise SettingsError(f"{options} describes another machine, and this one is measured: give --gpu too")


def _this_machine(job: Job, ranks: int | None, quick: bool, memory: dict[str, str | None]) -> PlanMachine:
    from longshore.byte_sizes import parse_byte_size
    from longshore.plan.measurement import this_machine

    host, device = (_parsed(name, text, parse_byte_size) for name, text in memory.items())
    console = make_console()
    with console.status("measuring") as status:  # seen on terminals alone
        sizes = {"numel": _QUICK_NUMEL, "rounds": 1} if quick else {}
        try:
            found = this_machine(job, ranks, note=status.update, **sizes)
        except ValueError as error:
            raise SettingsError(str(error)) from error
    if device is not None and not found.staged:
        raise SettingsError("--device-memory is of a GPU, and this machine has none: give --gpu too")
    return replace(found, host_bytes=host or found.host_bytes, device_bytes=device or found.device_bytes)


def _write(plan: Plan, out: Path, figure: Any) -> None:
    from longshore.plan.page import picture, values

    out.mkdir(parents=True, exist_ok=True)
    content = values(plan)
    out.joinpath("plan.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    configuration = json.dumps(content["configuration"], indent=2) + "\n"
    out.joinpath("ds_config.json").write_text(configuration, encoding="utf-8")
    out.joinpath("plan.png").write_bytes(picture(plan, figure))


def _show(plan: Plan, as_json: bool, out: Path | None) -> None:
    from longshore.plan import page

    console = make_console()

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    if as_json:
        say(json.dumps(page.values(plan), indent=2))
        return
    for line in page.head(plan):
        say(line)
    console.print(page.table(plan))
    for line in page.tail(plan):
        say(line)
    if out is not None:
        say(f"wrote {out / 'ds_config.json'} (longshore.initialize loads it), plan.json and plan.png")
        return
    say("configuration:")
    say(json.dumps(page.values(plan)["configuration"], indent=2))
