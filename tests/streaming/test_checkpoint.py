"""Blocks of a streamed model that backward computes again, with their inputs on the device or on the host."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from on_device import device_type
from support import PlainLoop
from torch import Tensor, nn

import longshore
from longshore.checkpointing import held_host_bytes
from longshore.errors import LongshoreError

pytestmark = pytest.mark.gpu

WIDTH, ROWS = 24, 64


class Block(nn.Module):
    """Takes tensors by name and in a container, returns two, has dropout, and counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.forwards = 0

    def forward(self, x: Tensor, scales: tuple[Tensor, float], *, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.forwards += 1
        hidden = self.dropout(self.one(x).sin())
        y = x + scales[1] * scales[0] * self.two(hidden)
        return (y if shift is None else y + shift), hidden.mean()


class Network(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.shift = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x, extra = self.embedding(x), torch.zeros((), device=x.device)
        for block in self.blocks:
            x, more = block(x, (x.detach().abs().mean(), 0.5), shift=self.shift)
            extra = extra + more
        return self.head(x).square().mean() + extra


def batch(seed: int, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed)).to(device_type())


@pytest.mark.medium
@pytest.mark.parametrize("checkpoint", [True, "cpu"])
@pytest.mark.parametrize("release", [False, True])
def test_gradients_are_those_of_the_plain_model(checkpoint: Any, release: bool) -> None:
    torch.manual_seed(1)
    model = Network()
    plain = copy.deepcopy(model).to(device_type())
    handle = longshore.stream(model, device_type(), checkpoint=checkpoint)
    optimizer = longshore.AdamW(model.parameters(), lr=1e-2, release_gradients=release)
    reference = PlainLoop([each.detach().cpu().clone().requires_grad_() for each in plain.parameters()], lr=1e-2)
    for step in range(3):
        for each in (model, plain):
            torch.manual_seed(step)  # of the dropout
            torch.get_device_module(torch.device(device_type())).manual_seed_all(step)
            losses = [each(batch(10 * step + part)) for part in range(2)]  # two forwards before two backwards
            for loss in losses:
                loss.backward()
            with torch.no_grad():  # nothing is computed again
                each(batch(99))
        gradients = [each.grad.cpu() for each in plain.parameters() if each.grad is not None]
        reference.step(gradients)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, theirs in zip(plain.parameters(), reference.parameters, strict=True):
                mine.copy_(theirs)
                mine.grad = None
        for ours, theirs in zip(model.parameters(), reference.parameters, strict=True):
            assert torch.equal(ours, theirs)
    assert {block.forwards for block in model.blocks} == {3 * (2 * 2 + 1)}  # type: ignore[comparison-overlap]
    assert {block.forwards for block in plain.blocks} == {3 * 3}  # type: ignore[comparison-overlap]
    handle.close()
    model.to(device_type())(batch(0)).backward()  # a plain model again
    assert {block.forwards for block in model.blocks} == {3 * 5 + 1}  # type: ignore[comparison-overlap]


def most_bytes(checkpoint: Any, rows: int) -> tuple[int, int]:
    """The most that the device's allocator gives in a forward and a backward, and bytes of inputs on the host."""
    model = Network(8)
    handle = longshore.stream(model, device_type(), checkpoint=checkpoint)
    allocator = torch.get_device_module(torch.device(device_type()))
    for _ in range(2):
        torch.accelerator.synchronize()
        before = allocator.memory_allocated()
        allocator.reset_peak_memory_stats()
        loss = model(batch(0, rows))
        held = held_host_bytes()
        loss.backward()
        torch.accelerator.synchronize()
        model.zero_grad()
        del loss
    handle.close()
    return allocator.max_memory_allocated() - before, held


def test_memory_of_the_device() -> None:
    rows = 2048
    of_input = 4 * rows * WIDTH
    without, held = most_bytes(False, rows)
    again, held_again = most_bytes(True, rows)
    on_host, held_on_host = most_bytes("cpu", rows)
    assert held == held_again == 0
    assert without > 8 * 6 * of_input  # each block keeps what its two matrices and its dropout take
    assert again < without - 6 * 6 * of_input
    assert on_host < again - 5 * of_input  # a few inputs are on their way
    assert held_on_host >= 8 * of_input


def test_a_cache_that_a_block_writes_to_is_refused() -> None:
    from transformers import DynamicCache

    class Caching(Block):
        def forward(self, x: Tensor, past_key_values: list[Tensor] | None = None) -> Tensor:  # type: ignore[override]
            return self.two(self.one(x))

    model = nn.Sequential(nn.Sequential(Caching(), Caching()))
    handle = longshore.stream(model, device_type(), checkpoint=True)
    x = torch.ones(2, WIDTH, device=device_type())
    with pytest.raises(
        LongshoreError, match=r"^0\.0 is computed again .* write to past_key_values again: .*use_cache=F"
    ):
        model[0][0](x, past_key_values=[])
    with pytest.raises(LongshoreError, match=r"write to argument 1 again"):
        model[0][0](x, DynamicCache())
    model[0][0](x, past_key_values=None).sum().backward()
    with torch.no_grad():
        model[0][0](x, past_key_values=[])
    handle.close()


def test_what_does_not_go_together_is_refused() -> None:
    model = Network()
    with pytest.raises(ValueError, match="checkpoint is False, True or 'cpu'"):
        longshore.stream(model, device_type(), checkpoint="host")  # type: ignore[arg-type]
    model.blocks[1].gradient_checkpointing = True  # as transformers' gradient_checkpointing_enable() does
    with pytest.raises(ValueError, match=r"checkpoints its blocks itself, .*gradient_checkpointing_disable\(\)"):
        longshore.stream(model, device_type(), checkpoint="cpu")
    longshore.stream(model, device_type()).close()


def test_a_model_of_transformers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(2)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=3, vocab_size=40)).bfloat16()
    plain = copy.deepcopy(model).to(device_type())
    handle = longshore.stream(model, device_type(), checkpoint="cpu")
    tokens = torch.randint(40, (2, 7), generator=torch.Generator().manual_seed(3)).to(device_type())
    with pytest.raises(
        LongshoreError, match=r"write to (cache|past_key_values) again: call the model with use_cache=False"
    ):
        model(input_ids=tokens, labels=tokens)
    for each in (model, plain):
        each.config.use_cache = False
        each(input_ids=tokens, labels=tokens).loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad.cpu())
    with torch.no_grad():
        generated = [each.generate(tokens[:, :3], max_new_tokens=4, do_sample=False) for each in (model, plain)]
    assert torch.equal(*(each.cpu() for each in generated))
    handle.close()
