"""A float32 parameter in host memory is its own master: no copy of it is kept, and nothing written to it is lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import longshore
from tests.support import PlainLoop, loss_of, same_weights, twins

NUMEL = 1000


def stepped(optimizer_of: type, dtype: torch.dtype = torch.float32, **options: object) -> longshore.Optimizer:
    parameter = nn.Parameter(torch.ones(NUMEL, dtype=dtype))
    optimizer = optimizer_of([parameter], **options)
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("name", "arrays", "options"),
    [
        ("AdamW", 2, {}),
        ("Lion", 1, {}),
        ("SGD", 0, {"lr": 0.1}),
        ("SGD", 1, {"lr": 0.1, "momentum": 0.9}),
        ("Adagrad", 1, {}),
    ],
)
def test_the_states_alone_take_memory(name: str, arrays: int, options: dict[str, object]) -> None:
    kind = getattr(longshore, name)
    numel = -(-NUMEL // 16) * 16  # what aligns them
    assert stepped(kind, **options).host_bytes()["state"] == 4 * arrays * numel
    assert stepped(kind, torch.bfloat16, **options).host_bytes()["state"] == 4 * (1 + arrays) * numel


def test_a_float32_parameter_on_a_device_has_a_master_on_the_host() -> None:
    offload = longshore.Offload(transfer=longshore.SimulatedTransfer())
    assert stepped(longshore.Lion, offload=offload).host_bytes()["state"] == 2 * 4 * NUMEL // 16 * 16 + 2 * 4 * 8


@pytest.mark.parametrize("memory", [0, "100%"])
def test_writes_while_a_tile_is_stepped_ahead(memory: int | str) -> None:
    """A step ahead reads the master as it was before backward, so there it is kept apart from the parameter."""
    plain_model, model = twins()
    plain = PlainLoop(plain_model.parameters(), lr=1e-2)
    offload = longshore.Offload(tile_numel=64, speculation_memory=memory)
    optimizer = longshore.AdamW(model.parameters(), lr=1e-2, release_gradients=True, offload=offload)
    numel = sum(tile.layout.buffer_numel for tile in optimizer._core.members.store.tiles)
    for step in range(5):
        for each in (plain_model, model):
            loss_of(each, step).backward()
            each[0].weight.data[0] = 0.25  # after its tile was stepped ahead
        plain.refresh(0)
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(plain_model, model), step
    assert optimizer.host_bytes()["state"] == (12 if memory else 8) * numel


def test_new_memory_and_other_layouts() -> None:
    plain_model, model = twins()
    plain = PlainLoop(plain_model.parameters(), lr=1e-2)
    optimizer = longshore.AdamW(model.parameters(), lr=1e-2)
    for step in range(6):
        for each in (plain_model, model):
            if step == 2:  # other memory
                each[0].weight.data = each[0].weight.detach() * 0.5
            if step == 4:  # a transposed one, of which the step works on a copy
                each[0].weight.data = each[0].weight.detach().t().contiguous().t()
            loss_of(each, step).backward()
        plain.refresh(0)
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(plain_model, model), step
        assert torch.equal(optimizer._core.members.store.states.read(0, "master"), model[0].weight.detach().reshape(-1))


@pytest.mark.parametrize("first", [0, 2])
def test_a_gradient_in_the_memory_of_its_parameter(first: int) -> None:
    results = []
    for kind in (torch.optim.SGD, longshore.SGD):
        parameters = [nn.Parameter(torch.arange(100.0)), nn.Parameter(torch.ones(3, 5))]
        optimizer = kind(parameters, lr=0.1, momentum=0.9)
        for step in range(4):
            for each in parameters:
                each.grad = each.data if step >= first else torch.ones_like(each)
            optimizer.step()
        results.append(torch.cat([each.detach().view(-1) for each in parameters]))
    assert torch.equal(*results)


def test_the_state_of_a_bfloat16_model_does_not_change_a_float32_model() -> None:
    """As everywhere: the parameter is the user's, and the master follows it."""
    parameter, other = nn.Parameter(torch.ones(NUMEL)), nn.Parameter(torch.full((NUMEL,), 3.0, dtype=torch.bfloat16))
    optimizer, giver = longshore.AdamW([parameter]), longshore.AdamW([other])
    other.grad = torch.ones_like(other)
    giver.step()
    assert "master" in giver.state[other]
    optimizer.load_state_dict(giver.state_dict())
    assert parameter.eq(1).all()
    twin = nn.Parameter(torch.ones(NUMEL))
    plain = torch.optim.AdamW([twin], fused=True)
    state = {key: value for key, value in giver.state_dict()["state"][0].items() if key != "master"}
    plain.load_state_dict({"state": {0: state}, "param_groups": plain.state_dict()["param_groups"]})
    for each, by in ((parameter, optimizer), (twin, plain)):
        each.grad = torch.ones(NUMEL)
        by.step()
    assert torch.equal(parameter[: NUMEL // 16 * 16], twin[: NUMEL // 16 * 16])


@pytest.mark.parametrize("part", [slice(None), slice(1 << 16, None)], ids=["whole", "from the middle on"])
def test_gradients_in_the_memory_of_other_parameters(part: slice) -> None:
    """torch steps one parameter after the other: the second reads what the first has become. Each is several pieces of
    work, which threads take at the same time."""
    models = []
    for kind, options in ((longshore.SGD, {}), (torch.optim.SGD, {"fused": True})):
        torch.manual_seed(0)
        p, q = (nn.Parameter(torch.randn(1 << 20)) for _ in range(2))
        views = [nn.Parameter(each.data[part]) for each in (p, q)]  # parameters in the memory of two tensors
        optimizer = kind(views, lr=0.1, **options)
        other = [each.data[: views[0].numel()] for each in (p, q)]
        for _ in range(5):
            views[0].grad, views[1].grad = other[1], other[0]
            optimizer.step()
        models.append(views)
    for ours, plain in zip(*models, strict=True):
        assert torch.equal(ours, plain)
