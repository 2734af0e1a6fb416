"""What else is done with a model that is streamed: right, or refused in a sentence that says what to do instead."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from on_device import device_type
from ranks import Ranks
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import longshore
from longshore.errors import LongshoreError, ParameterError

pytestmark = pytest.mark.gpu

WIDTH = 8
aten = torch.ops.aten


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * torch.full((WIDTH,), 0.5, device=x.device)).sin() * self.scale


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks: Any = nn.ModuleList(Block() for _ in range(3))
        self.shift = nn.Parameter(torch.ones(WIDTH))
        self.selects: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.selects is None:
                x = block(x)
            else:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=self.selects)
        return x + self.shift

    def encode(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.first(x))

    def encode_with_own(self, x: Tensor) -> Tensor:
        return self.first(x) + self.shift


def pair(blocks: Any = "auto") -> tuple[Network, Network]:
    torch.manual_seed(0)
    model = Network()
    plain = copy.deepcopy(model).to(device_type())
    longshore.stream(model, device_type(), blocks=blocks)
    return plain, model


def batch(seed: int = 1) -> Tensor:
    """As large as a weight, so that one may be taken for the other."""
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device_type())


def same_gradients(plain: nn.Module, model: nn.Module) -> bool:
    return all(
        (a.grad is None and b.grad is None)
        or (a.grad is not None and b.grad is not None and torch.equal(a.grad.cpu(), b.grad.cpu()))
        for a, b in zip(plain.parameters(), model.parameters(), strict=True)
    )


# -- selective checkpointing --------------------------------------------------------


def saves(*operators: Any) -> Callable[..., CheckpointPolicy]:
    return lambda _, operator, *__, **___: (
        CheckpointPolicy.MUST_SAVE if operator in operators else CheckpointPolicy.PREFER_RECOMPUTE
    )


def saves_all_but(*operators: Any) -> Callable[..., CheckpointPolicy]:
    return lambda _, operator, *__, **___: (
        CheckpointPolicy.PREFER_RECOMPUTE if operator in operators else CheckpointPolicy.PREFER_SAVE
    )


POLICIES = {
    "matrices": saves(aten.mm.default, aten.addmm.default),
    "what fetching does too": saves(aten.empty_like.default, aten.full.default, aten.copy_.default),
    "a list": [aten.sin.default, aten.full.default],
    "all but views": saves_all_but(aten.t.default),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_selective_checkpointing(policy: str) -> None:
    plain, model = pair()
    for each in (plain, model):
        each.selects = functools.partial(create_selective_checkpoint_contexts, POLICIES[policy])
    for step in range(3):
        for each in (plain, model):
            each.zero_grad()
            each(batch(step)).square().sum().backward()
        assert same_gradients(plain, model)


@pytest.mark.parametrize("policy", [saves_all_but(), saves(aten.t.default), [aten.t.default]])
def test_selective_checkpointing_that_keeps_parameters_is_refused(policy: Any) -> None:
    plain, model = pair()
    model.selects = functools.partial(create_selective_checkpoint_contexts, policy)
    with pytest.raises(LongshoreError, match=r"keeps a view of parameter blocks.0.layer.weight, .* PREFER_RECOMPUTE"):
        model(batch())
    model.selects = None
    for each in (plain, model):
        each(batch()).square().sum().backward()
    assert same_gradients(plain, model)


# -- export -------------------------------------------------------------------------


EXPORTS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "torch.export": (
        lambda m: torch.export.export(m, (batch(),)),
        r"^forward of the model is streamed, .*call close\(\)",
    ),
    "torch.export, strict": (
        lambda m: torch.export.export(m, (batch(),), strict=True),
        r"to export the model, call close\(\) of its stream first",
    ),
    "torch.jit.trace": (
        lambda m: torch.jit.trace(m, (batch(),)),
        r"^torch.jit.trace and .* call close\(\) of the stream",
    ),
    "torch.jit.script": (torch.jit.script, r"^forward of the model is streamed, .*call close\(\)"),
    "torch.onnx.export": (
        lambda m: torch.onnx.export(m, (batch(),), io.BytesIO(), dynamo=False),
        r"^torch.jit.trace and torch.onnx.export would",
    ),
}


@pytest.mark.parametrize("way", EXPORTS)
@pytest.mark.filterwarnings("ignore")  # torch's own, of what is deprecated
def test_an_export_is_refused(way: str) -> None:
    plain, model = pair()
    does, words = EXPORTS[way]
    with pytest.raises(Exception, match=words):
        does(model)
    for each in (plain, model):
        each(batch()).square().sum().backward()
    assert same_gradients(plain, model)


# -- other parameters ---------------------------------------------------------------


def swap(model: Network) -> None:
    model.blocks[1] = Block()


def add(model: Network) -> None:
    model.blocks.append(Block())


def swap_inside(model: Network) -> None:
    model.blocks[2].layer = nn.Linear(WIDTH, WIDTH)


def add_a_parameter(model: Network) -> None:
    block = model.blocks[1]
    block.more = nn.Parameter(torch.full((WIDTH,), 2.0))
    block.forward = lambda x: x * block.more


def add_a_buffer(model: Network) -> None:
    model.blocks[1].register_buffer("mask", torch.full((WIDTH,), 2.0))
    model.blocks[1].forward = lambda x: x * model.blocks[1].mask


LATER: dict[str, tuple[Callable[[Network], None], str]] = {
    "a module swapped": (swap, "parameter blocks.1.scale came after"),
    "a module added": (add, "parameter blocks.3.scale came after"),
    "one inside of a block": (swap_inside, "parameter blocks.2.layer.weight came after"),
    "a parameter": (add_a_parameter, "parameter blocks.1.more came after"),
    "a buffer": (add_a_buffer, "buffer blocks.1.mask came after"),
}


@pytest.mark.parametrize("later", LATER)
def test_what_comes_later_is_named(later: str) -> None:
    """On the CPU it is refused; on the device it trains there, and stays."""
    plain, model = pair()
    does, words = LATER[later]
    for each in (plain, model):
        torch.manual_seed(2)
        does(each)
    with pytest.raises(LongshoreError, match=rf"^{words} longshore.stream.* is on cpu, .* call close\(\) .* again"):
        model(batch())
    known = {id(each) for each in model.parameters() if longshore.streaming.streams_of([each])}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, each in held.items():
                if id(each) not in known and each is not None:
                    moved = each.detach().to(device_type())
                    held[name] = nn.Parameter(moved) if held is module._parameters else moved
    plain.to(device_type())
    for each in (plain, model):
        each(batch()).square().sum().backward()
    assert same_gradients(plain, model)


def test_an_adapter_that_comes_later_is_named() -> None:
    peft = pytest.importorskip("peft")
    plain, model = pair()
    (stream,) = longshore.streaming.streams_of(model.parameters())
    config = peft.LoraConfig(target_modules=["layer"], r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    named = r"parameter \S*blocks.0.layer.lora_A.default.weight came after .* adapters \(LoRA\)"
    with pytest.raises(LongshoreError, match=named):
        adapted(batch())
    stream.close()
    plain = copy.deepcopy(adapted).to(device_type())
    longshore.stream(adapted, device_type())
    for each in (plain, adapted):
        each(batch()).square().sum().backward()
    assert same_gradients(plain, adapted) and any(each.grad is not None for each in adapted.parameters())


class Reaches(nn.Module):
    """Uses a weight of a module inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.two(x), self.one.weight)


