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
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import longshore
from engine.fully_sharded_cases import OPTIONS, config_of, raised_by
from longshore import utils
from longshore.engine.config import LossScaling

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


def placed_as(parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
    """What this rank has of a gradient, as torch's own FSDP2 takes it."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements)
    return None if gradient is None else local(gradient).float()


Losses = Callable[[Any, int], Sequence[Tensor]]


def engines_on_one_mesh() -> None:
    """One engine after another, whose process groups are of a part of the ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=DIMENSIONS[2])
    for _ in range(3):
        pair = Beside(torch.float32, mesh=mesh)
        pair.train(0)
        pair.engine.destroy()


class Beside:
    """An engine on tensor parallelism and FSDP2; and tensor parallelism alone, run on the data of all ranks in turn,
    with the plain loop that the engine has to equal."""

    def __init__(
        self, dtype: torch.dtype, shape: tuple[int, ...] = (2, 2), mesh: DeviceMesh | None = None, **fields: Any
    ) -> None:
        mesh = mesh or init_device_mesh("cpu", shape, mesh_dim_names=DIMENSIONS[len(shape)])
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
        self.loop.step(totals, self._coefficient(totals) / self.engine.loss_scale)

    def _gradients(self, loss: Tensor) -> list[Tensor | None]:
        parameters = list(self.named.values())
        found = torch.autograd.grad(loss.float() * self.engine.loss_scale, parameters, allow_unused=True)
        return [placed_as(parameter, each) for parameter, each in zip(parameters, found, strict=True)]

    def whole_of(self, twin: Tensor, part: Tensor) -> Tensor:
        """From what this rank has of something placed as the twin's parameter."""
        if not isinstance(twin, DTensor):
            return part.view(twin.shape)
        values = part.view(local(twin).shape)
        return DTensor.from_local(
            values, twin.device_mesh, twin.placements, shape=twin.shape, stride=twin.stride()
        ).full_tensor()

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
        expected = float(squares.sqrt()) / self.engine.loss_scale
        assert norm is not None and abs(norm - expected) <= 1e-6 * norm
        coefficient = float(torch.clamp(self.clip / (torch.tensor(norm) + 1e-6), max=1.0))
        assert coefficient < 1.0
        return coefficient

    def check(self, when: str) -> None:
        with longshore.gather(self.model) as gathered:
            for name, found, twin in zip(self.names, gathered, self.named.values(), strict=True):
                expected = twin.full_tensor() if isinstance(twin, DTensor) else twin
                assert not isinstance(found, DTensor) and torch.equal(found, expected), f"{when}: {name} differs"

    def check_masters(self) -> None:
        for (name, ours), twin in zip(self.model.named_parameters(), self.named.values(), strict=True):
            expected = twin.full_tensor() if isinstance(twin, DTensor) else twin
            master = utils.safe_get_full_fp32_param(ours)
            assert master is not None and torch.equal(master.to(expected.dtype), expected), name


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
        pair.check_masters()
        rows = {row.name: row for row in pair.engine.explain(False).parameters}
        assert rows["extra.weight"].step == 2 and rows["embedding.weight"].step == 3
        # Each rank has a part of what is cut; replicas have the same.
        numel = sum(count for _, count in rows["blocks.0.up.weight"].owners)
        assert numel == WIDTH * HIDDEN * (shape[0] if len(shape) == 3 else 1)


def overflowing(parameter: str) -> None:
    """Infinity in one parameter's gradient on the last rank alone: skipped by all, and they go on."""
    last = dist.get_world_size() - 1
    scaling = LossScaling(scale=8.0)
    with beside(torch.float16, gradient_clipping=0.05, loss_scaling=scaling) as pair:
        pair.train(0)
        record = next(record for record in pair.engine.optimizer._core.members.records if record.name == parameter)
        before = [local(each.detach()).clone() for each in pair.model.parameters()]
        loss = pair.engine(words_of(1, pair.place))
        leaf = record.leaf()
        assert leaf is not None
        hook = leaf.register_hook(_infinite) if dist.get_rank() == last else None
        pair.engine.backward(loss)
        if hook is not None:
            hook.remove()
        pair.engine.step()
        assert not pair.engine.was_step_applied() and pair.engine.skipped_steps == 1
        assert all(map(torch.equal, before, map(local, pair.model.parameters())))
        pair.train(2)


