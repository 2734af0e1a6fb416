"""Stages that reduce once reduce during the last backward; run on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.files import OPTIONS, assert_same, file, started
from engine.reduction_cases import Counted
from engine.scenarios import HEADS, Oracle, Scenario, Window, drive, inputs, make_model


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
        store = engine.optimizer.store
        reduced, agree, early = Counted(store, "_reduce"), store.agree, []

        def observed(collect: Any) -> Any:
            if taken_out is not None and rank in by:
                model.get_parameter(taken_out).grad = None
            if not early:
                store.lane.drain()
                early.append(reduced.take())
            return agree(collect)

        store.agree = observed
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
