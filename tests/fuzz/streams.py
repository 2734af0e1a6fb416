"""Models that are streamed, and what a script does with them: the names of the programs of streams.

The plain side runs on the CPU. Layers have only operations with the same bits there and on the simulated accelerator.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from on_device import device_type
from torch import Tensor, nn

import longshore
from longshore.checkpointing import checkpoint
from longshore.engine import activation_checkpointing

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WIDTH = 12
_LETTING_GO_S = 5.0


class Scaled(nn.Module):
    """A norm without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.weight


class Layer(nn.Module):
    """A block of one input; its second layer may be another block's, too."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = Scaled()
        self.one = nn.Linear(WIDTH, 20)
        self.two = nn.Linear(20, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(self.dropout(self.one(self.norm(x)).sin()))


class Gate(nn.Module):
    """A block that is called with one tensor twice."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.two = nn.Linear(WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * 0.5 + self.dropout(self.one(x).tanh() * torch.sigmoid(self.two(y)) * y)


class Attention(nn.Module):
    """A block that takes queries, keys and values, and compares them by identity, as torch's attention does."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = Scaled()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q + self.norm(self.inner(q, k, v)[0])


class Nested(nn.Module):
    """A block that uses its own parameter before and after the block inside of it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.ModuleList([Layer(dropout)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.own(x).sin()
        for block in self.inner:
            x = block(x)
        return self.own(x)


_INPUTS = {"Layer": 1, "Gate": 2, "Attention": 3, "Nested": 1}


class Blocks(nn.Module):
    """An embedding, four blocks in an order that is told with each call, two heads, and a gain in no module of its own.

    Args:
        dtype: one of :data:`DTYPES`.
        of: the class of the blocks.
        tied: the second head has the embedding's weight; two blocks have one weight.
        dropout: in blocks.
        inside: how the model checkpoints its blocks itself: ``"torch"``, ``"reentrant"`` or ``"host"``.
        unscaled: without a buffer, which FSDP2 could not move to the simulated accelerator.
    """

    place = "cpu"
    """The device of its inputs."""

    def __init__(
        self,
        dtype: str = "fp32",
        of: str = "Layer",
        tied: bool = False,
        dropout: float = 0.0,
        inside: str = "",
        unscaled: bool = False,
    ) -> None:
        super().__init__()
        # Classes of this model alone, so that a program may change them.
        self.kind = type(of, (globals()[of],), {})
        self.embedding = nn.Embedding(17, WIDTH)
        self.blocks = nn.ModuleList([self.kind(dropout) for _ in range(4)])
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 17, bias=False)])
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("scale", None if unscaled else torch.tensor(0.5))
        if tied:
            self.heads[1].weight = self.embedding.weight  # pyright: ignore
            if of in ("Layer", "Gate"):
                self.blocks[3].one.weight = self.blocks[1].one.weight  # pyright: ignore
        for seed, parameter in enumerate(self.parameters()):
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.data.copy_(values * 0.3)
        self.to(DTYPES[dtype])
        self.dtype = DTYPES[dtype]
        self.inside = inside
        self.checkpoint = torch.utils.checkpoint.checkpoint
        """By which the model checkpoints its blocks; ``"host"`` is longshore's own there."""

    def encode(self, seed: int, order: Sequence[int] = (0, 1)) -> Tensor:
        """Not its forward: as ``generate`` or ``get_image_features`` of other models."""
        numbers = torch.randint(17, (2, 5), generator=torch.Generator().manual_seed(seed)).to(self.place)
        x = self.embedding(numbers) * (0.5 if self.scale is None else self.scale)
        count = _INPUTS[self.kind.__name__]
        for index in order:
            block, inputs = self.blocks[index], (x,) * count
            if self.inside == "":
                x = block(*inputs)
            else:
                theirs = self.checkpoint is torch.utils.checkpoint.checkpoint
                how = {"use_reentrant": self.inside == "reentrant"} if theirs else {}
                x = self.checkpoint(block, *inputs, **how)
        return x

    def forward(self, seed: int, order: Sequence[int] = (0, 1, 2, 3), head: int = 1) -> Tensor:
        """The loss of a batch."""
        torch.manual_seed(seed)
        x = self.encode(seed, order)
        return self.heads[head](x * self.gain).float().square().mean()


# -- hooks; those that write do what they do once, however often they are called -------------------


def clamping(module: nn.Module, *_: Any) -> None:
    """Before forward: write to the weights where torch cannot see it."""
    for parameter in module.parameters(recurse=False):
        parameter.data.clamp_(-0.2, 0.2)


