"""Steps in which nothing is new: they make nothing for each parameter, and see all that a regular step sees."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import KIND_NAMES, KINDS, Kind, PlainLoop, loss_of, same_weights, twins
from torch import Tensor, nn

import longshore
from longshore.tiles import RepeatedCommit, Tiles

OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


class Steps:
    """How often a store was committed, by its regular commit and by the repeated one."""

    def __init__(self) -> None:
        self.regular = self.repeated = 0


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    counts = Steps()
    regular, repeated = Tiles.commit, RepeatedCommit.commit

    def commit(self: Tiles, *arguments: Any) -> None:
        counts.regular += 1
        regular(self, *arguments)

    def commit_again(self: RepeatedCommit, *arguments: Any) -> None:
        counts.repeated += 1
        repeated(self, *arguments)

    monkeypatch.setattr(Tiles, "commit", commit)
    monkeypatch.setattr(RepeatedCommit, "commit", commit_again)
    return counts


def backward(model: nn.Module, step: int, dtype: torch.dtype) -> None:
    model.zero_grad()
    loss_of(model, step, dtype).backward()


@pytest.mark.parametrize("tile_numel", [None, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_first_step_is_a_regular_one(dtype: torch.dtype, tile_numel: int | None, steps: Steps) -> None:
    plain_model, model = twins(dtype)
    plain = PlainLoop(plain_model.parameters(), **OPTIONS)
    optimizer = longshore.AdamW(model.parameters(), offload=longshore.Offload(tile_numel, threads=2), **OPTIONS)
    for step in range(5):
        for each in (plain_model, model):
            backward(each, step, dtype)
        versions = [parameter._version for parameter in model.parameters()]
        plain.step([parameter.grad for parameter in plain_model.parameters()])
        optimizer.step()
        assert all(parameter._version > old for parameter, old in zip(model.parameters(), versions, strict=True))
        assert same_weights(plain_model, model)
    assert (steps.regular, steps.repeated) == (1, 4)
    assert all(optimizer.state[parameter]["step"] == 5 for parameter in model.parameters())
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], plain.state(0, "exp_avg"))
    assert {entry.applied for entry in optimizer._core.window.entries.values()} == {1}


@pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES)
def test_every_kind(kind: Kind, steps: Steps) -> None:
    plain_model, model = twins()
    plain, optimizer = kind.loop(plain_model.parameters()), kind.make(model.parameters())
    for step in range(4):
        for each in (plain_model, model):
            backward(each, step, torch.float32)
        for loop in (plain.optimizer, optimizer):
            loop.param_groups[0]["lr"] = 1e-3 / (1 + step)
        plain.step([parameter.grad for parameter in plain_model.parameters()])
        optimizer.step()
    assert same_weights(plain_model, model)
    assert steps.repeated == 3


def no_gradient(model: Any, step: int) -> None:
    if step % 2:
        model[0].weight.grad = model[3].bias.grad = None


def other_memory(model: Any, step: int) -> None:
    model[0].weight.data = model[0].weight.data.clone().mul_(1.5)


def other_memory_at_the_old_address(model: Any, step: int) -> None:
    """Written where the version does not count: only the memory is another."""
    weight, address = model[0].weight, model[0].weight.data_ptr()
    values, kept = weight.detach().clone() * 1.5, []
    weight.data = torch.zeros(1)
    while len(kept) < 100:
        kept.append(torch.empty_like(values))
        if kept[-1].data_ptr() == address:
            break
    weight.data = kept[-1].copy_(values)


def written(model: Any, step: int) -> None:
    with torch.no_grad():
        model[2].bias.add_(1.0)


def columns_first(model: Any, step: int) -> None:
    model[0].weight.data = model[0].weight.data.t().contiguous().t()


def columns_of_the_gradient_first(model: Any, step: int) -> None:
    gradient = model[0].weight.grad
    assert gradient is not None
    model[0].weight.grad = gradient.t().contiguous().t()


def expanded_gradient(model: Any, step: int) -> None:
    model[2].bias.grad = torch.ones((), dtype=model[2].bias.dtype).expand(33)


def negated_gradient(model: Any, step: int) -> None:
    gradient = model[2].bias.grad
    assert gradient is not None
    model[2].bias.grad = torch.ops.aten._neg_view(gradient.clone())


def part_of_a_gradient(model: Any, step: int) -> None:
    gradient = model[2].bias.grad
    assert gradient is not None
    model[2].bias.grad = torch.stack([gradient, gradient])[1]


EDITS = [no_gradient, other_memory, other_memory_at_the_old_address, written, columns_first,
         columns_of_the_gradient_first, expanded_gradient, negated_gradient, part_of_a_gradient]  # fmt: skip


# Parameters in float32 are their own masters: what is written there is seen anyway.
@pytest.mark.parametrize("detect_writes", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_what_is_new_is_seen(
    edit: Callable[[Any, int], None], dtype: torch.dtype, detect_writes: bool, steps: Steps
) -> None:
    plain_model, model = twins(dtype)
    plain = PlainLoop(plain_model.parameters(), **OPTIONS)
    offload = longshore.Offload(detect_writes=detect_writes)
    optimizer = longshore.AdamW(model.parameters(), offload=offload, **OPTIONS)
    for step in range(6):
        for each in (plain_model, model):
            backward(each, step, dtype)
            if step > 2:
                edit(each, step)
        for index in range(len(plain.parameters)):
            plain.refresh(index)
        plain.step([parameter.grad for parameter in plain_model.parameters()])
        optimizer.step()
        assert same_weights(plain_model, model)
    assert steps.repeated >= 2


def test_groups_that_change(steps: Steps) -> None:
    """A parameter that leaves, one that comes back in another place, one that thaws, and one that is added."""
    plain_model, model = twins()
    plain_model[3].bias.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    extra, plain_extra = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(16))
    plain = PlainLoop([*plain_model.parameters(), plain_extra], **OPTIONS)
    optimizer = longshore.AdamW(model.parameters(), **OPTIONS)
    group = optimizer.param_groups[0]
    for step in range(12):
        for each in (plain_model, model):
            backward(each, step, torch.float32)
        gradients = [parameter.grad for parameter in plain_model.parameters()]
        if step == 3:
            taken = group["params"].pop(0)
        if 3 <= step < 6:
            gradients[0] = None
        if step == 6:
            group["params"].append(taken)  # pyright: ignore[reportPossiblyUnboundVariable]
        if step == 8:
            for each in (plain_model, model):
                each[3].bias.requires_grad_()
        if step == 10:
            optimizer.add_param_group({"params": [extra]})
        if step >= 10:
            extra.grad = torch.ones(16)
        plain.step([*gradients, extra.grad])
        optimizer.step()
        assert same_weights(plain_model, model), step
    assert torch.equal(extra, plain_extra)
    assert steps.repeated >= 6


def test_state_that_is_loaded(steps: Steps) -> None:
    plain_model, model = twins()
    plain = PlainLoop(plain_model.parameters(), **OPTIONS)
    optimizer = longshore.AdamW(model.parameters(), **OPTIONS)
    for step in range(8):
        for each in (plain_model, model):
            backward(each, step, torch.float32)
        if step == 2:
            weights = [parameter.detach().clone() for parameter in model.parameters()]
            masters = [master.detach().clone() for master in plain.masters]
            saved, plain_saved = copy.deepcopy(optimizer.state_dict()), plain.optimizer.state_dict()
            plain_saved["state"] = {
                key: {name: value.clone() for name, value in entry.items()}
                for key, entry in plain_saved["state"].items()
            }
        if step == 5:
            optimizer.load_state_dict(saved)  # pyright: ignore[reportPossiblyUnboundVariable]
            plain.optimizer.load_state_dict(plain_saved)  # pyright: ignore[reportPossiblyUnboundVariable]
            with torch.no_grad():
                for each in (plain_model, model):
                    for parameter, value in zip(each.parameters(), weights, strict=True):  # pyright: ignore
                        parameter.copy_(value)
                for master, value in zip(plain.masters, masters, strict=True):  # pyright: ignore
                    master.copy_(value)
        plain.step([parameter.grad for parameter in plain_model.parameters()])
        optimizer.step()
        assert same_weights(plain_model, model), step
    assert steps.repeated == 5  # what was handed out may have been edited, until it is known to be gone


def half(model: Any) -> None:
    model[2].half()


def other_shape(model: Any) -> None:
    model[2].bias.data = torch.zeros(34)


def other_shape_of_an_idle_parameter(model: Any) -> None:
    model[2].bias.grad = None
    model[2].bias.data = torch.zeros(34)


def gradient_of_another_shape(model: Any) -> None:
    gradient = model[2].bias.grad
    assert gradient is not None
    gradient.data = torch.zeros(34)


def sparse_gradient(model: Any) -> None:
    model[2].bias.grad = torch.ones(33).to_sparse()


def shared_memory(model: Any) -> None:
    model[2].bias.data = model[2].weight.data


@pytest.mark.parametrize(
    "edit",
    [half, other_shape, other_shape_of_an_idle_parameter, gradient_of_another_shape, sparse_gradient, shared_memory],
    ids=lambda edit: edit.__name__,
)
def test_what_cannot_be_stepped_is_an_error_and_nothing_is_stepped(edit: Callable[[Any], None]) -> None:
    _, model = twins()
    optimizer = longshore.AdamW(model.parameters(), offload=longshore.Offload(tile_numel=100), **OPTIONS)
    for step in range(3):
        backward(model, step, torch.float32)
        optimizer.step()
    backward(model, 3, torch.float32)
    edit(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises((longshore.LongshoreError, ValueError), match=r"2\.(bias|weight)|0\.[23]"):
        optimizer.step()
    assert all(torch.equal(parameter, old) for parameter, old in zip(model.parameters(), before, strict=True))


def test_clipping_and_a_loss_scale(steps: Steps) -> None:
    plain_model, model = twins()
    plain = PlainLoop(plain_model.parameters(), **OPTIONS)
    optimizer = longshore.AdamW(model.parameters(), **OPTIONS)
    for step in range(4):
        for each in (plain_model, model):
            backward(each, step, torch.float32)
        norm = optimizer.clip_grad_norm_(0.5)
        coefficient = float(torch.clamp(0.5 / (norm + 1e-6), max=1.0))
        assert coefficient < 1.0
        plain.step([parameter.grad for parameter in plain_model.parameters()], coefficient)
        optimizer.step()
        assert same_weights(plain_model, model)
    assert steps.repeated == 3


def test_an_interrupt_inside_the_step_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = twins()
    optimizer = longshore.AdamW(model.parameters(), offload=longshore.Offload(tile_numel=100), **OPTIONS)
    for step in range(2):
        backward(model, step, torch.float32)
        optimizer.step()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    backward(model, 2, torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd.graph, "increment_version", interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    with pytest.raises(longshore.BrokenStateError, match="half way"):
        optimizer.step()


def test_parameters_that_share_a_version_counter(steps: Steps) -> None:
    """Slices of one tensor count each other's writes."""
    values = torch.zeros(64)
    many = [nn.Parameter(values[start : start + 16]) for start in range(0, 64, 16)]
    optimizer = longshore.AdamW(many, lr=1e-2)
    for _ in range(4):
        for parameter in many:
            parameter.grad = torch.ones(16)
        optimizer.step()
    assert len({tuple(parameter.tolist()) for parameter in many}) == 1
    assert steps.repeated == 3


def test_no_tensor_is_made_for_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [nn.Parameter(torch.zeros(16)) for _ in range(10)]
    optimizer = longshore.AdamW(many)
    for parameter in many:
        parameter.grad = torch.ones(16)
    made, detach = [], Tensor.detach
    monkeypatch.setattr(Tensor, "detach", lambda self: made.append(1) or detach(self))
    optimizer.step()
    assert made
    made.clear()
    optimizer.step()
    assert not made
