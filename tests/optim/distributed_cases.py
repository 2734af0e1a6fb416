"""Scripts of torch's own distributed stack, run on every rank with an optimizer of ours and then with torch's.

Everything that torch's fused kernel steps has a multiple of 16 elements on each rank: in the other elements it rounds
otherwise than its own vector code.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import longshore

WIDTH, HIDDEN, LENGTH, BLOCKS = 64, 128, 8, 8
MICROBATCHES = 4
STEPS = 3
MAX_NORM = 0.05


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def make_blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def batch(step: int, place: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + place)
    return torch.randn(MICROBATCHES, LENGTH, WIDTH, generator=generator)


def loss_of(output: Tensor) -> Tensor:
    whole = output.full_tensor() if isinstance(output, DTensor) else output
    return whole.float().pow(2).mean()


# -- layouts: each gives this rank's modules, and a function that runs the backwards of a step ----

Backwards = Callable[[int, int], None]
"""Called with a step and how many backwards it has."""


def _on(model: nn.Module, place: int) -> Backwards:
    def run(step: int, backwards: int) -> None:
        for number in range(backwards):
            loss_of(model(batch(10 * step + number, place))).backward()

    return run


def fsdp(shape: tuple[int, ...], **options: Any) -> tuple[list[nn.Module], Backwards]:
    model = make_blocks()
    _shard(model, init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]), **options)
    return [model], _on(model, dist.get_rank())


def _shard(model: nn.Sequential, mesh: DeviceMesh, **options: Any) -> None:
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def _parallelize(model: nn.Sequential, mesh: DeviceMesh, sequence: bool) -> None:
    plan: dict[str, Any] = {}
    for number, _ in model.named_children():
        if sequence:
            plan[f"{number}.norm"] = SequenceParallel()
            plan[f"{number}.up"] = ColwiseParallel(input_layouts=Shard(1))
            plan[f"{number}.down"] = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        else:
            plan[f"{number}.up"], plan[f"{number}.down"] = ColwiseParallel(), RowwiseParallel()
    parallelize_module(model, mesh, plan)


class _Sequence(nn.Module):
    """Cut the input along the sequence first."""

    def __init__(self, blocks: nn.Sequential, mesh: DeviceMesh) -> None:
        super().__init__()
        self.blocks = blocks
        self._mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        part = x.chunk(self._mesh.size(), 1)[self._mesh.get_local_rank()].contiguous()
        return self.blocks(DTensor.from_local(part, self._mesh, [Shard(1)]))


def tensor_parallel(sequence: bool, fsdp: bool = False) -> tuple[list[nn.Module], Backwards]:
    size = dist.get_world_size()
    shape = (size // 2, 2) if fsdp else (1, size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("shard", "tp"))
    blocks = make_blocks()
    _parallelize(blocks, mesh["tp"], sequence)
    if fsdp:
        _shard(blocks, mesh["shard"])
    model = _Sequence(blocks, mesh["tp"]) if sequence else blocks
    return [blocks], _on(model, mesh.get_local_rank("shard"))


def pipeline(
    kind: str, stages: int = 1, fsdp: bool = False, tensor: bool = False, scale_grads: bool = False
) -> tuple[list[nn.Module], Backwards]:
    """``stages`` of each rank; with ``fsdp`` or ``tensor`` two pipelines are replicas or parts of one another."""
    size = dist.get_world_size()
    inner = 2 if fsdp or tensor else 1
    mesh = init_device_mesh("cpu", (size // inner, inner), mesh_dim_names=("pp", "inner"))
    ranks, place = mesh["pp"].size(), mesh.get_local_rank("pp")
    count = ranks * stages
    whole = make_blocks()
    if kind in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):  # the first and the last stage are on rank 0
        numbers = [place, count - 1 - place]
    else:
        numbers = [place + ranks * turn for turn in range(stages)]
    parts: list[nn.Module] = []
    for number in numbers:
        held = list(whole.named_children())[number * BLOCKS // count : (number + 1) * BLOCKS // count]
        part = nn.Sequential(OrderedDict(held))  # with the names that they have in the whole model
        if tensor:
            _parallelize(part, mesh["inner"], sequence=False)
        if fsdp:
            _shard(part, mesh["inner"])
        parts.append(part)
    group = mesh.get_group("pp")
    pieces: list[Any] = [
        PipelineStage(part, number, count, torch.device("cpu"), group=group)
        for part, number in zip(parts, numbers, strict=True)
    ]
    schedule: Any = getattr(schedules, kind)(
        pieces[0] if stages == 1 else pieces,
        MICROBATCHES,
        loss_fn=lambda output, target: loss_of(output) / (1 if scale_grads else MICROBATCHES),
        scale_grads=scale_grads,
    )
    replica = mesh.get_local_rank("inner") if fsdp else 0

    def run(step: int, backwards: int) -> None:
        for number in range(backwards):
            x = batch(10 * step + number, replica)
            schedule.step(*([x] if 0 in numbers else []), **({"target": x} if count - 1 in numbers else {}))

    return parts, run


def ddp(**options: Any) -> tuple[list[nn.Module], Backwards]:
    model = make_blocks()
    wrapped = DistributedDataParallel(model, **options)

    def run(step: int, backwards: int) -> None:
        for number in range(backwards):
            with contextlib.nullcontext() if number == backwards - 1 else wrapped.no_sync():
                loss_of(wrapped(batch(10 * step + number, dist.get_rank()))).backward()

    return [model], run


_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LAYOUTS: dict[str, Callable[[], tuple[list[nn.Module], Backwards]]] = {
    "FSDP2": lambda: fsdp((dist.get_world_size(),)),
    "FSDP2, bf16": lambda: fsdp((dist.get_world_size(),), mp_policy=_BF16),
    "FSDP2, not resharded": lambda: fsdp((dist.get_world_size(),), reshard_after_forward=False),
    "HSDP": lambda: fsdp((2, dist.get_world_size() // 2)),
    "TP": lambda: tensor_parallel(sequence=False),
    "TP with sequence parallel": lambda: tensor_parallel(sequence=True),
    "TP + FSDP2": lambda: tensor_parallel(sequence=False, fsdp=True),
    "TP with sequence parallel + FSDP2": lambda: tensor_parallel(sequence=True, fsdp=True),
    "GPipe, scaled by torch": lambda: pipeline("ScheduleGPipe", scale_grads=True),
    "GPipe": lambda: pipeline("ScheduleGPipe"),
    "1F1B": lambda: pipeline("Schedule1F1B"),
    "interleaved 1F1B": lambda: pipeline("ScheduleInterleaved1F1B", 2),
    "looped BFS": lambda: pipeline("ScheduleLoopedBFS", 2),
    "interleaved zero bubble": lambda: pipeline("ScheduleInterleavedZeroBubble", 2),
    "zero bubble V": lambda: pipeline("ScheduleZBVZeroBubble", 2),
    "1F1B + FSDP2": lambda: pipeline("Schedule1F1B", fsdp=True),
    "1F1B + TP": lambda: pipeline("Schedule1F1B", tensor=True),
    "DDP": ddp,
    "DDP, bucket views": lambda: ddp(gradient_as_bucket_view=True),
}
OF_FOUR = ("TP + FSDP2", "TP with sequence parallel + FSDP2", "1F1B + FSDP2", "1F1B + TP")
"""These need four ranks."""
MODES = ("default", "default, clipped by torch", "default, clipped", "released", "released, clipped")
OPTIONS: dict[str, Any] = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def trained(layout: str, mode: str, backwards: int, kind: str) -> None:
    """The same script twice, each with its own model: weights and states are equal, bit for bit."""
    norms: list[Tensor] = []
    options = {"release_gradients": "released" in mode, "offload": longshore.Offload(tile_numel=5000, threads=1)}
    ours, optimizer = _run(
        layout, mode, backwards, lambda each: getattr(longshore, kind)(each, **options, **OPTIONS), norms
    )
    theirs, other = _run(
        layout, mode, backwards, lambda each: getattr(torch.optim, kind)(each, fused=True, **OPTIONS), norms
    )
    assert not norms, "both clip in each step"
    for (name, one), two in zip(ours, (each for _, each in theirs), strict=True):
        assert torch.equal(local(one.detach()), local(two.detach())), f"{name} differs"
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(local(optimizer.state[one][key]), local(other.state[two][key])), f"{key} of {name}"
    optimizer.close()


def _run(
    layout: str, mode: str, backwards: int, make: Callable[[Any], Any], norms: list[Tensor]
) -> tuple[list[tuple[str, nn.Parameter]], Any]:
    """Train. Our clipping leaves its norms in ``norms``, by which torch's run then clips."""
    parts, run = LAYOUTS[layout]()
    named = [entry for part in parts for entry in part.named_parameters()]
    parameters = [each for _, each in named]
    begin = [local(each.detach()).clone() for each in parameters]
    # torch's fused step takes no group in which only some parameters are DTensors.
    groups = [[each for each in parameters if isinstance(each, DTensor) is cut] for cut in (False, True)]
    optimizer = make([{"params": group} for group in groups if group])
    is_ours = isinstance(optimizer, longshore.AdamW | longshore.Adam)
    for step in range(STEPS):
        run(step, backwards)
        if mode.endswith("clipped by torch"):
            _clip(parameters)
        elif mode.endswith("clipped"):
            if is_ours:
                norms.append(optimizer.clip_grad_norm_(MAX_NORM))
                assert norms[-1] > MAX_NORM
            else:
                _clip(parameters, norms.pop(0))
        optimizer.step()
        optimizer.zero_grad()
    assert not any(torch.equal(old, local(new.detach())) for old, new in zip(begin, parameters, strict=True))
    return named, optimizer


def _clip(parameters: list[Any], norm: Tensor | None = None) -> None:
    """By torch; parameters on one mesh at a time, since torch's function wants that."""
    by_mesh: dict[Any, list[Any]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        by_mesh.setdefault(mesh, []).append(parameter)
    for mesh, each in by_mesh.items():
        if norm is None:
            nn.utils.clip_grad_norm_(each, MAX_NORM)
        else:
            for parameter in each if mesh is not None else ():  # ours multiplies sums over ranks when they are reduced
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
            nn.utils.clip_grads_with_norm_(each, MAX_NORM, norm)


def scaled_by_torch() -> str:
    """What ``release_gradients=True`` says where a schedule divides ``.grad`` by the number of microbatches."""
    parts, run = LAYOUTS["GPipe, scaled by torch"]()
    optimizer = longshore.AdamW([each for part in parts for each in part.parameters()], release_gradients=True)
    try:
        run(0, 1)
        optimizer.step()
    except longshore.LongshoreError as error:
        return str(error)
    finally:
        optimizer.close()
    return ""
