"""Stage 3 on models of blocks, run on every rank."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from support import PlainLoop, whole
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import longshore
from longshore import utils
from longshore.layout.memory import LANDING_SLOTS
from longshore.layout.tiles import padded_bytes

OPTIONS: dict[str, Any] = {"lr": 2e-3, "weight_decay": 0.05}
WIDTH, WORDS = 5, 13


class Block(nn.Module):
    """Rows that two ranks cannot share evenly, one row, and a parameter of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(nn.functional.gelu(self.up(x)))


class Tower(nn.Module):
    """An embedding and a head that is tied to it, blocks between them, and a head that is sometimes used."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.extra = nn.Linear(WIDTH, 3)
        self.recompute = recompute
        """With torch's checkpointing: reentrant, not reentrant, or not at all."""

    def forward(
        self,
        words: Tensor,
        extra: bool = False,
        leave_out: Sequence[int] = (),
        hidden: Tensor | None = None,
        apart: bool = False,
    ) -> Any:
        x = self.embedding(words) if hidden is None else hidden
        for number, block in enumerate(self.blocks):
            if number in leave_out:
                continue
            if self.recompute is None:
                x = block(x)
            else:
                found = checkpoint(block, x, use_reentrant=self.recompute)
                assert isinstance(found, Tensor)
                x = found
        loss = self.head(x).float().pow(2).mean()
        if apart:
            return loss, self.extra(x).float().pow(2).sum()
        return loss + self.extra(x).float().sum() if extra else loss


def make_tower(dtype: torch.dtype = torch.float32, recompute: bool | None = None) -> Tower:
    torch.manual_seed(0)
    return Tower(recompute).to(dtype)


def words_of(step: int, rank: int) -> Tensor:
    return torch.randint(0, WORDS, (2, 4), generator=torch.Generator().manual_seed(100 * step + rank))


