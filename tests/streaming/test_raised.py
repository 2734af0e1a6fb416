"""A call or a backward that raised loses nothing: whoever skips the batch goes on as with plain PyTorch."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
import transformers
from on_device import device_type
from streaming.test_stream import Pair, plainly, tokens
from support import PlainLoop
from torch import Tensor, nn

import longshore
from longshore.errors import LongshoreError

pytestmark = pytest.mark.gpu

WIDTH = 16


# -- a batch that was left on the CPU ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("checkpoint", "checkpointed"), [(False, None), ("cpu", None), (False, "reentrant")])
def test_indices_on_the_host_are_refused_in_forward(checkpoint: Any, checkpointed: str | None) -> None:
    pair = Pair(checkpoint=checkpoint, checkpointed=checkpointed)
    pair.step(plainly, 0)
    words = rf"^embedding was called with a tensor on cpu, and a streamed model computes on {device_type()}:0"
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(LongshoreError, match=words):
            pair.model(tokens(1).cpu())
    for step in range(1, 3):
        pair.step(plainly, step)


@pytest.mark.parametrize("release", [False, True])
def test_a_batch_for_a_llama_on_the_host(release: bool) -> None:
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 64}
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=3, use_cache=False))
    plain = copy.deepcopy(model).to(device_type())
    reference = PlainLoop([nn.Parameter(each.detach().cpu().clone()) for each in plain.parameters()], lr=1e-2)
    longshore.stream(model, device_type())
    optimizer = longshore.AdamW(model.parameters(), lr=1e-2, release_gradients=release)
    skipped = 0
    for seed in range(4):
        batch = torch.randint(64, (2, 6), generator=torch.Generator().manual_seed(seed))
        there = batch.to(device_type())
        if seed % 2:
            with pytest.raises(
                LongshoreError, match=r"^model.embed_tokens was called with a tensor on cpu, and a streamed"
            ):
                model(input_ids=batch, labels=batch)
            skipped += 1
            continue
        for each in (model, plain):
            each(input_ids=there, labels=there).loss.backward()
        reference.step([each.grad.cpu() for each in plain.parameters() if each.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        plain.zero_grad()
        with torch.no_grad():
            for mine, ours, theirs in zip(reference.parameters, model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(mine, ours)
                theirs.copy_(mine)
    assert skipped == 2


# -- a backward that raised while the device's thread of autograd computes ---------------------------------------------


class SkippedError(Exception):
    pass


class Slow(nn.Module):
    """A block that backward, on the device's thread of autograd, is still computing again when the error is caught."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.entered: threading.Event | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).sin()
        if self.entered is not None and threading.current_thread() is not threading.main_thread():
            self.entered.set()
            self.entered = None
            time.sleep(0.3)  # as of a block that reads a file
        return x + self.linear(x)


class Network(nn.Module):
    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.whole = whole
        """Whether it lets backward compute all of its blocks again at once, by itself."""
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Slow() for _ in range(4))

    def forward(self, x: Tensor, order: Sequence[int] = (0, 1, 2, 3)) -> Tensor:
        if self.whole:
            return self.last(torch.utils.checkpoint.checkpoint(self.inner, x, order, use_reentrant=False))
        return self.last(self.inner(x, order))

    def inner(self, x: Tensor, order: Sequence[int]) -> Tensor:
        x = self.first(x)
        for index in order:
            x = self.blocks[index](x)
        return x


def batch(seed: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device_type())


class Interrupted:
    """A streamed model and the same plain one, right after a backward that raised on the thread that called it, while
    the device's thread computes block ``slow`` again."""

    def __init__(self, checkpoint: Any = True, slow: int = 1) -> None:
        torch.manual_seed(0)
        self.model = Network(whole=not checkpoint)
        self.plain = copy.deepcopy(self.model).to(device_type())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.handle = longshore.stream(self.model, device_type(), checkpoint=checkpoint)
        self.check(0)
        entered = threading.Event()

        def skip(_: Tensor) -> None:
            assert entered.wait(10)
            raise SkippedError

        block: Any = self.model.blocks[slow]
        block.entered = entered
        hook = self.model.last.weight.register_hook(skip)
        loss = self.model(batch(1)).square().sum()
        with pytest.raises(SkippedError):
            loss.backward()
        hook.remove()
        self.optimizer.zero_grad()

    def check(self, seed: int, *rest: Any) -> None:
        """Check that both have the same gradients."""
        for each in (self.model, self.plain):
            each(batch(seed), *rest).square().sum().backward()
        for ours, theirs in zip(self.parameters, self.plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            assert ours.grad is None or (theirs.grad is not None and torch.equal(ours.grad, theirs.grad.cpu()))
        self.optimizer.zero_grad()
        self.plain.zero_grad()

    @property
    def parameters(self) -> list[Tensor]:
        return self.optimizer.param_groups[0]["params"]

    def write_unseen(self) -> None:
        for parameter in (*self.parameters, *self.plain.parameters()):
            parameter.data.mul_(0.5)


@pytest.mark.parametrize("slow", [0, 1, 3])
@pytest.mark.parametrize("checkpoint", [False, True, "cpu"])
def test_the_next_batch_trains_after_a_backward_that_raised(checkpoint: Any, slow: int) -> None:
    both = Interrupted(checkpoint, slow)
    for step in range(2, 5):
        both.check(step)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 3), (1,)])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_values_written_after_a_backward_that_raised_are_used(checkpoint: Any, order: tuple[int, ...]) -> None:
    both = Interrupted(checkpoint)
    for step in range(2):
        both.write_unseen()
        both.check(2 + step, order)
    both.check(5)


def test_a_block_in_use_as_the_next_call_begins_is_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where backward goes on to another block of one checkpoint just after the call has found none in use."""
    both = Interrupted()
    both.write_unseen()
    with monkeypatch.context() as patched:
        patched.setattr(both.handle, "_backward_ends", lambda: True)
        both.check(2, (1,))
    both.check(3)


def test_a_model_is_evaluated_after_a_backward_that_raised() -> None:
    both = Interrupted()
    with torch.no_grad():
        assert torch.equal(both.model(batch(2)), both.plain(batch(2)))
        assert torch.equal(both.model.blocks[1](batch(2)), both.plain.blocks[1](batch(2)))
    both.check(3)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_stream_is_closed_after_a_backward_that_raised(checkpoint: Any) -> None:
    both = Interrupted(checkpoint)
    both.handle.close()
    assert all(each.device.type == "cpu" for each in both.model.parameters())
    both.plain.cpu()
    assert torch.equal(both.model(batch(2).cpu()), both.plain(batch(2).cpu()))
    both.handle = longshore.stream(both.model, device_type(), checkpoint=checkpoint)
    both.plain.to(device_type())
    both.check(3)
