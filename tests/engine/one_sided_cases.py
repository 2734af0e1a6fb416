"""Calls that one of two ranks makes and the other does not, run on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from support import PlainLoop, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import longshore
from engine.failure_cases import OPTIONS, _raise, backward, check_trains_on, explode, make_engine, raised_by
from engine.scenarios import HEADS, inputs, make_model


def called_on_one_rank(stage: int, what: str, before: str) -> str:
    """Rank 1 does something alone after a backward; what ``step()`` says of that. Then both go on.

    ``before``: what both ranks do after the backward: ``"norm"`` reduces what they kept.
    """
    rank = dist.get_rank()
    engine = make_engine(stage, gradient_accumulation_steps=2 if what == "raw backward" else 1)
    if what != "raw backward":
        backward(engine, 0, rank)
    if before == "norm":
        engine.optimizer.grad_norm()
    said = raised_by(lambda: _alone(engine, what, rank)) or raised_by(engine.step)
    engine.zero_grad()
    if what == "raw backward":
        engine.set_gradient_accumulation_steps(1)
    if said:
        check_trains_on(engine, stage, rank, range(3))
    engine.optimizer.close()
    return said


def _alone(engine: Any, what: str, rank: int) -> None:
    if what == "raw backward":
        for number in (0, 1):
            backward(engine, number, rank)
        if rank == 1:
            sum(parameter.sum() for parameter in engine.module.parameters()).backward()  # pyright: ignore
        return
    calls: dict[str, Callable[[], Any]] = {
        "norm": engine.optimizer.grad_norm,
        "zero_grad": engine.zero_grad,
    }
    if rank == 1:
        calls[what]()


def raw_backward_on_one_rank(stage: int, trained: bool, in_no_sync: bool) -> list[str]:
    """The first of two backwards a step is a plain one, from which only rank 1 gets gradients: what ``step()`` says of
    it, and once more. Then both discard the window, and train."""
    rank = dist.get_rank()
    engine = make_engine(stage)
    before = check_trains_on(engine, stage, rank, range(1)) if trained else None
    engine.set_gradient_accumulation_steps(2)
    with engine.no_sync() if in_no_sync else contextlib.nullcontext():
        loss = engine(inputs(0, 0, rank, torch.float32), HEADS)
        (loss if rank == 1 else torch.ones((), requires_grad=True) * 2.0).backward()
    said = [raised_by(engine.step), raised_by(engine.step)]
    engine.zero_grad()
    engine.set_gradient_accumulation_steps(1)
    check_trains_on(engine, stage, rank, range(1, 3), before)
    engine.optimizer.close()
    return said


def steps_without_a_backward(stage: int) -> None:
    """All ranks skip a batch that is not worth a backward, and call ``step()`` all the same."""
    rank = dist.get_rank()
    engine = make_engine(stage, gradient_accumulation_steps=2)
    before = [whole(parameter).clone() for parameter in engine.module.parameters()]
    backward(engine, 0, rank)
    engine.step()
    for _ in range(2):
        engine.step()
    assert not engine.was_step_applied()
    assert all(torch.equal(whole(one), two) for one, two in zip(engine.module.parameters(), before, strict=True))
    backward(engine, 1, rank)
    engine.step()
    assert engine.was_step_applied() and engine.global_steps == 1
    engine.optimizer.close()


class Optional(nn.Module):
    """Layers of which each forward names those that it uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        for number in used:
            x = self.layers[number](x)
        return x.pow(2).sum()


def discarded_by_the_model(stage: int, raw: bool) -> str:
    """Rank 0 alone gets gradients in a backward, no rank in the next one, and all call ``model.zero_grad()``."""
    rank = dist.get_rank()
    twin, model = Optional(), Optional()
    options: dict[str, Any] = {"lr": 0.1}
    gathered = {"wrap_policy": 1000} if stage == 3 else {}  # the whole model at once: layers may be left out
    config = longshore.Config(**{"stage": stage, "optimizer": {"type": "AdamW", **options}, **gathered})
    engine = longshore.initialize(model=model, config=config).engine

    def batch(step: int, of_rank: int) -> Tensor:
        return torch.full((2, 6), float(step + of_rank + 1), requires_grad=True)

    for number in range(2):
        loss = engine(batch(number, rank), (0,) if rank == number == 0 else ())
        if raw:
            loss.backward()
        else:
            engine.backward(loss)
    model.zero_grad()
    norms: list[float] = []
    said = raised_by(lambda: norms.append(float(engine.optimizer.grad_norm()))) or raised_by(engine.step)
    assert norms == ([] if said else [0.0])
    engine.zero_grad()
    plain = PlainLoop(twin.parameters(), **options)
    for step in range(2):
        engine.backward(engine(batch(step, rank), (0, 1)))
        engine.step()
        gradients = [torch.autograd.grad(twin(batch(step, each), (0, 1)), [*twin.parameters()]) for each in (0, 1)]
        plain.step([(one + other) * 0.5 for one, other in zip(*gradients, strict=True)])
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(whole(ours), theirs)
    engine.optimizer.close()
    return said