def config_of(dtype: torch.dtype | None = torch.float32, **fields: Any) -> longshore.Config:
    defaults: dict[str, Any] = {
        "stage": 3,
        "offload_device": "cpu",
        "dtype": {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", None: None}[dtype],
        "optimizer": {"type": "AdamW", **OPTIONS},
    }
    return longshore.Config(**{**defaults, **fields})


class Beside:
    """An engine at stage 3, and the plain loop that it has to equal."""

    def __init__(self, dtype: torch.dtype = torch.float32, model: Any = None, **arguments: Any) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.model = make_tower(dtype) if model is None else model
        arguments = {"config": config_of(dtype), "offload": longshore.Offload(20, threads=1), **arguments}
        self.engine = longshore.initialize(model=self.model, **arguments).engine
        self.twin = make_tower(dtype)
        self.loop = PlainLoop(self.twin.parameters(), **OPTIONS)

    def plain(self, losses: Callable[[Any, int], Sequence[Tensor]]) -> None:
        """One step of the plain loop; ``losses(model, rank)``, one for each backward."""
        totals: list[Tensor | None] = [None] * len(self.loop.parameters)
        by_rank = [[self._gradients(loss) for loss in losses(self.twin, rank)] for rank in range(self.world_size)]
        for backward in zip(*by_rank, strict=True):
            for place, entries in enumerate(zip(*backward, strict=True)):
                present = [entry for entry in entries if entry is not None]
                if present:
                    mean = torch.stack(present).sum(0) * (1.0 / self.world_size)
                    held = totals[place]
                    totals[place] = mean if held is None else held + mean
        self.loop.step(totals)

    def _gradients(self, loss: Tensor) -> list[Tensor | None]:
        trainable = [parameter for parameter in self.loop.parameters if parameter.requires_grad]
        found = dict(
            zip(
                map(id, trainable),
                torch.autograd.grad(loss, trainable, retain_graph=True, allow_unused=True),
                strict=True,
            )
        )
        gradients = [found.get(id(parameter)) for parameter in self.loop.parameters]
        return [None if gradient is None else gradient.float() for gradient in gradients]

    def train(self, step: int, losses: Callable[[Any, int], Sequence[Tensor]] | None = None) -> None:
        """One step of both, one backward for each loss, and compare."""
        chosen = losses or (lambda model, rank: [model(words_of(step, rank))])
        for loss in chosen(self.engine, self.rank):
            self.engine.backward(loss)
        self.engine.step()
        self.plain(chosen)
        self.check(f"step {step}")

    def check(self, when: str) -> None:
        for (name, ours), theirs in zip(self.model.named_parameters(), self.twin.parameters(), strict=True):
            assert torch.equal(whole(ours), theirs), f"{when}: {name} differs"


@contextlib.contextmanager
def beside(*args: Any, **kwargs: Any) -> Iterator[Beside]:
    pair = Beside(*args, **kwargs)
    try:
        yield pair
    finally:
        pair.engine.destroy()


def raised_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def live_bytes() -> int:
    """Of all tensors' memory in this process, counted; without what ranks share."""
    storages = {}
    for held in gc.get_objects():
        # A DTensor's shard is a tensor of its own, and a placeholder of a gradient has no memory.
        if type(held) in (Tensor, nn.Parameter) and held.device.type == "cpu":
            storage = held.untyped_storage()
            if storage.resizable():
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


# -- cases ---------------------------------------------------------------------


def blocks_are_units(policy: Any) -> list[str]:
    """Trains; returns what was gathered as a whole."""
    from torch.distributed.fsdp import FSDPModule

    with beside(config=config_of(wrap_policy=policy)) as pair:
        for step in range(2):
            pair.train(step)
        return [name for name, module in pair.model.named_modules() if isinstance(module, FSDPModule)]


def used_on_one_rank(dtype: torch.dtype) -> None:
    """The extra head: on rank 1 only, then nowhere, then on rank 0 in the second of two backwards."""
    with beside(dtype) as pair:
        pair.train(0, lambda model, rank: [model(words_of(0, rank), extra=rank == 1)])
        pair.train(1)
        pair.train(2, lambda model, rank: [model(words_of(2, rank)), model(words_of(3, rank), extra=rank == 0)])
        rows = {row.name: row for row in pair.engine.explain(False).parameters}
        assert rows["extra.weight"].applied and rows["extra.weight"].step == 2
        assert rows["embedding.weight"].step == 3


def left_out_on_one_rank(in_backward: bool) -> list[str]:
    """A block that rank 1 leaves out; then all go on."""
    with beside() as pair:
        engine, rank = pair.engine, pair.rank

        def window() -> None:
            if in_backward:
                # Both ranks run all blocks forward. The loss of rank 1 needs none of them.
                loss = engine(words_of(0, rank))
                if rank == 1:
                    loss = engine.module.extra.weight.float().sum() * 0 + engine(words_of(0, 1), leave_out=(0, 1, 2))
                engine.backward(loss)
            else:
                engine.backward(engine(words_of(0, rank), leave_out=(1,) if rank == 1 else ()))
            engine.step()

        said = raised_by(window)
        engine.zero_grad()
        for step in range(2):
            pair.train(step)
        return [said]


def evaluated_between_steps() -> None:
    with beside() as pair:
        for step in range(3):
            pair.train(step)
            for model in (pair.engine, pair.model):
                with torch.no_grad():
                    found = model(words_of(50 + step, 0))
                assert torch.equal(found, pair.twin(words_of(50 + step, 0)))
                assert hasattr(pair.model.embedding.weight, "full_tensor"), "nothing stays gathered"
        loss = pair.engine(words_of(60, 0))
        assert not hasattr(pair.model.embedding.weight, "full_tensor")  # it is gathered, and known all the same
        for model in (pair.model, pair.model.blocks[1]):
            for name, parameter in model.named_parameters():
                master = utils.safe_get_full_fp32_param(parameter)
                assert master is not None, name
        master = utils.safe_get_full_fp32_param(pair.model.embedding.weight)
        assert master is not None and torch.equal(master, pair.twin.embedding.weight)
        pair.engine.backward(loss)
        pair.engine(
            words_of(61, 0)
        )  # without a backward, and not under no_grad(): the root stays gathered until the step
        pair.engine.step()
        pair.plain(lambda model, rank: [model(words_of(60, 0))])
        pair.check("after a look between forward and backward")
        pair.train(7)


def old_graph() -> str:
    """A graph that is older than the weights."""
    with beside() as pair:
        pair.train(0)
        old = pair.engine(words_of(1, pair.rank))
        pair.train(1)
        said = raised_by(lambda: pair.engine.backward(old))
        pair.engine.zero_grad()
        pair.train(2)
        return said


def discarded_between(forward_first: bool) -> None:
    """``zero_grad()`` between forward and backward discards nothing of it."""
    with beside() as pair:
        pair.train(0)
        if not forward_first:
            pair.engine.backward(pair.engine(words_of(7, pair.rank)))
        loss = pair.engine(words_of(1, pair.rank))
        pair.engine.zero_grad()
        pair.engine.backward(loss)
        pair.engine.step()
        pair.plain(lambda model, rank: [model(words_of(1, rank))])
        pair.check("after")


def discarded_while_gathered(part: str) -> None:
    """``zero_grad()`` of a module while its parameters are gathered, after a forward that no backward followed; nothing
    was reduced yet. ``part``: of which module; ``""`` is the model."""
    with beside() as pair:
        pair.engine(words_of(0, pair.rank)).backward()
        pair.engine(words_of(1, pair.rank))
        assert not hasattr(pair.model.head.weight, "full_tensor"), "nothing is gathered"
        pair.model.get_submodule(part).zero_grad()
        kept = [each for name, each in pair.twin.named_parameters() if part and name != "embedding.weight"]
        assert (pair.engine.optimizer.grad_norm() > 0) == bool(part)
        pair.engine.step()
        assert pair.engine.was_step_applied() == bool(part)
        for parameter in pair.twin.parameters():
            parameter.requires_grad_(any(parameter is each for each in kept))
        if part:
            pair.plain(lambda model, rank: [model(words_of(0, rank))])
        pair.check("after")


def raising(module: nn.Module, where: str) -> Any:
    """A hook by which a module's forward or backward raises; to be removed."""

    def explode(*_: object) -> None:
        raise ArithmeticError("on purpose")

    def in_backward(_: nn.Module, __: Any, output: Tensor) -> None:
        output.register_hook(explode)

    return module.register_forward_hook(explode if where == "forward" else in_backward)


def failing_in(path: str, where: str, ranks: Sequence[int], raw: bool, until: str = "") -> list[str]:
    """A module in which some ranks raise, before or behind what the others gather; all discard, and go on.

    ``raw``: those that do not raise call ``loss.backward()``. Whoever raised has left already, and calls nothing.
    ``until``: whoever raised discards only when the others have said, under this name, that they were told.
    """
    with beside() as pair:
        pair.train(0)
        engine = pair.engine

        def window() -> None:
            handle = raising(pair.model.get_submodule(path), where) if pair.rank in ranks else None
            try:
                loss = engine(words_of(1, pair.rank))
                if raw:
                    loss.backward()
                else:
                    engine.backward(loss)
            finally:
                if handle is not None:
                    handle.remove()
            engine.step()

        said = raised_by(window)
        if until:
            store = dist.distributed_c10d._get_default_store()
            if pair.rank in ranks:
                store.wait([until], timedelta(seconds=20))
            else:
                store.set(until, "told")
        engine.zero_grad()
        for step in range(2, 4):
            pair.train(step)
        return [said]


def failing_once_more(where: str) -> list[str]:
    """Rank 0 raises in the second backward of a window, and the others begin a third."""
    with beside() as pair:
        pair.train(0)
        engine = pair.engine

        def window() -> None:
            for micro in range(3):
                handle = raising(pair.model.blocks[0], where) if pair.rank == 0 and micro == 1 else None
                try:
                    engine.backward(engine(words_of(micro, pair.rank)))
                finally:
                    if handle is not None:
                        handle.remove()

        said = raised_by(window)
        engine.zero_grad()
        for step in range(2, 4):
            pair.train(step)
        return [said]


def failing(where: str, ranks: Sequence[int]) -> list[str]:
    """A forward or a backward that raises on some ranks, in a block; all discard, and go on."""
    with beside() as pair:
        pair.train(0)
        engine = pair.engine

        def explode(*_: Any) -> None:
            raise ArithmeticError("on purpose")

        def window() -> None:
            handle = None
            if where == "forward" and pair.rank in ranks:
                handle = pair.model.blocks[1].down.register_forward_hook(explode)
            try:
                loss = engine(words_of(1, pair.rank))
            finally:
                if handle is not None:
                    handle.remove()
            if where == "backward" and pair.rank in ranks:
                loss = engine(words_of(1, pair.rank))
                hidden = torch.zeros(2, 4, WIDTH, requires_grad=True)
                hidden.register_hook(explode)
                loss = engine(words_of(1, pair.rank), hidden=hidden * 1.0)
            elif where == "backward":
                loss = engine(words_of(1, pair.rank))
                loss = engine(words_of(1, pair.rank), hidden=torch.zeros(2, 4, WIDTH))
            engine.backward(loss)
            engine.step()

        said = raised_by(window)
        engine.zero_grad()
        for step in range(2, 4):
            pair.train(step)
        return [said]


def recomputed(reentrant: bool, dtype: torch.dtype, backwards: int) -> None:
    with beside(dtype, make_tower(dtype, reentrant)) as pair:
        for step in range(3):
            pair.train(
                step, lambda model, rank, step=step: [model(words_of(9 * step + n, rank)) for n in range(backwards)]
            )


def prefetched(ahead: int) -> None:
    """Each block gathers the next ones while its forward, and its backward, run."""
    with beside() as pair:
        blocks: list[Any] = list(pair.model.blocks)
        for number, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + ahead])
            block.set_modules_to_backward_prefetch(blocks[max(0, number - ahead) : number][::-1])
        for step in range(3):
            pair.train(step)
            with torch.no_grad():
                assert torch.equal(pair.engine(words_of(step, 0)), pair.twin(words_of(step, 0)))


