"""One random training from a seed, with and without stepping ahead, on streams and a worker with random delays."""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any

import torch
from torch import nn

import longshore


class Net(nn.Module):
    """A trunk and heads of random sizes, or ``width``; every head is optional."""

    def __init__(self, dice: random.Random, width: int | None) -> None:
        super().__init__()
        drawn = dice.choice([3, 8, 17])
        width = width or drawn
        self.trunk = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(width, dice.choice([1, 4, 9])) for _ in range(dice.choice([1, 2, 3]))])

    def forward(self, x: torch.Tensor, heads: list[int]) -> torch.Tensor:
        hidden = self.trunk(x)
        return torch.stack([(self.heads[head](hidden) ** 2).mean() for head in heads]).sum()


class Schedule:
    """What a seed does: the same calls on two twins, of which one steps ahead. States have another format for each seed
    in turn."""

    def __init__(self, seed: int) -> None:
        states = ("fp32", "bf16", "8bit")[seed % 3]
        self.dice = dice = random.Random(seed)
        torch.manual_seed(seed)
        dtype = dice.choice([torch.float32, torch.bfloat16])
        # With 8 bits one matrix is large enough for them, and tiles have whole blocks of 64.
        eight_bit = states == "8bit"
        model = Net(dice, width=64 if eight_bit else None).to(dtype)
        self.dtype = dtype
        self.models = (model, copy.deepcopy(model))
        kind, options = dice.choice(
            [(longshore.AdamW, {"weight_decay": 0.1}), (longshore.Adam, {}), (longshore.SGD, {"momentum": 0.9})]
        )
        tile_numel = dice.choice([7, 30, 100, 1000]) * (10 if eight_bit else 1)
        delayed = longshore.SimulatedTransfer(seed, max_delay_s=dice.choice([0.0, 2e-5, 2e-4]))
        offloads = (
            longshore.Offload(tile_numel, threads=1, states=states),
            longshore.Offload(
                tile_numel,
                threads=1,
                states=states,
                transfer=dice.choice([delayed, delayed, None]),
                speculation_memory=dice.choice(["100%", "100%", "50%", "20%"]),
                accumulate="device" if seed % 4 < 2 else "host",
            ),
        )
        self.optimizers = tuple(
            kind(self._groups(model), lr=1e-2, release_gradients=True, offload=offload, **options)
            for model, offload in zip(self.models, offloads, strict=True)
        )
        self.usual = dice.choice([1, 1, 2, 3])
        self.seen: Counter[str] = Counter()
        self.seen[states] += 1

    def _groups(self, model: Net) -> list[dict[str, Any]]:
        return [{"params": list(model.trunk.parameters())}, {"params": list(model.heads.parameters()), "lr": 3e-3}]

    def play(self, windows: int = 7) -> Counter[str]:
        """Raises AssertionError where a bit differs; returns how often what happened."""
        try:
            for _ in range(windows):
                self._window()
            return self.seen
        finally:
            for optimizer in self.optimizers:
                optimizer.close()

    def _window(self) -> None:
        dice = self.dice
        if dice.random() < 0.15:
            self._freeze()
        if dice.random() < 0.2:
            self.optimizers[1].expect_backwards(dice.choice([1, 2, 3]))
        backwards = self.usual if dice.random() < 0.7 else dice.choice([1, 2, 4])
        for _ in range(backwards):
            self._backward()
            if dice.random() < 0.05:
                self._each(lambda optimizer, _: optimizer.zero_grad(), "discarded")
        for chance, change in ((0.1, self._take_out), (0.1, self._change_rate), (0.1, self._write)):
            if dice.random() < chance:
                change()
        if dice.random() < 0.5:
            norm = dice.choice([1e9, 1e9, 1e-2])
            first, second = self._each(lambda optimizer, _: optimizer.clip_grad_norm_(norm), f"clipped to {norm:g}")
            assert torch.equal(first, second), (first, second)
        self._each(lambda optimizer, _: optimizer.step(), "stepped")
        record = self.optimizers[1].speculation
        self.seen.update({name: getattr(record, name) for name in ("begun", "kept", "redone", "dropped", "waited")})
        self._check()

    def _each(self, work: Any, name: str) -> list[Any]:
        self.seen[name] += 1
        return [work(optimizer, model) for optimizer, model in zip(self.optimizers, self.models, strict=True)]

    def _backward(self) -> None:
        x = torch.randn(3, 5, dtype=self.dtype)
        heads = self.dice.choices(range(len(self.models[0].heads)), k=self.dice.choice([1, 1, 2]))
        for model in self.models:
            loss = model(x, heads)
            if loss.requires_grad:
                loss.backward()

    def _parameters(self, index: int) -> list[nn.Parameter]:
        return [list(model.parameters())[index] for model in self.models]

    def _any(self) -> list[nn.Parameter]:
        return self._parameters(self.dice.randrange(len(list(self.models[0].parameters()))))

    def _freeze(self) -> None:
        self.seen["frozen or thawed"] += 1
        for parameter in self._any():
            parameter.requires_grad_(not parameter.requires_grad)

    def _take_out(self) -> None:
        self.seen["taken out"] += 1
        for parameter in self._any():
            parameter.grad = None

    def _change_rate(self) -> None:
        rate = self.dice.choice([1e-3, 2e-2])
        self._each(lambda optimizer, _: optimizer.param_groups[1].update(lr=rate), "rate changed")

    def _write(self) -> None:
        self.seen["written"] += 1
        for parameter in self._any():
            parameter.data = torch.full_like(parameter, 0.25)

    def _check(self) -> None:
        plain, ahead = self.optimizers
        for (name, a), b in zip(self.models[0].named_parameters(), self.models[1].parameters(), strict=True):
            assert torch.equal(a, b), name
            mine, other = plain.state[a], ahead.state[b]
            assert mine.keys() == other.keys(), name
            for key in mine:
                assert torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(other[key])), (name, key)
