"""What backward computes again has the inputs, parameters and buffers of forward, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from on_device import device_type
from torch import Tensor, nn

import longshore
from longshore.checkpointing import checkpoint, configure, held_host_bytes
from longshore.engine import activation_checkpointing
from longshore.errors import LongshoreError

pytestmark = pytest.mark.gpu

WIDTH = 8


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    activation_checkpointing.install(None)


def batch(seed: int = 1) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device_type())


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if each.grad is None else each.grad.cpu() for each in model.parameters()]


def same(ours: list[Tensor | None], theirs: list[Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(ours, theirs, strict=True)
    )


# -- one tensor in several places -----------------------------------------------------


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [each for part in value for each in tensors_in(part)] if isinstance(value, (list, tuple)) else []


class Asks(nn.Module):
    """Computes something else with a tensor that is its first one than with another one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.asked: list[list[bool]] = []

    def forward(self, q: Tensor, *others: Any, named: Any = None) -> Tensor:
        every = tensors_in([others, named])
        self.asked.append([each is q for each in every])
        y = self.inner(q)
        for weight, each in enumerate(every, 2):
            y = y + (self.inner(each * weight).sin() if each is q else (each * weight).cos())
        return y


def call(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    return function(*args, **kwargs)


def torchs(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


class Network(nn.Module):
    def __init__(self, way: str, how: Callable[..., Tensor] = call) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks: Any = nn.ModuleList(Asks() for _ in range(3))
        self.way, self.how = WAYS[way], how

    def forward(self, x: Tensor) -> Tensor:
        fixed = x
        x = self.first(x)
        for block in self.blocks:
            args, kwargs = self.way(x, fixed)
            x = x + self.how(block, *args, **kwargs)
        return x


WAYS: dict[str, Callable[[Tensor, Tensor], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "twice": lambda x, _: ((x, x), {}),
    "three times": lambda x, _: ((x, x, x), {}),
    "by name too": lambda x, _: ((x,), {"named": x}),
    "in a tuple": lambda x, _: ((x, (x, 0.5)), {}),
    "in containers": lambda x, fixed: ((x,), {"named": {"a": [x, fixed], "b": (fixed, "text")}}),
    "in a container alone": lambda x, fixed: ((x, [fixed, fixed]), {}),
    "without a gradient": lambda _, fixed: ((fixed, fixed), {"named": (fixed,)}),
    "both": lambda x, fixed: ((x, fixed, x, fixed), {"named": fixed}),
    "views": lambda x, _: ((x, x.view_as(x)), {"named": x[:]}),
    "a view twice": lambda x, _: ((x, x.view_as(x), (part := x.T.T), part), {}),
    "equal ones": lambda x, _: ((x, x * 1), {}),
}


def ours_on_host(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    configure(checkpoint_in_cpu=True)
    return checkpoint(function, *args, **kwargs)


def ours(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    configure(checkpoint_in_cpu=False)
    return checkpoint(function, *args, **kwargs)


def a_method(function: Any, *args: Any, **kwargs: Any) -> Tensor:
    """A function that is no module, and its arguments by name in what torch does not see."""
    return torchs(lambda *args: function(*args, **kwargs), *args)


MODES: dict[str, tuple[Callable[..., Tensor], Any, bool]] = {
    "stream": (call, True, True),
    "stream, cpu": (call, "cpu", True),
    "torch's": (torchs, False, True),
    "torch's of a function": (a_method, False, True),
    "ours": (ours, False, True),
    "ours, cpu": (ours_on_host, False, True),
    "ours, not streamed": (ours, False, False),
    "ours, cpu, not streamed": (ours_on_host, False, False),
}
"""What calls the blocks, ``checkpoint=``, and whether the model is streamed."""


@pytest.mark.quick(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_one_tensor_is_one_tensor_again(way: str, mode: str) -> None:
    how, again, streamed = MODES[mode]
    torch.manual_seed(0)
    model = Network(way, how)
    plain = copy.deepcopy(model).to(device_type())
    plain.how = call
    if streamed:
        longshore.stream(model, device_type(), blocks=["Asks"], checkpoint=again)
    else:
        model.to(device_type())
    for step in range(2):
        for each in (plain, model):
            each(batch(step)).square().sum().backward()
    assert same(gradients(model), gradients(plain))
    for ours_, theirs in zip(model.blocks, plain.blocks, strict=True):
        assert ours_.asked == [each for each in theirs.asked for _ in range(2)]  # in forward, and again


@pytest.mark.parametrize("way", ["twice", "three times", "by name too", "in a tuple", "both"])
@pytest.mark.parametrize("mode", ["stream, cpu", "ours, cpu"])
def test_one_tensor_is_copied_to_the_host_once(way: str, mode: str) -> None:
    how, again, _ = MODES[mode]
    model = Network(way, how)
    longshore.stream(model, device_type(), blocks=["Asks"], checkpoint=again)
    loss = model(batch()).sum()
    assert held_host_bytes() == 3 * batch().nbytes * (2 if way == "both" else 1)
    loss.backward()
    del loss
    assert held_host_bytes() == 0


@pytest.mark.parametrize("mode", MODES)
def test_one_that_is_written_afterwards_is_refused(mode: str) -> None:
    how, again, streamed = MODES[mode]
    model = Network("twice", how)
    if streamed:
        longshore.stream(model, device_type(), blocks=["Asks"], checkpoint=again)
    else:
        model.to(device_type())
    x = batch()
    loss = how(model.blocks[0], x, x).square().sum()
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Appends(nn.Module):
    """Writes to a list that it is given, beside a tensor that is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        assert seen[0] is x
        y = self.inner(x).sin()
        seen.append(y)
        return y


def test_a_container_in_forward_is_the_one_that_was_given() -> None:
    model = nn.Sequential(nn.Sequential(Appends(), Appends()))
    longshore.stream(model, device_type(), checkpoint="cpu")
    x = batch()
    seen = [x]
    y = model[0][0](x, seen)
    assert len(seen) == 2 and seen[1] is y


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers: Any = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x, x, x)[0]
        return x


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("again", [False, True, "cpu"])
def test_attention_as_a_block(again: Any, frozen: bool) -> None:
    torch.manual_seed(0)
    model = Attention()
    model.layers[0].in_proj_bias.requires_grad_(not frozen)
    plain = copy.deepcopy(model).to(device_type())
    longshore.stream(model, device_type(), blocks=["MultiheadAttention"], checkpoint=again)
    for each in (plain, model):
        each(batch().view(1, 3, WIDTH)).square().sum().backward()
    assert same(gradients(model), gradients(plain))


# -- what is written between forward and backward -------------------------------------


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sin()


class Outer(nn.Module):
    """Has blocks of its own, a frozen bias, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.inside = nn.ModuleList(Inner() for _ in range(2))
        self.register_buffer("shift", torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) + self.frozen + self.shift
        for each in self.inside:
            x = each(x)
        return x


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(Outer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@torch.no_grad()
def _double(tensor: Any) -> None:
    tensor.mul_(2)


def _other_memory(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data * 2


def _load(model: nn.Module) -> None:
    model.load_state_dict(
        {name: value * 2 for name, value in model.state_dict().items() if "bias" in name}, strict=False
    )


WRITES: dict[str, tuple[Callable[[Any], None], str]] = {
    "a weight": (lambda m: _double(m.blocks[1].layer.weight), "parameter blocks.1.layer.weight is needed"),
    "a bias": (lambda m: _double(m.blocks[1].layer.bias), "parameter blocks.1.layer.bias is needed"),
    "a frozen one": (lambda m: _double(m.blocks[0].frozen), "parameter blocks.0.frozen is needed"),
    "of a block inside": (
        lambda m: _double(m.blocks[1].inside[0].layer.bias),
        "parameter blocks.1.inside.0.layer.bias is needed",
    ),
    "p.data =": (
        lambda m: _other_memory(m.blocks[0].inside[1].layer.bias),
        r"parameter blocks.0.inside.1.layer.bias was given other memory \(p.data = ...\) since forward",
    ),
    "load_state_dict": (_load, "parameter blocks.1.layer.bias is needed"),
    "a buffer": (
        lambda m: _double(m.blocks[0].shift),
        "buffer blocks.0.shift is needed .* would compute blocks.0 again with other values",
    ),
}


def whole(again: Any, blocks: Any = ("Outer", "Inner")) -> tuple[Whole, Whole]:
    torch.manual_seed(0)
    model = Whole()
    plain = copy.deepcopy(model).to(device_type())
    longshore.stream(model, device_type(), blocks=blocks, checkpoint=again)
    return plain, model


@pytest.mark.quick(1)
@pytest.mark.parametrize("blocks", [["Outer"], ["Outer", "Inner"]])
@pytest.mark.parametrize("again", [True, "cpu"])
@pytest.mark.parametrize("write", WRITES)
def test_what_a_block_has_and_is_written_between(write: str, again: Any, blocks: list[str]) -> None:
    plain, model = whole(again, blocks)
    does, words = WRITES[write]
    loss = model(batch()).sum()
    does(model)
    with pytest.raises(RuntimeError, match=words):
        loss.backward()
    does(plain)
    plain.zero_grad()
    model.zero_grad()
    for each in (plain, model):  # forward again, after it, is as without streaming
        each(batch()).sum().backward()
    assert same(gradients(model), gradients(plain))


@pytest.mark.parametrize("again", [False, True, "cpu"])
def test_what_a_block_does_not_have_may_be_written(again: Any) -> None:
    plain, model = whole(again)
    for each in (plain, model):
        loss = each(batch()).sum()
        part = each.blocks[0](batch(2)).sum()
        _double(each.head.bias)
        loss.backward()
        for parameter in each.blocks[1].parameters():
            _double(parameter)
        part.backward()
    assert same(gradients(model), gradients(plain))


def test_what_is_not_kept_may_be_written_where_nothing_is_computed_again() -> None:
    plain, model = whole(False)
    for each in (plain, model):
        loss = each(batch()).sum()
        _double(each.blocks[0].layer.bias)
        loss.backward()
    assert same(gradients(model), gradients(plain))


class Counts(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("table", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        if not len(self.table):
            self.table = torch.ones(WIDTH, device=x.device)  # as tables of positions grow
        return super().forward(x) * self.table


def test_a_block_that_writes_to_its_buffers_is_refused() -> None:
    model = nn.Sequential(nn.Sequential(Counts(), Counts()))
    longshore.stream(model, device_type(), checkpoint=True)
    with pytest.raises(LongshoreError, match=r"^0\.0 writes to its buffer 0\.0\.calls in forward, and would"):
        model(batch())
    model.eval()
    model(batch()).sum().backward()
    assert all(each.grad is not None for each in model.parameters())
