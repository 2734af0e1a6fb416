"""What is changed of a streamed model is what runs, as in plain PyTorch; a copy that would not be one is refused."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from on_device import device_type
from torch import Tensor, nn

import longshore
from longshore.errors import LongshoreError
from longshore.streaming import Stream

pytestmark = pytest.mark.gpu

WIDTH = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return x @ self.weight


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sin() * self.scale


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(Block() for _ in range(3))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + self.shift

    def generate(self, x: Tensor) -> Tensor:
        return self(x) * self.shift


class Other(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Changes classes until the end of the test."""
    return monkeypatch


def pair(**options: Any) -> tuple[Network, Network, Stream]:
    torch.manual_seed(0)
    model = Network()
    plain = copy.deepcopy(model).to(device_type())
    return plain, model, longshore.stream(model, device_type(), **options)


def batch(seed: int = 1) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device_type())


def check(plain: Network, model: Network, call: Callable[[Network], Tensor] | None = None) -> None:
    results = []
    for each in (plain, model):
        each.zero_grad()
        results.append(each(batch()) if call is None else call(each))
        results[-1].square().sum().backward()
    assert torch.equal(*results)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or theirs.grad is None or torch.equal(ours.grad, theirs.grad.cpu())


def _times(module: nn.Module, factor: float) -> Callable[[Tensor], Tensor]:
    """A forward of a block in the place of its own."""
    return types.MethodType(lambda self, x: self.layer(x).cos() * self.scale * factor, module)


def patch_class(kinds: pytest.MonkeyPatch, _: Network) -> None:
    kinds.setattr(Block, "forward", lambda self, x: self.layer(x).cos() * self.scale)


def patch_class_inside(kinds: pytest.MonkeyPatch, _: Network) -> None:
    kinds.setattr(Layer, "forward", lambda self, x: x @ self.weight.T)


def patch_model_class(kinds: pytest.MonkeyPatch, _: Network) -> None:
    kinds.setattr(Network, "forward", lambda self, x: self.blocks[1](self.blocks[0](x)) - self.shift)


def swap_class(_: pytest.MonkeyPatch, model: Network) -> None:
    for block in model.blocks:
        block.__class__ = Other


def replace_in_a_block(_: pytest.MonkeyPatch, model: Network) -> None:
    for number, block in enumerate(model.blocks):
        block.forward = _times(block, number + 1.5)


def replace_inside(_: pytest.MonkeyPatch, model: Network) -> None:
    layer: Any = model.blocks[1].layer
    layer.forward = lambda x: x @ layer.weight * 2


def wrap(_: pytest.MonkeyPatch, model: Network) -> None:
    """As others wrap a forward: the model's, a block's, and that of a module inside."""
    for each in (model, model.blocks[1], model.blocks[2].layer):
        each.forward = (lambda former: lambda *args: former(*args) * 2)(each.forward)


def wrap_as_others_do(_: pytest.MonkeyPatch, model: Network) -> None:
    """With the attributes of the former, as accelerate's hooks do."""
    for each in (model.blocks[1], model.blocks[2].layer):
        former = each.forward

        @functools.wraps(former)
        def wrapper(*args: Any, former: Any = former) -> Tensor:
            return former(*args) * 2

        each.forward = wrapper


def wrap_twice(kinds: pytest.MonkeyPatch, model: Network) -> None:
    wrap(kinds, model)
    with torch.no_grad():
        model(batch())
    wrap(kinds, model)


def replace_and_put_back(_: pytest.MonkeyPatch, model: Network) -> None:
    block: Any = model.blocks[1]
    former = block.forward
    block.forward = _times(block, 2)
    with torch.no_grad():
        model(batch())
    block.forward = former


def replace_and_delete(_: pytest.MonkeyPatch, model: Network) -> None:
    block: Any = model.blocks[1]
    block.forward = _times(block, 2)
    with torch.no_grad():
        model(batch())
    del block.forward


def wrap_and_swap_class(kinds: pytest.MonkeyPatch, model: Network) -> None:
    """What was wrapped stays what it was."""
    model.blocks[1].forward = (lambda former: lambda *args: former(*args) * 2)(model.blocks[1].forward)
    with torch.no_grad():
        model(batch())
    swap_class(kinds, model)