def discarded_together(stage: int, failing: int, backwards: int, rounds: int, where: str) -> list[str]:
    """Rank 0 fails in backward number ``failing`` of a window of three, rank 1 does ``backwards`` of them; both learn
    of it and discard the window. In the last of several rounds both fail. Then they train.

    ``where``: rank 0 fails in the ``"backward"`` or the ``"forward"``; ``"before state"``: in the backward, and once
    both have discarded the window, they read optimizer state, for which they meet.
    """
    rank = dist.get_rank()
    engine = make_engine(stage)
    trained = check_trains_on(engine, stage, rank, range(1)) if where == "before state" else None
    engine.set_gradient_accumulation_steps(3)
    in_forward = where == "forward"
    said = []
    for number in range(rounds):
        fails = rank == 0 or 0 < number == rounds - 1
        for _ in range(failing if fails else backwards):
            backward(engine, 0, rank)
        if fails:
            said.append(raised_by(lambda: explode(engine, 0, rank, in_forward=in_forward)).partition(":")[0])
        elif in_forward:
            engine(inputs(0, 0, rank, torch.float32), HEADS)
        dist.barrier()  # as a script that asks all ranks whether one failed
        engine.zero_grad()
        if where == "before state":
            assert engine.optimizer.state_dict()["state"]
    engine.set_gradient_accumulation_steps(1)
    check_trains_on(engine, stage, rank, range(1, 3), trained)
    engine.optimizer.close()
    return said


def fail_in_turn(stage: int, in_forward: bool, replicas: bool) -> str:
    """Rank 0 fails, and both ranks discard the window; rank 1 fails in the next one, and rank 0 goes on to ``step()``:
    what that says. Then they train.

    ``replicas``: each rank has all parameters and gathers alone, at stage 3.
    """
    rank = dist.get_rank()
    engine = make_replicas() if replicas else make_engine(stage, gradient_accumulation_steps=2)
    if rank == 0:
        raised_by(lambda: explode(engine, 0, rank, in_forward=in_forward))
    else:
        loss = engine(inputs(0, 0, rank, torch.float32), HEADS)
        if not in_forward:
            engine.backward(loss)
    dist.barrier()  # as a script that asks all ranks whether one failed
    engine.zero_grad()
    said = _fails_or_steps(engine, rank, 1, in_forward)
    _discard_and_train(engine, stage, rank)
    return said


def _fails_or_steps(engine: Any, rank: int, failing: int, in_forward: bool = False) -> str:
    """A window of two backwards, in the first of which rank ``failing`` fails: what each rank says."""

    def window() -> None:
        if rank == failing:
            explode(engine, 0, rank, in_forward=in_forward)
        for _ in range(2):
            backward(engine, 0, rank)
            engine.step()

    return raised_by(window)


def _discard_and_train(engine: Any, stage: int, rank: int) -> None:
    engine.zero_grad()
    engine.set_gradient_accumulation_steps(1)
    check_trains_on(engine, stage, rank, range(3))
    engine.optimizer.close()


def make_replicas() -> Any:
    """An engine at stage 3 whose ranks have all parameters each."""
    model = make_model(torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh)
    settings: dict[str, Any] = {"optimizer": {"type": "AdamW", **OPTIONS}, "gradient_accumulation_steps": 2}
    config = longshore.Config(stage=3, **settings)
    return longshore.initialize(model=model, config=config, offload=longshore.Offload(100, threads=1)).engine


def replicas_discard_together() -> None:
    """Rank 0 fails while rank 1 has done one backward more; both discard the window, and meet in the script."""
    rank = dist.get_rank()
    engine = make_replicas()
    if rank == 0:
        raised_by(lambda: explode(engine, 0, rank))
    else:
        for _ in range(2):
            backward(engine, 0, rank)
    dist.barrier()  # as a script that asks all ranks whether one failed
    engine.zero_grad()
    dist.barrier()
    engine.set_gradient_accumulation_steps(1)
    check_trains_on(engine, 3, rank, range(3))
    engine.optimizer.close()


