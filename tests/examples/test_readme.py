"""The lines that the README shows to people who come from DeepSpeed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 10)

    def forward(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.inner(batch[0]), batch[1])


def block(heading: str) -> str:
    text = (ROOT / "README.md").read_text()
    found = re.search(rf"^## {heading}\n.*?^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert found is not None, heading
    return found[1]


def test_five_lines_from_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = block("From DeepSpeed, in five lines")
    assert len([line for line in lines.splitlines() if line.strip()]) == 5
    monkeypatch.chdir(ROOT / "examples")
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(64, generator=generator), torch.tensor(place % 10)) for place in range(64)]
    model = WithLoss()
    before = model.inner.weight.detach().clone()
    names: dict[str, Any] = {"model": model, "data": data}
    exec(lines, names)
    engine = names["engine"]
    try:
        # Eight batches of eight, and the file accumulates two. Its warmup begins with two steps at 0, as DeepSpeed's.
        assert engine.global_steps == 4 and engine.micro_steps == 8
        assert not torch.equal(model.inner.weight, before)
    finally:
        engine.destroy()