def test_a_parameter_of_another_block_is_explained() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Reaches(), Reaches())
    plain = copy.deepcopy(model).to(device_type())
    handle = longshore.stream(model, device_type(), blocks=["Linear"])
    with pytest.raises(
        LongshoreError, match=r"^0 uses a tensor that is not on .*: a parameter .* around both in blocks="
    ):
        model(batch())
    handle.close()
    longshore.stream(model, device_type(), blocks=["Reaches"])
    for each in (plain, model):
        each(batch()).square().sum().backward()
    assert same_gradients(plain, model)


def test_inputs_on_another_device_are_named() -> None:
    plain, model = pair()
    with pytest.raises(LongshoreError, match=rf"^first was called with a tensor on cpu, .*batch.to\('{device_type()}"):
        model(batch().cpu())
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|size mismatch") as raised:  # is as it was
        model(batch()[:, :3])
    assert type(raised.value) is RuntimeError
    for each in (plain, model):
        each(batch()).square().sum().backward()
    assert same_gradients(plain, model)


def test_a_method_that_is_not_forward_calls_modules() -> None:
    plain, model = pair()
    for each in (plain, model):
        each.encode(batch()).square().sum().backward()
    assert same_gradients(plain, model)
    with pytest.raises(RuntimeError, match="same device"):  # a parameter of its own is on the host
        model.encode_with_own(batch())


# -- other streams ------------------------------------------------------------------


def test_streams_inside_of_one_another_are_refused() -> None:
    model = Network()
    handle = longshore.stream(model.blocks, device_type(), blocks=["Block"])
    words = r"^blocks, a module of Network, is streamed already; call close\(\) of its stream first"
    with pytest.raises(LongshoreError, match=words):
        longshore.stream(model, device_type())
    handle.close()
    handle = longshore.stream(model, device_type())
    with pytest.raises(LongshoreError, match=r"^ModuleList is streamed already; call close\(\)"):
        longshore.stream(model.blocks, device_type(), blocks=["Block"])
    handle.close()


def test_a_model_that_is_moved_is_refused() -> None:
    _, model = pair()
    model.to(device_type())
    with pytest.raises(ParameterError, match=r"parameter shift was replaced after .*no model.to"):
        model(batch())


def _sharded_later(of: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Network()
    longshore.stream(model, device_type())
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.blocks[1] if of == "a block" else model, mesh=mesh)
    name = "blocks.1.scale" if of == "a block" else "shift"
    with pytest.raises(ParameterError, match=rf"{name} was replaced .*fully_shard and longshore.stream exclude each"):
        model(batch())


@pytest.mark.parametrize("of", ["a block", "the model"])
def test_fully_shard_afterwards_is_refused(of: str, two_devices: Ranks) -> None:
    two_devices(_sharded_later, of)


def test_without_an_accelerator_it_says_what_there_is_instead() -> None:
    with pytest.raises(
        ValueError, match=r"and cpu is none of this machine: leave it out .* plan --stream --gpu .* demo"
    ):
        longshore.stream(Network(), "cpu")
