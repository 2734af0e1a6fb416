from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import PlainLoop, loss_of, small_model
from torch import nn

from engine.files import OPTIONS, assert_same, file, gradients_of, started, train
from longshore.errors import ParameterError

CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "half": lambda engine: engine.half(),
    "bfloat16": lambda engine: engine.bfloat16(),
    "double": lambda engine: engine.double(),
    "to": lambda engine: engine.to(torch.bfloat16),
    "type": lambda engine: engine.type(torch.float64),
    "meta": lambda engine: engine.to("meta"),
    "inside": lambda engine: nn.Sequential(engine).to("cpu", torch.float16),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_is_refused_at_once_and_changes_nothing(name: str) -> None:
    model, twin = small_model(), small_model()
    loop = PlainLoop(twin.parameters(), **OPTIONS)
    with started(file(), model) as engine:
        for step in range(2):
            engine.backward(loss_of(engine, step))
            with pytest.raises(
                ParameterError, match=r"the engine steps 0\.weight as torch\.float32 on cpu, .* make it"
            ):
                CONVERSIONS[name](engine)
            engine.step()
            loop.step(gradients_of(twin, [loss_of(twin, step)]))
            assert_same(model, twin, step)


@pytest.mark.parametrize(
    "same", [lambda engine: engine.to("cpu"), lambda engine: engine.float(), lambda engine: engine.cpu()]
)
def test_what_changes_nothing_is_allowed_even_within_a_window(same: Callable[[Any], Any]) -> None:
    model, twin = small_model(), small_model()
    loop = PlainLoop(twin.parameters(), **OPTIONS)
    with started(file(), model) as engine:
        for step in range(2):
            assert same(engine) is engine
            engine.backward(loss_of(engine, step))
            assert same(engine) is engine
            engine.step()
            loop.step(gradients_of(twin, [loss_of(twin, step)]))
            assert_same(model, twin, step)


def test_buffers_and_parameters_that_nobody_steps_are_the_users() -> None:
    model = small_model()
    model.register_buffer("scale", torch.ones(3))
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    with started(file(bf16={"enabled": True, "check_grad_overflow": False}), model) as engine:
        assert engine.bfloat16() is engine
        assert model.scale.dtype == torch.bfloat16
        train(engine, [loss_of(engine, 0, torch.bfloat16)])


def test_after_destroy_the_model_is_an_ordinary_one() -> None:
    model = small_model()
    with started(file(), model) as engine:
        engine.destroy()
        engine.half()
    assert all(parameter.dtype == torch.float16 for parameter in model.parameters())
