"""What the scripts train: small, and of sizes that torch's fused kernels round alike everywhere."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self, inputs: int = 16, hidden: int = 32, outputs: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.last = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def seeded_net(seed: int, *sizes: int) -> Net:
    torch.manual_seed(seed)
    return Net(*sizes)


def samples(count: int, seed: int = 0) -> torch.utils.data.TensorDataset:
    """Pairs of 16 numbers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=generator)
    return torch.utils.data.TensorDataset(x, torch.sin(3 * x).roll(1, dims=1))


def batch(seed: int, rank: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    """What a rank sees in a step."""
    data = samples(rows, seed=1000 * seed + rank)
    return data.tensors[0], data.tensors[1]