def fails_after_a_discarded_window(stage: int) -> str:
    """Both ranks discard a window, and rank 0 fails in the next one; rank 1 goes on to ``step()``: what that says."""
    rank = dist.get_rank()
    engine = make_engine(stage, gradient_accumulation_steps=2)
    backward(engine, 0, rank)
    engine.zero_grad()
    said = _fails_or_steps(engine, rank, 0)
    _discard_and_train(engine, stage, rank)
    return said


def reads_state_after_two_failures(stage: int) -> str:
    """Rank 0 fails in two windows. In the first, rank 1 hears of it in ``step()``, which is returned; the second both
    discard before rank 1 hears of it, and read optimizer state, for which they meet. Then they train."""
    rank = dist.get_rank()
    engine = make_engine(stage)
    trained = check_trains_on(engine, stage, rank, range(1))
    engine.set_gradient_accumulation_steps(2)
    said = _fails_or_steps(engine, rank, 0)
    engine.zero_grad()
    explode_or_train = explode if rank == 0 else backward
    raised_by(lambda: explode_or_train(engine, 0, rank))
    dist.barrier()  # as a script that asks all ranks whether one failed
    engine.zero_grad()
    assert engine.optimizer.state_dict()["state"]
    engine.set_gradient_accumulation_steps(1)
    check_trains_on(engine, stage, rank, range(1, 3), trained)
    engine.optimizer.close()
    return said


def skipped_on_one_rank(stage: int, instead: str) -> list[str]:
    """The forward of rank 1 fails for one batch, which its loop skips; the other goes on with that batch.

    ``instead``: rank 1 ``"retries"`` the same batch, and discards nothing; or it was a batch that it ``"evaluates"``.
    """
    rank = dist.get_rank()
    engine = make_engine(stage)
    trained = check_trains_on(engine, stage, rank, range(1))
    said = []
    if rank == 1:
        with torch.set_grad_enabled(instead != "evaluates"):
            said.append(raised_by(lambda: explode(engine, 1, rank, in_forward=True)))
        if instead != "retries":
            engine.zero_grad()
    if instead:
        check_trains_on(engine, stage, rank, range(1, 4), trained)
        engine.optimizer.close()
        return said

    def batch() -> None:
        backward(engine, 1, rank)
        engine.step()

    if rank == 0:
        said.append(raised_by(batch))
        engine.zero_grad()
    check_trains_on(engine, stage, rank, range(2, 4), trained)
    engine.optimizer.close()
    return said


def stepped_again_on_one_rank(stage: int, refused: bool) -> list[str]:
    """``step()`` is an error on both ranks, as they differ in their learning rate, or rank 0 ``refused`` it after they
    agreed. Rank 0 discards the window, and rank 1 calls ``step()`` again, when rank 0 is in the one of its next window:
    what both calls say.
    """
    rank = dist.get_rank()
    engine = make_engine(stage)
    (group,) = engine.optimizer.param_groups
    rate = group["lr"]
    members = engine.optimizer._core.members
    name_states = members.name_states
    if not refused:
        group["lr"] = rate * (1 + rank)
    elif rank == 0:
        members.name_states = lambda store: _raise()
    backward(engine, 7, rank)
    said = [raised_by(engine.step)]
    group["lr"], members.name_states = rate, name_states
    if rank == 1:
        said.append(raised_by(engine.step))
    engine.zero_grad()
    check_trains_on(engine, stage, rank, range(3))
    engine.optimizer.close()
    return said


def flagged_after_the_step(stage: int, backwards: int) -> list[str]:
    """A window is one ``try`` with its ``step()`` on each rank, and rank 0 fails in it; then both ask whether one did,
    and discard the window."""
    rank = dist.get_rank()
    engine = make_engine(stage, gradient_accumulation_steps=backwards)
    said = []

    def window(fails: bool) -> None:
        for number in range(backwards):
            explode(engine, 0, rank) if fails and number == 0 else backward(engine, 0, rank)
        engine.step()

    for _ in range(2):
        said.append(raised_by(lambda: window(rank == 0)))
        dist.all_reduce(torch.ones(1))
        engine.zero_grad()
    engine.set_gradient_accumulation_steps(1)
    check_trains_on(engine, stage, rank, range(3))
    engine.optimizer.close()
    return said
