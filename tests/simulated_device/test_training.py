"""Training on the simulated accelerator where streams, devices and delays are not the usual ones: the bits of plain
PyTorch. Delays follow from the seed in a test's name, so that a failure can be run again."""

from __future__ import annotations

import pytest
import torch
from support import PlainLoop, batch, small_model

import longshore
from longshore.accelerator import current_stream_is
from simulated_device import native

pytestmark = pytest.mark.simulated

CLIP = 0.05


def backward(model: torch.nn.Module, step: int) -> None:
    x = batch(step, torch.bfloat16).to(next(model.parameters()).device)
    model(x).float().pow(2).sum().backward()


def trained(optimizer: longshore.AdamW, model: torch.nn.Module, stream: torch.Stream | None, backwards: int) -> None:
    """Four steps beside a plain loop on the CPU, backwards on ``stream``; each clipped."""
    plain_model = small_model(torch.bfloat16)
    plain = PlainLoop(plain_model.parameters(), lr=1e-2)
    device = next(model.parameters()).device
    for step in range(4):
        sums: list[torch.Tensor | None] = [None] * len(plain.parameters)
        for number in range(backwards):
            # The plain loop has the gradients that the device computed: kernels of both may round differently.
            twin = small_model(torch.bfloat16).to(device)
            twin.load_state_dict(model.state_dict())
            backward(twin, 10 * step + number)
            found = [each.grad.float().cpu() for each in twin.parameters()]
            sums = [new if old is None else old + new for old, new in zip(sums, found, strict=True)]
        if stream is None:
            for number in range(backwards):
                backward(model, 10 * step + number)
        else:
            stream.wait_stream(torch.accelerator.current_stream(device))
            with current_stream_is(stream):
                for number in range(backwards):
                    backward(model, 10 * step + number)
            torch.accelerator.current_stream(device).wait_stream(stream)
        norm = optimizer.clip_grad_norm_(CLIP)
        plain.step(sums, float(torch.clamp(CLIP / (norm + 1e-6), max=1.0)))
        optimizer.step()
        optimizer.zero_grad()
        for ours, theirs in zip(model.parameters(), plain_model.parameters(), strict=True):
            assert torch.equal(ours.cpu(), theirs), step


@pytest.mark.quick(0)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("backwards", [1, 3])
def test_released_gradients(backwards: int, index: int, beside: bool, seed: int) -> None:
    """On device ``index`` while device 0 is current; ``beside``: backwards on a stream of their own."""
    device = torch.device("sim", index)
    model = small_model(torch.bfloat16).to(device)
    optimizer = longshore.AdamW(
        model.parameters(), lr=1e-2, release_gradients=True, offload=longshore.Offload(tile_numel=64)
    )
    native().set_delays(seed, 200, 200)
    try:
        trained(optimizer, model, torch.Stream(device) if beside else None, backwards)
    finally:
        native().set_delays(0, 0, 0)
    assert torch.accelerator.current_device_index() == 0
