"""How gradients of two ranks become one, and which rank steps what; run on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from support import PlainLoop
from torch import Tensor, nn

from engine.files import OPTIONS, assert_same, file, started, train
from engine.scenarios import HEADS, Backward, MultiTask, Oracle, Scenario, Window, drive, inputs, make_model


@dataclass(frozen=True)
class Arithmetic:
    """The reduction as it should be.

    Attributes:
        wire: dtype in which gradients travel; None: that of the parameter, or of sums.
        sums: dtype of sums on a rank.
        before: factor before the sum over ranks.
        after: factor after it.
    """

    wire: torch.dtype | None = None
    sums: torch.dtype = torch.float32
    before: float = 1.0
    after: float = 0.5

    def reduce(self, own: list[list[Tensor]]) -> Tensor:
        """One parameter's gradients, by rank and backward, as one float32 tensor."""
        total: Tensor | None = None
        for gradients in own:
            brought = gradients[0]
            for gradient in gradients[1:]:
                brought = brought.to(self.sums) + gradient.to(self.sums)
            sent = brought.to(self.wire or brought.dtype)
            sent = sent * self.before if self.before != 1.0 else sent
            total = sent.float() if total is None else total + sent.float()
        assert total is not None
        return total * self.after


def window_of(twin: MultiTask, step: int, backwards: int, each: bool, arithmetic: Arithmetic) -> list[Tensor | None]:
    """The window's gradients; ``each``: reduced after every backward, and then added in float32."""
    dtype, parameters = next(twin.parameters()).dtype, list(twin.parameters())
    found = [
        [
            torch.autograd.grad(
                twin(inputs(step, micro, rank, dtype), HEADS) / backwards, parameters, allow_unused=True
            )
            for micro in range(backwards)
        ]
        for rank in range(2)
    ]
    window: list[Tensor | None] = []
    for index in range(len(parameters)):
        own = [[gradients[index] for gradients in rank] for rank in found]
        if own[0][0] is None:
            window.append(None)
        elif each:
            total = arithmetic.reduce([rank[:1] for rank in own])
            for micro in range(1, backwards):
                total = total + arithmetic.reduce([rank[micro : micro + 1] for rank in own])
            window.append(total)
        else:
            window.append(arithmetic.reduce(own))
    return window


def reduces(config: dict[str, Any], dtype: torch.dtype, arithmetic: Arithmetic) -> dict[str, Any]:
    """Three windows; raises where a weight is not what ``arithmetic`` makes of it.

    Returns ``differs``: whether the default's arithmetic would have given other gradients.
    """
    import torch.distributed as dist

    rank = dist.get_rank()
    model, twin = make_model(dtype), make_model(dtype)
    loop = PlainLoop(twin.parameters(), **OPTIONS)
    backwards, differs = config.get("gradient_accumulation_steps", 1), False
    with started(file(**config), model) as engine:
        for step in range(3):
            train(engine, (engine(inputs(step, micro, rank, dtype), HEADS) for micro in range(backwards)))
            each = engine.zero_optimization_stage() >= 2
            window = window_of(twin, step, backwards, each, arithmetic)
            default = window_of(twin, step, backwards, each, Arithmetic())
            differs |= any(
                not torch.equal(one, other)
                for one, other in zip(window, default, strict=True)
                if one is not None and other is not None
            )
            loop.step(window)
            assert_same(model, twin, f"step {step}")
    return {"differs": differs}


def huge_gradients(config: dict[str, Any]) -> float:
    """A gradient of 3e38 on both ranks, whose sum is no float32; what SGD makes of a weight of 0."""
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    sgd = {"type": "SGD", "params": {"lr": 2e-38}}
    with started(file(optimizer=sgd, **config), model) as engine:
        train(engine, [engine(torch.full((1, 3), 3e38)).sum()])
        return float(model.weight.detach()[0, 0])


def shards(zero: dict[str, Any], backwards: int, heads: tuple[str, ...] = HEADS) -> dict[str, Any]:
    """Two windows on AdamW, with these heads; raises where a weight is not the plain loop's. Returns what was to be
    seen."""
    import torch.distributed as dist

    rank, stage = dist.get_rank(), zero.get("stage", 0)
    model = make_model(torch.float32)
    oracle = Oracle(Scenario(), torch.float32, 2, stage, **OPTIONS)
    found: dict[str, Any] = {"launched in backward": [], "gathered": []}
    with started(file(zero_optimization=zero, gradient_accumulation_steps=backwards), model) as engine:
        store = engine.optimizer._core.members.store
        submitted, gathered = Counted(store.collectives, "submit"), Counted(store.collectives.data, "gather")
        end_backward = store.end_backward

        def end(failure: Any) -> None:
            found["launched in backward"].append(submitted.take() - 1)  # one is for the ranks to meet
            end_backward(failure)

        store.end_backward = end
        begin_backward = store.begin_backward

        def begin(reduce: bool, last: bool) -> None:
            submitted.take()
            begin_backward(reduce, last)

        store.begin_backward = begin
        window = Window((Backward((heads,)),) * backwards, step_each=True)
        for step in range(2):
            gathered.take()
            drive(engine, window, step, rank, torch.float32)
            found["gathered"].append(gathered.take())
            oracle.loop.step(oracle.gradients(window, step, backwards))
            assert_same(model, oracle.model, f"step {step}")
        explanation = engine.explain(print_it=False)
        found["stage"] = engine.zero_optimization_stage()
        found["buckets"] = [bucket.numel for bucket in explanation.buckets]
        found["shards"] = [bucket.shard_numel for bucket in explanation.buckets]
        found["owners"] = {row.name: row.owners for row in explanation.parameters}
        found["reduced"] = {row.name: row.reduced for row in explanation.parameters if row.reduced is not None}
        found["numels"] = {row.name: row.numel for row in explanation.parameters}
    return found


def plain_backwards(backwards: int) -> None:
    """``loss.backward()`` so often a step, at stage 2; raises where a weight is not the plain loop's, or could not tell
    whether the backwards were first added up on their rank."""
    import torch.distributed as dist

    model = make_model(torch.float32)
    window = Window((Backward(raw=True),) * backwards)
    each, once = (Oracle(Scenario(), torch.float32, 2, stage, **OPTIONS) for stage in (2, 1))
    with started(file(zero_optimization={"stage": 2, "reduce_bucket_size": 1100}), model) as engine:
        for step in range(2):
            drive(engine, window, step, dist.get_rank(), torch.float32)
            for oracle in (each, once):
                oracle.loop.step(oracle.gradients(window, step, 1))
            assert_same(model, each.model, f"step {step}")
    assert any(not torch.equal(p, q) for p, q in zip(each.model.parameters(), once.model.parameters(), strict=True))


class Counted:
    """How often a method of ``owner`` is called."""

    def __init__(self, owner: Any, name: str) -> None:
        self._count, self._method = 0, getattr(owner, name)
        setattr(owner, name, self._call)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self._count += 1
        return self._method(*args, **kwargs)

    def take(self) -> int:
        count, self._count = self._count, 0
        return count