def destroyed_before_its_first_forward() -> None:
    """Nothing of the engine is left in the model, which trains on as FSDP2's."""
    model = make_tower()
    longshore.initialize(model=model, config=config_of()).engine.destroy()
    twin = make_tower()
    loss = model(words_of(0, dist.get_rank()))
    assert not getattr(model.embedding.weight, "_post_accumulate_grad_hooks", None), "it is gathered, and hooked"
    loss.backward()
    torch.stack([twin(words_of(0, rank)) for rank in range(2)]).mean().backward()
    for ours, theirs in ((model.embedding, twin.embedding), (model.blocks[1].up, twin.blocks[1].up)):
        assert ours.weight.grad is not None and theirs.weight.grad is not None
        assert torch.allclose(whole(ours.weight.grad), theirs.weight.grad, atol=1e-6)


def assigned_gradient() -> str:
    with beside() as pair:
        pair.train(0)
        pair.model.head.weight.grad = torch.ones_like(pair.model.head.weight)
        said = raised_by(pair.engine.step)
        pair.engine.zero_grad()
        pair.train(1)
        return said


def gathered(stage: int) -> None:
    """Read, written by one rank, written by another than the one that is said to write, and left by an exception."""
    with beside(config=config_of(stage=stage)) as pair:
        pair.train(0)
        block, twin = pair.model.blocks[1], pair.twin.blocks[1]
        with longshore.gather([block.up.weight, block.scale]) as (weight, scale):
            assert weight is block.up.weight and torch.equal(weight, twin.up.weight)
            assert torch.equal(scale, twin.scale)
        with longshore.gather(pair.model) as found:
            assert len(found) == len(list(pair.twin.parameters()))
            assert all(map(torch.equal, found, pair.twin.parameters()))
        with torch.no_grad(), longshore.gather(block, modifier_rank=1) as found:
            # Rank 1 writes; what rank 0 writes meanwhile does not count.
            found[0].fill_(0.25 + pair.rank)
            if pair.rank == 1:
                block.up.bias.data.copy_(torch.arange(7.0))  # where torch does not see it
                found[-1].mul_(1.5)
        with torch.no_grad():
            first, *_, last = twin.parameters()
            first.fill_(1.25)
            twin.up.bias.copy_(torch.arange(7.0))
            last.mul_(1.5)
        pair.check("written")
        for index in range(len(pair.loop.parameters)):
            pair.loop.refresh(index)
        pair.train(1)
        if stage == 3:
            gathering = longshore.gather(block.up.weight, modifier_rank=0)
            with contextlib.suppress(ArithmeticError), torch.no_grad(), gathering as (weight,):
                weight.zero_()
                raise ArithmeticError("on purpose")
        pair.train(2)
        said = [
            raised_by(lambda: longshore.gather(block, modifier_rank=2).__enter__()),
            raised_by(lambda: longshore.gather(["weight"]).__enter__()),  # pyright: ignore
        ]
        assert said[0] == "ValueError: modifier_rank is a rank from 0 to 1, or None, not 2"
        assert said[1] == "TypeError: gather() takes parameters or a module, not str"
    if stage == 3:
        said = raised_by(lambda: longshore.gather(nn.Parameter(pair.model.head.weight.detach() + 1)).__enter__())
        assert said.startswith("ValueError: a sharded parameter of shape [13, 5] belongs to no model that longshore.")


