"""How many functions a hook calls for each gradient, while it has the lock of the interpreter, is what docs/costs.md
says."""

from __future__ import annotations

import re
import sys
import threading
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
    """Return how many functions, of Python and of C, one backward calls for each parameter.

    A wait is one call: what it calls itself depends on the load of the machine, and it gives the lock away.
    """
    loss = torch.stack([parameter.float().sum() for parameter in parameters]).sum()
    calls = 0
    waiting: Any = None

    def counting(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls, waiting
        if waiting is not None:
            waiting = None if frame is waiting and event == "return" else waiting
            return
        calls += event in ("call", "c_call")
        if event == "call" and frame.f_code is threading.Condition.wait.__code__:
            waiting = frame

    sys.setprofile(counting)
    try:
        loss.backward()
    finally:
        sys.setprofile(None)
    return calls / len(parameters)


@pytest.mark.parametrize("accumulate", ["host", "device"])
def test_calls_of_a_hook(accumulate: Any) -> None:
    """After two windows of four backwards: never more, and as many where copies arrive during a backward."""
    parameters = [nn.Parameter(torch.ones(400, 100, dtype=torch.bfloat16)) for _ in range(PARAMETERS)]
    transfer = longshore.SimulatedTransfer(max_delay_s=0.0)
    offload = longshore.Offload(transfer=transfer, accumulate=accumulate, threads=1)
    optimizer = longshore.AdamW(parameters, release_gradients=True, offload=offload)
    first, later = said(accumulate)
    most = [0.0, 0.0]
    for window in range(60):
        counted = [calls_of_backward(parameters) for _ in range(4)]
        optimizer.step()
        optimizer.zero_grad()
        if window >= 2:
            most = [max(most[0], counted[0]), max(most[1], *counted[1:3])]
        if most[0] > 0.8 * first and most[1] > 0.65 * later:
            break
    assert 0.8 * first < most[0] <= first
    assert 0.65 * later < most[1] <= later
