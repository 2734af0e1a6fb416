"""Learning-rate schedules of a DeepSpeed file, and a client's, through the engine.

The rates are worked out from the formulas here; that each step was made with its rate is seen in the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support import PlainLoop, loss_of, small_model
from torch.optim import lr_scheduler

import longshore
from engine.files import assert_same, file, gradients_of, started, train, without

LR = 4e-3
STEPS = 8


def scheduled(kind: str, **params: Any) -> dict[str, Any]:
    return file(
        optimizer={"type": "AdamW", "params": {"lr": LR, "betas": [0.9, 0.99]}},
        scheduler={"type": kind, "params": params},
    )


def check(
    config: dict[str, Any],
    rates: Sequence[float | Sequence[float]],
    betas: Sequence[tuple[float, float]] | None = None,
    **arguments: Any,
) -> None:
    """Step by step the rates, of one group or two, and the weights of the plain loop with them."""
    model, twin = arguments.pop("model", None) or small_model(), small_model()
    several = isinstance(rates[0], (list, tuple))
    groups = _groups(twin) if several else list(twin.parameters())
    loop = PlainLoop(groups, lr=LR, betas=(0.9, 0.99), weight_decay=0.0)
    if several:
        arguments["model_parameters"] = _groups(model)
    with started(config, model, **arguments) as engine:
        for step, rate in enumerate(rates):
            expected = list(rate) if isinstance(rate, (list, tuple)) else [rate]
            assert engine.get_lr() == pytest.approx(expected, rel=1e-12, abs=0), f"step {step}"
            for place, group in enumerate(loop.optimizer.param_groups):
                group["lr"] = engine.get_lr()[place]
                if betas is not None:
                    assert engine.optimizer.param_groups[place]["betas"] == pytest.approx(betas[step], rel=1e-12)
                    group["betas"] = engine.optimizer.param_groups[place]["betas"]
            train(engine, [loss_of(engine, step)])
            loop.step(gradients_of(twin, [loss_of(twin, step)]))
            assert_same(model, twin, f"step {step}")


def _groups(model: Any) -> list[dict[str, Any]]:
    first, *rest = [list(layer.parameters()) for layer in model]
    return [{"params": first}, {"params": [parameter for layer in rest for parameter in layer], "lr": LR / 2}]


def warmup(fraction: Callable[[int], float], count: int) -> list[float]:
    """The first step is at the lowest rate, and so is the second: iteration 0 is made after it."""
    return [0.0, *(fraction(iteration) for iteration in range(count - 1))]


def linear(iteration: int) -> float:
    return min(1.0, iteration / 4)


def logarithmic(iteration: int) -> float:
    return min(1.0, math.log(iteration + 1) / math.log(4))


@pytest.mark.parametrize("kind, shape", [("linear", linear), ("log", logarithmic), (None, logarithmic)])
def test_warmup(kind: str | None, shape: Callable[[int], float]) -> None:
    low, high = 1e-3, 9e-3
    params: dict[str, Any] = {"warmup_min_lr": low, "warmup_max_lr": high, "warmup_num_steps": 4}
    if kind is not None:
        params["warmup_type"] = kind
    check(scheduled("WarmupLR", **params), [low + (high - low) * part for part in warmup(shape, STEPS)])


def test_warmup_to_the_groups_own_rates_and_to_given_ones() -> None:
    parts = warmup(linear, STEPS)
    params = {"warmup_num_steps": 4, "warmup_type": "linear"}
    check(scheduled("WarmupLR", **params), [[LR * part, LR / 2 * part] for part in parts])
    config = scheduled("WarmupLR", warmup_max_lr=[1e-2, 2e-2], warmup_min_lr=[0.0, 1e-2], **params)
    check(config, [[1e-2 * part, 1e-2 + 1e-2 * part] for part in parts])


def test_warmup_and_decay() -> None:
    params = {"warmup_num_steps": 3, "total_num_steps": 6, "warmup_max_lr": 6e-3, "warmup_type": "linear"}
    parts = [0, 0, 1 / 3, 2 / 3, 1, 2 / 3, 1 / 3, 0]
    check(scheduled("WarmupDecayLR", **params), [6e-3 * part for part in parts])


def test_cosine() -> None:
    params = {"warmup_num_steps": 2, "total_num_steps": 6, "warmup_min_ratio": 0.2, "cos_min_ratio": 0.1,
              "warmup_type": "linear"}  # fmt: skip
    decay = [0.1 + 0.9 * (1 + math.cos(math.pi * part / 4)) / 2 for part in (1, 2, 3, 4, 4)]
    check(scheduled("WarmupCosineLR", **params), [LR * ratio for ratio in (0.0, 0.2, 0.6, *decay)])


def test_one_cycle() -> None:
    """The rate goes up and down, the first beta down and up; then the rate decays, and the beta grows."""
    params = {"cycle_min_lr": 1e-3, "cycle_max_lr": 5e-3, "cycle_first_step_size": 2, "cycle_second_step_size": 4,
              "cycle_min_mom": 0.5, "cycle_max_mom": 0.9, "decay_step_size": 2, "decay_lr_rate": 1.0,
              "decay_mom_rate": 0.05}  # fmt: skip
    heights = [0, 1 / 2, 1, 3 / 4, 1 / 2, 1 / 4, 0]
    rates = [1e-3 + 4e-3 * height for height in heights]
    rates += [1e-3 / (1 + (steps - 6) / 2) for steps in (7, 8)]
    momenta = [0.5, *(0.9 - 0.4 * height for height in heights[1:])]
    momenta += [0.9 * (1 + 0.05 * (steps - 6) / 2) for steps in (7, 8)]
    check(scheduled("OneCycle", **params), rates, [(momentum, 0.99) for momentum in momenta])


def test_one_cycle_in_stairs() -> None:
    """Up in two stairs, down in four; betas stay as they are without cycle_momentum."""
    params = {"cycle_min_lr": [0.0, 1e-3], "cycle_max_lr": [4e-3, 5e-3], "cycle_first_step_size": 4,
              "cycle_first_stair_count": 2, "cycle_second_stair_count": 4, "cycle_momentum": False}  # fmt: skip
    heights = [0, 0, 0.5, 0.5, 1, 0.75, 0.5, 0.25, 0]
    rates = [[4e-3 * height, 1e-3 + 4e-3 * height] for height in heights]
    check(scheduled("OneCycle", **params), rates, [(0.9, 0.99)] * len(rates))


@pytest.mark.parametrize("stairs", [False, True])
def test_range_test(stairs: bool) -> None:
    params = {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 0.5,
              "lr_range_test_staircase": stairs}  # fmt: skip
    check(
        scheduled("LRRangeTest", **params),
        [1e-3 * (1 + 0.5 * (step // 2 if stairs else step / 2)) for step in range(STEPS)],
    )


NEEDED: dict[str, dict[str, Any]] = {
    "WarmupLR": {},
    "WarmupDecayLR": {"total_num_steps": 2000},
    "WarmupCosineLR": {"total_num_steps": 2000},
    "OneCycle": {"cycle_min_lr": 1e-3, "cycle_max_lr": 2e-3},
    "LRRangeTest": {},
}
FIRST = {
    # With the defaults: the rates of four steps.
    "WarmupLR": [LR * part for part in (0, 0, math.log(2) / math.log(1000), math.log(3) / math.log(1000))],
    "WarmupDecayLR": [1e-3 * part for part in (0, 0, math.log(2) / math.log(1000), math.log(3) / math.log(1000))],
    "WarmupCosineLR": [LR * part for part in (0, 0, math.log(2) / math.log(1000), math.log(3) / math.log(1000))],
    "OneCycle": [1e-3 + 1e-3 * step / 2000 for step in range(4)],
    "LRRangeTest": [1e-3 * (1 + step / 2000) for step in range(4)],
}


@pytest.mark.parametrize("kind", NEEDED)
def test_types(kind: str) -> None:
    """Each with its defaults, in any case."""
    betas = [(0.8 if step == 0 else 0.9 - 0.1 * step / 2000, 0.99) for step in range(4)]
    check(scheduled(kind.upper(), **NEEDED[kind]), FIRST[kind], betas if kind == "OneCycle" else None)


def test_a_skipped_step_does_not_move_the_schedule() -> None:
    config = scheduled("WarmupLR", warmup_num_steps=4, warmup_max_lr=1e-3, warmup_type="linear")
    with started({**config, "fp16": {"enabled": True, "loss_scale": 16}}) as engine:
        rates = []
        for step in range(5):
            train(engine, [loss_of(engine, step, torch.float16) * (1e9 if step == 2 else 1.0)])
            rates.append(engine.get_lr()[0])
        assert engine.skipped_steps == 1
    assert rates == pytest.approx([0.0, 2.5e-4, 2.5e-4, 5e-4, 7.5e-4])


CLIENTS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
}
EXPECTED = {
    "LambdaLR": [LR / (1 + step) for step in range(4)],
    "StepLR": [LR, LR, LR / 2, LR / 2],
    "CosineAnnealingLR": [LR * (1 + math.cos(math.pi * step / 5)) / 2 for step in range(4)],
}


@pytest.mark.parametrize("name", CLIENTS)
def test_a_function_that_makes_the_schedule(name: str) -> None:
    config = without(scheduled("WarmupLR"), "scheduler")
    check(config, EXPECTED[name], lr_scheduler=CLIENTS[name])


@pytest.mark.parametrize("name", CLIENTS)
def test_a_schedule_of_the_clients_optimizer(name: str) -> None:
    model = small_model()
    client = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = CLIENTS[name](client)
    config = without(file(), "optimizer")
    check(config, EXPECTED[name], model=model, optimizer=client, lr_scheduler=schedule)


class Behind:
    """A scheduler that has another inside, and no optimizer of its own, as warmup wrappers do."""

    def __init__(self, inner: Any) -> None:
        self.after_warmup = inner

    def step(self) -> None:
        self.after_warmup.step()


@pytest.mark.parametrize("made_by_function", [False, True])
def test_a_schedule_behind_another_object_drives_our_optimizer(made_by_function: bool) -> None:
    model = small_model()
    client = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = Behind(CLIENTS["StepLR"](client))
    given: Any = (lambda optimizer: schedule) if made_by_function else schedule
    config = without(file(), "optimizer")
    # A function that returns the optimizer is one more way to give it.
    check(config, EXPECTED["StepLR"], model=model, optimizer=lambda parameters: client, lr_scheduler=given)


@pytest.mark.parametrize("kind", ["itself", "inside", "behind", "function"])
@pytest.mark.parametrize("has_client", [False, True])
def test_a_schedule_of_another_optimizer_is_refused(kind: str, has_client: bool) -> None:
    """It would set learning rates that nobody uses, and the engine's would stay as they are."""
    model = small_model()
    foreign, client = (torch.optim.SGD(model.parameters(), lr=LR) for _ in range(2))
    schedule = CLIENTS["StepLR"](foreign)
    good = [lr_scheduler.ConstantLR(client, 0.5, 2)] if has_client else []
    given: Any = {
        "itself": schedule,
        "inside": lr_scheduler.ChainedScheduler([schedule]),
        "behind": Behind([*good, schedule]),
        "function": lambda optimizer: schedule,
    }[kind]
    arguments: dict[str, Any] = (
        {"optimizer": client, "config": without(file(), "optimizer")} if has_client else {"config": file()}
    )
    way = "build it on the optimizer that is passed as optimizer=, or " if has_client else ""
    words = (
        rf"(StepLR|ChainedScheduler) was built on an optimizer \(SGD\) that the engine does not step, .*; {way}pass a "
        r"function: lr_scheduler=lambda optimizer: (StepLR|ChainedScheduler)\(optimizer, \.\.\.\)"
    )
    with pytest.raises(ValueError, match=words):
        longshore.initialize(model=model, lr_scheduler=given, **arguments)
    assert schedule.optimizer is foreign
    assert all(one.optimizer is client for one in good)


def test_what_initialize_returns_is_what_drives_the_engine() -> None:
    result = longshore.initialize(model=small_model(), config=scheduled("WarmupLR"))
    engine, optimizer, loader, schedule = result
    assert engine.lr_scheduler is schedule is result.lr_scheduler
    assert schedule.optimizer is optimizer is engine.optimizer
    assert loader is None
    engine.destroy()


def test_a_schedule_is_given_once() -> None:
    with pytest.raises(ValueError, match="a scheduler is given twice"):
        longshore.initialize(model=small_model(), config=scheduled("WarmupLR"), lr_scheduler=CLIENTS["StepLR"])
    with pytest.raises(TypeError, match="lr_scheduler is a scheduler, or a function from an optimizer to one, not int"):
        longshore.initialize(model=small_model(), config=file(), lr_scheduler=3)
