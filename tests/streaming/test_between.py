"""What happens to a streamed model between fetch and use, and between forward and backward: seen, or an error."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from on_device import device_type
from streaming.test_chaos import delays
from torch import Tensor, nn
from torch.autograd import forward_ad

import longshore
from longshore.errors import LongshoreError, ParameterError
from longshore.streaming import streams_of

pytestmark = pytest.mark.gpu

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).sin()


class Network(nn.Module):
    """Blocks in an order that is told with each call, and parameters that are in none."""

    def __init__(self, kind: Callable[[], nn.Module] = Block, scaled: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH)) if scaled else None

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
        x = x * 1.0  # an activation before any block is used
        for index in order:
            x = self.blocks[index](x)
        return x if self.scale is None else x * self.scale


@pytest.fixture(autouse=True)
def _on_time() -> Iterator[None]:
    yield
    delays(0, 0, 0)


def pair(kind: Callable[[], nn.Module] = Block, scaled: bool = True, **options: Any) -> tuple[Network, Network]:
    """A plain model on the device, and the same one streamed."""
    torch.manual_seed(0)
    model = Network(kind, scaled)
    plain = copy.deepcopy(model).to(device_type())
    longshore.stream(model, device_type(), **options)
    return plain, model


def batch(seed: int = 1) -> Tensor:
    """As large as a weight, so that one may have the memory of the other."""
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device_type())


def same_gradients(plain: nn.Module, model: nn.Module) -> bool:
    return all(
        (a.grad is None and b.grad is None)
        or (a.grad is not None and b.grad is not None and torch.equal(a.grad.cpu(), b.grad))
        for a, b in zip(plain.parameters(), model.parameters(), strict=True)
    )


# -- what is fetched ahead ----------------------------------------------------


def test_memory_of_a_block_that_was_fetched_ahead_in_vain_waits_for_the_copy() -> None:
    """Layers are dropped at random, so that prefetches are dropped while their copies are under way; the memory of one
    becomes an activation's."""
    plain, model = pair()
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-2) for each in (plain, model)]
    choose = random.Random(1)
    delays(3, 0, 3000)
    for step in range(12):
        order = tuple(index for index in range(4) if choose.random() < 0.6) or (0,)
        losses = []
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            loss = each(batch(step), order).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert torch.equal(*(loss.cpu() for loss in losses)), step


def test_a_block_that_is_left_out_leaves_its_memory_alone() -> None:
    """The second block is fetched ahead, and the call ends without it; the next one's first activation, which waits for
    no copy, takes its memory."""
    plain, model = pair(scaled=False)
    x = batch()
    with torch.no_grad():
        for seed in range(10):
            model(x, (0, 1))
            torch.accelerator.synchronize()
            delays(seed, 0, 5000)
            model(x, (0,))
            found = model(x, (0,))
            torch.accelerator.synchronize()
            delays(0, 0, 0)
            assert torch.equal(found.cpu(), plain(x, (0,)).cpu()), seed


def _clamp(module: nn.Module, _: Any) -> None:
    module.inner.weight.data.clamp_(-0.05, 0.05)  # pyright: ignore


def test_what_a_hook_before_forward_writes_is_fetched() -> None:
    plain, model = pair()
    for each in (plain, model):
        each.blocks[2].register_forward_pre_hook(_clamp)
    for step in range(3):
        for each in (plain, model):
            each(batch(step)).square().mean().backward()
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter -= 0.1 * parameter.grad
    assert same_gradients(plain, model)
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.cpu(), b)


# -- writes between forward and backward --------------------------------------


class KeepsWhatItWrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        y = h.sin()  # which keeps h
        h.mul_(2)
        return y + h


@pytest.mark.parametrize("streamed", [False, True])
def test_an_activation_that_is_written_after_it_was_kept_is_refused(streamed: bool) -> None:
    model = pair(KeepsWhatItWrites)[streamed]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(batch()).sum().backward()


@pytest.mark.parametrize("checkpoint", [False, True, "cpu"])
def test_an_input_that_is_written_before_backward_is_refused(checkpoint: Any) -> None:
    _, model = pair(checkpoint=checkpoint)
    x = batch()
    loss = model.blocks[0](x).square().sum()
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_writes_through_what_shares_no_memory_change_nothing() -> None:
    plain, model = pair(checkpoint="cpu")
    for each in (plain, model):
        x = batch()
        loss = each.blocks[0](x.clone()).square().sum()
        x.zero_()
        loss.backward()
    assert same_gradients(plain, model)


def test_a_parameter_with_other_memory_in_backward_is_refused() -> None:
    _, model = pair()
    loss = model(batch()).square().sum()
    weight = model.blocks[1].inner.weight
    weight.data = weight.data.clone().mul_(2)
    with pytest.raises(RuntimeError, match=r"blocks.1.inner.weight was given other memory .* since forward"):
        loss.backward()


