"""Models on tensor parallelism and FSDP2 at once, run on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from support import PlainLoop
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import longshore
from engine.fully_sharded_cases import OPTIONS, config_of
from longshore import utils

WIDTH, HIDDEN, WORDS, LENGTH = 5, 8, 13, 4
DIMENSIONS = {2: ("shard", "tp"), 3: ("replicate", "shard", "tp")}


class Block(nn.Module):
    """A norm that all ranks have, on parts of the sequence; two matrices, cut both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    """Words that cannot be cut evenly; and what tensor parallelism leaves alone: a norm, and a head that is idle at
    times."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.extra = nn.Linear(WIDTH, 3)

    def forward(self, words: Tensor, extra: bool = False) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x.full_tensor())
        loss = self.head(x).float().pow(2).mean()
        return loss + self.extra(x).float().sum() if extra else loss


def make_tower(dtype: torch.dtype, mesh: DeviceMesh) -> Tower:
    """On tensor parallelism alone."""
    torch.manual_seed(0)
    model = Tower().to(dtype)
    sequence = Shard(1)
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence, use_local_output=False),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for number in range(len(model.blocks)):
        plan[f"blocks.{number}.norm"] = SequenceParallel()
        plan[f"blocks.{number}.up"] = ColwiseParallel(input_layouts=sequence)
        plan[f"blocks.{number}.down"] = RowwiseParallel(output_layouts=sequence, use_local_output=False)
    parallelize_module(model, mesh["tp"], plan)
    return model


def sharded(model: Tower, mesh: DeviceMesh) -> Tower:
    data = mesh[tuple(mesh.mesh_dim_names or ())[:-1]]
    for block in model.blocks:
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)
    return model


def words_of(step: int, place: int) -> Tensor:
    return torch.randint(0, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(100 * step + place))


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


Losses = Callable[[Any, int], Sequence[Tensor]]


class Beside:
    """An engine on tensor parallelism and FSDP2; and tensor parallelism alone, run on the data of all ranks in turn,
    with the plain loop that the engine has to equal."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...] = (2, 2), **fields: Any) -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=DIMENSIONS[len(shape)])
        self.parts = shape[-1]
        self.places = dist.get_world_size() // self.parts
        self.place, self.part = divmod(dist.get_rank(), self.parts)
        self.tp = mesh.get_group("tp")
        self.twin = make_tower(dtype, mesh)
        self.named = dict(self.twin.named_parameters())
        # The same memory as what this rank has of the twin.
        self.loop = PlainLoop([nn.Parameter(local(each.detach())) for each in self.named.values()], **OPTIONS)
        self.model = sharded(make_tower(dtype, mesh), mesh)
        config = config_of(dtype, **fields)
        self.engine = longshore.initialize(
            model=self.model, config=config, offload=longshore.Offload(20, threads=1)
        ).engine
        self.names = [name for name, _ in self.model.named_parameters()]
        self.clip = config.gradient_clipping

    def train(self, step: int, losses: Losses | None = None) -> None:
        """One step of both, one backward for each loss, and compare."""
        chosen = losses or (lambda model, place: [model(words_of(step, place))])
        for loss in chosen(self.engine, self.place):
            self.engine.backward(loss)
        self.engine.step()
        self.plain(chosen)
        self.check(f"step {step}")

    def plain(self, losses: Losses) -> None:
        totals: list[Tensor | None] = [None] * len(self.named)
        by_place = [[self._gradients(loss) for loss in losses(self.twin, place)] for place in range(self.places)]
        for backward in zip(*by_place, strict=True):
            for number, entries in enumerate(zip(*backward, strict=True)):
                present = [entry for entry in entries if entry is not None]
                if present:
                    mean = torch.stack(present).sum(0) * (1.0 / self.places)
                    held = totals[number]
                    totals[number] = mean if held is None else held + mean
        self.loop.step(totals, self._coefficient(totals))

    def _gradients(self, loss: Tensor) -> list[Tensor | None]:
        parameters = list(self.named.values())
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        placed = [
            each.redistribute(placements=parameter.placements) if isinstance(each, DTensor) else each
            for each, parameter in zip(found, parameters, strict=True)
        ]  # fmt: skip
        return [None if each is None else local(each).float() for each in placed]

    def _coefficient(self, totals: Sequence[Tensor | None]) -> float:
        """What the engine clipped by, from its own norm, which is that of all parts."""
        if self.clip is None:
            return 1.0
        squares = torch.zeros((), dtype=torch.float64)
        for parameter, total in zip(self.named.values(), totals, strict=True):
            if total is not None and (self.part == 0 or isinstance(parameter, DTensor)):
                cut = isinstance(parameter, DTensor) and parameter.placements[0].is_shard()
                squares += total.double().pow(2).sum() if cut or self.part == 0 else 0.0
        dist.all_reduce(squares, group=self.tp)
        norm = self.engine.get_global_grad_norm()
        assert norm is not None and abs(norm - float(squares.sqrt())) <= 1e-6 * norm
        coefficient = float(torch.clamp(self.clip / (torch.tensor(norm) + 1e-6), max=1.0))
        assert coefficient < 1.0
        return coefficient

    def check(self, when: str) -> None:
        with longshore.gather(self.model) as gathered:
            for name, found, twin in zip(self.names, gathered, self.named.values(), strict=True):
                expected = twin.full_tensor() if isinstance(twin, DTensor) else twin
                assert not isinstance(found, DTensor) and torch.equal(found, expected), f"{when}: {name} differs"
        for (name, ours), twin in zip(self.model.named_parameters(), self.named.values(), strict=True):
            expected = twin.full_tensor() if isinstance(twin, DTensor) else twin
            master = utils.safe_get_full_fp32_param(ours)
            assert master is not None and torch.equal(master.to(expected.dtype), expected), f"{when}: {name}'s master"


@contextlib.contextmanager
def beside(*args: Any, **fields: Any) -> Iterator[Beside]:
    pair = Beside(*args, **fields)
    try:
        yield pair
    finally:
        pair.engine.destroy()
        dist.barrier()


# -- cases ---------------------------------------------------------------------


def trained(dtype: torch.dtype, clip: float | None, shape: tuple[int, ...]) -> None:
    """The head that is used by some ranks' data, then by none, then in the second of two backwards."""
    with beside(dtype, shape, gradient_clipping=clip) as pair:
        last = pair.places - 1
        pair.train(0, lambda model, place: [model(words_of(0, place), extra=place == last)])
        pair.train(1)
        pair.train(2, lambda model, place: [model(words_of(2, place)), model(words_of(3, place), extra=place == 0)])
        rows = {row.name: row for row in pair.engine.explain(False).parameters}
        assert rows["extra.weight"].step == 2 and rows["embedding.weight"].step == 3
        # Each rank has a part of what is cut; replicas have the same.
        numel = sum(count for _, count in rows["blocks.0.up.weight"].owners)
        assert numel == WIDTH * HIDDEN * (shape[0] if len(shape) == 3 else 1)