def replicas_of_shards(dtype: torch.dtype) -> None:
    """Two replicas, each of two shards: the bits of stage 2 on as many ranks; read, written, stepped alike."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, weights = dist.get_rank(), []
    for stage in (2, 3):
        model = make_tower(dtype)
        if stage == 3:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        config = config_of(dtype, stage=stage, gradient_clipping=0.05)
        engine = longshore.initialize(model=model, config=config, offload=longshore.Offload(20, threads=1)).engine
        for step in range(3):
            for micro in range(2):
                engine.backward(engine(words_of(2 * step + micro, rank), extra=rank == step))
            engine.step()
        with longshore.gather(model.blocks[0], modifier_rank=3), torch.no_grad():
            if rank == 3:
                model.blocks[0].up.bias.add_(1.0)
        engine.backward(engine(words_of(9, rank)))
        engine.step()
        masters = [utils.safe_get_full_fp32_param(parameter) for parameter in model.parameters()]
        moments = [utils.safe_get_full_optimizer_state(each, "exp_avg") for each in model.parameters()]
        weights.append([*(whole(each.detach()).clone() for each in model.parameters()), *masters, *moments])
        engine.destroy()
    for place, (one, other) in enumerate(zip(*weights, strict=True)):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other), place


def two_losses_of_one_forward(discard: bool) -> None:
    """deepspeedai/DeepSpeed pull request 8135, on blocks that are gathered again for each backward."""
    with beside() as pair:
        for step in range(3):
            first, second = pair.engine(words_of(step, pair.rank), apart=True)
            pair.engine.backward(first, retain_graph=True)
            if discard:
                pair.engine.zero_grad()
            pair.engine.backward(second)
            pair.engine.step()
            pair.plain(lambda model, rank, step=step: model(words_of(step, rank), apart=True)[1 if discard else 0 :])
            pair.check(f"step {step}")


def equal_to_stage_2(dtype: torch.dtype) -> None:
    """On any number of ranks: the same sums, in the same order."""
    rank, found = dist.get_rank(), []
    for stage in (2, 3):
        model = make_tower(dtype)
        config = config_of(dtype, stage=stage, gradient_clipping=0.05)
        engine = longshore.initialize(model=model, config=config, offload=longshore.Offload(20, threads=1)).engine
        for step in range(4):
            for micro in range(2):
                engine.backward(engine(words_of(2 * step + micro, rank), extra=rank == step))
            engine.step()
        norm = engine.get_global_grad_norm()
        found.append((norm, {name: whole(each.detach()).clone() for name, each in model.named_parameters()}))
        engine.destroy()
    (one_norm, one), (other_norm, other) = found
    for name, weight in one.items():
        assert torch.equal(weight, other[name]), name
    assert one_norm is not None and abs(one_norm - other_norm) <= 1e-7 * one_norm


def memory() -> dict[str, float]:
    """How far a step grows beyond what stays, in blocks (a block's parameters, or its gradients); and what stays."""
    width, count = 64, 8
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width)) for _ in range(count))
    )
    block_bytes = sum(parameter.nbytes for parameter in model[0].parameters())
    numel = sum(parameter.numel() for parameter in model.parameters())
    # With a device of its own: without, what arrives on the host would be counted too.
    transfer = longshore.SimulatedTransfer(dist.get_rank(), in_flight_bytes=block_bytes // 2)
    offload = longshore.Offload(1 << 14, threads=1, transfer=transfer)
    engine = longshore.initialize(model=model, config=config_of(), offload=offload).engine
    peak = 0

    def look(*_: Any) -> None:
        nonlocal peak
        peak = max(peak, live_bytes())

    def look_twice(_: nn.Module, __: Any, output: Tensor) -> None:
        look()
        output.register_hook(look)

    try:
        for step in range(3):
            stays, peak = live_bytes(), 0
            if step == 2:
                for module in model.modules():
                    if isinstance(module, nn.Linear):
                        module.register_forward_hook(look_twice)
            engine.backward(engine(torch.randn(1, width)).sum())
            engine.step()
        # A rank's part of the memory in which all of them gather.
        segments = engine.optimizer._core.members.store.residence._gathers.shared._blocks
        peak += sum(segment.capacity for segment in segments) / dist.get_world_size()
        shards = sum(parameter.to_local().nbytes for parameter in model.parameters())
        counted = engine.optimizer.host_bytes()
        largest = max(tile.layout.buffer_numel for tile in engine.optimizer._core.members.store.tiles)
        assert counted.pop("staging") == LANDING_SLOTS * padded_bytes(4 * largest)
        host = sum(counted.values())
        return {
            "blocks": (peak - stays) / block_bytes,
            "shards": shards / (4 * numel),
            "host": host / numel,
            "device": engine.explain(False).device_bytes["parameters"] / (4 * numel),
        }
    finally:
        engine.destroy()


def compiled(backend: str) -> None:
    """Each block, here and in the plain loop."""
    model = make_tower()
    with beside(model=model) as pair, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # torch's own
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's, where inductor is imported
        for block in (*model.blocks, *pair.twin.blocks):
            block.compile(backend=backend)
        for step in range(3):
            pair.train(step)


def sharded_by_the_user(dtype: torch.dtype) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_tower(dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(2):  # a second engine, behind the first
        with beside(dtype, model) as pair:
            pair.twin.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
            pair.loop = PlainLoop(pair.twin.parameters(), **OPTIONS)
            for step in range(2):
                pair.train(step)


def frozen_and_thawed() -> None:
    """The extra head and a block are frozen at first, and again at the end."""
    model = make_tower()
    model.extra.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    with beside(model=model, model_parameters=list(model.parameters())) as pair:
        for step, trainable in enumerate((False, False, True, True, False, True)):
            for each in (pair.model, pair.twin):
                each.extra.requires_grad_(trainable)
                each.blocks[1].requires_grad_(trainable)
            pair.train(step, lambda model, rank, step=step: [model(words_of(step, rank), extra=True)])


def thawed_after_forward() -> None:
    """A block that is frozen in its first forward, and not any more when the backward begins."""

    def losses(model: Any, rank: int, step: int) -> list[Tensor]:
        model.blocks[1].requires_grad_(step > 0)
        loss = model(words_of(step, rank))
        model.blocks[1].requires_grad_()
        return [loss]

    with beside() as pair:
        for step in range(3):
            pair.train(step, lambda model, rank, step=step: losses(model, rank, step))


def frozen_while_gathered() -> None:
    """A forward without a backward leaves the root's parameters gathered; the script freezes those that it holds."""
    with beside() as pair:
        held = {id(each): dict(each.named_parameters()) for each in (pair.model, pair.twin)}
        pair.train(0)
        for step in range(1, 3):
            for model in (pair.model, pair.twin):
                model(words_of(step, 0), extra=True)
                held[id(model)]["extra.weight"].requires_grad_(False)
            pair.train(step, lambda model, rank, step=step: [model(words_of(step, rank), extra=True)])


def thawed_while_gathered(handles: str) -> None:
    """A forward without a backward leaves the root's parameters gathered; the script freezes and thaws the shards that
    it holds, what it has from before ``initialize()``, or what the model has then."""
    model = make_tower()
    model.extra.requires_grad_(False)
    former = dict(model.named_parameters())
    with beside(model=model, model_parameters=list(model.parameters())) as pair:
        pair.twin.extra.requires_grad_(False)
        held = {id(each): dict(each.named_parameters()) for each in (pair.model, pair.twin)}
        for step, trainable in enumerate((False, True, True, False, False, True)):
            for model in (pair.model, pair.twin):
                model(words_of(step, 0), extra=True)
                found = dict(model.named_parameters()) if handles == "model" else held[id(model)]
                if handles == "former" and model is pair.model:
                    found = former
                found["extra.weight"].requires_grad_(trainable)
            pair.train(step, lambda model, rank, step=step: [model(words_of(step, rank), extra=True)])
            for names in (former, held[id(pair.model)], dict(pair.model.named_parameters())):
                assert names["extra.weight"].requires_grad == trainable


def written_while_gathered(handles: str, then: str) -> None:
    """A forward without a backward leaves the root's parameters gathered; the script writes the shards that it holds,
    or the tensors that the model has then, and goes on with a forward, with its backward, or by reading the state."""
    with beside() as pair:
        held = dict(pair.model.named_parameters())
        for step in range(3):
            loss = pair.model(words_of(step, pair.rank))
            with torch.no_grad():
                found = held if handles == "shards" else dict(pair.model.named_parameters())
                for each in (found["extra.weight"], pair.twin.extra.weight):  # which this forward does not use
                    each.mul_(1.5)
            places = [index for index, each in enumerate(pair.loop.parameters) if each is pair.twin.extra.weight]
            pair.loop.refresh(*places)
            if then == "backward":
                pair.train(step, lambda model, rank, loss=loss, step=step: _loss_of(model, pair, rank, loss, step))
                continue
            if then == "state":
                state = pair.model.state_dict()
                assert torch.equal(whole(state["extra.weight"]), pair.twin.extra.weight)
            pair.train(step, lambda model, rank, step=step: [model(words_of(step, rank), extra=True)])


def _loss_of(model: Any, pair: Beside, rank: int, loss: Tensor, step: int) -> list[Tensor]:
    return [loss if model is pair.engine else model(words_of(step, rank))]


def written_twice_while_gathered(how: str, at: str) -> list[str]:
    """What the next forward or the backward says, and what the forward after it; the shard's values count. A write to
    another parameter, which nothing is wrong with, counts as well."""
    with beside() as pair:
        shards = dict(pair.model.named_parameters())
        held, other = shards["extra.weight"], shards["extra.bias"]
        before, other_before = (whole(each).detach().clone() for each in (held, other))
        loss = pair.engine(words_of(0, pair.rank))
        gathered = dict(pair.model.named_parameters())["extra.weight"]
        with torch.no_grad():
            dict(pair.model.named_parameters())["extra.bias"].add_(1.0)
            if how == "data":
                gathered.data.mul_(2.0)
            else:
                held.mul_(3.0)
                gathered.mul_(2.0)
        call = (lambda: pair.engine.backward(loss)) if at == "backward" else lambda: pair.engine(words_of(0, pair.rank))
        said = [raised_by(call)]
        assert dict(pair.model.named_parameters())["extra.weight"] is held, "not the shard again"
        assert torch.equal(whole(other), other_before + 1.0)
        pair.engine.zero_grad()
        said.append(raised_by(lambda: pair.engine(words_of(0, pair.rank))))
        pair.engine.zero_grad()
        assert torch.equal(whole(held), before if how == "data" else before * 3.0)
        return said


def old_parameters_are_empty() -> None:
    """Whoever kept a parameter from before has nothing that could be taken for the weights."""
    model = make_tower()
    kept = list(model.parameters())
    groups = [{"params": [("mine", kept[0])], "lr": 1e-3}, {"params": kept[1:]}]
    engine = longshore.initialize(model=model, model_parameters=groups, config=config_of()).engine
    try:
        assert all(parameter.numel() == 0 for parameter in kept)
        assert [len(group["params"]) for group in engine.optimizer.param_groups] == [1, len(kept) - 1]
        found = [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]
        assert {id(parameter) for parameter in found} == {id(parameter) for parameter in model.parameters()}
    finally:
        engine.destroy()


def parameter_without_elements() -> None:
    """It is used, and FSDP2 could not reduce its gradient."""
    with beside() as pair:
        for model in (pair.model, pair.twin):
            for block in model.blocks:
                block.up.register_forward_hook(lambda _, args, output, block=block: output + block.nothing.sum())
        for step in range(3):
            pair.train(step)


def refused(what: str) -> str:
    model: Any = make_tower()
    arguments: dict[str, Any] = {}
    if what == "scalar":
        model.temperature = nn.Parameter(torch.ones(()))
    elif what == "leaf":
        arguments["config"] = config_of(leaf_classes=["Blok"], leaf_name_suffixes=["nothing"])
    elif what == "strides":
        model.extra.weight = nn.Parameter(torch.ones(WIDTH, 3).t())
    elif what == "dtypes":
        for block in model.blocks:
            block.up.to(torch.bfloat16)
        arguments["config"] = config_of(dtype=None)
    elif what == "class":
        arguments["wrap_policy"] = ["Blok"]
    elif what == "stage":
        arguments["config"] = config_of(stage=2)
        arguments["wrap_policy"] = "auto"
    elif what in ("columns", "part", "dtype", "stage 2"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if what == "columns":
            model = nn.Linear(4, 4)
            fully_shard(model, mesh=mesh, shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))
        elif what == "part":
            fully_shard(model.blocks[0], mesh=mesh)
        else:
            fully_shard(model, mesh=mesh)
        arguments["config"] = config_of(
            torch.bfloat16 if what == "dtype" else torch.float32, stage=2 if what == "stage 2" else 3
        )
    return raised_by(lambda: longshore.initialize(**{"model": model, "config": config_of(), **arguments}))


def hooked(early: bool, after_it: bool) -> list[str]:
    """A hook on a parameter's gradient, of before or after initialize()."""
    model = make_tower()

    def hook() -> Any:
        parameter = model.blocks[1].get_parameter("up.weight")
        if after_it:
            return parameter.register_post_accumulate_grad_hook(lambda _: None)
        return parameter.register_hook(lambda gradient: gradient * 0.5)

    if early:
        handle = hook()
        said = [raised_by(lambda: Beside(model=model))]
        handle.remove()
        return said
    with beside(model=model) as pair:
        handle = hook()
        pair.engine.backward(pair.engine(words_of(0, pair.rank)))
        said = [raised_by(pair.engine.step)]
        handle.remove()
        pair.engine.zero_grad()
        pair.train(1)
        return said
