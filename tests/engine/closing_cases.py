"""Stages that reduce once reduce during the last backward; run on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from support import PlainLoop
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.files import OPTIONS, assert_same, file, started
from engine.reduction_cases import Counted
from engine.scenarios import HEADS, Oracle, Scenario, Window, drive, inputs, make_model
from longshore.errors import GradientError
from longshore.utils import safe_get_full_grad


def trained(
    plans: Sequence[Sequence[Window]],
    stage: int,
    dtype: torch.dtype = torch.float32,
    taken_out: str | None = None,
    by: Sequence[int] = (0, 1),
    **keys: Any,
) -> list[tuple[int, int]]:
    """Each rank makes its own calls, one plan for each; raises where a weight is not the plain loop's on the first.

    ``taken_out`` names a parameter whose ``.grad`` is set to None before every step, ``by`` some ranks.

    Returns:
        For each window, how many buckets were reduced before ``step()``, and how many in it.
    """
    import torch.distributed as dist

    rank = dist.get_rank()
    model = make_model(dtype)
    oracle = Oracle(Scenario(), dtype, dist.get_world_size(), stage, **OPTIONS)
    names = [name for name, _ in oracle.model.named_parameters()]
    zero = {"stage": stage, "reduce_bucket_size": 600}
    content = file(**{"zero_optimization": zero, **keys})
    if dtype == torch.bfloat16:
        content["bf16"] = {"enabled": True, "check_grad_overflow": False}
    found = []
    with started(content, model) as engine:
        store = engine.optimizer._core.members.store
        reduced, early = Counted(store._gradients, "reduce"), []

        collect = engine.optimizer._core._collect

        def observed() -> Any:
            if taken_out is not None and rank in by:
                model.get_parameter(taken_out).grad = None
            if not early:
                store.collectives.drain()
                early.append(reduced.take())
            return collect()

        engine.optimizer._core._collect = observed
        for step, window in enumerate(plans[rank]):
            early.clear()
            drive(engine, window, step, rank, dtype)
            found.append((early[0], reduced.take()))
            expected = plans[0][step]
            gradients = oracle.gradients(expected, step, expected.accumulation or engine.gradient_accumulation_steps())
            if taken_out is not None:
                gradients[names.index(taken_out)] = _mean_without(by, oracle, expected, step, names.index(taken_out))
            oracle.loop.step(gradients)
            assert_same(model, oracle.model, f"step {step}")
    return found


def _mean_without(by: Sequence[int], oracle: Oracle, window: Window, step: int, index: int) -> torch.Tensor | None:
    """One parameter's gradient, in a window of one backward, where ranks ``by`` count as zero."""
    (backward,) = window.backwards
    total = None
    for rank in {0, 1} - set(by):
        gradient = oracle._backward(backward, 0, step, rank, 1)[index]
        assert gradient is not None
        total = gradient if total is None else total + gradient
    return None if total is None else total * 0.5


class Repeated(nn.Module):
    """One layer in two reentrant checkpoints: its gradients come twice in one backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(19, 33)
        self.repeated = nn.Linear(33, 33)
        self.last = nn.Linear(33, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda hidden: torch.tanh(self.repeated(hidden)), x, use_reentrant=True)
        return self.last(x).float().pow(2).sum()


def repeated_layer(stage: int, bucket_numel: int, dtype: torch.dtype) -> bool:
    """Raises where a weight differs from the plain loop's, which adds each rank's gradients in float32.

    Returns:
        Whether sums in ``dtype`` would have made other weights.
    """
    import torch.distributed as dist

    model, rounded = Repeated().to(dtype), False
    twin = Repeated().to(dtype)
    loop = PlainLoop(list(twin.parameters()), **OPTIONS)
    content = file(zero_optimization={"stage": stage, "reduce_bucket_size": bucket_numel})
    content["bf16"] = {"enabled": dtype == torch.bfloat16, "check_grad_overflow": False}
    with started(content, model) as engine:
        for step in range(3):
            engine.backward(engine(inputs(step, 0, dist.get_rank(), dtype)))
            engine.step()
            totals = [_each_arrival(twin, inputs(step, 0, rank, dtype)) for rank in range(2)]
            loop.step([(mine + other) * 0.5 for mine, other in zip(*totals, strict=True)])
            assert_same(model, twin, f"step {step}")
            rounded |= any(not torch.equal(total, total.to(dtype).float()) for total in totals[0])
    return rounded


def _each_arrival(twin: nn.Module, batch: Tensor) -> list[Tensor]:
    """The sums in float32 of what a backward brings."""
    totals = [torch.zeros(parameter.shape) for parameter in twin.parameters()]

    def take(parameter: Tensor, total: Tensor) -> None:
        total.add_(parameter.grad)
        parameter.grad = None

    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda parameter, total=total: take(parameter, total))
        for parameter, total in zip(twin.parameters(), totals, strict=True)
    ]
    twin(batch).backward()
    for hook in hooks:
        hook.remove()
    return totals


def taken_out_after_a_reading(stage: int, unsynchronized: bool) -> str:
    """Rank 0 sets a ``.grad`` to None that was reduced already, by a reading or with a later backward; then both ranks
    go on. Returns what ``step()`` raises."""
    import torch.distributed as dist

    model, rank = make_model(torch.float32), dist.get_rank()
    with started(file(zero_optimization={"stage": stage, "reduce_bucket_size": 600}), model) as engine:
        with engine.no_sync() if unsynchronized else contextlib.nullcontext():
            engine.backward(engine(inputs(0, 0, rank, torch.float32), ("a",)))
        if unsynchronized:
            engine.backward(engine(inputs(0, 1, rank, torch.float32), ("b",)))
        else:
            safe_get_full_grad(model.second.bias)
        if rank == 0:
            model.heads["a"].bias.grad = None
        try:
            engine.backward(engine(inputs(0, 2, rank, torch.float32), ("a",)))
            engine.step()
        except GradientError as failure:
            return str(failure)
        return ""


def one_rank_has_no_backward(stage: int) -> list[float]:
    """Rank 1 only calls ``step()``: it counts as zero. Returns the change of one weight at each of two steps."""
    import torch.distributed as dist

    model = make_model(torch.float32)
    changes = []
    with started(file(zero_optimization={"stage": stage}), model) as engine:
        engine.set_gradient_accumulation_boundary(True)
        for step in range(2):
            before = model.first.bias.detach().clone()
            if dist.get_rank() == 0:
                engine.backward(engine(inputs(step, 0, 0, torch.float32), HEADS))
            engine.step()
            changes.append(float((model.first.bias.detach() - before).abs().sum()))
    return changes
