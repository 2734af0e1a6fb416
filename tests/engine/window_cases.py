"""What an engine counts, on any number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support import PlainLoop, loss_of, small_model, whole

from engine.failure_cases import OPTIONS, make_engine
from engine.files import assert_same, file, started
from engine.scenarios import HEADS, Backward, Oracle, Scenario, Window, _mean, _sum, inputs


def batch_numbers(config: dict[str, Any]) -> dict[str, Any]:
    """``numbers``: train batch, micro batch, accumulation steps; ``backwards``: how many the first step took."""
    with started(config) as engine:
        numbers = (
            engine.train_batch_size(),
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
        )
        backwards = 0
        while engine.global_steps == 0:
            engine.backward(loss_of(engine, backwards))
            engine.step()
            backwards += 1
        return {"numbers": numbers, "backwards": backwards}


def batch_numbers_or_error(config: dict[str, Any]) -> Any:
    try:
        return batch_numbers(config)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


def one_rank_without_a_gradient(stage: int, before: str, raw: bool) -> None:
    """What all ranks know of a window is agreed on anew: rank 0 cannot know that rank 1 has more gradients now.

    ``before``: what they agreed on before that.
    """
    rank = dist.get_rank()
    engine = make_engine(stage)
    oracle = Oracle(Scenario(), torch.float32, 2, stage, **OPTIONS)

    def backward(number: int, takes_part: bool = True) -> None:
        x = inputs(0, 10 * number, rank, torch.float32)
        loss = engine(x, HEADS) if takes_part else x.requires_grad_().sum()
        loss.backward() if raw else engine.backward(loss)

    numbers = [1, 2]
    if before == "step":
        engine.step()
        assert not engine.was_step_applied()
    else:
        numbers = [0, 1, 2]
        backward(0)
        engine.optimizer.grad_norm()
    backward(1, rank == 1)
    backward(2)
    engine.step()
    assert engine.was_step_applied()
    found = {
        (number, place): oracle._backward(Backward(), number, 0, place, 1) for number in numbers for place in (0, 1)
    }
    nothing = [None] * len(oracle.loop.parameters)
    found[1, 0] = nothing
    if raw and stage == 2:  # no hook told rank 0 of its first loss.backward(): its only one is reduced with that
        found[1, 0], found[2, 0] = found[2, 0], nothing
    by_backward = [[found[number, place] for place in (0, 1)] for number in numbers]
    rounds = [[each] for each in by_backward]
    if stage < 2 and before == "step":
        rounds = [by_backward]  # each rank adds its gradients up
    elif stage < 2:
        rounds = [by_backward[:1], by_backward[1:]]
    oracle.loop.step(
        [
            _sum([_mean([_sum([each[place][index] for each in members]) for place in (0, 1)]) for members in rounds])
            for index in range(len(oracle.loop.parameters))
        ]
    )
    for ours, theirs in zip(engine.module.parameters(), oracle.model.parameters(), strict=True):
        assert torch.equal(whole(ours), theirs)
    engine.optimizer.close()


def an_empty_parameter_of_one_rank(stage: int) -> int:
    """Rank 0 has a gradient of a parameter without elements, and rank 1 has none at all; returns the applied steps."""
    engine = make_engine(stage)
    for number in range(2):
        loss = engine(inputs(0, number, 0, torch.float32), HEADS) + engine.module.empty.sum()
        engine.backward(loss if dist.get_rank() == 0 else torch.ones(1, requires_grad=True).sum())
        engine.step()
        assert engine.was_step_applied()
    engine.optimizer.close()
    return engine.global_steps


def unmanaged(stage: int) -> None:
    """Windows of one, two and three backwards: the plain loop's weights, in which stages 0 and 1 reduce at the step."""
    engine = make_engine(stage, micro_batch_size=1, gradient_accumulation_steps=2, managed_accumulation=False)
    oracle = Oracle(Scenario(), torch.float32, 2, stage, **OPTIONS)
    for step, count in enumerate((1, 2, 3)):
        for number in range(count):
            engine.backward(engine(inputs(step, 10 * number, dist.get_rank(), torch.float32), HEADS))
        engine.step()
        assert engine.was_step_applied() and engine.global_steps == step + 1
        oracle.loop.step(oracle.gradients(Window(tuple(Backward() for _ in range(count))), step, 2))
        for ours, theirs in zip(engine.module.parameters(), oracle.model.parameters(), strict=True):
            assert torch.equal(whole(ours), theirs)
    engine.optimizer.close()


