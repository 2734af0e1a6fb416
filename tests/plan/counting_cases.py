"""What an engine counts, on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import longshore
from longshore.engine.config import load_config
from longshore.plan.job import Job, PlanChoice
from longshore.plan.layout import lay_out
from longshore.plan.memory import count_bytes
from longshore.plan.reading import plan_of_module


class Odd(nn.Module):
    """Sizes that leave rests everywhere: in tiles, in shards, in what is aligned."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 19)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(19, 41), nn.Linear(41, 19), nn.LayerNorm(19)) for _ in range(3)
        )
        self.head = nn.Linear(19, 37, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).float().square().mean()


class Wide(nn.Module):
    """Parameters with states of 8 bits, and such as are too small, or whose rows are no whole blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(71, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 130), nn.Linear(130, 64), nn.Linear(64, 64, bias=False), nn.LayerNorm(64))
            for _ in range(2)
        )
        self.narrow = nn.Linear(64, 21)
        self.head = nn.Linear(64, 71, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).float().square().mean() + self.narrow(x).float().square().mean()


def made(dtypes: str, kind: type[nn.Module] = Odd) -> Any:
    torch.manual_seed(0)
    model: Any = kind()
    if dtypes == "mixed":
        model.layers[1].bfloat16()
        model.layers[1].register_forward_pre_hook(lambda _, inputs: tuple(each.bfloat16() for each in inputs))
    if dtypes == "tied":
        model.head.weight = model.embedding.weight
    if dtypes == "frozen":
        model.layers[0].requires_grad_(False)
    if dtypes == "marked":
        for name, each in model.named_parameters():
            each.use_muon = name in ("head.weight", "layers.1.0.weight")  # pyright: ignore[reportAttributeAccessIssue]
    return model


def counts(
    stage: int,
    place: str,
    dtypes: str,
    ratio: float = 1.0,
    speculation: int | str = 0,
    accumulation: int = 1,
    optimizer: str = "AdamW",
    tile_numel: int | None = 112,
    bucket_numel: int = 700,
    params: Mapping[str, Any] | None = None,
    states: str | None = None,
    accumulate: str = "auto",
) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, int]]]:
    """What the engine counts, and what was planned: at the end of the third backward, before its step.

    With ``states``, for a model whose states can have other formats than float32.
    """
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    staged, offload = place != "direct", "none" if place == "resident" else "cpu"
    param_device = "cpu" if place == "streamed" else "none"
    dtype = torch.bfloat16 if dtypes == "bf16" else None
    kind, format = (Odd, "fp32") if states is None else (Wide, states)
    sizes = {"bucket_numel": bucket_numel, "tile_numel": tile_numel}
    job = Job(2, 8, accumulation, dtype, optimizer, **sizes, optimizer_params=params, states=format)
    choice = PlanChoice(stage, offload, ratio, speculation, param_device)
    planned_model = plan_of_module(made(dtypes, kind), "odd")
    layout = lay_out(planned_model, job, choice, ranks, staged, rank)
    simulated = staged and param_device == "none"
    on_device = layout.may_add_on_device and (accumulate == "device" or not simulated)
    planned = count_bytes(replace(layout, sums_on_device=on_device))
    config = longshore.Config(
        stage=stage,
        offload_device="cpu",
        param_device=param_device,
        reduce_bucket_numel=bucket_numel,
        allgather_bucket_numel=bucket_numel,
        tile_numel=tile_numel,
        dtype="bf16" if dtypes == "bf16" else None,
        gradient_accumulation_steps=accumulation,
        optimizer=load_config({"train_batch_size": 1, "optimizer": job.optimizer_section}).config.optimizer,
    )
    transfer = longshore.SimulatedTransfer(seed=rank, max_delay_s=0.0) if simulated else None
    ahead: dict[str, Any] = {"speculation_memory": speculation, "states": format, "accumulate": accumulate}
    offloading = longshore.Offload(tile_numel, 1, transfer=transfer, device=offload, ratio=ratio, **ahead)
    model = made(dtypes, kind)
    engine, *_ = longshore.initialize(model=model, config=config, offload=offloading, wrap_policy=None)
    found: Any = None
    for step in range(3):
        for number in range(accumulation):
            tokens = torch.randint(37, (2, 8), generator=torch.Generator().manual_seed(step))
            engine.backward(engine(tokens.to(engine.device)))
            if number < accumulation - 1:
                engine.step()
        if step == 2:
            engine.optimizer.grad_norm()  # waits for what is under way
            found = engine.explain(False)
        engine.step()
    engine.destroy()
    return {"host": dict(found.host_bytes), "device": dict(found.device_bytes)}, {
        "host": planned.host,
        "device": planned.device,
    }
