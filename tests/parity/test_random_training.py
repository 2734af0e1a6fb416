"""Whatever the model, the groups, the tiles and the loop: the weights are the plain loop's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import PlainLion, PlainLoop
from torch import Tensor, nn

import longshore

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

shapes = st.sampled_from([(), (1,), (16,), (5, 3), (0, 4), (33,), (2, 3, 7), (64, 9)])
groups_of_parameters = st.lists(
    st.lists(st.tuples(shapes, st.sampled_from(sorted(DTYPES))), min_size=1, max_size=4), min_size=1, max_size=3
)
betas = st.tuples(st.floats(0, 0.99), st.floats(0, 0.999))
weight_decay, lr, maximize = st.sampled_from([0.0, 0.3]), st.floats(0, 0.1), st.booleans()
adam = {"lr": lr, "betas": betas, "eps": st.floats(1e-10, 1e-2), "weight_decay": weight_decay, "maximize": maximize}
HYPER = {
    "Adam": adam,
    "AdamW": adam,
    "Lion": {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize},
    "Adagrad": {
        "lr": lr,
        "lr_decay": st.sampled_from([0.0, 0.1]),
        "eps": st.floats(1e-10, 1e-2),
        "weight_decay": weight_decay,
        "maximize": maximize,
    },
    "SGD": {
        "lr": lr,
        "momentum": st.sampled_from([0.0, 0.0, 0.9]),
        "dampening": st.sampled_from([0.0, 0.3]),
        "weight_decay": weight_decay,
        "maximize": maximize,
    },
}
kinds_and_options = st.sampled_from(sorted(HYPER)).flatmap(
    lambda kind: st.tuples(st.just(kind), st.lists(st.fixed_dictionaries(HYPER[kind]), min_size=3, max_size=3))
)
STATES = {"Adam": ("exp_avg", "exp_avg_sq"), "AdamW": ("exp_avg", "exp_avg_sq"), "Lion": ("exp_avg",)}
STATES.update(Adagrad=("sum",), SGD=("momentum_buffer",))

# What happens to one parameter in one backward: its gradient's magnitude, or none.
backward = st.lists(st.sampled_from([None, 1e-30, 1e-3, 1.0, 1e4]), min_size=12, max_size=12)
window = st.fixed_dictionaries(
    {
        "backwards": st.lists(backward, min_size=0, max_size=3),
        "frozen": st.sets(st.integers(0, 11), max_size=4),
        "discard_first": st.booleans(),
        "clip": st.sampled_from([None, 0.5]),
        "overwrite": st.one_of(st.none(), st.integers(0, 11)),
    }
)


class Training:
    """One parameter list trained twice: by the plain loop and by longshore."""

    def __init__(self, groups: list[Any], options: list[Any], kind: str, release: bool, offload: Any) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.release = release
        self.ours = [
            [nn.Parameter(self.random(shape, 1.0).to(DTYPES[dtype])) for shape, dtype in group] for group in groups
        ]
        theirs = [[nn.Parameter(parameter.detach().clone()) for parameter in group] for group in self.ours]
        own = [{"params": list(p), **o} for p, o in zip(self.ours, options, strict=False)]
        plain = [{"params": list(p), **o} for p, o in zip(theirs, options, strict=False)]
        self.kind = kind
        self.plain = PlainLoop(plain, PlainLion if kind == "Lion" else getattr(torch.optim, kind))
        self.optimizer = getattr(longshore, kind)(own, release_gradients=release, offload=offload)
        self.parameters = [parameter for group in self.ours for parameter in group]

    def random(self, shape: tuple[int, ...], magnitude: float) -> Tensor:
        return torch.randn(shape, generator=self.generator) * magnitude

    def backward(self, magnitudes: list[float | None]) -> list[Tensor | None]:
        """One backward in which each parameter gets a gradient of its own, or none."""
        terms, gradients = [], []
        for parameter, magnitude in zip(self.parameters, magnitudes, strict=False):
            if magnitude is None or not parameter.requires_grad:
                gradients.append(None)
                continue
            gradient = self.random(parameter.shape, magnitude).to(parameter.dtype)
            gradients.append(gradient)
            terms.append((parameter * gradient).sum().float())
        if terms:
            torch.stack(terms).sum().backward()
        return gradients

    def window(self, plan: dict[str, Any]) -> None:
        for index, parameter in enumerate(self.parameters):
            parameter.requires_grad_(index not in plan["frozen"])
        if plan["discard_first"]:
            self.backward([1.0] * len(self.parameters))
            self.optimizer.zero_grad()
        if plan["overwrite"] is not None:
            self.overwrite(plan["overwrite"] % len(self.parameters))
        total: list[Tensor | None] = [None] * len(self.parameters)
        for magnitudes in plan["backwards"]:
            for index, gradient in enumerate(self.backward(magnitudes)):
                if gradient is None:
                    continue
                # The dtype in which the mode accumulates.
                gradient = gradient.float() if self.release else gradient
                so_far = total[index]
                total[index] = gradient if so_far is None else so_far + gradient
        scale = 1.0
        if plan["clip"] is not None:
            norm = self.optimizer.clip_grad_norm_(plan["clip"])
            scale = torch.clamp(plan["clip"] / (norm + 1e-6), max=1.0).item()
        self.plain.step(total, scale)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def overwrite(self, index: int) -> None:
        values = self.random(self.parameters[index].shape, 1.0)
        with torch.no_grad():
            self.parameters[index].copy_(values)
            self.plain.parameters[index].copy_(values)
        self.plain.refresh(index)

    def check(self) -> None:
        for index, (ours, theirs) in enumerate(zip(self.parameters, self.plain.parameters, strict=True)):
            assert torch.equal(ours, theirs), index
            plain = self.plain.optimizer.state[self.plain.masters[index]]
            if ours not in self.optimizer.state:
                assert not plain or plain["step"] == 0  # torch's Adagrad has one from the beginning
                continue
            state = self.optimizer.state[ours]
            assert {*state} - {"step", "master"} == {*plain} - {"step"} <= {*STATES[self.kind]}, index
            for name in {*plain} - {"step"}:
                assert torch.equal(state[name], self.plain.state(index, name)), (index, name)
            assert state.get("step") == plain.get("step")


def run(case: dict[str, Any]) -> None:
    transfer = longshore.SimulatedTransfer(case["seed"], max_delay_s=0.0002) if case["simulated"] else None
    offload = longshore.Offload(tile_numel=case["tile_numel"], threads=case["threads"], transfer=transfer)
    kind, options = case["kind"]
    training = Training(case["groups"], options, kind, case["release"], offload)
    try:
        for plan in case["windows"]:
            training.window(plan)
            training.check()
    finally:
        training.optimizer.close()


cases = st.fixed_dictionaries(
    {
        "groups": groups_of_parameters,
        "kind": kinds_and_options,
        "release": st.booleans(),
        "simulated": st.booleans(),
        "tile_numel": st.sampled_from([5, 16, 50, 1000, 1 << 22]),
        "threads": st.integers(1, 3),
        "seed": st.integers(0, 1 << 30),
        "windows": st.lists(window, min_size=1, max_size=4),
    }
)


@pytest.mark.medium
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(case=cases)
def test_random_training(case: dict[str, Any]) -> None:
    run(case)


@pytest.mark.full
@settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases)
def test_much_random_training(case: dict[str, Any]) -> None:
    run(case)
