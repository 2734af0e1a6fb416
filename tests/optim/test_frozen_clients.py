"""Optimizers of torch with frozen parameters, of which some keep states from the constructor on (Adagrad)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import longshore
from longshore.optim.family import ELEMENTWISE

OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"lr": 0.01, "foreach": False} for name in ELEMENTWISE},
    **{name: {"lr": 0.01, "fused": True} for name in ("Adam", "AdamW", "Adagrad")},
    "SGD": {"lr": 0.1, "fused": True},
    "Adagrad, filled": {"lr": 0.1, "initial_accumulator_value": 0.3, "fused": True},
}
WAYS = ["default", "released", "stage 0", "stage 3"]
pytestmark = pytest.mark.filterwarnings("ignore:torch.optim.* has no kernel", "ignore:.*has been initialised")


def network(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[0].weight.requires_grad_(False)
    return model


def client(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    return getattr(torch.optim, kind.partition(",")[0])(model.parameters(), **OPTIONS[kind])


class Run:
    """A model with torch's optimizer, or with the one that took over from it."""

    def __init__(self, kind: str, way: str | None, optimizer: Any = None) -> None:
        self.model = network()
        self.take_over(optimizer or client(kind, self.model), way)

    def take_over(self, optimizer: Any, way: str | None) -> None:
        self.optimizer: Any = optimizer
        self.engine: Any = None
        if way in ("default", "released"):
            self.optimizer = longshore.from_client(self.optimizer, release_gradients=way == "released")
        elif way is not None:
            offload = {"device": "cpu"}
            config = {
                "train_micro_batch_size_per_gpu": 1,
                "gradient_clipping": 0,
                "zero_optimization": {"stage": int(way[-1]), "offload_optimizer": offload},
            }
            self.engine = longshore.initialize(model=self.model, optimizer=self.optimizer, config=config).engine
            self.optimizer = self.engine.optimizer

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            loss = self.model(torch.ones(2, 16)).square().mean()
            if self.engine is not None:
                self.engine.backward(loss)
                self.engine.step()
            else:
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()

    def save_and_load(self, folder: Path) -> None:
        if self.engine is not None:
            self.engine.save_checkpoint(folder, "t")
            self.engine.load_checkpoint(folder, "t")
        else:
            longshore.save(folder, self.model, self.optimizer, "t")
            longshore.load(folder, self.model, self.optimizer)
        self.optimizer.load_state_dict(self.optimizer.state_dict())


def check_same(mine: Run, plain: Run) -> None:
    for (name, ours), theirs in zip(mine.model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.medium
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_frozen_parameter_that_thaws(kind: str, way: str, tmp_path: Path) -> None:
    mine, plain = Run(kind, way), Run(kind, None)
    for run in (mine, plain):
        run.step(2)
    mine.save_and_load(tmp_path)
    for run in (mine, plain):
        run.model[0].weight.requires_grad_(True)
        run.step(2)
    check_same(mine, plain)
    assert not torch.equal(mine.model[0].weight, network()[0].weight)


@pytest.mark.parametrize("way", ["default", "stage 3"])
@pytest.mark.parametrize("kind", [kind for kind in OPTIONS if kind.startswith("Adagrad")])
def test_adagrad_keeps_a_state_of_frozen_parameters(kind: str, way: str, tmp_path: Path) -> None:
    mine, plain = Run(kind, way), Run(kind, None)
    for run in (mine, plain):
        run.step(2)
    mine.save_and_load(tmp_path)
    check_same(mine, plain)


def test_a_sum_that_was_set_for_a_frozen_parameter_counts() -> None:
    runs = []
    for way in ("default", None):
        model = network()
        optimizer = client("Adagrad", model)
        optimizer.state[model[0].weight]["sum"].fill_(5.0)
        run = Run.__new__(Run)
        run.model, run.engine = model, None
        run.optimizer = optimizer if way is None else longshore.from_client(optimizer)
        run.step(1)
        model[0].weight.requires_grad_(True)
        run.step(2)
        runs.append(run)
    check_same(*runs)


LARGEST = torch.finfo(torch.float32).max
SUMS = [0.0, 1e-45, 0.3, 1 / 3, 7, 1e30, LARGEST, math.inf]


@pytest.mark.parametrize("first", SUMS)
@pytest.mark.parametrize("way", [*WAYS, "ours", "ours, released"])
def test_an_initial_sum_is_torchs(way: str, first: float, tmp_path: Path) -> None:
    """Also that of a parameter that thaws after a checkpoint; of an optimizer that was torch's, or not."""
    options: dict[str, Any] = {"lr": 0.1, "initial_accumulator_value": first}
    mine, plain = Run.__new__(Run), Run.__new__(Run)
    for run, how in ((mine, way), (plain, None)):
        run.model = network()
        if how is not None and how.startswith("ours"):
            released = how.endswith("released")
            ours: Any = longshore.Adagrad(run.model.parameters(), **options, release_gradients=released)
            run.take_over(ours, None)
        else:
            run.take_over(torch.optim.Adagrad(run.model.parameters(), **options, fused=True), how)
    for run in (mine, plain):
        run.step(1)
    check_same(mine, plain)
    mine.save_and_load(tmp_path)
    for run in (mine, plain):
        run.step(1)
        run.model[0].weight.requires_grad_(True)
        run.step(2)
    check_same(mine, plain)
    moved = not torch.equal(mine.model[0].weight, network()[0].weight)
    assert moved == (first < 1e20), "with a large sum no step is as large as a unit in the last place"


@pytest.mark.parametrize("way", WAYS)
def test_sums_that_were_set_for_parameters_count(way: str, tmp_path: Path) -> None:
    """For one that is trained and one that thaws; one of them as if it were the initial sum of the other."""
    runs = []
    for each in (way, None):
        model = network()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.25, fused=True)
        optimizer.state[model[0].weight]["sum"].fill_(5.0)
        optimizer.state[model[1].weight]["sum"].zero_()
        run = Run.__new__(Run)
        run.model = model
        run.take_over(optimizer, each)
        run.step(1)
        if each is not None:
            run.save_and_load(tmp_path)
        model[0].weight.requires_grad_(True)
        run.step(2)
        runs.append(run)
    check_same(*runs)


@pytest.mark.parametrize("first", [LARGEST * 1.0001, 1e300, -0.5, math.nan])
def test_an_initial_sum_that_float32_cannot_hold_is_refused_by_name(first: float) -> None:
    with pytest.raises(ValueError, match="initial_accumulator_value"):
        longshore.Adagrad(network().parameters(), initial_accumulator_value=first)
