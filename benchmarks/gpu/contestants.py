"""Ways to train one Llama on one device, as people write them. Other packages are imported when they are asked for.

All clip the global norm to 1.0 (but where their name or their remark says otherwise), keep float32
masters of bfloat16 parameters (but for torchao's, whose parameters and moments
are bfloat16), and step with AdamW of the same settings.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contestants import MAX_NORM, load_deepspeed, zero_config
from benchmarks.floor import NotAvailable
from benchmarks.team import free_port, rank_environment

WEIGHT_DECAY = 0.01
BUCKET_NUMEL = 50_000_000
_NEVER = 1e9
"""A norm that no gradient reaches."""

BY_HAND = "no offload: AdamW(fused=True) on fp32 masters, by hand"
RESIDENT = "no offload: longshore's engine, device none"
ENGINE = "longshore's engine, device cpu"
ENGINE_HOST_SUMS = "longshore's engine, device cpu, gradients added on the host"
AHEAD = "longshore's engine, device cpu, super_offload"
AHEAD_HOST_SUMS = "longshore's engine, device cpu, super_offload, gradients added on the host"
AHEAD_UNCLIPPED = "longshore's engine, device cpu, super_offload, nothing clipped"
ONE_LINE = "longshore.AdamW, release_gradients"
ZERO_OFFLOAD = "DeepSpeed ZeRO-Offload, stage 2"
SUPER_OFFLOAD = "DeepSpeed SuperOffload, stage 3"
TORCHAO = "torchao CPUOffloadOptimizer"
FSDP2 = "FSDP2 CPUOffloadPolicy"

REMARKS = {
    AHEAD_UNCLIPPED: "the norm is measured, and bets hold",
    TORCHAO: "not clipped (it cannot be), no masters: parameters and moments in bf16",
    FSDP2: "gradients and their norm on the CPU",
}
DEEPSPEED = (ZERO_OFFLOAD, SUPER_OFFLOAD)
"""These run in the interpreter that has DeepSpeed."""


@dataclass(frozen=True)
class Way:
    """What a contestant has to know: ``backwards`` make one step."""

    device: str
    backwards: int
    learning_rate: float
    threads: int


@dataclass
class Training:
    """One contestant, under way.

    Attributes:
        step: one optimizer step on int64 ``[backwards, tokens]``; the mean loss, on the device.
        grad_norm: of the last step, before clipping; None where nobody knows.
        host_bytes: host memory by kind, where the contestant counts it.
        optimizer: the torch optimizer, to change its learning rate.
        ahead: what was stepped ahead in the last step.
    """

    step: Callable[[Tensor], Tensor]
    grad_norm: Callable[[], float | None] = lambda: None
    host_bytes: Callable[[], dict[str, int]] = dict
    optimizer: Any = None
    ahead: Callable[[], Any] = lambda: None


def start(name: str, model: nn.Module, way: Way) -> Training:
    """The contestant, which trains ``model``.

    Raises:
        NotAvailable: a package is missing.
    """
    return _START[name](model, way)


def prepare(name: str, way: Way) -> None:
    """Import and join what the contestant needs, ahead of its memory being measured.

    Raises:
        NotAvailable: a package is missing.
    """
    if name in DEEPSPEED:
        os.environ.update(rank_environment(0, 1, free_port(), way.threads))
        backend = "nccl" if way.device == "cuda" else "gloo"
        load_deepspeed(way.device).init_distributed(dist_backend=backend, verbose=False)
    elif name == TORCHAO:
        if importlib.util.find_spec("torchao") is None:
            raise NotAvailable("not installed: pip install torchao")
        importlib.import_module("torchao.optim")
    elif name == FSDP2:
        backend = "cpu:gloo,cuda:nccl" if way.device == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, rank=0, world_size=1, store=torch.distributed.HashStore())
    elif name != BY_HAND:
        importlib.import_module("longshore")


# -- the loops ------------------------------------------------------------------


def _loop(model: nn.Module, finish: Callable[[], None]) -> Callable[[Tensor], Tensor]:
    """Backwards on the mean of their losses, then ``finish``."""

    def step(batch: Tensor) -> Tensor:
        losses = []
        for tokens in batch.split(1):
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss / len(batch)).backward()
            losses.append(loss.detach())
        finish()
        return torch.stack(losses).mean()

    return step


def _engine_loop(engine: Any) -> Callable[[Tensor], Tensor]:
    """The loop of DeepSpeed and of longshore.initialize: the engine divides losses, and knows when a step is due."""

    def step(batch: Tensor) -> Tensor:
        losses = []
        for tokens in batch.split(1):
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return step


# -- without offload ------------------------------------------------------------


def _by_hand(model: nn.Module, way: Way) -> Training:
    """fp32 masters and preallocated fp32 gradients where the parameters are; cast, clip, fused AdamW, cast back."""
    parameters = list(model.parameters())
    masters = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
    gradients = [torch.zeros_like(master) for master in masters]
    optimizer = torch.optim.AdamW(masters, lr=way.learning_rate, weight_decay=WEIGHT_DECAY, fused=True)
    norm = torch.zeros(())

    @torch.no_grad()
    def finish() -> None:
        nonlocal norm
        for master, gradient, parameter in zip(masters, gradients, parameters, strict=True):
            assert parameter.grad is not None
            master.grad = gradient.copy_(parameter.grad)
        norm = nn.utils.clip_grad_norm_(masters, MAX_NORM)
        optimizer.step()
        for master, parameter in zip(masters, parameters, strict=True):
            parameter.copy_(master)
        model.zero_grad()

    return Training(_loop(model, finish), lambda: norm.item(), optimizer=optimizer)


# -- longshore ------------------------------------------------------------------


def _engine(
    model: nn.Module, way: Way, max_norm: float = MAX_NORM, accumulate: str = "auto", **offload_optimizer: Any
) -> Training:
    import longshore

    config = zero_config(BUCKET_NUMEL, way.learning_rate, way.backwards)
    config["zero_optimization"]["offload_optimizer"] = offload_optimizer
    config["gradient_clipping"] = max_norm
    config["longshore"] = {"accumulate": accumulate}
    engine, *_ = longshore.initialize(model=model, model_parameters=model.parameters(), config=config)
    optimizer: Any = engine.optimizer
    return Training(
        _engine_loop(engine),
        engine.get_global_grad_norm,
        optimizer.host_bytes,
        optimizer,
        lambda: None if optimizer.speculation is None else optimizer.speculation._asdict(),
    )


def _one_line(model: nn.Module, way: Way) -> Training:
    import longshore

    optimizer = longshore.AdamW(
        model.parameters(), lr=way.learning_rate, weight_decay=WEIGHT_DECAY, release_gradients=True
    )
    norm = torch.zeros(())

    def finish() -> None:
        nonlocal norm
        norm = optimizer.clip_grad_norm_(MAX_NORM)
        optimizer.step()

    return Training(_loop(model, finish), lambda: norm.item(), optimizer.host_bytes, optimizer)


# -- the others -----------------------------------------------------------------


def _deepspeed(model: nn.Module, way: Way, stage: int, **more: Any) -> Training:
    config = zero_config(BUCKET_NUMEL, way.learning_rate, way.backwards)
    config["zero_optimization"]["stage"] = stage
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True, **more}
    engine, *_ = load_deepspeed(way.device).initialize(model=model, model_parameters=model.parameters(), config=config)

    def grad_norm() -> float | None:
        norm = engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    return Training(_engine_loop(engine), grad_norm)


def _torchao(model: nn.Module, way: Way) -> Training:
    from torchao.optim import CPUOffloadOptimizer  # pyright: ignore[reportMissingImports]

    # It can let gradients go during backward only where there is one a step.
    optimizer = CPUOffloadOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        offload_gradients=way.backwards == 1,
        lr=way.learning_rate,
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )

    def finish() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Training(_loop(model, finish))


def _fsdp2(model: nn.Module, way: Way) -> Training:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {
        "mesh": init_device_mesh(way.device, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=way.device == "cuda"),
    }
    layers: Any = model.get_submodule("model.layers")
    for module in [*layers, model]:
        for parameter in module.parameters():  # they are the masters
            if parameter.dtype != torch.float32:  # those of the layers are sharded already
                parameter.data = parameter.data.float()
        fully_shard(module, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=way.learning_rate, weight_decay=WEIGHT_DECAY, fused=True)
    norm: Any = torch.zeros(())

    def finish() -> None:
        nonlocal norm
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return Training(_loop(model, finish), lambda: norm.full_tensor().item())


_START: dict[str, Callable[[nn.Module, Way], Training]] = {
    BY_HAND: _by_hand,
    RESIDENT: lambda model, way: _engine(model, way, device="none"),
    ENGINE: lambda model, way: _engine(model, way, device="cpu"),
    ENGINE_HOST_SUMS: lambda model, way: _engine(model, way, accumulate="host", device="cpu"),
    AHEAD: lambda model, way: _engine(model, way, device="cpu", super_offload=True),
    AHEAD_HOST_SUMS: lambda model, way: _engine(model, way, accumulate="host", device="cpu", super_offload=True),
    AHEAD_UNCLIPPED: lambda model, way: _engine(model, way, _NEVER, device="cpu", super_offload=True),
    ONE_LINE: _one_line,
    ZERO_OFFLOAD: lambda model, way: _deepspeed(model, way, 2),
    SUPER_OFFLOAD: lambda model, way: _deepspeed(model, way, 3, super_offload=True),
    TORCHAO: _torchao,
    FSDP2: _fsdp2,
}
CONTESTANTS = tuple(_START)
