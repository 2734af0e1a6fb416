"""``python -m benchmarks.gpu``: measure, print the table, write the results and the pictures."""

from __future__ import annotations

import datetime
import re
import sys
import time
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks import machine
from benchmarks.child import Progress
from benchmarks.gpu.contest import Contest, Settings
from benchmarks.gpu.contestants import CONTESTANTS
from benchmarks.gpu.figures import draw
from benchmarks.gpu.rows import PART, rows
from benchmarks.report import Measured, as_table, conclusion, write_results, write_whole
from longshore.kernels import usable_cpus


class Size(str, Enum):
    """Of the model, in parameters. ``tiny`` has sequences of 64 tokens, the others of 4096. ``1.2b-short`` begins from
    random weights, for a few steps: two or three minutes, instead of eight."""

    tiny = "tiny"
    small = "1.2b"
    short = "1.2b-short"
    large = "3b"


class Device(str, Enum):
    """Where parameters are."""

    cuda = "cuda"
    cpu = "cpu"


def main(
    size: Annotated[Size, typer.Option(help="Parameters of the Llama.")] = Size.small,
    device: Annotated[Device, typer.Option(help="cpu shows that it runs, at size tiny.")] = Device.cuda,
    threads: Annotated[int, typer.Option(min=1, help="Host threads of every contestant.")] = len(usable_cpus()),
    only: Annotated[
        list[str] | None, typer.Option(help="Contestants, in this order: any part of a name. Default: all.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results: JSON, table and pictures.")] = None,
    deepspeed_python: Annotated[
        str,
        typer.Option(
            envvar="LONGSHORE_BENCH_DEEPSPEED_PYTHON",
            help="Interpreter that has deepspeed and transformers, where another one does.",
        ),
    ] = sys.executable,
) -> None:
    """Train a Llama on one GPU: longshore, no offload, DeepSpeed, torchao and FSDP2, each in a process of its own."""
    if device is Device.cuda and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no CUDA device; --size tiny --device cpu shows that it runs")
    if device is Device.cpu and size is not Size.tiny:
        raise typer.BadParameter(f"--size {size.value} is for a GPU; on the CPU give --size tiny")
    console, started = Console(), time.monotonic()
    if not console.is_terminal:
        console.width = 200
    described = {**machine.describe(), "threads": threads, **_accelerator(device)}
    hardware = str(described.get("gpu", described["cpu"]))
    short = re.sub(r"[^a-z0-9]+", "-", hardware.lower()).strip("-") if "gpu" in described else machine.short_cpu_name()
    stem = f"{datetime.date.today().isoformat()}-training-{size.value}-{device.value}-{short}"

    def save(results: dict[str, Any]) -> None:
        if out is not None:
            write_results(out, stem, hardware, Measured(described, {"training": results}, rows(results)))

    progress = Progress(PART)
    settings = Settings(size.value, device.value, threads, deepspeed_python, _chosen(only or [""]))
    results = Contest(settings, progress, save).measure()
    progress.end()
    table = rows(results)
    console.print(as_table(table))
    if out is not None:
        pictures, reason = draw(results)
        for name, content in pictures.items():
            write_whole(out / f"{stem}-{name}.png", content)
        if reason:
            console.print(reason, highlight=False, markup=False)
    console.print(f"{conclusion(table)}; {time.monotonic() - started:.0f} s", highlight=False, markup=False)
    if "failed" in results.get("preparation", {}):
        raise typer.Exit(1)


def _chosen(parts: list[str]) -> list[str]:
    for part in parts:
        if not any(part in name for name in CONTESTANTS):
            raise typer.BadParameter(f"--only {part!r} is in no name; the names: {'; '.join(CONTESTANTS)}")
    return [name for part in parts for name in CONTESTANTS if part in name]


def _accelerator(device: Device) -> dict[str, object]:
    if device is Device.cpu:
        return {}
    gpu = torch.cuda.get_device_properties(0)
    return {
        "gpu": torch.cuda.get_device_name(),
        "gpu_memory_gib": round(gpu.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
    }


if __name__ == "__main__":
    typer.run(main)
