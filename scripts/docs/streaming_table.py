"""The tables of ``docs/streaming.md``: what fits on which device, and from how many tokens on copies are hidden."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from longshore.plan.job import Job, PlanChoice, PlannedModel
from longshore.plan.machine import Description, PlanMachine, described
from longshore.plan.planner import HOST_SHARE, Planner
from longshore.plan.reading import plan_of_module
from scripts.docs.tile_table import BEGIN, END, filled_between

_GB = 10**9
DEVICES = (8, 24, 80, 141)
"""Memory of devices, in GB."""
HOSTS = (64, 128, 256, 512, 1000, 2000)
"""Memory of hosts, in GB."""
GPUS = ("rtx-4090", "h100")
"""Of the planner's table of data sheets."""
STREAMED, OFFLOADED = PlanChoice(3, "cpu", param_device="cpu"), PlanChoice(0, "cpu")
JOB = Job(1, 2048, checkpointing=True)


class Shape(NamedTuple):
    """A Llama: the usual shape of models of so many parameters."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    groups: int  # heads that have keys and values
    vocabulary: int
    tied: bool = False


SHAPES = (
    Shape(16, 2048, 8192, 32, 8, 128_256, tied=True),
    Shape(28, 3072, 8192, 24, 8, 128_256, tied=True),
    Shape(32, 4096, 14_336, 32, 8, 128_256),
    Shape(40, 5120, 17_920, 40, 10, 100_352),
    Shape(64, 5120, 27_648, 40, 8, 152_064),
    Shape(80, 8192, 28_672, 64, 8, 128_256),
)


@lru_cache
def model_of(shape: Shape) -> PlannedModel:
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
    )
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(config)
    return plan_of_module(model, "llama", model.lm_head.weight).cast(torch.bfloat16)


def machine_of(gpu: str, device_bytes: int | None = None) -> PlanMachine:
    return described(Description(gpu, host_memory_bytes=HOSTS[-1] * _GB, device_memory_bytes=device_bytes))


def fits() -> str:
    """A row for each model, and a column for each device."""
    places = " | ".join(f"{size} GB" for size in DEVICES)
    lines = [f"| parameters | host memory | {places} |", "|---|---|" + "---|" * len(DEVICES)]
    for shape in SHAPES:
        model = model_of(shape)
        cells = [_cell(model, size * _GB) for size in DEVICES]
        host = Planner(model, machine_of(GPUS[1]), JOB).count(STREAMED).bytes.host_total
        enough = next((size for size in HOSTS if host <= HOST_SHARE * size * _GB), None)
        of = "more than any of these" if enough is None else f"of {_size(enough)}"
        lines.append(f"| {model.numel / 1e9:.1f} B | {host / _GB:,.0f} GB ({of}) | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _cell(model: PlannedModel, device_bytes: int) -> str:
    planner = Planner(model, machine_of(GPUS[1], device_bytes), JOB)
    offloaded, streamed = planner.count(OFFLOADED), planner.count(STREAMED)
    if offloaded.missing_device <= 0:
        return "fits without"
    if streamed.missing_device <= 0:
        return f"streamed ({streamed.bytes.device_total / _GB:.1f} GB)"
    return f"{streamed.missing_device / _GB:.1f} GB missing"


def hidden() -> str:
    """From how many tokens a step on the copies of the model of 8 B parameters are hidden."""
    model = model_of(SHAPES[2])
    rows = []
    for gpu in GPUS:
        machine = machine_of(gpu)
        tokens = Planner(model, machine, JOB).hidden_at(STREAMED)
        link = machine.to_device_bytes_per_s / 1e9
        said = "none" if tokens is None else f"{tokens:,}"
        rows.append(f"| {machine.name.removeprefix('1 x ')} | {link:.0f} GB/s | {said} |")
    return "\n".join(["| device | link to the host | tokens a step |", "|---|---|---|", *rows, ""])


def _size(gigabytes: int) -> str:
    return f"{gigabytes} GB" if gigabytes < 1000 else f"{gigabytes // 1000} TB"


def filled(text: str) -> str:
    """The page with its tables as the planner makes them now."""
    return filled_between(text, f"{BEGIN}\n{fits()}\n{hidden()}\n{END}")
