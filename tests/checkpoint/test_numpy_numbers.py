"""Schedules and values that are written with NumPy: a checkpoint has them, and a resumed run computes alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import longshore
from longshore.errors import CheckpointError

FLOAT16: Any = numpy.float16(0.01)
FLOAT32: Any = numpy.float32(0.9)
INTEGER: Any = numpy.int64(10)
MILESTONES: Any = numpy.array([2, 4])
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "a cosine": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: numpy.cos(step / 10)),
    "float32": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, FLOAT32),
    "float32 from a function": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: FLOAT32),
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, MILESTONES, numpy.float64(0.5)),
    "integers": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, INTEGER, FLOAT16),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_an_engine_goes_on(schedule: Callable[[Any], Any], tmp_path: Path) -> None:
    def engine() -> Any:
        torch.manual_seed(0)
        config = longshore.Config(optimizer={"type": "AdamW", "lr": 0.1})  # pyright: ignore[reportArgumentType]
        return longshore.initialize(model=nn.Linear(16, 16), config=config, lr_scheduler=schedule).engine

    found = []
    for stops in (False, True):
        each = engine()
        for step in range(6):
            if step == 3 and stops:
                each.save_checkpoint(tmp_path, client_state={"loss": numpy.mean([1.0, 2.0]), "at": numpy.int64(3)})
                each.destroy()
                each = engine()
                _, client = each.load_checkpoint(tmp_path)
                assert client == {"loss": 1.5, "at": 3} and [*map(type, client.values())] == [float, int]
            each.backward(each(torch.ones(2, 16)).pow(2).sum())
            each.step()
        found.append((each.module.weight.detach().clone(), each.optimizer.param_groups[0]["lr"]))
        each.destroy()
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("lr", [numpy.float32(0.1), numpy.float64(0.1)], ids=["float32", "float64"])
def test_a_loop_goes_on_at_a_rate_in_its_own_precision(lr: Any, tmp_path: Path) -> None:
    """A float32 times a number is rounded to float32, so that it may not come back as a float."""
    rates = []
    for stops in (False, True):
        model = nn.Linear(4, 4)
        optimizer = longshore.AdamW(model.parameters(), lr=lr)
        schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(6):
            if step == 3 and stops:
                longshore.save(tmp_path, model, optimizer, state={"schedule": schedule.state_dict()})
                optimizer = longshore.AdamW(model.parameters(), lr=0.5)
                schedule = lr_scheduler.ExponentialLR(optimizer, 0.5)
                schedule.load_state_dict(longshore.load(tmp_path, model, optimizer)["schedule"])
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1]


@pytest.mark.parametrize("value", [numpy.array([1.0]), numpy.complex64(1), numpy.longdouble(1), numpy.str_("a")])
def test_what_python_has_no_number_for_is_named(value: Any, tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = longshore.AdamW(model.parameters())
    with pytest.raises(CheckpointError, match=r"client_state\['mine'\] is a numpy"):
        longshore.save(tmp_path, model, optimizer, state={"mine": value})
