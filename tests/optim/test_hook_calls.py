"""How many functions a hook calls for each gradient, while it has the lock of the interpreter, is what docs/costs.md
says."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import longshore

_PAGE = (Path(__file__).parents[2] / "docs/costs.md").read_text()
PARAMETERS = 40


def said(row: str) -> list[int]:
    found = re.search(rf"^\| `accumulate=\"{row}\"` \| (\d+) \| (\d+) \|$", _PAGE, re.MULTILINE)
    assert found is not None, row
    return [int(each) for each in found.groups()]


def calls_of_backward(parameters: list[nn.Parameter]) -> float:
    """Return how many functions, of Python and of C, one backward calls for each parameter."""
    loss = torch.stack([parameter.float().sum() for parameter in parameters]).sum()
    calls = 0

    def counting(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(counting)
    try:
        loss.backward()
    finally:
        sys.setprofile(None)
    return calls / len(parameters)


@pytest.mark.parametrize("accumulate", ["host", "device"])
def test_calls_of_a_hook(accumulate: Any) -> None:
    """In the third window of four backwards, each but the last."""
    parameters = [nn.Parameter(torch.ones(400, 100, dtype=torch.bfloat16)) for _ in range(PARAMETERS)]
    transfer = longshore.SimulatedTransfer(max_delay_s=0.0)
    offload = longshore.Offload(transfer=transfer, accumulate=accumulate, threads=1)
    optimizer = longshore.AdamW(parameters, release_gradients=True, offload=offload)
    for _ in range(3):
        counted = [calls_of_backward(parameters) for _ in range(4)]
        optimizer.step()
        optimizer.zero_grad()
    first, later = said(accumulate)
    assert 0.8 * first < counted[0] <= first
    assert 0.7 * later < max(counted[1:3]) <= later
