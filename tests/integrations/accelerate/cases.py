"""Plain Accelerate loops with the one-line optimizer, in this process and on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from support import whole
from torch import Tensor, nn
from torch.utils.data import DataLoader

import longshore
from integrations.transformers.cases import check_equal, fresh_accelerate, make_data, make_model

OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "plain":
        return torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
    released = kind == "released"
    ahead = longshore.Offload(speculation_memory="100%") if released else None
    return longshore.AdamW(model.parameters(), release_gradients=released, offload=ahead, **OPTIONS)


def loop(
    kind: str,
    accelerator: Accelerator,
    steps: int = 4,
    clip: float | None = None,
    model: nn.Module | None = None,
    save: Path | None = None,
    load: Path | None = None,
) -> tuple[dict[str, Tensor], Any]:
    """As the documentation of Accelerate writes it, with an evaluation between two steps."""
    model = make_model() if model is None else model
    optimizer = make_optimizer(kind, model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=4)
    loader = DataLoader(make_data(32), batch_size=2)  # pyright: ignore[reportArgumentType]
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    done, kind_of_ranks = 0, accelerator.distributed_type
    if load is not None:
        accelerator.load_state(str(load))
        loader, done = accelerator.skip_first_batches(loader, 4), 2
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            done += 1
            with torch.no_grad():
                model(**batch)
            assert accelerator.distributed_type == kind_of_ranks
            if save is not None and done == 2:
                accelerator.save_state(str(save))
        if done == steps:
            break
    weights = {name.removeprefix("module."): whole(each.detach()).clone() for name, each in model.named_parameters()}
    return weights, optimizer


def accelerator(**options: Any) -> Accelerator:
    return Accelerator(cpu=True, gradient_accumulation_steps=2, **options)


def both(clip: float | None = None, mine: str = "kept", **options: Any) -> None:
    """A plain optimizer and ours, in the same loop."""
    results = []
    for kind in ("plain", mine):
        with fresh_accelerate():
            results.append(loop(kind, accelerator(**options), clip=clip)[0])
    check_equal(results[1], results[0])


def resumed(folder: str, kind: str, fsdp2: bool = False) -> None:
    """With Accelerate's own checkpoints."""
    make = fsdp2_accelerator if fsdp2 else accelerator
    with fresh_accelerate():
        undisturbed, _ = loop(kind, make(), save=Path(folder) / "saved")
    if dist.is_initialized():
        dist.barrier()
    with fresh_accelerate():
        again, _ = loop(kind, make(), load=Path(folder) / "saved")
    check_equal(again, undisturbed)


def fsdp2_accelerator() -> Accelerator:
    """Accelerate takes FSDP for GPUs only, and on CPUs falls back to DDP without a word; its code runs all the same."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )
    made = accelerator()
    PartialState._shared_state.update(distributed_type=DistributedType.FSDP)  # each new state is begun from it
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    assert made.is_fsdp2
    return made


def on_fsdp2(mine: str, clip: float | None) -> None:
    """The model is put on FSDP2 behind the optimizer's back; the weights are those of the plain loop on shards."""
    with fresh_accelerate():
        plain, _ = loop("plain", fsdp2_accelerator(), clip=clip)
    with fresh_accelerate():
        weights, optimizer = loop(mine, fsdp2_accelerator(), clip=clip)
        inner: Any = optimizer.optimizer
        # State is of the shards, and nothing of the whole parameters is left.
        kept = sum(record.kept.numel() for record in inner._core.members.records)
        assert kept == sum(each.numel() for each in weights.values()) // dist.get_world_size()
        assert inner.host_bytes()["state"] < 13 * kept + 4096
        if mine == "kept":
            check_equal(weights, plain)
    for name, each in weights.items():
        torch.testing.assert_close(each, plain[name], rtol=1e-3, atol=1e-5)


def clipped_by_the_optimizer(kind: str, max_norm: float) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and norms of a prepared loop whose optimizer clips; "plain" does by hand what longshore's does."""
    norms: list[float] = []
    with fresh_accelerate():
        mine, data = accelerator(), DataLoader(make_data(32), batch_size=2)  # pyright: ignore[reportArgumentType]
        model = make_model()
        model, optimizer, loader = mine.prepare(model, make_optimizer(kind, model), data)
        for batch in loader:
            with mine.accumulate(model):
                mine.backward(model(**batch).loss)
                if mine.sync_gradients:
                    norms.append(float(_clip(kind, model, optimizer, max_norm)))
                optimizer.step()
                optimizer.zero_grad()
    return {name: each.detach().clone() for name, each in model.named_parameters()}, norms


def _clip(kind: str, model: nn.Module, optimizer: Any, max_norm: float) -> Tensor:
    if kind != "plain":
        return optimizer.optimizer.clip_grad_norm_(max_norm)
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    norm = torch.stack([each.double().square().sum() for each in gradients]).sum().sqrt().float()
    for each in gradients:
        each.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
