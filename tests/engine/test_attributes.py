"""What scripts assign to an engine: it is seen, or it is an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import longshore


class _Model(nn.Module):
    """Its forward reads an attribute that scripts set, as those of curricula and of distillation do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.phase = 1
        self.optimizer = "the model's own attribute of this name"

    def forward(self, batch: Tensor) -> Tensor:
        return self.linear(batch) * self.phase


@pytest.fixture
def engine() -> Iterator[Any]:
    config = longshore.Config(optimizer={"type": "AdamW", "lr": 1e-3}, gradient_clipping=1.0)
    engine = longshore.initialize(model=_Model(), config=config).engine
    yield engine
    engine.destroy()


@pytest.mark.parametrize(
    "name, value, advice",
    [
        ("module", nn.Linear(4, 2), "engine.compile"),
        ("optimizer", None, "initialize"),
        ("config", longshore.Config(), "initialize"),
        ("loss_scaling", None, "fp16"),
        ("gradient_clipping", 2.0, "configuration"),
        ("train_batch_size", 8, "set_train_batch_size"),
        ("gradient_accumulation_steps", 2, "set_gradient_accumulation_steps"),
        ("zero_grad", None, "configuration"),
    ],
)
def test_what_would_not_be_seen_is_refused(name: str, value: Any, advice: str, engine: Any) -> None:
    before = getattr(engine, name)
    with pytest.raises(AttributeError, match=rf"engine\.{name} cannot be assigned.*{advice}"):
        setattr(engine, name, value)
    assert getattr(engine, name) == before


def test_what_is_there_already_may_be_assigned(engine: Any) -> None:
    engine.module, engine.optimizer = engine.module, engine.optimizer


def test_the_loss_scale_cannot_be_assigned(engine: Any) -> None:
    """Gradients that are there have the former scale."""
    with pytest.raises(AttributeError, match="value"):
        engine.loss_scaling.value = 8.0


def test_an_attribute_of_the_model_is_set_on_the_model(engine: Any) -> None:
    batch = torch.ones(3, 4)
    before = engine(batch)
    engine.phase = 3
    assert torch.equal(engine(batch), before * 3) and engine.module.phase == engine.phase == 3


def test_other_attributes_are_the_engines(engine: Any) -> None:
    engine.nickname = "mine"
    assert engine.nickname == "mine" and not hasattr(engine.module, "nickname")


def test_methods_may_be_wrapped_and_schedules_replaced(engine: Any) -> None:
    calls, step = [], engine.step
    engine.step = lambda: (calls.append("step"), step())
    engine.gradient_clipping = lambda: 2.0
    engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.1)
    engine.global_steps = 7
    engine.backward(engine(torch.ones(3, 4)).sum())
    engine.step()
    assert calls == ["step"] and engine.get_lr() == [pytest.approx(1e-4)] and engine.global_steps == 8
    assert engine.gradient_clipping() == 2.0