def taken_out(stage: int) -> None:
    """A parameter that all ranks take out of its group is neither stepped nor measured."""
    engine = make_engine(stage, gradient_clipping=1e9)
    oracle = Oracle(Scenario(), torch.float32, 2, stage, **OPTIONS)
    members = engine.optimizer.param_groups[0]["params"]
    out = len(members) - 2  # the weight of the last head
    kept = [whole(each).detach().clone() for each in engine.module.parameters()]
    for step in range(3):
        if step == 1:
            members.pop(out)
        engine.backward(engine(inputs(step, 0, dist.get_rank(), torch.float32), HEADS))
        engine.step()
        gradients: list[Any] = [*oracle.gradients(Window(), step, 1)]
        if step:
            gradients[out] = None
        total = sum(float(each.double().square().sum()) for each in gradients if each is not None)
        found = engine.get_global_grad_norm()
        assert found is not None and abs(float(found) ** 2 - total) < 1e-5 * total
        oracle.loop.step(gradients)
        for ours, theirs in zip(engine.module.parameters(), oracle.model.parameters(), strict=True):
            assert torch.equal(whole(ours), theirs)
        if step == 0:
            kept = [whole(each).detach().clone() for each in engine.module.parameters()]
    unchanged = [torch.equal(one, whole(other)) for one, other in zip(kept, engine.module.parameters(), strict=True)]
    assert [place for place, same in enumerate(unchanged) if same and kept[place].numel()] == [out]
    engine.optimizer.close()


def moved(stage: int) -> None:
    """Parameters that all ranks move to a new group by hand take their states along and have its rate from then on."""
    engine = make_engine(stage)
    oracle = Oracle(Scenario(), torch.float32, 2, stage, **OPTIONS)
    for step in range(4):
        engine.backward(engine(inputs(step, 0, dist.get_rank(), torch.float32), HEADS))
        if step == 2:  # gradients of the window are on their way already
            for optimizer in (engine.optimizer, oracle.loop.optimizer):
                group = optimizer.param_groups[0]
                taken, group["params"] = group["params"][-4:-2], group["params"][:-4] + group["params"][-2:]
                assert all(optimizer.state[each] for each in taken)
                optimizer.add_param_group({"params": taken, "lr": 30 * group["lr"], "weight_decay": 0.0})
        engine.step()
        oracle.loop.step(oracle.gradients(Window(), step, 1))
        for ours, theirs in zip(engine.module.parameters(), oracle.model.parameters(), strict=True):
            assert torch.equal(whole(ours), theirs)
    engine.optimizer.close()


def after_a_raw_backward_that_raised(stage: int, raises: int) -> None:
    """What a ``loss.backward()`` brought before a hook raised in it counts, as a backward of its own.

    ``raises``: the rank on which it does; 2: on both.
    """
    rank = dist.get_rank()
    plain = small_model()
    loop = PlainLoop(plain.parameters(), torch.optim.SGD, lr=0.5)
    config = file(optimizer={"type": "SGD", "params": {"lr": 0.5}}, zero_optimization={"stage": stage})
    with started(config, small_model()) as engine:
        for number, backward in enumerate(_raises_once(engine.module, raises in (rank, 2))):
            backward(engine, 2 * number + rank)
        engine.step()
        found = []
        for place in (0, 1):
            twin = small_model()
            for number, backward in enumerate(_raises_once(twin, raises in (place, 2))):
                backward(twin, 2 * number + place)
                found.append([parameter.grad for parameter in twin.parameters()])
                twin.zero_grad()
        assert sum(each is None for each in found[0]) == (2 if raises != 1 else 0)
        first, second = zip(found[0], found[2], strict=True), zip(found[1], found[3], strict=True)
        loop.step([_sum([_mean(a), _mean(b)]) for a, b in zip(first, second, strict=True)])
        assert_same(engine.module, plain)


def _raises_once(model: Any, raises: bool) -> list[Callable[[Any, int], None]]:
    """Two backwards; the first may raise in a hook after the gradients of all layers but the first."""
    left = [raises]

    def hook(*_: Any) -> None:
        if left.pop() if left else False:
            raise ArithmeticError("on purpose")

    model[1].register_full_backward_hook(hook)

    def backward(of: Any, seed: int) -> None:
        with contextlib.suppress(ArithmeticError):
            loss_of(of, seed).backward()

    return [backward, backward]