def test_a_parameter_that_is_written_while_its_block_computes_is_refused() -> None:
    _, model = pair()
    scale = model.scale  # the reference from before the call

    def write(*_: Any) -> None:
        with torch.no_grad():
            scale.clamp_(-1, 1)

    handle = model.blocks[0].register_forward_hook(write)
    with pytest.raises(ParameterError, match="parameter scale was written to while its block computed"):
        model(batch())
    handle.remove()
    model(batch()).sum().backward()


# -- gradients ----------------------------------------------------------------


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2, None


class Unused(nn.Module):
    """A function takes the weight, and has no gradient for it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(_NoGradient.apply(x, self.unused))


def test_no_gradient_is_none() -> None:
    plain, model = pair(Unused)
    for each in (plain, model):
        each(batch()).square().sum().backward()
    assert model.blocks[0].unused.grad is None  # zeros would let weight decay move it
    assert same_gradients(plain, model)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("half way")


def test_gradients_of_a_backward_that_raised_are_let_go() -> None:
    plain, model = pair()
    for _ in range(3):
        halfway = _Fails.apply(model.blocks[0](batch()))
        with pytest.raises(RuntimeError, match="half way"):
            model.blocks[1](halfway).sum().backward()
        model.zero_grad()
    (stream,) = streams_of(model.parameters())
    for each in (plain, model):
        each(batch()).square().sum().backward()
    assert same_gradients(plain, model)
    assert not stream._lanes._landing


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).T)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_parameters_keep_their_strides() -> None:
    plain, model = pair(Transposed)
    for each in (plain, model):
        each(batch()).square().sum().backward()
    weight = model.blocks[0].weight
    assert weight.stride() == plain.blocks[0].weight.stride() == (1, WIDTH)
    assert same_gradients(plain, model)


# -- what is refused, and what ends -------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, at its first dual level
def test_torch_func_and_forward_mode_are_refused_and_training_goes_on() -> None:
    plain, model = pair()
    parameters = dict(model.named_parameters())

    def of(x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).sum()

    for call in (
        lambda: torch.func.jvp(of, (batch(),), (batch(),)),
        lambda: torch.func.grad(of)(batch()),
        _dual(model),
    ):
        with pytest.raises(LongshoreError, match="forward-mode derivatives"):
            call()
    for each in (plain, model):
        each(batch()).square().sum().backward()
    assert same_gradients(plain, model)


def _dual(model: nn.Module) -> Callable[[], None]:
    def call() -> None:
        with forward_ad.dual_level():
            model(batch())

    return call


def test_a_forward_that_was_wrapped_since_ends_with_the_stream() -> None:
    """As accelerate wraps it."""
    torch.manual_seed(0)
    model = Network()
    handle = longshore.stream(model, device_type())
    streamed = model.forward
    model.forward = lambda *args: streamed(*args)  # type: ignore[method-assign]
    with pytest.raises(LongshoreError, match="is streamed already"):
        longshore.stream(model, device_type())
    handle.close()
    model(torch.ones(2, WIDTH)).sum().backward()  # on the CPU
    assert model.scale.grad is not None


def test_multihead_attention_is_one_block() -> None:
    layers = nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True) for _ in range(3)))
    plain = copy.deepcopy(layers).to(device_type()).train()
    longshore.stream(layers, device_type(), blocks=200)
    for each in (plain, layers):
        torch.manual_seed(1)
        each(batch().view(1, WIDTH, WIDTH)).sum().backward()
    assert same_gradients(plain, layers)


def _batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))


def _overlapping() -> nn.Module:
    both = torch.randn(WIDTH + 2, WIDTH)
    module = nn.Linear(WIDTH, WIDTH, bias=False)
    module.weight = nn.Parameter(both[:WIDTH])
    module.other = nn.Parameter(both[2:])
    return module


def _summed_in_float32() -> nn.Module:
    module = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
    module.weight.grad_dtype = torch.float32
    return module


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (_batch_norm, {"checkpoint": True}, r"blocks.0.1 keeps running statistics, which would be updated twice"),
        (_overlapping, {}, r"share memory and are not one parameter"),
        (_summed_in_float32, {}, r"blocks.0.weight has grad_dtype = torch.float32"),
    ],
)
def test_models_that_are_refused(kind: Callable[[], nn.Module], options: dict[str, Any], message: str) -> None:
    model = Network(kind)
    with pytest.raises((ValueError, ParameterError), match=message):
        longshore.stream(model, device_type(), **options)
    assert all(each.device.type == "cpu" for each in model.parameters())