def _infinite(gradient: Tensor) -> Tensor:
    values = local(gradient).clone()
    values.view(-1)[-1] = torch.inf
    if isinstance(gradient, DTensor):
        return DTensor.from_local(
            values, gradient.device_mesh, gradient.placements, shape=gradient.shape, stride=gradient.stride()
        )
    return values


def used_in_one_part() -> str:
    """A gradient that only some ranks of tensor parallelism have, of a parameter that all of them have."""
    with beside(torch.float32) as pair:
        pair.train(0)
        pair.engine.backward(pair.engine(words_of(1, pair.place), extra=pair.part == 0))
        said = raised_by(pair.engine.step)
        pair.engine.zero_grad()
        pair.train(2)
        return said


def failing_backward(failing: list[int]) -> list[str]:
    """Backwards that raise on some ranks, after the last collective of tensor parallelism; all ranks call step()."""
    said = []
    with beside(torch.float32) as pair:
        pair.train(0)
        record = next(each for each in pair.engine.optimizer._core.members.records if each.name == "embedding.weight")
        for step in (1, 2):
            loss = pair.engine(words_of(step, pair.place))
            leaf = record.leaf()
            assert leaf is not None
            hook = leaf.register_hook(_explode) if dist.get_rank() in failing else None
            said.append(raised_by(lambda loss=loss: pair.engine.backward(loss)))
            if hook is not None:
                hook.remove()
            said.append(raised_by(pair.engine.step))
            pair.engine.zero_grad()
            pair.train(step + 2)
    return said


def _explode(gradient: Tensor) -> Tensor:
    raise RuntimeError("exploded on purpose")


def read_and_written() -> None:
    """Moments, gradients, the state as a whole; masters and moments that are written; what is gathered."""
    with beside(torch.float32) as pair:
        pair.train(0)
        engine, parameters = pair.engine, dict(pair.model.named_parameters())
        for name, master in zip(pair.names, pair.loop.masters, strict=True):
            found = utils.safe_get_full_optimizer_state(parameters[name], "exp_avg")
            state = pair.loop.optimizer.state[master]
            assert (found is None) == (not state) == name.startswith("extra."), name
            if found is not None:
                twin = pair.named[name]
                assert torch.equal(found, pair.whole_of(twin, state["exp_avg"][: local(twin).numel()])), name
        for name in ("blocks.0.down.weight", "embedding.weight", "blocks.1.norm.bias", "norm.weight"):
            values = torch.arange(1.0, parameters[name].numel() + 1).view(parameters[name].shape)
            state = engine.optimizer.state_dict()
            utils.safe_set_full_optimizer_state(parameters[name], values, "exp_avg")
            found = utils.safe_get_full_optimizer_state(parameters[name], "exp_avg")
            assert found is not None and torch.equal(found, values)
            engine.optimizer.load_state_dict(state)
            utils.safe_set_full_fp32_param(parameters[name], values / 64)
            twin, part, index = pair.named[name], values / 64, pair.names.index(name)
            if isinstance(twin, DTensor):
                part = distribute_tensor(part, twin.device_mesh, twin.placements)
            with torch.no_grad():
                pair.loop.parameters[index].copy_(local(part))
            pair.loop.refresh(index)
        pair.check("written")
        pair.check_masters()
        pair.train(1)
        loss = engine(words_of(2, pair.place))
        # The root's parameters are gathered now, and stand in the model.
        embedding, twin = pair.model.embedding.weight, pair.named["embedding.weight"]
        assert isinstance(twin, DTensor)
        with longshore.gather(embedding) as (weight,):
            assert torch.equal(weight, twin.full_tensor())
        engine.backward(loss)
        gradient = utils.safe_get_full_grad(parameters["embedding.weight"])
        assert gradient is not None and gradient.shape == (WORDS, WIDTH) and bool(gradient.any())
        engine.step()
        pair.plain(lambda model, place: [model(words_of(2, place))])
        pair.check("after a look between forward and backward")
        with longshore.gather(pair.model.norm, modifier_rank=3) as (weight, _), torch.no_grad():
            if dist.get_rank() == 3:
                weight.fill_(0.5)
        with torch.no_grad():
            pair.twin.norm.weight.fill_(0.5)
        pair.check("what tensor parallelism left alone, written")


