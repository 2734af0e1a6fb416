"""Parameters of stage 3 that were frozen when their modules ran first, and train later; run on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from support import PlainLoop, whole
from torch import nn

import longshore
from engine.fully_sharded_cases import OPTIONS, Beside, Tower, beside, config_of, make_tower, raised_by, words_of


def train_body(model: nn.Module, trains: bool) -> None:
    """Freeze or thaw all but the head, which is tied to the embedding."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains or name.startswith("embedding"))


def sharded_tower() -> Tower:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_tower()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def restarted(pair: Beside, trains: bool = True, steps: int = 2) -> None:
    """Train a pair whose twin has the engine's first weights; the body moves if it ``trains``."""
    pair.twin.load_state_dict({name: whole(value) for name, value in pair.model.state_dict().items()})
    train_body(pair.twin, trains)
    pair.loop = PlainLoop(pair.twin.parameters(), **OPTIONS)
    before = {name: value.clone() for name, value in pair.twin.named_parameters()}
    for step in range(steps):
        pair.train(step, lambda model, rank, step=step: [model(words_of(step, rank), extra=True)])
    for name, value in pair.twin.named_parameters():
        moved = not torch.equal(before[name], value)
        assert moved == (value.requires_grad and value.numel() > 0), name


def thawed_before_initialize(ran: str) -> None:
    """The user's own ``fully_shard``, a first phase with a frozen body, and then an engine for all of it."""
    model = sharded_tower()
    train_body(model, trains=False)
    with torch.set_grad_enabled(ran != "no_grad"):
        loss = model(words_of(0, dist.get_rank()), extra=True)
    if ran == "backward":
        loss.backward()
        model.zero_grad()
    model.reshard()  # pyright: ignore[reportCallIssue]
    train_body(model, trains=True)
    with beside(model=model) as pair:
        restarted(pair)


def changed_between_engines(handles: str, ran: bool, trains: bool) -> None:
    """Between two engines the script freezes or thaws the body: the shards, or what it has from before the first."""
    model = make_tower()
    held: Any = dict(model.named_parameters())
    train_body(model, trains=not trains)
    with beside(model=model) as pair:
        if ran:
            restarted(pair, not trains, steps=1)
    if handles == "shards":
        held = dict(model.named_parameters())
    for name, parameter in held.items():
        parameter.requires_grad_(trains or name.startswith("embedding"))
    with beside(model=model) as pair:
        restarted(pair, trains)


def thawed_within_an_engine(raw: bool) -> None:
    model = make_tower()
    train_body(model, trains=False)
    with beside(model=model, model_parameters=list(model.parameters())) as pair:
        train_body(pair.twin, trains=False)
        pair.train(0)
        for each in (pair.model, pair.twin):
            train_body(each, trains=True)
        for step in range(1, 4):
            loss = pair.engine(words_of(step, pair.rank), extra=True)
            loss.backward() if raw else pair.engine.backward(loss)
            pair.engine.step()
            pair.plain(lambda model, rank, step=step: [model(words_of(step, rank), extra=True)])
            pair.check(f"step {step}")


def initialized_while_gathered() -> str:
    """A forward without a backward leaves the root's parameters gathered."""
    model = sharded_tower()
    model(words_of(0, dist.get_rank()))
    said = raised_by(lambda: longshore.initialize(model=model, config=config_of()))
    model.reshard()  # pyright: ignore[reportCallIssue]
    with beside(model=model) as pair:
        restarted(pair)
    return said


def written_under_a_second_engine() -> list[str]:
    """A parameter from before the first engine is as empty under the second, which tells whoever writes it."""
    model = make_tower()
    former = model.extra.weight
    longshore.initialize(model=model, config=config_of()).engine.destroy()
    with beside(model=model) as pair:
        with torch.no_grad():
            former.mul_(2.0)
        said = [raised_by(lambda: pair.engine(words_of(0, pair.rank)))]
        pair.engine.zero_grad()
        restarted(pair)
    return said