CHANGES: dict[str, Callable[[pytest.MonkeyPatch, Network], None]] = {
    each.__name__: each
    for each in (
        patch_class, patch_class_inside, patch_model_class, swap_class, replace_in_a_block, replace_inside, wrap,
        wrap_twice, replace_and_put_back, replace_and_delete,
        wrap_and_swap_class, wrap_as_others_do,
    )
}  # fmt: skip


@pytest.mark.parametrize("again", [False, True, "cpu"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_forward_that_changes_is_the_one_that_runs(change: str, again: Any, kinds: pytest.MonkeyPatch) -> None:
    plain, model, handle = pair(checkpoint=again)
    check(plain, model)
    before = model(batch())
    for each in (plain, model):
        CHANGES[change](kinds, each)
    after = model(batch())
    assert torch.equal(before, after) == ("replace_and" in change)  # which is in vain
    for _ in range(2):
        check(plain, model)
    handle.close()
    plain.cpu()
    x = batch().cpu()
    assert torch.equal(model(x), plain(x))
    for ours, theirs in zip(model.modules(), plain.modules(), strict=True):  # but for what is the user's
        assert {*vars(ours)} - {"forward"} == {*vars(theirs)} - {"forward"}
        assert ("forward" in vars(ours)) == ("forward" in vars(theirs)) or change == "replace_and_put_back"


@pytest.mark.parametrize("first", [wrap, swap_class])
def test_a_class_and_a_method_that_change_at_once_are_refused(first: Any, kinds: pytest.MonkeyPatch) -> None:
    """Plain PyTorch wraps the method from before or after the change of the class, and nobody can say which."""
    _, model, handle = pair()
    for change in (first, wrap if first is swap_class else swap_class):
        change(kinds, model)
    with pytest.raises(LongshoreError, match=r"forward of blocks\.1 was replaced .* its class got another one, too"):
        model(batch())
    handle.close()


def test_a_forward_that_calls_the_former_is_computed_again_once() -> None:
    _, model, _ = pair(checkpoint=True)
    for block in model.blocks:
        block.forward = (lambda former: lambda *args: former(*args) * 2)(block.forward)  # type: ignore[method-assign]
    for step in range(1, 3):
        model(batch()).sum().backward()
        assert [block.layer.forwards for block in model.blocks] == [2 * step] * 3  # type: ignore[union-attr]


@pytest.mark.parametrize("way", ["class", "instance"])
def test_another_method_that_is_streamed_changes_too(way: str, kinds: pytest.MonkeyPatch) -> None:
    plain, model, handle = pair()
    check(plain, model, lambda each: each.generate(batch()))
    for each in (plain, model):
        if way == "class":
            kinds.setattr(Network, "generate", lambda self, x: self(x) * 2 + self.shift)
        else:
            each.generate = types.MethodType(lambda self, x: self(x) * 3 + self.shift, each)  # type: ignore[method-assign]
    model(batch())
    check(plain, model, lambda each: each.generate(batch()))
    handle.close()
    check(plain.cpu(), model, lambda each: each.generate(batch().cpu()))


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda each: torch.save(each, io.BytesIO()),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("part", ["", "blocks", "blocks.1", "blocks.1.layer"])
def test_copies_are_refused_by_name(part: str, way: str) -> None:
    plain, model, handle = pair()
    module = model.get_submodule(part)
    with pytest.raises(TypeError, match=f"^{part or 'the model'} is streamed, and a copy would stream the parameters"):
        COPIES[way](module)
    check(plain, model)
    if part != "blocks":
        with pytest.raises(TypeError, match="is streamed, and a copy would"):
            COPIES[way](module.forward)
    handle.close()
    found = copy.copy(module)
    assert type(found) is type(module) and {*vars(found)} == {*vars(module)}
    COPIES[way](module)


def test_a_generate_of_the_model_inside_is_streamed() -> None:
    """A compiled model has what the one inside of it has."""
    model = torch.compile(Network(), backend="eager")
    handle = longshore.stream(model, device_type())
    with torch.no_grad():
        assert model.generate(batch()).device.type == device_type()
    handle.close()
    with torch.no_grad():
        assert model.generate(batch().cpu()).device.type == "cpu"