def halving(module: nn.Module, *_: Any) -> None:
    """After backward: edit the gradients of the module."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def scaling(factor: float) -> Callable[[Tensor], None]:
    """After a gradient was accumulated: edit it."""

    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)

    return hook


def louder(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    """After forward: another output."""
    return output * 1.5


def weaker(_: nn.Module, inputs: Any, __: Any) -> Any:
    """After backward: other gradients of the inputs."""
    return tuple(None if each is None else each * 0.5 for each in inputs)


# -- changes of a model after longshore.stream ----------------------------------------------------


def subclassed(block: nn.Module) -> None:
    """Give a block another class, with another forward."""
    former = type(block)
    block.__class__ = type(former.__name__, (former,), {"forward": lambda self, *x: former.forward(self, *x) * 0.5})


def patched(block: nn.Module) -> None:
    """Change the forward of all blocks of its class."""
    former = type(block).forward
    type(block).forward = lambda self, *x: former(self, *x) * 0.5  # pyright: ignore


def wrapped(block: nn.Module) -> None:
    """Wrap the forward of one block, as accelerate does."""
    former = block.forward
    block.forward = lambda *x: former(*x) * 0.5  # pyright: ignore


def replaced_head(model: Blocks) -> None:
    """Give the model another first head."""
    head = nn.Linear(WIDTH, 5).to(model.gain.dtype)
    for parameter in head.parameters():
        nn.init.constant_(parameter, 0.1)
    model.heads[0] = head


def adapted(model: Blocks, index: int) -> None:
    """Add a parameter to a block, which its forward takes, as an adapter does."""
    block = model.blocks[index]
    block.extra = nn.Parameter(torch.full((WIDTH,), 0.1, dtype=model.gain.dtype))  # pyright: ignore
    block.register_forward_hook(lambda module, _, output: output + module.extra)


def through_a_copy(model: Blocks, seed: int) -> Tensor:
    """The loss by a shallow copy, which has another first head."""
    other = copy.copy(model)
    other._modules = dict(model._modules)
    head = nn.Linear(WIDTH, 5).to(model.gain.dtype)
    for parameter in head.parameters():
        nn.init.constant_(parameter, 0.1)
    other.heads = nn.ModuleList([head.to(model.place), model.heads[1]])
    return other(seed, (0, 1, 2, 3), 0)


def bare(model: Blocks, seed: int) -> Tensor:
    """A parameter of the model's own, outside of forward."""
    return model.encode(seed) * model.gain


class Streams:
    """The models that a program streams to the simulated accelerator."""

    def __init__(self) -> None:
        self._handles: dict[int, Any] = {}
        self._begun: int | None = None

    def begin(self, model: Blocks, **options: Any) -> None:
        self.place(model)
        self._handles[id(model)] = longshore.stream(model, device_type(), **options)

    def place(self, model: Any) -> None:
        """Let a model compute on the device."""
        model.place = f"{device_type()}:{torch.accelerator.current_device_index()}"
        if model.inside == "host":
            activation_checkpointing.install(True)
            model.checkpoint = checkpoint
        if self._begun is None:
            self._begun = self._bytes()

    def again(self, model: Blocks, **options: Any) -> None:
        self._handles.pop(id(model)).close()
        self.begin(model, **options)

    def delays(self, seed: int, kernel_us: int, copy_us: int) -> None:
        """Let kernels and copies take up to so long, at random."""
        import simulated_device

        simulated_device.native().set_delays(seed, kernel_us, copy_us)

    def end(self) -> None:
        if self._begun is not None:
            self.delays(0, 0, 0)
            activation_checkpointing.install(None)
            for each in self._handles.values():
                each.close()
            self._handles.clear()

    def left_bytes(self) -> int:
        """Memory of the device that nobody gave back; after :meth:`end`, where no name of the program is left."""
        if self._begun is None or self._bytes() <= self._begun:
            return 0
        # What a backward raised is held, with what it had under way, until the device's next backward, and autograd's
        # thread lets go of a graph's last tensors when its caller has gone on already: of what is freed then, some is
        # found by the collector alone.
        end = time.monotonic() + _LETTING_GO_S
        while True:
            torch.ones(1, device=device_type(), requires_grad=True).sum().backward()
            gc.collect()
            if self._bytes() <= self._begun or time.monotonic() > end:
                break
            time.sleep(0.01)
        return max(0, self._bytes() - self._begun)

    @staticmethod
    def _bytes() -> int:
        torch.accelerator.synchronize()
        return torch.get_device_module(device_type()).memory_allocated()


_HOOKS = (clamping, halving, scaling, louder, weaker)
_CHANGES = (subclassed, patched, wrapped, replaced_head, adapted, through_a_copy, bare)

NAMES = {each.__name__: each for each in (Blocks, *_HOOKS, *_CHANGES)}
"""The names of programs, beside those of the worlds."""