def batches() -> list[int]:
    """Ranks of tensor parallelism have the same batches, and count once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=DIMENSIONS[2])
    model = sharded(make_tower(torch.float32, mesh), mesh)
    config = config_of(train_batch_size=8, gradient_accumulation_steps=2)
    started = longshore.initialize(model=model, config=config, training_data=list(range(12)))
    engine = started.engine
    try:
        assert engine.train_micro_batch_size_per_gpu() == 2 and engine.train_batch_size() == 8
        engine.set_train_batch_size(4)
        assert engine.gradient_accumulation_steps() == 1 and engine.world_size == 4
        for words in started.training_dataloader:
            engine.backward(engine(words.view(2, 1).expand(2, LENGTH)))
            engine.step()
        assert engine.global_samples == 12 and engine.global_steps == 3
        return [int(sample) for words in started.training_dataloader for sample in words]
    finally:
        engine.destroy()


def by_the_optimizer_alone(on_fsdp: bool, release: bool) -> None:
    """Without the engine: autograd leaves some gradients as sums over ranks, or all of one on each."""
    dtype, shape = torch.float32, (2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=DIMENSIONS[2])
    model, twin = make_tower(dtype, mesh), make_tower(dtype, mesh)
    if on_fsdp:
        sharded(model, mesh)
    loop = PlainLoop([nn.Parameter(local(each.detach())) for each in twin.parameters()], **OPTIONS)
    optimizer = longshore.AdamW(model.parameters(), release_gradients=release, **OPTIONS)
    try:
        for step in range(2):
            model(words_of(step, 0)).backward()  # the same everywhere: FSDP2's mean is exact
            optimizer.step()
            optimizer.zero_grad()
            parameters = list(twin.parameters())
            found = torch.autograd.grad(twin(words_of(step, 0)), parameters, allow_unused=True)
            loop.step([placed_as(parameter, each) for parameter, each in zip(parameters, found, strict=True)])
            for (name, ours), theirs in zip(model.named_parameters(), parameters, strict=True):
                held, expected = local(ours.detach()), local(theirs.detach())
                if on_fsdp:
                    rank = mesh.get_local_rank("shard")
                    rows = [len(chunk) for chunk in expected.chunk(2)] + [0]
                    expected = expected[sum(rows[:rank]) : sum(rows[: rank + 1])]
                assert torch.equal(held, expected), (step, name)
    finally:
        optimizer.close()


def refused(what: str) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=DIMENSIONS[2])
    model: Any = make_tower(torch.float32, mesh)
    if what == "columns":
        fully_shard(model.blocks[0].down, mesh=mesh["shard"], shard_placement_fn=lambda each: Shard(each.ndim - 1))
        sharded(model, mesh)
    elif what == "two dimensions":
        mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("shard", "ep", "tp"))
        model = nn.Linear(4, 4)
        for name, parameter in list(model.named_parameters()):
            placed = distribute_tensor(parameter.detach(), mesh["ep", "tp"], [Replicate(), Shard(0)])
            model.register_parameter(name, nn.Parameter(placed))
        fully_shard(model, mesh=mesh["shard"])
    elif what == "write":
        sharded(model, mesh)
        engine = longshore.initialize(model=model, config=config_of()).engine
        try:
            return raised_by(lambda: longshore.gather(model.blocks[0].up.weight, modifier_rank=0).__enter__())
        finally:
            engine.destroy()
    return raised_by(lambda: longshore.initialize(model=model, config=config_of()))
